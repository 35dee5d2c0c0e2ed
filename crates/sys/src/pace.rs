//! Idle strategy: the adaptive spin limit, and the throttle of event storms.

use core::time::Duration;

/// First step of a spin limit that grows from zero.
const SPIN_STEP: Duration = Duration::from_micros(5);

/// Adaptive spin limit: the time to busy-poll after the last work.
///
/// A sleep shorter than the maximum would have cost less as a spin, so the limit doubles. A longer sleep
/// halves it, down to zero.
#[derive(Debug)]
pub struct Spin {
    max: Duration,
    limit: Duration,
}

impl Spin {
    /// Creates a limit of at most `max`. Zero disables spinning.
    pub fn new(max: Duration) -> Spin {
        Spin { max, limit: max.min(SPIN_STEP) }
    }

    /// Returns the current spin limit.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// Adapts the limit to a sleep that work ended after `length`.
    pub fn slept(&mut self, length: Duration) {
        self.limit = if length < self.max {
            (self.limit * 2).max(SPIN_STEP).min(self.max)
        } else if self.limit > SPIN_STEP {
            self.limit / 2
        } else {
            Duration::ZERO
        };
    }
}

/// Consecutive events without work that are tolerated. A few are normal: polling may find work before
/// its event arrives.
const SPURIOUS_MAX: u32 = 16;
const BACKOFF_MIN: Duration = Duration::from_micros(50);
const BACKOFF_MAX: Duration = Duration::from_millis(5);

/// Throttle of one port's events (XSA-332, event storms). After too many events without work, events are
/// ignored for a time that doubles with each further one. An event with work resets it.
#[derive(Debug, Default)]
pub struct Throttle {
    spurious: u32,
    backoff: Duration,
    until: Option<Duration>,
}

impl Throttle {
    /// Resets the throttle, because an event announced work.
    pub fn worked(&mut self) {
        *self = Throttle::default();
    }

    /// Records an event without work. Returns `true` if events are to be ignored now.
    pub fn spurious(&mut self, now: Duration) -> bool {
        self.spurious = self.spurious.saturating_add(1);
        if self.spurious <= SPURIOUS_MAX {
            return false;
        }
        self.backoff = (self.backoff * 2).clamp(BACKOFF_MIN, BACKOFF_MAX);
        self.until = Some(now + self.backoff);
        true
    }

    /// Returns the end of the time in which events are ignored, at most `BACKOFF_MAX` ahead.
    pub fn until(&self) -> Option<Duration> {
        self.until
    }

    /// Clears the end of that time once it has passed.
    pub fn expire(&mut self, now: Duration) {
        self.until.take_if(|until| *until <= now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    #[test]
    fn short_sleeps_raise_the_spin_limit_and_long_ones_lower_it() {
        let mut spin = Spin::new(50 * US);
        for _ in 0..10 {
            spin.slept(40 * US);
        }
        assert_eq!(spin.limit(), 50 * US);
        for _ in 0..5 {
            spin.slept(51 * US);
        }
        assert_eq!(spin.limit(), Duration::ZERO);
        spin.slept(10 * US);
        assert_eq!(spin.limit(), SPIN_STEP);
    }

    #[test]
    fn spin_limit_of_zero_stays_zero() {
        let mut spin = Spin::new(Duration::ZERO);
        spin.slept(Duration::ZERO);
        assert_eq!(spin.limit(), Duration::ZERO);
    }

    #[test]
    fn xsa_332_event_storm_backoff_doubles_up_to_its_maximum() {
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
        assert!(!throttle.spurious(now), "not reset");
    }
}
