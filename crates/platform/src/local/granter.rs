//! Granting side of a pair: pages of one arena, granted to one peer.
//!
//! Handles of [`LocalGranter`] share one arena. A page is free, granted, or quarantined: revoked by force
//! while the peer's status word was raised, or while the kernel held the page for the peer in such a way that it
//! stayed in the file ([`super::pages`]). A quarantined page and its reference become free when the peer lowers the
//! word and the page has left the file. They are checked only when no free page is left.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, PoisonError};

use ringfence_sys::numbers::{bounded, usize_from};
use ringfence_wire::grant::{Access, DomId, Gref};

use super::arena::{self, ArenaFiles, ArenaShape};
use super::pages::{PageSize, Pages};
use crate::error::PlatformError;
use crate::grants::{Granter, Lease, LendError, RevokeError, StillLent};
use crate::table::{LentTable, TableWords, issue, try_revoke};

/// Maximum number of pages punched again in one attempt to reclaim, 5 µs each.
const PUNCHES_MAX: u32 = 16;

/// Reference and page that the peer claims to use after a forced revocation, or that is still part of the file. The
/// content is destroyed. But a mapping that a correct peer has yet to remove, a read in flight, or a pin of a page that
/// the file kept would reach data that is granted in this page next, under any reference.
struct Quarantined {
    gref: Gref,
    access: Access,
    page: u32,
    /// Set if the page is still part of the file.
    kept: bool,
}

struct SharedGranter {
    peer: DomId,
    shape: ArenaShape,
    table: LentTable,
    writable: Pages,
    read_only: Pages,
    references: Vec<Gref>,
    /// References and pages revoked by force while the peer claimed to use them.
    quarantine: VecDeque<Quarantined>,
}

impl SharedGranter {
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
        let (mut reclaimed, mut punches) = (0, 0);
        for _ in 0..self.quarantine.len() {
            if reclaimed >= 16 && self.has_free(access) {
                return;
            }
            let Some(held) = self.quarantine.pop_front() else { return };
            if self.table.status(held.gref) == 0 && self.has_left(&held, &mut punches) {
                self.references.push(held.gref);
                self.pages(held.access).free.push(held.page);
                reclaimed += 1;
            } else {
                self.quarantine.push_back(held);
            }
        }
    }

    /// Returns `true` if a page has left the file. Punches it again if it had not.
    fn has_left(&mut self, held: &Quarantined, punches: &mut u32) -> bool {
        if !held.kept {
            return true;
        }
        if *punches == PUNCHES_MAX {
            return false;
        }
        *punches += 1;
        let punched = self.pages(held.access).punch(&mut [held.page]);
        punched.is_ok_and(|punched| punched.kept.is_empty())
    }
}

/// Granter of pages of one arena set to one peer. Handles share the arena.
#[derive(Clone)]
pub struct LocalGranter {
    shared: Arc<Mutex<SharedGranter>>,
    peer: DomId,
}

impl LocalGranter {
    /// Creates an arena set for `peer`, in pages of size `wanted` where the system allows it. Returns the files for
    /// the peer as the second value.
    pub(crate) fn create(
        peer: DomId,
        shape: ArenaShape,
        wanted: PageSize,
    ) -> Result<(LocalGranter, ArenaFiles), PlatformError> {
        shape.check().map_err(|why| why.of(peer))?;
        let new = arena::create(shape)?;
        let table = arena::map_table(&new.own, shape, true).map_err(|why| why.of(peer))?;
        let map = |file, count| {
            Pages::new(file, count, wanted)
                .map_err(|e| PlatformError::system("mapping an arena", e))
        };
        let shared = SharedGranter {
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
        vec![shared.writable.descriptor(), shared.read_only.descriptor()]
    }

    /// Returns the size of the pages that hold the arena: huge if both kinds of pages are.
    pub fn page_size(&self) -> PageSize {
        let shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        match (shared.writable.size(), shared.read_only.size()) {
            (PageSize::Huge, PageSize::Huge) => PageSize::Huge,
            _ => PageSize::Small,
        }
    }

    /// Returns the number of pages that the peer can use now.
    pub fn lent(&self) -> usize {
        let shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let all = shared.shape.references.saturating_sub(Gref::FIRST_FREE.0);
        usize_from(all)
            .saturating_sub(shared.references.len())
            .saturating_sub(shared.quarantine.len())
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
        let limit = bounded(pages.generations.len(), u32::MAX);
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
        let mut kept = [Vec::new(), Vec::new()];
        for (access, kept) in [Access::ReadWrite, Access::ReadOnly].into_iter().zip(&mut kept) {
            let of_kind = leases.iter().filter(|l| l.access() == access);
            let mut pages: Vec<u32> = of_kind.map(Lease::page).collect();
            match shared.pages(access).punch(&mut pages) {
                Ok(punched) => *kept = punched.kept,
                Err(why) => return Err((leases, why)),
            }
        }
        let [kept_writable, kept_read_only] = kept;
        for lease in leases {
            let pages = shared.pages(lease.access());
            pages.next_generation(&[lease.page()]);
            let (gref, access, page) = (lease.gref(), lease.access(), lease.page());
            let kept = match access {
                Access::ReadWrite => &kept_writable,
                Access::ReadOnly => &kept_read_only,
            };
            let kept = kept.binary_search(&page).is_ok();
            if shared.table.status(gref) == 0 && !kept {
                shared.references.push(gref);
                shared.pages(access).free.push(page);
            } else {
                shared.quarantine.push_back(Quarantined { gref, access, page, kept });
            }
        }
        Ok(())
    }
}
