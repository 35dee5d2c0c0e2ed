//! Driver domain of a switch: its guests, its lifetime, and its part in the control loop.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringfence_block::storage::Disk;
use ringfence_frame::port::Fault;
use ringfence_memory::UringPool;
use ringfence_nbd::client::Dialer;
use ringfence_platform::local::hub::HubHandle;
use ringfence_platform::{DomId, Platform};
use ringfence_sandbox::channel::Channel;
use ringfence_switch::dataplane::DataplaneHandle;
use ringfence_switch::forwarding::filter::AddressFilter;
use ringfence_switch::forwarding::{Mac, PortPolicy};
use ringfence_sys::descriptors::{Descriptors, dispose};
use ringfence_wire::xenbus::{DeviceId, DeviceKind};
use ringfence_xenstore::{StoreClient, StoreError};

use super::addresses::{AddressPlan, Assigned};
use super::admission::Admission;
use super::error::DriverError;
use super::launcher::LauncherConnection;
use crate::domain::{Backends, Control, DriverDomain, Flow, OtherPort};
use crate::host_leg::HostLeg;
use crate::switchboard::FromDriver;
use crate::vbds::Vbd;

/// Time limit for the first guest. Also limits the delay of the end by connections that arrive
/// after the last guest has left.
const GUEST_WITHIN: Duration = Duration::from_secs(10);
/// Time from the first guest until the code that only starts a driver domain is unmapped.
const SETTLES_WITHIN: Duration = Duration::from_secs(1);
/// Maximum number of connections, with and without a guest.
const CONNECTIONS_MAX: usize = 1024;
/// Maximum number of connections that are not admitted yet. Another one replaces the oldest.
const UNADMITTED_MAX: usize = 64;

/// Connection of a launcher, and its guest once it is attached.
pub(super) struct Guest {
    pub(super) launcher: LauncherConnection,
    /// Domain of the guest, once it is attached.
    pub(super) domain: Option<DomId>,
    /// Name by which other guests find the guest.
    pub(super) name: Option<String>,
    pub(super) leg: Option<Leg>,
    pub(super) disks: u16,
}

/// Port of the host: reserved addresses, and the port once it is on the switch.
pub(super) struct Leg {
    pub(super) assigned: Assigned,
    pub(super) port: Option<HostLeg>,
}

/// Addresses of a vif, and the policy of its port.
pub(super) struct SwitchVif {
    pub(super) assigned: Assigned,
    pub(super) filter: Arc<AddressFilter>,
    /// Joins small TCP segments on their way to the guest.
    pub(super) join: bool,
}

/// Source of connections of a disk on an NBD server.
pub(super) struct SwitchVbd {
    /// Number of the guest's disk.
    pub(super) handle: u16,
    pub(super) dialer: Option<Arc<Dialer>>,
}

/// Driver domain of a switch.
pub(super) struct SwitchDomain {
    listener: OwnedFd,
    pub(super) hub: HubHandle,
    pub(super) dataplane: DataplaneHandle,
    pub(super) plan: AddressPlan,
    pub(super) admission: Admission,
    pub(super) rings: Arc<UringPool>,
    pub(super) guests: Vec<Guest>,
    lifetime: Lifetime,
}

/// Times that decide when a driver domain ends.
#[derive(Default)]
struct Lifetime {
    /// Time at which the domain ends without a guest.
    end: Option<Instant>,
    had_guests: bool,
    /// Time at which the code of the start is unmapped.
    settles: Option<Instant>,
    /// Time at which the last guest left.
    left: Option<Instant>,
}

/// Parts of a driver domain that its process makes at the start.
pub(super) struct Parts {
    pub(super) listener: OwnedFd,
    pub(super) hub: HubHandle,
    pub(super) dataplane: DataplaneHandle,
    pub(super) admission: Admission,
    /// Rings for disks in files.
    pub(super) rings: UringPool,
}

impl SwitchDomain {
    /// Creates the domain of the switch `name`, without a guest.
    pub(super) fn new(name: &str, parts: Parts) -> SwitchDomain {
        let Parts { listener, hub, dataplane, admission, rings } = parts;
        let lifetime = Lifetime { end: Some(Instant::now() + GUEST_WITHIN), ..Lifetime::default() };
        let (plan, guests) = (AddressPlan::new(name), Vec::new());
        let rings = Arc::new(rings);
        SwitchDomain { listener, hub, dataplane, plan, admission, rings, guests, lifetime }
    }

