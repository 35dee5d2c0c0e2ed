//! TCP: each connection of the guest is carried by one host socket.
//!
//! The guest's kernel has a connection with this module, segment by segment. The host's kernel has a
//! connection with the other end, by a socket. No payload is stored in between, but for a bounded backlog:
//!
//! ```text
//! guest  --segment-->  receive  --send-->  host socket  -->  other end
//! guest  <--segment--  serve    <--peek--  host socket  <--  other end
//! ```
//!
//! * **From the guest.** In-order payload goes from its frame into the socket. The acknowledgement covers
//!   the bytes that the socket accepted. The offered window is the room in the socket's send queue (`window`), and
//!   it never shrinks. Payload that it covered and the socket refuses waits for room (`backlog`). Segments out of
//!   order are answered by a duplicate acknowledgement and dropped; the guest retransmits them.
//! * **To the guest.** Payload is *peeked*: copied into frames while it stays in the socket's receive
//!   queue. It is discarded from the queue once the guest has acknowledged it. A retransmission peeks again.
//!   So the other end's window closes when the guest does not read, as on a direct connection.
//!
//! A guest's SYN is answered once the host's connection is established, or by a reset if it was refused. Behind an upstream
//! proxy, that is once the proxy has opened it (`at_proxy`).
//! FINs, resets, urgent data and failures are forwarded in both directions, in order with the data.
//!
//! Under an egress policy, connections to name servers and denied requests of HTTP have no socket: the uplink answers them
//! itself (`local`).
//!
//! Initial sequence numbers are keyed hashes of addresses and time (RFC 6528). Neither timestamps nor
//! selective acknowledgements are negotiated: the link to the guest is local and loses nothing by itself.
//!
//! # Limits
//!
//! [`TcpConfig`] bounds connections and half-open connections. At the limit, the connection idle longest or
//! the oldest half-open one is evicted. Connections from outside have limits of their own: they never
//! evict one that the guest opened. Each connection sends a bounded number of frames a round, in FIFO order.

mod at_proxy;
mod backlog;
pub mod config;
mod connection;
mod first;
mod local;
mod local_stream;
mod names;
mod open_flows;
mod pieces;
mod proxied;
mod receive;
mod reset;
mod rto;
mod run;
pub mod segment;
pub mod seq;
mod serve;
mod timers;
mod window;

use core::hash::BuildHasher;
use core::net::SocketAddr;
use core::time::Duration;
use std::collections::VecDeque;
use std::hash::RandomState;
use std::os::fd::OwnedFd;

use ringfence_offload::packet::tcp_flags::{ACK, RST};
use ringfence_policy::Protocol;
use rustix::io::Errno;

pub use config::TcpConfig;
use connection::{Charge, Disposition, GuestSyn, Phase, TcpConnection, Urgent};
pub use run::SegmentRun;
use segment::{Header, Ports, Segment};
use seq::Seq;
use serve::Served;

use crate::config::Config;
use crate::context::{Context, Way};
use crate::egress::{Asked, FirstBytes};
use crate::emit::Ends;
use crate::flow::{FlowId, FlowKey, FlowTable, Origin};
use crate::host::{Close, OwnerKind, Readiness, Ready};
use crate::link::GuestLink;
use crate::packet::{Mac, Packet};
use crate::upstream::ProxyFault;

/// Window scale of our windows, in bits: at most 16 MiB, in steps of 256 bytes.
const WINDOW_SCALE: u8 = 8;

/// Half-open connections of one origin.
#[derive(Default)]
struct HalfOpen {
    /// Connections that were half open when added, oldest first.
    entered: VecDeque<FlowId>,
    /// Number of entries that are still half open.
    count: usize,
}

/// All TCP connections of one guest.
pub struct Tcp {
    flows: FlowTable<TcpConnection>,
    /// Connections that have something to send, or may have.
    pending: VecDeque<FlowId>,
    half_open_guest: HalfOpen,
    half_open_outside: HalfOpen,
    secret: RandomState,
}

impl Tcp {
    /// Creates an empty set of connections with the limits of `config`.
    pub fn new(config: &Config) -> Tcp {
        Tcp {
            flows: FlowTable::with_outside(config.tcp.flows_max, config.tcp.inbound_max),
            pending: VecDeque::new(),
            half_open_guest: HalfOpen::default(),
            half_open_outside: HalfOpen::default(),
            secret: RandomState::new(),
        }
    }

    /// Returns the number of connections, in any state.
    pub fn len(&self) -> usize {
        self.flows.len()
    }

