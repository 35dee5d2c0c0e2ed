//! Type1v2, VFIO's own interface.
//!
//! A *container* is an address space. *Groups* of devices that the IOMMU cannot distinguish are added to
//! it, and a group provides the files of its devices. Mapped memory counts against the process's limit of
//! locked memory.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use super::call::{device_of, pair, plain, structure, vfio as number};
use super::{VfioError, group_of, open, step};

const CONTAINER: &str = "/dev/vfio/vfio";
/// `VFIO_TYPE1v2_IOMMU`, which unmaps whole mappings only.
const TYPE1_V2: usize = 3;
/// Flag `VFIO_GROUP_FLAGS_VIABLE` of a group.
const VIABLE: u32 = 1;
/// Flags `VFIO_DMA_MAP_FLAG_READ` and `VFIO_DMA_MAP_FLAG_WRITE`, the device's permissions.
const READ: u32 = 1;
const WRITE: u32 = 2;

/// Container with one group in it.
pub(super) struct Type1 {
    file: OwnedFd,
    /// Group, which stays in the container while its file is open.
    _group: OwnedFd,
}

impl Type1 {
    /// Creates a container with the group of `device` in it. Returns the device's file too.
    pub(super) fn new(device: &str) -> Result<(Type1, OwnedFd), VfioError> {
        let group = group_of(device)?;
        let file = open(PathBuf::from(CONTAINER), device)?;
        let version = plain(&file, number::GET_API_VERSION, 0);
        let extension = plain(&file, number::CHECK_EXTENSION, TYPE1_V2);
        if !matches!((version, extension), (Ok(0), Ok(1))) {
            return Err(VfioError::Unsupported);
        }
        let group_file = open(Path::new("/dev/vfio").join(group.to_string()), device)?;
        let mut status = [8u32, 0];
        structure(&group_file, number::GROUP_GET_STATUS, &mut status)
            .map_err(step("VFIO_GROUP_GET_STATUS"))?;
        if status[1] & VIABLE == 0 {
            return Err(VfioError::NotViable { group });
        }
        let mut container = [file.as_raw_fd()];
        structure(&group_file, number::GROUP_SET_CONTAINER, &mut container)
            .map_err(step("VFIO_GROUP_SET_CONTAINER"))?;
        plain(&file, number::SET_IOMMU, TYPE1_V2).map_err(step("VFIO_SET_IOMMU"))?;
        let what = step("VFIO_GROUP_GET_DEVICE_FD");
        let name = CString::new(device).map_err(|error| what(error.into()))?;
        let device = device_of(&group_file, &name).map_err(what)?;
        Ok((Type1 { file, _group: group_file }, device))
    }

    /// Maps `len` bytes at `from` in this process.
    pub(super) fn map(&self, address: u64, from: u64, len: u64, write: bool) -> io::Result<()> {
        let flags = if write { READ | WRITE } else { READ };
        // struct vfio_iommu_type1_dma_map: argsz and flags, vaddr, iova, size.
        let mut map = [pair(32, flags), from, address, len];
        structure(&self.file, number::IOMMU_MAP_DMA, &mut map)
    }

    /// Unmaps a range that was mapped. Returns its length in bytes.
    pub(super) fn unmap(&self, address: u64, len: u64) -> io::Result<u64> {
        // struct vfio_iommu_type1_dma_unmap: argsz and flags, iova, size. The kernel returns the unmapped size.
        let mut unmap = [pair(24, 0), address, len];
        structure(&self.file, number::IOMMU_UNMAP_DMA, &mut unmap)?;
        Ok(unmap[2])
    }
}
