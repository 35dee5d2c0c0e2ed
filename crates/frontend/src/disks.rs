//! Disks of a guest in its frontend: blkfront on one side, an NBD export on the other.
//!
//! Each disk waits for its backend. Once it is connected, an [`Export`] serves it on its Unix socket.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use ringfence_block::blkfront::{BlkfrontOptions, SourceLevels};
use ringfence_block::storage::Disk;
use ringfence_block::vbd::frontend::{FrontendError, PlatformDisk, VbdFrontend};
use ringfence_nbd::export::{Export, ExportOptions};
use ringfence_platform::{Platform, PlatformError};
use ringfence_sys::mailbox::WakeFd;
use ringfence_sys::pressure::Share;
use ringfence_wire::xenbus::DeviceId;
use ringfence_xenstore::{StoreClient, StoreError};

/// Reasons for which disks are not served, or no longer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DiskError {
    #[error(transparent)]
    Frontend(#[from] FrontendError),
    #[error(transparent)]
    Platform(#[from] PlatformError),
    #[error("store: {0}")]
    Store(#[from] StoreError),
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Order to serve a disk of a toolstack's at a socket.
pub(crate) struct DiskRequest {
    pub(crate) device: DeviceId,
    /// Directory of the backend, if it is not that of a kernel's backend.
    pub(crate) backend: Option<String>,
    pub(crate) options: BlkfrontOptions,
    /// Listening socket of the export.
    pub(crate) socket: OwnedFd,
}

/// One disk with its export.
struct Served<P: Platform> {
    vbd: VbdFrontend<P>,
    /// Listening socket, until the export takes it.
    socket: Option<OwnedFd>,
    export: Option<Export>,
}

pub(crate) struct Disks<P: Platform> {
    list: Vec<Served<P>>,
    store: Option<StoreClient>,
    wake: WakeFd,
}

/// Pages to grant for a disk: its own, its rings, and a reserve for pages that the backend releases
/// late.
pub(crate) const PAGES: u32 = 2048;

/// Pages of the grant window of a disk's ring.
pub(crate) const WINDOW: u32 = 1024;

/// Maximum number of store events handled in one call.
const ROUNDS: u32 = 64;

impl<P: Platform> Disks<P> {
    /// Creates the disks and allocates their memory. Call it before the sandbox closes.
    pub(crate) fn new(platform: &P, requests: Vec<DiskRequest>) -> Result<Disks<P>, DiskError> {
        let wake = WakeFd::new()?;
        let waker: Arc<dyn Fn() + Send + Sync> = {
            let wake = wake.clone();
            Arc::new(move || wake.wake())
        };
        let mut list = vec![];
        for DiskRequest { device, backend, options, socket } in requests {
            let vbd = VbdFrontend::new(platform, device, options, Arc::clone(&waker))?;
            let vbd = match backend {
                Some(directory) => vbd.with_backend(directory),
                None => vbd,
            };
            list.push(Served { vbd, socket: Some(socket), export: None });
        }
        Ok(Disks { list, store: None, wake })
    }

    /// Iterates over the descriptors that stay open in the sandbox.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        let sockets =
            self.list.iter().filter_map(|served| Some(served.socket.as_ref()?.as_raw_fd()));
        let windows = self.list.iter().flat_map(|served| served.vbd.descriptors());
        sockets.chain(windows).chain([self.wake.as_fd().as_raw_fd()])
    }

    /// Sets the share of its pages that each disk keeps lent under memory pressure.
    pub(crate) fn set_share(&self, share: Share) {
        for (disk, served) in self.list.iter().enumerate() {
            let Some(front) = served.vbd.disk() else { continue };
            front.set_share(share);
            let lent = front.lent_pages();
            let SourceLevels { present, in_use, .. } = front.window_levels().unwrap_or_default();
            tracing::info!(disk, %share, lent, present, in_use, "pages of the disk, and of its windows");
        }
    }

    /// Starts to watch the backends in the store.
    pub(crate) fn start(&mut self, platform: &P) -> Result<(), PlatformError> {
        if self.list.is_empty() {
            return Ok(());
        }
        let mut store = platform.store()?;
        for (served, number) in self.list.iter().zip(0..) {
            let path = served.vbd.watch_path();
            store.watch(&path, &format!("disk{number}")).map_err(PlatformError::from)?;
        }
        self.store = Some(store);
        Ok(())
    }

    /// Advances the life cycle of each disk. Returns `true` if work is left for which no poll
    /// returns.
    pub(crate) fn look(&mut self, platform: &P) -> Result<bool, DiskError> {
        self.wake.clear();
        for _ in 0..ROUNDS {
            self.look_at_each(platform)?;
            // A request to the store may have read events from the socket together with its answer.
            let Some(store) = &mut self.store else { return Ok(false) };
            if store.next_event()?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn look_at_each(&mut self, platform: &P) -> Result<(), DiskError> {
        let Some(store) = &mut self.store else { return Ok(()) };
        for served in &mut self.list {
            served.vbd.look(platform, store)?;
            if let Some(disk) = served.vbd.disk()
                && let Some(socket) = served.socket.take()
            {
                let disk: Arc<dyn Disk> = disk.clone();
                let listener = UnixListener::from(socket);
                let options = ExportOptions::default();
                served.export = Some(Export::start(listener, &disk, options)?);
            }
        }
        Ok(())
    }

    /// Returns the size of a disk in bytes, as its next connection has it. `None` if it is no disk, or was never connected.
    pub(crate) fn bytes(&self, number: u16) -> Option<u64> {
        let disk = self.list.get(usize::from(number))?.vbd.disk()?;
        Some(disk.geometry().bytes)
    }

    /// Returns `true` if every disk is exported.
    pub(crate) fn are_up(&self) -> bool {
        self.list.iter().all(|served| served.export.is_some())
    }

    /// Returns `true` if a backend serves every disk now.
    pub(crate) fn are_connected(&self) -> bool {
        self.list.iter().all(|served| served.vbd.is_up())
    }

    /// Iterates over the disks that were connected at least once.
    pub(crate) fn connected_once(&self) -> impl Iterator<Item = &Arc<PlatformDisk<P>>> {
        self.list.iter().filter_map(|served| served.vbd.disk())
    }

    /// Iterates over the descriptors to poll for input.
    pub(crate) fn wait_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let store = self.store.as_ref().map(StoreClient::fd);
        store.into_iter().chain([self.wake.as_fd()])
    }

    /// Ends the exports and closes the devices.
    pub(crate) fn close(&mut self) -> Result<(), DiskError> {
        let Some(store) = &mut self.store else { return Ok(()) };
        for served in &mut self.list {
            served.export = None;
            served.vbd.close(store)?;
        }
        Ok(())
    }
}
