//! Coalescing: joins packets of the wire into super-packets (GRO in Linux).
//!
//! # Theory of operation
//!
//! A worker receives and forwards frames in rounds; a [`Coalescer`] sits in between. The worker
//! [pushes](Coalescer::push) each frame of the round. A frame that continues a flow joins that flow's
//! packet; any other frame begins its own packet. [`Coalescer::finish`] yields the packets at the end of
//! the round. No frame is held longer than its round, so there are no timers and latency does not grow.
//!
//! No payload is moved. A joined packet is a private header and a list of frames with the ranges of their
//! payload. The header is the first frame's, with new lengths and flags and a blank checksum.
//!
//! # Which frames join
//!
//! The rules are Linux's (`inet_gro_receive`, `ipv6_gro_receive`, `tcp_gro_receive`,
//! `udp_gro_receive_segment`). Their aim: segmenting the packet again gives the same frames.
//!
//! * The headers are equal byte by byte, link header and options included, except for lengths,
//!   checksums, sequence number, IPv4 identification and some TCP flags.
//! * TCP: the sequence number continues the packet, and the payload is not empty and not longer than the
//!   first one's. SYN, RST and URG never join; CWR only begins a packet. A short segment, PSH or FIN ends
//!   the packet. Super-packets join if their segment size is the same.
//! * UDP, if enabled: whole datagrams of the same length with a checksum. A shorter one ends the packet. A
//!   packet has at most [`MAX_UDP_DATAGRAMS`].
//! * IPv4 identification: incremented by one each time, or, if fragmentation is forbidden, always the same.
//! * The checksum is blank, known to be right, or found right by summing. A damaged frame must not become
//!   part of a packet that is marked as correct.
//! * No fragments, no padding, no IPv6 routing header with segments left.
//!
//! Stricter than Linux: IPv6 flow labels and TCP urgent pointers must be equal. TCP payloads under
//! [`MIN_SEGMENT_SIZE`](crate::accept::MIN_SEGMENT_SIZE) bytes begin no packet, because a receiver that
//! uses [`accept`](crate::accept) would refuse it. Less strict: equal IPv4 options are allowed.
//!
//! # Order
//!
//! Packets appear in the order of their first frames. A frame that belongs to a flow but cannot join closes
//! the flow's packet. So frames of one flow never overtake each other; frames of different flows may.
//!
//! # Limits
//!
//! [`Coalescer::new`] allocates all storage, which never grows. A table with sets of [`SET`] entries finds
//! open flows and evicts the oldest entry of a full set. Flows made to collide lose only their own joining
//! and cost at most [`SET`] comparisons per frame.

mod candidate;
mod join;
mod limits;
mod packets;
mod table;
#[cfg(test)]
mod tests;

use std::ops::Range;

use crate::frame_bytes::FrameBytes;
use crate::meta::OffloadMeta;
use crate::packet::{Layers, tcp_flags};
use ringfence_base::numbers::bounded;

use candidate::{Candidate, Class, classify};
use join::Join;
pub use limits::Limits;
pub use packets::{Member, Members, Merged, Packet, Packets};
pub use table::SET;
use table::Table;

/// Maximum datagrams in one UDP super-packet (Linux `UDP_GRO_CNT_MAX`).
pub const MAX_UDP_DATAGRAMS: u32 = 64;

/// Header bytes reserved per packet on average; a round of longer headers joins fewer frames.
const HEADER_ROOM: usize = 128;

/// Error: the round is full, call [`Coalescer::finish`] first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("all {limit} frames of the round are in use")]
pub struct RoundFull {
    /// Maximum frames of a round.
    pub limit: usize,
}

/// Frame in a packet.
#[derive(Clone, Copy, Debug)]
struct Entry {
    frame: u32,
    payload: (u32, u32),
    /// Index of the packet's next entry.
    next: Option<u32>,
}

/// Packet that may still grow.
#[derive(Clone, Debug)]
struct Group {
    first: u32,
    last: u32,
    frames: u32,
    /// Range of the first frame's header, empty if no frame may join.
    header: Range<usize>,
    join: Option<Join>,
    meta: OffloadMeta,
}

/// Coalescer for the frames of a round. The [module](self) has the rules.
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
/// // Two TCP segments of a flow, 1000 bytes each, with verified checksums.
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
    /// Allocates storage for rounds within `limits`.
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

    /// Applies other limits from the next round on; call it between rounds. `frames` and `flows` keep the
    /// values given to [`Coalescer::new`], because the storage does not change.
    pub fn set_limits(&mut self, limits: Limits) {
        let Limits { frames, flows, .. } = self.limits;
        self.limits = Limits { frames, flows, ..limits };
    }

    /// Returns the number of frames in the round so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns `true` if the round has no frames so far.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Adds the next frame of the round.
    ///
    /// `frame` is the caller's index for it. `headers` are its first bytes and `layers` their parsed form, or
    /// `None` if they did not parse. `meta` was [accepted](crate::accept). `frame_bytes` is read only if the
    /// checksum is neither blank nor verified.
    ///
    /// # Errors
    /// Returns [`RoundFull`] and changes nothing.
    pub fn push(
        &mut self,
        frame: u32,
        headers: &[u8],
        layers: Option<&Layers>,
        meta: OffloadMeta,
        frame_bytes: &mut impl FrameBytes,
    ) -> Result<(), RoundFull> {
        if self.entries.len() >= self.limits.frames {
            return Err(RoundFull { limit: self.limits.frames });
        }
        let class = match layers {
            Some(layers) => classify(headers, layers, meta, &self.limits, frame_bytes),
            None => Class::NoFlow,
        };
        match class {
            Class::NoFlow => self.begin(frame, None),
            Class::Flow { flow, candidate } => {
                let open = self.table.find(flow.hash, |group| {
                    let group = &self.groups[group as usize];
                    let header = &self.headers[group.header.clone()];
                    group.join.as_ref().is_some_and(|join| flow.matches(header, join.shape))
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

    /// Adds the frame to the packet `open` if it continues that packet. Returns `true` if it joined.
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

    /// Begins a packet with the frame; returns its index if other frames may join it.
    fn begin(&mut self, frame: u32, candidate: Option<&Candidate<'_>>) -> Option<u32> {
        let entry = index(self.entries.len());
        let payload = candidate.map_or((0, 0), |candidate| candidate.payload);
        self.entries.push(Entry { frame, payload, next: None });
        let start = self.headers.len();
        let candidate = candidate.filter(|candidate| {
            candidate.can_begin_packet()
                && candidate.header.len() <= self.headers.capacity() - start
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

    /// Ends the round and yields its packets. [`Coalescer::clear`] begins the next round.
    pub fn finish(&mut self) -> Packets<'_> {
        for group in &mut self.groups {
            if let Some(join) = group.join.as_ref().filter(|_| group.frames > 1) {
                let header = &mut self.headers[group.header.clone()];
                group.meta = join.finish_header(header);
            }
        }
        self.table.clear();
        Packets::new(&self.groups, &self.entries, &self.headers)
    }

    /// Discards the round and keeps the storage.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.groups.clear();
        self.headers.clear();
        self.table.clear();
    }
}

/// Converts the index of an entry or group. A round cannot reach 2^32 frames: each takes more than a byte
/// of memory.
#[inline]
fn index(at: usize) -> u32 {
    bounded(at, u32::MAX)
}

/// TCP flags that are not compared, because they belong to single segments.
const SEGMENT_FLAGS: u8 = tcp_flags::CWR | tcp_flags::FIN | tcp_flags::PSH;
