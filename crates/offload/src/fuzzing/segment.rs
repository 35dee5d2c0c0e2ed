//! Body of the fuzz target `segment`.
//!
//! Guarantees checked: the segments' payloads are the super-packet's, in order and complete. A receiver
//! accepts each segment, and each segment's checksum is right. Fragments reassemble.

use crate::accept::accept;
use crate::checksum::verify::{Verdict, pseudo_header_sum, verify_ipv4_header, verify_transport};
use crate::meta::{Checksum, GsoKind, OffloadMeta};
use crate::packet::{Fragment, Layers, Network};
use crate::segment::{HEADER_MAX, MAX_SEGMENTS, Segment, SegmentError, Segmenter};
use crate::vnet::VnetHeader;

/// Runs one case on any bytes, in the format of [`packet_parse`](super::packet_parse).
///
/// # Panics
/// Panics if the crate breaks a guarantee.
pub fn segment(data: &[u8]) {
    let Some((prefix, frame)) = data.split_first_chunk::<{ super::PREFIX }>() else {
        return;
    };
    let [vnet @ .., c0, c1, m0, m1, _, _] = *prefix;
    let captured = usize::from(u16::from_le_bytes([c0, c1])).min(frame.len());
    let Ok(len) = u32::try_from(frame.len()) else {
        return;
    };
    let len = len + u32::from(u16::from_le_bytes([m0, m1]));
    let vnet = VnetHeader::from_modern(&vnet);
    let mut headers = frame[..captured].to_vec();
    let Ok(layers) = Layers::parse(&headers, len) else {
        return;
    };
    if let Ok(offered) = vnet.offered() {
        check_unaccepted(&headers, &layers, offered);
    }
    let Ok(meta) = vnet.accept(&mut headers, &Ok(layers)) else {
        return;
    };
    let bytes = [&headers, &frame[captured..]].concat();
    check_accepted(&headers, &layers, meta, &bytes);
}

/// Checks that segmentation of unaccepted metadata ends within its bounds.
fn check_unaccepted(headers: &[u8], layers: &Layers, meta: OffloadMeta) {
    let Ok(mut segmenter) = Segmenter::new(headers, layers, meta) else {
        return;
    };
    let segments = segmenter.segments();
    assert!((1..=MAX_SEGMENTS).contains(&segments));
    let mut room = [0; HEADER_MAX];
    let mut made = 0;
    while let Ok(Some(_)) = segmenter.next_partial(&mut room) {
        made += 1;
    }
    assert!(made == segments || made == 0, "{made} of {segments}");
}

fn check_accepted(headers: &[u8], layers: &Layers, meta: OffloadMeta, bytes: &[u8]) {
    let segmenter = match Segmenter::new(headers, layers, meta) {
        Ok(segmenter) => segmenter.with_fragment_id(7),
        Err(SegmentError::NoOrder) => return assert!(meta.gso.is_none()),
        Err(SegmentError::HeadersTooLong { needed }) => return assert!(needed > HEADER_MAX),
        Err(SegmentError::UdpLength { udp, payload }) => return assert!(u32::from(udp) != payload),
        Err(refused) => panic!("accepted, then refused: {refused}"),
    };
    let Some(gso) = meta.gso else {
        panic!("nothing to split");
    };
    let whole = u32::try_from(bytes.len()) == Ok(layers.frame_len());
    if gso.kind == GsoKind::UdpFragment {
        if whole {
            let fragments = collect_segments(segmenter, layers, bytes, true, gso.size);
            check_reassembly(&fragments, layers, bytes);
        }
        return;
    }
    let seed_is_right = checksum_seed(bytes, layers)
        .is_some_and(|seed| Ok(seed) == pseudo_header_sum(headers, layers));
    for (header, segment) in collect_segments(segmenter.clone(), layers, bytes, false, gso.size) {
        check_blank_segment(header, &segment, seed_is_right);
    }
    if whole {
        for (header, segment) in collect_segments(segmenter, layers, bytes, true, gso.size) {
            check_completed_segment(&header, &segment, bytes, seed_is_right);
        }
    }
}

