//! VFIO engine: address spaces of the machine's IOMMU with one device each (Linux's `vfio.h` and
//! `iommufd.h`).
//!
//! The kernel has two interfaces to the same page tables: VFIO's own, *type1v2*, which every kernel with
//! VFIO has, and *iommufd*, which few kernels have yet. Where both exist, iommufd is used. Both pin mapped
//! pages, and both end unmapping with a synchronous invalidation of the IOMMU's caches. A range is
//! unmapped as it was mapped or not at all.
//!
//! The system calls are made here because the existing crates for VFIO map everything writable, while
//! read-only grants need a mapping without the write flag.

mod call;
mod iommufd;
mod type1;

// #syscall none: for measuring; no sandboxed process has an IOMMU

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use ringfence_access::iommu::AddressSpace;
use ringfence_memory::DeviceRegion;
use ringfence_platform::Access;
use ringfence_platform::window::EngineFacts;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use call::{pair, structure};
use iommufd::Iommufd;
use type1::Type1;

/// Index of a PCI device's region that is its configuration space.
pub const CONFIGURATION: u32 = 7;

/// Reasons for which a device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum VfioError {
    /// A driver or device file does not exist.
    #[error(
        "{} does not exist: load the driver (`modprobe vfio-pci`, `modprobe vfio_iommu_type1`), give it the device (`driver_override`), and see that the machine's IOMMU is on (`intel_iommu=on`)",
        path.display()
    )]
    Missing { path: PathBuf },
    /// Permission to open a file is lacking.
    #[error("{} cannot be opened: permission denied. Let its group or user be yours (`chown`)", path.display())]
    Denied { path: PathBuf },
    /// Other devices of the group are bound to kernel drivers.
    #[error("group {group} has devices with other drivers: give all of them to vfio-pci")]
    NotViable { group: u32 },
    /// Another process uses the device or one of its group.
    #[error(
        "{device}, or another device of its group, is in use: end the process that has it, and give all of the group to vfio-pci"
    )]
    Busy {
        /// PCI address of the device.
        device: String,
    },
    /// VFIO version or IOMMU driver without page-wise unmapping.
    #[error("this kernel's VFIO lacks the IOMMU driver type1v2")]
    Unsupported,
    /// A setup step failed.
    #[error("{what}: {source}")]
    Step { what: &'static str, source: io::Error },
}

fn step(what: &'static str) -> impl Fn(io::Error) -> VfioError {
    move |source| VfioError::Step { what, source }
}

/// Opens a file of VFIO; errors name `device`.
fn open(path: PathBuf, device: &str) -> Result<OwnedFd, VfioError> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    rustix::fs::open(&path, flags, Mode::empty()).map_err(|errno| match errno {
        Errno::NOENT | Errno::NODEV | Errno::NXIO => VfioError::Missing { path },
        Errno::ACCESS | Errno::PERM => VfioError::Denied { path },
        Errno::BUSY => VfioError::Busy { device: device.to_owned() },
        other => VfioError::Step { what: "opening a VFIO file", source: other.into() },
    })
}

/// Invalidation policy of a group's IOMMU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Strictness {
    /// The kernel waits for the IOMMU at every unmapping.
    Strict,
    /// The kernel defers invalidation; the text says how to change that.
    Lazy(String),
}

/// Returns the kernel's invalidation policy for the devices of `group`.
///
/// Address spaces of VFIO are strict in any case, since each unmapping ends with a synchronous
/// invalidation. The policy applies to the group before VFIO owns it and after. Tests of revocation query
/// it to prove their conditions.
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

/// Returns the group number of a PCI device (`0000:00:03.0`).
///
/// # Errors
///
/// Returns [`VfioError::Missing`] if the device does not exist or is in no group.
pub fn group_of(device: &str) -> Result<u32, VfioError> {
    let path = Path::new("/sys/bus/pci/devices").join(device).join("iommu_group");
    let target = std::fs::read_link(&path).ok();
    let name = target.as_deref().and_then(Path::file_name).and_then(|name| name.to_str());
    name.and_then(|name| name.parse().ok()).ok_or(VfioError::Missing { path })
}

/// Kernel interface that manages an address space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Interface {
    /// Container and group of VFIO.
    Type1,
    /// Device file and `/dev/iommu`.
    Iommufd,
}

impl Interface {
    /// Returns the best interface that exists for `device` (`0000:00:03.0`).
    pub fn best(device: &str) -> Interface {
        if iommufd::is_there(device) { Interface::Iommufd } else { Interface::Type1 }
    }
}

