#![forbid(unsafe_code)]
//! Processes, and what keeps them apart.
//!
//! # Theory of operation
//!
//! Each domain of `ringfence run` is two processes, both this program started again by way of
//! `/proc/self/exe`:
//!
//! ```text
//! launcher ──spawn──> keeper ──spawn──> inner
//!  user's              unshares user     process 1 of the PID namespace;
//!  namespaces          and PID           unshares the rest, and then is
//!                      namespaces        the guest's init, the frontend or the driver domain
//! ```
//!
//! A process cannot put *itself* into a PID namespace, only its next child; hence the keeper, which
//! then waits, reports how the inner process ended, and cleans up. The chain of death signals
//! runs along the arrows (except from the launcher to the driver domain's keeper, which outlives
//! it), and the death of process 1 takes its whole PID namespace along. So whichever is killed,
//! what depends on it is gone a moment later, without anybody's help.
//!
//! Orders, descriptors and reports travel over [`Channel`]s (sequenced-packet sockets). The
//! keeper's, and the inner process's own, are each on descriptor 0 of the process that they are
//! for: so no descriptor needs to be inherited by number.

pub mod channel;
pub mod ids;
pub mod isolation;
mod limits;
pub mod owned_child;
pub mod signals;
pub mod spawn;
pub mod supervisor;

pub use channel::{Channel, ChannelError};
pub use spawn::{DomainKind, DomainProcess};

use rustix::process::Signal;

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Ending {
    /// It ended by itself with this status.
    Exited(u8),
    /// A signal of this number ended it.
    Killed(i32),
    /// How it ended is not known: who would have told was killed as well.
    Unknown,
}

impl Ending {
    /// The exit status that a shell would give for this: the status itself, or 128 + the signal.
    pub fn exit_status(self) -> u8 {
        match self {
            Ending::Exited(status) => status,
            Ending::Killed(signal) => {
                u8::try_from(signal).map_or(u8::MAX, |signal| signal.saturating_add(128))
            }
            Ending::Unknown => STATUS_FAILED,
        }
    }

    /// Reads what waiting for a process gave.
    pub fn from_wait(status: rustix::process::WaitStatus) -> Ending {
        if let Some(code) = status.exit_status() {
            Ending::Exited(u8::try_from(code).unwrap_or(u8::MAX))
        } else if let Some(signal) = status.terminating_signal() {
            Ending::Killed(signal)
        } else {
            Ending::Unknown
        }
    }
}

impl Ending {
    /// As [`Ending::from_wait`], for the other way of waiting.
    pub fn from_wait_id(status: &rustix::process::WaitIdStatus) -> Ending {
        if let Some(code) = status.exit_status() {
            Ending::Exited(u8::try_from(code).unwrap_or(u8::MAX))
        } else {
            status.terminating_signal().map_or(Ending::Unknown, Ending::Killed)
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

/// Exit status when Ringfence itself could not do its work.
pub const STATUS_FAILED: u8 = 125;
/// Exit status when the command was found but could not be started.
pub const STATUS_CANNOT_EXECUTE: u8 = 126;
/// Exit status when the command was not found.
pub const STATUS_NOT_FOUND: u8 = 127;

/// Has this process killed when its parent dies. To be called after the last change of
/// credentials, which clears it.
///
/// # Errors
///
/// The kernel's; none are expected.
pub fn die_with_parent() -> std::io::Result<()> {
    Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ending_gives_the_status_a_shell_would() {
        assert_eq!(Ending::Exited(3).exit_status(), 3);
        assert_eq!(Ending::Killed(9).exit_status(), 137);
        assert_eq!(Ending::Killed(15).to_string(), "was killed by signal 15 (SIGTERM)");
        assert_eq!(Ending::Unknown.exit_status(), STATUS_FAILED);
    }
}
