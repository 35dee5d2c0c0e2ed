//! Xenstore server as a state machine: messages in, messages out, no I/O.
//!
//! ```text
//!  connect ──> ConnectionId
//!  while may_read(id):  handle(id, header, payload)
//!  while let Some(id) = take_ready():  send what output(id) holds, or close when it is None
//! ```
//!
//! Every reply and every watch event goes to the [`OutputQueue`] of its connection. The server owns the
//! queues, because unread output is limited like everything else that a client makes the server keep:
//!
//! * Above [`Limits::output_soft`] the connection's requests must not be read
//!   ([`StoreServer::may_read`]).
//! * Above [`Limits::output_hard`] the connection is dropped. Only watch events can reach that limit.
//! * A privileged connection above its soft limit pauses all unprivileged connections instead. They
//!   cause its events, and a guest must not be able to disconnect the toolstack.
//!
//! A guest that keeps changing the toolstack's nodes could make every commit of the toolstack fail. So
//! the first transaction of a privileged connection after a conflict pauses the unprivileged
//! connections until it ends.

use super::access::{Actor, Change, ChangeKind};
use super::output::OutputQueue;
use super::path::NodePath;
use super::quota::{Limits, Quota, QuotaRefusal, Refusals, StoreCounters};
use super::transaction::Transaction;
use super::tree::{Node, Tree, without_domain};
use super::watch::{Versions, WatchTable};
use requests::{Effect, StoreAnswer};
use ringfence_wire::grant::DomId;
use ringfence_wire::xenstore::{
    ErrorName, Header, Path, WatchPath, domain_path, emit_error, emit_event, emit_reply,
};
use std::collections::{BTreeMap, BTreeSet};
use thiserror::Error;

mod requests;

/// Domain that owns the root, and the nodes that released domains leave.
const STORE_OWNER: DomId = DomId(0);

/// Id of a connection; never reused by one server.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ConnectionId(u64);

impl ConnectionId {
    /// Returns the id as a number, for use as an event loop's key.
    pub fn get(self) -> u64 {
        self.0
    }

    /// Returns the id with the number that [`get`](Self::get) returned.
    pub fn from_key(key: u64) -> ConnectionId {
        ConnectionId(key)
    }
}

/// Refusal of a connection above the limit of its domain.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[error("domain {domain} has {limit} store connections already")]
pub struct TooManyConnections {
    pub domain: DomId,
    /// Value of [`Limits::connections`].
    pub limit: usize,
}

/// Treatment of a released domain's nodes. In both cases no permission list names the domain id
/// afterwards, because another domain may get the same id (XSA-322).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Leftovers {
    /// The domain's home and all other nodes that it owns are removed (XSA-417).
    Remove,
    /// All nodes stay, and domain 0 becomes their owner.
    Keep,
}

#[derive(Debug)]
struct StoreConnection {
    actor: Actor,
    output: OutputQueue,
    transactions: BTreeMap<u32, Transaction>,
    next_transaction: u32,
    /// Set if the last commit of a privileged connection met a conflict.
    conflicted: bool,
}

/// State of the store: tree, watches, connections and transactions. See the module's description.
#[derive(Debug)]
pub struct StoreServer {
    limits: Limits,
    tree: Tree,
    watches: WatchTable,
    connections: BTreeMap<ConnectionId, StoreConnection>,
    next_connection: u64,
    introduced: BTreeSet<DomId>,
    ready: BTreeSet<ConnectionId>,
    /// Privileged connection, and its transaction that pauses the unprivileged connections.
    exclusive: Option<(ConnectionId, u32)>,
    counters: StoreCounters,
}

impl StoreServer {
    /// Creates a store with only the root, which domain 0 owns.
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

    /// Returns the limits in force.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Returns the counters of this server.
    pub fn counters(&self) -> &StoreCounters {
        &self.counters
    }

