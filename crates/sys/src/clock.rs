//! Clock of ports and workers, which tests can replace.

use core::time::Duration;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Instant;

/// Returns the time since a fixed moment.
pub fn monotonic() -> Duration {
    // The C library finds the vDSO in a sandbox, which saves a system call.
    static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);
    BEGAN.elapsed()
}

/// Returns the processor's time-stamp counter; `None` on processors on which a program cannot read one.
pub fn time_stamp() -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: every processor of x86-64 has the instruction. It reads a register and touches no memory.
        Some(unsafe { core::arch::x86_64::_rdtsc() })
    }
    #[cfg(not(target_arch = "x86_64"))]
    None
}

/// Source of time: the system's clock, or a clock that a test advances.
#[derive(Clone, Debug, Default)]
pub struct Clock(Option<Arc<Mutex<Duration>>>);

impl Clock {
    /// Creates a clock that only [`Clock::advance`] moves.
    pub fn standing() -> Clock {
        Clock(Some(Arc::default()))
    }

    /// Returns the time since a fixed moment.
    pub fn now(&self) -> Duration {
        match &self.0 {
            None => monotonic(),
            Some(time) => *time.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// Advances a standing clock. Does nothing to the system's clock.
    pub fn advance(&self, by: Duration) {
        if let Some(time) = &self.0 {
            *time.lock().unwrap_or_else(PoisonError::into_inner) += by;
        }
    }
}

#[cfg(test)]
mod tests {
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn time_stamp_advances() {
        let first = super::time_stamp().unwrap();
        std::thread::sleep(core::time::Duration::from_millis(1));
        assert!(super::time_stamp().unwrap() > first);
    }
}
