//! Splitting a super-packet into packets of the wire.
//!
//! # Theory of operation
//!
//! A [`Segmenter`] is made from a super-packet's private headers and metadata, and then yields one
//! [`Segment`] after the other: a header, written into storage of the caller's, and the range of the
//! *original frame* that follows it. No payload is moved or copied; with completed checksums
//! it is read once.
//!
//! The rules are Linux's (`tcp_gso_segment`, `__udp_gso_segment`, `inet_gso_segment`,
//! `ipv6_gso_segment`), and the bytes are compared with a kernel's (`tests/kernel.rs`):
//!
//! * Everything in front of the payload is repeated: Ethernet, tags, IPv4 options (those too that RFC
//!   791 wants in the first fragment only), IPv6 extension headers, TCP options.
//! * IPv4: total length and header checksum are redone, the identification is one more each time.
//!   IPv6: the payload length counts extension headers.
//! * TCP: the sequence number moves on by the segment size; FIN and PSH remain on the last segment
//!   only, CWR on the first only; all else is repeated.
//! * UDP segmentation: a length each, a computed checksum of zero is sent as 0xFFFF; at most
//!   [`MAX_UDP_SEGMENTS`](crate::accept::MAX_UDP_SEGMENTS).
//! * UDP fragmentation: the checksum of the whole datagram first, then IPv4 fragments, or IPv6
//!   fragment headers right in front of UDP, at multiples of 8 (an order's size is rounded down). The
//!   identification is one for all; "don't fragment" is dropped.
//! * A blank checksum starts from the super-packet's sum of the pseudo header, in which only the length
//!   is replaced. So IPv6 routing headers need not be understood.
//!
//! Two deviations, where Linux's bytes are not a valid datagram: fragments of a datagram with IPv6
//! extension headers (Linux counts their octets into the fragment offsets), and fragment sizes that
//! are no multiple of 8.
//!
//! # What bounds it
//!
//! [`Segmenter::new`] passes the order through [`accept`](crate::accept) once more, so it is safe on
//! metadata that was not. The number of segments is known before the first one is made
//! ([`Segmenter::segments`]) and is at most [`MAX_SEGMENTS`]; each takes at least one octet of payload.
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
use crate::meta::{Checksum, Gso, GsoKind, OffloadMeta};
use crate::octets::{FrameOctets, add_range};
use crate::packet::{Layers, Network, Transport, protocol, tcp_flags};
use crate::rewrite::{IPV6_LEN, Shape, UDP_LEN, field, get_u16, get_u32, put_u16, put_u32};

pub use error::SegmentError;

/// Octets of all headers of a segment, at most: enough for each order that a header of 248 octets, the
/// fragment header added, can come with.
pub const HEADER_MAX: usize = 256;

/// Segments that a super-packet can become: 64 KiB of the smallest accepted size.
pub const MAX_SEGMENTS: u32 = 65_535 / crate::accept::MIN_SEGMENT_SIZE as u32 + 1;

/// Octets of an IPv6 fragment header.
const FRAGMENT_LEN: usize = 8;
/// "More fragments": in IPv4's 16 bits of flags and offset, in IPv6's.
const MORE_V4: u16 = 0x2000;
const MORE_V6: u16 = 1;

/// One packet of the wire: a header that was written, and payload that stays where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Octets written into the caller's storage.
    pub header_len: usize,
    /// The octets that follow, as positions in the super-packet's frame.
    pub payload: Range<u32>,
    /// What is known about the segment: a blank or a finished checksum, never an order.
    pub meta: OffloadMeta,
}

/// What differs between the kinds.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Tcp { seq: u32, flags: u8 },
    Udp,
    Fragments(Fragments),
}

#[derive(Clone, Copy, Debug)]
struct Fragments {
    /// Where the fragment header is, over IPv6.
    header_at: usize,
    /// The identification, over IPv6.
    id: Option<u32>,
    /// The checksum of the whole datagram is in the template.
    summed: bool,
}

