//! Coalescing (GRO in Linux): joins small frames for an egress port that takes super-packets.
//!
//! # Theory of operation
//!
//! A sender without segmentation offload sends a frame for every 1448 bytes. Each frame costs a slot, a
//! copy and a pass through the receiver's network stack. So consecutive frames of a flow in one batch are
//! joined if the egress port takes super-packets. The joined frame has a private header and refers to the
//! payload of all its members where it is. [`ringfence_offload::coalesce`] has the rules, which are those of
//! Linux: segmentation of the joined frame gives the same frames again. No frame waits for a later round.
//!
//! # Checksums
//!
//! A joined frame leaves with a blank checksum, by which the receiver accepts the data as intact. So a
//! frame is joined only if its checksum was blank, was verified by a trusted party, or is correct by a sum
//! over the frame made here. A blank checksum is accepted because the receiver would accept it in the
//! sender's own frame too. The "data validated" flag of a guest does not count, because it is the guest's
//! claim about its own frame (`ringfence_net::netback`). A damaged frame stays alone and damaged.
//!
//! # Batches without candidates
//!
//! Most batches have nothing to join and must not be slowed. [`Joiner::has_candidates`] reads a few bytes
//! of each header and marks the frame's flow in a small bit set. Only a second frame of a marked flow
//! starts the coalescer.

use ringfence_frame::batch::{Batch, FRAMES_DEFAULT, FrameView};
use ringfence_frame::port::{ChecksumOffload, PortCapabilities, SUPER_FRAME_MAX};
use ringfence_offload::GsoKind;
use ringfence_offload::coalesce::{Coalescer, Limits, Packet};
use ringfence_sys::numbers::{bounded, usize_from};

use super::{EgressPort, ViewBytes, layers};

const ETHERTYPE_VLAN: [u16; 2] = [0x8100, 0x88a8];
const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const TCP: u8 = 6;
const UDP: u8 = 17;
/// FIN, SYN, RST, PSH and URG: no frame continues a frame with one of these flags.
const ENDING_FLAGS: u8 = 0x2f;

/// Joiner of the frames for one egress port, with its storage.
#[derive(Debug)]
pub(super) struct Joiner {
    coalescer: Coalescer,
    flows: FlowSet,
    /// Storage of the list that [`Joiner::join`] returns.
    joined: Vec<u32>,
}

/// Bit set of flows. Two flows may share a bit, which costs a useless run of the coalescer.
#[derive(Debug, Default)]
struct FlowSet([u64; 8]);

impl FlowSet {
    /// Returns the word and the bit of a flow.
    fn position(flow: u32) -> (usize, u64) {
        let spread = flow.wrapping_mul(0x9e37_79b1) >> 23;
        ((spread >> 6) as usize & 7, 1 << (spread & 63))
    }

    fn contains(&self, flow: u32) -> bool {
        let (word, bit) = Self::position(flow);
        self.0[word] & bit != 0
    }

    fn insert(&mut self, flow: u32) {
        let (word, bit) = Self::position(flow);
        self.0[word] |= bit;
    }
}

impl Default for Joiner {
    fn default() -> Joiner {
        let limits = Limits {
            frames: FRAMES_DEFAULT,
            packet_len: bounded(SUPER_FRAME_MAX, u32::MAX),
            ..Limits::default()
        };
        Joiner { coalescer: Coalescer::new(limits), flows: FlowSet::default(), joined: Vec::new() }
    }
}

impl Joiner {
    /// Returns the frames to transmit in place of `frames`, or `None` if there are no candidates. Joined
    /// frames stay in the batch until all derived frames are removed.
    pub(super) fn join(
        &mut self,
        batch: &mut Batch,
        frames: &[u32],
        port: EgressPort<'_>,
    ) -> Option<Vec<u32>> {
        let limits =
            coalescing_limits(port.capabilities).filter(|_| port.joins && frames.len() > 1)?;
        if !self.has_candidates(batch, frames, &limits) {
            return None;
        }
        let mut joined = core::mem::take(&mut self.joined);
        joined.clear();
        self.coalescer.set_limits(limits);
        for chunk in frames.chunks(FRAMES_DEFAULT) {
            self.join_chunk(batch, chunk, port, &mut joined);
        }
        batch.keep_derived();
        Some(joined)
    }

    /// Keeps the storage of the list that [`Joiner::join`] returned.
    pub(super) fn recycle(&mut self, joined: Vec<u32>) {
        self.joined = joined;
    }

