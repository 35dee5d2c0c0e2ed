//! Grant table between two domains, with the status words beside it.
//!
//! The granter writes *entries* (v1 layout of `grant_table.h`, one u64 each); the grantee only reads
//! them. The grantee writes *status words*, one u32 for each entry: the number of uses in progress.
//! Neither side can block the other:
//!
//! * The grantee begins a use: it reads the entry, raises the status, and reads the entry again. If the
//!   entry changed, it lowers the status and fails.
//! * The granter takes back: it clears the entry and reads the status. If the status is raised, it
//!   restores the entry and reports Busy.
//!
//! Each side writes its own word before it reads the other's, with a sequentially consistent fence
//! between. Of a use and a revocation that race, at least one therefore sees the other. loom tests
//! explore the interleavings.
//!
//! A faulty grantee can write status words that keep a page from being taken back; the forced revocation
//! handles that. It can reach no page that was not granted to it.
//!
//! A hypervisor's window has another layout, in which the hypervisor acts for the granter: one slot for each
//! reference, with a u32 entry and the u32 status word. The page of reference r is page r of the window.

use ringfence_memory::{LentSlice, OutOfRange};
use ringfence_ring::sync::{Ordering, fence};
use ringfence_wire::grant::{Access, DomId, GrantStatus, Gref, RawGrantEntry, flags};

/// Sizes of a table entry and of a status word in bytes.
pub(crate) const ENTRY_BYTES: usize = 8;
pub(crate) const STATUS_BYTES: usize = 4;

/// Size of a slot of a hypervisor's table: the entry, then the status word.
pub(crate) const SLOT_BYTES: usize = 8;

/// Bits of a slot's entry below its generation.
const SLOT_ISSUED: u32 = 1;
const SLOT_WRITABLE: u32 = 2;
const SLOT_GENERATION_SHIFT: u32 = 2;

/// Shared words of one table.
pub(crate) trait TableWords {
    /// Returns the number of references, including the reserved ones.
    fn references(&self) -> u32;
    /// Reads the entry of a reference below `references`.
    fn entry(&self, gref: Gref) -> u64;
    /// Returns the location of the page of a validated entry.
    fn locate(&self, _: Gref, entry: RawGrantEntry) -> Use {
        Use { frame: entry.frame(), read_only: entry.flags() & flags::READ_ONLY != 0 }
    }
    /// Writes an entry (granter).
    fn set_entry(&self, gref: Gref, value: u64);
    /// Reads a status word.
    fn status(&self, gref: Gref) -> u32;
    /// Raises a status word by one (grantee).
    fn raise(&self, gref: Gref);
    /// Lowers a status word by one (grantee).
    fn lower(&self, gref: Gref);
    /// Stores a status word (a grantee that counts its uses itself, in one thread). Release: accesses
    /// to the page happen before a reader sees the word.
    fn set_status(&self, gref: Gref, uses: u32);
}

/// Table in lent memory.
#[derive(Clone)]
pub(crate) struct LentTable {
    entries: LentSlice,
    /// First status word, and everything behind it.
    status: LentSlice,
    /// Binary logarithm of the distance between two status words.
    status_shift: u32,
    references: u32,
    /// Domain that the hypervisor's slots were issued to; `None` for entries of the granter.
    slots: Option<DomId>,
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
            status_shift: STATUS_BYTES.trailing_zeros(),
            references,
            slots: None,
        })
    }

    /// Creates the grantee's view of a hypervisor's table, whose slots were issued to `me`.
    pub(crate) fn of_slots(
        slots: &LentSlice,
        references: u32,
        me: DomId,
    ) -> Result<LentTable, OutOfRange> {
        let bytes = references as usize * SLOT_BYTES;
        let first_status = SLOT_BYTES - STATUS_BYTES;
        Ok(LentTable {
            entries: slots.slice(0, bytes)?,
            status: slots.slice(first_status, bytes.saturating_sub(first_status))?,
            status_shift: SLOT_BYTES.trailing_zeros(),
            references,
            slots: Some(me),
        })
    }

    /// Returns the offset of a status word.
    #[inline]
    fn status_at(&self, gref: Gref) -> usize {
        (gref.0 as usize) << self.status_shift
    }

    /// Reads a slot's entry in the form of [`RawGrantEntry`]. The frame field has the generation, so that an
    /// entry that was revoked and issued again differs.
    fn slot(&self, gref: Gref, me: DomId) -> u64 {
        let raw = self.entries.load_u32(gref.0 as usize * SLOT_BYTES, Ordering::SeqCst);
        slot_entry(u32::from_le(Self::checked(raw)), me)
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
    #[inline]
    fn entry(&self, gref: Gref) -> u64 {
        if let Some(me) = self.slots {
            return self.slot(gref, me);
        }
        let raw = self.entries.load_u64(gref.0 as usize * ENTRY_BYTES, Ordering::SeqCst);
        u64::from_le(Self::checked(raw))
    }
    #[inline]
    fn locate(&self, gref: Gref, entry: RawGrantEntry) -> Use {
        match self.slots {
            // One memory for both kinds; the hypervisor discards writes to a read-only page.
            Some(_) => Use { frame: gref.0, read_only: false },
            None => Use { frame: entry.frame(), read_only: entry.flags() & flags::READ_ONLY != 0 },
        }
    }
    fn set_entry(&self, gref: Gref, value: u64) {
        debug_assert!(self.slots.is_none(), "only the hypervisor writes the entries of slots");
        let at = gref.0 as usize * ENTRY_BYTES;
        Self::checked(self.entries.store_u64(at, value.to_le(), Ordering::SeqCst));
    }
    fn status(&self, gref: Gref) -> u32 {
        Self::checked(self.status.load_u32(self.status_at(gref), Ordering::SeqCst))
    }
    fn raise(&self, gref: Gref) {
        let at = self.status_at(gref);
        Self::checked(self.status.fetch_add_u32(at, 1, Ordering::SeqCst));
    }
    fn lower(&self, gref: Gref) {
        let at = self.status_at(gref);
        Self::checked(self.status.fetch_sub_u32(at, 1, Ordering::SeqCst));
    }
    fn set_status(&self, gref: Gref, uses: u32) {
        let at = self.status_at(gref);
        Self::checked(self.status.store_u32(at, uses, Ordering::Release));
    }
}

