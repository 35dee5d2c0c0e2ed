//! Grant windows of Xen, through `/dev/ringfence-window`.
//!
//! The granter's pages are memory of this process ([`create`]). The module pins a page while it is issued, and
//! the hypervisor makes and breaks the grantee's mapping by hypercall. After a revocation no access of the
//! grantee reaches the page, so the granter uses it again at once. The granter cannot read the status words,
//! which are in the grantee's memory: a forced revocation holds no page. Its reference is issued last again,
//! because an old transfer of the grantee would reach the next page under it.
//!
//! The grantee maps the table and all pages once ([`open`]). The page of reference r is page r. A reference
//! that is not issued reads as ones, and writes to it are discarded.
//!
//! A grantee that closes its window, or exits, destroys it for both sides. [`Engine::renew`] makes it anew.
//!
//! All windows of a grantee share the frames of its module (`frames=`). [`OpenReferences`] bounds those that one
//! granter takes up.

// #syscall none: limits are read and raised before a sandbox closes; the device's calls are beside its ABI

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};

use ringfence_memory::{DeviceAccess, LentSlice, Mapping, PAGE_SIZE, Protection};
use ringfence_sys::counters::Counters;
use ringfence_wire::grant::{DomId, Gref};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::abi::window::{self as abi, Revoke, status};
use super::device::XenDevice;
use crate::error::PlatformError;
use crate::grants::RevokeError;
use crate::local::pages::Pages;
use crate::table::LentTable;
use crate::window::{Engine, EngineFacts, EnginePage, GranterTable, IssueError};
use crate::window::{
    TranslationTable, WindowError, WindowHandle, WindowName, WindowShape, WindowView,
};

/// Requests for one revocation while the hypervisor's flush rate is exceeded. The module waits in each.
const REVOKE_ATTEMPTS: u32 = 3;

/// Locked memory of a process that issues pages: every page of every window that the hypervisor allows.
pub const LOCKED_MAX: u64 = 32 * 4096 * PAGE_SIZE as u64;

/// Raises this process's limit of locked memory to the need of issued pages, if the system allows it.
pub(super) fn raise_locked_memory() {
    let Rlimit { current, maximum } = getrlimit(Resource::Memlock);
    if current.is_none_or(|current| current >= LOCKED_MAX) {
        return;
    }
    let raised = maximum.map(|maximum| maximum.max(LOCKED_MAX));
    if setrlimit(Resource::Memlock, Rlimit { current: Some(LOCKED_MAX), maximum: raised }).is_err()
    {
        // The hard limit is not ours to raise. `create` reports a limit that is too low.
        let _ = setrlimit(Resource::Memlock, Rlimit { current: maximum, maximum });
    }
}

/// Checks that `wanted` more pages may be issued, beside `present` ones of other windows.
pub(super) fn check_locked_memory(present: u64, wanted: u64) -> Result<(), LockedMemory> {
    let bytes = present.saturating_add(wanted).saturating_mul(PAGE_SIZE as u64);
    match getrlimit(Resource::Memlock).current {
        Some(limit) if limit < bytes => Err(LockedMemory { bytes, limit }),
        _ => Ok(()),
    }
}

/// Limit of locked memory that is too low for a window.
#[derive(Debug, thiserror::Error)]
#[error(
    "the pages of grant windows count as locked memory: {bytes} bytes are needed, and the limit is {limit} \
     (`ulimit -l`, in bytes). Run this as root, or raise the limit"
)]
pub(super) struct LockedMemory {
    bytes: u64,
    limit: u64,
}

/// Grants of a window by hypercall.
pub(super) struct XenEngine {
    grantee: DomId,
    device: OwnedFd,
    handle: WindowHandle,
    references: u32,
    counters: Arc<Counters>,
}

