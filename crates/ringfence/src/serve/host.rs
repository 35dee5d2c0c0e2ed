//! Vifs of the daemon: the attachment of each vif and its xenbus handshake.
//!
//! A vif is attached either to the daemon's switch, or to a TAP of the host. In the second case a
//! dataplane with two ports connects both, and a port that is full slows the other one down
//! (backpressure). Mode, offloads and the address filter of a vif are chosen when the vif is found, and
//! again when its guest starts over.
//!
//! The control thread owns everything here. Packets pass through the threads of the dataplane.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use ringfence_access::staging::StagingPool;
use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::port::Port;
use ringfence_frame::tap::TapPort;
use ringfence_net::ctrl::record::CtrlRecord;
use ringfence_net::netback::QueueRecords;
use ringfence_net::vif::PortHost;
use ringfence_net::vif::backend::{BackendOptions, Life, QUEUES_MAX, VifBackend};
use ringfence_net::vif::controls::VifPolicy;
use ringfence_platform::Platform;
use ringfence_switch::dataplane::{DataplaneHandle, PortGone, PortId};
use ringfence_switch::forwarding::{Fabric, Patch, PortPolicy, Switch};
use ringfence_wire::netif::keys;
use ringfence_wire::xenbus::DeviceId;
use ringfence_xenstore::{StoreClient, StoreError};

use super::bridge::{self, BridgeError};
use super::config::{Attach, Config, DeviceSettings};
use super::devices::{Look, Served};
use super::made::MadeInterfaces;
use super::records::Records;
use super::staging::Staging;
use super::vif::{Attached, TapAttachment, Vif};
use super::vif_keys::VifKeys;
use ringfence_driver::ports::{PortBinding, PortEntry, Retired, device_name};
use ringfence_driver::workers::{EndedPorts, worker_count};
use ringfence_hostnet::log::LineBudget;

/// Reasons for which a vif is not served for now.
#[derive(Debug, thiserror::Error)]
pub(super) enum VifError {
    #[error(transparent)]
    Bridge(#[from] BridgeError),
    #[error("{limit} devices {of} are served already; see `limits` in the configuration")]
    TooMany {
        /// Set that has reached its limit.
        of: &'static str,
        /// Number of devices that may be served.
        limit: u16,
    },
    /// Source check needs an address, and the toolstack wrote none.
    #[error(
        "the toolstack wrote no usable `mac` for it, to which it could be held: give it one, or set \
         `check-source = false` for it in the configuration"
    )]
    NoMac,
    #[error(transparent)]
    System(#[from] io::Error),
    #[error(transparent)]
    Port(#[from] ringfence_switch::dataplane::AddPortError),
}

/// Host's interface on the switch.
pub(super) struct HostLeg {
    pub(super) name: String,
    pub(super) port: PortId,
}

/// Next step after a control ring was served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum AfterControl {
    Wait,
    /// Serve the ring again after the others.
    Again,
    /// Advance the device, because it is to be closed.
    Look,
}

/// All vifs of the daemon.
pub(super) struct Vifs<P: Platform> {
    platform: Arc<P>,
    config: Config,
    records: Records,
    made: MadeInterfaces,
    pub(super) gone: EndedPorts,
    switch: Option<DataplaneHandle>,
    pub(super) host_leg: Option<HostLeg>,
    pub(super) list: BTreeMap<DeviceId, Vif>,
    /// Vifs that lost their Ethernet address to another vif, and that are due.
    pub(super) displaced: Vec<DeviceId>,
    pub(super) retired_ports: Retired,
    pub(super) retired_rules: BTreeMap<&'static str, u64>,
    pub(super) adopted: u64,
    staging: Staging,
}

/// Port host of one vif: what its handshake may do to the daemon.
struct Host<'a> {
    binding: PortBinding<'a>,
    records: &'a Records,
    /// Pools of staged pages: the guest's, and the one of all guests.
    staging: [Arc<StagingPool>; 2],
    /// All other vifs.
    others: &'a mut BTreeMap<DeviceId, Vif>,
    displaced: &'a mut Vec<DeviceId>,
}

