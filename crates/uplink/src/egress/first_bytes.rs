//! First bytes of a TCP connection that wait for a verdict.
//!
//! Behind a hello of TLS, the bytes are read on until no second hello can follow ([`Later`]): the server may ask for one.
//!
//! ```text
//! bytes ──> first hello: waits ──> verdict ──> passed ──> later records: pass, or wait as a second hello
//!     │
//!     └───> no request line: passed ──> rest of the first line: passes, and is read ([`FirstLine`])
//! ```
//!
//! A word without an end of line may be the first message of another protocol, or the beginning of a request. After a pause
//! ([`WORD_PASSES_AFTER`]) it is passed, and the bytes behind it are read as before.
//!
//! A name that no rule covers may be asked about ([`asking`](super::asking)). The bytes wait for the answer, and are then read
//! again.
//!
//! A guest gains nothing by the pause: only characters of a method, or ends of lines, pass by it, and no server acts on those
//! alone. They stay here and are read again together with what follows, so the server receives the rest of a request, with its
//! target and host, after the verdict on all of it. A TLS record begins with a byte that is no character of a method, so no part
//! of a hello passes by a pause.

use core::net::SocketAddr;
use core::time::Duration;
use std::borrow::Cow;
use std::sync::Arc;

use ringfence_policy::first::{FIRST_BYTES_MAX, Shown};
use ringfence_policy::gate::{Decision, FirstRead, Inspection};
use ringfence_policy::http::{FirstLine, Line, is_word};
use ringfence_policy::tls::second::{Later, Next, first_len};
use ringfence_policy::{HostName, Protocol};

use super::{
    Admitted, Asked, Egress, FIRST_BYTES_HELD_MAX, FIRST_BYTES_WITHIN, WORD_PASSES_AFTER, Waiting,
};

/// First bytes of a connection, and the hello or request in them.
#[derive(Debug)]
pub struct FirstBytes {
    egress: Arc<Egress>,
    to: SocketAddr,
    admitted: Admitted,
    bytes: Vec<u8>,
    /// Bytes that were passed before a verdict. They are read again together with later ones.
    before: Vec<u8>,
    /// Number of bytes at the beginning that may go to the server.
    passed: usize,
    /// Time at which the bytes must be complete, from the first one on that waits.
    until: Option<Duration>,
    /// Time at which a word is passed.
    pause: Option<Duration>,
    /// Question about the name that they show.
    asked: Option<Waiting>,
    /// No bytes will follow.
    are_all: bool,
    /// Time of the last call.
    now: Duration,
    reader: Reader,
    /// State of the first bytes after a verdict, and the name that they show. The owner takes it.
    shown: Option<(FirstRead, Option<HostName>)>,
    /// Response to a request that is denied.
    page: Option<Vec<u8>>,
}

/// State of the inspection.
#[derive(Debug)]
enum Reader {
    First,
    /// Reads the rest of the first line of another protocol.
    Line(FirstLine),
    Later(Later),
    /// All bytes may go: they wait only for room in the socket.
    Done,
}

/// Results of adding first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstVerdict {
    /// More bytes are needed.
    Wait,
    /// Some bytes may go to the server.
    Pass,
    Deny,
}

impl FirstBytes {
    /// Prepares the inspection of a connection. Returns `None` if it needs none.
    pub fn new(
        egress: &Arc<Egress>,
        to: SocketAddr,
        admitted: impl Into<Admitted>,
    ) -> Option<Box<FirstBytes>> {
        let admitted = admitted.into();
        (admitted.decision.inspection != Inspection::None).then(|| {
            let egress = Arc::clone(egress);
            Box::new(FirstBytes {
                egress,
                to,
                admitted,
                bytes: Vec::new(),
                before: Vec::new(),
                passed: 0,
                until: None,
                pause: None,
                asked: None,
                are_all: false,
                now: Duration::ZERO,
                reader: Reader::First,
                shown: None,
                page: None,
            })
        })
    }

    /// Returns the time of the next call of [`FirstBytes::on_deadline`].
    pub fn deadline(&self) -> Option<Duration> {
        self.pause.or(self.until)
    }

