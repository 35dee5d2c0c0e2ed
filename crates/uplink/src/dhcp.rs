//! DHCP server (RFC 2131): offers a guest its one configured IPv4 address.

use core::net::Ipv4Addr;

use ringfence_offload::checksum::{Accumulator, never_zero};
use ringfence_offload::packet::protocol;

use dhcproto::v4::{DhcpOption, DhcpOptions, HType, Message, MessageType, Opcode, OptionCode};
use dhcproto::{Decodable, Decoder, Encodable, Name};

use crate::context::Context;
use crate::emit::{Ends, UdpEnds};
use crate::packet::{Mac, Packet};

/// Ports of DHCP servers and clients.
pub(crate) const SERVER: u16 = 67;
const CLIENT: u16 = 68;
/// Length of the longest message that is read, in bytes.
const MESSAGE_MAX: usize = 1500;
/// Length of an Ethernet address in bytes.
const MAC_LEN: u8 = 6;
/// Lease time in seconds.
const LEASE: u32 = 24 * 3600;

/// Handles a datagram from the guest to the server's port.
pub(crate) fn input(packet: &Packet<'_>, context: &mut Context<'_>) {
    let mut frame = [0; MESSAGE_MAX];
    let copied = packet.frame.copy_to(&mut frame);
    let start = packet.payload_start();
    let end = (start + crate::udp::payload_len(packet)).min(copied);
    let Some(bytes) = frame.get(start..end) else {
        return context.counters.drop_malformed.add(1);
    };
    let Ok(request) = Message::decode(&mut Decoder::new(bytes)) else {
        return context.counters.drop_malformed.add(1);
    };
    // A longer address would be read beyond its field.
    let has_address = request.htype() == HType::Eth && request.hlen() == MAC_LEN;
    if request.opcode() != Opcode::BootRequest || !has_address {
        return context.counters.drop_malformed.add(1);
    }
    let Some(answer) = answer(&request, context) else { return };
    let Ok(bytes) = answer.to_vec() else { return };
    let Some(server) = server(context) else { return };
    // A client without an address receives the reply at its hardware address.
    let to = if request.ciaddr().is_unspecified() { Ipv4Addr::BROADCAST } else { request.ciaddr() };
    context.counters.dhcp_answers.add(1);
    push(packet.mac, server, to, &bytes, context);
}

/// Returns the server's address: the router's, or the network's first one that is not the guest's.
fn server(context: &Context<'_>) -> Option<Ipv4Addr> {
    let router = context.config.guest.gateways.iter().find_map(|gateway| match gateway {
        core::net::IpAddr::V4(ip) => Some(*ip),
        core::net::IpAddr::V6(_) => None,
    });
    let (own, prefix) = context.config.guest.ipv4()?;
    let network = own.to_bits() & mask(prefix).to_bits();
    router.or_else(|| (1..3).map(|n| Ipv4Addr::from_bits(network | n)).find(|ip| *ip != own))
}

fn mask(prefix: u8) -> Ipv4Addr {
    Ipv4Addr::from_bits(u32::MAX.checked_shl(32 - u32::from(prefix.min(32))).unwrap_or(0))
}

fn answer(request: &Message, context: &Context<'_>) -> Option<Message> {
    let guest = &context.config.guest;
    let (own, prefix) = guest.ipv4()?;
    let kind = match request.opts().msg_type()? {
        MessageType::Discover => MessageType::Offer,
        MessageType::Request if is_refused(request, own) => MessageType::Nak,
        MessageType::Request | MessageType::Inform => MessageType::Ack,
        _ => return None,
    };
    let server = server(context)?;
    // Each constructor chooses a random id. In a statically linked program that opens a file, which the sandbox refuses.
    let mut answer = request.clone();
    let has_own = matches!(request.opts().msg_type(), Some(MessageType::Inform));
    let none = Ipv4Addr::UNSPECIFIED;
    answer.set_opcode(Opcode::BootReply).set_hops(0).set_secs(0).set_yiaddr(none).set_siaddr(none);
    answer.set_sname(&[]).set_fname(&[]).set_opts(DhcpOptions::default());
    let options = answer.opts_mut();
    options.insert(DhcpOption::MessageType(kind));
    options.insert(DhcpOption::ServerIdentifier(server));
    if kind == MessageType::Nak {
        return Some(answer);
    }
    options.insert(DhcpOption::SubnetMask(mask(prefix)));
    options.insert(DhcpOption::Router(vec![server]));
    if let Some(routes) = routes_to_foreign_router(own, prefix, server) {
        options.insert(routes);
    }
    let servers: Vec<Ipv4Addr> = guest.name_servers_v4().collect();
    if !servers.is_empty() {
        options.insert(DhcpOption::DomainNameServer(servers));
    }
    options.insert(DhcpOption::InterfaceMtu(context.config.mtu));
    let search: Vec<Name> =
        guest.search.iter().filter_map(|name| Name::from_utf8(name).ok()).collect();
    if !search.is_empty() {
        options.insert(DhcpOption::DomainSearch(search));
    }
    if !has_own {
        options.insert(DhcpOption::AddressLeaseTime(LEASE));
        answer.set_yiaddr(own).set_siaddr(server);
    }
    Some(answer)
}

