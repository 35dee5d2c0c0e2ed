//! ICMP and ICMPv6: echo requests by ping sockets, and errors to the guest ([`error`]).
//!
//! A Linux ping socket (`SOCK_DGRAM`, `IPPROTO_ICMP`) sends echo requests and receives their replies. It
//! needs no privilege but a group in `net.ipv4.ping_group_range`. Each pair of guest identifier and
//! destination is a flow with a socket of its own. Without permission for ping sockets, the guest's
//! requests are answered by "prohibited". The router itself always answers.

pub mod error;

use core::net::SocketAddr;
use core::time::Duration;
use std::collections::VecDeque;

use ringfence_offload::OffloadMeta;
use ringfence_offload::packet::protocol;
use ringfence_policy::Protocol;
use ringfence_sys::numbers::usize_from;
use rustix::io::Errno;

use crate::context::Context;
use crate::egress::OpenFlow;
use crate::emit::{ETHERNET_LEN, Ends};
use crate::flow::{FlowId, FlowKey, FlowTable, Origin};
use crate::fragment::{self, Fields};
use crate::host::datagrams::{DatagramSocket, ReceiveBuffer};
use crate::host::{OwnerKind, Ready};
use crate::link::{Committed, GuestLink, Slots};
use crate::packet::{self, Fragmentation, HOPS_DEFAULT, Mac, Marks, Packet, PathDiscovery};
use error::{Message, Reason};

/// Lifetime of an idle flow (RFC 5508, requirement 2).
pub const IDLE: Duration = Duration::from_secs(60);
/// Maximum of receive calls in one round.
const READS: usize = 8;
/// Length of an echo header, in bytes.
const ECHO_LEN: usize = 8;

struct Flow {
    socket: Option<Box<dyn DatagramSocket>>,
    mac: Mac,
    queued: bool,
    marks: Marks,
}

/// Echo flows of one guest.
pub struct Icmp {
    flows: FlowTable<Flow>,
    waiting: VecDeque<FlowId>,
    buffer: ReceiveBuffer,
    bytes: Vec<u8>,
}

impl Icmp {
    /// Creates an empty set of at most `flows_max` flows.
    pub fn new(flows_max: usize) -> Icmp {
        let flows = FlowTable::new(flows_max);
        Icmp {
            flows,
            waiting: VecDeque::new(),
            buffer: ReceiveBuffer::default(),
            bytes: Vec::new(),
        }
    }
}

/// Returns the message types of echo request and reply.
fn echo(is_v4: bool) -> (u8, u8) {
    if is_v4 { (8, 0) } else { (128, 129) }
}

impl Icmp {
    /// Handles an ICMP message from the guest.
    pub fn input(&mut self, packet: &Packet<'_>, context: &mut Context<'_>) {
        let Some(&[kind, code, _, _, i0, i1, _, _]) = packet.transport().first_chunk() else {
            return context.counters.drop_malformed.add(1);
        };
        let (request, answer) = echo(packet.source.is_ipv4());
        if kind != request || code != 0 {
            // No socket could use errors or replies of the guest.
            return context.counters.icmp_ignored.add(1);
        }
        self.copy_out(packet);
        if context.config.guest.is_virtual(packet.destination) {
            let bytes = core::mem::take(&mut self.bytes);
            let ends = Ends {
                from_mac: context.config.mac,
                to_mac: packet.mac,
                from: packet.destination,
                to: packet.source,
            };
            push_reply(&ends, &EchoReply { kind: answer, id: None, message: &bytes }, context);
            self.bytes = bytes;
            return;
        }
        let id = u16::from_be_bytes([i0, i1]);
        // The identifier takes the place of the guest's port; destinations have none.
        let guest = SocketAddr::new(packet.source, id);
        let key = FlowKey { guest, remote: SocketAddr::new(packet.destination, 0) };
        let Some(flow) = self.flows.find(&key).or_else(|| self.open(key, packet, context)) else {
            return;
        };
        self.flows.touch(flow);
        self.flows.set_deadline(flow, Some(context.now + IDLE));
        self.send(flow, packet, context);
    }

