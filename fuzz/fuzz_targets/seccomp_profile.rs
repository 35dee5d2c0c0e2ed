//! Fuzz target: lists of system calls in the form of the OCI.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_sandbox::command_filter::fuzzing::profile_text(data));
