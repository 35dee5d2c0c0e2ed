//! Why a frame's headers could not be parsed.

use std::fmt;

/// The header a parse error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layer {
    /// Ethernet II or 802.3.
    Ethernet,
    /// 802.1Q or 802.1ad tag.
    Vlan,
    /// IPv4 with its options.
    Ipv4,
    /// The fixed IPv6 header.
    Ipv6,
    /// An IPv6 extension header.
    Ipv6Extension,
    /// TCP with its options.
    Tcp,
    /// UDP.
    Udp,
    /// The common part of ICMP and ICMPv6.
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

/// Why a frame's headers could not be parsed. Positions count from the start of the frame, in octets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// The frame, or the IP packet in it, ends inside a header.
    #[error("{layer} needs {needed} octets, the packet ends at {end}")]
    Truncated {
        /// The header that is cut.
        layer: Layer,
        /// Where the header would end.
        needed: u32,
        /// Where the frame or the IP packet ends.
        end: u32,
    },
    /// The header is inside the frame, but beyond the bytes given. Give more of the frame, or treat
    /// the frame as too deep to offload.
    #[error("{layer} reaches octet {needed}, only the first {captured} are at hand")]
    NotCaptured {
        /// The header that is out of reach.
        layer: Layer,
        /// Where the header ends.
        needed: u32,
        /// Header bytes given.
        captured: u16,
    },
    /// The version nibble disagrees with the EtherType.
    #[error("IP version {version} under EtherType {ethertype:#06x}")]
    IpVersion {
        /// EtherType of the frame.
        ethertype: u16,
        /// Version nibble of the header.
        version: u8,
    },
    /// IPv4 header length below its minimum.
    #[error("IPv4 header length {offered} is below 20")]
    Ipv4HeaderLength {
        /// Octets the header claims.
        offered: u8,
    },
    /// IPv4 total length smaller than the header.
    #[error("IPv4 total length {total} is below its header length {header}")]
    Ipv4TotalLength {
        /// Octets the packet claims.
        total: u16,
        /// Octets of the header.
        header: u8,
    },
    /// The IP packet is longer than the frame.
    #[error("IP packet ends at {end}, beyond the frame's {frame_len} octets")]
    IpBeyondFrame {
        /// Where the IP packet claims to end.
        end: u32,
        /// Length of the frame.
        frame_len: u32,
    },
    /// More IPv6 extension headers than [`MAX_EXTENSION_HEADERS`](super::MAX_EXTENSION_HEADERS).
    #[error("more than {limit} IPv6 extension headers")]
    TooManyExtensionHeaders {
        /// The limit.
        limit: u8,
    },
    /// A fragment that would end beyond the largest datagram, or more data to follow at a length
    /// that is no multiple of 8 (RFC 791, RFC 8200 section 4.5).
    #[error("fragment of {len} octets at offset {offset}, more to follow: {more}")]
    FragmentSpan {
        /// Octet offset of the fragment.
        offset: u16,
        /// Octets of payload in it.
        len: u32,
        /// More fragments follow.
        more: bool,
    },
    /// TCP data offset below its minimum.
    #[error("TCP header length {offered} is below 20")]
    TcpHeaderLength {
        /// Octets the header claims.
        offered: u8,
    },
    /// UDP length below its header, or beyond the IP payload.
    #[error("UDP length {offered} is not within 8 and {maximum}")]
    UdpLength {
        /// Octets the datagram claims.
        offered: u16,
        /// Octets of IP payload.
        maximum: u32,
    },
}
