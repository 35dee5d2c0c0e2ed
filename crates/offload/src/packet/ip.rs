//! IPv4 (RFC 791) and IPv6 with its extension headers (RFC 8200).

use super::Network;
use super::error::{Layer, ParseError};
use super::transport::protocol;
use super::view::View;

/// Maximum parsed IPv6 extension headers. Real packets carry one or two; RFC 8200 allows six.
pub const MAX_EXTENSION_HEADERS: u8 = 8;

const IPV6_LEN: u16 = 40;
/// End of the largest IP payload that a fragment may reach (RFC 791: a 16-bit total length).
const MAX_DATAGRAM: u32 = 65535;

/// Part of a datagram that a fragment carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fragment {
    /// Bytes of the datagram before this part, a multiple of 8.
    pub offset: u16,
    /// Set if more parts follow.
    pub more: bool,
}

impl Fragment {
    /// Returns `true` for a real part. An IPv6 packet may carry a fragment header and be whole.
    #[must_use]
    pub fn is_part(self) -> bool {
        self.offset != 0 || self.more
    }

    /// Decodes IPv4's flags and offset: the offset in the low 13 bits, MF above it.
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

/// Parsed fields of an IPv4 header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ipv4 {
    /// Offset of the header in the frame.
    pub offset: u16,
    /// Length of the header with its options in bytes: 20 to 60.
    pub header_len: u8,
    /// Length of header and payload in bytes.
    pub total_len: u16,
    /// Number of the transport protocol.
    pub protocol: u8,
    /// Value of the identification field.
    pub id: u16,
    /// Value of the "don't fragment" flag.
    pub dont_fragment: bool,
    /// Set for one fragment of several.
    pub fragment: Option<Fragment>,
}

/// Parsed fields of an IPv6 header and its extension headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ipv6 {
    /// Offset of the fixed header in the frame.
    pub offset: u16,
    /// Length of the fixed header and the extension headers in bytes.
    pub header_len: u16,
    /// Length of extension headers and payload in bytes.
    pub payload_len: u16,
    /// Protocol number after the last extension header.
    pub protocol: u8,
    /// Number of extension headers.
    pub extensions: u8,
    /// Set if there is a fragment header, even for a whole packet.
    pub fragment: Option<Fragment>,
    /// Set if a routing header has segments left. The pseudo header then needs another destination than the
    /// fixed header's.
    pub routed: bool,
}

/// Parsed IP header, with the values that the transport parser needs.
pub(super) struct Parsed {
    pub(super) network: Network,
    /// Offset of the packet's end.
    pub(super) end: u32,
    /// Offset of the payload.
    pub(super) payload: u16,
    pub(super) protocol: u8,
    /// Set for one fragment of several.
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
    let payload = frame.checked_end(Layer::Ipv4, offset, u16::from(header_len))?;
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

/// Walks the chain of extension headers to the transport header. For a later fragment, stops at its data
/// right after the fragment header. AH, ESP and mobility headers count as transports, because packets
/// behind them cannot be offloaded.
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
        let end = packet.checked_end(Layer::Ipv6Extension, start, len)?;
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
