//! Thread engine: executes jobs with blocking system calls, where there is no io_uring.

// #syscall driver,disk,daemon eventfd2,read,write: threads say what is done
// #syscall driver,disk,daemon fdatasync: a guest flushes its disk
// #syscall driver,disk,daemon fallocate: a guest gives up ranges of its disk

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use ringfence_memory::{LentSlice, ReadList, WriteList};
use ringfence_sys::blkdev;
use ringfence_sys::mailbox::WakeFd;

use super::bounce::BounceBuffers;
use super::job::{Job, Next, Policy, Step, store_extents};
use crate::storage::{DiskQueue, Done, QueueEngine, Request};

/// Maximum number of threads of one queue.
const THREADS_MAX: u32 = 16;

/// State shared by the threads and the owner of the queue.
struct PoolShared {
    file: Arc<OwnedFd>,
    policy: Policy,
    /// Raised while there are results.
    event: WakeFd,
    work: Mutex<Work>,
    changed: Condvar,
}

#[derive(Default)]
struct Work {
    jobs: VecDeque<Job>,
    done: Vec<Done>,
    stop: bool,
}

impl PoolShared {
    fn lock(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Disk queue served by a pool of threads.
pub(super) struct PoolQueue {
    shared: Arc<PoolShared>,
    threads: Vec<JoinHandle<()>>,
    threads_max: usize,
    /// Submitted jobs that are not started.
    queued: Vec<Job>,
    in_flight: usize,
    /// Results of requests that were refused at submission.
    ready: Vec<Done>,
}

impl PoolQueue {
    /// Creates a queue of at most `depth` threads, which are started on demand.
    pub(super) fn new(file: Arc<OwnedFd>, policy: Policy, depth: u32) -> io::Result<PoolQueue> {
        let event = WakeFd::new()?;
        let shared =
            PoolShared { file, policy, event, work: Mutex::default(), changed: Condvar::new() };
        let mut queue = PoolQueue {
            shared: Arc::new(shared),
            threads: vec![],
            threads_max: depth.clamp(1, THREADS_MAX) as usize,
            queued: vec![],
            in_flight: 0,
            ready: vec![],
        };
        // One thread must exist, or the queue could not do I/O.
        queue.add_thread()?;
        Ok(queue)
    }

    fn add_thread(&mut self) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let thread =
            std::thread::Builder::new().name("disk".to_owned()).spawn(move || serve(&shared))?;
        self.threads.push(thread);
        Ok(())
    }
}

impl DiskQueue for PoolQueue {
    fn submit(&mut self, request: Request) {
        let job = Job::new(request, &self.shared.policy);
        match job.check(&self.shared.policy) {
            Ok(()) => self.queued.push(job),
            Err(errno) => self.ready.push(job.finish(&mut BounceBuffers::default(), Err(errno))),
        }
    }

    fn kick(&mut self) {
        if self.queued.is_empty() {
            return;
        }
        self.in_flight += self.queued.len();
        while self.threads.len() < self.threads_max.min(self.in_flight) {
            // Without a further thread the existing ones do all the work.
            if self.add_thread().is_err() {
                break;
            }
        }
        self.shared.lock().jobs.extend(self.queued.drain(..));
        self.shared.changed.notify_all();
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        done.append(&mut self.ready);
        if self.in_flight == 0 {
            return;
        }
        let mut work = self.shared.lock();
        if work.done.is_empty() {
            return;
        }
        self.in_flight -= work.done.len();
        done.append(&mut work.done);
        self.shared.event.clear();
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }

    fn engine(&self) -> Option<QueueEngine> {
        Some(QueueEngine::Threads)
    }
}

impl Drop for PoolQueue {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Executes jobs until the queue is empty and stopped.
fn serve(shared: &PoolShared) {
    let mut buffers = BounceBuffers::default();
    loop {
        let mut work = shared.lock();
        let job = loop {
            if let Some(job) = work.jobs.pop_front() {
                break job;
            }
            if work.stop {
                return;
            }
            work = shared.changed.wait(work).unwrap_or_else(PoisonError::into_inner);
        };
        drop(work);
        let done = execute(shared, job, &mut buffers);
        let mut work = shared.lock();
        work.done.push(done);
        // Under the lock: `reap` takes all results and clears the event together.
        shared.event.wake();
    }
}

fn execute(shared: &PoolShared, mut job: Job, buffers: &mut BounceBuffers) -> Done {
    let policy = &shared.policy;
    let mut pieces = vec![];
    loop {
        pieces.clear();
        let result = match job.next(policy, &mut pieces, buffers) {
            // A thread uses one buffer at a time, so the budget always allows it.
            Ok(Next::Wait) | Err(_) => return job.finish(buffers, Err(libc::ENOMEM)),
            Ok(Next::Over(result)) => return job.finish(buffers, result),
            Ok(Next::Step(step)) => execute_step(&shared.file, step, &pieces),
        };
        let result = result.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO));
        if let Err(errno) = job.advance(buffers, result) {
            return job.finish(buffers, Err(errno));
        }
    }
}

fn execute_step(file: &OwnedFd, step: Step, pieces: &[LentSlice]) -> io::Result<u32> {
    let moved = match step {
        Step::Read { offset } => {
            let mut list = ReadList::new();
            for piece in pieces {
                list.push_lent(piece, 0, piece.len()).map_err(io::Error::other)?;
            }
            list.read_at(file, offset)?
        }
        Step::Write { offset, sync } => {
            let mut list = WriteList::new();
            for piece in pieces {
                list.push_lent(piece, 0, piece.len()).map_err(io::Error::other)?;
            }
            let moved = list.write_at(file, offset)?;
            if sync {
                rustix::fs::fdatasync(file)?;
            }
            moved
        }
        Step::Sync => {
            rustix::fs::fdatasync(file)?;
            0
        }
        Step::Allocate { mode, offset, len } => {
            rustix::fs::fallocate(file, mode, offset, len)?;
            0
        }
        Step::Discard { secure, offset, len } => {
            let discard = if secure { blkdev::discard_securely } else { blkdev::discard };
            discard(file, offset, len)?;
            0
        }
        Step::Extents { offset, len, sector } => {
            store_extents(file, offset..offset.saturating_add(len), sector, pieces)?;
            0
        }
    };
    u32::try_from(moved).map_err(io::Error::other)
}
