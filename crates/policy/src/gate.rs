//! Gate of one guest: applies a policy to its DNS queries, connections and first bytes.
//!
//! ```text
//! query ----> resolve ----> server        refused names never reach a server
//! answer <--- pin <-------- server        addresses are pinned to the name that was asked for
//! SYN ------> connect ----> server        rules for addresses, then the names of the address's pins
//! hello ----> check ------> server        the name that the client shows
//! ```
//!
//! Queries come as datagrams or over TCP. A server's datagram may be incomplete: then the caller asks the server over TCP
//! ([`AnswerFate::AskOverTcp`]). An answer that is longer than the guest accepts in a datagram makes the guest ask over TCP.
//! Each query gets a reply, also if the server's answer cannot be read.
//!
//! The caller owns sockets and clock. All tables are bounded.

use core::net::{IpAddr, SocketAddr};
use core::time::Duration;
use std::collections::{HashMap, HashSet, VecDeque};

use crate::approvals::{Approvals, Host as SubjectHost, Subject};
use crate::dns::{Code, NotAQuery, Query};
use crate::first::Shown;
use crate::http::Host;
use crate::name::HostName;
use crate::pins::{self, Pins};
use crate::policy::{AskResult, Cause, Policy, Verdict};
use crate::ranges::{is_approvable, is_special};
use crate::refusal;
use crate::rule::{Action, Protocol};
use crate::substitutes::Substitutes;

mod open_flows;
pub use open_flows::FirstRead;

/// Maximum number of queries without an answer.
pub const PENDING_MAX: usize = 1024;
/// Time for which an answer is accepted.
pub const ANSWER_WITHIN: Duration = Duration::from_secs(30);
/// Maximum number of addresses that one answer pins.
const PINNED_MAX: usize = 256;
/// Maximum length in bytes of the part of a name that a wildcard stands for.
pub const WILDCARD_PART_MAX: usize = 64;
/// New names below wildcards: number at once, and interval after which one more is possible.
pub const WILDCARD_BURST: u32 = 100;
const WILDCARD_EVERY: Duration = Duration::from_millis(500);
/// Number of names below wildcards that are remembered as not new.
const WILDCARD_KNOWN: usize = 1024;
/// Ports on which strict policies require a readable name.
const NAMED_PORTS: [u16; 2] = [80, 443];

/// Verdict on a destination that was approved.
const APPROVED: Verdict =
    Verdict { action: Action::Allow, cause: Cause::Asked(AskResult::Approved) };

/// Ways to inspect the first bytes of an allowed connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inspection {
    None,
    /// A name that a rule denies ends the connection.
    DeniedNames,
    /// A name that no rule allows ends the connection.
    AllowedNames,
}

/// Verdict on a connection, with the reading that it still needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    pub verdict: Verdict,
    /// Name for which the address was pinned, or that the connection shows.
    pub name: Option<HostName>,
    /// Inspection that an allowed connection needs.
    pub inspection: Inspection,
}

/// Decision on a query, with the name asked for if a rule can have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolution {
    pub fate: QueryFate,
    pub name: Option<HostName>,
    pub verdict: Verdict,
    /// Destination about which a person can be asked, if the query is refused.
    pub subject: Option<Subject>,
}

/// Next step for a query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QueryFate {
    /// These bytes go to the server.
    Forward(Vec<u8>),
    /// These bytes go back to the guest.
    Reply(Vec<u8>),
    Drop,
}

/// Next step for an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerFate {
    /// The answer goes to the guest.
    Deliver,
    /// The answer contains a private address for this name. These bytes go to the guest instead.
    Replace(HostName, Vec<u8>),
    /// These bytes go to the guest instead: the answer cannot be read, or is too long for a datagram.
    Reply(Vec<u8>),
    /// The answer is incomplete. The query stays, and these bytes go to the server over TCP.
    AskOverTcp(Vec<u8>),
    /// The answer belongs to no query.
    Drop,
}

/// Addresses and ports between which a query and its answer are exchanged.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct QueryEnds {
    pub guest: SocketAddr,
    pub server: SocketAddr,
    /// Protocol of the guest's query: UDP or TCP.
    pub over: Protocol,
}

/// Ends of a query, and its id.
type PendingKey = (QueryEnds, u16);

struct Pending {
    query: Query,
    until: Duration,
    /// Protocol over which the server was asked last.
    asked_over: Protocol,
}

