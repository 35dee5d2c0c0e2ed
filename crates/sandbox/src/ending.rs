//! Ends of processes: how one ended, exit statuses, and the end with the parent.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use ringfence_sys::poll::wait_hung_up;
use rustix::process::Signal;

use super::signals;

/// Way in which a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Ending {
    /// The process exited with this status.
    Exited(u8),
    /// A signal of this number killed the process.
    Killed(i32),
    /// The end was not observed, because the process that waited was killed too.
    Unknown,
}

impl Ending {
    /// Returns the exit status that a shell reports: the status itself, or 128 plus the signal.
    pub fn exit_status(self) -> u8 {
        match self {
            Ending::Exited(status) => status,
            Ending::Killed(signal) => {
                u8::try_from(signal).map_or(u8::MAX, |signal| signal.saturating_add(128))
            }
            Ending::Unknown => STATUS_FAILED,
        }
    }

    /// Converts the result of `waitpid`.
    pub fn from_wait(status: rustix::process::WaitStatus) -> Ending {
        Ending::of(status.exit_status(), status.terminating_signal())
    }

    /// Converts the result of `waitid`.
    pub fn from_wait_id(status: &rustix::process::WaitIdStatus) -> Ending {
        Ending::of(status.exit_status(), status.terminating_signal())
    }

    /// Converts the status of a child of the standard library.
    pub fn from_status(status: std::process::ExitStatus) -> Ending {
        use std::os::unix::process::ExitStatusExt;
        Ending::of(status.code(), status.signal())
    }

    /// Returns the end of a process that exited with `code` or was killed by `signal`. A code has eight bits.
    fn of(code: Option<i32>, signal: Option<i32>) -> Ending {
        match (code, signal) {
            (Some(code), _) => Ending::Exited(code.to_le_bytes()[0]),
            (None, Some(signal)) => Ending::Killed(signal),
            (None, None) => Ending::Unknown,
        }
    }
}

impl std::fmt::Display for Ending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            Ending::Exited(0) => f.write_str("ended"),
            Ending::Exited(status) => write!(f, "ended with status {status}"),
            Ending::Killed(number) => match signals::name(number) {
                Some(name) => write!(f, "was killed by signal {number} ({name})"),
                None => write!(f, "was killed by signal {number}"),
            },
            Ending::Unknown => f.write_str("is gone"),
        }
    }
}

/// Exit status for a failure of Ringfence itself.
pub const STATUS_FAILED: u8 = 125;
/// Exit status for a command that was found but could not be executed.
pub const STATUS_CANNOT_EXECUTE: u8 = 126;
/// Exit status for a command that was not found.
pub const STATUS_NOT_FOUND: u8 = 127;

/// Makes the kernel kill this process when its parent thread ends. A change of credentials clears
/// the setting, so call this after the last one. A parent that has ended by then is not noticed: the caller finds its channel
/// closed, or calls [`die_with_parent_of`].
///
/// # Errors
///
/// Returns the kernel's error; none is expected.
pub fn die_with_parent() -> io::Result<()> {
    Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?)
}

/// Makes the kernel kill this process when its parent ends, also if the parent ended before this call.
///
/// `parent` is the reading end of a pipe whose writing end the parent alone keeps open. The kernel closes a process's files
/// before it sends death signals, so the pipe is closed if the signal was missed.
///
/// # Errors
///
/// Returns an error if the parent has ended, and the kernel's error; none is expected.
pub fn die_with_parent_of(parent: impl AsFd) -> io::Result<()> {
    die_with_parent()?;
    if wait_hung_up(parent, Duration::ZERO)? {
        return Err(io::Error::other("the process that started this one has ended"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_status_of_ending_follows_shell_convention() {
        assert_eq!(Ending::Exited(3).exit_status(), 3);
        assert_eq!(Ending::Killed(9).exit_status(), 137);
        assert_eq!(Ending::Killed(15).to_string(), "was killed by signal 15 (SIGTERM)");
        assert_eq!(Ending::Unknown.exit_status(), STATUS_FAILED);
    }
}
