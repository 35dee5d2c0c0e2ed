//! What either side says in the handshake of NBD, to the other.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_nbd::protocol::fuzzing::handshakes(data));
