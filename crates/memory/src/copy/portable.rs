//! Copy routine of architectures without one of their own, and of miri.

/// Copies `len` bytes with volatile loads and relaxed atomic stores. Loads cannot be atomic: the source may be borrowed
/// for reading, which allows no `AtomicU64`.
///
/// # Safety
///
/// As for [`copy_racing`](super::copy_racing).
pub(super) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    use core::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
    let mut i = 0;
    let aligned = (src as usize) % 8 == (dst as usize) % 8;
    while i < len {
        // SAFETY: i < len, so both pointers stay inside the ranges that the caller vouches for.
        let (s, t) = unsafe { (src.add(i), dst.add(i)) };
        if aligned && (s as usize).is_multiple_of(8) && len - i >= 8 {
            // SAFETY: eight bytes are left on both sides and both addresses are aligned to 8.
            unsafe {
                let word = s.cast::<u64>().read_volatile();
                AtomicU64::from_ptr(t.cast()).store(word, Relaxed);
            }
            i += 8;
        } else {
            // SAFETY: one byte is left on both sides.
            unsafe {
                let byte = s.read_volatile();
                AtomicU8::from_ptr(t).store(byte, Relaxed);
            }
            i += 1;
        }
    }
}
