//! TCP segments from the guest (RFC 9293, 3.10.7): acknowledgements, windows, payload to the socket.
//!
//! [`TcpConnection::segment`] dispatches by state. Payload in order goes into the socket at once; anything
//! else only changes flags, which `serve` turns into segments in the same round.

use core::time::Duration;

use ringfence_offload::packet::tcp_flags::{ACK, FIN, RST, SYN};
use ringfence_sys::numbers::{bounded, usize_from};
use rustix::io::Errno;

use super::connection::{
    CONGESTION_MIN, Disposition, MSS_DEFAULT, Phase, TcpConnection, UNCONGESTED,
};
use super::reset;
use super::run::SegmentRun;
use super::segment::{Segment, SynOptions};
use super::seq::Seq;
use crate::context::Context;
use crate::flow::FlowId;
use crate::host::{Close, Piece};
use crate::packet::Packet;

/// Number of duplicate acknowledgements after which a segment counts as lost (RFC 5681, 3.2).
const DUPLICATE_ACKS: u8 = 3;

/// Maximum of bytes whose acknowledgement may be delayed. It covers a request, but not a stream, whose every
/// full segment is acknowledged at once (RFC 9293, 3.8.6.3, asks for every second one).
const UNACKED_MAX: u32 = 4096;

/// Maximum delay of an acknowledgement: about as long as a nearby server takes to answer. A guest that
/// waits for it before it sends more (RFC 896) loses little; RFC 9293 allows half a second.
const ACK_WITHIN: Duration = Duration::from_millis(1);

/// Maximum of duplicate acknowledgements in one round; three are enough for the guest.
const DUPLICATE_ACKS_MAX: u8 = 8;

impl TcpConnection {
    /// Handles a TCP segment received from the guest on this connection.
    pub(super) fn segment(
        &mut self,
        segment: &Segment,
        options: &[u8],
        packet: &Packet<'_>,
        context: &mut Context<'_>,
    ) -> Disposition {
        match self.phase {
            Phase::Connecting => self.in_connecting(segment),
            Phase::SynReceived => self.in_syn_received(segment, packet, context),
            Phase::SynSent => self.in_syn_sent(segment, options, packet, context),
            Phase::Open => self.in_open(segment, packet, None, context),
            Phase::TimeWait => self.in_time_wait(segment),
        }
    }

    /// Reads sequence number, window and options of the guest's SYN.
    pub(super) fn read_syn(&mut self, segment: &Segment, options: &[u8], mtu: u16) {
        let options = SynOptions::parse(options);
        let mine = TcpConnection::mss_of(mtu, self.ends.to);
        self.mss = options.mss.unwrap_or(MSS_DEFAULT).clamp(88, mine.max(88));
        self.snd_scale = options.scale.unwrap_or(0);
        self.rcv_scale = if options.scale.is_some() { super::WINDOW_SCALE } else { 0 };
        self.rcv_nxt = segment.seq + 1;
        self.rcv_edge = self.rcv_nxt;
        // The window of a SYN is never scaled (RFC 7323, 2.2).
        self.snd_wnd = segment.window.into();
        self.window_update = (segment.seq, self.snd_una);
    }

    fn in_connecting(&mut self, segment: &Segment) -> Disposition {
        if segment.has(RST) && segment.seq == self.rcv_nxt {
            return Disposition::Close(Close::Reset);
        }
        Disposition::Keep
    }

    fn in_syn_received(
        &mut self,
        segment: &Segment,
        packet: &Packet<'_>,
        context: &mut Context<'_>,
    ) -> Disposition {
        if segment.has(RST) {
            let ours = segment.seq == self.rcv_nxt;
            return if ours { Disposition::Close(Close::Reset) } else { Disposition::Keep };
        }
        if segment.has(SYN) {
            self.flags.syn_due = segment.seq + 1 == self.rcv_nxt;
            return Disposition::Keep;
        }
        if !segment.ack() {
            return Disposition::Keep;
        }
        if segment.acknowledged != self.snd_nxt {
            reset::refuse(packet, segment, context);
            return Disposition::Keep;
        }
        self.open(segment, context);
        self.in_open(segment, packet, None, context)
    }

