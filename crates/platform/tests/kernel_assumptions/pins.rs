//! Pinned pages: a page that the kernel holds for a peer keeps its old content after a punch, and never
//! shows the content that is lent later.

use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};

use io_uring::{IoUring, opcode, types};
use rustix::fs::SeekFrom;

use crate::memory::{Mapped, PAGE, arena, punch};
use crate::{not_allowed_here, not_in_this_kernel};

const OLD: u64 = 0x0101_0101_0101_0101;
const NEW: u64 = 0x0202_0202_0202_0202;
const LATE: u64 = 0x0303_0303_0303_0303;

/// Page that holds `OLD`, mapped by the granter and by the grantee.
struct Shared {
    fd: OwnedFd,
    granter: Mapped,
    grantee: Mapped,
}

impl Shared {
    fn new() -> Shared {
        let fd = arena(1);
        let (granter, grantee) = (Mapped::new(&fd, 0, 1, true), Mapped::new(&fd, 0, 1, true));
        granter.set(0, OLD);
        Shared { fd, granter, grantee }
    }

    /// Revokes by force and lends the page again. The second step comes too early on purpose.
    fn revoke_and_lend_again(&self) {
        punch(&self.fd, 0, 1).unwrap();
        assert_eq!(self.granter.get(0), 0);
        self.granter.set(0, NEW);
    }
}

fn pipe() -> (PipeReader, PipeWriter) {
    std::io::pipe().unwrap()
}

fn read_word(from: &mut PipeReader) -> u64 {
    let mut bytes = [0; 8];
    from.read_exact(&mut bytes).unwrap();
    u64::from_le_bytes(bytes)
}

/// Assumption: a page that `vmsplice` gave to a pipe by reference keeps its old content.
#[test]
fn vmspliced_page_keeps_old_content_after_punch() {
    let shared = Shared::new();
    let (mut from, into) = pipe();
    let vec = libc::iovec { iov_base: shared.grantee.address().cast(), iov_len: PAGE };
    // SAFETY: the page stays mapped; the kernel takes a reference to it.
    let gone = unsafe { libc::vmsplice(into.as_raw_fd(), &raw const vec, 1, 0) };
    assert_eq!(gone, 4096);
    shared.revoke_and_lend_again();
    assert_eq!(read_word(&mut from), OLD, "by vmsplice");
    assert_eq!(shared.grantee.get(0), NEW, "a mapping follows the file, a pin does not");
}

/// Assumption: a page that was spliced from the arena's file keeps its old content.
#[test]
fn page_spliced_from_arena_keeps_old_content_after_punch() {
    let shared = Shared::new();
    let (mut from, into) = pipe();
    let mut offset: libc::loff_t = 0;
    let none = core::ptr::null_mut();
    // SAFETY: the two descriptors are open, and the offset is ours.
    let gone = unsafe {
        let (fd, into) = (shared.fd.as_raw_fd(), into.as_raw_fd());
        libc::splice(fd, &raw mut offset, into, none, PAGE, 0)
    };
    assert_eq!(gone, 4096);
    shared.revoke_and_lend_again();
    assert_eq!(read_word(&mut from), OLD);
}

/// Creates an io_uring. Returns `None` after it has reported why there is none.
fn ring() -> Option<IoUring> {
    match IoUring::new(4) {
        Ok(ring) => Some(ring),
        Err(e) if e.raw_os_error() == Some(libc::ENOSYS) => {
            not_in_this_kernel("no io_uring");
            None
        }
        Err(e) => {
            not_allowed_here(format!("io_uring is refused ({e}): set kernel.io_uring_disabled=0"));
            None
        }
    }
}

/// Creates an io_uring with `page` as a registered buffer.
fn registered(page: &Mapped) -> Option<IoUring> {
    let ring = ring()?;
    let buffer = libc::iovec { iov_base: page.address().cast(), iov_len: PAGE };
    // SAFETY: the page stays mapped until the ring is gone: each test drops the ring first.
    unsafe { ring.submitter().register_buffers(&[buffer]) }.unwrap();
    Some(ring)
}

fn submit(ring: &mut IoUring, entry: &io_uring::squeue::Entry) {
    // SAFETY: the entry names the registered buffer and descriptors that are open until it is done.
    unsafe { ring.submission().push(entry) }.unwrap();
    ring.submit().unwrap();
}

fn completed(ring: &mut IoUring) -> i32 {
    ring.submit_and_wait(1).unwrap();
    ring.completion().next().unwrap().result()
}

/// Assumption: a buffer registered with an io_uring keeps its old content.
#[test]
fn registered_io_uring_buffer_keeps_old_content_after_punch() {
    let shared = Shared::new();
    let Some(mut ring) = registered(&shared.grantee) else { return };
    shared.revoke_and_lend_again();
    let (mut from, into) = pipe();
    let at = shared.grantee.address().cast_const();
    let fd = types::Fd(into.as_raw_fd());
    submit(&mut ring, &opcode::WriteFixed::new(fd, at, 4096, 0).build());
    assert_eq!(completed(&mut ring), 4096);
    assert_eq!(read_word(&mut from), OLD);
    drop(ring);
}

