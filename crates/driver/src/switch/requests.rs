//! Requests of launchers: a guest is attached, gets a port of the host and disks, and is detached.
//!
//! The end of a connection detaches its guest: all its nodes, ports and addresses are removed.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use ringfence_block::blkback::BlkbackOptions;
use ringfence_block::storage::Disk;
use ringfence_block::vbd::backend::VbdBackend;
use ringfence_block::vbd::toolstack as vbd_toolstack;
use ringfence_net::vif::backend::{BackendOptions, VifBackend};
use ringfence_net::vif::toolstack;
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::{DomId, Platform};
use ringfence_sandbox::channel::expect_fds;
use ringfence_switch::forwarding::PortPolicy;
use ringfence_sys::descriptors::{Descriptors, is_character_device};
use ringfence_sys::tap::TapOffloads;
use ringfence_wire::xenbus::DeviceId;
use ringfence_xenstore::StoreAccess;

use super::addresses::Assigned;
use super::domain::{Guest, Leg, SwitchDomain, SwitchVbd, SwitchVif, vbd_of, vif_of};
use super::media::{self, OpenedMedium};
use super::nodes::{self, NAMES_ROOT, filter_of};
use crate::domain::Control;
use crate::host_leg::{HostLeg, HostTap};
use crate::ports::device_name;
use crate::replacement::{MakeDisk, Replacement};
use crate::switchboard::{
    AttachRequest, Attached, DISKS_MAX, DiskRequest, DriverStats, FromDriver, LegConfig, Medium,
    ToDriver, VERSION,
};
use crate::vbds::{Vbd, ring_counts, ring_levels};
use crate::vifs::Vif;

/// Domain that has no device: the driver domain itself.
const NOBODY: DomId = DomId(0);

/// Device number of `/dev/net/tun`.
const TUN: (u32, u32) = (10, 200);

fn text(error: &dyn std::fmt::Display) -> String {
    error.to_string()
}

/// Request for a port of the host.
struct LegRequest {
    /// Name of the host's interface.
    name: String,
    offloads: TapOffloads,
    /// Maximum length of a frame without its Ethernet header, in bytes.
    mtu: u16,
}

impl<P: Platform> Control<P, SwitchDomain> {
    /// Serves one request of each launcher. Detaches guests whose launchers are gone, do not read,
    /// or were silent for too long.
    pub(super) fn serve_launchers(&mut self) {
        let now = Instant::now();
        let mut at = 0;
        while at < self.backends.domain.guests.len() {
            if self.serve_launcher(at, now) {
                at += 1;
            } else {
                let guest = self.backends.domain.guests.swap_remove(at);
                self.detach(guest);
            }
        }
    }

    /// Serves one message. Returns `false` if the connection must be closed.
    fn serve_launcher(&mut self, at: usize, now: Instant) -> bool {
        let domain = &mut self.backends.domain;
        let Some(guest) = domain.guests.get_mut(at) else { return false };
        let launcher = &mut guest.launcher;
        match launcher.channel.try_receive_with::<ToDriver>(launcher.fds_max()) {
            Ok(None) => {}
            Ok(Some((message, fds))) if launcher.is_admitted() => {
                launcher.touch(now);
                if let Some(answer) = self.handle_request(at, message, fds) {
                    self.guest(at).launcher.send(&answer, &[]);
                }
            }
            Ok(Some((message, fds))) => {
                if let Err(why) = domain.admission.check(&message, &fds) {
                    tracing::warn!(%why, "a connection was not admitted");
                    launcher.send(&FromDriver::Refused(why), &[]);
                    return false;
                }
                launcher.admit();
                launcher.touch(now);
            }
            Err(_) => return false,
        }
        let guest = self.guest(at);
        if guest.launcher.is_slow() {
            tracing::warn!("a launcher that does not read its messages was disconnected");
        }
        !guest.launcher.is_slow() && guest.expires().is_none_or(|expires| expires > now)
    }

    fn guest(&mut self, at: usize) -> &mut Guest {
        &mut self.backends.domain.guests[at]
    }

