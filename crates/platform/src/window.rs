//! Windows: the redesigned grant mechanism, in which the granter issues and revokes alone.
//!
//! A granter makes a *translation table* for one grantee, with a number of entries and memory of its
//! own, and tells the grantee its [`WindowHandle`]. The grantee maps the whole window once. From then
//! on the granter issues and revokes grants of pages in it with nothing asked of the grantee: no
//! message, no answer, no turn of its scheduler. The grantee finds a page by its reference, which is an
//! index into the table, and raises the entry's status word while it uses the page.
//!
//! Whoever guards the memory (for processes the kernel, elsewhere an IOMMU) is the *engine* of the
//! table, behind [`TranslationTable`].
//!
//! # Pages and references
//!
//! The memory of a window may have many more pages than its table has entries. A page is in one of
//! these states:
//!
//! | page | may be |
//! |---|---|
//! | fresh: no mapping and no pin of the grantee reaches what is put there | filled, issued |
//! | issued under one reference | revoked |
//! | stale: revoked, but the grantee may have kept a way to it | made fresh ([`TranslationTable::prepare`]) |
//! | held: revoked by force while the grantee claimed to use it | waited for |
//!
//! So what is put into a page after its revocation is reached by nothing that the grantee kept. What is
//! to be kept of a stale page's content is copied out before it is made fresh.

use std::os::fd::RawFd;

use ringfence_memory::LentSlice;

pub use crate::local::{RoundPlace, WindowPlace, WindowRound, WindowView};
use crate::{Access, DomId, Gref, PlatformError, RevokeError};

/// Names a window among those that one granter made for one grantee. Never zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct WindowHandle(pub u32);

/// A page of a window's memory: the writable ones come first.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct PageId(pub u32);

/// Sizes of a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowShape {
    /// Pages that can be issued for reading and writing.
    pub writable: u32,
    /// Pages that can be issued for reading.
    pub read_only: u32,
    /// Entries of the table: pages that can be issued at a time.
    pub entries: u32,
}

impl WindowShape {
    /// Pages of both kinds.
    pub fn pages(self) -> u32 {
        self.writable.saturating_add(self.read_only)
    }

    /// The pages of one kind.
    pub fn pages_for(self, access: Access) -> impl DoubleEndedIterator<Item = PageId> + Clone {
        let range = match access {
            Access::ReadWrite => 0..self.writable,
            Access::ReadOnly => self.writable..self.pages(),
        };
        range.map(PageId)
    }

    /// What a page of it can be issued for; `None` beyond its end.
    pub fn access_of(self, page: PageId) -> Option<Access> {
        match page.0 {
            n if n < self.writable => Some(Access::ReadWrite),
            n if n < self.pages() => Some(Access::ReadOnly),
            _ => None,
        }
    }

    /// The references of its table.
    pub fn grefs(self) -> impl DoubleEndedIterator<Item = Gref> + Clone {
        let first = Gref::FIRST_FREE.0;
        (first..first.saturating_add(self.entries)).map(Gref)
    }
}

/// What an engine promises.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EngineFacts {
    /// Its name on the command line and in reports.
    pub name: &'static str,
    /// Whether a revocation needs nothing from the grantee, not even that it runs.
    pub one_sided: bool,
    /// What becomes of an access that is in flight when its page is revoked.
    pub in_flight: &'static str,
    /// What issuing and revoking cost.
    pub cost: &'static str,
}

/// Why a page was not issued.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum IssueError {
    /// No such entry.
    #[error("{gref} is none of the table's {entries} entries")]
    NoEntry {
        /// The reference.
        gref: Gref,
        /// Entries there are.
        entries: u32,
    },
    /// The entry is taken.
    #[error("{gref} is issued already")]
    Taken {
        /// The reference.
        gref: Gref,
    },
    /// The grantee still claims to use what was revoked by force under that reference.
    #[error("{gref} was revoked by force, and the peer has not let go of it")]
    Held {
        /// The reference.
        gref: Gref,
    },
    /// No such page.
    #[error("page {page} of {pages}", page = page.0)]
    NoPage {
        /// The page.
        page: PageId,
        /// Pages there are.
        pages: u32,
    },
    /// The page is not fresh: it is issued, stale or held.
    #[error("page {page} is not fresh", page = page.0)]
    NotFresh {
        /// The page.
        page: PageId,
    },
    /// A page is issued for what its kind is made for: only that can be enforced.
    #[error("page {page} can be issued for {kind:?} only", page = page.0)]
    Access {
        /// The page.
        page: PageId,
        /// What it can be issued for.
        kind: Access,
    },
    /// The system refused (errno).
    #[error("the system refused (errno {0})")]
    System(i32),
}

