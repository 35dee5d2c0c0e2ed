//! Guests of a switch, from the launcher's request to removal.
//!
//! [`Guests`] belongs to the control thread. It has one entry for each launcher's connection, with
//! the vif, the host's port and the disks of its guest. A connection's end detaches the guest: all
//! its nodes, ports and addresses are removed.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringfence_block::vbd::backend::VbdBackend;
use ringfence_frame::port::{Fault, Port};
use ringfence_frame::tap::TapPort;
use ringfence_net::vif::backend::{BackendOptions, Life, VifBackend};
use ringfence_net::vif::toolstack;
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::local::hub::HubHandle;
use ringfence_platform::{DomId, Platform};
use ringfence_switch::dataplane::{DataplaneHandle, PortGone};
use ringfence_switch::forwarding::PortPolicy;
use ringfence_switch::forwarding::filter::AddressFilter;
use ringfence_sys::descriptors::{Descriptors, Disposal, is_character_device};
use ringfence_sys::mailbox::WakeFd;
use ringfence_sys::tap::TapOffloads;
use ringfence_wire::xenbus::{DeviceId, DeviceKind};
use ringfence_wire::xenstore::{NodeAccess, PermissionList};
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

use super::NAMES_ROOT;
use super::addresses::{AddressPlan, Assigned};
use super::admission::Admission;
use super::device::{filter_of, make_device};
use super::disks::Disks;
use super::lease::Lease;
use ringfence_driver::ports::{PortBinding, PortEntry, Retired, device_name};
use ringfence_driver::switchboard::{
    AttachRequest, Attached, DiskRequest, DriverStats, FromDriver, LegConfig, ToDriver, VERSION,
};
use ringfence_sandbox::channel::Channel;

/// Maximum number of connections, with and without a guest.
const CONNECTIONS_MAX: usize = 1024;
/// Maximum number of connections that are not admitted yet. Another one replaces the oldest.
const UNADMITTED_MAX: usize = 64;
/// Maximum number of disks in teardown. A teardown lasts until its storage has completed all
/// requests.
const TEARDOWNS_MAX: usize = 256;
/// Device number of `/dev/net/tun`.
const TUN: (u32, u32) = (10, 200);

/// Resources of the control thread that operations on guests use.
pub(super) struct Scope<'a> {
    pub(super) hub: &'a HubHandle,
    pub(super) platform: &'a LocalPlatform,
    pub(super) store: &'a mut StoreClient,
    pub(super) dataplane: &'a DataplaneHandle,
}

/// Connection of a launcher, and its guest once it is attached.
struct Guest {
    lease: Lease,
    /// Domain of the guest, once it is attached.
    domain: Option<DomId>,
    /// Absent before the guest is attached, and if it has only disks.
    vif: Option<Vif>,
    leg: Option<Leg>,
    disks: Disks,
}

struct Vif {
    backend: VifBackend,
    entry: PortEntry,
    assigned: Assigned,
    filter: Arc<AddressFilter>,
    name: Option<String>,
    join: bool,
}

/// Port of the host: reserved addresses, and the port once it is on the switch.
struct Leg {
    assigned: Assigned,
    port: Option<ringfence_switch::dataplane::PortId>,
}

/// All connections and guests of the switch.
pub(super) struct Guests {
    plan: AddressPlan,
    list: Vec<Guest>,
    retired_ports: Retired,
    /// Devices whose control rings have requests left after one round.
    controls_due: Vec<DeviceId>,
    /// Sums of the rule violations of guests that have left.
    retired: BTreeMap<&'static str, u64>,
    disk_wake: WakeFd,
    admission: Admission,
    teardown: Disposal<VbdBackend>,
    /// Time at which the last guest left.
    left: Option<Instant>,
}

/// Lets every guest read the names. Each name's node belongs to its guest.
pub(super) fn open_names(store: &mut StoreClient) -> Result<(), StoreError> {
    store.set_perms(NAMES_ROOT, &PermissionList::owned_by(DomId(0), NodeAccess::Read))
}

