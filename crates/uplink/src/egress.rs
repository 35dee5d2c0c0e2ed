//! Egress policy of a guest: connects the engines with the policy's gate.
//!
//! All engines of a guest share one [`Egress`]: a name may be asked for on one queue, and the connection to its
//! address opened on another. The lock is taken when a flow opens, for DNS messages and for first bytes; packets
//! of an open flow need none. Without a policy there is no `Egress`, and nothing of this module runs.

pub mod asking;
mod datagrams;
mod ends;
mod first_bytes;
mod limits;
mod notes;
mod open_flow;
mod recording;
mod replaced;

use core::fmt;
use core::net::SocketAddr;
use core::time::Duration;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_policy::first::Shown;
use ringfence_policy::gate::{AnswerFate, Decision, Gate, Inspection, QueryEnds, QueryFate};
use ringfence_policy::http::Host;
use ringfence_policy::policy::AskResult;
use ringfence_policy::record::Event;
use ringfence_policy::refusal;
use ringfence_policy::{Action, Cause, HostName, Policy, Protocol, Subject, Verdict};
use ringfence_sys::counters::Counter;

use crate::counters::UplinkCounters;
use crate::upstream::UpstreamProxy;
pub use asking::{Answer, AskLimits, Asked, Question, QuestionId, Waiting};
use asking::{Asking, ONCE_FOR, UNANSWERED_FOR, UNATTENDED_FOR};
pub use datagrams::{DatagramInspector, DatagramVerdict};
pub use first_bytes::{FirstBytes, FirstVerdict};
use limits::Uses;
pub use limits::{Admitted, Permit};
pub use notes::{Note, NoteQueue};
pub use open_flow::OpenFlow;

/// Time within which the first bytes of a connection must be complete.
pub const FIRST_BYTES_WITHIN: Duration = Duration::from_secs(10);
/// Pause after which a word goes to the server although it could begin a request.
pub const WORD_PASSES_AFTER: Duration = Duration::from_millis(200);
/// Maximum number of first bytes that wait for a verdict, of all connections of a guest.
pub const FIRST_BYTES_HELD_MAX: usize = 16 << 20;

/// Bytes of payload that a TCP connection has carried.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CarriedBytes {
    pub from_guest: u64,
    pub to_guest: u64,
}

/// Verdicts that the recorder receives.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recording {
    All,
    Denials,
}

/// Next step for an answer of a name server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answered {
    /// These bytes go to the guest.
    Send(Vec<u8>),
    /// The answer is incomplete: these bytes go to the server over TCP.
    AskOverTcp(Vec<u8>),
    Nothing,
}

/// Policy of a guest, shared by its engines.
pub struct Egress {
    state: Mutex<EgressState>,
    notes: Option<NoteQueue>,
    /// Allows everything, and only records.
    learns: bool,
    asks: bool,
    /// Number of questions that are over. It grows while the lock is held.
    settled: Counter,
}

struct EgressState {
    gate: Gate,
    /// Questions about destinations that no rule covers, if somebody can answer them.
    asking: Option<Asking>,
    /// Amounts of rules with limits that the guest has used.
    uses: Uses,
    /// Number of first bytes that wait for a verdict, and of bytes of local streams.
    waiting: usize,
    recording: Recording,
}

impl EgressState {
    /// Asks about a destination if there is anybody to ask. A refusal changes the cause of the verdict.
    fn ask(
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

impl fmt::Debug for Egress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Egress").finish_non_exhaustive()
    }
}

impl Egress {
    /// Creates a gate with this policy. `notes` receives events; those that do not fit are lost, and `None` is for
    /// the owner of the queue. With `learns`,
    /// everything is allowed.
    pub fn new(policy: Policy, notes: Option<NoteQueue>, learns: bool) -> Arc<Egress> {
        Arc::new(Egress::with_questions(policy, notes, learns, None))
    }

