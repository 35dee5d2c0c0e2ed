//! Copy routine of aarch64: pairs of registers by LDP and STP.

use core::arch::asm;

/// Smallest length for the loop of pairs.
pub(super) const PAIRS_FROM: usize = 64;

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
            PAIRS_FROM.. => copy_pairs(src, dst, len),
            16.. => copy_half_line(src, dst, len),
            _ => copy_few(src, dst, len),
        }
    }
}

/// Copies at least [`PAIRS_FROM`] bytes: blocks of 64, and the last 64 bytes.
///
/// # Safety
///
/// As for [`copy_racing`](super::copy_racing), and `len` is at least [`PAIRS_FROM`].
pub(super) unsafe fn copy_pairs(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the loop copies blocks that begin below len - 64; the last block covers [len - 64, len). All are
    // within [0, len), and together they cover it.
    unsafe {
        asm!(
            "2:",
            "cmp {s}, {last}",
            "b.hs 3f",
            "ldp q0, q1, [{s}]",
            "ldp q2, q3, [{s}, #32]",
            "add {s}, {s}, #64",
            "stp q0, q1, [{t}]",
            "stp q2, q3, [{t}, #32]",
            "add {t}, {t}, #64",
            "b 2b",
            "3:",
            "ldp q0, q1, [{last}]",
            "ldp q2, q3, [{last}, #32]",
            "stp q0, q1, [{end}, #-64]",
            "stp q2, q3, [{end}, #-32]",
            s = inout(reg) src => _, t = inout(reg) dst => _,
            last = in(reg) src.add(len - PAIRS_FROM), end = in(reg) dst.add(len),
            out("v0") _, out("v1") _, out("v2") _, out("v3") _,
            options(nostack),
        );
    }
}

/// Copies 16 to 64 bytes: moves of 16 bytes, the last of which ends at `len`.
///
/// # Safety
///
/// As for [`copy_racing`](super::copy_racing), and `len` is at least 16.
#[inline]
unsafe fn copy_half_line(src: *const u8, dst: *mut u8, len: usize) {
    let last = len - 16;
    for at in (0..last).step_by(16).chain([last]) {
        // SAFETY: `at` is at most len - 16, so the move is within [0, len).
        unsafe {
            asm!("ldr {a:q}, [{s}]", "str {a:q}, [{t}]", a = out(vreg) _,
                 s = in(reg) src.add(at), t = in(reg) dst.add(at),
                 options(nostack, preserves_flags));
        }
    }
}

/// Copies fewer than 16 bytes.
///
/// # Safety
///
/// As for [`copy_racing`](super::copy_racing), and `len` is below 16.
#[inline]
unsafe fn copy_few(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the two moves of 8 bytes cover [0, len) and may overlap; the others are below len.
    unsafe {
        if len >= 8 {
            asm!("ldr {x}, [{s}]", "ldr {y}, [{s}, {n}]", "str {x}, [{t}]", "str {y}, [{t}, {n}]",
                 x = out(reg) _, y = out(reg) _, n = in(reg) len - 8, s = in(reg) src, t = in(reg) dst,
                 options(nostack, preserves_flags));
            return;
        }
        for i in 0..len {
            asm!("ldrb {x:w}, [{s}, {i}]", "strb {x:w}, [{t}, {i}]", x = out(reg) _,
                 i = in(reg) i, s = in(reg) src, t = in(reg) dst,
                 options(nostack, preserves_flags));
        }
    }
}
