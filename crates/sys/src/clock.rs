//! The time by which ports and data plane go.

use core::time::Duration;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Instant;

/// Time since a fixed moment.
pub fn monotonic() -> Duration {
    // By the C library: it finds the kernel's clock page in a sandbox, which saves a system call.
    static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);
    BEGAN.elapsed()
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
