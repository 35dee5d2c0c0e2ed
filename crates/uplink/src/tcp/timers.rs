//! TCP timers: retransmission, window probe, delayed acknowledgement, keep-alive, removal.

use super::connection::{Disposition, Phase, TcpConnection};
use super::serve::Served;
use crate::context::Context;
use crate::host::Close;

/// Number of unanswered SYNs after which a connection is aborted: about a minute.
const SYN_TRIES_MAX: u8 = 5;

impl TcpConnection {
    /// Handles the timers of the connection that are due.
    pub(super) fn on_deadline(&mut self, context: &mut Context<'_>) -> Disposition {
        let now = context.now;
        let is_due = |at: Option<core::time::Duration>| at.is_some_and(|at| at <= now);
        if is_due(self.ends_at) && self.local.is_some() {
            return self.abort(context);
        }
        if is_due(self.ends_at) {
            let how = if self.phase == Phase::TimeWait { Close::Orderly } else { Close::Reset };
            return Disposition::Close(how);
        }
        let first = self.first.as_ref().and_then(|first| first.deadline());
        if is_due(first) && !self.on_first_bytes_deadline(context) {
            return self.abort(context);
        }
        if is_due(self.retransmit_at) && !self.on_retransmission_timeout(context) {
            return self.abort(context);
        }
        if is_due(self.window_probe_at) {
            self.window_probe_at = None;
            self.window_probes = self.window_probes.saturating_add(1);
            self.flags.probe_due = true;
        }
        if is_due(self.offer.check_at) {
            self.on_window_check(context);
        }
        if is_due(self.ack_at) {
            self.ack_at = None;
            self.flags.ack_due = true;
            self.flags.delayed_ack_expired = true;
        }
        if self.phase == Phase::Open {
            return self.keep_alive(context);
        }
        Disposition::Keep
    }

    /// Handles the retransmission timeout. Returns `false` after too many in a row.
    fn on_retransmission_timeout(&mut self, context: &Context<'_>) -> bool {
        context.counters.tcp_timeouts.add(1);
        self.retransmit_at = None;
        if self.phase != Phase::Open {
            self.flags.syn_due = true;
            return self.rto.back_off() && self.rto.tries() <= SYN_TRIES_MAX;
        }
        // Everything in flight counts as lost. It is still in the socket's queue.
        self.recover = Some(self.snd_max);
        self.snd_nxt = self.snd_una;
        self.duplicate_acks = 0;
        self.congestion = super::connection::CONGESTION_MIN;
        if self.snd_wnd == 0 {
            // The guest closed its window: it is probed for as long as it answers.
            return true;
        }
        context.counters.tcp_retransmitted.add(1);
        self.rto.back_off()
    }

    fn abort(&mut self, context: &mut Context<'_>) -> Disposition {
        if self.phase == Phase::Open {
            let Served::Over(how) = self.reset(context) else {
                return Disposition::Close(Close::Reset);
            };
            return Disposition::Close(how);
        }
        Disposition::Close(Close::Reset)
    }

    /// Sends a keep-alive probe to a guest that has been silent for too long.
    fn keep_alive(&mut self, context: &mut Context<'_>) -> Disposition {
        let config = &context.config.tcp;
        if self.keep_alive_at(config) > context.now {
            return Disposition::Keep;
        }
        if self.keep_alive_probes >= config.keep_alive_tries {
            return self.abort(context);
        }
        self.keep_alive_probes += 1;
        self.flags.probe_due = true;
        Disposition::Keep
    }
}
