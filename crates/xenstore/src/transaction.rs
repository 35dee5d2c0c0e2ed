//! Transactions: a private copy of the tree, and a commit that fails after a conflicting change.
//!
//! A transaction keeps four things: the tree at its start, the tree with its own changes (both share
//! unchanged nodes with the store), its read set, and a log of its changes. The read set holds every
//! node that a reply depended on: the node itself, and for a missing node the nearest existing ancestor,
//! whose permissions decided.
//!
//! A commit compares the generations of the read set between the starting tree and the current tree.
//! If all are equal, every reply of the transaction is still true. The log is then applied to a copy of
//! the current tree, with all checks and quotas (XSA-420), and the copy becomes the tree. If any
//! generation differs, the commit fails with `EAGAIN` and changes nothing.
//!
//! A transaction without changes always commits: everything that it read was true at its start.

use super::access::{Actor, Change, Mutation};
use super::path::NodePath;
use super::quota::{Limits, Quota, QuotaRefusal};
use super::tree::Tree;
use ringfence_wire::xenstore::ErrorName;
use std::collections::BTreeSet;

/// State of an open transaction.
#[derive(Debug)]
pub(super) struct Transaction {
    base: Tree,
    tree: Tree,
    read_set: BTreeSet<NodePath>,
    log: Vec<Mutation>,
    /// Bytes of the paths in `read_set` and of the log entries.
    bytes: usize,
}

impl Transaction {
    /// Creates a transaction that starts from `base`.
    pub(super) fn new(base: &Tree) -> Transaction {
        Transaction {
            base: base.clone(),
            tree: base.clone(),
            read_set: BTreeSet::new(),
            log: Vec::new(),
            bytes: 0,
        }
    }

    /// Adds the node at `path` to the read set and returns the tree as the transaction sees it.
    ///
    /// # Errors
    /// Returns the quota of the transaction that is exceeded.
    pub(super) fn tree_for_read(
        &mut self,
        path: &NodePath,
        actor: Actor,
        limits: &Limits,
    ) -> Result<&Tree, QuotaRefusal> {
        let (_, found) = self.tree.nearest(path.as_str());
        if found < path.depth() {
            self.add_to_read_set(path.ancestor(found), actor, limits)?;
        }
        self.add_to_read_set(path.clone(), actor, limits)?;
        Ok(&self.tree)
    }

    fn add_to_read_set(
        &mut self,
        path: NodePath,
        actor: Actor,
        limits: &Limits,
    ) -> Result<(), Quota> {
        if self.read_set.contains(&path) {
            return Ok(());
        }
        if !actor.privileged && self.read_set.len() >= limits.transaction_nodes {
            return Err(Quota::TransactionNodes);
        }
        self.charge(path.as_str().len(), actor, limits)?;
        self.read_set.insert(path);
        Ok(())
    }

    fn charge(&mut self, bytes: usize, actor: Actor, limits: &Limits) -> Result<(), Quota> {
        let sum = self.bytes.saturating_add(bytes);
        if !actor.privileged && sum > limits.transaction_bytes {
            return Err(Quota::TransactionBytes);
        }
        self.bytes = sum;
        Ok(())
    }

    /// Applies `mutation` inside the transaction.
    ///
    /// # Errors
    /// Returns the error of the reply. The tree is unchanged then.
    pub(super) fn apply(
        &mut self,
        mutation: Mutation,
        actor: Actor,
        limits: &Limits,
    ) -> Result<(), QuotaRefusal> {
        let path = mutation.path();
        self.tree_for_read(path, actor, limits)?;
        // A log entry costs its path, its value and its own size, so that a log of empty writes is limited too.
        let cost = path.as_str().len() + mutation.payload_len() + size_of::<Mutation>();
        self.charge(cost, actor, limits)?;
        mutation.apply(&mut self.tree, actor, limits, &mut Vec::new())?;
        self.log.push(mutation);
        Ok(())
    }

    /// Commits the transaction to `current`, and returns the new tree and the changes.
    ///
    /// # Errors
    /// Returns `EAGAIN` after a conflict, or the quota that is exceeded.
    pub(super) fn commit(
        &self,
        current: &Tree,
        actor: Actor,
        limits: &Limits,
    ) -> Result<(Tree, Vec<Change>), QuotaRefusal> {
        let mut tree = current.clone();
        let mut changes = Vec::new();
        if self.log.is_empty() {
            return Ok((tree, changes));
        }
        let differs = |path: &NodePath| {
            let path = path.as_str();
            self.base.generation_at(path) != current.generation_at(path)
        };
        if self.read_set.iter().any(differs) {
            return Err(ErrorName::Again.into());
        }
        for mutation in &self.log {
            mutation.apply(&mut tree, actor, limits, &mut changes)?;
        }
        Ok((tree, changes))
    }
}
