//! Backend's end of a split virtqueue: the device that serves a driver it does not trust.
//!
//! [`BackendQueue::take`] fetches the next chain of descriptors, [`BackendQueue::finish`] returns it, and
//! [`BackendQueue::publish`] shows the returned chains to the driver.
//!
//! # Validation of the driver
//!
//! Each rule has its own [`DriverFault`]. After a fault the queue must not be used:
//!
//! * The available index advances by at most the size of the queue.
//! * A head and each link name a descriptor of their table.
//! * A chain has at most [`LINKS_MAX`] descriptors, so a loop ends.
//! * Writable descriptors come behind readable ones.
//! * An indirect table is the last descriptor of its chain (virtio 1.x, 2.7.5.3), and holds no other indirect table.
//!
//! Each descriptor is fetched once. The addresses in it are not checked here: the caller translates them.
//!
//! # Crashes
//!
//! A queue with an [`InflightLog`] keeps its chains in flight there, and takes those first that an earlier backend left
//! ([`BackendQueue::with_log`]).

use std::collections::VecDeque;

use ringfence_memory::{LentSlice, OutOfRange, Raw};
use ringfence_wire::virtio::{
    AVAIL_NO_INTERRUPT, DESCRIPTOR_BYTES, Descriptor, QUEUE_SIZE_MAX, USED_BYTES, USED_NO_NOTIFY,
    UsedElement, flag,
};

use super::driver::{QueueFeatures, passes};
use super::inflight::{InflightLog, LogFault};
use crate::sync::{Ordering, fence};

/// Maximum descriptors of a chain.
pub const LINKS_MAX: usize = 1024;

/// Bytes of a table before its ring: flags and index.
const RING_HEADER: usize = 4;

/// Tables of a queue that cannot be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TableFault {
    /// Size that is no power of two up to 32768.
    #[error("a queue of {size} entries")]
    Size {
        /// Number of entries.
        size: u32,
    },
    /// Table that is too short, not aligned, or read-only.
    #[error("the {table}: {fault}")]
    Table {
        table: &'static str,
        /// Rule that it breaks.
        fault: OutOfRange,
    },
}

/// Broken rule of the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DriverFault {
    /// Available index further ahead than the queue has entries.
    #[error("the driver announced {announced} buffers in a queue of {size}")]
    Overrun {
        /// Distance that the driver claims.
        announced: u16,
        /// Entries of the queue.
        size: u16,
    },
    /// Descriptor beyond its table.
    #[error("descriptor {index} of a table of {len}")]
    Index {
        /// Number of the descriptor.
        index: u16,
        /// Descriptors of the table.
        len: u16,
    },
    /// Chain with a loop, or with more than [`LINKS_MAX`] descriptors.
    #[error("a chain of more than {limit} descriptors")]
    Links { limit: usize },
    /// Readable descriptor behind a writable one (virtio 1.x, 2.7.4.2).
    #[error("a descriptor to be read behind one to be written")]
    Order,
    /// Indirect table that was not negotiated, or is not the last of its chain, or has an invalid length.
    #[error("an invalid indirect table of {len} bytes")]
    Indirect {
        /// Length of the table in bytes.
        len: u32,
    },
    /// Indirect table outside of the device's memory.
    #[error("an indirect table at {address:#x}, outside of the device's memory")]
    Unmapped { address: u64 },
}

/// Tables of a queue, checked to hold `size` entries, so that no later access is out of range.
#[derive(Clone, Debug)]
pub struct QueueTables {
    size: u16,
    descriptors: LentSlice,
    available: LentSlice,
    used: LentSlice,
}

impl QueueTables {
    /// Returns the lengths of descriptor table, available ring and used ring in bytes, without the event indices.
    ///
    /// # Errors
    ///
    /// Returns [`TableFault::Size`] unless `size` is a power of two up to 32768.
    pub fn lengths(size: u32) -> Result<[usize; 3], TableFault> {
        let valid = u16::try_from(size).ok();
        let valid = valid.filter(|size| size.is_power_of_two() && *size <= QUEUE_SIZE_MAX);
        let entries = usize::from(valid.ok_or(TableFault::Size { size })?);
        let rings = [2, USED_BYTES].map(|entry| RING_HEADER + entries * entry);
        Ok([entries * DESCRIPTOR_BYTES, rings[0], rings[1]])
    }

