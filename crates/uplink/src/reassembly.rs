//! Reassembly of fragmented packets from the guest (RFC 791, 3.2; RFC 8200, 4.5).
//!
//! Sockets accept only whole datagrams, so the uplink joins fragments. A complete datagram is a batch with
//! one frame. A fragment that overlaps others in part discards its datagram (RFC 5722); one that is a
//! duplicate is ignored.
//!
//! # Limits
//!
//! At most [`DATAGRAMS_MAX`] incomplete datagrams of 64 KiB each, with at most [`PARTS_MAX`] separate parts,
//! are kept for [`LIFETIME`]. Beyond that the oldest is discarded.

use core::net::IpAddr;
use core::time::Duration;

use ringfence_frame::Batch;
use ringfence_offload::OffloadMeta;
use ringfence_offload::packet::{Fragment, Network};
use ringfence_sys::numbers::usize_from;

use arrayvec::ArrayVec;

use crate::context::Context;
use crate::emit::{ETHERNET_LEN, Ends};
use crate::packet::{self, Mac, Marks, Packet};

/// Maximum of incomplete datagrams.
pub(crate) const DATAGRAMS_MAX: usize = 32;
/// Length of the longest IP packet, and of an IPv4 header, which counts as part of it.
const PACKET_MAX: usize = 65_535;
const IPV4_LEN: usize = 20;
/// Maximum of received parts of a datagram with gaps between them.
const PARTS_MAX: usize = 16;
/// Lifetime of an incomplete datagram (RFC 8200, 4.5).
pub(crate) const LIFETIME: Duration = Duration::from_secs(60);
/// Length of an IPv6 header and a fragment header. Packets with other extension headers are dropped.
const IPV6_AND_FRAGMENT_LEN: u16 = 48;

/// Fields that identify the fragments of one packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DatagramKey {
    source: IpAddr,
    destination: IpAddr,
    protocol: u8,
    id: u32,
}

/// Datagram with missing fragments.
#[derive(Debug)]
struct Datagram {
    key: DatagramKey,
    mac: Mac,
    /// Marks of the fragment that came first.
    marks: Marks,
    begun: Duration,
    bytes: Vec<u8>,
    /// Received ranges in ascending order, with gaps between them.
    parts: ArrayVec<(usize, usize), PARTS_MAX>,
    /// Length of the datagram, known from its last fragment.
    end: Option<usize>,
}

/// Results of adding a fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FragmentOutcome {
    /// More fragments are missing.
    Incomplete,
    /// The datagram is complete.
    Whole,
    /// The fragment contradicts earlier ones.
    Broken,
}

/// Incomplete datagrams, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Reassembly {
    datagrams: Vec<Datagram>,
}

impl Reassembly {
    /// Adds a fragment. Returns the whole datagram, as a batch with one frame, once it is complete.
    pub(crate) fn take(&mut self, packet: &Packet<'_>, context: &Context<'_>) -> Option<Batch> {
        self.forget(context);
        context.counters.fragments_in.add(1);
        let Some((key, fragment, start)) = describe(packet) else {
            context.counters.drop_fragment.add(1);
            return None;
        };
        let place = self.place(key, packet, context);
        let datagram = self.datagrams.get_mut(place)?;
        match datagram.add(packet, fragment, start) {
            FragmentOutcome::Incomplete => None,
            FragmentOutcome::Broken => {
                self.datagrams.remove(place);
                context.counters.drop_fragment.add(1);
                None
            }
            FragmentOutcome::Whole => {
                let whole = self.datagrams.remove(place).frame(context.config.mac);
                let counter = match whole {
                    Some(_) => &context.counters.fragments_joined,
                    None => &context.counters.drop_fragment,
                };
                counter.add(1);
                whole
            }
        }
    }

    /// Returns the index of a datagram, adding one if its key is new.
    fn place(&mut self, key: DatagramKey, packet: &Packet<'_>, context: &Context<'_>) -> usize {
        if let Some(place) = self.datagrams.iter().position(|datagram| datagram.key == key) {
            return place;
        }
        if self.datagrams.len() >= DATAGRAMS_MAX {
            self.datagrams.remove(0);
            context.counters.drop_incomplete.add(1);
        }
        self.datagrams.push(Datagram {
            key,
            mac: packet.mac,
            marks: packet.marks(),
            begun: context.now,
            bytes: Vec::new(),
            parts: ArrayVec::new(),
            end: None,
        });
        self.datagrams.len() - 1
    }

    /// Discards datagrams whose lifetime has ended.
    pub(crate) fn forget(&mut self, context: &Context<'_>) {
        while self.deadline().is_some_and(|deadline| deadline <= context.now) {
            self.datagrams.remove(0);
            context.counters.drop_incomplete.add(1);
        }
    }

    /// Returns the time at which [`forget`](Self::forget) must be called next.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.datagrams.first().map(|oldest| oldest.begun + LIFETIME)
    }

    /// Returns the number of bytes held.
    #[cfg(test)]
    fn held(&self) -> usize {
        self.datagrams.iter().map(|datagram| datagram.bytes.capacity()).sum()
    }
}

