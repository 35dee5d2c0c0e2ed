use proptest::prelude::*;

use super::*;
use crate::test_frames::{self as frames, frame, len, tagged};

fn parse(bytes: &[u8]) -> Result<Layers, ParseError> {
    Layers::parse(bytes, len(bytes))
}

fn with(hex: &str, at: usize, value: u8) -> Vec<u8> {
    let mut bytes = frame(hex);
    bytes[at] = value;
    bytes
}

#[test]
fn tcp_over_ipv4_parses() {
    let layers = parse(&frame(frames::TCP_V4)).unwrap();
    assert_eq!(layers.link(), Link { vlan_tags: 0, ethertype: 0x0800 });
    let ip = Ipv4 {
        offset: 14,
        header_len: 20,
        total_len: 60,
        protocol: 6,
        id: 0x7236,
        dont_fragment: true,
        fragment: None,
    };
    assert_eq!(layers.network(), Network::Ipv4(ip));
    let tcp = Tcp { offset: 34, header_len: 40, flags: tcp_flags::SYN };
    assert_eq!(layers.transport(), Transport::Tcp(tcp));
    assert_eq!(layers.checksum_place(), Some(ChecksumPlace { start: 34, offset: 16 }));
    assert_eq!((layers.header_len(), layers.payload_len()), (74, 0));
    assert_eq!((layers.frame_len(), layers.network_end(), layers.captured()), (74, 74, 74));
}

#[test]
fn tcp_over_ipv6_parses() {
    let layers = parse(&frame(frames::TCP_V6)).unwrap();
    let ip = Ipv6 {
        offset: 14,
        header_len: 40,
        payload_len: 40,
        protocol: 6,
        extensions: 0,
        fragment: None,
        routed: false,
    };
    assert_eq!(layers.network(), Network::Ipv6(ip));
    assert_eq!((layers.transport_offset(), layers.header_len()), (Some(54), 94));
}

#[test]
fn udp_behind_ipv4_options_parses() {
    let layers = parse(&frame(frames::UDP_V4_OPTIONS)).unwrap();
    assert_eq!(layers.transport(), Transport::Udp(Udp { offset: 46, length: 13 }));
    assert_eq!(layers.checksum_place(), Some(ChecksumPlace { start: 46, offset: 6 }));
    assert_eq!((layers.header_len(), layers.payload_len()), (54, 5));
}

#[test]
fn udp_behind_two_extension_headers_parses() {
    let layers = parse(&frame(frames::UDP_V6_EXTENSIONS)).unwrap();
    let Network::Ipv6(ip) = layers.network() else { panic!("{layers:?}") };
    assert_eq!((ip.extensions, ip.header_len, ip.protocol), (2, 56, 17));
    assert_eq!(layers.transport(), Transport::Udp(Udp { offset: 70, length: 11 }));
}

#[test]
fn vlan_tags_shift_offsets() {
    for (tags, shift) in [
        (&[(ethertype::VLAN, 100)][..], 4),
        (&[(ethertype::QINQ, 200), (ethertype::VLAN, 300)], 8),
        (&[(ethertype::VLAN, 1), (ethertype::VLAN, 2)], 8),
    ] {
        for hex in frames::CHECKSUMMED {
            let (plain, tagged) = (parse(&frame(hex)).unwrap(), parse(&tagged(hex, tags)).unwrap());
            assert_eq!(tagged.network_offset(), 14 + shift);
            assert_eq!(tagged.header_len(), plain.header_len() + shift);
            assert_eq!(tagged.transport_offset(), plain.transport_offset().map(|at| at + shift));
            assert_eq!(tagged.payload_len(), plain.payload_len());
        }
    }
}

#[test]
fn third_vlan_tag_is_other_network() {
    let bytes = tagged(frames::TCP_V4, &[(ethertype::QINQ, 1), (ethertype::VLAN, 2), (0x8100, 3)]);
    let layers = parse(&bytes).unwrap();
    assert_eq!(layers.network(), Network::Other(0x8100));
    assert_eq!((layers.header_len(), layers.transport()), (22, Transport::None));
}

