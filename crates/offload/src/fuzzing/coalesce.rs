//! Body of the fuzz target `coalesce`.
//!
//! A round consists of a super-packet's own segments. Some are altered, left out or repeated, so they
//! often almost fit. Guarantees checked: each frame is in one packet, frames of a flow keep their order, and
//! segmenting a packet gives its frames again.

use std::collections::HashMap;

use crate::accept::accept;
use crate::checksum::complete_partial;
use crate::checksum::verify::{Verdict, verify_transport};
use crate::coalesce::{Coalescer, Limits, MAX_UDP_DATAGRAMS, Merged, Packet};
use crate::meta::{Checksum, GsoKind, OffloadMeta};
use crate::packet::{Layers, Network};
use crate::segment::{HEADER_MAX, Segmenter};
use crate::vnet::{MODERN_LEN, VnetHeader};

/// Bytes before the super-packet: settings, a virtio-net header, the super-packet's length.
const PREFIX: usize = 1 + MODERN_LEN + 2;
/// Maximum frames in a round.
const FRAMES: usize = 48;

/// Frame with its offload metadata.
pub type Frame = (Vec<u8>, OffloadMeta);

/// Runs one case on any bytes. After the super-packet come steps of 3 bytes: an action and two arguments.
///
/// # Panics
/// Panics if the crate breaks a guarantee.
pub fn coalesce(data: &[u8]) {
    let Some((settings, frames)) = frames_of_a_round(data) else { return };
    let limits = Limits {
        frames: FRAMES,
        flows: 8,
        packet_len: if settings & 1 == 0 { 65_535 } else { 4000 },
        packet_frames: if settings & 2 == 0 { 64 } else { 3 },
        udp: settings & 4 == 0,
        ..Limits::default()
    };
    check_round(&frames, limits);
}

/// Decodes the settings of a [`coalesce`] case and the frames of its round.
#[must_use]
pub fn frames_of_a_round(data: &[u8]) -> Option<(u8, Vec<Frame>)> {
    let (prefix, rest) = data.split_first_chunk::<PREFIX>()?;
    let [settings, vnet @ .., l0, l1] = *prefix;
    let len = usize::from(u16::from_le_bytes([l0, l1])).min(rest.len());
    let (frame, script) = rest.split_at(len);
    let mut frame = frame.to_vec();
    let layers = Layers::parse(&frame, length(&frame));
    let meta = VnetHeader::from_modern(&vnet).accept(&mut frame, &layers);
    let meta = meta.unwrap_or(OffloadMeta::PLAIN);
    Some((settings, build_round(frame, meta, script)))
}

/// Builds the frames of a round by the steps of `script`.
fn build_round(frame: Vec<u8>, meta: OffloadMeta, script: &[u8]) -> Vec<Frame> {
    let whole = (frame, meta);
    let blank = split(&whole, false);
    let mut next = blank.iter();
    let mut frames: Vec<Frame> = Vec::new();
    for step in script.chunks_exact(3).take(FRAMES) {
        let last = frames.last().cloned();
        let frame = match (step[0] % 8, next.clone().next()) {
            (0..=2, Some(_)) => {
                next.next().cloned().map(|frame| complete_checksum(frame, step[0] % 8))
            }
            (3, _) => next.next().and(None),
            (4, _) => Some(whole.clone()),
            (5, _) => last,
            (6, _) => last.map(|(mut bytes, meta)| {
                let at = usize::from(step[1]);
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= step[2];
                }
                (bytes, meta)
            }),
            (_, _) => last.map(|(mut bytes, _)| {
                bytes.push(step[1]);
                (bytes, OffloadMeta::PLAIN)
            }),
        };
        frames.extend(frame);
    }
    frames
}

/// Leaves a blank checksum blank, or completes it and marks it as verified or unknown.
fn complete_checksum((mut bytes, meta): Frame, how: u8) -> Frame {
    let Some(place) = meta.checksum.place().filter(|_| how > 0) else {
        return (bytes, meta);
    };
    let done = complete_partial(&mut bytes, place);
    assert!(done.is_ok(), "{done:?}");
    let checksum = if how == 1 { Checksum::None } else { Checksum::Verified };
    (bytes, OffloadMeta { checksum, gso: None })
}

pub(super) fn length(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap_or(u32::MAX)
}

/// Segments a frame into packets of the wire; returns none if it cannot be segmented.
pub(super) fn split((bytes, meta): &Frame, complete: bool) -> Vec<Frame> {
    let Ok(layers) = Layers::parse(bytes, length(bytes)) else {
        return Vec::new();
    };
    let headers = &bytes[..bytes.len().min(HEADER_MAX)];
    let Ok(mut segmenter) = Segmenter::new(headers, &layers, *meta) else {
        return Vec::new();
    };
    let mut room = [0; HEADER_MAX];
    let mut made = Vec::new();
    loop {
        let next = if complete {
            segmenter.next_complete(&mut room, &mut &bytes[..])
        } else {
            segmenter.next_partial(&mut room)
        };
        let Ok(Some(segment)) = next else { break };
        let payload = &bytes[segment.payload.start as usize..segment.payload.end as usize];
        made.push(([&room[..segment.header_len], payload].concat(), segment.meta));
    }
    made
}

