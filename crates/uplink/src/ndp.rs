//! Neighbour discovery (RFC 4861): every address but the guest's own is at the uplink's hardware address,
//! and the uplink is the router.
//!
//! Router advertisements refer to DHCPv6 for addresses (`M`, `O`). They contain only prefixes of which the guest may
//! choose addresses ([`Access::guest_prefixes`](crate::Access)), so no guest configures an address that it may not
//! send from. No prefix is on-link. They announce the MTU and the name servers (RFC 8106).

use core::net::{IpAddr, Ipv6Addr};
use core::time::Duration;

use ringfence_offload::packet::protocol;

use crate::access::IpPrefix;
use crate::config::LeftOut;
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
const OPTION_PREFIX: u8 = 3;
const OPTION_MTU: u8 = 5;
const OPTION_RDNSS: u8 = 25;
/// Flags of a neighbour advertisement: router, solicited, override.
const FLAGS_NEIGHBOUR: u8 = 0xe0;
/// Flags of a prefix: addresses are configured of it (`A`), and no neighbours are assumed in it.
const FLAGS_PREFIX: u8 = 0x40;
/// Maximum number of announced prefixes.
const PREFIXES_MAX: usize = 4;
/// Flags of a router advertisement: managed addresses and other configuration (DHCPv6).
const FLAGS_MANAGED: u8 = 0xc0;
/// Router lifetime in seconds.
const LIFETIME: u16 = 9000;
/// Interval of unsolicited advertisements. Several may be lost before the router's lifetime ends.
const INTERVAL: Duration = Duration::from_secs(1800);
/// Lifetime of prefixes in seconds: infinite, because the guest asks for no router later (RFC 4861, 4.6.2).
const PREFIX_LIFETIME: u32 = u32::MAX;

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
    for prefix in context.config.access.guest_prefixes.iter().take(PREFIXES_MAX) {
        let IpPrefix { ip: IpAddr::V6(ip), len } = prefix.masked() else { continue };
        body.extend_from_slice(&[OPTION_PREFIX, 4, len, FLAGS_PREFIX]);
        // Valid and preferred lifetime, and four reserved bytes.
        body.extend_from_slice(&PREFIX_LIFETIME.to_be_bytes());
        body.extend_from_slice(&PREFIX_LIFETIME.to_be_bytes());
        body.extend_from_slice(&[0; 4]);
        body.extend_from_slice(&ip.octets());
    }
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

/// Timer of unsolicited advertisements. A kernel that configures itself asks for a router once, and forgets it when
/// its lifetime ends.
#[derive(Debug, Default)]
pub(crate) struct Advertisements {
    due: Option<Duration>,
}

impl Advertisements {
    /// Advertises the router if it is time. The timer starts with the first packet of a guest that configures itself.
    pub(crate) fn run_timers(&mut self, context: &mut Context<'_>) {
        let guest = &context.config.guest;
        let left_out = context.config.left_out;
        let is_off = left_out.contains(LeftOut::NDP)
            || left_out.contains(LeftOut::ROUTER_ADVERTISEMENTS)
            || !guest.has_ipv6();
        let Some(mac) = guest.mac.filter(|_| guest.learns && !is_off) else { return };
        match self.due {
            Some(due) if due > context.now => return,
            Some(_) => advertise_router(Ipv6Addr::UNSPECIFIED, mac, context),
            None => {}
        }
        self.due = Some(context.now + INTERVAL);
    }