impl Host<'_> {
    /// Removes vifs with the same Ethernet address from the switch. The vif that connected last keeps the
    /// address: a guest that migrates to its own host connects again before its old domain is destroyed.
    fn take_address(&mut self, device: &DeviceId) {
        let Some(mac) = self.binding.policy.mac else { return };
        for (other, vif) in self.others.iter_mut().filter(|(_, vif)| vif.is_held_to(mac)) {
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

impl PortHost for Host<'_> {
    fn attach(&mut self, device: &DeviceId, port: Box<dyn Port>) {
        self.take_address(device);
        self.binding.attach(device, port);
    }

    fn detach(&mut self, device: &DeviceId) {
        self.binding.detach(device);
        self.records.remove(&device_name(device));
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
        let name = device_name(device);
        let records = self.records.of(&name, queue);
        records
            .inspect_err(|error| {
                tracing::warn!(%name, %error, "no record is kept: it cannot be taken over exactly");
            })
            .ok()
    }

    fn staging_pools(&mut self, _: &DeviceId) -> Vec<Arc<StagingPool>> {
        self.staging.to_vec()
    }

    fn ctrl_record(&mut self, device: &DeviceId) -> Option<CtrlRecord> {
        let name = device_name(device);
        let record = self.records.of_control(&name);
        record
            .inspect_err(|error| {
                tracing::warn!(%name, %error, "what is staged cannot be taken over");
            })
            .ok()
    }
}

impl<P: Platform> Vifs<P> {
    pub(super) fn new(
        platform: Arc<P>,
        config: Config,
        records: Records,
        made: MadeInterfaces,
    ) -> io::Result<Vifs<P>> {
        Ok(Vifs {
            platform,
            config,
            records,
            made,
            gone: EndedPorts::new()?,
            switch: None,
            host_leg: None,
            list: BTreeMap::new(),
            displaced: Vec::new(),
            retired_ports: Retired::default(),
            retired_rules: BTreeMap::new(),
            adopted: 0,
            staging: Staging::new(),
        })
    }

    /// Applies a new configuration to all vifs.
    pub(super) fn reconfigure(&mut self, config: Config) {
        self.config = config;
        for vif in self.list.values_mut() {
            let settings = self.config.device(vif.keys.domain_name.as_deref(), vif.keys.mac);
            let options = BackendOptions { mode: settings.mode, mtu: vif.mtu };
            let policy = policy_of(&settings);
            vif.backend.reconfigure(options, settings.offloads, policy, settings.max_queues);
            vif.settings = settings;
        }
    }

    /// Removes interfaces that earlier daemons created and that are no longer needed: those of guests that
    /// were destroyed while no daemon ran, and those of guests that are on the switch now.
    pub(super) fn sweep(&self, store: &mut StoreClient) {
        self.made.sweep(&self.config.network, self.platform.domid(), store);
    }

    /// Creates the switch and the host's interface on it, if the configuration asks for them.
    pub(super) fn make_switch(&mut self) -> Result<(), VifError> {
        if self.config.network.attach != Attach::Switch {
            return Ok(());
        }
        let counters = Arc::clone(self.platform.counters());
        let dataplane = self.gone.start_workers(
            worker_count(QUEUES_MAX),
            || Fabric::Switch(Switch::new()),
            &counters,
        )?;
        self.switch = Some(dataplane.clone());
        let Some(name) = self.config.network.host_interface.clone() else { return Ok(()) };
        let tap = bridge::make_host_leg(&name)?;
        self.made.register(&name);
        let mtu = bridge::mtu_of(&name).unwrap_or(keys::MTU_DEFAULT);
        let port = TapPort::new(tap.fd, tap.offloads, mtu, counters);
        let policy = PortPolicy { addresses: 1024, ..PortPolicy::default() };
        let port = dataplane.add_port(Box::new(port), policy, &name)?;
        self.host_leg = Some(HostLeg { name, port });
        Ok(())
    }

    /// Returns the switch, if there is one.
    pub(super) fn switch(&self) -> Option<&DataplaneHandle> {
        self.switch.as_ref()
    }

    /// Handles a port that the dataplane closed. Returns the vif of the port, which is due then.
    pub(super) fn port_gone(&mut self, gone: PortGone) -> Option<DeviceId> {
        let PortGone { id, name, reason, ports, .. } = gone;
        // Unmap the pages before the guest is notified.
        self.retired_ports.retire(ports);
        for (device, vif) in &mut self.list {
            let of_guest = device_name(device);
            if name == of_guest && vif.entry.vacate(id) {
                vif.backend.close_with_penalty(reason.to_string());
                return Some(*device);
            }
            if name != tap_port_name(&of_guest) {
                continue;
            }
            if let Some(Attached::Tap(attached)) = &mut vif.attached
                && attached.port.take_if(|port| *port == id).is_some()
            {
                tracing::warn!(name = %of_guest, %reason, "its interface is of no more use");
                return Some(*device);
            }
        }
        if self.host_leg.take_if(|leg| leg.name == name && leg.port == id).is_some() {
            tracing::error!(%name, %reason, "the host has no leg on the switch any more");
        }
        None
    }

    /// Iterates over the vifs with a control ring. The descriptor is readable when the ring has requests.
    pub(super) fn controls(&self) -> impl Iterator<Item = (DeviceId, BorrowedFd<'_>)> {
        self.list.iter().filter_map(|(device, vif)| Some((*device, vif.backend.control_fd()?)))
    }

    /// Serves the control ring of a vif once, if it has one.
    pub(super) fn serve_control(&mut self, device: &DeviceId) -> AfterControl {
        let Some(mut vif) = self.list.remove(device) else { return AfterControl::Wait };
        let served = self.split(device, &mut vif);
        let after = served.map_or(AfterControl::Wait, |(backend, mut host)| {
            match (backend.serve_control(&mut host), backend.penalized()) {
                (true, _) => AfterControl::Again,
                (false, Some(_)) => AfterControl::Look,
                (false, None) => AfterControl::Wait,
            }
        });
        self.list.insert(*device, vif);
        after
    }

    /// Gives each vif the MTU that its TAP has now. An administrator may change that at any time.
    pub(super) fn follow_mtus(&mut self) {
        self.list.iter_mut().for_each(|(device, vif)| vif.follow_mtu(device));
    }

    /// Drops all vifs without closing them, so that the next daemon can take them over.
    pub(super) fn leave(&mut self) {
        self.list.clear();
    }

    /// Starts to close a device.
    pub(super) fn close(
        &mut self,
        device: &DeviceId,
        store: &mut StoreClient,
    ) -> Result<(), StoreError> {
        let Some(vif) = self.list.get_mut(device) else { return Ok(()) };
        vif.backend.close_with_penalty("the daemon ends".to_owned());
        self.look(device, store).map(drop)
    }

    /// Creates the record of a vif from the toolstack's keys.
    fn new_vif(&self, device: &DeviceId, keys: VifKeys) -> Vif {
        let settings = self.config.device(keys.domain_name.as_deref(), keys.mac);
        let bridge = self.bridge_of(&keys);
        // A TAP of an earlier daemon keeps the MTU that an administrator gave it.
        let earlier = bridge.and_then(|_| bridge::mtu_of(&device_name(device)));
        let mtu = earlier.or(keys.mtu).or_else(|| bridge::mtu_of(bridge?));
        let mtu = mtu.unwrap_or(keys::MTU_DEFAULT);
        let backend = VifBackend::new(*device, BackendOptions { mode: settings.mode, mtu })
            .with_offloads(settings.offloads)
            .with_queues(settings.max_queues)
            .with_policy(policy_of(&settings))
            .waiting_for_hotplug(keys.scripted);
        let (entry, attached, problem) = (PortEntry::default(), None, None);
        Vif { keys, settings, mtu, backend, problem, entry, attached, lines: LineBudget::new() }
    }

    /// Removes a vif from the list. Reads its keys again unless it is connected: a toolstack may have
    /// created it again with other keys.
    fn take_vif(&mut self, device: &DeviceId, store: &mut StoreClient) -> Result<Vif, StoreError> {
        let known = match self.list.remove(device) {
            Some(vif) if vif.backend.connection().is_some() => return Ok(vif),
            known => known,
        };
        let keys = match VifKeys::read(store, device) {
            Ok(keys) => keys,
            Err(error) => {
                // The record stays, because the TAP is removed with it.
                self.list.extend(known.map(|vif| (*device, vif)));
                return Err(error);
            }
        };
        match known {
            Some(vif) if vif.keys == keys => Ok(vif),
            Some(vif) => {
                self.remove_vif(device, vif);
                Ok(self.new_vif(device, keys))
            }
            None => Ok(self.new_vif(device, keys)),
        }
    }

    /// Checks the limits on served vifs.
    fn is_full(&self, device: &DeviceId) -> Result<(), VifError> {
        let limits = &self.config.limits;
        let served = self.list.iter().filter(|(_, vif)| vif.attached.is_some()).map(|(of, _)| of);
        let of_domain = served.clone().filter(|other| other.frontend == device.frontend).count();
        for (count, limit, of) in [
            (served.count(), limits.devices, "of all domains"),
            (of_domain, limits.devices_per_domain, "of this domain"),
        ] {
            if count >= usize::from(limit) {
                return Err(VifError::TooMany { of, limit });
            }
        }
        Ok(())
    }

    /// Returns the bridge that a vif belongs to.
    fn bridge_of<'a>(&'a self, keys: &'a VifKeys) -> Option<&'a str> {
        match self.config.network.attach {
            Attach::Switch => None,
            Attach::Bridge => keys.bridge.as_deref().or(self.config.network.bridge.as_deref()),
        }
    }

    /// Attaches the vif to the switch or to a TAP, unless it is attached.
    fn attach_vif(&self, device: &DeviceId, vif: &mut Vif) -> Result<(), VifError> {
        if vif.attached.is_none() {
            self.is_full(device)?;
            if vif.settings.check_source && vif.keys.mac.is_none() {
                return Err(VifError::NoMac);
            }
        }
        if let Some(switch) = &self.switch {
            vif.attached = Some(Attached::Switch(switch.clone()));
            return Ok(());
        }
        if vif.ports().1.is_some() {
            return Ok(());
        }
        let name = device_name(device);
        let counters = self.platform.counters();
        let bridge = self.bridge_of(&vif.keys).map(str::to_owned);
        // One queue of the TAP and one thread for each queue that the guest may have.
        let queues = worker_count(vif.settings.max_queues);
        let mut taps = bridge::make_tap(&name, bridge.as_deref(), vif.mtu, queues)?;
        self.made.register(&name);
        // The guest's port stays in its dataplane when only the TAP has to be created again.
        let dataplane = match vif.dataplane() {
            Some(dataplane) => dataplane.clone(),
            None => self.gone.start_workers(queues, || Fabric::Patch(Patch::new()), counters)?,
        };
        let tap =
            taps.first().ok_or(io::ErrorKind::NotFound).map_err(io::Error::from)?.try_clone()?;
        let ports = taps.drain(..).map(|tap| {
            let port = TapPort::new(tap.fd, tap.offloads, vif.mtu, Arc::clone(counters));
            Box::new(port) as Box<dyn Port>
        });
        // Otherwise each frame of a guest without segmentation offload is a write.
        let policy = PortPolicy { join_in_patch: true, ..PortPolicy::default() };
        let port = dataplane.add_queues(ports.collect(), policy, &tap_port_name(&name))?;
        vif.attached =
            Some(Attached::Tap(TapAttachment { dataplane, tap, port: Some(port), bridge }));
        vif.limit_tap();
        Ok(())
    }

    /// Returns the handshake of a vif, and the port host for it. Returns `None` if the vif is not attached.
    fn split<'a>(
        &'a mut self,
        device: &DeviceId,
        vif: &'a mut Vif,
    ) -> Option<(&'a mut VifBackend, Host<'a>)> {
        let settings = vif.settings;
        let policy = PortPolicy {
            mac: vif.keys.mac.filter(|_| settings.check_source),
            addresses: settings.addresses,
            ..PortPolicy::default()
        };
        let binding = PortBinding {
            entry: &mut vif.entry,
            retired: &mut self.retired_ports,
            dataplane: vif.attached.as_ref()?.dataplane(),
            policy,
        };
        let staging = self.staging.of(device.frontend);
        let (others, displaced) = (&mut self.list, &mut self.displaced);
        let host = Host { binding, records: &self.records, staging, others, displaced };
        Some((&mut vif.backend, host))
    }

    /// Advances the handshake of a vif, and logs a change of its connection.
    fn advance(
        &mut self,
        device: &DeviceId,
        vif: &mut Vif,
        store: &mut StoreClient,
    ) -> Result<Life, StoreError> {
        let platform = Arc::clone(&self.platform);
        let before = vif.backend.connection().copied();
        let Some((backend, mut host)) = self.split(device, vif) else { return Ok(Life::Alive) };
        let life = backend.look(&*platform, store, &mut host);
        let now = vif.backend.connection().copied();
        if now != before {
            vif.limit_tap();
            let what = match now {
                Some(connection) if connection.adopted => {
                    self.adopted += 1;
                    "taken over"
                }
                Some(_) => "connected",
                None => "disconnected",
            };
            if let Some(unlogged) = vif.lines.take() {
                tracing::info!(name = %device_name(device), unlogged, "{what}");
            }
        }
        life
    }

    /// Removes everything that was created for a vif.
    fn remove_vif(&mut self, device: &DeviceId, mut vif: Vif) {
        if let Some((backend, mut host)) = self.split(device, &mut vif) {
            backend.let_go(&mut host);
        }
        for (rule, count) in vif.backend.rules().all() {
            *self.retired_rules.entry(rule).or_default() += count;
        }
        // The records may also come from an earlier daemon whose connection was not taken over.
        self.records.remove(&device_name(device));
        if let Some(Attached::Tap(attached)) = vif.attached {
            if let Some(port) = attached.port {
                drop(attached.dataplane.remove_port(port));
            }
            match attached.tap.keep(false) {
                Ok(()) => self.made.forget(&device_name(device)),
                Err(error) => {
                    tracing::warn!(name = %device_name(device), %error, "its interface stays");
                }
            }
        }
    }
}

