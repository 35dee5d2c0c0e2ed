//! Copies between memory that may race with another domain and private memory.
//!
//! Inline assembly is opaque to the optimiser, which can neither repeat nor split it. A race on the bytes that
//! it touches is no undefined behaviour in Rust's model; only the content is unspecified. Other architectures
//! use relaxed atomics of the widest aligned word, at a third of the speed.

/// Smallest length for `rep movsb`. Below it, SSE moves avoid its start-up cost (break-even near 700 bytes).
#[cfg(all(target_arch = "x86_64", not(miri)))]
const MOVSB_FROM: usize = 768;

/// Copies `len` bytes from `src` to `dst`; either may be racing lent memory. If the ranges overlap, the content
/// of `dst` is unspecified.
///
/// # Safety
///
/// `src` must be readable and `dst` writable for `len` bytes.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
pub(crate) unsafe fn copy_racing(src: *const u8, dst: *mut u8, len: usize) {
    use core::arch::asm;
    if len >= MOVSB_FROM {
        // SAFETY: the caller vouches for both ranges; `rep movsb` touches exactly `len` bytes of
        // each, and the direction flag is clear by the ABI.
        unsafe {
            asm!("rep movsb", inout("rcx") len => _, inout("rsi") src => _, inout("rdi") dst => _,
                 options(nostack, preserves_flags));
        }
        return;
    }
    if len > 64 {
        // SAFETY: by the caller's contract; there are more than 16 bytes.
        return unsafe { copy_blocks(src, dst, len) };
    }
    if len >= 32 {
        // SAFETY: by the caller's contract; there are 32 to 64 bytes.
        return unsafe { copy_line(src, dst, len) };
    }
    if len >= 16 {
        // SAFETY: by the caller's contract; there are 16 to 32 bytes.
        return unsafe { copy_half_line(src, dst, len) };
    }
    // SAFETY: by the caller's contract.
    unsafe { copy_few(src, dst, len) };
}

/// Copies 32 to 64 bytes with four SSE moves; the last two end at `len`.
///
/// # Safety
///
/// As for [`copy_racing`], and `len` is 32 to 64.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
unsafe fn copy_line(src: *const u8, dst: *mut u8, len: usize) {
    use core::arch::asm;
    // SAFETY: the moves cover [0, 32) and [len - 32, len), which is [0, len), and may overlap.
    unsafe {
        asm!(
            "movups {a}, [{s}]",
            "movups {b}, [{s} + 16]",
            "movups {c}, [{s} + {n} - 32]",
            "movups {d}, [{s} + {n} - 16]",
            "movups [{t}], {a}",
            "movups [{t} + 16], {b}",
            "movups [{t} + {n} - 32], {c}",
            "movups [{t} + {n} - 16], {d}",
            n = in(reg) len, s = in(reg) src, t = in(reg) dst,
            a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, d = out(xmm_reg) _,
            options(nostack, preserves_flags),
        );
    }
}

