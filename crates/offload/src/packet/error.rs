//! Errors of header parsing.

use std::fmt;

/// Header that a parse error concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layer {
    /// Ethernet II or 802.3 header.
    Ethernet,
    /// 802.1Q or 802.1ad tag.
    Vlan,
    /// IPv4 with its options.
    Ipv4,
    /// Fixed part of the IPv6 header.
    Ipv6,
    Ipv6Extension,
    /// TCP with its options.
    Tcp,
    Udp,
    /// Common part of ICMP and ICMPv6.
    Icmp,
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ethernet => "Ethernet header",
            Self::Vlan => "VLAN tag",
            Self::Ipv4 => "IPv4 header",
            Self::Ipv6 => "IPv6 header",
            Self::Ipv6Extension => "IPv6 extension header",
            Self::Tcp => "TCP header",
            Self::Udp => "UDP header",
            Self::Icmp => "ICMP header",
        })
    }
}

/// Errors of header parsing. Offsets are bytes from the start of the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// Frame, or IP packet in it, that ends inside a header.
    #[error("{layer} needs {needed} bytes, the packet ends at {end}")]
    Truncated {
        /// Header that is cut off.
        layer: Layer,
        /// Offset of the header's end.
        needed: u32,
        /// Offset of the end of the frame or IP packet.
        end: u32,
    },
    /// Header inside the frame, but beyond the given bytes. Copy more of the frame, or treat the frame as too
    /// deep to offload.
    #[error("{layer} reaches byte {needed}, only the first {captured} are available")]
    NotCaptured {
        /// Header that is out of reach.
        layer: Layer,
        /// Offset of the header's end.
        needed: u32,
        /// Number of header bytes given.
        captured: u16,
    },
    /// Version nibble that disagrees with the EtherType.
    #[error("IP version {version} under EtherType {ethertype:#06x}")]
    IpVersion {
        ethertype: u16,
        /// Version nibble of the header.
        version: u8,
    },
    /// IPv4 header length below its minimum.
    #[error("IPv4 header length {offered} is below 20")]
    Ipv4HeaderLength {
        /// Length in the header in bytes.
        offered: u8,
    },
    /// IPv4 total length smaller than the header.
    #[error("IPv4 total length {total} is below its header length {header}")]
    Ipv4TotalLength {
        /// Total length in the header in bytes.
        total: u16,
        /// Length of the header in bytes.
        header: u8,
    },
    /// IP packet longer than the frame.
    #[error("IP packet ends at {end}, beyond the frame's {frame_len} bytes")]
    IpBeyondFrame {
        /// Offset of the IP packet's end.
        end: u32,
        frame_len: u32,
    },
    /// More IPv6 extension headers than [`MAX_EXTENSION_HEADERS`](super::MAX_EXTENSION_HEADERS).
    #[error("more than {limit} IPv6 extension headers")]
    TooManyExtensionHeaders {
        /// Maximum number of extension headers.
        limit: u8,
    },
    /// Fragment that would end beyond the largest datagram, or that is not the last although its length is no
    /// multiple of 8 (RFC 791, RFC 8200 section 4.5).
    #[error("fragment of {len} bytes at offset {offset}, more to follow: {more}")]
    FragmentSpan {
        /// Offset of the fragment in bytes.
        offset: u16,
        /// Payload bytes of the fragment.
        len: u32,
        /// Set if more fragments follow.
        more: bool,
    },
    /// TCP data offset below its minimum.
    #[error("TCP header length {offered} is below 20")]
    TcpHeaderLength {
        /// Length in the header in bytes.
        offered: u8,
    },
    /// UDP length below its header, or beyond the IP payload.
    #[error("UDP length {offered} is not within 8 and {maximum}")]
    UdpLength {
        /// Length in the UDP header in bytes.
        offered: u16,
        /// Bytes of the IP payload.
        maximum: u32,
    },
}