    // #syscall driver accept4: launchers connect
    // #syscall driver getsockopt 1=SOL_SOCKET: the user of a connection
    fn accept(&mut self) {
        use rustix::net::SocketFlags;
        while let Ok(socket) = rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC) {
            self.add_connection(Channel::from_fd(socket));
        }
    }

    // #syscall driver ioctl 1=0x5421: FIONBIO: O_NONBLOCK of a new listening socket
    /// Replaces the listening socket. Connections stay. Returns the reason if the descriptor is no such socket.
    pub(super) fn replace_listener(&mut self, fds: Descriptors) -> Result<(), String> {
        use rustix::net::{SocketType, sockopt};
        let [listener] = fds.exactly().map_err(|found| format!("{found} descriptors, not 1"))?;
        let listens = sockopt::socket_acceptconn(&listener) == Ok(true)
            && sockopt::socket_type(&listener) == Ok(SocketType::SEQPACKET);
        if !listens || rustix::io::ioctl_fionbio(&listener, true).is_err() {
            dispose(listener);
            return Err("it came with no listening socket".to_owned());
        }
        self.listener = listener;
        Ok(())
    }

    /// Adds a connection. It must prove to be a launcher's before requests are served.
    pub(super) fn add_connection(&mut self, channel: Channel) {
        let is_unadmitted = |guest: &Guest| !guest.launcher.is_admitted();
        if self.guests.len() >= CONNECTIONS_MAX || !self.admission.is_own_user(&channel) {
            return channel.dispose();
        }
        if self.guests.iter().filter(|guest| is_unadmitted(guest)).count() >= UNADMITTED_MAX
            && let Some(oldest) = self.guests.iter().position(is_unadmitted)
        {
            self.guests.remove(oldest).launcher.channel.dispose();
        }
        self.guests.push(Guest::new(channel));
    }

    fn any_attached(&self) -> bool {
        self.guests.iter().any(|guest| guest.domain.is_some())
    }

    /// Returns `true` if the end of the driver domain must be delayed for a connection without a
    /// guest.
    fn any_newcomer(&self, now: Instant) -> bool {
        self.guests.iter().any(|guest| guest.launcher.newcomer_until(self.lifetime.left) > now)
    }

    /// Records that a guest has left.
    pub(super) fn note_departure(&mut self) {
        self.lifetime.left = Some(Instant::now());
    }

    /// Sends a message to all launchers.
    pub(super) fn broadcast(&self, message: &FromDriver) {
        self.guests.iter().for_each(|guest| guest.launcher.channel.send_or_drop(message));
    }

    /// Decides whether the domain ends now.
    fn follow_lifetime(&mut self) -> Flow {
        if self.any_attached() {
            let lifetime = &mut self.lifetime;
            if !lifetime.had_guests {
                lifetime.settles = Some(Instant::now() + SETTLES_WITHIN);
            }
            if lifetime.settles.take_if(|at| *at <= Instant::now()).is_some() {
                ringfence_sys::code::unmap();
            }
            (lifetime.had_guests, lifetime.end) = (true, None);
            return Flow::Continue;
        }
        self.lifetime.settles = None;
        // A launcher may have connected meanwhile.
        self.accept();
        let now = Instant::now();
        let end = *self.lifetime.end.get_or_insert_with(|| now + GUEST_WITHIN);
        if now >= end || (self.lifetime.had_guests && !self.any_newcomer(now)) {
            return Flow::End;
        }
        Flow::Continue
    }

    /// Returns the guest of a device.
    fn guest_of(&mut self, device: &DeviceId) -> Option<&mut Guest> {
        self.guests.iter_mut().find(|guest| guest.domain == Some(device.frontend))
    }

    /// Sends a message to the launcher of a device's guest.
    fn send(&mut self, device: &DeviceId, message: &FromDriver) {
        if let Some(guest) = self.guest_of(device) {
            guest.launcher.send(message, &[]);
        }
    }
}

impl Guest {
    fn new(channel: Channel) -> Guest {
        Guest {
            launcher: LauncherConnection::new(channel),
            domain: None,
            name: None,
            leg: None,
            disks: 0,
        }
    }

    /// Returns the time at which the connection expires. `None` with a guest.
    pub(super) fn expires(&self) -> Option<Instant> {
        self.domain.is_none().then(|| self.launcher.expires())
    }

    /// Returns the vif of the guest, whether it has one or not.
    pub(super) fn vif(&self) -> Option<DeviceId> {
        self.domain.map(vif_of)
    }