/// Returns a fragment's datagram, its range, and the offset of its bytes in the frame.
fn describe(packet: &Packet<'_>) -> Option<(DatagramKey, Fragment, usize)> {
    let (protocol, id, fragment, start) = match packet.layers.network() {
        Network::Ipv4(ip) => {
            (ip.protocol, u32::from(ip.id), ip.fragment?, ip.offset + u16::from(ip.header_len))
        }
        Network::Ipv6(ip) if ip.header_len == IPV6_AND_FRAGMENT_LEN => {
            let start = ip.offset + ip.header_len;
            let id = packet.frame.header().get(usize::from(start) - 4..)?.first_chunk()?;
            (ip.protocol, u32::from_be_bytes(*id), ip.fragment?, start)
        }
        _ => return None,
    };
    let key = DatagramKey { source: packet.source, destination: packet.destination, protocol, id };
    Some((key, fragment, usize::from(start)))
}

impl Datagram {
    /// Adds a fragment whose bytes begin at offset `start` of its frame.
    fn add(&mut self, packet: &Packet<'_>, fragment: Fragment, start: usize) -> FragmentOutcome {
        let stop = usize_from(packet.layers.network_end());
        let from = usize::from(fragment.offset);
        let to = from + stop.saturating_sub(start);
        let ends_elsewhere = self.end.is_some_and(|end| end != to);
        let longest = PACKET_MAX - if self.key.source.is_ipv4() { IPV4_LEN } else { 0 };
        let beyond = to > self.end.unwrap_or(longest);
        let has_more_behind = self.bytes.len() > to;
        if from == to || beyond || (!fragment.more && (ends_elsewhere || has_more_behind)) {
            return FragmentOutcome::Broken;
        }
        if self.parts.iter().any(|&(a, b)| a <= from && to <= b) {
            return FragmentOutcome::Incomplete;
        }
        if self.parts.iter().any(|&(a, b)| a < to && from < b) || !self.enter(from, to) {
            return FragmentOutcome::Broken;
        }
        if !fragment.more {
            self.end = Some(to);
        }
        if self.bytes.len() < to {
            // The buffer doubles as vectors do; no packet exceeds 64 KiB.
            self.bytes.reserve_exact(to.next_power_of_two() - self.bytes.len());
            self.bytes.resize(to, 0);
        }
        self.copy(packet, start..stop, from);
        match (self.end, &self.parts[..]) {
            (Some(end), &[(0, all)]) if all == end => FragmentOutcome::Whole,
            _ => FragmentOutcome::Incomplete,
        }
    }

    /// Records a range that overlaps no other. Returns `false` if there are too many gaps.
    fn enter(&mut self, from: usize, to: usize) -> bool {
        let at = self.parts.partition_point(|&(start, _)| start < from);
        let before = at.checked_sub(1).filter(|&i| self.parts[i].1 == from);
        let after = Some(at).filter(|&i| self.parts.get(i).is_some_and(|part| part.0 == to));
        match (before, after) {
            (Some(before), Some(after)) => {
                self.parts[before].1 = self.parts[after].1;
                self.parts.remove(after);
            }
            (Some(before), None) => self.parts[before].1 = to,
            (None, Some(after)) => self.parts[after].0 = from,
            (None, None) => return self.parts.try_insert(at, (from, to)).is_ok(),
        }
        true
    }

    /// Copies a range of the packet's frame to offset `to` of the datagram.
    fn copy(&mut self, packet: &Packet<'_>, range: core::ops::Range<usize>, mut to: usize) {
        let mut at = 0;
        for piece in packet.frame.pieces() {
            let from = range.start.saturating_sub(at).min(piece.len());
            let until = range.end.saturating_sub(at).min(piece.len());
            if from < until {
                piece.for_each_piece_of(from..until, |bytes| {
                    if let Some(room) = self.bytes.get_mut(to..to + bytes.len()) {
                        room.copy_from_slice(bytes);
                    }
                    to += bytes.len();
                });
            }
            at += piece.len();
        }
    }

    /// Builds a frame from the complete datagram. Returns `None` if it exceeds the longest packet.
    fn frame(self, to_mac: Mac) -> Option<Batch> {
        let DatagramKey { source, destination, protocol, .. } = self.key;
        let ends = Ends { from_mac: self.mac, to_mac, from: source, to: destination };
        let len = ends.header_len() + self.bytes.len();
        let mut batch = Batch::with_capacity(1, len);
        let offset = batch.reserve(len)?;
        let frame = batch.scratch_mut(offset..offset + len).ok()?;
        frame.get_mut(ends.header_len()..)?.copy_from_slice(&self.bytes);
        ends.write(frame, protocol, self.bytes.len(), 0)?;
        let ip = frame.get_mut(ETHERNET_LEN..)?;
        packet::set_marks(ip, self.marks.hops, self.marks.class)?;
        packet::mark_joined(ip);
        batch.push_contiguous(offset, len, OffloadMeta::PLAIN).ok()?;
        Some(batch)
    }
}

#[cfg(test)]
mod tests;
