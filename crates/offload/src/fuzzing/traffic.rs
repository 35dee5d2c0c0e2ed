//! Comparison of traffic before and after coalescing, segmentation and checksumming.

use std::collections::HashMap;

use super::coalesce::{Frame, flow, length, split};
use crate::blank::{derive_place, reset_pseudo_header};
use crate::checksum::complete_partial;
use crate::meta::{Checksum, OffloadMeta};
use crate::packet::{Layers, Network};

/// Returns a frame as a worker holds it that trusts no sender: not verified, and with the right pseudo
/// header sum in a blank checksum.
#[must_use]
pub fn believing_nobody((mut bytes, mut meta): Frame) -> Frame {
    if meta.checksum == Checksum::Verified {
        meta.checksum = Checksum::None;
    }
    if let (Some(place), Ok(layers)) =
        (meta.checksum.place(), Layers::parse(&bytes, length(&bytes)))
        && derive_place(&layers) == Ok(place)
    {
        let reset = reset_pseudo_header(&mut bytes, &layers);
        assert_eq!(reset, Ok(place));
    }
    (bytes, meta)
}

/// Asserts that `got` is the same traffic as `sent`. Once segmented and summed, each flow must have the same
/// packets in the same order, and so must the frames without a flow.
///
/// # Panics
/// Panics if they differ.
pub fn is_the_same(sent: &[Frame], got: &[Frame]) {
    let (sent, got) = (by_flow(sent), by_flow(got));
    for (flow, packets) in &sent {
        let found = got.get(flow).map_or(&[][..], |found| found);
        assert!(
            packets == found,
            "{} packets in, {} out, first difference at {:?}",
            packets.len(),
            found.len(),
            packets.iter().zip(found).position(|(one, other)| one != other)
        );
    }
    assert_eq!(sent.len(), got.len(), "no flow from nowhere");
}

fn by_flow(frames: &[Frame]) -> HashMap<Option<Vec<u8>>, Vec<Vec<u8>>> {
    let mut flows = HashMap::new();
    for frame in frames {
        let packets = match frame.1.gso {
            Some(_) => split(frame, true).into_iter().map(|(bytes, _)| bytes).collect(),
            None => vec![with_checksum(frame.clone())],
        };
        for packet in packets {
            let of_flow: &mut Vec<_> = flows.entry(flow(&packet)).or_default();
            of_flow.push(canonical(packet));
        }
    }
    flows
}

fn with_checksum((mut bytes, meta): Frame) -> Vec<u8> {
    if let OffloadMeta { checksum: Checksum::Partial { .. }, .. } = meta
        && let Some(place) = meta.checksum.place()
    {
        let done = complete_partial(&mut bytes, place);
        assert!(done.is_ok(), "{done:?}");
    }
    bytes
}

/// Clears the fields that joining may change: the identification of a packet that cannot be fragmented, and the form
/// of a zero checksum.
fn canonical(mut bytes: Vec<u8>) -> Vec<u8> {
    let Ok(layers) = Layers::parse(&bytes, length(&bytes)) else { return bytes };
    if let Some(place) = layers.checksum_place()
        && bytes[place.field()..place.field_end()] == [0, 0]
    {
        bytes[place.field()..place.field_end()].fill(0xff);
    }
    if let Network::Ipv4(ip) = layers.network()
        && ip.dont_fragment
    {
        let at = usize::from(ip.offset);
        bytes[at + 4..at + 6].fill(0);
        bytes[at + 10..at + 12].fill(0);
    }
    bytes
}
