//! Requests whose range does not begin or end at a sector: steps at the disk, and exclusion of neighbours.
//!
//! A read transfers the sectors around its range. A write first reads the sectors at its edges (at most two),
//! completes its data with the bytes around the range, and writes whole sectors. A write of zeros does that for
//! its edges alone, and a trim leaves its edges out.
//!
//! Between the read and the write of such a request, another request could write the neighbouring bytes,
//! and its data would be lost. [`Exclusion`] prevents that: while a request that reads its edges is at the
//! disk, nothing else that writes to the same sectors is. Requests that have to wait keep their order. Reads
//! never wait.

use std::collections::{HashMap, VecDeque};

use arrayvec::ArrayVec;
use ringfence_block::storage::Op;

use crate::protocol::serve::{ClientRequest, NbdCommand};

/// Range of a disk in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Span {
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl Span {
    /// Returns the range of a request. It lies inside the disk.
    pub(super) fn of(request: &ClientRequest) -> Span {
        Span { offset: request.offset, len: u64::from(request.len) }
    }

    fn between(start: u64, end: u64) -> Span {
        Span { offset: start, len: end.saturating_sub(start) }
    }

    pub(super) fn end(self) -> u64 {
        self.offset.saturating_add(self.len)
    }

    /// Returns the sectors that contain the range.
    pub(super) fn widened(self, sector: u32) -> Span {
        let sector = u64::from(sector.max(1));
        let end = self.end();
        Span::between(self.offset - self.offset % sector, end.div_ceil(sector) * sector)
    }

    /// Returns the whole sectors inside the range.
    fn narrowed(self, sector: u32) -> Span {
        let sector = u64::from(sector.max(1));
        let end = self.end();
        Span::between(self.offset.div_ceil(sector) * sector, end - end % sector)
    }

    fn overlaps(self, other: Span) -> bool {
        self.offset < other.end() && other.offset < self.end()
    }

    /// Returns the part that both ranges have, possibly of length 0.
    pub(super) fn common(self, other: Span) -> Span {
        Span::between(self.offset.max(other.offset), self.end().min(other.end()))
    }

    /// Returns the parts of this range before and behind `inner`, each possibly of length 0.
    pub(super) fn around(self, inner: Span) -> [Span; 2] {
        [
            Span::between(self.offset, inner.offset.min(self.end())),
            Span::between(inner.end().max(self.offset), self.end()),
        ]
    }

    /// Returns the sectors at the edges of the range that it covers in part.
    fn edges(self, sector: u32) -> ArrayVec<Span, 2> {
        let wide = self.widened(sector);
        let len = u64::from(sector.max(1));
        let mut edges = ArrayVec::new();
        if wide.offset != self.offset {
            edges.push(Span { offset: wide.offset, len });
        }
        let last = wide.end() - len;
        let is_new = edges.first().is_none_or(|first| first.offset != last);
        if wide.end() != self.end() && is_new {
            edges.push(Span { offset: last, len });
        }
        edges
    }
}

/// Step of a request at the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// Reads a sector at an edge.
    ReadEdge(Span),
    /// Writes the sector at an edge that was read last, with zeros inside the range.
    WriteEdge(Span),
    /// Reads or writes the sectors of the payload, or stores the extents of the range in it.
    Payload(Op, Span),
    /// Operation on a range, without data.
    Range(Op, Span),
    /// Writes zeros to a range.
    Zeros(Span),
    Flush,
}

/// Steps of one request. The next one is the last of the list.
pub(super) type Steps = ArrayVec<Step, 6>;

