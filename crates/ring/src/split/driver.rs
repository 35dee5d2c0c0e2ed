//! Driver's end of a split virtqueue.

use ringfence_memory::{DeviceAccess, DeviceRange};
use ringfence_wire::numbers::bounded;
use ringfence_wire::virtio::{
    AVAIL_NO_INTERRUPT, DESCRIPTOR_BYTES, Descriptor, SplitLayout, USED_NO_NOTIFY, UsedElement,
    flag,
};

use super::CHAIN_MAX;
use super::memory::{QueueMemory, QueuePages};
use crate::sync::{Ordering, fence};

/// Optional virtqueue features that both sides use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct QueueFeatures {
    /// A chain takes one entry and its own table (`VIRTIO_F_INDIRECT_DESC`).
    pub indirect: bool,
    /// Notifications are requested by index (`VIRTIO_F_EVENT_IDX`).
    pub event_idx: bool,
    /// Buffers are used in order, and one element may stand for several (`VIRTIO_F_IN_ORDER`).
    pub in_order: bool,
}

/// Reasons for which a chain cannot be made available.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PushError {
    /// Fewer free descriptors than the chain needs.
    #[error("{wanted} descriptors where {free} are free")]
    Full {
        /// Descriptors that the chain needs.
        wanted: usize,
        /// Number of free descriptors.
        free: u16,
    },
    /// Chain without descriptors, or with more than [`CHAIN_MAX`].
    #[error("a chain of {len} descriptors, not of 1 to {CHAIN_MAX}")]
    Chain {
        /// Descriptors of the chain.
        len: usize,
    },
    /// Readable descriptor behind a writable one (virtio 1.x, 2.7.4.2).
    #[error("a descriptor to be read behind one to be written")]
    Order,
    /// Total length beyond 32 bits.
    #[error("a chain of more than 4 GiB")]
    TooLong,
}

/// Broken rule of the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum QueueFault {
    /// Used index ahead of the chains in flight.
    #[error("the device announced {announced} used buffers with {in_flight} in flight")]
    Overrun {
        /// Distance that the device claims.
        announced: u16,
        /// Number of chains in flight.
        in_flight: u16,
    },
    /// Buffer id beyond the descriptor table.
    #[error("the device used buffer {id} in a queue of {size}")]
    UnknownId {
        /// Id in the used element.
        id: u32,
        /// Entries of the queue.
        size: u16,
    },
    /// Buffer id without a chain in flight: used before, or never made available.
    #[error("the device used buffer {id}, which is not in flight")]
    NotInFlight {
        /// Id in the used element.
        id: u16,
    },
    /// Length beyond the bytes that the device may write.
    #[error("the device wrote {len} bytes to buffer {id} of {capacity}")]
    Length {
        /// Id in the used element.
        id: u16,
        /// Bytes that the device claims.
        len: u32,
        /// Bytes of the buffer that the device may write.
        capacity: u32,
    },
    /// Element for more buffers than the used index announces.
    #[error("the device used {batch} buffers at once but announced {announced}")]
    Batch {
        /// Buffers up to the one that the element names.
        batch: u16,
        /// Buffers that the used index announces.
        announced: u16,
    },
}

impl QueueFault {
    /// Returns the name of the rule, for its counter.
    pub fn rule(&self) -> &'static str {
        match self {
            QueueFault::Overrun { .. } => "virtqueue_used_overrun",
            QueueFault::UnknownId { .. } => "virtqueue_used_unknown_id",
            QueueFault::NotInFlight { .. } => "virtqueue_used_not_in_flight",
            QueueFault::Length { .. } => "virtqueue_used_length",
            QueueFault::Batch { .. } => "virtqueue_used_batch",
        }
    }
}

/// Buffer that the device has used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Used {
    /// Token that [`DriverQueue::push`] received.
    pub token: u32,
    /// Bytes that the device wrote, at most the writable length.
    pub len: u32,
}

/// Private state of a chain, stored at the index of its first descriptor.
#[derive(Clone, Copy, Debug, Default)]
struct Chain {
    /// Descriptors of the table that the chain takes; 0 if no chain begins here.
    descriptors: u16,
    /// Free-running index of the chain in the available ring.
    avail_index: u16,
    /// Set once the chain was published to the device.
    published: bool,
    capacity: u32,
    token: u32,
}

