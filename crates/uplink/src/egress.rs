//! Egress policy of a guest: connects the engines with the policy's gate.
//!
//! All engines of a guest share one [`Egress`]: a name may be asked for on one queue, and the connection to its
//! address opened on another. The lock is taken when a flow opens, for DNS messages and for first bytes; packets
//! of an open flow need none. Without a policy there is no `Egress`, and nothing of this module runs.

mod datagrams;
mod first_bytes;

use core::fmt;
use core::net::SocketAddr;
use core::time::Duration;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_policy::first::Shown;
use ringfence_policy::gate::{AnswerFate, Decision, Gate, Inspection, QueryEnds, QueryFate};
use ringfence_policy::http::Host;
use ringfence_policy::record::{Event, Record};
use ringfence_policy::{Action, Cause, HostName, Policy, Protocol, Verdict};
use ringfence_sys::counters::Counter;

use crate::access::Refusal;
use crate::counters::UplinkCounters;
pub use datagrams::{DatagramInspector, DatagramVerdict};
pub use first_bytes::{FirstBytes, FirstVerdict};

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

/// Event for the recorder.
#[derive(Clone, Debug)]
pub struct Note {
    pub record: Record,
    /// Destination that a learned policy must allow: name if known, address and port, protocol.
    pub learn: Option<(Option<HostName>, SocketAddr, Protocol)>,
}

/// Policy of a guest, shared by its engines.
pub struct Egress {
    state: Mutex<EgressState>,
    notes: Option<SyncSender<Option<Note>>>,
    /// Allows everything, and only records.
    learns: bool,
}

struct EgressState {
    gate: Gate,
    /// Number of first bytes that wait for a verdict.
    waiting: usize,
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
    pub fn new(
        policy: Policy,
        notes: Option<SyncSender<Option<Note>>>,
        learns: bool,
    ) -> Arc<Egress> {
        let state = Mutex::new(EgressState { gate: Gate::new(policy), waiting: 0 });
        Arc::new(Egress { state, notes, learns })
    }

    /// Replaces the policy. The engines judge their flows again by [`Egress::still_allows`].
    pub fn replace(&self, policy: Policy) {
        self.state().gate.replace(policy);
    }

    /// Returns the number of addresses that are pinned to a name now.
    pub fn pins(&self, now: Duration) -> usize {
        self.state().gate.pins().in_force(now)
    }

    fn state(&self) -> MutexGuard<'_, EgressState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decides on a new flow. Returns `None` if it is denied.
    pub fn connect(
        &self,
        to: SocketAddr,
        protocol: Protocol,
        now: Duration,
        counters: &UplinkCounters,
    ) -> Option<Decision> {
        let state = self.state();
        let mut decision = state.gate.connect(to, protocol, now);
        if self.learns {
            decision.verdict.action = Action::Allow;
        }
        self.note(&state.gate, Event::Connect, &decision, Some((to, protocol)), None);
        drop(state);
        let is_allowed = decision.verdict.is_allowed();
        let counter = if is_allowed { &counters.egress_allowed } else { &counters.egress_denied };
        counter.add(1);
        is_allowed.then_some(decision)
    }

    /// Records a new flow to an address that the guest cannot reach, whatever the policy is.
    pub(crate) fn refuse(&self, to: SocketAddr, protocol: Protocol, refusal: Refusal) {
        let Some(notes) = &self.notes else { return };
        let record = Record {
            event: Event::Connect,
            verdict: Action::Deny,
            name: None,
            address: Some(to.ip()),
            port: Some(to.port()).filter(|port| *port > 0),
            protocol: Some(protocol),
            reason: refusal.describe().to_owned(),
            sni: None,
            bytes_out: None,
            bytes_in: None,
        };
        let _ = notes.try_send(Some(Note { record, learn: None }));
    }

    /// Records the end of a TCP connection.
    pub fn close(&self, to: SocketAddr, name: Option<String>, bytes: CarriedBytes) {
        let Some(notes) = &self.notes else { return };
        let record = Record {
            event: Event::Close,
            verdict: Action::Allow,
            name,
            address: Some(to.ip()),
            port: Some(to.port()),
            protocol: Some(Protocol::Tcp),
            reason: "closed".to_owned(),
            sni: None,
            bytes_out: Some(bytes.from_guest),
            bytes_in: Some(bytes.to_guest),
        };
        let _ = notes.try_send(Some(Note { record, learn: None }));
    }

