//! Hypervisor and backend that send what they like through a proxy.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_vhost_user::proxy::fuzzing::pool_proxy(data));
