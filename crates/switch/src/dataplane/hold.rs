//! How long a port may make others wait for room.
//!
//! # Theory of operation
//!
//! A ring of 256 slots holds 15 frames of 64 KiB, which a sender makes in less time than it takes the
//! receiver's process to be scheduled. If what finds no room were dropped, TCP would send much of it
//! twice. So a sender all of whose frames go to one port is held up while that port has no room: its
//! frames stay on its own ring, at no cost, and its own kernel notices.
//!
//! But what stands behind those frames may be for somebody else. So waiting has to be earned: for each
//! slot that a port takes it may make others wait for [`EARNED`] longer, no more than [`SAVED_MAX`] in
//! all. That is, it is waited for as long as it is at least as fast as a link of 1 Gbit/s (or takes
//! 30,000 frames a second). One that takes nothing is waited for once, for a moment, and a new one not
//! at all. After that what it has no room for is dropped, as at the port of any switch.
//!
//! Never waited for:
//!
//! * by a sender whose last frames went to several ports: what is for a full one of them is dropped,
//!   and the others get theirs;
//! * for the sake of a frame to everybody;
//! * by other senders: those that send elsewhere are not concerned.

use core::time::Duration;

/// How long others may wait for a slot that was taken: as long as a page takes at 1 Gbit/s.
const EARNED: Duration = Duration::from_micros(32);
/// The longest wait that can be saved up.
const SAVED_MAX: Duration = Duration::from_millis(10);

/// How long others still wait for a port.
#[derive(Debug, Default)]
pub(super) struct Patience {
    left: Duration,
    /// Since when the time of those who wait counts against what is left.
    since: Option<Duration>,
    /// Somebody was made to wait in this round.
    waiting: bool,
}

impl Patience {
    /// Whether others wait if there is no room now.
    pub(super) fn lasts(&self) -> bool {
        !self.left.is_zero()
    }

    /// The port took frames of that many slots.
    pub(super) fn earn(&mut self, slots: usize) {
        let earned = EARNED.saturating_mul(u32::try_from(slots).unwrap_or(u32::MAX));
        self.left = self.left.saturating_add(earned).min(SAVED_MAX);
    }

    /// Somebody waits.
    pub(super) fn wait(&mut self) {
        self.waiting = true;
    }

    /// Whether somebody waited in the round before.
    pub(super) fn awaited(&self) -> bool {
        self.since.is_some() || self.waiting
    }

    /// A round is over. Whether a time of waiting began.
    pub(super) fn settle(&mut self, now: Duration) -> bool {
        let before = self.since.take();
        if !core::mem::take(&mut self.waiting) {
            return false;
        }
        if let Some(since) = before {
            self.left = self.left.saturating_sub(now.saturating_sub(since));
        }
        self.since = Some(now);
        before.is_none()
    }

    /// When nobody is to wait any longer, if somebody does.
    pub(super) fn until(&self) -> Option<Duration> {
        self.since.map(|since| since + self.left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_port_that_never_took_anything_is_not_waited_for() {
        let mut patience = Patience::default();
        assert!(!patience.lasts());
        patience.earn(1);
        assert!(patience.lasts());
    }

    #[test]
    fn one_that_stops_is_waited_for_once_and_not_for_long() {
        let mut patience = Patience::default();
        patience.earn(1_000_000);
        let mut now = Duration::from_secs(5);
        let mut waited = Duration::ZERO;
        for _ in 0..1000 {
            if patience.lasts() {
                patience.wait();
                waited += MS / 10;
            }
            patience.settle(now);
            now += MS / 10;
        }
        assert!(waited >= SAVED_MAX && waited <= SAVED_MAX + MS, "{waited:?}");
        assert_eq!(patience.until(), None);
    }

    #[test]
    fn one_that_takes_a_gigabit_a_second_is_waited_for_all_the_time() {
        let mut patience = Patience::default();
        patience.earn(64);
        let mut now = Duration::ZERO;
        for _ in 0..10_000 {
            assert!(patience.lasts());
            patience.wait();
            patience.settle(now);
            // A frame of 64 KiB each half a millisecond.
            now += 16 * EARNED;
            patience.earn(16);
        }
        // Half as fast: half of the time.
        let mut lasted = 0;
        for step in 0..32_000 {
            now += EARNED;
            if step % 32 == 0 {
                patience.earn(16);
            }
            if patience.lasts() {
                lasted += 1;
                patience.wait();
            }
            patience.settle(now);
        }
        assert!((15_000..=18_000).contains(&lasted), "{lasted}");
    }

    #[test]
    fn time_counts_only_while_somebody_waits() {
        let mut patience = Patience::default();
        patience.earn(100);
        patience.wait();
        assert!(patience.settle(MS), "it begins");
        assert_eq!(patience.until(), Some(MS + 100 * EARNED));
        patience.wait();
        assert!(!patience.settle(2 * MS), "and goes on");
        assert!(patience.awaited());
        assert!(!patience.settle(50 * MS), "over: nobody waited since");
        assert!(!patience.awaited() && patience.lasts());
    }
}
