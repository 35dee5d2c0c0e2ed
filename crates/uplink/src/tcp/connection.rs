//! State of one TCP connection between the guest and the uplink.
//!
//! The other half of the connection is the host's socket. [`TcpConnection`] holds sequence numbers,
//! windows, timers and the work that is due. `receive` handles segments from the guest, `serve` sends
//! segments to it, `timers` handles deadlines.

use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use std::sync::Arc;

use super::backlog::Backlog;
use super::config::TcpConfig;
use super::local_stream::LocalStream;
use super::names::Names;
use super::proxied::Proxied;
use super::rto::Rto;
use super::segment::{Ports, Segment};
use super::seq::Seq;
use super::window::Offer;
use crate::context::Context;
use crate::egress::{CarriedBytes, FirstBytes, Permit};
use crate::emit::Ends;
use crate::flow::FlowKey;
use crate::host::{Close, Socket};
use crate::packet::Packet;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// The guest's SYN has arrived, the host's connect is in progress. Nothing is sent to the guest.
    Connecting,
    /// The host's connection is established. The guest receives SYN+ACK, repeated until it answers.
    SynReceived,
    /// A connection came from outside. The guest receives a SYN, repeated until it answers.
    SynSent,
    /// Both ends know of the connection. `guest_fin` and `fin` tell which side has closed.
    Open,
    /// Both FINs are acknowledged and ours was first. The socket is closed; a repeated FIN of the guest is
    /// still acknowledged.
    TimeWait,
}

/// SYN of the guest that opens a connection.
#[derive(Clone, Copy)]
pub(super) struct GuestSyn<'a> {
    pub(super) packet: &'a Packet<'a>,
    pub(super) segment: &'a Segment,
    /// TCP options, as received.
    pub(super) options: &'a [u8],
}

/// Result of an event for a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Disposition {
    Keep,
    /// The connection is removed and its socket, if any, is closed in this way.
    Close(Close),
}

/// Urgent data in the host socket's receive queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Urgent {
    /// The queue holds no urgent mark.
    None,
    /// The queue may hold a mark. A read ends at the mark, and only the front of the queue shows whether it is
    /// there. So each read is sent and acknowledged before the next one.
    Ahead,
}

/// Work that is due for the guest, and known state of the socket.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Flags {
    /// A segment with an acknowledgement is due, unless another segment carries it first.
    pub(super) ack_due: bool,
    /// A SYN or SYN+ACK is due.
    pub(super) syn_due: bool,
    /// A retransmission of the first unacknowledged bytes is due, one segment.
    pub(super) retransmit_due: bool,
    /// A probe segment is due, which the guest must answer.
    pub(super) probe_due: bool,
    /// The socket may have data to read.
    pub(super) readable: bool,
    /// The socket's stream has ended, perhaps after bytes that are not yet read.
    pub(super) read_closed: bool,
    /// The socket failed, or both its directions are closed.
    pub(super) failed: bool,
    /// The host is to report room in the send queue.
    pub(super) awaiting_room: bool,
    /// The socket took less than the offered window. The guest must retransmit the rest.
    pub(super) refused: bool,
    /// The guest's FIN has arrived, but payload before it waits for room in the socket.
    pub(super) fin_waits: bool,
    /// The guest's FIN and everything before it have arrived.
    pub(super) guest_fin: bool,
    /// Our FIN was sent before the guest's FIN arrived.
    pub(super) closed_first: bool,
    /// Our FIN is acknowledged.
    pub(super) fin_acked: bool,
    /// The connection is in the queue of connections to serve.
    pub(super) queued: bool,
    /// The egress policy denies the connection by its first bytes.
    pub(super) denied: bool,
    /// The end of the connection is in the egress record, or does not belong there.
    pub(super) recorded: bool,
    /// The last delayed acknowledgement was sent alone: no data carried it in time.
    pub(super) delayed_ack_expired: bool,
}

/// Bytes of a connection that count for rules with limits.
#[derive(Debug)]
pub(super) struct Charge {
    permit: Arc<Permit>,
    /// Bytes that are counted.
    counted: u64,
}

impl Charge {
    pub(super) fn new(permit: Arc<Permit>) -> Box<Charge> {
        Box::new(Charge { permit, counted: 0 })
    }
}

