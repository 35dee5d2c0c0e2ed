//! The disks of a guest, in the driver domain.
//!
//! The launcher has opened and locked the file, and found out about it: here there is no file system
//! to open anything in, and no /sys. What comes is the descriptor, and the facts.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ringfence_block::blkback::BlkbackOptions;
use ringfence_block::storage::file::{Engine, FileDisk, FileOptions, OpenFile};
use ringfence_block::vbd::backend::VbdBackend;
use ringfence_block::vbd::toolstack::{self, VbdConfig};
use ringfence_platform::DomId;
use ringfence_platform::store::StoreError;
use ringfence_wire::xenbus::{DeviceId, DeviceKind};
use rustix::event::EventfdFlags;

use super::guests::Scope;
use crate::disk::DISKS_MAX;
use crate::seat::device_name;
use crate::switchboard::DiskRequest;
use crate::sys::channel::expect_fds;

/// Tells the control thread that a disk is to be looked at.
pub(super) struct DiskBell(Arc<OwnedFd>);

impl DiskBell {
    pub(super) fn new() -> std::io::Result<DiskBell> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(DiskBell(Arc::new(rustix::event::eventfd(0, flags)?)))
    }

    /// True if it was rung since the last call.
    pub(super) fn was_rung(&self) -> bool {
        rustix::io::read(&*self.0, &mut [0; 8]).is_ok()
    }

    fn ring(&self) -> Arc<dyn Fn() + Send + Sync> {
        let bell = Arc::clone(&self.0);
        Arc::new(move || {
            let _ = rustix::io::write(&*bell, &1u64.to_ne_bytes());
        })
    }
}

impl AsFd for DiskBell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The disks of one guest.
#[derive(Default)]
pub(super) struct Disks(Vec<VbdBackend>);

impl Disks {
    /// Makes a disk of an open file, for the domain `frontend`.
    pub(super) fn add(
        &mut self,
        frontend: DomId,
        request: &DiskRequest,
        fds: Vec<OwnedFd>,
        bell: &DiskBell,
        scope: &mut Scope<'_>,
    ) -> Result<(), String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let [file] = expect_fds(fds).map_err(|e| text(&e))?;
        if usize::from(request.handle) != self.0.len() || self.0.len() >= DISKS_MAX {
            return Err(format!("a guest has at most {DISKS_MAX} disks, in order"));
        }
        let mode = request.mode.parse().map_err(|e| text(&e))?;
        // A ring of io_uring does I/O behind the back of the sandbox's filter, so none may be made
        // in here: threads.
        let options = FileOptions { engine: Engine::Threads, ..request.options.clone() };
        let opened = OpenFile { file, facts: request.facts };
        let disk = FileDisk::new(opened, &options).map_err(|e| text(&e))?;
        let device = DeviceId {
            kind: DeviceKind::Vbd,
            frontend,
            backend: DomId(0),
            handle: request.handle.into(),
        };
        let config = VbdConfig {
            read_only: request.facts.read_only,
            no_discard: !options.discard,
            ..VbdConfig::default()
        };
        toolstack::create(scope.store, &device, config).map_err(|e| text(&e))?;
        let back = BlkbackOptions { mode, ..BlkbackOptions::default() };
        let backend = VbdBackend::new(device, back, Arc::new(disk), bell.ring());
        for path in backend.watch_paths() {
            scope.store.watch(&path, &device_name(&device)).map_err(|e| text(&e))?;
        }
        self.0.push(backend);
        self.look(scope).map_err(|e| text(&e))
    }

    /// Whether one of them has this token.
    pub(super) fn have(&self, token: &str) -> bool {
        self.0.iter().any(|disk| device_name(disk.device()) == token)
    }

    /// Does what is due.
    pub(super) fn look(&mut self, scope: &mut Scope<'_>) -> Result<(), StoreError> {
        for disk in &mut self.0 {
            disk.look(scope.platform, scope.store)?;
        }
        Ok(())
    }

    /// Why one of them was closed, if it was.
    pub(super) fn condemned(&self) -> Option<String> {
        self.0.iter().find_map(|disk| disk.condemned().map(ToOwned::to_owned))
    }

    /// Removes every trace of them.
    pub(super) fn leave(&mut self, scope: &mut Scope<'_>) {
        for mut disk in self.0.drain(..) {
            disk.let_go();
            for path in disk.watch_paths() {
                let _ = scope.store.unwatch(&path, &device_name(disk.device()));
            }
            if let Err(error) = toolstack::remove(scope.store, disk.device()) {
                tracing::warn!(%error, "the nodes of a disk were not removed");
            }
        }
    }
}
