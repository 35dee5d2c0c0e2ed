//! Segmentation: splits a super-packet into packets of the wire.
//!
//! # Theory of operation
//!
//! A [`Segmenter`] is created from a super-packet's private headers and metadata. It yields one
//! [`Segment`] after the other: a header, written into the caller's storage, and the range of the
//! *original frame* that follows it. No payload is moved; completing checksums reads it once.
//!
//! The rules are Linux's (`tcp_gso_segment`, `__udp_gso_segment`, `inet_gso_segment`,
//! `ipv6_gso_segment`). `tests/kernel.rs` compares the bytes with a kernel's:
//!
//! * All bytes before the payload are repeated: Ethernet, tags, IPv4 options (including those that RFC
//!   791 allows in the first fragment only), IPv6 extension headers, TCP options.
//! * IPv4: total length and header checksum are recomputed; the identification rises by one per segment.
//!   IPv6: the payload length includes extension headers.
//! * TCP: the sequence number rises by the segment size. FIN and PSH remain on the last segment only, CWR
//!   on the first only; all other flags are repeated.
//! * UDP segmentation: each datagram has its own length, and a computed checksum of zero is sent as
//!   0xFFFF. There are at most [`MAX_UDP_SEGMENTS`](crate::accept::MAX_UDP_SEGMENTS).
//! * UDP fragmentation: the checksum of the whole datagram comes first. IPv4 fragments, or IPv6 fragment
//!   headers right before UDP, follow at multiples of 8 (the requested size is rounded down). All fragments
//!   have the same identification; "don't fragment" is cleared.
//! * A blank checksum starts from the super-packet's pseudo header sum, with only the length replaced. So
//!   the code need not understand IPv6 routing headers.
//!
//! Two deviations apply where Linux's bytes are no valid datagram: fragments of a datagram with IPv6
//! extension headers (Linux counts their bytes into the fragment offsets), and fragment sizes that are no
//! multiple of 8.
//!
//! # Limits
//!
//! [`Segmenter::new`] passes the request through [`accept`](crate::accept) again, so unaccepted metadata is
//! safe. The number of segments is known before the first one is made ([`Segmenter::segments`]) and is at
//! most [`MAX_SEGMENTS`]. Each segment takes at least one byte of payload.
//!
//! Tunnels and DCCP are not segmented; `accept` refuses them.

mod error;
#[cfg(test)]
mod tests;

use std::ops::Range;

use crate::accept::accept;
use crate::blank::reset_pseudo_header;
use crate::checksum::Accumulator;
use crate::checksum::incremental::replace;
use crate::checksum::partial::never_zero;
use crate::frame_bytes::{FrameBytes, add_range};
use crate::meta::{Checksum, Gso, GsoKind, OffloadMeta};
use crate::packet::{Layers, Network, Transport, protocol, tcp_flags};
use crate::rewrite::{IPV6_LEN, Shape, UDP_LEN, field, get_u16, get_u32, put_u16, put_u32};
use ringfence_base::numbers::{bounded, usize_from};

pub use error::SegmentError;

/// Maximum length of a segment's headers in bytes. Requests with headers of up to 248 bytes fit, the
/// fragment header added.
pub const HEADER_MAX: usize = 256;

/// Maximum segments of a super-packet: 64 KiB in the smallest accepted size.
pub const MAX_SEGMENTS: u32 = 65_535 / crate::accept::MIN_SEGMENT_SIZE as u32 + 1;

/// Length of an IPv6 fragment header in bytes.
const FRAGMENT_LEN: usize = 8;
/// "More fragments" flag in the 16 bits of IPv4's and IPv6's flags and offset.
const MORE_V4: u16 = 0x2000;
const MORE_V6: u16 = 1;

/// One packet of the wire: a written header, and payload that stays in place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Bytes written into the caller's storage.
    pub header_len: usize,
    /// Range of the payload in the super-packet's frame.
    pub payload: Range<u32>,
    /// Metadata of the segment: a blank or completed checksum, never a segmentation request.
    pub meta: OffloadMeta,
}