/// Creates a window with memory of its own.
pub(super) fn create(
    grantee: DomId,
    shape: WindowShape,
    counters: &Arc<Counters>,
) -> Result<impl TranslationTable + use<>, PlatformError> {
    let references = shape.references();
    let (device, handle) = create_end(grantee, references)?;
    let pages = |name, count| {
        Pages::anonymous(name, count)
            .map_err(|e| PlatformError::system("making the memory of a window", e))
    };
    let memory = [pages("ringfence-rw", shape.writable)?, pages("ringfence-ro", shape.read_only)?];
    let engine = XenEngine { grantee, device, handle, references, counters: Arc::clone(counters) };
    Ok(GranterTable::new(engine, grantee, shape, memory, Arc::clone(counters)))
}

fn create_end(grantee: DomId, references: u32) -> Result<(OwnedFd, WindowHandle), PlatformError> {
    let device = XenDevice::Window.open()?;
    let handle = abi::create(device.as_fd(), grantee, references)
        .map_err(|e| PlatformError::system("creating a grant window", e))?;
    Ok((device, WindowHandle(handle)))
}

/// Returns `true` if the status says that the page is not mapped. The module has released its pin.
fn is_revoked(status: i32) -> bool {
    // A bad handle: the grantee destroyed the window. A bad reference: it is not issued.
    matches!(status, status::OKAY | status::BAD_HANDLE | status::BAD_GREF)
}

fn revoke_result(status: i32) -> Result<(), RevokeError> {
    match status {
        status if is_revoked(status) => Ok(()),
        status::BUSY => Err(RevokeError::Busy),
        status::AGAIN => Err(RevokeError::System(Errno::AGAIN.raw_os_error())),
        _ => Err(RevokeError::System(Errno::IO.raw_os_error())),
    }
}

fn issue_result(status: i32) -> Result<(), IssueError> {
    let errno = match status {
        status::OKAY => return Ok(()),
        status::NO_SPACE => Errno::NOMEM,
        status::AGAIN => Errno::AGAIN,
        status::BAD_HANDLE => Errno::STALE,
        _ => Errno::IO,
    };
    Err(IssueError::System(errno.raw_os_error()))
}

impl XenEngine {
    /// Revokes references. Repeats those over the hypervisor's flush rate a few times.
    fn revoke_all(&self, mut list: Vec<Revoke>) -> Result<(), RevokeError> {
        for _ in 0..REVOKE_ATTEMPTS {
            self.counters.syscalls.add(1);
            abi::revoke(self.device.as_fd(), &mut list)
                .map_err(|errno| RevokeError::System(errno.raw_os_error()))?;
            list.retain(|revoke| !is_revoked(revoke.status()));
            let over_rate = list.iter().any(|revoke| revoke.status() == status::AGAIN);
            if !over_rate {
                break;
            }
        }
        list.first().map_or(Ok(()), |revoke| {
            tracing::debug!(gref = %revoke.gref(), status = revoke.status(), "not revoked");
            revoke_result(revoke.status())
        })
    }
}

impl Engine for XenEngine {
    const FACTS: EngineFacts = EngineFacts {
        name: "xen",
        one_sided: true,
        in_flight: "reads ones, and its writes are discarded",
        cost: "issue and revoke: one hypercall each; a revocation flushes TLBs, once for a batch",
    };
    const CUTS_OFF: bool = true;

    fn issue(&mut self, gref: Gref, page: &EnginePage<'_>) -> Result<(), IssueError> {
        let access = DeviceAccess::Write;
        let range = page
            .memory
            .device_range(0, PAGE_SIZE, access)
            .map_err(|_| IssueError::System(Errno::FAULT.raw_os_error()))?;
        self.counters.syscalls.add(1);
        let status = abi::issue(self.device.as_fd(), gref, range, page.access)
            .map_err(|errno| IssueError::System(errno.raw_os_error()))?;
        issue_result(status)
    }

    fn revoke(&mut self, gref: Gref) -> Result<(), RevokeError> {
        self.revoke_all(vec![Revoke::new(gref, false)])
    }

