//! Node tree: a persistent data structure without permission checks and quotas.
//!
//! A [`Tree`] is cheap to clone: clones share their nodes, and a change copies only the nodes on the path
//! to the changed node. A transaction works on such a clone, and watches compare two of them.
//!
//! Each node carries a generation: the number of the change that last modified its value, its permissions
//! or the list of its children. Generations only grow, so an equal generation means an unchanged node,
//! even if the node was removed and created again in between.
//!
//! The tree accounts for the nodes that each domain owns. Recursion is bounded by the deepest path, see
//! [`DEPTH_MAX`](super::quota::DEPTH_MAX).

use super::path::{NodePath, names, parent};
use ringfence_wire::grant::DomId;
use ringfence_wire::xenstore::{NodeAccess, Permission, PermissionList};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Node of the store: value, permissions and children.
#[derive(Clone, Debug)]
pub(super) struct Node {
    value: Arc<[u8]>,
    permissions: PermissionList,
    generation: u64,
    children: BTreeMap<Arc<str>, Arc<Node>>,
}

impl Node {
    pub(super) fn value(&self) -> &[u8] {
        &self.value
    }

    pub(super) fn permissions(&self) -> &PermissionList {
        &self.permissions
    }

    pub(super) fn owner(&self) -> DomId {
        self.permissions.owner()
    }

    /// Returns the number of the change that last modified this node.
    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the names of the children in order.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.children.keys().map(|name| &**name)
    }
}

/// Resources that one domain owns in the tree.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Usage {
    pub(super) nodes: usize,
    /// Bytes of the nodes' names and values.
    pub(super) bytes: usize,
}

impl Usage {
    fn of(name: &str, node: &Node) -> Usage {
        Usage { nodes: 1, bytes: name.len() + node.value.len() }
    }
}

/// Snapshot of all nodes.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    root: Arc<Node>,
    generation: u64,
    usage: Arc<BTreeMap<DomId, Usage>>,
}

impl Tree {
    /// Creates a tree with only the root, which `owner` owns and no other unprivileged domain may read.
    pub(super) fn new(owner: DomId) -> Tree {
        let root = Node {
            value: Arc::from([]),
            permissions: PermissionList::owned_by(owner, NodeAccess::None),
            generation: 0,
            children: BTreeMap::new(),
        };
        let usage = BTreeMap::from([(owner, Usage::of("", &root))]);
        Tree { root: Arc::new(root), generation: 0, usage: Arc::new(usage) }
    }

    /// Returns the node at `path`.
    pub(super) fn get(&self, path: &str) -> Option<&Node> {
        names(path)
            .try_fold(&*self.root, |node, name| node.children.get(name).map(|child| &**child))
    }

    /// Returns the deepest existing node on the way to `path`, and the number of names that lead to it.
    pub(super) fn nearest(&self, path: &str) -> (&Node, usize) {
        let mut found = (&*self.root, 0);
        for name in names(path) {
            match found.0.children.get(name) {
                Some(child) => found = (&**child, found.1 + 1),
                None => break,
            }
        }
        found
    }

    /// Returns the generation of the node at `path`; `None` for a missing node.
    pub(super) fn generation_at(&self, path: &str) -> Option<u64> {
        self.get(path).map(Node::generation)
    }

    /// Returns the resources that `domain` owns.
    pub(super) fn usage(&self, domain: DomId) -> Usage {
        self.usage.get(&domain).copied().unwrap_or_default()
    }

    fn charge(&mut self, domain: DomId, amount: Usage) {
        let used = Arc::make_mut(&mut self.usage).entry(domain).or_default();
        used.nodes += amount.nodes;
        used.bytes += amount.bytes;
    }

    fn discharge(&mut self, domain: DomId, amount: Usage) {
        let usage = Arc::make_mut(&mut self.usage);
        let used = usage.entry(domain).or_default();
        used.nodes = used.nodes.saturating_sub(amount.nodes);
        used.bytes = used.bytes.saturating_sub(amount.bytes);
        if used.nodes == 0 {
            usage.remove(&domain);
        }
    }

    /// Returns the node at `path` for modification, with a new generation.
    fn touch(&mut self, path: &str) -> Option<&mut Node> {
        self.get(path)?;
        self.generation += 1;
        let mut node = Arc::make_mut(&mut self.root);
        for name in names(path) {
            node = Arc::make_mut(node.children.get_mut(name)?);
        }
        node.generation = self.generation;
        Some(node)
    }

