//! What a round became.

use std::ops::Range;

use super::{Entry, Group};
use crate::meta::OffloadMeta;

/// A packet of a finished round.
#[derive(Clone, Debug)]
pub enum Packet<'a> {
    /// A frame that goes on as it came: the caller's name for it.
    Alone(u32),
    /// Several frames, joined.
    Merged(Merged<'a>),
}

/// Several frames as one super-packet: [`header`](Self::header), followed by the payload of each of
/// the [`members`](Self::members), in order.
#[derive(Clone, Debug)]
pub struct Merged<'a> {
    /// The headers.
    pub header: &'a [u8],
    /// Blank checksum and segmentation order.
    pub meta: OffloadMeta,
    /// Octets of the whole frame, headers included.
    pub len: u32,
    /// Frames that have joined: 2 or more.
    pub frames: u32,
    entries: &'a [Entry],
    first: u32,
}

impl<'a> Merged<'a> {
    /// The frames whose payload follows the header.
    #[must_use]
    pub fn members(&self) -> Members<'a> {
        Members { entries: self.entries, next: Some(self.first) }
    }
}

/// A frame in a joined packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// The caller's name for it.
    pub frame: u32,
    /// Its payload, as positions in that frame.
    pub payload: Range<u32>,
}

/// The frames of a joined packet, in order.
#[derive(Clone, Debug)]
pub struct Members<'a> {
    entries: &'a [Entry],
    next: Option<u32>,
}

impl Iterator for Members<'_> {
    type Item = Member;

    fn next(&mut self) -> Option<Member> {
        let entry = self.entries.get(self.next? as usize)?;
        self.next = entry.next;
        Some(Member { frame: entry.frame, payload: entry.payload.0..entry.payload.1 })
    }
}

/// The packets of a finished round, in the order of their first frames.
#[derive(Clone, Debug)]
pub struct Packets<'a> {
    groups: std::slice::Iter<'a, Group>,
    entries: &'a [Entry],
    headers: &'a [u8],
}

impl<'a> Packets<'a> {
    pub(super) fn new(groups: &'a [Group], entries: &'a [Entry], headers: &'a [u8]) -> Self {
        Self { groups: groups.iter(), entries, headers }
    }
}

impl<'a> Iterator for Packets<'a> {
    type Item = Packet<'a>;

    fn next(&mut self) -> Option<Packet<'a>> {
        let group = self.groups.next()?;
        let Some(join) = group.join.as_ref().filter(|_| group.frames > 1) else {
            return Some(Packet::Alone(self.entries[group.first as usize].frame));
        };
        Some(Packet::Merged(Merged {
            header: &self.headers[group.header.clone()],
            meta: group.meta,
            len: join.frame_len(group.header.len()),
            frames: group.frames,
            entries: self.entries,
            first: group.first,
        }))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.groups.size_hint()
    }
}

impl ExactSizeIterator for Packets<'_> {}