    fn revoke_forced(&mut self, grefs: &[Gref]) -> Result<(), RevokeError> {
        if grefs.is_empty() {
            return Ok(());
        }
        self.revoke_all(grefs.iter().map(|gref| Revoke::new(*gref, true)).collect())
    }

    fn is_held(&self, _: Gref) -> bool {
        false
    }

    fn handle(&self) -> WindowHandle {
        self.handle
    }

    /// Makes another window: the grantee's last program has destroyed the old one, or will.
    fn renew(&mut self) -> Result<bool, WindowError> {
        let (device, handle) = create_end(self.grantee, self.references)?;
        // Closing the old file destroys its window and releases every page.
        self.device = device;
        self.handle = handle;
        Ok(true)
    }

    fn descriptors(&self) -> Vec<RawFd> {
        vec![self.device.as_raw_fd()]
    }
}

/// Maximum number of references of all windows that this process has open of one granter: half of the frames
/// that the module has by default. A vif of 16 queues needs 8448, a ring of a disk 1032.
const REFERENCES_MAX: u32 = 16_384;

/// Numbers of references of the windows that this process has open, by granter.
#[derive(Default)]
pub(super) struct OpenReferences(Mutex<HashMap<DomId, u32>>);

impl OpenReferences {
    /// Counts `wanted` more references of `granter`, until the result is dropped.
    fn take(self: &Arc<Self>, granter: DomId, wanted: u32) -> Result<OpenShare, WindowError> {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let present = open.get(&granter).copied().unwrap_or(0);
        let limit = REFERENCES_MAX;
        if wanted > limit - present {
            return Err(WindowError::TooMany { granter, present, wanted, limit });
        }
        open.insert(granter, present + wanted);
        Ok(OpenShare { all: Arc::clone(self), granter, references: wanted })
    }
}

/// References that are counted for one open window.
struct OpenShare {
    all: Arc<OpenReferences>,
    granter: DomId,
    references: u32,
}

impl Drop for OpenShare {
    fn drop(&mut self) {
        let mut open = self.all.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(present) = open.get_mut(&self.granter) {
            *present -= self.references;
            if *present == 0 {
                open.remove(&self.granter);
            }
        }
    }
}

/// Mapped part of an open window. The window's frames are free again after its last part is unmapped.
struct OpenPart {
    // In this order: the references are counted until the part is unmapped.
    mapping: Mapping,
    _share: Arc<OpenShare>,
}

impl OpenPart {
    fn map(
        device: &OwnedFd,
        share: &Arc<OpenShare>,
        offset: u64,
        pages: u32,
    ) -> Result<LentSlice, WindowError> {
        let bytes = pages as usize * PAGE_SIZE;
        let mapping = Mapping::new(device, offset, bytes, Protection::ReadWrite)
            .map_err(|e| PlatformError::system("mapping a grant window", e))?;
        let part = Arc::new(OpenPart { mapping, _share: Arc::clone(share) });
        // SAFETY: the owner holds the mapping until it is dropped.
        let lent = unsafe { part.mapping.part(Arc::clone(&part) as _, 0, bytes) };
        lent.map_err(|e| {
            PlatformError::system("mapping a grant window", io::Error::other(e)).into()
        })
    }
}

/// Registers and maps a window that was created for `me`.
pub(super) fn open(
    me: DomId,
    granter: DomId,
    name: WindowName,
    entries_max: u32,
    open: &Arc<OpenReferences>,
) -> Result<WindowView, WindowError> {
    let handle = name.handle;
    let references = name.references.ok_or(WindowError::NoReferences { granter })?;
    let found = references.saturating_sub(Gref::FIRST_FREE.0);
    if found > entries_max {
        return Err(WindowError::TooLarge { found, limit: entries_max });
    }
    let share = Arc::new(open.take(granter, references)?);
    let device = XenDevice::Window.open().map_err(PlatformError::from)?;
    let table_pages = abi::register(device.as_fd(), granter, handle.0, references)
        .map_err(|errno| refusal(errno, granter, handle))?;
    let slots = OpenPart::map(&device, &share, 0, table_pages)?;
    let pages = OpenPart::map(&device, &share, abi::PAGES_OFFSET, references)?;
    let table = LentTable::of_slots(&slots, references, me)
        .map_err(|_| WindowError::NoSuchWindow { granter, handle })?;
    // One memory for both kinds: the hypervisor enforces the kind of each page.
    let shape = WindowShape { writable: references, read_only: 0, entries: found };
    Ok(WindowView::new(me, shape, table, [pages.clone(), pages]))
}