/// Limit of new names below wildcards.
#[derive(Default)]
struct WildcardLimit {
    known: HashSet<HostName>,
    order: VecDeque<HostName>,
    /// Time at which the whole burst is available again.
    full_at: Duration,
}

impl WildcardLimit {
    fn accepts(&mut self, name: &HostName, parent: &HostName, now: Duration) -> bool {
        let part = name.as_str().len() - parent.as_str().len() - 1;
        if part > WILDCARD_PART_MAX {
            return false;
        }
        if self.known.contains(name) {
            return true;
        }
        let full_at = self.full_at.max(now) + WILDCARD_EVERY;
        if full_at > now + WILDCARD_EVERY * WILDCARD_BURST {
            return false;
        }
        self.full_at = full_at;
        if self.order.len() >= WILDCARD_KNOWN
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
        self.known.insert(name.clone());
        self.order.push_back(name.clone());
        true
    }
}

/// Policy of one guest with its pins and pending queries.
pub struct Gate {
    policy: Policy,
    pins: Pins,
    pending: HashMap<PendingKey, Pending>,
    /// Keys of `pending` in the order of their end.
    pending_order: VecDeque<(Duration, PendingKey)>,
    wildcards: WildcardLimit,
    approvals: Approvals,
}

impl Gate {
    /// Creates a gate without pins.
    pub fn new(policy: Policy) -> Gate {
        Gate {
            policy,
            pins: Pins::default(),
            pending: HashMap::new(),
            pending_order: VecDeque::new(),
            wildcards: WildcardLimit::default(),
            approvals: Approvals::default(),
        }
    }

    /// Returns the policy in force.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Returns the table of pinned addresses.
    pub fn pins(&self) -> &Pins {
        &self.pins
    }

    /// Replaces the policy, and ends all approvals. Pins stay: the new policy decides on their names.
    pub fn replace(&mut self, policy: Policy) {
        self.policy = policy;
        self.approvals = Approvals::default();
    }

    /// Allows a destination from now on, or until a time. Flows that were opened by then stay. Returns `false` if there are too
    /// many approvals.
    pub fn approve(&mut self, subject: &Subject, until: Option<Duration>) -> bool {
        self.approvals.add(subject, until)
    }

    /// Returns the destination about which a person can be asked, if a flow was denied because no rule covers it.
    pub fn subject(decision: &Decision, to: SocketAddr, protocol: Protocol) -> Option<Subject> {
        match decision.verdict {
            Verdict { action: Action::Deny, cause: Cause::NoRule } => {
                Subject::of_flow(Some(decision.name.as_ref()?), to, protocol)
            }
            Verdict { action: Action::Deny, cause: Cause::NoPin | Cause::Special } => {
                Subject::of_flow(None, to, protocol)
            }
            _ => None,
        }
    }

    /// Decides on a query of the guest.
    pub fn query(&mut self, ends: QueryEnds, bytes: &[u8], now: Duration) -> Resolution {
        self.query_or_substitute(ends, bytes, None, now)
    }

    /// Decides on a query as [`Gate::query`] does. With `substitutes`, allowed names are answered from that table, and no server is
    /// asked.
    pub fn query_or_substitute(
        &mut self,
        ends: QueryEnds,
        bytes: &[u8],
        substitutes: Option<&mut Substitutes>,
        now: Duration,
    ) -> Resolution {
        let malformed = |fate| Resolution {
            fate,
            name: None,
            verdict: Verdict::deny(Cause::DnsForm),
            subject: None,
        };
        let query = match Query::parse(bytes) {
            Ok(query) => query,
            Err(NotAQuery::Ignore) => return malformed(QueryFate::Drop),
            Err(NotAQuery::Reply(reply)) => return malformed(QueryFate::Reply(reply)),
        };
        let verdict = self.resolve(&query, ends.server, now);
        if let Some(reply) = self.explain(&query, verdict) {
            let verdict = Verdict::allow(Cause::Why);
            return Resolution {
                fate: QueryFate::Reply(reply),
                name: None,
                verdict,
                subject: None,
            };
        }
        let name = query.name().cloned();
        let is_unknown = verdict == Verdict::deny(Cause::NoRule) && query.is_for_addresses();
        let subject = name.as_ref().filter(|_| is_unknown).and_then(Subject::of_query);
        let fate = match verdict.action {
            Action::Deny => QueryFate::Reply(query.reply(Code::Refused)),
            // Such records hold addresses and keys that no pin follows. Programs ask for addresses, too.
            Action::Allow if query.is_service_binding() => {
                QueryFate::Reply(query.reply(Code::NoData))
            }
            Action::Allow => match substitutes {
                Some(substitutes) => QueryFate::Reply(substitutes.answer(&query, now)),
                None => {
                    let bytes = query.to_server();
                    self.remember((ends, query.id()), query, now);
                    QueryFate::Forward(bytes)
                }
            },
        };
        Resolution { fate, name, verdict, subject }
    }

