//! Fuzz target: messages of passt's control protocol, of a client and of a server.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_pasta::forward_rules::fuzzing::port_rules(data));
