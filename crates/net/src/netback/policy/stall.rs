//! Whether a guest still takes frames.
//!
//! A guest whose receiving side has died posts no buffers any more, or a few that the next frame does
//! not fit into. What is sent to it would wait, or be tried, for ever. So a guest that for some time
//! took nothing *and* has too little room for the largest frame that could come counts as stalled, and
//! frames for it are dropped at once. (To ask for one free buffer instead is what XSA-392 is about:
//! a guest that leaves one free would never be found out.) It has recovered when the largest frame fits.

use core::time::Duration;

/// How long a guest may take nothing, where nobody says otherwise: as long as with Linux's netback.
pub const STALL_DEFAULT: Duration = Duration::from_secs(60);

/// What changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    Nothing,
    Stalled,
    Recovered,
}

/// What is known of a guest's receiving side.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Stall {
    limit: Duration,
    /// When it was seen for the first time that it took nothing, since it took something last.
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

    /// The largest frame fits.
    pub(crate) fn fits(&mut self) -> Change {
        self.since = None;
        if core::mem::take(&mut self.stalled) { Change::Recovered } else { Change::Nothing }
    }

    /// A frame was taken, whether or not a larger one would have fit.
    pub(crate) fn taken(&mut self) {
        self.since = None;
    }

    /// Somebody has something to send, nothing was taken, and the largest frame does not fit.
    pub(crate) fn refused(&mut self, now: Duration) -> Change {
        let since = *self.since.get_or_insert(now);
        if self.stalled || now.saturating_sub(since) < self.limit {
            return Change::Nothing;
        }
        self.stalled = true;
        Change::Stalled
    }

    /// When it will count as stalled if it goes on like this.
    pub(crate) fn until(&self) -> Option<Duration> {
        self.since.filter(|_| !self.stalled).map(|since| since.saturating_add(self.limit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn xsa_392_who_takes_nothing_for_a_minute_is_stalled_until_the_largest_frame_fits() {
        let mut stall = Stall::new(STALL_DEFAULT);
        assert_eq!(stall.refused(5 * S), Change::Nothing);
        assert_eq!(stall.until(), Some(65 * S));
        assert_eq!(stall.refused(65 * S - Duration::from_nanos(1)), Change::Nothing);
        assert_eq!(stall.refused(65 * S), Change::Stalled);
        assert_eq!((stall.refused(66 * S), stall.until()), (Change::Nothing, None));
        stall.taken();
        assert!(stall.is_stalled(), "a small frame is not room for a large one");
        assert_eq!(stall.fits(), Change::Recovered);
        assert_eq!((stall.fits(), stall.is_stalled()), (Change::Nothing, false));
    }

    #[test]
    fn who_takes_something_now_and_then_is_slow_and_not_stalled() {
        let mut stall = Stall::new(STALL_DEFAULT);
        for second in 0..1000 {
            assert_eq!(stall.refused(second * S), Change::Nothing);
            if second % 50 == 49 {
                stall.taken();
            }
        }
    }
}
