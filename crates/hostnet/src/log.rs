//! Log messages on standard error.
//!
//! The supervisor of a sandboxed process passes its messages on. The service manager of a daemon stores
//! them. A message that a peer can cause is limited, to once for each rule or by a `LineBudget`, so a
//! peer cannot fill the log. Counters count every event.

// #syscall all write: the log on standard error

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tracing::level_filters::LevelFilter;
use tracing::{Level, Subscriber};
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

/// Sends log messages of `level` and above to a function, as lines without an end.
pub fn to_lines_at(level: Level, report: impl Fn(&str) + Send + Sync + 'static) {
    // Fails if a program that uses the crate has a log of its own.
    let _ = tracing::subscriber::set_global_default(lines(level, report));
}

fn lines(level: Level, report: impl Fn(&str) + Send + Sync + 'static) -> impl Subscriber {
    let report = Arc::new(report);
    let lines = fmt::layer()
        .with_writer(move || Lines(Arc::clone(&report)))
        .with_target(false)
        .with_level(false)
        .without_time()
        .with_ansi(false);
    tracing_subscriber::registry().with(LevelFilter::from_level(level)).with(lines)
}

/// Writer that passes lines to a function. The log writes each message at once.
struct Lines<F>(Arc<F>);

impl<F: Fn(&str)> io::Write for Lines<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        String::from_utf8_lossy(bytes).lines().for_each(|line| (self.0)(line));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
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
pub struct LineBudget {
    left: u32,
    since: Instant,
    dropped: u64,
}

impl Default for LineBudget {
    fn default() -> LineBudget {
        LineBudget::new()
    }
}

impl LineBudget {
    pub fn new() -> LineBudget {
        LineBudget { left: LINES_AT_ONCE, since: Instant::now(), dropped: 0 }
    }

    /// Takes a line from the budget. Returns the number of lines that were dropped since the last one, or
    /// `None` if this line is to be dropped as well.
    pub fn take(&mut self) -> Option<u64> {
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
    fn log_to_function_has_messages_of_the_level_without_ends() {
        let kept = Arc::new(std::sync::Mutex::new(Vec::new()));
        let into = Arc::clone(&kept);
        let report = move |line: &str| into.lock().unwrap().push(line.to_owned());
        tracing::subscriber::with_default(lines(Level::WARN, report), || {
            tracing::info!("left out");
            tracing::warn!(disk = 1, "no O_DIRECT there");
            tracing::error!("two\nlines");
        });
        assert_eq!(*kept.lock().unwrap(), ["no O_DIRECT there disk=1", "two", "lines"]);
    }

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
