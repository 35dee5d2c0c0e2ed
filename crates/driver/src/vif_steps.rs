//! Steps of a vif: its handshake, its control ring, and the end of its port.

use std::collections::BTreeMap;
use std::sync::Arc;

use ringfence_access::staging::StagingPool;
use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::port::Port;
use ringfence_net::ctrl::record::CtrlRecord;
use ringfence_net::netback::QueueRecords;
use ringfence_net::vif::PortHost;
use ringfence_net::vif::backend::{Life, VifBackend};
use ringfence_platform::Platform;
use ringfence_switch::dataplane::PortGone;
use ringfence_wire::xenbus::DeviceId;
use ringfence_xenstore::{StoreClient, StoreError};

use crate::devices::Look;
use crate::domain::{Backends, DriverDomain, OtherPort, look_of};
use crate::ports::{PortBinding, device_name};
use crate::vifs::{AfterControl, Vif, Vifs};

/// Counter of a guest's rule violations that closed its device.
const PENALTIES: &str = "device_condemned";

/// Port host of one vif: the operations that its handshake has on the driver domain.
struct VifHost<'a, D: DriverDomain> {
    binding: PortBinding<'a>,
    domain: &'a mut D,
    others: &'a mut BTreeMap<DeviceId, Vif<D::Vif>>,
    displaced: &'a mut Vec<DeviceId>,
}

impl<D: DriverDomain> VifHost<'_, D> {
    /// Removes vifs with the same Ethernet address from the switch. The vif that connected last keeps the
    /// address: a guest that migrates to its own host connects again before its old domain is destroyed.
    fn take_address(&mut self, device: &DeviceId) {
        let Some(mac) = self.binding.policy.mac else { return };
        for (other, vif) in self.others.iter_mut() {
            if !self.domain.is_held_to(&vif.own, mac) {
                continue;
            }
            let Some(id) = vif.entry.port() else { continue };
            vif.entry.vacate(id);
            self.binding.retired.retire(self.binding.dataplane.remove_port(id));
            vif.backend.close_with_penalty(format!(
                "{} has its Ethernet address now",
                device_name(device)
            ));
            self.displaced.push(*other);
        }
    }
}

impl<D: DriverDomain> PortHost for VifHost<'_, D> {
    fn attach(&mut self, device: &DeviceId, port: Box<dyn Port>) {
        self.take_address(device);
        self.binding.attach(device, port);
    }

    fn detach(&mut self, device: &DeviceId) {
        self.binding.detach(device);
        self.domain.remove_records(device);
    }

    fn execute(
        &mut self,
        device: &DeviceId,
        queue: u16,
        command: PortCommand,
    ) -> Option<PortReply> {
        self.binding.execute(device, queue, command)
    }

    fn records(&mut self, device: &DeviceId, queue: u32) -> Option<QueueRecords> {
        self.domain.records(device, queue)
    }

    fn ctrl_record(&mut self, device: &DeviceId) -> Option<CtrlRecord> {
        self.domain.ctrl_record(device)
    }

    fn staging_pools(&mut self, device: &DeviceId) -> Vec<Arc<StagingPool>> {
        self.domain.staging_pools(device)
    }
}

impl<P: Platform, D: DriverDomain> Backends<P, D> {
    /// Serves a vif once.
    pub(crate) fn look_at_vif(
        &mut self,
        device: &DeviceId,
        store: &mut StoreClient,
    ) -> Result<Look, StoreError> {
        D::refresh(self, device, store)?;
        let Some(mut vif) = self.vifs.list.remove(device) else { return Ok(Look::Over) };
        let problem = D::attach_vif(self, device, &mut vif).err();
        if let Some(why) = problem.as_ref().filter(|_| problem != vif.problem) {
            tracing::error!(name = %device_name(device), %why, "it is not served");
        }
        vif.problem = problem;
        let failed = vif.problem.is_some();
        let life = self.advance_vif(device, &mut vif, store);
        self.vifs.list.insert(*device, vif);
        Ok(look_of::<D>(life?, failed))
    }