enum Space {
    Type1(Type1),
    Iommufd(Iommufd),
}

/// Address space of the machine's IOMMU with one device in it.
pub struct Container {
    space: Space,
    /// Mapped regions by I/O address. The kernel pins their pages as well.
    mapped: Mutex<BTreeMap<u64, DeviceRegion>>,
}

impl Container {
    /// Creates an address space for a PCI device (`0000:00:03.0`), by the best interface. The device stays in
    /// it until the device's file is closed.
    ///
    /// # Errors
    ///
    /// Returns a [`VfioError`] whose text says what to do.
    pub fn open(device: &str) -> Result<(Container, Device), VfioError> {
        Container::open_by(Interface::best(device), device)
    }

    /// Creates an address space by this interface, as [`Container::open`] does.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Container::open`].
    pub fn open_by(interface: Interface, device: &str) -> Result<(Container, Device), VfioError> {
        let (space, file) = match interface {
            Interface::Type1 => {
                let (space, file) = Type1::new(device)?;
                (Space::Type1(space), file)
            }
            Interface::Iommufd => {
                let (space, file) = Iommufd::new(device)?;
                (Space::Iommufd(space), file)
            }
        };
        Ok((Container { space, mapped: Mutex::default() }, Device { file }))
    }
}

impl AddressSpace for Container {
    fn engine(&self) -> EngineFacts {
        EngineFacts {
            name: match self.space {
                Space::Type1(_) => "vfio",
                Space::Iommufd(_) => "iommufd",
            },
            one_sided: true,
            in_flight: "ends before the revocation returns, or does not begin: the IOMMU's caches are emptied by the call",
            cost: "issue and revoke: a system call each, in which the page is pinned or let go and the IOMMU told",
        }
    }

    fn map_region(&self, address: u64, memory: &DeviceRegion, access: Access) -> io::Result<()> {
        let write = access == Access::ReadWrite;
        if write && !memory.is_writable() {
            return Err(Errno::PERM.into());
        }
        let (from, len) = (memory.address(), memory.len());
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        match &self.space {
            Space::Type1(space) => space.map(address, from, len, write)?,
            Space::Iommufd(space) => space.map(address, from, len, write)?,
        }
        mapped.insert(address, memory.clone());
        Ok(())
    }

    fn unmap(&self, address: u64) -> io::Result<()> {
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        let len = mapped.get(&address).ok_or(Errno::NOENT)?.len();
        let unmapped = match &self.space {
            Space::Type1(space) => space.unmap(address, len)?,
            Space::Iommufd(space) => space.unmap(address, len)?,
        };
        if unmapped != len {
            return Err(Errno::IO.into());
        }
        mapped.remove(&address);
        Ok(())
    }
}

/// Device driven through its file alone: registers are read and written by system calls.
pub struct Device {
    file: OwnedFd,
}

impl Device {
    /// Returns the offset of a region of the device in its file, and the region's length.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn region(&self, index: u32) -> io::Result<(u64, u64)> {
        // struct vfio_region_info: argsz and flags, index and cap_offset, size, offset.
        let mut info = [pair(32, 0), pair(index, 0), 0, 0];
        structure(&self.file, call::vfio::DEVICE_GET_REGION_INFO, &mut info)?;
        Ok((info[3], info[2]))
    }

    /// Enables the device's registers and transfers (bits 1 and 2 of the command register).
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn enable(&self) -> io::Result<()> {
        const COMMAND: u64 = 4;
        let (start, _) = self.region(CONFIGURATION)?;
        let mut word = [0; 2];
        rustix::io::pread(&self.file, &mut word, start + COMMAND)?;
        let word = u16::from_le_bytes(word) | 0b110;
        rustix::io::pwrite(&self.file, &word.to_le_bytes(), start + COMMAND)?;
        Ok(())
    }

    /// Reads a register of four bytes at `at` in the device's file, little-endian.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn read(&self, at: u64) -> io::Result<u32> {
        let mut word = [0; 4];
        match rustix::io::pread(&self.file, &mut word, at)? {
            4 => Ok(u32::from_le_bytes(word)),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Writes a register of four bytes.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    pub fn write(&self, at: u64, value: u32) -> io::Result<()> {
        match rustix::io::pwrite(&self.file, &value.to_le_bytes(), at)? {
            4 => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }
}