    /// Returns `true` if an open flow may stay under the policy in force. `name` is the one for which it was allowed.
    pub fn still_allows(
        &self,
        to: SocketAddr,
        protocol: Protocol,
        name: Option<&str>,
        now: Duration,
    ) -> bool {
        let name = name.and_then(|name| HostName::parse(name).ok());
        self.learns || self.state().gate.keeps(to, protocol, name.as_ref(), now)
    }

    /// Decides on the first bytes of an allowed connection. Returns `true` if it may go on.
    fn check(&self, to: SocketAddr, protocol: Protocol, allowed: &Decision, shown: &Shown) -> bool {
        let state = self.state();
        let mut decision = state.gate.check(to, protocol, allowed, shown);
        if self.learns {
            decision.verdict.action = Action::Allow;
        }
        // A connection whose name is the expected one needs no second line.
        if !decision.verdict.is_allowed() || decision.name != allowed.name {
            let name = match shown {
                Shown::Tls(hello) => hello.name.as_ref(),
                Shown::Http(Host::Name(name)) => Some(name),
                _ => None,
            };
            let sni = name.map(HostName::to_string);
            self.note(&state.gate, Event::Hello, &decision, Some((to, protocol)), sni);
        }
        decision.verdict.is_allowed()
    }

    /// Returns `true` if an allowed TCP connection may show this. Records nothing.
    fn allows(&self, to: SocketAddr, allowed: &Decision, shown: &Shown) -> bool {
        let decision = self.state().gate.check(to, Protocol::Tcp, allowed, shown);
        self.learns || decision.verdict.is_allowed()
    }

    /// Decides on a query of the guest. Returns the next step.
    pub fn query(
        &self,
        ends: QueryEnds,
        bytes: &[u8],
        now: Duration,
        counters: &UplinkCounters,
    ) -> QueryFate {
        let mut state = self.state();
        let resolution = state.gate.query(ends, bytes, now);
        if resolution.verdict.is_allowed() {
            counters.egress_queries.add(1);
        } else {
            counters.egress_queries_refused.add(1);
        }
        let (name, verdict) = (resolution.name, resolution.verdict);
        let decision = Decision { verdict, name, inspection: Inspection::None };
        self.note(&state.gate, Event::Resolve, &decision, None, None);
        resolution.fate
    }

    /// Decides on an answer of a name server. Returns the bytes for the guest.
    pub fn answer(
        &self,
        ends: QueryEnds,
        mut bytes: Vec<u8>,
        now: Duration,
        counters: &UplinkCounters,
    ) -> Option<Vec<u8>> {
        let mut state = self.state();
        match state.gate.answer(ends, &mut bytes, now) {
            AnswerFate::Deliver => Some(bytes),
            AnswerFate::Drop => None,
            AnswerFate::Replace(name, reply) => {
                counters.egress_rebinding.add(1);
                let verdict = Verdict { action: Action::Deny, cause: Cause::Rebinding };
                let inspection = Inspection::None;
                let decision = Decision { verdict, name: Some(name), inspection };
                self.note(&state.gate, Event::Resolve, &decision, None, None);
                Some(reply)
            }
        }
    }

    /// Sends an event to the recorder, if there is one.
    fn note(
        &self,
        gate: &Gate,
        event: Event,
        decision: &Decision,
        to: Option<(SocketAddr, Protocol)>,
        sni: Option<String>,
    ) {
        let Some(notes) = &self.notes else { return };
        let name = decision.name.as_ref();
        let record = Record {
            event,
            verdict: decision.verdict.action,
            name: name.map(HostName::to_string),
            address: to.map(|(to, _)| to.ip()),
            port: to.map(|(to, _)| to.port()).filter(|port| *port > 0),
            protocol: to.map(|(_, protocol)| protocol),
            reason: gate.policy().describe(decision.verdict.cause),
            sni,
            bytes_out: None,
            bytes_in: None,
        };
        let learn = to.map(|(to, protocol)| (name.cloned(), to, protocol));
        // The recorder bounds its rate; a guest that floods it loses its own lines.
        let _ = notes.try_send(Some(Note { record, learn }));
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

    /// Replaces the policy. Records and pins of the old one stay.
    pub(crate) fn set(&self, policy: Policy) {
        let mut egress = self.egress.lock().unwrap_or_else(PoisonError::into_inner);
        match &*egress {
            Some(egress) => egress.replace(policy),
            None => *egress = Some(Egress::new(policy, None, false)),
        }
        self.version.add(1);
    }
}