    /// Returns `true` if there is no connection.
    pub fn is_empty(&self) -> bool {
        self.flows.is_empty()
    }

    /// Returns the addresses and ports of a packet whose connection another engine of the guest may have: this one has
    /// none for it, and the packet opens none.
    pub(crate) fn foreign(&self, packet: &Packet<'_>) -> Option<FlowKey> {
        let (segment, _) = Segment::read(packet)?;
        let guest = SocketAddr::new(packet.source, segment.ports.from);
        let remote = SocketAddr::new(packet.destination, segment.ports.to);
        let key = FlowKey { guest, remote };
        let is_own = segment.opens() || self.flows.find(&key).is_some();
        (!is_own).then_some(key)
    }

    fn half_open(&mut self, origin: Origin) -> &mut HalfOpen {
        match origin {
            Origin::Guest => &mut self.half_open_guest,
            Origin::Outside => &mut self.half_open_outside,
        }
    }

    /// Handles a TCP packet from the guest, whose checksum and source address are already verified. Its
    /// payload may wait in `run` until `finish_input`.
    pub fn input<'a>(
        &mut self,
        packet: &Packet<'a>,
        run: &mut SegmentRun<'a>,
        context: &mut Context<'_>,
    ) {
        let Some((segment, options)) = Segment::read(packet) else {
            return context.counters.drop_malformed.add(1);
        };
        let guest = SocketAddr::new(packet.source, segment.ports.from);
        let remote = SocketAddr::new(packet.destination, segment.ports.to);
        let key = FlowKey { guest, remote };
        let found = self.flows.find(&key);
        if let Some(id) = found
            && let Some(flow) = self.flows.get_mut(id)
            && flow.is_next(&segment)
        {
            return self.append_to_run(id, packet, &segment, run, context);
        }
        self.finish_input(run, context);
        match found {
            Some(id) if self.starts_new_connection(id, &segment) => {
                self.end(id, Close::Reset, context);
                self.open_from_guest(key, GuestSyn { packet, segment: &segment, options }, context);
            }
            Some(id) => self.dispatch(id, packet, &segment, options, context),
            None if segment.opens() => {
                self.open_from_guest(key, GuestSyn { packet, segment: &segment, options }, context);
            }
            None => {
                context.counters.tcp_stray.add(1);
                reset::refuse(packet, &segment, context);
            }
        }
    }

    /// Adds an in-order segment with nothing but payload to the run of its batch.
    fn append_to_run<'a>(
        &mut self,
        id: FlowId,
        packet: &Packet<'a>,
        segment: &Segment,
        run: &mut SegmentRun<'a>,
        context: &mut Context<'_>,
    ) {
        if run.owner().is_some_and(|owner| owner != id) || !run.has_room_for(packet) {
            self.finish_input(run, context);
        }
        let Some(flow) = self.flows.get_mut(id) else { return };
        // The previous run may have been cut short; this segment then no longer follows.
        let run = flow.is_next(segment).then_some((id, run));
        flow.ends.to_mac = packet.mac;
        // Programs such as `ssh` choose it once the connection is open.
        flow.copy_dscp(packet, context);
        match flow.in_open(segment, packet, run, context) {
            Disposition::Close(how) => self.end(id, how, context),
            Disposition::Keep => {
                self.flows.touch(id);
                self.enqueue(id);
            }
        }
    }

    /// Returns `true` if a SYN opens a new connection with the same addresses and ports.
    fn starts_new_connection(&self, id: FlowId, segment: &Segment) -> bool {
        let Some(flow) = self.flows.get(id) else { return false };
        let is_syn = segment.opens();
        match flow.phase {
            Phase::TimeWait => is_syn && segment.seq > flow.rcv_nxt,
            Phase::Connecting => is_syn && segment.seq + 1 != flow.rcv_nxt,
            _ => false,
        }
    }

    fn dispatch(
        &mut self,
        id: FlowId,
        packet: &Packet<'_>,
        segment: &Segment,
        options: &[u8],
        context: &mut Context<'_>,
    ) {
        let Some(origin) = self.flows.origin(id) else { return };
        let Some(flow) = self.flows.get_mut(id) else { return };
        let was_half_open = flow.is_half_open();
        flow.ends.to_mac = packet.mac;
        let fate = flow.segment(segment, options, packet, context);
        let is_made = was_half_open && !flow.is_half_open();
        self.half_open(origin).count -= usize::from(is_made);
        match fate {
            Disposition::Close(how) => self.end(id, how, context),
            Disposition::Keep => {
                self.flows.touch(id);
                self.enqueue(id);
            }
        }
    }

    /// Opens a connection for a SYN of the guest.
    fn open_from_guest(&mut self, key: FlowKey, syn: GuestSyn<'_>, context: &mut Context<'_>) {
        let Some(way) = context.open_to(key.remote, Protocol::Tcp) else {
            return reset::refuse(syn.packet, syn.segment, context);
        };
        if let (Some(egress), Way::Direct(server)) = (context.egress, &way)
            && context.config.access.is_name_server(key.remote)
            && (context.upstream().is_some() || egress.answers_for(key.remote, context.now))
        {
            return self.open_for_names(key, *server, egress, syn, context);
        }
        let (mut first, mut name, mut permit) = (None, None, None);
        if let Some(egress) = &context.egress {
            let admitted = match context.decide(key.remote, &way, Protocol::Tcp) {
                Asked::Decided(Some(admitted)) => admitted,
                Asked::Decided(None) => return reset::refuse(syn.packet, syn.segment, context),
                Asked::Held(waiting) => return context.hold(syn.packet, waiting),
            };
            name = admitted.decision.name.as_ref().map(|name| name.as_str().into());
            permit = admitted.permit.clone().map(Charge::new);
            first = FirstBytes::new(egress, key.remote, admitted);
        }
        let iss = self.initial_seq(&key, context.now);
        let mut flow = TcpConnection::for_syn(Phase::Connecting, &key, iss, syn, context);
        flow.set_first(first);
        flow.names.allowed = name;
        flow.charge = permit;
        let to = flow.set_way(way, context);
        let Some(id) = self.enter(key, flow, Origin::Guest, context) else { return };
        match to.map(|to| self.connect(id, to, context)) {
            Some(Err(errno)) => return self.refuse(id, errno, context),
            Some(Ok(())) => {}
            None => self.connect_to_proxy(id, ProxyFault::Closed, context),
        }
        if let Some(flow) = self.flows.get_mut(id) {
            context.counters.tcp_opened.add(1);
            flow.copy_dscp(syn.packet, context);
        }
    }

    fn connect(
        &mut self,
        id: FlowId,
        to: SocketAddr,
        context: &mut Context<'_>,
    ) -> Result<(), Errno> {
        let owner = id.owner(OwnerKind::Tcp);
        let socket = match context.host.connect(owner, to) {
            // No descriptor is free. The connection idle longest is closed, one from outside first.
            Err(Errno::MFILE | Errno::NFILE) => {
                let oldest = [Origin::Outside, Origin::Guest].map(|side| self.flows.oldest(side));
                if let Some(oldest) = oldest.into_iter().flatten().find(|&oldest| oldest != id) {
                    self.evict(oldest, context);
                }
                context.host.connect(owner, to)?
            }
            other => other?,
        };
        if let Some(flow) = self.flows.get_mut(id) {
            flow.socket = Some(socket);
        }
        self.update_deadline(id, context);
        Ok(())
    }

    /// Opens a connection for a socket that was accepted outside. The guest receives a SYN from `client`,
    /// which must have the guest's address family.
    pub fn accept(
        &mut self,
        file: OwnedFd,
        client: SocketAddr,
        guest: SocketAddr,
        mac: Mac,
        context: &mut Context<'_>,
    ) {
        let key = FlowKey { guest, remote: client };
        // The host may reuse a client's port before our TIME-WAIT ends.
        let is_over = |id: &FlowId| self.flows.get(*id).is_some_and(|f| f.phase == Phase::TimeWait);
        if let Some(old) = self.flows.find(&key).filter(is_over) {
            self.end(old, Close::Orderly, context);
        }
        if self.flows.find(&key).is_some() || client.is_ipv4() != guest.is_ipv4() {
            context.counters.tcp_refused.add(1);
            return;
        }
        let (from, to) = (client.ip(), guest.ip());
        let ends = Ends { from_mac: context.config.mac, to_mac: mac, from, to };
        let ports = Ports { from: client.port(), to: guest.port() };
        let iss = self.initial_seq(&key, context.now);
        let mut flow = TcpConnection::new(Phase::SynSent, ends, ports, iss, context.now);
        flow.rcv_scale = WINDOW_SCALE;
        flow.flags.syn_due = true;
        // Egress records are about connections that the guest opens.
        flow.flags.recorded = true;
        let Some(id) = self.enter(key, flow, Origin::Outside, context) else {
            context.counters.tcp_refused.add(1);
            return;
        };
        match context.host.adopt(id.owner(OwnerKind::Tcp), file) {
            Ok(socket) => {
                if let Some(flow) = self.flows.get_mut(id) {
                    flow.socket = Some(socket);
                }
                context.counters.tcp_accepted.add(1);
                self.enqueue(id);
                self.update_deadline(id, context);
            }
            Err(_) => {
                context.counters.tcp_refused.add(1);
                self.end(id, Close::Reset, context);
            }
        }
    }

    /// Inserts a half-open connection. Evicts others of the same origin if a limit is reached.
    fn enter(
        &mut self,
        key: FlowKey,
        flow: TcpConnection,
        origin: Origin,
        context: &mut Context<'_>,
    ) -> Option<FlowId> {
        let half_open_max = context.config.tcp.half_open_of(origin);
        if self.half_open(origin).count >= half_open_max {
            self.evict_half_open(origin, context);
        }
        if self.flows.is_full(origin)
            && let Some(oldest) = self.flows.oldest(origin)
        {
            self.evict(oldest, context);
        }
        let id = self.flows.insert(key, flow, origin)?;
        let half_open = match origin {
            Origin::Guest => &mut self.half_open_guest,
            Origin::Outside => &mut self.half_open_outside,
        };
        half_open.count += 1;
        half_open.entered.push_back(id);
        // Most entries have left the half-open state long ago; they are dropped in bulk.
        if half_open.entered.len() > 2 * half_open_max {
            let flows = &self.flows;
            half_open.entered.retain(|&id| flows.get(id).is_some_and(TcpConnection::is_half_open));
        }
        Some(id)
    }

    fn evict_half_open(&mut self, origin: Origin, context: &mut Context<'_>) {
        while let Some(id) = self.half_open(origin).entered.pop_front() {
            if self.flows.get(id).is_some_and(TcpConnection::is_half_open) {
                return self.evict(id, context);
            }
        }
    }

    /// Removes a connection to make room. Both its ends receive a reset.
    fn evict(&mut self, id: FlowId, context: &mut Context<'_>) {
        context.counters.tcp_evicted.add(1);
        if let Some(flow) = self.flows.get_mut(id)
            && flow.phase == Phase::Open
        {
            flow.reset(context);
        }
        self.end(id, Close::Reset, context);
    }

    /// Removes a connection whose host connection failed, or that may not stay, and resets it at the guest.
    fn refuse(&mut self, id: FlowId, errno: Errno, context: &mut Context<'_>) {
        context.counters.tcp_refused.add(1);
        tracing::debug!(%errno, "a connection was refused");
        match self.flows.get(id) {
            // Without an answer from the other end, the guest receives none either.
            Some(_) if errno == Errno::TIMEDOUT => {}
            Some(flow) if flow.phase == Phase::Connecting => {
                reset::refuse_syn(flow, errno, context);
            }
            Some(flow) => {
                let (ports, seq, acknowledged) = (flow.ports, flow.snd_nxt, flow.rcv_nxt);
                let header =
                    Header { ports, seq, acknowledged, flags: RST | ACK, ..Header::default() };
                reset::send(&flow.ends, header, context);
            }
            None => {}
        }
        self.end(id, Close::Reset, context);
    }

    /// Removes a connection and closes its socket.
    fn end(&mut self, id: FlowId, how: Close, context: &mut Context<'_>) {
        let Some(origin) = self.flows.origin(id) else { return };
        let Some((_, mut flow)) = self.flows.remove(id) else { return };
        self.half_open(origin).count -= usize::from(flow.is_half_open());
        if let Some(socket) = flow.socket.take() {
            context.host.close(socket, how);
        }
        flow.drop_backlog(context);
        flow.record_end(context);
        context.counters.tcp_closed.add(1);
    }

    /// Returns an initial sequence number (RFC 6528): a clock of 4 µs plus a keyed hash of the addresses.
    fn initial_seq(&self, key: &FlowKey, now: Duration) -> Seq {
        let ticks = now.as_micros() / 4;
        let bytes = (u128::from(self.secret.hash_one(key)) + ticks).to_le_bytes();
        Seq(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    /// Sends the payload in `run` to its socket. Must be called after the last packet of a batch.
    pub fn finish_input(&mut self, run: &mut SegmentRun<'_>, context: &mut Context<'_>) {
        let Some(owner) = run.owner() else { return };
        match self.flows.get_mut(owner) {
            Some(flow) => flow.send_run(run, context),
            // The connection was evicted in the meantime.
            None => *run = SegmentRun::default(),
        }
    }

    /// Handles an event of a socket.
    pub fn ready(&mut self, ready: Ready, context: &mut Context<'_>) {
        let Some(id) = self.flows.owned_by(ready.owner) else { return };
        let Some(flow) = self.flows.get_mut(id) else { return };
        if flow.phase != Phase::Connecting {
            flow.on_socket_event(ready.what, context);
            return self.enqueue(id);
        }
        let at_proxy = self.advance_at_proxy(id, ready.what, context);
        let is_waiting = at_proxy == Some(false);
        let Some(flow) = self.flows.get_mut(id).filter(|_| !is_waiting) else { return };
        if ready.what.failed
            && let Some(socket) = &flow.socket
            && let Some(errno) = context.host.error(socket)
        {
            return self.refuse(id, errno, context);
        }
        if ready.what.writable || at_proxy == Some(true) {
            flow.phase = Phase::SynReceived;
            flow.flags.syn_due = true;
            flow.ends_at = None;
            flow.record_event(ready.what);
            self.enqueue(id);
        }
    }

    /// Enqueues a connection to be served in the next [`output`](Self::output).
    fn enqueue(&mut self, id: FlowId) {
        if let Some(flow) = self.flows.get_mut(id)
            && !flow.flags.queued
        {
            flow.flags.queued = true;
            self.pending.push_back(id);
        }
    }

    /// Updates the timer of a connection.
    fn update_deadline(&mut self, id: FlowId, context: &Context<'_>) {
        let deadline = self.flows.get(id).and_then(|flow| flow.deadline(&context.config.tcp));
        self.flows.set_deadline(id, deadline);
    }

    /// Handles all timers that are due.
    pub fn run_timers(&mut self, context: &mut Context<'_>) {
        while let Some(id) = self.flows.take_due(context.now) {
            let Some(flow) = self.flows.get_mut(id) else { continue };
            if flow.is_late_at_proxy(context.now) {
                self.fail_at_proxy(id, ProxyFault::Late, context);
                continue;
            }
            match flow.on_deadline(context) {
                Disposition::Keep => {
                    self.enqueue(id);
                    self.update_deadline(id, context);
                }
                Disposition::Close(how) => self.end(id, how, context),
            }
        }
    }

    /// Returns the time at which [`run_timers`](Self::run_timers) must be called next.
    pub fn deadline(&self) -> Option<Duration> {
        self.flows.next_timer()
    }

    /// Sends due segments and data of sockets to the guest, in FIFO order of the connections. Returns `true`
    /// if more can be sent.
    pub fn output(&mut self, link: &mut dyn GuestLink, context: &mut Context<'_>) -> bool {
        for _ in 0..self.pending.len() {
            let Some(id) = self.pending.pop_front() else { break };
            let Some(flow) = self.flows.get_mut(id) else { continue };
            flow.flags.queued = false;
            let served = flow.serve(link, context);
            match served {
                Served::Over(how) => {
                    self.end(id, how, context);
                    continue;
                }
                Served::More => self.enqueue(id),
                Served::NoRoom => {
                    self.enqueue(id);
                    self.update_deadline(id, context);
                    return true;
                }
                Served::Done => {}
            }
            self.update_deadline(id, context);
        }
        !self.pending.is_empty()
    }
}

impl TcpConnection {
    /// Copies the DSCP of the guest's packet to the socket, if it has another one.
    #[inline]
    fn copy_dscp(&mut self, packet: &Packet<'_>, context: &mut Context<'_>) {
        /// Bits of the traffic class that belong to ECN.
        const ECN: u8 = 3;
        let dscp = packet.class() & !ECN;
        if self.dscp != dscp {
            self.dscp = dscp;
            if let Some(socket) = &self.socket {
                context.host.set_class(socket, dscp);
            }
        }
    }

    fn record_event(&mut self, what: Readiness) {
        self.flags.readable |= what.readable || what.read_closed;
        self.flags.read_closed |= what.read_closed;
        self.flags.failed |= what.failed;
        if what.urgent {
            self.urgent = Urgent::Ahead;
        }
    }

    /// Handles a socket event of a connection whose host side is established.
    fn on_socket_event(&mut self, what: Readiness, context: &mut Context<'_>) {
        self.record_event(what);
        if !what.writable || !self.flags.awaiting_room {
            return;
        }
        self.flags.awaiting_room = false;
        self.resume_first_bytes(context);
        if !self.send_backlog(context) {
            return;
        }
        let moved = self.refresh_window(context);
        let refused = core::mem::take(&mut self.flags.refused);
        if refused {
            // Three duplicate acknowledgements, beside the window update, make the guest retransmit at once.
            self.duplicate_acks_due = 3;
        }
        self.flags.ack_due |= moved || refused;
    }
}
