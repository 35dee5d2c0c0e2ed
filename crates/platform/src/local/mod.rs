//! Local platform: domains as ordinary Linux processes, without a hypervisor and without root.
//!
//! The kernel takes the role of Xen:
//!
//! | Xen | here |
//! |---|---|
//! | frames granted to one peer | arena: memfds that only that peer gets ([`ArenaShape`]) |
//! | grant table | one table for each pair, entries as in version 1, status words beside it |
//! | map, unmap | `mmap`, `munmap` of that page |
//! | copy | `preadv`/`pwritev` on the arena, without a mapping |
//! | revoke | `fallocate(PUNCH_HOLE)`: the page is out of every mapping before the call returns |
//! | event channel | socket pair |
//! | domain ids, xenstore | the [`hub`] |

mod arena;
mod channel;
mod grantee;
mod granter;
pub mod hub;
pub(crate) mod pages;
#[doc(hidden)]
#[cfg(any(test, feature = "test-utils"))]
pub mod raw;
mod window;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

pub use arena::{ArenaFault, ArenaFiles, ArenaShape};
pub use channel::LocalChannel;
pub use grantee::{LocalGrantee, MAPPED_MAX};
pub use granter::LocalGranter;
use hub::client::HubClient;
pub use hub::protocol::Refusal;
use hub::protocol::{ANY_DOMAIN, Kind};
pub use pages::PageSize;
use ringfence_sys::counters::Counters;
use ringfence_sys::descriptors::{ByteSocket, Descriptors, dispose, refuse_descriptors};
use ringfence_wire::grant::DomId;
use ringfence_xenstore::StoreClient;

use crate::error::PlatformError;
use crate::events::EventPort;
use crate::services::Platform;
use crate::window::{
    TranslationTable, WindowError, WindowHandle, WindowName, WindowShape, WindowView,
};

/// Connection of this process, as one domain, with the hub and its peers.
pub struct LocalPlatform {
    hub: Arc<HubClient>,
    domid: DomId,
    shape: ArenaShape,
    page_size: PageSize,
    granters: Mutex<HashMap<DomId, LocalGranter>>,
    /// Number of the last grant window of each grantee.
    windows: Mutex<HashMap<DomId, u32>>,
    counters: Arc<Counters>,
}

impl LocalPlatform {
    /// Default number of pages of each kind for one peer: 512 pages (2 MiB) of each, enough for a vif of
    /// one queue with full rings in both directions.
    pub const DEFAULT_PAGES: u32 = 512;

    /// Joins the hub at the other end of `socket`. The hub chooses the number.
    ///
    /// # Errors
    ///
    /// Fails if the hub does not answer or refuses.
    pub fn connect(socket: OwnedFd) -> Result<LocalPlatform, PlatformError> {
        Self::connect_as(socket, None)
    }

    // #syscall none: a hub is joined before a sandbox closes
    /// Connects to the hub that listens at `path`, and joins it under a number of the hub's choice.
    ///
    /// # Errors
    ///
    /// Fails if no hub listens there, or if it does not answer.
    pub fn join(path: &Path) -> Result<LocalPlatform, PlatformError> {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
        let connect = || -> io::Result<OwnedFd> {
            let fd = rustix::net::socket_with(
                AddressFamily::UNIX,
                SocketType::SEQPACKET,
                SocketFlags::CLOEXEC,
                None,
            )?;
            rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
            Ok(fd)
        };
        let system = |source| PlatformError::System { what: "reaching the hub", source };
        Self::connect(connect().map_err(system)?)
    }

