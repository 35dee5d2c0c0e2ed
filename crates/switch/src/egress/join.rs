//! Receive coalescing (GRO in Linux): joins small frames for a port that takes super-packets.
//!
//! # Theory of operation
//!
//! A sender without segmentation offload hands over a frame for every 1448 octets; each then costs a
//! slot, a copy and a walk through the receiver's kernel. Where the frames of one turn continue each
//! other and the port that they leave by takes super-packets, they are joined first: a private header,
//! and the payload of all of them where it lies ([`ringfence_offload::coalesce`] has the rules, which
//! are Linux's: splitting the packet again gives the same frames). Nothing waits for a later turn.
//!
//! # Checksums
//!
//! A joined frame leaves with a blank checksum, which tells the receiver that the data is good. So a
//! frame joins only if its own checksum was blank (its sender vouches for it, and a receiver would
//! have taken its word anyway), was verified by whoever we trust, or is found right here by summing.
//! netif's "data validated" of a guest does not count: it is the guest's word about itself
//! (`ringfence_net::netback`). A damaged frame goes on alone, damaged.
//!
//! # Where there is nothing to join
//!
//! Most turns have nothing to join, and are to pay next to nothing for it. [`Joiner::promising`] looks
//! at a few octets of each header and marks the frame's flow in a small table of bits; only a frame whose
//! flow was marked before, by one that can be continued, starts the real work.

use ringfence_frame::batch::{Batch, FRAMES_DEFAULT, FrameView};
use ringfence_frame::port::{ChecksumOffload, PortCapabilities, SUPER_FRAME_MAX};
use ringfence_offload::GsoKind;
use ringfence_offload::coalesce::{Coalescer, Limits, Packet};

use super::{Leaving, Octets, layers};

const ETHERTYPE_VLAN: [u16; 2] = [0x8100, 0x88a8];
const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const TCP: u8 = 6;
const UDP: u8 = 17;
/// FIN, SYN, RST, PSH and URG: a frame with one of them is continued by none.
const ENDING: u8 = 0x2f;

/// Joiner of the frames of one pass.
#[derive(Debug)]
pub(super) struct Joiner {
    coalescer: Coalescer,
    marks: Marks,
    joined: Vec<u32>,
}

/// Flows seen, one bit each; two that share a bit cost some work in vain.
#[derive(Debug, Default)]
struct Marks([u64; 8]);

impl Marks {
    fn place(flow: u32) -> (usize, u64) {
        let spread = flow.wrapping_mul(0x9e37_79b1) >> 23;
        ((spread >> 6) as usize & 7, 1 << (spread & 63))
    }

    fn has(&self, flow: u32) -> bool {
        let (word, bit) = Self::place(flow);
        self.0[word] & bit != 0
    }

    fn add(&mut self, flow: u32) {
        let (word, bit) = Self::place(flow);
        self.0[word] |= bit;
    }
}

impl Default for Joiner {
    fn default() -> Joiner {
        let limits = Limits {
            frames: FRAMES_DEFAULT,
            packet_len: u32::try_from(SUPER_FRAME_MAX).unwrap_or(0),
            ..Limits::default()
        };
        Joiner { coalescer: Coalescer::new(limits), marks: Marks::default(), joined: Vec::new() }
    }
}

impl Joiner {
    /// Returns the frames to send in place of `frames`, or `None` if none is to be joined. Joined frames
    /// stay in the batch until all derived frames are dropped.
    pub(super) fn join(
        &mut self,
        batch: &mut Batch,
        frames: &[u32],
        port: Leaving<'_>,
    ) -> Option<Vec<u32>> {
        let wanted = wanted(port.capabilities).filter(|_| port.joins && frames.len() > 1)?;
        if !self.promising(batch, frames, &wanted) {
            return None;
        }
        let mut joined = core::mem::take(&mut self.joined);
        joined.clear();
        self.coalescer.set_limits(wanted);
        for round in frames.chunks(FRAMES_DEFAULT) {
            self.round(batch, round, port, &mut joined);
        }
        batch.keep_derived();
        Some(joined)
    }

    /// Recycles the list that [`Joiner::join`] returned.
    pub(super) fn recycle(&mut self, joined: Vec<u32>) {
        self.joined = joined;
    }

    /// Returns `true` if two frames may belong together, by a check of their headers only.
    fn promising(&mut self, batch: &Batch, frames: &[u32], wanted: &Limits) -> bool {
        self.marks = Marks::default();
        for frame in batch.select(frames) {
            let Some(Glance { flow, ends }) = glance(&frame, wanted) else { continue };
            if self.marks.has(flow) {
                return true;
            }
            if !ends {
                self.marks.add(flow);
            }
        }
        false
    }

