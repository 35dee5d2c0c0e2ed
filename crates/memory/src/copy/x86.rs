//! Copy routines of x86-64.
//!
//! | length | routine |
//! |---|---|
//! | up to 64 | two or four moves that overlap |
//! | from [`AVX_FROM`] | moves of 32 bytes, if the processor and the system have AVX |
//! | otherwise | moves of 16 bytes |
//!
//! `rep movsb` is not used. On processors with `erms` and `fsrm` it is at best as fast as AVX moves from 2 to 64 KiB
//! and slower below. It is up to 30 times slower where destination minus source modulo 4096 is small, above
//! zero and no multiple of 64 (AMD EPYC); `docs/perf/log.md` has the table.

use core::arch::asm;

/// Smallest length for AVX moves. Below it the call costs more than they save.
pub(super) const AVX_FROM: usize = 128;

/// Copies `len` bytes from `src` to `dst`.
///
/// # Safety
///
/// As for [`copy_racing`](super::copy_racing).
#[inline]
pub(super) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: by the caller's contract; each routine is called with a length that it allows.
    unsafe {
        match len {
            65.. => copy_long(src, dst, len),
            32.. => copy_line(src, dst, len),
            16.. => copy_half_line(src, dst, len),
            _ => copy_few(src, dst, len),
        }
    }
}

/// Copies more than 64 bytes. Not inlined, so that the moves of short copies fit into their callers.
///
/// # Safety
///
/// As for [`copy_racing`](super::copy_racing), and `len` is above 64.
#[inline(never)]
unsafe fn copy_long(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: by the caller's contract; AVX moves are made on a processor that has them.
    unsafe {
        if len >= AVX_FROM && has_avx() {
            copy_avx(src, dst, len);
        } else {
            copy_sse(src, dst, len);
        }
    }
}

/// Returns `true` if the processor has AVX and the system saves its registers.
#[inline]
pub(super) fn has_avx() -> bool {
    std::arch::is_x86_feature_detected!("avx")
}

/// Copies at least [`AVX_FROM`] bytes with AVX moves: the first 32 bytes, blocks of 128 at aligned places of the
/// destination, and the last 128 bytes.
///
/// # Safety
///
/// As for [`copy_racing`](super::copy_racing); `len` is at least [`AVX_FROM`], and the processor has AVX.
#[inline(never)]
pub(super) unsafe fn copy_avx(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the first move covers [0, 32). The loop begins at 1 to 32, so that the destination is aligned, and
    // writes a block at i only if i < len - 128. The last four moves cover [len - 128, len). All are within
    // [0, len), and together they cover it. Every vector register is declared as changed, because `vzeroupper`
    // clears the upper half of each.
    unsafe {
        asm!(
            "vmovdqu ymm0, [{s}]",
            "vmovdqu ymm4, [{s} + {n} - 32]",
            "vmovdqu ymm5, [{s} + {n} - 64]",
            "vmovdqu ymm6, [{s} + {n} - 96]",
            "vmovdqu ymm7, [{s} + {n} - 128]",
            "lea {end}, [{t} + {n}]",
            "mov {i}, {t}",
            "and {i}, 31",
            "neg {i}",
            "add {i}, 32",
            "vmovdqu [{t}], ymm0",
            "lea {last}, [{n} - 128]",
            "cmp {i}, {last}",
            "jae 3f",
            ".p2align 5",
            "2:",
            "vmovdqu ymm0, [{s} + {i}]",
            "vmovdqu ymm1, [{s} + {i} + 32]",
            "vmovdqu ymm2, [{s} + {i} + 64]",
            "vmovdqu ymm3, [{s} + {i} + 96]",
            "vmovdqa [{t} + {i}], ymm0",
            "vmovdqa [{t} + {i} + 32], ymm1",
            "vmovdqa [{t} + {i} + 64], ymm2",
            "vmovdqa [{t} + {i} + 96], ymm3",
            "add {i}, 128",
            "cmp {i}, {last}",
            "jb 2b",
            "3:",
            "vmovdqu [{end} - 32], ymm4",
            "vmovdqu [{end} - 64], ymm5",
            "vmovdqu [{end} - 96], ymm6",
            "vmovdqu [{end} - 128], ymm7",
            "vzeroupper",
            i = out(reg) _, last = out(reg) _, end = out(reg) _,
            n = in(reg) len, s = in(reg) src, t = in(reg) dst,
            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
            out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
            out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
            out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
            options(nostack),
        );
    }
}

/// Copies `len` bytes with `rep movsb`. Only the benchmark of copies uses it.
///
/// # Safety
///
/// As for [`copy_racing`](super::copy_racing).
pub(super) unsafe fn copy_movsb(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller vouches for both ranges; `rep movsb` touches exactly `len` bytes of each, and the
    // direction flag is clear by the ABI.
    unsafe {
        asm!("rep movsb", inout("rcx") len => _, inout("rsi") src => _, inout("rdi") dst => _,
             options(nostack, preserves_flags));
    }
}

/// Copies 32 to 64 bytes with four SSE moves; the last two end at `len`.
///
/// # Safety
///
/// As for [`copy_racing`](super::copy_racing), and `len` is 32 to 64.
#[inline]
unsafe fn copy_line(src: *const u8, dst: *mut u8, len: usize) {
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
/// As for [`copy_racing`](super::copy_racing), and `len` is 16 to 32.
#[inline]
unsafe fn copy_half_line(src: *const u8, dst: *mut u8, len: usize) {
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

/// Copies at least 16 bytes with SSE moves.
///
/// # Safety
///
/// As for [`copy_racing`](super::copy_racing), and `len` is at least 16.
#[inline]
pub(super) unsafe fn copy_sse(src: *const u8, dst: *mut u8, len: usize) {
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
/// As for [`copy_racing`](super::copy_racing), and `len` is below 16.
#[inline]
unsafe fn copy_few(src: *const u8, dst: *mut u8, len: usize) {
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