    fn in_syn_sent(
        &mut self,
        segment: &Segment,
        options: &[u8],
        packet: &Packet<'_>,
        context: &mut Context<'_>,
    ) -> Disposition {
        if segment.ack() && segment.acknowledged != self.snd_nxt {
            reset::refuse(packet, segment, context);
            return Disposition::Keep;
        }
        if segment.has(RST) {
            let refused = segment.ack();
            return if refused { Disposition::Close(Close::Reset) } else { Disposition::Keep };
        }
        // A SYN without ACK is a simultaneous open by the guest: our SYN is repeated until one side times out.
        if segment.has(SYN | ACK) {
            self.read_syn(segment, options, context.config.mtu);
            self.keep_window_of_syn();
            self.open(segment, context);
            self.flags.ack_due = true;
        }
        Disposition::Keep
    }

    fn open(&mut self, segment: &Segment, context: &Context<'_>) {
        self.phase = Phase::Open;
        self.snd_una = self.snd_nxt;
        self.rto.acknowledged(self.snd_una, context.now);
        self.retransmit_at = None;
        self.ends_at = self.local.as_ref().map(|_| context.now + super::local_stream::IDLE);
        self.last_heard = context.now;
        let shift = if segment.has(SYN) { 0 } else { self.snd_scale };
        self.snd_wnd = u32::from(segment.window) << shift;
        self.window_update = (segment.seq, segment.acknowledged);
    }

    fn in_time_wait(&mut self, segment: &Segment) -> Disposition {
        if segment.has(RST) && segment.seq == self.rcv_nxt {
            return Disposition::Close(Close::Orderly);
        }
        self.flags.ack_due = !segment.has(RST);
        Disposition::Keep
    }

    /// Handles a segment in state `Open`. With a run of this connection, the payload is added to the run
    /// instead of being sent.
    pub(super) fn in_open<'a>(
        &mut self,
        segment: &Segment,
        packet: &Packet<'a>,
        run: Option<(FlowId, &mut SegmentRun<'a>)>,
        context: &mut Context<'_>,
    ) -> Disposition {
        self.last_heard = context.now;
        let is_probed = core::mem::take(&mut self.keep_alive_probes) > 0;
        if !self.is_acceptable(segment) {
            context.counters.tcp_out_of_window.add(1);
            self.flags.ack_due |= !segment.has(RST);
            return Disposition::Keep;
        }
        if segment.has(RST) {
            // RFC 5961, 3: only the exact sequence number resets the connection.
            if segment.seq == self.rcv_nxt {
                // The guest's kernel has forgotten a connection that its process has closed. The host's kernel does the
                // same with the socket, as it would with one of a process.
                let is_orphan = is_probed && self.flags.guest_fin;
                let how = if is_orphan { Close::Orderly } else { Close::Reset };
                return Disposition::Close(how);
            }
            self.flags.ack_due = true;
            return Disposition::Keep;
        }
        if segment.has(SYN) {
            // RFC 5961, 4: a SYN is answered by a challenge ACK.
            self.flags.ack_due = true;
            return Disposition::Keep;
        }
        if !segment.ack() || !self.acknowledge(segment, context) {
            return Disposition::Keep;
        }
        match run {
            Some((id, run)) => {
                let (start, len) = (packet.payload_start(), usize_from(segment.len));
                run.add(id, Piece { frame: packet.frame, start, len });
                self.rcv_nxt += segment.len;
                self.acknowledge_soon(context);
                Disposition::Keep
            }
            None => self.take_payload(segment, packet, context),
        }
    }

    /// Returns `true` if the segment lies in the window (RFC 9293, 3.10.7.4, first check).
    fn is_acceptable(&self, segment: &Segment) -> bool {
        let starts_inside = segment.seq < self.rcv_edge || segment.seq == self.rcv_nxt;
        match segment.extent() {
            0 => segment.seq >= self.rcv_nxt && starts_inside,
            _ => segment.end() > self.rcv_nxt && starts_inside,
        }
    }

