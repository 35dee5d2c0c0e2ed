//! ABI of the kernel's Xen devices: request numbers and structures (`gntdev.h`, `gntalloc.h`, `evtchn.h`
//! of `xen-sys/Linux`), behind safe functions.
//!
//! A request number consists of the direction "none" (for every call), a letter, a number and the size of
//! the fixed structure. Structures of variable length are passed as [`Row`]s of two words: the kernel
//! copies them byte by byte and does not require an alignment.

// #syscall daemon ioctl 1=0x00184700: gntdev: mapping
// #syscall daemon ioctl 1=0x00104701: gntdev: unmapping
// #syscall daemon ioctl 1=0x00104707: gntdev, gntalloc: notice of unmapping
// #syscall daemon ioctl 1=0x00104708: gntdev: copying
// #syscall daemon ioctl 1=0x00184705: gntalloc: lending
// #syscall daemon ioctl 1=0x00104706: gntalloc: taking back
// #syscall daemon ioctl 1=0x00084501: evtchn: binding
// #syscall daemon ioctl 1=0x00044502: evtchn: allocating
// #syscall daemon ioctl 1=0x00044503: evtchn: unbinding
// #syscall daemon ioctl 1=0x00044504: evtchn: notifying
// #syscall daemon ioctl 1=0x00004505: evtchn: after an overflow

pub(super) mod window;

use core::ffi::c_void;
use std::os::fd::BorrowedFd;

use ringfence_wire::grant::{DomId, GrantStatus, Gref};
use rustix::io::Errno;
use rustix::ioctl::{Direction, Ioctl, IoctlOutput, Opcode, ioctl, opcode};

const fn number(letter: u8, number: u8, size: usize) -> Opcode {
    opcode::from_components(Direction::None, letter, number, size)
}

pub(super) const MAP_GRANT_REF: Opcode = number(b'G', 0, 24);
pub(super) const UNMAP_GRANT_REF: Opcode = number(b'G', 1, 16);
pub(super) const ALLOC_GREF: Opcode = number(b'G', 5, 24);
pub(super) const DEALLOC_GREF: Opcode = number(b'G', 6, 16);
pub(super) const SET_UNMAP_NOTIFY: Opcode = number(b'G', 7, 16);
pub(super) const GRANT_COPY: Opcode = number(b'G', 8, 16);
pub(super) const BIND_INTERDOMAIN: Opcode = number(b'E', 1, 8);
pub(super) const BIND_UNBOUND_PORT: Opcode = number(b'E', 2, 4);
pub(super) const NOTIFY: Opcode = number(b'E', 4, 4);
pub(super) const RESET: Opcode = number(b'E', 5, 0);

/// Call with a pointer argument, or none, that returns a number.
struct Call {
    request: Opcode,
    argument: *mut c_void,
}

// SAFETY: the pointer and the number are passed through unchanged. The creator of a `Call`
// guarantees that the kernel may use the target of the pointer.
unsafe impl Ioctl for Call {
    type Output = IoctlOutput;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        self.request
    }

    fn as_ptr(&mut self) -> *mut c_void {
        self.argument
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> rustix::io::Result<IoctlOutput> {
        Ok(out)
    }
}

/// Makes a call with a structure of words.
///
/// # Safety
///
/// `request` must read and write only the bytes of `argument`. The caller must guarantee the validity
/// of every pointer in `argument` that the request follows.
unsafe fn call<T>(
    fd: BorrowedFd<'_>,
    request: Opcode,
    argument: &mut [T],
) -> Result<IoctlOutput, Errno> {
    let argument = argument.as_mut_ptr().cast();
    // SAFETY: the kernel accesses only `argument`, which the caller borrows exclusively.
    unsafe { ioctl(fd, Call { request, argument }) }
}

/// Splits a `u64` into two words in memory order.
fn words_of(value: u64) -> Row {
    let [a, b, c, d, e, f, g, h] = value.to_ne_bytes();
    [u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h])]
}

fn u64_of(row: Row) -> u64 {
    let [[a, b, c, d], [e, f, g, h]] = row.map(u32::to_ne_bytes);
    u64::from_ne_bytes([a, b, c, d, e, f, g, h])
}

/// Two words of a structure.
pub(super) type Row = [u32; 2];

/// Set of references to map together: `ioctl_gntdev_map_grant_ref`, with reusable storage.
#[derive(Default)]
pub(super) struct MapRequest {
    rows: Vec<Row>,
}

/// Rows before the references: count and padding, and the returned index.
const HEADER_ROWS: usize = 2;

impl MapRequest {
    pub(super) fn begin(&mut self) {
        self.rows.clear();
        self.rows.resize(HEADER_ROWS, [0, 0]);
    }

    pub(super) fn push(&mut self, granter: DomId, gref: Gref) {
        self.rows.push([u32::from(granter.0), gref.0]);
        self.rows[0][0] += 1;
    }

