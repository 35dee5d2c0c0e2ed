//! Requests to the kernel about network interfaces (rtnetlink(7)). Each request waits for its answer.

// #syscall daemon socket 0=AF_NETLINK: interfaces of the host
// #syscall daemon bind,sendto,recvfrom: interfaces of the host
// #syscall daemon ioctl 1=0x8933: SIOCGIFINDEX: the number of an interface

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use netlink_packet_route::route::{
    RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use ringfence_sys::numbers::usize_from;
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{RecvFlags, SendFlags, SocketFlags, SocketType};

use serde::{Deserialize, Serialize};

use crate::address::Address;

/// Connection to the kernel. It applies to the network namespace in which it was opened.
#[derive(Debug)]
pub struct Netlink {
    socket: OwnedFd,
    sequence: u32,
}

/// Notification group of changes of interfaces (`RTMGRP_LINK`).
const LINK_GROUP: u32 = 1;
/// Notification groups of changes of addresses and routes (`RTMGRP_IPV4_IFADDR` and the others).
const NETWORK_GROUPS: u32 = 0x10 | 0x40 | 0x100 | 0x400;
/// Maximum of notices discarded in one call.
const NOTICES: usize = 64;

/// Notices about the network namespace in which they were opened. Their content is not used.
#[derive(Debug)]
pub struct Notices {
    socket: OwnedFd,
}

impl Notices {
    /// Opens a socket that is readable after an interface was changed.
    pub fn of_links() -> io::Result<Notices> {
        Notices::open(LINK_GROUP)
    }

    /// Opens a socket that is readable after an interface, an address or a route was changed.
    pub fn of_network() -> io::Result<Notices> {
        Notices::open(LINK_GROUP | NETWORK_GROUPS)
    }

    fn open(groups: u32) -> io::Result<Notices> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let family = rustix::net::AddressFamily::NETLINK;
        let socket = rustix::net::socket_with(family, SocketType::RAW, flags, None)?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, groups))?;
        Ok(Notices { socket })
    }

    /// Discards the notices that wait. Returns `true` if there were some, or the kernel has lost some.
    pub fn clear(&self) -> bool {
        let mut notice = [0u8; 16];
        let mut any = false;
        for _ in 0..NOTICES {
            match rustix::net::recv(&self.socket, &mut notice, RecvFlags::TRUNC) {
                Ok(_) | Err(Errno::NOBUFS | Errno::INTR) => any = true,
                Err(_) => break,
            }
        }
        any
    }
}

impl AsFd for Notices {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Entry of a routing table, as netlink reads and writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    pub destination: IpAddr,
    /// Length of the prefix. 0 stands for the default route.
    pub prefix: u8,
    /// Next hop. `None` stands for a network that is reached directly.
    pub gateway: Option<IpAddr>,
    /// Metric. The kernel prefers the smallest.
    pub metric: Option<u32>,
}

/// Changes of an interface. `None` leaves a property unchanged.
#[derive(Debug, Default)]
pub struct LinkChange {
    pub mac: Option<[u8; 6]>,
    /// Longest packet in bytes.
    pub mtu: Option<u32>,
    /// Maximum number of segments of a super-packet. 1 allows none.
    pub gso_max_segments: Option<u32>,
    /// Set to bring the interface up.
    pub up: bool,
    /// Index of the bridge that the interface becomes a port of.
    pub bridge: Option<u32>,
}

