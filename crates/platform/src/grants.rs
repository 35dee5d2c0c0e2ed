//! Both sides of ordinary grants: a granter lends pages, a grantee maps or copies them.

use ringfence_memory::LentSlice;
use ringfence_wire::grant::{Access, DomId, GrantStatus, Gref};

use crate::copy::CopyList;

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
    /// [`CopyOps::statuses`](crate::CopyOps::statuses).
    fn copy(&mut self, list: CopyList<'_, '_>);
}
