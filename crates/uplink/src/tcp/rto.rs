//! Retransmission timeout (RFC 6298): round-trip estimator and exponential backoff.

use core::time::Duration;

use super::seq::Seq;

/// Timeout before the first measurement (RFC 6298, 2.1).
pub(super) const INITIAL: Duration = Duration::from_secs(1);
/// Minimum timeout, as in Linux; the link to the guest is local.
pub(super) const MIN: Duration = Duration::from_millis(200);
/// Maximum timeout; RFC 6298, 2.5, allows 60 s or more.
pub(super) const MAX: Duration = Duration::from_secs(60);
/// Number of timeouts in a row after which a connection is aborted.
pub(super) const TRIES_MAX: u8 = 12;

/// Timeout estimator of one connection.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rto {
    /// Smoothed round-trip time and its variation.
    smoothed: Option<(Duration, Duration)>,
    /// Number of timeouts in a row.
    tries: u8,
    /// Segment being timed: its end, and when it was sent.
    timed: Option<(Seq, Duration)>,
}

impl Rto {
    /// Returns the current timeout.
    pub(super) fn timeout(&self) -> Duration {
        let base = self.smoothed.map_or(INITIAL, |(mean, deviation)| mean + 4 * deviation);
        let backed_off = base.max(MIN).saturating_mul(1 << self.tries.min(TRIES_MAX));
        backed_off.min(MAX)
    }

    /// Records that bytes up to `end` were sent for the first time.
    pub(super) fn sent(&mut self, end: Seq, now: Duration) {
        if self.timed.is_none() {
            self.timed = Some((end, now));
        }
    }

    /// Records that everything before `upto` was acknowledged.
    pub(super) fn acknowledged(&mut self, upto: Seq, now: Duration) {
        self.tries = 0;
        let Some((end, since)) = self.timed else { return };
        if end <= upto {
            self.timed = None;
            self.measured(now.saturating_sub(since));
        }
    }

    fn measured(&mut self, sample: Duration) {
        self.smoothed = Some(match self.smoothed {
            None => (sample, sample / 2),
            Some((mean, deviation)) => {
                let off = mean.abs_diff(sample);
                ((mean * 7 + sample) / 8, (deviation * 3 + off) / 4)
            }
        });
    }

    /// Records a retransmission: data in flight can no longer be timed (Karn's algorithm).
    pub(super) fn retransmitted(&mut self) {
        self.timed = None;
    }

    /// Doubles the timeout after it has expired. Returns `false` after too many in a row.
    pub(super) fn back_off(&mut self) -> bool {
        self.timed = None;
        self.tries = self.tries.saturating_add(1);
        self.tries <= TRIES_MAX
    }

    /// Returns the number of timeouts in a row.
    pub(super) fn tries(&self) -> u8 {
        self.tries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn timeout_after_one_sample_is_mean_plus_four_deviations() {
        let mut rto = Rto::default();
        assert_eq!(rto.timeout(), INITIAL);
        rto.sent(Seq(10), ms(0));
        rto.sent(Seq(20), ms(50));
        rto.acknowledged(Seq(5), ms(60));
        rto.acknowledged(Seq(10), ms(100));
        assert_eq!(rto.timeout(), ms(300), "mean 100, deviation 50");
    }

    #[test]
    fn backoff_doubles_up_to_max_and_acknowledgement_resets_it() {
        let mut rto = Rto::default();
        for tries in 1..=TRIES_MAX {
            assert!(rto.back_off());
            assert_eq!(rto.timeout(), (INITIAL * (1 << tries)).min(MAX));
        }
        assert!(!rto.back_off());
        rto.acknowledged(Seq(1), ms(1));
        assert_eq!(rto.timeout(), INITIAL);
    }

    #[test]
    fn retransmitted_segment_is_not_timed() {
        let mut rto = Rto::default();
        rto.sent(Seq(10), ms(0));
        rto.retransmitted();
        rto.acknowledged(Seq(10), ms(5000));
        assert_eq!(rto.timeout(), INITIAL);
    }
}
