//! io_uring engine: one io_uring instance for each queue, and so for each thread. The thread of the queue starts
//! operations and takes their completions; a batch of requests is one system call.
//!
//! Discards on a block device are an ioctl, which io_uring lacks. They go to a thread of a
//! [`PoolQueue`], which is created with the queue if discards are enabled. An epoll file then stands for
//! the completions of both.

// #syscall driver,disk,daemon epoll_create1,epoll_ctl: a device with discards waits for its ring and for a thread

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ringfence_memory::{LentSlice, Uring};
use rustix::event::epoll;

use super::bounce::BounceBuffers;
use super::facts::FileKind;
use super::job::{Job, Next, Policy, Step, store_extents};
use super::pool::{FileExecutor, PoolQueue};
use crate::storage::{DiskQueue, Done, Op, QueueEngine, Request};

/// Maximum number of registered memory ranges of one queue.
const REGISTERED_MAX: u16 = 8192;

/// Disk queue served by io_uring.
pub(super) struct UringQueue {
    file: Arc<OwnedFd>,
    ring: Uring,
    policy: Policy,
    /// Jobs in the io_uring instance, by token.
    jobs: Vec<Option<Job>>,
    free: Vec<usize>,
    /// Jobs that wait for room in the ring or for a buffer.
    waiting: VecDeque<Job>,
    /// Results of jobs that never entered the ring.
    ready: Vec<Done>,
    buffers: BounceBuffers,
    registrations: Registrations,
    aside: Option<Aside>,
    pieces: Vec<LentSlice>,
    /// Completed tokens and their results.
    completed: Vec<(u64, Result<u32, i32>)>,
}

/// Thread queue for operations that io_uring lacks.
struct Aside {
    queue: PoolQueue,
    /// Epoll file that watches the io_uring instance and the threads.
    both: OwnedFd,
}

/// Memory registered with io_uring.
#[derive(Default)]
struct Registrations {
    numbers: HashMap<u64, u16>,
    free: Vec<u16>,
    state: RegistrationState,
}

#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum RegistrationState {
    /// No registration was attempted.
    #[default]
    Unknown,
    /// Registrations are possible.
    Open,
    /// The limit of locked memory is reached; an unregistration may make room.
    Full,
    /// The kernel, or the type of memory, does not allow registrations.
    Refused,
}

impl UringQueue {
    pub(super) fn new(ring: Uring, policy: Policy) -> io::Result<UringQueue> {
        let file = Arc::clone(ring.file());
        let aside = match policy.kind() {
            FileKind::BlockDevice if policy.discard => {
                let (file, policy) = (Arc::clone(&file), policy.clone());
                let queue = PoolQueue::new(Arc::new(FileExecutor { file, policy }), 1)?;
                Some(Aside { both: watch(&[ring.as_fd(), queue.wait_fd()])?, queue })
            }
            _ => None,
        };
        let room = ring.room();
        Ok(UringQueue {
            file,
            ring,
            policy,
            jobs: (0..room).map(|_| None).collect(),
            free: (0..room).rev().collect(),
            waiting: VecDeque::new(),
            ready: vec![],
            buffers: BounceBuffers::default(),
            registrations: Registrations::default(),
            aside,
            pieces: vec![],
            completed: vec![],
        })
    }

    /// Starts the next step of `job`, ends it, or queues it until there is room.
    fn advance_job(&mut self, mut job: Job, done: &mut Vec<Done>) {
        let Some(number) = self.free.pop() else {
            self.waiting.push_back(job);
            return;
        };
        self.pieces.clear();
        let next = job
            .next(&self.policy, &mut self.pieces, &mut self.buffers)
            .unwrap_or(Next::Over(Err(libc::ENOMEM)));
        let next = self.executed_here(next);
        let result = match next {
            Next::Step(step) if self.start(number, step, &job) => {
                self.jobs[number] = Some(job);
                return;
            }
            Next::Step(_) => Err(libc::EIO),
            Next::Wait => {
                self.free.push(number);
                self.waiting.push_back(job);
                return;
            }
            Next::Over(result) => result,
        };
        self.free.push(number);
        done.push(job.finish(&mut self.buffers, result));
    }

