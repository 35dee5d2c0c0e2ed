//! Shadow of a vring: chains of the driver, and their copies in the pool, which the backend serves.
//!
//! All state of a chain is private. The backend reaches the pool alone, so of what it writes only the used ring is read
//! here, and [`DriverQueue`] checks it.

use std::collections::VecDeque;
use std::ops::Range;

use ringfence_memory::{DeviceAccess, DeviceRange, LentSlice};
use ringfence_ring::split::backend::BackendQueue;
use ringfence_ring::split::{CHAIN_MAX, DriverQueue, QueueFeatures, QueuePages};
use ringfence_sys::numbers::usize_from;
use ringfence_wire::virtio::{Descriptor, SplitLayout, flag};

use super::arena::{Arena, Block};
use super::fault::ShieldFault;
use super::pool::{POOL_ADDRESS, ShieldPool};
use crate::ClientFault;
use crate::dirty::DirtyLog;
use crate::memory::GuestMemory;

/// Maximum length of a segment that stays a descriptor of its own in bytes.
const SHORT_MAX: usize = 64;
/// Bytes for the short segments of a chain: one to be read, and one to be written.
const SHORTS: usize = 2 * SHORT_MAX;
/// Number of bytes at the end of a chain that are copied back, however many the backend reports.
pub(super) const STATUS_MAX: usize = 64;
/// Alignment of data in the pool in bytes: backends that bypass the page cache need that of a sector.
const ALIGNMENT: usize = 4096;
/// Maximum of chains that one round takes.
const CHAINS_PER_ROUND: usize = 128;

/// Places of a chain's bytes in the pool.
#[derive(Clone, Copy, Debug, Default)]
struct Shape {
    /// First readable segment, if it is short.
    head: usize,
    /// Readable bytes behind it.
    readable: usize,
    /// Writable bytes before the tail.
    writable: usize,
    /// Last writable segment, if it is short.
    tail: usize,
}

impl Shape {
    /// Returns the offset of the writable bytes in the block.
    fn writable_at(self) -> usize {
        match self.writable {
            0..ALIGNMENT => self.readable.next_multiple_of(SHORT_MAX),
            _ => self.readable.next_multiple_of(ALIGNMENT),
        }
    }

    /// Returns the length of the block in bytes.
    fn block(self) -> usize {
        if self.writable == 0 { self.readable } else { self.writable_at() + self.writable }
    }

    /// Returns all bytes that the backend may write.
    fn capacity(self) -> usize {
        self.writable + self.tail
    }
}

/// Chain of the driver.
#[derive(Debug, Default)]
struct Chain {
    head: u16,
    /// Position in the order in which chains were taken.
    sequence: u64,
    /// Memory of the machine: readable segments, then writable ones.
    segments: Vec<LentSlice>,
    /// Number of readable segments.
    readable: usize,
    /// Addresses of the writable segments.
    addresses: Vec<u64>,
    shape: Shape,
    /// Block in the pool. Set if it is of the vring's reserve.
    block: Option<(Block, bool)>,
    is_in_flight: bool,
    /// Set once the chain has waited for room in the pool.
    has_waited: bool,
}

/// Shadow of one vring. See the [module](self).
#[derive(Debug)]
pub(super) struct ShadowQueue {
    index: u32,
    driver: DriverQueue,
    /// Tables, short segments and reserve.
    blocks: [Block; 3],
    tables_at: usize,
    shorts_at: usize,
    reserve: Arena,
    /// Chains by their tokens.
    chains: Vec<Chain>,
    /// Tokens without a chain.
    free: Vec<u32>,
    /// Heads of the driver's chains in flight.
    heads: Vec<bool>,
    /// Tokens of chains that the backend does not have yet, in order.
    pending: VecDeque<u32>,
    sequence: u64,
    fetched: Vec<Descriptor>,
}

/// Properties of a shadow.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShadowShape {
    pub(super) index: u32,
    pub(super) size: u16,
    /// Features of the backend's vring.
    pub(super) features: QueueFeatures,
    /// Number of vrings that may run.
    pub(super) vrings: usize,
}

/// Driver's queue in the pool, and the places that belong to it.
struct Placed {
    driver: DriverQueue,
    blocks: [Block; 3],
    tables_at: usize,
    shorts_at: usize,
    reserve: Arena,
}