    /// Handles a request. Returns the answer, unless it has been sent already.
    fn handle_request(
        &mut self,
        at: usize,
        message: ToDriver,
        fds: Descriptors,
    ) -> Option<FromDriver> {
        let answer_to = |done: Result<(), String>, answer: FromDriver| match done {
            Ok(()) => answer,
            Err(why) => FromDriver::Refused(why),
        };
        match message {
            ToDriver::Hello { .. } => Some(FromDriver::Refused("it was admitted before".into())),
            ToDriver::Attach(request) => self.attach(at, &request).err().map(FromDriver::Refused),
            ToDriver::HostLeg { name, offloads, mtu } => {
                let request = LegRequest { name, offloads: TapOffloads(offloads), mtu };
                Some(answer_to(self.add_leg(at, &request, fds), FromDriver::LegAdded))
            }
            ToDriver::Disk(request) => {
                Some(answer_to(self.add_disk(at, &request, fds), FromDriver::DiskAdded))
            }
            ToDriver::Snapshot { handle, chain, options } => {
                let medium = Medium::Image { chain: *chain, options };
                let begun = self.begin_snapshot(at, handle, medium, fds);
                begun.err().map(|why| FromDriver::DiskChanged { handle, problem: Some(why) })
            }
            ToDriver::ResizeDisk { handle, bytes } => {
                let begun = self.begin_change(at, handle, media::resized(bytes));
                begun.err().map(|why| FromDriver::DiskChanged { handle, problem: Some(why) })
            }
            ToDriver::Dialled { handle, problem } => {
                self.deliver_connection(at, handle, fds, problem);
                None
            }
            ToDriver::Stats => Some(FromDriver::Stats(Box::new(self.stats(None)))),
            ToDriver::GuestStats => {
                let guest = self.guest(at).domain.unwrap_or(NOBODY);
                Some(FromDriver::Stats(Box::new(self.stats(Some(guest)))))
            }
            ToDriver::Listen => {
                self.backends.domain.replace_listener(fds).err().map(FromDriver::Refused)
            }
        }
    }

    fn attach(&mut self, at: usize, request: &AttachRequest) -> Result<(), String> {
        if request.version != VERSION {
            return Err(format!(
                "the switch is served by Ringfence {VERSION}, this is {}; use another --switch",
                request.version
            ));
        }
        if self.guest(at).domain.is_some() {
            return Err("this connection has a guest already".to_owned());
        }
        let (domain, connection) =
            self.backends.domain.hub.admit(None, false).map_err(|e| text(&e))?;
        let names = connection
            .try_clone()
            .map_err(|e| text(&e))
            .and_then(|copy| LocalPlatform::connect(copy).map_err(|e| text(&e)))
            .and_then(|guest| guest.store_connection().map_err(|e| text(&e)))?;
        let attached = if request.interface {
            self.add_vif(at, domain, request)?
        } else {
            Attached { domain: domain.0, mac: [0; 6], addresses: vec![], host_leg: None }
        };
        let guest = self.guest(at);
        guest.domain = Some(domain);
        let answer = FromDriver::Attached(Box::new(attached));
        guest.launcher.send(&answer, &[connection.as_fd(), names.as_fd()]);
        Ok(())
    }

    /// Creates the vif of a guest that is being attached, and reserves the host's addresses.
    fn add_vif(
        &mut self,
        at: usize,
        domain: DomId,
        request: &AttachRequest,
    ) -> Result<Attached, String> {
        let mode =
            request.mode().ok_or_else(|| format!("`{}` is no mode of this build", request.mode))?;
        let offloads = request
            .offloads()
            .ok_or_else(|| format!("`{}` are no offloads of this build", request.offloads))?;
        let plan = &mut self.backends.domain.plan;
        plan.avoid(&request.avoid);
        let assigned =
            plan.assign(domain.0, request.mac, &request.addresses).map_err(|e| text(&e))?;
        let leg = match request.host_leg.then(|| plan.assign_host_leg()).transpose() {
            Ok(leg) => leg,
            Err(error) => {
                plan.release(&assigned);
                return Err(format!("the host has a leg on this switch already ({error})"));
            }
        };
        let device = vif_of(domain);
        if let Err(why) = self.create_vif(&device, &assigned, request) {
            let plan = &mut self.backends.domain.plan;
            plan.release(&assigned);
            leg.iter().for_each(|leg| plan.release(leg));
            return Err(why);
        }
        let backend = VifBackend::new(device, BackendOptions { mode, mtu: request.mtu })
            .with_offloads(offloads)
            .with_queues(request.queues);
        let attached = Attached {
            domain: domain.0,
            mac: assigned.mac,
            addresses: assigned.addresses.clone(),
            host_leg: leg
                .as_ref()
                .map(|leg| LegConfig { mac: leg.mac, addresses: leg.addresses.clone() }),
        };
        let filter = Arc::new(filter_of(&assigned, request));
        let vif = SwitchVif { assigned, filter, join: request.coalesce };
        self.backends.vifs.list.insert(device, Vif::new(backend, vif));
        let guest = self.guest(at);
        guest.leg = leg.map(|assigned| Leg { assigned, port: None });
        guest.name.clone_from(&request.name);
        Ok(attached)
    }

    /// Creates the nodes of a vif and watches them.
    fn create_vif(
        &mut self,
        device: &DeviceId,
        assigned: &Assigned,
        request: &AttachRequest,
    ) -> Result<(), String> {
        nodes::create_vif(&mut self.store, device, assigned, request)?;
        self.devices.register(device, &mut self.store, &self.backends).map_err(|error| text(&error))
    }

