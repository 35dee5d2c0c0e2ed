//! First bytes of a connection: TLS hellos, HTTP requests.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_policy::fuzzing::first_bytes(data));
