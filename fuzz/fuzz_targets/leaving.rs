//! Frames of one round that leave by a port which takes some of them as they are.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_switch::fuzzing::egress(data));
