//! Rules and policy files of an egress policy.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_policy::fuzzing::rule_text(data));
