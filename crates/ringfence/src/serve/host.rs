//! The vifs that the daemon serves: what each is attached to, and its handshake.
//!
//! A vif is attached to the daemon's switch, or to a TAP of the host by a data plane of two ports,
//! in which each end is held up while the other has no room. What is decided about it (the mode, the
//! offloads, whose addresses it may use) is decided when it is found, and again when its guest
//! starts over.

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
use ringfence_switch::forwarding::{Fabric, Mac, Patch, PortPolicy, Switch};
use ringfence_sys::tap::Tap;
use ringfence_wire::netif::keys;
use ringfence_wire::xenbus::DeviceId;
use ringfence_xenstore::{StoreClient, StoreError};

use super::bridge::{self, BridgeError};
use super::config::{Attach, Config, DeviceSettings};
use super::devices::{Look, Served};
use super::made::Made;
use super::records::Records;
use super::staging::Staging;
use super::vif_keys::VifKeys;
use crate::log::LineBudget;
use crate::plane::{Gone, threads};
use crate::seat::{Retired, Seat, Usher, device_name};

/// Why a vif cannot be served for now.
#[derive(Debug, thiserror::Error)]
pub(super) enum VifError {
    /// No interface of the host.
    #[error(transparent)]
    Bridge(#[from] BridgeError),
    /// More than are served.
    #[error("{limit} devices {of} are served already; see `limits` in the configuration")]
    TooMany {
        /// Of which there are too many.
        of: &'static str,
        /// How many there may be.
        limit: u16,
    },
    /// It cannot be held to an address that nobody knows.
    #[error(
        "the toolstack wrote no usable `mac` for it, to which it could be held: give it one, or set \
         `check-source = false` for it in the configuration"
    )]
    NoMac,
    /// No thread or file.
    #[error(transparent)]
    System(#[from] io::Error),
    /// The data plane refuses.
    #[error(transparent)]
    Port(#[from] ringfence_switch::dataplane::AddPortError),
}

/// What a vif is attached to.
enum Cable {
    Switch(DataplaneHandle),
    Tap(TapCable),
}

/// A TAP of the host, and the data plane between it and the guest.
struct TapCable {
    dataplane: DataplaneHandle,
    tap: Tap,
    port: Option<PortId>,
    bridge: Option<String>,
}

impl Cable {
    fn dataplane(&self) -> &DataplaneHandle {
        match self {
            Cable::Switch(dataplane) | Cable::Tap(TapCable { dataplane, .. }) => dataplane,
        }
    }
}

/// One vif.
pub(super) struct Vif {
    pub(super) keys: VifKeys,
    pub(super) settings: DeviceSettings,
    pub(super) mtu: u16,
    pub(super) backend: VifBackend,
    pub(super) problem: Option<String>,
    seat: Seat,
    cable: Option<Cable>,
    /// For lines that the guest causes by connecting and disconnecting.
    lines: LineBudget,
}

impl Vif {
    /// Whether it is on the switch with this address alone.
    fn is_held_to(&self, mac: Mac) -> bool {
        let on_switch = matches!(self.cable, Some(Cable::Switch(_)));
        on_switch && self.settings.check_source && self.keys.mac == Some(mac)
    }

    /// The host's interface and its bridge, where there is one.
    pub(super) fn tap(&self) -> Option<(&str, Option<&str>)> {
        match &self.cable {
            Some(Cable::Tap(cable)) => Some((&cable.tap.name, cable.bridge.as_deref())),
            _ => None,
        }
    }

    /// The data plane that its port is in.
    pub(super) fn dataplane(&self) -> Option<&DataplaneHandle> {
        self.cable.as_ref().map(Cable::dataplane)
    }

    /// The ports of the guest and of the TAP.
    pub(super) fn ports(&self) -> (Option<PortId>, Option<PortId>) {
        let tap = match &self.cable {
            Some(Cable::Tap(cable)) => cable.port,
            _ => None,
        };
        (self.seat.port(), tap)
    }
}

/// The leg of the host on the switch.
pub(super) struct HostLeg {
    pub(super) name: String,
    pub(super) port: PortId,
}

/// What is to be done after a turn for a control ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum AfterControl {
    /// Wait for the guest.
    Wait,
    /// Go on with it, when others have had their turn.
    Again,
    /// Look at the device: it is to be closed.
    Look,
}

