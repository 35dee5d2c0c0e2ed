//! Domain of the daemon: what it owns beside devices, and its part in the control loop.
//!
//! Other threads ask for a [`Snapshot`] through a mailbox and wait [`SNAPSHOT_TIMEOUT`] for the answer.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use ringfence_access::staging::StagingPool;
use ringfence_block::storage::Disk;
use ringfence_hostnet::log;
use ringfence_hostnet::netlink::Notices;
use ringfence_hostnet::runtime_dir::RuntimeDirError;
use ringfence_memory::UringPool;
use ringfence_net::ctrl::record::CtrlRecord;
use ringfence_net::netback::QueueRecords;
use ringfence_net::vif::backend::QUEUES_MAX;
use ringfence_platform::{Platform, PlatformError};
use ringfence_sandbox::isolation::SandboxError;
use ringfence_sandbox::signals::{Signals, name as signal_name};
use ringfence_switch::dataplane::DataplaneHandle;
use ringfence_switch::forwarding::{Fabric, Mac, PortPolicy, Switch};
use ringfence_sys::mailbox::{Mailbox, mailbox};
use ringfence_sys::pressure::{PressureMonitor, Share};
use ringfence_wire::netif::keys;
use ringfence_wire::xenbus::{DeviceId, DeviceKind, XenbusState};
use ringfence_xenstore::{StoreClient, StoreError};
use rustix::process::Signal;

use super::args::OnExit;
use super::bridge;
use super::config::{Attach, Config, ConfigError, Effect};
use super::disks::vbd::XenVbd;
use super::made::MadeInterfaces;
use super::metrics::{Exporter, ExporterError};
use super::records::Records;
use super::setup::Setup;
use super::staging::Staging;
use super::states::state_of;
use super::status::{OrderedChange, Snapshot, StatusSocket};
use super::vif::{Attached, XenVif};
use crate::devices::Served;
use crate::domain::{Backends, Control, DriverDomain, Flow, OtherPort, Readiness};
use crate::host_leg::{HostLeg, HostTap};
use crate::ports::device_name;
use crate::vbds::{Vbd, rings};
use crate::vifs::Vif;
use crate::workers::{EndedPorts, worker_count};

/// Number of rings of io_uring. Threads serve the rings of guests' disks beyond it.
const RINGS: usize = 64;
/// Time that guests have to disconnect when the daemon closes their devices and ends.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for storage operations in flight of removed disks at the end.
const TEARDOWN_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that another thread waits for a snapshot.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(5);

