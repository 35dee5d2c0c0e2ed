//! Fuzz target: the host's `hosts(5)` and `resolv.conf(5)`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_hostnet::name_files::fuzzing::name_files(data));
