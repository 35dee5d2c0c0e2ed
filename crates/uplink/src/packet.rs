//! IP packet from the guest: a frame of a batch with its parsed headers and addresses.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub use ringfence_base::address::Mac;
use ringfence_frame::FrameView;
use ringfence_offload::Layers;
use ringfence_offload::checksum::verify::pseudo_header_sum;
use ringfence_offload::checksum::{Accumulator, internet_checksum};
use ringfence_offload::packet::{Network, Transport};
use ringfence_sys::numbers::usize_from;

/// Hop limit assumed for a packet without one, which is Linux's default.
pub(crate) const HOPS_DEFAULT: u8 = 64;

/// Length up to which every path is assumed to carry a packet whole, in bytes: the minimum MTU of IPv6.
pub(crate) const SHORT: usize = 1280;

/// Flow label of an IPv6 packet that was joined from fragments. Nothing else reads the label.
const JOINED: [u8; 3] = [0x0f, 0xff, 0xff];

/// Fields of a packet's IP header that the host's packets copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marks {
    /// TTL or hop limit.
    pub hops: u8,
    /// Type of service or traffic class: DSCP and ECN.
    pub class: u8,
    pub discovery: PathDiscovery,
}

impl Default for Marks {
    /// Returns those of a socket without options.
    fn default() -> Marks {
        Marks { hops: HOPS_DEFAULT, class: 0, discovery: PathDiscovery::Host }
    }
}

/// Handling of datagrams that are longer than the path's MTU (`IP_MTU_DISCOVER`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PathDiscovery {
    /// The host's default: it fragments datagrams that are longer than the MTU it knows of, and sets DF on all others.
    #[default]
    Host,
    /// DF is set on all. A datagram that is too long fails, whatever the host knows of the path.
    Guest,
    /// DF is set on none.
    Off,
}

/// Fragmentation that a packet of the guest permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fragmentation {
    /// The packet is so short that it matters to nobody.
    Short,
    Allowed,
    /// Not allowed, as far as the packet tells. Linux forbids it for every datagram that fits into the MTU it knows of, and
    /// fragments longer ones, unless a program asks for more.
    Presumed,
    /// Not allowed: the program in the guest has asked for that.
    Forbidden,
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

    /// Returns the type of service or traffic class: DSCP and ECN.
    pub fn class(&self) -> u8 {
        let header = self.frame.header();
        let class = match self.layers.network() {
            Network::Ipv4(ip) => header.get(usize::from(ip.offset) + 1).copied(),
            Network::Ipv6(ip) => header
                .get(usize::from(ip.offset)..)
                .and_then(|header| header.first_chunk())
                .map(|&[high, low]: &[u8; 2]| high << 4 | low >> 4),
            Network::Arp | Network::Other(_) => None,
        };
        class.unwrap_or(0)
    }

    /// Returns the fields that the host's packets copy.
    pub fn marks(&self) -> Marks {
        Marks { hops: self.hop_limit(), class: self.class(), discovery: PathDiscovery::Host }
    }

    /// Returns the fragmentation that the packet permits, or each packet of a super-packet.
    pub fn fragmentation(&self) -> Fragmentation {
        let headers = self.payload_start() - usize::from(self.layers.network_offset());
        let payload = match self.frame.meta().gso {
            Some(gso) => usize::from(gso.size).min(self.payload_len()),
            None => self.payload_len(),
        };
        if headers + payload <= SHORT {
            return Fragmentation::Short;
        }
        match self.layers.network() {
            // Linux numbers these packets only if they may be fragmented after all, or the socket is connected.
            Network::Ipv4(ip) if ip.dont_fragment && ip.id == 0 => Fragmentation::Forbidden,
            Network::Ipv4(ip) if ip.dont_fragment => Fragmentation::Presumed,
            Network::Ipv6(ip) => {
                let label = self.frame.header().get(usize::from(ip.offset) + 1..);
                let label = label.and_then(|header| header.first_chunk::<3>());
                let is_joined = label.is_some_and(|&[a, b, c]| [a & 0x0f, b, c] == JOINED);
                if is_joined { Fragmentation::Allowed } else { Fragmentation::Presumed }
            }
            _ => Fragmentation::Allowed,
        }
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

/// Permits fragmentation of a packet with complete headers that was joined from fragments. `ip` begins with the IP header.
pub(crate) fn mark_joined(ip: &mut [u8]) {
    match ip.first_chunk_mut::<20>() {
        Some(header) if header[0] >> 4 == 4 => {
            header[6] &= !0x40;
            write_checksum(header);
        }
        Some(header) => {
            header[1] = header[1] & 0xf0 | JOINED[0];
            header[2..4].copy_from_slice(&JOINED[1..]);
        }
        None => {}
    }
}

/// Sets hop limit and traffic class of a packet with complete headers. `ip` begins with the IP header.
pub(crate) fn set_marks(ip: &mut [u8], hops: u8, class: u8) -> Option<()> {
    let header = ip.first_chunk_mut::<20>()?;
    if header[0] >> 4 == 4 {
        (header[1], header[8]) = (class, hops);
        write_checksum(header);
    } else {
        header[0] = 0x60 | class >> 4;
        header[1] = header[1] & 0x0f | class << 4;
        header[7] = hops;
    }
    Some(())
}

/// Writes the checksum of an IPv4 header without options.
fn write_checksum(header: &mut [u8; 20]) {
    header[10..12].fill(0);
    let checksum = internet_checksum(header);
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
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

#[cfg(test)]
mod tests;
