//! Questions about destinations that no rule covers: asks whoever started the guest, and applies the answers.
//!
//! ```text
//! query, SYN, datagram, hello ──> no rule: ask ──> Note::Question ──> recorder ──> launcher ──> person or program
//!        │                                                                                          │
//!        └── held by its engine (`held`, `first_bytes`)   Egress::answer_question <── orders <──────┘
//!                 │                                                      │
//!                 └── judged again by the usual rules <── settled ───────┘
//! ```
//!
//! An answer changes what the gate allows, and opens nothing by itself: what was held is judged again, as if it had come after
//! the answer. A question has a number that no other has. An answer to a number that does not wait is counted and ignored.
//!
//! At most [`AskLimits::at_a_time`] questions wait, and one guest asks at most [`QUESTIONS_MAX`]: others are denied at once, and
//! so is a destination that was denied before. Destinations that a rule covers never wait.

use core::time::Duration;
use std::collections::HashMap;

use ringfence_policy::Subject;
use ringfence_policy::policy::AskResult;

use super::notes::{Note, NoteQueue};

/// Maximum number of questions of a guest.
pub const QUESTIONS_MAX: u64 = 10_000;
/// Maximum number of denials that are remembered.
const DENIED_MAX: usize = 1024;
/// Time for which an approval for one time opens new flows: those of one attempt, with its queries.
pub const ONCE_FOR: Duration = Duration::from_secs(10);
/// Time for which a destination about which nobody has answered is denied without a question.
pub(super) const UNANSWERED_FOR: Duration = Duration::from_secs(60);
/// Time for which a destination is denied without a question if nobody can answer: that of its held packets.
pub(super) const UNATTENDED_FOR: Duration = Duration::from_secs(1);

/// Number of a question, never used again.
pub type QuestionId = u64;

/// Limits of the questions of a guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AskLimits {
    /// Time limit for an answer.
    pub within: Duration,
    /// Maximum number of questions that wait for an answer.
    pub at_a_time: usize,
}

/// Question about a destination.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Question {
    pub id: QuestionId,
    pub subject: Subject,
}

/// Answer to a question.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// Allows new flows for [`ONCE_FOR`].
    Once,
    /// Allows it until the guest ends.
    Run,
    /// Denies it until the guest ends.
    Deny,
    /// Nobody can answer.
    Unattended,
}

/// Question for which a packet or first bytes wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Waiting {
    pub id: QuestionId,
    /// End of its time.
    pub until: Duration,
}

/// Verdict on a flow, a query or first bytes, which may have to wait for an answer.
#[derive(Debug)]
pub enum Asked<T> {
    Decided(T),
    Held(Waiting),
}

/// Questions of one guest.
#[derive(Debug)]
pub(super) struct Asking {
    limits: AskLimits,
    waiting: HashMap<Subject, Waiting>,
    /// Destinations that are denied without a question, the time until which they are, and the reason.
    denied: HashMap<Subject, (Duration, AskResult)>,
    /// Number of questions so far.
    pub(super) asked: u64,
    /// Number of answers that were ignored.
    pub(super) ignored: u64,
}

impl Asking {
    pub(super) fn new(limits: AskLimits) -> Asking {
        Asking { limits, waiting: HashMap::new(), denied: HashMap::new(), asked: 0, ignored: 0 }
    }

    /// Forgets denials: another policy is in force.
    pub(super) fn forget_denials(&mut self) {
        self.denied.clear();
    }

    /// Asks about a destination, unless that was done.
    pub(super) fn ask(
        &mut self,
        subject: Subject,
        notes: Option<&NoteQueue>,
        now: Duration,
    ) -> Result<Waiting, AskResult> {
        if let Some(&(until, why)) = self.denied.get(&subject)
            && now < until
        {
            return Err(why);
        }
        if let Some(known) = self.waiting.get(&subject) {
            return Ok(*known);
        }
        if self.waiting.len() >= self.limits.at_a_time || self.asked >= QUESTIONS_MAX {
            return Err(AskResult::TooMany);
        }
        let waiting = Waiting { id: self.asked + 1, until: now + self.limits.within };
        let question = Question { id: waiting.id, subject: subject.clone() };
        let sent =
            notes.is_some_and(|notes| notes.try_send(Some(Note::Question(question))).is_ok());
        if !sent {
            return Err(AskResult::TooMany);
        }
        self.asked += 1;
        self.waiting.insert(subject, waiting);
        Ok(waiting)
    }

    pub(super) fn is_waiting(&self, id: QuestionId) -> bool {
        self.waiting.values().any(|waiting| waiting.id == id)
    }

    /// Denies a destination without a question until a time.
    pub(super) fn deny(&mut self, subject: Subject, until: Duration, why: AskResult) {
        if self.denied.len() >= DENIED_MAX
            && let Some(first) = self.denied.iter().min_by_key(|(_, (until, _))| *until)
        {
            let first = first.0.clone();
            self.denied.remove(&first);
        }
        self.denied.insert(subject, (until, why));
    }

    /// Removes a question. Returns its destination.
    pub(super) fn take(&mut self, is_it: impl Fn(&Waiting) -> bool) -> Option<(Subject, Waiting)> {
        let found = self.waiting.iter().find(|(_, waiting)| is_it(waiting))?;
        let subject = found.0.clone();
        self.waiting.remove_entry(&subject)
    }
}

#[cfg(test)]
mod tests;