    /// Joins the hub under `wanted`, or under a number of the hub's choice.
    ///
    /// # Errors
    ///
    /// Fails if the hub does not answer or refuses the number.
    pub fn connect_as(
        socket: OwnedFd,
        wanted: Option<DomId>,
    ) -> Result<LocalPlatform, PlatformError> {
        let hub = Arc::new(HubClient::new(socket));
        let wanted = wanted.map_or(ANY_DOMAIN, |d| u32::from(d.0));
        let (reply, _) = hub.call("give a domain number", Kind::Hello, &[wanted], &[])?;
        let domid = u16::try_from(reply[0]).map_err(|_| PlatformError::Disconnected("hub"))?;
        Ok(LocalPlatform {
            hub,
            domid: DomId(domid),
            shape: ArenaShape::of(Self::DEFAULT_PAGES, Self::DEFAULT_PAGES),
            page_size: PageSize::Small,
            granters: Mutex::new(HashMap::new()),
            windows: Mutex::new(HashMap::new()),
            counters: Arc::default(),
        })
    }

    /// Sets the size of the arena for each peer that this domain grants to from now on.
    #[must_use]
    pub fn with_arena(mut self, shape: ArenaShape) -> LocalPlatform {
        self.shape = shape;
        self
    }

    /// Sets the size of the pages of arenas from now on. [`PageSize::Huge`] is for pages that stay lent as long as the
    /// device lasts: a forced revocation of one page splits a huge page for ever. It is used where the system
    /// allows huge pages for shared memory, and takes all memory of the arena at once.
    #[must_use]
    pub fn with_page_size(mut self, size: PageSize) -> LocalPlatform {
        self.page_size = size;
        self
    }

    /// Returns the size of the pages in use: huge if every arena that this domain lent is in huge pages.
    pub fn page_size(&self) -> PageSize {
        let granters = self.granters.lock().unwrap_or_else(PoisonError::into_inner);
        let huge = |granter: &LocalGranter| granter.page_size() == PageSize::Huge;
        if !granters.is_empty() && granters.values().all(huge) {
            PageSize::Huge
        } else {
            PageSize::Small
        }
    }

    /// Returns the connection to the hub. It reports a hang-up after the hub has ended.
    pub fn hub_fd(&self) -> BorrowedFd<'_> {
        self.hub.fd()
    }

    /// Opens a store connection as a descriptor, for another process of this domain.
    ///
    /// # Errors
    ///
    /// Fails if the hub refuses.
    pub fn store_connection(&self) -> Result<OwnedFd, PlatformError> {
        let (_, fds) = self.hub.call("connect to the store", Kind::Store, &[], &[])?;
        Self::one_socket(fds)
    }

    /// Returns the open descriptors, for a sandbox that closes or refuses all others.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let granters = self.granters.lock().unwrap_or_else(PoisonError::into_inner);
        let arenas = granters.values().flat_map(LocalGranter::descriptors);
        arenas.chain([self.hub.fd().as_raw_fd()]).collect()
    }

    /// Returns the number of pages that peers can use now under ordinary grants.
    pub fn lent_pages(&self) -> usize {
        let granters = self.granters.lock().unwrap_or_else(PoisonError::into_inner);
        granters.values().map(LocalGranter::lent).sum()
    }

    /// Fetches the arena of `granter`: that of ordinary grants (0), or a grant window.
    fn fetch(
        &self,
        granter: DomId,
        window: u32,
    ) -> Result<(ArenaShape, ArenaFiles), PlatformError> {
        let args = [u32::from(granter.0), window];
        let (reply, fds) = self.hub.call("hand out an arena", Kind::Fetch, &args, &[])?;
        let [writable, read_only, references, ..] = reply;
        let shape = ArenaShape { writable, read_only, references };
        let files = ArenaFiles::receive(fds, shape).map_err(|why| why.of(granter))?;
        Ok((shape, files))
    }

    /// Returns the Unix socket of a reply of the hub. Disposes of any other descriptor.
    fn one_socket(fds: Descriptors) -> Result<OwnedFd, PlatformError> {
        let broken = PlatformError::Disconnected("hub (it broke its protocol)");
        match fds.exactly() {
            Ok([fd]) if refuse_descriptors(&fd).is_ok() => Ok(fd),
            Ok([fd]) => {
                dispose(fd);
                Err(broken)
            }
            Err(_) => Err(broken),
        }
    }

    fn channel(&self, reply: ([u32; 5], Descriptors)) -> Result<LocalChannel, PlatformError> {
        let ([port, ..], fds) = reply;
        let (hub, counters) = (Arc::downgrade(&self.hub), Arc::clone(&self.counters));
        let socket = ByteSocket::new(Self::one_socket(fds)?)
            .map_err(|errno| PlatformError::system("binding an event channel", errno))?;
        Ok(LocalChannel::new(EventPort(port), socket, hub, counters))
    }
}

