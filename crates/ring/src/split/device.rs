//! Device's end of a split virtqueue for tests: correct, unless a test makes it write other values.

use ringfence_wire::virtio::{
    AVAIL_NO_INTERRUPT, DESCRIPTOR_BYTES, Descriptor, SplitLayout, USED_NO_NOTIFY, UsedElement,
    flag,
};

use super::driver::{QueueFeatures, passes};
use super::memory::{QueueMemory, QueuePages};
use crate::sync::{Ordering, fence};

/// Buffer that the driver made available.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TakenChain {
    /// Index of the first descriptor.
    pub head: u16,
    /// All descriptors; those of an indirect table replace the one that names it.
    pub chain: Vec<Descriptor>,
}

impl TakenChain {
    /// Returns the bytes that the device may write.
    pub fn capacity(&self) -> u32 {
        self.chain.iter().filter(|d| d.flags & flag::WRITE != 0).map(|d| d.len).sum()
    }
}

/// Device's end of a split virtqueue.
#[derive(Debug)]
pub struct DeviceQueue<M = QueuePages> {
    memory: M,
    layout: SplitLayout,
    features: QueueFeatures,
    avail: u16,
    used: u16,
    /// Used index at the last check of the driver's event index.
    signalled: u16,
}

impl<M: QueueMemory> DeviceQueue<M> {
    /// Creates the device's end of a queue that [`DriverQueue::new`](super::DriverQueue::new) initialised.
    pub fn new(memory: M, layout: SplitLayout, features: QueueFeatures) -> DeviceQueue<M> {
        DeviceQueue { memory, layout, features, avail: 0, used: 0, signalled: 0 }
    }

    /// Moves an empty queue to `index`, to test the wrap-around of indices.
    pub fn start_at(&mut self, index: u16) {
        (self.avail, self.used, self.signalled) = (index, index, index);
        self.memory.store(self.layout.avail_idx(), index, Ordering::Relaxed);
        self.memory.store(self.layout.used_idx(), index, Ordering::Relaxed);
    }

    /// Returns the number of available buffers that were not taken.
    pub fn available(&self) -> u16 {
        self.memory.load(self.layout.avail_idx(), Ordering::Acquire).wrapping_sub(self.avail)
    }

    /// Takes the next available buffer.
    ///
    /// # Panics
    ///
    /// Panics if the driver breaks a rule: a chain with a loop, or an indirect table at another address.
    pub fn take(&mut self) -> Option<TakenChain> {
        if self.available() == 0 {
            return None;
        }
        let head = self.memory.load(self.layout.avail_entry(self.avail), Ordering::Relaxed);
        self.avail = self.avail.wrapping_add(1);
        Some(TakenChain { head, chain: self.chain(head) })
    }

    fn chain(&self, head: u16) -> Vec<Descriptor> {
        let outer = Descriptor::from_bytes(&self.memory.fetch(self.layout.descriptor(head)));
        let mut chain = Vec::new();
        if outer.flags & flag::INDIRECT != 0 {
            let table = QueuePages::indirect(self.layout, head);
            assert_eq!(outer.address, self.memory.indirect_address(table), "the entry's own table");
            for n in 0..outer.len as usize / DESCRIPTOR_BYTES {
                let at = table + n * DESCRIPTOR_BYTES;
                chain.push(Descriptor::from_bytes(&self.memory.fetch(at)));
            }
            return chain;
        }
        let mut next = Some(head);
        while let Some(number) = next {
            let descriptor =
                Descriptor::from_bytes(&self.memory.fetch(self.layout.descriptor(number)));
            chain.push(descriptor);
            assert!(chain.len() <= usize::from(self.layout.size()), "a chain with a loop");
            next = (descriptor.flags & flag::NEXT != 0).then_some(descriptor.next);
        }
        chain
    }

    /// Marks a buffer as used; [`publish`](Self::publish) shows it to the driver.
    pub fn finish(&mut self, head: u16, len: u32) {
        self.put_used(UsedElement { id: head.into(), len }, 1);
    }

    /// Marks `count` buffers as used with one element that names the last one, `head` (with `IN_ORDER`).
    pub fn finish_batch(&mut self, head: u16, len: u32, count: u16) {
        self.put_used(UsedElement { id: head.into(), len }, count);
    }

    /// Writes any used element and advances by `count`.
    pub fn put_used(&mut self, element: UsedElement, count: u16) {
        self.memory.put(self.layout.used_entry(self.used), &element.to_bytes());
        self.used = self.used.wrapping_add(count);
    }

    /// Publishes the used buffers. Returns `true` if the driver wants an interrupt.
    #[must_use]
    pub fn publish(&mut self) -> bool {
        self.publish_index(self.used)
    }

    /// Publishes any used index. Returns `true` if the driver wants an interrupt.
    #[must_use]
    pub fn publish_index(&mut self, index: u16) -> bool {
        self.used = index;
        self.memory.store(self.layout.used_idx(), index, Ordering::Release);
        fence(Ordering::SeqCst);
        let old = core::mem::replace(&mut self.signalled, index);
        if self.features.event_idx {
            let event = self.memory.load(self.layout.used_event(), Ordering::Relaxed);
            passes(old, index, event)
        } else {
            let flags = self.memory.load(self.layout.avail_flags(), Ordering::Relaxed);
            flags & AVAIL_NO_INTERRUPT == 0
        }
    }

    /// Suppresses kicks from the driver.
    pub fn suppress(&mut self) {
        if self.features.event_idx {
            let past_index = self.avail.wrapping_sub(1);
            self.memory.store(self.layout.avail_event(), past_index, Ordering::Relaxed);
        } else {
            self.memory.store(self.layout.used_flags(), USED_NO_NOTIFY, Ordering::Relaxed);
        }
    }

    /// Requests a kick with the next buffer. Returns `true` if there is one already.
    pub fn arm(&mut self) -> bool {
        if self.features.event_idx {
            self.memory.store(self.layout.avail_event(), self.avail, Ordering::Relaxed);
        } else {
            self.memory.store(self.layout.used_flags(), 0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        self.available() > 0
    }
}
