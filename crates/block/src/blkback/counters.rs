//! What a queue did.

use ringfence_access::persistent::PersistentCounters;
use ringfence_sys::counters::Counter;
use ringfence_wire::blkif::{Direction, SegmentRange};

use super::job::Work;

/// Running totals of one queue.
#[derive(Default, Debug)]
pub struct QueueCounters {
    /// Requests to read.
    pub reads: Counter,
    /// Requests to write, those of flushes and barriers included.
    pub writes: Counter,
    /// Flushes and barriers.
    pub flushes: Counter,
    /// Discards.
    pub discards: Counter,
    /// Of reads and writes those whose segments were described in pages of their own.
    pub indirect: Counter,
    /// Bytes asked for.
    pub read_bytes: Counter,
    /// Bytes to be written.
    pub written_bytes: Counter,
    /// Requests that broke a rule.
    pub refused: Counter,
    /// Requests that the disk failed.
    pub failed: Counter,
    /// Requests that had to wait for one in front of them.
    pub waited: Counter,
    /// Requests that were answered while an older one was not.
    pub moved: Counter,
    /// Events that announced nothing.
    pub spurious_wakeups: Counter,
    /// Times that events were ignored for a while.
    pub throttles: Counter,
    /// Pauses because of requests that broke rules.
    pub pauses: Counter,
}

impl QueueCounters {
    /// Name and value of each.
    pub fn named(&self) -> Vec<(&'static str, u64)> {
        let of = |name, counter: &Counter| (name, counter.get());
        vec![
            of("reads", &self.reads),
            of("writes", &self.writes),
            of("flushes", &self.flushes),
            of("discards", &self.discards),
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
            None if matches!(work, Work::Discard { .. }) => self.discards.add(1),
            None => {}
        }
    }
}

/// Name and value of each of a ring's counters of persistent pages.
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
