//! UDP: each association of the guest has a host socket of its own.
//!
//! An association is identified by the guest's address and port and those of the other end. The first
//! datagram opens a socket and connects it to the other end. The socket has the guest's own port if that
//! is free. So the other end sees the guest's port, third parties cannot inject datagrams, and ICMP errors
//! reach the right association.
//!
//! Associations of one guest port with several peers share one socket, and so one host port (`mapping`).
//!
//! * **To the host** (`to_host`): consecutive datagrams of one association and one length leave as one block,
//!   which the host's kernel segments (`UDP_SEGMENT`). A super-packet of the guest (USO) leaves unchanged.
//! * **To the guest** (`to_guest`): a readable socket waits in a FIFO queue. One call reads many datagrams.
//!   Those of equal length become one super-packet if the link accepts those.
//!
//! Sockets of forwarded ports ([`Udp::listen`]) accept datagrams from any client. Each client has an
//! association of its own, so the guest sees the client's real address. The answer leaves by the socket
//! and the address that the client had contacted. Datagrams that the guest sends first from such a port leave by
//! the same socket. When it is removed ([`Udp::unlisten`]), its associations end.
//!
//! Datagrams from loopback to loopback do not take the link (`relay`). Multicast has sockets of its own ([`multicast`]).
//!
//! # Limits
//!
//! Idle associations end after [`UNANSWERED`] or [`ANSWERED`]. When the table is full, the one idle longest
//! is evicted. Clients of forwarded ports have a table of their own: they evict only each other.

mod admission;
mod inspect;
mod limits;
mod mapping;
pub mod multicast;
mod names;
mod path;
pub(crate) mod relay;
mod to_guest;
mod to_host;

use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringfence_offload::packet::{Transport, protocol};
use ringfence_policy::Protocol;
use ringfence_sys::numbers::bounded;
use rustix::io::Errno;

use crate::context::Context;
use crate::egress::{DatagramInspector, OpenFlow, Permit};
use crate::flow::{FlowId, FlowKey, FlowTable, Origin};
use crate::forward::{ForwardId, Reused};
use crate::host::datagrams::{DatagramSocket, Failure, ReceiveBuffer, Via};
use crate::host::{OwnerKind, Ready};
use crate::icmp::error::{self as icmp_error, Message, QuotedPacket, Reason};
use crate::packet::{Fragmentation, Mac, Marks, Packet};
use admission::NotAdmitted;
use mapping::Mapping;
use path::{KnownPath, KnownPaths};
use to_host::SendBlock;

/// Lifetime of an idle association without an answer (RFC 4787 asks for two minutes once there is one).
pub const UNANSWERED: Duration = Duration::from_secs(30);
/// Lifetime of an idle association with an answer.
pub const ANSWERED: Duration = Duration::from_secs(180);
/// Maximum of error reports read from one socket in a row.
const REPORTS: usize = 16;

/// Route by which datagrams of an association leave.
enum Route {
    /// No socket yet: the association is being opened.
    Closed,
    /// Socket of the association's own.
    Socket(Box<dyn DatagramSocket>),
    /// Socket of a forwarded port, or one that associations of the same guest port share, by its index.
    Listener(usize, Via),
}

struct Flow {
    route: Route,
    mac: Mac,
    /// The host's address of the other end.
    outward: SocketAddr,
    answered: bool,
    /// Set while the socket waits in the queue to be read.
    queued: bool,
    marks: Marks,
    path: KnownPath,
    /// Inspection that the egress policy requires.
    inspector: Option<Box<DatagramInspector>>,
    /// Permit for rules with limits.
    permit: Option<Arc<Permit>>,
}

impl Flow {
    /// Creates an association whose other end is `outward` on the host. `mac` is the guest's.
    fn new(route: Route, outward: SocketAddr, mac: Mac) -> Flow {
        Flow {
            route,
            mac,
            outward,
            answered: false,
            queued: false,
            marks: Marks::default(),
            path: KnownPath::UNKNOWN,
            inspector: None,
            permit: None,
        }
    }
}

