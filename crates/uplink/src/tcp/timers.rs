//! TCP timers: retransmission, window probe, delayed acknowledgement, keep-alive, removal.

use super::connection::{Fate, Phase, TcpConnection};
use super::serve::Served;
use crate::context::Context;
use crate::host::Close;

/// Number of unanswered SYNs after which a connection is aborted: about a minute.
const SYN_TRIES_MAX: u8 = 5;

impl TcpConnection {
    /// Handles the timers of the connection that are due.
    pub(super) fn time_is_up(&mut self, context: &mut Context<'_>) -> Fate {
        let now = context.now;
        let has_come = |at: Option<core::time::Duration>| at.is_some_and(|at| at <= now);
        if has_come(self.ends_at) {
            let how = if self.phase == Phase::TimeWait { Close::Orderly } else { Close::Reset };
            return Fate::Ends(how);
        }
        if has_come(self.retransmit_at) && !self.send_again(context) {
            return self.give_up(context);
        }
        if has_come(self.probe_at) {
            self.probe_at = None;
            self.probes = self.probes.saturating_add(1);
            self.flags.probe_due = true;
        }
        if has_come(self.ack_at) {
            self.ack_at = None;
            self.flags.ack_due = true;
            self.flags.waited_in_vain = true;
        }
        if self.phase == Phase::Open {
            return self.keep_alive(context);
        }
        Fate::Lives
    }

    /// Handles the retransmission timeout. Returns `false` after too many in a row.
    fn send_again(&mut self, context: &Context<'_>) -> bool {
        context.counters.tcp_timeouts.add(1);
        self.retransmit_at = None;
        if self.phase != Phase::Open {
            self.flags.syn_due = true;
            return self.rto.back_off() && self.rto.tries() <= SYN_TRIES_MAX;
        }
        // Everything in flight counts as lost. It is still in the socket's queue.
        self.recover = Some(self.snd_max);
        self.snd_nxt = self.snd_una;
        self.same_acks = 0;
        self.congestion = super::connection::CONGESTION_MIN;
        if self.snd_wnd == 0 {
            // The guest closed its window: it is probed for as long as it answers.
            return true;
        }
        context.counters.tcp_retransmitted.add(1);
        self.rto.back_off()
    }

    fn give_up(&mut self, context: &mut Context<'_>) -> Fate {
        if self.phase == Phase::Open {
            let Served::Over(how) = self.reset(context) else { return Fate::Ends(Close::Reset) };
            return Fate::Ends(how);
        }
        Fate::Ends(Close::Reset)
    }

    /// Sends a keep-alive probe to a guest that has been silent for too long.
    fn keep_alive(&mut self, context: &mut Context<'_>) -> Fate {
        let config = &context.config.tcp;
        let asked = u32::from(self.asked);
        let due = self.heard + config.keep_alive_after + config.keep_alive_every * asked;
        if due > context.now {
            return Fate::Lives;
        }
        if self.asked >= config.keep_alive_tries {
            return self.give_up(context);
        }
        self.asked += 1;
        self.flags.probe_due = true;
        Fate::Lives
    }
}
