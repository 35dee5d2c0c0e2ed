//! Joining packets of the wire into super-packets (what Linux calls GRO).
//!
//! # Theory of operation
//!
//! A data plane works in rounds: it receives a batch of frames and hands them on. A [`Coalescer`]
//! sits in between. Each frame of the round is [pushed](Coalescer::push); one that continues a flow
//! joins the packet of that flow, any other begins a packet of its own; at the round's end
//! [`Coalescer::finish`] yields the packets. Nothing is held back longer than its round, so there are
//! no timers, and latency does not grow.
//!
//! No payload is touched. A joined packet is a private header (the first frame's, lengths and flags
//! redone, checksum blank) and a list of the frames and the ranges in them whose octets follow.
//!
//! # Which frames join
//!
//! Linux's rules (`inet_gro_receive`, `ipv6_gro_receive`, `tcp_gro_receive`,
//! `udp_gro_receive_segment`), with one aim: segmenting the packet again gives the same frames.
//!
//! * The headers are equal octet by octet, link header and options included, but for lengths,
//!   checksums, sequence number, IPv4 identification and some TCP flags.
//! * TCP: the sequence number is the next, the payload not empty and not longer than the first one's;
//!   SYN, RST and URG never join, CWR only begins; a short segment, PSH or FIN end the packet. Frames
//!   that are super-packets themselves join if their segment size is the same.
//! * UDP, if asked for: whole datagrams with a checksum, of the same size; a shorter one ends the
//!   packet; at most [`MAX_UDP_DATAGRAMS`].
//! * IPv4 identification: one more each time, or, where fragments are forbidden, always the same.
//! * The checksum is blank, or known to be right, or found to be right by summing: a damaged frame must
//!   not get a mark that says it is fine.
//! * No fragments, no padding, no IPv6 routing header under way.
//!
//! Stricter than Linux: IPv6 flow labels and TCP urgent pointers must be equal, TCP payloads under
//! [`MIN_SEGMENT_SIZE`](crate::accept::MIN_SEGMENT_SIZE) octets begin nothing (no receiver that uses
//! [`accept`](crate::accept) would take the packet). Less strict: IPv4 options, if equal, do no harm.
//!
//! # Order
//!
//! Packets come out in the order of their first frames. A frame that belongs to a flow but cannot join
//! its packet closes it. So frames of one flow never overtake each other; frames of different flows may.
//!
//! # What bounds it
//!
//! All storage is allocated by [`Coalescer::new`] and never grows. Open flows are found in a table
//! of sets of [`SET`] entries, the oldest of which makes room: flows made to collide cost their own
//! joining, and at most [`SET`] comparisons a frame.

mod candidate;
mod join;
mod packets;
mod table;
#[cfg(test)]
mod tests;

use std::ops::Range;

use crate::meta::OffloadMeta;
use crate::octets::FrameOctets;
use crate::packet::{Layers, tcp_flags};

use candidate::{Candidate, Class, classify};
use join::Join;
pub use packets::{Member, Members, Merged, Packet, Packets};
pub use table::SET;
use table::Table;

/// Datagrams in one UDP super-packet, at most (Linux `UDP_GRO_CNT_MAX`).
pub const MAX_UDP_DATAGRAMS: u32 = 64;

/// Octets of header kept for a packet, on average; a round of longer ones joins fewer frames.
const HEADER_ROOM: usize = 128;

/// What is joined, and how much of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Frames in a round.
    pub frames: usize,
    /// Flows that can be open at a time, rounded up to whole sets of [`SET`].
    pub flows: usize,
    /// Octets of the longest frame made, its headers included; IP's own limit applies too.
    pub packet_len: u32,
    /// Frames in one packet, at most.
    pub packet_frames: u32,
    /// Whether TCP over IPv4 is joined: the leaving port takes such super-packets.
    pub tcp_v4: bool,
    /// Whether TCP over IPv6 is joined.
    pub tcp_v6: bool,
    /// Whether UDP is joined. Not every receiver of datagrams expects them so; Linux leaves it off.
    pub udp: bool,
}

