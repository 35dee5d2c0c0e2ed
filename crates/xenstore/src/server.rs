//! The xenstore server as a state machine: messages in, messages out, no I/O.
//!
//! ```text
//!  connect ──> ConnectionId
//!  while may_read(id):  handle(id, header, payload)
//!  while let Some(id) = take_ready():  send what outbox(id) holds, or close when it is None
//! ```
//!
//! Every answer and every watch event goes to an [`Outbox`] that belongs to the server, because what
//! a connection has not read yet is bounded like all else that it can make the server hold:
//!
//! * Above [`Limits::output_soft`] its requests are not to be read ([`StoreServer::may_read`]).
//! * Above [`Limits::output_hard`], which only watch events can reach, the connection is dropped.
//! * A privileged connection that is behind holds up all unprivileged ones instead: they are
//!   what its events come from, and a guest must not be able to cut off the toolstack.
//!
//! A guest that keeps changing what the toolstack works on could starve it of commits. So after a
//! conflict the next transaction of a privileged connection holds up the unprivileged ones as well,
//! until it ends.

use super::access::{Actor, Change, ChangeKind};
use super::outbox::Outbox;
use super::path::NodePath;
use super::quota::{Limits, Quota, Refusal, Refusals, StoreCounters};
use super::transaction::Transaction;
use super::tree::{Node, Tree, without_domain};
use super::watch::{Versions, WatchTable};
use requests::{Answer, Then};
use ringfence_wire::grant::DomId;
use ringfence_wire::xenstore::{
    ErrorName, Header, Path, WatchPath, domain_path, emit_error, emit_event, emit_reply,
};
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

mod requests;

/// The domain that owns the root, and inherits what released domains leave.
const STORE_OWNER: DomId = DomId(0);

/// A connection's number; never used twice by one server.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ConnectionId(u64);

impl ConnectionId {
    /// The number, for use as an event loop's key.
    pub fn get(self) -> u64 {
        self.0
    }

    /// The connection with that number, if it came from [`get`](Self::get).
    pub fn from_key(key: u64) -> ConnectionId {
        ConnectionId(key)
    }
}

/// A domain has as many connections as it may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("domain {domain} has {limit} store connections already")]
pub struct TooManyConnections {
    /// The domain.
    pub domain: DomId,
    /// [`Limits::connections`].
    pub limit: usize,
}

/// What becomes of a released domain's nodes. Either way, no node grants anything any more to
/// the number, which another domain may get (XSA-322).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Leftovers {
    /// Its home and whatever else it owns is removed (XSA-417).
    Remove,
    /// All stays; domain 0 becomes the owner.
    Keep,
}

#[derive(Debug)]
struct Connection {
    actor: Actor,
    outbox: Outbox,
    transactions: BTreeMap<u32, Transaction>,
    next_transaction: u32,
    /// A privileged connection's last commit met a conflict.
    conflicted: bool,
}

/// The store. See the module's description.
#[derive(Debug)]
pub struct StoreServer {
    limits: Limits,
    tree: Tree,
    watches: WatchTable,
    connections: BTreeMap<ConnectionId, Connection>,
    next_connection: u64,
    introduced: BTreeSet<DomId>,
    ready: BTreeSet<ConnectionId>,
    /// The privileged connection whose transaction holds up the unprivileged ones.
    exclusive: Option<(ConnectionId, u32)>,
    counters: StoreCounters,
}

impl StoreServer {
    /// A store with nothing in it but the root, which domain 0 owns.
    pub fn new(limits: Limits) -> StoreServer {
        StoreServer {
            limits,
            tree: Tree::new(STORE_OWNER),
            watches: WatchTable::default(),
            connections: BTreeMap::new(),
            next_connection: 0,
            introduced: BTreeSet::new(),
            ready: BTreeSet::new(),
            exclusive: None,
            counters: StoreCounters::default(),
        }
    }

    /// The bounds in force.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// What was counted so far.
    pub fn counters(&self) -> &StoreCounters {
        &self.counters
    }

    /// A new connection on behalf of `domain`. Only `privileged` ones are exempt from permissions
    /// and quotas.
    ///
    /// # Errors
    /// [`TooManyConnections`], for an unprivileged one.
    pub fn connect(
        &mut self,
        domain: DomId,
        privileged: bool,
    ) -> Result<ConnectionId, TooManyConnections> {
        let actor = Actor { domain, privileged };
        let limit = self.limits.connections;
        if !privileged && self.of_domain(domain).count() >= limit {
            self.counters.refused.count(Quota::Connections);
            return Err(TooManyConnections { domain, limit });
        }
        let id = ConnectionId(self.next_connection);
        self.next_connection += 1;
        let connection = Connection {
            actor,
            outbox: Outbox::default(),
            transactions: BTreeMap::new(),
            next_transaction: 1,
            conflicted: false,
        };
        self.connections.insert(id, connection);
        Ok(id)
    }