    /// Uses the beginnings of these slices as the tables of a queue.
    ///
    /// # Errors
    ///
    /// Returns [`TableFault`] for an invalid size, and for a table that is too short, not aligned, or read-only.
    pub fn new(
        size: u32,
        event_idx: bool,
        [descriptors, available, used]: [&LentSlice; 3],
    ) -> Result<QueueTables, TableFault> {
        let lengths = QueueTables::lengths(size)?;
        let more = if event_idx { 2 } else { 0 };
        let table = |name, lent: &LentSlice, len, alignment| {
            let failed = |fault| TableFault::Table { table: name, fault };
            if !lent.is_writable() {
                return Err(failed(OutOfRange::ReadOnly));
            }
            if !lent.is_aligned_to(alignment) {
                return Err(failed(OutOfRange::Unaligned { offset: 0, width: alignment }));
            }
            lent.slice(0, len).map_err(failed)
        };
        Ok(QueueTables {
            size: u16::try_from(size).map_err(|_| TableFault::Size { size })?,
            descriptors: table("descriptor table", descriptors, lengths[0], DESCRIPTOR_BYTES)?,
            available: table("available ring", available, lengths[1] + more, 2)?,
            used: table("used ring", used, lengths[2] + more, 4)?,
        })
    }

    fn ring_index(&self, index: u16) -> usize {
        usize::from(index & (self.size - 1))
    }
}

/// Backend's end of a split virtqueue. See the [module](self).
#[derive(Debug)]
pub struct BackendQueue {
    tables: QueueTables,
    features: QueueFeatures,
    /// Index of the next chain in the available ring.
    avail: u16,
    /// Available index of the driver at the last load.
    avail_seen: u16,
    used: u16,
    /// Used index at the last check of the driver's event index.
    signalled: u16,
    log: Option<InflightLog>,
    /// Heads of the chains that an earlier backend took and did not return.
    left_over: VecDeque<u16>,
    /// Number of those at the start.
    found: usize,
}

impl BackendQueue {
    /// Continues a queue at the available index `next`. The used index is the one in memory.
    pub fn new(tables: QueueTables, features: QueueFeatures, next: u16) -> BackendQueue {
        let used = load(&tables.used, 2, Ordering::Relaxed);
        BackendQueue {
            tables,
            features,
            avail: next,
            avail_seen: next,
            used,
            signalled: used,
            log: None,
            left_over: VecDeque::new(),
            found: 0,
        }
    }

    /// Continues a queue whose chains in flight are in a log for so many descriptors, at least those of the queue. If the log has chains of an earlier backend, they are taken
    /// first, and the available index is the one at which that backend stopped. Otherwise it is `next`.
    ///
    /// # Errors
    ///
    /// Returns [`LogFault`] for a log that does not belong to the queue.
    pub fn with_log(
        tables: QueueTables,
        features: QueueFeatures,
        next: u16,
        (log, size): (LentSlice, u16),
    ) -> Result<BackendQueue, LogFault> {
        let mut queue = BackendQueue::new(tables, features, next);
        if size < queue.size() {
            return Err(LogFault::Size { found: size, size: queue.size() });
        }
        let (log, left_over) = InflightLog::attach(&log, size, queue.used)?;
        if let Ok(count @ 1..) = u16::try_from(left_over.len()) {
            // Each chain that was taken is either in the used ring or in the log.
            queue.avail = queue.used.wrapping_add(count);
            queue.avail_seen = queue.avail;
        }
        queue.log = Some(log);
        queue.found = left_over.len();
        queue.left_over = left_over.into();
        Ok(queue)
    }

    /// Returns `true` if chains of an earlier backend were not taken yet.
    pub fn has_left_over(&self) -> bool {
        !self.left_over.is_empty()
    }

