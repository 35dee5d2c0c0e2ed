//! Model of the contents that a disk may have, given what it acknowledged.
//!
//! Each write has an id and fills every sector of 512 bytes with a pattern of that id and the sector number.
//! A sector read back thus identifies its write, or shows that it is torn, misplaced or damaged.
//!
//! For each sector the checker keeps the *candidates*: the newest content that a flush made durable, and
//! all later writes in order. A write that is in flight, or that failed, may or may not be on the disk.
//! The rules are:
//!
//! * Without a crash, a read returns the newest acknowledged write or one in flight.
//! * After a crash, any candidate may be there, but nothing older than the flushed content.
//! * A flush covers the writes acknowledged before it was *submitted*.
//!
//! Two writes in flight must not overlap: their result is undefined.

use std::collections::HashMap;
use std::io::{self, Read, Write};

use super::mix;

/// Unit in bytes that is never torn.
pub const SECTOR: usize = 512;

/// Content of a sector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// Only zero bytes.
    Zeros,
    /// Pattern of this write.
    Of(u64),
    /// Pattern of no write.
    Damaged,
}

/// Fills a sector with the pattern of write `id`.
pub fn fill(id: u64, sector: u64, bytes: &mut [u8; SECTOR]) {
    let words = bytes.as_chunks_mut::<8>().0;
    for (word, i) in words.iter_mut().zip(0u64..) {
        *word = match i {
            0 => id,
            1 => sector,
            _ => mix(id ^ sector.rotate_left(20) ^ (i << 56)),
        }
        .to_le_bytes();
    }
}

/// Identifies the content of bytes read from `sector`.
pub fn identify(sector: u64, bytes: &[u8; SECTOR]) -> Content {
    if bytes.iter().all(|byte| *byte == 0) {
        return Content::Zeros;
    }
    let id = u64::from_le_bytes(bytes.as_chunks::<8>().0[0]);
    let mut wanted = [0; SECTOR];
    fill(id, sector, &mut wanted);
    if *bytes == wanted { Content::Of(id) } else { Content::Damaged }
}

/// Sector with a content that the model excludes.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("sector {sector} holds {found:?}, but may hold only one of {allowed:?}")]
pub struct Violation {
    pub sector: u64,
    pub found: Content,
    /// Contents that the model allows.
    pub allowed: Vec<Content>,
}

/// Event of the I/O. The journal records a submission *before* it can have an effect, and an
/// acknowledgement after it arrived.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    /// Submission of a write.
    Submitted {
        /// Id of the write: not 0, and never reused.
        id: u64,
        first: u64,
        count: u32,
        /// Set if the write stores zeros instead of its pattern.
        zeros: bool,
        /// Set if the write is durable when it is acknowledged.
        fua: bool,
    },
    /// Acknowledgement of a write.
    Acknowledged { id: u64 },
    /// Submission of a flush.
    FlushSubmitted { id: u64 },
    /// Acknowledgement of a flush.
    FlushAcknowledged { id: u64 },
}

/// Length in bytes of an event in a journal.
pub const RECORD: usize = 24;

impl Event {
    fn to_record(self) -> [u8; RECORD] {
        let (kind, id, first, count) = match self {
            Event::Submitted { id, first, count, zeros, fua } => {
                (1 + u32::from(zeros) + 2 * u32::from(fua), id, first, count)
            }
            Event::Acknowledged { id } => (5, id, 0, 0),
            Event::FlushSubmitted { id } => (6, id, 0, 0),
            Event::FlushAcknowledged { id } => (7, id, 0, 0),
        };
        let mut record = [0; RECORD];
        record[0..4].copy_from_slice(&kind.to_le_bytes());
        record[4..8].copy_from_slice(&count.to_le_bytes());
        record[8..16].copy_from_slice(&id.to_le_bytes());
        record[16..24].copy_from_slice(&first.to_le_bytes());
        record
    }

