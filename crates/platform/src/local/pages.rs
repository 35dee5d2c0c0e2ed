//! Pages of an arena file: the mapping, the free list, and the destruction of single pages.
//!
//! [`Pages::punch`] removes pages from the file, and with them from every mapping of every process. A process that
//! pinned a page (a read in flight, `vmsplice`) keeps the old page, which is no longer part of the file. This fails
//! for a part of a *huge* page: while a part is pinned the kernel cannot split it. It zeroes the punched part and
//! leaves it in the file, where the pin would see what is lent next. Huge pages come from three sources: this side asks
//! for them ([`PageSize::Huge`]), the system gives them to every file (`shmem_enabled` is `always`), or a peer
//! collapses small ones (`MADV_COLLAPSE`). So every punch is checked: a page that is still in the file afterwards is
//! *kept*, and is not lent again before a later punch has removed it.

// #syscall driver,frontend,card,daemon fallocate: revoking: punching pages out of one's own arena
// #syscall driver,frontend,card lseek 2=SEEK_DATA: whether a punched page has left the file

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering;

use ringfence_memory::{HUGE_PAGE, LentSlice, Mapping, PAGE_SIZE, Protection};
use ringfence_sys::numbers::bounded;
use rustix::fs::{FallocateFlags, SeekFrom};

use super::arena;
use crate::grants::{LendError, RevokeError};

/// Size of the pages that hold lent memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PageSize {
    /// Pages of 4 KiB.
    #[default]
    Small,
    /// Pages of 2 MiB.
    Huge,
}

/// Pages of one kind: the file, its mapping, and the free pages.
pub(crate) struct Pages {
    file: OwnedFd,
    memory: LentSlice,
    size: PageSize,
    pub(super) free: Vec<u32>,
    pub(super) generations: Vec<u32>,
}

/// Result of a punch.
#[derive(Debug, Default)]
pub(crate) struct Punched {
    /// Number of system calls that removed pages.
    pub(crate) calls: u64,
    /// Pages whose content was destroyed, but which are still part of the file. Sorted.
    pub(crate) kept: Vec<u32>,
}

impl Pages {
    /// Maps the `count` pages of `file`, which nobody has touched yet. `wanted` is a wish: huge pages are used only
    /// where the system allows them for shared memory.
    pub(crate) fn new(file: OwnedFd, count: u32, wanted: PageSize) -> std::io::Result<Pages> {
        let bytes = count.max(1) as usize * PAGE_SIZE;
        let huge = match wanted {
            PageSize::Huge => map_huge(&file, bytes)?,
            PageSize::Small => None,
        };
        let (mapping, size) = match huge {
            Some(mapping) => (mapping, PageSize::Huge),
            None => (Mapping::new(&file, 0, bytes, Protection::ReadWrite)?, PageSize::Small),
        };
        let memory = mapping.lent();
        // Last in, first out: the lowest page is used first, and the page with the warmest cache next.
        Ok(Pages {
            file,
            memory,
            size,
            free: (0..count).rev().collect(),
            generations: vec![0; count as usize],
        })
    }

    /// Creates `count` pages that only this process reaches.
    pub(crate) fn anonymous(name: &str, count: u32) -> std::io::Result<Pages> {
        let file = arena::sealed_memfd(name, u64::from(count.max(1)) * PAGE_SIZE as u64)?;
        Pages::new(file, count, PageSize::Small)
    }

    pub(crate) fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Returns the size of the pages that the kernel gave the file.
    pub(super) fn size(&self) -> PageSize {
        self.size
    }

    pub(crate) fn slice(&self, page: u32) -> Result<LentSlice, LendError> {
        let offset = page as usize * PAGE_SIZE;
        self.memory.slice(offset, PAGE_SIZE).map_err(|_| LendError::NoPage { limit: page })
    }

    /// Returns the number of revocations of a page.
    pub(crate) fn generation(&self, page: u32) -> u32 {
        self.generations.get(page as usize).copied().unwrap_or(0)
    }

