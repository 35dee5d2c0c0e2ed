//! The grant table between two domains and the status words beside it.
//!
//! The granter writes *entries* (the v1 layout of `grant_table.h`, one u64 each), the grantee only
//! reads them. The grantee writes *status words*, one u32 an entry: how many uses of the page are
//! going on. Neither side can hold the other up:
//!
//! * begin a use: read the entry, raise the status, read the entry again; if it changed, lower the
//!   status and try no further.
//! * take back: clear the entry, read the status; if it is raised, put the entry back and report
//!   Busy.
//!
//! Both sides write their own word before they read the other's, with a sequentially consistent fence between, so
//! that of a use and a revocation that race at least one sees the other. loom explores this.
//!
//! What a *dishonest* grantee writes into the status words can keep a page from being taken back,
//! which is what the forced revocation is for; it can reach no page that was not lent to it.

use ringfence_memory::{LentSlice, OutOfRange};
use ringfence_ring::sync::{Ordering, fence};
use ringfence_wire::grant::{Access, DomId, GrantStatus, Gref, RawGrantEntry, flags};

/// Bytes of a table entry and of a status word.
pub(crate) const ENTRY_BYTES: usize = 8;
pub(crate) const STATUS_BYTES: usize = 4;

/// The shared words of one table.
pub(crate) trait TableWords {
    /// References, reserved ones included.
    fn references(&self) -> u32;
    /// Reads the entry of a reference below `references`.
    fn entry(&self, gref: Gref) -> u64;
    /// Writes it (granter).
    fn set_entry(&self, gref: Gref, value: u64);
    /// Reads the status word.
    fn status(&self, gref: Gref) -> u32;
    /// Raises it by one (grantee).
    fn raise(&self, gref: Gref);
    /// Lowers it by one (grantee).
    fn lower(&self, gref: Gref);
}

/// A table in lent memory.
#[derive(Clone)]
pub(crate) struct LentTable {
    entries: LentSlice,
    status: LentSlice,
    references: u32,
}

impl LentTable {
    pub(crate) fn new(
        entries: LentSlice,
        status: LentSlice,
        references: u32,
    ) -> Result<LentTable, OutOfRange> {
        let count = references as usize;
        Ok(LentTable {
            entries: entries.slice(0, count * ENTRY_BYTES)?,
            status: status.slice(0, count * STATUS_BYTES)?,
            references,
        })
    }

    fn checked<T: Default>(result: Result<T, OutOfRange>) -> T {
        debug_assert!(result.is_ok(), "references were checked against the table's size");
        result.unwrap_or_default()
    }
}

impl TableWords for LentTable {
    fn references(&self) -> u32 {
        self.references
    }
    fn entry(&self, gref: Gref) -> u64 {
        let raw = self.entries.load_u64(gref.0 as usize * ENTRY_BYTES, Ordering::SeqCst);
        u64::from_le(Self::checked(raw))
    }
    fn set_entry(&self, gref: Gref, value: u64) {
        let at = gref.0 as usize * ENTRY_BYTES;
        Self::checked(self.entries.store_u64(at, value.to_le(), Ordering::SeqCst));
    }
    fn status(&self, gref: Gref) -> u32 {
        Self::checked(self.status.load_u32(gref.0 as usize * STATUS_BYTES, Ordering::SeqCst))
    }
    fn raise(&self, gref: Gref) {
        let at = gref.0 as usize * STATUS_BYTES;
        Self::checked(self.status.fetch_add_u32(at, 1, Ordering::SeqCst));
    }
    fn lower(&self, gref: Gref) {
        let at = gref.0 as usize * STATUS_BYTES;
        Self::checked(self.status.fetch_sub_u32(at, 1, Ordering::SeqCst));
    }
}

/// A validated use of a page: where it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Use {
    pub(crate) frame: u32,
    pub(crate) read_only: bool,
}