impl Default for Limits {
    /// Rounds of 64 frames, 64 flows, TCP only, frames of at most 65535 octets.
    fn default() -> Self {
        Self {
            frames: 64,
            flows: 64,
            packet_len: 65_535,
            packet_frames: 64,
            tcp_v4: true,
            tcp_v6: true,
            udp: false,
        }
    }
}

/// The round has as many frames as it can hold: call [`Coalescer::finish`] first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("all {limit} frames of the round are in use")]
pub struct RoundFull {
    /// Frames a round can hold.
    pub limit: usize,
}

/// A frame in a packet.
#[derive(Clone, Copy, Debug)]
struct Entry {
    frame: u32,
    payload: (u32, u32),
    /// The next one of the same packet.
    next: Option<u32>,
}

/// A packet in the making.
#[derive(Clone, Debug)]
struct Group {
    first: u32,
    last: u32,
    frames: u32,
    /// The first frame's header, where others may join.
    header: Range<usize>,
    join: Option<Join>,
    meta: OffloadMeta,
}

/// Joins the frames of a round. See the [module](self).
///
/// ```
/// use ringfence_offload::coalesce::{Coalescer, Limits, Packet};
/// use ringfence_offload::{Checksum, Layers, OffloadMeta};
///
/// # let mut frame = vec![0u8; 1054];
/// # frame[12..14].copy_from_slice(&[8, 0]);
/// # frame[14..18].copy_from_slice(&[0x45, 0, 4, 16]);
/// # frame[22..24].copy_from_slice(&[64, 6]);
/// # frame[46] = 0x50;
/// # let mut second = frame.clone();
/// # second[40..42].copy_from_slice(&1000u16.to_be_bytes());
/// # second[18..20].copy_from_slice(&[0, 1]);
/// # for frame in [&mut frame, &mut second] {
/// #     let sum = ringfence_offload::checksum::internet_checksum(&frame[14..34]);
/// #     frame[24..26].copy_from_slice(&sum.to_be_bytes());
/// # }
/// // Two TCP segments of a flow, 1000 octets each, whose checksums were found right.
/// let mut coalescer = Coalescer::new(Limits::default());
/// let meta = OffloadMeta { checksum: Checksum::Verified, gso: None };
/// for (index, bytes) in [(0, &frame[..]), (1, &second[..])] {
///     let layers = Layers::parse(bytes, 1054)?;
///     coalescer.push(index, bytes, Some(&layers), meta, &mut { bytes })?;
/// }
/// let mut packets = coalescer.finish();
/// let Some(Packet::Merged(packet)) = packets.next() else { panic!("they join") };
/// assert_eq!((packet.header.len(), packet.len), (54, 2054));
/// assert_eq!(packet.meta.gso.map(|gso| gso.size), Some(1000));
/// assert!(packet.members().map(|member| member.frame).eq([0, 1]));
/// assert!(packets.next().is_none());
/// # drop(packets);
/// coalescer.clear();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Coalescer {
    limits: Limits,
    entries: Vec<Entry>,
    groups: Vec<Group>,
    headers: Vec<u8>,
    table: Table,
}

