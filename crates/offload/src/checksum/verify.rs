//! Verification of a parsed packet's checksums, and the sum of its pseudo header.

use super::{Accumulator, internet_checksum, pseudo};
use crate::packet::{Layers, Network, Transport, protocol};
use ringfence_base::numbers::usize_from;

/// Reasons for which a packet has no computable checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChecksumError {
    /// Transport other than TCP, UDP, ICMP or ICMPv6.
    #[error("the packet carries no transport with a known checksum")]
    NoTransport,
    /// Fragment: the checksum spans the whole datagram.
    #[error("the packet is a fragment, its checksum spans the whole datagram")]
    Fragment,
    /// Routing header with segments left: the final destination is unknown.
    #[error("the packet is under way by a routing header, its final destination is not known")]
    Routed,
    /// Headers of another frame than [`Layers`].
    #[error("headers of {headers} bytes are not those of the parsed frame, {needed} are needed")]
    ForeignHeaders {
        /// Bytes that the packet needs.
        needed: usize,
        /// Bytes in the slice.
        headers: usize,
    },
    /// Payload shorter than the packet.
    #[error("the packet has {expected} bytes after its headers, {given} were given")]
    PayloadMissing {
        /// Bytes that `Layers` announces.
        expected: usize,
        /// Bytes in the pieces.
        given: usize,
    },
}

/// Result of verifying a transport checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Correct,
    /// Wrong checksum, or absent although IPv6 requires one.
    Wrong,
    /// UDP over IPv4 without a checksum.
    Absent,
}

/// Returns the sum of a packet's pseudo header: the value of a blank checksum's field.
///
/// ICMP has no pseudo header; its sum is zero. `headers` are the bytes that `layers` were parsed from.
/// IPv4 source routes are not followed: the header's destination is used, as in Linux.
///
/// # Errors
/// Returns [`ChecksumError`] for fragments, unknown transports, routing headers with segments left, and
/// headers too short to be those of `layers`.
pub fn pseudo_header_sum(headers: &[u8], layers: &Layers) -> Result<u16, ChecksumError> {
    let transport = layers.transport();
    if layers.is_fragment() {
        return Err(ChecksumError::Fragment);
    }
    let offset = u32::from(transport.offset().ok_or(ChecksumError::NoTransport)?);
    let remaining = layers.network_end() - offset;
    let (number, length) = match transport {
        Transport::Tcp(_) => (protocol::TCP, remaining),
        Transport::Udp(udp) => (protocol::UDP, u32::from(udp.length)),
        Transport::Icmpv6(_) => (protocol::ICMPV6, remaining),
        Transport::Icmp(_) => return Ok(0),
        Transport::None | Transport::LaterFragment | Transport::Other { .. } => {
            return Err(ChecksumError::NoTransport);
        }
    };
    match layers.network() {
        Network::Ipv4(ip) => {
            let addresses = usize::from(ip.offset) + 12;
            let source = read_array::<4>(headers, addresses)?;
            let destination = read_array::<4>(headers, addresses + 4)?;
            Ok(pseudo::pseudo_header_v4(source, destination, number, length))
        }
        Network::Ipv6(ip) if ip.routed => Err(ChecksumError::Routed),
        Network::Ipv6(ip) => {
            let addresses = usize::from(ip.offset) + 8;
            let source = read_array::<16>(headers, addresses)?;
            let destination = read_array::<16>(headers, addresses + 16)?;
            Ok(pseudo::pseudo_header_v6(source, destination, number, length))
        }
        Network::Arp | Network::Other(_) => Err(ChecksumError::NoTransport),
    }
}

/// Verifies the transport checksum of a frame: private `headers` followed by the `payload` pieces.
///
/// Padding after the IP packet, and bytes after the datagram inside it (UDP options, RFC 9868), are
/// excluded.
///
/// # Errors
/// Returns [`ChecksumError`] if the packet has no checksum to verify, or if bytes are missing.
pub fn verify_transport<'a>(
    headers: &'a [u8],
    payload: impl IntoIterator<Item = &'a [u8]>,
    layers: &Layers,
) -> Result<Verdict, ChecksumError> {
    let mut sum = Accumulator::with_sum(pseudo_header_sum(headers, layers)?);
    let start = usize::from(layers.transport_offset().ok_or(ChecksumError::NoTransport)?);
    let is_udp = matches!(layers.transport(), Transport::Udp(_));
    if is_udp && read_array::<2>(headers, start + 6)? == [0, 0] {
        let over_v6 = matches!(layers.network(), Network::Ipv6(_));
        return Ok(if over_v6 { Verdict::Wrong } else { Verdict::Absent });
    }
    let expected = covered_len(layers);
    let mut missing = expected;
    let first = headers.get(start..).unwrap_or_default();
    for piece in std::iter::once(first).chain(payload) {
        let piece = piece.get(..missing).unwrap_or(piece);
        sum.add(piece);
        missing -= piece.len();
        if missing == 0 {
            break;
        }
    }
    if missing > 0 {
        return Err(ChecksumError::PayloadMissing { expected, given: expected - missing });
    }
    Ok(if sum.checksum() == 0 { Verdict::Correct } else { Verdict::Wrong })
}

/// Returns the length of transport header and payload under the checksum.
fn covered_len(layers: &Layers) -> usize {
    let offset = layers.transport_offset().map_or(layers.network_end(), u32::from);
    let len = match layers.transport() {
        Transport::Udp(udp) => u32::from(udp.length),
        _ => layers.network_end() - offset,
    };
    usize_from(len)
}

/// Verifies the IPv4 header's own checksum; returns `None` for a frame that is not IPv4.
///
/// # Errors
/// Returns [`ChecksumError::ForeignHeaders`] if `headers` is too short for `layers`.
pub fn verify_ipv4_header(headers: &[u8], layers: &Layers) -> Result<Option<bool>, ChecksumError> {
    let Network::Ipv4(ip) = layers.network() else {
        return Ok(None);
    };
    let start = usize::from(ip.offset);
    let end = start + usize::from(ip.header_len);
    let foreign = ChecksumError::ForeignHeaders { needed: end, headers: headers.len() };
    let header = headers.get(start..end).ok_or(foreign)?;
    Ok(Some(internet_checksum(header) == 0))
}

/// Returns the `N` bytes at offset `start`.
fn read_array<const N: usize>(headers: &[u8], start: usize) -> Result<[u8; N], ChecksumError> {
    headers.get(start..).and_then(|rest| rest.first_chunk()).copied().ok_or(
        ChecksumError::ForeignHeaders { needed: start.saturating_add(N), headers: headers.len() },
    )
}
