//! Test tools for disks, usable for any [`Disk`].
//!
//! * [`conformance`]: checks of behaviour that every disk must have.
//! * [`checker`]: model of the contents that a disk may have after a crash, given its acknowledgements. Its
//!   journal is a file, so that the process that does the I/O may be killed.
//! * [`workload`]: random reads, writes, flushes and barriers, checked by the model.
//! * [`powercut`]: disk that reorders writes, and loses unflushed ones at a power cut.
//!
//! All randomness comes from a seed, which each failure message names.

// #syscall none: for tests

pub mod checker;
pub mod conformance;
pub mod powercut;
pub mod workload;

use std::time::Duration;

use ringfence_memory::LentSlice;
use ringfence_sys::numbers::usize_from;
use ringfence_sys::poll::wait_readable;

use super::{Disk, DiskQueue, Done, Op, Request, Segment};

/// Random number generator with a seed (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates a generator; the same seed yields the same numbers.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// Returns the next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// Returns a number below `bound`, or 0 if `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next_u64() % bound.max(1)
    }

    /// Returns `true` once in `n` calls on average.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Returns a number below `len`, as an index.
    pub fn index(&mut self, len: usize) -> usize {
        usize_from(self.below(len as u64))
    }
}

/// Returns a pseudo-random number that depends on `x` alone.
pub(crate) fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// Disk queue with blocking waits, for tests.
pub struct Driver {
    queue: Box<dyn DiskQueue>,
    next_token: u64,
    in_flight: usize,
    timeout: Duration,
}

/// Timeout: no request completed in time.
#[derive(Debug)]
pub struct Stuck;

impl Driver {
    /// Creates a driver that waits up to two minutes for a completion.
    pub fn new(queue: Box<dyn DiskQueue>) -> Driver {
        Driver { queue, next_token: 1, in_flight: 0, timeout: Duration::from_secs(120) }
    }

    /// Sets the maximum wait for a completion.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Driver {
        self.timeout = timeout;
        self
    }

    /// Returns the underlying disk queue.
    pub fn queue(&mut self) -> &mut dyn DiskQueue {
        &mut *self.queue
    }

    /// Returns the number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Submits a request and returns its token. The request starts with the next [`Driver::wait`].
    pub fn submit(&mut self, op: Op, offset: u64, len: u64, segments: Vec<Segment>) -> u64 {
        let token = self.next_token;
        self.next_token += 1;
        self.in_flight += 1;
        self.queue.submit(Request { token, op, offset, len, segments });
        token
    }

    /// Starts the submitted requests and blocks until at least one completes.
    ///
    /// # Errors
    ///
    /// Returns [`Stuck`] after a timeout.
    pub fn wait(&mut self) -> Result<Vec<Done>, Stuck> {
        self.queue.kick();
        let mut done = vec![];
        let until = std::time::Instant::now() + self.timeout;
        loop {
            self.queue.reap(&mut done);
            if !done.is_empty() || self.in_flight == 0 {
                self.in_flight -= done.len();
                return Ok(done);
            }
            let left = until.saturating_duration_since(std::time::Instant::now());
            if left.is_zero() {
                return Err(Stuck);
            }
            let fd = self.queue.wait_fd();
            let _ = wait_readable(fd, Some(left));
        }
    }

    /// Executes one request and returns its result.
    ///
    /// # Panics
    ///
    /// Panics after a timeout, or if another request is in flight.
    pub fn run(&mut self, op: Op, offset: u64, len: u64, segments: Vec<Segment>) -> Done {
        assert_eq!(self.in_flight, 0);
        let token = self.submit(op, offset, len, segments);
        let mut done = self.wait().expect("the disk answers");
        assert_eq!((done.len(), done[0].token), (1, token));
        done.remove(0)
    }

    /// Writes `bytes` at `offset`.
    ///
    /// # Errors
    ///
    /// Returns the errno of the disk.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), i32> {
        let memory = lent_with(bytes);
        let op = Op::Write { fua: false };
        self.run(op, offset, bytes.len() as u64, vec![memory.into()]).result
    }

    /// Reads `len` bytes at `offset`.
    ///
    /// # Errors
    ///
    /// Returns the errno of the disk.
    pub fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, i32> {
        let memory = LentSlice::anonymous(len);
        self.run(Op::Read, offset, len as u64, vec![memory.clone().into()]).result?;
        Ok(bytes_of(&memory))
    }
}

/// Creates private memory that holds `bytes`.
pub fn lent_with(bytes: &[u8]) -> LentSlice {
    let memory = LentSlice::anonymous(bytes.len());
    memory.copy_from(0, bytes).expect("the memory was made for them");
    memory
}

/// Returns a copy of lent memory.
pub fn bytes_of(memory: &LentSlice) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.copy_to(0, &mut bytes).expect("the room was made for them");
    bytes
}

/// Reads the whole disk.
///
/// # Panics
///
/// Panics if the disk cannot be read.
pub fn image(disk: &dyn Disk) -> Vec<u8> {
    let mut driver = Driver::new(disk.queue(1).expect("a queue"));
    let mut image = vec![];
    let bytes = disk.geometry().bytes;
    while (image.len() as u64) < bytes {
        let at = image.len() as u64;
        let step = usize_from((bytes - at).min(1 << 20));
        image.extend(driver.read(at, step).expect("the disk can be read"));
    }
    image
}