/// State that differs between segmentation kinds.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Tcp { seq: u32, flags: u8 },
    Udp,
    Fragments(Fragments),
}

#[derive(Clone, Copy, Debug)]
struct Fragments {
    /// Offset of the fragment header, for IPv6.
    header_at: usize,
    /// Identification of the fragments, for IPv6.
    id: Option<u32>,
    /// Set once the template holds the whole datagram's checksum.
    summed: bool,
}

/// Segmenter of one super-packet. The [module](self) has the rules.
///
/// ```
/// use ringfence_offload::segment::{HEADER_MAX, Segmenter};
/// use ringfence_offload::vnet::VnetHeader;
/// use ringfence_offload::Layers;
///
/// # let headers: &mut [u8] = &mut [0; 54];
/// # headers[12..14].copy_from_slice(&[8, 0]);
/// # headers[14..18].copy_from_slice(&[0x45, 0, 0x0f, 0xc8]);
/// # headers[23] = 6;
/// # headers[46] = 0x50;
/// // A frame of 4054 bytes from a TAP: 54 of headers, 4000 of TCP payload, segments of 1448.
/// let vnet = VnetHeader::from_modern(&[1, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0, 0, 0]);
/// let layers = Layers::parse(headers, 4054)?;
/// let meta = vnet.accept(headers, &Ok(layers))?;
///
/// let mut segmenter = Segmenter::new(headers, &layers, meta)?;
/// let mut room = [0; HEADER_MAX];
/// let mut payload = Vec::new();
/// while let Some(segment) = segmenter.next_partial(&mut room)? {
/// // Send `room[..segment.header_len]` and the frame's bytes at `segment.payload`.
///     payload.push(segment.payload);
/// }
/// assert_eq!(payload, [54..1502, 1502..2950, 2950..4054]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Segmenter {
    template: [u8; HEADER_MAX],
    /// Length of each segment's headers in bytes; for fragments, without the first one's UDP header.
    header_len: usize,
    shape: Shape,
    kind: Kind,
    meta: OffloadMeta,
    /// Length that the 16-bit sum in the template's checksum field includes.
    seed_len: u16,
    ipv4_id: u16,
    /// Payload bytes of each segment except the last; for fragments, bytes of IP payload.
    size: u32,
    /// Offset of the payload of the segment `index`.
    position: u32,
    end: u32,
    index: u32,
    count: u32,
}

impl Segmenter {
    /// Creates a segmenter for the frame that `headers` (its first bytes) and `layers` describe.
    ///
    /// # Errors
    /// Returns [`SegmentError`] if there is no request, or if the request does not match the headers.
    pub fn new(headers: &[u8], layers: &Layers, meta: OffloadMeta) -> Result<Self, SegmentError> {
        let gso = meta.gso.ok_or(SegmentError::NoOrder)?;
        let header_len = usize::from(layers.header_len());
        let mut template = [0; HEADER_MAX];
        let room = template
            .get_mut(..header_len)
            .ok_or(SegmentError::HeadersTooLong { needed: header_len })?;
        let given = headers.len();
        let foreign = SegmentError::ForeignHeaders { needed: header_len, given };
        room.copy_from_slice(headers.get(..header_len).ok_or(foreign)?);
        // The caller has most likely accepted it already; a second check is a few comparisons.
        let accepted = accept(meta, room, layers)?;
        let (shape, ipv4_id) = shape_of(layers, gso)?;
        let mut segmenter = Self {
            template,
            header_len,
            shape,
            kind: Kind::Udp,
            meta: OffloadMeta { checksum: accepted.checksum, gso: None },
            seed_len: field_len(layers.network_end(), shape.transport),
            ipv4_id,
            size: u32::from(gso.size),
            position: u32::from(layers.header_len()),
            end: layers.network_end(),
            index: 0,
            count: 1,
        };
        segmenter.set_kind(accepted.gso, layers)?;
        Ok(segmenter)
    }