    /// Counts a revocation of `pages`.
    pub(crate) fn next_generation(&mut self, pages: &[u32]) {
        for page in pages {
            if let Some(generation) = self.generations.get_mut(*page as usize) {
                *generation = generation.wrapping_add(1);
            }
        }
    }

    /// Destroys the content of `pages` in every mapping of every process, with one call for each run of
    /// neighbours, and reports the pages that are still part of the file.
    pub(crate) fn punch(&self, pages: &mut [u32]) -> Result<Punched, RevokeError> {
        let mut done = Punched::default();
        pages.sort_unstable();
        for run in pages.chunk_by(|a, b| a + 1 == *b) {
            let (Some(&first), Some(&last)) = (run.first(), run.last()) else { continue };
            let start = byte_offset(first);
            let len = byte_offset(last - first + 1);
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&self.file, flags, start, len)
                .map_err(|e| RevokeError::System(e.raw_os_error()))?;
            done.calls += 1;
            self.find_kept(start, start + len, &mut done.kept)?;
        }
        Ok(done)
    }

    /// Appends the pages between two offsets that the file has.
    fn find_kept(&self, mut at: u64, end: u64, kept: &mut Vec<u32>) -> Result<(), RevokeError> {
        while at < end {
            let found = match rustix::fs::seek(&self.file, SeekFrom::Data(at)) {
                Ok(found) => found,
                // No page up to the end of the file.
                Err(rustix::io::Errno::NXIO) => return Ok(()),
                Err(e) => return Err(RevokeError::System(e.raw_os_error())),
            };
            if found >= end {
                return Ok(());
            }
            // Within the arena, whose pages have 32-bit numbers.
            kept.push(bounded(found / PAGE_SIZE as u64, u32::MAX));
            at = found + PAGE_SIZE as u64;
        }
        Ok(())
    }
}

fn byte_offset(page: u32) -> u64 {
    u64::from(page) * PAGE_SIZE as u64
}

/// Maps a peer's arena file, which was checked. One that is in huge pages has all its blocks from the start; it is
/// mapped where these fit. The size that the file claims decides about nothing else.
pub(super) fn map_arena(
    file: &OwnedFd,
    bytes: usize,
    protection: Protection,
) -> std::io::Result<Mapping> {
    let blocks = rustix::fs::fstat(file)?.st_blocks.max(0).cast_unsigned();
    if blocks.saturating_mul(512) >= bytes as u64 {
        Mapping::whole(file, bytes, protection)
    } else {
        Mapping::new(file, 0, bytes, protection)
    }
}