/// All of them.
pub(super) struct Vifs<P: Platform> {
    platform: Arc<P>,
    config: Config,
    records: Records,
    made: Made,
    pub(super) gone: Gone,
    switch: Option<DataplaneHandle>,
    pub(super) host_leg: Option<HostLeg>,
    pub(super) list: BTreeMap<DeviceId, Vif>,
    /// Those that another one took the address from; they are to be looked at.
    pub(super) displaced: Vec<DeviceId>,
    pub(super) retired_ports: Retired,
    pub(super) retired_rules: BTreeMap<&'static str, u64>,
    pub(super) adopted: u64,
    staging: Staging,
}

/// Where the ports of one vif go while it is looked at.
struct Host<'a> {
    usher: Usher<'a>,
    records: &'a Records,
    /// Pools of staged pages of the guest and of all.
    staging: [Arc<StagingPool>; 2],
    /// All others.
    others: &'a mut BTreeMap<DeviceId, Vif>,
    displaced: &'a mut Vec<DeviceId>,
}

impl Host<'_> {
    /// Takes whoever has the same address off the switch. The last to connect has it: a guest that
    /// migrates to its own host connects again before its old domain is gone.
    fn make_way(&mut self, device: &DeviceId) {
        let Some(mac) = self.usher.policy.mac else { return };
        for (other, vif) in self.others.iter_mut().filter(|(_, vif)| vif.is_held_to(mac)) {
            let Some(id) = vif.seat.port() else { continue };
            vif.seat.vacate(id);
            self.usher.retired.retire(self.usher.dataplane.remove_port(id));
            vif.backend.condemn(format!("{} has its Ethernet address now", device_name(device)));
            self.displaced.push(*other);
        }
    }
}