/// Coalesces a round of any frames and checks all guarantees.
pub(crate) fn check_round(frames: &[Frame], limits: Limits) {
    let mut coalescer = Coalescer::new(limits);
    for (index, (bytes, meta)) in frames.iter().enumerate() {
        let layers = Layers::parse(bytes, length(bytes)).ok();
        let headers = &bytes[..bytes.len().min(HEADER_MAX)];
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        let full = coalescer.push(index, headers, layers.as_ref(), *meta, &mut &bytes[..]);
        assert_eq!(full, Ok(()));
    }
    let mut order = Vec::new();
    for packet in coalescer.finish() {
        match packet {
            Packet::Alone(frame) => order.push(frame),
            Packet::Merged(merged) => {
                order.extend(merged.members().map(|member| member.frame));
                check_merged(&merged, frames, limits);
            }
        }
    }
    check_flow_order(frames, &order);
    order.sort_unstable();
    assert!(order.into_iter().eq((0..).take(frames.len())), "each frame once");
}

fn check_merged(merged: &Merged<'_>, frames: &[Frame], limits: Limits) {
    let mut bytes = merged.header.to_vec();
    let mut expected = Vec::new();
    let mut count = 0;
    for member in merged.members() {
        let (frame, meta) = &frames[member.frame as usize];
        let payload = &frame[member.payload.start as usize..member.payload.end as usize];
        assert_eq!(member.payload.end, length(frame), "all of a frame's payload");
        bytes.extend_from_slice(payload);
        count += 1;
        if meta.checksum == Checksum::None {
            let layers = Layers::parse(frame, length(frame));
            let verdict = layers.map(|layers| verify_transport(frame, [], &layers));
            assert_eq!(verdict, Ok(Ok(Verdict::Correct)), "no damaged frame joins");
        }
        if meta.gso.is_some() {
            expected.extend(split(&(frame.clone(), *meta), true).into_iter().map(|(b, _)| b));
        } else {
            expected.push(frame.clone());
        }
    }
    assert!(count >= 2 && count == merged.frames && count <= limits.packet_frames);
    assert!(length(&bytes) == merged.len && merged.len <= limits.packet_len);
    let Ok(layers) = Layers::parse(&bytes, merged.len) else {
        panic!("a joined packet does not parse");
    };
    let accepted = accept(merged.meta, &mut bytes, &layers);
    assert_eq!(accepted, Ok(merged.meta), "a joined packet is accepted");
    assert!(merged.meta.gso.is_some_and(|gso| gso.kind != GsoKind::UdpFragment));
    let made = split(&(bytes, merged.meta), true);
    if merged.meta.gso.is_some_and(|gso| gso.kind == GsoKind::Udp) {
        assert!(frame_count(&made) <= MAX_UDP_DATAGRAMS);
    }
    // Segmentation increments an identification that was constant. That is allowed where fragments are
    // impossible (RFC 6864).
    let ids: Vec<_> = expected.iter().map(|bytes| atomic_id(bytes)).collect();
    let fixed = ids.iter().all(|id| id.is_some() && *id == ids[0]);
    let made: Vec<_> = made.into_iter().map(|(bytes, _)| canonical(bytes, fixed)).collect();
    let expected: Vec<_> = expected.into_iter().map(|bytes| canonical(bytes, fixed)).collect();
    assert_eq!(made, expected, "splitting gives the frames back");
}

fn frame_count(list: &[Frame]) -> u32 {
    u32::try_from(list.len()).unwrap_or(u32::MAX)
}

/// Returns the identification of an IPv4 packet that must not be fragmented.
fn atomic_id(bytes: &[u8]) -> Option<u16> {
    match Layers::parse(bytes, length(bytes)).ok()?.network() {
        Network::Ipv4(ip) if ip.dont_fragment => Some(ip.id),
        _ => None,
    }
}

/// Clears the fields that joining may change: the transport's checksum (blank, or of two forms of zero) and, if
/// `fixed`, the identification.
fn canonical(mut bytes: Vec<u8>, fixed: bool) -> Vec<u8> {
    let Ok(layers) = Layers::parse(&bytes, length(&bytes)) else {
        panic!("a packet that joined does not parse");
    };
    if let Some(place) = layers.checksum_place() {
        bytes[place.field()..place.field_end()].fill(0);
    }
    if let (Network::Ipv4(ip), true) = (layers.network(), fixed) {
        let at = usize::from(ip.offset);
        bytes[at + 4..at + 6].fill(0);
        bytes[at + 10..at + 12].fill(0);
    }
    bytes
}

fn check_flow_order(frames: &[Frame], order: &[u32]) {
    let mut last: HashMap<Vec<u8>, u32> = HashMap::new();
    for &frame in order {
        let Some(flow) = flow(&frames[frame as usize].0) else { continue };
        if let Some(before) = last.insert(flow, frame) {
            assert!(before < frame, "frame {frame} was overtaken by {before}");
        }
    }
}

/// Returns the bytes that all frames of a flow share.
pub(super) fn flow(bytes: &[u8]) -> Option<Vec<u8>> {
    let layers = Layers::parse(bytes, length(bytes)).ok()?;
    let place = layers.checksum_place()?;
    let (ip, ports) = (usize::from(layers.network_offset()), usize::from(place.start));
    let addresses = match layers.network() {
        Network::Ipv4(_) => ip + 12..ip + 20,
        _ => ip + 8..ip + 40,
    };
    let parts = [&bytes[..ip], &bytes[addresses], &bytes[ports..ports + 4]];
    Some([&parts.concat()[..], &place.offset.to_be_bytes()].concat())
}