    /// Answers a query for the TXT records of `why.HOST` by the verdict on `HOST`. A name that a rule allows is never such a
    /// question.
    fn explain(&self, query: &Query, verdict: Verdict) -> Option<Vec<u8>> {
        if verdict.is_allowed() || !query.is_text() {
            return None;
        }
        let host = refusal::asked_about(query.name()?)?;
        let text = refusal::answer(&self.policy, &host, self.policy.resolve(&host));
        Some(query.text_reply(&text))
    }

    fn resolve(&mut self, query: &Query, server: SocketAddr, now: Duration) -> Verdict {
        let is_open = self.policy.default_action() == Action::Allow
            || self
                .policy
                .address(server.ip(), server.port(), Protocol::Udp)
                .is_some_and(Verdict::is_allowed);
        let no_rule = if is_open { Action::Allow } else { Action::Deny };
        let otherwise = Verdict { action: no_rule, cause: Cause::NoRule };
        let Some(name) = query.name() else { return otherwise };
        let verdict = self.policy.resolve(name);
        let is_approved = verdict.cause == Cause::NoRule && self.approvals.resolves(name, now);
        let verdict = if is_approved { APPROVED } else { verdict };
        if !verdict.is_allowed() {
            return if verdict.cause == Cause::NoRule { otherwise } else { verdict };
        }
        if query.is_bulk() && !is_open {
            return Verdict::deny(Cause::DnsForm);
        }
        match self.policy.wildcard_of(name) {
            Some(parent) if !is_approved && !self.wildcards.accepts(name, parent, now) => {
                Verdict::deny(Cause::WildcardLimit)
            }
            _ => verdict,
        }
    }

    fn remember(&mut self, key: PendingKey, query: Query, now: Duration) {
        while let Some(&(until, first)) = self.pending_order.front()
            && (until <= now || self.pending_order.len() >= PENDING_MAX)
        {
            self.pending_order.pop_front();
            if self.pending.get(&first).is_some_and(|pending| pending.until == until) {
                self.pending.remove(&first);
            }
        }
        let until = now + ANSWER_WITHIN;
        self.pending.insert(key, Pending { query, until, asked_over: key.0.over });
        self.pending_order.push_back((until, key));
    }

    /// Decides on an answer of a server, which came `over` this protocol. Pins its addresses, and spells its question as the
    /// guest did.
    pub fn answer(
        &mut self,
        ends: QueryEnds,
        over: Protocol,
        bytes: &mut [u8],
        now: Duration,
    ) -> AnswerFate {
        let Some(&[high, low]) = bytes.first_chunk() else { return AnswerFate::Drop };
        let key = (ends, u16::from_be_bytes([high, low]));
        let pending = self.pending.get_mut(&key);
        let Some(pending) = pending.filter(|known| known.until > now && known.asked_over == over)
        else {
            return AnswerFate::Drop;
        };
        let Some(answer) = pending.query.read_answer(bytes) else { return AnswerFate::Drop };
        if answer.is_truncated && over == Protocol::Udp {
            pending.asked_over = Protocol::Tcp;
            return AnswerFate::AskOverTcp(pending.query.to_server());
        }
        let Some(Pending { query, .. }) = self.pending.remove(&key) else {
            return AnswerFate::Drop;
        };
        let Some(addresses) = answer.addresses else {
            return AnswerFate::Reply(query.reply(Code::ServFail));
        };
        if let Some(name) = query.name() {
            let is_accepted = |(ip, _): &(IpAddr, u32)| self.policy.accepts_in_answers(*ip);
            if !addresses.iter().all(is_accepted) {
                return AnswerFate::Replace(name.clone(), query.reply(Code::Refused));
            }
            let name = self.policy.shared(name);
            for &(ip, ttl) in addresses.iter().take(PINNED_MAX) {
                self.pins.add(name, ip, pins::life(ttl), now);
            }
        }
        if ends.over == Protocol::Udp && bytes.len() > query.datagram_max() {
            return AnswerFate::Reply(query.truncated());
        }
        AnswerFate::Deliver
    }

