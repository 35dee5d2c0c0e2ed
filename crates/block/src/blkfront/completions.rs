//! Completion queue of one handle: results of its requests until the handle reaps them.
//!
//! Several handles share a lane, and the handle that polls the ring finds the responses of all of them.
//! It stores each result in the completion queue of the owner. It wakes the other owners once per reap,
//! not once per result, and never itself: most results then cost no system call. A mailbox
//! ([`ringfence_sys::mailbox::mailbox`]) would write to its eventfd for each item.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ringfence_sys::mailbox::WakeFd;

use crate::storage::Done;

/// Completion queue of one handle.
pub(super) struct Completions {
    done: Mutex<Vec<Done>>,
    /// Raised by another handle after it stored results here, and by a change of the connection.
    pub(super) wake: WakeFd,
}

impl Completions {
    pub(super) fn new() -> io::Result<Completions> {
        Ok(Completions { done: Mutex::default(), wake: WakeFd::new()? })
    }

    fn list(&self) -> MutexGuard<'_, Vec<Done>> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores a result. Does not wake the owner.
    pub(super) fn push(&self, done: Done) {
        self.list().push(done);
    }

    /// Moves all results to `done`.
    pub(super) fn drain_into(&self, done: &mut Vec<Done>) {
        done.append(&mut self.list());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list().is_empty()
    }
}