    /// Returns `true` if one frame may continue another, by a check of their headers only.
    fn has_candidates(&mut self, batch: &Batch, frames: &[u32], limits: &Limits) -> bool {
        self.flows = FlowSet::default();
        for frame in batch.select(frames) {
            let Some(HeaderSummary { flow, ends }) = summarise(&frame, limits) else { continue };
            if self.flows.contains(flow) {
                return true;
            }
            if !ends {
                self.flows.insert(flow);
            }
        }
        false
    }

    /// Joins at most [`FRAMES_DEFAULT`] frames and appends the resulting frames to `joined`.
    fn join_chunk(
        &mut self,
        batch: &mut Batch,
        chunk: &[u32],
        port: EgressPort<'_>,
        joined: &mut Vec<u32>,
    ) {
        self.coalescer.clear();
        let longest = port.capabilities.frame_max();
        for &index in chunk {
            let Some(frame) = batch.get(index) else { continue };
            // A frame that is too long for the port stays alone, so only that frame is dropped.
            let fits = frame.meta().gso.is_some() || frame.len() <= longest;
            let layers = if fits { layers(&frame) } else { None };
            let (header, meta) = (frame.header(), frame.meta());
            let bytes = &mut ViewBytes(frame);
            // The coalescer has room for all frames of a chunk.
            let _ = self.coalescer.push(index, header, layers.as_ref(), meta, bytes);
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
                (member.frame, usize_from(member.payload.start)..usize_from(member.payload.end))
            });
            match batch.join(merged.header, members, merged.meta) {
                Ok(index) => {
                    port.counters.frames_coalesced.add(merged.frames.into());
                    joined.push(index);
                }
                // The frame would have too many pieces, or the batch has no room: the members stay alone.
                Err(_) => joined.extend(merged.members().map(|member| member.frame)),
            }
        }
    }
}

/// Returns the coalescing limits for a port, or `None` if it takes no super-packets.
fn coalescing_limits(capabilities: &PortCapabilities) -> Option<Limits> {
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
        packet_len: bounded(SUPER_FRAME_MAX, u32::MAX),
        ..Limits::default()
    };
    (limits.tcp_v4 || limits.tcp_v6 || limits.udp).then_some(limits)
}

/// Summary of a frame's headers.
struct HeaderSummary {
    /// Hash of addresses and ports.
    flow: u32,
    /// Set if no frame can continue this one.
    ends: bool,
}

/// Summarises the headers of a frame. Returns `None` if the frame cannot be joined.
fn summarise(frame: &FrameView<'_>, limits: &Limits) -> Option<HeaderSummary> {
    let header = frame.header();
    let mut at = 14;
    let mut ethertype = read_u16(header, 12)?;
    for _ in 0..2 {
        if ETHERTYPE_VLAN.contains(&ethertype) {
            ethertype = read_u16(header, at + 2)?;
            at += 4;
        }
    }
    let (protocol, addresses, transport, tcp) = match ethertype {
        ETHERTYPE_IPV4 => {
            let length = usize::from(*header.get(at)? & 15) * 4;
            (*header.get(at + 9)?, (at + 12, at + 16), at + length, limits.tcp_v4)
        }
        ETHERTYPE_IPV6 => (*header.get(at + 6)?, (at + 20, at + 36), at + 40, limits.tcp_v6),
        _ => return None,
    };
    let (length, ends) = match protocol {
        TCP if tcp => {
            let flags = *header.get(transport + 13)?;
            (usize::from(*header.get(transport + 12)? >> 4) * 4, flags & ENDING_FLAGS != 0)
        }
        UDP if limits.udp => (8, false),
        _ => return None,
    };
    // A frame without payload neither continues another frame nor is continued.
    if frame.len() <= transport + length {
        return None;
    }
    let word =
        |at| Some(u32::from(read_u16(header, at)?) << 16 | u32::from(read_u16(header, at + 2)?));
    let flow = word(addresses.0)?.rotate_left(7) ^ word(addresses.1)?.rotate_left(19);
    Some(HeaderSummary { flow: flow ^ word(transport)?, ends })
}

fn read_u16(header: &[u8], at: usize) -> Option<u16> {
    let bytes = header.get(at..at + 2)?;
    Some(u16::from(bytes[0]) << 8 | u16::from(bytes[1]))
}
