//! The lending side, by `/dev/xen/gntalloc`.
//!
//! The kernel allocates the page, zeroed, lends it and keeps it: a page that is given up while the
//! peer has it mapped is the kernel's until the peer lets go, and is nobody else's before that. User
//! space cannot ask whether that is so. Hence [`Granter::take_back`]
//! *never says busy*: the page is given up for good, the kernel ends the grant in one attempt, or,
//! when the peer is using it, as soon as it is not (XSA-396); and the next lease has a fresh page.
//! A peer that never lets go costs this domain the pages that were lent to it, out of what
//! `/sys/module/xen_gntalloc/parameters/limit` allows all programs together (1024 by default).
//!
//! Xen has no way to revoke a grant against the grantee's will, so
//! [`Granter::revoke_forced`] always refuses.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use ringfence_memory::{Mapping, PAGE_SIZE, Protection};
use rustix::io::Errno;

use super::abi;
use crate::{Access, Counters, DomId, Granter, Lease, LendError, RevokeError, StillLent};

/// Where the driver says how many pages all programs together may lend.
const LIMIT_PATH: &str = "/sys/module/xen_gntalloc/parameters/limit";

/// What it says unless somebody changed it.
const LIMIT_DEFAULT: u32 = 1024;

/// Lends pages to one peer. A lease whose granter is gone stays lent until its memory is dropped.
pub struct XenGranter {
    peer: DomId,
    device: Arc<OwnedFd>,
    counters: Arc<Counters>,
}

impl XenGranter {
    pub(super) fn new(peer: DomId, device: Arc<OwnedFd>, counters: Arc<Counters>) -> XenGranter {
        XenGranter { peer, device, counters }
    }

    fn give_up(&self, index: u64) -> Result<(), Errno> {
        self.counters.syscalls.add(1);
        abi::dealloc_gref(self.device.as_fd(), index)
    }
}

fn refusal(errno: Errno) -> LendError {
    match errno {
        Errno::NOSPC => {
            let said = std::fs::read_to_string(LIMIT_PATH).ok();
            let limit = said.and_then(|text| text.trim_end().parse().ok());
            LendError::NoPage { limit: limit.unwrap_or(LIMIT_DEFAULT) }
        }
        errno => LendError::System(errno.raw_os_error()),
    }
}

impl Granter for XenGranter {
    fn peer(&self) -> DomId {
        self.peer
    }

    fn lend(&mut self, access: Access) -> Result<Lease, LendError> {
        let writable = access == Access::ReadWrite;
        let (gref, index) =
            abi::alloc_gref(self.device.as_fd(), self.peer, writable).map_err(refusal)?;
        self.counters.syscalls.add(2);
        let mapped = Mapping::new(&*self.device, index, PAGE_SIZE, Protection::ReadWrite)
            .map_err(|e| LendError::System(e.raw_os_error().unwrap_or(0)));
        // The driver numbers pages one after the other, so this is far off.
        let page = u32::try_from(index / PAGE_SIZE as u64)
            .map_err(|_| LendError::System(Errno::OVERFLOW.raw_os_error()));
        match mapped.and_then(|mapping| Ok((mapping, page?))) {
            Ok((mapping, page)) => Ok(Lease::new(gref, access, mapping.lent(), page, 0)),
            Err(why) => {
                // If it cannot even be given up, it goes when the device is closed.
                let _ = self.give_up(index);
                Err(why)
            }
        }
    }

    /// Never busy; the page is not lent again. What this domain itself still holds of it (a part
    /// of [`Lease::memory`], in an I/O) keeps it lent until that is dropped.
    fn take_back(&mut self, lease: Lease) -> Result<(), StillLent> {
        match self.give_up(u64::from(lease.page()) * PAGE_SIZE as u64) {
            Ok(()) => {
                // The removal of the mapping, with the lease.
                self.counters.syscalls.add(1);
                Ok(())
            }
            Err(errno) => Err(StillLent { lease, why: RevokeError::System(errno.raw_os_error()) }),
        }
    }

    fn revoke_forced(&mut self, leases: Vec<Lease>) -> Result<(), (Vec<Lease>, RevokeError)> {
        if leases.is_empty() { Ok(()) } else { Err((leases, RevokeError::NeedsPeer)) }
    }
}