/// One TCP connection. `rcv_*` are sequence numbers of the guest, `snd_*` are ours.
#[derive(Debug)]
pub(super) struct TcpConnection {
    pub(super) phase: Phase,
    pub(super) socket: Option<Socket>,
    pub(super) ends: Ends,
    /// Ports of segments for the guest.
    pub(super) ports: Ports,
    /// DSCP of the socket's segments, in the upper six bits.
    pub(super) dscp: u8,
    pub(super) flags: Flags,
    pub(super) urgent: Urgent,
    /// First bytes of the guest that wait for a verdict of the egress policy.
    pub(super) first: Option<Box<FirstBytes>>,
    /// Stream of a connection that the uplink answers itself, in the place of the socket.
    pub(super) local: Option<Box<LocalStream>>,
    /// The upstream proxy carries the connection.
    pub(super) proxied: Option<Box<Proxied>>,
    pub(super) names: Names,
    /// Payload bytes from the guest and to it, without retransmissions.
    pub(super) bytes: CarriedBytes,
    /// Bytes that count for rules with limits.
    pub(super) charge: Option<Box<Charge>>,

    /// Next byte expected from the guest.
    pub(super) rcv_nxt: Seq,
    /// End of the window that was offered to the guest.
    pub(super) rcv_edge: Seq,
    pub(super) offer: Offer,
    /// Payload that waits for room in the socket.
    pub(super) backlog: Option<Box<Backlog>>,
    /// Window scale of our windows, in bits.
    pub(super) rcv_scale: u8,
    /// Acknowledgement number of the last segment sent to the guest.
    pub(super) last_ack_sent: Seq,
    /// Time at which a delayed acknowledgement is sent alone.
    pub(super) ack_at: Option<Duration>,
    /// Number of duplicate acknowledgements that are due after the first one.
    pub(super) duplicate_acks_due: u8,

    /// First byte that the guest has not acknowledged.
    pub(super) snd_una: Seq,
    pub(super) snd_nxt: Seq,
    /// First byte that was never sent.
    pub(super) snd_max: Seq,
    /// Bytes before `snd_una` that are still at the front of the socket's queue.
    pub(super) undiscarded: u32,
    /// Sequence number of our FIN, set at the end of the socket's stream.
    pub(super) fin: Option<Seq>,
    /// Bytes that the guest accepts from `snd_una` on.
    pub(super) snd_wnd: u32,
    pub(super) snd_scale: u8,
    /// Sequence and acknowledgement number of the segment that last updated `snd_wnd` (`SND.WL1`, `SND.WL2`).
    pub(super) window_update: (Seq, Seq),
    /// Maximum of payload bytes in a segment.
    pub(super) mss: u16,
    /// Number of duplicate acknowledgements in a row.
    pub(super) duplicate_acks: u8,
    /// End of loss recovery: everything before it was in flight when a loss was found.
    pub(super) recover: Option<Seq>,
    /// Congestion window: maximum of bytes in flight. A loss lowers it, acknowledgements raise it.
    pub(super) congestion: u32,

    pub(super) rto: Rto,
    pub(super) retransmit_at: Option<Duration>,
    pub(super) window_probe_at: Option<Duration>,
    pub(super) window_probes: u8,
    /// Time of the guest's last segment.
    pub(super) last_heard: Duration,
    /// Number of unanswered keep-alive probes.
    pub(super) keep_alive_probes: u8,
    /// Time at which a half-open or closed connection is removed.
    pub(super) ends_at: Option<Duration>,
    /// Identification field of the next IPv4 packet.
    pub(super) ip_id: u16,
}

/// Congestion window of a connection without losses.
pub(super) const UNCONGESTED: u32 = 1 << 24;

/// Minimum of the congestion window: two frames.
pub(super) const CONGESTION_MIN: u32 = 128 << 10;

