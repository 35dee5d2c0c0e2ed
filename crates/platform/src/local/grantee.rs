//! Accessing side of a pair: mappings and copies of pages that the peer granted.
//!
//! [`LocalGrantee`] resolves each reference in the granter's table, raises the status word for the
//! duration of the use, and bounds the frame number, which is the peer's input. [`Grantee::map`] maps
//! neighbouring pages with one `mmap`; [`Grantee::copy`] joins adjacent ranges into one `preadv` or
//! `pwritev`; [`Grantee::keep`] returns parts of one mapping of the whole file.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use ringfence_memory::{
    AddressReservation, LentSlice, Mapping, PAGE_SIZE, Protection, ReadList, ReservedPages,
    WriteList,
};
use ringfence_sys::counters::Counters;
use ringfence_wire::grant::{Access, DomId, GrantStatus, Gref};

use super::arena::{self, ArenaFault, ArenaFiles, ArenaShape};
use super::pages;
use crate::copy::{CopyList, CopyLocal, CopyOp};
use crate::grants::Grantee;
use crate::table::{LentTable, Use, begin_use, end_use};

/// Maximum number of pages that one pair may have mapped through [`Grantee::map`]. Far below the
/// kernel's 65,530 mappings for each process, since every page may become its own mapping.
pub const MAPPED_MAX: usize = 4096;

/// Maximum number of copies joined into one system call; a scatter-gather list holds 32.
const JOIN_MAX: usize = 32;

struct SharedGrantee {
    me: DomId,
    files: ArenaFiles,
    shape: ArenaShape,
    table: LentTable,
    reservation: AddressReservation,
    /// Mappings of the whole writable and read-only files, for kept pages. One mapping serves all of
    /// them, because the kernel allows a process about 65,530.
    whole: [OnceLock<Option<Arc<Mapping>>>; 2],
    counters: Arc<Counters>,
}

/// Kept page: a part of the mapping of its whole file.
struct KeptPage {
    gref: Gref,
    whole: Arc<Mapping>,
    shared: Arc<SharedGrantee>,
}

impl Drop for KeptPage {
    fn drop(&mut self) {
        self.shared.counters.grant_unmaps.add(1);
        end_use(&self.shared.table, self.gref);
    }
}

/// User of one granter's arena: it maps pages by mmap, and copies by `pread` and `pwrite`.
pub struct LocalGrantee {
    granter: DomId,
    shared: Arc<SharedGrantee>,
    begun: Vec<Result<Use, GrantStatus>>,
}

/// Pages mapped by one call. They are unmapped together when the last handle is dropped.
struct MappedPages {
    batch: Option<ReservedPages>,
    used: Vec<Gref>,
    shared: Arc<SharedGrantee>,
}

impl Drop for MappedPages {
    fn drop(&mut self) {
        if !self.used.is_empty() {
            let counters = &self.shared.counters;
            counters.grant_unmaps.add(self.used.len() as u64);
            counters.syscalls.add(1);
        }
        // Unmap before the status is lowered: at zero the granter may reuse the page.
        drop(self.batch.take());
        for gref in &self.used {
            end_use(&self.shared.table, *gref);
        }
    }
}

impl LocalGrantee {
    /// Accepts the arena of `granter` after checking it.
    pub(crate) fn new(
        me: DomId,
        granter: DomId,
        files: ArenaFiles,
        shape: ArenaShape,
        counters: Arc<Counters>,
    ) -> Result<LocalGrantee, ArenaFault> {
        files.verify(shape)?;
        let table = arena::map_table(&files, shape, false)?;
        let reservation = AddressReservation::new(MAPPED_MAX)
            .map_err(|e| ArenaFault::System(e.raw_os_error().unwrap_or(0)))?;
        let whole = [OnceLock::new(), OnceLock::new()];
        let shared =
            Arc::new(SharedGrantee { me, files, shape, table, reservation, whole, counters });
        Ok(LocalGrantee { granter, shared, begun: Vec::new() })
    }
}

impl SharedGrantee {
    /// Begins a use and bounds the frame number, which is the peer's input.
    fn begin(&self, gref: Gref, access: Access) -> Result<Use, GrantStatus> {
        let found = begin_use(&self.table, gref, self.me, access)?;
        let pages = if found.read_only { self.shape.read_only } else { self.shape.writable };
        if found.frame >= pages {
            end_use(&self.table, gref);
            return Err(GrantStatus::BadPage);
        }
        Ok(found)
    }