    /// Advances the handshake of a vif.
    fn advance_vif(
        &mut self,
        device: &DeviceId,
        vif: &mut Vif<D::Vif>,
        store: &mut StoreClient,
    ) -> Result<Life, StoreError> {
        let platform = Arc::clone(&self.platform);
        let before = vif.backend.connection().copied();
        let penalties = vif.backend.rules().get(PENALTIES);
        let Some((backend, mut host)) = self.split(vif) else { return Ok(Life::Alive) };
        let life = backend.look(&*platform, store, &mut host);
        if vif.backend.connection().copied() != before {
            self.domain.vif_changed(device, vif);
        }
        if vif.backend.rules().get(PENALTIES) > penalties {
            let why =
                vif.backend.penalized().unwrap_or("see the driver domain's messages").to_owned();
            self.domain.vif_penalized(device, &why);
        }
        life
    }

    /// Returns the handshake of a vif, and the port host for it. Returns `None` if the vif is not attached.
    fn split<'a>(
        &'a mut self,
        vif: &'a mut Vif<D::Vif>,
    ) -> Option<(&'a mut VifBackend, VifHost<'a, D>)> {
        let Vif { backend, entry, own, .. } = vif;
        let dataplane = self.domain.dataplane(own)?.clone();
        let policy = self.domain.port_policy(own);
        let Vifs { list, displaced, retired_ports, .. } = &mut self.vifs;
        let binding = PortBinding { entry, retired: retired_ports, dataplane, policy };
        let host = VifHost { binding, domain: &mut self.domain, others: list, displaced };
        Some((backend, host))
    }

    /// Serves the control ring of a vif once, if it has one.
    pub(crate) fn serve_control(&mut self, device: &DeviceId) -> AfterControl {
        let Some(mut vif) = self.vifs.list.remove(device) else { return AfterControl::Wait };
        let served = self.split(&mut vif);
        let after = served.map_or(AfterControl::Wait, |(backend, mut host)| {
            match (backend.serve_control(&mut host), backend.penalized()) {
                (true, _) => AfterControl::Again,
                (false, Some(_)) => AfterControl::Look,
                (false, None) => AfterControl::Wait,
            }
        });
        self.vifs.list.insert(*device, vif);
        after
    }

    /// Handles a port that ended on a worker. Returns the device that is due then.
    pub(crate) fn retire_port(&mut self, gone: PortGone) -> Option<DeviceId> {
        let PortGone { id, name, reason, ports, .. } = gone;
        // Unmap the guest's pages before the guest or its launcher is notified.
        self.vifs.retired_ports.retire(ports);
        // Dataplanes number their ports independently, so the name counts as well.
        let is_it = |device: &DeviceId, vif: &Vif<D::Vif>| {
            vif.entry.port() == Some(id) && name == device_name(device)
        };
        let Some((device, vif)) =
            self.vifs.list.iter_mut().find(|(device, vif)| is_it(device, vif))
        else {
            return D::other_port_gone(self, &OtherPort { id, name, reason });
        };
        vif.entry.vacate(id);
        let device = *device;
        vif.backend.close_with_penalty(reason.to_string());
        self.domain.vif_port_gone(&device, &reason);
        Some(device)
    }

    /// Removes everything that was created for a vif that is over.
    pub(crate) fn forget_vif(&mut self, device: &DeviceId) {
        let Some(mut vif) = self.vifs.list.remove(device) else { return };
        if let Some((backend, mut host)) = self.split(&mut vif) {
            backend.let_go(&mut host);
        }
        for (rule, count) in vif.backend.rules().all() {
            *self.vifs.retired_rules.entry(rule).or_default() += count;
        }
        self.domain.vif_removed(device, vif.own);
    }

    /// Starts to close a vif, for the reason `why`. The vif is due then.
    pub(crate) fn close_vif(&mut self, device: &DeviceId, why: &str) {
        if let Some(vif) = self.vifs.list.get_mut(device) {
            vif.backend.close_with_penalty(why.to_owned());
        }
    }
}
