//! ICMP and ICMPv6 errors to the guest.
//!
//! An error quotes the packet that caused it. [`refuse`] answers a packet at hand; `send_about` rebuilds
//! the headers of one that was sent earlier.

use core::net::IpAddr;

use ringfence_offload::checksum::Accumulator;
use ringfence_offload::packet::{Network, protocol};
use ringfence_sys::numbers::usize_from;

use crate::context::Context;
use crate::emit::{ETHERNET_LEN, Ends};
use crate::packet::{Mac, Packet};

/// Maximum of quoted bytes, IP header included: the minimum MTU less the headers of the error (RFC 1812,
/// 4.3.2.3; RFC 4443, 2.4).
const QUOTE_MAX_V4: usize = 576 - 28;
const QUOTE_MAX_V6: usize = 1280 - 48;

/// Reasons for which a packet is not delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// No route to the network.
    NetUnreachable,
    /// No route to the host.
    HostUnreachable,
    /// No listener at the port.
    PortUnreachable,
    /// Destination is prohibited by policy.
    Prohibited,
    /// Packet exceeds this MTU in bytes.
    TooBig(u32),
}

impl Reason {
    /// Returns the reason that matches an error of the host.
    pub fn of(errno: rustix::io::Errno) -> Reason {
        use rustix::io::Errno;
        match errno {
            Errno::HOSTUNREACH | Errno::HOSTDOWN => Reason::HostUnreachable,
            Errno::CONNREFUSED => Reason::PortUnreachable,
            Errno::ACCESS | Errno::PERM => Reason::Prohibited,
            _ => Reason::NetUnreachable,
        }
    }

    /// Returns type, code, and the word after the checksum.
    pub(crate) fn numbers(self, is_v4: bool) -> (u8, u8, u32) {
        match (self, is_v4) {
            (Reason::NetUnreachable, true) => (3, 0, 0),
            (Reason::HostUnreachable, true) => (3, 1, 0),
            (Reason::PortUnreachable, true) => (3, 3, 0),
            (Reason::Prohibited, true) => (3, 13, 0),
            (Reason::TooBig(mtu), true) => (3, 4, mtu.min(0xffff)),
            (Reason::NetUnreachable, false) => (1, 0, 0),
            (Reason::HostUnreachable, false) => (1, 3, 0),
            (Reason::PortUnreachable, false) => (1, 4, 0),
            (Reason::Prohibited, false) => (1, 1, 0),
            (Reason::TooBig(mtu), false) => (2, 0, mtu),
        }
    }
}

/// Fields of an error message, without the quoted packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Message {
    /// Address of the reporter.
    pub(crate) from: IpAddr,
    /// Address of the guest that sent the packet.
    pub(crate) to: IpAddr,
    /// Hardware address of the guest.
    pub(crate) mac: Mac,
    pub(crate) kind: u8,
    pub(crate) code: u8,
    /// Word after the checksum.
    pub(crate) info: u32,
}

/// Answers a packet of the guest by an error. Errors and multicast packets get none (RFC 1122, 3.2.2).
pub fn refuse(packet: &Packet<'_>, reason: Reason, context: &mut Context<'_>) {
    if packet.destination.is_multicast() || quotes_an_error(packet) {
        return;
    }
    let start = usize::from(packet.layers.network_offset());
    let end = usize_from(packet.layers.network_end());
    let mut frame = [0; ETHERNET_LEN + 8 + QUOTE_MAX_V6];
    let copied = packet.frame.copy_to(&mut frame).min(end);
    let quote = frame.get(start..copied).unwrap_or_default();
    let (kind, code, info) = reason.numbers(packet.source.is_ipv4());
    let from = reporter(packet.destination, context);
    let message = Message { from, to: packet.source, mac: packet.mac, kind, code, info };
    send(&message, quote, context);
}

