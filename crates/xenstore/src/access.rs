//! Access control: permissions and quotas over the bare tree.
//!
//! An [`Actor`] is the caller of a request. [`Mutation::apply`] checks permissions and quotas first and
//! changes the tree afterwards, so a refused mutation changes nothing. The rules:
//!
//! * A privileged caller may read and write every node. For other callers the permission list of the
//!   node decides: owner, then entry of the domain, then default.
//! * For a missing node the nearest existing ancestor decides. Without access to that ancestor the
//!   error is `EACCES`, as for an existing node without access. So a domain cannot find out that a node
//!   exists which it may not read, unless it may write the parent and tries to create the same name.
//! * A new node inherits the permissions of its parent. An unprivileged writer becomes its owner.
//! * Only the owner and privileged callers change permissions. Only privileged callers change the
//!   owner, because the owner's quota pays for the node (XSA-352, XSA-419).

use super::path::NodePath;
use super::quota::{DEPTH_MAX, Limits, Quota, QuotaRefusal};
use super::tree::{Node, Tree};
use ringfence_wire::grant::DomId;
use ringfence_wire::xenstore::{ErrorName, NodeAccess, PAYLOAD_MAX, PermissionList};
use std::sync::Arc;

/// Caller of a request: a domain, and its privilege.
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

    /// Returns `true` if the node at `path` exists and this actor may read it.
    pub(super) fn may_read(self, tree: &Tree, path: &str) -> bool {
        tree.get(path).is_some_and(|node| self.access(node).reads())
    }

    /// Returns the node at `path` if it exists and `allowed` accepts the actor's access to it.
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

    /// Returns the node at `path` for reading.
    ///
    /// # Errors
    /// Returns `ENOENT` for a missing node, `EACCES` without read access.
    pub(super) fn read<'t>(self, tree: &'t Tree, path: &NodePath) -> Result<&'t Node, ErrorName> {
        self.node(tree, path, NodeAccess::reads)
    }

    fn writable<'t>(self, tree: &'t Tree, path: &NodePath) -> Result<&'t Node, ErrorName> {
        self.node(tree, path, NodeAccess::writes)
    }
}

/// Change of one node that a client requests.
#[derive(Clone, Debug)]
pub(super) enum Mutation {
    /// Sets the value; creates the node if it is missing.
    Write(NodePath, Arc<[u8]>),
    /// Creates the node if it is missing.
    Create(NodePath),
    /// Removes the node and all nodes below it.
    Remove(NodePath),
    SetPermissions(NodePath, PermissionList),
}

/// Change of one node that happened, for the watches.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Change {
    pub(super) path: NodePath,
    pub(super) kind: ChangeKind,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ChangeKind {
    /// The node was created, its value was set, or its permissions were changed.
    Written,
    /// The node was created as an ancestor of a new node. Watches without a depth limit get the event of
    /// that node only.
    CreatedAncestor,
    /// The node was removed with all nodes below it.
    Removed,
}

impl Mutation {
    pub(super) fn path(&self) -> &NodePath {
        match self {
            Mutation::Write(path, _)
            | Mutation::Create(path)
            | Mutation::Remove(path)
            | Mutation::SetPermissions(path, _) => path,
        }
    }

    /// Returns the number of bytes in a log entry of this mutation, without the path.
    pub(super) fn payload_len(&self) -> usize {
        match self {
            Mutation::Write(_, value) => value.len(),
            _ => 0,
        }
    }

    /// Applies the mutation to `tree` and appends the changed nodes to `changes`.
    ///
    /// # Errors
    /// Returns the error of the reply. `tree` is unchanged then.
    pub(super) fn apply(
        &self,
        tree: &mut Tree,
        actor: Actor,
        limits: &Limits,
        changes: &mut Vec<Change>,
    ) -> Result<(), QuotaRefusal> {
        match self {
            Mutation::Write(path, value) => write(tree, actor, limits, path, value, changes),
            Mutation::Create(path) => match actor.writable(tree, path) {
                Ok(_) => Ok(()),
                Err(ErrorName::NotFound) => create(tree, actor, limits, path, 0, changes),
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

/// Checks that `actor` may own `nodes` more nodes and `bytes` more bytes.
fn check_quota(
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
    // A request that adds nothing passes, even if a privileged writer exceeded the domain's quota on
    // its behalf.
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
) -> Result<(), QuotaRefusal> {
    let existing = match actor.writable(tree, path) {
        Ok(node) => Some((node.owner(), node.value().len())),
        Err(ErrorName::NotFound) => None,
        Err(error) => return Err(error.into()),
    };
    // Every value must fit into one reply.
    let len_max = if actor.privileged { PAYLOAD_MAX as usize } else { limits.value_bytes };
    if value.len() > len_max {
        return Err(Quota::ValueBytes.into());
    }
    match existing {
        Some((owner, before)) if owner == actor.domain => {
            check_quota(tree, actor, limits, 0, value.len().saturating_sub(before))?;
        }
        // The domain may write a node that another domain owns, up to the limit of one value.
        Some(_) => {}
        None => create(tree, actor, limits, path, value.len(), changes)?,
    }
    tree.set_value(path.as_str(), value);
    if existing.is_some() {
        changes.push(written(path));
    }
    Ok(())
}

/// Creates the missing node `path`, whose parent `actor` may write. `value_len` is the length of the
/// value that the caller sets afterwards.
fn create(
    tree: &mut Tree,
    actor: Actor,
    limits: &Limits,
    path: &NodePath,
    value_len: usize,
    changes: &mut Vec<Change>,
) -> Result<(), QuotaRefusal> {
    if path.depth() > limits.depth.min(DEPTH_MAX) {
        return Err(Quota::Depth.into());
    }
    let (_, found) = tree.nearest(path.as_str());
    let missing = path.names().skip(found);
    let (nodes, bytes) =
        missing.fold((0, value_len), |(nodes, bytes), name| (nodes + 1, bytes + name.len()));
    check_quota(tree, actor, limits, nodes, bytes)?;
    tree.create(path, (!actor.privileged).then_some(actor.domain));
    for depth in found + 1..path.depth() {
        changes.push(Change { path: path.ancestor(depth), kind: ChangeKind::CreatedAncestor });
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
        // Removing a missing node succeeds if its parent exists.
        Err(ErrorName::NotFound) => {
            let parent = path.parent().unwrap_or_else(NodePath::root);
            return match tree.get(parent.as_str()) {
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
) -> Result<(), QuotaRefusal> {
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
