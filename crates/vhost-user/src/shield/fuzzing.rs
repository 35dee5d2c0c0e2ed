//! Fuzz target `shield`: a driver and a backend, of which either or both write what they like, around the shadow of a vring.
//! A property test runs it, too.

// #syscall none: a driver and a backend of tests

use ringfence_memory::{DeviceAccess, LentSlice};
use ringfence_ring::split::backend::{BackendQueue, QueueTables};
use ringfence_ring::split::{DriverQueue, QueueFeatures};
use ringfence_wire::vhost_user::{DirtyArea, MemoryRegion};
use ringfence_wire::virtio::{Descriptor, SplitLayout, feature, flag};

use super::fault::ShieldFault;
use super::pool::{POOL_ADDRESS, POOL_MIN, ShieldPool};
use super::shadow::{ShadowQueue, ShadowShape};
use crate::PoolRule;
use crate::dirty::DirtyLog;
use crate::memory::GuestMemory;
use crate::testing::{FrontShape, Frontend, PageMarks, memfd};

/// Maximum of steps in one case.
const STEPS_MAX: usize = 200;
/// Entries of the vring.
pub(super) const ENTRIES: u16 = 8;
/// Bytes for buffers of the driver.
pub(super) const BUFFERS: usize = 1 << 20;
/// Bytes behind the machine's memory, in its file, which no backend may see.
const BEHIND: usize = 64 << 10;
const SECRET: &[u8] = b"bytes-that-the-machine-did-not-lend";

/// Driver, shadow and backend of one vring.
pub(super) struct Rig {
    pub(super) front: Frontend,
    pub(super) memory: GuestMemory,
    pub(super) queue: BackendQueue,
    pub(super) pool: ShieldPool,
    pub(super) shadow: ShadowQueue,
    pub(super) backend: BackendQueue,
    /// Log of the pages that are written.
    pub(super) dirty: DirtyLog,
    features: QueueFeatures,
}

/// Returns the features of a vring.
fn bits(features: QueueFeatures) -> u64 {
    let when = |is_set, bit| if is_set { bit } else { 0 };
    when(features.indirect, feature::INDIRECT) | when(features.event_idx, feature::EVENT_IDX)
}

/// Creates a pool of so many bytes.
pub(super) fn pool_of(bytes: u64) -> Option<ShieldPool> {
    ShieldPool::new(memfd(bytes).ok()?).ok()
}

/// Returns the tables of a shadow, as its backend sees them.
pub(super) fn tables_of(
    shadow: &ShadowQueue,
    pool: &ShieldPool,
    event_idx: bool,
) -> Option<QueueTables> {
    let part = |address: u64| {
        let offset = usize::try_from(address.checked_sub(POOL_ADDRESS)?).ok()?;
        pool.memory().slice(offset, pool.memory().len() - offset).ok()
    };
    let [descriptors, used, available] = shadow.tables().map(part);
    let tables = [&descriptors?, &available?, &used?];
    QueueTables::new(shadow.size().into(), event_idx, tables).ok()
}

/// Returns memory of a pool by its address, as a backend finds it.
pub(super) fn at(pool: &ShieldPool, address: u64, len: usize) -> Option<LentSlice> {
    let offset = usize::try_from(address.checked_sub(POOL_ADDRESS)?).ok()?;
    pool.memory().slice(offset, len).ok()
}

impl Rig {
    /// Creates a rig whose driver has `front` features, and whose backend has `back` ones.
    pub(super) fn new(front: QueueFeatures, back: QueueFeatures, pool: u64) -> Option<Rig> {
        let shape = FrontShape {
            vrings: 1,
            size: ENTRIES,
            buffers: BUFFERS,
            features: bits(front),
            protocol: 0,
            has_mark: false,
        };
        let made = Frontend::new(shape).ok()?;
        let bytes = made.memory.len() as u64;
        rustix::fs::ftruncate(&made.file, bytes + BEHIND as u64).ok()?;
        for at in (0..BEHIND as u64).step_by(64) {
            rustix::io::pwrite(&made.file, SECRET, bytes + at).ok()?;
        }
        let start = made.base();
        let region = MemoryRegion { guest: start, len: bytes, user: start, offset: 0 };
        let file = made.file.try_clone().ok()?;
        let memory = GuestMemory::map(&[region], vec![file].into(), PoolRule::Any).ok()?;
        let layout = SplitLayout::new(ENTRIES)?;
        let tables = start + made.tables_at(0) as u64;
        let part = |offset: usize| memory.at_user(tables + offset as u64).ok();
        let parts = [part(0)?, part(layout.avail_flags())?, part(layout.used_flags())?];
        let tables = QueueTables::new(ENTRIES.into(), front.event_idx, parts.each_ref()).ok()?;
        let queue = BackendQueue::new(tables, front, 0);
        let mut pool = pool_of(pool)?;
        let shape = ShadowShape { index: 0, size: ENTRIES, features: back, vrings: 1 };
        let shadow = ShadowQueue::new(&mut pool, shape).ok()?;
        let tables = tables_of(&shadow, &pool, back.event_idx)?;
        let backend = BackendQueue::new(tables, back, 0);
        let dirty = DirtyLog::default();
        Some(Rig { front: made, memory, queue, pool, shadow, backend, dirty, features: back })
    }

