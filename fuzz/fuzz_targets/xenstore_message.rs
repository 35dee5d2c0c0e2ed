//! A stream of xenstore messages, as a server and as a client read it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_wire::fuzzing::xenstore_message(data));
