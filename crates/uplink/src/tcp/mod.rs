//! TCP: connections of the guest, each by a connection of the host's.
//!
//! # Theory of operation
//!
//! Between the guest and the other end there are two connections: one that the guest's kernel has
//! with this module, segment by segment, and one that the host's kernel has with the other end, by a
//! socket. Nothing is stored in between:
//!
//! * **From the guest.** Payload that is next goes from its frame into the socket, and is
//!   acknowledged as far as the socket took it. The window that the guest is offered is what the
//!   socket's send queue has room for, so that nothing has to be refused; once offered it is never
//!   taken back. What comes out of order is answered and dropped: the guest sends it again.
//! * **To the guest.** Payload is *peeked*: read into frames while it stays in the socket's receive
//!   queue. It is taken off the queue when the guest has acknowledged it. To retransmit is to peek
//!   once more. So the other end's window closes when the guest does not read, as it would if the
//!   two were connected.
//!
//! A connection is told to be made only when it is: a guest's SYN is answered when the host's
//! connection stands, and with a reset when it was refused. FINs, resets, urgent data and failures
//! are passed on in both directions, in their order with the data.
//!
//! # Numbers that are ours
//!
//! Initial sequence numbers are secret functions of addresses and time (RFC 6528). Neither
//! timestamps nor selective acknowledgements are negotiated: the link to the guest is short, and
//! loses nothing unless somebody drops frames on purpose.
//!
//! # Bounds
//!
//! Connections, and those not yet made, are bounded ([`TcpConfig`]); the longest idle one, or the
//! oldest half-open one, makes room. Connections from outside have bounds of their own: they never
//! evict one that the guest began. A turn of a connection is bounded, and they take turns.

pub mod config;
mod connection;
mod receive;
mod reset;
mod rto;
mod run;
pub mod segment;
pub mod seq;
mod serve;
mod timers;

use core::hash::BuildHasher;
use core::net::SocketAddr;
use core::time::Duration;
use std::collections::VecDeque;
use std::hash::RandomState;
use std::os::fd::OwnedFd;

use ringfence_offload::packet::tcp_flags::{ACK, RST, SYN};
use rustix::io::Errno;

pub use config::TcpConfig;
use connection::{Fate, Phase, TcpConnection, Urgent, split};
pub use run::Run;
use segment::{Header, Segment};
use seq::Seq;
use serve::Served;

use crate::config::Config;
use crate::context::Context;
use crate::emit::Ends;
use crate::flow::{FlowId, Key, Origin, Table};
use crate::host::{Close, OwnerKind, Readiness, Ready};
use crate::link::GuestSide;
use crate::packet::{Mac, Packet};

/// By how many bits our windows are shifted: 16 MiB at most, in steps of 256 octets.
const WINDOW_SCALE: u8 = 8;

/// Conversations of one origin that are not yet made.
#[derive(Default)]
struct HalfOpen {
    /// Those that were not yet made when they were entered, oldest first.
    entered: VecDeque<FlowId>,
    /// How many of them still are.
    count: usize,
}

/// All TCP conversations.
pub struct Tcp {
    flows: Table<TcpConnection>,
    /// Those that something is owed to.
    dirty: VecDeque<FlowId>,
    half_open_guest: HalfOpen,
    half_open_outside: HalfOpen,
    secret: RandomState,
}

impl Tcp {
    /// No conversations, within the limits of `config`.
    pub fn new(config: &Config) -> Tcp {
        Tcp {
            flows: Table::with_outside(config.tcp.flows_max, config.tcp.inbound_max),
            dirty: VecDeque::new(),
            half_open_guest: HalfOpen::default(),
            half_open_outside: HalfOpen::default(),
            secret: RandomState::new(),
        }
    }

    /// Conversations, whatever their state.
    pub fn len(&self) -> usize {
        self.flows.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.flows.is_empty()
    }

    fn half_open(&mut self, origin: Origin) -> &mut HalfOpen {
        match origin {
            Origin::Guest => &mut self.half_open_guest,
            Origin::Outside => &mut self.half_open_outside,
        }
    }

