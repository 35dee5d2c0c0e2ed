//! TCP segments to the guest: data peeked from the socket into the link's frames, and control segments.
//!
//! [`TcpConnection::serve`] sends, in this order: a retransmission, new data, FIN, acknowledgements, probes.
//! Each call sends a bounded number of frames. It stops when the link has no room.

use core::ops::ControlFlow;
use core::time::Duration;
use std::io::IoSliceMut;

use arrayvec::ArrayVec;
use ringfence_frame::{ChecksumOffload, PortCapabilities};
use ringfence_offload::checksum::complete_partial;
use ringfence_offload::meta::{Checksum, ChecksumPlace, Gso, TCP_CHECKSUM_OFFSET};
use ringfence_offload::packet::protocol;
use ringfence_offload::packet::tcp_flags::{ACK, FIN, PSH, RST, SYN, URG};
use ringfence_offload::{GsoKind, OffloadMeta};
use ringfence_sys::numbers::{bounded, usize_from};
use rustix::io::Errno;

use super::connection::{Phase, TcpConnection, Urgent};
use super::reset;
use super::segment::{HEADER_LEN, Header, SYN_OPTIONS_LEN, SynOptions};
use super::seq::Seq;
use crate::context::Context;
use crate::host::{Close, UrgentMark};
use crate::link::{Committed, GuestLink, RESERVE_MAX, Slots};

/// Acknowledged bytes that may stay in the socket's queue while others are in flight. Discarding them in
/// bulk saves a system call per acknowledgement.
const DISCARD_AT_LEAST: u32 = 256 << 10;

/// Length of the longest IP packet.
const IP_MAX: usize = 65_535;

/// Maximum of data frames that a connection sends in one round.
const FRAMES_PER_ROUND: usize = RESERVE_MAX;

/// Results of serving a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Served {
    /// No segment is due any more.
    Done,
    /// More can be sent: the connection is to be served again.
    More,
    NoRoom,
    /// The connection is to be removed, its socket closed in this way.
    Over(Close),
}

/// Result of one step: continue with the next step, or end the service.
type Step = ControlFlow<Served>;

/// Fields of a segment to send that differ from segment to segment.
#[derive(Clone, Copy, Debug)]
struct Outgoing {
    seq: Seq,
    flags: u8,
    urgent: u16,
}

impl TcpConnection {
    /// Sends due segments, up to the limit of one round.
    pub(super) fn serve(&mut self, link: &mut dyn GuestLink, context: &mut Context<'_>) -> Served {
        if !self.is_within_limits() {
            context.counters.egress_limits.add(1);
            self.flags.denied = true;
        }
        if self.flags.denied {
            return self.reset(context);
        }
        let done = match self.phase {
            Phase::Connecting => Step::Continue(()),
            Phase::SynReceived | Phase::SynSent => self.serve_syn(link, context),
            Phase::Open => self.serve_open(link, context),
            Phase::TimeWait => self.serve_ack(link, context),
        };
        match done {
            Step::Continue(()) => Served::Done,
            Step::Break(served) => served,
        }
    }

    fn serve_syn(&mut self, link: &mut dyn GuestLink, context: &mut Context<'_>) -> Step {
        if !self.flags.syn_due {
            return Step::Continue(());
        }
        let flags = if self.phase == Phase::SynSent { SYN } else { SYN | ACK };
        let mss = TcpConnection::mss_of(context.config.mtu, self.ends.to);
        let offers_scale = self.phase == Phase::SynSent || self.rcv_scale > 0;
        let options = SynOptions::write(mss, offers_scale.then_some(super::WINDOW_SCALE));
        self.refresh_window(context);
        let outgoing = Outgoing { seq: self.snd_una, flags, urgent: 0 };
        self.send_control(outgoing, &options, link, context)?;
        self.flags.syn_due = false;
        self.snd_nxt = self.snd_una + 1;
        self.snd_max = self.snd_nxt;
        if self.rto.tries() == 0 {
            self.rto.sent(self.snd_nxt, context.now);
        }
        self.retransmit_at = Some(context.now + self.rto.timeout());
        Step::Continue(())
    }

