//! Domains on Xen, seen from Linux user space: dom0, a driver domain, or a guest.
//!
//! | Xen | here |
//! |---|---|
//! | frames lent to one peer | pages of `/dev/xen/gntalloc` ([`XenGranter`]) |
//! | map, unmap, copy | `/dev/xen/gntdev` ([`XenGrantee`]) |
//! | event channel | `/dev/xen/evtchn`, open once for each ([`XenChannel`]) |
//! | xenstore | `/dev/xen/xenbus`, else the socket of xenstored |
//! | this domain's number | the node `domid` |
//!
//! Nothing but these devices is needed: no library of the hypervisor's, and no role in its toolstack.

mod abi;
mod channel;
mod device;
mod grantee;
mod granter;

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub use channel::XenChannel;
pub use device::{Device, DeviceError, StoreWay};
pub use grantee::{COPY_MAX, MAPPED_MAX, UnmapNotice, XenGrantee};
pub use granter::XenGranter;
use ringfence_wire::xenstore::ErrorName;
use ringfence_xenstore::{StoreAccess, StoreClient, StoreError};

use crate::{Counters, DomId, EventPort, Platform, PlatformError};

/// What a program is going to do, and so which devices it needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// It uses what others lend: gntdev, evtchn and the store.
    Backend,
    /// It lends to others: gntalloc, evtchn and the store.
    Frontend,
    /// Both.
    Both,
}

impl Side {
    fn devices(self) -> &'static [Device] {
        match self {
            Side::Backend => &[Device::Gntdev, Device::Evtchn],
            Side::Frontend => &[Device::Gntalloc, Device::Evtchn],
            Side::Both => &[Device::Gntdev, Device::Gntalloc, Device::Evtchn],
        }
    }
}

/// How long the store may take to say which domain this is: where xenstored does not run, the
/// kernel takes the question and never answers.
const FIRST_ANSWER: Duration = Duration::from_secs(10);

/// The domain that this system is.
pub struct XenPlatform {
    domid: DomId,
    way: StoreWay,
    /// Open once lent from: all pages are numbered by one file.
    gntalloc: Mutex<Option<Arc<OwnedFd>>>,
    counters: Arc<Counters>,
}

impl XenPlatform {
    /// Finds out which domain this is, and that the devices for `side` are there and may be used.
    ///
    /// # Errors
    ///
    /// [`PlatformError::Device`] names the first device that is missing and the module that makes
    /// it, or what is wrong with the store.
    pub fn open(side: Side) -> Result<XenPlatform, PlatformError> {
        let (fd, way) = device::open_store()?;
        let mut store = StoreClient::new(fd)?;
        store.set_timeout(FIRST_ANSWER);
        let domid = discover(&mut store, way)?;
        for device in side.devices() {
            drop(device.open()?);
        }
        Ok(XenPlatform { domid, way, gntalloc: Mutex::new(None), counters: Arc::default() })
    }

    /// A store connection as a descriptor, non-blocking. Over the kernel's device each message has to
    /// be written by itself.
    ///
    /// # Errors
    ///
    /// When the store cannot be reached.
    pub fn store_connection(&self) -> Result<OwnedFd, PlatformError> {
        Ok(device::open_store()?.0)
    }

    /// How the store is reached. By the device, paths without a leading slash are relative to this
    /// domain's home; by the socket they are not.
    pub fn store_way(&self) -> StoreWay {
        self.way
    }
}

/// The number of the domain that `store` takes this one for.
fn discover(store: &mut StoreClient, way: StoreWay) -> Result<DomId, DeviceError> {
    match (way, store.read_u16("domid")) {
        // Whoever talks to the daemon's socket is in the daemon's domain, and is taken for dom0.
        (StoreWay::Socket, _) => Ok(DomId(0)),
        (StoreWay::Device, Ok(id)) => Ok(DomId(id)),
        (StoreWay::Device, Err(why)) if is_absent(&why) && is_control_domain() => Ok(DomId(0)),
        (StoreWay::Device, Err(why)) => Err(DeviceError::NoDomId { why }),
    }
}

fn is_absent(why: &StoreError) -> bool {
    why.refusal() == Some(ErrorName::NotFound)
}

/// Whether the kernel says that this is dom0, which is there before anybody fills in its home.
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
            None => Arc::clone(gntalloc.insert(Arc::new(Device::Gntalloc.open()?))),
        };
        Ok(XenGranter::new(peer, device, Arc::clone(&self.counters)))
    }

    /// Nothing is asked of the granter here; whether it lent anything shows with each page.
    fn grantee(&self, granter: DomId) -> Result<XenGrantee, PlatformError> {
        Ok(XenGrantee::new(granter, Device::Gntdev.open()?, Arc::clone(&self.counters)))
    }

    fn alloc_unbound(&self, peer: DomId) -> Result<XenChannel, PlatformError> {
        XenChannel::alloc(peer, Arc::clone(&self.counters))
    }

    fn bind_interdomain(&self, peer: DomId, port: EventPort) -> Result<XenChannel, PlatformError> {
        XenChannel::bind(peer, port, Arc::clone(&self.counters))
    }

    fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }
}
