//! Virtqueues whose other side writes what it likes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_link::vhost_net::fuzzing::virtqueues(data));
