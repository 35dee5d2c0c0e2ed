//! Classification of frames: flow, and ability to be part of a super-packet.

use super::limits::Limits;
use crate::accept::MIN_SEGMENT_SIZE;
use crate::checksum::Accumulator;
use crate::checksum::verify::{pseudo_header_sum, verify_ipv4_header};
use crate::frame_bytes::{FrameBytes, add_range};
use crate::meta::{Checksum, GsoKind, OffloadMeta};
use crate::packet::{Layers, Network, Tcp, Transport, Udp, tcp_flags};
use crate::rewrite::{Shape, get_u16, get_u32};
use crate::segment::HEADER_MAX;

/// "Don't fragment" flag, the only bit of IPv4's flags and offset that may be set.
const DONT_FRAGMENT: u16 = 0x4000;

pub(super) enum Class<'a> {
    /// Frame other than a whole TCP or UDP packet of an enabled protocol.
    NoFlow,
    /// Frame of a flow; it may join other frames if there is a candidate.
    Flow { flow: Flow<'a>, candidate: Option<Candidate<'a>> },
}

/// Flow of a frame: link header, addresses, protocol and ports.
#[derive(Clone, Copy)]
pub(super) struct Flow<'a> {
    header: &'a [u8],
    shape: Shape,
    kind: GsoKind,
    pub(super) hash: u32,
}

/// Frame that may join other frames or be joined by them.
#[derive(Clone, Copy)]
pub(super) struct Candidate<'a> {
    pub(super) header: &'a [u8],
    pub(super) shape: Shape,
    pub(super) kind: GsoKind,
    pub(super) flow: Flow<'a>,
    /// Start and end of the payload in the frame.
    pub(super) payload: (u32, u32),
    /// Segment size in bytes: the payload's length, or the size in the frame's request.
    pub(super) size: u32,
    /// Packets of the wire that the frame stands for.
    pub(super) segments: u32,
}

impl<'a> Flow<'a> {
    fn new(header: &'a [u8], shape: Shape, kind: GsoKind) -> Self {
        let mut hash = u32::from(header[shape.network - 3]);
        let (addresses, ports) = Self::parts(header, shape);
        for word in addresses.chunks_exact(4).chain(ports.chunks_exact(4)) {
            hash = (hash ^ get_u32(word, 0)).wrapping_mul(0x9e37_79b1).rotate_left(15);
        }
        Self { header, shape, kind, hash: hash ^ hash >> 16 }
    }

    fn parts(header: &[u8], shape: Shape) -> (&[u8], &[u8]) {
        let addresses = if shape.is_v6 { 8..40 } else { 12..20 };
        let addresses = shape.network + addresses.start..shape.network + addresses.end;
        (&header[addresses], &header[shape.transport..shape.transport + 4])
    }

    /// Returns `true` if `header` belongs to this flow. TCP and UDP with the same ports count as one flow,
    /// which costs them only their joining.
    pub(super) fn matches(&self, header: &[u8], shape: Shape) -> bool {
        shape.is_v6 == self.shape.is_v6
            && shape.network == self.shape.network
            && header[..shape.network] == self.header[..shape.network]
            && Self::parts(header, shape) == Self::parts(self.header, self.shape)
    }
}

impl Candidate<'_> {
    pub(super) fn payload_len(&self) -> u32 {
        self.payload.1 - self.payload.0
    }

    /// Returns `true` if no frame may follow: a short last segment, or a flag that ends the packet.
    pub(super) fn ends_packet(&self) -> bool {
        !self.payload_len().is_multiple_of(self.size)
            || self.flags() & (tcp_flags::FIN | tcp_flags::PSH) != 0
    }

    /// Returns `true` if other frames may follow it as the first.
    pub(super) fn can_begin_packet(&self) -> bool {
        let acceptable = !self.kind.is_tcp() || self.size >= u32::from(MIN_SEGMENT_SIZE);
        acceptable && !self.ends_packet()
    }

    /// Returns the TCP flags; 0 for UDP.
    pub(super) fn flags(&self) -> u8 {
        if self.kind.is_tcp() { self.header[self.shape.transport + 13] } else { 0 }
    }
}

