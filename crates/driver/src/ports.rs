//! Ports of a device: the record of a device's port in a switch, and its attachment.
//!
//! [`PortBinding`] lets the vif life cycle ([`PortHost`]) add a device's port to the workers and
//! remove it. [`PortEntry`] records the port's id. [`Retired`] keeps the counters of removed ports.

use std::collections::BTreeMap;

use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::port::Port;
use ringfence_net::vif::PortHost;
use ringfence_switch::dataplane::{DataplaneHandle, PortId};
use ringfence_switch::forwarding::PortPolicy;
use ringfence_wire::xenbus::DeviceId;

/// Record of a device's port. Empty while the device is not connected.
#[derive(Debug, Default)]
pub struct PortEntry {
    port: Option<PortId>,
}

impl PortEntry {
    /// Returns the id of the device's port, if it has one.
    pub fn port(&self) -> Option<PortId> {
        self.port
    }

    /// Clears the entry if it has the port `gone`. Returns `true` if so.
    pub fn vacate(&mut self, gone: PortId) -> bool {
        self.port.take_if(|port| *port == gone).is_some()
    }
}

/// Sums of the counters of removed ports.
#[derive(Debug, Default)]
pub struct Retired(BTreeMap<&'static str, u64>);

impl Retired {
    /// Adds the counters of a port's parts, and drops them. No page of the guest is mapped when
    /// this returns.
    pub fn retire(&mut self, parts: Vec<Box<dyn Port>>) {
        for port in parts {
            for (name, count) in port.counters().named() {
                *self.0.entry(name).or_default() += count;
            }
        }
    }

    /// Iterates over the sums by counter name.
    pub fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.0.iter().map(|(name, count)| (*name, *count))
    }
}

/// Attaches one device's port to the workers, and detaches it.
pub struct PortBinding<'a> {
    pub entry: &'a mut PortEntry,
    pub retired: &'a mut Retired,
    pub dataplane: DataplaneHandle,
    pub policy: PortPolicy,
}

/// Returns a device's name for operators: `vif5.0`.
pub fn device_name(device: &DeviceId) -> String {
    format!("{}{}.{}", device.kind.as_str(), device.frontend, device.handle)
}

impl PortHost for PortBinding<'_> {
    fn attach(&mut self, device: &DeviceId, port: Box<dyn Port>) {
        self.detach(device);
        let name = device_name(device);
        match self.dataplane.add_port(port, self.policy.clone(), &name) {
            Ok(id) => self.entry.port = Some(id),
            Err(error) => tracing::error!(%name, %error, "the port was not added"),
        }
    }

    fn execute(&mut self, _: &DeviceId, queue: u16, order: PortCommand) -> Option<PortReply> {
        self.dataplane.execute(self.entry.port?, queue, order)
    }

    fn detach(&mut self, _: &DeviceId) {
        if let Some(id) = self.entry.port.take() {
            self.retired.retire(self.dataplane.remove_port(id));
        }
    }
}
