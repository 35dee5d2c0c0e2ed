//! Proof of being a launcher, to the driver domain of a switch.
//!
//! The command in a guest runs under the same host uid as the launcher, so the credentials of a
//! connection do not tell them apart; and in its sandbox the driver domain cannot examine a process. What
//! the command does not have is the launcher's user namespace: it runs in a child of that one. The kernel
//! opens `/proc/self/ns/user` as the caller's own namespace, and lets nobody open that of a process in
//! a parent namespace. So a launcher sends a descriptor of its user namespace with its first message, and
//! the driver domain compares it with that of the launcher that started it.
//!
//! The descriptor is for the driver domain alone. Nobody else can listen at a switch's socket: it is
//! in the runtime directory, which guests do not see.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use ringfence_sandbox::channel::{Channel, ChannelError};

use crate::switchboard::{ToDriver, VERSION};

/// Opens the user namespace of this process.
///
/// # Errors
///
/// The system's: there is no `/proc`.
pub fn own_user_namespace() -> io::Result<OwnedFd> {
    Ok(std::fs::File::open("/proc/self/ns/user")?.into())
}

/// Sends the message that comes first on a connection to a driver domain.
///
/// # Errors
///
/// [`ChannelError`].
pub fn introduce(channel: &Channel) -> Result<(), ChannelError> {
    let namespace = own_user_namespace()?;
    channel.send(&ToDriver::Hello { version: VERSION.to_owned() }, &[namespace.as_fd()])
}
