//! Drain: the last frames of a guest whose programs have ended.
//!
//! Its kernel may still have frames in the TAP, and a worker requests in the TX ring. The drain is over when neither has any.
//! After a frame, both must stay empty for [`QUIET`]: the acknowledgement of one segment lets the kernel send the next.

use std::time::{Duration, Instant};

/// Time without a frame after which a drain that has found frames is over.
const QUIET: Duration = Duration::from_millis(10);
/// Time without progress after which a drain gives up frames that the backend does not take.
const STALLED: Duration = Duration::from_millis(500);
/// Maximum time of a drain.
const MAX: Duration = Duration::from_secs(10);
/// Interval of the looks of a drain.
pub(crate) const INTERVAL: Duration = Duration::from_millis(1);

/// State of a drain.
#[derive(Debug)]
pub(crate) struct Drain {
    began: Instant,
    /// Number of frames that were read from the TAP.
    frames: u64,
    /// Time since which that number is the same.
    moved: Instant,
    /// Time since which TAP and ring are empty.
    empty: Option<Instant>,
    has_found: bool,
}

impl Drain {
    /// Begins a drain after `frames` frames.
    pub(crate) fn begin(frames: u64, now: Instant) -> Drain {
        Drain { began: now, frames, moved: now, empty: None, has_found: false }
    }

    /// Records a look: TAP and ring are empty, and so many frames were read so far. Returns `true` if the drain is over.
    pub(crate) fn look(&mut self, is_empty: bool, frames: u64, now: Instant) -> bool {
        if frames != self.frames {
            (self.frames, self.moved, self.empty) = (frames, now, None);
        }
        self.has_found |= !is_empty || self.moved > self.began;
        self.empty = if is_empty { self.empty.or(Some(now)) } else { None };
        let quiet = if self.has_found { QUIET } else { Duration::ZERO };
        let is_quiet = self.empty.is_some_and(|since| now >= since + quiet);
        is_quiet || now >= self.moved + STALLED || now >= self.began + MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn drain_without_frames_is_over_at_the_first_look() {
        let now = Instant::now();
        assert!(Drain::begin(7, now).look(true, 7, now));
    }

    #[test]
    fn drain_after_a_frame_is_over_when_nothing_followed_for_a_while() {
        let now = Instant::now();
        let mut drain = Drain::begin(7, now);
        assert!(!drain.look(false, 7, now), "a frame waits");
        assert!(!drain.look(true, 8, now + MS), "it was just read");
        assert!(!drain.look(true, 8, now + 10 * MS));
        assert!(!drain.look(true, 9, now + 10 * MS), "another one came");
        assert!(!drain.look(true, 9, now + 19 * MS));
        assert!(drain.look(true, 9, now + 20 * MS));
    }

    #[test]
    fn drain_whose_frames_the_backend_does_not_take_is_given_up() {
        let now = Instant::now();
        let mut drain = Drain::begin(7, now);
        assert!(!drain.look(false, 8, now + MS));
        assert!(!drain.look(false, 8, now + 500 * MS));
        assert!(drain.look(false, 8, now + 501 * MS));
    }

    #[test]
    fn drain_of_endless_frames_is_given_up() {
        let now = Instant::now();
        let mut drain = Drain::begin(0, now);
        for ms in 1..10_000_u32 {
            assert!(!drain.look(false, ms.into(), now + ms * MS));
        }
        assert!(drain.look(false, 10_000, now + 10_000 * MS));
    }
}