    fn set_kind(&mut self, gso: Option<Gso>, layers: &Layers) -> Result<(), SegmentError> {
        let mut split = layers.payload_len();
        match (layers.transport(), gso) {
            (Transport::Tcp(tcp), _) => {
                let seq = get_u32(&self.template, self.shape.transport + 4);
                self.kind = Kind::Tcp { seq, flags: tcp.flags };
            }
            (Transport::Udp(udp), Some(Gso { kind: GsoKind::UdpFragment, .. })) => {
                check_udp_length(udp.length, self.seed_len)?;
                self.begin_fragments(layers)?;
                split = u32::from(self.seed_len);
            }
            (Transport::Udp(udp), _) => check_udp_length(udp.length, self.seed_len)?,
            // `accept` refuses every other transport.
            _ => return Err(SegmentError::NoOrder),
        }
        if gso.is_some() {
            self.count = split.div_ceil(self.size);
        }
        Ok(())
    }

    /// Turns the template into the first fragment's: the UDP header last, for IPv6 after a fragment header.
    fn begin_fragments(&mut self, layers: &Layers) -> Result<(), SegmentError> {
        self.size &= !7; // at least 8: `accept` checked
        // The whole datagram is summed here, so its pseudo header sum is recomputed too. Under a routing
        // header this fails, and the sender's sum remains.
        let _ = reset_pseudo_header(&mut self.template, layers);
        let transport = self.shape.transport;
        if self.shape.is_v6 {
            let needed = self.header_len + FRAGMENT_LEN;
            if needed > HEADER_MAX {
                return Err(SegmentError::HeadersTooLong { needed });
            }
            let at = self.last_next_header();
            self.template[at] = protocol::IPV6_FRAGMENT;
            self.template.copy_within(transport..self.header_len, transport + FRAGMENT_LEN);
            self.template[transport..transport + FRAGMENT_LEN].fill(0);
            self.template[transport] = protocol::UDP;
            self.header_len = needed;
        }
        self.header_len -= UDP_LEN;
        self.kind = Kind::Fragments(Fragments { header_at: transport, id: None, summed: false });
        Ok(())
    }

    /// Returns the offset of the "next header" field that names the transport.
    fn last_next_header(&self) -> usize {
        let mut at = self.shape.network + IPV6_LEN;
        let mut next_header = self.shape.network + 6;
        while at < self.shape.transport {
            next_header = at;
            at += 8 * (usize::from(self.template[at + 1]) + 1);
        }
        next_header
    }

    /// Sets the identification of an IPv6 datagram's fragments. It should not be predictable (RFC 7739) and
    /// should not repeat soon for the same addresses. Other kinds ignore it.
    #[must_use]
    pub fn with_fragment_id(mut self, id: u32) -> Self {
        if let Kind::Fragments(fragments) = &mut self.kind {
            fragments.id = Some(id);
        }
        self
    }

    /// Returns the number of segments: 1 to [`MAX_SEGMENTS`].
    #[must_use]
    pub fn segments(&self) -> u32 {
        self.count
    }

    /// Returns the number of segments not yet made.
    #[must_use]
    pub fn remaining(&self) -> u32 {
        self.count - self.index
    }

    /// Returns the length of the longest header in bytes, at most [`HEADER_MAX`].
    #[must_use]
    pub fn header_room(&self) -> usize {
        match self.kind {
            Kind::Fragments(_) => self.header_len + UDP_LEN,
            Kind::Tcp { .. } | Kind::Udp => self.header_len,
        }
    }

    /// Makes the next segment with a blank checksum: the field holds the sum of its pseudo header.
    ///
    /// Writes the headers to the front of `header`. Returns `None` after the last segment.
    ///
    /// # Errors
    /// Returns [`SegmentError::HeaderRoom`], or [`SegmentError::BlankFragment`] for UDP fragmentation. The call
    /// can be repeated for the same segment.
    pub fn next_partial(&mut self, header: &mut [u8]) -> Result<Option<Segment>, SegmentError> {
        if self.index == self.count {
            return Ok(None);
        }
        if let Kind::Fragments(_) = self.kind {
            return Err(SegmentError::BlankFragment);
        }
        let payload = self.next_payload();
        self.write_header(header, &payload)?;
        let segment =
            Segment { header_len: self.header_len, payload: payload.clone(), meta: self.meta };
        self.advance(&payload);
        Ok(Some(segment))
    }

