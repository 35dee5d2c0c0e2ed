//! Standard output of the command.
//!
//! A reader such as `head` may close the pipe early. That is no failure: the command ends without a
//! message. Only an error from here proves that standard output was closed, and not another pipe. All
//! results of the command therefore pass through [`Out`].

use std::error::Error;
use std::fmt;
use std::io::{self, Write};

use ringfence_sandbox::STATUS_FAILED;

/// Writer for standard output that marks the error of a closed pipe.
#[derive(Clone, Copy, Debug, Default)]
pub struct Out;

/// Mark of an error that a closed standard output caused.
#[derive(Debug)]
struct Closed;

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nobody reads standard output any more")
    }
}

impl Error for Closed {}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        io::stdout().write(bytes).map_err(mark)
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stdout().flush().map_err(mark)
    }
}

fn mark(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::BrokenPipe {
        io::Error::new(io::ErrorKind::BrokenPipe, Closed)
    } else {
        error
    }
}

/// Returns `true` if the error was caused by a closed standard output.
pub fn is_closed(error: &anyhow::Error) -> bool {
    let closed = |cause: &io::Error| cause.get_ref().is_some_and(|inner| inner.is::<Closed>());
    error.chain().any(|cause| cause.downcast_ref::<io::Error>().is_some_and(closed))
}

/// Prints the help, the version or an error of the command line. Returns the exit status.
pub fn tell(parse_result: &clap::Error) -> u8 {
    let printed = parse_result.print().and_then(|()| io::stdout().flush());
    match printed {
        Err(error) if !parse_result.use_stderr() && error.kind() != io::ErrorKind::BrokenPipe => {
            eprintln!("ringfence: standard output: {error}");
            STATUS_FAILED
        }
        _ if parse_result.use_stderr() && has_own_statuses() => STATUS_FAILED,
        _ => u8::try_from(parse_result.exit_code()).unwrap_or(STATUS_FAILED),
    }
}

/// Returns `true` if the command line is that of `run` or `exec`, whose exit status is that of another command, or of
/// `wait`, whose status is a result. Errors of usage are told from these by a status of their own, as with env(1) and
/// timeout(1).
fn has_own_statuses() -> bool {
    std::env::args_os().nth(1).is_some_and(|word| word == "run" || word == "exec" || word == "wait")
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn broken_pipe_of_standard_output_only_is_marked() {
        let other = io::Error::from(io::ErrorKind::BrokenPipe);
        let ours = mark(io::Error::from(io::ErrorKind::BrokenPipe));
        assert!(is_closed(&Err::<(), _>(ours).context("a row").unwrap_err()));
        assert!(!is_closed(&Err::<(), _>(other).context("an order").unwrap_err()));
        let full = mark(io::Error::from(io::ErrorKind::StorageFull));
        assert!(!is_closed(&full.into()));
    }
}