#[test]
fn icmp_icmpv6_and_arp_parse() {
    let icmp = parse(&frame(frames::ICMP)).unwrap();
    assert_eq!(icmp.transport(), Transport::Icmp(Icmp { offset: 34, kind: 8 }));
    let icmpv6 = parse(&frame(frames::ICMPV6)).unwrap();
    assert_eq!(icmpv6.transport(), Transport::Icmpv6(Icmp { offset: 54, kind: 128 }));
    let arp = parse(&frame(frames::ARP)).unwrap();
    assert_eq!((arp.network(), arp.header_len(), arp.network_end()), (Network::Arp, 14, 42));
    assert_eq!((icmp.checksum_place(), arp.checksum_place()), (None, None));
}

#[test]
fn icmp_over_wrong_ip_version_is_other_transport() {
    let v6_under_v4 = parse(&with(frames::ICMP, 23, protocol::ICMPV6)).unwrap();
    let other = Transport::Other { offset: 34, protocol: protocol::ICMPV6 };
    assert_eq!(v6_under_v4.transport(), other);
    let v4_under_v6 = parse(&with(frames::ICMPV6, 20, protocol::ICMP)).unwrap();
    assert_eq!(v4_under_v6.transport(), Transport::Other { offset: 54, protocol: protocol::ICMP });
}

#[test]
fn first_fragment_has_header_but_no_checksum_place() {
    let v4 = Layers::parse(&frame(frames::FRAGMENT_V4_FIRST), 1290).unwrap();
    let v6 = Layers::parse(&frame(frames::FRAGMENT_V6_FIRST), 1294).unwrap();
    for (layers, offset) in [(v4, 34), (v6, 62)] {
        // The UDP length is the datagram's, beyond this fragment.
        assert_eq!(layers.transport(), Transport::Udp(Udp { offset, length: 1308 }));
        assert!(layers.is_fragment());
        assert_eq!(layers.checksum_place(), None);
    }
}

#[test]
fn later_fragment_has_no_transport() {
    let v4 = parse(&frame(frames::FRAGMENT_V4_LAST)).unwrap();
    let v6 = parse(&frame(frames::FRAGMENT_V6_LAST)).unwrap();
    for (layers, header_len, payload) in [(v4, 34, 52), (v6, 62, 76)] {
        assert_eq!(layers.transport(), Transport::LaterFragment);
        assert_eq!(layers.transport_offset(), None);
        assert_eq!((layers.header_len(), layers.payload_len()), (header_len, payload));
        assert!(layers.is_fragment());
    }
    let Network::Ipv4(ip) = v4.network() else { panic!("{v4:?}") };
    assert_eq!(ip.fragment, Some(Fragment { offset: 1256, more: false }));
    let Network::Ipv6(ip) = v6.network() else { panic!("{v6:?}") };
    assert_eq!(ip.fragment, Some(Fragment { offset: 1232, more: false }));
}

#[test]
fn atomic_ipv6_fragment_is_whole() {
    let mut bytes = frame(frames::UDP_V6);
    bytes[18..20].copy_from_slice(&26u16.to_be_bytes());
    bytes[20] = protocol::IPV6_FRAGMENT;
    bytes.splice(54..54, [protocol::UDP, 0, 0, 0, 1, 2, 3, 4]);
    let layers = parse(&bytes).unwrap();
    assert!(!layers.is_fragment());
    assert_eq!(layers.checksum_place(), Some(ChecksumPlace { start: 62, offset: 6 }));
}

#[test]
fn padding_is_excluded_from_payload() {
    let mut bytes = frame(frames::UDP_V4);
    bytes.resize(60, 0);
    let layers = parse(&bytes).unwrap();
    assert_eq!((layers.frame_len(), layers.network_end(), layers.payload_len()), (60, 51, 9));
}

