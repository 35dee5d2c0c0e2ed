//! Driver and backend that write what they like, around the shadow of a vring.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_vhost_user::shield::fuzzing::shield(data));