    /// Ends a query that the server does not answer over TCP. Returns the reply for the guest.
    pub fn fail(&mut self, ends: QueryEnds, query: &[u8]) -> Option<Vec<u8>> {
        let &[high, low] = query.first_chunk()?;
        let pending = self.pending.remove(&(ends, u16::from_be_bytes([high, low])))?;
        Some(pending.query.reply(Code::ServFail))
    }

    /// Returns `true` if TCP connections to this name server are answered here: no rule lets the guest reach the server
    /// itself.
    pub fn answers_for(&self, server: SocketAddr, now: Duration) -> bool {
        !self.connect(server, Protocol::Tcp, now).verdict.is_allowed()
    }

    /// Decides on a connection to an address. Protocols without ports use port 0.
    pub fn connect(&self, to: SocketAddr, protocol: Protocol, now: Duration) -> Decision {
        self.decide(to, protocol, now, true)
    }

    /// Decides on a connection to an address that no approval opens, as [`Gate::connect`] does.
    pub fn connect_by_rules(&self, to: SocketAddr, protocol: Protocol, now: Duration) -> Decision {
        self.decide(to, protocol, now, false)
    }

    /// Decides on a connection to a name whose address only a proxy knows. Rules for addresses do not concern it.
    pub fn connect_to_name(
        &self,
        name: &HostName,
        port: u16,
        can_be_approved: bool,
        now: Duration,
    ) -> Decision {
        let verdict = match can_be_approved {
            true => self.name(name, port, Protocol::Tcp, Some(now)),
            false => self.policy.name(name, port, Protocol::Tcp),
        };
        self.decision_on_name(name, verdict)
    }

    fn decision_on_name(&self, name: &HostName, verdict: Verdict) -> Decision {
        let inspection = match (verdict.is_allowed(), self.policy.default_action()) {
            (true, Action::Deny) => Inspection::AllowedNames,
            (true, Action::Allow) => self.denied_names(),
            (false, _) => Inspection::None,
        };
        Decision { verdict, name: Some(name.clone()), inspection }
    }

    /// Returns the inspection of connections that no name opens.
    fn denied_names(&self) -> Inspection {
        if self.policy.denies_names() { Inspection::DeniedNames } else { Inspection::None }
    }

    fn decide(
        &self,
        to: SocketAddr,
        protocol: Protocol,
        now: Duration,
        can_be_approved: bool,
    ) -> Decision {
        let (ip, port) = (to.ip(), to.port());
        let can_be_approved = can_be_approved && is_approvable(ip);
        let denied_names = self.denied_names();
        if let Some(verdict) = self.policy.address(ip, port, protocol) {
            let name = self.pins.names(ip, now).next().cloned();
            return Decision { verdict, name, inspection: denied_names };
        }
        let host = || SubjectHost::Address(ip);
        if can_be_approved && self.approvals.covers(host, port, protocol, Some(now)) {
            let name = self.pins.names(ip, now).next().cloned();
            return Decision { verdict: APPROVED, name, inspection: denied_names };
        }
        let is_open = self.policy.default_action() == Action::Allow;
        let deny = |cause| {
            let name = self.pins.names(ip, now).next().cloned();
            Decision { verdict: Verdict::deny(cause), name, inspection: Inspection::None }
        };
        if !is_open && is_special(ip) {
            return deny(Cause::Special);
        }
        let mut refused = None;
        for name in self.pins.names(ip, now) {
            let verdict = match can_be_approved {
                true => self.name(name, port, protocol, Some(now)),
                false => self.policy.name(name, port, protocol),
            };
            let name = Some(name.clone());
            if verdict.is_allowed() {
                let inspection = if is_open { denied_names } else { Inspection::AllowedNames };
                return Decision { verdict, name, inspection };
            }
            refused.get_or_insert(Decision { verdict, name, inspection: Inspection::None });
        }
        if is_open {
            let verdict = self.policy.otherwise(protocol);
            return refused.unwrap_or(Decision { verdict, name: None, inspection: denied_names });
        }
        refused.unwrap_or_else(|| deny(Cause::NoPin))
    }

