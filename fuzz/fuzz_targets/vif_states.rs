//! Sequences of xenbus states, from a frontend, a backend, or both.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_xenbus::fuzzing::vif_states(data));
