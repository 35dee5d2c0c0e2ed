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
//! driver domain, which outlives it, and to that of a guest with a cgroup: the launcher's death continues it if it is
//! stopped, and it ends the guest and removes the cgroup. The kernel ends a PID namespace together with its process 1.
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
//! * [`cgroup`]: cgroups of guests, with their limits.
//! * [`command_filter`]: system-call filter of a guest's command.
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

pub mod cgroup;
pub mod channel;
pub mod command_filter;
mod ending;
pub mod ids;
pub mod isolation;
pub mod limits;
pub mod namespace_settings;
pub mod owned_child;
pub mod signals;
pub mod spawn;
pub mod supervisor;
mod supervisor_process;

pub use channel::{Channel, ChannelError};
pub use ending::{
    Ending, STATUS_CANNOT_EXECUTE, STATUS_FAILED, STATUS_NOT_FOUND, die_with_parent,
    die_with_parent_of,
};
pub use spawn::{DomainKind, DomainProcess};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
