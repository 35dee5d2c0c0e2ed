//! Backpressure: a port without room slows its senders for a bounded time.
//!
//! # Theory of operation
//!
//! A ring of 256 slots holds 15 frames of 64 KiB. A sender produces them in less time than the scheduler
//! takes to run the receiver. If frames without room were dropped, TCP would send many of them twice. So
//! a sender whose frames all go to one port is not polled while that port has no room. Its frames stay on
//! its own ring, at no cost, and its kernel slows down.
//!
//! Frames behind the waiting ones may be for another port, so the delay has a *budget*. Each slot that
//! the port accepts adds [`CREDIT_PER_SLOT`], up to [`BUDGET_MAX`]. A port as fast as a link of 1 Gbit/s
//! (or about 30,000 frames a second) can therefore slow its senders without limit. A port that accepts
//! nothing slows them once, for the rest of its budget. A new port has no budget. Without a budget, frames
//! that find no room are dropped, as at the port of any switch.
//!
//! Backpressure does not apply to:
//!
//! * a sender whose last frames went to several ports: frames for a full port are dropped;
//! * frames that are flooded to several ports;
//! * senders of other ports.

use core::time::Duration;

/// Budget for one accepted slot: the time that a page takes at 1 Gbit/s.
const CREDIT_PER_SLOT: Duration = Duration::from_micros(32);
/// Maximum backpressure budget of a port.
const BUDGET_MAX: Duration = Duration::from_millis(10);

/// Backpressure budget of a port, and the senders' use of it.
#[derive(Debug, Default)]
pub(super) struct Backpressure {
    /// Time for which senders may still wait.
    budget: Duration,
    /// Start of the waiting time that is not yet subtracted from `budget`; `None` if no sender waits.
    since: Option<Duration>,
    /// Set if a sender waited in this round.
    waiting: bool,
}

impl Backpressure {
    /// Returns `true` if senders wait when the port has no room.
    pub(super) fn has_budget(&self) -> bool {
        !self.budget.is_zero()
    }

    /// Adds the budget for `slots` slots that the port accepted.
    pub(super) fn credit(&mut self, slots: usize) {
        let credit = CREDIT_PER_SLOT.saturating_mul(u32::try_from(slots).unwrap_or(u32::MAX));
        self.budget = self.budget.saturating_add(credit).min(BUDGET_MAX);
    }

    /// Records that a sender waits in this round.
    pub(super) fn record_waiting(&mut self) {
        self.waiting = true;
    }

    /// Returns `true` if a sender waited in this round or the previous one.
    pub(super) fn has_waiting(&self) -> bool {
        self.since.is_some() || self.waiting
    }

    /// Ends the round and subtracts the time that senders waited. Returns `true` if a sender waited in this
    /// round and none in the previous one.
    pub(super) fn end_round(&mut self, now: Duration) -> bool {
        let before = self.since.take();
        if !core::mem::take(&mut self.waiting) {
            return false;
        }
        if let Some(since) = before {
            self.budget = self.budget.saturating_sub(now.saturating_sub(since));
        }
        self.since = Some(now);
        before.is_none()
    }

    /// Returns the time at which the budget is used up, if a sender waits.
    pub(super) fn ends_at(&self) -> Option<Duration> {
        self.since.map(|since| since + self.budget)
    }
}
#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn new_port_has_no_backpressure_budget() {
        let mut backpressure = Backpressure::default();
        assert!(!backpressure.has_budget());
        backpressure.credit(1);
        assert!(backpressure.has_budget());
    }

    #[test]
    fn stopped_port_slows_senders_once_for_its_budget() {
        let mut backpressure = Backpressure::default();
        backpressure.credit(1_000_000);
        let mut now = Duration::from_secs(5);
        let mut waited = Duration::ZERO;
        for _ in 0..1000 {
            if backpressure.has_budget() {
                backpressure.record_waiting();
                waited += MS / 10;
            }
            backpressure.end_round(now);
            now += MS / 10;
        }
        assert!(waited >= BUDGET_MAX && waited <= BUDGET_MAX + MS, "{waited:?}");
        assert_eq!(backpressure.ends_at(), None);
    }

    #[test]
    fn gigabit_port_slows_senders_without_limit() {
        let mut backpressure = Backpressure::default();
        backpressure.credit(64);
        let mut now = Duration::ZERO;
        for _ in 0..10_000 {
            assert!(backpressure.has_budget());
            backpressure.record_waiting();
            backpressure.end_round(now);
            // One frame of 64 KiB every half millisecond.
            now += 16 * CREDIT_PER_SLOT;
            backpressure.credit(16);
        }
        // A port of half that speed slows its senders half of the time.
        let mut slowed = 0;
        for step in 0..32_000 {
            now += CREDIT_PER_SLOT;
            if step % 32 == 0 {
                backpressure.credit(16);
            }
            if backpressure.has_budget() {
                slowed += 1;
                backpressure.record_waiting();
            }
            backpressure.end_round(now);
        }
        assert!((15_000..=18_000).contains(&slowed), "{slowed}");
    }

    #[test]
    fn budget_without_waiting_sender_is_not_consumed() {
        let mut backpressure = Backpressure::default();
        backpressure.credit(100);
        backpressure.record_waiting();
        assert!(backpressure.end_round(MS), "a sender begins to wait");
        assert_eq!(backpressure.ends_at(), Some(MS + 100 * CREDIT_PER_SLOT));
        backpressure.record_waiting();
        assert!(!backpressure.end_round(2 * MS), "the sender waits already");
        assert!(backpressure.has_waiting());
        assert!(!backpressure.end_round(50 * MS), "no sender waits any more");
        assert!(!backpressure.has_waiting() && backpressure.has_budget());
    }
}
