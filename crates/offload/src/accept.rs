//! Validation of offload metadata from an untrusted sender.
//!
//! # Theory of operation
//!
//! A guest, or another host's kernel, describes how its frame must be completed. Each number in that
//! description is an offset that later code writes to, or a divisor of a length. [`accept`] checks the
//! numbers against the frame's own headers, in the order of Linux's `virtio_net_hdr_to_skb`. Its rules
//! are stricter, because a frame here is passed on rather than parsed again:
//!
//! * A segmentation request must match the headers: TCP over IPv4, TCP over IPv6, or UDP. The packet must
//!   be no fragment, have no IPv6 fragment header, and fill the frame. Its checksum must be at the
//!   transport's place. So a segmenter finds headers of the requested kind.
//! * An accepted request always has a blank checksum whose field holds the pseudo header's sum. Linux
//!   accepts TCP and UFO frames without one, and old netfronts send them. `accept` then adds it in the
//!   private copy of the headers. USO without a blank checksum is refused, as in Linux.
//! * A request that gives only one packet is dropped: the frame becomes an ordinary one.
//! * A blank checksum without segmentation may lie anywhere after the IP header (the inner packet of a
//!   tunnel), but never in a fragment. Its field must be within the private header bytes, so that it can
//!   be completed in place.
//!
//! `accept` is idempotent. It does not check the negotiated features, and it does not check the content of
//! a pseudo header sum that the sender provided ([`reset_pseudo_header`] replaces it).

use crate::blank::{ResetError, reset_pseudo_header};
use crate::meta::{Checksum, ChecksumPlace, Gso, GsoKind, OffloadMeta};
use crate::packet::{Layers, Network, Transport, tcp_flags};

/// Maximum segments of a UDP super-packet (Linux `UDP_MAX_SEGMENTS`).
pub const MAX_UDP_SEGMENTS: u32 = 128;
/// Segment size with a special meaning in Linux (`GSO_BY_FRAGS`).
pub const RESERVED_GSO_SIZE: u16 = 0xffff;
/// Minimum payload of an IP fragment that others follow.
pub const MIN_FRAGMENT_SIZE: u16 = 8;

/// Minimum payload of a TCP segment that others follow. Linux never requests less (`TCP_MIN_GSO_SIZE`)
/// but would make segments of one byte. This limit bounds the work that one frame can request.
pub const MIN_SEGMENT_SIZE: u16 = 8;

/// Bytes before the transport header of the smallest IP frame with unparsed headers.
const MIN_UNKNOWN_START: u32 = 14 + 20;

/// Reasons for which metadata is refused: one variant for each rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Checksum field beyond the end of the frame.
    #[error("checksum field ends at byte {end} of a frame of {frame_len}")]
    ChecksumBeyondFrame {
        /// First byte after the field, or after the smallest transport header at its start.
        end: u32,
        frame_len: u32,
    },
    /// Checksum field inside the frame, but outside the private header bytes.
    #[error("checksum field ends at byte {end}, only the first {captured} are private")]
    ChecksumNotCaptured {
        /// First byte after the field.
        end: u32,
        /// Number of private header bytes.
        captured: u16,
    },
    /// Checksum that starts inside the link or IP headers.
    #[error("checksum starts at byte {start}, the transport cannot start before {minimum}")]
    ChecksumInHeaders {
        /// First summed byte in the request.
        start: u16,
        /// First byte that may belong to a transport.
        minimum: u32,
    },
    /// Blank checksum on a fragment, which has no checksum of its own.
    #[error("blank checksum on a fragment")]
    ChecksumOnFragment,
    /// Segment size of zero.
    #[error("segment size is zero")]
    SizeZero,
    /// Segment size equal to [`RESERVED_GSO_SIZE`].
    #[error("segment size {RESERVED_GSO_SIZE:#x} is reserved")]
    SizeReserved,
    /// TCP segment size below [`MIN_SEGMENT_SIZE`].
    #[error("segment size {size} is below {MIN_SEGMENT_SIZE}")]
    SegmentSize {
        /// Segment size in the request.
        size: u16,
    },
    /// Fragment size below [`MIN_FRAGMENT_SIZE`].
    #[error("fragment size {size} is below {MIN_FRAGMENT_SIZE}")]
    FragmentSize {
        /// Fragment size in the request.
        size: u16,
    },
    /// ECN mark on a request that is not TCP.
    #[error("ECN mark on a segmentation type that is not TCP")]
    EcnWithoutTcp,
    /// Headers of another IP version or transport than the request, or of a fragment.
    #[error("segmentation as {kind:?} of a packet that is not that")]
    KindMismatch {
        /// Kind in the request.
        kind: GsoKind,
    },
    /// IP packet that does not fill the frame.
    #[error("super-packet's IP length ends at byte {end} of a frame of {frame_len}")]
    LengthMismatch {
        /// Offset of the IP packet's end.
        end: u32,
        frame_len: u32,
    },
    /// Super-packet whose blank checksum is not the transport's.
    #[error("super-packet with its checksum at {offered:?}, the transport's is at {expected:?}")]
    ChecksumElsewhere {
        /// Place in the request.
        offered: ChecksumPlace,
        /// Place that the headers give.
        expected: ChecksumPlace,
    },
    /// UDP segmentation without a blank checksum.
    #[error("UDP segmentation without a blank checksum")]
    UdpWithoutChecksum,
    /// UDP segmentation into more than [`MAX_UDP_SEGMENTS`] segments.
    #[error("{payload} bytes in UDP segments of {size} are more than {MAX_UDP_SEGMENTS} segments")]
    TooManySegments {
        /// Payload bytes of the super-packet.
        payload: u32,
        /// Segment size in the request.
        size: u16,
    },
    /// Super-packet without a blank checksum, where none can be added.
    #[error("super-packet without a blank checksum, and none can be added: {0}")]
    CannotBlank(#[from] ResetError),
}

