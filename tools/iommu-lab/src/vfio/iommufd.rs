//! iommufd, the kernel's newer interface to IOMMU page tables (Linux's `iommufd.h`; with device files
//! since Linux 6.6, and not in every kernel).
//!
//! The file `/dev/iommu` holds *I/O address spaces*. A device has a file of its own, is bound to
//! `/dev/iommu`, and is attached to one of its spaces. Mapped memory counts against the user's limit of
//! locked memory. Ranges are unmapped as they were mapped, never split.

// #syscall none: for measuring; no sandboxed process has an IOMMU

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};
use rustix::io::Errno;

use super::call::{iommufd as number, pair, structure, vfio};
use super::{VfioError, open, step};

const IOMMU: &str = "/dev/iommu";
/// Flags `IOMMU_IOAS_MAP_FIXED_IOVA`, `IOMMU_IOAS_MAP_WRITEABLE` and `IOMMU_IOAS_MAP_READABLE`.
const FIXED: u32 = 1;
const WRITE: u32 = 2;
const READ: u32 = 4;

/// Returns `true` if the kernel has the interface for this device and this process may open it.
pub(super) fn is_there(device: &str) -> bool {
    let usable = |path: &Path| access(path, Access::READ_OK | Access::WRITE_OK).is_ok();
    usable(Path::new(IOMMU)) && file_of(&entries_of(device)).is_some_and(|path| usable(&path))
}

/// Returns the directory in which the kernel names a PCI device's own file.
fn entries_of(device: &str) -> PathBuf {
    Path::new("/sys/bus/pci/devices").join(device).join("vfio-dev")
}

/// Returns the device file named by the one entry of `folder`, for instance `vfio0`.
fn file_of(folder: &Path) -> Option<PathBuf> {
    let name = std::fs::read_dir(folder).ok()?.find_map(Result::ok)?.file_name();
    Some(Path::new("/dev/vfio/devices").join(name))
}

/// Address space with one device.
pub(super) struct Iommufd {
    file: OwnedFd,
    /// Number of the space in it.
    space: u32,
}

impl Iommufd {
    /// Creates an address space with `device` in it. Returns the device's file too.
    pub(super) fn new(device: &str) -> Result<(Iommufd, OwnedFd), VfioError> {
        let entries = entries_of(device);
        let path = file_of(&entries).ok_or(VfioError::Missing { path: entries })?;
        let file = open(PathBuf::from(IOMMU), device)?;
        let device_file = open(path, device)?;
        // struct vfio_device_bind_iommufd: argsz, flags, iommufd, and the device's number there.
        let mut bind = [16, 0, file.as_raw_fd().cast_unsigned(), 0];
        structure(&device_file, vfio::DEVICE_BIND_IOMMUFD, &mut bind).map_err(|error| {
            match Errno::from_io_error(&error) {
                Some(Errno::BUSY | Errno::INVAL) => VfioError::Busy { device: device.to_owned() },
                _ => step("VFIO_DEVICE_BIND_IOMMUFD")(error),
            }
        })?;
        // struct iommu_ioas_alloc: size, flags, and the new space's number.
        let mut space = [12u32, 0, 0];
        structure(&file, number::IOAS_ALLOC, &mut space).map_err(step("IOMMU_IOAS_ALLOC"))?;
        let space = space[2];
        // struct vfio_device_attach_iommufd_pt: argsz, flags, the space; the kernel returns its page table.
        let mut attach = [12, 0, space];
        structure(&device_file, vfio::DEVICE_ATTACH_IOMMUFD_PT, &mut attach)
            .map_err(step("VFIO_DEVICE_ATTACH_IOMMUFD_PT"))?;
        Ok((Iommufd { file, space }, device_file))
    }

    /// Maps `len` bytes at `from` in this process.
    pub(super) fn map(&self, address: u64, from: u64, len: u64, write: bool) -> io::Result<()> {
        let flags = if write { FIXED | READ | WRITE } else { FIXED | READ };
        // struct iommu_ioas_map: size and flags, the space and a reserved u32, user_va, length, iova.
        let mut map = [pair(40, flags), pair(self.space, 0), from, len, address];
        structure(&self.file, number::IOAS_MAP, &mut map)
    }

    /// Unmaps a range that was mapped. Returns its length in bytes.
    pub(super) fn unmap(&self, address: u64, len: u64) -> io::Result<u64> {
        // struct iommu_ioas_unmap: size and the space, iova, length. The kernel returns the unmapped length.
        let mut unmap = [pair(24, self.space), address, len];
        structure(&self.file, number::IOAS_UNMAP, &mut unmap)?;
        Ok(unmap[2])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_file_is_named_by_its_folder_entry() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(file_of(folder.path()), None, "VFIO has no such device");
        std::fs::create_dir(folder.path().join("vfio7")).unwrap();
        assert_eq!(file_of(folder.path()), Some(PathBuf::from("/dev/vfio/devices/vfio7")));
        assert_eq!(file_of(&folder.path().join("gone")), None, "a kernel without such files");
    }

    #[test]
    fn missing_device_has_no_iommufd() {
        assert!(!is_there("0000:ff:1f.7"));
        let error = Iommufd::new("0000:ff:1f.7").map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("vfio-dev does not exist"), "{error}");
    }
}