    /// Creates a gate as [`Egress::new`] does, which asks about unknown destinations if there are limits of questions.
    pub fn with_questions(
        policy: Policy,
        notes: Option<NoteQueue>,
        learns: bool,
        limits: Option<AskLimits>,
    ) -> Egress {
        let (gate, asking) = (Gate::new(policy), limits.map(Asking::new));
        let recording = Recording::All;
        let uses = Uses::default();
        let state = Mutex::new(EgressState { gate, asking, uses, waiting: 0, recording });
        Egress { state, notes, learns, asks: limits.is_some(), settled: Counter::default() }
    }

    /// Sets the verdicts that the recorder receives from now on; all at first.
    pub fn record(&self, recording: Recording) {
        self.state().recording = recording;
    }

    /// Counts bytes of the guest that are held. Returns `false` if there are too many.
    pub(crate) fn hold(&self, count: usize) -> bool {
        let mut state = self.state();
        let is_possible = state.waiting + count <= FIRST_BYTES_HELD_MAX;
        state.waiting += if is_possible { count } else { 0 };
        is_possible
    }

    /// Counts bytes that are not held any more.
    pub(crate) fn release(&self, count: usize) {
        self.state().waiting -= count;
    }

    /// Replaces the policy, and forgets answers. The engines decide on their flows again ([`Egress::decide_again`]).
    pub fn replace(&self, policy: Policy) {
        let mut state = self.state();
        state.uses.keep(&policy);
        state.gate.replace(policy);
        state.asking.iter_mut().for_each(Asking::forget_denials);
    }

    /// Returns the number of addresses that are pinned to a name now.
    pub fn pins(&self, now: Duration) -> usize {
        self.state().gate.pins().in_force(now)
    }

    fn state(&self) -> MutexGuard<'_, EgressState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

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
    /// `name`: the name for which the address stands, at the upstream proxy. `can_be_approved`: the flow leads to no address of the
    /// host itself.
    pub(crate) fn admit(
        &self,
        to: SocketAddr,
        name: Option<&HostName>,
        protocol: Protocol,
        can_be_approved: bool,
        now: Duration,
        counters: &UplinkCounters,
    ) -> Asked<Option<Admitted>> {
        let mut state = self.state();
        let gate = &state.gate;
        let mut decision = match (name, can_be_approved) {
            (Some(name), _) => gate.connect_to_name(name, to.port(), can_be_approved, now),
            (None, true) => gate.connect(to, protocol, now),
            (None, false) => gate.connect_by_rules(to, protocol, now),
        };
        let subject = Gate::subject(&decision, to, protocol).filter(|_| can_be_approved);
        let held = state.ask(subject, &mut decision.verdict, self.notes.as_ref(), now);
        if let Some(waiting) = held {
            return Asked::Held(waiting);
        }
        let permit = if self.learns {
            decision.verdict.action = Action::Allow;
            None
        } else {
            let EgressState { gate, uses, .. } = &mut *state;
            uses.admit(gate, &mut decision, to, protocol, now)
        };
        self.note(&state, Event::Connect, &decision, Some((to, protocol)), None);
        drop(state);
        let is_allowed = decision.verdict.is_allowed();
        let counter = if is_allowed { &counters.egress_allowed } else { &counters.egress_denied };
        counter.add(1);
        Asked::Decided(is_allowed.then_some(Admitted { decision, permit }))
    }

