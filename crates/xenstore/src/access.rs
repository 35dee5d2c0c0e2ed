//! What a caller may see and change: permissions and quotas over the bare tree.
//!
//! The rules:
//!
//! * A privileged caller may do all; else a node's own list decides (owner, entry, default).
//! * A node that is not there is judged by the nearest one above it that is: whoever may not use that
//!   one is told `EACCES`, the same as for a node that exists but is not theirs. So nobody learns
//!   of a node that they may not read (unless they may write the one above it, where names collide).
//! * A new node inherits the permissions of the one above; an unprivileged writer becomes its owner.
//! * Only the owner and privileged callers change permissions, and only the latter the owner: a
//!   domain cannot make another pay for its nodes (XSA-352, XSA-419).
//!
//! A change either happens as a whole or not at all: every check comes first.

use super::path::NodePath;
use super::quota::{DEPTH_MAX, Limits, Quota, Refusal};
use super::tree::{Node, Tree};
use ringfence_wire::grant::DomId;
use ringfence_wire::xenstore::{ErrorName, NodeAccess, PAYLOAD_MAX, PermissionList};
use std::sync::Arc;

/// On whose behalf something is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Actor {
    pub(super) domain: DomId,
    pub(super) privileged: bool,
}

impl Actor {
    fn access(self, node: &Node) -> NodeAccess {
        if self.privileged {
            return NodeAccess::Both;
        }
        node.permissions().access_of(self.domain)
    }

    /// Whether the node at `path` exists and this actor may read it.
    pub(super) fn may_read(self, tree: &Tree, path: &str) -> bool {
        tree.get(path).is_some_and(|node| self.access(node).reads())
    }

    /// The node at `path`, if it exists and `allowed` says so of the access to it.
    fn node<'t>(
        self,
        tree: &'t Tree,
        path: &NodePath,
        allowed: fn(NodeAccess) -> bool,
    ) -> Result<&'t Node, ErrorName> {
        let (node, found) = tree.nearest(path.as_str());
        if !allowed(self.access(node)) {
            return Err(ErrorName::Access);
        }
        if found < path.depth() {
            return Err(ErrorName::NotFound);
        }
        Ok(node)
    }

    /// The node at `path`, for reading.
    ///
    /// # Errors
    /// `ENOENT`, `EACCES`.
    pub(super) fn read<'t>(self, tree: &'t Tree, path: &NodePath) -> Result<&'t Node, ErrorName> {
        self.node(tree, path, NodeAccess::reads)
    }

    fn writable<'t>(self, tree: &'t Tree, path: &NodePath) -> Result<&'t Node, ErrorName> {
        self.node(tree, path, NodeAccess::writes)
    }
}

/// A change of one node.
#[derive(Clone, Debug)]
pub(super) enum Mutation {
    /// Set the value, making the node if need be.
    Write(NodePath, Arc<[u8]>),
    /// Make the node if need be.
    Make(NodePath),
    /// Remove it and all below.
    Remove(NodePath),
    /// Set its permissions.
    SetPermissions(NodePath, PermissionList),
}

/// What happened to a node, for the watches.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Change {
    pub(super) path: NodePath,
    pub(super) kind: ChangeKind,
}

/// In what way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ChangeKind {
    /// Made, written, or its permissions changed.
    Written,
    /// Made because something below was made. Watches that see any depth are told of that
    /// one alone.
    MadeOnTheWay,
    /// Removed with all below.
    Removed,
}

impl Mutation {
    pub(super) fn path(&self) -> &NodePath {
        match self {
            Mutation::Write(path, _)
            | Mutation::Make(path)
            | Mutation::Remove(path)
            | Mutation::SetPermissions(path, _) => path,
        }
    }

    /// Bytes that remembering this takes, path aside.
    pub(super) fn payload_len(&self) -> usize {
        match self {
            Mutation::Write(_, value) => value.len(),
            _ => 0,
        }
    }

    /// Does it, and says so in `changes`; on error nothing is done.
    ///
    /// # Errors
    /// What the request is to be answered with.
    pub(super) fn apply(
        &self,
        tree: &mut Tree,
        actor: Actor,
        limits: &Limits,
        changes: &mut Vec<Change>,
    ) -> Result<(), Refusal> {
        match self {
            Mutation::Write(path, value) => write(tree, actor, limits, path, value, changes),
            Mutation::Make(path) => match actor.writable(tree, path) {
                Ok(_) => Ok(()),
                Err(ErrorName::NotFound) => make(tree, actor, limits, path, 0, changes),
                Err(error) => Err(error.into()),
            },
            Mutation::Remove(path) => Ok(remove(tree, actor, path, changes)?),
            Mutation::SetPermissions(path, permissions) => {
                set_permissions(tree, actor, limits, path, permissions)?;
                changes.push(written(path));
                Ok(())
            }
        }
    }
}

