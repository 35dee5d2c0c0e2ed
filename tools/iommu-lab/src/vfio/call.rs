//! System calls of VFIO and iommufd, and the encoding of their structures.

// #syscall none: for measuring; no sandboxed process has an IOMMU

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// Ioctl numbers of Linux's `vfio.h`: `_IO(';', 100 + n)`.
pub(super) mod vfio {
    pub(in super::super) const GET_API_VERSION: u32 = 0x3b64;
    pub(in super::super) const CHECK_EXTENSION: u32 = 0x3b65;
    pub(in super::super) const SET_IOMMU: u32 = 0x3b66;
    pub(in super::super) const GROUP_GET_STATUS: u32 = 0x3b67;
    pub(in super::super) const GROUP_SET_CONTAINER: u32 = 0x3b68;
    pub(super) const GROUP_GET_DEVICE_FD: u32 = 0x3b6a;
    pub(in super::super) const DEVICE_GET_REGION_INFO: u32 = 0x3b6c;
    pub(in super::super) const IOMMU_MAP_DMA: u32 = 0x3b71;
    pub(in super::super) const IOMMU_UNMAP_DMA: u32 = 0x3b72;
    pub(in super::super) const DEVICE_BIND_IOMMUFD: u32 = 0x3b76;
    pub(in super::super) const DEVICE_ATTACH_IOMMUFD_PT: u32 = 0x3b77;
}

/// Ioctl numbers of Linux's `iommufd.h`: `_IO(';', 0x80 + n)`.
pub(super) mod iommufd {
    pub(in super::super) const IOAS_ALLOC: u32 = 0x3b81;
    pub(in super::super) const IOAS_MAP: u32 = 0x3b85;
    pub(in super::super) const IOAS_UNMAP: u32 = 0x3b86;
}

/// Joins two adjacent u32 of a structure, for instance its size and its flags.
pub(super) fn pair(first: u32, second: u32) -> u64 {
    let ([a, b, c, d], [e, f, g, h]) = (first.to_ne_bytes(), second.to_ne_bytes());
    u64::from_ne_bytes([a, b, c, d, e, f, g, h])
}

/// Makes a call whose argument is a number.
pub(super) fn plain(file: impl AsFd, number: u32, argument: usize) -> io::Result<i32> {
    // SAFETY: the calls made through this function take no address.
    let done = unsafe { libc::ioctl(file.as_fd().as_raw_fd(), number.into(), argument) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(done) }
}

/// Makes a call whose argument is a structure with its own size, or the number of a file.
pub(super) fn structure<T: Copy, const N: usize>(
    file: impl AsFd,
    number: u32,
    argument: &mut [T; N],
) -> io::Result<()> {
    // SAFETY: the kernel reads and writes at most the structure's size, which its first word says (SET_CONTAINER
    // reads one int); the callers' arrays of integers are as long, and any bits are integers. Addresses in
    // them are of memory that a `DeviceRegion` keeps mapped until it was unmapped from the device, and to which
    // no Rust reference points.
    let done = unsafe {
        libc::ioctl(
            file.as_fd().as_raw_fd(),
            number.into(),
            argument.as_mut_ptr().cast::<libc::c_void>(),
        )
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Opens the file of a group's device by name.
pub(super) fn device_of(group: impl AsFd, name: &CStr) -> io::Result<OwnedFd> {
    let group = group.as_fd().as_raw_fd();
    // SAFETY: the call reads a string that ends in zero.
    let file = unsafe { libc::ioctl(group, vfio::GROUP_GET_DEVICE_FD.into(), name.as_ptr()) };
    if file < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel made the file for this call alone.
    Ok(unsafe { OwnedFd::from_raw_fd(file) })
}
