//! Metadata from an untrusted sender: what is accepted.
//!
//! # Theory of operation
//!
//! A guest, or another host's kernel, says how its frame is to be finished. Every number in that is
//! an offset somebody will write to, or a divisor of a length. [`accept`] checks it against the frame's
//! own headers, in the order of Linux's `virtio_net_hdr_to_skb`, and then goes further, since a frame
//! here is handed on rather than parsed again:
//!
//! * A segmentation order must name what the headers show: TCP over IPv4, TCP over IPv6, or UDP, not a
//!   fragment, no IPv6 fragment header, the IP packet filling the frame, and the checksum at that
//!   transport's place. So whoever segments finds the headers of the promised kind.
//! * An accepted order always has a blank checksum whose field holds the pseudo header's sum. A sender
//!   that left the checksum out (Linux takes such TCP and UFO frames, and old netfronts send them)
//!   gets it added, in the private copy of the headers. USO without one is refused, as in Linux.
//! * An order that would make one packet is dropped: the frame is an ordinary one.
//! * A blank checksum without segmentation may lie anywhere after the IP header (the inner packet of a
//!   tunnel), but never in a fragment, and its field is within the private header bytes, so that it
//!   can be finished in place.
//!
//! Accepting twice changes nothing. What is not checked: whether the other side may use the feature at
//! all (that is negotiation), and the content of a pseudo header sum that the sender did provide
//! ([`reset_pseudo_header`] replaces it).

use crate::blank::{ResetError, reset_pseudo_header};
use crate::meta::{Checksum, ChecksumPlace, Gso, GsoKind, OffloadMeta};
use crate::packet::{Layers, Network, Transport, tcp_flags};

/// Segments a UDP super-packet may stand for (Linux `UDP_MAX_SEGMENTS`).
pub const MAX_UDP_SEGMENTS: u32 = 128;
/// A segment size that Linux gives a meaning of its own (`GSO_BY_FRAGS`).
pub const RESERVED_GSO_SIZE: u16 = 0xffff;
/// Smallest payload of an IP fragment that others follow.
pub const MIN_FRAGMENT_SIZE: u16 = 8;

/// Smallest payload of a TCP segment that others follow. Linux never asks for less
/// (`TCP_MIN_GSO_SIZE`), but would split into segments of one octet; this bounds the work that a
/// frame can ask for.
pub const MIN_SEGMENT_SIZE: u16 = 8;

/// Octets before the transport header of the smallest IP frame whose headers are not known to us.
const MIN_UNKNOWN_START: u32 = 14 + 20;

/// Why metadata was not accepted: one variant for each broken rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The blank checksum's field ends after the frame.
    #[error("checksum field ends at octet {end} of a frame of {frame_len}")]
    ChecksumBeyondFrame {
        /// First octet after the field, or after the smallest transport header at its start.
        end: u32,
        /// Length of the frame.
        frame_len: u32,
    },
    /// The blank checksum's field is in the frame, but not in the private header bytes.
    #[error("checksum field ends at octet {end}, only the first {captured} are private")]
    ChecksumNotCaptured {
        /// First octet after the field.
        end: u32,
        /// Private header bytes.
        captured: u16,
    },
    /// The blank checksum starts inside the link or IP headers.
    #[error("checksum starts at octet {start}, the transport cannot start before {minimum}")]
    ChecksumInHeaders {
        /// Start offered.
        start: u16,
        /// First octet that may be a transport's.
        minimum: u32,
    },
    /// A fragment has no checksum of its own that could be blank.
    #[error("blank checksum on a fragment")]
    ChecksumOnFragment,
    /// Segment size zero.
    #[error("segment size is zero")]
    SizeZero,
    /// Segment size [`RESERVED_GSO_SIZE`].
    #[error("segment size {RESERVED_GSO_SIZE:#x} is reserved")]
    SizeReserved,
    /// A TCP segment size below [`MIN_SEGMENT_SIZE`].
    #[error("segment size {size} is below {MIN_SEGMENT_SIZE}")]
    SegmentSize {
        /// Size offered.
        size: u16,
    },
    /// A fragment size below [`MIN_FRAGMENT_SIZE`].
    #[error("fragment size {size} is below {MIN_FRAGMENT_SIZE}")]
    FragmentSize {
        /// Size offered.
        size: u16,
    },
    /// ECN on something other than TCP.
    #[error("ECN mark on a segmentation type that is not TCP")]
    EcnWithoutTcp,
    /// The headers are of another IP version or transport than the order, or of a fragment.
    #[error("segmentation as {kind:?} of a packet that is not that")]
    KindMismatch {
        /// Kind offered.
        kind: GsoKind,
    },
    /// The IP packet does not fill the frame.
    #[error("super-packet's IP length ends at octet {end} of a frame of {frame_len}")]
    LengthMismatch {
        /// Where the IP packet ends.
        end: u32,
        /// Length of the frame.
        frame_len: u32,
    },
    /// The blank checksum of a super-packet is not its transport's.
    #[error("super-packet with its checksum at {offered:?}, the transport's is at {expected:?}")]
    ChecksumElsewhere {
        /// Place offered.
        offered: ChecksumPlace,
        /// Place that the headers give.
        expected: ChecksumPlace,
    },
    /// UDP segmentation without a blank checksum.
    #[error("UDP segmentation without a blank checksum")]
    UdpWithoutChecksum,
    /// UDP segmentation into more than [`MAX_UDP_SEGMENTS`].
    #[error("{payload} octets in UDP segments of {size} are more than {MAX_UDP_SEGMENTS} segments")]
    TooManySegments {
        /// Payload of the super-packet.
        payload: u32,
        /// Segment size.
        size: u16,
    },
    /// The checksum that the sender left out cannot be added.
    #[error("super-packet without a blank checksum, and none can be added: {0}")]
    CannotBlank(#[from] ResetError),
}

/// Checks `offered` against the frame's headers and returns metadata that may be acted on.
///
/// `headers` is the private copy that `layers` was parsed from. It is written to in one case only: a
/// super-packet without a blank checksum gets the pseudo header's sum in its checksum field.
///
/// # Errors
/// A [`Refusal`] for the first rule broken. The frame should then be dropped and counted.
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

/// The rules for any blank checksum.
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

/// The headers are of the kind the order names, and describe the whole frame.
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

/// A super-packet's checksum is its transport's.
fn check_transport_place(place: ChecksumPlace, layers: &Layers) -> Result<Checksum, Refusal> {
    match layers.checksum_place() {
        Some(expected) if expected == place => Ok(place.into()),
        Some(expected) => Err(Refusal::ChecksumElsewhere { offered: place, expected }),
        None => Err(Refusal::ChecksumOnFragment),
    }
}

/// Bounds the segments, drops an order that makes one packet, and re-reads ECN from the header.
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