/// Places a vring in the pool.
fn place_vring(pool: &mut ShieldPool, shape: ShadowShape) -> Option<Placed> {
    let layout = SplitLayout::new(shape.size)?;
    let lens =
        [QueuePages::bytes(layout), usize::from(shape.size) * SHORTS, pool.reserve(shape.vrings)];
    let blocks = pool.allocate_fixed(lens)?;
    let [tables_at, shorts_at, reserve_at] = blocks.map(|block| block.offset(&pool.fixed));
    let tables = pool.memory().slice(tables_at, lens[0]).ok()?;
    let pages = QueuePages::new(&tables, layout).ok()?;
    let pages = pages.at_io_address(POOL_ADDRESS + tables_at as u64);
    let mut driver = DriverQueue::new(pages, layout, shape.features);
    driver.clamp_lengths();
    let reserve = Arena::new(reserve_at, lens[2]);
    Some(Placed { driver, blocks, tables_at, shorts_at, reserve })
}

impl ShadowQueue {
    /// Creates the shadow of a vring in the pool.
    ///
    /// # Errors
    ///
    /// Returns [`ShieldFault::Crowded`] if the pool has no room for it.
    pub(super) fn new(pool: &mut ShieldPool, shape: ShadowShape) -> Result<Self, ShieldFault> {
        let crowded = ShieldFault::Crowded { index: shape.index, pool: pool.bytes() };
        let placed = place_vring(pool, shape).ok_or(crowded)?;
        let Placed { driver, blocks, tables_at, shorts_at, reserve } = placed;
        let size = usize::from(shape.size);
        Ok(ShadowQueue {
            index: shape.index,
            driver,
            blocks,
            tables_at,
            shorts_at,
            reserve,
            chains: (0..size).map(|_| Chain::default()).collect(),
            free: (0..u32::from(shape.size)).rev().collect(),
            heads: vec![false; size],
            pending: VecDeque::with_capacity(size),
            sequence: 0,
            fetched: Vec::new(),
        })
    }

    /// Moves the shadow to the pool of another backend, which gets all chains in flight, in their order.
    ///
    /// # Errors
    ///
    /// Returns [`ShieldFault::Crowded`] if the pool has no room for it.
    pub(super) fn move_to(
        &mut self,
        pool: &mut ShieldPool,
        shape: ShadowShape,
    ) -> Result<(), ShieldFault> {
        let crowded = ShieldFault::Crowded { index: shape.index, pool: pool.bytes() };
        let placed = place_vring(pool, shape).ok_or(crowded)?;
        let Placed { driver, blocks, tables_at, shorts_at, reserve } = placed;
        (self.driver, self.blocks, self.reserve) = (driver, blocks, reserve);
        (self.tables_at, self.shorts_at) = (tables_at, shorts_at);
        self.pending = self.in_flight().into();
        for chain in &mut self.chains {
            // The block was in the other pool.
            chain.block = None;
        }
        Ok(())
    }

    /// Returns the tokens of the chains in flight, in the order in which they were taken.
    pub(super) fn in_flight(&self) -> Vec<u32> {
        let tokens = (0_u32..).zip(&self.chains).filter(|(_, chain)| chain.is_in_flight);
        let mut tokens: Vec<_> = tokens.map(|(token, chain)| (chain.sequence, token)).collect();
        tokens.sort_unstable();
        tokens.into_iter().map(|(_, token)| token).collect()
    }

    /// Returns `true` if the backend has chains that it did not use.
    pub(super) fn is_at_backend(&self) -> bool {
        self.free.len() + self.pending.len() < self.chains.len()
    }

    /// Returns the addresses of the tables for the backend: descriptors, used ring, available ring.
    pub(super) fn tables(&self) -> [u64; 3] {
        let start = POOL_ADDRESS + self.tables_at as u64;
        let layout = self.driver.layout();
        [0, layout.used_flags(), layout.avail_flags()].map(|at| start + at as u64)
    }

    /// Returns the number of entries.
    pub(super) fn size(&self) -> u16 {
        self.driver.size()
    }

    /// Takes chains of the driver, and makes their copies available to the backend. Returns `true` if there were any.
    ///
    /// # Errors
    ///
    /// Returns [`ShieldFault`] for a driver that breaks a rule.
    pub(super) fn forward(
        &mut self,
        front: &mut BackendQueue,
        memory: &GuestMemory,
        pool: &mut ShieldPool,
    ) -> Result<bool, ShieldFault> {
        let mut worked = self.place_pending(pool)?;
        for _ in 0..CHAINS_PER_ROUND {
            if self.is_full() || !self.take(front, memory)? {
                break;
            }
            worked = true;
            self.place_pending(pool)?;
        }
        Ok(worked)
    }

