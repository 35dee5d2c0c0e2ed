//! Hypervisor and driver of a virtual machine's disk that send and write what they like.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_block::vhost_user::fuzzing::vhost_user_disk(data));