/// Copies 16 to 32 bytes with two SSE moves; the last one ends at `len`.
///
/// # Safety
///
/// As for [`copy_racing`], and `len` is 16 to 32.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
unsafe fn copy_half_line(src: *const u8, dst: *mut u8, len: usize) {
    use core::arch::asm;
    // SAFETY: the moves cover [0, 16) and [len - 16, len), which is [0, len), and may overlap.
    unsafe {
        asm!(
            "movups {a}, [{s}]",
            "movups {b}, [{s} + {n} - 16]",
            "movups [{t}], {a}",
            "movups [{t} + {n} - 16], {b}",
            n = in(reg) len, s = in(reg) src, t = in(reg) dst,
            a = out(xmm_reg) _, b = out(xmm_reg) _,
            options(nostack, preserves_flags),
        );
    }
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

/// Copies at least 16 bytes with SSE moves.
///
/// # Safety
///
/// As for [`copy_racing`], and `len` is at least 16.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
unsafe fn copy_blocks(src: *const u8, dst: *mut u8, len: usize) {
    use core::arch::asm;
    // SAFETY: all moves stay within [0, len): whole blocks first, then one 16-byte move that ends exactly at
    // len and may overlap the previous block.
    unsafe {
        asm!(
            "xor {i}, {i}",
            "cmp {n}, 64",
            "jb 3f",
            "2:",
            "movups {a}, [{s} + {i}]",
            "movups {b}, [{s} + {i} + 16]",
            "movups {c}, [{s} + {i} + 32]",
            "movups {d}, [{s} + {i} + 48]",
            "movups [{t} + {i}], {a}",
            "movups [{t} + {i} + 16], {b}",
            "movups [{t} + {i} + 32], {c}",
            "movups [{t} + {i} + 48], {d}",
            "add {i}, 64",
            "lea {e}, [{i} + 64]",
            "cmp {e}, {n}",
            "jbe 2b",
            "3:",
            "lea {e}, [{i} + 16]",
            "cmp {e}, {n}",
            "ja 4f",
            "movups {a}, [{s} + {i}]",
            "movups [{t} + {i}], {a}",
            "mov {i}, {e}",
            "jmp 3b",
            "4:",
            "movups {a}, [{s} + {n} - 16]",
            "movups [{t} + {n} - 16], {a}",
            i = out(reg) _, e = out(reg) _,
            n = in(reg) len, s = in(reg) src, t = in(reg) dst,
            a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, d = out(xmm_reg) _,
            options(nostack),
        );
    }
}

/// Copies fewer than 16 bytes with general-purpose registers.
///
/// # Safety
///
/// As for [`copy_racing`], and `len` is below 16.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[inline]
unsafe fn copy_few(src: *const u8, dst: *mut u8, len: usize) {
    use core::arch::asm;
    // SAFETY: by the caller's contract; the two moves of each branch cover [0, len) and may overlap.
    unsafe {
        if len >= 8 {
            asm!("mov {x}, [{s}]", "mov {y}, [{s} + {n} - 8]", "mov [{t}], {x}",
                 "mov [{t} + {n} - 8], {y}", x = out(reg) _, y = out(reg) _,
                 n = in(reg) len, s = in(reg) src, t = in(reg) dst,
                 options(nostack, preserves_flags));
        } else if len >= 4 {
            asm!("mov {x:e}, [{s}]", "mov {y:e}, [{s} + {n} - 4]", "mov [{t}], {x:e}",
                 "mov [{t} + {n} - 4], {y:e}", x = out(reg) _, y = out(reg) _,
                 n = in(reg) len, s = in(reg) src, t = in(reg) dst,
                 options(nostack, preserves_flags));
        } else {
            for i in 0..len {
                asm!("mov {x}, [{s} + {i}]", "mov [{t} + {i}], {x}", x = out(reg_byte) _,
                     i = in(reg) i, s = in(reg) src, t = in(reg) dst,
                     options(nostack, preserves_flags));
            }
        }
    }
}

/// Copies `len` bytes with relaxed atomic words; either range may be racing lent memory. If the ranges overlap,
/// the content of `dst` is unspecified.
///
/// # Safety
///
/// `src` must be readable and `dst` writable for `len` bytes.
#[cfg(any(not(target_arch = "x86_64"), miri))]
pub(crate) unsafe fn copy_racing(src: *const u8, dst: *mut u8, len: usize) {
    use core::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
    let mut i = 0;
    let aligned = (src as usize) % 8 == (dst as usize) % 8;
    while i < len {
        // SAFETY: i < len, so both pointers stay inside the ranges that the caller vouches for.
        let (s, t) = unsafe { (src.add(i), dst.add(i)) };
        if aligned && (s as usize) % 8 == 0 && len - i >= 8 {
            // SAFETY: eight bytes are left on both sides and both addresses are aligned to 8.
            unsafe {
                let word = AtomicU64::from_ptr(s.cast_mut().cast()).load(Relaxed);
                AtomicU64::from_ptr(t.cast()).store(word, Relaxed);
            }
            i += 8;
        } else {
            // SAFETY: one byte is left on both sides.
            unsafe {
                let byte = AtomicU8::from_ptr(s.cast_mut()).load(Relaxed);
                AtomicU8::from_ptr(t).store(byte, Relaxed);
            }
            i += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::copy_racing;

    #[test]
    fn copy_racing_of_every_length_copies_exact_range() {
        let src: Vec<u8> = (0..2048u32).map(|i| (i * 31 + 7).to_le_bytes()[0]).collect();
        for len in (0..300).chain([511, 767, 768, 769, 1500, 2000]) {
            for shift in [0usize, 1, 3, 8, 13] {
                let mut dst = vec![0xEEu8; 2100];
                // SAFETY: len + shift <= 2013 lies inside both vectors, which do not overlap.
                unsafe { copy_racing(src.as_ptr().add(shift), dst.as_mut_ptr().add(5), len) };
                assert_eq!(&dst[5..5 + len], &src[shift..shift + len], "len {len} shift {shift}");
                assert!(dst[..5].iter().chain(&dst[5 + len..]).all(|&b| b == 0xEE), "len {len}");
            }
        }
    }
}
