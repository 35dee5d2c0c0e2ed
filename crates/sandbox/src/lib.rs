#![forbid(unsafe_code)]
//! Process isolation of Ringfence: how domains are started, confined, supervised and ended.
//!
//! Each domain of `ringfence run` is two processes. The supervisor is a fork of the launcher, unless the launcher has
//! several threads: then it executes this program again, through `/proc/self/exe`. The inner process always does, and
//! so has nothing of the memory of the others, nor the layout of their address space:
//!
//! ```text
//! launcher ──fork───> supervisor ──spawn──> inner process
//!  user's              unshares user         process 1 of the PID namespace;
//!  namespaces          and PID               unshares the rest, then becomes
//!                      namespaces            guest init, frontend, uplink or driver domain
//! ```
//!
//! `unshare(CLONE_NEWPID)` moves only the *next child* into the new PID namespace. The supervisor
//! is the process that calls it. Afterwards it waits, reports how the inner process ended, and
//! cleans up.
//!
//! Parent death signals run along the arrows, except from the launcher to the supervisor of a
//! driver domain, which outlives it. The kernel ends a PID namespace together with its process 1.
//! If any of the processes is killed, the kernel therefore ends all that depend on it.
//!
//! Commands, descriptors and reports travel over [`Channel`]s (sequenced-packet sockets). Each
//! process finds its own channel on descriptor 0, so no descriptor is inherited by number.
//!
//! # Modules
//!
//! * [`spawn`]: the launcher's side, [`DomainProcess`].
//! * [`supervisor`]: main function of the supervisor process.
//! * [`isolation`]: stages by which an inner process or a daemon confines itself; seccomp and
//!   Landlock lists.
//! * [`ids`]: id maps of user namespaces. [`signals`]: signals as a descriptor.
//! * [`channel`]: messages with descriptors. [`owned_child`]: child processes that end with their
//!   owner.
//!
//! # Example
//!
//! ```
//! use ringfence_sandbox::Channel;
//! use ringfence_sandbox::channel::expect_fds;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (launcher, inner) = Channel::pair()?;
//! launcher.send(&"attach", &[])?;
//! let (request, descriptors): (String, _) = inner.receive()?;
//! let [] = expect_fds(descriptors)?;
//! assert_eq!(request, "attach");
//! # Ok(())
//! # }
//! ```

pub mod channel;
pub mod ids;
pub mod isolation;
pub mod limits;
pub mod owned_child;
pub mod signals;
pub mod spawn;
pub mod supervisor;
mod supervisor_process;

pub use channel::{Channel, ChannelError};
pub use spawn::{DomainKind, DomainProcess};

use rustix::process::Signal;

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
    /// Converts the result of `waitid`.
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

/// Exit status for a failure of Ringfence itself.
pub const STATUS_FAILED: u8 = 125;
/// Exit status for a command that was found but could not be executed.
pub const STATUS_CANNOT_EXECUTE: u8 = 126;
/// Exit status for a command that was not found.
pub const STATUS_NOT_FOUND: u8 = 127;

/// Makes the kernel kill this process when its parent thread ends. A change of credentials clears
/// the setting, so call this after the last one.
///
/// # Errors
///
/// Returns the kernel's error; none is expected.
pub fn die_with_parent() -> std::io::Result<()> {
    Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?)
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

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
