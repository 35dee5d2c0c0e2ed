//! Xen platform: a domain as Linux user space sees it, in dom0, a driver domain or a guest.
//!
//! | Xen | here |
//! |---|---|
//! | frames granted to one peer | pages of `/dev/xen/gntalloc` ([`XenGranter`]) |
//! | map, unmap, copy | `/dev/xen/gntdev` ([`XenGrantee`]) |
//! | grant window | `/dev/ringfence-window`, if the hypervisor has windows (`window`) |
//! | event channel | `/dev/xen/evtchn`, opened once for each ([`XenChannel`]) |
//! | xenstore | `/dev/xen/xenbus`, else the socket of xenstored |
//! | number of this domain | the node `domid` |
//!
//! Only these devices are needed, and windows are optional: no library of the hypervisor, and no role in its toolstack.

mod abi;
mod channel;
mod device;
mod grantee;
mod granter;
mod window;

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub use channel::XenChannel;
pub use device::{DeviceError, StoreWay, XenDevice, check_store};
pub use grantee::{COPY_MAX, MAPPED_MAX, UnmapNotice, XenGrantee};
pub use granter::XenGranter;
use ringfence_sys::counters::Counters;
use ringfence_wire::grant::DomId;
use ringfence_wire::xenstore::ErrorName;
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};
pub use window::LOCKED_MAX;

use crate::error::PlatformError;
use crate::events::EventPort;
use crate::services::Platform;
use crate::window::{TranslationTable, WindowError, WindowName, WindowShape, WindowView};

/// Role of a program, which determines the devices that it needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// Accesses granted pages: gntdev, evtchn and the store.
    Backend,
    /// Grants pages: gntalloc, evtchn and the store.
    Frontend,
    Both,
}

impl Side {
    fn devices(self) -> &'static [XenDevice] {
        match self {
            Side::Backend => &[XenDevice::Gntdev, XenDevice::Evtchn],
            Side::Frontend => &[XenDevice::Gntalloc, XenDevice::Evtchn],
            Side::Both => &[XenDevice::Gntdev, XenDevice::Gntalloc, XenDevice::Evtchn],
        }
    }
}

/// Maximum time for the store to return the number of this domain. Without a running xenstored the
/// kernel accepts the request and never replies.
const FIRST_ANSWER: Duration = Duration::from_secs(10);

/// Domain in which this process runs, on a hypervisor.
pub struct XenPlatform {
    domid: DomId,
    way: StoreWay,
    /// Opened by the first granter. One file numbers all granted pages.
    gntalloc: Mutex<Option<Arc<OwnedFd>>>,
    /// Number of pages that the windows of this process can issue together.
    issuable: Mutex<u64>,
    /// References of the windows that this process has open.
    open_references: Arc<window::OpenReferences>,
    counters: Arc<Counters>,
}

impl XenPlatform {
    /// Finds the number of this domain, and checks that the devices for `side` can be opened.
    ///
    /// # Errors
    ///
    /// Returns [`PlatformError::Device`] for the first missing device, with the kernel module to load, or
    /// for a store that cannot be reached.
    pub fn open(side: Side) -> Result<XenPlatform, PlatformError> {
        let (fd, way) = device::open_store()?;
        let mut store = StoreClient::new(fd)?;
        store.set_timeout(FIRST_ANSWER);
        let domid = discover(&mut store, way)?;
        for device in side.devices() {
            drop(device.open()?);
        }
        if side != Side::Backend && XenDevice::Window.open().is_ok() {
            window::raise_locked_memory();
        }
        Ok(XenPlatform {
            domid,
            way,
            gntalloc: Mutex::new(None),
            issuable: Mutex::default(),
            open_references: Arc::default(),
            counters: Arc::default(),
        })
    }

    /// Opens a store connection as a non-blocking descriptor. On the kernel's device each message must
    /// be one write.
    ///
    /// # Errors
    ///
    /// Fails if the store cannot be reached.
    pub fn store_connection(&self) -> Result<OwnedFd, PlatformError> {
        Ok(device::open_store()?.0)
    }