/// Driver's end of a split virtqueue. The [module](super) has the protocol.
#[derive(Debug)]
pub struct DriverQueue<M = QueuePages> {
    memory: M,
    layout: SplitLayout,
    features: QueueFeatures,
    chains: Vec<Chain>,
    /// First descriptors of the chains in the available ring, as written there.
    heads: Vec<u16>,
    /// Next descriptor of each descriptor in its chain.
    links: Vec<u16>,
    /// Ring of free descriptor indices, starting at `free_first`.
    free: Vec<u16>,
    free_first: u16,
    free_count: u16,
    avail: u16,
    published: u16,
    used: u16,
    /// Used index of the device at the last load.
    used_seen: u16,
    /// Used element that covers several buffers, while some are not popped yet.
    batch: Option<UsedElement>,
    /// A length beyond the capacity is clamped.
    clamps: bool,
}

impl<M: QueueMemory> DriverQueue<M> {
    /// Creates an empty queue in `memory` and initialises its tables. The device must not access them yet.
    /// Interrupts are suppressed.
    pub fn new(memory: M, layout: SplitLayout, features: QueueFeatures) -> DriverQueue<M> {
        for offset in [layout.avail_flags(), layout.avail_idx(), layout.used_flags()] {
            memory.store(offset, 0, Ordering::Relaxed);
        }
        for offset in [layout.used_idx(), layout.used_event(), layout.avail_event()] {
            memory.store(offset, 0, Ordering::Relaxed);
        }
        let size = usize::from(layout.size());
        let mut queue = DriverQueue {
            memory,
            layout,
            features,
            chains: vec![Chain::default(); size],
            heads: vec![0; size],
            links: vec![0; size],
            free: (0..layout.size()).collect(),
            free_first: 0,
            free_count: layout.size(),
            avail: 0,
            published: 0,
            used: 0,
            used_seen: 0,
            batch: None,
            clamps: false,
        };
        queue.suppress();
        queue
    }

    /// Clamps lengths beyond the bytes that the device may write, in place of [`QueueFault::Length`]: some devices count
    /// the bytes that they have read, too.
    pub fn clamp_lengths(&mut self) {
        self.clamps = true;
    }

    /// Returns the number of entries.
    pub fn size(&self) -> u16 {
        self.layout.size()
    }

    /// Returns the negotiated features.
    pub fn features(&self) -> QueueFeatures {
        self.features
    }

    /// Returns the queue's memory.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Returns the offsets of the tables in the memory.
    pub fn layout(&self) -> SplitLayout {
        self.layout
    }

    /// Returns the number of free descriptors. A chain takes one if indirect tables were negotiated.
    pub fn free(&self) -> u16 {
        self.free_count
    }

    /// Returns the number of published buffers that were not popped.
    pub fn in_flight(&self) -> u16 {
        self.published.wrapping_sub(self.used)
    }

    /// Adds a buffer of these ranges, which the next [`publish`](Self::publish) makes available.
    /// [`pop`](Self::pop) returns `token` with it.
    ///
    /// # Errors
    ///
    /// Returns [`PushError`] and changes nothing.
    pub fn push(&mut self, ranges: &[DeviceRange], token: u32) -> Result<(), PushError> {
        if ranges.is_empty() || ranges.len() > CHAIN_MAX {
            return Err(PushError::Chain { len: ranges.len() });
        }
        let capacity = check_ranges(ranges)?;
        let indirect = self.features.indirect && ranges.len() > 1;
        let wanted = if indirect { 1 } else { ranges.len() };
        if wanted > usize::from(self.free_count) {
            return Err(PushError::Full { wanted, free: self.free_count });
        }
        let head = self.nth_free(0);
        if indirect {
            self.write_indirect(head, ranges);
        } else {
            self.write_direct(ranges);
        }
        let descriptors = bounded(wanted, self.free_count);
        self.free_first = self.free_first.wrapping_add(descriptors);
        self.free_count -= descriptors;
        self.chains[usize::from(head)] =
            Chain { descriptors, avail_index: self.avail, published: false, capacity, token };
        let slot_index = self.slot_index(self.avail);
        self.heads[slot_index] = head;
        self.memory.store(self.layout.avail_entry(self.avail), head, Ordering::Relaxed);
        self.avail = self.avail.wrapping_add(1);
        Ok(())
    }