    /// Processes acknowledgement and window. Returns `false` if the segment must be dropped.
    fn acknowledge(&mut self, segment: &Segment, context: &Context<'_>) -> bool {
        let upto = segment.acknowledged;
        if upto > self.snd_max {
            self.flags.ack_due = true;
            return false;
        }
        if upto < self.snd_una {
            // Old, or forged (RFC 5961, 5): one that is older than any window is dropped.
            return upto + context.config.tcp.flight_max.max(1 << 16) >= self.snd_una;
        }
        let window = u32::from(segment.window) << self.snd_scale;
        let same_window = window == self.snd_wnd;
        let (seq, ack) = self.window_update;
        if seq < segment.seq || (seq == segment.seq && ack <= upto) {
            self.snd_wnd = window;
            self.window_update = (segment.seq, upto);
            if window > 0 {
                self.window_probe_at = None;
                self.window_probes = 0;
            }
        }
        if upto > self.snd_una {
            self.advance(upto, context);
        } else if segment.extent() == 0 && same_window && self.snd_max > self.snd_una {
            self.count_duplicate_ack();
        }
        true
    }

    /// Handles a new acknowledgement of everything before `upto`.
    fn advance(&mut self, upto: Seq, context: &Context<'_>) {
        let mut bytes = upto.since(self.snd_una).unwrap_or(0);
        if self.fin.is_some_and(|fin| upto > fin) {
            bytes -= 1;
            self.flags.fin_acked = true;
        }
        self.undiscarded += bytes;
        self.snd_una = upto;
        self.snd_nxt = self.snd_nxt.max(upto);
        self.duplicate_acks = 0;
        self.rto.acknowledged(upto, context.now);
        self.congestion = self.congestion.saturating_add(bytes).min(UNCONGESTED);
        match self.recover {
            Some(recover) if upto >= recover => self.recover = None,
            // RFC 6582: the next lost segment begins here. After a timeout everything is sent again anyway.
            Some(_) => self.flags.retransmit_due = self.snd_nxt == self.snd_max,
            None => {}
        }
        let under_way = self.snd_max > self.snd_una;
        self.retransmit_at = under_way.then(|| context.now + self.rto.timeout());
    }

    /// Counts a duplicate acknowledgement. The third one starts a fast retransmission.
    fn count_duplicate_ack(&mut self) {
        self.duplicate_acks = self.duplicate_acks.saturating_add(1);
        if self.duplicate_acks == DUPLICATE_ACKS && self.recover.is_none() {
            self.recover = Some(self.snd_max);
            self.flags.retransmit_due = true;
            self.congestion = (self.in_flight() / 2).max(CONGESTION_MIN);
        }
    }

    /// Accepts payload and FIN that are in order, as far as the socket has room.
    fn take_payload(
        &mut self,
        segment: &Segment,
        packet: &Packet<'_>,
        context: &mut Context<'_>,
    ) -> Disposition {
        if segment.extent() == 0 {
            return Disposition::Keep;
        }
        if segment.seq > self.rcv_nxt {
            context.counters.tcp_out_of_order.add(1);
            self.duplicate_acks_due = (self.duplicate_acks_due + 1).min(DUPLICATE_ACKS_MAX);
            return Disposition::Keep;
        }
        let skip = self.rcv_nxt.since(segment.seq).unwrap_or(0);
        // A retransmission means that the guest misses our acknowledgement.
        self.flags.ack_due |= skip > 0;
        if self.flags.guest_fin {
            // No data can follow a FIN.
            self.flags.ack_due = true;
            return Disposition::Keep;
        }
        if skip < segment.len {
            match self.forward_payload(segment, skip, packet, context) {
                Ok(true) => self.acknowledge_soon(context),
                Ok(false) => return Disposition::Keep,
                Err(_) => {
                    // The socket reports the error after the data that came before it.
                    self.flags.failed = true;
                    return Disposition::Keep;
                }
            }
        }
        if segment.has(FIN) {
            if self.finish_first_bytes(context) && self.backlog.is_none() {
                self.accept_fin(context);
            } else {
                self.flags.fin_waits = true;
            }
        }
        Disposition::Keep
    }

