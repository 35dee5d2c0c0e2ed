//! The time by which ports and data plane go.

use core::time::Duration;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::time::{ClockId, clock_gettime};

/// Time since a fixed moment.
pub(crate) fn monotonic() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}

/// Tells the time: the system's, or one that a test sets.
#[derive(Clone, Debug, Default)]
pub struct Clock(Option<Arc<Mutex<Duration>>>);

impl Clock {
    /// A clock that stands still until it is moved on.
    pub fn standing() -> Clock {
        Clock(Some(Arc::default()))
    }

    /// Time since a fixed moment.
    pub fn now(&self) -> Duration {
        match &self.0 {
            None => monotonic(),
            Some(time) => *time.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// Moves a standing clock on; the system's is left alone.
    pub fn advance(&self, by: Duration) {
        if let Some(time) = &self.0 {
            *time.lock().unwrap_or_else(PoisonError::into_inner) += by;
        }
    }
}
