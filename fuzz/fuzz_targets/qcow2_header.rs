//! Fuzz target: the header of a qcow2 image, and the names in it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_block::storage::qcow2::fuzzing::header(data));
