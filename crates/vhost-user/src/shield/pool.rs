//! Memory of a shield that one backend sees: vrings and buffers.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ringfence_memory::{
    DeviceAccess, DeviceRange, FIRST_IO_ADDRESS, LentSlice, Mapping, Protection,
};
use ringfence_wire::vhost_user::MemoryRegion;

use super::arena::{Arena, Block};
use super::totals::PoolTraffic;
use crate::memory::size_of;

/// Minimum length of a pool in bytes.
pub const POOL_MIN: u64 = 1 << 20;

/// Address of the pool's first byte for the backend, in each address space. No address of a process is as high.
pub(super) const POOL_ADDRESS: u64 = FIRST_IO_ADDRESS;

/// Pool of one connection to a backend.
#[derive(Debug)]
pub struct ShieldPool {
    file: OwnedFd,
    memory: LentSlice,
    /// Vrings and their reserves. They stay while data comes and goes.
    pub(super) fixed: Arena,
    /// Data of chains.
    pub(super) data: Arena,
    /// Length of the longest block of data in bytes.
    limit: usize,
    pub(super) traffic: PoolTraffic,
}

/// Part of the pool that vrings and their reserves have: one of so many bytes.
const FIXED_PART: usize = 4;
/// Limits of the length of a reserve in bytes. A packet with its headers needs a little more than 64 KiB.
const RESERVE_MIN: usize = 128 << 10;
const RESERVE_MAX: usize = 1 << 20;

impl ShieldPool {
    /// Uses a memfd without content as a pool. The caller has sealed its size.
    ///
    /// # Errors
    ///
    /// Returns the system's error, and `InvalidInput` for a file of less than [`POOL_MIN`] bytes.
    pub fn new(file: OwnedFd) -> io::Result<ShieldPool> {
        let size = size_of(&file)?;
        let len = usize::try_from(size).ok().filter(|_| size >= POOL_MIN);
        let len = len.ok_or(io::ErrorKind::InvalidInput)?;
        let memory = Mapping::new(&file, 0, len, Protection::ReadWrite)?.lent();
        let middle = len / FIXED_PART;
        let data = Arena::new(middle, len - middle);
        let limit = data.longest();
        let (fixed, traffic) = (Arena::new(0, middle), PoolTraffic::default());
        Ok(ShieldPool { file, memory, fixed, data, limit, traffic })
    }

    /// Returns the file, for the backend.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns the length in bytes.
    pub fn bytes(&self) -> u64 {
        self.memory.len() as u64
    }

    /// Returns the pool as the only region of a memory table.
    pub(super) fn region(&self) -> MemoryRegion {
        let (start, len) = (POOL_ADDRESS, self.bytes());
        MemoryRegion { guest: start, len, user: start, offset: 0 }
    }

    /// Returns the mapped memory of the pool.
    pub(super) fn memory(&self) -> &LentSlice {
        &self.memory
    }

    /// Returns the length of the longest block of data in bytes.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Takes blocks for a vring: all of them, or none.
    pub(super) fn allocate_fixed(&mut self, lens: [usize; 3]) -> Option<[Block; 3]> {
        let blocks = lens.map(|len| self.fixed.allocate(len));
        if let [Some(tables), Some(shorts), Some(reserve)] = blocks {
            return Some([tables, shorts, reserve]);
        }
        blocks.into_iter().flatten().for_each(|block| self.fixed.release(block));
        None
    }

    /// Returns a part of the pool for a descriptor.
    pub(super) fn range(offset: usize, len: usize, access: DeviceAccess) -> Option<DeviceRange> {
        let len = u32::try_from(len).ok()?;
        DeviceRange::io(POOL_ADDRESS + offset as u64, len, access)
    }

    /// Returns the length of a vring's reserve in bytes, where `vrings` may run.
    pub(super) fn reserve(&self, vrings: usize) -> usize {
        let share = self.memory.len() / FIXED_PART / 2 / vrings.max(1);
        1 << share.clamp(RESERVE_MIN, RESERVE_MAX).ilog2()
    }
}