    /// Copies the message into `self.bytes`, up to the length that the packet's headers say.
    fn copy_out(&mut self, packet: &Packet<'_>) {
        let start = packet.layers.transport_offset().map_or(0, usize::from);
        let end = usize_from(packet.layers.network_end());
        self.bytes.clear();
        let mut at = 0;
        for piece in packet.frame.pieces() {
            let from = start.saturating_sub(at).min(piece.len());
            let to = end.saturating_sub(at).min(piece.len());
            if from < to {
                piece.for_each_piece_of(from..to, |bytes| self.bytes.extend_from_slice(bytes));
            }
            at += piece.len();
        }
    }

    fn open(
        &mut self,
        key: FlowKey,
        packet: &Packet<'_>,
        context: &mut Context<'_>,
    ) -> Option<FlowId> {
        let admitted = |_: &_| context.admits(key.remote, Protocol::Icmp);
        let outward = context.open_directly(key.remote, Protocol::Icmp);
        let Some(outward) = outward.filter(admitted) else {
            error::refuse(packet, Reason::Prohibited, context);
            return None;
        };
        if self.flows.is_full(Origin::Guest) {
            let oldest = self.flows.oldest(Origin::Guest)?;
            self.flows.remove(oldest);
            context.counters.icmp_evicted.add(1);
        }
        let flow = Flow { socket: None, mac: packet.mac, queued: false, marks: Marks::default() };
        let id = self.flows.insert(key, flow, Origin::Guest)?;
        match context.host.open_echo(id.owner(OwnerKind::Icmp), key.guest.port(), outward.ip()) {
            Ok(socket) => {
                self.flows.get_mut(id)?.socket = Some(socket);
                context.counters.icmp_opened.add(1);
                Some(id)
            }
            Err(errno) => {
                self.flows.remove(id);
                context.counters.icmp_refused.add(1);
                error::refuse(packet, Reason::of(errno), context);
                None
            }
        }
    }

    fn send(&mut self, id: FlowId, packet: &Packet<'_>, context: &mut Context<'_>) {
        // A host fragments echo requests, unless `ping` says otherwise.
        let discovery = match packet.fragmentation() {
            Fragmentation::Forbidden => PathDiscovery::Guest,
            _ => PathDiscovery::Host,
        };
        let marks = Marks { discovery, ..packet.marks() };
        let bytes = core::mem::take(&mut self.bytes);
        for _ in 0..3 {
            let Some(flow) = self.flows.get_mut(id) else { break };
            let Some(socket) = &mut flow.socket else { break };
            if flow.marks != marks {
                flow.marks = marks;
                socket.set_marks(marks);
            }
            match socket.send(&bytes, None, None) {
                Ok(()) => {
                    context.counters.icmp_requests.add(1);
                    break;
                }
                Err(Errno::AGAIN | Errno::NOBUFS) => break,
                // Without an MTU, the error concerns an earlier request.
                Err(_) => {
                    if let Some(mtu) = self.report(id, context) {
                        error::refuse(packet, Reason::TooBig(mtu), context);
                        break;
                    }
                }
            }
        }
        self.bytes = bytes;
    }

    /// Handles an event of a socket.
    pub fn ready(&mut self, ready: Ready, context: &mut Context<'_>) {
        let Some(id) = self.flows.owned_by(ready.owner) else { return };
        if ready.what.failed {
            self.report(id, context);
        }
        if let Some(flow) = self.flows.get_mut(id)
            && !flow.queued
        {
            flow.queued = true;
            self.waiting.push_back(id);
        }
    }