fn written(path: &NodePath) -> Change {
    Change { path: path.clone(), kind: ChangeKind::Written }
}

/// Whether `actor` may own `nodes` and `bytes` more.
fn afford(
    tree: &Tree,
    actor: Actor,
    limits: &Limits,
    nodes: usize,
    bytes: usize,
) -> Result<(), Quota> {
    if actor.privileged {
        return Ok(());
    }
    let used = tree.usage(actor.domain);
    // What is freed or replaced is never refused, even when a privileged writer went over the bound
    // on the domain's behalf.
    if nodes > 0 && used.nodes.saturating_add(nodes) > limits.nodes {
        return Err(Quota::Nodes);
    }
    if bytes > 0 && used.bytes.saturating_add(bytes) > limits.node_bytes {
        return Err(Quota::NodeBytes);
    }
    Ok(())
}

fn write(
    tree: &mut Tree,
    actor: Actor,
    limits: &Limits,
    path: &NodePath,
    value: &Arc<[u8]>,
    changes: &mut Vec<Change>,
) -> Result<(), Refusal> {
    let existing = match actor.writable(tree, path) {
        Ok(node) => Some((node.owner(), node.value().len())),
        Err(ErrorName::NotFound) => None,
        Err(error) => return Err(error.into()),
    };
    // Any value has to come back in one reply, so nobody writes more than that.
    let most = if actor.privileged { PAYLOAD_MAX as usize } else { limits.value_bytes };
    if value.len() > most {
        return Err(Quota::ValueBytes.into());
    }
    match existing {
        Some((owner, before)) if owner == actor.domain => {
            afford(tree, actor, limits, 0, value.len().saturating_sub(before))?;
        }
        // Another domain's node, which lets this one write: at most a value's bound each.
        Some(_) => {}
        None => make(tree, actor, limits, path, value.len(), changes)?,
    }
    tree.set_value(path.as_str(), value);
    if existing.is_some() {
        changes.push(written(path));
    }
    Ok(())
}

/// Makes `path`, which is not there and which `actor` may make; `value_len` is what comes with it.
fn make(
    tree: &mut Tree,
    actor: Actor,
    limits: &Limits,
    path: &NodePath,
    value_len: usize,
    changes: &mut Vec<Change>,
) -> Result<(), Refusal> {
    if path.depth() > limits.depth.min(DEPTH_MAX) {
        return Err(Quota::Depth.into());
    }
    let (_, found) = tree.nearest(path.as_str());
    let missing = path.names().skip(found);
    let (nodes, bytes) =
        missing.fold((0, value_len), |(nodes, bytes), name| (nodes + 1, bytes + name.len()));
    afford(tree, actor, limits, nodes, bytes)?;
    tree.make(path, (!actor.privileged).then_some(actor.domain));
    for depth in found + 1..path.depth() {
        changes.push(Change { path: path.ancestor(depth), kind: ChangeKind::MadeOnTheWay });
    }
    changes.push(written(path));
    Ok(())
}

fn remove(
    tree: &mut Tree,
    actor: Actor,
    path: &NodePath,
    changes: &mut Vec<Change>,
) -> Result<(), ErrorName> {
    match actor.writable(tree, path) {
        Ok(_) => {}
        // Gone already is fine, if it had a place to be in.
        Err(ErrorName::NotFound) => {
            let above = path.parent().unwrap_or_else(NodePath::root);
            return match tree.get(above.as_str()) {
                Some(_) => Ok(()),
                None => Err(ErrorName::NotFound),
            };
        }
        Err(error) => return Err(error),
    }
    if !tree.remove(path.as_str()) {
        return Err(ErrorName::Invalid);
    }
    changes.push(Change { path: path.clone(), kind: ChangeKind::Removed });
    Ok(())
}

fn set_permissions(
    tree: &mut Tree,
    actor: Actor,
    limits: &Limits,
    path: &NodePath,
    permissions: &PermissionList,
) -> Result<(), Refusal> {
    let node = actor.writable(tree, path)?;
    let owner = node.owner();
    if !actor.privileged {
        if owner != actor.domain {
            return Err(ErrorName::Access.into());
        }
        if permissions.owner() != owner {
            return Err(ErrorName::NotPermitted.into());
        }
        if permissions.entries().len() > limits.permissions {
            return Err(Quota::Permissions.into());
        }
    }
    tree.set_permissions(path.as_str(), permissions);
    Ok(())
}
