//! A request off a blkif ring that a frontend wrote, and the descriptors of its segments.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_wire::fuzzing::blkif_request(data));
