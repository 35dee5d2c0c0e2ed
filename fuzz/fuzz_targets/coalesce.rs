//! A round of frames that nearly continue each other: coalescing.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_offload::fuzzing::coalesce(data));