impl PortHost for Host<'_> {
    fn attach(&mut self, device: &DeviceId, port: Box<dyn Port>) {
        self.make_way(device);
        self.usher.attach(device, port);
    }

    fn detach(&mut self, device: &DeviceId) {
        self.usher.detach(device);
        self.records.remove(&device_name(device));
    }

    fn execute(
        &mut self,
        device: &DeviceId,
        queue: u16,
        command: PortCommand,
    ) -> Option<PortReply> {
        self.usher.execute(device, queue, command)
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
        made: Made,
    ) -> io::Result<Vifs<P>> {
        Ok(Vifs {
            platform,
            config,
            records,
            made,
            gone: Gone::new()?,
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

    /// What holds for devices from now on.
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

    /// Removes what daemons before this one made and nobody needs any more: interfaces of guests that
    /// went away while none ran, or that are on the switch now.
    pub(super) fn sweep(&self, store: &mut StoreClient) {
        self.made.sweep(&self.config.network, self.platform.domid(), store);
    }

    /// Makes the switch and the host's leg on it, if the configuration says so.
    pub(super) fn make_switch(&mut self) -> Result<(), VifError> {
        if self.config.network.attach != Attach::Switch {
            return Ok(());
        }
        let counters = Arc::clone(self.platform.counters());
        let dataplane = self.gone.start_plane(
            threads(QUEUES_MAX),
            || Fabric::Switch(Switch::new()),
            &counters,
        )?;
        self.switch = Some(dataplane.clone());
        let Some(name) = self.config.network.host_interface.clone() else { return Ok(()) };
        let tap = bridge::make_host_leg(&name)?;
        self.made.note(&name);
        let mtu = bridge::mtu_of(&name).unwrap_or(keys::MTU_DEFAULT);
        let port = TapPort::new(tap.fd, tap.offloads, mtu, counters);
        let policy = PortPolicy { addresses: 1024, ..PortPolicy::default() };
        let port = dataplane.add_port(Box::new(port), policy, &name)?;
        self.host_leg = Some(HostLeg { name, port });
        Ok(())
    }

    /// The switch, where there is one.
    pub(super) fn switch(&self) -> Option<&DataplaneHandle> {
        self.switch.as_ref()
    }

    /// The data plane gave a port up. Says whose it was, which is to be looked at then.
    pub(super) fn port_gone(&mut self, gone: PortGone) -> Option<DeviceId> {
        let PortGone { id, name, reason, ports, .. } = gone;
        // Unmap before anything is said to the guest.
        self.retired_ports.retire(ports);
        for (device, vif) in &mut self.list {
            let of_guest = device_name(device);
            if name == of_guest && vif.seat.vacate(id) {
                vif.backend.condemn(reason.to_string());
                return Some(*device);
            }
            if name != tap_port_name(&of_guest) {
                continue;
            }
            if let Some(Cable::Tap(cable)) = &mut vif.cable
                && cable.port.take_if(|port| *port == id).is_some()
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

    /// The devices that have a control ring, and what to wait for there.
    pub(super) fn controls(&self) -> impl Iterator<Item = (DeviceId, BorrowedFd<'_>)> {
        self.list.iter().filter_map(|(device, vif)| Some((*device, vif.backend.control_fd()?)))
    }

    /// One turn for the control ring of this device, if it has one. Says what is to be done then.
    pub(super) fn serve_control(&mut self, device: &DeviceId) -> AfterControl {
        let Some(mut vif) = self.list.remove(device) else { return AfterControl::Wait };
        let served = self.split(device, &mut vif);
        let after = served.map_or(AfterControl::Wait, |(backend, mut host)| {
            match (backend.serve_control(&mut host), backend.condemned()) {
                (true, _) => AfterControl::Again,
                (false, Some(_)) => AfterControl::Look,
                (false, None) => AfterControl::Wait,
            }
        });
        self.list.insert(*device, vif);
        after
    }

    /// Lets go of all devices and leaves them as they are, for the daemon that comes next.
    pub(super) fn leave(&mut self) {
        self.list.clear();
    }

    /// Begins to close a device.
    pub(super) fn close(
        &mut self,
        device: &DeviceId,
        store: &mut StoreClient,
    ) -> Result<(), StoreError> {
        let Some(vif) = self.list.get_mut(device) else { return Ok(()) };
        vif.backend.condemn("the daemon ends".to_owned());
        self.look(device, store).map(drop)
    }

    /// A device as the toolstack made it.
    fn make(&self, device: &DeviceId, keys: VifKeys) -> Vif {
        let settings = self.config.device(keys.domain_name.as_deref(), keys.mac);
        let bridge = self.bridge_of(&keys);
        let mtu = keys.mtu.or_else(|| bridge::mtu_of(bridge?)).unwrap_or(keys::MTU_DEFAULT);
        let backend = VifBackend::new(*device, BackendOptions { mode: settings.mode, mtu })
            .with_offloads(settings.offloads)
            .with_queues(settings.max_queues)
            .with_policy(policy_of(&settings))
            .waiting_for_hotplug(keys.scripted);
        let (seat, cable, problem) = (Seat::default(), None, None);
        Vif { keys, settings, mtu, backend, problem, seat, cable, lines: LineBudget::new() }
    }

    /// What is known of a device, read anew while it is not connected: a toolstack may have made it
    /// again, with other keys.
    fn take(&mut self, device: &DeviceId, store: &mut StoreClient) -> Result<Vif, StoreError> {
        let known = match self.list.remove(device) {
            Some(vif) if vif.backend.connection().is_some() => return Ok(vif),
            known => known,
        };
        let keys = match VifKeys::read(store, device) {
            Ok(keys) => keys,
            Err(error) => {
                // Its interface is removed when the device goes, and so it has to be known until then.
                self.list.extend(known.map(|vif| (*device, vif)));
                return Err(error);
            }
        };
        match known {
            Some(vif) if vif.keys == keys => Ok(vif),
            Some(vif) => {
                self.bury(device, vif);
                Ok(self.make(device, keys))
            }
            None => Ok(self.make(device, keys)),
        }
    }

    /// Whether there are as many as there may be.
    fn is_full(&self, device: &DeviceId) -> Result<(), VifError> {
        let limits = &self.config.limits;
        let served = self.list.iter().filter(|(_, vif)| vif.cable.is_some()).map(|(of, _)| of);
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

    /// The bridge that a vif belongs on.
    fn bridge_of<'a>(&'a self, keys: &'a VifKeys) -> Option<&'a str> {
        match self.config.network.attach {
            Attach::Switch => None,
            Attach::Bridge => keys.bridge.as_deref().or(self.config.network.bridge.as_deref()),
        }
    }

    /// Sees to it that the vif is attached to something.
    fn cable(&self, device: &DeviceId, vif: &mut Vif) -> Result<(), VifError> {
        if vif.cable.is_none() {
            self.is_full(device)?;
            if vif.settings.check_source && vif.keys.mac.is_none() {
                return Err(VifError::NoMac);
            }
        }
        if let Some(switch) = &self.switch {
            vif.cable = Some(Cable::Switch(switch.clone()));
            return Ok(());
        }
        if vif.ports().1.is_some() {
            return Ok(());
        }
        let name = device_name(device);
        let counters = self.platform.counters();
        let bridge = self.bridge_of(&vif.keys).map(str::to_owned);
        // A queue and a thread for each queue that the guest may have.
        let queues = threads(vif.settings.max_queues);
        let mut taps = bridge::make_tap(&name, bridge.as_deref(), vif.mtu, queues)?;
        self.made.note(&name);
        // The data plane stays when the interface has to be made again: the guest is in it.
        let dataplane = match vif.dataplane() {
            Some(dataplane) => dataplane.clone(),
            None => self.gone.start_plane(queues, || Fabric::Patch(Patch::new()), counters)?,
        };
        let tap =
            taps.first().ok_or(io::ErrorKind::NotFound).map_err(io::Error::from)?.try_clone()?;
        let ports = taps.drain(..).map(|tap| {
            let port = TapPort::new(tap.fd, tap.offloads, vif.mtu, Arc::clone(counters));
            Box::new(port) as Box<dyn Port>
        });
        let policy = PortPolicy::default();
        let port = dataplane.add_queues(ports.collect(), policy, &tap_port_name(&name))?;
        vif.cable = Some(Cable::Tap(TapCable { dataplane, tap, port: Some(port), bridge }));
        Ok(())
    }

    /// The handshake, and where its port goes.
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
        let usher = Usher {
            seat: &mut vif.seat,
            retired: &mut self.retired_ports,
            dataplane: vif.cable.as_ref()?.dataplane(),
            policy,
        };
        let staging = self.staging.of(device.frontend);
        let (others, displaced) = (&mut self.list, &mut self.displaced);
        let host = Host { usher, records: &self.records, staging, others, displaced };
        Some((&mut vif.backend, host))
    }

    /// Does what is due.
    fn follow(
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

    /// Removes what was made for a device.
    fn bury(&mut self, device: &DeviceId, mut vif: Vif) {
        if let Some((backend, mut host)) = self.split(device, &mut vif) {
            backend.let_go(&mut host);
        }
        for (rule, count) in vif.backend.rules().all() {
            *self.retired_rules.entry(rule).or_default() += count;
        }
        // Also one that was left by a daemon before this one, and never taken up.
        self.records.remove(&device_name(device));
        if let Some(Cable::Tap(cable)) = vif.cable {
            if let Some(port) = cable.port {
                drop(cable.dataplane.remove_port(port));
            }
            match cable.tap.keep(false) {
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

/// What the TAP's end of a vif's cable is called in the data plane.
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
        let mut vif = self.take(device, store)?;
        let problem = self.cable(device, &mut vif).err().map(|error| error.to_string());
        if let Some(why) = problem.as_ref().filter(|_| problem != vif.problem) {
            tracing::error!(name = %device_name(device), %why, "it is not served");
        }
        vif.problem = problem;
        let troubled = vif.problem.is_some();
        let life = self.follow(device, &mut vif, store);
        self.list.insert(*device, vif);
        Ok(match life? {
            Life::Over => Look::Over,
            Life::Alive if troubled => Look::Again,
            Life::Alive => Look::Alive,
        })
    }

    fn forget(&mut self, device: &DeviceId) {
        if let Some(vif) = self.list.remove(device) {
            self.bury(device, vif);
        }
    }
}
