//! Updates of length fields, and of dependent fields, in private headers.
//!
//! Offsets come from [`Layers`](crate::Layers) of the same headers, or of longer ones, so they lie inside.
//! The caller has bounded all lengths.

use crate::checksum::internet_checksum;
use ringfence_base::numbers::bounded;

/// Length of the fixed IPv6 header in bytes.
pub(crate) const IPV6_LEN: usize = 40;
/// Length of a UDP header in bytes.
pub(crate) const UDP_LEN: usize = 8;

/// Returns the 16-bit field at offset `at`.
pub(crate) fn get_u16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// Returns the 32-bit field at offset `at`.
pub(crate) fn get_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Stores a 16-bit field at offset `at`.
pub(crate) fn put_u16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

/// Stores a 32-bit field at offset `at`.
pub(crate) fn put_u32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
}

/// Converts a length of at most 65535 to its 16-bit field.
#[inline]
pub(crate) fn field(len: usize) -> u16 {
    bounded(len, u16::MAX)
}

/// Header offsets of a TCP or UDP packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Offset of the IP header.
    pub(crate) network: usize,
    /// Offset of the transport header, after IPv4's options or IPv6's extension headers.
    pub(crate) transport: usize,
    pub(crate) is_v6: bool,
}

impl Shape {
    /// Sets the IP packet's length to `ip_len` bytes, IP header included.
    pub(crate) fn set_ip_len(self, header: &mut [u8], ip_len: usize) {
        if self.is_v6 {
            put_u16(header, self.network + 4, field(ip_len.saturating_sub(IPV6_LEN)));
        } else {
            put_u16(header, self.network + 2, field(ip_len));
        }
    }

    /// Recomputes the checksum of the IPv4 header; does nothing for IPv6, which has none.
    pub(crate) fn set_ip_checksum(self, header: &mut [u8]) {
        if self.is_v6 {
            return;
        }
        let at = self.network + 10;
        put_u16(header, at, 0);
        let checksum = internet_checksum(&header[self.network..self.transport]);
        put_u16(header, at, checksum);
    }
}
