//! Packets off a tx ring that a frontend wrote.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_wire::fuzzing::tx_chain(data));
