//! Frames of a hostile port at the address filter of a switch.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_switch::fuzzing::address_filter(data));
