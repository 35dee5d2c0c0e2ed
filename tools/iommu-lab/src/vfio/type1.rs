//! VFIO's own interface, type1v2.
//!
//! A *container* is an address space; *groups* of devices, which the IOMMU cannot tell apart, are put into
//! it; a group gives the files of its devices. What is mapped counts against the process's limit of locked
//! memory.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use super::call::{device_of, pair, plain, structure, vfio as number};
use super::{VfioError, group_of, open, step};

const CONTAINER: &str = "/dev/vfio/vfio";
/// `VFIO_TYPE1v2_IOMMU`: unmaps what was mapped, no part of it.
const TYPE1_V2: usize = 3;
/// `VFIO_GROUP_FLAGS_VIABLE`
const VIABLE: u32 = 1;
/// `VFIO_DMA_MAP_FLAG_READ`, `VFIO_DMA_MAP_FLAG_WRITE`: what the device may do.
const READ: u32 = 1;
const WRITE: u32 = 2;

/// A container with one group in it.
pub(super) struct Type1 {
    file: OwnedFd,
    /// Stays in the container while its file is open.
    _group: OwnedFd,
}

impl Type1 {
    /// A container with the group of `device` in it, and the device's file.
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

    /// Maps `len` octets at `from` in this process.
    pub(super) fn map(&self, address: u64, from: u64, len: u64, write: bool) -> io::Result<()> {
        let flags = if write { READ | WRITE } else { READ };
        // struct vfio_iommu_type1_dma_map: argsz and flags, vaddr, iova, size.
        let mut map = [pair(32, flags), from, address, len];
        structure(&self.file, number::IOMMU_MAP_DMA, &mut map)
    }

    /// Unmaps what was mapped: how many octets it was.
    pub(super) fn unmap(&self, address: u64, len: u64) -> io::Result<u64> {
        // struct vfio_iommu_type1_dma_unmap: argsz and flags, iova, size. The kernel says how much it was.
        let mut unmap = [pair(24, 0), address, len];
        structure(&self.file, number::IOMMU_UNMAP_DMA, &mut unmap)?;
        Ok(unmap[2])
    }
}