/// Socket of a forwarded port, or one that associations of the same guest port share.
struct Listener {
    socket: Box<dyn DatagramSocket>,
    guest: SocketAddr,
    queued: bool,
    marks: Marks,
    /// Address of the forwarded port on the host.
    at: Option<SocketAddr>,
    /// Number of associations that share the socket; `None` for a forwarded port.
    users: Option<usize>,
}

/// Socket with datagrams for the guest.
#[derive(Clone, Copy, Debug)]
enum Source {
    Flow(FlowId),
    Listener(usize),
}

/// All UDP associations of one guest.
pub struct Udp {
    flows: FlowTable<Flow>,
    listeners: Reused<Listener>,
    /// Indices of the sockets of forwarded ports, by the guest's port.
    ports: HashMap<u16, Vec<usize>>,
    /// Mappings of the guest's other ports.
    mappings: HashMap<SocketAddr, Mapping>,
    paths: KnownPaths,
    waiting: VecDeque<Source>,
    block: SendBlock,
    buffer: ReceiveBuffer,
    /// Payload of a packet under inspection.
    scratch: Vec<u8>,
    /// Answers of name servers that came over TCP, or that are written here.
    answers: Vec<(FlowKey, Mac, Vec<u8>)>,
    ip_id: u16,
}

impl Udp {
    /// Creates an empty set of at most `flows_max` associations, and as many of clients from outside.
    pub fn new(flows_max: usize) -> Udp {
        Udp {
            // Associations of clients need no descriptor each.
            flows: FlowTable::with_outside(flows_max, flows_max),
            listeners: Reused::default(),
            ports: HashMap::new(),
            mappings: HashMap::new(),
            paths: KnownPaths::default(),
            waiting: VecDeque::new(),
            block: SendBlock::default(),
            buffer: ReceiveBuffer::default(),
            scratch: Vec::new(),
            answers: Vec::new(),
            ip_id: 0,
        }
    }
}

impl Udp {
    /// Returns the number of associations.
    pub fn len(&self) -> usize {
        self.flows.len()
    }

    /// Returns `true` if there is no association.
    pub fn is_empty(&self) -> bool {
        self.flows.is_empty()
    }

    /// Forwards datagrams that arrive at a bound socket to `guest`.
    ///
    /// # Errors
    ///
    /// Returns the host's error if it does not accept the socket.
    pub fn listen(
        &mut self,
        socket: OwnedFd,
        guest: SocketAddr,
        context: &mut Context<'_>,
    ) -> Result<ForwardId, Errno> {
        let id = self.listeners.insert(OwnerKind::UdpListener, |owner| {
            let socket = context.host.adopt_udp(owner, socket)?;
            let at = socket.local_address();
            Ok(Listener { socket, guest, queued: false, marks: Marks::default(), at, users: None })
        })?;
        let index = self.listeners.index_of(id.0);
        self.ports.entry(guest.port()).or_default().extend(index);
        Ok(id)
    }

    /// Closes the socket of a forwarded port, and ends its associations.
    pub fn unlisten(&mut self, id: ForwardId, context: &mut Context<'_>) {
        let Some(index) = self.listeners.index_of(id.0) else { return };
        for flow in self.users_of(index) {
            self.flush_if(flow, context);
            self.remove(flow);
        }
        self.ports.retain(|_, indices| {
            indices.retain(|of| *of != index);
            !indices.is_empty()
        });
        self.waiting.retain(|source| !matches!(source, Source::Listener(of) if *of == index));
        self.listeners.remove(id);
    }

    /// Sends an answer to a client of a forwarded port, by the port's socket. Without the port the answer is lost.
    pub(crate) fn answer(&mut self, port: ForwardId, bytes: &[u8], segment: Option<u16>, via: Via) {
        let index = self.listeners.index_of(port.0);
        if let Some(listener) = index.and_then(|index| self.listeners.get_mut(index)) {
            // A client that is gone is reported by the socket.
            let _ = listener.socket.send(bytes, segment, Some(via));
        }
    }

    /// Returns the guest's ports to which forwarded ports lead.
    pub fn forwarded_ports(&self) -> Vec<u16> {
        let ports = self.listeners.values().filter(|listener| listener.users.is_none());
        ports.map(|listener| listener.guest.port()).collect()
    }