    fn file(&self, read_only: bool) -> &OwnedFd {
        if read_only { &self.files.read_only } else { &self.files.writable }
    }

    /// Returns the mapping of a whole file; creates it for the first kept page.
    fn whole(&self, read_only: bool) -> Option<Arc<Mapping>> {
        let map = || {
            let (pages, protection) = if read_only {
                (self.shape.read_only, Protection::ReadOnly)
            } else {
                (self.shape.writable, Protection::ReadWrite)
            };
            self.counters.syscalls.add(1);
            let bytes = pages as usize * PAGE_SIZE;
            pages::map_arena(self.file(read_only), bytes, protection).ok().map(Arc::new)
        };
        self.whole[usize::from(read_only)].get_or_init(map).clone()
    }

    fn keep(self: &Arc<Self>, gref: Gref, access: Access) -> Result<LentSlice, GrantStatus> {
        let found = self.begin(gref, access)?;
        let Some(whole) = self.whole(found.read_only) else {
            end_use(&self.table, gref);
            return Err(GrantStatus::NoDeviceSpace);
        };
        self.counters.grant_maps.add(1);
        let kept = Arc::new(KeptPage { gref, whole, shared: Arc::clone(self) });
        let offset = found.frame as usize * PAGE_SIZE;
        // SAFETY: the owner holds the mapping.
        let page = unsafe { kept.whole.part(Arc::clone(&kept) as _, offset, PAGE_SIZE) };
        page.map_err(|_| GrantStatus::BadPage)
    }
}

fn byte_offset(found: Use) -> u64 {
    u64::from(found.frame) * PAGE_SIZE as u64
}

impl Grantee for LocalGrantee {
    fn granter(&self) -> DomId {
        self.granter
    }

    fn map(&mut self, pages: &[(Gref, Access)], out: &mut Vec<Result<LentSlice, GrantStatus>>) {
        let Some(mut batch) = self.shared.reservation.batch(pages.len()) else {
            out.extend(pages.iter().map(|_| Err(GrantStatus::NoSpace)));
            return;
        };
        self.begun.clear();
        for (gref, access) in pages {
            self.begun.push(self.shared.begin(*gref, *access));
        }
        let protection = |access| match access {
            Access::ReadOnly => Protection::ReadOnly,
            Access::ReadWrite => Protection::ReadWrite,
        };
        // Neighbouring pages of one file with the same access are mapped by one call.
        let mut places = Vec::with_capacity(pages.len());
        let mut used = Vec::with_capacity(pages.len());
        let mut at = 0;
        while at < pages.len() {
            let Ok(first) = self.begun[at] else {
                places.push(None);
                at += 1;
                continue;
            };
            let joins = |i: usize, n: u32| {
                self.begun[i] == Ok(Use { frame: first.frame + n, ..first })
                    && pages[i].1 == pages[at].1
            };
            let run = 1 + (at + 1..pages.len()).zip(1..).take_while(|&(i, n)| joins(i, n)).count();
            let file = self.shared.file(first.read_only);
            let mapped = batch.map(file, byte_offset(first), run, protection(pages[at].1));
            self.shared.counters.syscalls.add(1);
            for i in 0..run {
                let gref = pages[at + i].0;
                if mapped.is_ok() {
                    used.push(gref);
                } else {
                    end_use(&self.shared.table, gref);
                    self.begun[at + i] = Err(GrantStatus::NoDeviceSpace);
                }
                places.push(mapped.as_ref().ok().map(|place| place + i));
            }
            at += run;
        }
        self.shared.counters.grant_maps.add(used.len() as u64);
        let owner =
            Arc::new(MappedPages { batch: Some(batch), used, shared: Arc::clone(&self.shared) });
        for (i, place) in places.into_iter().enumerate() {
            let slice = match (&owner.batch, place) {
                // SAFETY: the page was mapped above with this protection, and `owner` holds the
                // batch until it is dropped.
                (Some(batch), Some(place)) => unsafe {
                    batch.page(Arc::clone(&owner) as _, place, protection(pages[i].1))
                },
                _ => None,
            };
            let status = || self.begun[i].err().unwrap_or(GrantStatus::GeneralError);
            out.push(slice.ok_or_else(status));
        }
    }

