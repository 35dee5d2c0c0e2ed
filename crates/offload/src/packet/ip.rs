//! IPv4 (RFC 791) and IPv6 with its extension headers (RFC 8200).

use super::Network;
use super::error::{Layer, ParseError};
use super::transport::protocol;
use super::view::View;

/// IPv6 extension headers looked through. Real packets carry one or two; RFC 8200 allows six.
pub const MAX_EXTENSION_HEADERS: u8 = 8;

const IPV6_LEN: u16 = 40;
/// Largest IP payload a fragment may reach (RFC 791: a 16-bit total length).
const MAX_DATAGRAM: u32 = 65535;

/// Which part of a datagram a packet carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fragment {
    /// Octets of the datagram before this part, a multiple of 8.
    pub offset: u16,
    /// More parts follow.
    pub more: bool,
}

impl Fragment {
    /// Whether it is really a part: an IPv6 packet may carry a fragment header and be whole.
    #[must_use]
    pub fn is_part(self) -> bool {
        self.offset != 0 || self.more
    }

    /// From the 16 bits of either header: IPv4 has the offset in the low 13 bits and MF above it;
    /// IPv6 has the offset in the high 13 bits and M in the lowest.
    fn from_v4(field: u16) -> Self {
        Self { offset: (field & 0x1fff) << 3, more: field & 0x2000 != 0 }
    }

    fn from_v6(field: u16) -> Self {
        Self { offset: field & 0xfff8, more: field & 1 != 0 }
    }

    /// Refuses spans that no datagram has (the "ping of death" family).
    fn check(self, len: u32) -> Result<(), ParseError> {
        let beyond = u32::from(self.offset) + len > MAX_DATAGRAM;
        if beyond || (self.more && !len.is_multiple_of(8)) {
            return Err(ParseError::FragmentSpan { offset: self.offset, len, more: self.more });
        }
        Ok(())
    }
}

/// An IPv4 header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ipv4 {
    /// Where the header starts in the frame.
    pub offset: u16,
    /// Octets of the header with its options: 20 to 60.
    pub header_len: u8,
    /// Octets of header and payload.
    pub total_len: u16,
    /// Transport protocol number.
    pub protocol: u8,
    /// Identification field.
    pub id: u16,
    /// The "don't fragment" flag.
    pub dont_fragment: bool,
    /// Set if the packet is one part of several.
    pub fragment: Option<Fragment>,
}

/// An IPv6 header and what is known of its extension headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ipv6 {
    /// Where the fixed header starts in the frame.
    pub offset: u16,
    /// Octets of the fixed header and the extension headers.
    pub header_len: u16,
    /// Octets after the fixed header: extension headers and payload.
    pub payload_len: u16,
    /// Protocol number after the last extension header.
    pub protocol: u8,
    /// Number of extension headers.
    pub extensions: u8,
    /// Set if there is a fragment header; it may say that the packet is whole.
    pub fragment: Option<Fragment>,
    /// Set if a routing header has segments left: the final destination, which the pseudo header
    /// needs, is then not the one in the fixed header.
    pub routed: bool,
}

/// An IP header, and what the transport's parser needs of it.
pub(super) struct Parsed {
    pub(super) network: Network,
    /// Where the packet ends.
    pub(super) end: u32,
    /// Where its payload starts.
    pub(super) payload: u16,
    pub(super) protocol: u8,
    /// Set if the packet is one part of several.
    pub(super) fragment: Option<Fragment>,
}

fn check_end(frame: &View<'_>, offset: u16, len: u32) -> Result<u32, ParseError> {
    let end = u32::from(offset) + len;
    if end > frame.end() {
        return Err(ParseError::IpBeyondFrame { end, frame_len: frame.end() });
    }
    Ok(end)
}

fn check_version(first: u8, version: u8, ethertype: u16) -> Result<(), ParseError> {
    if first >> 4 != version {
        return Err(ParseError::IpVersion { ethertype, version: first >> 4 });
    }
    Ok(())
}

