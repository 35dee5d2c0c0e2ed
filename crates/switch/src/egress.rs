//! Egress processing: segments and checksums frames that the egress port cannot take whole.
//!
//! # Theory of operation
//!
//! A frame keeps its blank checksum and its GSO metadata until it leaves by a port that cannot pass them
//! on. Only this module completes checksums and segments frames. So a port receives only frames that
//! conform to its [`PortCapabilities`].
//!
//! ```text
//! frames for a port ─> join ─> decide ─┬─ pass ──────────────────────────┐
//!                                      ├─ complete the blank checksum ───┼─> ready ─> transmit
//!                                      ├─ segment (headers, checksums) ──┘
//!                                      └─ drop and count
//! ```
//!
//! * A blank checksum is completed in the batch. The other egress ports of the frame then get the
//!   completed frame too, which every port can take.
//! * A super-packet that the port does not take is segmented. The segments get headers of their own and
//!   share the payload. They are transmitted when the batch has no room for more, and are then removed.
//!   Another egress port of the frame gets segments of its own.
//! * A super-packet whose segments are longer than the port takes is dropped, segmented or not.
//! * In a switch, consecutive frames of one flow are joined if the port takes super-packets (`join`).
//!   In a patch both ends may belong to one guest, whose kernel joins frames itself, so the port's policy
//!   decides ([`PortPolicy::join_in_patch`](crate::forwarding::PortPolicy::join_in_patch)).
//!
//! # Limits
//!
//! A super-packet has at least 8 bytes of payload a segment, so 64 KiB become up to 8192 segments. One
//! call of [`EgressProcessor::process`] makes at most [`SEGMENTS_MAX`] segments, which suffices for the
//! largest frames of a batch at usual sizes. Frames beyond that are dropped and counted. If the batch is
//! full of segments and the port transmits none of them, the rest of that super-packet is dropped.

mod join;
#[cfg(test)]
mod tests;

use core::hash::BuildHasher;
use core::ops::{ControlFlow, Range};
use std::hash::RandomState;

use ringfence_frame::batch::{Batch, FrameView};
use ringfence_frame::counters::{DropReason, PortCounters};
use ringfence_frame::port::{ChecksumOffload, PortCapabilities, SUPER_FRAME_MAX, Transmitted};
use ringfence_offload::blank::derive_place;
use ringfence_offload::frame_bytes::FrameBytes;
use ringfence_offload::packet::Network;
use ringfence_offload::segment::{HEADER_MAX, Segment, SegmentError, Segmenter};
use ringfence_offload::{ChecksumPlace, Gso, GsoKind, Layers, OffloadMeta};
use ringfence_sys::numbers::usize_from;

use join::Joiner;

/// Maximum number of segments made for a port in one pass.
pub const SEGMENTS_MAX: usize = 4096;

/// Action that a frame needs at its egress port.
#[derive(Debug)]
enum Action {
    Pass,
    /// Pass of a super-packet, which is counted.
    PassWhole,
    CompleteChecksum,
    Segment(Box<Segmenter>, Checksums),
    Drop(DropReason),
}

/// State of the checksums of new segments.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Checksums {
    /// The port passes on that they are blank.
    Blank,
    Complete,
}

/// Egress port of one call of [`EgressProcessor::process`].
#[derive(Clone, Copy, Debug)]
pub struct EgressPort<'a> {
    pub capabilities: &'a PortCapabilities,
    pub counters: &'a PortCounters,
    /// Set if small frames are joined for this port.
    pub joins: bool,
}

/// Egress processor of a worker, with its storage.
#[derive(Debug, Default)]
pub struct EgressProcessor {
    /// Frames that are ready for transmission, as indices into the batch.
    ready: Vec<u32>,
    /// Number of segments made in this call.
    made: usize,
    fragment_ids: FragmentIds,
    joiner: Joiner,
}

impl EgressProcessor {
    /// Passes `frames` (indices into `batch`) to `transmit` in their order, each in a form that the port
    /// takes, as one frame or as several segments. Frames for which that is impossible are dropped and
    /// counted. `transmit` may be called several times. It returns the result of the transmission, or
    /// `None` if the port has a fault.
    pub fn process(
        &mut self,
        batch: &mut Batch,
        frames: &[u32],
        port: EgressPort<'_>,
        mut transmit: impl FnMut(&Batch, &[u32]) -> Option<Transmitted>,
    ) {
        self.ready.clear();
        self.made = 0;
        let joined = self.joiner.join(batch, frames, port);
        self.process_each(batch, joined.as_deref().unwrap_or(frames), port, &mut transmit);
        batch.drop_all_derived();
        if let Some(joined) = joined {
            self.joiner.recycle(joined);
        }
    }

