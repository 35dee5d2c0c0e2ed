//! Requests in progress of a virtual machine's disk, by the token of the disk's request and by the head of their chain.

use ringfence_memory::LentSlice;
use ringfence_sys::numbers::usize_from;
use ringfence_vhost_user::ClientFault;

use crate::work::Work;

/// Request that was taken from a vring and is not answered yet.
#[derive(Debug)]
pub(super) struct VringJob {
    pub(super) vring: usize,
    /// Head of its chain.
    pub(super) head: u16,
    pub(super) work: Work,
    /// Byte for the status.
    pub(super) status: LentSlice,
    /// Bytes of the data that the disk writes to memory.
    pub(super) readable: u32,
}

/// Jobs in progress, at most a fixed number.
#[derive(Debug)]
pub(super) struct VringJobs {
    /// Jobs that the disk works on; the token is the position.
    jobs: Vec<Option<VringJob>>,
    free: Vec<u32>,
    /// Heads in progress, for each vring.
    busy: Vec<Vec<bool>>,
}

impl VringJobs {
    /// Makes an empty table.
    pub(super) fn new(max: u32, vrings: usize) -> VringJobs {
        VringJobs {
            jobs: (0..max).map(|_| None).collect(),
            free: (0..max).rev().collect(),
            busy: vec![Vec::new(); vrings],
        }
    }

    /// Returns `true` if no further job has room.
    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Marks a chain as in progress.
    ///
    /// # Errors
    ///
    /// Returns [`ClientFault::Repeated`] if it is already.
    pub(super) fn begin(&mut self, vring: usize, head: u16) -> Result<(), ClientFault> {
        let busy = &mut self.busy[vring];
        if busy.len() <= usize::from(head) {
            busy.resize(usize::from(head) + 1, false);
        }
        match std::mem::replace(&mut busy[usize::from(head)], true) {
            false => Ok(()),
            true => Err(ClientFault::Repeated { head }),
        }
    }

    /// Marks a chain as returned.
    pub(super) fn end(&mut self, vring: usize, head: u16) {
        self.busy[vring][usize::from(head)] = false;
    }

    /// Forgets all marks of chains. No job is in progress.
    pub(super) fn forget_heads(&mut self) {
        self.busy.iter_mut().for_each(Vec::clear);
    }

    /// Adds a job and returns its token, or the job if there is no room.
    pub(super) fn insert(&mut self, job: VringJob) -> Result<u64, VringJob> {
        let Some(token) = self.free.pop() else { return Err(job) };
        self.jobs[usize_from(token)] = Some(job);
        Ok(token.into())
    }

    /// Removes the job of a completion. Returns `None` if the disk does not work on such a job.
    pub(super) fn remove(&mut self, token: u64) -> Option<VringJob> {
        let number = u32::try_from(token).ok()?;
        let job = self.jobs.get_mut(usize_from(number))?.take()?;
        self.free.push(number);
        Some(job)
    }
}
