//! DHCPv6 server (RFC 8415): offers a guest its configured IPv6 addresses.

use core::net::{IpAddr, Ipv6Addr};

use dhcproto::v6::{
    DhcpOption, DhcpOptions, IAAddr, IANA, Message, MessageType, OptionCode, Status, StatusCode,
};
use dhcproto::{Decodable, Decoder, Encodable, Name};

use crate::context::Context;
use crate::emit::{Ends, UdpEnds};
use crate::ndp::link_local;
use crate::packet::{Mac, Packet};

/// Ports of DHCPv6 servers and clients.
pub(crate) const SERVER: u16 = 547;
const CLIENT: u16 = 546;
/// Multicast address of all servers of a link.
pub(crate) const SERVERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2);
/// Length of the longest message that is read, in bytes.
const MESSAGE_MAX: usize = 1500;
/// Lease time in seconds.
const LEASE: u32 = 24 * 3600;

/// Handles a datagram from the guest to all servers.
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
    let Some(answer) = answer(&request, context) else { return };
    let Ok(bytes) = answer.to_vec() else { return };
    let IpAddr::V6(to) = packet.source else { return };
    let own = context.config.mac;
    let ends =
        Ends { from_mac: own, to_mac: packet.mac, from: link_local(own).into(), to: to.into() };
    context.counters.dhcpv6_answers.add(1);
    let ends = UdpEnds { ends, from: SERVER, to: CLIENT };
    context.replies.push(|frame| crate::dhcp::udp_frame(&ends, &bytes, frame));
}

/// Returns the server's identifier, built from its hardware address (DUID type 3, RFC 8415, 11.4).
fn server_id(mac: Mac) -> Vec<u8> {
    [&[0, 3, 0, 1][..], &mac].concat()
}

fn answer(request: &Message, context: &Context<'_>) -> Option<Message> {
    let asked = request.opts();
    let rapid = asked.get(OptionCode::RapidCommit).is_some();
    let kind = match request.msg_type() {
        MessageType::Solicit if rapid => MessageType::Reply,
        MessageType::Solicit => MessageType::Advertise,
        MessageType::Request
        | MessageType::Renew
        | MessageType::Rebind
        | MessageType::Confirm
        | MessageType::Release
        | MessageType::Decline
        | MessageType::InformationRequest => MessageType::Reply,
        _ => return None,
    };
    let own = server_id(context.config.mac);
    // The message is for another server.
    if matches!(asked.get(OptionCode::ServerId), Some(DhcpOption::ServerId(id)) if *id != own) {
        return None;
    }
    // Each constructor chooses a random id first: see `crate::dhcp`.
    let mut answer = request.clone();
    answer.set_msg_type(kind).set_opts(DhcpOptions::new());
    let options = answer.opts_mut();
    options.insert(DhcpOption::ServerId(own));
    if let Some(client) = asked.get(OptionCode::ClientId) {
        options.insert(client.clone());
    }
    if rapid && kind == MessageType::Reply && request.msg_type() == MessageType::Solicit {
        options.insert(DhcpOption::RapidCommit);
    }
    if let Some(DhcpOption::IANA(wanted)) = asked.get(OptionCode::IANA)
        && !matches!(request.msg_type(), MessageType::Release | MessageType::Decline)
    {
        options.insert(DhcpOption::IANA(lease(wanted.id, context)));
    }
    if matches!(request.msg_type(), MessageType::Confirm | MessageType::Release) {
        options.insert(DhcpOption::StatusCode(StatusCode {
            status: Status::Success,
            msg: String::new(),
        }));
    }
    add_settings(options, context);
    Some(answer)
}

fn lease(id: u32, context: &Context<'_>) -> IANA {
    let mut opts = DhcpOptions::new();
    for addr in context.config.guest.ipv6().take(8) {
        let lease =
            IAAddr { addr, preferred_life: LEASE, valid_life: LEASE, opts: DhcpOptions::new() };
        opts.insert(DhcpOption::IAAddr(lease));
    }
    IANA { id, t1: LEASE / 2, t2: LEASE / 5 * 4, opts }
}

fn add_settings(options: &mut DhcpOptions, context: &Context<'_>) {
    let guest = &context.config.guest;
    let servers: Vec<Ipv6Addr> = guest.name_servers_v6().collect();
    if !servers.is_empty() {
        options.insert(DhcpOption::DomainNameServers(servers));
    }
    let search: Vec<Name> =
        guest.search.iter().filter_map(|name| Name::from_utf8(name).ok()).collect();
    if !search.is_empty() {
        options.insert(DhcpOption::DomainSearchList(search));
    }
}
