//! Packets off an rx ring that a backend wrote.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_wire::fuzzing::rx_responses(data));