    /// Creates the node at `path` and its missing ancestors, all empty. Each inherits the permissions of
    /// its parent. `owner`, if given, becomes the owner.
    pub(super) fn create(&mut self, path: &NodePath, owner: Option<DomId>) {
        self.generation += 1;
        let generation = self.generation;
        let mut charges = Vec::new();
        let mut node = Arc::make_mut(&mut self.root);
        for name in path.names() {
            if !node.children.contains_key(name) {
                let child = Node {
                    value: Arc::from([]),
                    permissions: inherited(&node.permissions, owner),
                    generation,
                    children: BTreeMap::new(),
                };
                charges.push((child.owner(), Usage::of(name, &child)));
                node.generation = generation;
                node.children.insert(name.into(), Arc::new(child));
            }
            let child = node.children.get_mut(name);
            node = Arc::make_mut(child.expect("it was there or was just made"));
        }
        for (owner, amount) in charges {
            self.charge(owner, amount);
        }
    }

    /// Replaces the value of the node at `path`. Returns `false` for a missing node.
    pub(super) fn set_value(&mut self, path: &str, value: &Arc<[u8]>) -> bool {
        let Some(node) = self.touch(path) else {
            return false;
        };
        let before = std::mem::replace(&mut node.value, Arc::clone(value));
        let owner = node.owner();
        let bytes = |value: &[u8]| Usage { nodes: 0, bytes: value.len() };
        self.charge(owner, bytes(value));
        self.discharge(owner, bytes(&before));
        true
    }

    /// Replaces the permissions of the node at `path`. Returns `false` for a missing node.
    pub(super) fn set_permissions(&mut self, path: &str, permissions: &PermissionList) -> bool {
        let Some(node) = self.touch(path) else {
            return false;
        };
        let amount = Usage::of(names(path).last().unwrap_or_default(), node);
        let before = std::mem::replace(&mut node.permissions, permissions.clone());
        self.charge(permissions.owner(), amount);
        self.discharge(before.owner(), amount);
        true
    }

    /// Removes the node at `path` and all nodes below it. Returns `false` for a missing node and for the
    /// root.
    pub(super) fn remove(&mut self, path: &str) -> bool {
        let (Some(above), Some(name)) = (parent(path), names(path).last()) else {
            return false;
        };
        if self.get(path).is_none() {
            return false;
        }
        let removed = self.touch(above).and_then(|node| node.children.remove_entry(name));
        let Some((name, node)) = removed else {
            return false;
        };
        self.discharge_all(&name, &node);
        true
    }

    fn discharge_all(&mut self, name: &str, node: &Node) {
        self.discharge(node.owner(), Usage::of(name, node));
        for (name, child) in &node.children {
            self.discharge_all(name, child);
        }
    }

    /// Returns the topmost nodes for which `matches` returns `true`, except the root. Nodes below them are
    /// not examined.
    pub(super) fn topmost(&self, matches: impl Fn(&Node) -> bool) -> Vec<NodePath> {
        let mut found = Vec::new();
        self.search(true, &matches, &mut found);
        found
    }

    /// Returns all nodes for which `matches` returns `true`.
    pub(super) fn all(&self, matches: impl Fn(&Node) -> bool) -> Vec<NodePath> {
        let mut found = Vec::new();
        self.search(false, &matches, &mut found);
        found
    }

    fn search(&self, topmost: bool, matches: &dyn Fn(&Node) -> bool, found: &mut Vec<NodePath>) {
        fn below(
            path: &NodePath,
            node: &Node,
            topmost: bool,
            matches: &dyn Fn(&Node) -> bool,
            found: &mut Vec<NodePath>,
        ) {
            let root = path.as_str() == "/";
            if matches(node) && !(topmost && root) {
                found.push(path.clone());
                if topmost {
                    return;
                }
            }
            for (name, child) in &node.children {
                below(&path.child(name), child, topmost, matches, found);
            }
        }
        below(&NodePath::root(), &self.root, topmost, matches, found);
    }

    /// Recounts the resources of each domain and compares them with the accounts. For tests and fuzzing.
    pub(super) fn audit(&self) -> Result<(), String> {
        fn count(name: &str, node: &Node, counted: &mut BTreeMap<DomId, Usage>) {
            let amount = Usage::of(name, node);
            let used = counted.entry(node.owner()).or_default();
            used.nodes += amount.nodes;
            used.bytes += amount.bytes;
            for (name, child) in &node.children {
                count(name, child, counted);
            }
        }
        let mut counted = BTreeMap::new();
        count("", &self.root, &mut counted);
        if counted == *self.usage {
            return Ok(());
        }
        Err(format!("the account {:?} differs from the tree {counted:?}", self.usage))
    }
}

/// Returns the permissions of a new node below a parent with the permissions `above`.
fn inherited(above: &PermissionList, owner: Option<DomId>) -> PermissionList {
    let Some(owner) = owner else {
        return above.clone();
    };
    let mut entries: Vec<Permission> = above.entries().to_vec();
    if let Some(first) = entries.first_mut() {
        first.domain = owner;
    }
    PermissionList::new(&entries).expect("as many entries as a valid list has")
}

