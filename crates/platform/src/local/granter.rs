//! Granting side of a pair: pages of one arena, granted to one peer.
//!
//! Handles of [`LocalGranter`] share one arena. A page is free, granted, or quarantined: revoked by force
//! while the peer's status word was raised. A quarantined page and its reference become free when the
//! peer lowers the word. They are checked only when no free page is left.

// #syscall driver,frontend,daemon fallocate: revoking: punching pages out of one's own arena

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};

use ringfence_memory::{LentSlice, Mapping, PAGE_SIZE, Protection};
use ringfence_wire::grant::{Access, DomId, Gref};
use rustix::fs::FallocateFlags;

use super::arena::{self, ArenaFiles, ArenaShape};
use crate::table::{LentTable, TableWords, issue, try_revoke};
use crate::{Granter, Lease, LendError, PlatformError, RevokeError, StillLent};

/// Pages of one kind: the file, its mapping, and the free pages.
pub(crate) struct Pages {
    file: OwnedFd,
    memory: LentSlice,
    free: Vec<u32>,
    generations: Vec<u32>,
}

impl Pages {
    pub(crate) fn new(file: OwnedFd, count: u32) -> std::io::Result<Pages> {
        let bytes = count.max(1) as usize * PAGE_SIZE;
        let memory = Mapping::new(&file, 0, bytes, Protection::ReadWrite)?.lent();
        // Last in, first out: the lowest page is used first, and the page with the warmest cache next.
        Ok(Pages {
            file,
            memory,
            free: (0..count).rev().collect(),
            generations: vec![0; count as usize],
        })
    }

    /// Creates `count` pages that only this process reaches.
    pub(crate) fn anonymous(name: &str, count: u32) -> std::io::Result<Pages> {
        let file = arena::sealed_memfd(name, u64::from(count.max(1)) * PAGE_SIZE as u64)?;
        Pages::new(file, count)
    }

    pub(crate) fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    pub(crate) fn slice(&self, page: u32) -> Result<LentSlice, LendError> {
        let offset = page as usize * PAGE_SIZE;
        self.memory.slice(offset, PAGE_SIZE).map_err(|_| LendError::NoPage { limit: page })
    }

    /// Returns the number of revocations of a page.
    pub(crate) fn generation(&self, page: u32) -> u32 {
        self.generations.get(page as usize).copied().unwrap_or(0)
    }

    /// Counts a revocation of `pages`.
    pub(crate) fn next_generation(&mut self, pages: &[u32]) {
        for page in pages {
            if let Some(generation) = self.generations.get_mut(*page as usize) {
                *generation = generation.wrapping_add(1);
            }
        }
    }

    /// Destroys the content of `pages` in every mapping of every process, with one call for each run of
    /// neighbours. Returns the number of calls.
    pub(crate) fn punch(&self, pages: &mut [u32]) -> Result<u64, RevokeError> {
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

/// Reference and page that the peer claims to use after a forced revocation. The content is
/// destroyed. But a mapping that a correct peer has yet to remove, or a read in flight, would reach
/// data that is granted in this page next, under any reference.
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
    /// References and pages revoked by force while the peer claimed to use them.
    quarantine: VecDeque<Quarantined>,
}

impl Shared {
    fn pages(&mut self, access: Access) -> &mut Pages {
        match access {
            Access::ReadWrite => &mut self.writable,
            Access::ReadOnly => &mut self.read_only,
        }
    }

    /// Returns `true` if a page of that kind can be granted at once.
    fn has_free(&mut self, access: Access) -> bool {
        !self.references.is_empty() && !self.pages(access).free.is_empty()
    }

    /// Reclaims quarantined pages whose uses have ended, until a few pages can be granted. The others
    /// move to the back. Each entry is checked at most once, and there are at most as many as references.
    fn reclaim(&mut self, access: Access) {
        let mut reclaimed = 0;
        for _ in 0..self.quarantine.len() {
            if reclaimed >= 16 && self.has_free(access) {
                return;
            }
            let Some(held) = self.quarantine.pop_front() else { return };
            if self.table.status(held.gref) == 0 {
                self.references.push(held.gref);
                self.pages(held.access).free.push(held.page);
                reclaimed += 1;
            } else {
                self.quarantine.push_back(held);
            }
        }
    }
}

/// Granter of pages of one arena set to one peer. Handles share the arena.
#[derive(Clone)]
pub struct LocalGranter {
    shared: Arc<Mutex<Shared>>,
    peer: DomId,
}

impl LocalGranter {
    /// Creates an arena set for `peer`. Returns the files for the peer as the second value.
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

    /// Returns the open descriptors of the arena.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        vec![shared.writable.file.as_raw_fd(), shared.read_only.file.as_raw_fd()]
    }

    /// Returns the number of quarantined pages: those that the peer claims to use after a forced
    /// revocation. A peer that never ends its uses blocks only pages that were set aside for itself.
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
            shared.reclaim(access);
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
