//! Random I/O, every answer of which is checked.

use ringfence_memory::LentSlice;

use super::checker::{Checker, Event, SECTOR, Violation, fill};
use super::{Driver, Random, bytes_of, lent_with};
use crate::storage::{Disk, Done, Geometry, Op, Segment};

/// What kind of I/O.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// Everything random comes from it.
    pub seed: u64,
    /// Most requests in flight.
    pub depth: usize,
    /// Sectors of the longest request, in units of the disk's own.
    pub longest: u64,
    /// Only this many bytes at the start of the disk are used (0: all of it).
    pub span: u64,
}

/// Why a workload ended early.
#[derive(Debug)]
pub enum Failure {
    /// The disk holds what it may not.
    Violated(Violation),
    /// A request failed with this errno. (For some tests that is the end that was wanted.)
    Failed(i32),
    /// Nothing completes any more.
    Stuck,
}

/// What a request in flight was.
struct Pending {
    token: u64,
    /// Of the checker; 0 for a read.
    id: u64,
    op: Op,
    first: u64,
    count: u64,
    memory: Option<LentSlice>,
}

/// A workload in progress.
pub struct Running {
    workload: Workload,
    geometry: Geometry,
    random: Random,
    pending: Vec<Pending>,
    /// The next request waits until nothing is in flight: a barrier.
    barrier: bool,
}

impl Workload {
    /// A workload that touches much in little time.
    pub fn new(seed: u64) -> Workload {
        Workload { seed, depth: 16, longest: 32, span: 0 }
    }

    /// Begins.
    pub fn start(self, disk: &dyn Disk) -> Running {
        let mut geometry = disk.geometry();
        if self.span > 0 {
            geometry.bytes = geometry.bytes.min(self.span);
        }
        let random = Random::new(self.seed);
        Running { workload: self, geometry, random, pending: vec![], barrier: false }
    }

    /// `steps` requests to a disk of zeros, every answer of which is checked.
    ///
    /// # Panics
    ///
    /// When an answer is wrong, or none comes.
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
    /// Does `steps` requests more, and leaves the last ones in flight.
    ///
    /// # Errors
    ///
    /// [`Failure`].
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
                self.take_answers(driver, checker)?;
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
    /// [`Failure`].
    pub fn finish(&mut self, driver: &mut Driver, checker: &mut Checker) -> Result<(), Failure> {
        while !self.pending.is_empty() {
            self.take_answers(driver, checker)?;
        }
        Ok(())
    }

    /// Whoever answered is gone, and what was in flight with it.
    pub fn crashed(&mut self, checker: &mut Checker) {
        self.pending.clear();
        checker.crashed();
    }

    fn submit(&mut self, driver: &mut Driver, checker: &mut Checker) {
        match self.random.below(20) {
            0 => {
                let id = checker.new_id();
                checker.note(Event::FlushSubmitted { id });
                let token = driver.submit(Op::Flush, 0, 0, vec![]);
                let (op, memory) = (Op::Flush, None);
                self.pending.push(Pending { token, id, op, first: 0, count: 0, memory });
                self.barrier = self.random.one_in(3);
            }
            1 => self.barrier = true,
            2..=7 => self.transfer(driver, checker, Op::Read),
            8 if self.geometry.write_zeroes => self.transfer(driver, checker, Op::WriteZeroes),
            choice => self.transfer(driver, checker, Op::Write { fua: choice == 9 }),
        }
    }

    /// A range that no request in flight touches.
    fn range(&mut self) -> Option<(u64, u64)> {
        let unit = u64::from(self.geometry.sector_size) / SECTOR as u64;
        let units = self.geometry.bytes / u64::from(self.geometry.sector_size);
        for _ in 0..20 {
            // Mostly short ones.
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
        let len = usize::try_from(count).unwrap_or(0) * SECTOR;
        let mut bytes = vec![0; len];
        let id = if op == Op::Read { 0 } else { checker.new_id() };
        let zeros = op == Op::WriteZeroes;
        if id != 0 {
            let count = u32::try_from(count).unwrap_or(0);
            let fua = op == Op::Write { fua: true };
            checker.note(Event::Submitted { id, first, count, zeros, fua });
            for (sector, at) in bytes.as_chunks_mut().0.iter_mut().zip(first..) {
                fill(id, at, sector);
            }
        }
        let memory = (!zeros).then(|| lent_with(&bytes));
        let segments = memory.as_ref().map_or(vec![], |memory| self.split(memory));
        let token = driver.submit(op, first * SECTOR as u64, len as u64, segments);
        self.pending.push(Pending { token, id, op, first, count, memory });
    }

    /// Cuts memory into pieces of random length, in units of 512 bytes.
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

    fn take_answers(&mut self, driver: &mut Driver, checker: &mut Checker) -> Result<(), Failure> {
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
                (Op::Flush, _) => checker.note(Event::FlushAcknowledged { id }),
                _ => checker.note(Event::Acknowledged { id }),
            }
        }
        failed.map_or(Ok(()), |errno| Err(Failure::Failed(errno)))
    }
}