pub(super) fn parse_v4(frame: &View<'_>, offset: u16) -> Result<Parsed, ParseError> {
    let header = frame.array::<20>(Layer::Ipv4, offset)?;
    check_version(header[0], 4, super::ethertype::IPV4)?;
    let header_len = (header[0] & 0x0f) * 4;
    if header_len < 20 {
        return Err(ParseError::Ipv4HeaderLength { offered: header_len });
    }
    let total_len = u16::from_be_bytes([header[2], header[3]]);
    if total_len < u16::from(header_len) {
        return Err(ParseError::Ipv4TotalLength { total: total_len, header: header_len });
    }
    let end = check_end(frame, offset, u32::from(total_len))?;
    let payload = frame.reach(Layer::Ipv4, offset, u16::from(header_len))?;
    let flags = u16::from_be_bytes([header[6], header[7]]);
    let fragment = Some(Fragment::from_v4(flags)).filter(|fragment| fragment.is_part());
    if let Some(fragment) = fragment {
        fragment.check(end - u32::from(payload))?;
    }
    let ip = Ipv4 {
        offset,
        header_len,
        total_len,
        protocol: header[9],
        id: u16::from_be_bytes([header[4], header[5]]),
        dont_fragment: flags & 0x4000 != 0,
        fragment,
    };
    Ok(Parsed { network: Network::Ipv4(ip), end, payload, protocol: ip.protocol, fragment })
}

pub(super) fn parse_v6(frame: &View<'_>, offset: u16) -> Result<Parsed, ParseError> {
    let header = frame.array::<40>(Layer::Ipv6, offset)?;
    check_version(header[0], 6, super::ethertype::IPV6)?;
    let payload_len = u16::from_be_bytes([header[4], header[5]]);
    let end = check_end(frame, offset, u32::from(IPV6_LEN) + u32::from(payload_len))?;
    let mut ip = Ipv6 {
        offset,
        header_len: IPV6_LEN,
        payload_len,
        protocol: header[6],
        extensions: 0,
        fragment: None,
        routed: false,
    };
    walk_extensions(&frame.shortened(end), &mut ip)?;
    let payload = offset + ip.header_len;
    let fragment = ip.fragment.filter(|fragment| fragment.is_part());
    if let Some(fragment) = fragment {
        fragment.check(end - u32::from(payload))?;
    }
    Ok(Parsed { network: Network::Ipv6(ip), end, payload, protocol: ip.protocol, fragment })
}

/// Follows the chain of extension headers to the transport, or to a later fragment's data, which
/// begins right after its fragment header. AH, ESP and mobility headers count as transports: nothing
/// behind them can be offloaded.
fn walk_extensions(packet: &View<'_>, ip: &mut Ipv6) -> Result<(), ParseError> {
    while is_extension(ip.protocol) {
        if ip.extensions == MAX_EXTENSION_HEADERS {
            return Err(ParseError::TooManyExtensionHeaders { limit: MAX_EXTENSION_HEADERS });
        }
        let start = ip.offset + ip.header_len;
        let header = packet.array::<8>(Layer::Ipv6Extension, start)?;
        let len = match ip.protocol {
            protocol::IPV6_FRAGMENT => 8,
            _ => 8 * (u16::from(header[1]) + 1),
        };
        let end = packet.reach(Layer::Ipv6Extension, start, len)?;
        match ip.protocol {
            protocol::IPV6_FRAGMENT => {
                let fragment = Fragment::from_v6(u16::from_be_bytes([header[2], header[3]]));
                ip.fragment = Some(fragment);
            }
            protocol::IPV6_ROUTING => ip.routed |= header[3] != 0,
            _ => {}
        }
        ip.extensions += 1;
        ip.header_len = end - ip.offset;
        ip.protocol = header[0];
        if ip.fragment.is_some_and(|fragment| fragment.offset != 0) {
            break;
        }
    }
    Ok(())
}

fn is_extension(number: u8) -> bool {
    matches!(
        number,
        protocol::IPV6_HOP_BY_HOP
            | protocol::IPV6_ROUTING
            | protocol::IPV6_FRAGMENT
            | protocol::IPV6_DESTINATION
    )
}
