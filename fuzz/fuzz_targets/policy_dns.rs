//! DNS queries and answers at the gate of an egress policy.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_policy::fuzzing::dns_messages(data));