    /// Returns the time of the next advertisement.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.due
    }
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ringfence_frame::Batch;
    use ringfence_offload::{Checksum, OffloadMeta};

    use super::*;
    use crate::host::scripted::ScriptedHost;
    use crate::testing::Wire;
    use crate::{Config, Uplink};

    const MAC: Mac = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
    const START: Duration = Duration::from_secs(1000);

    fn uplink(learns: bool) -> Uplink {
        let mut config = Config { mtu: 1500, ..Config::default() };
        config.guest.addresses = vec![("2001:db8:1:2::7".parse().unwrap(), 64)];
        config.guest.learns = learns;
        config.access.guest = vec!["2001:db8:1:2::7".parse().unwrap()];
        if learns {
            config.access.guest_prefixes =
                vec![IpPrefix::new("2001:db8:1:2::".parse::<IpAddr>().unwrap(), 64)];
        }
        let host = ScriptedHost::new(16).unwrap();
        Uplink::new(config, Box::new(host), Arc::default())
    }

    /// Sends a packet of the guest. Returns the frames that the uplink sends then.
    fn send(
        uplink: &mut Uplink,
        source: &str,
        to: &str,
        protocol: u8,
        body: &[u8],
    ) -> Vec<Vec<u8>> {
        let to_mac = uplink.config().mac;
        let (from, to) = (source.parse().unwrap(), to.parse().unwrap());
        let ends = Ends { from_mac: MAC, to_mac, from, to };
        let mut frame = vec![0; ends.header_len()];
        ends.write(&mut frame, protocol, body.len(), 0).unwrap();
        frame[crate::emit::ETHERNET_LEN + 7] = 255;
        frame.extend_from_slice(body);
        let mut batch = Batch::with_capacity(1, 1 << 12);
        let offset = batch.reserve(frame.len()).unwrap();
        batch.scratch_mut(offset..offset + frame.len()).unwrap().copy_from_slice(&frame);
        let meta = OffloadMeta { checksum: Checksum::Verified, gso: None };
        let index = batch.push_contiguous(offset, frame.len(), meta).unwrap();
        uplink.input(&batch, &[index], START);
        sent(uplink, START)
    }

    fn sent(uplink: &mut Uplink, now: Duration) -> Vec<Vec<u8>> {
        let mut wire = Wire::new(4);
        uplink.run_timers(now);
        while uplink.output(&mut wire, now) {}
        wire.frames
    }

    fn advertisements(frames: &[Vec<u8>]) -> Vec<&[u8]> {
        let messages = frames.iter().filter_map(|frame| frame.get(54..));
        messages.filter(|message| message.first() == Some(&ROUTER_ADVERTISEMENT)).collect()
    }

    /// Sends a router solicitation. Returns the advertisement.
    fn solicit(uplink: &mut Uplink) -> Vec<u8> {
        let body = [ROUTER_SOLICITATION, 0, 0, 0, 0, 0, 0, 0];
        let frames = send(uplink, "fe80::1", "ff02::2", protocol::ICMPV6, &body);
        let found = advertisements(&frames);
        assert_eq!(found.len(), 1, "{frames:02x?}");
        found[0].to_vec()
    }

    #[test]
    fn prefix_is_announced_only_if_the_guest_may_choose_addresses_of_it() {
        let prefix: Ipv6Addr = "2001:db8:1:2::".parse().unwrap();
        let mut option = vec![OPTION_PREFIX, 4, 64, FLAGS_PREFIX];
        option.extend([0xFF; 8]);
        option.extend([0; 4]);
        option.extend(prefix.octets());
        let announces = |message: &[u8]| message.windows(32).any(|window| window == option);
        assert!(announces(&solicit(&mut uplink(true))));
        assert!(!announces(&solicit(&mut uplink(false))));
    }

    #[test]
    fn router_is_advertised_again_to_a_guest_that_configures_itself() {
        for learns in [true, false] {
            let mut uplink = uplink(learns);
            let later = |intervals: u32| START + INTERVAL * intervals;
            assert!(advertisements(&sent(&mut uplink, later(2))).is_empty(), "nobody is there");
            send(
                &mut uplink,
                "2001:db8:1:2::99",
                "2001:db8::1",
                protocol::UDP,
                &[0, 9, 0, 9, 0, 8, 0, 0],
            );
            let mut count = 0;
            for second in 0..2 * INTERVAL.as_secs() + 2 {
                let now = START + Duration::from_secs(second);
                count += advertisements(&sent(&mut uplink, now)).len();
            }
            assert_eq!(count, if learns { 2 } else { 0 });
        }
        assert!(INTERVAL.as_secs() * 3 < LIFETIME.into());
    }

    #[test]
    fn addresses_are_learned_from_packets_that_the_guest_may_send() {
        let mut uplink = uplink(true);
        let datagram = [0, 9, 0, 9, 0, 8, 0, 0];
        for forged in ["2001:db8:1:3::99", "::1", "ff02::1"] {
            send(&mut uplink, forged, "2001:db8::1", protocol::UDP, &datagram);
            assert_eq!((uplink.config().guest.mac, uplink.config().guest.seen), (None, None));
        }
        send(&mut uplink, "2001:db8:1:2::99", "2001:db8::1", protocol::UDP, &datagram);
        let guest = &uplink.config().guest;
        assert_eq!((guest.mac, guest.seen), (Some(MAC), "2001:db8:1:2::99".parse().ok()));
        let configured = "[2001:db8:1:2::7]:80".parse().unwrap();
        assert_eq!(guest.reached_at(configured), "[2001:db8:1:2::99]:80".parse().unwrap());
        let v4 = "192.0.2.7:80".parse().unwrap();
        assert_eq!(guest.reached_at(v4), v4);
    }
}
