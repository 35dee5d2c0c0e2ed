//! Ports of devices in the data plane.

use std::collections::{BTreeMap, HashMap};

use ringfence_net::dataplane::{DataplaneHandle, PortId};
use ringfence_net::port::Port;
use ringfence_net::switch::PortPolicy;
use ringfence_net::vif::PortHost;
use ringfence_wire::xenbus::DeviceId;

/// Which port belongs to which device, and what those that are gone had counted.
#[derive(Debug, Default)]
pub(super) struct Ports {
    ids: HashMap<DeviceId, PortId>,
    retired: BTreeMap<&'static str, u64>,
}

impl Ports {
    /// Whose port this was; it is forgotten.
    pub(super) fn forget(&mut self, id: PortId) -> Option<DeviceId> {
        let device = self.ids.iter().find(|(_, port)| **port == id).map(|(device, _)| *device)?;
        self.ids.remove(&device);
        Some(device)
    }

    /// Counts what a port that is gone had counted, and drops it: nothing of the guest's is mapped
    /// when this returns.
    pub(super) fn retire(&mut self, port: Option<Box<dyn Port>>) {
        let Some(port) = port else { return };
        for (name, count) in port.counters().named() {
            *self.retired.entry(name).or_default() += count;
        }
    }

    /// The counts of all ports that are gone.
    pub(super) fn retired(&self) -> &BTreeMap<&'static str, u64> {
        &self.retired
    }
}

/// Attaches one device's port to the switch.
pub(super) struct SwitchHost<'a> {
    pub(super) ports: &'a mut Ports,
    pub(super) dataplane: &'a DataplaneHandle,
    pub(super) mac: [u8; 6],
}

impl PortHost for SwitchHost<'_> {
    fn attach(&mut self, device: &DeviceId, port: Box<dyn Port>) {
        let policy = PortPolicy { mac: Some(self.mac), ..PortPolicy::default() };
        let name = format!("vif{}.{}", device.frontend, device.handle);
        match self.dataplane.add_port(port, policy, &name) {
            Ok(id) => self.ids_insert(device, id),
            Err(error) => tracing::error!(%name, %error, "the port was not added"),
        }
    }

    fn detach(&mut self, device: &DeviceId) {
        if let Some(id) = self.ports.ids.remove(device) {
            self.ports.retire(self.dataplane.remove_port(id));
        }
    }
}

impl SwitchHost<'_> {
    fn ids_insert(&mut self, device: &DeviceId, id: PortId) {
        if let Some(old) = self.ports.ids.insert(*device, id) {
            self.ports.retire(self.dataplane.remove_port(old));
        }
    }
}
