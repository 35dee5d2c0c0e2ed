//! Errors of a switch's driver domain.

use std::io;

use ringfence_platform::PlatformError;
use ringfence_sandbox::channel::ChannelError;
use ringfence_sandbox::isolation::SandboxError;
use ringfence_xenstore::StoreError;

/// Errors that end a driver domain.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The configuration did not arrive or is malformed.
    #[error("orders: {0}")]
    Channel(#[from] ChannelError),
    /// The sandbox could not be entered.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// The hub or the platform failed.
    #[error(transparent)]
    Platform(#[from] PlatformError),
    /// A store operation failed.
    #[error("store: {0}")]
    Store(#[from] StoreError),
    /// A system call failed.
    #[error(transparent)]
    System(#[from] io::Error),
}
