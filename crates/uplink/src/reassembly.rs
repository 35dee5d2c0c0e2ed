//! Datagrams that the guest sends in fragments, put together (RFC 791, 3.2; RFC 8200, 4.5).
//!
//! A socket takes whole datagrams, so a router that is made of sockets has to join what others would have
//! passed on in pieces. What a guest can make it hold by that is bounded: [`DATAGRAMS_MAX`] datagrams of at
//! most 64 KiB each, in [`PARTS_MAX`] pieces with gaps between them, for [`LIFETIME`]; the oldest makes room.
//! Fragments that overlap in part end their datagram (RFC 5722); what came already is ignored.

use core::net::IpAddr;
use core::time::Duration;

use ringfence_frame::Batch;
use ringfence_offload::OffloadMeta;
use ringfence_offload::packet::{Fragment, Network};

use arrayvec::ArrayVec;

use crate::context::Context;
use crate::emit::Ends;
use crate::packet::{Mac, Packet};

/// Datagrams that are put together at a time.
pub(crate) const DATAGRAMS_MAX: usize = 32;
/// Bytes of the longest IP packet, and of an IPv4 header, which counts as a part of it.
const PACKET_MAX: usize = 65_535;
const IPV4_LEN: usize = 20;
/// Stretches of a datagram with gaps between them.
const PARTS_MAX: usize = 16;
/// How long the rest of a datagram is waited for (RFC 8200, 4.5).
pub(crate) const LIFETIME: Duration = Duration::from_secs(60);
/// An IPv6 header with a fragment header alone behind it: others cannot be told from the datagram's own.
const IPV6_AND_FRAGMENT_LEN: u16 = 48;

/// Whose fragments belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    source: IpAddr,
    destination: IpAddr,
    protocol: u8,
    id: u32,
}

/// A datagram of which something is missing.
#[derive(Debug)]
struct Datagram {
    key: Key,
    mac: Mac,
    begun: Duration,
    octets: Vec<u8>,
    /// Stretches that are there, in order, with gaps between them.
    parts: ArrayVec<(usize, usize), PARTS_MAX>,
    /// Where it ends, once its last fragment has come.
    end: Option<usize>,
}

/// What a fragment did to its datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// More is to come.
    Incomplete,
    /// Nothing is missing any more.
    Whole,
    /// It contradicts what came before.
    Broken,
}

/// All datagrams of which something is missing, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Reassembly {
    datagrams: Vec<Datagram>,
}