    /// Returns the number of chains that the log had at the start. They are taken first.
    pub fn found_in_log(&self) -> usize {
        self.found
    }

    /// Returns `true` if the chains in flight are in a log.
    pub fn has_log(&self) -> bool {
        self.log.is_some()
    }

    /// Returns the number of entries.
    pub fn size(&self) -> u16 {
        self.tables.size
    }

    /// Returns the index of the next chain in the available ring.
    pub fn next_available(&self) -> u16 {
        self.avail
    }

    /// Replaces the tables by others with the same content.
    pub fn move_to(&mut self, tables: QueueTables) {
        self.tables = tables;
    }

    /// Returns the number of available chains that were not taken.
    ///
    /// # Errors
    ///
    /// Returns [`DriverFault::Overrun`].
    pub fn available(&mut self) -> Result<u16, DriverFault> {
        let seen = load(&self.tables.available, 2, Ordering::Acquire);
        let announced = seen.wrapping_sub(self.avail);
        let size = self.tables.size;
        if announced > size {
            return Err(DriverFault::Overrun { announced, size });
        }
        self.avail_seen = seen;
        Ok(announced)
    }

    /// Takes the next available chain: replaces the content of `chain` by its descriptors, and returns its head for
    /// [`finish`](Self::finish). `memory` returns the memory of an indirect table.
    ///
    /// # Errors
    ///
    /// Returns the [`DriverFault`] of the first broken rule.
    pub fn take(
        &mut self,
        memory: impl FnOnce(u64, usize) -> Option<LentSlice>,
        chain: &mut Vec<Descriptor>,
    ) -> Result<Option<u16>, DriverFault> {
        chain.clear();
        if let Some(head) = self.left_over.pop_front() {
            return self.fetch(head, memory, chain).map(|()| Some(head));
        }
        if self.avail == self.avail_seen && self.available()? == 0 {
            return Ok(None);
        }
        let entry = RING_HEADER + self.tables.ring_index(self.avail) * 2;
        let head = load(&self.tables.available, entry, Ordering::Relaxed);
        self.fetch(head, memory, chain)?;
        if let Some(log) = &mut self.log {
            log.take(head);
        }
        self.avail = self.avail.wrapping_add(1);
        Ok(Some(head))
    }

    /// Fetches the descriptors of a chain.
    fn fetch(
        &self,
        head: u16,
        memory: impl FnOnce(u64, usize) -> Option<LentSlice>,
        chain: &mut Vec<Descriptor>,
    ) -> Result<(), DriverFault> {
        let first = descriptor(&self.tables.descriptors, head, self.tables.size)?;
        let last = follow(&self.tables.descriptors, self.tables.size, first, chain)?;
        if let Some(Descriptor { address, len, flags, .. }) = last {
            let links = len as usize / DESCRIPTOR_BYTES;
            let valid = u16::try_from(links).ok().filter(|links| {
                self.features.indirect
                    && flags & flag::NEXT == 0
                    && (len as usize).is_multiple_of(DESCRIPTOR_BYTES)
                    && (1..=LINKS_MAX).contains(&usize::from(*links))
            });
            let links = valid.ok_or(DriverFault::Indirect { len })?;
            let table = memory(address, len as usize).ok_or(DriverFault::Unmapped { address })?;
            let first = descriptor(&table, 0, links)?;
            if let Some(inner) = follow(&table, links, first, chain)? {
                return Err(DriverFault::Indirect { len: inner.len });
            }
        }
        Ok(())
    }

    /// Returns the last chains that were taken, which are not finished and were not found in the log: they are available
    /// again.
    pub fn untake(&mut self, heads: impl IntoIterator<Item = u16>) {
        for head in heads {
            if let Some(log) = &mut self.log {
                log.untake(head);
            }
            self.avail = self.avail.wrapping_sub(1);
        }
    }