/// Validates `offered` against the frame's headers. The returned metadata may be acted on.
///
/// `headers` is the private copy that `layers` was parsed from. `accept` writes to it in one case only: a
/// super-packet without a blank checksum gets the pseudo header's sum in its checksum field.
///
/// # Errors
/// Returns the first broken rule. The caller should drop the frame and count it.
pub fn accept(
    offered: OffloadMeta,
    headers: &mut [u8],
    layers: &Layers,
) -> Result<OffloadMeta, Refusal> {
    if let Some(place) = offered.checksum.place() {
        check_place(place, offered.gso, layers)?;
    }
    let Some(gso) = offered.gso else {
        return Ok(offered);
    };
    check_size(gso)?;
    check_kind(gso, layers)?;
    let checksum = match offered.checksum.place() {
        Some(place) => check_transport_place(place, layers)?,
        None if gso.kind == GsoKind::Udp => return Err(Refusal::UdpWithoutChecksum),
        None => reset_pseudo_header(headers, layers)?.into(),
    };
    Ok(OffloadMeta { checksum, gso: check_payload(gso, layers)? })
}

/// Checks the rules for any blank checksum.
fn check_place(place: ChecksumPlace, gso: Option<Gso>, layers: &Layers) -> Result<(), Refusal> {
    let start = u32::from(place.start);
    let field_end = start + u32::from(place.offset) + 2;
    let smallest_header = match gso {
        Some(gso) if gso.kind.is_tcp() => 20,
        Some(_) => 8,
        None => 0,
    };
    let end = field_end.max(start + smallest_header);
    if end > layers.frame_len() {
        return Err(Refusal::ChecksumBeyondFrame { end, frame_len: layers.frame_len() });
    }
    if field_end > u32::from(layers.captured()) {
        let captured = layers.captured();
        return Err(Refusal::ChecksumNotCaptured { end: field_end, captured });
    }
    if layers.is_fragment() {
        return Err(Refusal::ChecksumOnFragment);
    }
    let minimum = layers.transport_offset().map_or(MIN_UNKNOWN_START, u32::from);
    if start < minimum {
        return Err(Refusal::ChecksumInHeaders { start: place.start, minimum });
    }
    Ok(())
}

fn check_size(gso: Gso) -> Result<(), Refusal> {
    match gso.size {
        0 => Err(Refusal::SizeZero),
        RESERVED_GSO_SIZE => Err(Refusal::SizeReserved),
        size if gso.kind == GsoKind::UdpFragment && size < MIN_FRAGMENT_SIZE => {
            Err(Refusal::FragmentSize { size })
        }
        size if gso.kind.is_tcp() && size < MIN_SEGMENT_SIZE => Err(Refusal::SegmentSize { size }),
        _ => Ok(()),
    }
}

/// Checks that the headers match the requested kind and describe the whole frame.
fn check_kind(gso: Gso, layers: &Layers) -> Result<(), Refusal> {
    if gso.ecn && !gso.kind.is_tcp() {
        return Err(Refusal::EcnWithoutTcp);
    }
    let network = match (layers.network(), gso.kind) {
        (Network::Ipv4(_), GsoKind::TcpV4 | GsoKind::Udp | GsoKind::UdpFragment) => true,
        (Network::Ipv6(ip), GsoKind::TcpV6 | GsoKind::Udp | GsoKind::UdpFragment) => {
            ip.fragment.is_none()
        }
        _ => false,
    };
    let transport = match layers.transport() {
        Transport::Tcp(_) => gso.kind.is_tcp(),
        Transport::Udp(_) => !gso.kind.is_tcp(),
        _ => false,
    };
    if !network || !transport || layers.is_fragment() {
        return Err(Refusal::KindMismatch { kind: gso.kind });
    }
    if layers.network_end() != layers.frame_len() {
        let (end, frame_len) = (layers.network_end(), layers.frame_len());
        return Err(Refusal::LengthMismatch { end, frame_len });
    }
    Ok(())
}

/// Checks that a super-packet's blank checksum is its transport's.
fn check_transport_place(place: ChecksumPlace, layers: &Layers) -> Result<Checksum, Refusal> {
    match layers.checksum_place() {
        Some(expected) if expected == place => Ok(place.into()),
        Some(expected) => Err(Refusal::ChecksumElsewhere { offered: place, expected }),
        None => Err(Refusal::ChecksumOnFragment),
    }
}

/// Bounds the segments, drops a request for a single packet, and reads ECN from the header.
fn check_payload(gso: Gso, layers: &Layers) -> Result<Option<Gso>, Refusal> {
    let size = u32::from(gso.size);
    let payload = layers.payload_len();
    if gso.kind == GsoKind::Udp && payload > size * MAX_UDP_SEGMENTS {
        return Err(Refusal::TooManySegments { payload, size: gso.size });
    }
    // The fragments of a datagram share its IP payload, UDP header included.
    let split = match layers.transport() {
        Transport::Udp(udp) if gso.kind == GsoKind::UdpFragment => {
            layers.network_end() - u32::from(udp.offset)
        }
        _ => payload,
    };
    let cwr = match layers.transport() {
        Transport::Tcp(tcp) => tcp.flags & tcp_flags::CWR != 0,
        _ => false,
    };
    Ok((split > size).then_some(Gso { ecn: gso.ecn || cwr, ..gso }))
}

#[cfg(test)]
mod tests;
