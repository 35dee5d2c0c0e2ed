//! Disk with a volatile cache, whose power can be cut.
//!
//! Requests complete in random order. A write goes to the cache. A flush moves the writes that completed
//! before its submission to the medium, and no other sector. At a power cut each sector of the cache is
//! decided separately: it keeps the content of the medium, or takes any content written since, whether
//! acknowledged or in flight. That is the worst behaviour allowed for a disk. A [`Flaw`] makes the disk
//! break one rule, to prove that the checker finds it.

// #syscall none: for tests

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_sys::mailbox::WakeFd;
use ringfence_sys::numbers::usize_from;

use super::checker::SECTOR;
use super::{Random, bytes_of};
use crate::storage::{Disk, DiskQueue, Done, Geometry, Op, Request, check_request};

/// Rule that the disk breaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flaw {
    /// Flushes are acknowledged without effect.
    IgnoresFlush,
    /// FUA has no effect.
    IgnoresFua,
    /// At a power cut a sector may hold halves of two writes.
    TearsSectors,
    /// Some writes are acknowledged without effect.
    LosesWrites,
}

/// Content written to a sector since its last flush.
#[derive(Clone)]
struct Dirty {
    content: [u8; SECTOR],
    /// Time of the acknowledgement.
    done: u64,
}

struct Medium {
    durable: Vec<u8>,
    cache: HashMap<u64, Vec<Dirty>>,
    random: Random,
    /// Number of acknowledgements so far, used as time.
    now: u64,
    /// Number of power cuts.
    cuts: u64,
    flaw: Option<Flaw>,
}

/// Data of writes in flight, by first sector and token.
type InFlight = HashMap<(u64, u64), Vec<u8>>;

/// Disk whose power can be cut. Clones are the same disk.
#[derive(Clone)]
pub struct PowerCutDisk {
    medium: Arc<Mutex<Medium>>,
    in_flight: Arc<Mutex<InFlight>>,
    geometry: Geometry,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PowerCutDisk {
    /// Creates a disk of `sectors` times 512 bytes, all zeros.
    pub fn new(sectors: usize, seed: u64) -> PowerCutDisk {
        let medium = Medium {
            durable: vec![0; sectors * SECTOR],
            cache: HashMap::new(),
            random: Random::new(seed),
            now: 0,
            cuts: 0,
            flaw: None,
        };
        let geometry = Geometry {
            bytes: (sectors * SECTOR) as u64,
            sector_size: 512,
            physical_sector_size: 512,
            read_only: false,
            flush: true,
            discard: None,
            write_zeroes: true,
            extents: false,
            rotational: false,
        };
        PowerCutDisk { medium: Arc::new(Mutex::new(medium)), in_flight: Arc::default(), geometry }
    }

    /// Adds a flaw to the disk.
    #[must_use]
    pub fn with_flaw(self, flaw: Flaw) -> PowerCutDisk {
        lock(&self.medium).flaw = Some(flaw);
        self
    }

    /// Cuts the power and restores it. Requests in flight never complete, and queues created before stay
    /// silent.
    pub fn cut(&self) {
        let mut medium = lock(&self.medium);
        let Medium { durable, cache, random, cuts, flaw, .. } = &mut *medium;
        *cuts += 1;
        for ((first, _), bytes) in lock(&self.in_flight).drain() {
            for (content, sector) in bytes.as_chunks().0.iter().zip(first..) {
                cache.entry(sector).or_default().push(Dirty { content: *content, done: u64::MAX });
            }
        }
        // Sorted, so that the seed decides everything.
        let mut sectors: Vec<_> = cache.drain().collect();
        sectors.sort_unstable_by_key(|(sector, _)| *sector);
        for (sector, contents) in sectors {
            let at = usize_from(sector) * SECTOR;
            let choice = random.index(contents.len() + 1);
            let Some(chosen) = contents.get(choice) else { continue };
            let torn = *flaw == Some(Flaw::TearsSectors) && random.one_in(2);
            let len = if torn { SECTOR / 2 } else { SECTOR };
            durable[at..at + len].copy_from_slice(&chosen.content[..len]);
        }
    }

    /// Returns the number of power cuts.
    pub fn cuts(&self) -> u64 {
        lock(&self.medium).cuts
    }
}

impl Medium {
    fn read(&self, first: u64, bytes: &mut [u8]) {
        for (room, sector) in bytes.as_chunks_mut::<SECTOR>().0.iter_mut().zip(first..) {
            let at = usize_from(sector) * SECTOR;
            match self.cache.get(&sector).and_then(|contents| contents.last()) {
                Some(newest) => *room = newest.content,
                None => room.copy_from_slice(&self.durable[at..at + SECTOR]),
            }
        }
    }

    fn write(&mut self, first: u64, bytes: &[u8], fua: bool) {
        self.now += 1;
        let done = self.now;
        if self.flaw == Some(Flaw::LosesWrites) && self.random.one_in(50) {
            return;
        }
        for (content, sector) in bytes.as_chunks().0.iter().zip(first..) {
            self.cache.entry(sector).or_default().push(Dirty { content: *content, done });
        }
        if fua && self.flaw != Some(Flaw::IgnoresFua) {
            let count = (bytes.len() / SECTOR) as u64;
            (first..first + count).for_each(|sector| self.keep(sector, done));
        }
    }

    fn flush(&mut self, moment: u64) {
        if self.flaw == Some(Flaw::IgnoresFlush) {
            return;
        }
        let sectors: Vec<u64> = self.cache.keys().copied().collect();
        sectors.into_iter().for_each(|sector| self.keep(sector, moment));
    }