    /// Returns `true` while no further chain can be taken: one waits for room, or all entries are in use.
    fn is_full(&self) -> bool {
        !self.pending.is_empty()
            || self.free.is_empty()
            || usize::from(self.driver.free()) < self.entries_max()
    }

    /// Returns the maximum of entries that a chain takes in the backend's vring.
    fn entries_max(&self) -> usize {
        if self.driver.features().indirect { 1 } else { CHAIN_MAX }
    }

    /// Takes the next chain of the driver. Returns `false` if there is none.
    fn take(
        &mut self,
        front: &mut BackendQueue,
        memory: &GuestMemory,
    ) -> Result<bool, ShieldFault> {
        let table = |address, len| {
            let (lent, offset) = memory.at(address, len).ok()?;
            lent.slice(offset, len).ok()
        };
        let fetched = front.take(table, &mut self.fetched).map_err(ClientFault::from)?;
        let Some(head) = fetched else { return Ok(false) };
        let is_in_flight = self.heads.get_mut(usize::from(head));
        match is_in_flight {
            Some(is_in_flight) if !*is_in_flight => *is_in_flight = true,
            _ => return Err(ClientFault::Repeated { head }.into()),
        }
        let Some(token) = self.free.pop() else { return Ok(false) };
        let chain = &mut self.chains[token as usize];
        (chain.head, chain.sequence, chain.is_in_flight) = (head, self.sequence, true);
        chain.has_waited = false;
        self.sequence += 1;
        chain.gather(self.index, &self.fetched, memory)?;
        self.pending.push_back(token);
        Ok(true)
    }

    /// Makes chains available to the backend, in order, while there is room. Returns `true` if there was for any.
    fn place_pending(&mut self, pool: &mut ShieldPool) -> Result<bool, ShieldFault> {
        let mut worked = false;
        while let Some(&token) = self.pending.front() {
            if !self.place(token, pool)? {
                break;
            }
            self.pending.pop_front();
            worked = true;
        }
        Ok(worked)
    }

    /// Copies a chain into the pool, and makes it available. Returns `false` if there is no room.
    fn place(&mut self, token: u32, pool: &mut ShieldPool) -> Result<bool, ShieldFault> {
        if usize::from(self.driver.free()) < self.entries_max() {
            return Ok(false);
        }
        let index = self.index;
        let chain = &mut self.chains[token as usize];
        let shape = chain.shape;
        let mut block_at = 0;
        if shape.block() > 0 {
            let (len, limit) = (shape.block(), pool.limit());
            if len > limit {
                return Err(ShieldFault::TooLong { index, len: len as u64, limit });
            }
            chain.block = match (pool.data.allocate(len), &mut self.reserve) {
                (Some(block), _) => Some((block, false)),
                (None, reserve) => reserve.allocate(len).map(|block| (block, true)),
            };
            let Some((block, is_reserve)) = chain.block else {
                pool.traffic.waits += u64::from(!std::mem::replace(&mut chain.has_waited, true));
                return Ok(false);
            };
            block_at = block.offset(if is_reserve { &self.reserve } else { &pool.data });
        }
        let shorts_at = self.shorts_at + token as usize * SHORTS;
        chain.copy_in(pool.memory(), shorts_at, block_at);
        let (ranges, count) = chain.ranges(shorts_at, block_at);
        let pushed = self.driver.push(&ranges[..count], token);
        pushed.map_err(|_| ShieldFault::Empty { index })?;
        pool.traffic.chains += 1;
        pool.traffic.bytes_in += (shape.head + shape.readable) as u64;
        Ok(true)
    }

    /// Returns the chains that the backend has used to the driver. Returns `true` if there were any.
    ///
    /// # Errors
    ///
    /// Returns [`ShieldFault::Used`] for a backend that breaks a rule, and [`ClientFault::Unlogged`] for a page that is not
    /// in the log of written pages.
    pub(super) fn complete(
        &mut self,
        front: &mut BackendQueue,
        pool: &mut ShieldPool,
        dirty: &DirtyLog,
    ) -> Result<bool, ShieldFault> {
        let mut worked = false;
        let index = self.index;
        while let Some(used) =
            self.driver.pop().map_err(|fault| ShieldFault::Used { index, fault })?
        {
            let shorts_at = self.shorts_at + used.token as usize * SHORTS;
            let chain = &self.chains[used.token as usize];
            let block_at = match chain.block {
                Some((block, true)) => block.offset(&self.reserve),
                Some((block, false)) => block.offset(&pool.data),
                None => 0,
            };
            let places = (shorts_at, block_at);
            chain.copy_back(pool.memory(), places, usize_from(used.len), dirty)?;
            pool.traffic.bytes_out += chain.shape.capacity().min(usize_from(used.len)) as u64;
            self.finish(used.token, used.len, front, pool);
            worked = true;
        }
        Ok(worked)
    }

