//! What a hypervisor provides, behind one trait: grants, event channels, a store.
//!
//! [`Platform`] is the only thing that a frontend or a backend knows of the machine it runs on.
//! [`local`] implements it with Linux processes alone: no hypervisor, no root. [`xen`] implements it
//! on Xen, in dom0, a driver domain or a guest.
//!
//! # Who may do what
//!
//! * A [`Granter`] lends pages to one peer and takes them back. What it lends, the peer may read
//!   (or write) at any instant until it was taken back.
//! * A [`Grantee`] reaches the pages that one peer lent it: by mapping them, or by copies in which
//!   nothing is mapped. Each element of a batch has a status of its own (XSA-361).
//! * A [`Channel`] is one bit each way: several notifications before it is cleared merge into one.
//! * The [store](ringfence_xenstore) carries the xenbus handshake. Every value in it is the peer's text.

pub mod copy;
pub mod local;
pub mod window;
pub mod xen;

use std::io;
use std::os::fd::AsFd;

pub use copy::{CopyList, CopyOps};
use ringfence_memory::LentSlice;
pub use ringfence_sys::counters::Counters;
pub use ringfence_wire::grant::{Access, DomId, GrantStatus, Gref};
pub use window::{
    PageId, RoundPlace, TranslationTable, WindowError, WindowHandle, WindowPlace, WindowRound,
    WindowShape, WindowView,
};

/// The number of an event channel in the domain that owns it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct EventPort(pub u32);

/// A domain's view of the platform.
pub trait Platform: Send + Sync + 'static {
    /// The lending side.
    type Granter: Granter;
    /// The using side.
    type Grantee: Grantee;
    /// One end of an event channel.
    type Channel: Channel;

    /// This domain's number.
    fn domid(&self) -> DomId;

    /// A connection to the store of its own.
    ///
    /// # Errors
    ///
    /// When the store cannot be reached.
    fn store(&self) -> Result<ringfence_xenstore::StoreClient, PlatformError>;

    /// The means to lend pages to `peer`.
    ///
    /// # Errors
    ///
    /// When a quota or the system refuses.
    fn granter(&self, peer: DomId) -> Result<Self::Granter, PlatformError>;

    /// The means to use pages that `granter` lent to this domain.
    ///
    /// # Errors
    ///
    /// When nothing was lent, or in a way that breaks the rules.
    fn grantee(&self, granter: DomId) -> Result<Self::Grantee, PlatformError>;

    /// A new channel that only `peer` may bind.
    ///
    /// # Errors
    ///
    /// When a quota or the system refuses.
    fn alloc_unbound(&self, peer: DomId) -> Result<Self::Channel, PlatformError>;

    /// Binds the channel that `peer` allocated for this domain as `port`. It is pending once at
    /// once.
    ///
    /// # Errors
    ///
    /// When there is no such port, or it is not for this domain, or it is bound already.
    fn bind_interdomain(
        &self,
        peer: DomId,
        port: EventPort,
    ) -> Result<Self::Channel, PlatformError>;

    /// Makes a window for `grantee`: memory that this domain lends and takes back alone. Some platforms
    /// can do so only before their sandbox closes.
    ///
    /// # Errors
    ///
    /// [`WindowError::NeedsPeer`] where pages are not taken back without the peer; else when a quota or
    /// the system refuses.
    fn window(
        &self,
        _grantee: DomId,
        _shape: WindowShape,
    ) -> Result<Box<dyn TranslationTable>, WindowError> {
        Err(WindowError::NeedsPeer)
    }

    /// Opens a window that `granter` made for this domain, and maps all of it.
    ///
    /// # Errors
    ///
    /// [`WindowError::NeedsPeer`] where there are none; else when there is none of that name, it has
    /// more than `entries_max` entries, or breaks a rule.
    fn open_window(
        &self,
        _granter: DomId,
        _handle: WindowHandle,
        _entries_max: u32,
    ) -> Result<WindowView, WindowError> {
        Err(WindowError::NeedsPeer)
    }

    /// Whether this platform has windows.
    fn has_windows(&self) -> bool {
        false
    }

    /// What was done so far through this platform.
    fn counters(&self) -> &std::sync::Arc<Counters>;
}

/// A page lent to a peer. An owned value: it stays lent until it is given to
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

    /// The reference to give to the peer.
    pub fn gref(&self) -> Gref {
        self.gref
    }

    /// What the peer may do.
    pub fn access(&self) -> Access {
        self.access
    }

    /// The page, 4096 bytes, readable and writable here.
    pub fn memory(&self) -> &LentSlice {
        &self.memory
    }

    /// How often the page behind this lease had been revoked when it was lent: contents of
    /// another generation were never visible under this lease.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    pub(crate) fn page(&self) -> u32 {
        self.page
    }
}

/// The page could not be taken back; the lease goes on.
#[derive(Debug, thiserror::Error)]
#[error("{gref} was not taken back: {why}", gref = lease.gref)]
pub struct StillLent {
    /// The lease, unchanged.
    pub lease: Lease,
    /// Why.
    pub why: RevokeError,
}

