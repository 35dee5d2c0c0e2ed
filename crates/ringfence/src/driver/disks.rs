//! Disks of one guest in the driver domain: vbd backends on files and NBD connections.
//!
//! The driver domain's sandbox has no file system and no `/sys`. The launcher therefore opens and
//! locks the file, reads its properties, and passes both. For a disk on an NBD server the launcher
//! connects, and connects again after a loss. The driver domain alone uses the connection.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringfence_access::Mode;
use ringfence_block::blkback::{BlkbackOptions, named_persistent};
use ringfence_block::storage::Disk;
use ringfence_block::storage::file::{Engine, FileDisk, FileFacts, FileOptions, OpenFile};
use ringfence_block::vbd::backend::VbdBackend;
use ringfence_block::vbd::toolstack::{self, VbdConfig};
use ringfence_nbd::client::{Dialer, NbdDisk};
use ringfence_platform::DomId;
use ringfence_sys::descriptors::{Descriptors, Disposal};
use ringfence_sys::mailbox::WakeFd;
use ringfence_wire::xenbus::{DeviceId, DeviceKind};
use ringfence_xenstore::StoreError;

use super::guests::Scope;
use ringfence_driver::ports::device_name;
use ringfence_driver::switchboard::{DISKS_MAX, DiskRequest, Medium};
use ringfence_sandbox::channel::expect_fds;

/// Backends of one guest's disks.
#[derive(Default)]
pub(super) struct Disks {
    backends: Vec<VbdBackend>,
    /// Sources of connections, by handle, for disks on an NBD server.
    dialers: BTreeMap<u16, Arc<Dialer>>,
}

/// Returns a callback that wakes the control thread.
fn waker(wake: &WakeFd) -> Arc<dyn Fn() + Send + Sync> {
    let wake = wake.clone();
    Arc::new(move || wake.wake())
}

fn text(error: &dyn std::fmt::Display) -> String {
    error.to_string()
}

/// Opens a disk on a file that the launcher opened.
fn open_file_disk(
    file: OwnedFd,
    facts: FileFacts,
    options: &FileOptions,
) -> Result<FileDisk, String> {
    // io_uring would execute operations that the seccomp filter does not see, so it is not allowed
    // here. Use a thread pool.
    let options = FileOptions { engine: Engine::Threads, ..options.clone() };
    FileDisk::new(OpenFile { file, facts }, &options).map_err(|e| text(&e))
}

impl Disks {
    /// Creates the backend of a disk for the domain `frontend`.
    pub(super) fn add(
        &mut self,
        frontend: DomId,
        request: &DiskRequest,
        fds: Descriptors,
        wake: &WakeFd,
        scope: &mut Scope<'_>,
    ) -> Result<(), String> {
        if usize::from(request.handle) != self.backends.len() || self.backends.len() >= DISKS_MAX {
            return Err(format!("a guest has at most {DISKS_MAX} disks, in order"));
        }
        let mode = Mode::for_disk(&request.mode).map_err(|e| text(&e))?;
        let (disk, read_only, no_discard): (Arc<dyn Disk>, _, _) = match &request.medium {
            Medium::File { facts, options } => {
                let [file] = expect_fds(fds).map_err(|e| text(&e))?;
                let disk = open_file_disk(file, *facts, options)?;
                (Arc::new(disk), facts.read_only, !options.discard)
            }
            Medium::Nbd(facts) => {
                let first = match fds.is_empty() {
                    true => None,
                    false => Some(expect_fds::<1>(fds).map_err(|e| text(&e))?).map(|[fd]| fd),
                };
                let dialer = Arc::new(Dialer::new(waker(wake)).map_err(|e| text(&e))?);
                let disk = NbdDisk::handed(facts, first, &dialer).map_err(|e| text(&e))?;
                self.dialers.insert(request.handle, dialer);
                (Arc::new(disk), facts.is_read_only(), false)
            }
        };
        let device = DeviceId {
            kind: DeviceKind::Vbd,
            frontend,
            backend: DomId(0),
            handle: request.handle.into(),
        };
        let config = VbdConfig { read_only, no_discard, ..VbdConfig::default() };
        toolstack::create(scope.store, &device, config).map_err(|e| text(&e))?;
        let back = BlkbackOptions { mode, ..BlkbackOptions::default() };
        let backend = VbdBackend::new(device, back, disk, waker(wake));
        for path in backend.watch_paths() {
            scope.store.watch(&path, &device_name(&device)).map_err(|e| text(&e))?;
        }
        self.backends.push(backend);
        self.look(scope).map_err(|e| text(&e))
    }

    /// Iterates over the disks that need a new connection to their server.
    pub(super) fn dialling(&self) -> impl Iterator<Item = u16> {
        let wanting = self.dialers.iter().filter(|(_, dialer)| dialer.is_wanted());
        wanting.map(|(handle, _)| *handle)
    }

    /// Passes a connection, or the reason why there is none, to the disk that requested it.
    pub(super) fn dialled(&self, handle: u16, fds: Descriptors, problem: Option<String>) {
        let Some(dialer) = self.dialers.get(&handle) else { return };
        dialer.deliver(match (expect_fds(fds), problem) {
            (Ok([stream]), None) => Ok(stream),
            (_, problem) => Err(std::io::Error::other(problem.unwrap_or_default())),
        });
    }

    /// Returns `true` if a watch token belongs to one of the disks.
    pub(super) fn has_token(&self, token: &str) -> bool {
        self.backends.iter().any(|disk| device_name(disk.device()) == token)
    }

    /// Advances the life cycle of each disk.
    pub(super) fn look(&mut self, scope: &mut Scope<'_>) -> Result<(), StoreError> {
        for disk in &mut self.backends {
            disk.look(scope.platform, scope.store)?;
        }
        Ok(())
    }

    /// Iterates over the disks that were closed because of an error or rule violation, with the
    /// reason.
    pub(super) fn closed(&self) -> impl Iterator<Item = (u16, String)> {
        let disks = (0..).zip(&self.backends);
        disks.filter_map(|(handle, disk)| Some((handle, disk.penalized()?.to_owned())))
    }

    /// Iterates over the rule violations of each disk, by device name.
    pub(super) fn violations(&self) -> impl Iterator<Item = (String, Vec<(&'static str, u64)>)> {
        self.backends
            .iter()
            .map(|disk| (device_name(disk.device()), disk.rules().all().into_iter().collect()))
    }

    /// Iterates over the counters of connected disks, summed over their queues.
    pub(super) fn counts(&self) -> impl Iterator<Item = (String, Vec<(&'static str, u64)>)> {
        self.backends.iter().filter_map(|disk| {
            let mut sums = BTreeMap::<&'static str, u64>::new();
            for (queue, persistent) in disk.served()?.counters() {
                for (name, count) in queue.named().into_iter().chain(named_persistent(persistent)) {
                    *sums.entry(name).or_default() += count;
                }
            }
            Some((device_name(disk.device()), sums.into_iter().collect()))
        })
    }

    /// Removes all disks. `teardown` waits for storage operations in flight on another thread,
    /// because a server or file system that does not answer must not block other guests.
    pub(super) fn remove_all(&mut self, scope: &mut Scope<'_>, teardown: &Disposal<VbdBackend>) {
        for mut disk in self.backends.drain(..) {
            disk.begin_to_leave();
            for path in disk.watch_paths() {
                let _ = scope.store.unwatch(&path, &device_name(disk.device()));
            }
            if let Err(error) = toolstack::remove(scope.store, disk.device()) {
                tracing::warn!(%error, "the nodes of a disk were not removed");
            }
            teardown.add(disk);
        }
    }
}