impl Reassembly {
    /// Takes a fragment. Returns the whole datagram in a batch of its own, with one frame, once nothing is
    /// missing.
    pub(crate) fn take(&mut self, packet: &Packet<'_>, context: &Context<'_>) -> Option<Batch> {
        self.forget(context);
        context.counters.fragments_in.add(1);
        let Some((key, fragment, start)) = describe(packet) else {
            context.counters.drop_fragment.add(1);
            return None;
        };
        let place = self.place(key, packet.mac, context);
        let datagram = self.datagrams.get_mut(place)?;
        match datagram.add(packet, fragment, start) {
            Outcome::Incomplete => None,
            Outcome::Broken => {
                self.datagrams.remove(place);
                context.counters.drop_fragment.add(1);
                None
            }
            Outcome::Whole => {
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

    /// Where the datagram is, a fresh one if it is not known.
    fn place(&mut self, key: Key, mac: Mac, context: &Context<'_>) -> usize {
        if let Some(place) = self.datagrams.iter().position(|datagram| datagram.key == key) {
            return place;
        }
        if self.datagrams.len() >= DATAGRAMS_MAX {
            self.datagrams.remove(0);
            context.counters.drop_incomplete.add(1);
        }
        self.datagrams.push(Datagram {
            key,
            mac,
            begun: context.now,
            octets: Vec::new(),
            parts: ArrayVec::new(),
            end: None,
        });
        self.datagrams.len() - 1
    }

    /// Forgets those whose rest has not come in time.
    pub(crate) fn forget(&mut self, context: &Context<'_>) {
        while self.deadline().is_some_and(|deadline| deadline <= context.now) {
            self.datagrams.remove(0);
            context.counters.drop_incomplete.add(1);
        }
    }

    /// When [`forget`](Self::forget) is to be called next.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.datagrams.first().map(|oldest| oldest.begun + LIFETIME)
    }

    /// Octets held.
    #[cfg(test)]
    fn held(&self) -> usize {
        self.datagrams.iter().map(|datagram| datagram.octets.capacity()).sum()
    }
}

/// Which datagram a fragment is of, which part of it, and where that begins in the frame.
fn describe(packet: &Packet<'_>) -> Option<(Key, Fragment, usize)> {
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
    let key = Key { source: packet.source, destination: packet.destination, protocol, id };
    Some((key, fragment, usize::from(start)))
}

impl Datagram {
    /// Adds a fragment whose octets begin at `start` of its frame.
    fn add(&mut self, packet: &Packet<'_>, fragment: Fragment, start: usize) -> Outcome {
        let stop = usize::try_from(packet.layers.network_end()).unwrap_or(0);
        let from = usize::from(fragment.offset);
        let to = from + stop.saturating_sub(start);
        let ends_elsewhere = self.end.is_some_and(|end| end != to);
        let longest = PACKET_MAX - if self.key.source.is_ipv4() { IPV4_LEN } else { 0 };
        let beyond = to > self.end.unwrap_or(longest);
        let has_more_behind = self.octets.len() > to;
        if from == to || beyond || (!fragment.more && (ends_elsewhere || has_more_behind)) {
            return Outcome::Broken;
        }
        if self.parts.iter().any(|&(a, b)| a <= from && to <= b) {
            return Outcome::Incomplete;
        }
        if self.parts.iter().any(|&(a, b)| a < to && from < b) || !self.enter(from, to) {
            return Outcome::Broken;
        }
        if !fragment.more {
            self.end = Some(to);
        }
        if self.octets.len() < to {
            // By doubling, as vectors grow; no packet is longer than 64 KiB.
            self.octets.reserve_exact(to.next_power_of_two() - self.octets.len());
            self.octets.resize(to, 0);
        }
        self.copy(packet, start..stop, from);
        match (self.end, &self.parts[..]) {
            (Some(end), &[(0, all)]) if all == end => Outcome::Whole,
            _ => Outcome::Incomplete,
        }
    }

    /// Enters a stretch that overlaps none. `false`: there are too many gaps.
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

    /// Copies a range of the packet's frame to the place where it belongs.
    fn copy(&mut self, packet: &Packet<'_>, range: core::ops::Range<usize>, mut to: usize) {
        let mut at = 0;
        for piece in packet.frame.pieces() {
            let from = range.start.saturating_sub(at).min(piece.len());
            let until = range.end.saturating_sub(at).min(piece.len());
            if from < until {
                piece.for_each_piece_of(from..until, |octets| {
                    if let Some(room) = self.octets.get_mut(to..to + octets.len()) {
                        room.copy_from_slice(octets);
                    }
                    to += octets.len();
                });
            }
            at += piece.len();
        }
    }

    /// The whole datagram as a frame. `None` where no packet is so long.
    fn frame(self, to_mac: Mac) -> Option<Batch> {
        let Key { source, destination, protocol, .. } = self.key;
        let ends = Ends { from_mac: self.mac, to_mac, from: source, to: destination };
        let len = ends.header_len() + self.octets.len();
        let mut batch = Batch::with_capacity(1, len);
        let offset = batch.reserve(len)?;
        let frame = batch.scratch_mut(offset..offset + len).ok()?;
        frame.get_mut(ends.header_len()..)?.copy_from_slice(&self.octets);
        ends.write(frame, protocol, self.octets.len(), 0)?;
        batch.push_contiguous(offset, len, OffloadMeta::PLAIN).ok()?;
        Some(batch)
    }
}

#[cfg(test)]
mod tests;