#[test]
fn header_beyond_copy_is_not_captured_rather_than_truncated() {
    let bytes = frame(frames::TCP_V4);
    assert_eq!(
        Layers::parse(&bytes[..60], 74),
        Err(ParseError::NotCaptured { layer: Layer::Tcp, needed: 74, captured: 60 })
    );
    let mut short = bytes;
    short[17] = 50;
    assert_eq!(
        Layers::parse(&short, 74),
        Err(ParseError::Truncated { layer: Layer::Tcp, needed: 74, end: 64 })
    );
}

/// Every prefix of every frame is refused with an end that is the prefix's, never accepted.
#[test]
fn frame_prefix_is_rejected_as_truncated() {
    for hex in frames::CHECKSUMMED {
        let bytes = frame(hex);
        let header_len = usize::from(parse(&bytes).unwrap().header_len());
        for cut in 0..header_len {
            let truncated = parse(&bytes[..cut]);
            let matches = match truncated {
                Err(ParseError::Truncated { needed, end, .. }) => {
                    needed > end && end == len(&bytes[..cut])
                }
                Err(ParseError::IpBeyondFrame { frame_len, .. }) => frame_len == len(&bytes[..cut]),
                _ => false,
            };
            assert!(matches, "{cut} bytes: {truncated:?}");
            let uncaptured = Layers::parse(&bytes[..cut], len(&bytes));
            assert!(matches!(uncaptured, Err(ParseError::NotCaptured { .. })), "{uncaptured:?}");
        }
        assert!(Layers::parse(&bytes[..header_len], len(&bytes)).is_ok());
    }
}

#[test]
fn bytes_past_frame_are_ignored() {
    let bytes = frame(frames::TCP_V4);
    let cut = Err(ParseError::IpBeyondFrame { end: 74, frame_len: 73 });
    assert_eq!(Layers::parse(&bytes, 73), cut);
}

#[test]
fn contradicting_header_fields_are_rejected() {
    use ParseError as E;
    let cases = [
        (with(frames::TCP_V4, 14, 0x65), E::IpVersion { ethertype: 0x0800, version: 6 }),
        (with(frames::TCP_V6, 14, 0x40), E::IpVersion { ethertype: 0x86dd, version: 4 }),
        (with(frames::TCP_V4, 14, 0x44), E::Ipv4HeaderLength { offered: 16 }),
        (with(frames::TCP_V4, 17, 19), E::Ipv4TotalLength { total: 19, header: 20 }),
        (with(frames::TCP_V4, 17, 61), E::IpBeyondFrame { end: 75, frame_len: 74 }),
        (with(frames::TCP_V6, 19, 41), E::IpBeyondFrame { end: 95, frame_len: 94 }),
        (with(frames::TCP_V4, 46, 0x40), E::TcpHeaderLength { offered: 16 }),
        (with(frames::UDP_V4, 39, 7), E::UdpLength { offered: 7, maximum: 17 }),
        (with(frames::UDP_V4, 39, 18), E::UdpLength { offered: 18, maximum: 17 }),
    ];
    for (bytes, error) in cases {
        assert_eq!(parse(&bytes), Err(error));
    }
}

/// The "ping of death": a fragment that would end past the largest datagram.
#[test]
fn fragment_past_64k_is_rejected() {
    let mut bytes = frame(frames::FRAGMENT_V4_LAST);
    bytes[20..22].copy_from_slice(&0x1fffu16.to_be_bytes());
    let refused = ParseError::FragmentSpan { offset: 65528, len: 52, more: false };
    assert_eq!(parse(&bytes), Err(refused));
    bytes[20..22].copy_from_slice(&0x2001u16.to_be_bytes());
    assert_eq!(parse(&bytes), Err(ParseError::FragmentSpan { offset: 8, len: 52, more: true }));
}

