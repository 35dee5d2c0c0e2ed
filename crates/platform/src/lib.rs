//! Platform abstraction: grants, event channels and a store behind one trait.
//!
//! Frontends and backends reach the machine only through [`Platform`]. There are two implementations:
//! [`local`] uses ordinary Linux processes, without a hypervisor and without root. [`xen`] uses Xen,
//! from dom0, a driver domain or a guest.
//!
//! # Roles
//!
//! * A [`Granter`] grants pages to one peer and revokes them. The peer may read (or write) a page at
//!   any instant until it is revoked.
//! * A [`Grantee`] accesses the pages that one peer granted: it maps them, or copies without a
//!   mapping. Each element of a batch has its own status (XSA-361).
//! * A [`Channel`] carries one pending bit in each direction. Notifications merge until the receiver
//!   clears the bit.
//! * A [`TranslationTable`] is the granter's end of a grant window, in which the granter issues and
//!   revokes grants without the grantee; see [`window`].
//! * The [store](ringfence_xenstore) carries the xenbus handshake. Every value in it is the peer's
//!   untrusted text.
//!
//! # Devices of the kernel
//!
//! [`vhost`] is a peer that the kernel plays: its worker reaches lent memory by virtqueues. [`iotlb`] is the table of
//! addresses through which that worker may have to go.
//!
//! # Example
//!
//! Two domains in one process, one page and one event:
//!
//! ```
//! use ringfence_platform::local::LocalPlatform;
//! use ringfence_platform::local::hub::{Hub, HubLimits};
//! use ringfence_platform::{Access, Channel, CopyOps, Grantee, Granter, Platform};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (hub, handle) = Hub::new(HubLimits::default())?;
//! let thread = std::thread::spawn(move || hub.run());
//! let guest = LocalPlatform::connect(handle.admit(None, false)?.1)?;
//! let backend = LocalPlatform::connect(handle.admit(None, false)?.1)?;
//!
//! let lease = guest.granter(backend.domid())?.lend(Access::ReadOnly)?;
//! lease.memory().copy_from(0, b"hello")?;
//! let mut ops = CopyOps::new();
//! let mut bytes = [0; 5];
//! let mut list = ops.begin();
//! list.read(lease.gref(), 0, &mut bytes)?;
//! backend.grantee(guest.domid())?.copy(list);
//! assert_eq!(&bytes, b"hello");
//!
//! let near = guest.alloc_unbound(backend.domid())?;
//! let far = backend.bind_interdomain(guest.domid(), near.port())?;
//! far.clear()?;
//! near.notify()?;
//! assert!(far.clear()?);
//! # handle.stop();
//! # thread.join().unwrap()?;
//! # Ok(())
//! # }
//! ```

pub mod copy;
pub mod iotlb;
pub mod local;
mod table;
pub mod vhost;
pub mod window;
pub mod xen;

use std::io;
use std::os::fd::AsFd;

pub use copy::{CopyList, CopyOps};
use ringfence_memory::LentSlice;
pub use ringfence_sys::counters::Counters;
pub use ringfence_wire::grant::{Access, DomId, GrantStatus, Gref};
pub use window::{
    PageId, RoundPlace, TranslationTable, WindowError, WindowHandle, WindowName, WindowPlace,
    WindowRound, WindowShape, WindowView,
};

/// Number of an event channel in the domain that owns this end.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct EventPort(pub u32);

/// Platform services as one domain sees them.
pub trait Platform: Send + Sync + 'static {
    /// Granting side of a pair of domains.
    type Granter: Granter;
    /// Accessing side of a pair of domains.
    type Grantee: Grantee;
    /// One end of an event channel.
    type Channel: Channel;

    /// Returns the number of this domain.
    fn domid(&self) -> DomId;

    /// Opens a new connection to the store.
    ///
    /// # Errors
    ///
    /// Fails if the store cannot be reached.
    fn store(&self) -> Result<ringfence_xenstore::StoreClient, PlatformError>;

    /// Returns a granter for pages of this domain that `peer` may access.
    ///
    /// # Errors
    ///
    /// Fails if a quota is used up or the system refuses.
    fn granter(&self, peer: DomId) -> Result<Self::Granter, PlatformError>;

    /// Returns a grantee for the pages that `granter` granted to this domain.
    ///
    /// # Errors
    ///
    /// Fails if `granter` granted nothing, or its memory breaks a rule.
    fn grantee(&self, granter: DomId) -> Result<Self::Grantee, PlatformError>;

    /// Allocates a channel that only `peer` may bind.
    ///
    /// # Errors
    ///
    /// Fails if a quota is used up or the system refuses.
    fn alloc_unbound(&self, peer: DomId) -> Result<Self::Channel, PlatformError>;

    /// Binds the channel that `peer` allocated for this domain as `port`. The new end is pending once.
    ///
    /// # Errors
    ///
    /// Fails if there is no such port, it is for another domain, or it is already bound.
    fn bind_interdomain(
        &self,
        peer: DomId,
        port: EventPort,
    ) -> Result<Self::Channel, PlatformError>;

    /// Creates a grant window for `grantee`: memory in which this domain alone issues and revokes
    /// grants. Some platforms can create windows only before their sandbox closes.
    ///
    /// # Errors
    ///
    /// Returns [`WindowError::NeedsPeer`] if the platform cannot revoke without the peer. Otherwise
    /// fails if a quota is used up or the system refuses.
    fn window(
        &self,
        _grantee: DomId,
        _shape: WindowShape,
    ) -> Result<Box<dyn TranslationTable>, WindowError> {
        Err(WindowError::NeedsPeer)
    }

    /// Opens a grant window that `granter` created for this domain, and maps all of it.
    ///
    /// # Errors
    ///
    /// Returns [`WindowError::NeedsPeer`] if the platform has no grant windows. Otherwise fails if there
    /// is no window of that name, it has more than `entries_max` entries, or it breaks a rule.
    fn open_window(
        &self,
        _granter: DomId,
        _name: impl Into<WindowName>,
        _entries_max: u32,
    ) -> Result<WindowView, WindowError> {
        Err(WindowError::NeedsPeer)
    }

    /// Returns `true` if this platform has grant windows.
    fn has_windows(&self) -> bool {
        false
    }

    /// Returns the counters of all operations of this platform.
    fn counters(&self) -> &std::sync::Arc<Counters>;
}