impl Coalescer {
    /// Storage for rounds within `limits`.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            entries: Vec::with_capacity(limits.frames),
            groups: Vec::with_capacity(limits.frames),
            headers: Vec::with_capacity(limits.frames.saturating_mul(HEADER_ROOM)),
            table: Table::new(limits.flows),
        }
    }

    /// Joins within other limits from the next round on: call it between rounds. The storage stays as
    /// [`Coalescer::new`] made it, and `frames` and `flows` with it.
    pub fn set_limits(&mut self, limits: Limits) {
        let Limits { frames, flows, .. } = self.limits;
        self.limits = Limits { frames, flows, ..limits };
    }

    /// Frames in the round so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether the round has no frames so far.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Takes the next frame of the round.
    ///
    /// `frame` is the caller's name for it. `headers` are its first octets and `layers` what they were
    /// parsed to, or `None` if they were not. `meta` was [accepted](crate::accept). `octets` are read
    /// only if the checksum is neither blank nor verified.
    ///
    /// # Errors
    /// [`RoundFull`]; nothing has changed.
    pub fn push(
        &mut self,
        frame: u32,
        headers: &[u8],
        layers: Option<&Layers>,
        meta: OffloadMeta,
        octets: &mut impl FrameOctets,
    ) -> Result<(), RoundFull> {
        if self.entries.len() >= self.limits.frames {
            return Err(RoundFull { limit: self.limits.frames });
        }
        let class = match layers {
            Some(layers) => classify(headers, layers, meta, &self.limits, octets),
            None => Class::NoFlow,
        };
        match class {
            Class::NoFlow => self.begin(frame, None),
            Class::Flow { flow, candidate } => {
                let open = self.table.find(flow.hash, |group| {
                    let group = &self.groups[group as usize];
                    let header = &self.headers[group.header.clone()];
                    group.join.as_ref().is_some_and(|join| flow.is_that_of(header, join.shape))
                });
                let joined = match (open, &candidate) {
                    (Some(open), Some(candidate)) => self.join(frame, open, candidate),
                    _ => false,
                };
                if !joined {
                    if let Some(open) = open {
                        self.table.close(flow.hash, open);
                    }
                    let group = self.begin(frame, candidate.as_ref());
                    if let Some(group) = group {
                        self.table.open(flow.hash, group);
                    }
                }
                return Ok(());
            }
        };
        Ok(())
    }

    /// Adds the frame to the packet `open`, if it continues it.
    fn join(&mut self, frame: u32, open: u32, candidate: &Candidate<'_>) -> bool {
        let group = &mut self.groups[open as usize];
        let header = &self.headers[group.header.clone()];
        let Some(join) = group.join.as_mut().filter(|_| group.frames < self.limits.packet_frames)
        else {
            return false;
        };
        if !join.admits(header, candidate, self.limits.packet_len) {
            return false;
        }
        join.add(header, candidate);
        let index = index(self.entries.len());
        self.entries.push(Entry { frame, payload: candidate.payload, next: None });
        self.entries[group.last as usize].next = Some(index);
        group.last = index;
        group.frames += 1;
        if join.ended {
            self.table.close(candidate.flow.hash, open);
        }
        true
    }

    /// Begins a packet with the frame; its index if others may join it.
    fn begin(&mut self, frame: u32, candidate: Option<&Candidate<'_>>) -> Option<u32> {
        let entry = index(self.entries.len());
        let payload = candidate.map_or((0, 0), |candidate| candidate.payload);
        self.entries.push(Entry { frame, payload, next: None });
        let start = self.headers.len();
        let candidate = candidate.filter(|candidate| {
            candidate.begins() && candidate.header.len() <= self.headers.capacity() - start
        });
        if let Some(candidate) = candidate {
            self.headers.extend_from_slice(candidate.header);
        }
        self.groups.push(Group {
            first: entry,
            last: entry,
            frames: 1,
            header: start..self.headers.len(),
            join: candidate.map(Join::new),
            meta: OffloadMeta::PLAIN,
        });
        candidate.map(|_| index(self.groups.len() - 1))
    }

    /// Ends the round and yields its packets. [`Coalescer::clear`] begins the next one.
    pub fn finish(&mut self) -> Packets<'_> {
        for group in &mut self.groups {
            if let Some(join) = group.join.as_ref().filter(|_| group.frames > 1) {
                let header = &mut self.headers[group.header.clone()];
                group.meta = join.complete(header);
            }
        }
        self.table.clear();
        Packets::new(&self.groups, &self.entries, &self.headers)
    }

    /// Forgets the round, and keeps the storage.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.groups.clear();
        self.headers.clear();
        self.table.clear();
    }
}

/// The index of an entry or group. A round of more than 2^32 frames cannot be made: each takes more
/// than an octet.
fn index(at: usize) -> u32 {
    u32::try_from(at).unwrap_or(u32::MAX)
}

/// TCP flags that are not compared: they belong to single segments.
const SEGMENT_FLAGS: u8 = tcp_flags::CWR | tcp_flags::FIN | tcp_flags::PSH;