fn checksum_seed(bytes: &[u8], layers: &Layers) -> Option<u16> {
    let at = layers.checksum_place()?.field();
    Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

/// Returns all segments with their headers. Checks the guarantees that hold for every kind.
fn collect_segments(
    mut segmenter: Segmenter,
    layers: &Layers,
    bytes: &[u8],
    complete: bool,
    size: u16,
) -> Vec<(Vec<u8>, Segment)> {
    let mut room = [0; HEADER_MAX];
    let mut made = Vec::new();
    let mut position = u32::from(layers.header_len());
    loop {
        let before = segmenter.remaining();
        let next = if complete {
            segmenter.next_complete(&mut room, &mut { bytes })
        } else {
            segmenter.next_partial(&mut room)
        };
        let segment = match next {
            Ok(Some(segment)) => segment,
            Ok(None) => break assert_eq!(before, 0),
            Err(error) => panic!("{error}"),
        };
        assert_eq!(segmenter.remaining() + 1, before);
        assert_eq!(segment.payload.start, position, "payloads follow each other");
        assert!(segment.payload.end - position <= u32::from(size));
        assert!(segment.header_len <= segmenter.header_room());
        position = segment.payload.end;
        made.push((room[..segment.header_len].to_vec(), segment));
    }
    assert_eq!(position, layers.network_end(), "all of the payload");
    assert_eq!(u32::try_from(made.len()), Ok(segmenter.segments()));
    made
}

fn parse(header: &[u8], segment: &Segment) -> Layers {
    let len = u32::try_from(header.len()).unwrap_or(u32::MAX);
    let len = len + (segment.payload.end - segment.payload.start);
    match Layers::parse(header, len) {
        Ok(layers) => {
            assert_eq!(layers.network_end(), len, "the IP packet fills the frame");
            assert_ne!(verify_ipv4_header(header, &layers), Ok(Some(false)));
            layers
        }
        Err(error) => panic!("a segment does not parse: {error}"),
    }
}

fn check_blank_segment(mut header: Vec<u8>, segment: &Segment, seed_is_right: bool) {
    let layers = parse(&header, segment);
    assert_eq!(segment.meta.checksum.place(), layers.checksum_place());
    assert_eq!(accept(segment.meta, &mut header, &layers), Ok(segment.meta));
    if seed_is_right {
        assert_eq!(checksum_seed(&header, &layers), pseudo_header_sum(&header, &layers).ok());
    }
}

fn check_completed_segment(header: &[u8], segment: &Segment, bytes: &[u8], seed_is_right: bool) {
    assert_eq!(segment.meta.checksum, Checksum::Verified);
    let layers = parse(header, segment);
    let payload = &bytes[segment.payload.start as usize..segment.payload.end as usize];
    if seed_is_right {
        assert_eq!(verify_transport(header, [payload], &layers), Ok(Verdict::Correct));
    }
}

/// Reassembles the datagram from the fragments' headers and compares it.
fn check_reassembly(fragments: &[(Vec<u8>, Segment)], layers: &Layers, bytes: &[u8]) {
    let mut datagram = Vec::new();
    for (header, segment) in fragments {
        assert!(segment.meta.is_finished());
        let parsed = parse(header, segment);
        let (fragment, start) = match parsed.network() {
            Network::Ipv4(ip) => (ip.fragment, ip.offset + u16::from(ip.header_len)),
            Network::Ipv6(ip) => (ip.fragment, ip.offset + ip.header_len),
            other => panic!("{other:?}"),
        };
        let Some(Fragment { offset, more }) = fragment else {
            panic!("not a fragment");
        };
        assert_eq!(usize::from(offset), datagram.len());
        assert_eq!(more, segment.payload.end < layers.network_end());
        datagram.extend_from_slice(&header[usize::from(start)..]);
        let payload = segment.payload.start as usize..segment.payload.end as usize;
        datagram.extend_from_slice(&bytes[payload]);
    }
    let start = usize::from(layers.transport_offset().unwrap_or_default());
    assert_eq!(datagram[..6], bytes[start..start + 6]);
    assert_eq!(datagram[8..], bytes[start + 8..]);
    let whole = [&bytes[..start], &datagram].concat();
    if pseudo_header_sum(&whole, layers).is_ok() {
        assert_eq!(verify_transport(&whole, [], layers), Ok(Verdict::Correct));
    }
}