    fn add_leg(&mut self, at: usize, request: &LegRequest, fds: Descriptors) -> Result<(), String> {
        if fds.is_empty() {
            return Err("the host's leg has no TAP".to_owned());
        }
        if !fds.each().all(|fd| is_character_device(fd, TUN.0, TUN.1)) {
            return Err("what came for the host's leg is no TAP".to_owned());
        }
        let vif = self.guest(at).vif().and_then(|device| self.backends.vifs.list.get(&device));
        let join = vif.is_none_or(|vif| vif.own.join);
        let policy = PortPolicy { join, ..PortPolicy::default() };
        let SwitchDomain { guests, dataplane, .. } = &mut self.backends.domain;
        let leg = guests[at].leg.as_mut().filter(|leg| leg.port.is_none());
        let leg = leg.ok_or("no leg of the host was asked for")?;
        let LegRequest { name, offloads, mtu } = request;
        let tap = HostTap { queues: fds.into_vec(), offloads: *offloads, mtu: *mtu };
        let (name, counters) = (format!("host:{name}"), self.backends.platform.counters());
        let port = HostLeg::attach(dataplane, name, tap, policy, counters);
        leg.port = Some(port.map_err(|e| text(&e))?);
        Ok(())
    }

    /// Creates the backend of a disk.
    fn add_disk(
        &mut self,
        at: usize,
        request: &DiskRequest,
        fds: Descriptors,
    ) -> Result<(), String> {
        let guest = self.guest(at);
        let frontend = guest.domain.ok_or("a guest comes before its disks")?;
        let handle = request.handle;
        if handle != guest.disks || usize::from(handle) >= DISKS_MAX {
            return Err(format!("a guest has at most {DISKS_MAX} disks, in order"));
        }
        let device = vbd_of(frontend, handle);
        let wake = Arc::new(self.backends.vbds.notifier(device));
        let OpenedMedium { mode, disk, config, dialer } =
            media::open(request, fds, wake.clone(), &self.backends.domain.rings)?;
        vbd_toolstack::create(&mut self.store, &device, config).map_err(|e| text(&e))?;
        let options = BlkbackOptions { mode, ..BlkbackOptions::default() };
        let backend = VbdBackend::new(device, options, disk, wake);
        self.devices.register(&device, &mut self.store, &self.backends).map_err(|e| text(&e))?;
        self.backends.vbds.list.insert(device, Vbd::new(backend, SwitchVbd { handle, dialer }));
        self.guest(at).disks += 1;
        Ok(())
    }

    /// Begins to replace a disk by an image above it. The answer follows.
    fn begin_snapshot(
        &mut self,
        at: usize,
        handle: u16,
        medium: Medium,
        fds: Descriptors,
    ) -> Result<(), String> {
        let (files, rings) = (fds.into_vec(), Arc::clone(&self.backends.domain.rings));
        let make = move |_: &Arc<dyn Disk>| {
            media::open_storage(&medium, files, Arc::new(|| {}), &rings).map(|(disk, _)| disk)
        };
        self.begin_change(at, handle, Box::new(make))
    }

    /// Begins to replace a disk. The answer follows.
    fn begin_change(&mut self, at: usize, handle: u16, make: MakeDisk) -> Result<(), String> {
        let device = self.guest(at).domain.map(|domain| vbd_of(domain, handle));
        let device = device.ok_or("a guest comes before its disks")?;
        let vbd = self.backends.vbds.list.get_mut(&device);
        let vbd = vbd.ok_or_else(|| format!("there is no disk {handle}"))?;
        Replacement::begin(vbd, make)?;
        self.devices.mark(&device);
        Ok(())
    }

    /// Passes a connection, or the reason why there is none, to the disk that requested it.
    fn deliver_connection(
        &mut self,
        at: usize,
        handle: u16,
        fds: Descriptors,
        problem: Option<String>,
    ) {
        let device = self.guest(at).domain.map(|domain| vbd_of(domain, handle));
        let vbd = device.and_then(|device| self.backends.vbds.list.get(&device));
        let Some(dialer) = vbd.and_then(|vbd| vbd.own.dialer.as_ref()) else { return };
        dialer.deliver(match (expect_fds(fds), problem) {
            (Ok([stream]), None) => Ok(stream),
            (_, problem) => Err(std::io::Error::other(problem.unwrap_or_default())),
        });
    }