/// Classifies a frame by flow and by its ability to join.
pub(super) fn classify<'a>(
    headers: &'a [u8],
    layers: &Layers,
    meta: OffloadMeta,
    limits: &Limits,
    frame_bytes: &mut impl FrameBytes,
) -> Class<'a> {
    let is_v6 = matches!(layers.network(), Network::Ipv6(_));
    let (kind, wanted) = match layers.transport() {
        Transport::Tcp(_) if is_v6 => (GsoKind::TcpV6, limits.tcp_v6),
        Transport::Tcp(_) => (GsoKind::TcpV4, limits.tcp_v4),
        Transport::Udp(_) => (GsoKind::Udp, limits.udp),
        _ => return Class::NoFlow,
    };
    let header_len = usize::from(layers.header_len());
    let (Some(header), Some(place)) = (headers.get(..header_len), layers.checksum_place()) else {
        return Class::NoFlow;
    };
    if !wanted {
        return Class::NoFlow;
    }
    let network = usize::from(layers.network_offset());
    let shape = Shape { network, transport: usize::from(place.start), is_v6 };
    let flow = Flow::new(header, shape, kind);
    let candidate = candidate(flow, layers, meta).filter(|_| {
        ip_is_plain(header, layers) && checksum_is_right(header, layers, meta, frame_bytes)
    });
    Class::Flow { flow, candidate }
}

/// Builds the candidate if the rules of the transport allow the frame to join any packet.
fn candidate<'a>(flow: Flow<'a>, layers: &Layers, meta: OffloadMeta) -> Option<Candidate<'a>> {
    let payload = (u32::from(layers.header_len()), layers.network_end());
    let len = layers.payload_len();
    let size = match (layers.transport(), meta.gso) {
        (Transport::Tcp(_), Some(gso)) if gso.kind == flow.kind => u32::from(gso.size),
        (Transport::Tcp(_) | Transport::Udp(_), None) => len,
        _ => return None,
    };
    let fits = match layers.transport() {
        Transport::Tcp(tcp) => tcp_can_join(tcp),
        Transport::Udp(udp) => udp_can_join(flow.header, udp, layers),
        _ => false,
    };
    let padded = layers.network_end() != layers.frame_len();
    if !fits || padded || len == 0 || size == 0 || flow.header.len() > HEADER_MAX {
        return None;
    }
    Some(Candidate {
        header: flow.header,
        shape: flow.shape,
        kind: flow.kind,
        flow,
        payload,
        size,
        segments: len.div_ceil(size),
    })
}

fn tcp_can_join(tcp: Tcp) -> bool {
    tcp.flags & (tcp_flags::SYN | tcp_flags::RST | tcp_flags::URG) == 0
}

// Requires a checksum, as segmentation would compute one, and no bytes after the datagram.
fn udp_can_join(header: &[u8], udp: Udp, layers: &Layers) -> bool {
    let payload = layers.network_end() - u32::from(udp.offset);
    u32::from(udp.length) == payload && get_u16(header, usize::from(udp.offset) + 6) != 0
}

fn ip_is_plain(header: &[u8], layers: &Layers) -> bool {
    match layers.network() {
        Network::Ipv4(ip) => {
            let flags = get_u16(header, usize::from(ip.offset) + 6);
            flags & !DONT_FRAGMENT == 0 && verify_ipv4_header(header, layers) == Ok(Some(true))
        }
        Network::Ipv6(ip) => !ip.routed && ip.fragment.is_none(),
        Network::Arp | Network::Other(_) => false,
    }
}

fn checksum_is_right(
    header: &[u8],
    layers: &Layers,
    meta: OffloadMeta,
    frame_bytes: &mut impl FrameBytes,
) -> bool {
    match meta.checksum {
        Checksum::Partial { .. } => meta.checksum.place() == layers.checksum_place(),
        // A super-packet without a blank checksum was not accepted.
        _ if meta.gso.is_some() => false,
        Checksum::Verified => true,
        Checksum::None => sum_is_zero(header, layers, frame_bytes),
    }
}

fn sum_is_zero(header: &[u8], layers: &Layers, frame_bytes: &mut impl FrameBytes) -> bool {
    let (Some(start), Ok(pseudo)) = (layers.transport_offset(), pseudo_header_sum(header, layers))
    else {
        return false;
    };
    let mut sum = Accumulator::with_sum(pseudo);
    sum.add(&header[usize::from(start)..]);
    let payload = u32::from(layers.header_len())..layers.network_end();
    add_range(&mut sum, frame_bytes, &payload).is_ok() && sum.checksum() == 0
}
