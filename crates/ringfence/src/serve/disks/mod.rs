//! Disks of the daemon: the storage of each disk and its xenbus handshake.
//!
//! # How it works
//!
//! The control thread announces a disk to its guest at once, because the toolstack waits for that. A
//! thread of its own opens the storage meanwhile (`opener`). The control thread connects a guest that
//! is ready once the storage is open. If the storage cannot be opened, the log, the status and the key
//! [`DISK_STATUS`] say why, and the daemon tries again every two seconds. The storage stays open until
//! the device is removed, or until its keys or the configuration change while no guest is connected.
//!
//! ```text
//! opener thread ──┐ DeviceId                    ┌── store: states, `disk-status`
//! ring threads  ──┴─────────> mailbox ─> control┤
//!                             `events`   thread └── VbdBackend: handshake, rings
//! ```
//!
//! Each ring has a thread of its own. The control thread never waits for a ring thread, and a ring
//! thread never waits for the control thread. A disk that hangs delays only its own guest.
//!
//! # Restart
//!
//! The backend itself finds the requests that an earlier daemon left in a ring
//! ([`ringfence_ring::AnyOrderRing`]). There are no other records of disks.

mod keys;
mod opener;
mod report;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use ringfence_block::blkback::{PersistentCounters, QueueCounters, named_persistent};
use ringfence_block::storage::Geometry;
use ringfence_block::vbd::backend::{Connection, VbdBackend};
use ringfence_platform::Platform;
use ringfence_sys::mailbox::{MailSender, Mailbox, mailbox};
use ringfence_wire::xenbus::DeviceId;
use ringfence_xenbus::end::Life;
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

use self::keys::{NoSource, Source, VbdKeys};
use self::opener::{OpenRequest, Opening};
use super::config::{Config, DiskSettings};
use super::devices::{Look, Served};
use ringfence_driver::ports::device_name;
use ringfence_hostnet::log::LineBudget;

/// Key in the backend's directory: `open`, or the reason for which the storage is not open.
const DISK_STATUS: &str = "disk-status";
/// Value of [`DISK_STATUS`] while the storage is open.
const OPEN: &str = "open";

/// Maximum number of pages that all rings together keep mapped. Each page is one mapping, and a process
/// can have 65530.
pub(super) const KEPT_PAGES_MAX: u32 = 49_152;

/// Directory that exists while the kernel's own backend is loaded.
const KERNEL_BACKEND: &str = "/sys/bus/xen-backend/drivers/vbd";

