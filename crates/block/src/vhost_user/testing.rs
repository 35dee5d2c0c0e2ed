//! Disk whose storage is a vhost-user backend: the driver's end, for tests.
//!
//! Data is copied to and from slots in the memory of a [`Frontend`]. The disk keeps its requests while backends come and
//! go ([`FrontDisk::reconnect`]).

// #syscall none: a virtual machine of tests

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_memory::DeviceAccess;
use ringfence_vhost_user::testing::{FrontShape, Frontend};
use ringfence_wire::vhost_user::{number, protocol_feature};
use ringfence_wire::virtio::feature;
use ringfence_wire::virtio_blk::{
    BlkStatus, HEADER_BYTES, RequestHeader, RequestKind, SECTOR, feature as blk,
};

use crate::storage::{Discard, Disk, DiskQueue, Done, Geometry, Op, Request};

/// Bytes of data of a slot.
pub const SLOT_DATA: usize = 256 << 10;
/// Bytes of a slot: header, status, data.
const SLOT: usize = SLOT_DATA + DATA_AT;
/// Offsets in a slot.
const STATUS_AT: usize = HEADER_BYTES;
const DATA_AT: usize = 4096;
/// Slots of each vring.
const SLOTS: usize = 16;
/// Features of a Linux driver.
pub const FEATURES: u64 = feature::INDIRECT
    | feature::EVENT_IDX
    | feature::VERSION_1
    | blk::SEG_MAX
    | blk::BLK_SIZE
    | blk::MQ
    | blk::FLUSH;
/// Protocol features of QEMU for a disk.
pub const PROTOCOL: u64 = protocol_feature::REPLY_ACK
    | protocol_feature::MULTIQUEUE
    | protocol_feature::CONFIG
    | protocol_feature::INFLIGHT;

/// Returns the shape of a frontend for a disk.
pub fn shape(vrings: u16) -> FrontShape {
    FrontShape {
        vrings,
        size: 64,
        buffers: usize::from(vrings) * SLOTS * SLOT,
        features: FEATURES,
        protocol: PROTOCOL,
        has_mark: true,
    }
}

/// Disk behind a vhost-user backend.
#[derive(Clone)]
pub struct FrontDisk {
    front: Arc<Mutex<Frontend>>,
    geometry: Geometry,
    /// Vrings that have no queue yet.
    free: Arc<Mutex<Vec<usize>>>,
}

impl FrontDisk {
    /// Sets the device up over the connection of `front`, and reads its configuration space.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Frontend::set_up`].
    pub fn new(mut front: Frontend) -> io::Result<FrontDisk> {
        front.set_up()?;
        let config = config(&front)?;
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|n| config[at + n]));
        let capacity = u64::from(word(0)) | u64::from(word(4)) << 32;
        let geometry = Geometry {
            bytes: capacity * SECTOR,
            sector_size: word(20),
            physical_sector_size: word(20) << config[24],
            read_only: false,
            flush: true,
            discard: Some(Discard { granularity: word(44) * 512, alignment: 0, secure: false }),
            write_zeroes: true,
            extents: false,
            rotational: false,
        };
        let free = (0..front.vrings.len()).collect();
        let free = Arc::new(Mutex::new(free));
        Ok(FrontDisk { front: Arc::new(Mutex::new(front)), geometry, free })
    }

    /// Sets the device up at the next backend. Requests in flight stay with the vrings and the in-flight log.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Frontend::set_up`].
    pub fn reconnect(&self, path: &Path) -> io::Result<()> {
        let mut front = self.front();
        front.disconnect();
        front.connect(path)?;
        front.set_up()
    }

    /// Locks the frontend, which the thread of the device uses too.
    pub fn front(&self) -> MutexGuard<'_, Frontend> {
        self.front.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads the configuration space.
///
/// # Errors
///
/// Returns the errors of [`Frontend::ask`].
pub fn config(front: &Frontend) -> io::Result<Vec<u8>> {
    let wanted = [[0, 60, 0].map(u32::to_ne_bytes).concat(), vec![0; 60]].concat();
    let (answer, _) = front.ask(number::GET_CONFIG, &wanted)?;
    answer.get(12..72).map(<[u8]>::to_vec).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

impl Disk for FrontDisk {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn queue(&self, _depth: u32) -> io::Result<Box<dyn DiskQueue>> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let vring = free.pop().ok_or(io::ErrorKind::QuotaExceeded)?;
        let call = self.front().vrings[vring].call.try_clone()?;
        let slots = (0..SLOTS).map(|_| None).collect();
        Ok(Box::new(FrontQueue { front: Arc::clone(&self.front), vring, call, slots }))
    }
}

/// Queue of a disk behind a vhost-user backend: one vring.
struct FrontQueue {
    front: Arc<Mutex<Frontend>>,
    vring: usize,
    call: OwnedFd,
    /// Requests in flight.
    slots: Vec<Option<Request>>,
}

