//! What a split virtqueue needs of the memory it lies in.

use ringfence_memory::{DeviceAccess, DeviceRange, LentSlice, OutOfRange};
use ringfence_wire::virtio::{DESCRIPTOR_BYTES, SplitLayout};

use super::CHAIN_MAX;
use crate::sync::Ordering;

/// Octets of the indirect table that each entry of a queue has.
const INDIRECT_BYTES: usize = CHAIN_MAX * DESCRIPTOR_BYTES;

/// Memory that holds a queue: the tables of its [`SplitLayout`], and behind them an indirect table for each
/// entry.
pub trait QueueMemory {
    /// Loads the u16 at `offset`, as it is in memory: little endian.
    fn load(&self, offset: usize, order: Ordering) -> u16;
    /// Stores the u16 at `offset`.
    fn store(&self, offset: usize, value: u16, order: Ordering);
    /// Fetches bytes at `offset`, each once.
    fn fetch<const N: usize>(&self, offset: usize) -> [u8; N];
    /// Stores bytes at `offset`.
    fn put(&self, offset: usize, bytes: &[u8]);
    /// The address of the indirect table of an entry, for the device.
    fn indirect_address(&self, offset: usize) -> u64;
}

/// Lent memory that was checked to hold a whole queue, so that no later access can be out of range.
#[derive(Clone, Debug)]
pub struct QueuePages {
    lent: LentSlice,
}

impl QueuePages {
    /// Octets of a queue of that layout, with its indirect tables.
    pub const fn bytes(layout: SplitLayout) -> usize {
        layout.bytes() + layout.size() as usize * INDIRECT_BYTES
    }

    /// Where the indirect table of the descriptor `index` is.
    pub(super) const fn indirect(layout: SplitLayout, index: u16) -> usize {
        layout.bytes() + (index & (layout.size() - 1)) as usize * INDIRECT_BYTES
    }

    /// Takes the beginning of `lent` for a queue of that layout.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`] when it is too short, read-only, or not aligned to 16.
    pub fn new(lent: &LentSlice, layout: SplitLayout) -> Result<QueuePages, OutOfRange> {
        if !lent.is_writable() {
            return Err(OutOfRange::ReadOnly);
        }
        if !lent.is_aligned_to(DESCRIPTOR_BYTES) {
            return Err(OutOfRange::Unaligned { offset: 0, width: DESCRIPTOR_BYTES });
        }
        Ok(QueuePages { lent: lent.slice(0, QueuePages::bytes(layout))? })
    }

    /// A part of the queue's memory, as a device is told of it.
    ///
    /// # Errors
    ///
    /// [`OutOfRange`].
    pub fn device_range(&self, offset: usize, len: usize) -> Result<DeviceRange, OutOfRange> {
        self.lent.device_range(offset, len, DeviceAccess::Write)
    }
}

impl QueueMemory for QueuePages {
    #[inline]
    fn load(&self, offset: usize, order: Ordering) -> u16 {
        u16::from_le(self.lent.load_u16(offset, order).unwrap_or_default())
    }

    #[inline]
    fn store(&self, offset: usize, value: u16, order: Ordering) {
        let stored = self.lent.store_u16(offset, value.to_le(), order);
        debug_assert!(stored.is_ok(), "a queue's tables lie inside its memory");
    }

    #[inline]
    fn fetch<const N: usize>(&self, offset: usize) -> [u8; N] {
        let fetched = self.lent.fetch::<N>(offset);
        debug_assert!(fetched.is_ok(), "a queue's tables lie inside its memory");
        fetched.map_or([0; N], ringfence_memory::Raw::into_unchecked)
    }

    #[inline]
    fn put(&self, offset: usize, bytes: &[u8]) {
        let stored = self.lent.copy_from(offset, bytes);
        debug_assert!(stored.is_ok(), "a queue's tables lie inside its memory");
    }

    #[inline]
    fn indirect_address(&self, offset: usize) -> u64 {
        let range = self.lent.device_range(offset, INDIRECT_BYTES, DeviceAccess::Read);
        debug_assert!(range.is_ok(), "a queue's tables lie inside its memory");
        range.map_or(0, DeviceRange::address)
    }
}