/// Reasons for which the daemon does not start, or ends early.
#[derive(Debug, thiserror::Error)]
pub(super) enum ServeError {
    /// No hypervisor, or no right to use it.
    #[error(transparent)]
    Platform(#[from] PlatformError),
    #[error("xenstore: {0}")]
    Store(#[from] StoreError),
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Failure of the switch or of the host's interface on it.
    #[error(transparent)]
    Switch(#[from] SwitchError),
    #[error(transparent)]
    Metrics(#[from] ExporterError),
    /// Failure of a file or directory that the daemon needs.
    #[error("{}: {what}: {source}", path.display())]
    File {
        path: PathBuf,
        /// Operation that failed.
        what: &'static str,
        source: io::Error,
    },
    #[error("{0} (as root?)")]
    RuntimeDir(#[from] RuntimeDirError),
    /// Another daemon holds the lock.
    #[error(
        "another `ringfence serve` runs in this domain{}: stop it first (`systemctl stop ringfence-serve`, or \
         SIGTERM); guests stay connected when another one is started",
        pid.map(|pid| format!(", process {pid}")).unwrap_or_default()
    )]
    AnotherRuns {
        /// Process id of the other daemon.
        pid: Option<u32>,
    },
    /// The sandbox could not be entered.
    #[error(transparent)]
    Confinement(#[from] SandboxError),
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Reasons for which the daemon has no switch.
#[derive(Debug, thiserror::Error)]
pub(super) enum SwitchError {
    #[error(transparent)]
    Bridge(#[from] bridge::BridgeError),
    #[error(transparent)]
    System(#[from] io::Error),
    #[error(transparent)]
    Port(#[from] ringfence_switch::dataplane::AddPortError),
}

/// Senders by which the control thread answers requests for a snapshot.
type SnapshotRequests = Mailbox<Sender<Snapshot>>;

/// Domain of the daemon.
pub(super) struct XenDomain {
    pub(super) setup: Setup,
    pub(super) config: Config,
    signals: Signals,
    pub(super) status: StatusSocket,
    /// Orders of the socket's clients.
    pub(super) orders: Mailbox<OrderedChange>,
    pub(super) requests: SnapshotRequests,
    pub(super) records: Records,
    pub(super) made: MadeInterfaces,
    pub(super) switch: Option<DataplaneHandle>,
    pub(super) host_leg: Option<HostLeg>,
    staging: Staging,
    /// Rings for disks in files.
    pub(super) rings: Arc<UringPool>,
    /// Number of vifs that were taken over from an earlier daemon.
    pub(super) adopted_vifs: u64,
    /// Number of disks that were taken over from an earlier daemon.
    pub(super) adopted_disks: u64,
    /// Changes of the host's interfaces.
    links: Notices,
    pub(super) began: Instant,
}

/// Opens the records, the switch and the sockets. Serves no device yet.
pub(super) fn start<P: Platform>(
    setup: Setup,
    config: Config,
    platform: P,
    signals: Signals,
    pressure: PressureMonitor,
) -> Result<Control<P, XenDomain>, ServeError> {
    let platform = Arc::new(platform);
    let mut store = platform.store()?;
    let file =
        |path: PathBuf, what| move |source| ServeError::File { path: path.clone(), what, source };
    let directory = setup.runtime_dir.join("records");
    let records = Records::open(&directory).map_err(file(directory.clone(), "cannot be made"))?;
    let directory = setup.runtime_dir.join("interfaces");
    let made =
        MadeInterfaces::open(&directory).map_err(file(directory.clone(), "cannot be made"))?;
    // Interfaces of guests that were destroyed while no daemon ran, and of guests that are on the switch now.
    made.sweep(&config.network, platform.domid(), &mut store);
    let ended = EndedPorts::new()?;
    let (switch, host_leg) = make_switch(&config, &made, &ended, &*platform)?;
    let socket = setup.status_socket(&config);
    let (order_sender, orders) = mailbox()?;
    let status = StatusSocket::listen(&socket, order_sender);
    let status = status.map_err(file(socket, "cannot be listened at"))?;
    let (requests, ask) = snapshot_requests()?;
    if let Some(listen) = &config.metrics.listen {
        Exporter::start(listen, ask)?;
    }
    let serves_disks = config.disks.serve;
    let domain = XenDomain {
        setup,
        config,
        signals,
        status,
        orders,
        requests,
        records,
        made,
        switch,
        host_leg,
        staging: Staging::new(),
        rings: Arc::new(rings(if serves_disks { RINGS } else { 0 })),
        adopted_vifs: 0,
        adopted_disks: 0,
        links: Notices::of_links()?,
        began: Instant::now(),
    };
    let mut control = Control::new(domain, platform, store, ended, pressure)?;
    control.devices.discover(&mut control.store, DeviceKind::Vif)?;
    if serves_disks {
        control.devices.discover(&mut control.store, DeviceKind::Vbd)?;
    }
    Ok(control)
}

/// Creates the switch and the host's interface on it, if the configuration asks for them.
fn make_switch<P: Platform>(
    config: &Config,
    made: &MadeInterfaces,
    ended: &EndedPorts,
    platform: &P,
) -> Result<(Option<DataplaneHandle>, Option<HostLeg>), SwitchError> {
    if config.network.attach != Attach::Switch {
        return Ok((None, None));
    }
    let (workers, counters) = (worker_count(QUEUES_MAX), platform.counters());
    let fabric = || Fabric::Switch(Switch::new());
    let dataplane = ended.start_workers(workers, fabric, counters)?;
    let Some(name) = config.network.host_interface.clone() else {
        return Ok((Some(dataplane), None));
    };
    let tap = bridge::make_host_leg(&name)?;
    made.register(&name);
    let mtu = bridge::mtu_of(&name).unwrap_or(keys::MTU_DEFAULT);
    let tap = HostTap { queues: vec![tap.fd], offloads: tap.offloads, mtu };
    let policy = PortPolicy { addresses: 1024, ..PortPolicy::default() };
    let leg = HostLeg::attach(&dataplane, name, tap, policy, counters)?;
    Ok((Some(dataplane), Some(leg)))
}

/// Creates the mailbox for requests, and a function by which another thread gets a snapshot.
fn snapshot_requests()
-> io::Result<(SnapshotRequests, impl Fn() -> Option<Snapshot> + Send + 'static)> {
    let (sender, requests) = mailbox()?;
    let ask = move || {
        let (answer, answered) = channel();
        sender.send(answer).ok()?;
        answered.recv_timeout(SNAPSHOT_TIMEOUT).ok()
    };
    Ok((requests, ask))
}

impl<P: Platform> Control<P, XenDomain> {
    /// Serves until a signal ends the daemon. Then leaves or closes the devices, by `--on-exit`.
    pub(super) fn serve(mut self) -> Result<(), ServeError> {
        self.run()?;
        match self.backends.domain.setup.on_exit {
            OnExit::Keep => self.leave(),
            OnExit::Close => self.close()?,
        }
        Ok(())
    }

    /// Drops all devices without closing them, so that the next daemon can take them over.
    fn leave(&mut self) {
        self.backends.vifs.list.clear();
        self.backends.vbds.list.clear();
        if !self.backends.vbds.teardown.wait_until_done(TEARDOWN_TIMEOUT) {
            tracing::warn!("requests of disks were still under way at the end");
        }
    }

    fn handle_signals(&mut self) -> Result<Flow, ServeError> {
        while let Some(arrived) = self.backends.domain.signals.next()? {
            if arrived.number == Signal::HUP.as_raw() {
                self.reload();
                continue;
            }
            tracing::info!(signal = signal_name(arrived.number).unwrap_or("signal"), "ending");
            return Ok(Flow::End);
        }
        Ok(Flow::Continue)
    }

    /// Reads the configuration again. A configuration with an error changes nothing.
    fn reload(&mut self) {
        let domain = &mut self.backends.domain;
        let new = match domain.setup.load() {
            Ok(new) => new,
            Err(error) => {
                tracing::error!(%error, "the configuration stays as it was");
                return;
            }
        };
        let changes = domain.config.changes_to(&new);
        tracing::info!(%changes, "the configuration was read again");
        if changes.with(Effect::Restart).next().is_some() {
            tracing::warn!("some changes wait for the daemon to be started again");
        }
        domain.config = domain.config.reloaded(new);
        log::set_level(domain.config.serve.log_level.level());
        self.backends.reconfigure_vifs();
        self.backends.reconfigure_vbds();
        self.devices.mark_all();
    }

    /// Closes all devices in an orderly way. Waits up to [`CLOSE_TIMEOUT`] for the guests to disconnect.
    fn close(&mut self) -> Result<(), ServeError> {
        let Backends { vifs, vbds, .. } = &self.backends;
        let devices: Vec<DeviceId> = vifs.list.keys().chain(vbds.list.keys()).copied().collect();
        for device in &devices {
            self.backends.close(device, "the daemon ends");
            self.devices.mark(device);
        }
        let until = Instant::now() + CLOSE_TIMEOUT;
        loop {
            self.run_round()?;
            let mut open = devices.clone();
            open.retain(|device| {
                let state = state_of(&mut self.store, &device.backend_path());
                self.backends.has(device) && !matches!(state, Some(XenbusState::Closed) | None)
            });
            if open.is_empty() {
                break;
            }
            if Instant::now() >= until {
                let names: Vec<_> = open.iter().map(device_name).collect();
                tracing::warn!(?names, "these guests did not let go in time");
                break;
            }
            self.wait(Some(until))?;
        }
        devices.iter().for_each(|device| self.backends.forget(device));
        self.leave();
        Ok(())
    }
}

impl DriverDomain for XenDomain {
    const OWNS_DEVICES: bool = false;

    type Error = ServeError;
    type Vif = XenVif;
    type Vbd = XenVbd;

    fn sources(&self) -> Vec<BorrowedFd<'_>> {
        let Self { signals, requests, links, orders, .. } = self;
        let mut sources = vec![signals.as_fd(), requests.as_fd(), links.as_fd(), orders.as_fd()];
        sources.extend(self.status.has_room().then(|| self.status.fd()));
        sources
    }

    fn deadline(&self) -> Option<Instant> {
        // All places are taken by clients that read their answers. Look again in a while.
        (!self.status.has_room()).then(|| Instant::now() + Duration::from_millis(100))
    }

    fn serve<P: Platform>(control: &mut Control<P, Self>) -> Result<Flow, ServeError> {
        let flow = control.handle_signals()?;
        if flow == Flow::Continue && control.backends.domain.links.clear() {
            control.backends.follow_mtus();
        }
        control.serve_orders();
        Ok(flow)
    }

    fn finish_round<P: Platform>(control: &mut Control<P, Self>) -> bool {
        control.answer()
    }

    fn refresh<P: Platform>(
        backends: &mut Backends<P, Self>,
        device: &DeviceId,
        store: &mut StoreClient,
    ) -> Result<(), StoreError> {
        match device.kind {
            DeviceKind::Vif => backends.refresh_vif(device, store),
            DeviceKind::Vbd => backends.refresh_vbd(device, store),
        }
    }

    fn attach_vif<P: Platform>(
        backends: &mut Backends<P, Self>,
        device: &DeviceId,
        vif: &mut Vif<XenVif>,
    ) -> Result<(), String> {
        backends.attach_vif(device, vif).map_err(|error| error.to_string())
    }

    fn dataplane<'a>(&'a self, vif: &'a XenVif) -> Option<&'a DataplaneHandle> {
        vif.dataplane()
    }

    fn port_policy(&self, vif: &XenVif) -> PortPolicy {
        PortPolicy {
            mac: vif.keys.mac.filter(|_| vif.settings.check_source),
            addresses: vif.settings.addresses,
            ..PortPolicy::default()
        }
    }

    fn is_held_to(&self, vif: &XenVif, mac: Mac) -> bool {
        let on_switch = matches!(vif.attached, Some(Attached::Switch(_)));
        on_switch && vif.settings.check_source && vif.keys.mac == Some(mac)
    }

    fn vif_changed(&mut self, device: &DeviceId, vif: &mut Vif<XenVif>) {
        self.follow_connection(device, vif);
    }

    fn other_port_gone<P: Platform>(
        backends: &mut Backends<P, Self>,
        port: &OtherPort,
    ) -> Option<DeviceId> {
        backends.retire_tap(port)
    }

    fn vif_removed(&mut self, device: &DeviceId, vif: XenVif) {
        self.remove_vif(device, vif);
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

    fn ctrl_record(&mut self, device: &DeviceId) -> Option<CtrlRecord> {
        let name = device_name(device);
        let record = self.records.of_control(&name);
        record
            .inspect_err(|error| {
                tracing::warn!(%name, %error, "what is staged cannot be taken over");
            })
            .ok()
    }

    fn remove_records(&mut self, device: &DeviceId) {
        self.records.remove(&device_name(device));
    }

    fn set_share(&mut self, share: Share) {
        self.staging.set_share(share);
    }

    fn staging_pools(&mut self, device: &DeviceId) -> Vec<Arc<StagingPool>> {
        self.staging.of(device.frontend).to_vec()
    }

    fn open_vbd<P: Platform>(
        backends: &mut Backends<P, Self>,
        device: &DeviceId,
        vbd: &mut Vbd<XenVbd>,
    ) -> Readiness {
        backends.open_vbd(device, vbd)
    }

    fn report_storage(
        &mut self,
        device: &DeviceId,
        vbd: &mut Vbd<XenVbd>,
        store: &mut StoreClient,
    ) -> Result<(), StoreError> {
        XenVbd::report_storage(device, vbd, store)
    }

    fn commit_disk(
        &mut self,
        device: &DeviceId,
        vbd: &mut Vbd<XenVbd>,
        store: &mut StoreClient,
    ) -> Result<(), String> {
        self.commit_overlay(device, vbd, store)
    }

    fn disk_replaced(
        &mut self,
        device: &DeviceId,
        vbd: &mut Vbd<XenVbd>,
        store: &mut StoreClient,
        old: Option<Arc<dyn Disk>>,
        outcome: Result<(), String>,
    ) {
        self.end_change(device, vbd, store, old, outcome);
    }

    fn vbd_changed(&mut self, device: &DeviceId, vbd: &mut Vbd<XenVbd>) {
        let adopted = XenVbd::report_connection(device, vbd);
        self.adopted_disks += u64::from(adopted);
    }
}