    pub(super) fn count(&self) -> u32 {
        self.rows[0][0]
    }

    /// Registers the set. Returns the offset at which `fd` maps all pages in one piece.
    pub(super) fn submit(&mut self, fd: BorrowedFd<'_>) -> Result<u64, Errno> {
        // SAFETY: the kernel reads `count` references behind the header, a count that `push` maintains,
        // and writes the header.
        unsafe { call(fd, MAP_GRANT_REF, &mut self.rows) }?;
        Ok(u64_of(self.rows[1]))
    }
}

/// Removes the set that [`MapRequest::submit`] returned `index` for. Its pages must be unmapped.
pub(super) fn unmap(fd: BorrowedFd<'_>, index: u64, count: u32) -> Result<(), Errno> {
    let mut rows = [words_of(index), [count, 0]];
    // SAFETY: the kernel reads one structure of 16 bytes.
    unsafe { call(fd, UNMAP_GRANT_REF, &mut rows) }.map(drop)
}

/// Notifications to the peer when a mapping goes away for any reason: `UNMAP_NOTIFY_*`.
const NOTIFY_CLEAR_BYTE: u32 = 1;
const NOTIFY_SEND_EVENT: u32 = 2;

/// Requests a notification for the time when the page at `place` (an offset of [`MapRequest::submit`])
/// is unmapped: clears the byte at `place` if `clear`, and notifies the other end of `port`.
pub(super) fn set_unmap_notify(
    fd: BorrowedFd<'_>,
    place: u64,
    clear: bool,
    port: Option<u32>,
) -> Result<(), Errno> {
    let clear = if clear { NOTIFY_CLEAR_BYTE } else { 0 };
    let send = if port.is_some() { NOTIFY_SEND_EVENT } else { 0 };
    let mut rows = [words_of(place), [clear | send, port.unwrap_or(0)]];
    // SAFETY: the kernel reads one structure of 16 bytes.
    unsafe { call(fd, SET_UNMAP_NOTIFY, &mut rows) }.map(drop)
}

/// One end of a copy: an offset in a peer's page, or an address of this process.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct CopyEnd(u64);

impl CopyEnd {
    pub(super) fn foreign(domain: DomId, gref: Gref, offset: u16) -> CopyEnd {
        let ([a, b, c, d], [e, f]) = (gref.0.to_ne_bytes(), offset.to_ne_bytes());
        let [g, h] = domain.0.to_ne_bytes();
        CopyEnd(u64::from_ne_bytes([a, b, c, d, e, f, g, h]))
    }

    pub(super) fn local(start: *const u8) -> CopyEnd {
        CopyEnd(start.expose_provenance() as u64)
    }
}

/// Copy of one request: `gntdev_grant_copy_segment`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct CopySegment {
    source: CopyEnd,
    dest: CopyEnd,
    len: u16,
    flags: u16,
    status: i16,
    padding: u16,
}

/// Flags `GNTCOPY_source_gref` and `GNTCOPY_dest_gref`.
const SOURCE_GREF: u16 = 1;
const DEST_GREF: u16 = 2;

impl CopySegment {
    /// Creates a copy from a peer's page to an address of this process.
    pub(super) fn fetch(source: CopyEnd, dest: CopyEnd, len: u16) -> CopySegment {
        CopySegment { source, dest, len, flags: SOURCE_GREF, status: 0, padding: 0 }
    }

    /// Creates a copy from an address of this process to a peer's page.
    pub(super) fn store(source: CopyEnd, dest: CopyEnd, len: u16) -> CopySegment {
        CopySegment { source, dest, len, flags: DEST_GREF, status: 0, padding: 0 }
    }

    pub(super) fn status(&self) -> GrantStatus {
        GrantStatus::from_raw(self.status)
    }
}

/// Executes the copies, each with its own status. If the call itself fails, the statuses are invalid.
///
/// # Safety
///
/// The local end of each segment must be `len` bytes that the caller may read (source) or write
/// (destination) during the call. Nothing else may access them meanwhile.
pub(super) unsafe fn copy(fd: BorrowedFd<'_>, segments: &mut [CopySegment]) -> Result<(), Errno> {
    let count = u32::try_from(segments.len()).map_err(|_| Errno::INVAL)?;
    #[repr(C)]
    struct Batch {
        count: u32,
        segments: *mut CopySegment,
    }
    let mut batch = [Batch { count, segments: segments.as_mut_ptr() }];
    // SAFETY: the kernel reads one structure, follows its pointer to `count` segments, and writes their
    // statuses. The caller guarantees that it may access the segments' targets.
    unsafe { call(fd, GRANT_COPY, &mut batch) }.map(drop)
}

/// Flag `GNTALLOC_FLAG_WRITABLE`, in the half word after the domain's number.
const WRITABLE: u16 = 1;