    /// Moves the newest content of a sector that was acknowledged by `moment` to the medium.
    fn keep(&mut self, sector: u64, moment: u64) {
        let Some(contents) = self.cache.get_mut(&sector) else { return };
        let Some(newest) = contents.iter().rposition(|dirty| dirty.done <= moment) else { return };
        let at = usize_from(sector) * SECTOR;
        self.durable[at..at + SECTOR].copy_from_slice(&contents[newest].content);
        contents.drain(..=newest);
        if contents.is_empty() {
            self.cache.remove(&sector);
        }
    }
}

impl Disk for PowerCutDisk {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn queue(&self, _depth: u32) -> io::Result<Box<dyn DiskQueue>> {
        let event = WakeFd::new()?;
        let cuts = self.cuts();
        Ok(Box::new(PowerCutQueue { disk: self.clone(), event, cuts, requests: vec![] }))
    }
}

struct PowerCutQueue {
    disk: PowerCutDisk,
    /// Raised while requests are in flight.
    event: WakeFd,
    /// Number of power cuts when the queue was created.
    cuts: u64,
    /// Requests in flight, with the time of their submission.
    requests: Vec<(Request, u64)>,
}

impl PowerCutQueue {
    fn name(&self, request: &Request) -> (u64, u64) {
        (request.offset / SECTOR as u64, request.token)
    }

    fn payload(request: &Request) -> Vec<u8> {
        match request.op {
            Op::Write { .. } => {
                request.segments.iter().flat_map(|segment| bytes_of(&segment.memory)).collect()
            }
            _ => vec![0; usize_from(request.len)],
        }
    }

    fn execute(&self, medium: &mut Medium, request: &Request, moment: u64) -> Result<(), i32> {
        let Geometry { bytes, sector_size, read_only, .. } = self.disk.geometry;
        check_request(request, bytes, sector_size, read_only)?;
        let first = request.offset / SECTOR as u64;
        match request.op {
            Op::Read => {
                let mut bytes = vec![0; usize_from(request.len)];
                medium.read(first, &mut bytes);
                let mut at = 0;
                for segment in &request.segments {
                    let len = segment.memory.len();
                    let copied = segment.memory.copy_from(0, &bytes[at..at + len]);
                    copied.map_err(|_| libc::EFAULT)?;
                    at += len;
                }
            }
            Op::Write { fua } => medium.write(first, &Self::payload(request), fua),
            Op::WriteZeroes { .. } => medium.write(first, &Self::payload(request), false),
            Op::Flush => medium.flush(moment),
            Op::Discard { .. } | Op::Extents => return Err(libc::EOPNOTSUPP),
        }
        Ok(())
    }
}

impl DiskQueue for PowerCutQueue {
    fn submit(&mut self, request: Request) {
        let moment = lock(&self.disk.medium).now;
        if matches!(request.op, Op::Write { .. } | Op::WriteZeroes { .. }) {
            lock(&self.disk.in_flight).insert(self.name(&request), Self::payload(&request));
        }
        self.requests.push((request, moment));
        self.event.wake();
    }

    fn kick(&mut self) {}

    fn reap(&mut self, done: &mut Vec<Done>) {
        let disk = self.disk.clone();
        let mut medium = lock(&disk.medium);
        if medium.cuts != self.cuts || self.requests.is_empty() {
            self.event.clear();
            return;
        }
        for _ in 0..1 + medium.random.index(self.requests.len()) {
            let at = medium.random.index(self.requests.len());
            let (request, moment) = self.requests.swap_remove(at);
            lock(&disk.in_flight).remove(&self.name(&request));
            let result = self.execute(&mut medium, &request, moment);
            done.push(request.done(result));
        }
        if self.requests.is_empty() {
            self.event.clear();
        }
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::super::checker::Checker;
    use super::super::workload::{Failure, Workload};
    use super::super::{Driver, image};
    use super::*;

    /// Runs rounds of I/O, each ended by a power cut at a random time, and returns the result of the checker.
    fn rounds(disk: &PowerCutDisk, seed: u64, rounds: usize) -> Result<(), Failure> {
        let mut checker = Checker::new();
        let mut random = Random::new(seed);
        for round in 0..rounds {
            let mut driver = Driver::new(disk.queue(16).unwrap());
            let mut running = Workload::new(seed + round as u64).start(disk);
            running.steps(&mut driver, &mut checker, 20 + random.index(300))?;
            disk.cut();
            running.crashed(&mut checker);
            checker.check_after_crash(0, &image(disk)).map_err(Failure::Violated)?;
        }
        Ok(())
    }

    #[test]
    fn acknowledged_flush_survives_power_cut() {
        for seed in 0..30 {
            rounds(&PowerCutDisk::new(512, seed), seed, 5)
                .unwrap_or_else(|failure| panic!("seed {seed}: {failure:?}"));
        }
    }

    #[test]
    fn checker_finds_each_flaw() {
        for flaw in [Flaw::IgnoresFlush, Flaw::IgnoresFua, Flaw::TearsSectors, Flaw::LosesWrites] {
            let found = (0..20).any(|seed| {
                let disk = PowerCutDisk::new(256, seed).with_flaw(flaw);
                matches!(rounds(&disk, seed, 5), Err(Failure::Violated(_)))
            });
            assert!(found, "{flaw:?}");
        }
    }

    #[test]
    fn power_cut_loses_part_of_unflushed_writes() {
        let disk = PowerCutDisk::new(64, 1);
        let mut driver = Driver::new(disk.queue(1).unwrap());
        let mut lost = 0;
        for sector in 0..64 {
            driver.write(sector * 512, &[7; 512]).unwrap();
        }
        disk.cut();
        for sector in image(&disk).as_chunks::<SECTOR>().0 {
            lost += u32::from(sector[0] == 0);
        }
        assert!((16..48).contains(&lost), "{lost} of 64 were lost");
    }
}