/// Returns the steps of a request. They may be none, for a trim of less than a sector. `zeroes` is set if the
/// disk can zero a range.
pub(super) fn steps(command: NbdCommand, span: Span, sector: u32, zeroes: bool) -> Steps {
    let mut steps = Steps::new();
    if let NbdCommand::Flush | NbdCommand::Disconnect = command {
        // Offset and length of a flush have no meaning and were not checked.
        steps.push(Step::Flush);
        return steps;
    }
    let (wide, inside) = (span.widened(sector), span.narrowed(sector));
    let edges = span.edges(sector);
    match command {
        NbdCommand::Read => steps.push(Step::Payload(Op::Read, wide)),
        NbdCommand::BlockStatus { .. } => steps.push(Step::Payload(Op::Extents, wide)),
        NbdCommand::Write { fua } => {
            steps.extend(edges.into_iter().map(Step::ReadEdge));
            steps.push(Step::Payload(Op::Write { fua }, wide));
        }
        NbdCommand::Trim { .. } if inside.len == 0 => {}
        NbdCommand::Trim { .. } => {
            steps.push(Step::Range(Op::Discard { secure: false }, inside));
        }
        NbdCommand::WriteZeroes { allocate, .. } => {
            for edge in edges {
                steps.extend([Step::ReadEdge(edge), Step::WriteEdge(edge)]);
            }
            if inside.len > 0 {
                let with_op = Step::Range(Op::WriteZeroes { allocate }, inside);
                steps.push(if zeroes { with_op } else { Step::Zeros(inside) });
            }
        }
        NbdCommand::Flush | NbdCommand::Disconnect => {}
    }
    if let NbdCommand::Trim { fua: true } | NbdCommand::WriteZeroes { fua: true, .. } = command {
        steps.push(Step::Flush);
    }
    steps.reverse();
    steps
}

/// Write at the disk, or one that waits.
#[derive(Clone, Copy, Debug)]
struct Writing {
    /// Sectors of the request.
    span: Span,
    /// Set if the request reads its edges before it writes them.
    reads_edges: bool,
}

impl Writing {
    fn of(steps: &Steps) -> Option<Writing> {
        let mut writing: Option<Writing> = None;
        for step in steps {
            let (span, reads_edges) = match *step {
                Step::Payload(Op::Read | Op::Extents, _) | Step::Flush => continue,
                Step::ReadEdge(span) => (span, true),
                Step::WriteEdge(span)
                | Step::Payload(_, span)
                | Step::Range(_, span)
                | Step::Zeros(span) => (span, false),
            };
            let so_far = writing.unwrap_or(Writing { span, reads_edges });
            let start = so_far.span.offset.min(span.offset);
            let span = Span::between(start, so_far.span.end().max(span.end()));
            writing = Some(Writing { span, reads_edges: so_far.reads_edges | reads_edges });
        }
        writing
    }

    fn excludes(self, other: Writing) -> bool {
        (self.reads_edges || other.reads_edges) && self.span.overlaps(other.span)
    }
}

/// Exclusion between writes of parts of a sector and other writes.
#[derive(Default)]
pub(super) struct Exclusion {
    running: HashMap<u64, Writing>,
    /// Number of running requests that read their edges.
    readers: usize,
    waiting: VecDeque<(u64, Writing)>,
    /// Request for which the first waiting one waits.
    blocker: Option<u64>,
}

impl Exclusion {
    /// Returns `true` if the request `token` may start. Otherwise [`Exclusion::finish`] returns it later.
    pub(super) fn admit(&mut self, token: u64, steps: &Steps) -> bool {
        let Some(writing) = Writing::of(steps) else { return true };
        self.waiting.push_back((token, writing));
        self.waiting.len() == 1 && self.next() == Some(token)
    }

    /// Removes a completed request. Returns the requests that start now.
    pub(super) fn finish(&mut self, token: u64) -> Vec<u64> {
        let mut started = vec![];
        let Some(writing) = self.running.remove(&token) else { return started };
        self.readers -= usize::from(writing.reads_edges);
        if self.blocker == Some(token) {
            started.extend(std::iter::from_fn(|| self.next()));
        }
        started
    }