    fn from_record(record: &[u8; RECORD]) -> Option<Event> {
        let word = |at: usize| u32::from_le_bytes(*record[at..].first_chunk().unwrap_or(&[0; 4]));
        let long = |at: usize| u64::from_le_bytes(*record[at..].first_chunk().unwrap_or(&[0; 8]));
        let id = long(8);
        Some(match word(0) {
            kind @ 1..=4 => Event::Submitted {
                id,
                first: long(16),
                count: word(4),
                zeros: (kind - 1) & 1 != 0,
                fua: (kind - 1) & 2 != 0,
            },
            5 => Event::Acknowledged { id },
            6 => Event::FlushSubmitted { id },
            7 => Event::FlushAcknowledged { id },
            _ => return None,
        })
    }
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    content: Content,
    /// Time of the acknowledgement, if there was one.
    acknowledged: Option<u64>,
    write: u64,
}

struct Written {
    first: u64,
    count: u32,
    fua: bool,
}

/// Journal of acknowledged I/O, and the candidates that follow from it.
pub struct Checker {
    /// Candidates by sector: the durable content, then later ones. Other sectors hold zeros.
    sectors: HashMap<u64, Vec<Candidate>>,
    in_flight: HashMap<u64, Written>,
    /// Flushes in flight, with the time of their submission.
    flushes: HashMap<u64, u64>,
    /// Number of acknowledgements so far, used as time.
    now: u64,
    next_id: u64,
    journal: Option<Box<dyn Write + Send>>,
}

const NEVER_WRITTEN: Candidate =
    Candidate { content: Content::Zeros, acknowledged: Some(0), write: 0 };

impl Default for Checker {
    fn default() -> Self {
        Checker::new()
    }
}

impl Checker {
    /// Creates the model of a disk that holds zeros.
    pub fn new() -> Checker {
        Checker {
            sectors: HashMap::new(),
            in_flight: HashMap::new(),
            flushes: HashMap::new(),
            now: 0,
            next_id: 1,
            journal: None,
        }
    }

    /// Also writes every event to `journal`, unbuffered, so that it outlives this process.
    #[must_use]
    pub fn with_journal(mut self, journal: impl Write + Send + 'static) -> Checker {
        self.journal = Some(Box::new(journal));
        self
    }

    /// Rebuilds the model from a journal. Requests in flight at its end are still in flight. A truncated last
    /// record is ignored.
    ///
    /// # Errors
    ///
    /// Returns the error of the reader, or `InvalidData` for an unknown record.
    pub fn replay(mut journal: impl Read) -> io::Result<Checker> {
        let mut checker = Checker::new();
        let mut bytes = vec![];
        journal.read_to_end(&mut bytes)?;
        for record in bytes.as_chunks::<RECORD>().0 {
            let event = Event::from_record(record).ok_or(io::ErrorKind::InvalidData)?;
            checker.record(event);
        }
        Ok(checker)
    }