    /// Forwards errors about earlier requests to the guest. Returns the MTU if a request is too long for the host,
    /// which the guest does not learn here.
    fn report(&mut self, id: FlowId, context: &mut Context<'_>) -> Option<u32> {
        let mut bytes = [0; 512];
        let mut mtu = None;
        for _ in 0..16 {
            let (Some(key), Some(flow)) = (self.flows.key(id), self.flows.get_mut(id)) else {
                break;
            };
            let Some(failure) = flow.socket.as_mut().and_then(|socket| socket.error(&mut bytes))
            else {
                break;
            };
            if failure.is_too_long() {
                mtu = Some(failure.info);
                continue;
            }
            let is_v4 = key.guest.is_ipv4();
            if is_v4 && !matches!(failure.kind, 3 | 11 | 12) || !is_v4 && failure.kind > 4 {
                continue;
            }
            let known = failure.reporter.filter(|ip| ip.is_ipv4() == is_v4 && !ip.is_loopback());
            let message = Message {
                from: known.unwrap_or_else(|| error::reporter(key.remote.ip(), context)),
                to: key.guest.ip(),
                mac: flow.mac,
                kind: failure.kind,
                code: failure.code,
                info: failure.info,
            };
            // The request left with the host's identifier.
            let len = failure.len.min(bytes.len());
            if let Some(id) = bytes.get_mut(4..6) {
                id.copy_from_slice(&key.guest.port().to_be_bytes());
            }
            let protocol = if is_v4 { protocol::ICMP } else { protocol::ICMPV6 };
            let (from, to) = (key.guest.ip(), key.remote.ip());
            let quoted = error::QuotedPacket { from, to, protocol };
            error::send_about(&message, quoted, &bytes[..len], context);
        }
        mtu
    }

    /// Sends echo replies to the guest. Returns `true` if more may be waiting.
    pub fn output(&mut self, link: &mut dyn GuestLink, context: &mut Context<'_>) -> bool {
        for _ in 0..READS {
            let Some(id) = self.waiting.pop_front() else { return false };
            let mut buffer = core::mem::take(&mut self.buffer);
            self.read(id, &mut buffer, link, context);
            self.buffer = buffer;
        }
        !self.waiting.is_empty()
    }

    fn read(
        &mut self,
        id: FlowId,
        buffer: &mut ReceiveBuffer,
        link: &mut dyn GuestLink,
        context: &mut Context<'_>,
    ) {
        let (Some(key), Some(flow)) = (self.flows.key(id), self.flows.get_mut(id)) else { return };
        flow.queued = false;
        let Some(socket) = &mut flow.socket else { return };
        match socket.receive(buffer) {
            Ok(drained) => {
                if !drained {
                    flow.queued = true;
                    self.waiting.push_back(id);
                }
            }
            Err(Errno::AGAIN) => return,
            Err(_) => {
                flow.queued = true;
                self.waiting.push_back(id);
                self.report(id, context);
                return;
            }
        }
        let ends = Ends {
            from_mac: context.config.mac,
            to_mac: flow.mac,
            from: key.remote.ip(),
            to: key.guest.ip(),
        };
        let (_, answer) = echo(key.guest.is_ipv4());
        for datagram in buffer.datagrams() {
            let bytes = buffer.bytes(datagram);
            if bytes.first() == Some(&answer) && bytes.len() >= ECHO_LEN {
                let hops = datagram.hops.unwrap_or(HOPS_DEFAULT);
                let marks = Marks { hops, class: datagram.class, ..Marks::default() };
                let id = Some(key.guest.port());
                let reply = EchoReply { kind: answer, id, message: bytes };
                send_reply(&ends, &reply, marks, link, context);
            }
        }
        self.flows.touch(id);
    }

    /// Closes flows of the guest that may not stay: to addresses that became the host's own, or that a new egress policy
    /// denies.
    pub fn close_forbidden(&mut self, context: &mut Context<'_>) {
        let outward: Vec<_> = self.flows.ids_of(Origin::Guest).collect();
        for id in outward {
            let Some(FlowKey { remote, .. }) = self.flows.key(id) else { continue };
            if !context.may_stay(remote, Protocol::Icmp, &OpenFlow::nameless()) {
                self.flows.remove(id);
            }
        }
    }

    /// Closes flows of the guest whose socket has an address that the host has lost. The next request opens them again.
    pub fn close_without_source(&mut self, context: &mut Context<'_>) {
        let outward: Vec<_> = self.flows.ids_of(Origin::Guest).collect();
        for id in outward {
            let socket = self.flows.get(id).and_then(|flow| flow.socket.as_ref());
            let at = socket.and_then(|socket| socket.local_address());
            if context.has_lost(at) {
                self.flows.remove(id);
            }
        }
    }