/// Page that is granted to a peer. An owned value: the page stays granted until the lease is passed to
/// [`Granter::take_back`] or [`Granter::revoke_forced`].
#[derive(Debug)]
pub struct Lease {
    gref: Gref,
    access: Access,
    memory: LentSlice,
    page: u32,
    generation: u32,
}

impl Lease {
    pub(crate) fn new(
        gref: Gref,
        access: Access,
        memory: LentSlice,
        page: u32,
        generation: u32,
    ) -> Lease {
        Lease { gref, access, memory, page, generation }
    }

    /// Returns the reference under which the peer reaches the page.
    pub fn gref(&self) -> Gref {
        self.gref
    }

    /// Returns the access that the peer has.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Returns the page: 4096 bytes that this domain can read and write.
    pub fn memory(&self) -> &LentSlice {
        &self.memory
    }

    /// Returns the number of revocations of the page before this lease. Content of another generation
    /// was never visible under this lease.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    pub(crate) fn page(&self) -> u32 {
        self.page
    }
}

/// Failed attempt to take a page back. The lease stays valid.
#[derive(Debug, thiserror::Error)]
#[error("{gref} was not taken back: {why}", gref = lease.gref)]
pub struct StillLent {
    /// Lease of the page, unchanged.
    pub lease: Lease,
    pub why: RevokeError,
}

/// Reasons for which a page is not taken back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RevokeError {
    #[error("the peer is using the page")]
    Busy,
    /// The platform cannot revoke without the peer's cooperation.
    #[error("this platform needs the peer's help to revoke")]
    NeedsPeer,
    #[error("nothing is issued under that reference")]
    NotIssued,
    /// Error of a system call (errno).
    #[error("the system refused (errno {0})")]
    System(i32),
}

/// Granting side of a pair of domains.
pub trait Granter: Send {
    /// Returns the domain that the pages are granted to.
    fn peer(&self) -> DomId;

    /// Grants one page. A fresh page holds zeros, or content that the same peer had access to before.
    ///
    /// # Errors
    ///
    /// Returns [`LendError`] if no page or no reference is free.
    fn lend(&mut self, access: Access) -> Result<Lease, LendError>;

    /// Makes one attempt to take a page back (XSA-396); it fails if the peer is using the page. The page
    /// returns to the pool of this pair and is granted to no other peer.
    ///
    /// # Errors
    ///
    /// Returns [`StillLent`] with the lease.
    fn take_back(&mut self, lease: Lease) -> Result<(), StillLent>;

    /// Revokes pages even if the peer is using them, and destroys their content. A reference that the
    /// peer still claims to use is quarantined together with its page until the peer ends the use. So no
    /// mapping of a correct peer reaches data that is granted later.
    ///
    /// # Errors
    ///
    /// Returns the leases, still valid, with [`RevokeError::NeedsPeer`] if the platform cannot revoke
    /// alone. After [`RevokeError::System`] the peer can begin no new use; the caller should retry.
    fn revoke_forced(&mut self, leases: Vec<Lease>) -> Result<(), (Vec<Lease>, RevokeError)>;
}

/// Takes leases back, by force those that the peer is using. Returns the leases that could not be
/// revoked on this platform.
pub fn take_back(granter: &mut impl Granter, leases: Vec<Lease>) -> Vec<Lease> {
    let mut busy = Vec::new();
    for lease in leases {
        if let Err(still) = granter.take_back(lease) {
            busy.push(still.lease);
        }
    }
    if busy.is_empty() {
        return busy;
    }
    match granter.revoke_forced(busy) {
        Ok(()) => Vec::new(),
        Err((left, _)) => left,
    }
}

