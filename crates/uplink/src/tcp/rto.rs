//! When to send once more: the retransmission time-out (RFC 6298).

use core::time::Duration;

use super::seq::Seq;

/// Before anything was measured (RFC 6298, 2.1).
pub(super) const INITIAL: Duration = Duration::from_secs(1);
/// As Linux has it; the link to the guest is short.
pub(super) const MIN: Duration = Duration::from_millis(200);
/// RFC 6298, 2.5, allows 60 s or more.
pub(super) const MAX: Duration = Duration::from_secs(60);
/// Time-outs in a row after which a connection is given up.
pub(super) const TRIES_MAX: u8 = 12;

/// The estimator of one connection.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rto {
    smoothed: Option<(Duration, Duration)>,
    /// Time-outs in a row.
    tries: u8,
    /// What is being timed: when everything up to here is acknowledged, and since when.
    timed: Option<(Seq, Duration)>,
}

impl Rto {
    /// The time-out now.
    pub(super) fn timeout(&self) -> Duration {
        let base = self.smoothed.map_or(INITIAL, |(mean, deviation)| mean + 4 * deviation);
        let backed_off = base.max(MIN).saturating_mul(1 << self.tries.min(TRIES_MAX));
        backed_off.min(MAX)
    }

    /// Something was sent for the first time, up to `end`.
    pub(super) fn sent(&mut self, end: Seq, now: Duration) {
        if self.timed.is_none() {
            self.timed = Some((end, now));
        }
    }

    /// Everything up to `upto` was acknowledged.
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

    /// Something is sent once more: what is under way cannot be timed any more (Karn).
    pub(super) fn retransmitted(&mut self) {
        self.timed = None;
    }

    /// The time-out has come. `false`: there have been too many.
    pub(super) fn back_off(&mut self) -> bool {
        self.timed = None;
        self.tries = self.tries.saturating_add(1);
        self.tries <= TRIES_MAX
    }

    /// Time-outs in a row.
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
    fn the_time_out_follows_what_is_measured() {
        let mut rto = Rto::default();
        assert_eq!(rto.timeout(), INITIAL);
        rto.sent(Seq(10), ms(0));
        rto.sent(Seq(20), ms(50));
        rto.acknowledged(Seq(5), ms(60));
        rto.acknowledged(Seq(10), ms(100));
        assert_eq!(rto.timeout(), ms(300), "mean 100, deviation 50");
    }

    #[test]
    fn it_doubles_to_a_limit_and_an_answer_ends_that() {
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
    fn what_was_sent_twice_is_not_timed() {
        let mut rto = Rto::default();
        rto.sent(Seq(10), ms(0));
        rto.retransmitted();
        rto.acknowledged(Seq(10), ms(5000));
        assert_eq!(rto.timeout(), INITIAL);
    }
}