    /// Adds a connection of `domain`. Only `privileged` connections are exempt from permissions and
    /// quotas.
    ///
    /// # Errors
    /// Returns [`TooManyConnections`] for an unprivileged connection above the limit.
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
        let connection = StoreConnection {
            actor,
            output: OutputQueue::default(),
            transactions: BTreeMap::new(),
            next_transaction: 1,
            conflicted: false,
        };
        self.connections.insert(id, connection);
        Ok(id)
    }

    /// Ends a connection with its watches and transactions. Does nothing for an ended connection.
    pub fn disconnect(&mut self, id: ConnectionId) {
        if self.connections.remove(&id).is_some() {
            self.watches.remove_all(id);
            self.end_exclusive(id, None);
            self.ready.insert(id);
        }
    }

    /// Returns `true` while the connection exists. The server drops a connection that exceeds the limit
    /// of unread output, and the connections of a released domain.
    pub fn is_connected(&self, id: ConnectionId) -> bool {
        self.connections.contains_key(&id)
    }

    fn of_domain(&self, domain: DomId) -> impl Iterator<Item = (ConnectionId, &StoreConnection)> {
        self.connections
            .iter()
            .filter(move |(_, connection)| connection.actor.domain == domain)
            .map(|(id, connection)| (*id, connection))
    }

    /// Records that `domain` exists. Fires `@introduceDomain` the first time.
    pub fn introduce(&mut self, domain: DomId) {
        if self.introduced.insert(domain) {
            self.fire_special(WatchPath::IntroduceDomain.as_str());
        }
    }

    /// Records that `domain` is gone: ends its unprivileged connections, treats its nodes as
    /// `leftovers` says, and fires `@releaseDomain` if the domain was introduced. Can be repeated.
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
            self.release_nodes(domain, leftovers);
        }
        if self.introduced.remove(&domain) {
            self.fire_special(WatchPath::ReleaseDomain.as_str());
        }
    }

    fn release_nodes(&mut self, domain: DomId, leftovers: Leftovers) {
        let before = self.tree.clone();
        let mut changes = Vec::new();
        if leftovers == Leftovers::Remove {
            let mut removed = self.tree.topmost(|node| node.owner() == domain);
            let home = domain_path(domain);
            let home = Path::parse(home.as_bytes()).map(|home| NodePath::resolve(home, domain));
            removed.extend(home.into_iter().flatten());
            for path in removed {
                if self.tree.remove(path.as_str()) {
                    changes.push(Change { path, kind: ChangeKind::Removed });
                }
            }
        }
        let names_domain = |node: &Node| {
            let mut entries = node.permissions().entries().iter();
            entries.any(|entry| entry.domain == domain)
        };
        for path in self.tree.all(names_domain) {
            if let Some(node) = self.tree.get(path.as_str()) {
                let list = without_domain(node.permissions(), domain, STORE_OWNER);
                self.tree.set_permissions(path.as_str(), &list);
            }
        }
        self.fire(&before, &changes);
    }

    /// Returns `true` if a request of this connection may be read and handled now. After `false`, ask
    /// again when output was sent or other requests were handled.
    pub fn may_read(&self, id: ConnectionId) -> bool {
        let Some(connection) = self.connections.get(&id) else {
            return false;
        };
        if connection.output.cost() > self.limits.output_soft {
            return false;
        }
        connection.actor.privileged || !self.unprivileged_paused()
    }

    fn unprivileged_paused(&self) -> bool {
        let behind = |connection: &StoreConnection| {
            connection.actor.privileged && connection.output.cost() > self.limits.output_soft
        };
        self.exclusive.is_some() || self.connections.values().any(behind)
    }

    /// Returns a connection with work: output to send, or a socket to close because the connection is no
    /// longer [connected](Self::is_connected). Returns each once until it has new work.
    pub fn take_ready(&mut self) -> Option<ConnectionId> {
        self.ready.pop_first()
    }

    /// Returns the output queue of the connection; `None` if the connection ended.
    pub fn output(&mut self, id: ConnectionId) -> Option<&mut OutputQueue> {
        self.connections.get_mut(&id).map(|connection| &mut connection.output)
    }

    /// Handles one request and queues its reply and events. The caller limits the length of `payload`.
    /// Does nothing for a connection that ended.
    pub fn handle(&mut self, id: ConnectionId, header: &Header, payload: &[u8]) {
        if !self.is_connected(id) {
            return;
        }
        self.counters.requests += 1;
        let answer = self.answer(id, header, payload);
        let mut message = Vec::new();
        let effect = match answer {
            Ok(StoreAnswer { payload, effect }) => match emit_reply(header, &payload, &mut message)
            {
                Ok(()) => effect,
                Err(_) => {
                    emit_error(header, ErrorName::TooBig, &mut message);
                    Effect::None
                }
            },
            Err(refusal) => {
                self.count_refusal(refusal);
                emit_error(header, refusal.error_name(), &mut message);
                Effect::None
            }
        };
        self.push_reply(id, message);
        match effect {
            Effect::None => {}
            Effect::Changed(before, changes) => self.fire(&before, &changes),
            Effect::WatchSet(name, token) => self.push_events(&[(id, name, token)]),
        }
    }

    fn count_refusal(&mut self, refusal: QuotaRefusal) {
        match refusal {
            QuotaRefusal::Quota(quota) => self.counters.refused.count(quota),
            QuotaRefusal::Error(ErrorName::Invalid | ErrorName::NotImplemented) => {
                self.counters.malformed += 1;
            }
            QuotaRefusal::Error(ErrorName::Access | ErrorName::NotPermitted) => {
                self.counters.denied += 1;
            }
            QuotaRefusal::Error(ErrorName::Again) => self.counters.conflicts += 1,
            QuotaRefusal::Error(_) => {}
        }
    }

    fn push_reply(&mut self, id: ConnectionId, message: Vec<u8>) {
        let soft = self.limits.output_soft;
        if let Some(connection) = self.connections.get_mut(&id) {
            let before = connection.output.cost();
            connection.output.push_reply(message);
            if before <= soft && connection.output.cost() > soft {
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
                let name = watch.event_path(path).to_owned();
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
            // The limit of a token leaves room for every path.
            if emit_event(path, token, &mut message).is_ok() {
                self.push_event(*id, &message);
            }
        }
    }

    fn push_event(&mut self, id: ConnectionId, message: &[u8]) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let before = connection.output.cost();
        if !connection.output.push_event(message) {
            self.counters.events_merged += 1;
            return;
        }
        self.counters.events += 1;
        let cost = connection.output.cost();
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

    /// Checks usage accounts and limits. For tests and fuzzing.
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
                ("output", connection.output.cost(), self.limits.output_hard),
            ];
            for (what, used, limit) in used {
                if used > limit {
                    return Err(format!("{id:?} of domain {domain} has {used} {what} of {limit}"));
                }
            }
        }
        Ok(())
    }

    /// Returns `true` if no connection, watch or exclusive transaction exists. For tests and fuzzing.
    #[cfg(any(test, feature = "test-utils"))]
    pub(super) fn is_idle(&self) -> bool {
        self.connections.is_empty() && self.watches.is_empty() && self.exclusive.is_none()
    }

    /// Returns the number of nodes that `domain` owns.
    pub fn nodes_of(&self, domain: DomId) -> usize {
        self.tree.usage(domain).nodes
    }

    /// Returns the bytes of names and values in nodes that `domain` owns.
    pub fn bytes_of(&self, domain: DomId) -> usize {
        self.tree.usage(domain).bytes
    }

    /// Returns the counters of refusals by quota.
    pub fn refusals(&self) -> &Refusals {
        &self.counters.refused
    }
}
