//! Atomics and fences of the shared protocols: `core`'s, or loom's in loom builds.

#[cfg(not(loom))]
pub use core::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

/// Orders earlier stores of the calling thread before its later loads, as `fence(Ordering::SeqCst)` does. The
/// compiler's `mfence` takes several times as long as a locked instruction, which orders ordinary memory
/// equally.
#[cfg(all(target_arch = "x86_64", not(loom), not(miri)))]
#[inline]
pub fn full_fence() {
    // SAFETY: the word at the top of the stack is mapped, and the instruction does not change it.
    unsafe { core::arch::asm!("lock or dword ptr [rsp], 0", options(nostack)) };
}

/// Orders earlier stores of the calling thread before its later loads.
#[cfg(not(all(target_arch = "x86_64", not(loom), not(miri))))]
#[inline]
pub fn full_fence() {
    fence(Ordering::SeqCst);
}
