//! Pause of a device: its queues consume no request and hold no queue of the disk, so that the disk can be replaced.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use ringfence_sys::mailbox::WakeFd;

use crate::storage::{DiskQueue, Done, Request};

/// Token of a pause. The device is paused when every queue has dropped its clone, which calls the function.
pub(super) struct PauseToken(pub(super) Arc<dyn Fn() + Send + Sync>);

impl Drop for PauseToken {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Disk queue of a paused ring. It fails each request.
pub(super) struct ClosedQueue {
    /// Raised never.
    event: WakeFd,
    failed: Vec<Done>,
}

impl ClosedQueue {
    pub(super) fn new() -> io::Result<ClosedQueue> {
        Ok(ClosedQueue { event: WakeFd::new()?, failed: vec![] })
    }
}

impl DiskQueue for ClosedQueue {
    fn submit(&mut self, request: Request) {
        self.failed.push(request.done(Err(libc::EIO)));
    }

    fn kick(&mut self) {}

    fn reap(&mut self, done: &mut Vec<Done>) {
        done.append(&mut self.failed);
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