    /// Marks written pages from now on.
    pub(super) fn keep_log(&mut self, marks: &PageMarks) -> Option<()> {
        let area = DirtyArea { len: PageMarks::BYTES, offset: 0 };
        let file = marks.file().try_clone_to_owned().ok()?;
        self.dirty.map(area, vec![file].into()).ok()?;
        self.dirty.switch(true);
        Some(())
    }

    pub(super) fn driver(&mut self) -> &mut DriverQueue {
        &mut self.front.vrings[0].driver
    }

    /// Passes chains to the backend.
    pub(super) fn forward(&mut self) -> Result<bool, ShieldFault> {
        let passed = self.shadow.forward(&mut self.queue, &self.memory, &mut self.pool);
        let _ = self.shadow.publish();
        passed
    }

    /// Passes used chains to the driver.
    pub(super) fn complete(&mut self) -> Result<bool, ShieldFault> {
        let passed = self.shadow.complete(&mut self.queue, &mut self.pool, &self.dirty);
        let _ = self.queue.publish();
        passed
    }

    /// Takes a chain as the backend. Returns its head and its descriptors.
    pub(super) fn take(&mut self) -> Option<(u16, Vec<Descriptor>)> {
        let mut chain = Vec::new();
        let pool = &self.pool;
        let head = self.backend.take(|address, len| at(pool, address, len), &mut chain);
        head.ok().flatten().map(|head| (head, chain))
    }

    /// Replaces the pool and the backend.
    pub(super) fn replace_backend(&mut self, bytes: u64) -> Option<()> {
        self.pool = pool_of(bytes)?;
        let features = self.features;
        let shape = ShadowShape { index: 0, size: ENTRIES, features, vrings: 1 };
        self.shadow.move_to(&mut self.pool, shape).ok()?;
        let tables = tables_of(&self.shadow, &self.pool, features.event_idx)?;
        self.backend = BackendQueue::new(tables, features, 0);
        Some(())
    }

    /// Checks that no byte behind the machine's memory is in the pool, and that those bytes are unchanged.
    fn check(&self) {
        let mut bytes = vec![0; self.pool.memory().len()];
        assert!(self.pool.memory().copy_to(0, &mut bytes).is_ok());
        let is_secret = |window: &[u8]| window == SECRET;
        assert!(
            !bytes.windows(SECRET.len()).step_by(1).any(is_secret),
            "the pool has other memory"
        );
        let mut behind = [0; BEHIND];
        let start = self.front.memory.len() as u64;
        let read = rustix::io::pread(&self.front.file, &mut behind, start);
        assert_eq!(read, Ok(BEHIND));
        assert!(behind.chunks(64).all(|chunk| chunk.starts_with(SECRET)), "other memory changed");
    }
}

