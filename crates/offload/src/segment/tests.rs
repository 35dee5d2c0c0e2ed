use super::*;
use crate::accept::Refusal;
use crate::checksum::verify::{Verdict, verify_ipv4_header, verify_transport};
use crate::octets::{BytesMissing, Pieces};
use crate::test_frames::{self as frames, frame, grown, len};
use crate::vnet::VnetHeader;

fn parse(bytes: &[u8]) -> Layers {
    Layers::parse(bytes, len(bytes)).unwrap()
}

/// Builds a super-packet with a blank checksum and a segmentation request.
fn super_packet(hex: &str, payload: u16, kind: GsoKind, size: u16) -> (Vec<u8>, OffloadMeta) {
    let mut bytes = grown(hex, payload);
    let layers = parse(&bytes);
    let place = reset_pseudo_header(&mut bytes, &layers).unwrap();
    (bytes, OffloadMeta { checksum: place.into(), gso: Some(Gso { kind, ecn: false, size }) })
}

fn split(bytes: &[u8], meta: OffloadMeta) -> Vec<Vec<u8>> {
    let mut segmenter = Segmenter::new(bytes, &parse(bytes), meta).unwrap().with_fragment_id(7);
    let mut room = [0; HEADER_MAX];
    let mut made = Vec::new();
    while let Some(segment) = segmenter.next_complete(&mut room, &mut { bytes }).unwrap() {
        let payload = &bytes[segment.payload.start as usize..segment.payload.end as usize];
        made.push([&room[..segment.header_len], payload].concat());
    }
    made
}

/// Returns flags, sequence number and identification of an untagged TCP segment over IPv4.
fn tcp_fields(segment: &[u8]) -> (u8, u32, u16) {
    (segment[47], get_u32(segment, 38), get_u16(segment, 18))
}

#[test]
fn tcp_segments_carry_flags_and_sequence_by_rfc_9293_and_3168() {
    let (mut bytes, meta) = super_packet(frames::TCP_V4, 3000, GsoKind::TcpV4, 1400);
    bytes[47] = !tcp_flags::SYN;
    put_u32(&mut bytes, 38, u32::MAX - 1000);
    put_u16(&mut bytes, 18, 0xffff);
    let made: Vec<_> = split(&bytes, meta).iter().map(|segment| tcp_fields(segment)).collect();
    let seq = u32::MAX - 1000;
    let middle = !(tcp_flags::SYN | tcp_flags::FIN | tcp_flags::PSH | tcp_flags::CWR);
    let expected = [
        (middle | tcp_flags::CWR, seq, 0xffff),
        (middle, seq.wrapping_add(1400), 0),
        (middle | tcp_flags::FIN | tcp_flags::PSH, seq.wrapping_add(2800), 1),
    ];
    assert_eq!(made, expected);
}

#[test]
fn completed_segments_verify() {
    for (hex, kind) in [
        (frames::TCP_V4, GsoKind::TcpV4),
        (frames::TCP_V6, GsoKind::TcpV6),
        (frames::UDP_V4, GsoKind::Udp),
        (frames::UDP_V6, GsoKind::Udp),
    ] {
        let (bytes, meta) = super_packet(hex, 5000, kind, 999);
        let made = split(&bytes, meta);
        assert_eq!(made.len(), 6);
        for segment in made {
            let layers = parse(&segment);
            assert_ne!(verify_ipv4_header(&segment, &layers), Ok(Some(false)));
            assert_eq!(verify_transport(&segment, [], &layers), Ok(Verdict::Correct));
        }
    }
}

/// A datagram with a computed checksum of zero, which would mean "no checksum" (RFC 768).
#[test]
fn udp_checksum_of_zero_is_sent_as_ones() {
    let (mut bytes, meta) = super_packet(frames::UDP_V4, 2991, GsoKind::Udp, 1000);
    let first = split(&bytes, meta).remove(0);
    // Adding the checksum to an even payload word makes the sum 0xFFFF, hence the checksum zero.
    let word = get_u16(&bytes, 100);
    let wanted = crate::checksum::fold(u64::from(word) + u64::from(get_u16(&first, 40)));
    put_u16(&mut bytes, 100, wanted);
    let first = split(&bytes, meta).remove(0);
    assert_eq!(get_u16(&first, 40), 0xffff);
    assert_eq!(verify_transport(&first, [], &parse(&first)), Ok(Verdict::Correct));
}

#[test]
fn ipv4_fragments_share_identification_and_omit_udp_header() {
    let (bytes, meta) = super_packet(frames::UDP_V4, 2000, GsoKind::UdpFragment, 1004);
    let made = split(&bytes, meta);
    let heads: Vec<_> = made.iter().map(|f| (f.len(), get_u16(f, 18), get_u16(f, 20))).collect();
    let id = get_u16(&bytes, 18);
    // 2017 bytes of IP payload in fragments of 1000, the multiple of 8 below 1004.
    assert_eq!(heads, [(1034, id, 0x2000), (1034, id, 0x2000 | 125), (51, id, 250)]);
}

#[test]
fn payload_within_segment_size_makes_one_packet() {
    for kind in [GsoKind::Udp, GsoKind::UdpFragment] {
        let (bytes, meta) = super_packet(frames::UDP_V6, 500, kind, 1400);
        let made = split(&bytes, meta);
        assert_eq!(made.len(), 1);
        assert_eq!(verify_transport(&made[0], [], &parse(&made[0])), Ok(Verdict::Correct));
        assert_eq!(made[0].len(), bytes.len());
    }
}