    /// Publishes all pushed buffers to the device. Returns `true` if the device wants a kick.
    #[must_use]
    pub fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.avail);
        if old == new {
            return false;
        }
        while self.published != new {
            let head = self.heads[self.slot_index(self.published)];
            self.chains[usize::from(head)].published = true;
            self.published = self.published.wrapping_add(1);
        }
        self.memory.store(self.layout.avail_idx(), new, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.features.event_idx {
            let event = self.memory.load(self.layout.avail_event(), Ordering::Relaxed);
            passes(old, new, event)
        } else {
            let flags = self.memory.load(self.layout.used_flags(), Ordering::Relaxed);
            flags & USED_NO_NOTIFY == 0
        }
    }

    /// Returns the next buffer that the device has used.
    ///
    /// # Errors
    ///
    /// Returns [`QueueFault`]. The device cannot be trusted any more, and the queue must not be used.
    pub fn pop(&mut self) -> Result<Option<Used>, QueueFault> {
        if self.announced()? == 0 {
            return Ok(None);
        }
        let used = if self.features.in_order { self.pop_in_order()? } else { self.pop_any()? };
        self.used = self.used.wrapping_add(1);
        Ok(Some(used))
    }

    /// Suppresses interrupts; with `EVENT_IDX`, only for the next 65535 buffers.
    pub fn suppress(&mut self) {
        if self.features.event_idx {
            let past_index = self.used.wrapping_sub(1);
            self.memory.store(self.layout.used_event(), past_index, Ordering::Relaxed);
        } else {
            self.memory.store(self.layout.avail_flags(), AVAIL_NO_INTERRUPT, Ordering::Relaxed);
        }
    }

    /// Requests an interrupt after `count` more used buffers, clamped to 1..=in flight; without `EVENT_IDX`, after
    /// one. Then checks again: returns `true` if they were used already and an interrupt may not come.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`DriverQueue::pop`].
    pub fn arm(&mut self, count: u16) -> Result<bool, QueueFault> {
        let count =
            if self.features.event_idx { count.clamp(1, self.in_flight().max(1)) } else { 1 };
        if self.features.event_idx {
            let event = self.used.wrapping_add(count - 1);
            self.memory.store(self.layout.used_event(), event, Ordering::Relaxed);
        } else {
            self.memory.store(self.layout.avail_flags(), 0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        self.used_seen = self.used;
        Ok(self.announced()? >= count)
    }

    /// Returns the number of used buffers that were not popped.
    fn announced(&mut self) -> Result<u16, QueueFault> {
        if self.used_seen == self.used {
            self.used_seen = self.memory.load(self.layout.used_idx(), Ordering::Acquire);
        }
        let announced = self.used_seen.wrapping_sub(self.used);
        let in_flight = self.in_flight();
        if announced > in_flight {
            return Err(QueueFault::Overrun { announced, in_flight });
        }
        Ok(announced)
    }

    /// Fetches the next used element, once, and checks that it names a chain in flight.
    fn fetch_element(&self) -> Result<(u16, UsedElement), QueueFault> {
        let bytes = self.memory.fetch(self.layout.used_entry(self.used));
        let element = UsedElement::from_bytes(bytes);
        let size = self.layout.size();
        let unknown = QueueFault::UnknownId { id: element.id, size };
        let id = u16::try_from(element.id).ok().filter(|id| *id < size).ok_or(unknown)?;
        let chain = &self.chains[usize::from(id)];
        if chain.descriptors == 0 || !chain.published {
            return Err(QueueFault::NotInFlight { id });
        }
        Ok((id, element))
    }

    fn pop_any(&mut self) -> Result<Used, QueueFault> {
        let (id, element) = self.fetch_element()?;
        self.release(id, element.len)
    }

    /// Returns the oldest buffer, used alone or in a batch. The element of a batch stands at the first buffer's
    /// position, names the last buffer and has its length. The others were filled (virtio 1.x, 2.7.8).
    fn pop_in_order(&mut self) -> Result<Used, QueueFault> {
        let oldest = self.heads[self.slot_index(self.used)];
        let element = match self.batch {
            Some(element) => element,
            None => {
                let (id, element) = self.fetch_element()?;
                let last = self.chains[usize::from(id)].avail_index;
                let batch = last.wrapping_sub(self.used).wrapping_add(1);
                let announced = self.announced()?;
                if batch > announced {
                    return Err(QueueFault::Batch { batch, announced });
                }
                element
            }
        };
        if u32::from(oldest) == element.id {
            self.batch = None;
            return self.release(oldest, element.len);
        }
        self.batch = Some(element);
        self.release(oldest, self.chains[usize::from(oldest)].capacity)
    }

    /// Frees the descriptors of a chain.
    fn release(&mut self, head: u16, len: u32) -> Result<Used, QueueFault> {
        let Chain { descriptors, capacity, token, .. } = self.chains[usize::from(head)];
        if len > capacity && !self.clamps {
            return Err(QueueFault::Length { id: head, len, capacity });
        }
        let len = len.min(capacity);
        self.chains[usize::from(head)].descriptors = 0;
        let mut number = head;
        for _ in 0..descriptors {
            let slot_index = self.slot_index(self.free_first.wrapping_add(self.free_count));
            self.free[slot_index] = number;
            self.free_count += 1;
            number = self.links[usize::from(number)];
        }
        Ok(Used { token, len })
    }

    fn write_direct(&mut self, ranges: &[DeviceRange]) {
        for (n, range) in (0..).zip(ranges) {
            let number = self.nth_free(n);
            let last = usize::from(n) + 1 == ranges.len();
            let next = if last { 0 } else { self.nth_free(n + 1) };
            self.links[usize::from(number)] = next;
            let descriptor = descriptor_of(range, (!last).then_some(next));
            self.memory.put(self.layout.descriptor(number), &descriptor.to_bytes());
        }
    }

    fn write_indirect(&mut self, head: u16, ranges: &[DeviceRange]) {
        let mut table = [0; CHAIN_MAX * DESCRIPTOR_BYTES];
        let slots = table.chunks_exact_mut(DESCRIPTOR_BYTES);
        for ((next, range), slot) in (1..).zip(ranges).zip(slots) {
            let last = usize::from(next) == ranges.len();
            slot.copy_from_slice(&descriptor_of(range, (!last).then_some(next)).to_bytes());
        }
        let len = ranges.len() * DESCRIPTOR_BYTES;
        let offset = QueuePages::indirect(self.layout, head);
        self.memory.put(offset, &table[..len]);
        let outer = Descriptor {
            address: self.memory.indirect_address(offset),
            len: bounded(len, u32::MAX),
            flags: flag::INDIRECT,
            next: 0,
        };
        self.memory.put(self.layout.descriptor(head), &outer.to_bytes());
    }

    /// Returns the index of the `n`-th free descriptor.
    fn nth_free(&self, n: u16) -> u16 {
        self.free[self.slot_index(self.free_first.wrapping_add(n))]
    }

    fn slot_index(&self, index: u16) -> usize {
        usize::from(index & (self.layout.size() - 1))
    }
}

/// Checks the order and total of a chain's ranges; returns the bytes that the device may write.
fn check_ranges(ranges: &[DeviceRange]) -> Result<u32, PushError> {
    let (mut total, mut capacity) = (0u32, 0u32);
    for range in ranges {
        total = total.checked_add(range.len()).ok_or(PushError::TooLong)?;
        match range.access() {
            DeviceAccess::Write => capacity += range.len(),
            DeviceAccess::Read if capacity > 0 => return Err(PushError::Order),
            DeviceAccess::Read => {}
        }
    }
    Ok(capacity)
}

fn descriptor_of(range: &DeviceRange, next: Option<u16>) -> Descriptor {
    let write = if range.access() == DeviceAccess::Write { flag::WRITE } else { 0 };
    let chained = if next.is_some() { flag::NEXT } else { 0 };
    Descriptor {
        address: range.address(),
        len: range.len(),
        flags: write | chained,
        next: next.unwrap_or(0),
    }
}

/// Returns `true` if an index that moved from `old` to `new` passed `event` (`vring_need_event`).
#[inline]
pub(super) fn passes(old: u16, new: u16, event: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(not(loom))]
#[cfg(test)]
impl<M: QueueMemory> DriverQueue<M> {
    /// Moves an empty queue to any index, to test the wrap-around of indices.
    pub(super) fn start_at(&mut self, index: u16) {
        (self.avail, self.published) = (index, index);
        (self.used, self.used_seen) = (index, index);
        self.suppress();
    }
}
