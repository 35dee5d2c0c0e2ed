//! Random I/O whose results are checked against the model.

use ringfence_memory::LentSlice;
use ringfence_sys::numbers::{bounded, usize_from};

use super::checker::{Checker, Event, SECTOR, Violation, fill};
use super::{Driver, Random, bytes_of, lent_with};
use crate::storage::{Disk, Done, Geometry, Op, Segment};

/// Parameters of random I/O.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// Seed of all random decisions.
    pub seed: u64,
    /// Maximum number of requests in flight.
    pub depth: usize,
    /// Maximum length of a request, in sectors of the disk.
    pub longest: u64,
    /// Number of bytes used at the start of the disk; 0 for all.
    pub span: u64,
}

/// Reasons for which a workload ended early.
#[derive(Debug)]
pub enum Failure {
    /// The disk holds content that the model excludes.
    Violated(Violation),
    /// A request failed with this errno. Some tests expect that.
    Failed(i32),
    /// No request completed in time.
    Stuck,
}

/// Request in flight at the disk.
struct Pending {
    token: u64,
    /// Id of the checker; 0 for a read.
    id: u64,
    op: Op,
    first: u64,
    count: u64,
    memory: Option<LentSlice>,
}

/// Workload that is in progress.
pub struct Running {
    workload: Workload,
    geometry: Geometry,
    random: Random,
    pending: Vec<Pending>,
    /// Set if the next request waits until nothing is in flight.
    barrier: bool,
}

impl Workload {
    /// Creates a workload of short requests with overlapping lifetimes.
    pub fn new(seed: u64) -> Workload {
        Workload { seed, depth: 16, longest: 32, span: 0 }
    }

    /// Starts the workload on a disk.
    pub fn start(self, disk: &dyn Disk) -> Running {
        let mut geometry = disk.geometry();
        if self.span > 0 {
            geometry.bytes = geometry.bytes.min(self.span);
        }
        let random = Random::new(self.seed);
        Running { workload: self, geometry, random, pending: vec![], barrier: false }
    }

    /// Executes `steps` requests on a disk of zeros and checks every result.
    ///
    /// # Panics
    ///
    /// Panics if a result is wrong or missing.
    pub fn exercise(self, disk: &dyn Disk, steps: usize) {
        let mut checker = Checker::new();
        let mut driver =
            Driver::new(disk.queue(u32::try_from(self.depth).expect("a depth")).expect("a queue"));
        let mut running = self.start(disk);
        running.steps(&mut driver, &mut checker, steps).expect("right answers");
        running.finish(&mut driver, &mut checker).expect("right answers");
    }
}

impl Running {
    /// Submits `steps` more requests and leaves the last ones in flight.
    ///
    /// # Errors
    ///
    /// Returns the first [`Failure`].
    pub fn steps(
        &mut self,
        driver: &mut Driver,
        checker: &mut Checker,
        steps: usize,
    ) -> Result<(), Failure> {
        for _ in 0..steps {
            while self.pending.len() >= self.workload.depth
                || (self.barrier && !self.pending.is_empty())
            {
                self.take_results(driver, checker)?;
            }
            self.barrier = false;
            self.submit(driver, checker);
        }
        driver.queue().kick();
        Ok(())
    }

    /// Waits until nothing is in flight.
    ///
    /// # Errors
    ///
    /// Returns the first [`Failure`].
    pub fn finish(&mut self, driver: &mut Driver, checker: &mut Checker) -> Result<(), Failure> {
        while !self.pending.is_empty() {
            self.take_results(driver, checker)?;
        }
        Ok(())
    }

    /// Records that the server crashed: requests in flight will never complete.
    pub fn crashed(&mut self, checker: &mut Checker) {
        self.pending.clear();
        checker.crashed();
    }