    /// Handles a datagram from the guest. It may be sent as late as in [`Udp::finish_input`].
    pub fn input(&mut self, packet: &Packet<'_>, context: &mut Context<'_>) {
        let Some(&[s0, s1, d0, d1]) = packet.transport().first_chunk() else {
            return context.counters.drop_malformed.add(1);
        };
        let (from, to) = (u16::from_be_bytes([s0, s1]), u16::from_be_bytes([d0, d1]));
        if from == 0 || to == 0 {
            return context.counters.drop_malformed.add(1);
        }
        let guest = SocketAddr::new(packet.source, from);
        let key = FlowKey { guest, remote: SocketAddr::new(packet.destination, to) };
        if let Some(egress) = admission::policy_of(key.remote, context) {
            return self.query(key, packet, egress, context);
        }
        let found = self.flows.find(&key).or_else(|| self.answered_from(&key, context));
        let Some(id) = found.or_else(|| self.open(key, packet, context)) else { return };
        self.flows.touch(id);
        self.extend_deadline(id, context.now);
        self.set_marks(id, packet, context);
        context.counters.udp_bytes_in.add(packet.payload_len() as u64);
        if !self.is_within_limits(id, || payload_len(packet), context) {
            return icmp_error::refuse(packet, Reason::Prohibited, context);
        }
        if self.flows.get(id).is_some_and(|flow| flow.inspector.is_some()) {
            return self.send_inspected(id, packet, context);
        }
        self.send(id, packet, context);
    }

    fn open(
        &mut self,
        key: FlowKey,
        packet: &Packet<'_>,
        context: &mut Context<'_>,
    ) -> Option<FlowId> {
        let outward = context.open_directly(key.remote, Protocol::Udp).ok_or(NotAdmitted::Denied);
        let admitted = outward.and_then(|to| Ok((to, admission::admit(key.remote, to, context)?)));
        let (outward, entry) = match admitted {
            Ok(admitted) => admitted,
            Err(NotAdmitted::Held(waiting)) => {
                context.hold(packet, waiting);
                return None;
            }
            Err(NotAdmitted::Denied) => {
                icmp_error::refuse(packet, Reason::Prohibited, context);
                return None;
            }
        };
        let flow = Flow::new(Route::Closed, outward, packet.mac);
        let id = self.insert(key, flow, Origin::Guest, context)?;
        match self.open_route(id, &key, outward, context) {
            Ok(route) => {
                let flow = self.flows.get_mut(id)?;
                (flow.route, flow.inspector, flow.permit) = (route, entry.inspector, entry.permit);
                self.make_path_known(id, context);
                context.counters.udp_opened.add(1);
                Some(id)
            }
            Err(errno) => {
                self.remove(id);
                context.counters.udp_refused.add(1);
                icmp_error::refuse(packet, Reason::of(errno), context);
                None
            }
        }
    }

    /// Inserts an association, evicting the one idle longest if the table is full.
    fn insert(
        &mut self,
        key: FlowKey,
        flow: Flow,
        origin: Origin,
        context: &mut Context<'_>,
    ) -> Option<FlowId> {
        if self.flows.is_full(origin) {
            let oldest = self.flows.oldest(origin)?;
            self.flush_if(oldest, context);
            self.remove(oldest);
            context.counters.udp_evicted.add(1);
        }
        self.flows.insert(key, flow, origin)
    }

    fn extend_deadline(&mut self, id: FlowId, now: Duration) {
        let Some(flow) = self.flows.get(id) else { return };
        let life = if flow.answered { ANSWERED } else { UNANSWERED };
        let held_until = flow.inspector.as_ref().and_then(|inspector| inspector.deadline());
        let deadline = held_until.map_or(now + life, |until| until.min(now + life));
        self.flows.set_deadline(id, Some(deadline));
    }

    /// Copies hop limit, traffic class and DF of the packet to the socket, so that the guest can trace routes and discover
    /// the MTU of paths.
    fn set_marks(&mut self, id: FlowId, packet: &Packet<'_>, context: &mut Context<'_>) {
        let Some(known) = self.marks_of(id).map(|(known, _)| *known) else { return };
        let fragmentation = packet.fragmentation();
        if fragmentation == Fragmentation::Presumed
            && self.flows.get(id).is_some_and(|flow| flow.path.is_over(context.now))
        {
            self.make_path_known(id, context);
        }
        let path = self.flows.get(id).map_or(KnownPath::UNKNOWN, |flow| flow.path);
        let discovery = path.discovery(fragmentation, known.discovery, context.now);
        let marks = Marks { discovery, ..packet.marks() };
        if known == marks {
            return;
        }
        // Earlier datagrams leave with their own.
        self.flush(context);
        if let Some((known, socket)) = self.marks_of(id) {
            *known = marks;
            socket.set_marks(marks);
        }
    }

