//! Transactions: a private copy of the tree, and a commit that happens only if nothing that was
//! looked at has changed meanwhile.
//!
//! A transaction keeps the tree it started from, a tree with its own changes (both share all that
//! is unchanged with everybody else's), the set of nodes that it looked at, and a log of what it
//! changed. "Looked at" covers what an answer depended on: the node itself, and if it is not there,
//! the nearest one above, whose permissions decided.
//!
//! A commit compares the change numbers of those nodes between the starting tree and the tree of now.
//! All equal: every answer that the transaction gave would be given again now, so the log is done
//! again on a copy of the tree of now, with all checks and quotas (XSA-420), and the copy becomes
//! the tree. Any of them different: `EAGAIN`, and nothing happened.
//!
//! A transaction that changed nothing always ends well: what it read was true when it began.

use super::access::{Actor, Change, Mutation};
use super::path::NodePath;
use super::quota::{Limits, Quota, Refusal};
use super::tree::Tree;
use ringfence_wire::xenstore::ErrorName;
use std::collections::BTreeSet;

/// An open transaction.
#[derive(Debug)]
pub(super) struct Transaction {
    base: Tree,
    tree: Tree,
    looked_at: BTreeSet<NodePath>,
    log: Vec<Mutation>,
    /// Bytes of the paths and values in `looked_at` and `log`.
    bytes: usize,
}

impl Transaction {
    /// A transaction that starts from `base`.
    pub(super) fn new(base: &Tree) -> Transaction {
        Transaction {
            base: base.clone(),
            tree: base.clone(),
            looked_at: BTreeSet::new(),
            log: Vec::new(),
            bytes: 0,
        }
    }

    /// The tree as the transaction sees it, for an answer that depends on the node at `path`.
    ///
    /// # Errors
    /// A quota of the transaction.
    pub(super) fn look_at(
        &mut self,
        path: &NodePath,
        actor: Actor,
        limits: &Limits,
    ) -> Result<&Tree, Refusal> {
        let (_, found) = self.tree.nearest(path.as_str());
        if found < path.depth() {
            self.note(path.ancestor(found), actor, limits)?;
        }
        self.note(path.clone(), actor, limits)?;
        Ok(&self.tree)
    }

    fn note(&mut self, path: NodePath, actor: Actor, limits: &Limits) -> Result<(), Quota> {
        if self.looked_at.contains(&path) {
            return Ok(());
        }
        if !actor.privileged && self.looked_at.len() >= limits.transaction_nodes {
            return Err(Quota::TransactionNodes);
        }
        self.remember(path.as_str().len(), actor, limits)?;
        self.looked_at.insert(path);
        Ok(())
    }

    fn remember(&mut self, bytes: usize, actor: Actor, limits: &Limits) -> Result<(), Quota> {
        let sum = self.bytes.saturating_add(bytes);
        if !actor.privileged && sum > limits.transaction_bytes {
            return Err(Quota::TransactionBytes);
        }
        self.bytes = sum;
        Ok(())
    }

    /// Does `mutation` inside the transaction.
    ///
    /// # Errors
    /// What the request is to be answered with; nothing is done then.
    pub(super) fn apply(
        &mut self,
        mutation: Mutation,
        actor: Actor,
        limits: &Limits,
    ) -> Result<(), Refusal> {
        let path = mutation.path();
        self.look_at(path, actor, limits)?;
        // A log entry costs its path, its value and a share of overhead, so that a long log of
        // empty writes is bounded as well.
        let cost = path.as_str().len() + mutation.payload_len() + size_of::<Mutation>();
        self.remember(cost, actor, limits)?;
        mutation.apply(&mut self.tree, actor, limits, &mut Vec::new())?;
        self.log.push(mutation);
        Ok(())
    }

    /// The tree that follows `now` when this transaction is committed, and what changed.
    ///
    /// # Errors
    /// `EAGAIN` after a conflict; a quota.
    pub(super) fn commit(
        &self,
        now: &Tree,
        actor: Actor,
        limits: &Limits,
    ) -> Result<(Tree, Vec<Change>), Refusal> {
        let mut tree = now.clone();
        let mut changes = Vec::new();
        if self.log.is_empty() {
            return Ok((tree, changes));
        }
        let differs = |path: &NodePath| {
            let path = path.as_str();
            self.base.generation_at(path) != now.generation_at(path)
        };
        if self.looked_at.iter().any(differs) {
            return Err(ErrorName::Again.into());
        }
        for mutation in &self.log {
            mutation.apply(&mut tree, actor, limits, &mut changes)?;
        }
        Ok((tree, changes))
    }
}
