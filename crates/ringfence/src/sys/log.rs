//! Log messages of a sandboxed process go to its standard error, which its keeper passes on.
//!
//! What peers can cause is logged once a rule (and counted always), so the log is bounded.

use tracing::Level;

/// Sends log messages to standard error: warnings and worse, or with `verbose` information too.
pub fn to_stderr(verbose: bool) {
    let level = if verbose { Level::INFO } else { Level::WARN };
    let subscriber = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(level)
        .with_target(false)
        .without_time()
        .with_ansi(false)
        .finish();
    // A second call changes nothing.
    let _ = tracing::subscriber::set_global_default(subscriber);
}