/// Location of a page in a validated use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Use {
    pub(crate) frame: u32,
    pub(crate) read_only: bool,
}

/// Converts a slot's entry to the form of [`RawGrantEntry`]; see [`LentTable::of_slots`].
fn slot_entry(entry: u32, me: DomId) -> u64 {
    if entry & SLOT_ISSUED == 0 {
        return 0;
    }
    let read_only = if entry & SLOT_WRITABLE == 0 { flags::READ_ONLY } else { 0 };
    let generation = entry >> SLOT_GENERATION_SHIFT;
    RawGrantEntry::from_fields(flags::PERMIT_ACCESS | read_only, me.0, generation).0
}

fn validate(word: u64, me: DomId, access: Access) -> Result<RawGrantEntry, GrantStatus> {
    let raw = RawGrantEntry(word);
    if raw.flags() & flags::TYPE_MASK != flags::PERMIT_ACCESS {
        return Err(GrantStatus::BadGref);
    }
    if raw.domain() != me {
        return Err(GrantStatus::PermissionDenied);
    }
    if raw.flags() & flags::READ_ONLY != 0 && access == Access::ReadWrite {
        return Err(GrantStatus::PermissionDenied);
    }
    Ok(raw)
}

/// Reads and validates the entry of `gref` for `me`, without beginning a use. Returns the entry too.
#[inline]
pub(crate) fn look<T: TableWords>(
    table: &T,
    gref: Gref,
    me: DomId,
    access: Access,
) -> Result<(u64, Use), GrantStatus> {
    if gref < Gref::FIRST_FREE || gref.0 >= table.references() {
        return Err(GrantStatus::BadGref);
    }
    let word = table.entry(gref);
    let entry = validate(word, me, access)?;
    Ok((word, table.locate(gref, entry)))
}

/// Begins a use of `gref` by `me` (grantee). On success the status is raised, and the caller must call
/// [`end_use`].
#[inline]
pub(crate) fn begin_use<T: TableWords>(
    table: &T,
    gref: Gref,
    me: DomId,
    access: Access,
) -> Result<Use, GrantStatus> {
    let (word, found) = look(table, gref, me, access)?;
    table.raise(gref);
    // Raised before the entry is read again: the granter clears the entry before it reads the status.
    fence(Ordering::SeqCst);
    if table.entry(gref) != word {
        table.lower(gref);
        return Err(GrantStatus::Again);
    }
    Ok(found)
}

/// Ends a use of `gref`.
#[inline]
pub(crate) fn end_use<T: TableWords>(table: &T, gref: Gref) {
    table.lower(gref);
}

/// Use counts of a grantee that begins and ends uses in one thread. Only this thread writes the status
/// words, so plain stores suffice; one fence serves a whole batch.
pub(crate) struct UseCounts {
    counts: Vec<u32>,
    words: Vec<u64>,
}

impl UseCounts {
    /// Creates counts without a use.
    pub(crate) fn new(references: u32) -> UseCounts {
        UseCounts { counts: vec![0; references as usize], words: Vec::new() }
    }

    fn change<T: TableWords>(&mut self, table: &T, gref: Gref, up: bool) {
        let Some(count) = self.counts.get_mut(gref.0 as usize) else { return };
        *count = if up { count.saturating_add(1) } else { count.saturating_sub(1) };
        table.set_status(gref, *count);
    }

