//! A device's place in a data plane.

use std::collections::BTreeMap;

use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::port::Port;
use ringfence_net::vif::PortHost;
use ringfence_switch::dataplane::{DataplaneHandle, PortId};
use ringfence_switch::forwarding::PortPolicy;
use ringfence_wire::xenbus::DeviceId;

/// The place; empty while the device is not connected.
#[derive(Debug, Default)]
pub(crate) struct Seat {
    port: Option<PortId>,
}

impl Seat {
    /// The port in it.
    pub(crate) fn port(&self) -> Option<PortId> {
        self.port
    }

    /// The port ended itself. True if it was this one's.
    pub(crate) fn vacate(&mut self, gone: PortId) -> bool {
        self.port.take_if(|port| *port == gone).is_some()
    }
}

/// What ports that are gone had counted.
#[derive(Debug, Default)]
pub(crate) struct Retired(BTreeMap<&'static str, u64>);

impl Retired {
    /// Adds what the parts of a port had counted, and drops them: nothing of the guest's is mapped
    /// when this returns.
    pub(crate) fn retire(&mut self, parts: Vec<Box<dyn Port>>) {
        for port in parts {
            for (name, count) in port.counters().named() {
                *self.0.entry(name).or_default() += count;
            }
        }
    }

    /// The counts.
    pub(crate) fn counts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.0.iter().map(|(name, count)| (*name, *count))
    }
}

/// Puts one device's port into its seat and takes it out again.
pub(crate) struct Usher<'a> {
    pub(crate) seat: &'a mut Seat,
    pub(crate) retired: &'a mut Retired,
    pub(crate) dataplane: &'a DataplaneHandle,
    pub(crate) policy: PortPolicy,
}

/// What operators call a device: `vif5.0`.
pub(crate) fn device_name(device: &DeviceId) -> String {
    format!("{}{}.{}", device.kind.as_str(), device.frontend, device.handle)
}

impl PortHost for Usher<'_> {
    fn attach(&mut self, device: &DeviceId, port: Box<dyn Port>) {
        self.detach(device);
        let name = device_name(device);
        match self.dataplane.add_port(port, self.policy.clone(), &name) {
            Ok(id) => self.seat.port = Some(id),
            Err(error) => tracing::error!(%name, %error, "the port was not added"),
        }
    }

    fn execute(&mut self, _: &DeviceId, queue: u16, command: PortCommand) -> Option<PortReply> {
        self.dataplane.order(self.seat.port?, queue, command)
    }

    fn detach(&mut self, _: &DeviceId) {
        if let Some(id) = self.seat.port.take() {
            self.retired.retire(self.dataplane.remove_port(id));
        }
    }
}
