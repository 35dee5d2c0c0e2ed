//! Header parser: finds the headers of a frame.
//!
//! # Theory of operation
//!
//! [`Layers::parse`] reads a *private copy* of a frame's first bytes and returns a small `Copy` value of
//! offsets and kinds. It walks Ethernet, up to two VLAN tags, IPv4 with options or IPv6 with extension
//! headers, and TCP, UDP, ICMP or ICMPv6. The result borrows nothing, so the caller may rewrite the bytes.
//!
//! Three limits bound every read, all checked in `view`: the end of the frame, the end of the IP packet in
//! it, and the end of the copy. The first two differ, because frames are padded to 60 bytes on the wire. A
//! header beyond the first two is [`ParseError::Truncated`]; a header beyond only the third is
//! [`ParseError::NotCaptured`].
//!
//! The parser refuses headers that contradict themselves. It reports unknown EtherTypes, a third tag and
//! unknown transports as `Other`: a switch forwards such frames, and offloads ignore them. It reads no
//! checksum ([`verify`](crate::checksum::verify) does) and no option.
//!
//! Every `Layers` guarantees: all offsets lie within the parsed bytes, and
//! `transport_offset ≤ header_len ≤ network_end ≤ frame_len`. It guarantees nothing about other bytes.
//! Functions that take headers with a `Layers` check the length again.

mod error;
mod ip;
mod link;
#[cfg(test)]
mod tests;
mod transport;
mod view;

pub use error::{Layer, ParseError};
pub use ip::{Fragment, Ipv4, Ipv6, MAX_EXTENSION_HEADERS};
pub use link::{Link, MAX_VLAN_TAGS, ethertype};
pub use transport::{Icmp, Tcp, Transport, Udp, protocol, tcp_flags};

use crate::meta::{ChecksumPlace, TCP_CHECKSUM_OFFSET, UDP_CHECKSUM_OFFSET};
use view::View;

/// Network layer of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Network {
    Ipv4(Ipv4),
    Ipv6(Ipv6),
    /// ARP packet; its fields are not parsed.
    Arp,
    /// Other protocol: the EtherType, or an 802.3 length if below 0x0600.
    Other(u16),
}

/// Offsets and kinds of a frame's headers. The [module](self) has the guarantees.
///
/// ```
/// use ringfence_offload::packet::{Layers, Network, Transport};
///
/// let mut frame = [0u8; 60];
/// frame[12..14].copy_from_slice(&0x0800u16.to_be_bytes()); // EtherType: IPv4
/// frame[14] = 0x45; // version 4, five words of header
/// frame[16..18].copy_from_slice(&28u16.to_be_bytes()); // total length
/// frame[23] = 17; // UDP
/// frame[38..40].copy_from_slice(&8u16.to_be_bytes()); // UDP length
/// let layers = Layers::parse(&frame, 60)?;
/// assert_eq!((layers.transport_offset(), layers.header_len()), (Some(34), 42));
/// assert_eq!(layers.network_end(), 42); // the rest is padding
/// assert!(matches!(layers.transport(), Transport::Udp(_)));
/// # Ok::<(), ringfence_offload::packet::ParseError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layers {
    frame_len: u32,
    network_end: u32,
    captured: u16,
    header_len: u16,
    link: Link,
    network: Network,
    transport: Transport,
}

impl Layers {
    /// Parses the headers at the start of a frame.
    ///
    /// `headers` holds the frame's first bytes: 256 are enough, and bytes past `frame_len` are ignored.
    /// `frame_len` is the length of the whole frame in bytes, without virtio or netif headers and without the
    /// frame check sequence.
    ///
    /// # Errors
    /// Returns [`ParseError`] for a frame that ends inside a header or contradicts itself.
    pub fn parse(headers: &[u8], frame_len: u32) -> Result<Self, ParseError> {
        let frame = View::new(headers, frame_len);
        let link = Link::parse(&frame)?;
        let offset = link.network_offset();
        let ip = match link.ethertype {
            ethertype::IPV4 => ip::parse_v4(&frame, offset)?,
            ethertype::IPV6 => ip::parse_v6(&frame, offset)?,
            other => {
                let network =
                    if other == ethertype::ARP { Network::Arp } else { Network::Other(other) };
                return Ok(Self {
                    frame_len,
                    network_end: frame_len,
                    captured: frame.captured(),
                    header_len: offset,
                    link,
                    network,
                    transport: Transport::None,
                });
            }
        };
        let packet = frame.shortened(ip.end);
        let transport = Transport::parse(&packet, &ip)?;
        Ok(Self {
            frame_len,
            network_end: ip.end,
            captured: frame.captured(),
            header_len: transport.header_end().unwrap_or(ip.payload),
            link,
            network: ip.network,
            transport,
        })
    }

    /// Returns the length of the whole frame in bytes.
    #[must_use]
    pub fn frame_len(&self) -> u32 {
        self.frame_len
    }

    /// Returns the length of the private header copy, at most the frame's length.
    #[must_use]
    pub fn captured(&self) -> u16 {
        self.captured
    }

    /// Returns the link layer.
    #[must_use]
    pub fn link(&self) -> Link {
        self.link
    }

    /// Returns the offset of the network header: 14, 18 or 22.
    #[must_use]
    pub fn network_offset(&self) -> u16 {
        self.link.network_offset()
    }

    /// Returns the network layer.
    #[must_use]
    pub fn network(&self) -> Network {
        self.network
    }

    /// Returns the end of the IP packet, which excludes the frame's padding. For other networks, returns the
    /// frame's length.
    #[must_use]
    pub fn network_end(&self) -> u32 {
        self.network_end
    }

    /// Returns the transport layer.
    #[must_use]
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// Returns the offset of the transport header, or of an unknown transport's first byte. Returns `None` for
    /// a frame that is not IP and for a fragment other than the first.
    #[must_use]
    pub fn transport_offset(&self) -> Option<u16> {
        self.transport.offset()
    }

    /// Returns the length of all headers in bytes, transport options included. Every segment of a super-packet
    /// repeats these bytes.
    #[must_use]
    pub fn header_len(&self) -> u16 {
        self.header_len
    }

    /// Returns the bytes between the headers and the end of the IP packet.
    #[must_use]
    pub fn payload_len(&self) -> u32 {
        self.network_end - u32::from(self.header_len)
    }

    /// Returns `true` if the packet is one fragment of several, the first included. An IPv6 "atomic" fragment
    /// is whole.
    #[must_use]
    pub fn is_fragment(&self) -> bool {
        match self.network {
            Network::Ipv4(ip) => ip.fragment.is_some(),
            Network::Ipv6(ip) => ip.fragment.is_some_and(Fragment::is_part),
            Network::Arp | Network::Other(_) => false,
        }
    }

    /// Returns the place of the transport checksum of a whole TCP or UDP packet.
    #[must_use]
    pub fn checksum_place(&self) -> Option<ChecksumPlace> {
        let offset = match self.transport {
            Transport::Tcp(_) => TCP_CHECKSUM_OFFSET,
            Transport::Udp(_) => UDP_CHECKSUM_OFFSET,
            _ => return None,
        };
        let start = self.transport_offset()?;
        (!self.is_fragment()).then_some(ChecksumPlace { start, offset })
    }
}
