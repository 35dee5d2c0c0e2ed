//! Grant windows: grants that the granter issues and revokes alone.
//!
//! A granter creates a *translation table* for one grantee, with its own entries and its own memory, and
//! passes its [`WindowHandle`] to the grantee. The grantee maps the whole window once. After that the
//! granter issues and revokes grants of pages in the window without the grantee: no message, no reply
//! and no scheduling of the grantee is needed. A reference is an index into the table. The grantee
//! resolves it there, and raises the entry's status word while it uses the page.
//!
//! The *engine* of a table enforces revocation: between processes the kernel, elsewhere an IOMMU. Engines
//! implement [`TranslationTable`].
//!
//! # Pages and references
//!
//! The memory of a window may have many more pages than its table has entries. A page is in one of
//! these states:
//!
//! | state of a page | next operation |
//! |---|---|
//! | fresh: no mapping and no pin of the grantee reaches its content | filled, issued |
//! | issued under one reference | revoked |
//! | stale: revoked, but the grantee may have kept a mapping or pin | made fresh ([`TranslationTable::prepare`]) |
//! | held: revoked by force while the grantee claimed to use it | made fresh after the use ended |
//!
//! The grantee therefore cannot reach data that is stored in a page after its revocation. A granter that
//! needs the content of a stale page copies it out before it makes the page fresh.

mod granter;
mod round;
mod translation;
mod view;

pub(crate) use self::granter::{Engine, EnginePage, GranterTable};
pub use self::round::{RoundPlace, WindowRound};
pub use self::translation::{
    EngineFacts, Held, IssueError, PageId, TranslationTable, WindowError, WindowHandle, WindowName,
    WindowShape,
};
pub use self::view::{WindowPlace, WindowView};