/// Reasons for which a page is not granted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LendError {
    /// No page of this peer and access is free.
    #[error("all {limit} pages set aside for this peer are lent")]
    NoPage {
        /// Number of pages set aside.
        limit: u32,
    },
    #[error("all {limit} grant references of this peer are in use")]
    NoReference {
        /// Number of references of the peer.
        limit: u32,
    },
    /// Error of a system call (errno).
    #[error("the system refused (errno {0})")]
    System(i32),
}

/// Accessing side of a pair of domains.
pub trait Grantee: Send {
    /// Returns the domain that granted the pages.
    fn granter(&self) -> DomId;

    /// Maps pages. Appends one result for each to `out`, in order. A mapping is removed after its last
    /// handle is dropped; pages of one call may be removed together.
    fn map(&mut self, pages: &[(Gref, Access)], out: &mut Vec<Result<LentSlice, GrantStatus>>);

    /// Maps a page for many uses. The mapping is removed after its own last handle is dropped,
    /// regardless of other pages. The caller bounds the number of kept pages: where the platform can
    /// tell them apart, they do not count against the limit of [`Grantee::map`].
    ///
    /// # Errors
    ///
    /// Returns the grant status of the page.
    fn keep(&mut self, gref: Gref, access: Access) -> Result<LentSlice, GrantStatus> {
        let mut out = Vec::with_capacity(1);
        self.map(&[(gref, access)], &mut out);
        out.pop().unwrap_or(Err(GrantStatus::GeneralError))
    }

    /// Executes the copies of `list` without a mapping. Each has its own status in
    /// [`CopyOps::statuses`].
    fn copy(&mut self, list: CopyList<'_, '_>);
}

/// One end of an event channel. Its descriptor is readable while the end is pending.
pub trait Channel: Send + AsFd {
    /// Returns the number of this end in its domain.
    fn port(&self) -> EventPort;

    /// Makes the other end pending. Never blocks. No effect if the other end is already pending.
    ///
    /// # Errors
    ///
    /// Returns [`ChannelError::PeerGone`] if the other end is closed.
    fn notify(&self) -> Result<(), ChannelError>;

    /// Clears the pending state. Returns `true` if this end was pending. Takes bounded time, whatever the
    /// peer sent.
    ///
    /// An event without work is always possible: on Xen, an event that arrived while an earlier one was
    /// waiting makes the end pending once more. Callers therefore clear, then look for work, then wait.
    ///
    /// # Errors
    ///
    /// Returns [`ChannelError::PeerGone`] if the other end is closed.
    fn clear(&self) -> Result<bool, ChannelError>;
}

/// Errors of an event channel.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ChannelError {
    #[error("the other end of the event channel was closed")]
    PeerGone,
    /// Error of a system call (errno).
    #[error("event channel: errno {0}")]
    System(i32),
}

/// Errors of setting up grants, channels or store connections.
#[derive(Debug, thiserror::Error)]
pub enum PlatformError {
    /// Failed system call.
    #[error("{what}: {source}")]
    System {
        /// Operation, as a noun phrase with a participle.
        what: &'static str,
        source: io::Error,
    },
    /// The hub refused a request.
    #[error("the hub refused to {what}: {source}")]
    Refused {
        /// Request, as a verb with its object.
        what: &'static str,
        /// Reason that the hub gave: [`local::Refusal`].
        source: BoxedError,
    },
    /// Lent memory breaks a rule.
    #[error("what domain {peer} lent cannot be used: {source}")]
    BadArena {
        peer: DomId,
        /// Name of the rule, for counters.
        kind: &'static str,
        /// Rule that is broken: [`local::ArenaFault`].
        source: BoxedError,
    },
    /// Lost connection to the hub or the store.
    #[error("the connection to the {0} was lost")]
    Disconnected(&'static str),
    /// Missing or inaccessible device of the hypervisor.
    #[error(transparent)]
    Device(BoxedError),
    /// Error of the store client.
    #[error(transparent)]
    Store(#[from] ringfence_xenstore::StoreError),
}

/// Cause of an error, of a type that only the implementation of the platform knows.
pub type BoxedError = Box<dyn std::error::Error + Send + Sync>;

impl PlatformError {
    pub(crate) fn refused(what: &'static str, why: local::Refusal) -> PlatformError {
        PlatformError::Refused { what, source: why.into() }
    }

    pub(crate) fn bad_arena(peer: DomId, why: local::ArenaFault) -> PlatformError {
        PlatformError::BadArena { peer, kind: why.kind(), source: why.into() }
    }

    pub(crate) fn system(what: &'static str, source: impl Into<io::Error>) -> PlatformError {
        PlatformError::System { what, source: source.into() }
    }
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