    /// Makes the next segment and completes its checksum. Reads the payload from `frame_bytes`, the bytes of the
    /// super-packet's frame: each once, in order.
    ///
    /// # Errors
    /// Returns [`SegmentError::HeaderRoom`], [`SegmentError::Bytes`] or [`SegmentError::NoFragmentId`]. The
    /// call can be repeated for the same segment.
    pub fn next_complete(
        &mut self,
        header: &mut [u8],
        frame_bytes: &mut impl FrameBytes,
    ) -> Result<Option<Segment>, SegmentError> {
        if self.index == self.count {
            return Ok(None);
        }
        let payload = self.next_payload();
        if let Kind::Fragments(fragments) = self.kind {
            return self.next_fragment(fragments, header, frame_bytes, payload).map(Some);
        }
        let room = self.write_header(header, &payload)?;
        let mut sum = Accumulator::new();
        sum.add(&room[self.shape.transport..]);
        add_range(&mut sum, frame_bytes, &payload)?;
        let (offset, checksum) = match self.kind {
            // Linux stores any result for TCP; zero has a special meaning only for UDP.
            Kind::Tcp { .. } => (16, sum.checksum()),
            Kind::Udp | Kind::Fragments(_) => (6, never_zero(sum.checksum())),
        };
        put_u16(room, self.shape.transport + offset, checksum);
        let meta = OffloadMeta { checksum: Checksum::Verified, gso: None };
        let segment = Segment { header_len: self.header_len, payload: payload.clone(), meta };
        self.advance(&payload);
        Ok(Some(segment))
    }

    /// Returns the payload range of the next segment.
    fn next_payload(&self) -> Range<u32> {
        let udp = match self.kind {
            Kind::Fragments(_) if self.index == 0 => 8,
            _ => 0,
        };
        let end = self.position.saturating_add(self.size - udp).min(self.end);
        let end = if self.count == 1 { self.end } else { end };
        self.position..end
    }

    fn advance(&mut self, payload: &Range<u32>) {
        self.position = payload.end;
        self.index += 1;
    }