    /// Iterates over the disks of the guest.
    pub(super) fn vbds(&self) -> impl Iterator<Item = DeviceId> + use<> {
        let domain = self.domain;
        (0..self.disks).filter_map(move |handle| Some(vbd_of(domain?, handle)))
    }
}

/// Returns the vif of a guest.
pub(super) fn vif_of(frontend: DomId) -> DeviceId {
    DeviceId { kind: DeviceKind::Vif, frontend, backend: DomId(0), handle: 0 }
}

/// Returns the disk `handle` of a guest.
pub(super) fn vbd_of(frontend: DomId, handle: u16) -> DeviceId {
    let handle = handle.into();
    DeviceId { kind: DeviceKind::Vbd, frontend, backend: DomId(0), handle }
}

impl DriverDomain for SwitchDomain {
    const OWNS_DEVICES: bool = true;

    type Error = DriverError;
    type Vif = SwitchVif;
    type Vbd = SwitchVbd;

    fn sources(&self) -> Vec<BorrowedFd<'_>> {
        let launchers = self.guests.iter().map(|guest| guest.launcher.channel.as_fd());
        std::iter::once(self.listener.as_fd()).chain(launchers).collect()
    }

    fn deadline(&self) -> Option<Instant> {
        let Lifetime { end, settles, left, .. } = self.lifetime;
        let any_attached = self.any_attached();
        let newcomers = self.guests.iter().filter(|_| !any_attached);
        let newcomers = newcomers.map(|guest| guest.launcher.newcomer_until(left));
        let expiries = self.guests.iter().filter_map(Guest::expires);
        expiries.chain(newcomers).chain(end).chain(settles).min()
    }

    fn serve<P: Platform>(control: &mut Control<P, Self>) -> Result<Flow, DriverError> {
        control.backends.domain.accept();
        control.serve_launchers();
        Ok(control.backends.domain.follow_lifetime())
    }

    fn dataplane<'a>(&'a self, _: &'a SwitchVif) -> Option<&'a DataplaneHandle> {
        Some(&self.dataplane)
    }

    fn port_policy(&self, vif: &SwitchVif) -> PortPolicy {
        let (mac, join) = (Some(vif.assigned.mac), vif.join);
        let filter = Some(Arc::clone(&vif.filter));
        PortPolicy { mac, filter, join, ..PortPolicy::default() }
    }

    fn is_held_to(&self, vif: &SwitchVif, mac: Mac) -> bool {
        vif.assigned.mac == mac
    }

    fn vif_penalized(&mut self, device: &DeviceId, why: &str) {
        let why = format!("its frontend could not be connected: {why}");
        self.send(device, &FromDriver::DeviceClosed(why));
    }

    fn vif_port_gone(&mut self, device: &DeviceId, reason: &Fault) {
        if !matches!(reason, Fault::Gone) {
            self.send(device, &FromDriver::DeviceClosed(reason.to_string()));
        }
    }

    fn other_port_gone<P: Platform>(
        backends: &mut Backends<P, Self>,
        port: &OtherPort,
    ) -> Option<DeviceId> {
        let OtherPort { name, reason, .. } = port;
        tracing::warn!(%name, %reason, "a port ended");
        for leg in backends.domain.guests.iter_mut().filter_map(|guest| guest.leg.as_mut()) {
            leg.port.take_if(|leg| leg.is(port));
        }
        None
    }

    fn vif_removed(&mut self, _: &DeviceId, vif: SwitchVif) {
        self.plan.release(&vif.assigned);
    }

    fn refresh<P: Platform>(
        backends: &mut Backends<P, Self>,
        device: &DeviceId,
        _: &mut StoreClient,
    ) -> Result<(), StoreError> {
        if let Some(Vbd { own: SwitchVbd { handle, dialer: Some(dialer) }, .. }) =
            backends.vbds.list.get(device)
            && dialer.is_wanted()
        {
            backends.domain.send(device, &FromDriver::Dial { handle: *handle });
        }
        Ok(())
    }

    fn disk_replaced(
        &mut self,
        device: &DeviceId,
        vbd: &mut Vbd<SwitchVbd>,
        _: &mut StoreClient,
        _: Option<Arc<dyn Disk>>,
        outcome: Result<(), String>,
    ) {
        let handle = vbd.own.handle;
        self.send(device, &FromDriver::DiskChanged { handle, problem: outcome.err() });
    }

    fn vbd_penalized(&mut self, device: &DeviceId, vbd: &Vbd<SwitchVbd>, why: &str) {
        let (handle, why) = (vbd.own.handle, why.to_owned());
        self.send(device, &FromDriver::DiskClosed { handle, why });
    }
}
