//! Translation tables: the granter's end of a grant window, its sizes, names and errors.

use std::os::fd::RawFd;

use ringfence_memory::LentSlice;
use ringfence_wire::grant::{Access, DomId, Gref};

use crate::error::PlatformError;
use crate::grants::RevokeError;

/// Name of a grant window among those of one granter for one grantee. The local platform has none named zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct WindowHandle(pub u32);

/// Name of a grant window as the grantee learns it, to open the window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowName {
    pub handle: WindowHandle,
    /// Number of references that the granter announced, reserved ones included. Without it, only a platform
    /// that finds the number itself can open the window.
    pub references: Option<u32>,
}

impl From<WindowHandle> for WindowName {
    fn from(handle: WindowHandle) -> WindowName {
        WindowName { handle, references: None }
    }
}

/// Page of a grant window's memory. Writable pages come first.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct PageId(pub u32);

/// Sizes of a grant window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WindowShape {
    /// Number of pages that can be issued for reading and writing.
    pub writable: u32,
    /// Number of pages that can be issued for reading.
    pub read_only: u32,
    /// Number of table entries: the maximum of pages that are issued at a time.
    pub entries: u32,
}

impl WindowShape {
    /// Returns the number of references, including the reserved ones.
    pub fn references(self) -> u32 {
        self.entries.saturating_add(Gref::FIRST_FREE.0)
    }

    /// Returns the number of pages of both kinds.
    pub fn pages(self) -> u32 {
        self.writable.saturating_add(self.read_only)
    }

    /// Iterates over the pages of one kind.
    pub fn pages_for(self, access: Access) -> impl DoubleEndedIterator<Item = PageId> + Clone {
        let range = match access {
            Access::ReadWrite => 0..self.writable,
            Access::ReadOnly => self.writable..self.pages(),
        };
        range.map(PageId)
    }

    /// Returns the access that a page can be issued for; `None` beyond the end.
    pub fn access_of(self, page: PageId) -> Option<Access> {
        match page.0 {
            n if n < self.writable => Some(Access::ReadWrite),
            n if n < self.pages() => Some(Access::ReadOnly),
            _ => None,
        }
    }

    /// Iterates over the references of the table.
    pub fn grefs(self) -> impl DoubleEndedIterator<Item = Gref> + Clone {
        let first = Gref::FIRST_FREE.0;
        (first..first.saturating_add(self.entries)).map(Gref)
    }
}

/// Properties by which engines of grant windows differ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EngineFacts {
    /// Name on the command line and in reports.
    pub name: &'static str,
    /// Set if a revocation needs nothing from the grantee, not even that it runs.
    pub one_sided: bool,
    /// Fate of an access that is in flight when its page is revoked.
    pub in_flight: &'static str,
    /// Cost of issuing and revoking.
    pub cost: &'static str,
}

/// Reasons for which a page is not issued.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum IssueError {
    /// Reference beyond the end of the table.
    #[error("{gref} is none of the table's {entries} entries")]
    NoEntry {
        gref: Gref,
        /// Number of entries of the table.
        entries: u32,
    },
    #[error("{gref} is issued already")]
    Taken { gref: Gref },
    /// The grantee still claims a use that was revoked by force under that reference.
    #[error("{gref} was revoked by force, and the peer has not let go of it")]
    Held { gref: Gref },
    /// Page number beyond the end of the window.
    #[error("page {page} of {pages}", page = page.0)]
    NoPage {
        page: PageId,
        /// Number of pages of the window.
        pages: u32,
    },
    /// Page that is issued, stale or held.
    #[error("page {page} is not fresh", page = page.0)]
    NotFresh { page: PageId },
    /// Access that the kind of page does not allow. Only the kind can be enforced.
    #[error("page {page} can be issued for {kind:?} only", page = page.0)]
    Access {
        page: PageId,
        /// Access that the page can be issued for.
        kind: Access,
    },
    /// Error of a system call (errno).
    #[error("the system refused (errno {0})")]
    System(i32),
}

/// Resources that are blocked because the grantee has not ended its uses.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Held {
    /// Number of pages, with one reference each, that the grantee claims to use after a forced
    /// revocation.
    pub pages: u32,
}

/// Granter's end of a grant window. It has one owner; the grantee takes no part.
pub trait TranslationTable: Send {
    /// Returns the guarantees of the engine.
    fn engine(&self) -> EngineFacts;

