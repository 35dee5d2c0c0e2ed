//! Code pages of this program: a process that is up gives back those that only its start needed.

// #syscall none: the allocator's call, which every list has

use std::ffi::{c_int, c_void};

/// `PF_W` of elf.h: the segment is writable.
const WRITABLE: u32 = 2;
/// `PT_LOAD` of elf.h: the segment is mapped.
const LOADED: u32 = 1;

/// Unmaps the program's code and constants. The kernel maps a page again at its next use, without I/O while the page is
/// in the page cache. The start of a process touches most of the program, its steady state a small part.
pub fn unmap() {
    // SAFETY: the callback has the type that the C library expects, and uses its arguments during the call only.
    unsafe { libc::dl_iterate_phdr(Some(unmap_first), std::ptr::null_mut()) };
}

/// Unmaps the segments of the first object, which is the program, and ends the iteration.
unsafe extern "C" fn unmap_first(
    info: *mut libc::dl_phdr_info,
    _size: libc::size_t,
    _data: *mut c_void,
) -> c_int {
    // SAFETY: the C library passes a valid pointer. Its table of program headers has `dlpi_phnum` entries.
    let (base, headers) = unsafe {
        let info = &*info;
        (info.dlpi_addr, std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()))
    };
    // The C library has this number since the start. Other ways read a file or make a system call that no list has.
    // SAFETY: the call takes a number, and has no effect.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) }.max(4096).cast_unsigned();
    for header in headers.iter().filter(|h| h.p_type == LOADED && h.p_flags & WRITABLE == 0) {
        let first = (base + header.p_vaddr).next_multiple_of(page);
        let end = (base + header.p_vaddr + header.p_memsz) / page * page;
        let Ok(length) = usize::try_from(end.saturating_sub(first)) else { continue };
        let Ok(first) = usize::try_from(first) else { continue };
        let address = std::ptr::with_exposed_provenance_mut::<c_void>(first);
        // SAFETY: the segment is a private mapping of the program's file that nothing writes, so a page has the same
        // bytes when it is mapped again. Whole pages inside the segment are unmapped. A failure leaves them mapped.
        unsafe { libc::madvise(address, length, libc::MADV_DONTNEED) };
    }
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the resident part of the program's executable segment in KiB.
    fn resident_code() -> u64 {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let program = std::env::current_exe().unwrap();
        let mut is_code = false;
        let mut sum = 0;
        for line in maps.lines() {
            let mut words = line.split_ascii_whitespace();
            let first = words.next().unwrap();
            if !first.ends_with(':') {
                let rights = words.next().unwrap();
                is_code = rights == "r-xp" && line.ends_with(program.to_str().unwrap());
            } else if is_code && first == "Rss:" {
                sum += words.next().unwrap().parse::<u64>().unwrap();
            }
        }
        sum
    }

    #[test]
    fn unmapped_code_runs_on_with_fewer_pages() {
        let before = resident_code();
        unmap();
        let after = resident_code();
        // Other tests run at the same time, and map what they need.
        assert!(after < before, "{before} KiB, then {after} KiB");
    }
}
