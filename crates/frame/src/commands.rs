//! Commands from the control side of a device to its port.
//!
//! Workers pass commands on. They know those of every kind of port; all others are opaque to them, and have their types in
//! the crate of the port.

use core::any::Any;
use std::sync::Arc;

use crate::steer::Steering;

/// Command for a port, executed between two rounds.
pub enum PortCommand {
    /// Sets the maximum number of bytes behind the Ethernet header, on all parts of the port; answered with
    /// [`PortReply::MtuSet`].
    SetMtu(u16),
    /// Sets the hash of packets to the guest, which the port also reports to the guest; `None` disables it. The workers
    /// use it as well. Answered with [`PortReply::Hashing`].
    Hash(Option<Arc<Steering>>),
    /// Command for one queue, of a type that the port's crate defines.
    Queue(Box<dyn Any + Send>),
    /// Command for all parts of the port, of a type that the port's crate defines.
    WholePort(Arc<dyn Any + Send + Sync>),
}

/// Port's answer to a [`PortCommand`].
pub enum PortReply {
    /// [`PortCommand::SetMtu`] succeeded.
    MtuSet,
    /// [`PortCommand::Hash`] succeeded.
    Hashing,
    /// Answer to an opaque command, of a type that the port's crate defines.
    Own(Box<dyn Any + Send>),
    /// Command that this port does not support.
    Unsupported,
}
