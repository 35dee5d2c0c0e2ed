//! Sums of the pseudo headers that TCP, UDP and ICMPv6 checksums begin with.
//!
//! The field of a blank checksum holds such a sum: folded, not complemented.

use super::Accumulator;

/// Returns the sum of the IPv4 pseudo header (RFC 768, RFC 9293 section 3.1): source and destination
/// address, a zero byte, the protocol number, and the length of transport header and payload.
///
/// The length field has 16 bits. A longer length, never on a wire, is summed as 32 bits, as in Linux.
#[must_use]
pub fn pseudo_header_v4(source: [u8; 4], destination: [u8; 4], protocol: u8, length: u32) -> u16 {
    let mut sum = Accumulator::new();
    sum.add(&source);
    sum.add(&destination);
    sum.add(&[0, protocol]);
    sum.add(&length.to_be_bytes());
    sum.fold()
}

/// Returns the sum of the IPv6 pseudo header (RFC 8200, 8.1): source and *final* destination address, the
/// length of transport header and payload, three zero bytes, and the transport's protocol number.
#[must_use]
pub fn pseudo_header_v6(source: [u8; 16], destination: [u8; 16], protocol: u8, length: u32) -> u16 {
    let mut sum = Accumulator::new();
    sum.add(&source);
    sum.add(&destination);
    sum.add(&length.to_be_bytes());
    sum.add(&[0, 0, 0, protocol]);
    sum.fold()
}
