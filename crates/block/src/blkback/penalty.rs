//! Penalty accounting of one ring: rule violations and pages that exceed the persistent limit.
//!
//! Ring threads share the processors. A thread that never sleeps is preempted only after milliseconds,
//! and a thread that wakes up for a single request waits that long. The queue of a well-behaved guest soon
//! runs out of work and sleeps. Two kinds of requests let a guest keep its ring thread busy without end:
//!
//! * Requests that break a rule never wait for a disk, so the guest can post the next ones at once.
//!   No correct driver sends many of them. After [`REFUSALS_PER_PAUSE`] refusals the ring pauses.
//! * Pages over the limit of persistent pages are allowed, but each costs a map and an unmap. After a
//!   round with such a page the thread yields the processor.

use core::time::Duration;

/// Number of refused requests after which the ring pauses once.
const REFUSALS_PER_PAUSE: u64 = 32;
/// Length of a pause. With [`REFUSALS_PER_PAUSE`] it bounds the refusals per second.
const PAUSE: Duration = Duration::from_millis(1);

/// Action due before the next round of the ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Penalty {
    None,
    /// Yield the processor to other threads.
    Yield,
    /// Serve nothing for this time.
    Pause(Duration),
}

/// Counters seen at the last penalty.
#[derive(Default, Debug)]
pub(super) struct Penalties {
    over: u64,
    paused_at: u64,
}

impl Penalties {
    /// Returns the action due after a round. `refused` and `over` are running totals: refused requests, and
    /// pages over the limit of persistent pages.
    pub(super) fn after_round(&mut self, refused: u64, over: u64) -> Penalty {
        let yields = over > self.over;
        self.over = over;
        if refused.wrapping_sub(self.paused_at) >= REFUSALS_PER_PAUSE {
            self.paused_at = refused;
            return Penalty::Pause(PAUSE);
        }
        if yields { Penalty::Yield } else { Penalty::None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_32_refusals_cause_one_pause_and_over_limit_pages_a_yield() {
        let mut penalties = Penalties::default();
        let actions: Vec<_> = (1..=64).map(|refused| penalties.after_round(refused, 0)).collect();
        let pauses = actions.iter().filter(|action| matches!(action, Penalty::Pause(_))).count();
        assert_eq!((pauses, actions[31], actions[30]), (2, Penalty::Pause(PAUSE), Penalty::None));
        assert_eq!(penalties.after_round(64, 0), Penalty::None);
        assert_eq!(penalties.after_round(64, 7), Penalty::Yield);
        assert_eq!(penalties.after_round(64, 7), Penalty::None);
        assert_eq!(
            penalties.after_round(300, 7),
            Penalty::Pause(PAUSE),
            "a whole ring at once: one pause"
        );
    }
}
