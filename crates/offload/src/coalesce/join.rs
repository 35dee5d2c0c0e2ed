//! Rules by which a frame continues a packet, and the header of the coalesced packet.

use super::candidate::Candidate;
use super::{MAX_UDP_DATAGRAMS, SEGMENT_FLAGS};
use crate::blank::reset_pseudo_header;
use crate::meta::{Gso, GsoKind, OffloadMeta};
use crate::packet::{Layers, tcp_flags};
use crate::rewrite::{IPV6_LEN, Shape, field, get_u16, get_u32, put_u16};
use ringfence_base::numbers::{bounded, usize_from};

/// Maximum of IP's length field: the whole packet in IPv4, the bytes after the fixed header in IPv6.
const IP_LENGTH_MAX: u64 = 65_535;

/// "Don't fragment" flag in the first byte of IPv4's flags and offset.
const DONT_FRAGMENT: u8 = 0x40;

/// State of a packet that frames join.
#[derive(Clone, Debug)]
pub(super) struct Join {
    pub(super) shape: Shape,
    kind: GsoKind,
    /// Payload bytes of each segment except the last.
    size: u32,
    /// Payload bytes so far.
    len: u32,
    /// Packets of the wire so far.
    segments: u32,
    /// TCP flags of later segments.
    flags: u8,
    /// Set if the second segment repeated the first one's identification.
    fixed_id: bool,
    /// Set if no further frame may join.
    pub(super) ended: bool,
}

impl Join {
    /// Starts a packet with its first frame.
    pub(super) fn new(first: &Candidate<'_>) -> Self {
        Self {
            shape: first.shape,
            kind: first.kind,
            size: first.size,
            len: first.payload_len(),
            segments: first.segments,
            flags: 0,
            fixed_id: false,
            ended: first.ends_packet(),
        }
    }

    /// Returns `true` if `next` continues the packet whose first header is `header`.
    pub(super) fn admits(&self, header: &[u8], next: &Candidate<'_>, packet_len: u32) -> bool {
        !self.ended
            && self.kind == next.kind
            && header.len() == next.header.len()
            && self.shape.transport == next.shape.transport
            && self.size_fits(header, next, packet_len)
            && self.ip_matches(header, next)
            && self.transport_matches(header, next)
    }

    fn size_fits(&self, header: &[u8], next: &Candidate<'_>, packet_len: u32) -> bool {
        let len = u64::from(self.len) + u64::from(next.payload_len());
        let frame = header.len() as u64 + len;
        let size = if next.segments > 1 {
            next.size == self.size
        } else {
            next.payload_len() <= self.size
        };
        let count = self.segments + next.segments;
        let counted = self.kind.is_tcp() || count <= MAX_UDP_DATAGRAMS;
        let fixed = if self.shape.is_v6 { IPV6_LEN } else { 0 };
        let ip = frame - (self.shape.network + fixed) as u64;
        size && counted && frame <= u64::from(packet_len) && ip <= IP_LENGTH_MAX
    }

    /// Compares link and IP headers except lengths, IPv4 checksum and identification.
    fn ip_matches(&self, header: &[u8], next: &Candidate<'_>) -> bool {
        let (at, end) = (self.shape.network, self.shape.transport);
        let same = |from: usize, to: usize| header[from..to] == next.header[from..to];
        if self.shape.is_v6 {
            return same(0, at + 4) && same(at + 6, end);
        }
        same(0, at + 2)
            && same(at + 6, at + 10)
            && same(at + 12, end)
            && self.id_matches(header, next)
    }

    fn id_matches(&self, header: &[u8], next: &Candidate<'_>) -> bool {
        let at = self.shape.network + 4;
        let distance = get_u16(next.header, at).wrapping_sub(get_u16(header, at));
        let fixed = distance == 0 && (self.fixed_id || self.fixed_id_allowed(header, next));
        let counted = u32::from(distance) == self.segments & 0xffff && !self.fixed_id;
        fixed || counted
    }

    /// Returns `true` if identifications may all be equal. They may where none is needed (RFC 6864), and must
    /// be from the second segment on.
    fn fixed_id_allowed(&self, header: &[u8], next: &Candidate<'_>) -> bool {
        let atomic = header[self.shape.network + 6] & DONT_FRAGMENT != 0;
        atomic && self.segments == 1 && next.segments == 1
    }

    fn transport_matches(&self, header: &[u8], next: &Candidate<'_>) -> bool {
        let at = self.shape.transport;
        let same =
            |from: usize, to: usize| header[at + from..at + to] == next.header[at + from..at + to];
        if !self.kind.is_tcp() {
            return same(0, 4);
        }
        let flags = header[at + 13] ^ next.flags();
        let seq = get_u32(header, at + 4).wrapping_add(self.len);
        same(0, 4)
            && same(8, 13)
            && flags & !SEGMENT_FLAGS == 0
            && next.flags() & tcp_flags::CWR == 0
            && same(14, 16)
            && same(18, header.len() - at)
            && get_u32(next.header, at + 4) == seq
    }

    /// Adds a frame that [`admits`](Self::admits) accepted.
    pub(super) fn add(&mut self, header: &[u8], next: &Candidate<'_>) {
        let id_at = self.shape.network + 4;
        if self.segments == 1 && !self.shape.is_v6 {
            self.fixed_id = get_u16(header, id_at) == get_u16(next.header, id_at);
        }
        self.len += next.payload_len();
        self.segments += next.segments;
        self.flags |= next.flags() & (tcp_flags::FIN | tcp_flags::PSH);
        let short = !next.payload_len().is_multiple_of(self.size);
        self.ended = short || self.flags != 0;
    }

    /// Returns the length of the packet's frame in bytes.
    #[inline]
    pub(super) fn frame_len(&self, header_len: usize) -> u32 {
        bounded(header_len, u32::MAX).saturating_add(self.len)
    }

    /// Turns `header` into the header of the whole packet, with a blank checksum.
    pub(super) fn finish_header(&self, header: &mut [u8]) -> OffloadMeta {
        let frame_len = self.frame_len(header.len());
        let end = usize_from(frame_len);
        self.shape.set_ip_len(header, end - self.shape.network);
        self.shape.set_ip_checksum(header);
        let at = self.shape.transport;
        if self.kind.is_tcp() {
            header[at + 13] |= self.flags;
        } else {
            put_u16(header, at + 4, field(end - at));
        }
        let ecn = self.kind.is_tcp() && header[at + 13] & tcp_flags::CWR != 0;
        let size = bounded(self.size, u16::MAX);
        let gso = Some(Gso { kind: self.kind, ecn, size });
        // The joined frames are whole TCP or UDP packets with equal lengths, so both calls succeed.
        let place = Layers::parse(header, frame_len)
            .ok()
            .and_then(|layers| reset_pseudo_header(header, &layers).ok());
        place.map_or(OffloadMeta::PLAIN, |place| OffloadMeta { checksum: place.into(), gso })
    }
}