    /// Decides on a query of the guest, which may have to wait for an answer. `can_wait`: its packet can be held. Behind an upstream
    /// proxy, allowed names are answered by substitute addresses.
    pub fn query(
        &self,
        ends: QueryEnds,
        bytes: &[u8],
        can_wait: bool,
        upstream: Option<&UpstreamProxy>,
        now: Duration,
        counters: &UplinkCounters,
    ) -> Asked<QueryFate> {
        let mut state = self.state();
        let mut substitutes = upstream.map(UpstreamProxy::substitutes);
        let resolution =
            state.gate.query_or_substitute(ends, bytes, substitutes.as_deref_mut(), now);
        drop(substitutes);
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

    /// Decides on a new flow, which never waits for an answer. Returns `None` if it is denied.
    pub fn connect(
        &self,
        to: SocketAddr,
        protocol: Protocol,
        now: Duration,
        counters: &UplinkCounters,
    ) -> Option<Decision> {
        match self.admit(to, None, protocol, false, now, counters) {
            Asked::Decided(admitted) => admitted.map(|admitted| admitted.decision),
            Asked::Held(_) => None,
        }
    }

    /// Decides on the first bytes of an allowed connection. Returns `true` if it may go on.
    fn check(
        &self,
        to: SocketAddr,
        protocol: Protocol,
        admitted: &Admitted,
        shown: &Shown,
        now: Duration,
    ) -> bool {
        let mut state = self.state();
        let mut decision = state.gate.check(to, protocol, &admitted.decision, shown, now);
        let EgressState { gate, uses, .. } = &mut *state;
        uses.check(gate, admitted, &mut decision, to, protocol);
        drop(state);
        self.conclude(to, protocol, &admitted.decision, shown, decision)
    }

    /// Decides on the first bytes of an allowed TCP connection, which may have to wait for an answer.
    fn check_or_ask(
        &self,
        to: SocketAddr,
        admitted: &Admitted,
        shown: &Shown,
        now: Duration,
    ) -> Asked<bool> {
        let (mut state, allowed) = (self.state(), &admitted.decision);
        let mut decision = state.gate.check(to, Protocol::Tcp, allowed, shown, now);
        let subject = Gate::subject(&decision, to, Protocol::Tcp);
        let held = state.ask(subject, &mut decision.verdict, self.notes.as_ref(), now);
        if let Some(waiting) = held {
            return Asked::Held(waiting);
        }
        let EgressState { gate, uses, .. } = &mut *state;
        uses.check(gate, admitted, &mut decision, to, Protocol::Tcp);
        drop(state);
        Asked::Decided(self.conclude(to, Protocol::Tcp, allowed, shown, decision))
    }

    /// Records a decision on first bytes. Returns `true` if the connection may go on.
    fn conclude(
        &self,
        to: SocketAddr,
        protocol: Protocol,
        allowed: &Decision,
        shown: &Shown,
        mut decision: Decision,
    ) -> bool {
        let state = self.state();
        if self.learns {
            decision.verdict.action = Action::Allow;
        }
        // A connection whose name is the expected one needs no second line.
        if !decision.verdict.is_allowed() || decision.name != allowed.name {
            let sni = shown.name().map(HostName::to_string);
            self.note(&state, Event::Hello, &decision, Some((to, protocol)), sni);
        }
        decision.verdict.is_allowed()
    }

    /// Returns the response to a request of HTTP that [`Egress::check`] has denied.
    fn refusal_page(
        &self,
        to: SocketAddr,
        admitted: &Admitted,
        shown: &Shown,
        is_head: bool,
        now: Duration,
    ) -> Vec<u8> {
        let mut state = self.state();
        let allowed = &admitted.decision;
        let mut decision = state.gate.check(to, Protocol::Tcp, allowed, shown, now);
        let EgressState { gate, uses, .. } = &mut *state;
        uses.check(gate, admitted, &mut decision, to, Protocol::Tcp);
        let policy = state.gate.policy();
        let cause = decision.verdict.cause;
        let host = match (&decision.name, shown) {
            (Some(name), _) => name.to_string(),
            (None, Shown::Http(Host::Address(ip))) => SocketAddr::new(*ip, to.port()).to_string(),
            (None, _) => to.to_string(),
        };
        let mut text = format!("denied {host}, {}", policy.describe_to_guest(cause));
        let to = Some((to, Protocol::Tcp));
        if let Some(rule) = policy.missing_rule(cause, decision.name.as_ref(), to) {
            text.push_str("; the host allows it by --allow ");
            text.push_str(&rule);
        }
        refusal::page(&text, is_head)
    }

    /// Returns `true` if an allowed TCP connection may show this. Records nothing.
    fn allows(&self, to: SocketAddr, allowed: &Decision, shown: &Shown, now: Duration) -> bool {
        let decision = self.state().gate.check(to, Protocol::Tcp, allowed, shown, now);
        self.learns || decision.verdict.is_allowed()
    }

    /// Returns `true` if TCP connections to this name server are answered by the policy.
    pub fn answers_for(&self, server: SocketAddr, now: Duration) -> bool {
        !self.learns && self.state().gate.answers_for(server, now)
    }

    /// Decides on a datagram of a name server.
    pub fn answer(
        &self,
        ends: QueryEnds,
        bytes: Vec<u8>,
        now: Duration,
        counters: &UplinkCounters,
    ) -> Answered {
        self.read_answer(ends, Protocol::Udp, bytes, now, counters)
    }

    /// Decides on the answer to a query over TCP. A query without one fails. Returns the bytes for the guest.
    pub fn answer_over_tcp(
        &self,
        ends: QueryEnds,
        query: &[u8],
        answer: Option<Vec<u8>>,
        now: Duration,
        counters: &UplinkCounters,
    ) -> Option<Vec<u8>> {
        let answered =
            answer.map(|answer| self.read_answer(ends, Protocol::Tcp, answer, now, counters));
        match answered {
            Some(Answered::Send(answer)) => Some(answer),
            // The server has closed the connection, or its answer is one to another query.
            _ => self.state().gate.fail(ends, query),
        }
    }

    /// Decides on the answer to a query that the server was asked over `over`.
    fn read_answer(
        &self,
        ends: QueryEnds,
        over: Protocol,
        mut bytes: Vec<u8>,
        now: Duration,
        counters: &UplinkCounters,
    ) -> Answered {
        let mut state = self.state();
        match state.gate.answer(ends, over, &mut bytes, now) {
            AnswerFate::Deliver => Answered::Send(bytes),
            AnswerFate::Reply(reply) => Answered::Send(reply),
            AnswerFate::AskOverTcp(query) => Answered::AskOverTcp(query),
            AnswerFate::Drop => Answered::Nothing,
            AnswerFate::Replace(name, reply) => {
                counters.egress_rebinding.add(1);
                let verdict = Verdict { action: Action::Deny, cause: Cause::Rebinding };
                let inspection = Inspection::None;
                let decision = Decision { verdict, name: Some(name), inspection };
                self.note(&state, Event::Resolve, &decision, None, None);
                Answered::Send(reply)
            }
        }
    }
}

/// Policy in force, for all engines of a guest. One thread sets it, and each engine reads it when it has changed.
#[derive(Debug, Default)]
pub struct PolicyInForce {
    /// Number of changes. It grows while the lock is held, so an engine that sees a new number reads the new policy.
    version: Counter,
    egress: Mutex<Option<Arc<Egress>>>,
}

impl PolicyInForce {
    /// Creates it with the policy of the start, if there is one.
    pub fn new(egress: Option<Arc<Egress>>) -> Arc<PolicyInForce> {
        Arc::new(PolicyInForce { version: Counter::default(), egress: Mutex::new(egress) })
    }

    /// Returns the policy, if there is one.
    pub fn get(&self) -> Option<Arc<Egress>> {
        self.read().1
    }

    /// Returns the policy and its version.
    pub(crate) fn read(&self) -> (u64, Option<Arc<Egress>>) {
        let egress = self.egress.lock().unwrap_or_else(PoisonError::into_inner);
        (self.version.get(), egress.clone())
    }

    /// Returns `true` if the version in force is not `version`.
    pub(crate) fn is_newer_than(&self, version: u64) -> bool {
        self.version.get() != version
    }

    /// Replaces the policy. Records and pins of the old one stay. The first policy gets this queue of records.
    pub(crate) fn set(&self, policy: Policy, notes: Option<NoteQueue>) {
        let mut egress = self.egress.lock().unwrap_or_else(PoisonError::into_inner);
        match &*egress {
            Some(egress) => egress.replace(policy),
            None => {
                let first = Egress::new(policy, notes, false);
                first.record(Recording::Denials);
                *egress = Some(first);
            }
        }
        self.version.add(1);
    }
}
