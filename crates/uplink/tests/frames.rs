#![forbid(unsafe_code)]
//! Arbitrary frames, and malformed frames of each protocol: none causes a panic, each is counted.

use proptest::prelude::*;
use ringfence_uplink::fuzzing::guest_frames;

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_cause_no_panic(data in proptest::collection::vec(any::<u8>(), 0..4096)) {
        guest_frames(&data);
    }

    #[test]
    fn malformed_datagrams_and_segments_cause_no_panic(
        frames in proptest::collection::vec(
            (any::<u8>(), any::<[u8; 20]>(), proptest::collection::vec(any::<u8>(), 0..300)),
            1..40,
        ),
    ) {
        let mut data = Vec::new();
        for (what, mut header, body) in frames {
            // A port that the uplink handles: DHCP, DHCPv6, one that answers, one that does not.
            let port = [67_u16, 547, 80, 7, 9, 53][usize::from(header[0]) % 6];
            header[..2].copy_from_slice(&4000_u16.to_be_bytes());
            header[2..4].copy_from_slice(&port.to_be_bytes());
            let len = header.len() + body.len();
            if what & 4 != 0 {
                header[4..6].copy_from_slice(&u16::try_from(len).unwrap_or(0).to_be_bytes());
            }
            // A TCP header of 20 bytes; its checksum is not verified.
            header[12] = 5 << 4;
            data.push(what | 2 | 8);
            data.extend_from_slice(&u16::try_from(len).unwrap_or(0).to_le_bytes());
            data.extend_from_slice(&header);
            data.extend_from_slice(&body);
        }
        guest_frames(&data);
    }
}