fn validate(word: u64, me: DomId, access: Access) -> Result<Use, GrantStatus> {
    let raw = RawGrantEntry(word);
    if raw.flags() & flags::TYPE_MASK != flags::PERMIT_ACCESS {
        return Err(GrantStatus::BadGref);
    }
    if raw.domain() != me {
        return Err(GrantStatus::PermissionDenied);
    }
    let read_only = raw.flags() & flags::READ_ONLY != 0;
    if read_only && access == Access::ReadWrite {
        return Err(GrantStatus::PermissionDenied);
    }
    Ok(Use { frame: raw.frame(), read_only })
}

/// Begins a use of `gref` by `me` (the grantee). On success the status is raised and
/// [`end_use`] is owed.
#[inline]
pub(crate) fn begin_use<T: TableWords>(
    table: &T,
    gref: Gref,
    me: DomId,
    access: Access,
) -> Result<Use, GrantStatus> {
    if gref < Gref::FIRST_FREE || gref.0 >= table.references() {
        return Err(GrantStatus::BadGref);
    }
    let word = table.entry(gref);
    let found = validate(word, me, access)?;
    table.raise(gref);
    // Raised before the entry is read again, as the granter clears it before it reads the status.
    fence(Ordering::SeqCst);
    if table.entry(gref) != word {
        table.lower(gref);
        return Err(GrantStatus::Again);
    }
    Ok(found)
}

/// Ends a use.
#[inline]
pub(crate) fn end_use<T: TableWords>(table: &T, gref: Gref) {
    table.lower(gref);
}

/// Issues `gref` (the granter; the entry is clear).
pub(crate) fn issue<T: TableWords>(table: &T, gref: Gref, to: DomId, frame: u32, access: Access) {
    let read_only = if access == Access::ReadOnly { flags::READ_ONLY } else { 0 };
    let word = RawGrantEntry::from_fields(flags::PERMIT_ACCESS | read_only, to.0, frame);
    table.set_entry(gref, word.0);
}

/// Takes `gref` back if no use is going on; one attempt.
pub(crate) fn try_revoke<T: TableWords>(table: &T, gref: Gref) -> bool {
    let word = table.entry(gref);
    table.set_entry(gref, 0);
    fence(Ordering::SeqCst);
    if table.status(gref) == 0 {
        return true;
    }
    table.set_entry(gref, word);
    false
}

#[cfg(loom)]
#[cfg(test)]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

    struct Modelled {
        entry: AtomicU64,
        status: AtomicU32,
    }

    impl TableWords for Modelled {
        fn references(&self) -> u32 {
            16
        }
        fn entry(&self, _: Gref) -> u64 {
            self.entry.load(Ordering::SeqCst)
        }
        fn set_entry(&self, _: Gref, value: u64) {
            self.entry.store(value, Ordering::SeqCst);
        }
        fn status(&self, _: Gref) -> u32 {
            self.status.load(Ordering::SeqCst)
        }
        fn raise(&self, _: Gref) {
            self.status.fetch_add(1, Ordering::SeqCst);
        }
        fn lower(&self, _: Gref) {
            self.status.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// A page that was taken back is never in use.
    #[test]
    fn loom_no_use_overlaps_a_successful_revocation() {
        loom::model(|| {
            let table = Arc::new(Modelled { entry: AtomicU64::new(0), status: AtomicU32::new(0) });
            let taken_back = Arc::new(AtomicBool::new(false));
            issue(&*table, Gref(8), DomId(1), 3, Access::ReadWrite);
            let (theirs, gone) = (Arc::clone(&table), Arc::clone(&taken_back));
            let grantee = loom::thread::spawn(move || {
                for _ in 0..2 {
                    if begin_use(&*theirs, Gref(8), DomId(1), Access::ReadOnly).is_ok() {
                        assert!(!gone.load(Ordering::SeqCst), "in use after it was taken back");
                        end_use(&*theirs, Gref(8));
                    }
                }
            });
            if try_revoke(&*table, Gref(8)) {
                taken_back.store(true, Ordering::SeqCst);
            }
            grantee.join().expect("the grantee ends");
            assert_eq!(table.status(Gref(8)), 0);
        });
    }
}
