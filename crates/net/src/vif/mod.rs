//! Handshake of a vif over xenbus, on both sides, and the keys that a toolstack writes for it.
//!
//! Each side reads both states and executes the step that is due ([`steps`]). [`backend`] and [`frontend`]
//! do the store access, the grants and the event channels, on any platform.

pub mod backend;
pub mod connect;
pub mod controls;
mod ctrl_ring;
pub mod frontend;
pub mod toolstack;
pub mod values;
mod windows;

use std::sync::Arc;

use ringfence_access::staging::StagingPool;
use ringfence_wire::xenbus::DeviceId;
pub use ringfence_xenbus::connect::WINDOW_ENTRIES_MAX;
pub use ringfence_xenbus::steps;

use crate::ctrl::record::CtrlRecord;
use crate::netback::QueueRecords;
use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::port::Port;

/// Owner of the ports: the datapath workers of a driver domain or of a frontend.
pub trait PortHost {
    /// Adds the port of a connected device.
    fn attach(&mut self, device: &DeviceId, port: Box<dyn Port>);

    /// Removes a device's port. When it returns, the port was dropped and no memory of the peer is mapped or
    /// used. Repeated calls have no effect.
    fn detach(&mut self, device: &DeviceId);

    /// Executes a command on the port of a queue. The result is `None` if there is no port, or the host does not
    /// support control rings.
    fn execute(
        &mut self,
        device: &DeviceId,
        queue: u16,
        command: PortCommand,
    ) -> Option<PortReply> {
        drop((device, queue, command));
        None
    }

    /// Returns the crash journals of a queue, for a host that another process can take over. They are the same
    /// for the same queue until it is detached.
    fn records(&mut self, device: &DeviceId, queue: u32) -> Option<QueueRecords> {
        let _ = (device, queue);
        None
    }

    /// Returns the crash journal of the control ring, with the rules of [`PortHost::records`].
    fn ctrl_record(&mut self, device: &DeviceId) -> Option<CtrlRecord> {
        let _ = device;
        None
    }

    /// Returns the pools of staged pages that the device shares with others.
    fn staging_pools(&mut self, device: &DeviceId) -> Vec<Arc<StagingPool>> {
        let _ = device;
        Vec::new()
    }
}
