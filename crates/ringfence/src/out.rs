//! Standard output.
//!
//! Whoever reads it may have seen enough, as `head` has after ten lines. That is no failure: the
//! command ends, and says nothing. Only what is written here can tell that from a pipe to another
//! process of ours that broke, so all of the command's results go through [`Out`].

use std::error::Error;
use std::fmt;
use std::io::{self, Write};

/// Standard output.
#[derive(Clone, Copy, Debug, Default)]
pub struct Out;

/// Nobody reads standard output any more.
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

/// Whether the error is that nobody reads standard output any more.
pub fn is_closed(error: &anyhow::Error) -> bool {
    let closed = |cause: &io::Error| cause.get_ref().is_some_and(|inner| inner.is::<Closed>());
    error.chain().any(|cause| cause.downcast_ref::<io::Error>().is_some_and(closed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn only_standard_output_counts() {
        let other = io::Error::from(io::ErrorKind::BrokenPipe);
        let ours = mark(io::Error::from(io::ErrorKind::BrokenPipe));
        assert!(is_closed(&Err::<(), _>(ours).context("a row").unwrap_err()));
        assert!(!is_closed(&Err::<(), _>(other).context("an order").unwrap_err()));
        let full = mark(io::Error::from(io::ErrorKind::StorageFull));
        assert!(!is_closed(&full.into()));
    }
}
