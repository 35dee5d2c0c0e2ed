//! Fuzz target: the port grammar of pasta's options.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence::pasta::ports::fuzzing::port_spec(data));
