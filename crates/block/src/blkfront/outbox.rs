//! What is done, until the one who asked for it looks.

// #syscall frontend eventfd2,read,write: answers wait for who asked

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

use crate::storage::Done;

/// Answers for one handle. Several share a ring, so one's answers may be found by another.
pub(super) struct Outbox {
    done: Mutex<Vec<Done>>,
    /// Raised when something was put here by somebody else.
    pub(super) event: OwnedFd,
}

impl Outbox {
    pub(super) fn new() -> io::Result<Outbox> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Outbox { done: Mutex::default(), event })
    }

    pub(super) fn put(&self, done: Done) {
        let mut list = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        list.push(done);
    }

    /// Moves everything to `done`; how much it was.
    pub(super) fn take(&self, done: &mut Vec<Done>) -> usize {
        let mut list = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        let count = list.len();
        done.append(&mut list);
        count
    }

    pub(super) fn is_empty(&self) -> bool {
        self.done.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Wakes whoever waits.
    pub(super) fn raise(&self) {
        // The counter of an eventfd cannot overflow by ones.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Clears the event.
    pub(super) fn clear(&self) {
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
    }
}
