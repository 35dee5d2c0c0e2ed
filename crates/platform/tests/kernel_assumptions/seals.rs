//! Seals, sizes and access modes of an arena's files.

use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, OFlags, SealFlags};
use rustix::io::Errno;

use crate::memory::{Mapped, PAGE, SEALS, arena, memfd, punch, reopen};
use crate::not_in_this_kernel;
use crate::peer::Peer;

/// Hazard: without `F_SEAL_SEAL` a peer that holds the writable descriptor can forbid punching.
#[test]
fn punch_after_peer_added_future_write_seal_is_refused() {
    let fd = memfd(1, SealFlags::SHRINK | SealFlags::GROW);
    let theirs = fd.try_clone().unwrap();
    let own = Mapped::new(&fd, 0, 1, true);
    own.set(0, 1);
    rustix::fs::fcntl_add_seals(&theirs, SealFlags::FUTURE_WRITE).unwrap();
    assert_eq!(punch(&fd, 0, 1), Err(Errno::PERM));
    assert_eq!(own.get(0), 1, "the page is not readable");
}

/// Assumption: with `F_SEAL_SEAL` no process can add a seal, and punching continues to work.
#[test]
fn seal_added_to_arena_with_seal_seal_is_refused() {
    let fd = arena(1);
    let theirs = fd.try_clone().unwrap();
    let own = Mapped::new(&fd, 0, 1, true);
    own.set(0, 1);
    for seal in [SealFlags::FUTURE_WRITE, SealFlags::WRITE, SealFlags::SEAL] {
        assert_eq!(rustix::fs::fcntl_add_seals(&theirs, seal), Err(Errno::PERM));
    }
    assert_eq!(rustix::fs::fcntl_get_seals(&theirs).unwrap(), SEALS);
    punch(&fd, 0, 1).unwrap();
    assert_eq!(own.get(0), 0);
}

/// Assumption: a read-only descriptor permits no write: no writable mapping, no later change of its
/// protection, no `pwrite`, no punch.
#[test]
fn write_through_read_only_descriptor_is_refused() {
    let fd = arena(1);
    let theirs = reopen(&fd, OFlags::RDONLY).unwrap();
    assert_eq!(Mapped::try_new(&theirs, 0, 1, true).err(), Some(Errno::ACCESS));
    let page = Mapped::new(&theirs, 0, 1, false);
    // SAFETY: asks for more rights on a mapping of our own; nothing depends on the fewer ones.
    let upgraded = unsafe {
        let both = libc::PROT_READ | libc::PROT_WRITE;
        libc::mprotect(page.address().cast(), PAGE, both)
    };
    assert_ne!(upgraded, 0, "mprotect made a read-only mapping writable");
    assert_eq!(rustix::io::pwrite(&theirs, b"x", 0), Err(Errno::BADF));
    assert_eq!(punch(&theirs, 0, 1), Err(Errno::BADF));
}

/// Hazard: a process that can open /proc/self/fd opens the read-only descriptor again for writing.
/// Therefore the sandbox of a grantee has no /proc.
#[test]
fn read_only_descriptor_reopened_through_proc_is_writable() {
    let fd = arena(1);
    let theirs = reopen(&fd, OFlags::RDONLY).unwrap();
    let again = match reopen(&theirs, OFlags::RDWR) {
        Ok(again) => again,
        Err(why) => return not_in_this_kernel(format!("it is refused: {why}")),
    };
    Mapped::new(&again, 0, 1, true).set(0, 1);
    assert_eq!(Mapped::new(&fd, 0, 1, false).get(0), 1);
}

/// Assumption: a file of exactly the announced size that cannot shrink raises no SIGBUS. Every page is
/// accessible before and after a punch, after all attempts of the other side to resize the file.
#[test]
fn access_to_every_page_of_sealed_arena_raises_no_sigbus() {
    const PAGES: usize = 16;
    let fd = arena(PAGES);
    let theirs = fd.try_clone().unwrap();
    for size in [0, PAGE, (PAGES - 1) * PAGE, PAGES * PAGE - 1] {
        assert_eq!(rustix::fs::ftruncate(&theirs, size as u64), Err(Errno::PERM));
    }
    let larger = ((PAGES + 1) * PAGE) as u64;
    assert_eq!(rustix::fs::ftruncate(&theirs, larger), Err(Errno::PERM));
    assert_eq!(rustix::io::pwrite(&theirs, b"x", larger), Err(Errno::PERM));
    let page = Mapped::new(&fd, 0, PAGES, true);
    for at in 0..PAGES {
        page.set(at, 1);
    }
    punch(&theirs, 0, PAGES).unwrap();
    for at in 0..PAGES {
        assert_eq!(page.get(at), 0);
    }
}

/// Hazard: in a file that can shrink, the next access kills each process that has it mapped.
#[test]
fn access_to_page_of_truncated_file_raises_sigbus() {
    let fd = memfd(1, SealFlags::empty());
    let theirs = fd.try_clone().unwrap();
    let victim = Peer::fork(|line| {
        let page = Mapped::new(&fd, 0, 1, false);
        line.send(page.get(0));
        line.receive();
        line.send(page.get(0));
    });
    assert_eq!(victim.receive(), 0);
    rustix::fs::ftruncate(&theirs, 0).unwrap();
    victim.send(1);
    let status = victim.wait();
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGBUS, "{status:#x}");
}

/// Hazard: a hugetlb memfd accepts the same seals, but its pages come from a pool that can be empty
/// (SIGBUS), and are punched in units of 2 MiB. Assumption: the file system type identifies it.
#[test]
fn hugetlb_memfd_reports_file_system_other_than_tmpfs() {
    const TMPFS_MAGIC: u64 = 0x0102_1994;
    let kind = |fd: &OwnedFd| u64::try_from(rustix::fs::fstatfs(fd).unwrap().f_type).unwrap();
    assert_eq!(kind(&arena(1)), TMPFS_MAGIC);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
    let huge = match rustix::fs::memfd_create("huge", flags) {
        Ok(fd) => fd,
        Err(why) => return not_in_this_kernel(format!("no hugetlb memfd: {why}")),
    };
    rustix::fs::fcntl_add_seals(&huge, SEALS).unwrap();
    assert_eq!(rustix::fs::fcntl_get_seals(&huge).unwrap(), SEALS);
    assert_ne!(kind(&huge), TMPFS_MAGIC);
}

/// Assumption: `pread` and `pwrite` on the file see the same bytes as mappings of it, with and without a
/// hole.
#[test]
fn file_io_and_mapping_of_arena_see_same_bytes() {
    let fd = arena(2);
    let page = Mapped::new(&fd, 1, 1, true);
    let read = || {
        let mut bytes = [0xEEu8; 8];
        assert_eq!(rustix::io::pread(&fd, &mut bytes, PAGE as u64).unwrap(), 8);
        u64::from_le_bytes(bytes)
    };
    assert_eq!(read(), 0, "a hole reads as zeros");
    assert_eq!(rustix::io::pwrite(&fd, &5u64.to_le_bytes(), PAGE as u64).unwrap(), 8);
    assert_eq!((read(), page.get(0)), (5, 5));
    page.set(0, 6);
    assert_eq!(read(), 6);
    punch(&fd, 1, 1).unwrap();
    assert_eq!((read(), page.get(0)), (0, 0));
}
