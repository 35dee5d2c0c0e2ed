//! Fuzz target: the port grammar of pasta's options.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_pasta::forward_spec::fuzzing::port_spec(data));
