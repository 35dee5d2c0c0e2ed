//! The host's own addresses, kept current by rtnetlink(7).
//!
//! The kernel's table `local` lists every address to which this host delivers packets itself: those of its
//! interfaces, broadcast and anycast addresses, and prefixes that an administrator routed to the host
//! (`ip route add local`). [`OwnAddresses`] reads the table when it is opened, subscribes to changes of
//! routes, and reads the table again after each change of it. So a look-up costs no system call.
//!
//! One socket receives notifications and is part of the engine's epoll; another one reads the table.
//! No call on them blocks. After lost notifications (`ENOBUFS`) the table is read again. While it cannot be
//! read, the last known addresses stay in force.

// #syscall uplink sendto,recvfrom: rtnetlink: the host's own addresses

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ringfence_base::address::IpPrefix;
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

/// Notification groups (`linux/rtnetlink.h`): bit n - 1 for group n, RTNLGRP_IPV4_ROUTE and
/// RTNLGRP_IPV6_ROUTE.
const GROUPS: u32 = 1 << (7 - 1) | 1 << (11 - 1);
/// Message types (`linux/netlink.h`, `linux/rtnetlink.h`).
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const RTM_GETROUTE: u16 = 26;
/// Message flags: dump request; dump that was interrupted by a change.
const NLM_F_REQUEST_DUMP: u16 = 0x1 | 0x300;
const NLM_F_DUMP_INTR: u16 = 0x10;
/// Lengths of a message header and of a route header, in bytes.
const HEADER_LEN: usize = 16;
const ROUTE_LEN: usize = 12;
/// Attribute that holds a route's destination.
const RTA_DST: u16 = 1;
/// Table `local`, and the route types whose packets the host itself receives.
const TABLE_LOCAL: u8 = 255;
const OWN_TYPES: [u8; 3] = [2, 3, 4];
/// Values of address families (`linux/socket.h`).
const INET: u8 = 2;
const INET6: u8 = 10;
/// Maximum of attempts to read a table that changes meanwhile.
const ATTEMPTS: usize = 4;
/// Size of the receive buffer; the kernel fills at most 32 KiB at a time.
const BUFFER: usize = 64 << 10;
/// Maximum of notifications handled in one call.
const NOTIFICATIONS: usize = 64;

/// Set of addresses and prefixes of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Prefixes {
    /// Prefixes of full length.
    single: HashSet<IpAddr>,
    /// Shorter prefixes.
    wide: Vec<IpPrefix>,
}

impl Prefixes {
    fn add(&mut self, ip: IpAddr, len: u8) {
        let prefix = IpPrefix::new(ip, len);
        if len >= prefix.full_len() {
            self.single.insert(ip);
        } else {
            self.wide.push(prefix);
        }
    }

    fn contain(&self, ip: IpAddr) -> bool {
        self.single.contains(&ip) || self.wide.iter().any(|prefix| prefix.contains(ip))
    }
}

/// Table of the host's own addresses, refreshed as the module says.
#[derive(Debug)]
pub struct OwnAddresses {
    notifications: OwnedFd,
    requests: OwnedFd,
    sequence: u32,
    prefixes: Prefixes,
    /// Set if the table has changed since it was last read.
    stale: bool,
    buffer: Vec<u8>,
}

