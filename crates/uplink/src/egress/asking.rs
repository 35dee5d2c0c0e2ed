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

use core::net::SocketAddr;
use core::time::Duration;
use std::collections::HashMap;

use ringfence_policy::gate::{Decision, Gate, Inspection, QueryEnds, QueryFate};
use ringfence_policy::policy::AskResult;
use ringfence_policy::record::Event;
use ringfence_policy::{Action, Cause, Protocol, Subject, Verdict};

use super::{Egress, EgressState, Note, NoteQueue};
use crate::counters::UplinkCounters;

/// Maximum number of questions of a guest.
pub const QUESTIONS_MAX: u64 = 10_000;
/// Maximum number of denials that are remembered.
const DENIED_MAX: usize = 1024;
/// Time for which an approval for one time opens new flows: those of one attempt, with its queries.
pub const ONCE_FOR: Duration = Duration::from_secs(10);
/// Time for which a destination about which nobody has answered is denied without a question.
const UNANSWERED_FOR: Duration = Duration::from_secs(60);
/// Time for which a destination is denied without a question if nobody can answer: that of its held packets.
const UNATTENDED_FOR: Duration = Duration::from_secs(1);

/// Number of a question, never used again.
pub type QuestionId = u64;

/// Limits of questions.
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
    asked: u64,
    ignored: u64,
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
    fn ask(
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

    fn is_waiting(&self, id: QuestionId) -> bool {
        self.waiting.values().any(|waiting| waiting.id == id)
    }

    fn deny(&mut self, subject: Subject, until: Duration, why: AskResult) {
        if self.denied.len() >= DENIED_MAX
            && let Some(first) = self.denied.iter().min_by_key(|(_, (until, _))| *until)
        {
            let first = first.0.clone();
            self.denied.remove(&first);
        }
        self.denied.insert(subject, (until, why));
    }

    /// Removes a question. Returns its destination.
    fn take(&mut self, is_it: impl Fn(&Waiting) -> bool) -> Option<(Subject, Waiting)> {
        let found = self.waiting.iter().find(|(_, waiting)| is_it(waiting))?;
        let subject = found.0.clone();
        self.waiting.remove_entry(&subject)
    }
}

impl EgressState {
    /// Asks about a destination if there is anybody to ask. A refusal changes the cause of the verdict.
    pub(super) fn ask(
        &mut self,
        subject: Option<Subject>,
        verdict: &mut Verdict,
        notes: Option<&NoteQueue>,
        now: Duration,
    ) -> Option<Waiting> {
        let asking = self.asking.as_mut()?;
        match asking.ask(subject?, notes, now) {
            Ok(waiting) => Some(waiting),
            Err(why) => {
                verdict.cause = Cause::Asked(why);
                None
            }
        }
    }
}

impl Egress {
    /// Returns `true` if unknown destinations are asked about.
    pub(crate) fn asks(&self) -> bool {
        self.asks
    }

    /// Returns the number of questions that were answered or are over, for all engines. Packets that were held for them can be
    /// judged again once it has changed.
    pub(crate) fn settled(&self) -> u64 {
        self.settled.get()
    }

    /// Returns `true` if a question waits for its answer.
    pub(crate) fn is_waiting(&self, id: QuestionId) -> bool {
        self.state().asking.as_ref().is_some_and(|asking| asking.is_waiting(id))
    }

    /// Returns the number of answers that were ignored: late, repeated, or to questions that nobody has asked.
    pub fn answers_ignored(&self) -> u64 {
        self.state().asking.as_ref().map_or(0, |asking| asking.ignored)
    }

    /// Returns the number of questions so far.
    pub fn questions(&self) -> u64 {
        self.state().asking.as_ref().map_or(0, |asking| asking.asked)
    }