    fn serve_open(&mut self, link: &mut dyn GuestLink, context: &mut Context<'_>) -> Step {
        // On a host that peeks from the front of the queue, acknowledged bytes there cost more than the call.
        let at_least = DISCARD_AT_LEAST.min(context.host.peek_limit() / 4);
        self.discard(context, at_least)?;
        if self.flags.retransmit_due {
            self.send_data(self.snd_una, 1, link, context)?;
            self.flags.retransmit_due = false;
            self.rto.retransmitted();
            context.counters.tcp_retransmitted.add(1);
        }
        let more = self.serve_data(link, context)?;
        self.serve_fin(link, context)?;
        self.serve_ack(link, context)?;
        if self.flags.probe_due {
            let outgoing = Outgoing { seq: self.snd_una - 1, flags: ACK, urgent: 0 };
            self.send_control(outgoing, &[], link, context)?;
            self.flags.probe_due = false;
        }
        if more {
            return Step::Break(Served::More);
        }
        self.check_failure(context)?;
        self.check_end(context)
    }

    /// Sends new data, up to the limit of one round. Returns `true` if more could be sent.
    fn serve_data(
        &mut self,
        link: &mut dyn GuestLink,
        context: &mut Context<'_>,
    ) -> ControlFlow<Served, bool> {
        if !self.flags.readable && self.snd_nxt == self.snd_max {
            return ControlFlow::Continue(false);
        }
        if self.urgent == Urgent::Ahead {
            if self.in_flight() > 0 {
                return ControlFlow::Continue(false);
            }
            if self.serve_urgent(link, context)? {
                return ControlFlow::Continue(true);
            }
        }
        let sent = self.send_data(self.snd_nxt, FRAMES_PER_ROUND, link, context)?;
        ControlFlow::Continue(sent > 0 && (self.flags.readable || self.snd_nxt < self.snd_max))
    }

    /// Returns the number of bytes that may be sent from `from` on.
    fn sendable(&self, from: Seq, context: &Context<'_>) -> u32 {
        let limit = self
            .congestion
            .min(context.config.tcp.flight_max)
            // Acknowledged bytes still in the queue count against the peek limit, too.
            .min(context.host.peek_limit().saturating_sub(self.undiscarded))
            .min(self.snd_wnd);
        let end = self.snd_una + limit;
        let end = self.fin.map_or(end, |fin| end.min(fin));
        let room = end.since(from).unwrap_or(0);
        // Silly window avoidance (RFC 9293, 3.8.6.2.1): a partial segment waits for the acknowledgement.
        let is_sliver = room < self.mss.into() && self.fin.is_none_or(|fin| end < fin);
        // Data behind a long peek waits, too.
        let is_far = self.in_flight() > context.host.peek_limit() / 2;
        let waits = (is_sliver && self.in_flight() > 0) || is_far;
        if waits && from == self.snd_nxt { 0 } else { room }
    }

    /// Sends bytes from `from` on, in at most `frames` frames. Returns the number of bytes sent.
    fn send_data(
        &mut self,
        from: Seq,
        frames: usize,
        link: &mut dyn GuestLink,
        context: &mut Context<'_>,
    ) -> ControlFlow<Served, u32> {
        let room = self.sendable(from, context);
        if room == 0 || self.socket.is_none() && self.local.is_none() {
            self.wait_for_window(context);
            return ControlFlow::Continue(0);
        }
        let shape = Shape::of(self, &link.capabilities());
        let room = usize_from(room);
        let count = room.div_ceil(shape.payload).min(frames).min(RESERVE_MAX);
        let mut slots = Slots::new();
        link.reserve(count, shape.header + shape.payload, &mut slots);
        if slots.is_empty() {
            return ControlFlow::Break(Served::NoRoom);
        }
        let mut keep_alive_probes = room.min(slots.len() * shape.payload);
        let wanted = keep_alive_probes;
        let mut buffers = ArrayVec::<IoSliceMut<'_>, RESERVE_MAX>::new();
        for slot in &mut slots {
            let len = keep_alive_probes.min(shape.payload);
            keep_alive_probes -= len;
            let Some(payload) = slot.get_mut(shape.header..shape.header + len) else { break };
            buffers.push(IoSliceMut::new(payload));
        }
        // Nothing comes behind an end that was reported before the peek.
        let is_ended = self.local.is_none()
            && self.flags.read_closed
            && !self.flags.failed
            && self.urgent == Urgent::None;
        let front = self.snd_una - self.undiscarded;
        let offset = usize_from(from.since(front).unwrap_or(0));
        let read = self.peek(offset, &mut buffers, context);
        drop(buffers);
        let bytes = match read {
            Ok(0) => {
                self.fin = Some(from);
                self.flags.readable = false;
                return ControlFlow::Continue(0);
            }
            Ok(bytes) => bytes.min(wanted),
            Err(Errno::AGAIN | Errno::INTR) => {
                self.flags.readable = false;
                return ControlFlow::Continue(0);
            }
            Err(_) => {
                drop(slots);
                return ControlFlow::Break(self.reset(context));
            }
        };
        let is_short = bytes < wanted;
        let done = self.write_frames(from, bytes, is_short, &mut slots, &shape, context);
        drop(slots);
        link.commit(&done);
        context.counters.frames_out.add(done.len() as u64);
        context.counters.tcp_bytes_out.add(bytes as u64);
        let bytes = bounded(bytes, u32::MAX);
        self.bytes.to_guest += u64::from((from + bytes).since(self.snd_max).unwrap_or(0));
        self.record_sent(from, bytes, context.now);
        if is_short && from == self.snd_nxt - bytes {
            self.note_all_sent(is_ended);
        }
        ControlFlow::Continue(bytes)
    }

