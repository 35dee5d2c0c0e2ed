//! The disks of a guest, in its frontend: blkfront on one side, an NBD server on the other.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;

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
use crate::switchboard::DiskFrontend;

/// One disk.
struct Served {
    vbd: VbdFrontend<LocalPlatform>,
    /// Until somebody can be served there.
    socket: Option<OwnedFd>,
    export: Option<Export>,
}

/// The disks of a guest.
pub(super) struct Disks {
    list: Vec<Served>,
    store: Option<StoreClient>,
    wake: WakeFd,
}

/// Pages to lend for a disk: its own, its rings, and room for those that the backend is slow to let
/// go of.
pub(super) const PAGES: u32 = 2048;

/// Pages of the window of a disk's ring.
pub(super) const WINDOW: u32 = 1024;

/// Changes in the store that are followed before others have their turn.
const ROUNDS: u32 = 64;

impl Disks {
    /// Sets memory aside for them, while that can be done.
    pub(super) fn new(
        platform: &LocalPlatform,
        orders: &[DiskFrontend],
        sockets: Vec<OwnedFd>,
    ) -> Result<Disks, Failure> {
        let wake = WakeFd::new()?;
        let waker: Arc<dyn Fn() + Send + Sync> = {
            let wake = wake.clone();
            Arc::new(move || wake.wake())
        };
        let mut list = vec![];
        for ((order, socket), handle) in orders.iter().zip(sockets).zip(0..) {
            let (kind, frontend) = (DeviceKind::Vbd, platform.domid());
            let device = DeviceId { kind, frontend, backend: DomId(0), handle };
            let DiskFrontend { persistent, windows } = *order;
            let window = if windows { WINDOW } else { 0 };
            let options = BlkfrontOptions { persistent, window, ..BlkfrontOptions::default() };
            let vbd = VbdFrontend::new(platform, device, options, Arc::clone(&waker))?;
            list.push(Served { vbd, socket: Some(socket), export: None });
        }
        Ok(Disks { list, store: None, wake })
    }

    /// Descriptors that are open on purpose.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = RawFd> {
        let sockets =
            self.list.iter().filter_map(|served| Some(served.socket.as_ref()?.as_raw_fd()));
        let windows = self.list.iter().flat_map(|served| served.vbd.descriptors());
        sockets.chain(windows).chain([self.wake.as_fd().as_raw_fd()])
    }

    /// Has the windows of each disk keep at most so many pages.
    pub(super) fn resize_windows(&self, most: u32) {
        for (disk, served) in self.list.iter().enumerate() {
            let Some(front) = served.vbd.disk() else { continue };
            front.resize_windows(most);
            if let Some(SourceLevels { present, in_use, .. }) = front.window_levels() {
                tracing::info!(disk, most, present, in_use, "pages of the disk's windows");
            }
        }
    }

    /// Begins to follow their backends.
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

    /// Does what is due; true if there is more to do, of which no poll tells.
    pub(super) fn look(&mut self, platform: &LocalPlatform) -> Result<bool, Failure> {
        self.wake.clear();
        for _ in 0..ROUNDS {
            self.look_at_each(platform)?;
            // While the store was asked, it may have told of changes: these were read from the
            // socket together with its answers.
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

    /// Whether every disk can be used.
    pub(super) fn are_up(&self) -> bool {
        self.list.iter().all(|served| served.export.is_some())
    }

    /// What to wait for.
    pub(super) fn wait_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let store = self.store.as_ref().map(StoreClient::fd);
        store.into_iter().chain([self.wake.as_fd()])
    }

    /// Ends what programs have open, and says that this frontend leaves.
    pub(super) fn close(&mut self) -> Result<(), Failure> {
        let Some(store) = &mut self.store else { return Ok(()) };
        for served in &mut self.list {
            served.export = None;
            served.vbd.close(store)?;
        }
        Ok(())
    }
}