    /// Makes the path of an association known to the guest, if it has a socket of its own.
    fn make_path_known(&mut self, id: FlowId, context: &mut Context<'_>) {
        let (Some(key), Some(flow)) = (self.flows.key(id), self.flows.get_mut(id)) else { return };
        let Flow { route, mac, path, .. } = flow;
        let path_mtu = || match route {
            Route::Socket(socket) => socket.path_mtu(),
            _ => None,
        };
        *path = self.paths.make_known(&key, *mac, path_mtu, context);
    }

    /// Returns the socket by which an association sends, with the options in force.
    fn marks_of(&mut self, id: FlowId) -> Option<(&mut Marks, &mut Box<dyn DatagramSocket>)> {
        let flow = self.flows.get_mut(id)?;
        match &mut flow.route {
            Route::Socket(socket) => Some((&mut flow.marks, socket)),
            Route::Listener(index, _) => {
                let listener = self.listeners.get_mut(*index)?;
                Some((&mut listener.marks, &mut listener.socket))
            }
            Route::Closed => None,
        }
    }

    /// Handles an event of a socket.
    pub fn ready(&mut self, ready: Ready, context: &mut Context<'_>) {
        match ready.owner.kind {
            OwnerKind::UdpListener => {
                let Some(index) = self.listeners.index_of(ready.owner) else { return };
                if ready.what.failed {
                    self.report_listener(index, context);
                }
                self.queue(Source::Listener(index));
            }
            _ => {
                let Some(id) = self.flows.owned_by(ready.owner) else { return };
                if ready.what.failed {
                    self.report(id, context);
                }
                self.queue(Source::Flow(id));
            }
        }
    }

    fn queue(&mut self, source: Source) {
        let queued = match source {
            Source::Flow(id) => self.flows.get_mut(id).map(|flow| &mut flow.queued),
            Source::Listener(index) => {
                self.listeners.get_mut(index).map(|listener| &mut listener.queued)
            }
        };
        if let Some(queued) = queued
            && !*queued
        {
            *queued = true;
            self.waiting.push_back(source);
        }
    }

    /// Reports datagrams of an association that were not delivered. Returns `true` if one is too long for the host.
    fn report(&mut self, id: FlowId, context: &mut Context<'_>) -> bool {
        let mut bytes = [0; 512];
        let mut is_too_long = false;
        for _ in 0..REPORTS {
            let (Some(key), Some(flow)) = (self.flows.key(id), self.flows.get_mut(id)) else {
                break;
            };
            let socket = match &mut flow.route {
                Route::Socket(socket) => socket,
                Route::Listener(index, _) => {
                    let index = *index;
                    return self.report_listener(index, context);
                }
                Route::Closed => break,
            };
            let Some(failure) = socket.error(&mut bytes) else { break };
            is_too_long |= failure.is_too_long();
            let left = bytes.get(..failure.len).unwrap_or(&bytes);
            report(&key, flow, &failure, left, context);
        }
        is_too_long
    }

    fn report_listener(&mut self, index: usize, context: &mut Context<'_>) -> bool {
        let mut bytes = [0; 512];
        let mut is_too_long = false;
        for _ in 0..REPORTS {
            let Some(listener) = self.listeners.get_mut(index) else { break };
            let Some(failure) = listener.socket.error(&mut bytes) else { break };
            is_too_long |= failure.is_too_long();
            let Some(client) = failure.to else { continue };
            let Some(id) = self.flow_at(index, client, context) else { continue };
            let (Some(key), Some(flow)) = (self.flows.key(id), self.flows.get(id)) else {
                continue;
            };
            let left = bytes.get(..failure.len).unwrap_or(&bytes);
            report(&key, flow, &failure, left, context);
        }
        is_too_long
    }