    /// A packet of the guest. Its checksum is right and its source is allowed. Its payload may wait in
    /// `run` until [`input_ends`](Self::input_ends).
    pub fn input<'a>(&mut self, packet: &Packet<'a>, run: &mut Run<'a>, context: &mut Context<'_>) {
        let Some((segment, options)) = Segment::read(packet) else {
            return context.counters.drop_malformed.add(1);
        };
        let (guest, remote) = segment.ports;
        let key = Key::new((packet.source, guest), (packet.destination, remote));
        let found = self.flows.find(&key);
        if let Some(id) = found
            && let Some(flow) = self.flows.get_mut(id)
            && flow.is_next(&segment)
        {
            return self.join(id, packet, &segment, run, context);
        }
        self.input_ends(run, context);
        match found {
            Some(id) if self.is_renewed(id, &segment) => {
                self.end(id, Close::Reset, context);
                self.begin(key, packet, &segment, options, context);
            }
            Some(id) => self.pass_on(id, packet, &segment, options, context),
            None if segment.flags & (SYN | ACK | RST) == SYN => {
                self.begin(key, packet, &segment, options, context);
            }
            None => {
                context.counters.tcp_stray.add(1);
                reset::refuse(packet, &segment, context);
            }
        }
    }

    /// Payload that is next, and no more: it goes together with what follows it in the batch.
    fn join<'a>(
        &mut self,
        id: FlowId,
        packet: &Packet<'a>,
        segment: &Segment,
        run: &mut Run<'a>,
        context: &mut Context<'_>,
    ) {
        if run.owner().is_some_and(|owner| owner != id) || !run.has_room_for(packet) {
            self.input_ends(run, context);
        }
        let Some(flow) = self.flows.get_mut(id) else { return };
        // What the run before it did not take, this one does not follow.
        let run = flow.is_next(segment).then_some((id, run));
        flow.ends.to_mac = packet.mac;
        match flow.while_open(segment, packet, run, context) {
            Fate::Ends(how) => self.end(id, how, context),
            Fate::Lives => {
                self.flows.touch(id);
                self.mark(id);
            }
        }
    }

    /// Whether a SYN begins another conversation between the same ends.
    fn is_renewed(&self, id: FlowId, segment: &Segment) -> bool {
        let Some(flow) = self.flows.get(id) else { return false };
        let is_syn = segment.flags & (SYN | ACK | RST) == SYN;
        match flow.phase {
            Phase::TimeWait => is_syn && segment.seq > flow.rcv_nxt,
            Phase::Connecting => is_syn && segment.seq + 1 != flow.rcv_nxt,
            _ => false,
        }
    }

    fn pass_on(
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
            Fate::Ends(how) => self.end(id, how, context),
            Fate::Lives => {
                self.flows.touch(id);
                self.mark(id);
            }
        }
    }

    /// The guest calls.
    fn begin(
        &mut self,
        key: Key,
        packet: &Packet<'_>,
        segment: &Segment,
        options: &[u8],
        context: &mut Context<'_>,
    ) {
        let Some(to) = context.outward_to(key.remote) else {
            return reset::refuse(packet, segment, context);
        };
        let ends = Ends {
            from_mac: context.config.mac,
            to_mac: packet.mac,
            from: packet.destination,
            to: packet.source,
        };
        let iss = self.initial(&key, context.now);
        let ports = (key.remote.port(), key.guest.port());
        let mut flow = TcpConnection::new(Phase::Connecting, ends, ports, iss, context.now);
        flow.take_syn(segment, options, context.config.mtu);
        flow.ends_at = Some(context.now + context.config.tcp.connect_within);
        let Some(id) = self.enter(key, flow, Origin::Guest, context) else { return };
        match self.connect(id, to, context) {
            Ok(()) => context.counters.tcp_opened.add(1),
            Err(errno) => self.refuse(id, errno, context),
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
            // No descriptor is free: the longest idle conversation gives its own, one from outside first.
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
        self.plan(id, context);
        Ok(())
    }

    /// A connection from outside, already accepted. It begins with a SYN to the guest, which comes from
    /// `client`, an address of the guest's family.
    pub fn accept(
        &mut self,
        file: OwnedFd,
        client: SocketAddr,
        guest: SocketAddr,
        mac: Mac,
        context: &mut Context<'_>,
    ) {
        let key = Key { guest, remote: client };
        // The host lets a client have its port again sooner than we forget who had it.
        let is_over = |id: &FlowId| self.flows.get(*id).is_some_and(|f| f.phase == Phase::TimeWait);
        if let Some(old) = self.flows.find(&key).filter(is_over) {
            self.end(old, Close::Orderly, context);
        }
        if self.flows.find(&key).is_some() || client.is_ipv4() != guest.is_ipv4() {
            context.counters.tcp_refused.add(1);
            return;
        }
        let ((from, ours), (to, guests)) = (split(client), split(guest));
        let ends = Ends { from_mac: context.config.mac, to_mac: mac, from, to };
        let iss = self.initial(&key, context.now);
        let mut flow = TcpConnection::new(Phase::SynSent, ends, (ours, guests), iss, context.now);
        flow.rcv_scale = WINDOW_SCALE;
        flow.flags.syn_due = true;
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
                self.mark(id);
                self.plan(id, context);
            }
            Err(_) => {
                context.counters.tcp_refused.add(1);
                self.end(id, Close::Reset, context);
            }
        }
    }

    /// Enters a conversation that is not yet made; others of its origin make room for it.
    fn enter(
        &mut self,
        key: Key,
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
        // Most of the list has long been made: what is no longer half open is forgotten now and then.
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

    /// A conversation makes room for another one: both its ends are told.
    fn evict(&mut self, id: FlowId, context: &mut Context<'_>) {
        context.counters.tcp_evicted.add(1);
        if let Some(flow) = self.flows.get_mut(id)
            && flow.phase == Phase::Open
        {
            flow.reset(context);
        }
        self.end(id, Close::Reset, context);
    }

    /// The host's connection did not come about.
    fn refuse(&mut self, id: FlowId, errno: Errno, context: &mut Context<'_>) {
        context.counters.tcp_refused.add(1);
        tracing::debug!(%errno, "a connection was refused");
        if let Some(flow) = self.flows.get(id)
            // Who does not answer is not answered for.
            && errno != Errno::TIMEDOUT
        {
            let header = Header {
                ports: flow.ports,
                acknowledged: flow.rcv_nxt,
                flags: RST | ACK,
                ..Header::default()
            };
            reset::send(&flow.ends, header, context);
        }
        self.end(id, Close::Reset, context);
    }

    /// Forgets a conversation and closes its socket.
    fn end(&mut self, id: FlowId, how: Close, context: &mut Context<'_>) {
        let Some(origin) = self.flows.origin(id) else { return };
        let Some((_, flow)) = self.flows.remove(id) else { return };
        self.half_open(origin).count -= usize::from(flow.is_half_open());
        if let Some(socket) = flow.socket {
            context.host.close(socket, how);
        }
        context.counters.tcp_closed.add(1);
    }

    /// RFC 6528: a clock of 4 microseconds and a secret function of the addresses.
    fn initial(&self, key: &Key, now: Duration) -> Seq {
        let ticks = now.as_micros() / 4;
        let bytes = (u128::from(self.secret.hash_one(key)) + ticks).to_le_bytes();
        Seq(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    }

    /// Nothing more is added to a run: it is sent on. To be called once all packets of a batch were put in.
    pub fn input_ends(&mut self, run: &mut Run<'_>, context: &mut Context<'_>) {
        let Some(owner) = run.owner() else { return };
        match self.flows.get_mut(owner) {
            Some(flow) => flow.send_run(run, context),
            // It made room for another one.
            None => *run = Run::default(),
        }
    }

    /// An event of a socket.
    pub fn ready(&mut self, ready: Ready, context: &mut Context<'_>) {
        let Some(id) = self.flows.owned_by(ready.owner) else { return };
        let Some(flow) = self.flows.get_mut(id) else { return };
        if flow.phase != Phase::Connecting {
            flow.socket_is(ready.what, context);
            return self.mark(id);
        }
        if ready.what.failed
            && let Some(socket) = &flow.socket
            && let Some(errno) = context.host.error(socket)
        {
            return self.refuse(id, errno, context);
        }
        if ready.what.writable {
            flow.phase = Phase::SynReceived;
            flow.flags.syn_due = true;
            flow.ends_at = None;
            flow.note(ready.what);
            self.mark(id);
        }
    }

    /// Something is owed to a conversation, or may be.
    fn mark(&mut self, id: FlowId) {
        if let Some(flow) = self.flows.get_mut(id)
            && !flow.flags.queued
        {
            flow.flags.queued = true;
            self.dirty.push_back(id);
        }
    }

    /// The conversation's next date is entered.
    fn plan(&mut self, id: FlowId, context: &Context<'_>) {
        let deadline = self.flows.get(id).and_then(|flow| flow.deadline(&context.config.tcp));
        self.flows.set_deadline(id, deadline);
    }

    /// Ends conversations of the guest to addresses that became the host's own.
    pub fn end_local(&mut self, context: &mut Context<'_>) {
        let outward: Vec<_> = self.flows.ids_of(Origin::Guest).collect();
        for id in outward {
            if self.flows.key(id).is_some_and(|key| context.outward_to(key.remote).is_none()) {
                self.refuse(id, Errno::HOSTUNREACH, context);
            }
        }
    }

    /// Does what is due by the clock.
    pub fn run_timers(&mut self, context: &mut Context<'_>) {
        while let Some(id) = self.flows.take_due(context.now) {
            let Some(flow) = self.flows.get_mut(id) else { continue };
            match flow.time_is_up(context) {
                Fate::Lives => {
                    self.mark(id);
                    self.plan(id, context);
                }
                Fate::Ends(how) => self.end(id, how, context),
            }
        }
    }

    /// When [`run_timers`](Self::run_timers) is to be called next.
    pub fn deadline(&self) -> Option<Duration> {
        self.flows.next_look()
    }

    /// Sends what is owed and what sockets have, each conversation in its turn. Returns whether there is
    /// more.
    pub fn output(&mut self, link: &mut dyn GuestSide, context: &mut Context<'_>) -> bool {
        for _ in 0..self.dirty.len() {
            let Some(id) = self.dirty.pop_front() else { break };
            let Some(flow) = self.flows.get_mut(id) else { continue };
            flow.flags.queued = false;
            let served = flow.serve(link, context);
            match served {
                Served::Over(how) => {
                    self.end(id, how, context);
                    continue;
                }
                Served::More => self.mark(id),
                Served::NoRoom => {
                    self.mark(id);
                    self.plan(id, context);
                    return true;
                }
                Served::Done => {}
            }
            self.plan(id, context);
        }
        !self.dirty.is_empty()
    }
}

impl TcpConnection {
    /// What an event says is taken down.
    fn note(&mut self, what: Readiness) {
        self.flags.readable |= what.readable || what.read_closed;
        self.flags.read_closed |= what.read_closed;
        self.flags.failed |= what.failed;
        if what.urgent {
            self.urgent = Urgent::Ahead;
        }
    }

    /// An event of the socket of a connection that was made.
    fn socket_is(&mut self, what: Readiness, context: &mut Context<'_>) {
        self.note(what);
        if !what.writable || !self.flags.awaiting_room {
            return;
        }
        self.flags.awaiting_room = false;
        let moved = self.refresh_window(context);
        if self.flags.refused && moved {
            // What was refused is asked for, three times over the one that tells of the window.
            self.flags.refused = false;
            self.duplicates_due = 3;
        }
        self.flags.ack_due |= moved;
    }
}
