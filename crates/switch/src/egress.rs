//! Egress processing: segments and checksums frames that the egress port cannot take whole.
//!
//! # Theory of operation
//!
//! A frame keeps its blank checksum and its segments until it leaves by a port that cannot pass them
//! on. Only this module completes checksums and splits frames. So a port receives only frames that
//! conform to its [`PortCapabilities`].
//!
//! * A blank checksum is completed in the batch. The other receivers in the batch then get the
//!   completed frame too, which every port can take.
//! * A super-packet that the port does not take is split: the segments get headers of their own and
//!   share the payload. They are sent when the batch has no room for more, and are then removed;
//!   another port that the frame goes to gets segments of its own.
//! * A super-packet whose segments are longer than the port takes is dropped, split or not.
//! * In a switch, consecutive frames of one flow are joined if the port takes super-packets (`join`).
//!   In a patch both ends belong to one guest, whose kernel joins frames itself.
//!
//! # Limits
//!
//! A super-packet has at most 65 bytes of headers a segment and as few as 8 bytes of payload, so
//! 64 KiB become up to 8192 segments. A pass makes at most [`SEGMENTS_MAX`] segments for a port, which
//! suffices for the largest frames of a batch at usual sizes. Frames beyond that are dropped and
//! counted. After a port took nothing, no more frames are split for it.

mod join;
#[cfg(test)]
mod tests;

use core::hash::BuildHasher;
use core::ops::Range;
use std::hash::RandomState;

use ringfence_frame::batch::{Batch, FrameView};
use ringfence_frame::counters::{DropReason, PortCounters};
use ringfence_frame::port::{ChecksumOffload, PortCapabilities, SUPER_FRAME_MAX, Transmitted};
use ringfence_offload::blank::derive_place;
use ringfence_offload::octets::FrameBytes;
use ringfence_offload::packet::Network;
use ringfence_offload::segment::{HEADER_MAX, Segment, SegmentError, Segmenter};
use ringfence_offload::{ChecksumPlace, Gso, GsoKind, Layers, OffloadMeta};

use join::Joiner;

/// Maximum number of segments made for a port in one pass.
pub const SEGMENTS_MAX: usize = 4096;

/// Processing that a frame needs.
#[derive(Debug)]
enum Verdict {
    Pass,
    PassWhole,
    FinishChecksum,
    Split(Box<Segmenter>, Sums),
    Drop(DropReason),
}

/// Side that completes the checksums of segments.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sums {
    Port,
    Edge,
}

/// Egress port of a pass.
#[derive(Clone, Copy, Debug)]
pub struct Leaving<'a> {
    pub capabilities: &'a PortCapabilities,
    pub counters: &'a PortCounters,
    /// Set if small frames are joined for it.
    pub joins: bool,
}

/// Egress processor of a worker, with its storage.
#[derive(Debug, Default)]
pub struct Edge {
    ready: Vec<u32>,
    /// Number of segments made in this pass.
    made: usize,
    identifications: Identifications,
    joiner: Joiner,
}

impl Edge {
    /// Hands each of `frames` (indices into `batch`) to `send` as one that the port takes, or as several,
    /// in order; counts those that cannot be. `send` may be called several times; it says what became
    /// of the frames, and nothing when the port is of no more use.
    pub fn pass(
        &mut self,
        batch: &mut Batch,
        frames: &[u32],
        port: Leaving<'_>,
        mut send: impl FnMut(&Batch, &[u32]) -> Option<Transmitted>,
    ) {
        self.ready.clear();
        self.made = 0;
        let joined = self.joiner.join(batch, frames, port);
        self.pass_each(batch, joined.as_deref().unwrap_or(frames), port, &mut send);
        batch.drop_all_derived();
        if let Some(joined) = joined {
            self.joiner.recycle(joined);
        }
    }

    fn pass_each(
        &mut self,
        batch: &mut Batch,
        frames: &[u32],
        port: Leaving<'_>,
        send: &mut impl FnMut(&Batch, &[u32]) -> Option<Transmitted>,
    ) {
        for &index in frames {
            let Some(frame) = batch.get(index) else { continue };
            match judge(&frame, port.capabilities) {
                Verdict::Pass => self.ready.push(index),
                Verdict::PassWhole => {
                    port.counters.frames_whole.add(1);
                    self.ready.push(index);
                }
                Verdict::FinishChecksum if batch.finish_checksum(index).is_ok() => {
                    port.counters.checksums_computed.add(1);
                    self.ready.push(index);
                }
                Verdict::FinishChecksum => port.counters.dropped(DropReason::ChecksumUnfinished),
                Verdict::Split(segmenter, sums) => {
                    let splitting = Splitting { index, segmenter: *segmenter, sums };
                    if self.split(batch, splitting, port, send) == Flow::Stop {
                        return;
                    }
                }
                Verdict::Drop(reason) => port.counters.dropped(reason),
            }
        }
        self.hand_over(batch, send);
    }

    /// Hands over what is ready. What was made is gone afterwards.
    fn hand_over(
        &mut self,
        batch: &mut Batch,
        send: &mut impl FnMut(&Batch, &[u32]) -> Option<Transmitted>,
    ) -> Option<Transmitted> {
        let sent = if self.ready.is_empty() {
            Some(Transmitted::default())
        } else {
            send(batch, &self.ready)
        };
        self.ready.clear();
        batch.drop_derived();
        sent
    }

