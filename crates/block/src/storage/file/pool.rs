//! Thread engine: executes jobs with blocking system calls, where there is no io_uring.

// #syscall driver,disk,daemon fdatasync: a guest flushes its disk
// #syscall driver,disk,daemon fallocate: a guest gives up ranges of its disk

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringfence_memory::{LentSlice, ReadList, WriteList};
use ringfence_sys::blkdev;

use super::bounce::BounceBuffers;
use super::job::{Job, Next, Policy, Step, store_extents};
use crate::storage::threads::{Executor, ThreadQueue};
use crate::storage::{Done, QueueEngine, Request};

/// Disk queue of a file, served by threads.
pub(super) type PoolQueue = ThreadQueue<FileExecutor>;

/// File whose jobs a thread executes, one at a time.
pub(super) struct FileExecutor {
    pub(super) file: Arc<OwnedFd>,
    pub(super) policy: Policy,
}

impl Executor for FileExecutor {
    type Job = Job;
    type Buffers = BounceBuffers;

    const THREAD: &'static str = "disk";
    const ENGINE: Option<QueueEngine> = Some(QueueEngine::Threads);

    fn admit(&self, request: Request) -> Result<Job, Done> {
        let job = Job::new(request, &self.policy);
        match job.check(&self.policy) {
            Ok(()) => Ok(job),
            Err(errno) => Err(job.finish(&mut BounceBuffers::default(), Err(errno))),
        }
    }

    fn execute(&self, mut job: Job, buffers: &mut BounceBuffers) -> Done {
        let mut pieces = vec![];
        loop {
            pieces.clear();
            let result = match job.next(&self.policy, &mut pieces, buffers) {
                // A thread uses one buffer at a time, so the budget always allows it.
                Ok(Next::Wait) | Err(_) => return job.finish(buffers, Err(libc::ENOMEM)),
                Ok(Next::Over(result)) => return job.finish(buffers, result),
                Ok(Next::Step(step)) => execute_step(&self.file, step, &pieces),
            };
            let result = result.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO));
            if let Err(errno) = job.advance(buffers, result) {
                return job.finish(buffers, Err(errno));
            }
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