impl Guests {
    pub(super) fn new(switch: &str, admission: Admission) -> std::io::Result<Guests> {
        Ok(Guests {
            plan: AddressPlan::new(switch),
            list: Vec::new(),
            retired_ports: Retired::default(),
            controls_due: Vec::new(),
            retired: BTreeMap::new(),
            disk_wake: WakeFd::new()?,
            admission,
            teardown: Disposal::new(TEARDOWNS_MAX, drop),
            left: None,
        })
    }

    /// Returns the event that is raised when a disk needs an update.
    pub(super) fn disk_wake(&self) -> &WakeFd {
        &self.disk_wake
    }

    pub(super) fn any_attached(&self) -> bool {
        self.list.iter().any(|guest| guest.domain.is_some())
    }

    pub(super) fn channels(&self) -> impl Iterator<Item = &Channel> {
        self.list.iter().map(|guest| &guest.lease.channel)
    }

    /// The devices that have a control ring, and what to wait for there.
    pub(super) fn controls(&self) -> impl Iterator<Item = (DeviceId, BorrowedFd<'_>)> {
        let vifs = self.list.iter().filter_map(|guest| guest.vif.as_ref());
        vifs.filter_map(|vif| Some((*vif.backend.device(), vif.backend.control_fd()?)))
    }

    /// Accepts a connection. It must prove to be a launcher's before requests are served.
    pub(super) fn accept(&mut self, channel: Channel) {
        let is_unadmitted = |guest: &Guest| !guest.lease.is_admitted();
        if self.list.len() >= CONNECTIONS_MAX || !self.admission.is_own_user(&channel) {
            return channel.dispose();
        }
        if self.list.iter().filter(|guest| is_unadmitted(guest)).count() >= UNADMITTED_MAX
            && let Some(oldest) = self.list.iter().position(is_unadmitted)
        {
            self.list.remove(oldest).lease.channel.dispose();
        }
        self.list.push(Guest::new(channel));
    }

    /// Returns `true` if the end of the driver domain must be delayed for a connection without a
    /// guest.
    pub(super) fn any_newcomer(&self, now: Instant) -> bool {
        self.list.iter().any(|guest| guest.lease.newcomer_until(self.left) > now)
    }

    /// Returns the next time at which a connection expires or the delay of the end is over.
    pub(super) fn next_timeout(&self) -> Option<Instant> {
        let any_attached = self.any_attached();
        let newcomers = self.list.iter().filter(|_| !any_attached);
        let newcomers = newcomers.map(|guest| guest.lease.newcomer_until(self.left));
        self.list.iter().filter_map(Guest::expires).chain(newcomers).min()
    }

    /// Waits for the teardown of disks. Returns `false` after `timeout`.
    pub(super) fn wait_for_disks(&self, timeout: Duration) -> bool {
        self.teardown.wait_until_done(timeout)
    }

    pub(super) fn broadcast(&self, message: &FromDriver) {
        self.list.iter().for_each(|guest| guest.lease.channel.send_or_drop(message));
    }

    /// Serves requests of all connections. Detaches guests whose launchers are gone, do not read,
    /// or were silent for too long.
    pub(super) fn serve_connections(&mut self, scope: &mut Scope<'_>) {
        let now = Instant::now();
        let mut at = 0;
        while at < self.list.len() {
            if self.serve_connection(at, now, scope) {
                at += 1;
            } else {
                let guest = self.list.swap_remove(at);
                self.detach(guest, scope);
            }
        }
    }

