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
const REFUSED: u64 = 32;
/// How long a pause is. With [`REFUSED`] this bounds what is refused in a second.
const PAUSE: Duration = Duration::from_millis(1);

/// What is to be done before the next round.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Turn {
    /// Nothing.
    GoOn,
    /// Others may go first.
    GiveWay,
    /// Nothing is to be done for so long.
    Pause(Duration),
}

/// What a ring did so far that others should not have to wait for.
#[derive(Default, Debug)]
pub(super) struct Manners {
    over: u64,
    paused_at: u64,
}

impl Manners {
    /// After a round: requests that were refused so far, and pages that could not be kept.
    pub(super) fn after(&mut self, refused: u64, over: u64) -> Turn {
        let gives_way = over > self.over;
        self.over = over;
        if refused.wrapping_sub(self.paused_at) >= REFUSED {
            self.paused_at = refused;
            return Turn::Pause(PAUSE);
        }
        if gives_way { Turn::GiveWay } else { Turn::GoOn }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_breaks_rules_again_and_again_has_pauses() {
        let mut manners = Manners::default();
        let turns: Vec<_> = (1..=64).map(|refused| manners.after(refused, 0)).collect();
        let pauses = turns.iter().filter(|turn| matches!(turn, Turn::Pause(_))).count();
        assert_eq!((pauses, turns[31], turns[30]), (2, Turn::Pause(PAUSE), Turn::GoOn));
        assert_eq!(manners.after(64, 0), Turn::GoOn);
        assert_eq!(manners.after(64, 7), Turn::GiveWay);
        assert_eq!(manners.after(64, 7), Turn::GoOn);
        assert_eq!(manners.after(300, 7), Turn::Pause(PAUSE), "a whole ring at once: one pause");
    }
}
