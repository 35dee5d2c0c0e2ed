//! Disks of a guest in its frontend: blkfront on one side, an NBD export on the other.
//!
//! Each disk waits for its backend. Once it is connected, an [`Export`] serves it on the Unix
//! socket that the launcher passed.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use ringfence_access::window::Revocation;
use ringfence_block::blkfront::{BlkfrontOptions, SourceLevels};
use ringfence_block::storage::Disk;
use ringfence_block::vbd::frontend::VbdFrontend;
use ringfence_nbd::export::{Export, ExportOptions};
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::{DomId, Platform, PlatformError};
use ringfence_sys::mailbox::WakeFd;
use ringfence_wire::xenbus::{DeviceId, DeviceKind};
use ringfence_xenstore::StoreClient;

use super::Failure;
use ringfence_driver::switchboard::DiskFrontend;
use ringfence_sys::pressure::Share;

/// One disk with its export.
struct Served {
    vbd: VbdFrontend<LocalPlatform>,
    /// Listening socket, until the export takes it.
    socket: Option<OwnedFd>,
    export: Option<Export>,
}

pub(super) struct Disks {
    list: Vec<Served>,
    store: Option<StoreClient>,
    wake: WakeFd,
}

/// Pages to grant for a disk: its own, its rings, and a reserve for pages that the backend releases
/// late.
pub(super) const PAGES: u32 = 2048;

/// Pages of the grant window of a disk's ring.
pub(super) const WINDOW: u32 = 1024;

/// Maximum number of store events handled in one call.
const ROUNDS: u32 = 64;

impl Disks {
    /// Creates the disks and allocates their memory. Call it before the sandbox closes.
    pub(super) fn new(
        platform: &LocalPlatform,
        requests: &[DiskFrontend],
        revocation: Revocation,
        sockets: Vec<OwnedFd>,
    ) -> Result<Disks, Failure> {
        let wake = WakeFd::new()?;
        let waker: Arc<dyn Fn() + Send + Sync> = {
            let wake = wake.clone();
            Arc::new(move || wake.wake())
        };
        let mut list = vec![];
        for ((request, socket), handle) in requests.iter().zip(sockets).zip(0..) {
            let (kind, frontend) = (DeviceKind::Vbd, platform.domid());
            let device = DeviceId { kind, frontend, backend: DomId(0), handle };
            let DiskFrontend { persistent, windows } = *request;
            let window = if windows { WINDOW } else { 0 };
            let options =
                BlkfrontOptions { persistent, window, revocation, ..BlkfrontOptions::default() };
            let vbd = VbdFrontend::new(platform, device, options, Arc::clone(&waker))?;
            list.push(Served { vbd, socket: Some(socket), export: None });
        }
        Ok(Disks { list, store: None, wake })
    }

    /// Iterates over the descriptors that stay open in the sandbox.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        let sockets =
            self.list.iter().filter_map(|served| Some(served.socket.as_ref()?.as_raw_fd()));
        let windows = self.list.iter().flat_map(|served| served.vbd.descriptors());
        sockets.chain(windows).chain([self.wake.as_fd().as_raw_fd()])
    }

    /// Sets the share of its pages that each disk keeps lent under memory pressure.
    pub(super) fn set_share(&self, share: Share) {
        for (disk, served) in self.list.iter().enumerate() {
            let Some(front) = served.vbd.disk() else { continue };
            front.set_share(share);
            let lent = front.lent_pages();
            let SourceLevels { present, in_use, .. } = front.window_levels().unwrap_or_default();
            tracing::info!(disk, %share, lent, present, in_use, "pages of the disk, and of its windows");
        }
    }

    /// Starts to watch the backends in the store.
    pub(super) fn start(&mut self, platform: &LocalPlatform) -> Result<(), PlatformError> {
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
    pub(super) fn look(&mut self, platform: &LocalPlatform) -> Result<bool, Failure> {
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

    fn look_at_each(&mut self, platform: &LocalPlatform) -> Result<(), Failure> {
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

    /// Returns `true` if every disk is exported.
    pub(super) fn are_up(&self) -> bool {
        self.list.iter().all(|served| served.export.is_some())
    }

    /// Iterates over the descriptors to poll for input.
    pub(super) fn wait_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let store = self.store.as_ref().map(StoreClient::fd);
        store.into_iter().chain([self.wake.as_fd()])
    }

    /// Ends the exports and closes the devices.
    pub(super) fn close(&mut self) -> Result<(), Failure> {
        let Some(store) = &mut self.store else { return Ok(()) };
        for served in &mut self.list {
            served.export = None;
            served.vbd.close(store)?;
        }
        Ok(())
    }
}