    fn process_each(
        &mut self,
        batch: &mut Batch,
        frames: &[u32],
        port: EgressPort<'_>,
        transmit: &mut impl FnMut(&Batch, &[u32]) -> Option<Transmitted>,
    ) {
        for &index in frames {
            let Some(frame) = batch.get(index) else { continue };
            match action(&frame, port.capabilities) {
                Action::Pass => self.ready.push(index),
                Action::PassWhole => {
                    port.counters.frames_whole.add(1);
                    self.ready.push(index);
                }
                Action::CompleteChecksum if batch.finish_checksum(index).is_ok() => {
                    port.counters.checksums_computed.add(1);
                    self.ready.push(index);
                }
                Action::CompleteChecksum => port.counters.dropped(DropReason::ChecksumUnfinished),
                Action::Segment(segmenter, checksums) => {
                    let segmentation = Segmentation { index, segmenter: *segmenter, checksums };
                    if self.segment(batch, segmentation, port, transmit).is_break() {
                        return;
                    }
                }
                Action::Drop(reason) => port.counters.dropped(reason),
            }
        }
        self.flush(batch, transmit);
    }

    /// Transmits the ready frames and removes the derived ones from the batch. Returns `None` if the port
    /// has a fault.
    fn flush(
        &mut self,
        batch: &mut Batch,
        transmit: &mut impl FnMut(&Batch, &[u32]) -> Option<Transmitted>,
    ) -> Option<Transmitted> {
        let sent = if self.ready.is_empty() {
            Some(Transmitted::default())
        } else {
            transmit(batch, &self.ready)
        };
        self.ready.clear();
        batch.drop_derived();
        sent
    }

    /// Segments a super-packet and transmits whenever the batch has no room for more segments. Returns
    /// `Break` if the port has a fault.
    fn segment(
        &mut self,
        batch: &mut Batch,
        mut segmentation: Segmentation,
        port: EgressPort<'_>,
        transmit: &mut impl FnMut(&Batch, &[u32]) -> Option<Transmitted>,
    ) -> ControlFlow<()> {
        let counters = port.counters;
        let segments = usize_from(segmentation.segmenter.segments());
        if segments > SEGMENTS_MAX - self.made {
            counters.dropped(DropReason::SegmentLimit);
            return ControlFlow::Continue(());
        }
        self.made += segments;
        segmentation.segmenter = segmentation.segmenter.with_fragment_id(self.fragment_ids.next());
        counters.frames_segmented.add(1);
        loop {
            if batch.derivable() == 0 {
                let Some(sent) = self.flush(batch, transmit) else { return ControlFlow::Break(()) };
                if sent.sent == 0 {
                    let left = segmentation.segmenter.remaining();
                    counters.dropped_many(DropReason::PortFull, left.into());
                    return ControlFlow::Continue(());
                }
            }
            match segmentation.next(batch) {
                Ok(Some(derived)) => self.ready.push(derived),
                Ok(None) => return ControlFlow::Continue(()),
                Err(_) => {
                    counters.dropped(DropReason::BadOffload);
                    return ControlFlow::Continue(());
                }
            }
            counters.segments_made.add(1);
            if segmentation.checksums == Checksums::Complete {
                counters.checksums_computed.add(1);
            }
        }
    }
}

/// Segmentation in progress of one super-packet.
struct Segmentation {
    index: u32,
    segmenter: Segmenter,
    checksums: Checksums,
}

impl Segmentation {
    /// Derives the next segment in the batch and returns its index, or `None` after the last segment.
    fn next(&mut self, batch: &mut Batch) -> Result<Option<u32>, SegmentError> {
        let mut header = [0; HEADER_MAX];
        let segment = match (self.checksums, batch.get(self.index)) {
            (Checksums::Blank, _) => self.segmenter.next_partial(&mut header)?,
            (Checksums::Complete, Some(frame)) => {
                self.segmenter.next_complete(&mut header, &mut ViewBytes(frame))?
            }
            (Checksums::Complete, None) => None,
        };
        let Some(Segment { header_len, payload, meta }) = segment else { return Ok(None) };
        let payload = usize_from(payload.start)..usize_from(payload.end);
        // `derive` does not fail: the batch has room, and the segmenter stays inside the frame.
        Ok(batch.derive(self.index, &header[..header_len], payload, meta).ok())
    }
}