/// Answers an earlier packet of the guest by an error. `ends` are those of frames to the guest, `protocol` and `body` are the
/// number and the payload of the packet, or the beginning of it.
pub(crate) fn refuse_earlier(
    ends: &Ends,
    reason: Reason,
    protocol: u8,
    body: &[u8],
    context: &mut Context<'_>,
) {
    let (kind, code, info) = reason.numbers(ends.to.is_ipv4());
    let from = reporter(ends.from, context);
    let message = Message { from, to: ends.to, mac: ends.to_mac, kind, code, info };
    let quoted = QuotedPacket { from: ends.to, to: ends.from, protocol };
    send_about(&message, quoted, body, context);
}

/// Returns the source address of errors that the host itself found: the guest's router of that family,
/// otherwise the destination.
pub(crate) fn reporter(destination: IpAddr, context: &Context<'_>) -> IpAddr {
    let of_family = |ip: &&IpAddr| ip.is_ipv4() == destination.is_ipv4();
    context.config.guest.gateways.iter().find(of_family).copied().unwrap_or(destination)
}

/// Queues an error about the IP packet that begins with `quote`.
pub(crate) fn send(message: &Message, quote: &[u8], context: &mut Context<'_>) {
    let is_v4 = message.to.is_ipv4();
    let quote = quote.get(..if is_v4 { QUOTE_MAX_V4 } else { QUOTE_MAX_V6 }).unwrap_or(quote);
    let ends = Ends {
        from_mac: context.config.mac,
        to_mac: message.mac,
        from: message.from,
        to: message.to,
    };
    context.counters.icmp_errors.add(1);
    context.replies.push(|frame| {
        let header = ends.header_len();
        let length = 8 + quote.len();
        frame.resize(header + length, 0);
        let number = if is_v4 { protocol::ICMP } else { protocol::ICMPV6 };
        ends.write(frame, number, length, 0)?;
        let body = frame.get_mut(header..)?;
        body[0] = message.kind;
        body[1] = message.code;
        body[4..8].copy_from_slice(&message.info.to_be_bytes());
        body[8..].copy_from_slice(quote);
        let sum = checksum(&ends, number, body);
        body[2..4].copy_from_slice(&sum.to_be_bytes());
        Some(())
    });
}

/// Returns the checksum of a message whose checksum field is zero. ICMPv6 includes a pseudo-header.
pub(crate) fn checksum(ends: &Ends, number: u8, body: &[u8]) -> u16 {
    let seed = if number == protocol::ICMP { 0 } else { ends.pseudo_header(number, body.len()) };
    let mut sum = Accumulator::with_sum(seed);
    sum.add(body);
    sum.checksum()
}

fn quotes_an_error(packet: &Packet<'_>) -> bool {
    let kind = packet.transport().first().copied();
    match (packet.layers.network(), packet.layers.transport()) {
        (Network::Ipv4(_), ringfence_offload::packet::Transport::Icmp(_)) => {
            !matches!(kind, Some(0 | 8))
        }
        (Network::Ipv6(_), ringfence_offload::packet::Transport::Icmpv6(_)) => {
            kind.is_none_or(|kind| kind < 128)
        }
        _ => false,
    }
}

/// Packet of the guest that an error quotes.
#[derive(Clone, Copy)]
pub(crate) struct QuotedPacket {
    pub(crate) from: IpAddr,
    pub(crate) to: IpAddr,
    /// Protocol number of the payload.
    pub(crate) protocol: u8,
}

/// Queues an error about an earlier packet of the guest. `body` is the payload of its IP packet, or the
/// beginning of it.
pub(crate) fn send_about(
    message: &Message,
    QuotedPacket { from, to, protocol }: QuotedPacket,
    body: &[u8],
    context: &mut Context<'_>,
) {
    let ends = Ends { from_mac: [0; 6], to_mac: [0; 6], from, to };
    let header = ends.header_len();
    let mut quote = vec![0; header + body.len()];
    if ends.write(&mut quote, protocol, body.len(), 0).is_some() {
        quote[header..].copy_from_slice(body);
        send(message, &quote[ETHERNET_LEN..], context);
    }
}