/// Assumption: a read in flight into a pinned page completes into the old page. Its data does not
/// appear in the page that was lent since.
#[test]
fn read_in_flight_into_pinned_page_does_not_reach_page_lent_again() {
    let shared = Shared::new();
    let Some(mut ring) = registered(&shared.grantee) else { return };
    let (from, mut into) = pipe();
    let fd = types::Fd(from.as_raw_fd());
    submit(&mut ring, &opcode::ReadFixed::new(fd, shared.grantee.address(), 4096, 0).build());
    shared.revoke_and_lend_again();
    into.write_all(&LATE.to_le_bytes()).unwrap();
    assert_eq!(completed(&mut ring), 8);
    assert_eq!((shared.granter.get(0), shared.grantee.get(0)), (NEW, NEW));
    drop(ring);
}

/// Hazard: a read in flight into memory that is *not* pinned writes to the page that is mapped when the
/// data arrives. Therefore a page in use is not lent again after a forced revocation until its user has
/// released it.
#[test]
fn read_in_flight_into_unpinned_mapping_reaches_page_lent_again() {
    let shared = Shared::new();
    let (from, mut into) = pipe();
    let at = shared.grantee.address().addr();
    let reader = std::thread::spawn(move || {
        let at = core::ptr::with_exposed_provenance_mut::<libc::c_void>(at);
        // SAFETY: the page stays mapped until this thread was joined; nothing refers to it but
        // atomics, and that a peer's bytes race with them is the point.
        unsafe { libc::read(from.as_raw_fd(), at, 8) }
    });
    shared.grantee.address().expose_provenance();
    // The thread may not wait yet. The result is the same, because `read` names the address in both cases.
    shared.revoke_and_lend_again();
    into.write_all(&LATE.to_le_bytes()).unwrap();
    assert_eq!(reader.join().unwrap(), 8);
    assert_eq!(shared.granter.get(0), LATE);
}

/// Hazard: a peer collapses the arena into a huge page and pins a part of it. The kernel then cannot remove
/// the punched page from the file, and the pin sees the content that is lent there next. Therefore the
/// sandbox denies MADV_COLLAPSE, and a granter lends no page again that is still in the file. The test reports
/// whether this kernel permits the advice. The content is destroyed in both cases.
///
/// Assumption: SEEK_DATA tells whether the page has left the file.
#[test]
fn punch_of_pinned_page_in_collapsed_arena_destroys_only_that_page() {
    const HUGE: usize = 512;
    const VICTIM: usize = 5;
    const MADV_COLLAPSE: i32 = 25;
    let fd = arena(HUGE);
    let granter = Mapped::new(&fd, 0, HUGE, true);
    (0..HUGE).for_each(|page| granter.set(page, OLD));
    let grantee = aligned(&fd, HUGE);
    (0..HUGE).for_each(|page| assert_eq!(grantee.get(page), OLD));
    // SAFETY: advice on a mapping of our own.
    let refused =
        unsafe { libc::madvise(grantee.address().cast(), HUGE * PAGE, MADV_COLLAPSE) } != 0;
    if refused {
        let why = std::io::Error::last_os_error();
        return not_in_this_kernel(format!("MADV_COLLAPSE of a memfd is refused: {why}"));
    }
    let (mut from, into) = pipe();
    let at = grantee.word(VICTIM).as_ptr();
    let vec = libc::iovec { iov_base: at.cast(), iov_len: PAGE };
    // SAFETY: the page stays mapped; the kernel takes a reference to it.
    let gone = unsafe { libc::vmsplice(into.as_raw_fd(), &raw const vec, 1, 0) };
    assert_eq!(gone, 4096);
    punch(&fd, VICTIM, 1).unwrap();
    let start = (VICTIM * PAGE) as u64;
    let is_kept = rustix::fs::seek(&fd, SeekFrom::Data(start)).unwrap() == start;
    assert_eq!((granter.get(VICTIM), grantee.get(VICTIM)), (0, 0), "the content is destroyed");
    assert_eq!(
        (granter.get(VICTIM - 1), granter.get(VICTIM + 1)),
        (OLD, OLD),
        "other pages changed"
    );
    granter.set(VICTIM, NEW);
    match (read_word(&mut from), is_kept) {
        (OLD, false) => eprintln!("this kernel splits a collapsed page with a pinned part"),
        (NEW, true) => eprintln!("this kernel keeps the punched part of a pinned huge page"),
        (other, is_kept) => panic!("the pin holds {other:#x}; kept by the file: {is_kept}"),
    }
}

/// Maps `pages` pages at a multiple of their total length.
fn aligned(fd: &OwnedFd, pages: usize) -> Mapped {
    let len = pages * PAGE;
    // SAFETY: address space of our own; then a mapping over a part of it, and the rest given back.
    unsafe {
        let anywhere = core::ptr::null_mut();
        let (none, private) = (libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let room = libc::mmap(anywhere, 2 * len, none, private, -1, 0);
        assert_ne!(room, libc::MAP_FAILED);
        let skip = room.addr().next_multiple_of(len) - room.addr();
        let start = room.byte_add(skip);
        let (both, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        let mapped = libc::mmap(start, len, both, shared | libc::MAP_FIXED, fd.as_raw_fd(), 0);
        assert_eq!(mapped, start);
        libc::munmap(room, skip);
        libc::munmap(start.byte_add(len), len - skip);
        Mapped::adopt(start.cast(), len)
    }
}