/// Returns routes for a client whose router is not in its network: to the router, which is on its link nevertheless, and
/// the default route by it (RFC 3442). A client that takes them ignores the router's own option.
fn routes_to_foreign_router(own: Ipv4Addr, prefix: u8, router: Ipv4Addr) -> Option<DhcpOption> {
    if (own.to_bits() ^ router.to_bits()) & mask(prefix).to_bits() == 0 {
        return None;
    }
    let to_router = (format!("{router}/32").parse().ok()?, Ipv4Addr::UNSPECIFIED);
    let by_router = ("0.0.0.0/0".parse().ok()?, router);
    Some(DhcpOption::ClasslessStaticRoute(vec![to_router, by_router]))
}

/// Returns `true` if the client requests an address other than its configured one.
fn is_refused(request: &Message, own: Ipv4Addr) -> bool {
    let wanted = match request.opts().get(OptionCode::RequestedIpAddress) {
        Some(DhcpOption::RequestedIpAddress(ip)) => *ip,
        _ => request.ciaddr(),
    };
    wanted != own
}

fn push(mac: Mac, from: Ipv4Addr, to: Ipv4Addr, bytes: &[u8], context: &mut Context<'_>) {
    let ends = Ends { from_mac: context.config.mac, to_mac: mac, from: from.into(), to: to.into() };
    let ends = UdpEnds { ends, from: SERVER, to: CLIENT };
    context.replies.push(|frame| udp_frame(&ends, bytes, frame));
}

/// Writes a complete frame with one UDP datagram.
pub(crate) fn udp_frame(
    UdpEnds { ends, from, to }: &UdpEnds,
    bytes: &[u8],
    frame: &mut Vec<u8>,
) -> Option<()> {
    let header = ends.header_len();
    let length = bytes.len() + 8;
    frame.resize(header + length, 0);
    ends.write(frame, protocol::UDP, length, 0)?;
    let udp = frame.get_mut(header..)?;
    udp[..2].copy_from_slice(&from.to_be_bytes());
    udp[2..4].copy_from_slice(&to.to_be_bytes());
    udp[4..6].copy_from_slice(&u16::try_from(length).ok()?.to_be_bytes());
    udp[6..8].fill(0);
    udp[8..].copy_from_slice(bytes);
    let mut sum = Accumulator::with_sum(ends.pseudo_header(protocol::UDP, length));
    sum.add(udp);
    udp[6..8].copy_from_slice(&never_zero(sum.checksum()).to_be_bytes());
    Some(())
}

#[cfg(test)]
mod tests {
    use core::time::Duration;
    use std::sync::Arc;

    use super::*;
    use crate::counters::UplinkCounters;
    use crate::host::scripted::ScriptedHost;
    use crate::share::Handoff;
    use crate::{Config, Uplink};
    use ringfence_offload::{Checksum, OffloadMeta};

    /// Sends a DISCOVER whose hardware address has this length. Returns the counters.
    fn discover(hlen: u8) -> Arc<UplinkCounters> {
        let mut config = Config::default();
        config.guest.addresses = vec![(Ipv4Addr::new(192, 0, 2, 2).into(), 24)];
        let (counters, mac) = (Arc::<UplinkCounters>::default(), [2, 0, 0, 0, 0, 2]);
        let host = Box::new(ScriptedHost::new(4).unwrap());
        let none = Ipv4Addr::UNSPECIFIED;
        let mut request = Message::new_with_id(7, none, none, none, none, &mac);
        request.opts_mut().insert(DhcpOption::MessageType(MessageType::Discover));
        let mut bytes = request.to_vec().unwrap();
        bytes[2] = hlen;
        let to_mac = config.mac;
        let ends =
            Ends { from_mac: mac, to_mac, from: none.into(), to: Ipv4Addr::BROADCAST.into() };
        let mut frame = Vec::new();
        udp_frame(&UdpEnds { ends, from: CLIENT, to: SERVER }, &bytes, &mut frame).unwrap();
        let mut uplink = Uplink::new(config, host, Arc::clone(&counters));
        let meta = OffloadMeta { checksum: Checksum::Verified, gso: None };
        uplink.accept_handoff(
            Handoff::Frame { bytes: frame, meta, visited: Default::default() },
            Duration::from_secs(1),
        );
        counters
    }

    #[test]
    fn request_with_another_length_of_its_address_is_dropped() {
        let answered = discover(6);
        assert_eq!((answered.dhcp_answers.get(), answered.drop_malformed.get()), (1, 0));
        for hlen in [0, 5, 7, 16, 17, 255] {
            let dropped = discover(hlen);
            assert_eq!(
                (dropped.dhcp_answers.get(), dropped.drop_malformed.get()),
                (0, 1),
                "{hlen}"
            );
        }
    }

    #[test]
    fn router_outside_of_the_network_has_routes_of_its_own() {
        let routes = |own: &str, prefix, router: &str| {
            routes_to_foreign_router(own.parse().unwrap(), prefix, router.parse().unwrap())
        };
        assert_eq!(routes("192.0.2.7", 24, "192.0.2.1"), None);
        assert_eq!(routes("10.0.0.1", 0, "192.0.2.1"), None);
        let found = routes("10.77.0.2", 24, "192.0.2.1");
        let Some(DhcpOption::ClasslessStaticRoute(found)) = found else { panic!("{found:?}") };
        let texts: Vec<String> = found.iter().map(|(to, by)| format!("{to} by {by}")).collect();
        assert_eq!(texts, ["192.0.2.1/32 by 0.0.0.0", "0.0.0.0/0 by 192.0.2.1"]);
        assert!(routes("192.0.2.7", 32, "192.0.2.1").is_some());
    }
}
