//! Requests to the kernel about network interfaces (rtnetlink(7)), one at a time.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::OwnedFd;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::guest::Address;

/// A connection to the kernel, about the network namespace it was opened in.
#[derive(Debug)]
pub(crate) struct Netlink {
    socket: OwnedFd,
    sequence: u32,
}

/// What to change of an interface.
#[derive(Debug, Default)]
pub(crate) struct LinkChange {
    pub(crate) mac: Option<[u8; 6]>,
    pub(crate) mtu: Option<u32>,
    /// Segments that a super-packet has at most; 1: there are none.
    pub(crate) gso_max_segments: Option<u32>,
    pub(crate) up: bool,
    /// The bridge it becomes a port of, by number.
    pub(crate) bridge: Option<u32>,
}

impl Netlink {
    pub(crate) fn open() -> io::Result<Netlink> {
        let socket = rustix::net::socket_with(
            rustix::net::AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            None,
        )?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, 0))?;
        Ok(Netlink { socket, sequence: 0 })
    }

    /// The number of an interface.
    pub(crate) fn index_of(&self, name: &str) -> io::Result<u32> {
        Ok(rustix::net::netdevice::name_to_index(&self.socket, name)?)
    }

    /// Changes an interface.
    pub(crate) fn change_link(&mut self, index: u32, change: &LinkChange) -> io::Result<()> {
        let mut link = LinkMessage::default();
        link.header.index = index;
        if change.up {
            link.header.flags = LinkFlags::Up;
            link.header.change_mask = LinkFlags::Up;
        }
        link.attributes.extend(change.mac.map(|mac| LinkAttribute::Address(mac.to_vec())));
        link.attributes.extend(change.mtu.map(LinkAttribute::Mtu));
        link.attributes.extend(change.gso_max_segments.map(LinkAttribute::GsoMaxSegs));
        link.attributes.extend(change.bridge.map(LinkAttribute::Controller));
        self.request(RouteNetlinkMessage::SetLink(link), 0)
    }

    /// Adds an address, usable at once: nobody else on the switch has it, so an IPv6 address need
    /// not be tried out first.
    pub(crate) fn add_address(&mut self, index: u32, address: Address) -> io::Result<()> {
        let mut message = AddressMessage::default();
        message.header.index = index;
        message.header.prefix_len = address.prefix();
        message.attributes.push(AddressAttribute::Address(address.ip()));
        message.attributes.push(AddressAttribute::Local(address.ip()));
        match address.ip() {
            IpAddr::V4(ip) => {
                message.header.family = AddressFamily::Inet;
                let broadcast = broadcast(ip, address.prefix());
                message.attributes.extend(broadcast.map(AddressAttribute::Broadcast));
            }
            IpAddr::V6(_) => {
                message.header.family = AddressFamily::Inet6;
                message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
            }
        }
        self.request(RouteNetlinkMessage::NewAddress(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    fn request(&mut self, payload: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | NLM_F_ACK | flags;
        header.sequence_number = self.sequence;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::from(payload));
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        rustix::net::send(&self.socket, &bytes, SendFlags::empty())?;
        self.acknowledgement()
    }

    fn acknowledgement(&self) -> io::Result<()> {
        let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        let mut buffer = vec![0; 16 * 1024];
        loop {
            let (length, _) = rustix::io::retry_on_intr(|| {
                rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::empty())
            })?;
            let answer = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&buffer[..length])
                .map_err(|error| invalid(&error.to_string()))?;
            if answer.header.sequence_number != self.sequence {
                continue;
            }
            return match answer.payload {
                NetlinkPayload::Error(error) if error.code.is_none() => Ok(()),
                NetlinkPayload::Error(error) => Err(error.to_io()),
                _ => Err(invalid("netlink: neither done nor refused")),
            };
        }
    }
}

/// The broadcast address of a network that has one.
fn broadcast(ip: Ipv4Addr, prefix: u8) -> Option<Ipv4Addr> {
    let hosts = u32::MAX.checked_shr(u32::from(prefix)).unwrap_or(0);
    (hosts > 1).then(|| Ipv4Addr::from_bits(ip.to_bits() | hosts))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_of_one_or_two_has_no_broadcast_address() {
        let ip = Ipv4Addr::new(10, 0, 0, 2);
        assert_eq!(broadcast(ip, 24), Some(Ipv4Addr::new(10, 0, 0, 255)));
        assert_eq!(broadcast(ip, 31), None);
        assert_eq!(broadcast(ip, 32), None);
    }
}
