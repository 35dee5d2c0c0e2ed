//! ABI of the device of grant windows (`linux/grant-window/ringfence-window.h`), behind safe functions.
//!
//! An open file is one window and has one role: `create` makes it the granter's end, `register` the grantee's.

// #syscall daemon ioctl 1=0xc00c7741: grant windows: creating, for each backend
// #syscall daemon ioctl 1=0xc0107742: grant windows: registering
// #syscall daemon ioctl 1=0x40107743: grant windows: issuing
// #syscall daemon ioctl 1=0x40107744: grant windows: revoking

use std::os::fd::BorrowedFd;

use ringfence_memory::DeviceRange;
use ringfence_wire::grant::{Access, DomId, Gref};
use rustix::io::Errno;
use rustix::ioctl::{Direction, Opcode, opcode};

use super::call;

/// Letter in the number of each request.
const LETTER: u8 = b'w';

/// Offset at which the grantee maps the pages, by reference. The table is at offset 0.
pub(in crate::xen) const PAGES_OFFSET: u64 = 1 << 30;

/// Flag of an issue: the grantee can only read.
const READ_ONLY: u32 = 1;

/// Flag of a revocation: even if the grantee uses the page.
const FORCE: u32 = 1;

/// Statuses of the hypervisor (`GNTST_*`) that the engine distinguishes.
pub(in crate::xen) mod status {
    pub(in crate::xen) const OKAY: i32 = 0;
    /// Reference that is not issued.
    pub(in crate::xen) const BAD_GREF: i32 = -3;
    /// Window that the grantee has destroyed.
    pub(in crate::xen) const BAD_HANDLE: i32 = -4;
    /// Flush rate exceeded, or the grantee has not registered the window yet.
    pub(in crate::xen) const AGAIN: i32 = -12;
    /// Limit reached; of the module: locked memory.
    pub(in crate::xen) const NO_SPACE: i32 = -13;
    /// Page in use by the grantee.
    pub(in crate::xen) const BUSY: i32 = -14;
}

/// Argument of a creation: `struct rfwin_create`.
#[repr(C)]
struct Create {
    grantee: u16,
    pad: u16,
    entries: u32,
    handle: u32,
}

/// Argument of a registration: `struct rfwin_register`.
#[repr(C)]
struct Register {
    granter: u16,
    pad: u16,
    handle: u32,
    entries: u32,
    table_pages: u32,
}

/// Issue of one page, with its status: `struct rfwin_issue`.
#[repr(C)]
struct Issue {
    address: u64,
    gref: u32,
    flags: u32,
    status: i32,
    pad: u32,
}

/// Revocation of one reference, with its status: `struct rfwin_revoke`.
#[repr(C)]
pub(in crate::xen) struct Revoke {
    gref: u32,
    flags: u32,
    status: i32,
    pad: u32,
}

impl Revoke {
    pub(in crate::xen) fn new(gref: Gref, forced: bool) -> Revoke {
        let flags = if forced { FORCE } else { 0 };
        Revoke { gref: gref.0, flags, status: status::AGAIN, pad: 0 }
    }

    pub(in crate::xen) fn gref(&self) -> Gref {
        Gref(self.gref)
    }

    pub(in crate::xen) fn status(&self) -> i32 {
        self.status
    }
}

/// Array of issues or revocations: `struct rfwin_batch`.
#[repr(C)]
struct Batch<T> {
    array: *mut T,
    count: u32,
    pad: u32,
}

const fn number(direction: Direction, number: u8, size: usize) -> Opcode {
    opcode::from_components(direction, LETTER, number, size)
}

const CREATE: Opcode = number(Direction::ReadWrite, 0x41, size_of::<Create>());
const REGISTER: Opcode = number(Direction::ReadWrite, 0x42, size_of::<Register>());
const ISSUE: Opcode = number(Direction::Write, 0x43, size_of::<Batch<Issue>>());
const REVOKE: Opcode = number(Direction::Write, 0x44, size_of::<Batch<Revoke>>());

/// Makes the file a window to `grantee`. Returns the handle.
pub(in crate::xen) fn create(
    fd: BorrowedFd<'_>,
    grantee: DomId,
    entries: u32,
) -> Result<u32, Errno> {
    let mut create = [Create { grantee: grantee.0, pad: 0, entries, handle: 0 }];
    // SAFETY: the kernel reads and writes one structure.
    unsafe { call(fd, CREATE, &mut create) }?;
    Ok(create[0].handle)
}

/// Makes the file the grantee's end of a window. Returns the number of pages of the table.
pub(in crate::xen) fn register(
    fd: BorrowedFd<'_>,
    granter: DomId,
    handle: u32,
    entries: u32,
) -> Result<u32, Errno> {
    let mut register = [Register { granter: granter.0, pad: 0, handle, entries, table_pages: 0 }];
    // SAFETY: the kernel reads and writes one structure.
    unsafe { call(fd, REGISTER, &mut register) }?;
    Ok(register[0].table_pages)
}

/// Issues the page at `page`, lent memory of this process. Returns the status.
pub(in crate::xen) fn issue(
    fd: BorrowedFd<'_>,
    gref: Gref,
    page: DeviceRange,
    access: Access,
) -> Result<i32, Errno> {
    let flags = if access == Access::ReadOnly { READ_ONLY } else { 0 };
    let (address, gref) = (page.address(), gref.0);
    let mut issue = Issue { address, gref, flags, status: status::AGAIN, pad: 0 };
    let mut batch = [Batch { array: &raw mut issue, count: 1, pad: 0 }];
    // SAFETY: the kernel reads one structure, follows its pointer to one element, and writes its status. It
    // pins the page at the address, which is lent memory as `DeviceRange` guarantees.
    unsafe { call(fd, ISSUE, &mut batch) }?;
    Ok(issue.status)
}

/// Revokes references, each with its own status. Statuses are valid up to the first that the kernel did not
/// reach, which is `AGAIN`.
pub(in crate::xen) fn revoke(fd: BorrowedFd<'_>, list: &mut [Revoke]) -> Result<(), Errno> {
    let count = u32::try_from(list.len()).map_err(|_| Errno::INVAL)?;
    let mut batch = [Batch { array: list.as_mut_ptr(), count, pad: 0 }];
    // SAFETY: the kernel reads one structure, follows its pointer to `count` elements, and writes their
    // statuses.
    unsafe { call(fd, REVOKE, &mut batch) }.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the numbers against those of a C compiler on x86-64.
    #[test]
    fn request_numbers_match_module_header() {
        let numbers = [
            (CREATE, 0xc00c_7741),
            (REGISTER, 0xc010_7742),
            (ISSUE, 0x4010_7743),
            (REVOKE, 0x4010_7744),
        ];
        for (ours, header) in numbers {
            assert_eq!(u64::from(ours), header, "{ours:#x} is not {header:#x}");
        }
    }

    #[test]
    fn structure_layouts_match_module_header() {
        use core::mem::offset_of;
        assert_eq!((size_of::<Issue>(), size_of::<Revoke>()), (24, 16));
        assert_eq!((offset_of!(Create, entries), offset_of!(Create, handle)), (4, 8));
        assert_eq!((offset_of!(Register, handle), offset_of!(Register, entries)), (4, 8));
        assert_eq!(offset_of!(Register, table_pages), 12);
        assert_eq!((offset_of!(Issue, gref), offset_of!(Issue, status)), (8, 16));
        assert_eq!((offset_of!(Revoke, flags), offset_of!(Revoke, status)), (4, 8));
        assert_eq!(offset_of!(Batch<Issue>, count), 8);
    }
}