impl Netlink {
    /// Opens a netlink socket in the network namespace of the calling thread.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn open() -> io::Result<Netlink> {
        let socket = rustix::net::socket_with(
            rustix::net::AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            None,
        )?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, 0))?;
        Ok(Netlink { socket, sequence: 0 })
    }

    /// Returns the index of an interface.
    pub fn index_of(&self, name: &str) -> io::Result<u32> {
        Ok(rustix::net::netdevice::name_to_index(&self.socket, name)?)
    }

    /// Applies `change` to the interface `index`.
    pub fn change_link(&mut self, index: u32, change: &LinkChange) -> io::Result<()> {
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

    /// Adds an address without duplicate address detection, so that it is usable at once. No other node on the
    /// switch has the address.
    pub fn add_address(&mut self, index: u32, address: Address) -> io::Result<()> {
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

    /// Adds a route over an interface.
    pub fn add_route(&mut self, index: u32, route: &Route) -> io::Result<()> {
        let mut message = RouteMessage::default();
        message.header.destination_prefix_length = route.prefix;
        message.header.table = RouteHeader::RT_TABLE_MAIN;
        message.header.protocol = RouteProtocol::Static;
        message.header.kind = RouteType::Unicast;
        message.header.scope =
            if route.gateway.is_some() { RouteScope::Universe } else { RouteScope::Link };
        if route.gateway.is_some() {
            // The kernel does not check that the gateway is on a network of the interface.
            message.header.flags = RouteFlags::Onlink;
        }
        message.header.address_family = match route.destination {
            IpAddr::V4(_) => AddressFamily::Inet,
            IpAddr::V6(_) => AddressFamily::Inet6,
        };
        let attributes = &mut message.attributes;
        if route.prefix > 0 {
            attributes.push(RouteAttribute::Destination(route.destination.into()));
        }
        attributes.extend(route.gateway.map(|ip| RouteAttribute::Gateway(ip.into())));
        attributes.push(RouteAttribute::Oif(index));
        attributes.extend(route.metric.map(RouteAttribute::Priority));
        self.request(RouteNetlinkMessage::NewRoute(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Returns all interfaces of the network namespace.
    pub fn links(&mut self) -> io::Result<Vec<LinkMessage>> {
        let found = self.dump(RouteNetlinkMessage::GetLink(LinkMessage::default()))?;
        let link = |message| match message {
            RouteNetlinkMessage::NewLink(link) => Some(link),
            _ => None,
        };
        Ok(found.into_iter().filter_map(link).collect())
    }

    /// Returns all addresses of the network namespace.
    pub fn addresses(&mut self) -> io::Result<Vec<AddressMessage>> {
        let found = self.dump(RouteNetlinkMessage::GetAddress(AddressMessage::default()))?;
        let address = |message| match message {
            RouteNetlinkMessage::NewAddress(address) => Some(address),
            _ => None,
        };
        Ok(found.into_iter().filter_map(address).collect())
    }

    /// Returns all routes of one family in the network namespace.
    pub fn routes(&mut self, family: AddressFamily) -> io::Result<Vec<RouteMessage>> {
        let mut request = RouteMessage::default();
        request.header.address_family = family;
        let found = self.dump(RouteNetlinkMessage::GetRoute(request))?;
        let route = |message| match message {
            RouteNetlinkMessage::NewRoute(route) => Some(route),
            _ => None,
        };
        Ok(found.into_iter().filter_map(route).collect())
    }

    fn dump(&mut self, payload: RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
        self.send(payload, NLM_F_DUMP)?;
        let mut found = Vec::new();
        let mut buffer = vec![0; 64 * 1024];
        loop {
            let (length, _) = rustix::io::retry_on_intr(|| {
                rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::empty())
            })?;
            let mut rest = &buffer[..length];
            while let Some((head, _)) = rest.split_first_chunk::<4>() {
                // Messages are aligned to four bytes. Messages of unknown kinds are skipped.
                let taken = usize_from(u32::from_ne_bytes(*head));
                let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest);
                rest = rest.get(taken.saturating_add(3) & !3..).unwrap_or_default();
                let Ok(message) = message else {
                    if taken < 16 {
                        return Err(invalid("netlink: a message without a header"));
                    }
                    continue;
                };
                if message.header.sequence_number != self.sequence {
                    continue;
                }
                match message.payload {
                    NetlinkPayload::InnerMessage(inner) => found.push(inner),
                    NetlinkPayload::Done(_) => return Ok(found),
                    NetlinkPayload::Error(error) => return Err(error.to_io()),
                    _ => {}
                }
            }
        }
    }

    fn request(&mut self, payload: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.send(payload, NLM_F_ACK | flags)?;
        self.acknowledgement()
    }

    fn send(&mut self, payload: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::from(payload));
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        rustix::net::send(&self.socket, &bytes, SendFlags::empty())?;
        Ok(())
    }

    fn acknowledgement(&self) -> io::Result<()> {
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

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

/// Returns the broadcast address of a network, if the network has one.
fn broadcast(ip: Ipv4Addr, prefix: u8) -> Option<Ipv4Addr> {
    let hosts = u32::MAX.checked_shr(u32::from(prefix)).unwrap_or(0);
    (hosts > 1).then(|| Ipv4Addr::from_bits(ip.to_bits() | hosts))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_of_one_or_two_hosts_has_no_broadcast_address() {
        let ip = Ipv4Addr::new(10, 0, 0, 2);
        assert_eq!(broadcast(ip, 24), Some(Ipv4Addr::new(10, 0, 0, 255)));
        assert_eq!(broadcast(ip, 31), None);
        assert_eq!(broadcast(ip, 32), None);
    }
}
