//! Granting side on Xen, through `/dev/xen/gntalloc`.
//!
//! The kernel allocates the page, zeroed, and grants it. A page that is released while the peer has it
//! mapped stays with the kernel until the peer unmaps it. User space cannot query that state. Hence
//! [`Granter::take_back`] *never returns Busy*: it releases the page for good, and the next lease has a
//! fresh page. The kernel ends the grant in one attempt, or once the peer has stopped using it (XSA-396).
//! A peer that never unmaps costs this domain the pages that were granted to it. They count against
//! `/sys/module/xen_gntalloc/parameters/limit`, which all programs share (1024 by default).
//!
//! Xen cannot revoke a grant against the grantee's will, so [`Granter::revoke_forced`] always refuses.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use ringfence_memory::{Mapping, PAGE_SIZE, Protection};
use ringfence_sys::counters::Counters;
use ringfence_wire::grant::{Access, DomId};
use rustix::io::Errno;

use super::abi;
use crate::grants::{Granter, Lease, LendError, RevokeError, StillLent};

/// File with the driver's limit of granted pages for all programs together.
const LIMIT_PATH: &str = "/sys/module/xen_gntalloc/parameters/limit";

/// Default of the driver's limit.
const LIMIT_DEFAULT: u32 = 1024;

/// Granter of pages to one peer. A lease that outlives its granter stays granted until its memory is
/// dropped.
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
        // The driver numbers pages consecutively, so an overflow is out of practical reach.
        let page = u32::try_from(index / PAGE_SIZE as u64)
            .map_err(|_| LendError::System(Errno::OVERFLOW.raw_os_error()));
        match mapped.and_then(|mapping| Ok((mapping, page?))) {
            Ok((mapping, page)) => Ok(Lease::new(gref, access, mapping.lent(), page, 0)),
            Err(why) => {
                // If the release fails, the kernel frees the page when the device is closed.
                let _ = self.give_up(index);
                Err(why)
            }
        }
    }

    /// Releases the page for good; never returns Busy. Parts of [`Lease::memory`] that this domain still
    /// holds, for example in an I/O, keep the page granted until they are dropped.
    fn take_back(&mut self, lease: Lease) -> Result<(), StillLent> {
        match self.give_up(u64::from(lease.page()) * PAGE_SIZE as u64) {
            Ok(()) => {
                // Unmapping, when the lease is dropped.
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
