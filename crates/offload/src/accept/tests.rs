use super::*;
use crate::blank::BlankError;
use crate::checksum::verify::pseudo_header_sum;
use crate::test_frames::{self as frames, frame, grown, len};

fn layers(bytes: &[u8]) -> Layers {
    Layers::parse(bytes, len(bytes)).unwrap()
}

fn gso(kind: GsoKind, size: u16) -> Option<Gso> {
    Some(Gso { kind, ecn: false, size })
}

/// Checks a request on a frame that `accept` must not write to.
fn check(bytes: &[u8], checksum: Checksum, gso: Option<Gso>) -> Result<OffloadMeta, Refusal> {
    let mut headers = bytes.to_vec();
    let result = accept(OffloadMeta { checksum, gso }, &mut headers, &layers(bytes));
    assert_eq!(headers, bytes, "the frame was written to");
    result
}

const TCP4: Checksum = Checksum::Partial { start: 34, offset: 16 };
const TCP6: Checksum = Checksum::Partial { start: 54, offset: 16 };
const UDP4: Checksum = Checksum::Partial { start: 34, offset: 6 };
const UDP6: Checksum = Checksum::Partial { start: 54, offset: 6 };

#[test]
fn gso_kind_on_another_packet_is_refused() {
    let packets = [
        (grown(frames::TCP_V4, 3000), TCP4),
        (grown(frames::TCP_V6, 3000), TCP6),
        (grown(frames::UDP_V4, 3000), UDP4),
        (grown(frames::UDP_V6, 3000), UDP6),
    ];
    let kinds = [GsoKind::TcpV4, GsoKind::TcpV6, GsoKind::Udp, GsoKind::UdpFragment];
    let fits = [
        [true, false, false, false],
        [false, true, false, false],
        [false, false, true, true],
        [false, false, true, true],
    ];
    for ((bytes, checksum), fits) in packets.iter().zip(fits) {
        for (kind, fits) in kinds.into_iter().zip(fits) {
            let result = check(bytes, *checksum, gso(kind, 1448));
            if fits {
                assert_eq!(result, Ok(OffloadMeta { checksum: *checksum, gso: gso(kind, 1448) }));
            } else {
                assert_eq!(result, Err(Refusal::KindMismatch { kind }));
            }
        }
    }
}

#[test]
fn invalid_segment_size_is_refused() {
    let tcp = grown(frames::TCP_V4, 3000);
    assert_eq!(check(&tcp, TCP4, gso(GsoKind::TcpV4, 0)), Err(Refusal::SizeZero));
    assert_eq!(check(&tcp, TCP4, gso(GsoKind::TcpV4, 0xffff)), Err(Refusal::SizeReserved));
    let tiny = check(&tcp, TCP4, gso(GsoKind::TcpV4, 7));
    assert_eq!(tiny, Err(Refusal::SegmentSize { size: 7 }));
    assert!(check(&tcp, TCP4, gso(GsoKind::TcpV4, 8)).is_ok());
    let udp = grown(frames::UDP_V4, 3000);
    let tiny = check(&udp, UDP4, gso(GsoKind::UdpFragment, 7));
    assert_eq!(tiny, Err(Refusal::FragmentSize { size: 7 }));
    assert!(check(&udp, UDP4, gso(GsoKind::UdpFragment, 8)).is_ok());
}

#[test]
fn gso_for_single_packet_is_dropped() {
    let tcp = grown(frames::TCP_V4, 1000);
    let plain = Ok(OffloadMeta { checksum: TCP4, gso: None });
    assert_eq!(check(&tcp, TCP4, gso(GsoKind::TcpV4, 1000)), plain);
    assert!(check(&tcp, TCP4, gso(GsoKind::TcpV4, 999)).unwrap().gso.is_some());
    // Nine bytes of payload were there already.
    let udp = grown(frames::UDP_V4, 991);
    assert_eq!(check(&udp, UDP4, gso(GsoKind::Udp, 1000)).unwrap().gso, None);
    // A fragmented datagram's UDP header counts.
    assert!(check(&udp, UDP4, gso(GsoKind::UdpFragment, 1007)).unwrap().gso.is_some());
    assert_eq!(check(&udp, UDP4, gso(GsoKind::UdpFragment, 1008)).unwrap().gso, None);
}