    fn split(
        &mut self,
        batch: &mut Batch,
        mut splitting: Splitting,
        port: Leaving<'_>,
        send: &mut impl FnMut(&Batch, &[u32]) -> Option<Transmitted>,
    ) -> Flow {
        let counters = port.counters;
        let segments = usize::try_from(splitting.segmenter.segments()).unwrap_or(usize::MAX);
        if segments > SEGMENTS_MAX - self.made {
            counters.dropped(DropReason::SegmentLimit);
            return Flow::Continue;
        }
        self.made += segments;
        splitting.segmenter = splitting.segmenter.with_fragment_id(self.identifications.next());
        counters.frames_segmented.add(1);
        loop {
            if batch.derivable() == 0 {
                let Some(sent) = self.hand_over(batch, send) else { return Flow::Stop };
                if sent.sent == 0 {
                    let left = splitting.segmenter.remaining();
                    counters.dropped_many(DropReason::PortFull, left.into());
                    return Flow::Continue;
                }
            }
            match splitting.next(batch) {
                Ok(Some(derived)) => self.ready.push(derived),
                Ok(None) => return Flow::Continue,
                Err(_) => {
                    counters.dropped(DropReason::BadOffload);
                    return Flow::Continue;
                }
            }
            counters.segments_made.add(1);
            if splitting.sums == Sums::Edge {
                counters.checksums_computed.add(1);
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Flow {
    Continue,
    Stop,
}

/// Super-packet under segmentation.
struct Splitting {
    index: u32,
    segmenter: Segmenter,
    sums: Sums,
}

impl Splitting {
    /// Adds the next segment to the batch.
    fn next(&mut self, batch: &mut Batch) -> Result<Option<u32>, SegmentError> {
        let mut header = [0; HEADER_MAX];
        let segment = match (self.sums, batch.get(self.index)) {
            (Sums::Port, _) => self.segmenter.next_partial(&mut header)?,
            (Sums::Edge, Some(frame)) => {
                self.segmenter.next_complete(&mut header, &mut Octets(frame))?
            }
            (Sums::Edge, None) => None,
        };
        let Some(Segment { header_len, payload, meta }) = segment else { return Ok(None) };
        let narrow = |octet| usize::try_from(octet).unwrap_or(usize::MAX);
        let payload = narrow(payload.start)..narrow(payload.end);
        // There is room for it, and the segmenter stays inside the frame.
        Ok(batch.derive(self.index, &header[..header_len], payload, meta).ok())
    }
}

/// Bytes of a frame, as input of a checksum.
struct Octets<'a>(FrameView<'a>);

impl FrameBytes for Octets<'_> {
    fn show(&mut self, range: Range<u32>, mut look: impl FnMut(&[u8])) {
        let narrow = |octet| usize::try_from(octet).unwrap_or(usize::MAX);
        let (start, end) = (narrow(range.start), narrow(range.end));
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

/// Identifications for fragments over IPv6: not to be predicted, and unlikely to repeat soon.
#[derive(Debug, Default)]
struct Identifications {
    key: RandomState,
    made: u64,
}

impl Identifications {
    fn next(&mut self) -> u32 {
        self.made = self.made.wrapping_add(1);
        let [a, b, c, d, ..] = self.key.hash_one(self.made).to_le_bytes();
        u32::from_le_bytes([a, b, c, d])
    }
}

fn judge(frame: &FrameView<'_>, capabilities: &PortCapabilities) -> Verdict {
    let meta = frame.meta();
    if let Some(gso) = meta.gso {
        return judge_super(frame, meta, gso, capabilities);
    }
    if frame.len() > capabilities.frame_max() {
        return Verdict::Drop(DropReason::TooLong);
    }
    match meta.checksum.place() {
        Some(place) if !takes_blank(layers(frame).as_ref(), place, capabilities.checksum) => {
            Verdict::FinishChecksum
        }
        _ => Verdict::Pass,
    }
}

fn judge_super(
    frame: &FrameView<'_>,
    meta: OffloadMeta,
    gso: Gso,
    capabilities: &PortCapabilities,
) -> Verdict {
    // Who sent it said what it is, and that was checked.
    let bad = Verdict::Drop(DropReason::BadOffload);
    let (Some(layers), Some(place)) = (layers(frame), meta.checksum.place()) else { return bad };
    let headers = match (gso.kind, layers.transport_offset()) {
        (GsoKind::UdpFragment, Some(transport)) => transport,
        _ => layers.header_len(),
    };
    let longest = capabilities.frame_max();
    if usize::from(headers) + usize::from(gso.size) > longest {
        return Verdict::Drop(DropReason::TooLong);
    }
    let blank = takes_blank(Some(&layers), place, capabilities.checksum);
    let fits =
        frame.len() <= longest || capabilities.scatter_gather && frame.len() <= SUPER_FRAME_MAX;
    if blank && fits && capabilities.gso.takes(gso.kind, gso.ecn) {
        return Verdict::PassWhole;
    }
    // The checksum of a fragmented datagram is of all fragments.
    let sums = if blank && gso.kind != GsoKind::UdpFragment { Sums::Port } else { Sums::Edge };
    match Segmenter::new(frame.header(), &layers, meta) {
        Ok(segmenter) => Verdict::Split(Box::new(segmenter), sums),
        Err(_) => bad,
    }
}

fn layers(frame: &FrameView<'_>) -> Option<Layers> {
    let frame_len = u32::try_from(frame.len()).ok()?;
    Layers::parse(frame.header(), frame_len).ok()
}

/// Whether a port with this offload can pass on that the checksum at `place` is blank.
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
