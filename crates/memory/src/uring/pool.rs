//! Rings of a process in a sandbox.
//!
//! A ring executes operations that no filter of system calls sees. The process therefore makes its rings before its
//! sandbox closes, and may enter them afterwards. The kernel restricts each ring before it is enabled: to reads,
//! writes, `fdatasync` and `fallocate`, without flags. Nothing can be registered, so the restrictions are final. A
//! restricted ring accesses the descriptors of its process, as the same system calls do, which the sandbox allows.
//!
//! Files are not registered. A registered file stays open until the kernel has torn down the ring of a killed process,
//! and the lock of a disk with it.

// #syscall none: the rings are made before the sandbox closes

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use io_uring::register::Restriction;
use io_uring::{IoUring, opcode};

use super::{DEPTH_MAX, Uring, build};

/// Rings that were made before the sandbox closed.
pub struct UringPool {
    free: Mutex<Vec<IoUring>>,
    /// Error of the kernel, if it refused all rings.
    refusal: Option<io::Error>,
}

impl core::fmt::Debug for UringPool {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let left = self.left();
        f.debug_struct("UringPool").field("left", &left).field("refusal", &self.refusal).finish()
    }
}

impl UringPool {
    /// Makes `count` rings of `depth` entries, or as many as the kernel allows.
    pub fn new(count: usize, depth: u32) -> UringPool {
        let (mut free, mut refusal) = (Vec::with_capacity(count), None);
        for _ in 0..count {
            match restricted(depth.clamp(1, DEPTH_MAX)) {
                Ok(ring) => free.push(ring),
                Err(error) => {
                    refusal = free.is_empty().then_some(error);
                    break;
                }
            }
        }
        UringPool { free: Mutex::new(free), refusal }
    }

    /// Returns the kernel's error if it refused all rings.
    pub fn refusal(&self) -> Option<&io::Error> {
        self.refusal.as_ref()
    }

    /// Returns the kernel's error if it refused all rings, and closes the rings.
    pub fn into_refusal(self) -> Option<io::Error> {
        self.refusal
    }

    /// Returns the number of rings that nobody uses.
    pub fn left(&self) -> usize {
        self.free().len()
    }

    /// Takes a ring for up to `depth` operations in flight on `file`, or fewer if the ring is smaller. Returns `None` if
    /// no ring is left.
    pub fn take(self: &Arc<Self>, file: Arc<OwnedFd>, depth: u32) -> Option<Uring> {
        let ring = self.free().pop()?;
        let depth = depth.clamp(1, ring.params().sq_entries());
        Some(Uring::on(ring, file, depth, Some(Arc::clone(self))))
    }

    pub(super) fn give_back(&self, ring: IoUring) {
        self.free().push(ring);
    }

    pub(super) fn free(&self) -> MutexGuard<'_, Vec<IoUring>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes a ring that can do what [`Uring`] does, and nothing else.
fn restricted(depth: u32) -> io::Result<IoUring> {
    let ring = build(depth, true)?;
    let mut allowed = [
        Restriction::sqe_op(opcode::Read::CODE),
        Restriction::sqe_op(opcode::Write::CODE),
        Restriction::sqe_op(opcode::Readv::CODE),
        Restriction::sqe_op(opcode::Writev::CODE),
        Restriction::sqe_op(opcode::Fsync::CODE),
        Restriction::sqe_op(opcode::Fallocate::CODE),
        Restriction::sqe_flags_allowed(0),
    ];
    ring.submitter().register_restrictions(&mut allowed)?;
    ring.submitter().register_enable_rings()?;
    Ok(ring)
}
