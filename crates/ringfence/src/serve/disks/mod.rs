//! The disks that the daemon serves: the storage of each, and its handshake.
//!
//! # Theory of operation
//!
//! A disk is announced to its guest at once, as the toolstack waits for that, and its storage is opened
//! meanwhile (`opener`). The guest that is ready is connected when the storage is open. What cannot be
//! opened is said in the log, in the status and to the toolstack (the key [`DISK_STATUS`]), and tried
//! again every two seconds. The storage stays open until the device goes, or the toolstack or the
//! configuration says something else of it while no guest is connected.
//!
//! Each ring is served by threads of its own, which the control thread neither waits for nor is waited
//! for by: a disk that hangs holds up its own guest, and nobody else's handshake.
//!
//! What a daemon before this one left in a ring is found there by the backend itself
//! ([`ringfence_ring::AnyOrderRing`]); there are no records besides.

// #syscall daemon eventfd2,read,write: a disk has something to say

mod keys;
mod opener;
mod report;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use ringfence_block::blkback::{PersistentCounters, QueueCounters, named_persistent};
use ringfence_block::storage::Geometry;
use ringfence_block::vbd::backend::{Connection, VbdBackend};
use ringfence_platform::Platform;
use ringfence_wire::xenbus::DeviceId;
use ringfence_xenbus::end::Life;
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};
use rustix::event::EventfdFlags;

use self::keys::{NoSource, Source, VbdKeys};
use self::opener::{Opening, Wish};
use super::config::{Config, DiskSettings};
use super::devices::{Look, Served};
use crate::log::LineBudget;
use crate::ports::device_name;

/// Key of the backend's directory: `open`, or why the storage is not.
const DISK_STATUS: &str = "disk-status";
/// What [`DISK_STATUS`] says of a disk that is served.
const OPEN: &str = "open";

/// Pages that all rings together keep mapped. A process has 65530 mappings at most, and each page is one.
pub(super) const KEPT_PAGES_MAX: u32 = 49_152;

/// Where the kernel's own backend shows itself.
const KERNEL_BACKEND: &str = "/sys/bus/xen-backend/drivers/vbd";

/// Why a disk cannot be served for now.
#[derive(Debug, thiserror::Error)]
enum Trouble {
    /// Two backends would both answer the guest.
    #[error(
        "the kernel's xen-blkback is loaded, and serves disks: unload it (`rmmod xen-blkback`), or set \
         `serve = false` in [disks] of the configuration"
    )]
    KernelBackend,
    /// More than are served.
    #[error("{limit} disks {of} are served already; see `limits` in the configuration")]
    TooMany {
        /// Of which there are too many.
        of: &'static str,
        /// How many there may be.
        limit: u16,
    },
    /// Nobody said where it is.
    #[error(transparent)]
    Source(#[from] NoSource),
    /// It cannot be opened.
    #[error(transparent)]
    Open(#[from] opener::OpenError),
}

/// Tells the control thread which disks are to be looked at.
#[derive(Clone)]
pub(super) struct DiskBell(Arc<(Mutex<BTreeSet<DeviceId>>, OwnedFd)>);

impl DiskBell {
    fn new() -> io::Result<DiskBell> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(DiskBell(Arc::new((Mutex::default(), rustix::event::eventfd(0, flags)?))))
    }

    fn ringer(&self, device: DeviceId) -> impl Fn() + Send + Sync + 'static {
        let bell = Arc::clone(&self.0);
        move || {
            bell.0.lock().unwrap_or_else(PoisonError::into_inner).insert(device);
            let _ = rustix::io::write(&bell.1, &1u64.to_ne_bytes());
        }
    }

    /// Those for which it was rung since the last call.
    pub(super) fn rung(&self) -> BTreeSet<DeviceId> {
        let _ = rustix::io::read(&self.0.1, &mut [0; 8]);
        core::mem::take(&mut *self.0.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl AsFd for DiskBell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.1.as_fd()
    }
}

/// How far a disk's storage is.
enum Storage {
    Closed,
    Opening(Opening),
    Open(Geometry),
}

/// The counters of a ring.
type RingCounters = (Arc<QueueCounters>, Arc<PersistentCounters>);

/// One disk.
struct Vbd {
    keys: VbdKeys,
    settings: DiskSettings,
    /// What the storage is opened by, or was.
    wish: Option<Wish>,
    storage: Storage,
    backend: VbdBackend,
    problem: Option<String>,
    /// Of the rings in use.
    rings: Vec<RingCounters>,
    /// What is told in [`DISK_STATUS`].
    told: Option<String>,
    /// For lines that the guest causes by connecting and disconnecting.
    lines: LineBudget,
}

