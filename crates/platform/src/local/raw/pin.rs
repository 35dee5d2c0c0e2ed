//! Adversary that pins a part of a huge page: the kernel cannot take that part out of the file.

// #syscall none: a peer of tests, which breaks the rules

use std::fs::File;
use std::io::{self, PipeReader, Read};
use std::os::fd::AsRawFd;
use std::ptr::null_mut;

use ringfence_memory::{HUGE_PAGE, PAGE_SIZE};

/// Page of an arena that a pipe holds by reference. The pin ends when the value is dropped.
#[derive(Debug)]
pub struct PinnedPage {
    held: PipeReader,
}

/// Mapping of the adversary, removed on drop. The pin outlives it.
struct View {
    room: *mut libc::c_void,
    len: usize,
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: the range was mapped for this value, and nothing refers to it any more.
        unsafe { libc::munmap(self.room, self.len) };
    }
}

impl PinnedPage {
    /// Collapses the first pages of `file` into one huge page, and pins page number `page` of them. The file has at
    /// least 512 pages, each of which was touched.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error. A kernel can refuse `MADV_COLLAPSE` for files in memory.
    pub fn in_huge_page(file: &impl AsRawFd, page: usize) -> io::Result<PinnedPage> {
        assert!(page < HUGE_PAGE / PAGE_SIZE, "a page of the first huge page");
        let check = |failed: bool| {
            if failed { Err(io::Error::last_os_error()) } else { Ok(()) }
        };
        let (private, none) = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, libc::PROT_NONE);
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let room = unsafe { libc::mmap(null_mut(), 2 * HUGE_PAGE, none, private, -1, 0) };
        check(room == libc::MAP_FAILED)?;
        let view = View { room, len: 2 * HUGE_PAGE };
        let skip = room.addr().next_multiple_of(HUGE_PAGE) - room.addr();
        // SAFETY: `skip` is less than HUGE_PAGE, so the huge page lies in the reservation of this function.
        let start = unsafe {
            let start = room.byte_add(skip);
            let (read, shared) = (libc::PROT_READ, libc::MAP_SHARED | libc::MAP_FIXED);
            check(libc::mmap(start, HUGE_PAGE, read, shared, file.as_raw_fd(), 0) != start)?;
            start
        };
        // SAFETY: advice about the mapping made above.
        check(unsafe { libc::madvise(start, HUGE_PAGE, libc::MADV_COLLAPSE) } != 0)?;
        let (held, into) = io::pipe()?;
        // SAFETY: the page lies in the mapping. The kernel takes a reference to it.
        let pinned = unsafe {
            let vec =
                libc::iovec { iov_base: start.byte_add(page * PAGE_SIZE), iov_len: PAGE_SIZE };
            libc::vmsplice(into.as_raw_fd(), &raw const vec, 1, 0)
        };
        check(usize::try_from(pinned) != Ok(PAGE_SIZE))?;
        drop(view);
        Ok(PinnedPage { held })
    }

    /// Returns the first word of the page as the pin sees it now, and ends the pin.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn read(mut self) -> io::Result<u64> {
        let mut bytes = [0; PAGE_SIZE];
        self.held.read_exact(&mut bytes)?;
        let first = bytes.first_chunk().copied().unwrap_or_default();
        Ok(u64::from_le_bytes(first))
    }
}

/// Setting of huge pages for files in memory, restored on drop.
#[derive(Debug)]
pub struct HugePageSetting {
    before: String,
}

impl HugePageSetting {
    const FILE: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

    /// Returns the present setting: `never`, `advise` and others.
    ///
    /// # Errors
    ///
    /// Fails on a kernel without huge pages.
    pub fn present() -> io::Result<String> {
        let text = std::fs::read_to_string(Self::FILE)?;
        let chosen = text.split('[').nth(1).and_then(|rest| rest.split(']').next());
        chosen.map(str::to_owned).ok_or_else(|| io::Error::other(text.clone()))
    }

    /// Changes the setting. Needs root.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn set(to: &str) -> io::Result<HugePageSetting> {
        let before = Self::present()?;
        let file = File::options().write(true).open(Self::FILE)?;
        io::Write::write_all(&mut &file, to.as_bytes())?;
        Ok(HugePageSetting { before })
    }
}

impl Drop for HugePageSetting {
    fn drop(&mut self) {
        // The setting was written once already, so it can be written.
        let _ = std::fs::write(Self::FILE, &self.before);
    }
}
