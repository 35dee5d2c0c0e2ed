//! What went into something that joins, splits and sums frames is what comes out of it.

use std::collections::HashMap;

use super::coalesce::{Frame, flow, length, split};
use crate::blank::{derive_place, reset_pseudo_header};
use crate::checksum::complete_partial;
use crate::meta::{Checksum, OffloadMeta};
use crate::packet::{Layers, Network};

/// A frame as a data plane has it that believes no sender: it is not known to be right, and in a blank
/// checksum is the pseudo header's sum.
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

/// Checks that `got` is the same traffic as `sent`: split to packets of the wire and summed, each flow has
/// the same ones in the same order, and so have all frames that are of no flow.
///
/// # Panics
/// If they differ.
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
            None => vec![summed(frame.clone())],
        };
        for packet in packets {
            let of_flow: &mut Vec<_> = flows.entry(flow(&packet)).or_default();
            of_flow.push(canonical(packet));
        }
    }
    flows
}

fn summed((mut bytes, meta): Frame) -> Vec<u8> {
    if let OffloadMeta { checksum: Checksum::Partial { .. }, .. } = meta
        && let Some(place) = meta.checksum.place()
    {
        let done = complete_partial(&mut bytes, place);
        assert!(done.is_ok(), "{done:?}");
    }
    bytes
}

/// Without what joining may change: an identification that is needed for nothing, since there can be no
/// fragments, and which of its two zeros a checksum is.
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