    /// Returns the number of bytes that are here.
    pub fn held(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the number of bytes for which there is room.
    pub fn room(&self) -> usize {
        FIRST_BYTES_MAX.saturating_sub(self.before.len() + self.bytes.len())
    }

    /// Returns the bytes that may go to the server.
    pub fn passed(&self) -> &[u8] {
        self.bytes.get(..self.passed).unwrap_or_default()
    }

    /// Returns `true` once nothing is inspected any more.
    pub fn is_done(&self) -> bool {
        matches!(self.reader, Reader::Done)
    }

    /// Adds bytes, which the guest regards as received. `is_all`: no more will come.
    pub fn add(&mut self, bytes: &[u8], is_all: bool, now: Duration) -> FirstVerdict {
        let mut state = self.egress.state();
        if state.waiting + bytes.len() > FIRST_BYTES_HELD_MAX {
            return FirstVerdict::Deny;
        }
        state.waiting += bytes.len();
        drop(state);
        self.bytes.extend_from_slice(bytes);
        self.are_all |= is_all;
        if self.asked.is_some() {
            return FirstVerdict::Wait;
        }
        self.read_on(now)
    }

    /// Reads the bytes that are here.
    fn read_on(&mut self, now: Duration) -> FirstVerdict {
        (self.now, self.pause) = (now, None);
        if !self.read(self.are_all) {
            return FirstVerdict::Deny;
        }
        if let Some(waiting) = self.asked {
            self.until = Some(waiting.until);
            return FirstVerdict::Wait;
        }
        let is_first = matches!(self.reader, Reader::First);
        if is_first && self.passed < self.bytes.len() && self.is_word_of_other_protocol() {
            self.pause = Some(now + WORD_PASSES_AFTER);
        }
        let waits = self.passed < self.bytes.len();
        self.until = if waits { self.until.or(Some(now + FIRST_BYTES_WITHIN)) } else { None };
        if self.passed > 0 { FirstVerdict::Pass } else { FirstVerdict::Wait }
    }

    /// Reads on. Returns `false` if the connection is denied.
    fn read(&mut self, is_all: bool) -> bool {
        if matches!(self.reader, Reader::First) {
            let all = self.all();
            let Some(shown) = ringfence_policy::first::inspect(&all, is_all) else {
                return true;
            };
            let is_allowed =
                match self.egress.check_or_ask(self.to, &self.admitted, &shown, self.now) {
                    Asked::Decided(is_allowed) => is_allowed,
                    Asked::Held(waiting) => {
                        self.asked = Some(waiting);
                        return true;
                    }
                };
            if !is_allowed {
                let is_web = self.to.port() == WEB && matches!(shown, Shown::Http(_));
                self.page = is_web.then(|| {
                    let is_head = is_head(&self.all());
                    self.egress.refusal_page(self.to, &self.admitted, &shown, is_head, self.now)
                });
                return false;
            }
            self.note_shown(&shown);
            self.reader = match &shown {
                Shown::Tls(hello) => {
                    self.passed = first_len(&self.bytes);
                    Reader::Later(Later::new(hello))
                }
                Shown::Unknown if !self.before.is_empty() => {
                    // The bytes before are read as a part of the line.
                    let mut line = FirstLine::default();
                    line.read(&self.before);
                    Reader::Line(line)
                }
                Shown::Unknown => Reader::Line(FirstLine::default()),
                _ => Reader::Done,
            };
        }
        if let Reader::Line(line) = &mut self.reader {
            match line.read(self.bytes.get(self.passed..).unwrap_or_default()) {
                Line::Open if !is_all => {
                    self.passed = self.bytes.len();
                    return true;
                }
                Line::Open | Line::Other => {}
                Line::Request if self.check(&Shown::Malformed) => {}
                Line::Request => return false,
            }
        }
        if let Reader::Later(later) = &mut self.reader {
            match later.read(self.bytes.get(self.passed..).unwrap_or_default()) {
                Next::More(count) => {
                    self.passed += count;
                    let waiting = self.bytes.len() - self.passed;
                    let is_complete = if is_all { waiting == 0 } else { waiting < FIRST_BYTES_MAX };
                    return is_complete || self.check(&Shown::Malformed);
                }
                Next::Over => {}
                Next::Hello(hello) if self.check(&Shown::Tls(hello.clone())) => {}
                Next::Hello(_) => return false,
                Next::Malformed if self.check(&Shown::Malformed) => {}
                Next::Malformed => return false,
            }
        }
        self.reader = Reader::Done;
        self.passed = self.bytes.len();
        true
    }

    fn note_shown(&mut self, shown: &Shown) {
        self.shown = Some((FirstRead::of(shown), shown.name().cloned()));
    }

    /// Takes the state of the first bytes, and the name that they show, if a verdict was made since the last call.
    pub fn take_shown(&mut self) -> Option<(FirstRead, Option<HostName>)> {
        self.shown.take()
    }

    /// Has the bytes that still come judged after this decision, by the policy in force.
    pub fn follow(&mut self, decision: &Decision) {
        self.admitted.decision = decision.clone();
        if decision.inspection == Inspection::None {
            // Bytes that wait are not lost if they are read without need.
            self.admitted.decision.inspection = Inspection::DeniedNames;
        }
    }

    /// Takes the response to a request that is denied: only a request of HTTP on port 80 gets one.
    pub fn take_page(&mut self) -> Option<Vec<u8>> {
        self.page.take()
    }

    /// Returns the policy that decides.
    pub fn egress(&self) -> &Arc<Egress> {
        &self.egress
    }

    /// Drops all bytes. No more are inspected.
    pub fn clear(&mut self) {
        self.egress.release(self.bytes.len() + self.before.len());
        (self.bytes, self.before, self.passed) = (Vec::new(), Vec::new(), 0);
        (self.until, self.pause, self.reader) = (None, None, Reader::Done);
        self.asked = None;
    }

    /// Returns `true` if the bytes wait for the answer to a question.
    pub fn is_asking(&self) -> bool {
        self.asked.is_some()
    }

    /// Returns `true` if the question for which the bytes wait is over.
    pub fn is_answered(&self) -> bool {
        self.asked.is_some_and(|waiting| !self.egress.is_waiting(waiting.id))
    }

    /// Reads the bytes again after the answer to the question.
    pub fn resume(&mut self, now: Duration) -> FirstVerdict {
        if self.asked.take().is_some() {
            self.until = None;
            return self.read_on(now);
        }
        FirstVerdict::Wait
    }

    /// Removes bytes that the socket accepted.
    pub fn sent(&mut self, count: usize) {
        let count = count.min(self.passed);
        let sent = self.bytes.drain(..count);
        self.passed -= count;
        if matches!(self.reader, Reader::First) {
            self.before.extend(sent);
        } else {
            drop(sent);
            self.egress.state().waiting -= count + self.before.len();
            self.before = Vec::new();
        }
    }

    /// Acts at [`FirstBytes::deadline`]. Returns [`FirstVerdict::Deny`] if the bytes are not complete in time, and records
    /// that.
    pub fn on_deadline(&mut self, now: Duration) -> FirstVerdict {
        self.now = now;
        if self.asked.is_some() {
            self.egress.expire_questions(now);
            return self.resume(now);
        }
        if self.pause.take().is_some() {
            self.passed = self.bytes.len();
            self.until = None;
            return FirstVerdict::Pass;
        }
        self.check(&Shown::Malformed);
        FirstVerdict::Deny
    }

    /// Returns all bytes that no verdict covers.
    fn all(&self) -> Cow<'_, [u8]> {
        if self.before.is_empty() {
            return Cow::Borrowed(&self.bytes);
        }
        [&self.before[..], &self.bytes].concat().into()
    }

    /// Returns `true` if the bytes are a word, and the connection may be of another protocol.
    fn is_word_of_other_protocol(&self) -> bool {
        is_word(&self.all())
            && self.egress.allows(self.to, &self.admitted.decision, &Shown::Unknown, self.now)
    }

    fn check(&mut self, shown: &Shown) -> bool {
        let is_allowed = self.egress.check(self.to, Protocol::Tcp, &self.admitted, shown, self.now);
        if is_allowed {
            self.note_shown(shown);
        }
        is_allowed
    }
}

/// Port on which a denied request is answered.
const WEB: u16 = 80;

/// Returns `true` for a request whose response has no body.
fn is_head(bytes: &[u8]) -> bool {
    let start = bytes.iter().position(|byte| !matches!(byte, b'\r' | b'\n')).unwrap_or(0);
    bytes.get(start..).is_some_and(|request| request.starts_with(b"HEAD "))
}

impl Drop for FirstBytes {
    fn drop(&mut self) {
        self.egress.state().waiting -= self.bytes.len() + self.before.len();
    }
}

#[cfg(test)]
mod tests;