    /// Returns a chain, of which `len` bytes were written. [`publish`](Self::publish) shows it to the driver.
    pub fn finish(&mut self, head: u16, len: u32) {
        let entry = RING_HEADER + self.tables.ring_index(self.used) * USED_BYTES;
        let element = UsedElement { id: head.into(), len };
        let stored = self.tables.used.copy_from(entry, &element.to_bytes());
        debug_assert!(stored.is_ok(), "a queue's tables lie inside their memory");
        if let Some(log) = &mut self.log {
            log.finish(head);
        }
        self.used = self.used.wrapping_add(1);
    }

    /// Publishes the returned chains. Returns `true` if the driver wants an interrupt.
    #[must_use]
    pub fn publish(&mut self) -> bool {
        if self.used == self.signalled {
            return false;
        }
        store(&self.tables.used, 2, self.used, Ordering::Release);
        if let Some(log) = &mut self.log {
            log.publish(self.used);
        }
        fence(Ordering::SeqCst);
        let old = core::mem::replace(&mut self.signalled, self.used);
        if self.features.event_idx {
            let event = RING_HEADER + usize::from(self.tables.size) * 2;
            passes(old, self.used, load(&self.tables.available, event, Ordering::Relaxed))
        } else {
            load(&self.tables.available, 0, Ordering::Relaxed) & AVAIL_NO_INTERRUPT == 0
        }
    }

    /// Suppresses kicks from the driver.
    pub fn suppress(&mut self) {
        if self.features.event_idx {
            self.set_event(self.avail.wrapping_sub(1));
        } else {
            store(&self.tables.used, 0, USED_NO_NOTIFY, Ordering::Relaxed);
        }
    }

    /// Requests a kick once more than `few` chains are available. Returns `true` if there are already.
    ///
    /// # Errors
    ///
    /// Returns [`DriverFault::Overrun`].
    pub fn arm(&mut self, few: u16) -> Result<bool, DriverFault> {
        if self.features.event_idx {
            self.set_event(self.avail.wrapping_add(few));
        } else {
            store(&self.tables.used, 0, 0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        self.available().map(|available| available > few)
    }

    fn set_event(&self, index: u16) {
        let event = RING_HEADER + usize::from(self.tables.size) * USED_BYTES;
        store(&self.tables.used, event, index, Ordering::Relaxed);
    }
}

/// Appends a chain that begins with `first`, in a table of `len` descriptors. Returns the descriptor of an indirect table,
/// where it ends.
fn follow(
    table: &LentSlice,
    len: u16,
    first: Descriptor,
    chain: &mut Vec<Descriptor>,
) -> Result<Option<Descriptor>, DriverFault> {
    let limit = LINKS_MAX.min(chain.len() + usize::from(len));
    let mut next = first;
    loop {
        if next.flags & flag::INDIRECT != 0 {
            return Ok(Some(next));
        }
        let is_readable = next.flags & flag::WRITE == 0;
        if is_readable && chain.last().is_some_and(|last| last.flags & flag::WRITE != 0) {
            return Err(DriverFault::Order);
        }
        if chain.len() == limit {
            return Err(DriverFault::Links { limit });
        }
        chain.push(next);
        if next.flags & flag::NEXT == 0 {
            return Ok(None);
        }
        next = descriptor(table, next.next, len)?;
    }
}

/// Fetches a descriptor of a table of `len`.
fn descriptor(table: &LentSlice, index: u16, len: u16) -> Result<Descriptor, DriverFault> {
    let fault = DriverFault::Index { index, len };
    if index >= len {
        return Err(fault);
    }
    let fetched = table.fetch::<DESCRIPTOR_BYTES>(usize::from(index) * DESCRIPTOR_BYTES);
    fetched.map(Raw::into_unchecked).map(|bytes| Descriptor::from_bytes(&bytes)).map_err(|_| fault)
}

fn load(table: &LentSlice, offset: usize, order: Ordering) -> u16 {
    let loaded = table.load_u16(offset, order);
    debug_assert!(loaded.is_ok(), "a queue's tables lie inside their memory");
    u16::from_le(loaded.unwrap_or_default())
}

fn store(table: &LentSlice, offset: usize, value: u16, order: Ordering) {
    let stored = table.store_u16(offset, value.to_le(), order);
    debug_assert!(stored.is_ok(), "a queue's tables lie inside their memory");
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests;
