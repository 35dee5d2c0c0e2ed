//! Copy routines by name, for the benchmark of copies and the comparison of all of them in a test.

/// Routine that copies between memory that may be racing and private memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CopyRoutine {
    /// Choice that every copy of lent memory makes.
    Chosen,
    /// Moves of 16 bytes (x86-64).
    Sse,
    /// Moves of 32 bytes (x86-64 with AVX).
    Avx,
    /// Moves of 64 bytes (x86-64 with AVX-512).
    Avx512,
    /// `rep movsb` (x86-64), which no copy of lent memory uses.
    Movsb,
    /// Pairs of registers (aarch64).
    Pairs,
}

impl CopyRoutine {
    /// Returns the routines that this processor has.
    pub fn available() -> Vec<CopyRoutine> {
        super::choose();
        let all = [
            CopyRoutine::Chosen,
            CopyRoutine::Sse,
            CopyRoutine::Avx,
            CopyRoutine::Avx512,
            CopyRoutine::Movsb,
            CopyRoutine::Pairs,
        ];
        all.into_iter().filter(|routine| routine.is_available()).collect()
    }

    /// Returns the routine's name in reports.
    pub fn name(self) -> &'static str {
        match self {
            CopyRoutine::Chosen => "chosen",
            CopyRoutine::Sse => "sse",
            CopyRoutine::Avx => "avx",
            CopyRoutine::Avx512 => "avx512",
            CopyRoutine::Movsb => "movsb",
            CopyRoutine::Pairs => "pairs",
        }
    }

    /// Returns the smallest length in bytes that the routine copies itself. It leaves shorter ones to the choice.
    pub fn from_bytes(self) -> usize {
        match self {
            CopyRoutine::Chosen | CopyRoutine::Movsb => 0,
            CopyRoutine::Sse => 16,
            CopyRoutine::Avx | CopyRoutine::Avx512 => 128,
            CopyRoutine::Pairs => 64,
        }
    }

    fn is_available(self) -> bool {
        match self {
            CopyRoutine::Chosen => true,
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            CopyRoutine::Avx => super::x86::has_avx(),
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            CopyRoutine::Avx512 => super::x86::has_avx512(),
            #[cfg(all(target_arch = "x86_64", not(miri)))]
            CopyRoutine::Sse | CopyRoutine::Movsb => true,
            #[cfg(all(target_arch = "aarch64", not(miri)))]
            CopyRoutine::Pairs => true,
            #[allow(unreachable_patterns, reason = "depends on the architecture")]
            _ => false,
        }
    }

    /// Copies the first bytes of `src` to `dst`, as many as both have. A routine that this processor does not have
    /// is replaced by the choice.
    #[inline]
    pub fn copy(self, src: &[u8], dst: &mut [u8]) {
        let len = src.len().min(dst.len());
        // SAFETY: both ranges have `len` bytes and do not overlap, because one is borrowed for writing.
        unsafe { self.copy_raw(src.as_ptr(), dst.as_mut_ptr(), len) }
    }

    /// Copies `len` bytes.
    ///
    /// # Safety
    ///
    /// As for [`copy_racing`](super::copy_racing).
    #[inline]
    pub(super) unsafe fn copy_raw(self, src: *const u8, dst: *mut u8, len: usize) {
        let routine = if len >= self.from_bytes() && self.is_available() {
            self
        } else {
            CopyRoutine::Chosen
        };
        // SAFETY: by the caller's contract; the routine is available and allows this length.
        unsafe {
            match routine {
                #[cfg(all(target_arch = "x86_64", not(miri)))]
                CopyRoutine::Sse => super::x86::copy_sse(src, dst, len),
                #[cfg(all(target_arch = "x86_64", not(miri)))]
                CopyRoutine::Avx => super::x86::copy_avx(src, dst, len),
                #[cfg(all(target_arch = "x86_64", not(miri)))]
                CopyRoutine::Avx512 => super::x86::copy_avx512(src, dst, len),
                #[cfg(all(target_arch = "x86_64", not(miri)))]
                CopyRoutine::Movsb => super::x86::copy_movsb(src, dst, len),
                #[cfg(all(target_arch = "aarch64", not(miri)))]
                CopyRoutine::Pairs => super::aarch64::copy_pairs(src, dst, len),
                _ => super::copy_racing(src, dst, len),
            }
        }
    }
}
