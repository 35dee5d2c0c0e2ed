//! Copy routines of x86-64.
//!
//! | length | routine |
//! |---|---|
//! | up to 64 | two or four moves that overlap |
//! | from [`AVX_FROM`] | moves of 64 bytes, if the processor has AVX-512 of its second generation |
//! | from [`AVX_FROM`] | moves of 32 bytes, if the processor and the system have AVX |
//! | otherwise | moves of 16 bytes |
//!
//! Copies above 64 bytes are functions with a convention of their own: they change few registers, which the caller's
//! assembly names. An ordinary call changes all registers that a caller saves, and made the loops around short
//! copies slower by up to a fifth, even where it was never reached.
//!
//! `rep movsb` is not used. On processors with `erms` and `fsrm` it is at best as fast as AVX moves from 2 to 64 KiB
//! and slower below. It is up to 30 times slower where destination minus source modulo 4096 is small, above
//! zero and no multiple of 64 (AMD EPYC); `docs/lab/performance-log.md` has the table.

use core::arch::{asm, naked_asm};
use core::sync::atomic::{AtomicU8, Ordering};

/// Calls a routine of long copies, which takes destination, source and length in RDI, RSI and RDX, leaves these as
/// they are and changes no registers but those named here.
macro_rules! call {
    ($routine:ident, $src:expr, $dst:expr, $len:expr) => {
        asm!(
            "call {routine}",
            routine = sym $routine,
            in("rdi") $dst, in("rsi") $src, in("rdx") $len,
            out("rax") _, out("rcx") _, out("r8") _,
            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
            out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
            out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
            out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
        )
    };
}

/// Smallest length for AVX moves. Below it the call costs more than they save.
pub(super) const AVX_FROM: usize = 128;

/// Bytes of a move of copies from [`AVX_FROM`] bytes. Until the processor is known, copies use SSE moves, which
/// every processor has.
static WIDTH: AtomicU8 = AtomicU8::new(SSE_WIDTH);
const SSE_WIDTH: u8 = 16;
const AVX_WIDTH: u8 = 32;
const AVX512_WIDTH: u8 = 64;

/// Chooses the routine of long copies by the processor. Mappings call it, so that copies need not.
pub(super) fn choose() {
    let width = if prefers_avx512() {
        AVX512_WIDTH
    } else if has_avx() {
        AVX_WIDTH
    } else {
        SSE_WIDTH
    };
    WIDTH.store(width, Ordering::Relaxed);
}

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
            65.. => call!(long_moves, src, dst, len),
            32.. => copy_line(src, dst, len),
            16.. => copy_half_line(src, dst, len),
            _ => copy_few(src, dst, len),
        }
    }
}

/// Returns `true` if the processor has AVX and the system saves its registers.
#[inline]
pub(super) fn has_avx() -> bool {
    std::arch::is_x86_feature_detected!("avx")
}

/// Returns `true` if the processor has AVX-512 and the system saves its registers.
#[inline]
pub(super) fn has_avx512() -> bool {
    std::arch::is_x86_feature_detected!("avx512f")
}

/// Returns `true` if moves of 64 bytes cost no clock frequency. The first processors with AVX-512 lower their clock
/// for them; those with VBMI2 (Ice Lake, Zen 4 and later) do not.
fn prefers_avx512() -> bool {
    has_avx512() && std::arch::is_x86_feature_detected!("avx512vbmi2")
}

/// Copies at least [`AVX_FROM`] bytes with AVX-512 moves.
///
/// # Safety
///
/// As for [`copy_racing`](super::copy_racing); `len` is at least [`AVX_FROM`], and the processor has AVX-512.
#[inline]
pub(super) unsafe fn copy_avx512(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: by the caller's contract.
    unsafe { call!(avx512_moves, src, dst, len) }
}

/// Copies at least [`AVX_FROM`] bytes with AVX moves.
///
/// # Safety
///
/// As for [`copy_racing`](super::copy_racing); `len` is at least [`AVX_FROM`], and the processor has AVX.
#[inline]
pub(super) unsafe fn copy_avx(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: by the caller's contract.
    unsafe { call!(avx_moves, src, dst, len) }
}

/// Copies at least 16 bytes with SSE moves.
///
/// # Safety
///
/// As for [`copy_racing`](super::copy_racing), and `len` is at least 16.
#[inline]
pub(super) unsafe fn copy_sse(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: by the caller's contract.
    unsafe { call!(sse_moves, src, dst, len) }
}

/// Copies with moves of [`WIDTH`] bytes from [`AVX_FROM`] bytes, otherwise with SSE moves.
///
/// # Safety
///
/// As for [`copy_racing`](super::copy_racing), and RDX is at least 16. Only [`call!`] may call it.
// SAFETY: the body keeps the convention of `call!`: it changes only the registers named there, and returns.
#[unsafe(naked)]
unsafe extern "C" fn long_moves() {
    naked_asm!(
        "cmp rdx, {from}",
        "jb {sse}",
        "cmp byte ptr [rip + {width}], {avx_width}",
        "jb {sse}",
        "je {avx}",
        "jmp {avx512}",
        from = const AVX_FROM,
        width = sym WIDTH,
        avx_width = const AVX_WIDTH,
        sse = sym sse_moves,
        avx = sym avx_moves,
        avx512 = sym avx512_moves,
    );
}

