//! ARP responder (RFC 826): every address but the guest's own is at the uplink's hardware address.

use core::net::{IpAddr, Ipv4Addr};

use crate::context::Context;

/// Length of a request for Ethernet and IPv4 with its link header, in bytes.
const LEN: usize = 14 + 28;
/// Hardware type, protocol type, and address lengths for Ethernet and IPv4.
const KIND: [u8; 6] = [0, 1, 8, 0, 6, 4];
const REQUEST: u16 = 1;
const ANSWER: [u8; 2] = [0, 2];

/// Handles an ARP packet from the guest. `frame` begins with its Ethernet header.
pub(crate) fn input(frame: &[u8], context: &mut Context<'_>) {
    let Some(arp) = frame.get(14..LEN).and_then(|arp| arp.first_chunk::<28>()) else {
        return context.counters.drop_malformed.add(1);
    };
    if arp[..6] != KIND {
        return context.counters.drop_malformed.add(1);
    }
    if u16::from_be_bytes([arp[6], arp[7]]) != REQUEST {
        // Announcements and replies need no answer.
        return;
    }
    let address = |at: usize| Ipv4Addr::new(arp[at], arp[at + 1], arp[at + 2], arp[at + 3]);
    let (sender, target) = (address(14), address(24));
    // Probes for the guest's own address (RFC 5227) must stay unanswered. The guest may also choose a
    // link-local address. Any other address is answered.
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
