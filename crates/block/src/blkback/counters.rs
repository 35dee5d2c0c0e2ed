//! Counters of one blkback queue.

use std::sync::{Mutex, PoisonError};

use ringfence_access::persistent::PersistentCounters;
use ringfence_sys::counters::{Counter, Level};
use ringfence_wire::blkif::{Direction, SegmentRange};

use crate::storage::QueueEngine;
use crate::work::Work;

/// Level of a disk: rings that io_uring serves.
const RINGS_OF_IO_URING: &str = "rings_io_uring";

/// Level of a disk: rings that threads serve.
const RINGS_OF_THREADS: &str = "rings_threads";

/// Running totals of one queue. All counters start at 0.
#[derive(Default, Debug)]
pub struct QueueCounters {
    pub reads: Counter,
    /// Write requests, including those that are part of a flush or barrier.
    pub writes: Counter,
    /// Flush and barrier requests.
    pub flushes: Counter,
    pub discards: Counter,
    /// Requests that write zeros to a range, without data.
    pub zeroes: Counter,
    pub extents: Counter,
    /// Reads and writes with indirect segments (descriptors in pages of their own).
    pub indirect: Counter,
    /// Bytes of all read requests.
    pub read_bytes: Counter,
    /// Bytes of all write requests.
    pub written_bytes: Counter,
    /// Requests refused because of a rule violation.
    pub refused: Counter,
    /// Requests for which the disk returned an error.
    pub failed: Counter,
    /// Requests that waited for an earlier one in the same ring.
    pub waited: Counter,
    /// Requests answered before an older one was.
    pub moved: Counter,
    /// Wake-ups by the event channel without work to do.
    pub spurious_wakeups: Counter,
    /// Times that the event channel was ignored for a while, after spurious wake-ups.
    pub throttles: Counter,
    /// Pauses of the queue because of rule violations.
    pub pauses: Counter,
    /// Requests that the disk works on now.
    pub in_flight: Level,
    /// Persistent pages that are mapped now.
    pub kept: Level,
    /// Engine of the queue of the disk, for disks that have several.
    pub engine: CurrentEngine,
}

/// Engine of a queue, which changes when the disk is replaced.
#[derive(Default, Debug)]
pub struct CurrentEngine(Mutex<Option<QueueEngine>>);

impl CurrentEngine {
    /// Replaces the engine by another one.
    pub(super) fn set(&self, engine: Option<QueueEngine>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = engine;
    }

    /// Returns the engine of this moment.
    pub fn get(&self) -> Option<QueueEngine> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl QueueCounters {
    /// Creates the counters of a queue whose disk has this engine.
    pub(super) fn of(engine: Option<QueueEngine>) -> QueueCounters {
        let counters = QueueCounters::default();
        counters.engine.set(engine);
        counters
    }

    /// Returns the name and value of each counter.
    pub fn named(&self) -> Vec<(&'static str, u64)> {
        let of = |name, counter: &Counter| (name, counter.get());
        vec![
            of("reads", &self.reads),
            of("writes", &self.writes),
            of("flushes", &self.flushes),
            of("discards", &self.discards),
            of("zeroes", &self.zeroes),
            of("extents", &self.extents),
            of("indirect", &self.indirect),
            of("read_bytes", &self.read_bytes),
            of("written_bytes", &self.written_bytes),
            of("refused", &self.refused),
            of("failed", &self.failed),
            of("waited", &self.waited),
            of("moved", &self.moved),
            of("spurious_wakeups", &self.spurious_wakeups),
            of("throttles", &self.throttles),
            of("pauses", &self.pauses),
        ]
    }

    /// Returns the name and value of each level. The sums over a disk's queues say which engines serve it.
    pub fn levels(&self) -> [(&'static str, u64); 4] {
        let own = self.engine.get();
        let has = |engine| u64::from(own == Some(engine));
        [
            ("requests_in_flight", self.in_flight.get()),
            ("pages_mapped", self.kept.get()),
            (RINGS_OF_IO_URING, has(QueueEngine::IoUring)),
            (RINGS_OF_THREADS, has(QueueEngine::Threads)),
        ]
    }

    pub(super) fn count(&self, work: Work, ranges: &[SegmentRange]) {
        if matches!(work, Work::Flush(_) | Work::Barrier(_)) {
            self.flushes.add(1);
        }
        let bytes = ranges.iter().map(|range| u64::from(range.len())).sum();
        match work.transfer().map(|transfer| transfer.direction) {
            Some(Direction::Read) => {
                self.reads.add(1);
                self.read_bytes.add(bytes);
            }
            Some(Direction::Write) => {
                self.writes.add(1);
                self.written_bytes.add(bytes);
            }
            None => match work {
                Work::Discard { .. } => self.discards.add(1),
                Work::Zeroes { .. } => self.zeroes.add(1),
                Work::Extents { .. } => self.extents.add(1),
                _ => {}
            },
        }
    }
}

/// Returns the names of the engines of a disk by its levels. `None` for storage without a choice.
pub fn engine_names<N: AsRef<str>>(
    levels: impl IntoIterator<Item = (N, u64)>,
) -> Option<&'static str> {
    let (mut rings, mut threads) = (false, false);
    for (name, level) in levels {
        rings |= name.as_ref() == RINGS_OF_IO_URING && level > 0;
        threads |= name.as_ref() == RINGS_OF_THREADS && level > 0;
    }
    match (rings, threads) {
        (true, false) => Some("io_uring"),
        (false, true) => Some("threads"),
        (true, true) => Some("io_uring+threads"),
        (false, false) => None,
    }
}

/// Returns the name and value of each counter of a ring's persistent pages.
pub fn named_persistent(counters: &PersistentCounters) -> Vec<(&'static str, u64)> {
    let of = |name, counter: &Counter| (name, counter.get());
    vec![
        of("persistent_hits", &counters.hits),
        of("persistent_misses", &counters.misses),
        of("persistent_over", &counters.over),
        of("persistent_purged", &counters.purged),
        of("persistent_expired", &counters.expired),
        of("persistent_squeezed", &counters.shrunk),
    ]
}