/// Copies RDX bytes from RSI to RDI with AVX-512 moves: the first 64 bytes, blocks of 128 at aligned places of the
/// destination, and the last 128 bytes. Changes RAX, RCX, R8 and the vector registers.
///
/// # Safety
///
/// As for [`copy_racing`](super::copy_racing); RDX is at least [`AVX_FROM`], and the processor has AVX-512. Only
/// [`call!`] may call it.
// SAFETY: the body keeps the convention of `call!`: it changes only the registers named there, and returns.
#[unsafe(naked)]
unsafe extern "C" fn avx512_moves() {
    // The first move covers [0, 64). The loop begins at 1 to 64, so that the destination is aligned, and writes a
    // block at RAX only if RAX < length - 128. The last two moves cover [length - 128, length). All are within
    // [0, length), and together they cover it. `vzeroupper` clears the upper part of each vector register.
    naked_asm!(
        "vmovdqu64 zmm0, [rsi]",
        "vmovdqu64 zmm4, [rsi + rdx - 64]",
        "vmovdqu64 zmm5, [rsi + rdx - 128]",
        "lea r8, [rdi + rdx]",
        "mov rax, rdi",
        "and rax, 63",
        "neg rax",
        "add rax, 64",
        "vmovdqu64 [rdi], zmm0",
        "lea rcx, [rdx - 128]",
        "cmp rax, rcx",
        "jae 3f",
        ".p2align 5",
        "2:",
        "vmovdqu64 zmm0, [rsi + rax]",
        "vmovdqu64 zmm1, [rsi + rax + 64]",
        "vmovdqa64 [rdi + rax], zmm0",
        "vmovdqa64 [rdi + rax + 64], zmm1",
        "add rax, 128",
        "cmp rax, rcx",
        "jb 2b",
        "3:",
        "vmovdqu64 [r8 - 64], zmm4",
        "vmovdqu64 [r8 - 128], zmm5",
        "vzeroupper",
        "ret",
    );
}

/// Copies RDX bytes from RSI to RDI with AVX moves: the first 32 bytes, blocks of 128 at aligned places of the
/// destination, and the last 128 bytes. Changes RAX, RCX, R8 and the vector registers.
///
/// # Safety
///
/// As for [`copy_racing`](super::copy_racing); RDX is at least [`AVX_FROM`], and the processor has AVX. Only
/// [`call!`] may call it.
// SAFETY: the body keeps the convention of `call!`: it changes only the registers named there, and returns.
#[unsafe(naked)]
unsafe extern "C" fn avx_moves() {
    // The first move covers [0, 32). The loop begins at 1 to 32, so that the destination is aligned, and writes a
    // block at RAX only if RAX < length - 128. The last four moves cover [length - 128, length). All are within
    // [0, length), and together they cover it. `vzeroupper` clears the upper half of each vector register.
    naked_asm!(
        "vmovdqu ymm0, [rsi]",
        "vmovdqu ymm4, [rsi + rdx - 32]",
        "vmovdqu ymm5, [rsi + rdx - 64]",
        "vmovdqu ymm6, [rsi + rdx - 96]",
        "vmovdqu ymm7, [rsi + rdx - 128]",
        "lea r8, [rdi + rdx]",
        "mov rax, rdi",
        "and rax, 31",
        "neg rax",
        "add rax, 32",
        "vmovdqu [rdi], ymm0",
        "lea rcx, [rdx - 128]",
        "cmp rax, rcx",
        "jae 3f",
        ".p2align 5",
        "2:",
        "vmovdqu ymm0, [rsi + rax]",
        "vmovdqu ymm1, [rsi + rax + 32]",
        "vmovdqu ymm2, [rsi + rax + 64]",
        "vmovdqu ymm3, [rsi + rax + 96]",
        "vmovdqa [rdi + rax], ymm0",
        "vmovdqa [rdi + rax + 32], ymm1",
        "vmovdqa [rdi + rax + 64], ymm2",
        "vmovdqa [rdi + rax + 96], ymm3",
        "add rax, 128",
        "cmp rax, rcx",
        "jb 2b",
        "3:",
        "vmovdqu [r8 - 32], ymm4",
        "vmovdqu [r8 - 64], ymm5",
        "vmovdqu [r8 - 96], ymm6",
        "vmovdqu [r8 - 128], ymm7",
        "vzeroupper",
        "ret",
    );
}

/// Copies RDX bytes from RSI to RDI with SSE moves. Changes RAX, RCX and the vector registers 0 to 3.
///
/// # Safety
///
/// As for [`copy_racing`](super::copy_racing), and RDX is at least 16. Only [`call!`] may call it.
// SAFETY: the body keeps the convention of `call!`: it changes only the registers named there, and returns.
#[unsafe(naked)]
unsafe extern "C" fn sse_moves() {
    // All moves stay within [0, RDX): whole blocks first, then one 16-byte move that ends exactly at RDX and may
    // overlap the previous block.
    naked_asm!(
        "xor eax, eax",
        "cmp rdx, 64",
        "jb 3f",
        "2:",
        "movups xmm0, [rsi + rax]",
        "movups xmm1, [rsi + rax + 16]",
        "movups xmm2, [rsi + rax + 32]",
        "movups xmm3, [rsi + rax + 48]",
        "movups [rdi + rax], xmm0",
        "movups [rdi + rax + 16], xmm1",
        "movups [rdi + rax + 32], xmm2",
        "movups [rdi + rax + 48], xmm3",
        "add rax, 64",
        "lea rcx, [rax + 64]",
        "cmp rcx, rdx",
        "jbe 2b",
        "3:",
        "lea rcx, [rax + 16]",
        "cmp rcx, rdx",
        "ja 4f",
        "movups xmm0, [rsi + rax]",
        "movups [rdi + rax], xmm0",
        "mov rax, rcx",
        "jmp 3b",
        "4:",
        "movups xmm0, [rsi + rdx - 16]",
        "movups [rdi + rdx - 16], xmm0",
        "ret",
    );
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
