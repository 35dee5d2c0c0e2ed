//! How long to poll before sleeping, and whose events to ignore for a while.

use core::time::Duration;

/// The first step of a spin window that grows from nothing.
const SPIN_STEP: Duration = Duration::from_micros(5);

/// How long to go on polling after the last work, learned from how long the sleeps were.
///
/// A sleep that was shorter than the longest window would better have been a spin: the window doubles.
/// After a longer one it halves, down to nothing.
#[derive(Debug)]
pub struct Spin {
    max: Duration,
    window: Duration,
}

impl Spin {
    /// Spins for no longer than `max` at a time; not at all for zero.
    pub fn new(max: Duration) -> Spin {
        Spin { max, window: max.min(SPIN_STEP) }
    }

    /// How long to spin now.
    pub fn window(&self) -> Duration {
        self.window
    }

    /// Work arrived after a sleep of that length.
    pub fn slept(&mut self, length: Duration) {
        self.window = if length < self.max {
            (self.window * 2).max(SPIN_STEP).min(self.max)
        } else if self.window > SPIN_STEP {
            self.window / 2
        } else {
            Duration::ZERO
        };
    }
}

/// Events in a row that may announce nothing. A few are normal: one that was on its way while the
/// work it announced was found by polling.
const SPURIOUS_MAX: u32 = 16;
const BACKOFF_MIN: Duration = Duration::from_micros(50);
const BACKOFF_MAX: Duration = Duration::from_millis(5);

/// Whether a port's events are listened to. A peer that keeps announcing nothing (XSA-332: event
/// storms) is ignored for a time that doubles with each further empty announcement; the first one
/// with work behind it sets all back.
#[derive(Debug, Default)]
pub struct Throttle {
    spurious: u32,
    backoff: Duration,
    until: Option<Duration>,
}

impl Throttle {
    /// There was work.
    pub fn worked(&mut self) {
        *self = Throttle::default();
    }

    /// There was an event and no work. Returns whether events are now to be ignored.
    pub fn spurious(&mut self, now: Duration) -> bool {
        self.spurious = self.spurious.saturating_add(1);
        if self.spurious <= SPURIOUS_MAX {
            return false;
        }
        self.backoff = (self.backoff * 2).clamp(BACKOFF_MIN, BACKOFF_MAX);
        self.until = Some(now + self.backoff);
        true
    }

    /// Until when events are to be ignored; no longer than `BACKOFF_MAX`.
    pub fn until(&self) -> Option<Duration> {
        self.until
    }

    /// Ends the time of being ignored if it is over.
    pub fn expire(&mut self, now: Duration) {
        self.until.take_if(|until| *until <= now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    #[test]
    fn short_sleeps_widen_the_window_and_long_ones_close_it() {
        let mut spin = Spin::new(50 * US);
        for _ in 0..10 {
            spin.slept(40 * US);
        }
        assert_eq!(spin.window(), 50 * US);
        for _ in 0..5 {
            spin.slept(51 * US);
        }
        assert_eq!(spin.window(), Duration::ZERO);
        spin.slept(10 * US);
        assert_eq!(spin.window(), SPIN_STEP);
    }

    #[test]
    fn no_spinning_where_none_is_allowed() {
        let mut spin = Spin::new(Duration::ZERO);
        spin.slept(Duration::ZERO);
        assert_eq!(spin.window(), Duration::ZERO);
    }

    #[test]
    fn xsa_332_a_storm_is_ignored_for_longer_and_longer_but_never_for_good() {
        let mut throttle = Throttle::default();
        let mut now = Duration::from_secs(1);
        for _ in 0..SPURIOUS_MAX {
            assert!(!throttle.spurious(now));
        }
        let mut waits = vec![];
        for _ in 0..9 {
            assert!(throttle.spurious(now));
            let until = throttle.until().unwrap();
            waits.push(until - now);
            throttle.expire(until - US);
            assert!(throttle.until().is_some());
            now = until;
            throttle.expire(now);
            assert_eq!(throttle.until(), None);
        }
        let expected: Vec<_> =
            [50, 100, 200, 400, 800, 1600, 3200, 5000, 5000].map(|n| n * US).into();
        assert_eq!(waits, expected);
        throttle.worked();
        assert!(!throttle.spurious(now), "forgiven");
    }
}
