//! Control thread of the daemon.
//!
//! One thread runs [`Daemon::run`]. Each round waits for signals, the store, ports that closed, disks,
//! control rings, and clients of the status socket and of the metrics. Then it serves all of them once.
//! A round takes a bounded number of store events, so that no source keeps the others from being served.
//!
//! Other threads ask for a [`Snapshot`] through a mailbox and wait [`SNAPSHOT_TIMEOUT`] for the answer.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use ringfence_platform::{Platform, PlatformError};
use ringfence_switch::dataplane::{DataplaneStats, PortId};
use ringfence_sys::mailbox::{Mailbox, mailbox};
use ringfence_sys::poll::{wait_any, wait_readable};
use ringfence_wire::netif::keys;
use ringfence_wire::xenbus::{self, DeviceId, DeviceKind, XenbusState};
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};
use rustix::event::{PollFd, PollFlags};
use rustix::process::Signal;

use super::config::{Config, ConfigError, Effect};
use super::devices::{Devices, Served};
use super::disks::Vbds;
use super::host::{AfterControl, VifError, Vifs};
use super::made::MadeInterfaces;
use super::metrics::{Exporter, ExporterError};
use super::records::Records;
use super::status::{
    Attachment, Counts, DaemonStatus, HostStatus, QueueStatus, Snapshot, StatusSocket, VifStatus,
};
use super::vif::Vif;
use super::{OnExit, Setup};
use ringfence_driver::ports::device_name;
use ringfence_hostnet::netlink::Notices;
use ringfence_sandbox::signals::{Signals, name as signal_name};