    /// Iterates over decisions that allow a connection by the rules for the names of its address, whose first bytes show the right
    /// one.
    pub fn by_names(
        &self,
        to: SocketAddr,
        protocol: Protocol,
        now: Duration,
    ) -> impl Iterator<Item = Decision> {
        let inspection = Inspection::AllowedNames;
        self.pins.names(to.ip(), now).filter_map(move |name| {
            let verdict = self.policy.name(name, to.port(), protocol);
            let name = Some(name.clone());
            verdict.is_allowed().then_some(Decision { verdict, name, inspection })
        })
    }

    /// Returns the verdict on a connection to a name, by a rule or an approval. Without a time, approvals that are over count, too.
    fn name(
        &self,
        name: &HostName,
        port: u16,
        protocol: Protocol,
        now: Option<Duration>,
    ) -> Verdict {
        let verdict = self.policy.name(name, port, protocol);
        let is_unknown = verdict == Verdict::deny(Cause::NoRule);
        let host = || SubjectHost::Name(name.clone());
        let is_approved = is_unknown && self.approvals.covers(host, port, protocol, now);
        if is_approved { APPROVED } else { verdict }
    }

    /// Decides on an allowed connection by its first bytes.
    pub fn check(
        &self,
        to: SocketAddr,
        protocol: Protocol,
        allowed: &Decision,
        shown: &Shown,
        now: Duration,
    ) -> Decision {
        let inspection = Inspection::None;
        let deny = |cause| Decision { verdict: Verdict::deny(cause), name: None, inspection };
        let nameless = || match self.policy.is_strict() {
            true => deny(Cause::NoReadableName),
            false => Decision { inspection, ..allowed.clone() },
        };
        let is_named = NAMED_PORTS.contains(&to.port());
        match shown {
            Shown::Malformed => deny(Cause::Malformed),
            Shown::Unknown if self.needs_quic(to, protocol, allowed) => deny(Cause::Quic),
            Shown::OtherQuic if allowed.inspection == Inspection::AllowedNames && is_named => {
                deny(Cause::Quic)
            }
            Shown::Unknown | Shown::OtherQuic if is_named => nameless(),
            Shown::Unknown | Shown::OtherQuic => Decision { inspection, ..allowed.clone() },
            Shown::Tls(hello) if hello.has_ech && self.policy.is_strict() => {
                Decision { name: hello.name.clone(), ..deny(Cause::NoReadableName) }
            }
            Shown::Tls(hello) => match &hello.name {
                Some(name) => self.check_name(to, protocol, allowed, name, now),
                None => nameless(),
            },
            Shown::Http(Host::Name(name)) => self.check_name(to, protocol, allowed, name, now),
            Shown::Http(Host::Address(ip)) if *ip != to.ip() => match allowed.inspection {
                Inspection::AllowedNames => deny(Cause::NoRule),
                _ => Decision { inspection, ..allowed.clone() },
            },
            Shown::Http(Host::Address(_) | Host::Absent) => nameless(),
        }
    }

    /// Returns `true` if a UDP association must be QUIC with a readable name: a rule for a name without `/udp` means
    /// the web.
    fn needs_quic(&self, to: SocketAddr, protocol: Protocol, allowed: &Decision) -> bool {
        protocol == Protocol::Udp
            && allowed.inspection == Inspection::AllowedNames
            && NAMED_PORTS.contains(&to.port())
            && !self.policy.names_protocol(allowed.verdict.cause)
    }

    fn check_name(
        &self,
        to: SocketAddr,
        protocol: Protocol,
        allowed: &Decision,
        name: &HostName,
        now: Duration,
    ) -> Decision {
        // The approval that has opened the connection may be over by now.
        let is_opened_by_it = allowed.verdict == APPROVED && allowed.name.as_ref() == Some(name);
        let now = Some(now).filter(|_| !is_opened_by_it);
        let verdict = match is_approvable(to.ip()) {
            true => self.name(name, to.port(), protocol, now),
            false => self.policy.name(name, to.port(), protocol),
        };
        let is_irrelevant = allowed.inspection == Inspection::DeniedNames
            && !matches!(verdict.cause, Cause::Rule(_));
        let verdict = if is_irrelevant { allowed.verdict } else { verdict };
        Decision { verdict, name: Some(name.clone()), inspection: Inspection::None }
    }
}

#[cfg(test)]
mod tests;
