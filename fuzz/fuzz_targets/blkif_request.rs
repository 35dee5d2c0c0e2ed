//! Fuzz target: a blkif request written by a frontend, and its segment descriptors.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_wire::fuzzing::blkif_request(data));
