//! Frames that a guest sends to its uplink: headers, TCP, UDP, DHCP, neighbour discovery, ICMP.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ringfence_uplink::fuzzing::guest_frames(data));