/// What cannot be reused because the grantee has not let go of it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Held {
    /// Pages with a reference each that the grantee claims to use although they were revoked by force.
    pub pages: u32,
}

/// The granter's end of a window. One owner; the grantee has no part in any of this.
pub trait TranslationTable: Send {
    /// What the engine promises.
    fn engine(&self) -> EngineFacts;

    /// For whom it was made.
    fn grantee(&self) -> DomId;

    /// The name to tell the grantee.
    fn handle(&self) -> WindowHandle;

    /// Its sizes.
    fn shape(&self) -> WindowShape;

    /// A page's 4096 bytes, readable and writable here. Filling a page that is not fresh is of no use:
    /// it can only be issued after it was made fresh, which empties it.
    fn memory(&self, page: PageId) -> Option<LentSlice>;

    /// How often a page was made fresh.
    fn generation(&self, page: PageId) -> u32;

    /// Makes a page fresh if it is not: its content is gone, and so is every mapping of it. May make
    /// other stale pages fresh in passing. Nothing happens to a fresh page.
    ///
    /// # Errors
    ///
    /// [`RevokeError::Busy`] when the page is issued or held.
    fn prepare(&mut self, page: PageId) -> Result<(), RevokeError>;

    /// Grants the grantee access to a fresh page under `gref`.
    ///
    /// # Errors
    ///
    /// [`IssueError`]; nothing changed.
    fn issue(&mut self, gref: Gref, page: PageId, access: Access) -> Result<(), IssueError>;

    /// Takes a grant back if the grantee is not using it: one attempt. The page is stale then; its
    /// content is still there for the granter.
    ///
    /// # Errors
    ///
    /// [`RevokeError::Busy`]: nothing changed. [`RevokeError::NotIssued`].
    fn revoke(&mut self, gref: Gref) -> Result<PageId, RevokeError>;

    /// Takes grants back whatever the grantee does, and destroys the pages' content. References that are
    /// not issued are passed over. Pages and references that the grantee claims to use are held until it
    /// lets go; the others are fresh and free.
    ///
    /// # Errors
    ///
    /// [`RevokeError::System`]: the grantee can begin no new use; try again.
    fn revoke_forced(&mut self, grefs: &[Gref]) -> Result<(), RevokeError>;

    /// Makes every stale page fresh, which also returns its memory to the system; how many.
    ///
    /// # Errors
    ///
    /// [`RevokeError::System`]
    fn scrub(&mut self) -> Result<u32, RevokeError>;

    /// The files it holds, for a sandbox that closes or refuses all others.
    fn descriptors(&self) -> Vec<RawFd> {
        Vec::new()
    }

    /// Looks at what is held, frees what was let go of, and says what is left.
    fn held(&mut self) -> Held;
}

/// Why there is no window.
#[derive(Debug, thiserror::Error)]
pub enum WindowError {
    /// The platform's grants are not revoked without the peer.
    #[error(
        "this platform has no windows: taking a page back needs the peer there; use `staging`, `persistent` or `copy`"
    )]
    NeedsPeer,
    /// The handle names nothing.
    #[error("domain {granter} made no window {handle} for this domain", handle = handle.0)]
    NoSuchWindow {
        /// Who was said to have made it.
        granter: DomId,
        /// Its name.
        handle: WindowHandle,
    },
    /// More entries than this side is ready for.
    #[error("the window has {found} entries, at most {limit} are allowed")]
    TooLarge {
        /// Entries it has.
        found: u32,
        /// Entries allowed.
        limit: u32,
    },
    /// The platform refused.
    #[error(transparent)]
    Platform(#[from] PlatformError),
}
