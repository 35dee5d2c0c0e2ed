//! First bytes of a connection under an egress policy: they reach the server only after the verdict.
//!
//! The bytes are acknowledged and kept in [`FirstBytes`], because the guest may send no more before it is
//! answered. A verdict needs at most some kilobytes. A denied connection is reset at both ends, but for a request of HTTP on
//! port 80: the guest gets a page that says why ([`ringfence_policy::refusal`]).

use ringfence_sys::numbers::bounded;
use rustix::io::Errno;

use super::Tcp;
use super::connection::TcpConnection;
use super::pieces::gather;
use crate::context::Context;
use crate::egress::{FirstBytes, FirstVerdict};
use crate::flow::Origin;
use crate::host::Piece;

impl Tcp {
    /// Lets the connections of the guest go on, or end, whose first bytes have waited for the answer to a question.
    pub(crate) fn resume_asked(&mut self, context: &mut Context<'_>) {
        let outward: Vec<_> = self.flows.ids_of(Origin::Guest).collect();
        for id in outward {
            if self.flows.get_mut(id).is_some_and(|flow| flow.resume_asked(context)) {
                self.enqueue(id);
                self.update_deadline(id, context);
            }
        }
    }
}

impl TcpConnection {
    /// Adds payload to the first bytes. Returns `true` if all of it was taken.
    pub(super) fn inspect_pieces(
        &mut self,
        first: &mut FirstBytes,
        pieces: &[Piece<'_>],
        offered: usize,
        context: &mut Context<'_>,
    ) -> bool {
        // Bytes that may go wait for room in the socket.
        if !first.passed().is_empty() {
            self.record_refused(offered, context);
            return false;
        }
        let mut bytes = Vec::new();
        gather(pieces, 0..first.room().min(offered), &mut bytes);
        self.rcv_nxt += bounded(bytes.len(), u32::MAX);
        context.counters.tcp_bytes_in.add(bytes.len() as u64);
        self.bytes.from_guest += bytes.len() as u64;
        self.judge(first, &bytes, false, context);
        if bytes.len() < offered && first.is_asking() {
            // There is no room before the answer, whatever the socket takes.
            context.counters.tcp_overcommitted.add((offered - bytes.len()) as u64);
            self.flags.refused = true;
        } else if bytes.len() < offered {
            self.record_refused(offered - bytes.len(), context);
        }
        bytes.len() == offered
    }

    /// Adds the guest's last bytes, at its FIN. Returns `true` if the FIN can be accepted now.
    pub(super) fn finish_first_bytes(&mut self, context: &mut Context<'_>) -> bool {
        let Some(mut first) = self.first.take() else { return true };
        if !first.is_done() {
            self.judge(&mut first, &[], true, context);
        }
        let is_done = first.held() == 0 && !self.flags.denied;
        if !is_done {
            self.first = Some(first);
        }
        is_done
    }

    /// Acts on the time limit of the first bytes. Returns `false` if the connection ends.
    pub(super) fn on_first_bytes_deadline(&mut self, context: &mut Context<'_>) -> bool {
        let Some(mut first) = self.first.take() else { return true };
        let verdict = first.on_deadline(context.now);
        self.apply(verdict, &mut first, context);
        self.keep_first_bytes(first);
        !self.flags.denied
    }

    /// Keeps first bytes as long as some are here, or will be read.
    fn keep_first_bytes(&mut self, first: Box<FirstBytes>) {
        if !first.is_done() || first.held() > 0 {
            self.first = Some(first);
        }
    }

    /// Reads first bytes again whose question is over. Returns `true` if there were any.
    pub(super) fn resume_asked(&mut self, context: &mut Context<'_>) -> bool {
        let Some(mut first) = self.first.take_if(|first| first.is_answered()) else { return false };
        let verdict = first.resume(context.now);
        self.apply(verdict, &mut first, context);
        self.keep_first_bytes(first);
        if core::mem::take(&mut self.flags.refused) {
            // The guest retransmits at once.
            self.duplicate_acks_due = 3;
        }
        self.flags.ack_due = true;
        true
    }

    fn judge(
        &mut self,
        first: &mut FirstBytes,
        bytes: &[u8],
        is_all: bool,
        context: &mut Context<'_>,
    ) {
        let verdict = first.add(bytes, is_all, context.now);
        self.apply(verdict, first, context);
    }

    fn apply(&mut self, verdict: FirstVerdict, first: &mut FirstBytes, context: &mut Context<'_>) {
        self.note_shown(first);
        match verdict {
            FirstVerdict::Wait => {}
            FirstVerdict::Pass => self.send_first_bytes(first, context),
            FirstVerdict::Deny => {
                context.counters.egress_hellos_denied.add(1);
                let page = first.take_page();
                let is_answered =
                    page.is_some_and(|page| self.replace_by_page(first.egress(), &page, context));
                self.flags.denied = !is_answered;
                if is_answered {
                    first.clear();
                }
            }
        }
    }

    fn send_first_bytes(&mut self, first: &mut FirstBytes, context: &mut Context<'_>) {
        let Some(socket) = &self.socket else { return };
        let sent = match context.host.send_bytes(socket, first.passed()) {
            Ok(sent) => sent,
            Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS | Errno::NOMEM) => 0,
            Err(_) => {
                self.flags.failed = true;
                first.passed().len()
            }
        };
        first.sent(sent);
        if !first.passed().is_empty() {
            self.await_room(context);
        }
    }

    /// Sends first bytes that waited for room in the socket.
    pub(super) fn resume_first_bytes(&mut self, context: &mut Context<'_>) {
        let Some(mut first) = self.first.take() else { return };
        if !first.passed().is_empty() {
            self.send_first_bytes(&mut first, context);
        }
        self.keep_first_bytes(first);
    }
}
