//! TCP, UDP, ICMP and ICMPv6 headers, as far as offloads need them.

use super::error::{Layer, ParseError};
use super::view::View;
use super::{Network, ip};

/// IP protocol numbers (IANA).
pub mod protocol {
    /// Hop-by-hop options of IPv6.
    pub const IPV6_HOP_BY_HOP: u8 = 0;
    /// Internet Control Message Protocol for IPv4.
    pub const ICMP: u8 = 1;
    /// Transmission Control Protocol (RFC 9293).
    pub const TCP: u8 = 6;
    /// User Datagram Protocol (RFC 768).
    pub const UDP: u8 = 17;
    /// Routing header of IPv6.
    pub const IPV6_ROUTING: u8 = 43;
    /// Fragment header of IPv6.
    pub const IPV6_FRAGMENT: u8 = 44;
    /// Internet Control Message Protocol for IPv6.
    pub const ICMPV6: u8 = 58;
    /// Destination options of IPv6.
    pub const IPV6_DESTINATION: u8 = 60;
}

/// Bits of the TCP header's flag byte (RFC 9293, 3.1).
pub mod tcp_flags {
    /// The sender has no more data.
    pub const FIN: u8 = 0x01;
    /// Synchronises the sequence numbers.
    pub const SYN: u8 = 0x02;
    /// Resets the TCP connection.
    pub const RST: u8 = 0x04;
    /// Requests immediate delivery to the application.
    pub const PSH: u8 = 0x08;
    /// The acknowledgement number is valid.
    pub const ACK: u8 = 0x10;
    /// The urgent pointer is valid.
    pub const URG: u8 = 0x20;
    /// Echoes congestion experienced (RFC 3168).
    pub const ECE: u8 = 0x40;
    /// Congestion window reduced (RFC 3168).
    pub const CWR: u8 = 0x80;
}

/// Parsed fields of a TCP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tcp {
    /// Offset of the header in the frame.
    pub offset: u16,
    /// Length of the header with its options in bytes: 20 to 60.
    pub header_len: u8,
    /// Flag byte with the bits of [`tcp_flags`].
    pub flags: u8,
}

/// Parsed fields of a UDP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Udp {
    /// Offset of the header in the frame.
    pub offset: u16,
    /// Length of header and data in bytes. At most the IP payload, except in a first fragment.
    pub length: u16,
}

/// Common part of all ICMP messages: type, code, checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Icmp {
    /// Offset of the header in the frame.
    pub offset: u16,
    pub kind: u8,
}

/// Transport layer of an IP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Frame that is not IP.
    None,
    /// Fragment other than the first, which has no transport header.
    LaterFragment,
    Tcp(Tcp),
    Udp(Udp),
    Icmp(Icmp),
    Icmpv6(Icmp),
    /// Unknown protocol in the first or only fragment.
    Other {
        /// Offset of its header in the frame.
        offset: u16,
        protocol: u8,
    },
}

impl Transport {
    /// Returns the offset of the transport header, if there is one.
    #[must_use]
    pub fn offset(self) -> Option<u16> {
        match self {
            Self::None | Self::LaterFragment => None,
            Self::Tcp(Tcp { offset, .. })
            | Self::Udp(Udp { offset, .. })
            | Self::Icmp(Icmp { offset, .. })
            | Self::Icmpv6(Icmp { offset, .. })
            | Self::Other { offset, .. } => Some(offset),
        }
    }

    /// Returns the end of the transport header; for an unknown protocol, its start.
    pub(super) fn header_end(self) -> Option<u16> {
        let len = match self {
            Self::Tcp(tcp) => u16::from(tcp.header_len),
            Self::Udp(_) => UDP_LEN,
            Self::Icmp(_) | Self::Icmpv6(_) => ICMP_LEN,
            Self::None | Self::LaterFragment | Self::Other { .. } => 0,
        };
        self.offset().map(|offset| offset + len)
    }

    pub(super) fn parse(packet: &View<'_>, ip: &ip::Parsed) -> Result<Self, ParseError> {
        let offset = ip.payload;
        if ip.fragment.is_some_and(|fragment| fragment.offset != 0) {
            return Ok(Self::LaterFragment);
        }
        let over_v4 = matches!(ip.network, Network::Ipv4(_));
        match ip.protocol {
            protocol::TCP => parse_tcp(packet, offset).map(Self::Tcp),
            protocol::UDP => parse_udp(packet, offset, ip.fragment.is_some()).map(Self::Udp),
            protocol::ICMP if over_v4 => parse_icmp(packet, offset).map(Self::Icmp),
            protocol::ICMPV6 if !over_v4 => parse_icmp(packet, offset).map(Self::Icmpv6),
            protocol => Ok(Self::Other { offset, protocol }),
        }
    }
}

const UDP_LEN: u16 = 8;
const ICMP_LEN: u16 = 4;

fn parse_tcp(packet: &View<'_>, offset: u16) -> Result<Tcp, ParseError> {
    let header = packet.array::<20>(Layer::Tcp, offset)?;
    let header_len = (header[12] >> 4) * 4;
    if header_len < 20 {
        return Err(ParseError::TcpHeaderLength { offered: header_len });
    }
    packet.checked_end(Layer::Tcp, offset, u16::from(header_len))?;
    Ok(Tcp { offset, header_len, flags: header[13] })
}

fn parse_udp(packet: &View<'_>, offset: u16, first_fragment: bool) -> Result<Udp, ParseError> {
    let header = packet.array::<8>(Layer::Udp, offset)?;
    let length = u16::from_be_bytes([header[4], header[5]]);
    let maximum = packet.end() - u32::from(offset);
    let beyond = u32::from(length) > maximum && !first_fragment;
    if length < UDP_LEN || beyond {
        return Err(ParseError::UdpLength { offered: length, maximum });
    }
    Ok(Udp { offset, length })
}

fn parse_icmp(packet: &View<'_>, offset: u16) -> Result<Icmp, ParseError> {
    let header = packet.array::<4>(Layer::Icmp, offset)?;
    Ok(Icmp { offset, kind: header[0] })
}
