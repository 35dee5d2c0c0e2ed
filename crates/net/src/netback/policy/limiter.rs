//! How much a guest may send: credit in bytes, given anew after each interval.
//!
//! The rules are those of Linux's netback, by which toolstacks choose the numbers:
//!
//! * A packet goes when there is credit for all of it. If there is none, it stays in the ring, and so
//!   does all behind it: nothing is lost.
//! * Each interval adds its bytes, up to [`BURST_MIN`] or one interval's bytes, whichever is more: so
//!   even the largest packet goes at last, however small the rate, and credit is not saved up for long.

use core::time::Duration;

use ringfence_frame::rate::Rate;

/// The least limit of the credit, in bytes: twice the largest packet.
const BURST_MIN: u64 = 128 << 10;

/// The credit of one guest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Limiter {
    rate: Rate,
    credit: u64,
    /// When the interval began for which credit was given last.
    since: Duration,
    /// What waits goes by then, and not before.
    until: Option<Duration>,
}

impl Limiter {
    /// A guest that begins with the credit of one interval.
    pub(crate) fn new(rate: Rate, now: Duration) -> Limiter {
        Limiter { rate, credit: rate.bytes(), since: now, until: None }
    }

    pub(crate) fn rate(&self) -> Rate {
        self.rate
    }

    /// Another rate holds from now on. Credit that was not used stays, as far as the new rate allows.
    pub(crate) fn change(&mut self, rate: Rate, now: Duration) {
        self.refill(now);
        *self = Limiter { credit: self.credit.min(burst(rate)), ..Limiter::new(rate, now) };
    }

    /// Takes `bytes` off the credit, or says that there is too little.
    pub(crate) fn take(&mut self, bytes: u64, now: Duration) -> bool {
        self.refill(now);
        if let Some(left) = self.credit.checked_sub(bytes) {
            self.credit = left;
            self.until = None;
            return true;
        }
        // Nothing may wait for more credit than there can be.
        let missing = bytes.min(burst(self.rate)).saturating_sub(self.credit);
        let intervals = u32::try_from(missing.div_ceil(self.rate.bytes())).unwrap_or(u32::MAX);
        let wait = self.rate.interval().saturating_mul(intervals);
        self.until = Some(self.since.saturating_add(wait));
        false
    }

    /// When what waits can go; `None` when nothing waits.
    pub(crate) fn until(&self) -> Option<Duration> {
        self.until
    }

    /// Whether something waits, and still has to. What no longer has to must ask again: it may have
    /// been taken back meanwhile.
    pub(crate) fn waits(&mut self, now: Duration) -> bool {
        self.until.take_if(|until| *until <= now);
        self.until.is_some()
    }

    /// Gives the credit of all intervals that have passed.
    fn refill(&mut self, now: Duration) {
        let interval = self.rate.interval().as_nanos();
        let passed = now.saturating_sub(self.since).as_nanos() / interval;
        if passed == 0 {
            return;
        }
        let intervals = u64::try_from(passed).unwrap_or(u64::MAX);
        let more = self.rate.bytes().saturating_mul(intervals);
        self.credit = self.credit.saturating_add(more).min(burst(self.rate));
        // Whole intervals alone: what is left of this one counts for the next.
        let whole = u64::try_from(passed * interval).map(Duration::from_nanos);
        self.since = whole.map_or(now, |whole| self.since.saturating_add(whole));
    }
}

fn burst(rate: Rate) -> u64 {
    rate.bytes().max(BURST_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);

    fn rate(bytes: u64, micros: u32) -> Rate {
        Rate::new(bytes, micros).unwrap()
    }

    #[test]
    fn a_packet_goes_when_there_is_credit_for_all_of_it() {
        let mut limiter = Limiter::new(rate(3000, 50_000), MS);
        assert!(limiter.take(1500, MS) && limiter.take(1500, MS));
        assert!(!limiter.take(1, MS));
        assert_eq!(limiter.until(), Some(51 * MS));
        assert!(limiter.waits(51 * MS - Duration::from_nanos(1)) && !limiter.waits(51 * MS));
        assert_eq!(limiter.until(), None, "nobody is woken twice for nothing");
        assert!(!limiter.take(3001, 51 * MS), "one byte more than the interval gave");
        assert_eq!(limiter.until(), Some(101 * MS));
        assert!(limiter.take(3000, 51 * MS), "what is smaller may go meanwhile");
        assert_eq!(limiter.until(), None);
    }

    #[test]
    fn the_largest_packet_goes_at_last_however_small_the_rate() {
        let mut limiter = Limiter::new(rate(1, 1000), Duration::ZERO);
        assert!(!limiter.take(65_535, Duration::ZERO));
        let until = limiter.until().unwrap();
        assert_eq!(until, 65_534 * MS);
        assert!(!limiter.take(65_535, until - MS));
        assert!(limiter.take(65_535, until));
    }

    #[test]
    fn credit_is_not_saved_up() {
        let year = Duration::from_secs(365 * 24 * 3600);
        let mut small = Limiter::new(rate(1000, 1), Duration::ZERO);
        assert!(small.take(BURST_MIN, year));
        assert!(!small.take(1, year));
        let mut large = Limiter::new(rate(1 << 20, 1), Duration::ZERO);
        assert!(large.take(1 << 20, year) && !large.take(1, year));
    }

    #[test]
    fn another_rate_holds_at_once() {
        let mut limiter = Limiter::new(rate(1 << 20, 1000), Duration::ZERO);
        limiter.change(rate(10, 1000), Duration::ZERO);
        assert!(limiter.take(BURST_MIN, Duration::ZERO), "what was not used, up to the new limit");
        assert!(!limiter.take(1000, Duration::ZERO));
        limiter.change(rate(1 << 30, 1000), Duration::ZERO);
        assert_eq!(limiter.until(), None, "what waits is asked for again");
        assert!(limiter.take(1000, MS));
    }

    proptest! {
        /// Whatever the numbers and however time goes, also backwards: no more goes than the first
        /// credit, what the intervals gave, and no packet that fits the burst waits for ever.
        #[test]
        fn no_more_goes_than_was_given(
            bytes in 1u64..1 << 40,
            micros in 1u32..,
            steps in prop::collection::vec((0u64..1 << 40, 1u64..70_000), 1..60),
        ) {
            let rate = rate(bytes, micros);
            let mut limiter = Limiter::new(rate, Duration::ZERO);
            let (mut latest, mut sent) = (Duration::ZERO, 0u128);
            for (nanos, size) in steps {
                let now = Duration::from_nanos(nanos);
                latest = latest.max(now);
                if limiter.take(size, now) {
                    sent += u128::from(size);
                } else {
                    let until = limiter.until().unwrap();
                    prop_assert!(limiter.clone().take(size, until));
                }
            }
            let intervals = latest.as_nanos() / rate.interval().as_nanos();
            prop_assert!(sent <= u128::from(bytes) * (intervals + 1));
        }
    }
}
