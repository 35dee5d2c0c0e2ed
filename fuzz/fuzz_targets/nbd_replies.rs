//! Fuzz target: replies of an NBD server, parsed by a client.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_nbd::protocol::fuzzing::replies(data));
