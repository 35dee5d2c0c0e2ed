//! IP packet from the guest: a frame of a batch with its parsed headers and addresses.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub use ringfence_base::address::Mac;
use ringfence_frame::FrameView;
use ringfence_offload::Layers;
use ringfence_offload::checksum::Accumulator;
use ringfence_offload::checksum::verify::pseudo_header_sum;
use ringfence_offload::packet::{Network, Transport};
use ringfence_sys::numbers::usize_from;

/// Hop limit assumed for a packet without one, which is Linux's default.
pub(crate) const HOPS_DEFAULT: u8 = 64;

/// Fields of a packet's IP header that the host's packets copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marks {
    /// TTL or hop limit.
    pub hops: u8,
    /// Type of service or traffic class: DSCP and ECN.
    pub class: u8,
}

impl Default for Marks {
    /// Returns those of a socket without options.
    fn default() -> Marks {
        Marks { hops: HOPS_DEFAULT, class: 0 }
    }
}

/// IP packet from the guest, whose headers lie in the frame's private header.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    pub frame: FrameView<'a>,
    /// Positions of the headers.
    pub layers: Layers,
    /// Hardware address of the sender.
    pub mac: Mac,
    pub source: IpAddr,
    pub destination: IpAddr,
}

impl<'a> Packet<'a> {
    /// Reads the packet in a frame. Returns `None` if it is no IP packet or its addresses are not in the
    /// private header.
    pub fn read(frame: FrameView<'a>, layers: Layers) -> Option<Packet<'a>> {
        let header = frame.header();
        let mac = *header.get(6..)?.first_chunk()?;
        let (source, destination) = match layers.network() {
            Network::Ipv4(ip) => {
                let addresses = header.get(usize::from(ip.offset) + 12..)?;
                let source: [u8; 4] = *addresses.first_chunk()?;
                let destination: [u8; 4] = *addresses.get(4..)?.first_chunk()?;
                (Ipv4Addr::from(source).into(), Ipv4Addr::from(destination).into())
            }
            Network::Ipv6(ip) => {
                let addresses = header.get(usize::from(ip.offset) + 8..)?;
                let source: [u8; 16] = *addresses.first_chunk()?;
                let destination: [u8; 16] = *addresses.get(16..)?.first_chunk()?;
                (Ipv6Addr::from(source).into(), Ipv6Addr::from(destination).into())
            }
            Network::Arp | Network::Other(_) => return None,
        };
        Some(Packet { frame, layers, mac, source, destination })
    }

    /// Returns the packet's TTL or hop limit; 1 instead of 0.
    pub fn hop_limit(&self) -> u8 {
        let at = match self.layers.network() {
            Network::Ipv4(ip) => usize::from(ip.offset) + 8,
            Network::Ipv6(ip) => usize::from(ip.offset) + 7,
            Network::Arp | Network::Other(_) => return HOPS_DEFAULT,
        };
        self.frame.header().get(at).copied().unwrap_or(HOPS_DEFAULT).max(1)
    }

    /// Returns the fields that the host's packets copy.
    pub fn marks(&self) -> Marks {
        let header = self.frame.header();
        let class = match self.layers.network() {
            Network::Ipv4(ip) => header.get(usize::from(ip.offset) + 1).copied(),
            Network::Ipv6(ip) => header
                .get(usize::from(ip.offset)..)
                .and_then(|header| header.first_chunk())
                .map(|&[high, low]: &[u8; 2]| high << 4 | low >> 4),
            Network::Arp | Network::Other(_) => None,
        };
        Marks { hops: self.hop_limit(), class: class.unwrap_or(0) }
    }

    /// Returns the headers from the transport header on, as far as they are private.
    pub fn transport(&self) -> &'a [u8] {
        let start = self.layers.transport_offset().map_or(usize::MAX, usize::from);
        self.frame.header().get(start..).unwrap_or_default()
    }

    /// Returns the offset of the payload in the frame.
    pub fn payload_start(&self) -> usize {
        usize::from(self.layers.header_len())
    }

    /// Returns the length of the payload in bytes, without link padding.
    #[inline]
    pub fn payload_len(&self) -> usize {
        usize_from(self.layers.payload_len())
    }
}

/// Returns `true` if the transport checksum is valid. A UDP datagram over IPv4 may have none.
pub fn has_valid_checksum(packet: &Packet<'_>) -> bool {
    let layers = &packet.layers;
    let header = packet.frame.header();
    let (Ok(pseudo), Some(start)) =
        (pseudo_header_sum(header, layers), layers.transport_offset().map(usize::from))
    else {
        // No known checksum in this protocol.
        return true;
    };
    let mut end = usize_from(layers.network_end());
    if let Transport::Udp(udp) = layers.transport() {
        let absent = header.get(start + 6..start + 8) == Some(&[0, 0]);
        if absent {
            return packet.source.is_ipv4();
        }
        end = start + usize::from(udp.length);
    }
    let mut sum = Accumulator::with_sum(pseudo);
    let mut at = 0;
    for piece in packet.frame.pieces() {
        let from = start.saturating_sub(at);
        let to = end.saturating_sub(at).min(piece.len());
        if from < to {
            piece.for_each_piece_of(from..to, |bytes| sum.add(bytes));
        }
        at += piece.len();
    }
    at >= end && sum.checksum() == 0
}
