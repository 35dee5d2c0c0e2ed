//! Backpressure: bounds the time for which a port without room may hold up its senders.
//!
//! # Theory of operation
//!
//! A ring of 256 slots holds 15 frames of 64 KiB, which a sender makes in less time than it takes the
//! receiver's process to be scheduled. If what finds no room were dropped, TCP would send much of it
//! twice. So a sender all of whose frames go to one port is held up while that port has no room: its
//! frames stay on its own ring, at no cost, and its own kernel notices.
//!
//! Frames behind the held ones may be for another port, so a port has to earn the waiting time. Each
//! slot that it takes adds [`EARNED`] to its credit, up to [`SAVED_MAX`]. A port that is as fast as a
//! link of 1 Gbit/s (or takes 30,000 frames a second) therefore holds up its senders without limit. A
//! port that takes nothing holds them up once, for the credit that is left; a new port has no credit.
//! Without credit, frames that find no room are dropped, as at the port of any switch.
//!
//! Backpressure does not apply to:
//!
//! * a sender whose last frames went to several ports: frames for a full port are dropped;
//! * flooded frames;
//! * senders of other ports.

use core::time::Duration;

/// Waiting time earned by one slot: the time that a page takes at 1 Gbit/s.
const EARNED: Duration = Duration::from_micros(32);
/// Maximum waiting time that a port can save.
const SAVED_MAX: Duration = Duration::from_millis(10);

/// Waiting time that a port has left.
#[derive(Debug, Default)]
pub(super) struct Backpressure {
    left: Duration,
    /// Start of the time that counts against `left`; `None` if no sender waits.
    since: Option<Duration>,
    /// Set if a sender was held up in this round.
    waiting: bool,
}

impl Backpressure {
    /// Returns `true` if senders wait when the port has no room.
    pub(super) fn lasts(&self) -> bool {
        !self.left.is_zero()
    }

    /// Adds the waiting time for `slots` slots that the port took.
    pub(super) fn earn(&mut self, slots: usize) {
        let earned = EARNED.saturating_mul(u32::try_from(slots).unwrap_or(u32::MAX));
        self.left = self.left.saturating_add(earned).min(SAVED_MAX);
    }

    /// Records that a sender waits in this round.
    pub(super) fn wait(&mut self) {
        self.waiting = true;
    }

    /// Returns `true` if a sender waited in this round or the previous one.
    pub(super) fn awaited(&self) -> bool {
        self.since.is_some() || self.waiting
    }

    /// Ends the round. Returns `true` if a sender began to wait in it.
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

    /// Returns the time at which the waiting ends, if a sender waits.
    pub(super) fn until(&self) -> Option<Duration> {
        self.since.map(|since| since + self.left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn new_port_has_no_waiting_time() {
        let mut patience = Backpressure::default();
        assert!(!patience.lasts());
        patience.earn(1);
        assert!(patience.lasts());
    }

    #[test]
    fn stopped_port_holds_senders_once_for_saved_time() {
        let mut patience = Backpressure::default();
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
    fn gigabit_port_holds_senders_without_limit() {
        let mut patience = Backpressure::default();
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
    fn waiting_time_without_waiting_sender_is_not_consumed() {
        let mut patience = Backpressure::default();
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
