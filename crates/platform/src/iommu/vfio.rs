//! VFIO, type1v2: an IOMMU of the machine, and devices behind it (Linux' `vfio.h`).
//!
//! A *container* is an address space; *groups* of devices, which the IOMMU cannot tell apart, are put into
//! it; a group gives the files of its devices. Everything that is mapped is pinned, and counts against the
//! limit of locked memory of who is not privileged.
//!
//! The crates there are for VFIO map everything for writing too; grants for reading need the flag, so the
//! four calls are made here.

// #syscall none: for measuring; no sandboxed process has an IOMMU

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use ringfence_memory::DeviceRegion;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::AddressSpace;
use crate::Access;
use crate::window::EngineFacts;

/// ioctl numbers: `_IO(';', 100 + n)`.
mod number {
    pub(super) const GET_API_VERSION: u32 = 0x3b64;
    pub(super) const CHECK_EXTENSION: u32 = 0x3b65;
    pub(super) const SET_IOMMU: u32 = 0x3b66;
    pub(super) const GROUP_GET_STATUS: u32 = 0x3b67;
    pub(super) const GROUP_SET_CONTAINER: u32 = 0x3b68;
    pub(super) const GROUP_GET_DEVICE_FD: u32 = 0x3b6a;
    pub(super) const DEVICE_GET_REGION_INFO: u32 = 0x3b6c;
    pub(super) const IOMMU_MAP_DMA: u32 = 0x3b71;
    pub(super) const IOMMU_UNMAP_DMA: u32 = 0x3b72;
}

/// `VFIO_TYPE1v2_IOMMU`: unmaps what was mapped, no part of it.
const TYPE1_V2: usize = 3;
/// `VFIO_GROUP_FLAGS_VIABLE`
const VIABLE: u32 = 1;
/// `VFIO_DMA_MAP_FLAG_READ`, `VFIO_DMA_MAP_FLAG_WRITE`: what the device may do.
const READ: u32 = 1;
const WRITE: u32 = 2;
/// The region of a PCI device that is its configuration space.
pub const CONFIGURATION: u32 = 7;

const CONTAINER: &str = "/dev/vfio/vfio";

/// Why a device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum VfioError {
    /// The driver is not there.
    #[error(
        "{} does not exist: load the driver (`modprobe vfio-pci`, `modprobe vfio_iommu_type1`), give it the device (`driver_override`), and see that the machine's IOMMU is on (`intel_iommu=on`)",
        path.display()
    )]
    Missing {
        /// What was looked for.
        path: PathBuf,
    },
    /// It may not be opened.
    #[error("{} cannot be opened: permission denied. Let its group or user be yours (`chown`)", path.display())]
    Denied {
        /// What was opened.
        path: PathBuf,
    },
    /// Other devices of the group are in the kernel's hands.
    #[error("group {group} has devices with other drivers: give all of them to vfio-pci")]
    NotViable {
        /// The group.
        group: u32,
    },
    /// The kernel speaks another version, or its IOMMU driver does not unmap pages one by one.
    #[error("this kernel's VFIO lacks the IOMMU driver type1v2")]
    Unsupported,
    /// A step was refused.
    #[error("{what}: {source}")]
    Step {
        /// The step.
        what: &'static str,
        /// Why it was refused.
        source: io::Error,
    },
}

fn step(what: &'static str) -> impl Fn(io::Error) -> VfioError {
    move |source| VfioError::Step { what, source }
}

fn open(path: PathBuf) -> Result<OwnedFd, VfioError> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    rustix::fs::open(&path, flags, Mode::empty()).map_err(|errno| match errno {
        Errno::NOENT | Errno::NODEV | Errno::NXIO => VfioError::Missing { path },
        Errno::ACCESS | Errno::PERM => VfioError::Denied { path },
        other => VfioError::Step { what: "opening a VFIO file", source: other.into() },
    })
}

/// What a group's address space is like.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Strictness {
    /// The kernel waits for the IOMMU whenever it takes something away.
    Strict,
    /// The kernel was not told so; the text says what to do.
    Lazy(String),
}

/// Whether the kernel makes unmapping take effect at once for the devices of `group`.
///
/// The address spaces that VFIO makes are strict in any case (each unmapping ends in a synchronous
/// invalidation); what is looked at here is how the kernel was started, which rules the group before VFIO has
/// it, and after. So that a test of revocation is known to have run as it should, it asks.
pub fn strictness(group: u32) -> Strictness {
    let path = format!("/sys/kernel/iommu_groups/{group}/type");
    match std::fs::read_to_string(&path) {
        Ok(kind) if kind.trim() == "DMA" => Strictness::Strict,
        Ok(kind) => Strictness::Lazy(format!(
            "the kernel's own address space of group {group} is of type {}, not DMA: start the kernel with iommu.strict=1",
            kind.trim()
        )),
        Err(error) => {
            Strictness::Lazy(format!("{path}: {error}: how strict the IOMMU is, is not known"))
        }
    }
}

/// The number of the group that a PCI device (`0000:00:03.0`) is in.
///
/// # Errors
///
/// [`VfioError::Missing`] for a device that there is not, or that is in no group.
pub fn group_of(device: &str) -> Result<u32, VfioError> {
    let path = Path::new("/sys/bus/pci/devices").join(device).join("iommu_group");
    let target = std::fs::read_link(&path).ok();
    let name = target.as_deref().and_then(Path::file_name).and_then(|name| name.to_str());
    name.and_then(|name| name.parse().ok()).ok_or(VfioError::Missing { path })
}

