//! Memory of a split virtqueue: the accesses of both ends, and their implementation on lent memory.

use ringfence_memory::{DeviceAccess, DeviceRange, LentSlice, OutOfRange};
use ringfence_wire::virtio::{DESCRIPTOR_BYTES, SplitLayout};

use super::CHAIN_MAX;
use crate::sync::Ordering;

/// Length of the indirect table of each queue entry in bytes.
const INDIRECT_BYTES: usize = CHAIN_MAX * DESCRIPTOR_BYTES;

/// Memory that holds a queue: the tables of its [`SplitLayout`], followed by an indirect table per entry.
pub trait QueueMemory {
    /// Loads the little-endian u16 at `offset`.
    fn load(&self, offset: usize, order: Ordering) -> u16;
    /// Stores the little-endian u16 at `offset`.
    fn store(&self, offset: usize, value: u16, order: Ordering);
    /// Fetches bytes at `offset`, each once.
    fn fetch<const N: usize>(&self, offset: usize) -> [u8; N];
    /// Stores bytes at `offset`.
    fn put(&self, offset: usize, bytes: &[u8]);
    /// Returns the device's address of the indirect table at `offset`.
    fn indirect_address(&self, offset: usize) -> u64;
}

/// Lent memory that was checked to hold a whole queue, so that no later access is out of range.
#[derive(Clone, Debug)]
pub struct QueuePages {
    lent: LentSlice,
    /// Address of the first byte for a device behind an address space. Else it uses addresses of this process.
    io: Option<u64>,
}

impl QueuePages {
    /// Returns the bytes of a queue with this layout, indirect tables included.
    pub const fn bytes(layout: SplitLayout) -> usize {
        layout.bytes() + layout.size() as usize * INDIRECT_BYTES
    }

    /// Returns the offset of the indirect table of the descriptor `index`.
    pub(super) const fn indirect(layout: SplitLayout, index: u16) -> usize {
        layout.bytes() + (index & (layout.size() - 1)) as usize * INDIRECT_BYTES
    }

    /// Uses the beginning of `lent` as a queue with this layout.
    ///
    /// # Errors
    ///
    /// Returns [`OutOfRange`] if `lent` is too short, read-only, or not aligned to 16.
    pub fn new(lent: &LentSlice, layout: SplitLayout) -> Result<QueuePages, OutOfRange> {
        if !lent.is_writable() {
            return Err(OutOfRange::ReadOnly);
        }
        if !lent.is_aligned_to(DESCRIPTOR_BYTES) {
            return Err(OutOfRange::Unaligned { offset: 0, width: DESCRIPTOR_BYTES });
        }
        Ok(QueuePages { lent: lent.slice(0, QueuePages::bytes(layout))?, io: None })
    }

    /// Uses these pages for a device to which they begin at the address `start`.
    #[must_use]
    pub fn at_io_address(self, start: u64) -> QueuePages {
        QueuePages { io: Some(start), ..self }
    }

    /// Returns a range of the queue's memory for a device.
    ///
    /// # Errors
    ///
    /// Returns [`OutOfRange`] if the range does not lie inside.
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
        if let Some(start) = self.io {
            return start.wrapping_add(offset as u64);
        }
        let range = self.lent.device_range(offset, INDIRECT_BYTES, DeviceAccess::Read);
        debug_assert!(range.is_ok(), "a queue's tables lie inside its memory");
        range.map_or(0, DeviceRange::address)
    }
}
