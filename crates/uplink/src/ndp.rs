//! Neighbour discovery (RFC 4861): every address but the guest's own is at the uplink's hardware address,
//! and the uplink is the router.
//!
//! Router advertisements refer to DHCPv6 for addresses (`M`, `O`). They contain no prefix, so no guest
//! configures an address that it may not send from. They announce the MTU and the name servers (RFC 8106).

use core::net::{IpAddr, Ipv6Addr};

use ringfence_offload::packet::protocol;

use crate::context::Context;
use crate::emit::Ends;
use crate::icmp::error::checksum;
use crate::packet::{Mac, Packet};

const ROUTER_SOLICITATION: u8 = 133;
const ROUTER_ADVERTISEMENT: u8 = 134;
const NEIGHBOUR_SOLICITATION: u8 = 135;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;

const OPTION_SOURCE_LINK: u8 = 1;
const OPTION_TARGET_LINK: u8 = 2;
const OPTION_MTU: u8 = 5;
const OPTION_RDNSS: u8 = 25;
/// Flags of a neighbour advertisement: router, solicited, override.
const FLAGS_NEIGHBOUR: u8 = 0xe0;
/// Flags of a router advertisement: managed addresses and other configuration (DHCPv6).
const FLAGS_MANAGED: u8 = 0xc0;
/// Router lifetime in seconds.
const LIFETIME: u16 = 9000;

/// Returns `true` for types of neighbour discovery messages.
pub(crate) fn is_neighbour_discovery(kind: u8) -> bool {
    (ROUTER_SOLICITATION..=137).contains(&kind)
}

/// Returns `true` for the type of router solicitations.
pub(crate) fn asks_for_router(kind: u8) -> bool {
    kind == ROUTER_SOLICITATION
}

/// Handles a message from the guest. Its hop limit proves that no router has forwarded it.
pub(crate) fn input(packet: &Packet<'_>, context: &mut Context<'_>) {
    let message = packet.transport();
    if packet.hop_limit() != 255 || message.get(1) != Some(&0) {
        return context.counters.drop_malformed.add(1);
    }
    let IpAddr::V6(source) = packet.source else { return };
    match message.first() {
        Some(&NEIGHBOUR_SOLICITATION) => answer_solicitation(message, source, packet.mac, context),
        Some(&ROUTER_SOLICITATION) => advertise_router(source, packet.mac, context),
        _ => context.counters.icmp_ignored.add(1),
    }
}

fn answer_solicitation(message: &[u8], source: Ipv6Addr, mac: Mac, context: &mut Context<'_>) {
    let Some(target) = message.get(8..24).and_then(|target| target.first_chunk::<16>()) else {
        return context.counters.drop_malformed.add(1);
    };
    let target = Ipv6Addr::from(*target);
    // Duplicate address detection for the guest's own address must stay unanswered.
    let own = context.config.access.guest.contains(&IpAddr::V6(target));
    if own || source.is_unspecified() || target.is_multicast() || target.is_unspecified() {
        return;
    }
    let own_mac = context.config.mac;
    let mut body = vec![NEIGHBOUR_ADVERTISEMENT, 0, 0, 0, FLAGS_NEIGHBOUR, 0, 0, 0];
    body.extend_from_slice(&target.octets());
    body.extend_from_slice(&[OPTION_TARGET_LINK, 1]);
    body.extend_from_slice(&own_mac);
    let to = source.into();
    let ends = Ends { from_mac: own_mac, to_mac: mac, from: target.into(), to };
    context.counters.ndp_answers.add(1);
    push(&ends, &body, context);
}

fn advertise_router(source: Ipv6Addr, mac: Mac, context: &mut Context<'_>) {
    if !context.config.guest.has_ipv6() {
        return;
    }
    let own_mac = context.config.mac;
    let [high, low] = LIFETIME.to_be_bytes();
    let mut body = vec![ROUTER_ADVERTISEMENT, 0, 0, 0, 64, FLAGS_MANAGED, high, low];
    // Reachable time and retransmission timer: unspecified.
    body.extend_from_slice(&[0; 8]);
    body.extend_from_slice(&[OPTION_SOURCE_LINK, 1]);
    body.extend_from_slice(&own_mac);
    body.extend_from_slice(&[OPTION_MTU, 1, 0, 0]);
    body.extend_from_slice(&u32::from(context.config.mtu).to_be_bytes());
    let servers: Vec<Ipv6Addr> = context.config.guest.name_servers_v6().take(3).collect();
    if let Ok(words @ 1..) = u8::try_from(servers.len() * 2) {
        body.extend_from_slice(&[OPTION_RDNSS, 1 + words, 0, 0]);
        body.extend_from_slice(&u32::from(LIFETIME).to_be_bytes());
        body.extend(servers.iter().flat_map(|server| server.octets()));
    }
    // A solicitation without source address is answered to all nodes.
    let (to, to_mac) = if source.is_unspecified() {
        (Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1), [0x33, 0x33, 0, 0, 0, 1])
    } else {
        (source, mac)
    };
    let from = link_local(own_mac).into();
    let ends = Ends { from_mac: own_mac, to_mac, from, to: to.into() };
    context.counters.ndp_answers.add(1);
    push(&ends, &body, context);
}

/// Returns the link-local address of a hardware address (RFC 4291, appendix A).
pub(crate) fn link_local(mac: Mac) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac;
    let word = |high, low| u16::from_be_bytes([high, low]);
    Ipv6Addr::new(0xfe80, 0, 0, 0, word(a ^ 2, b), word(c, 0xff), word(0xfe, d), word(e, f))
}

fn push(ends: &Ends, body: &[u8], context: &mut Context<'_>) {
    context.replies.push(|frame| {
        let header = ends.header_len();
        frame.resize(header + body.len(), 0);
        ends.write(frame, protocol::ICMPV6, body.len(), 0)?;
        // Receivers require hop limit 255, which proves that no router forwarded the packet.
        frame[crate::emit::ETHERNET_LEN + 7] = 255;
        let sum = checksum(ends, protocol::ICMPV6, body);
        let message = frame.get_mut(header..)?;
        message.copy_from_slice(body);
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        Some(())
    });
}
