//! ARP (RFC 826): everybody but the guest itself is at the uplink's hardware address.

use core::net::{IpAddr, Ipv4Addr};

use crate::context::Context;

/// Octets of a packet for Ethernet and IPv4, its link header included.
const LEN: usize = 14 + 28;
/// Ethernet, IPv4, six octets, four octets.
const KIND: [u8; 6] = [0, 1, 8, 0, 6, 4];
const REQUEST: u16 = 1;
const ANSWER: [u8; 2] = [0, 2];

/// A question of the guest's. `frame` begins with its Ethernet header.
pub(crate) fn input(frame: &[u8], context: &mut Context<'_>) {
    let Some(arp) = frame.get(14..LEN).and_then(|arp| arp.first_chunk::<28>()) else {
        return context.counters.drop_malformed.add(1);
    };
    if arp[..6] != KIND {
        return context.counters.drop_malformed.add(1);
    }
    if u16::from_be_bytes([arp[6], arp[7]]) != REQUEST {
        // An announcement: there is nobody to be told.
        return;
    }
    let address = |at: usize| Ipv4Addr::new(arp[at], arp[at + 1], arp[at + 2], arp[at + 3]);
    let (sender, target) = (address(14), address(24));
    // Whether an address is free (RFC 5227) the guest may ask of its own; and a link-local one it may
    // choose. Who is asked for may be anybody else.
    let own = context.config.access.guest.contains(&IpAddr::V4(target)) || sender == target;
    if own || target.is_unspecified() || target.is_multicast() || target.is_loopback() {
        return;
    }
    let mac = context.config.mac;
    context.counters.arp_answers.add(1);
    context.replies.push(|reply| {
        reply.extend_from_slice(&arp[8..14]);
        reply.extend_from_slice(&mac);
        reply.extend_from_slice(&[0x08, 0x06]);
        reply.extend_from_slice(&KIND);
        reply.extend_from_slice(&ANSWER);
        reply.extend_from_slice(&mac);
        reply.extend_from_slice(&target.octets());
        reply.extend_from_slice(&arp[8..18]);
        Some(())
    });
}