impl Platform for LocalPlatform {
    type Granter = LocalGranter;
    type Grantee = LocalGrantee;
    type Channel = LocalChannel;

    fn domid(&self) -> DomId {
        self.domid
    }

    fn store(&self) -> Result<StoreClient, PlatformError> {
        Ok(StoreClient::new(self.store_connection()?)?)
    }

    /// Creates the arena on the first call for a peer. Later calls share it.
    fn granter(&self, peer: DomId) -> Result<LocalGranter, PlatformError> {
        let mut granters = self.granters.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(granter) = granters.get(&peer) {
            return Ok(granter.clone());
        }
        let (granter, files) = LocalGranter::create(peer, self.shape, self.page_size)?;
        let ArenaShape { writable, read_only, references } = self.shape;
        let args = [u32::from(peer.0), writable, read_only, references];
        self.hub.call("take an arena", Kind::Lend, &args, &files.each())?;
        granters.insert(peer, granter.clone());
        Ok(granter)
    }

    fn grantee(&self, granter: DomId) -> Result<LocalGrantee, PlatformError> {
        let (shape, files) = self.fetch(granter, 0)?;
        LocalGrantee::new(self.domid, granter, files, shape, Arc::clone(&self.counters))
            .map_err(|why| why.of(granter))
    }

    fn has_windows(&self) -> bool {
        true
    }

    fn window(
        &self,
        grantee: DomId,
        shape: WindowShape,
    ) -> Result<Box<dyn TranslationTable>, WindowError> {
        let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        let number = windows.get(&grantee).copied().unwrap_or(0).saturating_add(1);
        let counters = Arc::clone(&self.counters);
        let (table, files) = window::create(grantee, WindowHandle(number), shape, counters)?;
        let ArenaShape { writable, read_only, references } = shape.into();
        let args = [u32::from(grantee.0), writable, read_only, references, number];
        self.hub.call("take a window", Kind::Lend, &args, &files.each())?;
        windows.insert(grantee, number);
        Ok(Box::new(table))
    }

    fn open_window(
        &self,
        granter: DomId,
        name: impl Into<WindowName>,
        entries_max: u32,
    ) -> Result<WindowView, WindowError> {
        let handle = name.into().handle;
        let no_such = || WindowError::NoSuchWindow { granter, handle };
        if handle.0 == 0 {
            return Err(no_such());
        }
        let (shape, files) = self.fetch(granter, handle.0).map_err(|error| match error {
            PlatformError::Refused { source, .. }
                if source.downcast_ref() == Some(&Refusal::NotFound) =>
            {
                no_such()
            }
            other => other.into(),
        })?;
        let found = WindowShape::from(shape).entries;
        if found > entries_max {
            return Err(WindowError::TooLarge { found, limit: entries_max });
        }
        window::open(self.domid, &files, shape).map_err(|why| why.of(granter).into())
    }

    fn alloc_unbound(&self, peer: DomId) -> Result<LocalChannel, PlatformError> {
        let args = [u32::from(peer.0)];
        self.channel(self.hub.call("allocate an event channel", Kind::Alloc, &args, &[])?)
    }

    fn bind_interdomain(
        &self,
        peer: DomId,
        port: EventPort,
    ) -> Result<LocalChannel, PlatformError> {
        let args = [u32::from(peer.0), port.0];
        self.channel(self.hub.call("bind an event channel", Kind::Bind, &args, &[])?)
    }

    fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }
}