    /// Executes a step that io_uring lacks and that does no I/O.
    fn executed_here(&self, next: Next) -> Next {
        let Next::Step(Step::Extents { offset, len, sector }) = next else { return next };
        let stored =
            store_extents(&self.file, offset..offset.saturating_add(len), sector, &self.pieces);
        Next::Over(stored.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO)))
    }

    fn start(&mut self, number: usize, step: Step, job: &Job) -> bool {
        let token = number as u64;
        let fixed = job
            .registered()
            .and_then(|(name, piece)| Some((*self.registrations.numbers.get(&name)?, piece)));
        let (ring, pieces) = (&mut self.ring, &mut self.pieces);
        match step {
            Step::Read { offset } => {
                fixed.is_some_and(|(buffer, piece)| ring.read_fixed(token, offset, piece, buffer))
                    || ring.read(token, offset, pieces)
            }
            Step::Write { offset, sync } => {
                fixed.is_some_and(|(buffer, piece)| {
                    ring.write_fixed(token, offset, piece, buffer, sync)
                }) || ring.write(token, offset, pieces, sync)
            }
            Step::Sync => ring.sync(token),
            Step::Allocate { mode, offset, len } => ring.fallocate(token, mode.bits(), offset, len),
            // Discards go to the threads in `submit`.
            Step::Discard { .. } | Step::Extents { .. } => false,
        }
    }

    /// Starts waiting jobs while there is room.
    fn start_waiting(&mut self, done: &mut Vec<Done>) {
        for _ in 0..self.waiting.len() {
            if self.free.is_empty() {
                return;
            }
            let Some(job) = self.waiting.pop_front() else { return };
            self.advance_job(job, done);
        }
    }

    fn submit_to_kernel(&mut self) {
        // Entries that the kernel has no room for stay queued for the next call, which follows the next
        // completion. Without a completion the loop tries again.
        while let Err(error) = self.ring.submit() {
            let busy = matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY));
            if !busy {
                tracing::error!("io_uring takes nothing any more: {error}");
                return;
            }
            if self.has_completed() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    fn has_completed(&mut self) -> bool {
        let completed = &mut self.completed;
        self.ring.complete(|completion| completed.push((completion.token, completion.result)));
        !self.completed.is_empty()
    }
}

fn watch(files: &[BorrowedFd<'_>]) -> io::Result<OwnedFd> {
    let both = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    for file in files {
        epoll::add(&both, file, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    }
    Ok(both)
}

impl DiskQueue for UringQueue {
    fn submit(&mut self, request: Request) {
        if let (Some(aside), Op::Discard { .. }) = (&mut self.aside, request.op) {
            aside.queue.submit(request);
            return;
        }
        let job = Job::new(request, &self.policy);
        let mut ready = std::mem::take(&mut self.ready);
        match job.check(&self.policy) {
            Ok(()) => self.advance_job(job, &mut ready),
            Err(errno) => ready.push(job.finish(&mut self.buffers, Err(errno))),
        }
        self.ready = ready;
    }

    fn kick(&mut self) {
        self.submit_to_kernel();
        if let Some(aside) = &mut self.aside {
            aside.queue.kick();
        }
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        done.append(&mut self.ready);
        if let Some(aside) = &mut self.aside {
            aside.queue.reap(done);
        }
        if !self.has_completed() {
            return;
        }
        let mut completed = std::mem::take(&mut self.completed);
        for (token, result) in completed.drain(..) {
            let Some(number) = usize::try_from(token).ok().filter(|n| *n < self.jobs.len()) else {
                continue;
            };
            let Some(mut job) = self.jobs[number].take() else { continue };
            self.free.push(number);
            match job.advance(&mut self.buffers, result) {
                Ok(()) => self.advance_job(job, done),
                Err(errno) => done.push(job.finish(&mut self.buffers, Err(errno))),
            }
        }
        self.completed = completed;
        self.start_waiting(done);
        self.submit_to_kernel();
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        match &self.aside {
            Some(aside) => aside.both.as_fd(),
            None => self.ring.as_fd(),
        }
    }

    fn engine(&self) -> Option<QueueEngine> {
        Some(QueueEngine::IoUring)
    }

    fn register(&mut self, name: u64, memory: &LentSlice) -> bool {
        self.unregister(name);
        let table = &mut self.registrations;
        if table.state == RegistrationState::Unknown {
            table.state = match self.ring.prepare_registration(REGISTERED_MAX) {
                Ok(()) => RegistrationState::Open,
                Err(_) => RegistrationState::Refused,
            };
            table.free = (0..REGISTERED_MAX).rev().collect();
        }
        if table.state != RegistrationState::Open {
            return false;
        }
        let Some(number) = table.free.pop() else { return false };
        match self.ring.register(number, memory) {
            Ok(()) => {
                table.numbers.insert(name, number);
                true
            }
            Err(error) => {
                table.free.push(number);
                table.state = match error.raw_os_error() {
                    Some(libc::ENOMEM) => RegistrationState::Full,
                    _ => RegistrationState::Refused,
                };
                tracing::debug!("memory is not registered with io_uring: {error}");
                false
            }
        }
    }

    fn unregister(&mut self, name: u64) {
        let table = &mut self.registrations;
        let Some(number) = table.numbers.remove(&name) else { return };
        self.ring.unregister(number);
        table.free.push(number);
        if table.state == RegistrationState::Full {
            table.state = RegistrationState::Open;
        }
    }
}