    /// Notes that the guest has all that the socket had. `is_ended` says that its end follows.
    fn note_all_sent(&mut self, is_ended: bool) {
        if is_ended {
            self.fin = Some(self.snd_nxt);
        }
        // Later data and the end raise an event, but the end may already have done so.
        self.flags.readable = self.flags.read_closed && !is_ended || self.urgent == Urgent::Ahead;
    }

    /// Copies bytes for the guest from `offset` on: of the socket, or of the local stream.
    fn peek(
        &self,
        offset: usize,
        into: &mut [IoSliceMut<'_>],
        context: &mut Context<'_>,
    ) -> Result<usize, Errno> {
        match (&self.local, &self.socket) {
            (Some(local), _) => local.peek(offset, into),
            (None, Some(socket)) => context.host.peek(socket, offset, into),
            (None, None) => Err(Errno::NOTCONN),
        }
    }

    /// Writes the headers of `bytes` payload bytes that are in `slots`.
    fn write_frames(
        &mut self,
        from: Seq,
        bytes: usize,
        is_last: bool,
        slots: &mut Slots<'_>,
        shape: &Shape,
        context: &mut Context<'_>,
    ) -> ArrayVec<Committed, RESERVE_MAX> {
        let mut done = ArrayVec::new();
        if self.flags.ack_due || self.ack_at.is_some() {
            self.refresh_window(context);
        }
        self.answered(context.now);
        let (mut seq, mut left) = (from, bytes);
        for slot in slots.iter_mut() {
            if left == 0 {
                break;
            }
            let len = left.min(shape.payload);
            left -= len;
            let flags = if left == 0 && is_last { ACK | PSH } else { ACK };
            let outgoing = Outgoing { seq, flags, urgent: 0 };
            let Some(frame) = slot.get_mut(..shape.header + len) else { break };
            let Some(meta) = self.write_headers(outgoing, &[], frame, shape) else { break };
            done.push(Committed { len: frame.len(), meta });
            seq += bounded(len, u32::MAX);
        }
        done
    }

    fn record_sent(&mut self, from: Seq, bytes: u32, now: Duration) {
        let end = from + bytes;
        if from == self.snd_max {
            self.rto.sent(end, now);
        }
        if from == self.snd_nxt {
            self.snd_nxt = end;
        }
        self.snd_max = self.snd_max.max(end);
        if self.retransmit_at.is_none() {
            self.retransmit_at = Some(now + self.rto.timeout());
        }
    }

    /// Arms the window probe timer if data waits and the guest's window is closed.
    fn wait_for_window(&mut self, context: &Context<'_>) {
        let shut = self.in_flight() == 0 && self.fin.is_none_or(|fin| self.snd_nxt < fin);
        if shut && self.window_probe_at.is_none() {
            let wait = self.rto.timeout().saturating_mul(1 << self.window_probes.min(8));
            self.window_probe_at = Some(context.now + wait.min(super::rto::MAX));
        }
    }

    /// Sends the urgent byte if the urgent mark is at the front of the queue. Returns `true` if it was sent.
    fn serve_urgent(
        &mut self,
        link: &mut dyn GuestLink,
        context: &mut Context<'_>,
    ) -> ControlFlow<Served, bool> {
        self.discard(context, 0)?;
        let Some(socket) = &self.socket else { return ControlFlow::Continue(false) };
        match context.host.urgent_mark(socket) {
            UrgentMark::Ahead => return ControlFlow::Continue(false),
            UrgentMark::None => {
                self.urgent = Urgent::None;
                return ControlFlow::Continue(false);
            }
            UrgentMark::Here => self.urgent = Urgent::None,
        }
        let mut byte = [0; 1];
        let read = context.host.peek(socket, 0, &mut [IoSliceMut::new(&mut byte)]);
        if read != Ok(1) {
            return ControlFlow::Continue(false);
        }
        let outgoing = Outgoing { seq: self.snd_nxt, flags: ACK | URG | PSH, urgent: 1 };
        self.send_with(outgoing, &[], &byte, link, context)?;
        self.record_sent(self.snd_nxt, 1, context.now);
        ControlFlow::Continue(true)
    }

    fn serve_fin(&mut self, link: &mut dyn GuestLink, context: &mut Context<'_>) -> Step {
        if self.fin != Some(self.snd_nxt) || self.flags.fin_acked {
            return Step::Continue(());
        }
        self.refresh_window(context);
        let outgoing = Outgoing { seq: self.snd_nxt, flags: FIN | ACK, urgent: 0 };
        self.send_control(outgoing, &[], link, context)?;
        if self.snd_max == self.snd_nxt {
            self.flags.closed_first = !self.flags.guest_fin;
        }
        self.record_sent(self.snd_nxt, 1, context.now);
        Step::Continue(())
    }

    fn serve_ack(&mut self, link: &mut dyn GuestLink, context: &mut Context<'_>) -> Step {
        let outgoing = |this: &Self| Outgoing { seq: this.snd_nxt, flags: ACK, urgent: 0 };
        if self.flags.ack_due {
            self.refresh_window(context);
            self.send_control(outgoing(self), &[], link, context)?;
        }
        while self.duplicate_acks_due > 0 {
            self.send_control(outgoing(self), &[], link, context)?;
            self.duplicate_acks_due -= 1;
        }
        Step::Continue(())
    }

    /// Discards acknowledged bytes from the socket's queue: once there are `at_least` of them, or none is in
    /// flight.
    fn discard(&mut self, context: &mut Context<'_>, at_least: u32) -> Step {
        let idle = self.snd_una == self.snd_max;
        if self.undiscarded == 0 || (self.undiscarded < at_least && !idle) {
            return Step::Continue(());
        }
        if let Some(local) = &mut self.local {
            local.discard(self.undiscarded);
            self.undiscarded = 0;
        }
        // Twice, since such a read ends before the urgent mark.
        for _ in 0..2 {
            let Some(socket) = self.socket.as_ref().filter(|_| self.undiscarded > 0) else { break };
            let len = usize_from(self.undiscarded);
            match context.host.discard(socket, len) {
                Ok(bytes) => {
                    let bytes = bounded(bytes, u32::MAX);
                    self.undiscarded = self.undiscarded.saturating_sub(bytes);
                }
                Err(Errno::INTR | Errno::AGAIN) => break,
                Err(_) => return Step::Break(self.reset(context)),
            }
        }
        Step::Continue(())
    }

    /// Resets the connection if the socket failed. Called after all its data was sent.
    fn check_failure(&mut self, context: &mut Context<'_>) -> Step {
        if !self.flags.failed {
            return Step::Continue(());
        }
        self.flags.failed = false;
        let error = self.socket.as_ref().and_then(|socket| context.host.error(socket));
        if error.is_some() { Step::Break(self.reset(context)) } else { Step::Continue(()) }
    }

    /// Queues a reset for the guest.
    pub(super) fn reset(&mut self, context: &mut Context<'_>) -> Served {
        let header = Header {
            ports: self.ports,
            seq: self.snd_nxt,
            acknowledged: self.rcv_nxt,
            flags: RST | ACK,
            ..Header::default()
        };
        reset::send(&self.ends, header, context);
        Served::Over(Close::Reset)
    }

    fn check_end(&mut self, context: &mut Context<'_>) -> Step {
        if !self.is_over() {
            return Step::Continue(());
        }
        self.discard(context, 0)?;
        if !self.flags.closed_first {
            return Step::Break(Served::Over(Close::Orderly));
        }
        if let Some(socket) = self.socket.take() {
            context.host.close(socket, Close::Orderly);
        }
        self.local = None;
        self.record_end(context);
        self.phase = Phase::TimeWait;
        self.retransmit_at = None;
        self.window_probe_at = None;
        self.ends_at = Some(context.now + context.config.tcp.time_wait);
        Step::Continue(())
    }

    fn send_control(
        &mut self,
        outgoing: Outgoing,
        options: &[u8],
        link: &mut dyn GuestLink,
        context: &mut Context<'_>,
    ) -> Step {
        self.send_with(outgoing, options, &[], link, context)
    }

    /// Sends a segment with a short payload.
    fn send_with(
        &mut self,
        outgoing: Outgoing,
        options: &[u8],
        payload: &[u8],
        link: &mut dyn GuestLink,
        context: &mut Context<'_>,
    ) -> Step {
        debug_assert!(options.len() <= SYN_OPTIONS_LEN);
        let mut shape = Shape::of(self, &link.capabilities());
        shape.header += options.len();
        let len = shape.header + payload.len();
        let mut slots = Slots::new();
        link.reserve(1, len, &mut slots);
        let Some(frame) = slots.first_mut().and_then(|slot| slot.get_mut(..len)) else {
            return Step::Break(Served::NoRoom);
        };
        if let Some(room) = frame.get_mut(shape.header..) {
            room.copy_from_slice(payload);
        }
        let meta = self.write_headers(outgoing, options, frame, &shape);
        drop(slots);
        if let Some(meta) = meta {
            link.commit(&[Committed { len, meta }]);
            context.counters.frames_out.add(1);
        }
        Step::Continue(())
    }

    /// Writes all headers of a frame whose payload is in place.
    fn write_headers(
        &mut self,
        outgoing: Outgoing,
        options: &[u8],
        frame: &mut [u8],
        shape: &Shape,
    ) -> Option<OffloadMeta> {
        let start = self.ends.header_len();
        let transport = frame.len().checked_sub(start)?;
        let payload = frame.len().checked_sub(shape.header)?;
        let segments = payload.div_ceil(shape.mss).max(1);
        self.ends.write(frame, protocol::TCP, transport, self.ip_id)?;
        self.ip_id = self.ip_id.wrapping_add(bounded(segments, u16::MAX));
        let header = Header {
            ports: self.ports,
            seq: outgoing.seq,
            acknowledged: if outgoing.flags & ACK != 0 { self.rcv_nxt } else { Seq(0) },
            flags: outgoing.flags,
            window: self.window_field(outgoing.flags),
            urgent: outgoing.urgent,
        };
        if header.flags & ACK != 0 {
            self.last_ack_sent = self.rcv_nxt;
            self.ack_at = None;
            self.flags.ack_due = false;
        }
        let pseudo = self.ends.pseudo_header(protocol::TCP, transport);
        header.write(options, pseudo, frame.get_mut(start..)?)?;
        let place =
            ChecksumPlace { start: u16::try_from(start).ok()?, offset: TCP_CHECKSUM_OFFSET };
        if !shape.blank_checksum {
            complete_partial(frame, place).ok()?;
            return Some(OffloadMeta { checksum: Checksum::None, gso: None });
        }
        let size = u16::try_from(shape.mss).ok()?;
        let gso = (segments > 1).then_some(Gso { kind: shape.gso, ecn: false, size });
        Some(OffloadMeta { checksum: place.into(), gso })
    }
}

/// Frame layout of a connection on a link.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// Length of all headers without options, in bytes.
    header: usize,
    /// Maximum of payload bytes in a segment.
    mss: usize,
    /// Maximum of payload bytes in a frame.
    payload: usize,
    gso: GsoKind,
    /// Set if the link accepts frames with a partial checksum.
    blank_checksum: bool,
}

impl Shape {
    fn of(connection: &TcpConnection, link: &PortCapabilities) -> Shape {
        let over_v4 = connection.ends.to.is_ipv4();
        let header = connection.ends.header_len() + HEADER_LEN;
        let packet = usize::from(link.mtu) + crate::emit::ETHERNET_LEN;
        let mss = usize::from(connection.mss).min(packet.saturating_sub(header)).max(1);
        let gso = if over_v4 { GsoKind::TcpV4 } else { GsoKind::TcpV6 };
        let blank_checksum = match link.checksum {
            ChecksumOffload::None => false,
            ChecksumOffload::Any => true,
            ChecksumOffload::Netif { ipv4, ipv6 } => {
                if over_v4 {
                    ipv4
                } else {
                    ipv6
                }
            }
        };
        let whole = blank_checksum && link.scatter_gather && link.gso.takes(gso, false);
        let ip_max = IP_MAX + if over_v4 { 0 } else { 40 } + crate::emit::ETHERNET_LEN;
        let longest = link.longest().min(ip_max).saturating_sub(header);
        let payload = if whole { (longest / mss).max(1) * mss } else { mss };
        Shape { header, mss, payload, gso, blank_checksum }
    }
}