    /// Returns the way to the store. On the device, paths without a leading slash are relative to this
    /// domain's home; on the socket they are not.
    pub fn store_way(&self) -> StoreWay {
        self.way
    }
}

/// Returns the number of this domain according to `store`.
fn discover(store: &mut StoreClient, way: StoreWay) -> Result<DomId, DeviceError> {
    match (way, store.read_u16("domid")) {
        // The daemon's socket exists only in the daemon's domain, and the daemon treats clients as dom0.
        (StoreWay::Socket, _) => Ok(DomId(0)),
        (StoreWay::Device, Ok(id)) => Ok(DomId(id)),
        (StoreWay::Device, Err(why)) if is_absent(&why) && is_control_domain() => Ok(DomId(0)),
        (StoreWay::Device, Err(why)) => Err(DeviceError::NoDomId { why }),
    }
}

fn is_absent(why: &StoreError) -> bool {
    why.refusal() == Some(ErrorName::NotFound)
}

/// Returns `true` if the kernel reports dom0, which may start before its home in the store is filled.
fn is_control_domain() -> bool {
    std::fs::read_to_string("/proc/xen/capabilities").is_ok_and(|text| text.contains("control_d"))
}

impl Platform for XenPlatform {
    type Granter = XenGranter;
    type Grantee = XenGrantee;
    type Channel = XenChannel;

    fn domid(&self) -> DomId {
        self.domid
    }

    fn store(&self) -> Result<StoreClient, PlatformError> {
        Ok(StoreClient::new(self.store_connection()?)?)
    }

    fn granter(&self, peer: DomId) -> Result<XenGranter, PlatformError> {
        let mut gntalloc = self.gntalloc.lock().unwrap_or_else(PoisonError::into_inner);
        let device = match &*gntalloc {
            Some(device) => Arc::clone(device),
            None => Arc::clone(gntalloc.insert(Arc::new(XenDevice::Gntalloc.open()?))),
        };
        Ok(XenGranter::new(peer, device, Arc::clone(&self.counters)))
    }

    /// Returns a grantee without a request to the granter. Missing grants show as statuses of pages.
    fn grantee(&self, granter: DomId) -> Result<XenGrantee, PlatformError> {
        Ok(XenGrantee::new(granter, XenDevice::Gntdev.open()?, Arc::clone(&self.counters)))
    }

    fn alloc_unbound(&self, peer: DomId) -> Result<XenChannel, PlatformError> {
        XenChannel::alloc(peer, Arc::clone(&self.counters))
    }

    fn bind_interdomain(&self, peer: DomId, port: EventPort) -> Result<XenChannel, PlatformError> {
        XenChannel::bind(peer, port, Arc::clone(&self.counters))
    }

    /// Returns `true` if the module of grant windows is loaded. It does not load on a hypervisor without windows.
    fn has_windows(&self) -> bool {
        XenDevice::Window.open().is_ok()
    }

    fn window(
        &self,
        grantee: DomId,
        shape: WindowShape,
    ) -> Result<Box<dyn TranslationTable>, WindowError> {
        if !self.has_windows() {
            return Err(WindowError::NeedsPeer);
        }
        let mut issuable = self.issuable.lock().unwrap_or_else(PoisonError::into_inner);
        let pages = u64::from(shape.entries.min(shape.pages()));
        window::check_locked_memory(*issuable, pages)
            .map_err(|error| PlatformError::Device(error.into()))?;
        let table = window::create(grantee, shape, &self.counters)?;
        *issuable = issuable.saturating_add(pages);
        Ok(Box::new(table))
    }

    fn open_window(
        &self,
        granter: DomId,
        name: impl Into<WindowName>,
        entries_max: u32,
    ) -> Result<WindowView, WindowError> {
        if !self.has_windows() {
            return Err(WindowError::NeedsPeer);
        }
        window::open(self.domid, granter, name.into(), entries_max, &self.open_references)
    }

    fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }
}
