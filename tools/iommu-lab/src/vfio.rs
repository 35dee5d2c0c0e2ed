//! VFIO: an IOMMU of the machine, and a device behind it (Linux' `vfio.h` and `iommufd.h`).
//!
//! The kernel has two interfaces to the same page tables: VFIO's own, *type1v2*, which every kernel with VFIO
//! has, and *iommufd*, which few have yet. Where both are there, iommufd is taken. Either way what is
//! mapped is pinned, unmapping ends in a synchronous invalidation of the IOMMU's caches, and a range is unmapped
//! as it was mapped or not at all.
//!
//! The crates there are for VFIO map everything for writing too; grants for reading need the flag, so the
//! few calls are made here.

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

/// The region of a PCI device that is its configuration space.
pub const CONFIGURATION: u32 = 7;

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
    /// Somebody has the device, or one beside it.
    #[error(
        "{device}, or another device of its group, is in use: end the process that has it, and give all of the group to vfio-pci"
    )]
    Busy {
        /// The device.
        device: String,
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

/// Opens a file of VFIO's, for the sake of `device`.
fn open(path: PathBuf, device: &str) -> Result<OwnedFd, VfioError> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    rustix::fs::open(&path, flags, Mode::empty()).map_err(|errno| match errno {
        Errno::NOENT | Errno::NODEV | Errno::NXIO => VfioError::Missing { path },
        Errno::ACCESS | Errno::PERM => VfioError::Denied { path },
        Errno::BUSY => VfioError::Busy { device: device.to_owned() },
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

/// By which of the kernel's interfaces an address space is managed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Interface {
    /// VFIO's own: a container and a group.
    Type1,
    /// `/dev/iommu`, and the device's own file.
    Iommufd,
}

impl Interface {
    /// The better one of those that there are for `device` (`0000:00:03.0`).
    pub fn best(device: &str) -> Interface {
        if iommufd::is_there(device) { Interface::Iommufd } else { Interface::Type1 }
    }
}

enum Space {
    Type1(Type1),
    Iommufd(Iommufd),
}

/// One address space of the machine's IOMMU, with one device in it.
pub struct Container {
    space: Space,
    /// What is mapped, by its I/O address. The kernel has the pages pinned as well.
    mapped: Mutex<BTreeMap<u64, DeviceRegion>>,
}

impl Container {
    /// Makes an address space for the PCI device of that name (`0000:00:03.0`), by the best interface. The
    /// device is in it until the device's file is closed.
    ///
    /// # Errors
    ///
    /// [`VfioError`]; the text says what to do.
    pub fn open(device: &str) -> Result<(Container, Device), VfioError> {
        Container::open_by(Interface::best(device), device)
    }

    /// As [`Container::open`], by this interface.
    ///
    /// # Errors
    ///
    /// As there.
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
        let mut info = [pair(32, 0), pair(index, 0), 0, 0];
        structure(&self.file, call::vfio::DEVICE_GET_REGION_INFO, &mut info)?;
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
