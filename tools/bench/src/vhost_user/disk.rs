//! Front-end of a disk: one vring, with a number of requests in flight.
//!
//! The data of a request is used where the device reads or writes it; with a pool it is copied to or from private memory, as
//! the guest module does. Every sector of the disk begins with its number.

use std::path::Path;
use std::time::Duration;

use anyhow::ensure;
use ringfence_block::vhost_user::testing::{FEATURES, PROTOCOL};
use ringfence_memory::DeviceAccess;
use ringfence_vhost_user::testing::{FrontShape, Frontend};
use ringfence_wire::vhost_user::protocol_feature;
use ringfence_wire::virtio_blk::{BlkStatus, HEADER_BYTES, RequestHeader, RequestKind, SECTOR};

use super::args::Way;
use super::front::{FrontEnd, Stopwatch, Worked, frontend, kick, wait};
use crate::block::args::Rw;

/// Bytes of the disk.
pub(super) const DISK: u64 = 128 << 20;
/// Offsets in the slot of a request: header, status, data.
const STATUS_AT: usize = HEADER_BYTES;
const DATA_AT: usize = 4096;
/// State of the random numbers at the beginning.
const SEED: u64 = 0x9e37_79b9_7f4a_7c15;
/// Entries of the vring.
const ENTRIES: u16 = 128;

/// Requests of a front-end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Requests {
    pub(super) block: u32,
    pub(super) depth: u16,
    pub(super) rw: Rw,
}

/// Front-end of a disk.
pub(super) struct DiskFront {
    front: Frontend,
    work: Requests,
    /// Memory to copy from and to, if the data of requests is in a pool.
    private: Option<Vec<u8>>,
    /// Sector of the request in each slot.
    sectors: Vec<u64>,
    /// Last block of sequential requests, or state of the random numbers.
    position: u64,
    worked: Worked,
}

impl DiskFront {
    /// Connects to the socket of a backend, or of a shield. `has_log`: the backend keeps a log of the requests in flight.
    ///
    /// # Errors
    ///
    /// Returns an error if the device cannot be set up.
    pub(super) fn connect(
        socket: &Path,
        has_log: bool,
        way: Way,
        work: Requests,
    ) -> anyhow::Result<DiskFront> {
        let protocol = if has_log { PROTOCOL } else { PROTOCOL & !protocol_feature::INFLIGHT };
        let shape = FrontShape {
            vrings: 1,
            size: ENTRIES,
            buffers: usize::from(work.depth) * slot_bytes(work),
            features: FEATURES,
            protocol,
            has_mark: way == Way::Pool,
        };
        let mut front = frontend(socket, shape)?;
        front.set_up()?;
        let private = (way == Way::Pool).then(|| vec![0; work.block as usize]);
        let sectors = vec![0; work.depth.into()];
        let worked = Worked::default();
        Ok(DiskFront { front, work, private, sectors, position: SEED, worked })
    }

    fn kick(&mut self) {
        kick(&mut self.front.vrings[0], &mut self.worked);
    }

    fn slot_at(&self, slot: u16) -> usize {
        self.front.buffers_at() + usize::from(slot) * slot_bytes(self.work)
    }

    /// Returns the number of the next block, which may be beyond the end.
    fn next_block(&mut self) -> u64 {
        if self.work.rw == Rw::SeqRead {
            self.position += 1;
            return self.position;
        }
        self.position ^= self.position << 13;
        self.position ^= self.position >> 7;
        self.position ^= self.position << 17;
        self.position
    }

    /// Makes the next request available, in this slot.
    fn push(&mut self, slot: u16) -> anyhow::Result<()> {
        let (at, len) = (self.slot_at(slot), self.work.block as usize);
        let per_block = u64::from(self.work.block) / SECTOR;
        let sector = self.next_block() % (DISK / u64::from(self.work.block)) * per_block;
        self.sectors[usize::from(slot)] = sector;
        let is_write = self.work.rw == Rw::RandWrite;
        let kind = if is_write { RequestKind::Write } else { RequestKind::Read };
        let memory = &self.front.memory;
        memory.copy_from(at, &RequestHeader { kind, sector }.to_bytes())?;
        memory.copy_from(at + STATUS_AT, &[0xff])?;
        if is_write {
            if let Some(private) = &mut self.private {
                stamp(private, sector, per_block);
                memory.copy_from(at + DATA_AT, private)?;
                self.worked.copied += u64::from(self.work.block);
            } else {
                for (number, at) in (sector..sector + per_block).zip((at + DATA_AT..).step_by(512))
                {
                    memory.copy_from(at, &number.to_le_bytes())?;
                }
            }
        }
        let access = if is_write { DeviceAccess::Read } else { DeviceAccess::Write };
        let ranges = [
            self.front.range(at, HEADER_BYTES, DeviceAccess::Read),
            self.front.range(at + DATA_AT, len, access),
            self.front.range(at + STATUS_AT, 1, DeviceAccess::Write),
        ];
        self.front.vrings[0].driver.push(&ranges, slot.into())?;
        Ok(())
    }

    /// Checks the result of a request.
    fn finish(&mut self, slot: u16) -> anyhow::Result<()> {
        let (at, sector) = (self.slot_at(slot), self.sectors[usize::from(slot)]);
        let memory = &self.front.memory;
        let mut status = [0];
        memory.copy_to(at + STATUS_AT, &mut status)?;
        ensure!(status[0] == BlkStatus::Okay as u8, "sector {sector}: status {}", status[0]);
        if self.work.rw != Rw::RandWrite {
            let mut found = [0; 8];
            if let Some(private) = &mut self.private {
                memory.copy_to(at + DATA_AT, private)?;
                self.worked.copied += u64::from(self.work.block);
                found.copy_from_slice(&private[..8]);
            } else {
                memory.copy_to(at + DATA_AT, &mut found)?;
            }
            let found = u64::from_le_bytes(found);
            ensure!(found == sector, "sector {sector} has the data of sector {found}");
        }
        self.worked.done += 1;
        Ok(())
    }
}

impl FrontEnd for DiskFront {
    /// Keeps the requests in flight for this time, and waits for the last ones.
    fn work(&mut self, length: Duration) -> anyhow::Result<Worked> {
        self.worked = Worked::default();
        let begun = Stopwatch::start();
        for slot in 0..self.work.depth {
            self.push(slot)?;
        }
        self.kick();
        let mut in_flight = self.work.depth;
        while in_flight > 0 {
            let continues = begun.elapsed() < length;
            let mut popped = 0;
            while let Some(used) = self.front.vrings[0].driver.pop()? {
                let slot = u16::try_from(used.token)?;
                self.finish(slot)?;
                popped += 1;
                if continues {
                    self.push(slot)?;
                } else {
                    in_flight -= 1;
                }
            }
            if continues && popped > 0 {
                self.kick();
            }
            if in_flight > 0 && !self.front.vrings[0].driver.arm(1)? {
                wait(&[&self.front.vrings[0]], &mut self.worked)?;
            }
        }
        Ok(begun.stop(self.worked))
    }
}

/// Writes the numbers of sectors to their beginnings.
pub(super) fn stamp(data: &mut [u8], first: u64, count: u64) {
    for (number, sector) in (first..first + count).zip(data.chunks_mut(512)) {
        if let Some(place) = sector.first_chunk_mut::<8>() {
            *place = number.to_le_bytes();
        }
    }
}

fn slot_bytes(work: Requests) -> usize {
    DATA_AT + (work.block as usize).next_multiple_of(4096)
}