    /// Returns the domain that the window was created for.
    fn grantee(&self) -> DomId;

    /// Returns the name to pass to the grantee.
    fn handle(&self) -> WindowHandle;

    /// Returns the sizes of the window.
    fn shape(&self) -> WindowShape;

    /// Returns a page: 4096 bytes that this domain can read and write. Content that is written into a
    /// page that is not fresh is lost: the page is emptied before it can be issued.
    fn memory(&self, page: PageId) -> Option<LentSlice>;

    /// Returns the number of times that a page was made fresh.
    fn generation(&self, page: PageId) -> u32;

    /// Makes a page fresh: destroys its content and every mapping of it. May make other stale pages
    /// fresh too. No effect on a fresh page.
    ///
    /// # Errors
    ///
    /// Returns [`RevokeError::Busy`] if the page is issued or held.
    fn prepare(&mut self, page: PageId) -> Result<(), RevokeError>;

    /// Grants the grantee access to a fresh page under `gref`.
    ///
    /// # Errors
    ///
    /// Returns [`IssueError`]; nothing changed.
    fn issue(&mut self, gref: Gref, page: PageId, access: Access) -> Result<(), IssueError>;

    /// Makes one attempt to revoke a grant; it fails if the grantee is using the page. The page is stale
    /// afterwards; the granter can still read its content.
    ///
    /// # Errors
    ///
    /// Returns [`RevokeError::Busy`] if the page is in use; nothing changed. Returns
    /// [`RevokeError::NotIssued`] if nothing is issued under `gref`.
    fn revoke(&mut self, gref: Gref) -> Result<PageId, RevokeError>;

    /// Revokes grants even if the grantee is using the pages, and destroys their content. References
    /// that are not issued are skipped. Pages and references that the grantee claims to use are held
    /// until it ends the uses; the others are fresh and free.
    ///
    /// # Errors
    ///
    /// Returns [`RevokeError::System`]; the grantee can begin no new use, and the caller should retry.
    fn revoke_forced(&mut self, grefs: &[Gref]) -> Result<(), RevokeError>;

    /// Makes every stale page fresh, which also returns its memory to the system. Returns the number of
    /// pages.
    ///
    /// # Errors
    ///
    /// Returns [`RevokeError::System`] with the system's error.
    fn scrub(&mut self) -> Result<u32, RevokeError>;

    /// Prepares the window for another program of the grantee, which opens it next. The handle may change. All
    /// grants should be revoked before; some engines revoke them here.
    ///
    /// # Errors
    ///
    /// Returns an error if the window cannot be used any more.
    fn renew(&mut self) -> Result<(), WindowError> {
        Ok(())
    }

    /// Returns the open descriptors, for a sandbox that closes or refuses all others.
    fn descriptors(&self) -> Vec<RawFd> {
        Vec::new()
    }

    /// Frees held pages whose uses have ended. Returns the rest.
    fn held(&mut self) -> Held;
}

/// Errors of creating or opening a grant window.
#[derive(Debug, thiserror::Error)]
pub enum WindowError {
    /// The platform cannot revoke grants without the peer.
    #[error(
        "this platform has no windows: taking a page back needs the peer there; use `staging`, `persistent` or `copy`"
    )]
    NeedsPeer,
    /// Handle that names no window.
    #[error("domain {granter} made no window {handle} for this domain", handle = handle.0)]
    NoSuchWindow {
        /// Domain that was named as its creator.
        granter: DomId,
        handle: WindowHandle,
    },
    /// Window with more entries than the caller accepts.
    #[error("the window has {found} entries, at most {limit} are allowed")]
    TooLarge {
        /// Number of entries of the window.
        found: u32,
        /// Maximum number of entries.
        limit: u32,
    },
    /// Window beyond the limit of one granter's open windows.
    #[error(
        "domain {granter} has windows of {present} references open here; {wanted} more exceed the limit of {limit}"
    )]
    TooMany {
        /// Domain that made the window.
        granter: DomId,
        /// Number of references of its open windows.
        present: u32,
        /// Number of references of the window.
        wanted: u32,
        /// Maximum number of references.
        limit: u32,
    },
    /// Window without an announced number of references, on a platform that needs it.
    #[error("domain {granter} did not say how many references its window has")]
    NoReferences {
        /// Domain that made the window.
        granter: DomId,
    },
    #[error(transparent)]
    Platform(#[from] PlatformError),
}