    /// Starts the first waiting request, unless a running one excludes it.
    fn next(&mut self) -> Option<u64> {
        let (token, writing) = *self.waiting.front()?;
        let mut running = self.running.iter();
        let is_relevant = writing.reads_edges || self.readers > 0;
        let blocker =
            running.find(|(_, other)| is_relevant && writing.excludes(**other)).map(|(id, _)| *id);
        self.blocker = blocker;
        if blocker.is_some() {
            return None;
        }
        self.waiting.pop_front();
        self.running.insert(token, writing);
        self.readers += usize::from(writing.reads_edges);
        Some(token)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WRITE: NbdCommand = NbdCommand::Write { fua: false };
    const ZEROES: NbdCommand = NbdCommand::WriteZeroes { allocate: false, fua: false };

    fn of(command: NbdCommand, offset: u64, len: u64) -> Steps {
        steps(command, Span { offset, len }, 512, true)
    }

    #[test]
    fn aligned_requests_have_one_step() {
        for command in
            [NbdCommand::Read, WRITE, ZEROES, NbdCommand::Trim { fua: false }, NbdCommand::Flush]
        {
            assert_eq!(of(command, 512, 1024).len(), 1, "{command:?}");
        }
        let durable = NbdCommand::WriteZeroes { allocate: false, fua: true };
        assert_eq!(of(durable, 512, 1024).len(), 2);
        assert_eq!(of(NbdCommand::Flush, u64::MAX, u64::from(u32::MAX))[..], [Step::Flush]);
        assert_eq!(of(NbdCommand::Trim { fua: false }, 1, 1000).len(), 0, "no whole sector");
    }

    #[test]
    fn writes_wait_for_overlapping_write_that_reads_its_edges_alone() {
        let mut exclusion = Exclusion::default();
        assert!(exclusion.admit(1, &of(WRITE, 0, 512)));
        assert!(exclusion.admit(2, &of(WRITE, 0, 512)), "aligned writes may overlap");
        assert!(!exclusion.admit(3, &of(WRITE, 1, 1)));
        assert!(!exclusion.admit(4, &of(WRITE, 2, 1)));
        assert!(!exclusion.admit(5, &of(WRITE, 4096, 512)), "requests that wait keep their order");
        assert!(exclusion.admit(6, &of(NbdCommand::Read, 0, 1)), "reads never wait");
        let finished = [1, 2].map(|token| exclusion.finish(token)).concat();
        assert_eq!(finished, [3]);
        assert_eq!(exclusion.finish(3), [4, 5]);
        assert!(!exclusion.admit(7, &of(ZEROES, 0, 1024)));
        assert_eq!(exclusion.finish(5), [] as [u64; 0]);
        assert_eq!(exclusion.finish(4), [7]);
    }

    proptest! {
        #[test]
        fn steps_write_each_byte_of_range_and_no_sector_beyond(
            offset in 0u64..5000, len in 1u64..5000, sector in prop_oneof![Just(512u32), Just(4096)],
            zeroes: bool, kind in 0..2,
        ) {
            let span = Span { offset, len };
            let command = if kind == 0 { WRITE } else { ZEROES };
            let mut written = vec![0; 16384];
            let mut read = vec![false; 16384];
            let index = |byte: u64| usize::try_from(byte).unwrap();
            let at = |span: Span| index(span.offset)..index(span.end());
            for step in steps(command, span, sector, zeroes).into_iter().rev() {
                match step {
                    Step::ReadEdge(edge) => read[at(edge)].fill(true),
                    Step::WriteEdge(part)
                    | Step::Payload(_, part)
                    | Step::Range(_, part)
                    | Step::Zeros(part) => {
                        prop_assert!(part.offset.is_multiple_of(u64::from(sector)));
                        prop_assert!(part.len > 0 && part.len.is_multiple_of(u64::from(sector)));
                        written[at(part)].iter_mut().for_each(|count| *count += 1);
                    }
                    Step::Flush => {}
                }
            }
            for byte in 0..16384u64 {
                let inside = (span.offset..span.end()).contains(&byte);
                let (count, read) = (written[index(byte)], read[index(byte)]);
                // A byte beside the range is written back only after it was read.
                prop_assert!(if inside { count == 1 } else { count == i32::from(read) }, "{byte}");
            }
            let edge = span.widened(sector);
            let [before, behind] = edge.around(span);
            prop_assert_eq!(before.len + span.len + behind.len, edge.len);
        }
    }
}
