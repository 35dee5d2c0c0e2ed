//! Ethernet and IP headers of frames to the guest, and the pseudo-header sum of their checksums.

use core::net::IpAddr;

use ringfence_frame::{ChecksumOffload, PortCapabilities};
use ringfence_sys::numbers::bounded;

use ringfence_offload::checksum::{internet_checksum, pseudo};

use crate::packet::{HOPS_DEFAULT, Mac};

/// Length of an Ethernet header, in bytes.
pub const ETHERNET_LEN: usize = 14;

/// Link and network addresses of a packet to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// Hardware address of the uplink.
    pub from_mac: Mac,
    /// Hardware address of the guest.
    pub to_mac: Mac,
    /// Source address, of the same family as `to`.
    pub from: IpAddr,
    /// Destination address: the guest's.
    pub to: IpAddr,
}

/// Addresses and ports of a UDP datagram, or of all that go in one direction.
#[derive(Clone, Copy)]
pub(crate) struct UdpEnds {
    pub(crate) ends: Ends,
    /// Source port.
    pub(crate) from: u16,
    /// Destination port.
    pub(crate) to: u16,
}

impl Ends {
    /// Returns the length of Ethernet and IP header in bytes.
    pub fn header_len(&self) -> usize {
        ETHERNET_LEN + if self.to.is_ipv4() { 20 } else { 40 }
    }

    /// Writes Ethernet and IP header to the front of `frame`, for `payload` bytes of `protocol` behind them.
    /// Returns the length of the headers, or `None` if they do not fit or the address families differ. `id` is
    /// IPv4's identification. The packet must not be fragmented (DF).
    pub fn write(&self, frame: &mut [u8], protocol: u8, payload: usize, id: u16) -> Option<usize> {
        let len = self.header_len();
        let (ethernet, ip) = frame.get_mut(..len)?.split_at_mut(ETHERNET_LEN);
        ethernet[..6].copy_from_slice(&self.to_mac);
        ethernet[6..12].copy_from_slice(&self.from_mac);
        match (self.from, self.to) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                ethernet[12..].copy_from_slice(&0x0800u16.to_be_bytes());
                let total = u16::try_from(payload + 20).ok()?;
                ip.fill(0);
                ip[0] = 0x45;
                ip[2..4].copy_from_slice(&total.to_be_bytes());
                ip[4..6].copy_from_slice(&id.to_be_bytes());
                ip[6] = 0x40;
                ip[8] = HOPS_DEFAULT;
                ip[9] = protocol;
                ip[12..16].copy_from_slice(&from.octets());
                ip[16..20].copy_from_slice(&to.octets());
                let checksum = internet_checksum(ip);
                ip[10..12].copy_from_slice(&checksum.to_be_bytes());
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                ethernet[12..].copy_from_slice(&0x86ddu16.to_be_bytes());
                let payload = u16::try_from(payload).ok()?;
                ip[..4].copy_from_slice(&[0x60, 0, 0, 0]);
                ip[4..6].copy_from_slice(&payload.to_be_bytes());
                ip[6] = protocol;
                ip[7] = HOPS_DEFAULT;
                ip[8..24].copy_from_slice(&from.octets());
                ip[24..40].copy_from_slice(&to.octets());
            }
            _ => return None,
        }
        Some(len)
    }

    /// Returns the sum of the pseudo-header for `payload` bytes of `protocol`; zero if the families differ.
    pub fn pseudo_header(&self, protocol: u8, payload: usize) -> u16 {
        let payload = bounded(payload, u32::MAX);
        match (self.from, self.to) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                pseudo::pseudo_header_v4(from.octets(), to.octets(), protocol, payload)
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                pseudo::pseudo_header_v6(from.octets(), to.octets(), protocol, payload)
            }
            _ => 0,
        }
    }
}

/// Returns `true` if a link accepts frames with a partial transport checksum.
pub(crate) fn takes_blank(takes: &PortCapabilities, is_v4: bool) -> bool {
    match takes.checksum {
        ChecksumOffload::Any => true,
        ChecksumOffload::Netif { ipv4, ipv6 } => {
            if is_v4 {
                ipv4
            } else {
                ipv6
            }
        }
        ChecksumOffload::None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_offload::Layers;
    use ringfence_offload::packet::Network;

    #[test]
    fn written_headers_parse_to_the_same_packet() {
        for (from, to) in [("192.0.2.1", "10.0.0.2"), ("2001:db8::1", "fd00::2")] {
            let ends = Ends {
                from_mac: [2; 6],
                to_mac: [4; 6],
                from: from.parse().unwrap(),
                to: to.parse().unwrap(),
            };
            let mut frame = [0; 100];
            let len = ends.write(&mut frame, 253, 30, 7).unwrap();
            let layers = Layers::parse(&frame, 100).unwrap();
            assert_eq!(usize::try_from(layers.network_end()).unwrap(), len + 30);
            match layers.network() {
                Network::Ipv4(ip) => {
                    assert!(ip.dont_fragment);
                    assert_eq!(internet_checksum(&frame[14..34]), 0);
                }
                Network::Ipv6(ip) => assert_eq!(ip.protocol, 253),
                other => panic!("{other:?}"),
            }
        }
    }
}
