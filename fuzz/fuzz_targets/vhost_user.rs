//! Hypervisor and driver of a virtual machine that send and write what they like.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_link::vhost_user::fuzzing::vhost_user(data));