impl OwnAddresses {
    /// Reads the addresses of this process's network namespace, and subscribes to changes.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn follow() -> Result<OwnAddresses, Errno> {
        let open = |groups| {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            // Protocol 0 is NETLINK_ROUTE.
            let family = AddressFamily::NETLINK;
            let socket = rustix::net::socket_with(family, SocketType::RAW, flags, None)?;
            rustix::net::bind(&socket, &SocketAddrNetlink::new(0, groups))?;
            Ok::<OwnedFd, Errno>(socket)
        };
        let mut own = OwnAddresses {
            // Subscribed before the first read, so that no change is missed.
            notifications: open(GROUPS)?,
            requests: open(0)?,
            sequence: 0,
            prefixes: Prefixes::default(),
            stale: false,
            buffer: vec![0; BUFFER],
        };
        // Without the filter the kernel lists all tables, which is slower but correct.
        let _ = ringfence_sys::socket::set_netlink_strict(&own.requests);
        own.prefixes = own.read()?;
        Ok(own)
    }

    /// Returns a descriptor that is readable when the addresses may have changed.
    pub(super) fn wait_fd(&self) -> BorrowedFd<'_> {
        self.notifications.as_fd()
    }

    /// Returns `true` if the host itself receives packets to this address.
    pub(super) fn contain(&self, ip: IpAddr) -> bool {
        self.prefixes.contain(ip)
    }

    /// Returns `true` if the table must be read again although no notification is waiting.
    pub(super) fn is_stale(&self) -> bool {
        self.stale
    }

    /// Handles notifications, and reads the table again if they concern it. Returns `true` if the addresses
    /// changed.
    pub(super) fn refresh(&mut self) -> bool {
        for _ in 0..NOTIFICATIONS {
            match receive(&self.notifications, &mut self.buffer) {
                Ok(len) => {
                    let all = self.buffer.get(..len).unwrap_or_default();
                    self.stale |= messages(all).any(|message| {
                        matches!(message.kind, RTM_NEWROUTE | RTM_DELROUTE)
                            && message.body.get(4) == Some(&TABLE_LOCAL)
                    });
                }
                Err(Errno::AGAIN) => break,
                // Notifications were lost.
                Err(_) => self.stale = true,
            }
        }
        if !self.stale {
            return false;
        }
        match self.read() {
            Ok(prefixes) => {
                self.stale = false;
                let changed = self.prefixes != prefixes;
                self.prefixes = prefixes;
                changed
            }
            Err(errno) => {
                tracing::debug!(%errno, "the host's own addresses cannot be read");
                false
            }
        }
    }

    fn read(&mut self) -> Result<Prefixes, Errno> {
        for _ in 0..ATTEMPTS {
            let mut prefixes = Prefixes::default();
            if self.dump(INET, &mut prefixes)? && self.dump(INET6, &mut prefixes)? {
                return Ok(prefixes);
            }
        }
        Err(Errno::AGAIN)
    }

    /// Adds the addresses of one family. Returns `false` if the table changed meanwhile.
    fn dump(&mut self, family: u8, into: &mut Prefixes) -> Result<bool, Errno> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut request = [0; HEADER_LEN + ROUTE_LEN];
        request[..4].copy_from_slice(&28_u32.to_ne_bytes());
        request[4..6].copy_from_slice(&RTM_GETROUTE.to_ne_bytes());
        request[6..8].copy_from_slice(&NLM_F_REQUEST_DUMP.to_ne_bytes());
        request[8..12].copy_from_slice(&self.sequence.to_ne_bytes());
        request[HEADER_LEN] = family;
        request[HEADER_LEN + 4] = TABLE_LOCAL;
        rustix::net::send(&self.requests, &request, SendFlags::DONTWAIT)?;
        let mut is_consistent = true;
        loop {
            let len = receive(&self.requests, &mut self.buffer)?;
            for message in messages(self.buffer.get(..len).unwrap_or_default()) {
                // Rest of an earlier dump that was abandoned.
                if message.sequence != self.sequence {
                    continue;
                }
                is_consistent &= message.flags & NLM_F_DUMP_INTR == 0;
                match message.kind {
                    NLMSG_DONE => return Ok(is_consistent),
                    NLMSG_ERROR => return refusal(message.body).map_or(Ok(true), Err),
                    RTM_NEWROUTE => {
                        if let Some((ip, len)) = own_prefix(message.body) {
                            into.add(ip, len);
                        }
                    }
                    _ => {}
                }
            }
        }
    }
}

/// Returns the error in a reply; `None` if the host has no such family or table.
fn refusal(body: &[u8]) -> Option<Errno> {
    let code = body.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code));
    let errno = Errno::from_raw_os_error(code.wrapping_neg());
    let absent = matches!(errno, Errno::NOENT | Errno::AFNOSUPPORT | Errno::OPNOTSUPP);
    (!absent).then_some(errno)
}

fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> Result<usize, Errno> {
    let (len, _) =
        rustix::io::retry_on_intr(|| rustix::net::recv(socket, &mut *buffer, RecvFlags::DONTWAIT))?;
    Ok(len)
}

/// Parsed netlink message header and body.
#[derive(Clone, Copy, Debug)]
struct Message<'a> {
    kind: u16,
    flags: u16,
    sequence: u32,
    body: &'a [u8],
}

/// Iterates over the messages in a received buffer.
fn messages(mut rest: &[u8]) -> impl Iterator<Item = Message<'_>> {
    core::iter::from_fn(move || {
        let &[l0, l1, l2, l3, k0, k1, f0, f1, s0, s1, s2, s3, ..] = rest else { return None };
        let len = usize::try_from(u32::from_ne_bytes([l0, l1, l2, l3])).ok()?;
        let body = rest.get(HEADER_LEN..len)?;
        // Messages are aligned to four bytes.
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some(Message {
            kind: u16::from_ne_bytes([k0, k1]),
            flags: u16::from_ne_bytes([f0, f1]),
            sequence: u32::from_ne_bytes([s0, s1, s2, s3]),
            body,
        })
    })
}

/// Returns the prefix of a route in table `local` whose packets the host itself receives.
fn own_prefix(body: &[u8]) -> Option<(IpAddr, u8)> {
    let (head, mut attributes) = body.split_first_chunk::<ROUTE_LEN>()?;
    let &[family, len, _, _, table, _, _, kind, ..] = head;
    if table != TABLE_LOCAL || !OWN_TYPES.contains(&kind) {
        return None;
    }
    while let &[l0, l1, k0, k1, ..] = attributes {
        let size = usize::from(u16::from_ne_bytes([l0, l1]));
        let value = attributes.get(4..size)?;
        if u16::from_ne_bytes([k0, k1]) == RTA_DST {
            let ip: IpAddr = match family {
                INET => Ipv4Addr::from(*value.first_chunk::<4>()?).into(),
                INET6 => Ipv6Addr::from(*value.first_chunk::<16>()?).into(),
                _ => return None,
            };
            return Some((ip, len));
        }
        attributes = attributes.get(size.next_multiple_of(4)..).unwrap_or_default();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn loopback_addresses_of_this_host_are_its_own() {
        let mut own = OwnAddresses::follow().unwrap();
        assert!(own.contain(ip("127.0.0.1")) && own.contain(ip("127.9.8.7")), "{own:?}");
        assert!(!own.contain(ip("198.51.100.77")) && !own.contain(ip("2001:db8::77")), "{own:?}");
        own.refresh();
        assert!(!own.is_stale());
    }

    #[test]
    fn truncated_messages_end_the_list() {
        assert_eq!(messages(&[0; 15]).count(), 0);
        assert_eq!(messages(&[0; 64]).count(), 0);
        let mut message = [0; 28];
        message[..4].copy_from_slice(&200_u32.to_ne_bytes());
        assert_eq!(messages(&message).count(), 0);
        message[..4].copy_from_slice(&28_u32.to_ne_bytes());
        assert_eq!(messages(&message).count(), 1);
    }

    #[test]
    fn route_of_table_main_is_not_own() {
        let mut route = vec![INET, 32, 0, 0, TABLE_LOCAL, 0, 0, 2, 0, 0, 0, 0];
        route.extend_from_slice(&8_u16.to_ne_bytes());
        route.extend_from_slice(&RTA_DST.to_ne_bytes());
        route.extend_from_slice(&[192, 0, 2, 2]);
        assert_eq!(own_prefix(&route), Some((ip("192.0.2.2"), 32)));
        route[4] = 254;
        assert_eq!(own_prefix(&route), None);
        (route[4], route[7]) = (TABLE_LOCAL, 1);
        assert_eq!(own_prefix(&route), None);
    }
}