/// A super-packet being split. See the [module](self).
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
/// // A frame of 4054 octets from a TAP: 54 of headers, 4000 of TCP payload, segments of 1448.
/// let vnet = VnetHeader::from_modern(&[1, 1, 54, 0, 0xa8, 5, 34, 0, 16, 0, 0, 0]);
/// let layers = Layers::parse(headers, 4054)?;
/// let meta = vnet.accept(headers, &Ok(layers))?;
///
/// let mut segmenter = Segmenter::new(headers, &layers, meta)?;
/// let mut room = [0; HEADER_MAX];
/// let mut payload = Vec::new();
/// while let Some(segment) = segmenter.next_partial(&mut room)? {
///     // Here `room[..segment.header_len]` and the frame's octets at `segment.payload` are sent.
///     payload.push(segment.payload);
/// }
/// assert_eq!(payload, [54..1502, 1502..2950, 2950..4054]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Segmenter {
    template: [u8; HEADER_MAX],
    /// Octets of each segment's headers; for fragments, without the first one's UDP header.
    header_len: usize,
    shape: Shape,
    kind: Kind,
    meta: OffloadMeta,
    /// The 16-bit sum in the template's checksum field counts this length in.
    seed_len: u16,
    ipv4_id: u16,
    /// Octets of payload of each segment but the last; for fragments, of IP payload.
    size: u32,
    /// Where the payload of the segment `index` starts.
    position: u32,
    end: u32,
    index: u32,
    count: u32,
}