/// Bytes of a frame, as input of a checksum.
struct ViewBytes<'a>(FrameView<'a>);

impl FrameBytes for ViewBytes<'_> {
    fn show(&mut self, range: Range<u32>, mut look: impl FnMut(&[u8])) {
        let (start, end) = (usize_from(range.start), usize_from(range.end));
        let mut position = 0;
        for piece in self.0.pieces() {
            let here = position..position + piece.len();
            position = here.end;
            let (from, to) = (start.max(here.start), end.min(here.end));
            if from < to {
                piece.for_each_piece_of(from - here.start..to - here.start, &mut look);
            }
            if position >= end {
                return;
            }
        }
    }
}

/// Generator of IPv6 fragment identifications, which are unpredictable and unlikely to repeat soon.
#[derive(Debug, Default)]
struct FragmentIds {
    key: RandomState,
    made: u64,
}

impl FragmentIds {
    fn next(&mut self) -> u32 {
        self.made = self.made.wrapping_add(1);
        let [a, b, c, d, ..] = self.key.hash_one(self.made).to_le_bytes();
        u32::from_le_bytes([a, b, c, d])
    }
}

/// Returns the action that a frame needs at a port of these capabilities.
fn action(frame: &FrameView<'_>, capabilities: &PortCapabilities) -> Action {
    let meta = frame.meta();
    if let Some(gso) = meta.gso {
        return action_for_super_packet(frame, meta, gso, capabilities);
    }
    if frame.len() > capabilities.frame_max() {
        return Action::Drop(DropReason::TooLong);
    }
    match meta.checksum.place() {
        Some(place) if !takes_blank(layers(frame).as_ref(), place, capabilities.checksum) => {
            Action::CompleteChecksum
        }
        _ => Action::Pass,
    }
}

fn action_for_super_packet(
    frame: &FrameView<'_>,
    meta: OffloadMeta,
    gso: Gso,
    capabilities: &PortCapabilities,
) -> Action {
    // Unexpected: the GSO metadata of the sender was validated at ingress.
    let bad = Action::Drop(DropReason::BadOffload);
    let (Some(layers), Some(place)) = (layers(frame), meta.checksum.place()) else { return bad };
    let headers = match (gso.kind, layers.transport_offset()) {
        (GsoKind::UdpFragment, Some(transport)) => transport,
        _ => layers.header_len(),
    };
    let longest = capabilities.frame_max();
    if usize::from(headers) + usize::from(gso.size) > longest {
        return Action::Drop(DropReason::TooLong);
    }
    let blank = takes_blank(Some(&layers), place, capabilities.checksum);
    let fits =
        frame.len() <= longest || capabilities.scatter_gather && frame.len() <= SUPER_FRAME_MAX;
    if blank && fits && capabilities.gso.takes(gso.kind, gso.ecn) {
        return Action::PassWhole;
    }
    // The checksum of a fragmented datagram covers all fragments, so no port can complete it.
    let blank_segments = blank && gso.kind != GsoKind::UdpFragment;
    let checksums = if blank_segments { Checksums::Blank } else { Checksums::Complete };
    match Segmenter::new(frame.header(), &layers, meta) {
        Ok(segmenter) => Action::Segment(Box::new(segmenter), checksums),
        Err(_) => bad,
    }
}

fn layers(frame: &FrameView<'_>) -> Option<Layers> {
    let frame_len = u32::try_from(frame.len()).ok()?;
    Layers::parse(frame.header(), frame_len).ok()
}

/// Returns `true` if a port with this offload can pass on that the checksum at `place` is blank.
fn takes_blank(layers: Option<&Layers>, place: ChecksumPlace, offload: ChecksumOffload) -> bool {
    let (ipv4, ipv6) = match offload {
        ChecksumOffload::None => return false,
        ChecksumOffload::Any => return true,
        ChecksumOffload::Netif { ipv4, ipv6 } => (ipv4, ipv6),
    };
    let Some(layers) = layers else { return false };
    let version = match layers.network() {
        Network::Ipv4(_) => ipv4,
        Network::Ipv6(_) => ipv6,
        Network::Arp | Network::Other(_) => false,
    };
    version && derive_place(layers) == Ok(place)
}
