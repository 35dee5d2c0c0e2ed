//! Log messages go to standard error: a sandboxed process's keeper passes them on, and a daemon's
//! supervisor keeps them.
//!
//! What peers can cause is logged once a rule (and counted always), so the log is bounded.

// #syscall all write: the log on standard error

use std::sync::OnceLock;

use tracing::Level;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::{Registry, fmt, reload};

static LEVEL: OnceLock<reload::Handle<LevelFilter, Registry>> = OnceLock::new();

/// Sends log messages to standard error: warnings and worse, or with `verbose` information too.
pub fn to_stderr(verbose: bool) {
    to_stderr_at(if verbose { Level::INFO } else { Level::WARN });
}

/// As [`to_stderr`], for messages of `level` and worse.
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

/// From now on, messages of `level` and worse.
pub fn set_level(level: Level) {
    if let Some(handle) = LEVEL.get() {
        // It fails only when there is no log any more.
        let _ = handle.modify(|filter| *filter = LevelFilter::from_level(level));
    }
}
