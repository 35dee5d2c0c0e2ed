//! Sessions of hostile xenstore clients with the server: no bound is passed, nothing is left behind.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_xenstore::fuzz_store_session(data));