/// Reasons for which a disk is not served for now.
#[derive(Debug, thiserror::Error)]
enum VbdError {
    /// Both backends would answer the guest.
    #[error(
        "the kernel's xen-blkback is loaded, and serves disks: unload it (`rmmod xen-blkback`), or set \
         `serve = false` in [disks] of the configuration"
    )]
    KernelBackend,
    #[error("{limit} disks {of} are served already; see `limits` in the configuration")]
    TooMany { of: &'static str, limit: u16 },
    #[error(transparent)]
    Source(#[from] NoSource),
    #[error(transparent)]
    Open(#[from] opener::OpenError),
}

/// State of a disk's storage.
enum Storage {
    Closed,
    Opening(Opening),
    Open(Geometry),
}

/// Counters of one ring.
type RingCounters = (Arc<QueueCounters>, Arc<PersistentCounters>);

/// One disk and its handshake.
struct Vbd {
    keys: VbdKeys,
    settings: DiskSettings,
    /// Request that opened, or is to open, the storage.
    request: Option<OpenRequest>,
    storage: Storage,
    backend: VbdBackend,
    problem: Option<String>,
    /// Counters of the rings in use.
    rings: Vec<RingCounters>,
    /// Value last written to [`DISK_STATUS`].
    reported: Option<String>,
    /// Budget for log lines that the guest causes by connecting and disconnecting.
    lines: LineBudget,
}

impl Vbd {
    /// Returns the maximum number of pages that the disk's rings keep mapped.
    fn kept_pages(&self) -> u32 {
        let rings = self.backend.connection().map_or(0, |connection| connection.queues);
        rings * u32::from(self.settings.persistent_pages)
    }
}

/// All disks of the daemon.
pub(super) struct Vbds<P: Platform> {
    platform: Arc<P>,
    config: Config,
    /// Devices for which a ring thread or an opener thread has news. Several entries may name one device.
    pub(super) events: Mailbox<DeviceId>,
    event_sender: MailSender<DeviceId>,
    list: BTreeMap<DeviceId, Vbd>,
    /// Devices that were removed and still have I/O in flight.
    leaving: Vec<VbdBackend>,
    retired: BTreeMap<&'static str, u64>,
    retired_rules: BTreeMap<&'static str, u64>,
    adopted: u64,
}

impl<P: Platform> Vbds<P> {
    pub(super) fn new(platform: Arc<P>, config: Config) -> io::Result<Vbds<P>> {
        let (event_sender, events) = mailbox()?;
        Ok(Vbds {
            platform,
            config,
            events,
            event_sender,
            list: BTreeMap::new(),
            leaving: Vec::new(),
            retired: BTreeMap::new(),
            retired_rules: BTreeMap::new(),
            adopted: 0,
        })
    }

    /// Applies a new configuration to all disks. Connected guests keep most of what they negotiated.
    pub(super) fn reconfigure(&mut self, config: Config) {
        self.config = config;
        for vbd in self.list.values_mut() {
            let keys = &vbd.keys;
            vbd.settings = settings_of(&self.config, keys);
            vbd.backend.reconfigure(vbd.settings.options());
        }
    }

    pub(super) fn devices(&self) -> impl Iterator<Item = &DeviceId> {
        self.list.keys()
    }

    /// Returns `true` if the device is served.
    pub(super) fn has(&self, device: &DeviceId) -> bool {
        self.list.contains_key(device)
    }

    /// Discards removed devices whose I/O has completed.
    pub(super) fn drop_finished(&mut self) {
        self.leaving.retain_mut(VbdBackend::is_leaving);
    }

    /// Drops all devices without closing them, so that the next daemon can take them over.
    pub(super) fn leave(&mut self) {
        self.list.clear();
        self.leaving.clear();
    }

    /// Starts to close a device.
    pub(super) fn close(
        &mut self,
        device: &DeviceId,
        store: &mut StoreClient,
    ) -> Result<(), StoreError> {
        let Some(vbd) = self.list.get_mut(device) else { return Ok(()) };
        vbd.backend.close_with_penalty("the daemon ends");
        self.look(device, store).map(drop)
    }

    /// Returns a function that puts a device into the mailbox.
    fn notifier(&self, device: DeviceId) -> impl Fn() + Send + Sync + 'static {
        let events = self.event_sender.clone();
        move || {
            // The send fails only when the daemon ends.
            let _ = events.send(device);
        }
    }

    /// Creates the record of a device that has not been served yet.
    fn new_vbd(&self, device: &DeviceId, keys: VbdKeys) -> Vbd {
        let settings = settings_of(&self.config, &keys);
        let ring = Arc::new(self.notifier(*device));
        let backend = VbdBackend::without_disk(*device, settings.options(), ring);
        Vbd {
            keys,
            settings,
            request: None,
            storage: Storage::Closed,
            backend,
            problem: None,
            rings: Vec::new(),
            reported: None,
            lines: LineBudget::new(),
        }
    }

    /// Removes a device from the list. Reads its keys again unless it is connected: a toolstack may have
    /// created it again with other keys.
    fn take_vbd(&mut self, device: &DeviceId, store: &mut StoreClient) -> Result<Vbd, StoreError> {
        let known = match self.list.remove(device) {
            Some(vbd) if vbd.backend.connection().is_some() => return Ok(vbd),
            known => known,
        };
        let mut keys = match VbdKeys::read(store, device) {
            Ok(keys) => keys,
            Err(error) => {
                self.list.extend(known.map(|vbd| (*device, vbd)));
                return Err(error);
            }
        };
        let Some(mut vbd) = known else { return Ok(self.new_vbd(device, keys)) };
        // A sector size that this daemon wrote itself is no reason to open the storage again.
        keys.fixed_sector_size = keys.fixed_sector_size.and(vbd.keys.fixed_sector_size);
        if vbd.keys != keys {
            vbd.settings = settings_of(&self.config, &keys);
            vbd.backend.reconfigure(vbd.settings.options());
            vbd.keys = keys;
        }
        Ok(vbd)
    }

    /// Builds the request that opens a disk's storage.
    fn request(&self, vbd: &Vbd) -> Result<OpenRequest, NoSource> {
        let Vbd { keys, settings, .. } = vbd;
        let disks = &self.config.disks;
        Ok(OpenRequest {
            source: keys.source.clone()?,
            read_only: keys.read_only,
            discard: keys.discard,
            direct_io_safe: keys.direct_io_safe,
            cache: settings.cache,
            bounce: settings.bounce,
            sector_size: keys.fixed_sector_size.or(settings.sector_size),
            paths: disks.paths.clone(),
            nbd: disks.nbd,
            in_use: keys.fixed_sector_size.is_some(),
        })
    }

    /// Opens the storage if it is neither open nor being opened, and collects the result.
    fn open(&self, device: &DeviceId, vbd: &mut Vbd) -> Result<(), VbdError> {
        if vbd.backend.connection().is_some() {
            return Ok(());
        }
        if Path::new(KERNEL_BACKEND).exists() {
            return Err(VbdError::KernelBackend);
        }
        self.is_full(device)?;
        let request = self.request(vbd);
        if vbd.request.as_ref() != request.as_ref().ok() {
            // Other storage or other options. The storage stays locked until the last user drops it.
            vbd.backend.set_disk(None);
            vbd.storage = Storage::Closed;
            vbd.request = request.as_ref().ok().cloned();
        }
        let request = request?;
        if let Storage::Closed = vbd.storage {
            let opening = Opening::begin(request, self.notifier(*device));
            vbd.storage = Storage::Opening(opening.map_err(opener::OpenError::from)?);
        }
        let Storage::Opening(opening) = &vbd.storage else { return Ok(()) };
        match opening.poll() {
            None => Ok(()),
            Some(Ok(disk)) => {
                vbd.storage = Storage::Open(disk.geometry());
                vbd.backend.set_disk(Some(disk));
                Ok(())
            }
            Some(Err(error)) => {
                vbd.storage = Storage::Closed;
                Err(error.into())
            }
        }
    }

    /// Checks the limits on served disks.
    fn is_full(&self, device: &DeviceId) -> Result<(), VbdError> {
        let open = |vbd: &Vbd| !matches!(vbd.storage, Storage::Closed);
        let served = self.list.iter().filter(|(_, vbd)| open(vbd)).map(|(of, _)| of);
        let of_domain = served.clone().filter(|other| other.frontend == device.frontend).count();
        let limits = &self.config.limits;
        for (count, limit, of) in [
            (served.count(), limits.disks, "of all domains"),
            (of_domain, limits.disks_per_domain, "of this domain"),
        ] {
            if count >= usize::from(limit) {
                return Err(VbdError::TooMany { of, limit });
            }
        }
        Ok(())
    }

    /// Reports the state of the storage in the log and to the toolstack.
    fn report_storage(
        device: &DeviceId,
        vbd: &mut Vbd,
        store: &mut StoreClient,
        cause: Option<&VbdError>,
    ) -> Result<(), StoreError> {
        let problem = match (cause, &vbd.storage) {
            // The last problem stays valid while the storage is being opened again.
            (None, Storage::Opening(_)) => vbd.problem.clone(),
            (cause, _) => cause.map(ToString::to_string),
        };
        if let Some(why) = problem.as_ref().filter(|_| problem != vbd.problem) {
            match cause {
                Some(VbdError::Source(NoSource::Script | NoSource::NoMedium)) => {
                    tracing::info!(name = %device_name(device), %why, "it is not served yet");
                }
                _ => tracing::error!(name = %device_name(device), %why, "it is not served"),
            }
        }
        vbd.problem = problem;
        let reported = match (&vbd.problem, &vbd.storage) {
            (Some(why), _) => why.clone(),
            (None, Storage::Open(_)) => OPEN.to_owned(),
            (None, _) => return Ok(()),
        };
        if vbd.reported.as_ref() != Some(&reported) {
            let back = device.backend_path();
            let state = format!("{back}/{}", ringfence_wire::xenbus::STATE);
            store.transaction(|t| match t.read_opt(&state)? {
                Some(_) => t.write(&format!("{back}/{DISK_STATUS}"), &reported),
                // A write would create a directory again that the toolstack has removed.
                None => Ok(()),
            })?;
            vbd.reported = Some(reported);
        }
        Ok(())
    }

    /// Advances the handshake of a disk, and collects the counters of its rings.
    fn advance(
        &mut self,
        device: &DeviceId,
        vbd: &mut Vbd,
        store: &mut StoreClient,
    ) -> Result<Life, StoreError> {
        let before = vbd.backend.connection().copied();
        if before.is_none() {
            let kept: u32 = self.list.values().map(Vbd::kept_pages).sum();
            let left = KEPT_PAGES_MAX.saturating_sub(kept) / vbd.settings.max_queues.max(1);
            let most = u16::try_from(left).unwrap_or(u16::MAX);
            vbd.backend.keep_pages(vbd.settings.persistent_pages.min(most));
        }
        let life = vbd.backend.look(&*self.platform, store);
        let now = vbd.backend.connection().copied();
        if now != before {
            self.retire_rings(&mut vbd.rings);
            let served = vbd.backend.served().into_iter();
            vbd.rings = served
                .flat_map(|served| served.counters())
                .map(|(queue, kept)| (Arc::clone(queue), Arc::clone(kept)))
                .collect();
            let unanswered = vbd.backend.served().map_or(0, |served| served.adopted());
            if let Some(unlogged) = vbd.lines.take() {
                report_change(device, now, unanswered, unlogged);
            }
            self.adopted += u64::from(now.is_some_and(|connection| connection.adopted));
        }
        life
    }

    fn retire_rings(&mut self, rings: &mut Vec<RingCounters>) {
        for (name, count) in rings.drain(..).flat_map(|ring| ring_counts(&ring)) {
            *self.retired.entry(name).or_default() += count;
        }
    }
}

/// Returns the settings of a disk, with those limits that its storage needs.
fn settings_of(config: &Config, keys: &VbdKeys) -> DiskSettings {
    let mut settings = config.disk(keys.domain_name.as_deref(), keys.vdev.as_deref());
    // The order of writes on a server's disk is known only within one connection.
    if let Ok(Source::Nbd(_)) = keys.source {
        settings.max_queues = 1;
    }
    settings
}

/// Logs that a disk was connected, taken over or disconnected. `unlogged` is the number of such lines
/// that were dropped.
fn report_change(device: &DeviceId, now: Option<Connection>, unanswered: u32, unlogged: u64) {
    let name = device_name(device);
    match now {
        Some(connection) if connection.adopted => {
            tracing::info!(%name, unanswered, unlogged, "taken over");
        }
        Some(Connection { queues, ring_pages, persistent, .. }) => {
            tracing::info!(%name, queues, ring_pages, persistent, unlogged, "connected");
        }
        None => tracing::info!(%name, unlogged, "disconnected"),
    }
}

fn ring_counts((queue, kept): &RingCounters) -> Vec<(&'static str, u64)> {
    let mut all = queue.named();
    all.extend(named_persistent(kept));
    all
}

impl<P: Platform> Served for Vbds<P> {
    fn watch_paths(&self, device: &DeviceId) -> Vec<String> {
        vec![format!("{}/{}", device.frontend_path(), ringfence_wire::xenbus::STATE)]
    }

    fn look(&mut self, device: &DeviceId, store: &mut StoreClient) -> Result<Look, StoreError> {
        let mut vbd = self.take_vbd(device, store)?;
        let opened = self.open(device, &mut vbd);
        let cause = opened.as_ref().err();
        let reported = Self::report_storage(device, &mut vbd, store, cause);
        // Only one of two backends may answer.
        let life = match cause {
            Some(VbdError::KernelBackend) => Ok(Life::Alive),
            _ => self.advance(device, &mut vbd, store),
        };
        // These problems end with a change of the toolstack's keys, which a watch reports.
        let waits_for_keys = matches!(cause, None | Some(VbdError::Source(_)));
        self.list.insert(*device, vbd);
        reported?;
        Ok(match life? {
            Life::Over => Look::Over,
            Life::Alive if waits_for_keys => Look::Alive,
            Life::Alive => Look::Again,
        })
    }

    fn forget(&mut self, device: &DeviceId) {
        let Some(mut vbd) = self.list.remove(device) else { return };
        self.retire_rings(&mut vbd.rings);
        for (rule, count) in vbd.backend.rules().all() {
            *self.retired_rules.entry(rule).or_default() += count;
        }
        vbd.backend.begin_to_leave();
        if vbd.backend.is_leaving() {
            self.leaving.push(vbd.backend);
        }
    }
}
