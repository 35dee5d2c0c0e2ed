//! Disk queue of one user of a frontend's disk.
//!
//! Each [`Handle`] uses one lane, which it may share with others. The thread that reaps polls the ring for
//! all handles of the lane and wakes those whose completion queues it filled.

// #syscall frontend,daemon epoll_ctl,ppoll: the frontend of a disk waits

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use ringfence_platform::{Channel, Granter};
use ringfence_sys::poll::wait_readable;
use rustix::event::epoll;

use super::broken::BrokenRule;
use super::completions::Completions;
use super::lane::Lane;
use super::{BrokenCallback, KnownGeometry, SharedLane, lock};
use crate::storage::{DiskQueue, Done, Geometry, Request, check_request};

/// Maximum time for which a dropped handle waits for its requests.
const DRAIN_LIMIT: Duration = Duration::from_secs(10);
/// Longest wait between two looks at the connection while a dropped handle drains.
const DRAIN_STEP: Duration = Duration::from_millis(100);

/// Epoll file that is readable when the completion queue or the event channel has something.
pub(super) struct Waiting {
    epoll: OwnedFd,
}

impl Waiting {
    pub(super) fn new(epoll: OwnedFd) -> Waiting {
        Waiting { epoll }
    }

    /// Adds a file to the set, until it is closed.
    pub(super) fn watch(&self, file: impl AsFd) {
        let added =
            epoll::add(&self.epoll, file, epoll::EventData::new_u64(0), epoll::EventFlags::IN);
        debug_assert!(added.is_ok(), "{added:?}");
    }
}

/// [`DiskQueue`] of a frontend's disk.
pub(super) struct Handle<G: Granter, C: Channel> {
    lane: SharedLane<G, C>,
    geometry: KnownGeometry,
    owner: u32,
    completions: Arc<Completions>,
    waiting: Arc<Waiting>,
    on_broken: Arc<BrokenCallback>,
    /// Results of requests that were refused without being submitted.
    refused: Vec<Done>,
    submitted: Vec<Request>,
}

impl<G: Granter, C: Channel> Handle<G, C> {
    pub(super) fn new(
        lane: SharedLane<G, C>,
        geometry: KnownGeometry,
        owner: u32,
        completions: Arc<Completions>,
        waiting: Arc<Waiting>,
        on_broken: Arc<BrokenCallback>,
    ) -> Handle<G, C> {
        let (refused, submitted) = (Vec::new(), Vec::new());
        Handle { lane, geometry, owner, completions, waiting, on_broken, refused, submitted }
    }

    /// Checks a request. One that is refused for the size is checked against the size of this moment.
    fn check_range(&mut self, request: &Request) -> Result<(), i32> {
        let KnownGeometry { geometry, current } = &mut self.geometry;
        let check = |geometry: &Geometry| {
            let Geometry { bytes, sector_size, read_only, .. } = *geometry;
            check_request(request, bytes, sector_size, read_only)
        };
        if request.range().end > geometry.bytes {
            geometry.bytes = current.get();
        }
        check(geometry)
    }

    /// Ends a connection that broke a rule, and notifies its owner.
    fn check(&self, mut lane: MutexGuard<'_, Lane<G, C>>, outcome: Result<(), BrokenRule>) {
        if outcome.is_err() {
            lane.break_off();
            // Under the lock: the callback must not be mistaken for one about the next connection.
            self.on_broken.call();
        }
    }

    /// Wakes the other handles of the lane that have results.
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
        match self.check_range(&request) {
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
    /// Waits for the requests in flight while there is a connection, at most [`DRAIN_LIMIT`]. The memory of an
    /// unfinished request stays alive until the request ends.
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
        lock(&self.lane).unregister(self.owner);
    }
}
