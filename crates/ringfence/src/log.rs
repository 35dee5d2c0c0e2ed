//! Log messages on standard error.
//!
//! The supervisor of a sandboxed process passes its messages on. The service manager of a daemon stores
//! them. A message that a peer can cause is limited, to once for each rule or by a `LineBudget`, so a
//! peer cannot fill the log. Counters count every event.

// #syscall all write: the log on standard error

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use tracing::Level;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::{Registry, fmt, reload};

static LEVEL: OnceLock<reload::Handle<LevelFilter, Registry>> = OnceLock::new();

/// Sends log messages of the level `warn` and above to standard error, with `verbose` also `info`.
pub fn to_stderr(verbose: bool) {
    to_stderr_at(if verbose { Level::INFO } else { Level::WARN });
}

/// Sends log messages of `level` and above to standard error.
pub fn to_stderr_at(level: Level) {
    let (filter, handle) = reload::Layer::new(LevelFilter::from_level(level));
    let lines = fmt::layer()
        .with_writer(std::io::stderr)
        .with_target(false)
        .without_time()
        .with_ansi(false);
    let subscriber = tracing_subscriber::registry().with(filter).with(lines);
    // A second call changes nothing.
    if tracing::subscriber::set_global_default(subscriber).is_ok() {
        let _ = LEVEL.set(handle);
    }
}

/// Changes the level: from now on, messages of `level` and above are logged.
pub fn set_level(level: Level) {
    if let Some(handle) = LEVEL.get() {
        // The call fails only if the log does not exist any more.
        let _ = handle.modify(|filter| *filter = LevelFilter::from_level(level));
    }
}

/// Number of lines that a [`LineBudget`] allows at once.
const LINES_AT_ONCE: u32 = 8;
/// Time after which a [`LineBudget`] allows one more line.
const LINE_EVERY: Duration = Duration::from_secs(60);

/// Rate limit for the log lines of one device that a peer can cause as often as it likes, such as those
/// of its connections.
#[derive(Debug)]
pub(crate) struct LineBudget {
    left: u32,
    since: Instant,
    dropped: u64,
}

impl LineBudget {
    pub(crate) fn new() -> LineBudget {
        LineBudget { left: LINES_AT_ONCE, since: Instant::now(), dropped: 0 }
    }

    /// Takes a line from the budget. Returns the number of lines that were dropped since the last one, or
    /// `None` if this line is to be dropped as well.
    pub(crate) fn take(&mut self) -> Option<u64> {
        self.take_at(Instant::now())
    }

    fn take_at(&mut self, now: Instant) -> Option<u64> {
        while self.left < LINES_AT_ONCE && now.saturating_duration_since(self.since) >= LINE_EVERY {
            self.left += 1;
            self.since += LINE_EVERY;
        }
        if self.left == LINES_AT_ONCE {
            self.since = now;
        }
        let Some(left) = self.left.checked_sub(1) else {
            self.dropped += 1;
            return None;
        };
        self.left = left;
        Some(core::mem::take(&mut self.dropped))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_budget_spent_at_once_drops_and_counts_lines() {
        let (mut budget, now) = (LineBudget::new(), Instant::now());
        let logged = (0..100).filter(|_| budget.take_at(now).is_some()).count();
        assert_eq!(logged, LINES_AT_ONCE as usize);
        assert_eq!(budget.take_at(now + LINE_EVERY), Some(92));
        assert_eq!(budget.take_at(now + LINE_EVERY), None);
    }

    #[test]
    fn line_budget_unused_for_long_allows_no_more_than_at_first() {
        let (mut budget, now) = (LineBudget::new(), Instant::now());
        while budget.take_at(now).is_some() {}
        let later = now + LINE_EVERY * 1000;
        let logged = (0..100).filter(|_| budget.take_at(later).is_some()).count();
        assert_eq!(logged, LINES_AT_ONCE as usize);
    }
}