    /// Keeps a page without a system call, as a part of the mapping of the whole arena. A page that is
    /// requested read-only may be mapped writable.
    fn keep(&mut self, gref: Gref, access: Access) -> Result<LentSlice, GrantStatus> {
        self.shared.keep(gref, access)
    }

    fn copy(&mut self, mut list: CopyList<'_, '_>) {
        let (ops, statuses) = list.parts();
        statuses.clear();
        let mut at = 0;
        while at < ops.len() {
            at += self.copy_run(&ops[at..], statuses);
        }
    }
}

/// Returns the access that a copy needs, from its direction.
fn access_of(op: &CopyOp) -> Access {
    match op.local {
        CopyLocal::Into(_) => Access::ReadOnly,
        CopyLocal::From(_) | CopyLocal::FromLent(..) => Access::ReadWrite,
    }
}

impl LocalGrantee {
    /// Executes the first copy of `ops`, and the following ones that continue it without a gap in the
    /// peer's memory, with one system call. Returns the number of copies.
    fn copy_run(&self, ops: &[CopyOp], statuses: &mut Vec<GrantStatus>) -> usize {
        let access = access_of(&ops[0]);
        let first = match self.shared.begin(ops[0].gref, access) {
            Ok(first) => first,
            Err(status) => {
                statuses.push(status);
                return 1;
            }
        };
        let start = byte_offset(first) + u64::from(ops[0].offset);
        let mut end = start + u64::from(ops[0].len);
        let mut run = 1;
        while let Some(next) = ops.get(run).filter(|_| run < JOIN_MAX) {
            // A copy can continue the last one only in the same page, or from the end of one page to the
            // start of the next; then the frames must be neighbours too.
            let last = &ops[run - 1];
            let same_page = next.gref == last.gref && next.offset == last.offset + last.len;
            let next_page = next.offset == 0 && end.is_multiple_of(PAGE_SIZE as u64);
            if !(same_page || next_page) || access_of(next) != access {
                break;
            }
            let Ok(found) = self.shared.begin(next.gref, access) else { break };
            if found.read_only != first.read_only
                || byte_offset(found) + u64::from(next.offset) != end
            {
                end_use(&self.shared.table, next.gref);
                break;
            }
            end += u64::from(next.len);
            run += 1;
        }
        let file = self.shared.file(first.read_only).as_fd();
        let done = match access {
            Access::ReadOnly => fetch(&ops[..run], file, start),
            Access::ReadWrite => store(&ops[..run], file, start),
        };
        let status =
            if done == Ok(end - start) { GrantStatus::Okay } else { GrantStatus::GeneralError };
        for op in &ops[..run] {
            end_use(&self.shared.table, op.gref);
            statuses.push(status);
        }
        let counters = &self.shared.counters;
        counters.syscalls.add(1);
        counters.grant_copies.add(run as u64);
        counters.grant_copy_bytes.add(end - start);
        run
    }
}

/// Copies from consecutive peer memory into the destinations of `ops`. Returns the bytes copied.
fn fetch(ops: &[CopyOp], file: BorrowedFd<'_>, start: u64) -> Result<u64, ()> {
    let mut list = ReadList::new();
    for op in ops {
        let CopyLocal::Into(ptr) = &op.local else { return Err(()) };
        // SAFETY: the CopyList that is being executed borrows these bytes exclusively.
        let bytes = unsafe { core::slice::from_raw_parts_mut(*ptr, op.len.into()) };
        list.push(bytes).map_err(|_| ())?;
    }
    list.read_at(file, start).map(|n| n as u64).map_err(|_| ())
}

/// Copies the sources of `ops` into consecutive peer memory. Returns the bytes copied.
fn store(ops: &[CopyOp], file: BorrowedFd<'_>, start: u64) -> Result<u64, ()> {
    let mut list = WriteList::new();
    for op in ops {
        match &op.local {
            CopyLocal::From(ptr) => {
                // SAFETY: the CopyList that is being executed borrows these bytes.
                let bytes = unsafe { core::slice::from_raw_parts(*ptr, op.len.into()) };
                list.push(bytes).map_err(|_| ())?;
            }
            CopyLocal::FromLent(lent) => {
                list.push_lent(lent, 0, op.len.into()).map_err(|_| ())?;
            }
            CopyLocal::Into(_) => return Err(()),
        }
    }
    list.write_at(file, start).map(|n| n as u64).map_err(|_| ())
}
