//! A super-packet and its virtio-net header, both a peer's: segmentation.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_offload::fuzzing::segment(data));