    /// Applies an answer. Returns `false` if no question of this number waits.
    pub fn answer_question(&self, id: QuestionId, answer: Answer, now: Duration) -> bool {
        let mut state = self.state();
        let Some(asking) = state.asking.as_mut() else { return false };
        let Some((subject, _)) = asking.take(|waiting| waiting.id == id && now < waiting.until)
        else {
            asking.ignored += 1;
            return false;
        };
        let until = match answer {
            Answer::Once => Some(now + ONCE_FOR),
            _ => None,
        };
        let denied = match answer {
            Answer::Once | Answer::Run if state.gate.approve(&subject, until) => None,
            Answer::Once | Answer::Run => Some((Duration::MAX, AskResult::TooMany)),
            Answer::Deny => Some((Duration::MAX, AskResult::Denied)),
            Answer::Unattended => Some((now + UNATTENDED_FOR, AskResult::Unattended)),
        };
        if let (Some((until, why)), Some(asking)) = (denied, state.asking.as_mut()) {
            asking.deny(subject, until, why);
        }
        self.settled.add(1);
        true
    }

    /// Ends the questions whose time is over.
    pub(crate) fn expire_questions(&self, now: Duration) {
        let mut state = self.state();
        let Some(asking) = state.asking.as_mut() else { return };
        while let Some((subject, waiting)) = asking.take(|waiting| waiting.until <= now) {
            asking.deny(subject, now + UNANSWERED_FOR, AskResult::Unanswered);
            if let Some(notes) = &self.notes {
                // The launcher has a limit of its own, in case this is lost.
                let _ = notes.try_send(Some(Note::Over(waiting.id)));
            }
            self.settled.add(1);
        }
    }

    /// Decides on a new flow of the guest, which may have to wait for an answer. Returns `None` in a decision if it is denied.
    /// `can_be_approved`: the flow leads to no address of the host itself.
    pub(crate) fn admit(
        &self,
        to: SocketAddr,
        protocol: Protocol,
        can_be_approved: bool,
        now: Duration,
        counters: &UplinkCounters,
    ) -> Asked<Option<Decision>> {
        let mut state = self.state();
        let mut decision = match can_be_approved {
            true => state.gate.connect(to, protocol, now),
            false => state.gate.connect_by_rules(to, protocol, now),
        };
        let subject = Gate::subject(&decision, to, protocol).filter(|_| can_be_approved);
        let held = state.ask(subject, &mut decision.verdict, self.notes.as_ref(), now);
        if let Some(waiting) = held {
            return Asked::Held(waiting);
        }
        if self.learns {
            decision.verdict.action = Action::Allow;
        }
        self.note(&state, Event::Connect, &decision, Some((to, protocol)), None);
        drop(state);
        let is_allowed = decision.verdict.is_allowed();
        let counter = if is_allowed { &counters.egress_allowed } else { &counters.egress_denied };
        counter.add(1);
        Asked::Decided(is_allowed.then_some(decision))
    }

    /// Decides on a query of the guest, which may have to wait for an answer. `can_wait`: its packet can be held.
    pub fn query(
        &self,
        ends: QueryEnds,
        bytes: &[u8],
        can_wait: bool,
        now: Duration,
        counters: &UplinkCounters,
    ) -> Asked<QueryFate> {
        let mut state = self.state();
        let resolution = state.gate.query(ends, bytes, now);
        let (name, mut verdict) = (resolution.name, resolution.verdict);
        let subject = resolution.subject.filter(|_| can_wait);
        if let Some(waiting) = state.ask(subject, &mut verdict, self.notes.as_ref(), now) {
            return Asked::Held(waiting);
        }
        if verdict.is_allowed() {
            counters.egress_queries.add(1);
        } else {
            counters.egress_queries_refused.add(1);
        }
        let decision = Decision { verdict, name, inspection: Inspection::None };
        self.note(&state, Event::Resolve, &decision, None, None);
        Asked::Decided(resolution.fate)
    }
}

#[cfg(test)]
mod tests;
