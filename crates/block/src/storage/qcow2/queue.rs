//! Queue of an image: threads that execute requests.

// #syscall driver,disk,daemon preadv,pwritev: clusters of an image, from and to private memory

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use ringfence_sys::mailbox::WakeFd;

use super::disk::{Buffer, Image};
use crate::storage::{DiskQueue, Done, Request};

/// Maximum number of threads of one queue.
const THREADS_MAX: u32 = 16;

/// State shared by the threads and the owner of the queue.
struct Shared {
    image: Arc<Image>,
    /// Raised while there are results.
    event: WakeFd,
    work: Mutex<Work>,
    changed: Condvar,
}

#[derive(Default)]
struct Work {
    requests: VecDeque<Request>,
    done: Vec<Done>,
    stop: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Queue of one user of an image.
pub(super) struct ImageQueue {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    threads_max: usize,
    /// Submitted requests that are not started.
    queued: Vec<Request>,
    in_flight: usize,
    /// Results of requests that were refused at submission.
    ready: Vec<Done>,
}

impl ImageQueue {
    /// Creates a queue of at most `depth` threads, which are started on demand.
    pub(super) fn new(image: Arc<Image>, depth: u32) -> io::Result<ImageQueue> {
        let (event, work, changed) = (WakeFd::new()?, Mutex::default(), Condvar::new());
        let mut queue = ImageQueue {
            shared: Arc::new(Shared { image, event, work, changed }),
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
        let thread = std::thread::Builder::new().name("image".to_owned());
        self.threads.push(thread.spawn(move || serve(&shared))?);
        Ok(())
    }
}

impl DiskQueue for ImageQueue {
    fn submit(&mut self, request: Request) {
        match self.shared.image.check(&request) {
            Ok(()) => self.queued.push(request),
            Err(errno) => self.ready.push(request.done(Err(errno))),
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
        let one = self.queued.len() == 1;
        self.shared.lock().requests.extend(self.queued.drain(..));
        match one {
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
}

impl Drop for ImageQueue {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Executes requests until the queue is empty and stopped.
fn serve(shared: &Shared) {
    let mut buffer = Buffer::default();
    loop {
        let mut work = shared.lock();
        let request = loop {
            if let Some(request) = work.requests.pop_front() {
                break request;
            }
            if work.stop {
                return;
            }
            work = shared.changed.wait(work).unwrap_or_else(PoisonError::into_inner);
        };
        drop(work);
        let result = shared.image.execute(&request, &mut buffer);
        let mut work = shared.lock();
        work.done.push(request.done(result));
        // Under the lock: `reap` takes all results and clears the event together.
        shared.event.wake();
    }
}
