//! Queue whose requests threads execute, with system calls that block.

// #syscall driver,disk,daemon eventfd2,read,write: threads say what is done

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use ringfence_sys::mailbox::WakeFd;

use super::{DiskQueue, Done, QueueEngine, Request};

/// Maximum number of threads of one queue.
const THREADS_MAX: u32 = 16;

/// Storage that executes one request in one call.
pub(super) trait Executor: Send + Sync + 'static {
    /// Valid request.
    type Job: Send;
    /// Private memory that a thread keeps between jobs.
    type Buffers: Default;

    /// Name of the threads.
    const THREAD: &'static str;
    /// Engine that the queue reports.
    const ENGINE: Option<QueueEngine>;

    /// Checks a request. Returns the result of an invalid one.
    fn admit(&self, request: Request) -> Result<Self::Job, Done>;

    /// Executes a job. Blocks until it is done.
    fn execute(&self, job: Self::Job, buffers: &mut Self::Buffers) -> Done;
}

/// State shared by the threads and the owner of the queue.
struct Shared<E: Executor> {
    executor: Arc<E>,
    /// Raised while there are results.
    event: WakeFd,
    work: Mutex<Work<E::Job>>,
    changed: Condvar,
}

struct Work<J> {
    jobs: VecDeque<J>,
    done: Vec<Done>,
    stop: bool,
}

impl<E: Executor> Shared<E> {
    fn lock(&self) -> MutexGuard<'_, Work<E::Job>> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Executes jobs until there are none and the queue is stopped.
    fn serve(&self) {
        let mut buffers = E::Buffers::default();
        loop {
            let mut work = self.lock();
            let job = loop {
                if let Some(job) = work.jobs.pop_front() {
                    break job;
                }
                if work.stop {
                    return;
                }
                work = self.changed.wait(work).unwrap_or_else(PoisonError::into_inner);
            };
            drop(work);
            let done = self.executor.execute(job, &mut buffers);
            let mut work = self.lock();
            work.done.push(done);
            // Under the lock: `reap` takes all results and clears the event together.
            self.event.wake();
        }
    }
}

/// Disk queue served by threads.
pub(super) struct ThreadQueue<E: Executor> {
    shared: Arc<Shared<E>>,
    threads: Vec<JoinHandle<()>>,
    threads_max: usize,
    /// Submitted jobs that are not started.
    queued: Vec<E::Job>,
    in_flight: usize,
    /// Results of requests that were refused at submission.
    ready: Vec<Done>,
}

impl<E: Executor> ThreadQueue<E> {
    /// Creates a queue of at most `depth` threads, which are started on demand.
    ///
    /// # Errors
    ///
    /// Returns the system's error if there is no descriptor for the event, or not even one thread.
    pub(super) fn new(executor: Arc<E>, depth: u32) -> io::Result<ThreadQueue<E>> {
        let work = Work { jobs: VecDeque::new(), done: vec![], stop: false };
        let (event, work, changed) = (WakeFd::new()?, Mutex::new(work), Condvar::new());
        let mut queue = ThreadQueue {
            shared: Arc::new(Shared { executor, event, work, changed }),
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
        let thread = std::thread::Builder::new().name(E::THREAD.to_owned());
        self.threads.push(thread.spawn(move || shared.serve())?);
        Ok(())
    }
}

impl<E: Executor> DiskQueue for ThreadQueue<E> {
    fn submit(&mut self, request: Request) {
        match self.shared.executor.admit(request) {
            Ok(job) => self.queued.push(job),
            Err(done) => self.ready.push(done),
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
        let is_one = self.queued.len() == 1;
        self.shared.lock().jobs.extend(self.queued.drain(..));
        match is_one {
            true => self.shared.changed.notify_one(),
            false => self.shared.changed.notify_all(),
        }
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
        E::ENGINE
    }
}

impl<E: Executor> Drop for ThreadQueue<E> {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
