//! In-flight log of a virtqueue (vhost-user, "Inflight I/O tracking", split virtqueues): which chains a backend has taken
//! and not returned.
//!
//! The log is shared memory that outlives the backend. After the backend was killed at any instant, the next one finds in
//! it each chain that it has to serve once more:
//!
//! ```text
//!  0 features u64    8 version u16   10 desc_num u16   12 last_batch_head u16   14 used_idx u16
//! 16 for each descriptor: inflight u8, 5 bytes of padding, next u16, counter u64
//! ```
//!
//! * A chain that is taken is marked, with a counter that gives the order.
//! * A chain that is returned joins a batch: `last_batch_head`, and `next` of each descriptor.
//! * Once the used index in the ring is stored, the marks of the batch are cleared, then `used_idx` is stored. If both
//!   indices differ, the backend died in between, and the next one clears the marks.
//!
//! The frontend can write the log at any time. Every number from it is bounded; a log that breaks a rule is a
//! [`LogFault`].

use ringfence_memory::{LentSlice, OutOfRange};

use crate::sync::Ordering;

/// Version of the layout.
const VERSION: u16 = 1;
/// Bytes before the first descriptor's state, and bytes of each state.
const STATE_BYTES: usize = 16;
/// Alignment of the logs of several queues in bytes.
const ALIGNMENT: usize = 64;

const VERSION_AT: usize = 8;
const SIZE_AT: usize = 10;
const LAST_AT: usize = 12;
const USED_AT: usize = 14;
/// Offsets in the state of a descriptor.
const NEXT: usize = 6;
const COUNTER: usize = 8;

/// Log that does not belong to its queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LogFault {
    #[error("an in-flight log of version {version}")]
    Version { version: u16 },
    #[error("an in-flight log of {found} descriptors for a queue of {size}")]
    Size { found: u16, size: u16 },
    /// Used index further behind the ring's than the queue has entries.
    #[error("an in-flight log that is {behind} entries behind its queue of {size}")]
    Behind { behind: u16, size: u16 },
    /// Batch with a descriptor beyond the queue.
    #[error("an in-flight log with descriptor {index} of {size}")]
    Index { index: u16, size: u16 },
    #[error("an in-flight log: {0}")]
    Memory(#[from] OutOfRange),
}

/// Log of one queue. See the [module](self).
#[derive(Debug)]
pub struct InflightLog {
    memory: LentSlice,
    size: u16,
    /// Counter of the next chain.
    counter: u64,
    /// Head of the last chain that was returned.
    last: u16,
    /// Returned chains whose marks are still set.
    batch: Vec<u16>,
}

impl InflightLog {
    /// Returns the length of the log of a queue of `size` entries in bytes, as a multiple of 64.
    pub const fn bytes(size: u16) -> usize {
        (STATE_BYTES + size as usize * STATE_BYTES).next_multiple_of(ALIGNMENT)
    }

    /// Attaches a queue of `size` entries, whose used index is `used`, to a log. Returns the log, and the heads of the
    /// chains in flight in the order in which they were taken. A log whose bytes are all 0 is initialised.
    ///
    /// # Errors
    ///
    /// Returns [`LogFault`] for a log of another queue, and for memory that is too short, not aligned or read-only.
    pub fn attach(
        memory: &LentSlice,
        size: u16,
        used: u16,
    ) -> Result<(InflightLog, Vec<u16>), LogFault> {
        let memory = memory.slice(0, InflightLog::bytes(size))?;
        if !memory.is_writable() {
            return Err(OutOfRange::ReadOnly.into());
        }
        let mut log = InflightLog { memory, size, counter: 0, last: 0, batch: Vec::new() };
        match log.load(VERSION_AT)? {
            0 => {
                log.memory.store_u16(SIZE_AT, size.to_le(), Ordering::Relaxed)?;
                log.memory.store_u16(USED_AT, used.to_le(), Ordering::Relaxed)?;
                log.memory.store_u16(VERSION_AT, VERSION.to_le(), Ordering::Release)?;
                return Ok((log, Vec::new()));
            }
            VERSION => {}
            version => return Err(LogFault::Version { version }),
        }
        match log.load(SIZE_AT)? {
            found if found != size => return Err(LogFault::Size { found, size }),
            _ => {}
        }
        log.last = log.load(LAST_AT)?;
        log.complete_batch(used)?;
        let mut taken = Vec::new();
        for head in 0..size {
            if log.load(state(head))? & 0xff != 0 {
                let counter = log.memory.load_u64(state(head) + COUNTER, Ordering::Relaxed)?;
                taken.push((u64::from_le(counter), head));
            }
        }
        taken.sort_unstable();
        log.counter = taken.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        Ok((log, taken.into_iter().map(|(_, head)| head).collect()))
    }

    /// Clears the marks of a batch that was published, if the last backend died before it did.
    fn complete_batch(&self, used: u16) -> Result<(), LogFault> {
        let size = self.size;
        let behind = used.wrapping_sub(self.load(USED_AT)?);
        if behind > size {
            return Err(LogFault::Behind { behind, size });
        }
        let mut head = self.last;
        for _ in 0..behind {
            if head >= size {
                return Err(LogFault::Index { index: head, size });
            }
            self.mark(head, 0);
            head = self.load(state(head) + NEXT)?;
        }
        self.store(USED_AT, used);
        Ok(())
    }