    /// Writes the headers of a TCP segment or a UDP datagram and returns them.
    fn write_header<'a>(
        &self,
        header: &'a mut [u8],
        payload: &Range<u32>,
    ) -> Result<&'a mut [u8], SegmentError> {
        let room = self.copy_template(header, self.header_len)?;
        let len = self.header_len + range_len(payload);
        self.set_ip(room, len);
        let transport = self.shape.transport;
        let transport_len = field(len - transport);
        let checksum_at = match self.kind {
            Kind::Tcp { seq, flags } => {
                put_u32(room, transport + 4, seq.wrapping_add(self.index.wrapping_mul(self.size)));
                room[transport + 13] = self.segment_flags(flags);
                transport + 16
            }
            Kind::Udp | Kind::Fragments(_) => {
                put_u16(room, transport + 4, transport_len);
                transport + 6
            }
        };
        let seed = get_u16(room, checksum_at);
        put_u16(room, checksum_at, replace(seed, self.seed_len, transport_len));
        Ok(room)
    }

    fn segment_flags(&self, flags: u8) -> u8 {
        let mut cleared = 0;
        if self.index > 0 {
            cleared |= tcp_flags::CWR;
        }
        if self.index + 1 < self.count {
            cleared |= tcp_flags::FIN | tcp_flags::PSH;
        }
        flags & !cleared
    }

    /// Sets length, identification and checksum of the IP header; `len` is the frame's length.
    fn set_ip(&self, header: &mut [u8], len: usize) {
        self.shape.set_ip_len(header, len - self.shape.network);
        if !self.shape.is_v6 {
            #[expect(clippy::cast_possible_truncation, reason = "identifications wrap around")]
            let id = self.ipv4_id.wrapping_add(self.index as u16);
            put_u16(header, self.shape.network + 4, id);
            self.shape.set_ip_checksum(header);
        }
    }

    fn next_fragment(
        &mut self,
        mut fragments: Fragments,
        header: &mut [u8],
        frame_bytes: &mut impl FrameBytes,
        payload: Range<u32>,
    ) -> Result<Segment, SegmentError> {
        if self.shape.is_v6 && fragments.id.is_none() {
            return Err(SegmentError::NoFragmentId);
        }
        if !fragments.summed {
            self.sum_datagram(frame_bytes)?;
            fragments.summed = true;
            self.kind = Kind::Fragments(fragments);
        }
        let header_len = if self.index == 0 { self.header_room() } else { self.header_len };
        let room = self.copy_template(header, header_len)?;
        self.set_fragment(room, fragments, header_len + range_len(&payload));
        let segment = Segment { header_len, payload: payload.clone(), meta: OffloadMeta::PLAIN };
        self.advance(&payload);
        Ok(segment)
    }

    /// Stores the checksum of the whole datagram in the template.
    fn sum_datagram(&mut self, frame_bytes: &mut impl FrameBytes) -> Result<(), SegmentError> {
        let udp = self.header_len..self.header_len + UDP_LEN;
        let mut sum = Accumulator::new();
        sum.add(&self.template[udp.clone()]);
        add_range(&mut sum, frame_bytes, &(self.position..self.end))?;
        put_u16(&mut self.template, udp.start + 6, never_zero(sum.checksum()));
        Ok(())
    }

    /// Sets the fragment's offset and flags; `len` is the frame's length.
    fn set_fragment(&self, header: &mut [u8], fragments: Fragments, len: usize) {
        // The datagram is below 64 KiB, so the conversion succeeds.
        let offset = bounded(self.index * self.size, u16::MAX);
        let more = self.index + 1 < self.count;
        self.shape.set_ip_len(header, len - self.shape.network);
        if self.shape.is_v6 {
            let field = offset | if more { MORE_V6 } else { 0 };
            put_u16(header, fragments.header_at + 2, field);
            put_u32(header, fragments.header_at + 4, fragments.id.unwrap_or_default());
        } else {
            let field = offset >> 3 | if more { MORE_V4 } else { 0 };
            put_u16(header, self.shape.network + 6, field);
            self.shape.set_ip_checksum(header);
        }
    }

    fn copy_template<'a>(
        &self,
        header: &'a mut [u8],
        len: usize,
    ) -> Result<&'a mut [u8], SegmentError> {
        let given = header.len();
        let room = header.get_mut(..len).ok_or(SegmentError::HeaderRoom { needed: len, given })?;
        room.copy_from_slice(&self.template[..len]);
        Ok(room)
    }
}

#[inline]
fn range_len(range: &Range<u32>) -> usize {
    usize_from(range.end - range.start)
}

/// Returns the bytes from `start` to the end of the packet; at most 65535, as IP's own length.
#[inline]
fn field_len(end: u32, start: usize) -> u16 {
    field(usize_from(end).saturating_sub(start))
}

fn check_udp_length(udp: u16, payload: u16) -> Result<(), SegmentError> {
    if udp != payload {
        return Err(SegmentError::UdpLength { udp, payload: payload.into() });
    }
    Ok(())
}

/// Returns the header offsets and, for IPv4, the identification.
fn shape_of(layers: &Layers, gso: Gso) -> Result<(Shape, u16), SegmentError> {
    let mismatch =
        || SegmentError::Refused(crate::accept::Refusal::KindMismatch { kind: gso.kind });
    let transport = usize::from(layers.transport_offset().ok_or_else(mismatch)?);
    let network = usize::from(layers.network_offset());
    match layers.network() {
        Network::Ipv4(ip) => Ok((Shape { network, transport, is_v6: false }, ip.id)),
        Network::Ipv6(_) => Ok((Shape { network, transport, is_v6: true }, 0)),
        Network::Arp | Network::Other(_) => Err(mismatch()),
    }
}
