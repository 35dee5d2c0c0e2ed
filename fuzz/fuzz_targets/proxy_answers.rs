//! Answers of an upstream proxy to the uplink.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_uplink::upstream::fuzzing::proxy_answers(data));
