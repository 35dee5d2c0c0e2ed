//! Kernel vhost with `VIRTIO_F_ACCESS_PLATFORM`: the worker looks every address up in a table that the
//! driver fills and empties by messages to the device's file (Linux' `vhost.h`, *device IOTLB*).
//!
//! * *update* puts a range into the table: issue;
//! * *invalidate* takes it out, and returns when the worker can begin no access through it, since it takes the
//!   locks under which the worker works: revoke;
//! * a *miss* comes back when the worker wants what is not there. Its queue waits until it is answered by an
//!   update, so a miss that is not answered stops that queue, and no other.
//!
//! The kernel's table has 2048 entries unless the module was told otherwise; when it is full, the kernel
//! drops the oldest, silently. So entries are counted here, and what is beyond them is refused.

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

/// Entries of the kernel's table, where it does not say.
const ENTRIES: usize = 2048;

/// Where it says how many there are.
const ENTRIES_FILE: &str = "/sys/module/vhost/parameters/max_iotlb_entries";

impl std::fmt::Debug for IotlbSpace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "IotlbSpace({} of {} entries)", self.mapped(), self.entries)
    }
}

/// What a worker wanted and was not given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Miss {
    /// The I/O address.
    pub address: u64,
    /// For what.
    pub access: Access,
}

/// The address space of one vhost device.
pub struct IotlbSpace {
    file: OwnedFd,
    entries: usize,
    /// What the worker may reach, by its I/O address; see `drop`.
    mapped: Mutex<BTreeMap<u64, ManuallyDrop<DeviceRegion>>>,
}

impl IotlbSpace {
    /// The space of the device that `file` is, on which `VIRTIO_F_ACCESS_PLATFORM` and messages of the second
    /// version were agreed. Reading it does not wait from here on.
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

    /// Entries that can be mapped at a time.
    pub fn entries(&self) -> usize {
        self.entries
    }

    /// Entries that are mapped.
    pub fn mapped(&self) -> usize {
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// The next miss, if there is one. Whoever wants it answered maps what is wanted; who does not has stopped
    /// the queue, and had better stop the device: the kernel keeps a message for each time that the worker tries
    /// again.
    ///
    /// # Errors
    ///
    /// The kernel's; `InvalidData` for a message that is no miss.
    pub fn take_miss(&self) -> io::Result<Option<Miss>> {
        let mut bytes = [0; IOTLB_MESSAGE_LEN];
        match rustix::io::read(&self.file, &mut bytes) {
            Ok(IOTLB_MESSAGE_LEN) => {}
            Ok(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(Errno::AGAIN) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        }
        // A queue waits for an answer to whatever this was, and would wait for ever.
        let Some(Iotlb::Miss { address, access }) = parse_miss(&bytes) else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let access = match access {
            IotlbAccess::Read => Access::ReadOnly,
            IotlbAccess::Write | IotlbAccess::ReadWrite => Access::ReadWrite,
        };
        Ok(Some(Miss { address, access }))
    }

    /// Makes `memory` (whole pages) what is at `address` and after it; keeps it mapped in this process as
    /// long as the device can reach it.
    ///
    /// # Errors
    ///
    /// The kernel's; `EEXIST` where something is mapped there already; `ENOSPC` where the entries are
    /// used up; `EPERM` for memory that cannot be written and is to be.
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
        // Known before it is told: what the worker may reach is kept mapped, whatever comes.
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

    /// Takes what was mapped at `address` away, all of it. After it returns, the worker begins no access by
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
    /// Readable when there is a miss.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for IotlbSpace {
    /// The device may live on, by another handle to its file: what it may still reach is never unmapped.
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