    /// Serves one message. Returns `false` if the connection must be closed.
    fn serve_connection(&mut self, at: usize, now: Instant, scope: &mut Scope<'_>) -> bool {
        let Some(guest) = self.list.get_mut(at) else { return false };
        let lease = &mut guest.lease;
        match lease.channel.try_receive_with::<ToDriver>(lease.fds_max()) {
            Ok(None) => {}
            Ok(Some((message, fds))) if lease.is_admitted() => {
                lease.touch(now);
                if let Some(answer) = self.handle_request(at, message, fds, scope) {
                    self.list[at].lease.send(&answer, &[]);
                }
            }
            Ok(Some((message, fds))) => {
                if let Err(why) = self.admission.check(&message, &fds) {
                    tracing::warn!(%why, "a connection was not admitted");
                    lease.send(&FromDriver::Refused(why), &[]);
                    return false;
                }
                lease.admit();
                lease.touch(now);
            }
            Err(_) => return false,
        }
        let guest = &self.list[at];
        if guest.lease.is_slow() {
            tracing::warn!("a launcher that does not read its messages was disconnected");
        }
        !guest.lease.is_slow() && guest.expires().is_none_or(|expires| expires > now)
    }

    /// Handles a request. Returns the answer, unless it has been sent already.
    fn handle_request(
        &mut self,
        at: usize,
        message: ToDriver,
        fds: Descriptors,
        scope: &mut Scope<'_>,
    ) -> Option<FromDriver> {
        match message {
            ToDriver::Hello { .. } => Some(FromDriver::Refused("it was admitted before".into())),
            ToDriver::Attach(request) => {
                self.attach(at, &request, scope).err().map(FromDriver::Refused)
            }
            ToDriver::HostLeg { name, offloads, mtu } => {
                Some(match self.add_leg(at, &name, offloads, mtu, fds, scope) {
                    Ok(()) => FromDriver::LegAdded,
                    Err(why) => FromDriver::Refused(why),
                })
            }
            ToDriver::Disk(request) => Some(match self.add_disk(at, &request, fds, scope) {
                Ok(()) => FromDriver::DiskAdded,
                Err(why) => FromDriver::Refused(why),
            }),
            ToDriver::Dialled { handle, problem } => {
                self.list[at].disks.dialled(handle, fds, problem);
                None
            }
            ToDriver::Stats => Some(FromDriver::Stats(Box::new(self.stats(scope)))),
        }
    }

    fn attach(
        &mut self,
        at: usize,
        request: &AttachRequest,
        scope: &mut Scope<'_>,
    ) -> Result<(), String> {
        if request.version != VERSION {
            return Err(format!(
                "the switch is served by Ringfence {VERSION}, this is {}; use another --switch",
                request.version
            ));
        }
        if self.list[at].domain.is_some() {
            return Err("this connection has a guest already".to_owned());
        }
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let (domain, connection) = scope.hub.admit(None, false).map_err(|e| text(&e))?;
        let names = connection
            .try_clone()
            .map_err(|e| text(&e))
            .and_then(|copy| LocalPlatform::connect(copy).map_err(|e| text(&e)))
            .and_then(|guest| guest.store_connection().map_err(|e| text(&e)))?;
        let attached = if request.interface {
            self.add_vif(at, domain, request, scope)?
        } else {
            Attached { domain: domain.0, mac: [0; 6], addresses: vec![], host_leg: None }
        };
        let guest = &mut self.list[at];
        guest.domain = Some(domain);
        let answer = FromDriver::Attached(Box::new(attached));
        guest.lease.send(&answer, &[connection.as_fd(), names.as_fd()]);
        Ok(())
    }

