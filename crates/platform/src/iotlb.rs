//! Device IOTLB of kernel vhost with `VIRTIO_F_ACCESS_PLATFORM` (Linux' `vhost.h`).
//!
//! The worker looks up every address in a table. The driver fills and empties the table by messages to the
//! device's file:
//!
//! * *update* adds a range (issue);
//! * *invalidate* removes it (revoke). It takes the locks under which the worker runs, so no access through
//!   the range begins after it returns;
//! * a *miss* reports an address that the table lacks. The worker's queue waits for an update; an unanswered
//!   miss stops that queue only.
//!
//! The kernel's table has 2048 entries by default. A full table drops the oldest entry without a report, so
//! this module counts entries and refuses those beyond the limit.

// #syscall none: for measuring; no sandboxed process has an IOMMU

use std::collections::BTreeMap;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use ringfence_memory::{DeviceRegion, LentSlice};
use ringfence_wire::grant::Access;
use ringfence_wire::vhost::{IOTLB_MESSAGE_LEN, Iotlb, IotlbAccess, iotlb_message, parse_miss};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;

/// Entries of the kernel's table if the module's parameter cannot be read.
const ENTRIES: usize = 2048;

/// Path of the module parameter with the number of entries.
const ENTRIES_FILE: &str = "/sys/module/vhost/parameters/max_iotlb_entries";

impl std::fmt::Debug for IotlbSpace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "IotlbSpace({} of {} entries)", self.mapped(), self.entries)
    }
}

/// Access of a worker to an address that the table lacks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Miss {
    pub address: u64,
    pub access: Access,
}

/// I/O address space of one vhost device.
pub struct IotlbSpace {
    file: OwnedFd,
    entries: usize,
    /// Mapped regions by I/O address; see `drop`.
    mapped: Mutex<BTreeMap<u64, ManuallyDrop<DeviceRegion>>>,
}

impl IotlbSpace {
    /// Creates the address space of the device `file`, which negotiated `VIRTIO_F_ACCESS_PLATFORM` and version
    /// 2 messages. Makes the file non-blocking.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn new(file: OwnedFd) -> io::Result<IotlbSpace> {
        fcntl_setfl(&file, fcntl_getfl(&file)? | OFlags::NONBLOCK)?;
        let told = std::fs::read_to_string(ENTRIES_FILE).ok();
        let entries = told.and_then(|text| text.trim().parse().ok()).unwrap_or(ENTRIES);
        Ok(IotlbSpace { file, entries, mapped: Mutex::default() })
    }

    /// Returns the maximum number of mapped entries.
    pub fn entries(&self) -> usize {
        self.entries
    }

    /// Returns the number of mapped entries.
    pub fn mapped(&self) -> usize {
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Returns the next miss, if there is one. The caller maps the address or stops the device: the kernel
    /// keeps one message for each retry of the worker.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error; `InvalidData` for a message that is no miss.
    pub fn take_miss(&self) -> io::Result<Option<Miss>> {
        let mut bytes = [0; IOTLB_MESSAGE_LEN];
        match rustix::io::read(&self.file, &mut bytes) {
            Ok(IOTLB_MESSAGE_LEN) => {}
            Ok(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(Errno::AGAIN) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        }
        // A queue waits for an answer to this message, without a time limit.
        let Some(Iotlb::Miss { address, access }) = parse_miss(&bytes) else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let access = match access {
            IotlbAccess::Read => Access::ReadOnly,
            IotlbAccess::Write | IotlbAccess::ReadWrite => Access::ReadWrite,
        };
        Ok(Some(Miss { address, access }))
    }

    /// Maps `memory` (whole pages) at `address`. This process keeps the memory mapped as long as the device can
    /// access it.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error; `EEXIST` if the range overlaps a mapped one; `ENOSPC` if no entry is free;
    /// `EPERM` for write access to read-only memory.
    pub fn map_region(
        &self,
        address: u64,
        memory: &DeviceRegion,
        access: Access,
    ) -> io::Result<()> {
        if access == Access::ReadWrite && !memory.is_writable() {
            return Err(Errno::PERM.into());
        }
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        let len = memory.len();
        let end = address.checked_add(len).ok_or(Errno::OVERFLOW)?;
        let before = mapped.range(..end).next_back();
        if before.is_some_and(|(start, slice)| start + slice.len() > address) {
            return Err(Errno::EXIST.into());
        }
        if mapped.len() >= self.entries {
            return Err(Errno::NOSPC.into());
        }
        let user_address = memory.address();
        let access = match access {
            Access::ReadOnly => IotlbAccess::Read,
            Access::ReadWrite => IotlbAccess::ReadWrite,
        };
        // Recorded before the update: memory that the worker may access stays mapped in every case.
        mapped.insert(address, ManuallyDrop::new(memory.clone()));
        let told = self.tell(Iotlb::Update { address, len, user_address, access });
        if told.is_err() && self.tell(Iotlb::Invalidate { address, len }).is_ok() {
            drop(mapped.remove(&address).map(ManuallyDrop::into_inner));
        }
        told
    }

    /// Maps lent memory, as [`IotlbSpace::map_region`] does.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn map(&self, address: u64, memory: &LentSlice, access: Access) -> io::Result<()> {
        self.map_region(address, &memory.device_region(), access)
    }

    /// Removes the whole mapping that begins at `address`. After it returns, the worker begins no access by
    /// these addresses.
    ///
    /// # Errors
    ///
    /// The kernel's; `ENOENT` where nothing was mapped. The worker may still reach it then.
    pub fn unmap(&self, address: u64) -> io::Result<()> {
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        let len = mapped.get(&address).ok_or(Errno::NOENT)?.len();
        self.tell(Iotlb::Invalidate { address, len })?;
        drop(mapped.remove(&address).map(ManuallyDrop::into_inner));
        Ok(())
    }

    fn tell(&self, message: Iotlb) -> io::Result<()> {
        let bytes = iotlb_message(message);
        match rustix::io::write(&self.file, &bytes)? {
            IOTLB_MESSAGE_LEN => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }
}

impl AsFd for IotlbSpace {
    /// Returns a descriptor that is readable while there is a miss.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for IotlbSpace {
    /// Never unmaps memory that the device may still access by another handle to its file.
    fn drop(&mut self) {
        let mapped = self.mapped.get_mut().unwrap_or_else(PoisonError::into_inner);
        let left: Vec<u64> = mapped.keys().copied().collect();
        for address in left {
            let _ = self.unmap(address);
        }
    }
}

#[cfg(test)]
mod tests;