    /// Schedules an acknowledgement of data in order. It is delayed so that the answer can carry it
    /// (RFC 9293, 3.8.6.3). It is due at once after more than one request, a half-used window, our FIN, or a
    /// delay that no answer ended.
    pub(super) fn acknowledge_soon(&mut self, context: &Context<'_>) {
        let unacked = self.rcv_nxt.since(self.last_ack_sent).unwrap_or(u32::MAX);
        let mss = TcpConnection::mss_of(context.config.mtu, self.ends.to);
        let open = self.rcv_edge.since(self.rcv_nxt).unwrap_or(0);
        let at_once = self.flags.delayed_ack_expired
            || unacked >= UNACKED_MAX.min(mss.into())
            || open <= self.offer.size / 2
            || self.fin.is_some();
        if at_once {
            self.flags.ack_due = true;
        } else if self.ack_at.is_none() {
            self.ack_at = Some(context.now + ACK_WITHIN);
        }
    }

    /// Records that data goes to the guest. Data that came soon makes delayed acknowledgements worthwhile.
    pub(super) fn answered(&mut self, now: Duration) {
        if now.saturating_sub(self.last_heard) <= ACK_WITHIN {
            self.flags.delayed_ack_expired = false;
        }
    }

    /// Sends payload except its first `skip` bytes, which came before. Returns `true` if the socket took all.
    fn forward_payload(
        &mut self,
        segment: &Segment,
        skip: u32,
        packet: &Packet<'_>,
        context: &mut Context<'_>,
    ) -> Result<bool, Errno> {
        let urgent = segment.urgent.map(u32::from).filter(|&end| end > skip && end <= segment.len);
        let Some(end) = urgent else {
            return self.send_part(segment, skip..segment.len, false, packet, context);
        };
        // The socket marks the last byte of each urgent send.
        let all = self.send_part(segment, skip..end, true, packet, context)?;
        if !all || end == segment.len {
            return Ok(all);
        }
        self.send_part(segment, end..segment.len, false, packet, context)
    }

    fn send_part(
        &mut self,
        segment: &Segment,
        part: core::ops::Range<u32>,
        urgent: bool,
        packet: &Packet<'_>,
        context: &mut Context<'_>,
    ) -> Result<bool, Errno> {
        debug_assert!(part.end <= segment.len);
        let (from, to) = (usize_from(part.start), usize_from(part.end));
        let piece =
            Piece { frame: packet.frame, start: packet.payload_start() + from, len: to - from };
        self.send_pieces(&[piece], piece.len, urgent, context)
    }

    /// Sends `offered` bytes, which are in `pieces`. Returns `true` if the socket took all of them.
    pub(super) fn send_pieces(
        &mut self,
        pieces: &[Piece<'_>],
        offered: usize,
        urgent: bool,
        context: &mut Context<'_>,
    ) -> Result<bool, Errno> {
        if self.local.is_some() {
            return Ok(self.take_locally(pieces, offered, context));
        }
        if let Some(mut first) = self.first.take() {
            let all = self.inspect_pieces(&mut first, pieces, offered, context);
            if !first.is_done() || first.held() > 0 {
                self.first = Some(first);
            }
            return Ok(all);
        }
        let Some(socket) = &self.socket else { return Err(Errno::NOTCONN) };
        let taken = match &self.backlog {
            None => match context.host.send(socket, pieces, urgent) {
                Ok(taken) => taken.min(offered),
                Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS | Errno::NOMEM) => 0,
                Err(errno) => return Err(errno),
            },
            // Payload stays in order.
            Some(_) => 0,
        };
        self.rcv_nxt += bounded(taken, u32::MAX);
        context.counters.tcp_bytes_in.add(taken as u64);
        self.bytes.from_guest += taken as u64;
        Ok(taken == offered || self.keep_refused(pieces, taken..offered, urgent, context))
    }

    /// Records that first bytes were refused. The guest sends them again once there is room.
    pub(super) fn record_refused(&mut self, refused: usize, context: &mut Context<'_>) {
        context.counters.tcp_overcommitted.add(refused as u64);
        self.flags.refused = true;
        self.flags.ack_due = true;
        self.await_room(context);
    }
}
