//! The atomics and fences of the shared protocols: `core`'s, or loom's when it explores them.

#[cfg(not(loom))]
pub use core::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

/// Orders what the calling thread stored before against what it loads after, as
/// `fence(Ordering::SeqCst)` does. The processor's own instruction for that (`mfence`) takes several times
/// as long as a locked one, which orders ordinary memory just as much.
#[cfg(all(target_arch = "x86_64", not(loom), not(miri)))]
#[inline]
pub fn full_fence() {
    // SAFETY: the word at the stack's top is there, and stays as it is.
    unsafe { core::arch::asm!("lock or dword ptr [rsp], 0", options(nostack)) };
}

/// Orders what the calling thread stored before against what it loads after.
#[cfg(not(all(target_arch = "x86_64", not(loom), not(miri))))]
#[inline]
pub fn full_fence() {
    fence(Ordering::SeqCst);
}