    fn submit(&mut self, driver: &mut Driver, checker: &mut Checker) {
        match self.random.below(20) {
            0 => {
                let id = checker.new_id();
                checker.record(Event::FlushSubmitted { id });
                let token = driver.submit(Op::Flush, 0, 0, vec![]);
                let (op, memory) = (Op::Flush, None);
                self.pending.push(Pending { token, id, op, first: 0, count: 0, memory });
                self.barrier = self.random.one_in(3);
            }
            1 => self.barrier = true,
            2..=7 => self.transfer(driver, checker, Op::Read),
            8 if self.geometry.write_zeroes => {
                let allocate = self.random.one_in(2);
                self.transfer(driver, checker, Op::WriteZeroes { allocate });
            }
            choice => self.transfer(driver, checker, Op::Write { fua: choice == 9 }),
        }
    }

    /// Returns a range that no request in flight touches: first sector and number of sectors.
    fn range(&mut self) -> Option<(u64, u64)> {
        let unit = u64::from(self.geometry.sector_size) / SECTOR as u64;
        let units = self.geometry.bytes / u64::from(self.geometry.sector_size);
        for _ in 0..20 {
            // Short ranges are most frequent.
            let longest = 1 + self.random.below(self.workload.longest.min(units));
            let count = 1 + self.random.below(longest);
            let first = self.random.below(units - count + 1);
            let (first, count) = (first * unit, count * unit);
            let clash = self
                .pending
                .iter()
                .any(|other| first < other.first + other.count && other.first < first + count);
            if !clash {
                return Some((first, count));
            }
        }
        None
    }

    fn transfer(&mut self, driver: &mut Driver, checker: &mut Checker, op: Op) {
        let Some((first, count)) = self.range() else { return };
        let len = usize_from(count) * SECTOR;
        let mut bytes = vec![0; len];
        let id = if op == Op::Read { 0 } else { checker.new_id() };
        let zeros = matches!(op, Op::WriteZeroes { .. });
        if id != 0 {
            let count = bounded(count, u32::MAX);
            let fua = op == Op::Write { fua: true };
            checker.record(Event::Submitted { id, first, count, zeros, fua });
            for (sector, at) in bytes.as_chunks_mut().0.iter_mut().zip(first..) {
                fill(id, at, sector);
            }
        }
        let memory = (!zeros).then(|| lent_with(&bytes));
        let segments = memory.as_ref().map_or(vec![], |memory| self.split(memory));
        let token = driver.submit(op, first * SECTOR as u64, len as u64, segments);
        self.pending.push(Pending { token, id, op, first, count, memory });
    }

    /// Cuts memory into segments of random length, in units of 512 bytes.
    fn split(&mut self, memory: &LentSlice) -> Vec<Segment> {
        let mut segments = vec![];
        let mut at = 0;
        while at < memory.len() {
            let left = (memory.len() - at) / SECTOR;
            let sectors =
                if self.random.one_in(4) { left } else { 1 + self.random.index(left.min(8)) };
            let piece = memory.slice(at, sectors * SECTOR).expect("within the memory");
            at += piece.len();
            segments.push(piece.into());
        }
        segments
    }

    fn take_results(&mut self, driver: &mut Driver, checker: &mut Checker) -> Result<(), Failure> {
        let answers = driver.wait().map_err(|_| Failure::Stuck)?;
        let mut failed = None;
        for Done { token, result, .. } in answers {
            let at = self.pending.iter().position(|pending| pending.token == token);
            let Pending { id, op, first, memory, .. } =
                self.pending.swap_remove(at.expect("an answer is to a request"));
            if let Err(errno) = result {
                checker.failed(id);
                failed = Some(errno);
                continue;
            }
            match (op, memory) {
                (Op::Read, Some(memory)) => {
                    checker.check_read(first, &bytes_of(&memory)).map_err(Failure::Violated)?
                }
                (Op::Flush, _) => checker.record(Event::FlushAcknowledged { id }),
                _ => checker.record(Event::Acknowledged { id }),
            }
        }
        failed.map_or(Ok(()), |errno| Err(Failure::Failed(errno)))
    }
}
