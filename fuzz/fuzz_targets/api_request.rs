//! Fuzz target: requests of slirp4netns's API socket.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_pasta::hostfwd::fuzzing::api_request(data));
