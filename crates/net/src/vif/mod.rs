//! The xenbus handshake of a vif, on both sides, and what a toolstack does for it.
//!
//! Both sides look at both states and do what is due ([`steps`]); what is done to the store, to
//! grants and to event channels is in [`backend`] and [`frontend`]. Neither knows which platform it
//! runs on.

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
pub use ringfence_xenbus::steps;
pub use windows::WINDOW_ENTRIES_MAX;

use crate::ctrl::record::CtrlRecord;
use crate::netback::QueueRecords;
use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::port::Port;

/// Whoever runs the ports: the data plane of a driver domain or of a frontend.
pub trait PortHost {
    /// Takes a connected port into operation.
    fn attach(&mut self, device: &DeviceId, port: Box<dyn Port>);

    /// Takes a device's port out of operation. When this returns the port was dropped: nothing of
    /// the peer's is mapped or used any more. Idempotent.
    fn detach(&mut self, device: &DeviceId);

    /// Has the port of that queue carry out an order; `None` when it is not there, or when this host
    /// has no use for a control ring.
    fn execute(
        &mut self,
        device: &DeviceId,
        queue: u16,
        command: PortCommand,
    ) -> Option<PortReply> {
        drop((device, queue, command));
        None
    }

    /// Pages in which a record of a queue is kept, for a host that can be taken over by another
    /// process; the same pages for the same queue until it is detached.
    fn records(&mut self, device: &DeviceId, queue: u32) -> Option<QueueRecords> {
        let _ = (device, queue);
        None
    }

    /// The same for the control ring.
    fn ctrl_record(&mut self, device: &DeviceId) -> Option<CtrlRecord> {
        let _ = device;
        None
    }

    /// Pools of staged pages that the device shares with others; none for a host of one device.
    fn staging_pools(&mut self, device: &DeviceId) -> Vec<Arc<StagingPool>> {
        let _ = device;
        Vec::new()
    }
}
