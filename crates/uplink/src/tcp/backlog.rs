//! Backlog: payload that the offered window covered and the socket refused.
//!
//! The window is computed from the room in the socket's send queue, which the kernel may lower afterwards, or fill by
//! the overhead of short segments. What the guest has sent by then is acknowledged and kept here: a guest that had to
//! send it again would wait for its retransmission timeout first. The backlog goes to the socket when that has room.
//! Meanwhile no window is offered, later payload follows into the backlog, and a FIN of the guest waits without an
//! acknowledgement, so that everything is in the socket once the guest's connection is closed.
//!
//! A backlog holds no more than the window covered, and all of an engine no more than
//! [`TcpConfig::backlog_max`](super::TcpConfig). Beyond that, and for urgent data, payload is refused: three duplicate
//! acknowledgements ask for it as soon as there is room.

use core::ops::Range;

use ringfence_sys::numbers::{bounded, usize_from};
use rustix::io::Errno;

use super::connection::TcpConnection;
use super::pieces::gather;
use crate::context::Context;
use crate::host::Piece;

/// Payload of the guest that waits for room in the socket.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    bytes: Vec<u8>,
    /// Number of bytes at the beginning that were sent.
    sent: usize,
}

impl Backlog {
    /// Returns the bytes that wait.
    fn waiting(&self) -> &[u8] {
        self.bytes.get(self.sent..).unwrap_or_default()
    }
}

impl TcpConnection {
    /// Keeps payload that the socket refused: the bytes of `pieces` in the range `refused`. Returns `true` if all of it
    /// was kept. The guest sends the rest again.
    #[cold]
    pub(super) fn keep_refused(
        &mut self,
        pieces: &[Piece<'_>],
        refused: Range<usize>,
        urgent: bool,
        context: &mut Context<'_>,
    ) -> bool {
        let counters = context.counters;
        counters.tcp_overcommitted.add(refused.len() as u64);
        if self.backlog.is_none() {
            self.measure_full_queue(context);
        }
        let held = counters.tcp_backlog_in.get().wrapping_sub(counters.tcp_backlog_out.get());
        let room = (context.config.tcp.backlog_max as u64).saturating_sub(held);
        // The window field is rounded up.
        let rounding = (1 << self.rcv_scale) - 1;
        let covered = usize_from((self.rcv_edge + rounding).since(self.rcv_nxt).unwrap_or(0));
        let room = if urgent { 0 } else { usize::try_from(room).unwrap_or(usize::MAX) };
        let kept = refused.len().min(covered).min(room);
        if kept > 0 {
            let backlog = self.backlog.get_or_insert_default();
            gather(pieces, refused.start..refused.start + kept, &mut backlog.bytes);
            self.rcv_nxt += bounded(kept, u32::MAX);
            self.bytes.from_guest += kept as u64;
            counters.tcp_bytes_in.add(kept as u64);
            counters.tcp_backlog_in.add(kept as u64);
        }
        self.flags.refused |= kept < refused.len();
        self.flags.ack_due = true;
        self.await_room(context);
        kept == refused.len()
    }

    /// Requests an event for when the socket has room, once.
    pub(super) fn await_room(&mut self, context: &mut Context<'_>) {
        if let Some(socket) = self.socket.as_ref().filter(|_| !self.flags.awaiting_room) {
            self.flags.awaiting_room = true;
            context.host.await_room(socket);
        }
    }

    /// Sends the backlog as far as the socket has room, and a FIN behind it. Returns `true` if nothing is left.
    pub(super) fn send_backlog(&mut self, context: &mut Context<'_>) -> bool {
        if let (Some(backlog), Some(socket)) = (&mut self.backlog, &self.socket) {
            let sent = match context.host.send_bytes(socket, backlog.waiting()) {
                Ok(sent) => sent.min(backlog.waiting().len()),
                Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS | Errno::NOMEM) => 0,
                Err(_) => {
                    self.flags.failed = true;
                    backlog.waiting().len()
                }
            };
            backlog.sent += sent;
            context.counters.tcp_backlog_out.add(sent as u64);
            if !backlog.waiting().is_empty() {
                self.await_room(context);
                return false;
            }
            self.backlog = None;
        }
        if self.flags.fin_waits && self.first.is_none() {
            self.accept_fin(context);
        }
        true
    }

    /// Drops the backlog of a connection that ends.
    pub(super) fn drop_backlog(&mut self, context: &Context<'_>) {
        if let Some(backlog) = self.backlog.take() {
            context.counters.tcp_backlog_out.add(backlog.waiting().len() as u64);
        }
    }

    /// Accepts the guest's FIN: everything before it is in the socket.
    pub(super) fn accept_fin(&mut self, context: &mut Context<'_>) {
        self.flags.fin_waits = false;
        self.rcv_nxt += 1;
        self.flags.guest_fin = true;
        self.acknowledge_soon(context);
        self.end_locally();
        if let Some(socket) = &self.socket {
            context.host.shut_down(socket);
        }
    }
}