    /// Returns a chain to the driver, and its block to the pool.
    fn finish(&mut self, token: u32, len: u32, front: &mut BackendQueue, pool: &mut ShieldPool) {
        let head = self.forget(token, pool);
        front.finish(head, len);
    }

    /// Forgets a chain. Returns its head.
    fn forget(&mut self, token: u32, pool: &mut ShieldPool) -> u16 {
        let chain = &mut self.chains[token as usize];
        match chain.block.take() {
            Some((block, true)) => self.reserve.release(block),
            Some((block, false)) => pool.data.release(block),
            None => {}
        }
        // The machine's memory of a chain that is not in flight stays mapped no longer.
        chain.segments.clear();
        chain.is_in_flight = false;
        let head = chain.head;
        self.heads[usize::from(head)] = false;
        self.free.push(token);
        head
    }

    /// Ends the shadow of a vring that the backend has stopped. Chains that the backend did not use are available again
    /// to the next device, if they are the last ones that were taken. Others stay in the log of chains in flight; without
    /// one they are returned without data.
    ///
    /// # Errors
    ///
    /// As [`ShadowQueue::complete`].
    pub(super) fn stop(
        mut self,
        front: Option<&mut BackendQueue>,
        pool: &mut ShieldPool,
        dirty: &DirtyLog,
    ) -> Result<(), ShieldFault> {
        if let Some(front) = front {
            self.complete(front, pool, dirty)?;
            let mut left = self.in_flight();
            let mut sequence = self.sequence;
            // Those of the log came first, and their places in the ring are not known.
            while let Some(&token) = left.last()
                && self.chains[token as usize].sequence + 1 == sequence
                && sequence > front.found_in_log() as u64
            {
                left.pop();
                sequence -= 1;
                let head = self.forget(token, pool);
                front.untake([head]);
            }
            if !front.has_log() {
                for token in left {
                    self.finish(token, 0, front, pool);
                }
            }
        }
        for token in self.in_flight() {
            self.forget(token, pool);
        }
        self.blocks.into_iter().for_each(|block| pool.fixed.release(block));
        Ok(())
    }

    /// Publishes copies to the backend. Returns `true` if it wants a kick.
    #[must_use]
    pub(super) fn publish(&mut self) -> bool {
        self.driver.publish()
    }

    /// Requests a call of the backend. Also requests a kick of the driver, unless the vring is full. Returns `true` if there
    /// is work already.
    ///
    /// # Errors
    ///
    /// Returns [`ShieldFault`] for a peer that breaks a rule.
    pub(super) fn arm(&mut self, front: &mut BackendQueue) -> Result<bool, ShieldFault> {
        let is_used = self.await_call()?;
        if self.is_full() {
            return Ok(is_used);
        }
        Ok(front.arm(0).map_err(ClientFault::from)? || front.has_left_over() || is_used)
    }

    /// Requests a call of the backend. Returns `true` if it has used a chain already.
    ///
    /// # Errors
    ///
    /// Returns [`ShieldFault::Used`] for a backend that breaks a rule.
    pub(super) fn await_call(&mut self) -> Result<bool, ShieldFault> {
        let index = self.index;
        self.driver.arm(1).map_err(|fault| ShieldFault::Used { index, fault })
    }

    /// Suppresses calls of the backend and kicks of the driver.
    pub(super) fn suppress(&mut self, front: &mut BackendQueue) {
        self.driver.suppress();
        front.suppress();
    }
}

