//! How a ring takes turns with the others, whose threads share the processors.
//!
//! A thread that always has something to do is put off by the scheduler only after milliseconds, and one
//! that wakes up for a single request, as all do that serve a guest at work, waits for that. Honest guests
//! soon have nothing to do for a moment. Two kinds of work have no such end:
//!
//! * requests that break a rule: they never wait for a disk, so a guest can have the next ones ready at
//!   once. No driver sends many, so after some the ring has a pause, in which it costs nothing;
//! * pages that cannot be kept because there are too many: this is allowed, and costs a mapping and an
//!   unmapping each. After each request of that kind the ring lets the others
//!   go first.

use core::time::Duration;

/// Requests that break a rule, for one pause.
const REFUSALS_PER_PAUSE: u64 = 32;
/// How long a pause is. With [`REFUSALS_PER_PAUSE`] this bounds what is refused in a second.
const PAUSE: Duration = Duration::from_millis(1);

/// What is to be done before the next round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Penalty {
    /// Nothing.
    None,
    /// Others may go first.
    Yield,
    /// Nothing is to be done for so long.
    Pause(Duration),
}

/// What a ring did so far that others should not have to wait for.
#[derive(Default, Debug)]
pub(super) struct Penalties {
    over: u64,
    paused_at: u64,
}

impl Penalties {
    /// After a round: requests that were refused so far, and pages that could not be kept.
    pub(super) fn after_round(&mut self, refused: u64, over: u64) -> Penalty {
        let gives_way = over > self.over;
        self.over = over;
        if refused.wrapping_sub(self.paused_at) >= REFUSALS_PER_PAUSE {
            self.paused_at = refused;
            return Penalty::Pause(PAUSE);
        }
        if gives_way { Penalty::Yield } else { Penalty::None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_breaks_rules_again_and_again_has_pauses() {
        let mut penalties = Penalties::default();
        let turns: Vec<_> = (1..=64).map(|refused| penalties.after_round(refused, 0)).collect();
        let pauses = turns.iter().filter(|turn| matches!(turn, Penalty::Pause(_))).count();
        assert_eq!((pauses, turns[31], turns[30]), (2, Penalty::Pause(PAUSE), Penalty::None));
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
