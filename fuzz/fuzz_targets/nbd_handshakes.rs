//! Fuzz target: both sides of the NBD handshake.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_nbd::protocol::fuzzing::handshakes(data));
