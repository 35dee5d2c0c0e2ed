//! Rate limiter: credit in bytes that each interval adds.
//!
//! The rules are those of Linux's netback, for which toolstacks select the numbers:
//!
//! * A packet passes if there is credit for all of it. Otherwise it and all later packets stay in the ring;
//!   nothing is lost.
//! * Each interval adds its bytes, up to the maximum of [`BURST_MIN`] and one interval's bytes. So even the
//!   longest packet passes eventually at any rate, and unused credit is limited.

use core::time::Duration;

use crate::rate::Rate;

/// Minimum limit of the credit in bytes: twice the longest packet.
const BURST_MIN: u64 = 128 << 10;

/// Rate limiter of one guest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Limiter {
    rate: Rate,
    credit: u64,
    /// Start of the last interval that was credited.
    since: Duration,
    /// Time at which the waiting packet has enough credit.
    until: Option<Duration>,
}

impl Limiter {
    /// Makes a limiter with the credit of one interval.
    pub(crate) fn new(rate: Rate, now: Duration) -> Limiter {
        Limiter { rate, credit: rate.bytes(), since: now, until: None }
    }

    pub(crate) fn rate(&self) -> Rate {
        self.rate
    }

    /// Changes the rate. Unused credit remains, up to the new limit.
    pub(crate) fn change(&mut self, rate: Rate, now: Duration) {
        self.refill(now);
        *self = Limiter { credit: self.credit.min(burst(rate)), ..Limiter::new(rate, now) };
    }

    /// Subtracts `bytes` from the credit; returns false if there is too little.
    pub(crate) fn take(&mut self, bytes: u64, now: Duration) -> bool {
        self.refill(now);
        if let Some(left) = self.credit.checked_sub(bytes) {
            self.credit = left;
            self.until = None;
            return true;
        }
        // A packet waits at most for the maximum credit.
        let missing = bytes.min(burst(self.rate)).saturating_sub(self.credit);
        let intervals = u32::try_from(missing.div_ceil(self.rate.bytes())).unwrap_or(u32::MAX);
        let wait = self.rate.interval().saturating_mul(intervals);
        self.until = Some(self.since.saturating_add(wait));
        false
    }

    /// Returns the time at which the waiting packet can pass; `None` if no packet waits.
    pub(crate) fn until(&self) -> Option<Duration> {
        self.until
    }

    /// Returns true if a packet still has to wait. After the waiting time it clears the record, since the guest
    /// may have withdrawn the packet.
    pub(crate) fn waits(&mut self, now: Duration) -> bool {
        self.until.take_if(|until| *until <= now);
        self.until.is_some()
    }

    /// Adds the credit of all intervals that have passed.
    fn refill(&mut self, now: Duration) {
        let interval = self.rate.interval().as_nanos();
        let passed = now.saturating_sub(self.since).as_nanos() / interval;
        if passed == 0 {
            return;
        }
        let intervals = u64::try_from(passed).unwrap_or(u64::MAX);
        let more = self.rate.bytes().saturating_mul(intervals);
        self.credit = self.credit.saturating_add(more).min(burst(self.rate));
        // Count whole intervals only: the rest of this one counts later.
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
    fn packet_waits_until_credit_covers_it() {
        let mut limiter = Limiter::new(rate(3000, 50_000), MS);
        assert!(limiter.take(1500, MS) && limiter.take(1500, MS));
        assert!(!limiter.take(1, MS));
        assert_eq!(limiter.until(), Some(51 * MS));
        assert!(limiter.waits(51 * MS - Duration::from_nanos(1)) && !limiter.waits(51 * MS));
        assert_eq!(limiter.until(), None, "no second wake-up without work");
        assert!(!limiter.take(3001, 51 * MS), "one byte more than the interval gave");
        assert_eq!(limiter.until(), Some(101 * MS));
        assert!(limiter.take(3000, 51 * MS), "what is smaller may go meanwhile");
        assert_eq!(limiter.until(), None);
    }

    #[test]
    fn longest_packet_passes_at_minimum_rate() {
        let mut limiter = Limiter::new(rate(1, 1000), Duration::ZERO);
        assert!(!limiter.take(65_535, Duration::ZERO));
        let until = limiter.until().unwrap();
        assert_eq!(until, 65_534 * MS);
        assert!(!limiter.take(65_535, until - MS));
        assert!(limiter.take(65_535, until));
    }

    #[test]
    fn unused_credit_is_limited_to_burst() {
        let year = Duration::from_secs(365 * 24 * 3600);
        let mut small = Limiter::new(rate(1000, 1), Duration::ZERO);
        assert!(small.take(BURST_MIN, year));
        assert!(!small.take(1, year));
        let mut large = Limiter::new(rate(1 << 20, 1), Duration::ZERO);
        assert!(large.take(1 << 20, year) && !large.take(1, year));
    }

    #[test]
    fn changed_rate_applies_immediately() {
        let mut limiter = Limiter::new(rate(1 << 20, 1000), Duration::ZERO);
        limiter.change(rate(10, 1000), Duration::ZERO);
        assert!(limiter.take(BURST_MIN, Duration::ZERO), "what was not used, up to the new limit");
        assert!(!limiter.take(1000, Duration::ZERO));
        limiter.change(rate(1 << 30, 1000), Duration::ZERO);
        assert_eq!(limiter.until(), None, "what waits is asked for again");
        assert!(limiter.take(1000, MS));
    }

    proptest! {
        /// Checks the limit for any rate and any clock: no more bytes pass than the initial credit and the intervals
        /// allow. Every packet within the burst passes at `until`.
        #[test]
        fn passed_bytes_never_exceed_granted_credit(
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
