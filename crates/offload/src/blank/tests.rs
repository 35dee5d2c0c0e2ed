use super::*;
use crate::checksum::complete_partial;
use crate::checksum::verify::{Verdict, verify_ipv4_header, verify_transport};
use crate::test_frames::{self as frames, frame, len, tagged};

const BLANK: NetifChecksum = NetifChecksum { blank: true, validated: true };

fn layers(bytes: &[u8]) -> Layers {
    Layers::parse(bytes, len(bytes)).unwrap()
}

const TCP_AND_UDP: [&str; 6] = [
    frames::TCP_V4,
    frames::TCP_V6,
    frames::UDP_V4,
    frames::UDP_V4_OPTIONS,
    frames::UDP_V6,
    frames::UDP_V6_EXTENSIONS,
];

/// Checks that blanking and completing a kernel's frame gives the kernel's bytes again.
#[test]
fn blanked_kernel_frame_completes_to_same_bytes() {
    for hex in TCP_AND_UDP {
        for tags in [&[][..], &[(0x8100, 5)], &[(0x88a8, 5), (0x8100, 6)]] {
            let original = tagged(hex, tags);
            let mut bytes = original.clone();
            let layers = layers(&bytes);
            // A hostile sender leaves rubbish in the field.
            let place = derive_place(&layers).unwrap();
            bytes[place.field()..place.field_end()].copy_from_slice(&[0xde, 0xad]);
            assert_eq!(reset_pseudo_header(&mut bytes, &layers), Ok(place));
            complete_partial(&mut bytes, place).unwrap();
            assert_eq!(bytes, original);
        }
    }
}

#[test]
fn kernel_frame_verifies_and_damaged_one_does_not() {
    for hex in frames::CHECKSUMMED {
        let mut bytes = frame(hex);
        let layers = layers(&bytes);
        assert_eq!(verify_transport(&bytes, [], &layers), Ok(Verdict::Correct), "{hex}");
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        assert_eq!(verify_transport(&bytes, [], &layers), Ok(Verdict::Wrong), "{hex}");
    }
}

#[test]
fn ipv4_header_verifies_and_damaged_one_does_not() {
    for (hex, expected) in [(frames::UDP_V4_OPTIONS, Some(true)), (frames::UDP_V6, None)] {
        let bytes = frame(hex);
        assert_eq!(verify_ipv4_header(&bytes, &layers(&bytes)), Ok(expected));
    }
    let mut bytes = frame(frames::ICMP);
    bytes[22] -= 1; // time to live
    assert_eq!(verify_ipv4_header(&bytes, &layers(&bytes)), Ok(Some(false)));
}

#[test]
fn verify_transport_ignores_padding() {
    let mut bytes = frame(frames::UDP_V4);
    bytes.resize(60, 0xee);
    let layers = layers(&bytes);
    assert_eq!(verify_transport(&bytes, [], &layers), Ok(Verdict::Correct));
    let (headers, payload) = bytes.split_at(43);
    let layers = Layers::parse(headers, 60).unwrap();
    assert_eq!(verify_transport(headers, [payload], &layers), Ok(Verdict::Correct));
    let missing = ChecksumError::PayloadMissing { expected: 17, given: 9 };
    assert_eq!(verify_transport(headers, [], &layers), Err(missing));
}

/// Bytes between the datagram's end and the packet's: UDP options (RFC 9868) have a sum of their own.
#[test]
fn verify_transport_ignores_udp_options() {
    let mut bytes = frame(frames::UDP_V4);
    bytes[17] += 4;
    bytes.extend([0xaa, 0xbb, 0xcc, 0xdd]);
    assert_eq!(verify_transport(&bytes, [], &layers(&bytes)), Ok(Verdict::Correct));
}

#[test]
fn udp_without_checksum_is_absent_on_ipv4_and_wrong_on_ipv6() {
    for (hex, at, verdict) in
        [(frames::UDP_V4, 40, Verdict::Absent), (frames::UDP_V6, 60, Verdict::Wrong)]
    {
        let mut bytes = frame(hex);
        bytes[at..at + 2].fill(0);
        assert_eq!(verify_transport(&bytes, [], &layers(&bytes)), Ok(verdict));
    }
}

#[test]
fn headers_too_short_for_layers_are_rejected() {
    let layers = layers(&frame(frames::UDP_V6));
    let foreign = ChecksumError::ForeignHeaders { needed: 38, headers: 30 };
    assert_eq!(pseudo_header_sum(&[0; 30], &layers), Err(foreign));
    let foreign = ResetError::Checksum(ChecksumError::ForeignHeaders { needed: 62, headers: 61 });
    assert_eq!(reset_pseudo_header(&mut [0; 61], &layers), Err(foreign));
}

#[test]
fn pseudo_header_of_routed_packet_is_rejected() {
    let mut bytes = frame(frames::UDP_V6_EXTENSIONS);
    bytes[54] = 43; // the second header becomes a routing header
    bytes[65] = 1; // with a segment left
    let layers = layers(&bytes);
    assert_eq!(pseudo_header_sum(&bytes, &layers), Err(ChecksumError::Routed));
    // The place is known: a sender that knows the final destination may leave the checksum blank.
    assert!(derive_place(&layers).is_ok());
}

#[test]
fn blank_bit_on_fragment_or_other_transport_is_refused() {
    for hex in [frames::ICMP, frames::ICMPV6, frames::ARP] {
        assert_eq!(from_netif(BLANK, &layers(&frame(hex))), Err(BlankError::NotTcpOrUdp));
    }
    for hex in [frames::FRAGMENT_V4_LAST, frames::FRAGMENT_V6_LAST] {
        assert_eq!(from_netif(BLANK, &layers(&frame(hex))), Err(BlankError::Fragment));
    }
    let first = Layers::parse(&frame(frames::FRAGMENT_V4_FIRST), 1290).unwrap();
    assert_eq!(from_netif(BLANK, &first), Err(BlankError::Fragment));
}

#[test]
fn blank_bit_on_udp_shorter_than_packet_is_refused() {
    let mut bytes = frame(frames::UDP_V4);
    bytes[39] -= 1;
    let surplus = BlankError::UdpSurplus { udp: 16, payload: 17 };
    assert_eq!(from_netif(BLANK, &layers(&bytes)), Err(surplus));
}

#[test]
fn netif_checksum_bits_translate_both_ways() {
    let layers = layers(&frame(frames::TCP_V4));
    let partial = Checksum::Partial { start: 34, offset: 16 };
    for (blank, validated, checksum) in [
        (false, false, Checksum::None),
        (false, true, Checksum::Verified),
        (true, false, partial),
        (true, true, partial),
    ] {
        assert_eq!(from_netif(NetifChecksum { blank, validated }, &layers), Ok(checksum));
    }
    assert_eq!(to_netif(partial, &layers), Ok(BLANK));
    assert_eq!(to_netif(Checksum::None, &layers), Ok(NetifChecksum::default()));
    let verified = NetifChecksum { blank: false, validated: true };
    assert_eq!(to_netif(Checksum::Verified, &layers), Ok(verified));
}

/// A tunnel's inner checksum: a virtio header can say where it is, netif's bit cannot.
#[test]
fn blank_checksum_at_other_place_is_refused() {
    let layers = layers(&frame(frames::UDP_V4));
    let offered = ChecksumPlace { start: 42, offset: 6 };
    let found = ChecksumPlace { start: 34, offset: 6 };
    let refused = Err(BlankError::Elsewhere { offered, found });
    assert_eq!(to_netif(offered.into(), &layers), refused);
}
