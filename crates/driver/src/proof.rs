//! Proof of being a launcher, for the driver domain of a switch.
//!
//! The command in a guest runs under the same host uid as the launcher, so the credentials of a
//! connection do not distinguish them. The sandboxed driver domain cannot examine processes. The
//! command runs in a child of the launcher's user namespace and cannot open the parent: the kernel
//! opens `/proc/self/ns/user` as the caller's own namespace, and denies access to a process of a
//! parent namespace. A launcher therefore sends a descriptor of its user namespace with its first
//! message. The driver domain compares it with the namespace of the launcher that started it.
//!
//! Only the driver domain receives the descriptor. No other process can listen at a switch's
//! socket, which is in the runtime directory: guests do not see it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use ringfence_sandbox::channel::{Channel, ChannelError};

use crate::switchboard::{ToDriver, VERSION};

/// Opens the user namespace of this process.
///
/// # Errors
///
/// Returns the kernel's error if there is no `/proc`.
pub fn own_user_namespace() -> io::Result<OwnedFd> {
    Ok(std::fs::File::open("/proc/self/ns/user")?.into())
}

/// Sends the first message on a connection to a driver domain.
///
/// # Errors
///
/// Returns [`ChannelError`] if the message cannot be sent.
pub fn introduce(channel: &Channel) -> Result<(), ChannelError> {
    let namespace = own_user_namespace()?;
    channel.send(&ToDriver::Hello { version: VERSION.to_owned() }, &[namespace.as_fd()])
}