impl Vbd {
    /// Most pages that its rings keep.
    fn kept_pages(&self) -> u32 {
        let rings = self.backend.connection().map_or(0, |connection| connection.queues);
        rings * u32::from(self.settings.persistent_pages)
    }
}

/// All of them.
pub(super) struct Vbds<P: Platform> {
    platform: Arc<P>,
    config: Config,
    pub(super) bell: DiskBell,
    list: BTreeMap<DeviceId, Vbd>,
    /// Devices that are gone and have I/O in flight.
    departing: Vec<VbdBackend>,
    retired: BTreeMap<&'static str, u64>,
    retired_rules: BTreeMap<&'static str, u64>,
    adopted: u64,
}

impl<P: Platform> Vbds<P> {
    pub(super) fn new(platform: Arc<P>, config: Config) -> io::Result<Vbds<P>> {
        Ok(Vbds {
            platform,
            config,
            bell: DiskBell::new()?,
            list: BTreeMap::new(),
            departing: Vec::new(),
            retired: BTreeMap::new(),
            retired_rules: BTreeMap::new(),
            adopted: 0,
        })
    }

    /// What holds for disks from now on.
    pub(super) fn reconfigure(&mut self, config: Config) {
        self.config = config;
        for vbd in self.list.values_mut() {
            let keys = &vbd.keys;
            vbd.settings = settings_of(&self.config, keys);
            vbd.backend.reconfigure(vbd.settings.options());
        }
    }

    /// The devices there are.
    pub(super) fn devices(&self) -> impl Iterator<Item = &DeviceId> {
        self.list.keys()
    }

    /// Whether there is such a device.
    pub(super) fn has(&self, device: &DeviceId) -> bool {
        self.list.contains_key(device)
    }

    /// Drops what finished since.
    pub(super) fn bury_departed(&mut self) {
        self.departing.retain_mut(VbdBackend::is_leaving);
    }

    /// Lets go of all devices and leaves them as they are, for the daemon that comes next.
    pub(super) fn leave(&mut self) {
        self.list.clear();
        self.departing.clear();
    }

    /// Begins to close a device.
    pub(super) fn close(
        &mut self,
        device: &DeviceId,
        store: &mut StoreClient,
    ) -> Result<(), StoreError> {
        let Some(vbd) = self.list.get_mut(device) else { return Ok(()) };
        vbd.backend.close_with_penalty("the daemon ends");
        self.look(device, store).map(drop)
    }

    fn make(&self, device: &DeviceId, keys: VbdKeys) -> Vbd {
        let settings = settings_of(&self.config, &keys);
        let ring = Arc::new(self.bell.ringer(*device));
        let backend = VbdBackend::without_disk(*device, settings.options(), ring);
        Vbd {
            keys,
            settings,
            wish: None,
            storage: Storage::Closed,
            backend,
            problem: None,
            rings: Vec::new(),
            told: None,
            lines: LineBudget::new(),
        }
    }

    /// What is known of a device, read anew while it is not connected: a toolstack may have made it
    /// again, with other keys.
    fn take(&mut self, device: &DeviceId, store: &mut StoreClient) -> Result<Vbd, StoreError> {
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
        let Some(mut vbd) = known else { return Ok(self.make(device, keys)) };
        // What this daemon told the guest is no reason to open the storage anew.
        keys.told_sector = keys.told_sector.and(vbd.keys.told_sector);
        if vbd.keys != keys {
            vbd.settings = settings_of(&self.config, &keys);
            vbd.backend.reconfigure(vbd.settings.options());
            vbd.keys = keys;
        }
        Ok(vbd)
    }

    /// What the storage of a disk is to be opened by.
    fn wish(&self, vbd: &Vbd) -> Result<Wish, NoSource> {
        let Vbd { keys, settings, .. } = vbd;
        let disks = &self.config.disks;
        Ok(Wish {
            source: keys.source.clone()?,
            read_only: keys.read_only,
            discard: keys.discard,
            direct_io_safe: keys.direct_io_safe,
            cache: settings.cache,
            bounce: settings.bounce,
            sector_size: keys.told_sector.or(settings.sector_size),
            paths: disks.paths.clone(),
            nbd: disks.nbd,
            in_use: keys.told_sector.is_some(),
        })
    }