#[test]
fn uso_into_too_many_segments_is_refused() {
    let udp = grown(frames::UDP_V4, 1280 - 9);
    assert!(check(&udp, UDP4, gso(GsoKind::Udp, 10)).is_ok());
    let udp = grown(frames::UDP_V4, 1281 - 9);
    let refused = Err(Refusal::TooManySegments { payload: 1281, size: 10 });
    assert_eq!(check(&udp, UDP4, gso(GsoKind::Udp, 10)), refused);
}

#[test]
fn ecn_on_udp_is_refused_and_on_tcp_follows_cwr() {
    let udp = grown(frames::UDP_V4, 3000);
    for kind in [GsoKind::Udp, GsoKind::UdpFragment] {
        let marked = Some(Gso { kind, ecn: true, size: 1000 });
        assert_eq!(check(&udp, UDP4, marked), Err(Refusal::EcnWithoutTcp));
    }
    let mut tcp = grown(frames::TCP_V4, 3000);
    tcp[47] |= tcp_flags::CWR;
    let accepted = check(&tcp, TCP4, gso(GsoKind::TcpV4, 1448)).unwrap();
    assert_eq!(accepted.gso, Some(Gso { kind: GsoKind::TcpV4, ecn: true, size: 1448 }));
}

#[test]
fn gso_with_checksum_elsewhere_is_refused() {
    let tcp = grown(frames::TCP_V4, 3000);
    let expected = ChecksumPlace { start: 34, offset: 16 };
    for (start, offset) in [(34, 6), (36, 16), (35, 15)] {
        let offered = ChecksumPlace { start, offset };
        let refused = Err(Refusal::ChecksumElsewhere { offered, expected });
        assert_eq!(check(&tcp, offered.into(), gso(GsoKind::TcpV4, 1448)), refused);
    }
}

#[test]
fn gso_of_packet_shorter_than_frame_is_refused() {
    let mut tcp = grown(frames::TCP_V4, 3000);
    tcp.push(0);
    let refused = Err(Refusal::LengthMismatch { end: 3074, frame_len: 3075 });
    assert_eq!(check(&tcp, TCP4, gso(GsoKind::TcpV4, 1448)), refused);
}

#[test]
fn gso_without_blank_checksum_gets_one_where_linux_accepts() {
    for (hex, kind, place) in [
        (frames::TCP_V4, GsoKind::TcpV4, TCP4),
        (frames::TCP_V6, GsoKind::TcpV6, TCP6),
        (frames::UDP_V6, GsoKind::UdpFragment, UDP6),
    ] {
        for checksum in [Checksum::None, Checksum::Verified] {
            let mut headers = grown(hex, 3000);
            let layers = layers(&headers);
            let offered = OffloadMeta { checksum, gso: gso(kind, 1000) };
            let accepted = accept(offered, &mut headers, &layers).unwrap();
            assert_eq!(accepted, OffloadMeta { checksum: place, gso: gso(kind, 1000) });
            let field = place.place().unwrap().field();
            let stored = u16::from_be_bytes([headers[field], headers[field + 1]]);
            assert_eq!(Ok(stored), pseudo_header_sum(&headers, &layers));
        }
    }
    let udp = grown(frames::UDP_V4, 3000);
    let refused = Err(Refusal::UdpWithoutChecksum);
    assert_eq!(check(&udp, Checksum::Verified, gso(GsoKind::Udp, 1000)), refused);
}

#[test]
fn gso_without_blank_checksum_and_place_is_refused() {
    let mut udp = grown(frames::UDP_V4, 3000);
    udp[39] ^= 1; // UDP length no longer the packet's
    let surplus = BlankError::UdpSurplus { udp: 3016, payload: 3017 };
    let refused = Err(Refusal::CannotBlank(ResetError::Blank(surplus)));
    assert_eq!(check(&udp, Checksum::None, gso(GsoKind::UdpFragment, 1000)), refused);
}

