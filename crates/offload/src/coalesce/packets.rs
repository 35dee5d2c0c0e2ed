//! Packets of a finished round.

use std::ops::Range;

use super::{Entry, Group};
use crate::meta::OffloadMeta;

/// Packet of a finished round.
#[derive(Clone, Debug)]
pub enum Packet<'a> {
    /// Frame that joined no other, by the caller's index.
    Alone(u32),
    /// Several frames joined into one super-packet.
    Merged(Merged<'a>),
}

/// Several frames as one super-packet: [`header`](Self::header), followed by the payload of each of
/// [`members`](Self::members) in order.
#[derive(Clone, Debug)]
pub struct Merged<'a> {
    /// Headers of the super-packet.
    pub header: &'a [u8],
    /// Blank checksum and segmentation request.
    pub meta: OffloadMeta,
    /// Length of the whole frame in bytes, headers included.
    pub len: u32,
    /// Number of joined frames: 2 or more.
    pub frames: u32,
    entries: &'a [Entry],
    first: u32,
}

impl<'a> Merged<'a> {
    /// Returns the frames whose payload follows the header.
    #[must_use]
    pub fn members(&self) -> Members<'a> {
        Members { entries: self.entries, next: Some(self.first) }
    }
}

/// Frame in a joined packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Index that the caller gave the frame.
    pub frame: u32,
    /// Range of the payload in that frame.
    pub payload: Range<u32>,
}

/// Iterator over the frames of a joined packet, in order.
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

/// Iterator over the packets of a finished round, in the order of their first frames.
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