    /// Marks a chain that was taken.
    pub fn take(&mut self, head: u16) {
        let counter = self.counter.to_le();
        let stored = self.memory.store_u64(state(head) + COUNTER, counter, Ordering::Release);
        debug_assert!(stored.is_ok(), "the log has a state for each head");
        self.mark(head, 1);
        self.counter = self.counter.wrapping_add(1);
    }

    /// Clears the mark of a chain that is available again.
    pub fn untake(&mut self, head: u16) {
        self.mark(head, 0);
    }

    /// Adds a chain to the batch. The caller then stores it in the used ring, and publishes.
    pub fn finish(&mut self, head: u16) {
        self.store(state(head) + NEXT, self.last);
        self.store(LAST_AT, head);
        self.last = head;
        self.batch.push(head);
    }

    /// Clears the marks of the batch, after the ring's used index was stored.
    pub fn publish(&mut self, used: u16) {
        while let Some(head) = self.batch.pop() {
            self.mark(head, 0);
        }
        self.store(USED_AT, used);
    }

    /// Stores a mark. The byte behind it is padding.
    fn mark(&self, head: u16, mark: u16) {
        self.store(state(head), mark);
    }

    fn load(&self, at: usize) -> Result<u16, OutOfRange> {
        self.memory.load_u16(at, Ordering::Acquire).map(u16::from_le)
    }

    /// Stores a number behind all earlier stores: a process can be killed between any two of them.
    fn store(&self, at: usize, value: u16) {
        let stored = self.memory.store_u16(at, value.to_le(), Ordering::Release);
        debug_assert!(stored.is_ok(), "the log has a state for each head");
    }
}

/// Returns the offset of a descriptor's state.
fn state(head: u16) -> usize {
    STATE_BYTES + usize::from(head) * STATE_BYTES
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SIZE: u16 = 8;

    fn memory() -> LentSlice {
        LentSlice::anonymous(InflightLog::bytes(SIZE))
    }

    fn attach(memory: &LentSlice, used: u16) -> (InflightLog, Vec<u16>) {
        InflightLog::attach(memory, SIZE, used).unwrap()
    }

    #[test]
    fn chains_in_flight_are_found_again_in_the_order_in_which_they_were_taken() {
        let memory = memory();
        let (mut log, none) = attach(&memory, 0);
        assert_eq!(none, [0; 0]);
        [5, 2, 7, 0].into_iter().for_each(|head| log.take(head));
        log.finish(2);
        log.publish(1);
        let (mut log, taken) = attach(&memory, 1);
        assert_eq!(taken, [5, 7, 0]);
        log.take(2);
        assert_eq!(attach(&memory, 1).1, [5, 7, 0, 2]);
    }

    /// Checks a backend that dies before each of its stores: the used index in the ring decides on the whole batch.
    #[test]
    fn batch_is_in_flight_until_the_used_index_of_the_ring_is_stored() {
        let memory = memory();
        let (mut log, _) = attach(&memory, 65_534);
        [3, 4, 1].into_iter().for_each(|head| log.take(head));
        log.finish(4);
        log.finish(3);
        assert_eq!(attach(&memory, 65_534).1, [3, 4, 1], "not yet published");
        assert_eq!(attach(&memory, 0).1, [1], "published, and the marks still set");
        assert_eq!(attach(&memory, 0).1, [1], "a backend that did no more than attach");
    }

    #[test]
    fn log_of_another_queue_is_a_fault() {
        let fault = |at: usize, value: u16, used| {
            let memory = memory();
            attach(&memory, 0);
            memory.store_u16(at, value.to_le(), Ordering::Relaxed).unwrap();
            InflightLog::attach(&memory, SIZE, used).unwrap_err()
        };
        assert_eq!(fault(VERSION_AT, 2, 0), LogFault::Version { version: 2 });
        assert_eq!(fault(SIZE_AT, 16, 0), LogFault::Size { found: 16, size: SIZE });
        assert_eq!(fault(USED_AT, 0, 9), LogFault::Behind { behind: 9, size: SIZE });
        assert_eq!(fault(LAST_AT, 8, 1), LogFault::Index { index: 8, size: SIZE });
        let short = LentSlice::anonymous(InflightLog::bytes(SIZE) - 1);
        let short = InflightLog::attach(&short, SIZE, 0).unwrap_err();
        assert!(matches!(short, LogFault::Memory(OutOfRange::Bounds { .. })), "{short}");
    }

    proptest! {
        #[test]
        fn arbitrary_log_gives_heads_of_the_queue_or_a_fault(
            bytes in proptest::collection::vec(any::<u8>(), InflightLog::bytes(SIZE)),
            is_valid: bool,
            used: u16,
        ) {
            let memory = memory();
            memory.copy_from(0, &bytes).unwrap();
            if is_valid {
                memory.store_u16(VERSION_AT, VERSION.to_le(), Ordering::Relaxed).unwrap();
                memory.store_u16(SIZE_AT, SIZE.to_le(), Ordering::Relaxed).unwrap();
                memory.store_u16(USED_AT, used.wrapping_sub(3).to_le(), Ordering::Relaxed).unwrap();
            }
            if let Ok((_, taken)) = InflightLog::attach(&memory, SIZE, used) {
                prop_assert!(taken.len() <= usize::from(SIZE));
                prop_assert!(taken.iter().all(|head| *head < SIZE));
            }
        }
    }
}