    fn round(
        &mut self,
        batch: &mut Batch,
        round: &[u32],
        port: Leaving<'_>,
        joined: &mut Vec<u32>,
    ) {
        self.coalescer.clear();
        let longest = port.capabilities.frame_max();
        for &index in round {
            let Some(frame) = batch.get(index) else { continue };
            // One that is too long is to be dropped alone.
            let fits = frame.meta().gso.is_some() || frame.len() <= longest;
            let layers = if fits { layers(&frame) } else { None };
            let (header, meta) = (frame.header(), frame.meta());
            let octets = &mut Octets(frame);
            // There is room for as many as a round has.
            let _ = self.coalescer.push(index, header, layers.as_ref(), meta, octets);
        }
        for packet in self.coalescer.finish() {
            let merged = match packet {
                Packet::Alone(index) => {
                    joined.push(index);
                    continue;
                }
                Packet::Merged(merged) => merged,
            };
            let members = merged.members().map(|member| {
                let octet = |at| usize::try_from(at).unwrap_or(usize::MAX);
                (member.frame, octet(member.payload.start)..octet(member.payload.end))
            });
            match batch.join(merged.header, members, merged.meta) {
                Ok(index) => {
                    port.counters.frames_coalesced.add(merged.frames.into());
                    joined.push(index);
                }
                // In too many pieces, or too many already: they go on as they came.
                Err(_) => joined.extend(merged.members().map(|member| member.frame)),
            }
        }
    }
}

/// Returns the coalescing limits for a port, or `None` if it takes no super-packets.
fn wanted(capabilities: &PortCapabilities) -> Option<Limits> {
    let (ipv4, ipv6, any) = match capabilities.checksum {
        ChecksumOffload::None => return None,
        ChecksumOffload::Netif { ipv4, ipv6 } => (ipv4, ipv6, false),
        ChecksumOffload::Any => (true, true, true),
    };
    let takes = |kind| capabilities.scatter_gather && capabilities.gso.takes(kind, false);
    let limits = Limits {
        tcp_v4: ipv4 && takes(GsoKind::TcpV4),
        tcp_v6: ipv6 && takes(GsoKind::TcpV6),
        udp: any && takes(GsoKind::Udp),
        packet_len: u32::try_from(SUPER_FRAME_MAX).unwrap_or(0),
        ..Limits::default()
    };
    (limits.tcp_v4 || limits.tcp_v6 || limits.udp).then_some(limits)
}

/// Summary of a header.
struct Glance {
    /// Hash of addresses and ports.
    flow: u32,
    /// Set if no frame can continue this one.
    ends: bool,
}

/// Summarises the header of a frame; returns `None` if the frame cannot be joined.
fn glance(frame: &FrameView<'_>, wanted: &Limits) -> Option<Glance> {
    let header = frame.header();
    let mut at = 14;
    let mut ethertype = half(header, 12)?;
    for _ in 0..2 {
        if ETHERTYPE_VLAN.contains(&ethertype) {
            ethertype = half(header, at + 2)?;
            at += 4;
        }
    }
    let (protocol, addresses, transport, tcp) = match ethertype {
        ETHERTYPE_IPV4 => {
            let length = usize::from(*header.get(at)? & 15) * 4;
            (*header.get(at + 9)?, (at + 12, at + 16), at + length, wanted.tcp_v4)
        }
        ETHERTYPE_IPV6 => (*header.get(at + 6)?, (at + 20, at + 36), at + 40, wanted.tcp_v6),
        _ => return None,
    };
    let (length, ends) = match protocol {
        TCP if tcp => {
            let flags = *header.get(transport + 13)?;
            (usize::from(*header.get(transport + 12)? >> 4) * 4, flags & ENDING != 0)
        }
        UDP if wanted.udp => (8, false),
        _ => return None,
    };
    // Without payload there is nothing to continue, or to continue with.
    if frame.len() <= transport + length {
        return None;
    }
    let word = |at| Some(u32::from(half(header, at)?) << 16 | u32::from(half(header, at + 2)?));
    let flow = word(addresses.0)?.rotate_left(7) ^ word(addresses.1)?.rotate_left(19);
    Some(Glance { flow: flow ^ word(transport)?, ends })
}

fn half(header: &[u8], at: usize) -> Option<u16> {
    let octets = header.get(at..at + 2)?;
    Some(u16::from(octets[0]) << 8 | u16::from(octets[1]))
}
