//! Stall detection: finds guests that no longer accept frames.
//!
//! A guest whose receive side hangs posts no buffers, or too few for the next frame. Frames for it would wait
//! without end. A guest is stalled if, for some time, it accepted nothing *and* has too few buffers for the
//! longest possible frame. Its frames are then dropped at once. (A check for one free buffer is not enough,
//! XSA-392: a guest that leaves one buffer free would never be detected.) The guest recovers when the longest
//! frame fits.

use core::time::Duration;

/// Default time without accepted frames, as in Linux's netback.
pub const STALL_DEFAULT: Duration = Duration::from_secs(60);

/// State change of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    Nothing,
    Stalled,
    Recovered,
}

/// Stall state of a guest's receive side.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Stall {
    limit: Duration,
    /// Time of the first refusal since the last accepted frame.
    since: Option<Duration>,
    stalled: bool,
}

impl Stall {
    pub(crate) fn new(limit: Duration) -> Stall {
        Stall { limit, since: None, stalled: false }
    }

    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    pub(crate) fn is_stalled(&self) -> bool {
        self.stalled
    }

    /// Records that the longest frame fits.
    pub(crate) fn record_fit(&mut self) -> Change {
        self.since = None;
        if core::mem::take(&mut self.stalled) { Change::Recovered } else { Change::Nothing }
    }

    /// Records an accepted frame, even if a longer one would not fit.
    pub(crate) fn record_accepted(&mut self) {
        self.since = None;
    }

    /// Records a refusal: frames wait, none was accepted, and the longest frame does not fit.
    pub(crate) fn record_refusal(&mut self, now: Duration) -> Change {
        let since = *self.since.get_or_insert(now);
        if self.stalled || now.saturating_sub(since) < self.limit {
            return Change::Nothing;
        }
        self.stalled = true;
        Change::Stalled
    }

    /// Returns the time at which the guest will count as stalled without a change.
    pub(crate) fn until(&self) -> Option<Duration> {
        self.since.filter(|_| !self.stalled).map(|since| since.saturating_add(self.limit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn xsa_392_guest_without_accepted_frames_is_stalled_until_longest_fits() {
        let mut stall = Stall::new(STALL_DEFAULT);
        assert_eq!(stall.record_refusal(5 * S), Change::Nothing);
        assert_eq!(stall.until(), Some(65 * S));
        assert_eq!(stall.record_refusal(65 * S - Duration::from_nanos(1)), Change::Nothing);
        assert_eq!(stall.record_refusal(65 * S), Change::Stalled);
        assert_eq!((stall.record_refusal(66 * S), stall.until()), (Change::Nothing, None));
        stall.record_accepted();
        assert!(stall.is_stalled(), "a small frame is not room for a large one");
        assert_eq!(stall.record_fit(), Change::Recovered);
        assert_eq!((stall.record_fit(), stall.is_stalled()), (Change::Nothing, false));
    }

    #[test]
    fn guest_accepting_occasional_frames_is_not_stalled() {
        let mut stall = Stall::new(STALL_DEFAULT);
        for second in 0..1000 {
            assert_eq!(stall.record_refusal(second * S), Change::Nothing);
            if second % 50 == 49 {
                stall.record_accepted();
            }
        }
    }
}