    /// Ends a connection with its watches and transactions. Idempotent.
    pub fn disconnect(&mut self, id: ConnectionId) {
        if self.connections.remove(&id).is_some() {
            self.watches.remove_all(id);
            self.leave_exclusive(id, None);
            self.ready.insert(id);
        }
    }

    /// Whether the connection is still there: the server drops it when it does not read its output,
    /// and when its domain is released.
    pub fn is_connected(&self, id: ConnectionId) -> bool {
        self.connections.contains_key(&id)
    }

    fn of_domain(&self, domain: DomId) -> impl Iterator<Item = (ConnectionId, &Connection)> {
        self.connections
            .iter()
            .filter(move |(_, connection)| connection.actor.domain == domain)
            .map(|(id, connection)| (*id, connection))
    }

    /// Says that `domain` exists now. Fires `@introduceDomain`, once.
    pub fn introduce(&mut self, domain: DomId) {
        if self.introduced.insert(domain) {
            self.fire_special(WatchPath::IntroduceDomain.as_str());
        }
    }

    /// Says that `domain` is gone: ends its unprivileged connections, settles what it owned as
    /// `leftovers` says, and fires `@releaseDomain` if it had been introduced. Idempotent.
    pub fn release(&mut self, domain: DomId, leftovers: Leftovers) {
        let gone: Vec<ConnectionId> = self
            .of_domain(domain)
            .filter(|(_, connection)| !connection.actor.privileged)
            .map(|(id, _)| id)
            .collect();
        for id in gone {
            self.disconnect(id);
        }
        if domain != STORE_OWNER {
            self.settle_nodes(domain, leftovers);
        }
        if self.introduced.remove(&domain) {
            self.fire_special(WatchPath::ReleaseDomain.as_str());
        }
    }

    fn settle_nodes(&mut self, domain: DomId, leftovers: Leftovers) {
        let before = self.tree.clone();
        let mut changes = Vec::new();
        if leftovers == Leftovers::Remove {
            let mut doomed = self.tree.topmost(|node| node.owner() == domain);
            let home = domain_path(domain);
            let home = Path::parse(home.as_bytes()).map(|home| NodePath::resolve(home, domain));
            doomed.extend(home.into_iter().flatten());
            for path in doomed {
                if self.tree.remove(path.as_str()) {
                    changes.push(Change { path, kind: ChangeKind::Removed });
                }
            }
        }
        let names_it = |node: &Node| {
            let mut entries = node.permissions().entries().iter();
            entries.any(|entry| entry.domain == domain)
        };
        for path in self.tree.all(names_it) {
            if let Some(node) = self.tree.get(path.as_str()) {
                let list = without_domain(node.permissions(), domain, STORE_OWNER);
                self.tree.set_permissions(path.as_str(), &list);
            }
        }
        self.fire(&before, &changes);
    }

    /// Whether a request of this connection may be read and handled now. If not, ask again when
    /// output was sent or other requests were handled.
    pub fn may_read(&self, id: ConnectionId) -> bool {
        let Some(connection) = self.connections.get(&id) else {
            return false;
        };
        if connection.outbox.cost() > self.limits.output_soft {
            return false;
        }
        connection.actor.privileged || !self.unprivileged_wait()
    }

    fn unprivileged_wait(&self) -> bool {
        let behind = |connection: &Connection| {
            connection.actor.privileged && connection.outbox.cost() > self.limits.output_soft
        };
        self.exclusive.is_some() || self.connections.values().any(behind)
    }

    /// A connection with something to do: output to send, or to be closed because it is no longer
    /// [connected](Self::is_connected). Each is named once until there is more.
    pub fn take_ready(&mut self) -> Option<ConnectionId> {
        self.ready.pop_first()
    }

    /// What is to be sent to the connection; `None` when it is no longer there.
    pub fn outbox(&mut self, id: ConnectionId) -> Option<&mut Outbox> {
        self.connections.get_mut(&id).map(|connection| &mut connection.outbox)
    }