    /// Removes all traces of a guest whose launcher is gone.
    fn detach(&mut self, guest: Guest) {
        for device in guest.vbds() {
            self.backends.forget_vbd(&device);
            self.devices.unregister(&device, &mut self.store, &self.backends);
            if let Err(error) = vbd_toolstack::remove(&mut self.store, &device) {
                tracing::warn!(%error, "the nodes of a disk were not removed");
            }
        }
        let vif = guest.vif().filter(|device| self.backends.vifs.list.contains_key(device));
        guest.launcher.channel.dispose();
        let domain = &mut self.backends.domain;
        if let Some(leg) = guest.leg {
            leg.port.map(|leg| domain.dataplane.remove_port(leg.port));
            domain.plan.release(&leg.assigned);
        }
        if guest.domain.is_some() {
            domain.note_departure();
        }
        let Some(device) = vif else { return };
        self.backends.forget_vif(&device);
        self.devices.unregister(&device, &mut self.store, &self.backends);
        if let Err(error) = toolstack::remove(&mut self.store, &device) {
            tracing::warn!(%error, "the nodes of a guest were not removed");
        }
        if let Some(name) = guest.name {
            // The node is gone already if the guest's domain was released before.
            let _ = self.store.rm(&format!("{NAMES_ROOT}/{name}"));
        }
    }

    /// Returns the counters of the switch, with the devices of one guest or of all. Counters of zero are left out: the
    /// length of a message is bounded, and a switch may have many ports.
    fn stats(&self, only: Option<DomId>) -> DriverStats {
        let backends = &self.backends;
        let (vifs, vbds) = (&backends.vifs, &backends.vbds);
        let is_wanted = |device: &DeviceId| only.is_none_or(|guest| guest == device.frontend);
        let own_vifs = || vifs.list.iter().filter(|(device, _)| is_wanted(device));
        let own_vbds = || vbds.list.iter().filter(|(device, _)| is_wanted(device));
        let all_ports = match only {
            None => backends.domain.dataplane.stats(),
            Some(_) => own_vifs()
                .find_map(|(_, vif)| vif.entry.port())
                .and_then(|port| backends.domain.dataplane.stats_of(Some(port))),
        };
        let all_ports = all_ports.map(|stats| stats.ports).unwrap_or_default();
        let mut levels: BTreeMap<_, _> = own_vifs()
            .map(|(device, vif)| {
                let port = all_ports.iter().find(|port| Some(port.id) == vif.entry.port());
                (device_name(device), nonzero(vif.levels(port)))
            })
            .collect();
        levels.extend(
            own_vbds().map(|(device, vbd)| (device_name(device), nonzero(ring_levels(&vbd.rings)))),
        );
        let ports = all_ports.into_iter().map(|port| (port.name, nonzero(port.counters)));
        let of_vifs = own_vifs().map(|(device, vif)| (device, vif.backend.rules().all()));
        let of_vbds = own_vbds().map(|(device, vbd)| (device, vbd.backend.rules().all()));
        let rules = of_vifs.chain(of_vbds).map(|(device, broken)| (device_name(device), broken));
        let connected = own_vbds().filter(|(_, vbd)| !vbd.rings.is_empty());
        let disks = connected.map(|(device, vbd)| {
            let mut sums = BTreeMap::<&'static str, u64>::new();
            for (name, count) in vbd.rings.iter().flat_map(ring_counts) {
                *sums.entry(name).or_default() += count;
            }
            (device_name(device), nonzero(sums))
        });
        let mut stats = DriverStats {
            path: owned(backends.platform.counters().values().named()),
            ports: ports.collect(),
            disks: disks.collect(),
            levels,
            rules: rules
                .filter(|(_, broken)| !broken.is_empty())
                .map(|(name, broken)| (name, owned(broken)))
                .collect(),
            hub: owned(backends.domain.hub.faults()),
        };
        if only.is_none() {
            self.add_gone(&mut stats);
        }
        stats
    }

    /// Adds the sums over ports and guests that are gone.
    fn add_gone(&self, stats: &mut DriverStats) {
        let (vifs, vbds) = (&self.backends.vifs, &self.backends.vbds);
        stats.ports.insert("gone".to_owned(), nonzero(vifs.retired_ports.counts()));
        let mut gone = vifs.retired_rules.clone();
        for (rule, count) in &vbds.retired_rules {
            *gone.entry(rule).or_default() += count;
        }
        if !gone.is_empty() {
            stats.rules.insert("gone".to_owned(), owned(gone));
        }
    }
}

fn owned(counts: impl IntoIterator<Item = (&'static str, u64)>) -> BTreeMap<String, u64> {
    counts.into_iter().map(|(name, count)| (name.to_owned(), count)).collect()
}

fn nonzero(counts: impl IntoIterator<Item = (&'static str, u64)>) -> BTreeMap<String, u64> {
    owned(counts.into_iter().filter(|(_, count)| *count > 0))
}