/// Maximum number of store events that one round takes before it serves the devices that they name.
const EVENTS_PER_ROUND: usize = 256;
/// Time that guests have to disconnect when the daemon closes their devices and ends.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
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
    Vif(#[from] VifError),
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
    RuntimeDir(#[from] ringfence_hostnet::runtime_dir::RuntimeDirError),
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
    Confinement(#[from] ringfence_sandbox::isolation::SandboxError),
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Senders by which the control thread answers requests for a snapshot.
type SnapshotRequests = Mailbox<Sender<Snapshot>>;

/// Running daemon, with all that the control thread owns.
pub(super) struct Daemon<P: Platform> {
    setup: Setup,
    config: Config,
    platform: Arc<P>,
    store: StoreClient,
    signals: Signals,
    status: StatusSocket,
    requests: SnapshotRequests,
    devices: Devices,
    vifs: Vifs<P>,
    /// Devices of the kind vbd, if the daemon serves disks.
    disk_devices: Option<Devices>,
    disks: Vbds<P>,
    /// Devices whose control rings may have requests.
    controls: BTreeSet<DeviceId>,
    /// Changes of the host's interfaces.
    links: Notices,
    began: Instant,
}

/// Decision of the signal handler.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    Continue,
    End,
}

impl<P: Platform> Daemon<P> {
    /// Opens the records, the switch and the sockets. Serves no device yet.
    pub(super) fn new(
        setup: Setup,
        config: Config,
        platform: P,
        signals: Signals,
    ) -> Result<Daemon<P>, ServeError> {
        let platform = Arc::new(platform);
        let mut store = platform.store()?;
        let file = |path: PathBuf, what| {
            move |source| ServeError::File { path: path.clone(), what, source }
        };
        let directory = setup.runtime_dir.join("records");
        let records =
            Records::open(&directory).map_err(file(directory.clone(), "cannot be made"))?;
        let directory = setup.runtime_dir.join("interfaces");
        let made =
            MadeInterfaces::open(&directory).map_err(file(directory.clone(), "cannot be made"))?;
        let mut vifs = Vifs::new(Arc::clone(&platform), config.clone(), records, made)?;
        vifs.sweep(&mut store);
        vifs.make_switch()?;
        let socket = setup.status_socket(&config);
        let status =
            StatusSocket::listen(&socket).map_err(file(socket, "cannot be listened at"))?;
        let (requests, ask) = snapshot_requests()?;
        if let Some(listen) = &config.metrics.listen {
            Exporter::start(listen, ask)?;
        }
        let own = platform.domid();
        let devices = Devices::watch(&mut store, own, DeviceKind::Vif)?;
        let serves_disks = config.disks.serve;
        let disk_devices = serves_disks.then(|| Devices::watch(&mut store, own, DeviceKind::Vbd));
        let disk_devices = disk_devices.transpose()?;
        let disks = Vbds::new(Arc::clone(&platform), config.clone())?;
        let began = Instant::now();
        Ok(Daemon {
            setup,
            config,
            platform,
            store,
            signals,
            status,
            requests,
            devices,
            vifs,
            disk_devices,
            disks,
            controls: BTreeSet::new(),
            links: Notices::of_links()?,
            began,
        })
    }

    /// Runs rounds until a signal ends the daemon. Then leaves or closes the devices, by `--on-exit`.
    pub(super) fn run(mut self) -> Result<(), ServeError> {
        let mut more = true;
        loop {
            let deadline = if more { Some(Instant::now()) } else { self.deadline() };
            self.wait(deadline)?;
            if self.handle_signals()? == Flow::End {
                break;
            }
            more = self.run_round()?;
        }
        match self.setup.on_exit {
            OnExit::Keep => {
                self.vifs.leave();
                self.disks.leave();
            }
            OnExit::Close => self.close()?,
        }
        Ok(())
    }

    /// Returns the time at which a device is to be tried again.
    fn deadline(&self) -> Option<Instant> {
        let of_disks = self.disk_devices.as_ref().and_then(Devices::deadline);
        self.devices.deadline().into_iter().chain(of_disks).min()
    }

    /// Blocks until something happens, or until `until`. Notes the control rings that have requests.
    fn wait(&mut self, until: Option<Instant>) -> io::Result<()> {
        let mut fds = vec![
            PollFd::from_borrowed_fd(self.signals.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.store.fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.vifs.gone.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.disks.events.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.requests.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.links.as_fd(), PollFlags::IN),
        ];
        if self.status.has_room() {
            fds.push(PollFd::from_borrowed_fd(self.status.fd(), PollFlags::IN));
        }
        // All places are taken by clients that read their answers. Look again in a while.
        let until = match (self.status.has_room(), until) {
            (true, until) => until,
            (false, until) => {
                let soon = Instant::now() + Duration::from_millis(100);
                Some(until.map_or(soon, |until| until.min(soon)))
            }
        };
        let first = fds.len();
        let (devices, controls): (Vec<_>, Vec<_>) = self.vifs.controls().unzip();
        fds.extend(controls.into_iter().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        wait_any(&mut fds, until)?;
        let ready = devices.into_iter().zip(&fds[first..]);
        let ready = ready.filter(|(_, fd)| !fd.revents().is_empty()).map(|(device, _)| device);
        self.controls.extend(ready);
        Ok(())
    }

    /// Serves each control ring that may have requests, once. Returns `true` if some have more.
    fn serve_controls(&mut self) -> bool {
        let mut again = BTreeSet::new();
        for device in core::mem::take(&mut self.controls) {
            match self.vifs.serve_control(&device) {
                AfterControl::Wait => {}
                AfterControl::Look => self.devices.mark(&device),
                AfterControl::Again => {
                    again.insert(device);
                }
            }
        }
        self.controls = again;
        !self.controls.is_empty()
    }

    /// Serves all sources once. Returns `true` if more events may wait that were already read from the
    /// store's socket, so that `poll` does not report them.
    fn run_round(&mut self) -> Result<bool, ServeError> {
        self.vifs.gone.clear();
        while let Some(gone) = self.vifs.gone.next() {
            if let Some(device) = self.vifs.port_gone(gone) {
                self.devices.mark(&device);
            }
        }
        if self.links.clear() {
            self.vifs.follow_mtus();
        }
        let mut more = true;
        for _ in 0..EVENTS_PER_ROUND {
            let Some(event) = self.store.next_event()? else {
                more = false;
                break;
            };
            match &mut self.disk_devices {
                Some(disks) if event.token.starts_with(DeviceKind::Vbd.as_str()) => {
                    disks.handle_event(&event);
                }
                _ => self.devices.handle_event(&event),
            }
        }
        more |= self.serve_controls();
        more |= self.devices.work(&mut self.store, &mut self.vifs)?;
        for device in self.vifs.displaced.drain(..) {
            self.devices.mark(&device);
            more = true;
        }
        more |= self.serve_disks()?;
        more |= self.answer();
        Ok(more)
    }

    /// Serves the disks that have news. Returns `true` if there were any.
    fn serve_disks(&mut self) -> Result<bool, ServeError> {
        self.disks.events.clear();
        let Some(devices) = &mut self.disk_devices else { return Ok(false) };
        self.disks.events.drain().for_each(|device| devices.mark(&device));
        self.disks.drop_finished();
        Ok(devices.work(&mut self.store, &mut self.disks)?)
    }

    fn handle_signals(&mut self) -> Result<Flow, ServeError> {
        while let Some(arrived) = self.signals.next()? {
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
        let new = match self.setup.load() {
            Ok(new) => new,
            Err(error) => {
                tracing::error!(%error, "the configuration stays as it was");
                return;
            }
        };
        let changes = self.config.changes_to(&new);
        tracing::info!(%changes, "the configuration was read again");
        if changes.with(Effect::Restart).next().is_some() {
            tracing::warn!("some changes wait for the daemon to be started again");
        }
        self.config = self.config.reloaded(new);
        ringfence_hostnet::log::set_level(self.config.serve.log_level.level());
        self.vifs.reconfigure(self.config.clone());
        self.disks.reconfigure(self.config.clone());
        self.devices.mark_all();
        if let Some(disks) = &mut self.disk_devices {
            disks.mark_all();
        }
    }

    /// Closes all devices in an orderly way. Waits up to [`CLOSE_TIMEOUT`] for the guests to disconnect.
    fn close(&mut self) -> Result<(), ServeError> {
        let devices: Vec<DeviceId> = self.vifs.list.keys().copied().collect();
        for device in &devices {
            self.vifs.close(device, &mut self.store)?;
        }
        let disks: Vec<DeviceId> = self.disks.devices().copied().collect();
        for device in &disks {
            self.disks.close(device, &mut self.store)?;
        }
        let until = Instant::now() + CLOSE_TIMEOUT;
        loop {
            self.run_round()?;
            let open = devices.iter().filter(|device| self.vifs.list.contains_key(device));
            let open_disks = disks.iter().filter(|device| self.disks.has(device));
            let mut open: Vec<DeviceId> = open.chain(open_disks).copied().collect();
            open.retain(|device| {
                let state = state_of(&mut self.store, &device.backend_path());
                !matches!(state, Some(XenbusState::Closed) | None)
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
        devices.iter().for_each(|device| self.vifs.forget(device));
        disks.iter().for_each(|device| self.disks.forget(device));
        self.disks.leave();
        Ok(())
    }

    /// Answers requests for a snapshot. Returns `true` if there were any.
    fn answer(&mut self) -> bool {
        self.requests.clear();
        let waiting: Vec<_> = self.requests.drain().collect();
        let asked = !waiting.is_empty();
        if !asked && !wait_readable(self.status.fd(), Some(Duration::ZERO)).unwrap_or(false) {
            return false;
        }
        let snapshot = self.snapshot();
        for sender in waiting {
            // A thread whose time is over has dropped its receiver.
            let _ = sender.send(snapshot.clone());
        }
        self.status.answer(|| snapshot);
        true
    }

    /// Collects the state and the counters of the daemon and of its devices.
    fn snapshot(&mut self) -> Snapshot {
        let switch = self.vifs.switch().map(|dataplane| dataplane.stats().unwrap_or_default());
        let host_interface = self.vifs.host_leg.as_ref().map(|leg| HostStatus {
            name: leg.name.clone(),
            counters: port_counts(switch.as_ref(), Some(leg.port)).unwrap_or_default(),
        });
        let daemon = DaemonStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            platform: self.setup.platform_name().to_owned(),
            domain: self.platform.domid().0,
            pid: std::process::id(),
            uptime_seconds: self.began.elapsed().as_secs(),
            path: counts(self.platform.counters().values().named()),
            gone_ports: counts(self.vifs.retired_ports.counts()),
            gone_rules: counts(self.vifs.retired_rules.clone()),
            adopted: self.vifs.adopted,
            disks: self.disks.totals(),
            switch_addresses: switch.as_ref().map(|stats| stats.addresses as u64),
            host_interface,
        };
        let store = &mut self.store;
        let vifs = self.vifs.list.iter().map(|(device, vif)| {
            let stats = match &switch {
                Some(switch) => Some(switch.clone()),
                None => vif.dataplane().and_then(|dataplane| dataplane.stats()),
            };
            vif_status(device, vif, stats.as_ref(), store)
        });
        let vifs = vifs.collect();
        Snapshot { vifs, disks: self.disks.status(store), daemon }
    }
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

/// Returns the counters that are not zero.
pub(super) fn counts(all: impl IntoIterator<Item = (&'static str, u64)>) -> Counts {
    let some = all.into_iter().filter(|(_, count)| *count > 0);
    some.map(|(name, count)| (name.to_owned(), count)).collect()
}

fn port_counts(stats: Option<&DataplaneStats>, port: Option<PortId>) -> Option<Counts> {
    let port = stats?.ports.iter().find(|stats| Some(stats.id) == port)?;
    Some(counts(port.counters.iter().copied()))
}

pub(super) fn state_of(store: &mut StoreClient, directory: &str) -> Option<XenbusState> {
    let text = store.read_opt(&format!("{directory}/{}", xenbus::STATE)).ok()??;
    Some(XenbusState::parse(&text).unwrap_or(XenbusState::Missing))
}

pub(super) fn state_name(state: Option<XenbusState>) -> String {
    state.map_or_else(|| "none".to_owned(), |state| format!("{state:?}"))
}

fn vif_status(
    device: &DeviceId,
    vif: &Vif,
    stats: Option<&DataplaneStats>,
    store: &mut StoreClient,
) -> VifStatus {
    let (guest, tap) = vif.ports();
    let attachment = match vif.tap() {
        Some((interface, bridge)) => {
            Attachment::Tap { interface: interface.to_owned(), bridge: bridge.map(str::to_owned) }
        }
        None => Attachment::Switch,
    };
    let hotplug = store.read_opt(&format!("{}/{}", device.backend_path(), keys::HOTPLUG_STATUS));
    let hotplug = hotplug.ok().flatten().and_then(|text| String::from_utf8(text).ok());
    let connection = vif.backend.connection();
    let backend_state = state_of(store, &device.backend_path());
    let queues = port_counts(stats, guest).map(|counters| QueueStatus { counters });
    let rules: BTreeMap<_, _> = vif.backend.rules().all().into_iter().collect();
    VifStatus {
        name: device_name(device),
        domain: device.frontend.0,
        domain_name: vif.keys.domain_name.clone(),
        handle: device.handle,
        mac: vif.keys.mac.map(ringfence_net::vif::toolstack::mac_text),
        mtu: vif.mtu,
        attachment,
        backend_state: state_name(backend_state),
        frontend_state: state_name(state_of(store, &device.frontend_path())),
        hotplug_status: hotplug,
        connected: guest.is_some() && backend_state == Some(XenbusState::Connected),
        adopted: connection.is_some_and(|connection| connection.adopted),
        mode: vif.backend.mode().name().to_owned(),
        frontend_takes: connection.map(|connection| connection.features.peer.to_string()),
        backend_takes: connection.map(|connection| connection.features.own.to_string()),
        problem: vif.problem.clone().or_else(|| vif.backend.penalized().map(str::to_owned)),
        queue_count: connection.map_or(0, |connection| connection.queues),
        staged_pages: vif.backend.staged(),
        queues: queues.into_iter().collect(),
        tap: port_counts(stats, tap),
        rules: counts(rules),
    }
}