#[test]
fn blank_checksum_beyond_frame_is_refused() {
    let tcp = frame(frames::TCP_V4);
    let at = |start, offset| check(&tcp, Checksum::Partial { start, offset }, None);
    let beyond = |end| Err(Refusal::ChecksumBeyondFrame { end, frame_len: 74 });
    assert!(at(34, 38).is_ok());
    assert_eq!(at(34, 39), beyond(75));
    assert_eq!(at(65535, 65535), beyond(131_072));
    // With an order, the smallest transport header counts too.
    let place = Checksum::Partial { start: 60, offset: 6 };
    assert_eq!(check(&tcp, place, gso(GsoKind::TcpV4, 100)), beyond(80));
}

#[test]
fn blank_checksum_inside_ip_header_is_refused() {
    for (bytes, minimum) in [
        (frame(frames::TCP_V4), 34),
        (frame(frames::TCP_V6), 54),
        (frame(frames::UDP_V4_OPTIONS), 46),
        (frame(frames::ARP), 34),
    ] {
        for start in [0, 12, u16::try_from(minimum).unwrap() - 1] {
            let place = Checksum::Partial { start, offset: 2 };
            let refused = Err(Refusal::ChecksumInHeaders { start, minimum });
            assert_eq!(check(&bytes, place, None), refused);
        }
        let start = u16::try_from(minimum).unwrap();
        assert!(check(&bytes, Checksum::Partial { start, offset: 2 }, None).is_ok());
    }
}

#[test]
fn blank_checksum_outside_private_bytes_is_refused() {
    let bytes = grown(frames::UDP_V4, 600);
    let layers = Layers::parse(&bytes[..256], len(&bytes)).unwrap();
    let at = |start| OffloadMeta { checksum: Checksum::Partial { start, offset: 6 }, gso: None };
    let mut headers = bytes[..256].to_vec();
    assert!(accept(at(248), &mut headers, &layers).is_ok());
    let refused = Err(Refusal::ChecksumNotCaptured { end: 257, captured: 256 });
    assert_eq!(accept(at(249), &mut headers, &layers), refused);
}

#[test]
fn fragment_with_checksum_or_gso_request_is_refused() {
    let last = frame(frames::FRAGMENT_V4_LAST);
    assert_eq!(check(&last, UDP4, None), Err(Refusal::ChecksumOnFragment));
    let kind = GsoKind::UdpFragment;
    let split = check(&last, Checksum::None, gso(kind, 8));
    assert_eq!(split, Err(Refusal::KindMismatch { kind }));
    let mut first = grown(frames::TCP_V4, 3000);
    first[20] |= 0x20; // more fragments
    let kind = GsoKind::TcpV4;
    let split = check(&first, Checksum::None, gso(kind, 1448));
    assert_eq!(split, Err(Refusal::KindMismatch { kind }));
}

/// Checks that an IPv6 fragment header, even an atomic one, is refused: segments cannot repeat it.
#[test]
fn gso_of_atomic_ipv6_fragment_is_refused() {
    let mut bytes = grown(frames::TCP_V6, 3000);
    let payload = u16::from_be_bytes([bytes[18], bytes[19]]) + 8;
    bytes[18..20].copy_from_slice(&payload.to_be_bytes());
    bytes[20] = 44;
    bytes.splice(54..54, [6, 0, 0, 0, 0, 0, 0, 1]);
    let place = Checksum::Partial { start: 62, offset: 16 };
    assert!(check(&bytes, place, None).is_ok());
    let refused = Err(Refusal::KindMismatch { kind: GsoKind::TcpV6 });
    assert_eq!(check(&bytes, place, gso(GsoKind::TcpV6, 1000)), refused);
}

#[test]
fn plain_metadata_is_accepted_unchanged() {
    let bytes = frame(frames::ARP);
    for checksum in [Checksum::None, Checksum::Verified] {
        assert_eq!(check(&bytes, checksum, None), Ok(OffloadMeta { checksum, gso: None }));
    }
}