/// An IPv6 packet with `count` destination option headers before "no next header".
fn chain_of(count: u16, first: u8) -> Vec<u8> {
    let mut bytes = frame(frames::UDP_V6)[..54].to_vec();
    bytes[18..20].copy_from_slice(&(8 * count).to_be_bytes());
    bytes[20] = first;
    for left in (0..count).rev() {
        bytes.extend([if left == 0 { 59 } else { first }, 0, 0, 0, 0, 0, 0, 0]);
    }
    bytes
}

#[test]
fn too_many_extension_headers_are_rejected() {
    let most = u16::from(MAX_EXTENSION_HEADERS);
    let layers = parse(&chain_of(most, protocol::IPV6_DESTINATION)).unwrap();
    assert_eq!(layers.transport(), Transport::Other { offset: 54 + 8 * most, protocol: 59 });
    let over = parse(&chain_of(most + 1, protocol::IPV6_DESTINATION));
    assert_eq!(over, Err(ParseError::TooManyExtensionHeaders { limit: 8 }));
}

#[test]
fn extension_header_beyond_packet_is_rejected() {
    let mut bytes = chain_of(1, protocol::IPV6_HOP_BY_HOP);
    bytes[55] = 255;
    bytes.resize(4096, 0);
    let refused = ParseError::Truncated { layer: Layer::Ipv6Extension, needed: 2102, end: 62 };
    assert_eq!(parse(&bytes), Err(refused));
}

#[test]
fn routing_header_with_segments_left_sets_routed() {
    let mut bytes = chain_of(1, protocol::IPV6_ROUTING);
    for (segments_left, expected) in [(0, false), (1, true)] {
        bytes[57] = segments_left;
        let layers = parse(&bytes).unwrap();
        assert!(matches!(layers.network(), Network::Ipv6(ip) if ip.routed == expected));
    }
}

#[test]
fn layers_size_is_at_most_48_bytes() {
    // Copied with every frame.
    assert!(size_of::<Layers>() <= 48, "{}", size_of::<Layers>());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn packet_parse_of_any_bytes_keeps_guarantees(data in prop::collection::vec(any::<u8>(), 0..300)) {
        crate::fuzzing::packet_parse(&data);
    }

    /// Real frames with a few bytes changed get much further than noise does.
    #[test]
    fn packet_parse_of_damaged_frames_keeps_guarantees(
        which in 0usize..8,
        tags in 0usize..3,
        grow in 0u16..3000,
        vnet in any::<[u8; 12]>(),
        sane in any::<bool>(),
        missing in prop_oneof![Just(0u16), any::<u16>()],
        captured in prop_oneof![Just(256u16), 0u16..300],
        cut in 0u16..400,
        damage in prop::collection::vec((0usize..120, any::<u8>()), 0..4),
    ) {
        let hex = frames::CHECKSUMMED[which];
        let mut bytes = frames::grown(hex, if missing == 0 { grow } else { 0 });
        for _ in 0..tags {
            bytes.splice(12..12, [0x81, 0x00, 0x00, 0x07]);
        }
        for (at, value) in damage {
            if let Some(byte) = bytes.get_mut(at) {
                *byte = value;
            }
        }
        let header = if sane { sane_vnet(&bytes, vnet) } else { vnet };
        let prefix = [captured, missing, cut].map(u16::to_le_bytes).concat();
        let input = [&header[..], &prefix, &bytes].concat();
        crate::fuzzing::packet_parse(&input);
    }
}

/// A virtio-net header whose checksum place fits the frame, with the drawn type and size.
fn sane_vnet(bytes: &[u8], drawn: [u8; 12]) -> [u8; 12] {
    let place = parse(bytes).ok().and_then(|layers| layers.checksum_place());
    let mut header = drawn;
    header[0] |= 1;
    header[1] = [0, 1, 3, 4, 5, 0x81, 0x84][usize::from(drawn[1]) % 7];
    header[5] &= 3;
    if let Some(place) = place {
        header[6..8].copy_from_slice(&place.start.to_le_bytes());
        header[8..10].copy_from_slice(&place.offset.to_le_bytes());
    }
    header
}
