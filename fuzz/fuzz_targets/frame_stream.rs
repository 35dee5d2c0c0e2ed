//! Byte stream of a virtual machine's frames, in pieces.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_wire::fuzzing::frame_stream(data));