    /// Creates the vif of a guest that is being attached, and reserves the host's addresses.
    fn add_vif(
        &mut self,
        at: usize,
        domain: DomId,
        request: &AttachRequest,
        scope: &mut Scope<'_>,
    ) -> Result<Attached, String> {
        let mode =
            request.mode().ok_or_else(|| format!("`{}` is no mode of this build", request.mode))?;
        let offloads = request
            .offloads()
            .ok_or_else(|| format!("`{}` are no offloads of this build", request.offloads))?;
        let text = |error: &dyn std::fmt::Display| error.to_string();
        self.plan.avoid(&request.avoid);
        let assigned = self.plan.assign(domain.0, &request.addresses).map_err(|e| text(&e))?;
        let leg = match request.host_leg.then(|| self.plan.assign_host_leg()).transpose() {
            Ok(leg) => leg,
            Err(error) => {
                self.plan.release(&assigned);
                return Err(format!("the host has a leg on this switch already ({error})"));
            }
        };
        let device =
            DeviceId { kind: DeviceKind::Vif, frontend: domain, backend: DomId(0), handle: 0 };
        let backend = VifBackend::new(device, BackendOptions { mode, mtu: request.mtu })
            .with_offloads(offloads)
            .with_queues(request.queues);
        let made = make_device(scope.store, &backend, &assigned, request);
        if let Err(why) = made {
            self.plan.release(&assigned);
            leg.iter().for_each(|leg| self.plan.release(leg));
            return Err(why);
        }
        let (name, join) = (request.name.clone(), request.coalesce);
        let filter = Arc::new(filter_of(&assigned, request));
        let mut vif = Vif { backend, entry: PortEntry::default(), assigned, filter, name, join };
        vif.look(&mut self.retired_ports, scope).map_err(|e| text(&e))?;
        let attached = Attached {
            domain: domain.0,
            mac: vif.assigned.mac,
            addresses: vif.assigned.addresses.clone(),
            host_leg: leg
                .as_ref()
                .map(|l| LegConfig { mac: l.mac, addresses: l.addresses.clone() }),
        };
        let guest = &mut self.list[at];
        guest.leg = leg.map(|assigned| Leg { assigned, port: None });
        guest.vif = Some(vif);
        Ok(attached)
    }

    fn add_leg(
        &mut self,
        at: usize,
        name: &str,
        offloads: u32,
        mtu: u16,
        fds: Descriptors,
        scope: &mut Scope<'_>,
    ) -> Result<(), String> {
        if fds.is_empty() {
            return Err("the host's leg has no TAP".to_owned());
        }
        if !fds.each().all(|fd| is_character_device(fd, TUN.0, TUN.1)) {
            return Err("what came for the host's leg is no TAP".to_owned());
        }
        let join = self.list[at].vif.as_ref().is_none_or(|vif| vif.join);
        let policy = PortPolicy { join, ..PortPolicy::default() };
        let leg = self.list[at].leg.as_mut().filter(|leg| leg.port.is_none());
        let leg = leg.ok_or("no leg of the host was asked for")?;
        let queue = |tap| {
            let counters = scope.platform.counters().clone();
            Box::new(TapPort::new(tap, TapOffloads(offloads), mtu, counters)) as Box<dyn Port>
        };
        let id = scope
            .dataplane
            .add_queues(
                fds.into_vec().into_iter().map(queue).collect(),
                policy,
                &format!("host:{name}"),
            )
            .map_err(|e| e.to_string())?;
        leg.port = Some(id);
        Ok(())
    }

    fn add_disk(
        &mut self,
        at: usize,
        request: &DiskRequest,
        fds: Descriptors,
        scope: &mut Scope<'_>,
    ) -> Result<(), String> {
        let guest = &mut self.list[at];
        let frontend = guest.domain.ok_or("a guest comes before its disks")?;
        guest.disks.add(frontend, request, fds, &self.disk_wake, scope)
    }

    /// Updates the disks of all guests.
    pub(super) fn look_at_disks(&mut self, scope: &mut Scope<'_>) {
        self.update_disks_that(scope, |_| true);
    }

    fn update_disks_that(&mut self, scope: &mut Scope<'_>, selected: impl Fn(&Disks) -> bool) {
        for guest in self.list.iter_mut().filter(|guest| selected(&guest.disks)) {
            for handle in guest.disks.dialling() {
                guest.lease.send(&FromDriver::Dial { handle }, &[]);
            }
            let before: Vec<_> = guest.disks.closed().collect();
            if let Err(error) = guest.disks.look(scope) {
                tracing::warn!(%error, "a disk's state could not be followed");
            }
            for (handle, why) in guest.disks.closed().filter(|disk| !before.contains(disk)) {
                guest.lease.send(&FromDriver::DiskClosed { handle, why }, &[]);
            }
        }
    }