    /// Begins a use of each page by `me`, and appends one result for each. The caller must call
    /// [`UseCounts::end`] for each success.
    pub(crate) fn begin<T: TableWords>(
        &mut self,
        table: &T,
        me: DomId,
        pages: impl Iterator<Item = (Gref, Access)> + Clone,
        out: &mut Vec<Result<Use, GrantStatus>>,
    ) {
        let base = out.len();
        let mut words = core::mem::take(&mut self.words);
        words.clear();
        for (gref, access) in pages.clone() {
            let (word, found) = match look(table, gref, me, access) {
                Ok((word, found)) => (word, Ok(found)),
                Err(status) => (0, Err(status)),
            };
            if found.is_ok() {
                self.change(table, gref, true);
            }
            words.push(word);
            out.push(found);
        }
        // All words are raised before any entry is read again: the granter clears an entry before it
        // reads the status.
        fence(Ordering::SeqCst);
        for (((gref, _), word), found) in pages.zip(&words).zip(&mut out[base..]) {
            if found.is_ok() && table.entry(gref) != *word {
                self.change(table, gref, false);
                *found = Err(GrantStatus::Again);
            }
        }
        self.words = words;
    }

    /// Ends a use of `gref`.
    pub(crate) fn end<T: TableWords>(&mut self, table: &T, gref: Gref) {
        self.change(table, gref, false);
    }

    /// Ends every use that is in progress.
    pub(crate) fn end_all<T: TableWords>(&mut self, table: &T) {
        for (number, count) in (0..).zip(&mut self.counts) {
            if core::mem::take(count) > 0 {
                table.set_status(Gref(number), 0);
            }
        }
    }
}

/// Issues `gref` (granter). The entry has to be clear.
pub(crate) fn issue<T: TableWords>(table: &T, gref: Gref, to: DomId, frame: u32, access: Access) {
    let read_only = if access == Access::ReadOnly { flags::READ_ONLY } else { 0 };
    let word = RawGrantEntry::from_fields(flags::PERMIT_ACCESS | read_only, to.0, frame);
    table.set_entry(gref, word.0);
}