impl Segmenter {
    /// Begins to split the frame that `headers` (its first octets) and `layers` describe.
    ///
    /// # Errors
    /// [`SegmentError`] if there is nothing to split, or if the order does not fit the headers.
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
        // Whoever calls has most likely accepted it already; doing it again is a few comparisons.
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
        segmenter.choose_kind(accepted.gso, layers)?;
        Ok(segmenter)
    }

    fn choose_kind(&mut self, gso: Option<Gso>, layers: &Layers) -> Result<(), SegmentError> {
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
            // Neither: `accept` would have refused.
            _ => return Err(SegmentError::NoOrder),
        }
        if gso.is_some() {
            self.count = split.div_ceil(self.size);
        }
        Ok(())
    }

    /// Turns the template into a first fragment's: the UDP header last, over IPv6 after a fragment
    /// header.
    fn begin_fragments(&mut self, layers: &Layers) -> Result<(), SegmentError> {
        self.size &= !7; // at least 8: `accept` checked
        // The whole datagram is summed here, so the sum of its pseudo header may as well be computed.
        // Under a routing header it cannot be, and the sender's must do.
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

    /// Where the IPv6 header in front of the transport says what follows it.
    fn last_next_header(&self) -> usize {
        let mut at = self.shape.network + IPV6_LEN;
        let mut next_header = self.shape.network + 6;
        while at < self.shape.transport {
            next_header = at;
            at += 8 * (usize::from(self.template[at + 1]) + 1);
        }
        next_header
    }

    /// Sets the identification that the fragments of an IPv6 datagram carry. It should not be
    /// predictable (RFC 7739), and not repeat soon for the same addresses. Other kinds ignore it.
    #[must_use]
    pub fn with_fragment_id(mut self, id: u32) -> Self {
        if let Kind::Fragments(fragments) = &mut self.kind {
            fragments.id = Some(id);
        }
        self
    }

    /// Packets that the super-packet becomes: 1 to [`MAX_SEGMENTS`].
    #[must_use]
    pub fn segments(&self) -> u32 {
        self.count
    }

    /// Packets that are still to come.
    #[must_use]
    pub fn remaining(&self) -> u32 {
        self.count - self.index
    }

    /// Octets of the longest header: what storage is needed, at most [`HEADER_MAX`].
    #[must_use]
    pub fn header_room(&self) -> usize {
        match self.kind {
            Kind::Fragments(_) => self.header_len + UDP_LEN,
            Kind::Tcp { .. } | Kind::Udp => self.header_len,
        }
    }

    /// Makes the next segment, its checksum blank: the field holds the sum of its pseudo header.
    ///
    /// `header` receives the headers, from its front. After the last segment there is `None`.
    ///
    /// # Errors
    /// [`SegmentError::HeaderRoom`], and [`SegmentError::BlankFragment`] for UDP fragmentation. The
    /// same segment can then be tried again.
    pub fn next_partial(&mut self, header: &mut [u8]) -> Result<Option<Segment>, SegmentError> {
        if self.index == self.count {
            return Ok(None);
        }
        if let Kind::Fragments(_) = self.kind {
            return Err(SegmentError::BlankFragment);
        }
        let payload = self.payload();
        self.write_header(header, &payload)?;
        let segment =
            Segment { header_len: self.header_len, payload: payload.clone(), meta: self.meta };
        self.advance(&payload);
        Ok(Some(segment))
    }

    /// Makes the next segment and finishes its checksum, for which `octets`, those of the
    /// super-packet's frame, are read: each once, in order.
    ///
    /// # Errors
    /// [`SegmentError::HeaderRoom`], [`SegmentError::Octets`], and [`SegmentError::NoFragmentId`]. The
    /// same segment can then be tried again.
    pub fn next_complete(
        &mut self,
        header: &mut [u8],
        octets: &mut impl FrameOctets,
    ) -> Result<Option<Segment>, SegmentError> {
        if self.index == self.count {
            return Ok(None);
        }
        let payload = self.payload();
        if let Kind::Fragments(fragments) = self.kind {
            return self.next_fragment(fragments, header, octets, payload).map(Some);
        }
        let room = self.write_header(header, &payload)?;
        let mut sum = Accumulator::new();
        sum.add(&room[self.shape.transport..]);
        add_range(&mut sum, octets, &payload)?;
        let (offset, checksum) = match self.kind {
            // Linux stores what comes out; only for UDP zero has a meaning of its own.
            Kind::Tcp { .. } => (16, sum.checksum()),
            Kind::Udp | Kind::Fragments(_) => (6, never_zero(sum.checksum())),
        };
        put_u16(room, self.shape.transport + offset, checksum);
        let meta = OffloadMeta { checksum: Checksum::Verified, gso: None };
        let segment = Segment { header_len: self.header_len, payload: payload.clone(), meta };
        self.advance(&payload);
        Ok(Some(segment))
    }

    /// The payload of the segment that comes next.
    fn payload(&self) -> Range<u32> {
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

    /// Writes the headers of a TCP segment or a UDP datagram; returns them.
    fn write_header<'a>(
        &self,
        header: &'a mut [u8],
        payload: &Range<u32>,
    ) -> Result<&'a mut [u8], SegmentError> {
        let room = self.copy_template(header, self.header_len)?;
        let len = self.header_len + octets_in(payload);
        self.set_ip(room, len);
        let transport = self.shape.transport;
        let transport_len = field(len - transport);
        let checksum_at = match self.kind {
            Kind::Tcp { seq, flags } => {
                put_u32(room, transport + 4, seq.wrapping_add(self.index.wrapping_mul(self.size)));
                room[transport + 13] = self.flags_of(flags);
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

    fn flags_of(&self, flags: u8) -> u8 {
        let mut cleared = 0;
        if self.index > 0 {
            cleared |= tcp_flags::CWR;
        }
        if self.index + 1 < self.count {
            cleared |= tcp_flags::FIN | tcp_flags::PSH;
        }
        flags & !cleared
    }

    /// Length, identification and checksum of the IP header; `len` is the frame's.
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
        octets: &mut impl FrameOctets,
        payload: Range<u32>,
    ) -> Result<Segment, SegmentError> {
        if self.shape.is_v6 && fragments.id.is_none() {
            return Err(SegmentError::NoFragmentId);
        }
        if !fragments.summed {
            self.sum_datagram(octets)?;
            fragments.summed = true;
            self.kind = Kind::Fragments(fragments);
        }
        let header_len = if self.index == 0 { self.header_room() } else { self.header_len };
        let room = self.copy_template(header, header_len)?;
        self.set_fragment(room, fragments, header_len + octets_in(&payload));
        let segment = Segment { header_len, payload: payload.clone(), meta: OffloadMeta::PLAIN };
        self.advance(&payload);
        Ok(segment)
    }

    /// Stores the checksum of the whole datagram in the template.
    fn sum_datagram(&mut self, octets: &mut impl FrameOctets) -> Result<(), SegmentError> {
        let udp = self.header_len..self.header_len + UDP_LEN;
        let mut sum = Accumulator::new();
        sum.add(&self.template[udp.clone()]);
        add_range(&mut sum, octets, &(self.position..self.end))?;
        put_u16(&mut self.template, udp.start + 6, never_zero(sum.checksum()));
        Ok(())
    }

    /// Which part of the datagram this is; `len` is the frame's.
    fn set_fragment(&self, header: &mut [u8], fragments: Fragments, len: usize) {
        // Below 64 KiB, as the datagram is.
        let offset = u16::try_from(self.index * self.size).unwrap_or(u16::MAX);
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

fn octets_in(range: &Range<u32>) -> usize {
    usize::try_from(range.end - range.start).unwrap_or(usize::MAX)
}

/// Octets from `start` to the end of the packet; at most 65535, as IP's own length is.
fn field_len(end: u32, start: usize) -> u16 {
    field(usize::try_from(end).unwrap_or(usize::MAX).saturating_sub(start))
}

fn check_udp_length(udp: u16, payload: u16) -> Result<(), SegmentError> {
    if udp != payload {
        return Err(SegmentError::UdpLength { udp, payload: payload.into() });
    }
    Ok(())
}

/// The shape of the headers, and the identification over IPv4.
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