impl Chain {
    /// Looks the memory of the descriptors up, and joins them.
    fn gather(
        &mut self,
        index: u32,
        fetched: &[Descriptor],
        memory: &GuestMemory,
    ) -> Result<(), ShieldFault> {
        self.segments.clear();
        self.addresses.clear();
        self.readable = 0;
        let mut totals = [0_u64; 2];
        for &Descriptor { address, len, flags, .. } in fetched.iter().filter(|link| link.len > 0) {
            let bytes = usize_from(len);
            let (lent, offset) = memory.at(address, bytes)?;
            let segment = lent.slice(offset, bytes);
            let unmapped = ClientFault::Unmapped { address, len: bytes };
            self.segments.push(segment.map_err(|_| unmapped)?);
            let is_writable = flags & flag::WRITE != 0;
            if is_writable {
                self.addresses.push(address);
            }
            self.readable += usize::from(!is_writable);
            totals[usize::from(is_writable)] += u64::from(len);
        }
        let total = totals[0] + totals[1];
        if total == 0 {
            return Err(ShieldFault::Empty { index });
        }
        let limit = u32::MAX as usize;
        let [readable, writable] = match u32::try_from(total) {
            Ok(_) => totals.map(|total| usize::try_from(total).unwrap_or(limit)),
            Err(_) => return Err(ShieldFault::TooLong { index, len: total, limit }),
        };
        let [ins, outs] = [&self.segments[..self.readable], &self.segments[self.readable..]];
        let length_if_short = |segment: Option<&LentSlice>| {
            segment.map(LentSlice::len).filter(|len| *len <= SHORT_MAX).unwrap_or(0)
        };
        let [head, tail] = [length_if_short(ins.first()), length_if_short(outs.last())];
        self.shape = Shape { head, readable: readable - head, writable: writable - tail, tail };
        Ok(())
    }

    /// Copies the readable bytes into the pool, and fills the room for the others with zeros.
    fn copy_in(&self, pool: &LentSlice, shorts_at: usize, block_at: usize) {
        let Shape { head, writable, tail, .. } = self.shape;
        let mut at = block_at;
        for (number, segment) in self.segments[..self.readable].iter().enumerate() {
            let len = segment.len();
            let copied = if number == 0 && head > 0 {
                pool.copy_from_lent(shorts_at, segment, 0, len)
            } else {
                at += len;
                pool.copy_from_lent(at - len, segment, 0, len)
            };
            debug_assert!(copied.is_ok(), "a block has room for its chain");
        }
        // The backend gets no bytes that were there before, and the machine none that the backend did not write.
        let zeroed = pool
            .zero(block_at + self.shape.writable_at(), writable)
            .and_then(|()| pool.zero(shorts_at + SHORT_MAX, tail));
        debug_assert!(zeroed.is_ok(), "a block has room for its chain");
    }

    /// Returns the ranges of the backend's descriptors, and their number.
    fn ranges(&self, shorts_at: usize, block_at: usize) -> ([DeviceRange; CHAIN_MAX], usize) {
        use DeviceAccess::{Read, Write};
        let shape = self.shape;
        let parts = [
            (shorts_at, shape.head, Read),
            (block_at, shape.readable, Read),
            (block_at + shape.writable_at(), shape.writable, Write),
            (shorts_at + SHORT_MAX, shape.tail, Write),
        ];
        let mut ranges = [None; CHAIN_MAX];
        let mut count = 0;
        for (at, len, access) in parts {
            if len > 0 {
                ranges[count] = ShieldPool::range(at, len, access);
                count += 1;
            }
        }
        let none = DeviceRange::io(POOL_ADDRESS, 0, Read);
        (ranges.map(|range| range.or(none).expect("an address in the pool")), count)
    }

    /// Copies the first `len` writable bytes and the last [`STATUS_MAX`] to the machine's memory, and marks their pages.
    fn copy_back(
        &self,
        pool: &LentSlice,
        (shorts_at, block_at): (usize, usize),
        len: usize,
        dirty: &DirtyLog,
    ) -> Result<(), ClientFault> {
        let capacity = self.shape.capacity();
        let len = len.min(capacity);
        let status = capacity.saturating_sub(STATUS_MAX).max(len);
        let mut start = 0;
        let outs = &self.segments[self.readable..];
        for (number, (segment, address)) in outs.iter().zip(&self.addresses).enumerate() {
            let is_tail = self.shape.tail > 0 && number + 1 == outs.len();
            let from = match is_tail {
                true => shorts_at + SHORT_MAX,
                false => block_at + self.shape.writable_at() + start,
            };
            for part in [0..len, status..capacity] {
                let copied = copy_part(segment, pool, from, start, part);
                dirty.mark(address + copied.start as u64, copied.len())?;
            }
            start += segment.len();
        }
        Ok(())
    }
}

/// Copies the bytes of a segment that lie in `part` of the chain, and returns their range in the segment. The segment begins
/// at `start` of the chain, and at `from` in the pool.
fn copy_part(
    segment: &LentSlice,
    pool: &LentSlice,
    from: usize,
    start: usize,
    part: Range<usize>,
) -> Range<usize> {
    let first = part.start.clamp(start, start + segment.len()) - start;
    let end = part.end.clamp(start, start + segment.len()) - start;
    if first < end {
        let copied = segment.copy_from_lent(first, pool, from + first, end - first);
        debug_assert!(copied.is_ok(), "both have room for it");
    }
    first..end
}
