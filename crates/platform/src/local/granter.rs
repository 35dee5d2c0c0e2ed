//! The lending side of a pair.

// #syscall driver,frontend,daemon fallocate: revoking: punching pages out of one's own arena

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};

use ringfence_memory::{LentSlice, Mapping, PAGE_SIZE, Protection};
use ringfence_wire::grant::{Access, DomId, Gref};
use rustix::fs::FallocateFlags;

use super::arena::{self, ArenaFiles, ArenaShape};
use super::table::{LentTable, TableWords, issue, try_revoke};
use crate::{Granter, Lease, LendError, PlatformError, RevokeError, StillLent};

/// Pages of one kind: a mapping, the file behind it, and the pages that are not lent.
pub(super) struct Pages {
    file: OwnedFd,
    memory: LentSlice,
    free: Vec<u32>,
    generations: Vec<u32>,
}

impl Pages {
    pub(super) fn new(file: OwnedFd, count: u32) -> std::io::Result<Pages> {
        let bytes = count.max(1) as usize * PAGE_SIZE;
        let memory = Mapping::new(&file, 0, bytes, Protection::ReadWrite)?.lent();
        // Last in, first out: the lowest page is handed out first, the hottest again next.
        Ok(Pages {
            file,
            memory,
            free: (0..count).rev().collect(),
            generations: vec![0; count as usize],
        })
    }

    pub(super) fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    pub(super) fn slice(&self, page: u32) -> Result<LentSlice, LendError> {
        let offset = page as usize * PAGE_SIZE;
        self.memory.slice(offset, PAGE_SIZE).map_err(|_| LendError::NoPage { limit: page })
    }

    /// How often a page was revoked.
    pub(super) fn generation(&self, page: u32) -> u32 {
        self.generations.get(page as usize).copied().unwrap_or(0)
    }

    /// Counts that `pages` were revoked.
    pub(super) fn next_generation(&mut self, pages: &[u32]) {
        for page in pages {
            if let Some(generation) = self.generations.get_mut(*page as usize) {
                *generation = generation.wrapping_add(1);
            }
        }
    }

    /// Destroys the content of `pages` in every mapping of every process; runs of neighbours go
    /// in one call. Returns how many calls that took.
    pub(super) fn punch(&self, pages: &mut [u32]) -> Result<u64, RevokeError> {
        let mut calls = 0;
        pages.sort_unstable();
        for run in pages.chunk_by(|a, b| a + 1 == *b) {
            let (Some(&first), len) = (run.first(), run.len()) else { continue };
            rustix::fs::fallocate(
                &self.file,
                FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
                u64::from(first) * PAGE_SIZE as u64,
                (len * PAGE_SIZE) as u64,
            )
            .map_err(|e| RevokeError::System(e.raw_os_error()))?;
            calls += 1;
        }
        Ok(calls)
    }
}

/// A reference and its page that the peer claims to use although they were revoked by force. The
/// page's content is destroyed; but a mapping that an honest peer has yet to remove, or a read that
/// is under way into it, would reach what was lent in that page next, under whatever reference.
struct Quarantined {
    gref: Gref,
    access: Access,
    page: u32,
}

struct Shared {
    peer: DomId,
    shape: ArenaShape,
    table: LentTable,
    writable: Pages,
    read_only: Pages,
    references: Vec<Gref>,
    /// What was revoked by force while the peer claimed to use it.
    quarantine: VecDeque<Quarantined>,
}

impl Shared {
    fn pages(&mut self, access: Access) -> &mut Pages {
        match access {
            Access::ReadWrite => &mut self.writable,
            Access::ReadOnly => &mut self.read_only,
        }
    }

    /// Whether a page of that kind can be lent at once.
    fn has_free(&mut self, access: Access) -> bool {
        !self.references.is_empty() && !self.pages(access).free.is_empty()
    }

    /// Takes from quarantine what the peer let go of, until a few pages can be lent. What it holds on
    /// to goes to the back: at worst each entry is looked at once, and there are no more than
    /// references.
    fn thaw(&mut self, access: Access) {
        let mut thawed = 0;
        for _ in 0..self.quarantine.len() {
            if thawed >= 16 && self.has_free(access) {
                return;
            }
            let Some(held) = self.quarantine.pop_front() else { return };
            if self.table.status(held.gref) == 0 {
                self.references.push(held.gref);
                self.pages(held.access).free.push(held.page);
                thawed += 1;
            } else {
                self.quarantine.push_back(held);
            }
        }
    }
}

