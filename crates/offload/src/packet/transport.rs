//! TCP, UDP and the ICMPs, as far as offloads need them.

use super::error::{Layer, ParseError};
use super::view::View;
use super::{Network, ip};

/// Protocol numbers (IANA).
pub mod protocol {
    /// IPv6 hop-by-hop options.
    pub const IPV6_HOP_BY_HOP: u8 = 0;
    /// ICMP for IPv4.
    pub const ICMP: u8 = 1;
    /// TCP.
    pub const TCP: u8 = 6;
    /// UDP.
    pub const UDP: u8 = 17;
    /// IPv6 routing header.
    pub const IPV6_ROUTING: u8 = 43;
    /// IPv6 fragment header.
    pub const IPV6_FRAGMENT: u8 = 44;
    /// ICMPv6.
    pub const ICMPV6: u8 = 58;
    /// IPv6 destination options.
    pub const IPV6_DESTINATION: u8 = 60;
}

/// Bits of the TCP header's flag octet (RFC 9293, 3.1).
pub mod tcp_flags {
    /// No more data.
    pub const FIN: u8 = 0x01;
    /// Synchronise sequence numbers.
    pub const SYN: u8 = 0x02;
    /// Reset.
    pub const RST: u8 = 0x04;
    /// Push.
    pub const PSH: u8 = 0x08;
    /// The acknowledgement number counts.
    pub const ACK: u8 = 0x10;
    /// The urgent pointer counts.
    pub const URG: u8 = 0x20;
    /// Congestion experienced, echoed (RFC 3168).
    pub const ECE: u8 = 0x40;
    /// Congestion window reduced (RFC 3168).
    pub const CWR: u8 = 0x80;
}

/// A TCP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tcp {
    /// Where the header starts in the frame.
    pub offset: u16,
    /// Octets of the header with its options: 20 to 60.
    pub header_len: u8,
    /// The flag octet, see [`tcp_flags`].
    pub flags: u8,
}

/// A UDP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Udp {
    /// Where the header starts in the frame.
    pub offset: u16,
    /// Octets of header and data. At most the IP payload, unless the packet is a first fragment.
    pub length: u16,
}

/// The part that all ICMP messages share: type, code, checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Icmp {
    /// Where the header starts in the frame.
    pub offset: u16,
    /// Message type.
    pub kind: u8,
}

/// What the IP packet carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transport {
    /// The frame is not IP.
    None,
    /// A fragment other than the first: there is no transport header.
    LaterFragment,
    /// TCP.
    Tcp(Tcp),
    /// UDP.
    Udp(Udp),
    /// ICMP, over IPv4.
    Icmp(Icmp),
    /// ICMPv6, over IPv6.
    Icmpv6(Icmp),
    /// Another protocol.
    Other {
        /// Where its header starts in the frame.
        offset: u16,
        /// Protocol number.
        protocol: u8,
    },
}

impl Transport {
    /// Where the transport header starts, if there is one.
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

    /// Where the transport header ends; for a protocol that is not known, where it starts.
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
    packet.reach(Layer::Tcp, offset, u16::from(header_len))?;
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