    /// Returns an id that was not used yet.
    pub fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }

    /// Records an event.
    ///
    /// # Panics
    ///
    /// Panics if the journal cannot be written, if an id is reused, or if writes in flight overlap.
    pub fn record(&mut self, event: Event) {
        if let Some(journal) = &mut self.journal {
            journal.write_all(&event.to_record()).expect("the journal can be written");
        }
        match event {
            Event::Submitted { id, first, count, zeros, fua } => {
                self.next_id = self.next_id.max(id + 1);
                let content = if zeros { Content::Zeros } else { Content::Of(id) };
                let candidate = Candidate { content, acknowledged: None, write: id };
                for sector in first..first + u64::from(count) {
                    let candidates =
                        self.sectors.entry(sector).or_insert_with(|| vec![NEVER_WRITTEN]);
                    let overlaps = candidates.iter().any(|candidate| {
                        candidate.acknowledged.is_none()
                            && self.in_flight.contains_key(&candidate.write)
                    });
                    assert!(!overlaps, "write {id} overlaps one in flight at sector {sector}");
                    candidates.push(candidate);
                }
                let before = self.in_flight.insert(id, Written { first, count, fua });
                assert!(before.is_none(), "the identity {id} was used twice");
            }
            Event::Acknowledged { id } => self.acknowledged(id),
            Event::FlushSubmitted { id } => {
                self.next_id = self.next_id.max(id + 1);
                self.flushes.insert(id, self.now);
            }
            Event::FlushAcknowledged { id } => {
                if let Some(moment) = self.flushes.remove(&id) {
                    self.flushed(moment);
                }
            }
        }
    }

    /// Records that a write failed: it may be on the disk or not, and is not in flight any more.
    pub fn failed(&mut self, id: u64) {
        self.in_flight.remove(&id);
        self.flushes.remove(&id);
    }

    fn acknowledged(&mut self, id: u64) {
        let Some(Written { first, count, fua }) = self.in_flight.remove(&id) else { return };
        self.now += 1;
        for sector in first..first + u64::from(count) {
            let Some(candidates) = self.sectors.get_mut(&sector) else { continue };
            let Some(at) = candidates.iter().position(|candidate| candidate.write == id) else {
                continue;
            };
            candidates[at].acknowledged = Some(self.now);
            if fua {
                candidates.drain(..at);
            }
        }
    }

    fn flushed(&mut self, moment: u64) {
        for candidates in self.sectors.values_mut() {
            let covered = |candidate: &Candidate| {
                candidate.acknowledged.is_some_and(|acknowledged| acknowledged <= moment)
            };
            if let Some(newest) = candidates.iter().rposition(covered) {
                candidates.drain(..newest);
            }
        }
    }

    fn candidates(&self, sector: u64) -> &[Candidate] {
        self.sectors.get(&sector).map_or(&[NEVER_WRITTEN], Vec::as_slice)
    }

    fn violation(sector: u64, found: Content, allowed: &[Candidate]) -> Violation {
        let allowed = allowed.iter().map(|candidate| candidate.content).collect();
        Violation { sector, found, allowed }
    }

    /// Checks whole sectors read from sector `first` on, while the disk is in use.
    ///
    /// # Errors
    ///
    /// Returns the first [`Violation`].
    pub fn check_read(&self, first: u64, bytes: &[u8]) -> Result<(), Violation> {
        for (bytes, sector) in bytes.as_chunks::<SECTOR>().0.iter().zip(first..) {
            let (found, candidates) = (identify(sector, bytes), self.candidates(sector));
            // Allowed are the newest acknowledged content and all later ones.
            let newest = candidates.iter().rposition(|c| c.acknowledged.is_some()).unwrap_or(0);
            let allowed = &candidates[newest..];
            if !allowed.iter().any(|candidate| candidate.content == found) {
                return Err(Checker::violation(sector, found, allowed));
            }
        }
        Ok(())
    }

    /// Checks the content of a disk after a crash, from sector `first` on, and expects exactly that content
    /// from then on.
    ///
    /// # Errors
    ///
    /// Returns the first [`Violation`].
    pub fn check_after_crash(&mut self, first: u64, bytes: &[u8]) -> Result<(), Violation> {
        for (bytes, sector) in bytes.as_chunks::<SECTOR>().0.iter().zip(first..) {
            let (found, candidates) = (identify(sector, bytes), self.candidates(sector));
            let Some(one) = candidates.iter().rfind(|candidate| candidate.content == found) else {
                return Err(Checker::violation(sector, found, candidates));
            };
            let now = Candidate { acknowledged: Some(self.now), ..*one };
            self.sectors.insert(sector, vec![now]);
        }
        Ok(())
    }

    /// Records a crash: no request is in flight any more.
    pub fn crashed(&mut self) {
        self.in_flight.clear();
        self.flushes.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(id: u64, sector: u64) -> [u8; SECTOR] {
        let mut bytes = [0; SECTOR];
        fill(id, sector, &mut bytes);
        bytes
    }

    fn submit(checker: &mut Checker, first: u64, count: u32) -> u64 {
        let id = checker.new_id();
        checker.record(Event::Submitted { id, first, count, zeros: false, fua: false });
        id
    }

    fn flush(checker: &mut Checker) {
        let id = checker.new_id();
        checker.record(Event::FlushSubmitted { id });
        checker.record(Event::FlushAcknowledged { id });
    }

    #[test]
    fn sector_identifies_its_write_and_torn_sector_is_damaged() {
        let bytes = written(7, 42);
        assert_eq!(identify(42, &bytes), Content::Of(7));
        assert_eq!(identify(43, &bytes), Content::Damaged, "misplaced");
        let mut torn = bytes;
        torn[256..].copy_from_slice(&written(8, 42)[256..]);
        assert_eq!(identify(42, &torn), Content::Damaged);
        assert_eq!(identify(42, &[0; SECTOR]), Content::Zeros);
    }

    #[test]
    fn flushed_write_survives_crash_and_unflushed_one_may_be_lost() {
        let mut checker = Checker::new();
        let one = submit(&mut checker, 5, 1);
        checker.record(Event::Acknowledged { id: one });
        assert!(checker.check_read(5, &[0; SECTOR]).is_err(), "a lost write, without a crash");
        checker.check_read(5, &written(one, 5)).unwrap();
        flush(&mut checker);
        let two = submit(&mut checker, 5, 1);
        checker.check_read(5, &written(one, 5)).unwrap();
        checker.check_read(5, &written(two, 5)).unwrap();
        checker.record(Event::Acknowledged { id: two });
        assert!(checker.check_after_crash(5, &[0; SECTOR]).is_err(), "lost though flushed");
        checker.check_after_crash(5, &written(one, 5)).unwrap();
        assert!(checker.check_after_crash(5, &written(two, 5)).is_err(), "it was seen lost");
    }

    #[test]
    fn flush_covers_only_writes_acknowledged_before_its_submission() {
        let mut checker = Checker::new();
        let one = submit(&mut checker, 1, 1);
        let id = checker.new_id();
        checker.record(Event::FlushSubmitted { id });
        checker.record(Event::Acknowledged { id: one });
        checker.record(Event::FlushAcknowledged { id });
        checker.check_after_crash(1, &[0; SECTOR]).unwrap();
    }

    #[test]
    fn fua_write_survives_crash_without_flush() {
        let mut checker = Checker::new();
        let id = checker.new_id();
        checker.record(Event::Submitted { id, first: 3, count: 2, zeros: false, fua: true });
        checker.record(Event::Acknowledged { id });
        assert!(checker.check_after_crash(4, &[0; SECTOR]).is_err());
        checker.check_after_crash(4, &written(id, 4)).unwrap();
    }

    #[test]
    fn replayed_journal_with_truncated_end_gives_same_model() {
        let mut checker = Checker::new();
        let events = [
            Event::Submitted { id: 1, first: 9, count: 3, zeros: false, fua: false },
            Event::Acknowledged { id: 1 },
            Event::FlushSubmitted { id: 2 },
            Event::FlushAcknowledged { id: 2 },
            Event::Submitted { id: 3, first: 9, count: 1, zeros: true, fua: true },
        ];
        let mut journal = vec![];
        for event in events {
            checker.record(event);
            journal.extend(event.to_record());
            assert_eq!(Event::from_record(&event.to_record()), Some(event));
        }
        journal.extend([1, 2, 3]);
        let mut again = Checker::replay(journal.as_slice()).unwrap();
        again.crashed();
        again.check_after_crash(9, &[0; SECTOR]).unwrap();
        assert!(again.check_after_crash(10, &[0; SECTOR]).is_err());
        again.check_after_crash(10, &written(1, 10)).unwrap();
    }
}
