//! A frame and its virtio-net header, both a peer's: parsing, acceptance, finishing checksums.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_offload::fuzzing::packet_parse(data));