/// One address space of the machine's IOMMU, with one group of devices in it.
pub struct Container {
    file: OwnedFd,
    group: OwnedFd,
    /// What is mapped, by its I/O address. The kernel has the pages pinned as well.
    mapped: Mutex<BTreeMap<u64, DeviceRegion>>,
}

impl Container {
    /// Makes an address space and puts `group` (the number of its file in `/dev/vfio`) into it.
    ///
    /// # Errors
    ///
    /// [`VfioError`]; the text says what to do.
    pub fn open(group: u32) -> Result<Container, VfioError> {
        let file = open(PathBuf::from(CONTAINER))?;
        let version = plain(&file, number::GET_API_VERSION, 0);
        let extension = plain(&file, number::CHECK_EXTENSION, TYPE1_V2);
        if !matches!((version, extension), (Ok(0), Ok(1))) {
            return Err(VfioError::Unsupported);
        }
        let group_file = open(Path::new("/dev/vfio").join(group.to_string()))?;
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
        Ok(Container { file, group: group_file, mapped: Mutex::default() })
    }

    /// The device of that name (`0000:00:03.0`), which is in the group.
    ///
    /// # Errors
    ///
    /// [`VfioError::Step`]
    pub fn device(&self, name: &str) -> Result<Device, VfioError> {
        let what = "VFIO_GROUP_GET_DEVICE_FD";
        let name = CString::new(name).map_err(|error| step(what)(error.into()))?;
        // SAFETY: the call reads a string that ends in zero.
        let file = unsafe {
            libc::ioctl(self.group.as_raw_fd(), number::GROUP_GET_DEVICE_FD.into(), name.as_ptr())
        };
        if file < 0 {
            return Err(step(what)(io::Error::last_os_error()));
        }
        // SAFETY: the kernel made the file for this call alone.
        Ok(Device { file: unsafe { OwnedFd::from_raw_fd(file) } })
    }
}

impl AddressSpace for Container {
    fn engine(&self) -> EngineFacts {
        EngineFacts {
            name: "vfio",
            one_sided: true,
            in_flight: "ends before the revocation returns, or does not begin: the IOMMU's caches are emptied by the call",
            cost: "issue and revoke: a system call each, in which the page is pinned or let go and the IOMMU told",
        }
    }

    fn map_region(&self, address: u64, memory: &DeviceRegion, access: Access) -> io::Result<()> {
        if access == Access::ReadWrite && !memory.is_writable() {
            return Err(Errno::PERM.into());
        }
        let flags = if access == Access::ReadWrite { READ | WRITE } else { READ };
        // struct vfio_iommu_type1_dma_map: argsz and flags, vaddr, iova, size.
        let mut map = [head(32, flags), memory.address(), address, memory.len()];
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        structure(&self.file, number::IOMMU_MAP_DMA, &mut map)?;
        mapped.insert(address, memory.clone());
        Ok(())
    }

    fn unmap(&self, address: u64) -> io::Result<()> {
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        let size = mapped.get(&address).ok_or(Errno::NOENT)?.len();
        // struct vfio_iommu_type1_dma_unmap: argsz and flags, iova, size. The kernel says how much it was.
        let mut unmap = [head(24, 0), address, size];
        structure(&self.file, number::IOMMU_UNMAP_DMA, &mut unmap)?;
        if unmap[2] != size {
            return Err(Errno::IO.into());
        }
        mapped.remove(&address);
        Ok(())
    }
}

/// The two u32 at the beginning of a structure.
fn head(size: u32, flags: u32) -> u64 {
    let ([a, b, c, d], [e, f, g, h]) = (size.to_ne_bytes(), flags.to_ne_bytes());
    u64::from_ne_bytes([a, b, c, d, e, f, g, h])
}

/// A device, driven through its file alone: its registers are read and written by system calls.
pub struct Device {
    file: OwnedFd,
}

impl Device {
    /// Where a region of the device begins in its file, and how long it is.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn region(&self, index: u32) -> io::Result<(u64, u64)> {
        // struct vfio_region_info: argsz and flags, index and cap_offset, size, offset.
        let mut info = [head(32, 0), head(index, 0), 0, 0];
        structure(&self.file, number::DEVICE_GET_REGION_INFO, &mut info)?;
        Ok((info[3], info[2]))
    }

    /// Lets the device use its registers and begin transfers (bits 1 and 2 of the command register).
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn enable(&self) -> io::Result<()> {
        const COMMAND: u64 = 4;
        let (start, _) = self.region(CONFIGURATION)?;
        let mut word = [0; 2];
        rustix::io::pread(&self.file, &mut word, start + COMMAND)?;
        let word = u16::from_le_bytes(word) | 0b110;
        rustix::io::pwrite(&self.file, &word.to_le_bytes(), start + COMMAND)?;
        Ok(())
    }

    /// Reads a register of four octets at `at` in the device's file, little-endian.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn read(&self, at: u64) -> io::Result<u32> {
        let mut word = [0; 4];
        match rustix::io::pread(&self.file, &mut word, at)? {
            4 => Ok(u32::from_le_bytes(word)),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Writes a register of four octets.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn write(&self, at: u64, value: u32) -> io::Result<()> {
        match rustix::io::pwrite(&self.file, &value.to_le_bytes(), at)? {
            4 => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }
}

/// A call whose argument is a number.
fn plain(file: impl AsFd, number: u32, argument: usize) -> io::Result<i32> {
    // SAFETY: the calls made by this function take no address.
    let done = unsafe { libc::ioctl(file.as_fd().as_raw_fd(), number.into(), argument) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(done) }
}

/// A call whose argument is a structure that says its own size, or a file's number.
fn structure<T: Copy, const N: usize>(
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
