//! Datagrams of a QUIC client: raw bytes, and frames in Initial packets.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_policy::fuzzing::quic_datagrams(data));