fn refusal(errno: Errno, granter: DomId, handle: WindowHandle) -> WindowError {
    match errno {
        Errno::NXIO | Errno::BUSY => WindowError::NoSuchWindow { granter, handle },
        errno => PlatformError::system("registering a grant window", errno).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_becomes_revocation_result() {
        for status in [0, -3, -4] {
            assert_eq!(revoke_result(status), Ok(()));
        }
        assert_eq!(revoke_result(-14), Err(RevokeError::Busy));
        assert_eq!(revoke_result(-12), Err(RevokeError::System(11)));
        // A page that may still be mapped is not revoked.
        assert_eq!(revoke_result(-1), Err(RevokeError::System(5)));
    }

    #[test]
    fn status_becomes_issue_result() {
        assert_eq!(issue_result(0), Ok(()));
        assert_eq!(issue_result(-13), Err(IssueError::System(12)));
        assert_eq!(issue_result(-4), Err(IssueError::System(116)));
        assert!(issue_result(-9).is_err());
    }

    #[test]
    fn window_without_announced_references_is_refused() {
        let none = Arc::default();
        let refused = open(DomId(1), DomId(2), WindowHandle(1).into(), 4096, &none).err();
        assert!(matches!(refused, Some(WindowError::NoReferences { granter: DomId(2) })));
    }

    #[test]
    fn window_beyond_limit_is_refused_before_device_is_opened() {
        let name = WindowName { handle: WindowHandle(1), references: Some(u32::MAX) };
        let refused = open(DomId(1), DomId(2), name, 4096, &Arc::default()).err();
        assert!(matches!(refused, Some(WindowError::TooLarge { limit: 4096, .. })));
    }

    #[test]
    fn windows_of_one_granter_beyond_their_sum_are_refused_until_one_is_closed() {
        let (me, hostile, other) = (DomId(1), DomId(2), DomId(3));
        let all = Arc::<OpenReferences>::default();
        let mut shares: Vec<_> =
            (0..4).map(|_| all.take(hostile, REFERENCES_MAX / 4).unwrap()).collect();
        let name = WindowName { handle: WindowHandle(1), references: Some(9) };
        let refused = open(me, hostile, name, 4096, &all).err();
        let Some(WindowError::TooMany { granter, present, wanted, limit }) = refused else {
            panic!("{refused:?}");
        };
        assert_eq!((granter, present), (hostile, REFERENCES_MAX));
        assert_eq!((wanted, limit), (9, REFERENCES_MAX));
        // Another granter has a bound of its own.
        let theirs = all.take(other, REFERENCES_MAX).unwrap();
        assert!(all.take(other, 1).is_err());
        shares.pop();
        let again = all.take(hostile, REFERENCES_MAX / 4).unwrap();
        assert!(all.take(hostile, 1).is_err());
        assert!(all.take(hostile, u32::MAX).is_err());
        drop((shares, again, theirs));
        assert!(all.0.lock().unwrap().is_empty());
    }

    #[test]
    fn locked_memory_beyond_limit_is_an_error_with_both_numbers() {
        let Some(limit) = getrlimit(Resource::Memlock).current else { return };
        let error = check_locked_memory(limit / PAGE_SIZE as u64, 1).unwrap_err().to_string();
        assert!(error.contains(&limit.to_string()) && error.contains("ulimit -l"), "{error}");
    }
}