/// Lends pages of one arena set to one peer. Handles share the arena.
#[derive(Clone)]
pub struct LocalGranter {
    shared: Arc<Mutex<Shared>>,
    peer: DomId,
}

impl LocalGranter {
    /// Makes an arena set for `peer`; the second value is what the peer is to get.
    pub(crate) fn create(
        peer: DomId,
        shape: ArenaShape,
    ) -> Result<(LocalGranter, ArenaFiles), PlatformError> {
        shape.check().map_err(|why| PlatformError::bad_arena(peer, why))?;
        let new = arena::create(shape)?;
        let table = arena::map_table(&new.own, shape, true)
            .map_err(|why| PlatformError::bad_arena(peer, why))?;
        let map = |file, count| {
            Pages::new(file, count).map_err(|e| PlatformError::system("mapping an arena", e))
        };
        let shared = Shared {
            peer,
            shape,
            table,
            writable: map(new.own.writable, shape.writable)?,
            read_only: map(new.own.read_only, shape.read_only)?,
            references: (Gref::FIRST_FREE.0..shape.references).rev().map(Gref).collect(),
            quarantine: VecDeque::new(),
        };
        Ok((LocalGranter { shared: Arc::new(Mutex::new(shared)), peer }, new.handed_over))
    }

    /// The descriptors of the arena.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        vec![shared.writable.file.as_raw_fd(), shared.read_only.file.as_raw_fd()]
    }

    /// Pages, each with its reference, that the peer claims to use although they were revoked by
    /// force. They are not lent again until it lets go: a peer that never does can keep what was
    /// set aside for it from being lent to it, and nothing else.
    pub fn quarantined(&self) -> usize {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).quarantine.len()
    }
}

impl Granter for LocalGranter {
    fn peer(&self) -> DomId {
        self.peer
    }

    fn lend(&mut self, access: Access) -> Result<Lease, LendError> {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if !shared.has_free(access) {
            shared.thaw(access);
        }
        let limit = shared.shape.references;
        let gref = *shared.references.last().ok_or(LendError::NoReference { limit })?;
        let pages = shared.pages(access);
        let limit = u32::try_from(pages.generations.len()).unwrap_or(u32::MAX);
        let page = pages.free.pop().ok_or(LendError::NoPage { limit })?;
        let memory = pages.slice(page)?;
        let generation = pages.generations[page as usize];
        shared.references.pop();
        let peer = shared.peer;
        issue(&shared.table, gref, peer, page, access);
        Ok(Lease::new(gref, access, memory, page, generation))
    }

    fn take_back(&mut self, lease: Lease) -> Result<(), StillLent> {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if !try_revoke(&shared.table, lease.gref()) {
            return Err(StillLent { lease, why: RevokeError::Busy });
        }
        shared.references.push(lease.gref());
        shared.pages(lease.access()).free.push(lease.page());
        Ok(())
    }

    fn revoke_forced(&mut self, leases: Vec<Lease>) -> Result<(), (Vec<Lease>, RevokeError)> {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        for lease in &leases {
            shared.table.set_entry(lease.gref(), 0);
        }
        for access in [Access::ReadWrite, Access::ReadOnly] {
            let of_kind = leases.iter().filter(|l| l.access() == access);
            let mut pages: Vec<u32> = of_kind.map(Lease::page).collect();
            if let Err(why) = shared.pages(access).punch(&mut pages) {
                return Err((leases, why));
            }
        }
        for lease in leases {
            let pages = shared.pages(lease.access());
            pages.next_generation(&[lease.page()]);
            let (gref, access, page) = (lease.gref(), lease.access(), lease.page());
            if shared.table.status(gref) == 0 {
                shared.references.push(gref);
                shared.pages(access).free.push(page);
            } else {
                shared.quarantine.push_back(Quarantined { gref, access, page });
            }
        }
        Ok(())
    }
}