fn policy_of(settings: &DeviceSettings) -> VifPolicy {
    VifPolicy {
        multicast_control: settings.multicast_control,
        stall: Duration::from_secs(settings.stall_seconds.into()),
    }
}

/// Returns the name of the TAP's port in the dataplane.
fn tap_port_name(vif: &str) -> String {
    format!("{vif} tap")
}

impl<P: Platform> Served for Vifs<P> {
    fn watch_paths(&self, device: &DeviceId) -> Vec<String> {
        let front = device.frontend_path();
        let keys = [ringfence_wire::xenbus::STATE, keys::REQUEST_MULTICAST_CONTROL];
        keys.map(|key| format!("{front}/{key}")).to_vec()
    }

    fn look(&mut self, device: &DeviceId, store: &mut StoreClient) -> Result<Look, StoreError> {
        let mut vif = self.take_vif(device, store)?;
        let problem = self.attach_vif(device, &mut vif).err().map(|error| error.to_string());
        if let Some(why) = problem.as_ref().filter(|_| problem != vif.problem) {
            tracing::error!(name = %device_name(device), %why, "it is not served");
        }
        vif.problem = problem;
        let troubled = vif.problem.is_some();
        let life = self.advance(device, &mut vif, store);
        self.list.insert(*device, vif);
        Ok(match life? {
            Life::Over => Look::Over,
            Life::Alive if troubled => Look::Again,
            Life::Alive => Look::Alive,
        })
    }

    fn forget(&mut self, device: &DeviceId) {
        if let Some(vif) = self.list.remove(device) {
            self.remove_vif(device, vif);
        }
    }
}