impl FrontQueue {
    fn slot_at(&self, front: &Frontend, slot: usize) -> usize {
        front.buffers_at() + (self.vring * SLOTS + slot) * SLOT
    }

    /// Makes the chain of a request available.
    fn push(&self, front: &mut Frontend, slot: usize, request: &Request, flushes: bool) {
        let at = self.slot_at(front, slot);
        let sector = request.offset / SECTOR;
        let len = usize::try_from(request.len).expect("a short request");
        assert!(len <= SLOT_DATA || !matches!(request.op, Op::Read | Op::Write { .. }));
        let range = |unmap: u32| {
            let sectors = u32::try_from(request.len / SECTOR).expect("a short range");
            [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &unmap.to_le_bytes()].concat()
        };
        let (kind, out, fills) = match request.op {
            _ if flushes => (RequestKind::Flush, vec![], 0),
            Op::Flush => (RequestKind::Flush, vec![], 0),
            Op::Read => (RequestKind::Read, vec![], len),
            Op::Write { .. } => {
                let mut data = vec![0; len];
                let mut filled = 0;
                for segment in &request.segments {
                    let len = segment.memory.len();
                    segment.memory.copy_to(0, &mut data[filled..filled + len]).expect("in range");
                    filled += len;
                }
                (RequestKind::Write, data, 0)
            }
            Op::Discard { .. } => (RequestKind::Discard, range(0), 0),
            Op::WriteZeroes { allocate } => {
                (RequestKind::WriteZeroes, range(u32::from(!allocate)), 0)
            }
            Op::Extents => panic!("a virtio disk has no extents"),
        };
        let header = RequestHeader { kind, sector }.to_bytes();
        let memory = &front.memory;
        memory.copy_from(at, &header).expect("a slot");
        memory.copy_from(at + STATUS_AT, &[0xff]).expect("a slot");
        memory.copy_from(at + DATA_AT, &out).expect("a slot");
        let mut ranges = vec![front.range(at, HEADER_BYTES, DeviceAccess::Read)];
        if !out.is_empty() {
            ranges.push(front.range(at + DATA_AT, out.len(), DeviceAccess::Read));
        }
        if fills > 0 {
            ranges.push(front.range(at + DATA_AT, fills, DeviceAccess::Write));
        }
        ranges.push(front.range(at + STATUS_AT, 1, DeviceAccess::Write));
        let token = u32::try_from(slot).expect("a slot");
        front.vrings[self.vring].driver.push(&ranges, token).expect("a free descriptor");
    }

    /// Ends a request. Returns its result, or `None` if its flush follows.
    fn finish(&mut self, front: &mut Frontend, slot: usize) -> Option<Done> {
        let mut request = self.slots[slot].take().expect("a request in flight");
        let at = self.slot_at(front, slot);
        let mut status = [0];
        front.memory.copy_to(at + STATUS_AT, &mut status).expect("a slot");
        let result = match status[0] {
            status if status == BlkStatus::Okay as u8 => Ok(()),
            status if status == BlkStatus::Unsupported as u8 => Err(libc::EOPNOTSUPP),
            _ => Err(libc::EIO),
        };
        if request.op == (Op::Write { fua: true }) && result.is_ok() {
            request.op = Op::Write { fua: false };
            self.push(front, slot, &request, true);
            front.kick(self.vring);
            self.slots[slot] = Some(request);
            return None;
        }
        if request.op == Op::Read && result.is_ok() {
            let mut filled = at + DATA_AT;
            for segment in &request.segments {
                let (memory, len) = (&segment.memory, segment.memory.len());
                memory.copy_from_lent(0, &front.memory, filled, len).expect("a slot");
                filled += len;
            }
        }
        Some(request.done(result))
    }
}

impl DiskQueue for FrontQueue {
    fn submit(&mut self, request: Request) {
        let front = Arc::clone(&self.front);
        let mut front = front.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = self.slots.iter().position(Option::is_none).expect("the depth of the queue");
        self.push(&mut front, slot, &request, false);
        self.slots[slot] = Some(request);
    }

    fn kick(&mut self) {
        self.front.lock().unwrap_or_else(PoisonError::into_inner).kick(self.vring);
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        // The event was read, or was not there.
        let _ = rustix::io::read(&self.call, &mut [0; 8]);
        let front = Arc::clone(&self.front);
        let mut front = front.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let used = front.vrings[self.vring].driver.pop().expect("an honest device");
            let Some(used) = used else {
                if front.vrings[self.vring].driver.arm(1).expect("an honest device") {
                    continue;
                }
                return;
            };
            done.extend(self.finish(&mut front, used.token as usize));
        }
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.call.as_fd()
    }
}