    /// Sees to it that the storage is open, or is being opened.
    fn open(&self, device: &DeviceId, vbd: &mut Vbd) -> Result<(), Trouble> {
        if vbd.backend.connection().is_some() {
            return Ok(());
        }
        if Path::new(KERNEL_BACKEND).exists() {
            return Err(Trouble::KernelBackend);
        }
        self.is_full(device)?;
        let wish = self.wish(vbd);
        if vbd.wish.as_ref() != wish.as_ref().ok() {
            // Another storage, or the same one in another way; it is locked until nobody has it.
            vbd.backend.set_disk(None);
            vbd.storage = Storage::Closed;
            vbd.wish = wish.as_ref().ok().cloned();
        }
        let wish = wish?;
        if let Storage::Closed = vbd.storage {
            let opening = Opening::begin(wish, self.bell.ringer(*device));
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

    /// Whether there are as many as there may be.
    fn is_full(&self, device: &DeviceId) -> Result<(), Trouble> {
        let open = |vbd: &Vbd| !matches!(vbd.storage, Storage::Closed);
        let served = self.list.iter().filter(|(_, vbd)| open(vbd)).map(|(of, _)| of);
        let of_domain = served.clone().filter(|other| other.frontend == device.frontend).count();
        let limits = &self.config.limits;
        for (count, limit, of) in [
            (served.count(), limits.disks, "of all domains"),
            (of_domain, limits.disks_per_domain, "of this domain"),
        ] {
            if count >= usize::from(limit) {
                return Err(Trouble::TooMany { of, limit });
            }
        }
        Ok(())
    }

    /// Says what became of the storage: in the log, and to the toolstack.
    fn tell(
        device: &DeviceId,
        vbd: &mut Vbd,
        store: &mut StoreClient,
        trouble: Option<&Trouble>,
    ) -> Result<(), StoreError> {
        let problem = match (trouble, &vbd.storage) {
            // While it is tried again, nothing is known that is better.
            (None, Storage::Opening(_)) => vbd.problem.clone(),
            (trouble, _) => trouble.map(ToString::to_string),
        };
        if let Some(why) = problem.as_ref().filter(|_| problem != vbd.problem) {
            match trouble {
                Some(Trouble::Source(NoSource::Script | NoSource::NoMedium)) => {
                    tracing::info!(name = %device_name(device), %why, "it is not served yet");
                }
                _ => tracing::error!(name = %device_name(device), %why, "it is not served"),
            }
        }
        vbd.problem = problem;
        let told = match (&vbd.problem, &vbd.storage) {
            (Some(why), _) => why.clone(),
            (None, Storage::Open(_)) => OPEN.to_owned(),
            (None, _) => return Ok(()),
        };
        if vbd.told.as_ref() != Some(&told) {
            let back = device.backend_path();
            let state = format!("{back}/{}", ringfence_wire::xenbus::STATE);
            store.transaction(|t| match t.read_opt(&state)? {
                Some(_) => t.write(&format!("{back}/{DISK_STATUS}"), &told),
                // What is written into a directory that is gone would make it again.
                None => Ok(()),
            })?;
            vbd.told = Some(told);
        }
        Ok(())
    }

    /// Does what is due.
    fn follow(
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

/// What holds for a disk.
fn settings_of(config: &Config, keys: &VbdKeys) -> DiskSettings {
    let mut settings = config.disk(keys.domain_name.as_deref(), keys.vdev.as_deref());
    // Only over one connection is it known in which order a server's disk was written to.
    if let Ok(Source::Nbd(_)) = keys.source {
        settings.max_queues = 1;
    }
    settings
}

/// Logs that a disk was connected, taken over or disconnected. `unlogged` lines of this kind were dropped.
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
        let mut vbd = self.take(device, store)?;
        let opened = self.open(device, &mut vbd);
        let trouble = opened.as_ref().err();
        let told = Self::tell(device, &mut vbd, store, trouble);
        // Two backends must not both answer.
        let life = match trouble {
            Some(Trouble::KernelBackend) => Ok(Life::Alive),
            _ => self.follow(device, &mut vbd, store),
        };
        // Where the toolstack is to say something first, it is heard.
        let waits = matches!(trouble, None | Some(Trouble::Source(_)));
        self.list.insert(*device, vbd);
        told?;
        Ok(match life? {
            Life::Over => Look::Over,
            Life::Alive if waits => Look::Alive,
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
            self.departing.push(vbd.backend);
        }
    }
}