impl TcpConnection {
    /// Creates a connection that has sent and received nothing. `iss` is our initial sequence number.
    pub(super) fn new(phase: Phase, ends: Ends, ports: Ports, iss: Seq, now: Duration) -> Self {
        TcpConnection {
            phase,
            socket: None,
            ends,
            ports,
            dscp: 0,
            flags: Flags::default(),
            urgent: Urgent::None,
            first: None,
            local: None,
            proxied: None,
            names: Names::default(),
            bytes: CarriedBytes::default(),
            charge: None,
            rcv_nxt: Seq(0),
            rcv_edge: Seq(0),
            offer: Offer::default(),
            backlog: None,
            rcv_scale: 0,
            last_ack_sent: Seq(0),
            ack_at: None,
            duplicate_acks_due: 0,
            snd_una: iss,
            snd_nxt: iss,
            snd_max: iss,
            undiscarded: 0,
            fin: None,
            snd_wnd: 0,
            snd_scale: 0,
            window_update: (Seq(0), Seq(0)),
            mss: MSS_DEFAULT,
            duplicate_acks: 0,
            recover: None,
            congestion: UNCONGESTED,
            rto: Rto::default(),
            retransmit_at: None,
            window_probe_at: None,
            window_probes: 0,
            last_heard: now,
            keep_alive_probes: 0,
            ends_at: None,
            ip_id: 1,
        }
    }

    /// Creates the connection for a SYN of the guest.
    pub(super) fn for_syn(
        phase: Phase,
        key: &FlowKey,
        iss: Seq,
        syn: GuestSyn<'_>,
        context: &Context<'_>,
    ) -> TcpConnection {
        let ends = Ends {
            from_mac: context.config.mac,
            to_mac: syn.packet.mac,
            from: syn.packet.destination,
            to: syn.packet.source,
        };
        let ports = Ports { from: key.remote.port(), to: key.guest.port() };
        let mut flow = TcpConnection::new(phase, ends, ports, iss, context.now);
        flow.read_syn(syn.segment, syn.options, context.config.mtu);
        flow
    }

    /// Returns `true` until both ends know of the connection.
    pub(super) fn is_half_open(&self) -> bool {
        matches!(self.phase, Phase::Connecting | Phase::SynReceived | Phase::SynSent)
    }

    /// Adds the end of the connection to the egress record, once. It then counts for no limit of open connections.
    pub(super) fn record_end(&mut self, context: &Context<'_>) {
        if let Some(egress) = context.egress.as_ref().filter(|_| !self.flags.recorded) {
            self.flags.recorded = true;
            let to = SocketAddr::new(self.ends.from, self.ports.from);
            self.is_within_limits();
            let limit = self.charge.take().and_then(|charge| charge.permit.exceeded());
            egress.close(to, self.names.allowed.take().map(String::from), self.bytes, limit);
        }
    }

    /// Charges the bytes that were carried since the last call. Returns `false` if they exceed the limit of a rule.
    pub(super) fn is_within_limits(&mut self) -> bool {
        let Some(charge) = &mut self.charge else { return true };
        let carried = self.bytes.from_guest.saturating_add(self.bytes.to_guest);
        let new = carried.saturating_sub(charge.counted);
        charge.counted = carried;
        charge.permit.carry(new)
    }

    /// Returns the number of bytes in flight to the guest, a FIN counting as one.
    pub(super) fn in_flight(&self) -> u32 {
        self.snd_nxt.since(self.snd_una).unwrap_or(0)
    }

    /// Returns the maximum segment size for an MTU, in either direction.
    pub(super) fn mss_of(mtu: u16, remote: IpAddr) -> u16 {
        mtu.saturating_sub(if remote.is_ipv4() { 40 } else { 60 })
    }

    /// Returns `true` when both directions are closed and both FINs are acknowledged.
    pub(super) fn is_over(&self) -> bool {
        self.flags.guest_fin && self.flags.fin_acked
    }

    /// Returns the time of the next keep-alive probe of an open connection.
    pub(super) fn keep_alive_at(&self, config: &TcpConfig) -> Duration {
        let is_half_closed = self.flags.guest_fin || self.flags.fin_waits;
        let after = if is_half_closed { config.half_closed_after } else { config.keep_alive_after };
        self.last_heard + after + config.keep_alive_every * u32::from(self.keep_alive_probes)
    }

    /// Returns the time of the connection's next timer.
    pub(super) fn deadline(&self, config: &TcpConfig) -> Option<Duration> {
        let keep_alive = (self.phase == Phase::Open).then(|| self.keep_alive_at(config));
        let first = self.first.as_ref().and_then(|first| first.deadline());
        let (retransmit, probe) = (self.retransmit_at, self.window_probe_at);
        let own = [retransmit, probe, self.offer.check_at, self.ends_at, self.ack_at, first];
        own.into_iter().chain([keep_alive]).flatten().min()
    }
}

/// Maximum segment size of a guest that announces none (RFC 9293, 3.7.1).
pub(super) const MSS_DEFAULT: u16 = 536;