    /// Removes all traces of a guest whose launcher is gone.
    fn detach(&mut self, mut guest: Guest, scope: &mut Scope<'_>) {
        for (_, broken) in guest.disks.violations() {
            for (rule, count) in broken {
                *self.retired.entry(rule).or_default() += count;
            }
        }
        guest.disks.remove_all(scope, &self.teardown);
        guest.lease.channel.dispose();
        if let Some(leg) = guest.leg {
            leg.port.map(|id| scope.dataplane.remove_port(id));
            self.plan.release(&leg.assigned);
        }
        if guest.domain.is_some() {
            self.left = Some(Instant::now());
        }
        let Some(mut vif) = guest.vif else { return };
        let (backend, mut host) = vif.split(&mut self.retired_ports, scope.dataplane);
        backend.let_go(&mut host);
        for (rule, count) in vif.backend.rules().all() {
            *self.retired.entry(rule).or_default() += count;
        }
        self.plan.release(&vif.assigned);
        for path in vif.backend.watch_paths() {
            // Watches end with the store connection in any case.
            let _ = scope.store.unwatch(&path, &vif.token());
        }
        let named = vif.name.iter().map(|name| format!("{NAMES_ROOT}/{name}"));
        let removed = toolstack::remove(scope.store, vif.backend.device());
        if let Err(error) = removed {
            tracing::warn!(%error, "the nodes of a guest were not removed");
        }
        for path in named {
            // The node is gone already if the guest's domain was released before.
            let _ = scope.store.rm(&path);
        }
    }

    /// Handles a port that ended on a worker.
    pub(super) fn port_gone(&mut self, gone: PortGone, scope: &mut Scope<'_>) {
        let PortGone { id, name, reason, ports, .. } = gone;
        // Unmap the guest's pages before anything is sent to the launcher.
        self.retired_ports.retire(ports);
        let of = |guest: &mut Guest| {
            let vif = guest.vif.as_mut()?;
            vif.entry.vacate(id).then(|| *vif.backend.device())
        };
        let Some(device) = self.list.iter_mut().find_map(of) else {
            tracing::warn!(%name, %reason, "a port ended");
            self.list
                .iter_mut()
                .filter_map(|g| g.leg.as_mut())
                .filter(|l| l.port == Some(id))
                .for_each(|l| l.port = None);
            return;
        };
        let Some(guest) = self.find(&device) else { return };
        let Some(vif) = &mut guest.vif else { return };
        let why = reason.to_string();
        if !matches!(reason, Fault::Gone) {
            guest.lease.send(&FromDriver::DeviceClosed(why.clone()), &[]);
        }
        vif.backend.close_with_penalty(why);
        self.look(&device, scope);
    }

    fn find(&mut self, device: &DeviceId) -> Option<&mut Guest> {
        self.list.iter_mut().find(|g| g.vif.as_ref().is_some_and(|v| v.backend.device() == device))
    }

    /// Handles a store event of a device's watch.
    pub(super) fn store_changed(&mut self, token: &str, scope: &mut Scope<'_>) {
        let concerned: Vec<DeviceId> = self
            .list
            .iter()
            .filter_map(|guest| guest.vif.as_ref())
            .filter(|vif| token == "release" || vif.token() == token)
            .map(|vif| *vif.backend.device())
            .collect();
        for device in concerned {
            self.look(&device, scope);
        }
        self.update_disks_that(scope, |disks| token == "release" || disks.has_token(token));
    }

    fn look(&mut self, device: &DeviceId, scope: &mut Scope<'_>) {
        let mut retired = core::mem::take(&mut self.retired_ports);
        if let Some(guest) = self.find(device)
            && let Some(vif) = &mut guest.vif
        {
            let before = vif.backend.rules().get("device_condemned");
            match vif.look(&mut retired, scope) {
                Ok(Life::Alive | Life::Over) => {}
                Err(error) => tracing::warn!(%error, "a device's state could not be followed"),
            }
            if vif.backend.rules().get("device_condemned") > before {
                let why = "its frontend could not be connected (see the driver domain's messages)";
                guest.lease.send(&FromDriver::DeviceClosed(why.to_owned()), &[]);
            }
        }
        self.retired_ports = retired;
    }

