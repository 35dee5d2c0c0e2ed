//! Block device ioctls: size, discard and secure discard of a range.
//!
//! The calls block until the device has completed the operation.

// #syscall daemon ioctl 1=0x80081272: BLKGETSIZE64: how large a block device is
// #syscall driver,disk,daemon ioctl 1=0x1277: BLKDISCARD: giving up ranges of a block device
// #syscall driver,daemon ioctl 1=0x127d: BLKSECDISCARD: the same, for certain

use core::ffi::c_void;
use std::io;
use std::os::fd::AsFd;

use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, opcode};

/// Request numbers of `linux/fs.h`. They encode no argument size.
const BLKDISCARD: Opcode = opcode::none(0x12, 119);
const BLKSECDISCARD: Opcode = opcode::none(0x12, 125);
const BLKGETSIZE64: Opcode = opcode::read::<usize>(0x12, 114);

/// Operation on a range: offset and length in bytes, both 64-bit.
struct OnRange {
    code: Opcode,
    range: [u64; 2],
}

// SAFETY: both operations read two u64 at the address and write nothing there.
unsafe impl Ioctl for OnRange {
    type Output = ();
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        self.code
    }

    fn as_ptr(&mut self) -> *mut c_void {
        self.range.as_mut_ptr().cast()
    }

    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}

/// Query of a device's size in bytes.
struct Size(u64);

// SAFETY: the kernel writes one u64 at the address (the code's size is that of a pointer for
// historical reasons).
unsafe impl Ioctl for Size {
    type Output = u64;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        BLKGETSIZE64
    }

    fn as_ptr(&mut self) -> *mut c_void {
        (&raw mut self.0).cast()
    }

    unsafe fn output_from_ptr(_: IoctlOutput, at: *mut c_void) -> rustix::io::Result<u64> {
        // SAFETY: the address is that of `self.0`, by `as_ptr`.
        Ok(unsafe { at.cast::<u64>().read() })
    }
}

/// Returns the size of the block device `file` in bytes.
///
/// # Errors
///
/// Returns the kernel's error: `ENOTTY` if the file is no block device.
pub fn size(file: impl AsFd) -> io::Result<u64> {
    // SAFETY: by the implementation of `Ioctl`.
    Ok(unsafe { rustix::ioctl::ioctl(file, Size(0)) }?)
}

/// Discards the content of a range (multiples of 512 bytes).
///
/// # Errors
///
/// Returns the kernel's error: `EOPNOTSUPP` if the device does not support the operation.
pub fn discard(file: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    on_range(file, BLKDISCARD, offset, len)
}

/// Discards a range so that its content cannot be recovered (multiples of 512 bytes).
///
/// # Errors
///
/// Returns the kernel's error: `EOPNOTSUPP` if the device does not support the operation.
pub fn discard_securely(file: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    on_range(file, BLKSECDISCARD, offset, len)
}

/// Returns `true` if the device supports [`discard_securely`]. Changes nothing.
pub fn can_discard_securely(file: impl AsFd) -> bool {
    // A range that is never valid: the kernel checks the device's capabilities first.
    let refused = on_range(file, BLKSECDISCARD, 1, 1).err().and_then(|e| e.raw_os_error());
    refused == Some(libc::EINVAL)
}

fn on_range(file: impl AsFd, code: Opcode, offset: u64, len: u64) -> io::Result<()> {
    // SAFETY: by the implementation of `Ioctl`.
    Ok(unsafe { rustix::ioctl::ioctl(file, OnRange { code, range: [offset, len] }) }?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_that_is_no_block_device_is_refused() {
        let file = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let errno = |e: io::Error| e.raw_os_error();
        assert_eq!(size(&file).map_err(errno), Err(Some(libc::ENOTTY)));
        assert_eq!(discard(&file, 0, 512).map_err(errno), Err(Some(libc::ENOTTY)));
        assert_eq!(discard_securely(&file, 0, 512).map_err(errno), Err(Some(libc::ENOTTY)));
        assert!(!can_discard_securely(&file));
    }
}
