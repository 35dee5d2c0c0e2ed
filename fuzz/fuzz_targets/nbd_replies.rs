//! An NBD server's replies to a client.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_nbd::protocol::fuzzing::replies(data));