/// Makes one attempt to take `gref` back. Returns `false` if a use is in progress.
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const ME: DomId = DomId(5);

    /// Returns a hypervisor's table, and its memory.
    fn slots(references: u32) -> (LentTable, LentSlice) {
        let memory = LentSlice::anonymous(ringfence_memory::PAGE_SIZE);
        (LentTable::of_slots(&memory, references, ME).expect("it fits"), memory)
    }

    fn set(memory: &LentSlice, gref: u32, generation: u32, rights: u32) {
        let at = gref as usize * SLOT_BYTES;
        let word = generation << 2 | rights;
        memory.store_u32(at, word.to_le(), Ordering::SeqCst).expect("a slot");
    }

    #[test]
    fn slot_leads_to_the_page_of_its_reference() {
        let (table, memory) = slots(512);
        set(&memory, 9, 3, 0b11);
        let (_, found) = look(&table, Gref(9), ME, Access::ReadWrite).expect("issued");
        assert_eq!(found, Use { frame: 9, read_only: false });
        assert_eq!(look(&table, Gref(10), ME, Access::ReadOnly), Err(GrantStatus::BadGref));
        assert_eq!(look(&table, Gref(512), ME, Access::ReadOnly), Err(GrantStatus::BadGref));
    }

    #[test]
    fn slot_for_reading_is_refused_for_writing() {
        let (table, memory) = slots(512);
        set(&memory, 9, 0, 0b01);
        assert!(look(&table, Gref(9), ME, Access::ReadOnly).is_ok());
        let refused = look(&table, Gref(9), ME, Access::ReadWrite);
        assert_eq!(refused, Err(GrantStatus::PermissionDenied));
    }

    #[test]
    fn slot_of_reserved_reference_is_refused() {
        let (table, memory) = slots(512);
        set(&memory, 7, 0, 0b11);
        assert_eq!(look(&table, Gref(7), ME, Access::ReadOnly), Err(GrantStatus::BadGref));
    }

    #[test]
    fn slot_issued_again_has_another_entry() {
        let (table, memory) = slots(512);
        let mut seen = Vec::new();
        for generation in [0, 1, 2, (1 << 30) - 1] {
            set(&memory, 9, generation, 0b11);
            seen.push(table.entry(Gref(9)));
        }
        seen.dedup();
        assert_eq!(seen.len(), 4);
    }

    #[test]
    fn status_word_of_slot_is_beside_its_entry() {
        let (table, memory) = slots(512);
        set(&memory, 511, 1, 0b11);
        let mut counts = UseCounts::new(512);
        let mut found = Vec::new();
        counts.begin(&table, ME, [(Gref(511), Access::ReadWrite)].into_iter(), &mut found);
        assert!(found[0].is_ok());
        let word = |at| memory.load_u32(at, Ordering::SeqCst).expect("a word");
        assert_eq!((word(511 * 8), word(511 * 8 + 4)), ((1 << 2 | 3u32).to_le(), 1));
        counts.end(&table, Gref(511));
        assert_eq!(word(511 * 8 + 4), 0);
        table.raise(Gref(8));
        assert_eq!((word(8 * 8), word(8 * 8 + 4)), (0, 1));
    }

    proptest::proptest! {
        /// Checks that no word of a slot leads to another page, or to more than it says.
        #[test]
        fn slot_with_any_word_grants_at_most_its_page_and_right(
            word: u32,
            gref in 0..1024u32,
            write: bool,
        ) {
            let (table, memory) = slots(512);
            if gref < 512 {
                memory
                    .store_u32(gref as usize * SLOT_BYTES, word.to_le(), Ordering::SeqCst)
                    .expect("a slot");
            }
            let access = if write { Access::ReadWrite } else { Access::ReadOnly };
            let usable = (8..512).contains(&gref) && word & 1 == 1 && (!write || word & 2 == 2);
            match look(&table, Gref(gref), ME, access) {
                Ok((_, found)) => {
                    proptest::prop_assert!(usable);
                    proptest::prop_assert_eq!(found, Use { frame: gref, read_only: false });
                }
                Err(_) => proptest::prop_assert!(!usable),
            }
        }
    }

    #[test]
    fn table_larger_than_its_memory_is_refused() {
        let memory = LentSlice::anonymous(ringfence_memory::PAGE_SIZE);
        assert!(LentTable::of_slots(&memory, 513, ME).is_err());
    }
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
        fn set_status(&self, _: Gref, uses: u32) {
            self.status.store(uses, Ordering::Release);
        }
    }

    /// Checks that a use never sees data that the granter stores after a successful revocation, and
    /// that writes of a use are complete before it.
    #[test]
    fn loom_write_after_revocation_is_invisible_to_earlier_use() {
        const SECRET: u32 = 77;
        loom::model(|| {
            let table = Arc::new(Modelled { entry: AtomicU64::new(0), status: AtomicU32::new(0) });
            let page = Arc::new(AtomicU32::new(1));
            issue(&*table, Gref(8), DomId(1), 3, Access::ReadWrite);
            let (theirs, shared) = (Arc::clone(&table), Arc::clone(&page));
            let grantee = loom::thread::spawn(move || {
                let mut counts = UseCounts::new(16);
                let mut found = Vec::new();
                let wanted = [(Gref(8), Access::ReadWrite)];
                counts.begin(&*theirs, DomId(1), wanted.into_iter(), &mut found);
                if found[0].is_ok() {
                    assert_ne!(shared.load(Ordering::Relaxed), SECRET);
                    shared.store(2, Ordering::Relaxed);
                    counts.end(&*theirs, Gref(8));
                }
            });
            if try_revoke(&*table, Gref(8)) {
                // No access of a use can follow.
                let content = page.load(Ordering::Relaxed);
                page.store(SECRET, Ordering::Relaxed);
                grantee.join().expect("the grantee ends");
                assert_eq!(page.load(Ordering::Relaxed), SECRET);
                assert!(content == 1 || content == 2);
            } else {
                // Busy: a use may be in progress, or about to fail.
                grantee.join().expect("the grantee ends");
                assert_ne!(page.load(Ordering::Relaxed), SECRET);
            }
        });
    }

    /// Checks the same for uses that the grantee counts and begins in batches.
    #[test]
    fn loom_batched_use_never_overlaps_successful_revocation() {
        loom::model(|| {
            let table = Arc::new(Modelled { entry: AtomicU64::new(0), status: AtomicU32::new(0) });
            let taken_back = Arc::new(AtomicBool::new(false));
            issue(&*table, Gref(8), DomId(1), 3, Access::ReadWrite);
            let (theirs, gone) = (Arc::clone(&table), Arc::clone(&taken_back));
            let grantee = loom::thread::spawn(move || {
                let mut counts = UseCounts::new(16);
                for _ in 0..2 {
                    let mut found = Vec::new();
                    let wanted = [(Gref(8), Access::ReadOnly), (Gref(3), Access::ReadOnly)];
                    counts.begin(&*theirs, DomId(1), wanted.into_iter(), &mut found);
                    if found[0].is_ok() {
                        assert!(!gone.load(Ordering::SeqCst), "in use after it was taken back");
                        counts.end(&*theirs, Gref(8));
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

    /// Checks that a page is not in use after a successful revocation.
    #[test]
    fn loom_use_never_overlaps_successful_revocation() {
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