    /// Serves one round for each of these control rings, and for those with requests left. Returns
    /// `true` if some still have requests.
    pub(super) fn serve_controls(&mut self, devices: &[DeviceId], scope: &mut Scope<'_>) -> bool {
        let mut due = core::mem::take(&mut self.controls_due);
        due.extend(
            devices.iter().filter(|device| !due.contains(device)).copied().collect::<Vec<_>>(),
        );
        for device in due {
            let mut retired = core::mem::take(&mut self.retired_ports);
            let vif = self.find(&device).and_then(|guest| guest.vif.as_mut());
            let (more, is_closed) = vif.map_or((false, false), |vif| {
                let (backend, mut host) = vif.split(&mut retired, scope.dataplane);
                let more = backend.serve_control(&mut host);
                (more, backend.penalized().is_some())
            });
            self.retired_ports = retired;
            if more {
                self.controls_due.push(device);
            }
            if is_closed {
                self.look(&device, scope);
            }
        }
        !self.controls_due.is_empty()
    }

    fn stats(&self, scope: &Scope<'_>) -> DriverStats {
        let owned = |pairs: Vec<(&'static str, u64)>| -> BTreeMap<String, u64> {
            pairs.into_iter().map(|(k, v)| (k.to_owned(), v)).collect()
        };
        let ports = scope.dataplane.stats().map(|stats| stats.ports).unwrap_or_default();
        let rules = self.list.iter().filter_map(|g| g.vif.as_ref()).map(|vif| {
            let broken = vif.backend.rules().all().into_iter().collect();
            (vif.token(), owned(broken))
        });
        let disk_rules = self.list.iter().flat_map(|guest| guest.disks.violations());
        let rules = rules.chain(disk_rules.map(|(name, broken)| (name, owned(broken))));
        let rules =
            rules.chain([("gone".to_owned(), owned(self.retired.clone().into_iter().collect()))]);
        // Leave out zeros: the length of a message is bounded, and a switch may have many ports.
        let nonzero = |counters: Vec<(&'static str, u64)>| {
            owned(counters.into_iter().filter(|(_, n)| *n > 0).collect())
        };
        let mut ports: BTreeMap<_, _> =
            ports.into_iter().map(|port| (port.name, nonzero(port.counters))).collect();
        let disks = self.list.iter().flat_map(|guest| guest.disks.counts());
        ports.insert("gone".to_owned(), nonzero(self.retired_ports.counts().collect()));
        DriverStats {
            path: owned(scope.platform.counters().values().named()),
            ports,
            disks: disks.map(|(name, counts)| (name, nonzero(counts))).collect(),
            rules: rules.filter(|(_, broken)| !broken.is_empty()).collect(),
            hub: owned(scope.hub.faults().into_iter().collect()),
        }
    }
}

impl Guest {
    fn new(channel: Channel) -> Guest {
        let (lease, disks) = (Lease::new(channel), Disks::default());
        Guest { lease, domain: None, vif: None, leg: None, disks }
    }

    /// Returns the time at which the connection expires. `None` with a guest.
    fn expires(&self) -> Option<Instant> {
        self.domain.is_none().then(|| self.lease.expires())
    }
}

impl Vif {
    fn token(&self) -> String {
        device_name(self.backend.device())
    }

    /// Splits the vif into its backend and the binding of its port.
    fn split<'a>(
        &'a mut self,
        retired: &'a mut Retired,
        dataplane: &'a DataplaneHandle,
    ) -> (&'a mut VifBackend, PortBinding<'a>) {
        let (mac, join) = (Some(self.assigned.mac), self.join);
        let filter = Some(Arc::clone(&self.filter));
        let policy = PortPolicy { mac, filter, join, ..PortPolicy::default() };
        (&mut self.backend, PortBinding { entry: &mut self.entry, retired, dataplane, policy })
    }

    fn look(&mut self, retired: &mut Retired, scope: &mut Scope<'_>) -> Result<Life, StoreError> {
        let (backend, mut host) = self.split(retired, scope.dataplane);
        backend.look(scope.platform, scope.store, &mut host)
    }
}
