//! One user's way to a lane.

// #syscall frontend epoll_ctl,ppoll: the frontend of a disk waits

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use ringfence_platform::{Channel, Granter};
use ringfence_sys::poll::wait_readable;
use rustix::event::epoll;

use super::completions::Completions;
use super::lane::{Broken, Lane};
use super::{Notice, SharedLane, lock};
use crate::storage::{DiskQueue, Done, Geometry, Request, check_request};

/// How long a handle that goes waits for what it asked for.
const DRAIN_LIMIT: Duration = Duration::from_secs(10);
/// Longest wait between two looks at the connection while a dropped handle drains.
const DRAIN_STEP: Duration = Duration::from_millis(100);

/// A file that is readable when one of others is.
pub(super) struct Waiting {
    epoll: OwnedFd,
}

impl Waiting {
    pub(super) fn new(epoll: OwnedFd) -> Waiting {
        Waiting { epoll }
    }

    /// Watches another file, until it is closed.
    pub(super) fn watch(&self, file: impl AsFd) {
        let added =
            epoll::add(&self.epoll, file, epoll::EventData::new_u64(0), epoll::EventFlags::IN);
        debug_assert!(added.is_ok(), "{added:?}");
    }
}

/// The [`DiskQueue`] of a frontend's disk.
pub(super) struct Handle<G: Granter, C: Channel> {
    lane: SharedLane<G, C>,
    geometry: Geometry,
    owner: u32,
    completions: Arc<Completions>,
    waiting: Arc<Waiting>,
    on_broken: Arc<Notice>,
    /// Answers that were given at once.
    refused: Vec<Done>,
    submitted: Vec<Request>,
}

impl<G: Granter, C: Channel> Handle<G, C> {
    pub(super) fn new(
        lane: SharedLane<G, C>,
        geometry: Geometry,
        owner: u32,
        completions: Arc<Completions>,
        waiting: Arc<Waiting>,
        on_broken: Arc<Notice>,
    ) -> Handle<G, C> {
        let (refused, submitted) = (Vec::new(), Vec::new());
        Handle { lane, geometry, owner, completions, waiting, on_broken, refused, submitted }
    }

    /// A connection that is of no use ends here; its owner is told.
    fn check(&self, mut lane: MutexGuard<'_, Lane<G, C>>, outcome: Result<(), Broken>) {
        if outcome.is_err() {
            lane.break_off();
            // Under the lock, so that it is not taken for a word about the next connection.
            self.on_broken.give();
        }
    }

    /// Wakes the others of the lane for whom something is there.
    fn wake_others(&self, lane: &Lane<G, C>) {
        for other in lane.owners() {
            if !Arc::ptr_eq(other, &self.completions) && !other.is_empty() {
                other.wake.wake();
            }
        }
    }
}

impl<G: Granter, C: Channel> DiskQueue for Handle<G, C> {
    fn submit(&mut self, request: Request) {
        let Geometry { bytes, sector_size, read_only, .. } = self.geometry;
        match check_request(&request, bytes, sector_size, read_only) {
            Ok(()) => self.submitted.push(request),
            Err(errno) => self.refused.push(request.done(Err(errno))),
        }
    }

    fn kick(&mut self) {
        let mut lane = lock(&self.lane);
        for request in self.submitted.drain(..) {
            lane.submit(self.owner, request);
        }
        let pumped = lane.pump();
        self.check(lane, pumped);
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        done.append(&mut self.refused);
        self.completions.wake.clear();
        let mut lane = lock(&self.lane);
        let outcome = loop {
            let collected = lane.collect().and_then(|()| lane.pump()).and_then(|()| lane.arm());
            match collected {
                Ok(true) => {}
                Ok(false) => break Ok(()),
                Err(broken) => break Err(broken),
            }
        };
        self.completions.drain_into(done);
        self.wake_others(&lane);
        self.check(lane, outcome);
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.waiting.epoll.as_fd()
    }
}

impl<G: Granter, C: Channel> Drop for Handle<G, C> {
    /// Waits for what was asked for while there is a connection, and no longer than a while. Memory of
    /// a request that is not over stays as long as the request does.
    fn drop(&mut self) {
        let begun = Instant::now();
        let mut done = Vec::new();
        self.kick();
        loop {
            self.reap(&mut done);
            done.clear();
            let lane = lock(&self.lane);
            let idle = lane.pending(self.owner) == 0 || lane.connection().is_none();
            drop(lane);
            if idle || begun.elapsed() >= DRAIN_LIMIT {
                break;
            }
            let _ = wait_readable(&self.waiting.epoll, Some(DRAIN_STEP));
        }
        lock(&self.lane).leave(self.owner);
    }
}