    /// Does one request. The payload is what came with the header; its length is bounded by
    /// whoever cut it from the stream. Does nothing for a connection that is no longer there.
    pub fn handle(&mut self, id: ConnectionId, header: &Header, payload: &[u8]) {
        if !self.is_connected(id) {
            return;
        }
        self.counters.requests += 1;
        let answer = self.answer(id, header, payload);
        let mut message = Vec::new();
        let then = match answer {
            Ok(Answer { payload, then }) => match emit_reply(header, &payload, &mut message) {
                Ok(()) => then,
                Err(_) => {
                    emit_error(header, ErrorName::TooBig, &mut message);
                    Then::Nothing
                }
            },
            Err(refusal) => {
                self.count_refusal(refusal);
                emit_error(header, refusal.error_name(), &mut message);
                Then::Nothing
            }
        };
        self.push_reply(id, message);
        match then {
            Then::Nothing => {}
            Then::Changed(before, changes) => self.fire(&before, &changes),
            Then::Watching(name, token) => self.push_events(&[(id, name, token)]),
        }
    }

    fn count_refusal(&mut self, refusal: Refusal) {
        match refusal {
            Refusal::Quota(quota) => self.counters.refused.count(quota),
            Refusal::Error(ErrorName::Invalid | ErrorName::NotImplemented) => {
                self.counters.malformed += 1;
            }
            Refusal::Error(ErrorName::Access | ErrorName::NotPermitted) => {
                self.counters.denied += 1;
            }
            Refusal::Error(ErrorName::Again) => self.counters.conflicts += 1,
            Refusal::Error(_) => {}
        }
    }

    fn push_reply(&mut self, id: ConnectionId, message: Vec<u8>) {
        let soft = self.limits.output_soft;
        if let Some(connection) = self.connections.get_mut(&id) {
            let before = connection.outbox.cost();
            connection.outbox.push_reply(message);
            if before <= soft && connection.outbox.cost() > soft {
                self.counters.output_paused += 1;
            }
            self.ready.insert(id);
        }
    }

    fn fire(&mut self, before: &Tree, changes: &[Change]) {
        for change in changes {
            let versions = Versions { before, after: &self.tree };
            let mut events = Vec::new();
            self.watches.match_change(change, versions, |watch, path| {
                let name = watch.name(path).to_owned();
                events.push((watch.connection, name, watch.token.clone()));
            });
            self.push_events(&events);
        }
    }

    fn fire_special(&mut self, name: &str) {
        let mut events = Vec::new();
        self.watches.match_special(name, |watch, name| {
            events.push((watch.connection, name.to_owned(), watch.token.clone()));
        });
        self.push_events(&events);
    }

    fn push_events(&mut self, events: &[(ConnectionId, String, Box<[u8]>)]) {
        let mut message = Vec::new();
        for (id, path, token) in events {
            message.clear();
            // Tokens are bounded so that every path fits beside them.
            if emit_event(path, token, &mut message).is_ok() {
                self.push_event(*id, &message);
            }
        }
    }

    fn push_event(&mut self, id: ConnectionId, message: &[u8]) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let before = connection.outbox.cost();
        if !connection.outbox.push_event(message) {
            self.counters.events_merged += 1;
            return;
        }
        self.counters.events += 1;
        let cost = connection.outbox.cost();
        if before <= self.limits.output_soft && cost > self.limits.output_soft {
            self.counters.output_paused += 1;
        }
        let hard = if connection.actor.privileged {
            self.limits.output_hard_privileged
        } else {
            self.limits.output_hard
        };
        self.ready.insert(id);
        if cost > hard {
            self.counters.output_overrun += 1;
            self.disconnect(id);
        }
    }

    /// Checks that accounts and bounds hold; for tests and fuzzing.
    #[doc(hidden)]
    pub fn audit(&self) -> Result<(), String> {
        self.tree.audit()?;
        for (id, connection) in &self.connections {
            let domain = connection.actor.domain;
            if connection.actor.privileged {
                continue;
            }
            let open: usize =
                self.of_domain(domain).map(|(_, connection)| connection.transactions.len()).sum();
            let used = [
                ("watches", self.watches.count(domain), self.limits.watches),
                ("transactions", open, self.limits.transactions),
                ("output", connection.outbox.cost(), self.limits.output_hard),
            ];
            for (what, used, limit) in used {
                if used > limit {
                    return Err(format!("{id:?} of domain {domain} has {used} {what} of {limit}"));
                }
            }
        }
        Ok(())
    }

    /// Whether no connection, watch or hold-up is left; for tests and fuzzing.
    #[cfg(any(test, feature = "test-utils"))]
    pub(super) fn is_idle(&self) -> bool {
        self.connections.is_empty() && self.watches.is_empty() && self.exclusive.is_none()
    }

    /// Nodes that `domain` owns.
    pub fn nodes_of(&self, domain: DomId) -> usize {
        self.tree.usage(domain).nodes
    }

    /// Bytes of names and values in nodes that `domain` owns.
    pub fn bytes_of(&self, domain: DomId) -> usize {
        self.tree.usage(domain).bytes
    }

    /// Refusals by quota so far.
    pub fn refusals(&self) -> &Refusals {
        &self.counters.refused
    }
}