/// Returns `list` without entries for `domain`. If `domain` was the owner, `new_owner` replaces it, and the
/// default access becomes none.
pub(super) fn without_domain(
    list: &PermissionList,
    domain: DomId,
    new_owner: DomId,
) -> PermissionList {
    let mut entries = list.entries().to_vec();
    let mut first = true;
    entries.retain(|entry| std::mem::take(&mut first) || entry.domain != domain);
    if let Some(owner) = entries.first_mut().filter(|entry| entry.domain == domain) {
        owner.domain = new_owner;
        owner.access = NodeAccess::None;
    }
    PermissionList::new(&entries).expect("the owner stayed and nothing was added")
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringfence_wire::xenstore::Path;

    fn path(text: &str) -> NodePath {
        NodePath::resolve(Path::parse(text.as_bytes()).unwrap(), DomId(0)).unwrap()
    }

    fn value(text: &str) -> Arc<[u8]> {
        Arc::from(text.as_bytes())
    }

    #[test]
    fn change_in_clone_leaves_other_clones_unchanged() {
        let mut tree = Tree::new(DomId(0));
        tree.create(&path("/a/b"), None);
        tree.create(&path("/c"), None);
        let before = tree.clone();
        assert!(tree.set_value("/a/b", &value("new")));
        assert!(tree.remove("/c"));

        assert_eq!(before.get("/a/b").unwrap().value(), b"");
        assert!(before.get("/c").is_some());
        assert_eq!(tree.get("/a/b").unwrap().value(), b"new");
        assert!(tree.get("/c").is_none());
        let mut copied = before.clone();
        copied.create(&path("/a/d"), None);
        assert!(
            Arc::ptr_eq(&before.root.children["c"], &copied.root.children["c"]),
            "nodes off the changed path stay shared"
        );
        for tree in [tree, before, copied] {
            tree.audit().unwrap();
        }
    }

    #[test]
    fn generation_changes_with_value_and_child_list_of_node_only() {
        let mut tree = Tree::new(DomId(0));
        tree.create(&path("/a/b"), None);
        let at = |tree: &Tree, path: &str| tree.generation_at(path).unwrap();
        let (a, b) = (at(&tree, "/a"), at(&tree, "/a/b"));
        tree.set_value("/a/b", &value("x"));
        assert_eq!(at(&tree, "/a"), a);
        assert!(at(&tree, "/a/b") > b);
        tree.create(&path("/a/c"), None);
        assert!(at(&tree, "/a") > a);

        let b = at(&tree, "/a/b");
        tree.remove("/a/b");
        tree.create(&path("/a/b"), None);
        assert_ne!(at(&tree, "/a/b"), b, "a node made again is another one");
    }

    #[test]
    fn account_follows_owner_changes_and_removals() {
        let mut tree = Tree::new(DomId(0));
        tree.create(&path("/a/bb"), Some(DomId(5)));
        tree.set_value("/a/bb", &value("12345"));
        assert_eq!(tree.usage(DomId(5)), Usage { nodes: 2, bytes: 8 });
        tree.set_permissions("/a/bb", &PermissionList::owned_by(DomId(6), NodeAccess::Read));
        assert_eq!(tree.usage(DomId(5)), Usage { nodes: 1, bytes: 1 });
        assert_eq!(tree.usage(DomId(6)), Usage { nodes: 1, bytes: 7 });
        tree.audit().unwrap();
        tree.remove("/a");
        assert_eq!(tree.usage(DomId(5)), Usage::default());
        assert_eq!(tree.usage(DomId(6)), Usage::default());
        tree.audit().unwrap();
    }

    #[test]
    fn nearest_returns_deepest_existing_ancestor() {
        let mut tree = Tree::new(DomId(0));
        tree.create(&path("/a/b"), None);
        assert_eq!(tree.nearest("/a/x/y").1, 1);
        assert_eq!(tree.nearest("/a/b").1, 2);
        assert_eq!(tree.nearest("/x").1, 0);
    }

    #[test]
    fn removal_of_root_is_refused() {
        let mut tree = Tree::new(DomId(0));
        assert!(!tree.remove("/"));
        assert!(tree.get("/").is_some());
    }

    #[test]
    fn without_domain_drops_entries_and_replaces_owner() {
        let list = |text: &[u8]| ringfence_wire::xenstore::parse_permissions(text).unwrap();
        assert_eq!(without_domain(&list(b"r0\0b5\0r6\0"), DomId(5), DomId(0)), list(b"r0\0r6\0"));
        assert_eq!(without_domain(&list(b"b5\0r6\0r5\0"), DomId(5), DomId(0)), list(b"n0\0r6\0"));
    }
}