/// Why a page could not be taken back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RevokeError {
    /// The peer says that it is using the page.
    #[error("the peer is using the page")]
    Busy,
    /// The platform cannot do this alone.
    #[error("this platform needs the peer's help to revoke")]
    NeedsPeer,
    /// Nothing is lent under that reference.
    #[error("nothing is issued under that reference")]
    NotIssued,
    /// The system refused (errno).
    #[error("the system refused (errno {0})")]
    System(i32),
}

/// The lending side of a pair of domains.
pub trait Granter: Send {
    /// Who the pages are lent to.
    fn peer(&self) -> DomId;

    /// Lends one page. Fresh pages hold zeros or what was lent to the same peer before.
    ///
    /// # Errors
    ///
    /// [`LendError`] when no page or no reference is free.
    fn lend(&mut self, access: Access) -> Result<Lease, LendError>;

    /// Takes a page back if the peer is not using it: one attempt (XSA-396). The page returns to
    /// this pair's pool; nobody but the same peer is lent it again.
    ///
    /// # Errors
    ///
    /// [`StillLent`] with the lease.
    fn take_back(&mut self, lease: Lease) -> Result<(), StillLent>;

    /// Takes pages back whatever the peer does, destroying their content. A reference that the peer
    /// still claims to use is not issued again until it lets go, and its page is not lent again:
    /// so no mapping of an honest peer reaches data that is lent later.
    ///
    /// # Errors
    ///
    /// [`RevokeError::NeedsPeer`] where the platform cannot; the leases go on.
    /// [`RevokeError::System`]: the peer can begin no new use; try again.
    fn revoke_forced(&mut self, leases: Vec<Lease>) -> Result<(), (Vec<Lease>, RevokeError)>;
}

/// Takes leases back; those the peer is using go by force where the platform can, else they are
/// returned.
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

/// Why a page was not lent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LendError {
    /// Every page set aside for this peer and access is lent.
    #[error("all {limit} pages set aside for this peer are lent")]
    NoPage {
        /// Pages set aside.
        limit: u32,
    },
    /// No reference is free.
    #[error("all {limit} grant references of this peer are in use")]
    NoReference {
        /// References there are.
        limit: u32,
    },
    /// The system refused (errno).
    #[error("the system refused (errno {0})")]
    System(i32),
}

/// The using side of a pair of domains.
pub trait Grantee: Send {
    /// Who lent the pages.
    fn granter(&self) -> DomId;

    /// Maps pages, each with a status of its own, appended to `out` in order. A mapping is
    /// removed when the last handle to it is dropped; pages of one call may be removed together.
    fn map(&mut self, pages: &[(Gref, Access)], out: &mut Vec<Result<LentSlice, GrantStatus>>);

    /// Maps a page that is to stay mapped for many uses. It is removed when its own last handle is
    /// dropped, whatever else is kept. How many are kept is the caller's to bound; they do not count
    /// against what [`Grantee::map`] may have mapped where the platform can tell them apart.
    ///
    /// # Errors
    ///
    /// The status of the page.
    fn keep(&mut self, gref: Gref, access: Access) -> Result<LentSlice, GrantStatus> {
        let mut out = Vec::with_capacity(1);
        self.map(&[(gref, access)], &mut out);
        out.pop().unwrap_or(Err(GrantStatus::GeneralError))
    }

    /// Does the copies of `list`, each with a status of its own in [`CopyOps::statuses`]; nothing
    /// is mapped.
    fn copy(&mut self, list: CopyList<'_, '_>);
}

/// One end of an event channel.
pub trait Channel: Send + AsFd {
    /// The number of this end in its domain.
    fn port(&self) -> EventPort;

    /// Makes the other end pending. Never blocks; if it is pending already nothing happens.
    ///
    /// # Errors
    ///
    /// [`ChannelError::PeerGone`] when the other end was closed.
    fn notify(&self) -> Result<(), ChannelError>;

    /// Clears the pending state. Returns whether it was pending. Bounded in time, whatever the
    /// peer sent.
    ///
    /// What was sent before may make it pending once more (on Xen, an event that came while an
    /// earlier one was waiting): an event without work is always possible. So clear, then look for
    /// work, then wait.
    ///
    /// # Errors
    ///
    /// [`ChannelError::PeerGone`] when the other end was closed.
    fn clear(&self) -> Result<bool, ChannelError>;
}

/// A channel that is of no more use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ChannelError {
    /// The other end was closed.
    #[error("the other end of the event channel was closed")]
    PeerGone,
    /// The system refused (errno).
    #[error("event channel: errno {0}")]
    System(i32),
}

/// What setting something up can fail with.
#[derive(Debug, thiserror::Error)]
pub enum PlatformError {
    /// The system refused.
    #[error("{what}: {source}")]
    System {
        /// What was attempted.
        what: &'static str,
        /// Why it failed.
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
    /// The connection to the hub or store was lost.
    #[error("the connection to the {0} was lost")]
    Disconnected(&'static str),
    /// A device of the hypervisor is missing or may not be used.
    #[error(transparent)]
    Device(BoxedError),
    /// The store refused or broke its protocol.
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