    /// Closes flows whose idle time is over.
    pub fn run_timers(&mut self, context: &mut Context<'_>) {
        while let Some(id) = self.flows.take_due(context.now) {
            self.flows.remove(id);
        }
    }

    /// Returns the time at which [`Icmp::run_timers`] must be called next.
    pub fn deadline(&self) -> Option<Duration> {
        self.flows.next_timer()
    }
}

/// Echo reply for the guest.
struct EchoReply<'a> {
    /// Type of the message.
    kind: u8,
    /// Identifier that the guest knows; `None` if `message` has it.
    id: Option<u16>,
    /// Message from its first byte on. Its type, identifier and checksum are replaced.
    message: &'a [u8],
}

/// Writes headers and a reply into `frame`, whose length must be that of both.
fn write_reply(ends: &Ends, reply: &EchoReply<'_>, frame: &mut [u8]) -> Option<()> {
    let number = if ends.to.is_ipv4() { protocol::ICMP } else { protocol::ICMPV6 };
    let header = ends.header_len();
    ends.write(frame, number, reply.message.len(), 0)?;
    let body = frame.get_mut(header..)?;
    body.copy_from_slice(reply.message);
    body[0] = reply.kind;
    body[2..4].fill(0);
    if let Some(id) = reply.id {
        body[4..6].copy_from_slice(&id.to_be_bytes());
    }
    let sum = error::checksum(ends, number, body);
    body[2..4].copy_from_slice(&sum.to_be_bytes());
    Some(())
}

/// Queues a reply from the uplink itself.
fn push_reply(ends: &Ends, reply: &EchoReply<'_>, context: &mut Context<'_>) {
    context.replies.push(|frame| {
        frame.resize(ends.header_len() + reply.message.len(), 0);
        write_reply(ends, reply, frame)
    });
}

fn send_reply(
    ends: &Ends,
    reply: &EchoReply<'_>,
    marks: Marks,
    link: &mut dyn GuestLink,
    context: &mut Context<'_>,
) {
    let len = ends.header_len() + reply.message.len();
    let mtu = usize::from(link.capabilities().mtu);
    if len > mtu + ETHERNET_LEN {
        return send_long_reply(ends, reply, marks, mtu, link, context);
    }
    let mut slots = Slots::new();
    link.reserve(1, len, &mut slots);
    let Some(frame) = slots.first_mut().and_then(|slot| slot.get_mut(..len)) else { return };
    let written = write_reply(ends, reply, frame)
        .and_then(|()| packet::set_marks(frame.get_mut(ETHERNET_LEN..)?, marks.hops, marks.class));
    drop(slots);
    if written.is_some() {
        link.commit(&[Committed { len, meta: OffloadMeta::PLAIN }]);
        context.counters.frames_out.add(1);
        context.counters.icmp_answers.add(1);
    }
}

/// Sends a reply that exceeds the MTU, in fragments.
fn send_long_reply(
    ends: &Ends,
    reply: &EchoReply<'_>,
    marks: Marks,
    mtu: usize,
    link: &mut dyn GuestLink,
    context: &mut Context<'_>,
) {
    let number = if ends.to.is_ipv4() { protocol::ICMP } else { protocol::ICMPV6 };
    let mut whole = vec![0; ends.header_len() + reply.message.len()];
    let body = write_reply(ends, reply, &mut whole)
        .and_then(|()| whole.get(ends.header_len()..)?.split_first_chunk());
    let Some((head, rest)) = body else { return context.counters.drop_reply.add(1) };
    // The identification must differ between replies in flight: identifier and sequence number do.
    let [_, _, _, _, i0, i1, s0, s1] = *head;
    let id = u16::from_be_bytes([i0, i1]) ^ u16::from_be_bytes([s0, s1]);
    let fields = Fields { id, marks, mtu };
    let frames = fragment::send(ends, number, head, rest, fields, link);
    context.counters.frames_out.add(frames as u64);
    context.counters.icmp_answers.add(1);
}
