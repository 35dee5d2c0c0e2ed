//! Comparison of every routine with a loop over bytes.

use super::{CopyRoutine, portable};
use crate::PAGE_SIZE;

/// Greatest length that is compared, in bytes. Miri takes a small one.
const LEN_MAX: usize = if cfg!(miri) { 80 } else { 8192 };
/// Number of pages of a buffer, without its guard pages.
const PAGES: usize = LEN_MAX.div_ceil(PAGE_SIZE) + 1;

/// Copy of `len` bytes between two addresses.
type Copy<'a> = dyn Fn(*const u8, *mut u8, usize) + 'a;

/// Pages between two that cannot be accessed.
struct Guarded {
    start: *mut u8,
    len: usize,
    #[cfg(not(miri))]
    whole: *mut u8,
    #[cfg(miri)]
    _memory: Vec<u8>,
}

impl Guarded {
    #[cfg(not(miri))]
    fn new() -> Guarded {
        use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
        let len = PAGES * PAGE_SIZE;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new private mapping at an address that the kernel chooses.
        let whole = unsafe {
            mmap_anonymous(core::ptr::null_mut(), len + 2 * PAGE_SIZE, access, MapFlags::PRIVATE)
        };
        let whole: *mut u8 = whole.unwrap().cast();
        let start = whole.wrapping_add(PAGE_SIZE);
        for guard in [whole, start.wrapping_add(len)] {
            // SAFETY: one page of the mapping just made, which nothing refers to.
            unsafe { mprotect(guard.cast(), PAGE_SIZE, MprotectFlags::empty()) }.unwrap();
        }
        Guarded { start, len, whole }
    }

    #[cfg(miri)]
    fn new() -> Guarded {
        let mut memory = vec![0; PAGES * PAGE_SIZE];
        Guarded { start: memory.as_mut_ptr(), len: memory.len(), _memory: memory }
    }

    fn fill(&self, byte: impl Fn(usize) -> u8) {
        for at in 0..self.len {
            // SAFETY: within the accessible pages.
            unsafe { self.start.add(at).write(byte(at)) };
        }
    }

    fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= self.len);
        // SAFETY: within the accessible pages, which nothing writes meanwhile.
        unsafe { core::slice::from_raw_parts(self.start.add(at), len) }.to_vec()
    }
}

#[cfg(not(miri))]
impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the whole mapping of `new`, to which no reference is left.
        unsafe { rustix::mm::munmap(self.whole.cast(), self.len + 2 * PAGE_SIZE) }.unwrap();
    }
}

/// Copies every length up to [`LEN_MAX`], flush with each guard page and at other alignments.
fn copies_equal_those_of_a_loop(name: &str, copy: &Copy<'_>) {
    const FILL: u8 = 0xEE;
    let (source, target) = (Guarded::new(), Guarded::new());
    source.fill(|at| (at.wrapping_mul(31) ^ (at >> 8).wrapping_mul(7)).to_le_bytes()[0]);
    let mut random = 0x9E37_79B9_u32;
    let mut next = |below: usize| {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (random >> 8) as usize % below
    };
    for len in 0..=LEN_MAX {
        let (first, last) = (0, source.len - len);
        let places = [
            (first, first),
            (last, last),
            (first, last),
            (last, first),
            (next(64).min(last), next(64).min(last)),
            (last - next(64).min(last), last - next(64).min(last)),
        ];
        for (from, to) in places {
            let before = to.min(40);
            let after = (target.len - to - len).min(40);
            for at in to - before..to + len + after {
                // SAFETY: within the accessible pages.
                unsafe { target.start.add(at).write(FILL) };
            }
            copy(source.start.wrapping_add(from), target.start.wrapping_add(to), len);
            assert!(
                target.bytes(to, len) == source.bytes(from, len),
                "{name}: {len} bytes from {from} to {to}"
            );
            let around =
                [target.bytes(to - before, before), target.bytes(to + len, after)].concat();
            assert!(around.iter().all(|byte| *byte == FILL), "{name}: around {len} bytes at {to}");
        }
    }
}

#[test]
fn every_routine_at_every_length_copies_exact_range() {
    for routine in CopyRoutine::available() {
        copies_equal_those_of_a_loop(routine.name(), &|src, dst, len| {
            // SAFETY: the ranges lie within two buffers.
            unsafe { routine.copy_raw(src, dst, len) }
        });
    }
}

#[test]
fn portable_routine_at_every_length_copies_exact_range() {
    copies_equal_those_of_a_loop("portable", &|src, dst, len| {
        // SAFETY: the ranges lie within two buffers.
        unsafe { portable::copy(src, dst, len) }
    });
}

#[test]
fn routine_by_name_copies_as_many_bytes_as_both_have() {
    for routine in CopyRoutine::available() {
        let (source, mut target) = ([7u8; 200], [1u8; 150]);
        routine.copy(&source, &mut target);
        assert_eq!(target, [7; 150], "{}", routine.name());
        let mut longer = [1u8; 250];
        routine.copy(&source, &mut longer);
        assert!(longer[..200].iter().all(|b| *b == 7) && longer[200..].iter().all(|b| *b == 1));
    }
}
