//! Copies between memory that may race with another domain and private memory.
//!
//! Inline assembly is opaque to the optimiser, which can neither repeat nor split it. A race on the bytes that
//! it touches is no undefined behaviour in Rust's model; only the content is unspecified. x86-64 and aarch64 have
//! routines of their own, which are chosen by the length and, once, by the processor. Other architectures and miri
//! use volatile loads and relaxed atomic stores of the widest aligned word, at a third of the speed.

#[cfg(all(target_arch = "aarch64", not(miri)))]
mod aarch64;
#[cfg(any(not(any(target_arch = "x86_64", target_arch = "aarch64")), miri, test))]
mod portable;
mod routine;
#[cfg(test)]
mod tests;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86;

#[cfg(all(target_arch = "aarch64", not(miri)))]
use aarch64 as chosen;
#[cfg(any(not(any(target_arch = "x86_64", target_arch = "aarch64")), miri))]
use portable as chosen;
#[cfg(all(target_arch = "x86_64", not(miri)))]
use x86 as chosen;

pub use routine::CopyRoutine;

/// Copies `len` bytes from `src` to `dst`; either may be racing lent memory. If the ranges overlap, the content
/// of `dst` is unspecified.
///
/// # Safety
///
/// `src` must be readable and `dst` writable for `len` bytes.
#[inline]
pub(crate) unsafe fn copy_racing(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: by the caller's contract.
    unsafe { chosen::copy(src, dst, len) }
}

/// Chooses the copy routine by the processor, where there is a choice. Copies are correct without it.
#[inline]
pub(crate) fn choose() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    x86::choose();
}

/// Length of a cache line in bytes.
const LINE: usize = 64;

/// Prefetches the cache lines of a range for reading. Accesses no memory in Rust's sense and never faults, so
/// any address is allowed.
#[inline]
pub(crate) fn prefetch_read(at: *const u8, len: usize) {
    for line in (0..len).step_by(LINE) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: a prefetch is a hint: it changes no register or memory and never faults.
        unsafe {
            core::arch::asm!("prefetcht0 [{}]", in(reg) at.wrapping_add(line),
                             options(nostack, preserves_flags, readonly));
        }
        #[cfg(any(not(target_arch = "x86_64"), miri))]
        let _ = (at, line);
    }
}

/// Prefetches the cache lines of a range for writing: other processors give the lines up.
#[inline]
pub(crate) fn prefetch_write(at: *mut u8, len: usize) {
    for line in (0..len).step_by(LINE) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: as above. Processors without the instruction execute it as a no-op.
        unsafe {
            core::arch::asm!("prefetchw [{}]", in(reg) at.wrapping_add(line),
                             options(nostack, preserves_flags, readonly));
        }
        #[cfg(any(not(target_arch = "x86_64"), miri))]
        let _ = (at, line);
    }
}