/// Asks for huge pages, touches each, and looks at what the kernel chose: after the touch of one word a whole huge
/// page is part of the file, or a small one alone. Returns the mapping if all are huge.
fn map_huge(file: &OwnedFd, bytes: usize) -> std::io::Result<Option<Mapping>> {
    let mapping = Mapping::whole(file, bytes, Protection::ReadWrite)?;
    let memory = mapping.lent();
    let units = memory.len() / HUGE_PAGE;
    let is_huge = |unit: usize| {
        let start = unit * HUGE_PAGE;
        let hole = memory
            .store_u32(start, 0, Ordering::Relaxed)
            .ok()
            .and_then(|()| rustix::fs::seek(file, SeekFrom::Hole(start as u64)).ok());
        hole.is_some_and(|hole| hole >= (start + HUGE_PAGE) as u64)
    };
    let found = units > 0 && mapping.advise_huge().is_ok() && (0..units).all(is_huge);
    Ok(found.then_some(mapping))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::raw::pin::{HugePageSetting, PinnedPage};

    const COUNT: u32 = 1024;

    fn pages(wanted: PageSize) -> Pages {
        let file = arena::sealed_memfd("t", byte_offset(COUNT)).unwrap();
        Pages::new(file, COUNT, wanted).unwrap()
    }

    fn tag(pages: &Pages, page: u32) -> u64 {
        pages.slice(page).unwrap().load_u64(0, Ordering::SeqCst).unwrap()
    }

    fn fill(pages: &Pages) {
        for page in 0..COUNT {
            pages.slice(page).unwrap().store_u64(0, 1, Ordering::SeqCst).unwrap();
        }
    }

    /// Returns `true` if the kernel has a reserve of free memory in pieces of a huge page, which the tenth number of a zone counts.
    fn has_free_huge_pages() -> bool {
        let zones = std::fs::read_to_string("/proc/buddyinfo").unwrap_or_default();
        let of_zone = |zone: &str| -> u32 {
            let pieces = zone.split_whitespace().skip(4 + 9);
            pieces.filter_map(|count| count.parse::<u32>().ok()).sum()
        };
        zones.lines().filter(|zone| !zone.contains(" DMA ")).map(of_zone).sum::<u32>() >= 16
    }

    /// Checks punches of single pages and of runs, in pages of any size.
    fn check_punches(pages: &Pages) {
        fill(pages);
        let punched = pages.punch(&mut [7, 600, 6, 5, COUNT - 1]).unwrap();
        assert_eq!((punched.calls, punched.kept), (3, vec![]));
        let empty: Vec<u32> = (0..COUNT).filter(|page| tag(pages, *page) == 0).collect();
        assert_eq!(empty, [5, 6, 7, 600, COUNT - 1]);
    }

    #[test]
    fn huge_pages_are_used_where_the_system_allows_them_and_small_ones_elsewhere() {
        let small = pages(PageSize::Small);
        assert_eq!(small.size(), PageSize::Small);
        check_punches(&small);
        let check = |allowed: bool| {
            let mut huge = pages(PageSize::Huge);
            for _ in 0..50 {
                if huge.size() == PageSize::Huge || !allowed {
                    break;
                }
                // Other programs may have left no memory in one piece. Root can have it joined.
                let _ = std::fs::write("/proc/sys/vm/compact_memory", "1");
                huge = pages(PageSize::Huge);
            }
            if allowed && huge.size() == PageSize::Small && !has_free_huge_pages() {
                return eprintln!("SKIPPED: huge pages: no memory is free in one piece");
            }
            let expected = if allowed { PageSize::Huge } else { PageSize::Small };
            assert_eq!(huge.size(), expected, "{:?}", HugePageSetting::present());
            check_punches(&huge);
        };
        match HugePageSetting::present() {
            Ok(present) => check(!["never", "deny"].contains(&&*present)),
            Err(_) => check(false),
        }
        for (setting, allowed) in [("advise", true), ("never", false)] {
            match HugePageSetting::set(setting) {
                Ok(_restored_on_drop) => check(allowed),
                Err(error) => eprintln!("SKIPPED: huge pages set to {setting} ({error})"),
            }
        }
    }

    #[test]
    fn arena_shorter_than_a_huge_page_stays_in_small_pages() {
        let file = arena::sealed_memfd("t", byte_offset(511)).unwrap();
        assert_eq!(Pages::new(file, 511, PageSize::Huge).unwrap().size(), PageSize::Small);
    }

    #[test]
    fn page_pinned_in_huge_page_is_kept_by_the_file_until_pin_ends() {
        let pages = pages(PageSize::Small);
        fill(&pages);
        let pin = match PinnedPage::in_huge_page(&pages.file, 9) {
            Ok(pin) => pin,
            Err(error) => return eprintln!("SKIPPED: MADV_COLLAPSE is refused ({error})"),
        };
        let punched = pages.punch(&mut [8, 9, 10, 700]).unwrap();
        assert_eq!(punched.calls, 2);
        assert!(punched.kept.contains(&9), "{:?}", punched.kept);
        assert!(!punched.kept.contains(&700), "{:?}", punched.kept);
        assert_eq!([8, 9, 10, 700].map(|page| tag(&pages, page)), [0; 4]);
        assert_eq!([7, 11, 701].map(|page| tag(&pages, page)), [1; 3]);
        assert_eq!(pin.read().unwrap(), 0, "the content was destroyed");
        assert_eq!(pages.punch(&mut [8, 9, 10]).unwrap().kept, []);
    }
}