#[test]
fn segmentation_of_invalid_request_is_refused() {
    let (bytes, meta) = super_packet(frames::TCP_V4, 3000, GsoKind::TcpV4, 1000);
    let layers = parse(&bytes);
    let plain = OffloadMeta { gso: None, ..meta };
    assert_eq!(Segmenter::new(&bytes, &layers, plain).unwrap_err(), SegmentError::NoOrder);
    let foreign = SegmentError::ForeignHeaders { needed: 74, given: 73 };
    assert_eq!(Segmenter::new(&bytes[..73], &layers, meta).unwrap_err(), foreign);
    let zero = OffloadMeta { gso: meta.gso.map(|gso| Gso { size: 0, ..gso }), ..meta };
    let refused = SegmentError::Refused(Refusal::SizeZero);
    assert_eq!(Segmenter::new(&bytes, &layers, zero).unwrap_err(), refused);

    let (mut bytes, meta) = super_packet(frames::UDP_V4, 3000, GsoKind::Udp, 1000);
    put_u16(&mut bytes, 38, 100);
    let short = SegmentError::UdpLength { udp: 100, payload: 3017 };
    assert_eq!(Segmenter::new(&bytes, &parse(&bytes), meta).unwrap_err(), short);
}

#[test]
fn failed_segment_call_can_be_repeated() {
    let (bytes, meta) = super_packet(frames::UDP_V6, 3000, GsoKind::UdpFragment, 1000);
    let mut segmenter = Segmenter::new(&bytes, &parse(&bytes), meta).unwrap();
    let mut room = [0; HEADER_MAX];
    let mut frame_bytes = &bytes[..];
    assert_eq!(segmenter.next_partial(&mut room), Err(SegmentError::BlankFragment));
    let no_id = Err(SegmentError::NoFragmentId);
    assert_eq!(segmenter.next_complete(&mut room, &mut frame_bytes), no_id);
    let mut segmenter = segmenter.with_fragment_id(1);
    let short = SegmentError::Octets(BytesMissing { expected: 3010, given: 2000 });
    assert_eq!(segmenter.next_complete(&mut room, &mut &bytes[..2062]), Err(short));
    let no_room = SegmentError::HeaderRoom { needed: 70, given: 69 };
    assert_eq!(segmenter.next_complete(&mut room[..69], &mut frame_bytes), Err(no_room));
    assert_eq!((segmenter.header_room(), segmenter.remaining()), (70, 4));
    while segmenter.next_complete(&mut room, &mut frame_bytes).unwrap().is_some() {}
    assert_eq!(segmenter.remaining(), 0);
    assert_eq!(segmenter.next_complete(&mut room, &mut frame_bytes), Ok(None));
}

#[test]
fn payload_in_pieces_gives_same_segments() {
    let (bytes, meta) = super_packet(frames::TCP_V6, 6000, GsoKind::TcpV6, 1111);
    let pieces: Vec<&[u8]> = [&bytes[..101]].into_iter().chain(bytes[101..].chunks(777)).collect();
    let mut frame_bytes = Pieces::new(&pieces);
    let mut segmenter = Segmenter::new(&bytes[..101], &parse(&bytes), meta).unwrap();
    let mut room = [0; HEADER_MAX];
    for whole in split(&bytes, meta) {
        let segment = segmenter.next_complete(&mut room, &mut frame_bytes).unwrap().unwrap();
        assert_eq!(room[..segment.header_len], whole[..segment.header_len]);
    }
}

/// Bounds 64 KiB of the smallest size, the largest request.
#[test]
fn segments_of_largest_request_are_bounded() {
    let (bytes, meta) = super_packet(frames::TCP_V4, 65_475, GsoKind::TcpV4, 8);
    let segmenter = Segmenter::new(&bytes, &parse(&bytes), meta).unwrap();
    assert_eq!(segmenter.segments(), 65_475u32.div_ceil(8));
    assert!(segmenter.segments() <= MAX_SEGMENTS);
}

/// Super-packets as a kernel sent them: the headers alone are enough for blank checksums.
#[test]
fn kernel_super_packets_are_segmented() {
    for (vnet, headers, frame_len, count) in [
        (frames::VNET_TSO.0, frames::VNET_TSO.1, frames::VNET_TSO.2, 2),
        (frames::VNET_USO.0, frames::VNET_USO.1, frames::VNET_USO.2, 5),
    ] {
        let vnet = VnetHeader::from_modern(frame(vnet).first_chunk().unwrap());
        let mut headers = frame(headers);
        let layers = Layers::parse(&headers, u32::try_from(frame_len).unwrap()).unwrap();
        let meta = vnet.accept(&mut headers, &Ok(layers)).unwrap();
        let mut segmenter = Segmenter::new(&headers, &layers, meta).unwrap();
        assert_eq!(segmenter.segments(), count);
        let mut room = [0; HEADER_MAX];
        while let Some(segment) = segmenter.next_partial(&mut room).unwrap() {
            let len = segment.header_len + range_len(&segment.payload);
            let mut header = room[..segment.header_len].to_vec();
            let layers = Layers::parse(&header, u32::try_from(len).unwrap()).unwrap();
            let left = header.clone();
            reset_pseudo_header(&mut header, &layers).unwrap();
            assert_eq!(header, left, "the sum of the pseudo header is the segment's own");
        }
    }
}