/// Lets a driver and a backend act around a shadow. Neither gets other memory, and an honest driver never sees a broken rule.
///
/// # Panics
///
/// Panics if a rule is broken.
pub fn shield(data: &[u8]) {
    let Some((settings, steps)) = data.split_first() else { return };
    let has = |bit: u8| settings & bit != 0;
    let features =
        |bit: u8| QueueFeatures { indirect: has(bit), event_idx: has(bit << 1), in_order: false };
    let (is_driver_hostile, is_backend_hostile) = (has(16), has(32));
    let Some(mut rig) = Rig::new(features(1), features(4), POOL_MIN) else { return };
    let mut keeps_log = || rig.keep_log(&PageMarks::new().ok()?);
    if has(64) && keeps_log().is_none() {
        return;
    }
    for (number, step) in (0_u32..).zip(steps.chunks_exact(8).take(STEPS_MAX)) {
        let Ok([what, rest @ ..]) = <[u8; 8]>::try_from(step) else { return };
        let passed = match what & 15 {
            0 | 1 => rig.forward(),
            2 | 3 => rig.complete(),
            4 if what & 0xf0 == 0 => {
                rig.replace_backend(POOL_MIN);
                Ok(true)
            }
            4..=8 => {
                drive(&mut rig, number, what, rest, is_driver_hostile);
                Ok(true)
            }
            _ => {
                serve(&mut rig, what, rest, is_backend_hostile);
                Ok(true)
            }
        };
        match passed {
            Ok(_) => {}
            Err(ShieldFault::Used { .. }) if is_backend_hostile => break,
            Err(ShieldFault::Client(_) | ShieldFault::Empty { .. }) if is_driver_hostile => break,
            Err(ShieldFault::TooLong { .. }) => break,
            Err(fault) => panic!("a broken rule of an honest peer: {fault}"),
        }
        if !is_driver_hostile {
            while let Some(used) = rig.driver().pop().expect("an honest device") {
                assert!(used.token <= number);
            }
        }
    }
    rig.check();
}

/// Lets the driver make a chain available, or write into its tables.
fn drive(rig: &mut Rig, number: u32, what: u8, [a, b, c, d, e, f, g]: [u8; 7], is_hostile: bool) {
    let (low, high) = (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]));
    if !is_hostile {
        let lens = [usize::from(e & 31) + 1, usize::from(low) + 1, usize::from(high) + 1, 1];
        let readable = usize::from(f & 3);
        let start = rig.front.buffers_at();
        let mut at = start;
        let mut ranges = Vec::new();
        for (part, len) in lens.into_iter().enumerate().take(1 + usize::from(g & 3)) {
            let access = if part < readable { DeviceAccess::Read } else { DeviceAccess::Write };
            ranges.push(rig.front.range(at, len, access));
            at += len;
        }
        let _ = rig.driver().push(&ranges, number);
        let _ = rig.driver().publish();
        return;
    }
    let Some(layout) = SplitLayout::new(ENTRIES) else { return };
    let tables = rig.front.tables_at(0);
    let memory = rig.front.memory.clone();
    let write = |offset: usize, bytes: &[u8]| {
        let _ = memory.copy_from(offset, bytes);
    };
    let slot = u16::from(e & 7);
    match what >> 4 & 3 {
        0 | 1 => {
            let far = u64::from(g >> 7) << 40;
            let address = (rig.front.base() + rig.front.buffers_at() as u64 + u64::from(low)) | far;
            let flags = u16::from(f & 7);
            let len = u32::from(high) << (g & 7);
            let link = Descriptor { address, len, flags, next: u16::from(f >> 4) };
            write(tables + layout.descriptor(slot), &link.to_bytes());
        }
        2 => write(tables + layout.avail_entry(slot), &low.to_le_bytes()),
        _ => write(tables + layout.avail_idx(), &u16::from(g & 15).to_le_bytes()),
    }
}

/// Lets the backend use a chain, or write into the pool.
fn serve(rig: &mut Rig, what: u8, [a, b, c, d, e, f, g]: [u8; 7], is_hostile: bool) {
    if is_hostile && what & 0x30 == 0x30 {
        let offset = usize::from(u16::from_le_bytes([a, b]) & 0x3ff);
        let _ = rig.pool.memory().copy_from(offset, &[c, d, e, f]);
        return;
    }
    let Some((head, chain)) = rig.take() else { return };
    let mut capacity = 0;
    for link in &chain {
        let Some(memory) = at(&rig.pool, link.address, link.len as usize) else {
            // A hostile backend reads what it wrote into its tables.
            assert!(is_hostile, "a descriptor outside of the pool");
            continue;
        };
        if link.flags & flag::WRITE != 0 {
            let mut bytes = vec![1; memory.len()];
            assert!(memory.copy_to(0, &mut bytes).is_ok());
            assert!(is_hostile || bytes.iter().all(|byte| *byte == 0), "stale bytes");
            let _ = memory.copy_from(0, &[g]);
            capacity += link.len;
        }
    }
    if is_hostile && what & 0x40 != 0 {
        let id = u16::from_le_bytes([a, b & 1]);
        rig.backend.finish(id, u32::from_le_bytes([c, d, e, f]));
    } else {
        rig.backend.finish(head, u32::from_le_bytes([c, d, 0, 0]).min(capacity));
    }
    let _ = rig.backend.publish();
}