/// Allocates a zeroed page in the kernel and grants it. Returns its reference and its mmap offset.
pub(super) fn alloc_gref(
    fd: BorrowedFd<'_>,
    peer: DomId,
    writable: bool,
) -> Result<(Gref, u64), Errno> {
    let [a, b] = peer.0.to_ne_bytes();
    let [c, d] = (if writable { WRITABLE } else { 0 }).to_ne_bytes();
    let mut rows = [[u32::from_ne_bytes([a, b, c, d]), 1], [0, 0], [0, 0]];
    // SAFETY: the kernel reads and writes one structure with one reference: 24 bytes with its padding.
    unsafe { call(fd, ALLOC_GREF, &mut rows) }?;
    Ok((Gref(rows[2][0]), u64_of(rows[1])))
}

/// Releases a page of [`alloc_gref`]. The kernel frees it after its last mapping is removed.
pub(super) fn dealloc_gref(fd: BorrowedFd<'_>, index: u64) -> Result<(), Errno> {
    let mut rows = [words_of(index), [1, 0]];
    // SAFETY: the kernel reads one structure of 16 bytes.
    unsafe { call(fd, DEALLOC_GREF, &mut rows) }.map(drop)
}

fn port_of(output: IoctlOutput) -> Result<u32, Errno> {
    u32::try_from(output).map_err(|_| Errno::INVAL)
}

/// Binds a port that `peer` allocated. Returns the local port.
pub(super) fn bind_interdomain(fd: BorrowedFd<'_>, peer: DomId, port: u32) -> Result<u32, Errno> {
    let mut words = [u32::from(peer.0), port];
    // SAFETY: the kernel reads one structure of 8 bytes.
    port_of(unsafe { call(fd, BIND_INTERDOMAIN, &mut words) }?)
}

/// Allocates a port that `peer` may bind.
pub(super) fn bind_unbound(fd: BorrowedFd<'_>, peer: DomId) -> Result<u32, Errno> {
    // SAFETY: the kernel reads one word.
    port_of(unsafe { call(fd, BIND_UNBOUND_PORT, &mut [u32::from(peer.0)]) }?)
}

/// Makes the other end of `port` pending.
pub(super) fn notify(fd: BorrowedFd<'_>, port: u32) -> Result<(), Errno> {
    // SAFETY: the kernel reads one word.
    unsafe { call(fd, NOTIFY, &mut [port]) }.map(drop)
}

/// Empties the buffer of pending ports after an overflow.
pub(super) fn reset(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    // SAFETY: the call takes no argument.
    unsafe { call::<u32>(fd, RESET, &mut []) }.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the numbers against those of a C compiler on x86-64.
    #[test]
    fn request_numbers_match_c_headers() {
        let numbers = [
            (MAP_GRANT_REF, 0x0018_4700),
            (UNMAP_GRANT_REF, 0x0010_4701),
            (ALLOC_GREF, 0x0018_4705),
            (DEALLOC_GREF, 0x0010_4706),
            (SET_UNMAP_NOTIFY, 0x0010_4707),
            (GRANT_COPY, 0x0010_4708),
            (BIND_INTERDOMAIN, 0x0008_4501),
            (BIND_UNBOUND_PORT, 0x0004_4502),
            (NOTIFY, 0x0004_4504),
            (RESET, 0x0000_4505),
        ];
        for (ours, header) in numbers {
            assert_eq!(u64::from(ours), header, "{ours:#x} is not {header:#x}");
        }
    }

    #[test]
    fn copy_segment_layout_matches_header() {
        assert_eq!(size_of::<CopySegment>(), 24);
        assert_eq!(core::mem::offset_of!(CopySegment, dest), 8);
        assert_eq!(core::mem::offset_of!(CopySegment, len), 16);
        assert_eq!(core::mem::offset_of!(CopySegment, flags), 18);
        assert_eq!(core::mem::offset_of!(CopySegment, status), 20);
    }

    #[test]
    fn foreign_copy_end_encodes_reference_offset_domain() {
        let CopyEnd(word) = CopyEnd::foreign(DomId(0x1122), Gref(0x3344_5566), 0x0789);
        assert_eq!(word.to_le_bytes(), [0x66, 0x55, 0x44, 0x33, 0x89, 0x07, 0x22, 0x11]);
    }

    #[test]
    fn map_request_counts_pushed_references() {
        let mut request = MapRequest::default();
        for _ in 0..2 {
            request.begin();
            request.push(DomId(3), Gref(8));
            request.push(DomId(3), Gref(u32::MAX));
            assert_eq!(request.count(), 2);
            assert_eq!(request.rows, [[2, 0], [0, 0], [3, 8], [3, u32::MAX]]);
        }
        // The size in the request number includes one reference.
        assert_eq!(size_of::<Row>() * (HEADER_ROWS + 1), 24);
    }

    #[test]
    fn index_round_trips_through_two_words() {
        for value in [0, 4096, 0x1_0000_0000, u64::MAX, 0x0123_4567_89AB_CDEF] {
            assert_eq!(u64_of(words_of(value)), value);
        }
    }
}