    /// Closes associations of the guest that may not stay: to addresses that became the host's own, that a new egress
    /// policy denies, or that stand for another server now.
    pub fn close_forbidden(&mut self, context: &mut Context<'_>) {
        let outward: Vec<_> = self.flows.ids_of(Origin::Guest).collect();
        for id in outward {
            let Some(FlowKey { remote, .. }) = self.flows.key(id) else { continue };
            // Names that an earlier policy has allowed in this association are not known any more.
            let is_inspected = self.flows.get(id).is_some_and(|flow| flow.inspector.is_some());
            // The policy decides on queries to the guest's name servers, not on the association.
            let is_moved = |to| self.flows.get(id).is_some_and(|flow| flow.outward != to);
            let stays = match admission::policy_of(remote, context) {
                _ if context.outward_to(remote).is_some_and(is_moved) => false,
                Some(_) => context.outward_to(remote).is_some(),
                None => {
                    !is_inspected && context.may_stay(remote, Protocol::Udp, &OpenFlow::default())
                }
            };
            if !stays {
                self.remove(id);
            }
        }
    }

    /// Closes associations of the guest whose socket has an address that the host has lost: the kernel sends nothing from
    /// it. The next datagram opens them again, with the address of the route in force. A guest that sends all the time,
    /// such as a peer of WireGuard, would otherwise keep its association, and reach nobody.
    pub fn close_without_source(&mut self, context: &mut Context<'_>) {
        let outward: Vec<_> = self.flows.ids_of(Origin::Guest).collect();
        for id in outward {
            let Some(Flow { route: Route::Socket(socket), .. }) = self.flows.get(id) else {
                continue;
            };
            if context.has_lost(socket.local_address()) {
                self.flush_if(id, context);
                self.remove(id);
            }
        }
    }

    /// Closes associations whose idle time is over, or whose first datagrams are not complete in time.
    pub fn run_timers(&mut self, context: &mut Context<'_>) {
        while let Some(id) = self.flows.take_due(context.now) {
            if !self.expire_inspection(id, context) {
                self.remove(id);
                context.counters.udp_aged.add(1);
            }
        }
    }

    /// Returns the time at which [`Udp::run_timers`] must be called next.
    pub fn deadline(&self) -> Option<Duration> {
        self.flows.next_timer()
    }
}

/// Returns the payload length of a UDP datagram in bytes.
pub(crate) fn payload_len(packet: &Packet<'_>) -> usize {
    match packet.layers.transport() {
        Transport::Udp(udp) if packet.frame.meta().gso.is_none() => {
            usize::from(udp.length).saturating_sub(8).min(packet.payload_len())
        }
        _ => packet.payload_len(),
    }
}

/// Sends the guest an ICMP error about a datagram that was not delivered.
fn report(key: &FlowKey, flow: &Flow, failure: &Failure, bytes: &[u8], context: &mut Context<'_>) {
    let is_error = match key.guest.ip() {
        IpAddr::V4(_) => matches!(failure.kind, 3 | 11 | 12),
        IpAddr::V6(_) => matches!(failure.kind, 1..=4),
    };
    if !is_error {
        return;
    }
    let from = match failure.reporter {
        Some(ip)
            if ip.is_ipv4() == key.guest.is_ipv4()
                && ip != flow.outward.ip()
                && !ip.is_loopback() =>
        {
            ip
        }
        Some(_) => key.remote.ip(),
        None => icmp_error::reporter(key.remote.ip(), context),
    };
    let message = Message {
        from,
        to: key.guest.ip(),
        mac: flow.mac,
        kind: failure.kind,
        code: failure.code,
        info: failure.info,
    };
    let mut header = [0; 8];
    header[..2].copy_from_slice(&key.guest.port().to_be_bytes());
    header[2..4].copy_from_slice(&key.remote.port().to_be_bytes());
    let length = bounded(bytes.len() + 8, u16::MAX);
    header[4..6].copy_from_slice(&length.to_be_bytes());
    let body = [&header[..], bytes].concat();
    let (from, to) = (key.guest.ip(), key.remote.ip());
    let quoted = QuotedPacket { from, to, protocol: protocol::UDP };
    icmp_error::send_about(&message, quoted, &body, context);
}
