//! Owned absolute paths: the keys of trees, watches and transactions.

use ringfence_wire::grant::DomId;
use ringfence_wire::xenstore::{Path, PathError};
use std::borrow::Borrow;
use std::fmt;

/// Absolute path that follows the rules of [`Path`].
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct NodePath(Box<str>);

impl NodePath {
    /// Returns `path` as an absolute path. A relative path starts at the home of `caller`.
    pub(super) fn resolve(path: Path<'_>, caller: DomId) -> Result<NodePath, PathError> {
        Ok(NodePath(path.to_absolute(caller)?.into_boxed_str()))
    }

    /// Returns the path of the root.
    pub(super) fn root() -> NodePath {
        NodePath("/".into())
    }

    /// Returns the path as text.
    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the names from the root down; none for the root itself.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        names(&self.0)
    }

    /// Returns the number of names.
    pub(super) fn depth(&self) -> usize {
        self.names().count()
    }

    /// Returns the path of the child `name`.
    pub(super) fn child(&self, name: &str) -> NodePath {
        let above = self.0.trim_end_matches('/');
        NodePath(format!("{above}/{name}").into_boxed_str())
    }

    /// Returns the path of the parent; `None` for the root.
    pub(super) fn parent(&self) -> Option<NodePath> {
        parent(&self.0).map(|above| NodePath(above.into()))
    }

    /// Returns the ancestor with the first `depth` names, or the path itself if it has fewer.
    pub(super) fn ancestor(&self, depth: usize) -> NodePath {
        let mut path = String::new();
        for name in self.names().take(depth) {
            path.push('/');
            path.push_str(name);
        }
        if path.is_empty() {
            return NodePath::root();
        }
        NodePath(path.into_boxed_str())
    }

    /// Returns this path, then its ancestors up to the root.
    pub(super) fn upwards(&self) -> impl Iterator<Item = &str> {
        std::iter::successors(Some(self.as_str()), |path| parent(path))
    }
}

impl Borrow<str> for NodePath {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for NodePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Returns the names in an absolute path.
pub(super) fn names(path: &str) -> impl Iterator<Item = &str> {
    path.split('/').filter(|name| !name.is_empty())
}

/// Returns the parent of an absolute path; `None` for the root.
pub(super) fn parent(path: &str) -> Option<&str> {
    match path.rsplit_once('/') {
        Some(("", "")) | None => None,
        Some(("", _)) => Some("/"),
        Some((above, _)) => Some(above),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> NodePath {
        NodePath::resolve(Path::parse(text.as_bytes()).unwrap(), DomId(7)).unwrap()
    }

    #[test]
    fn relative_path_resolves_below_home_of_caller() {
        assert_eq!(path("data/x").as_str(), "/local/domain/7/data/x");
        assert_eq!(path("/data/x").as_str(), "/data/x");
    }

    #[test]
    fn upwards_ends_at_root() {
        let above = path("/a/bc/d");
        let all: Vec<&str> = above.upwards().collect();
        assert_eq!(all, ["/a/bc/d", "/a/bc", "/a", "/"]);
        assert_eq!(NodePath::root().upwards().collect::<Vec<_>>(), ["/"]);
    }

    #[test]
    fn child_parent_ancestor_and_depth_agree() {
        assert_eq!(NodePath::root().child("a").as_str(), "/a");
        assert_eq!(path("/a").child("b").as_str(), "/a/b");
        assert_eq!(path("/a/b").parent(), Some(path("/a")));
        assert_eq!(path("/a").parent(), Some(NodePath::root()));
        assert_eq!(NodePath::root().parent(), None);
        assert_eq!(path("/a/b/c").ancestor(2), path("/a/b"));
        assert_eq!(path("/a").ancestor(0), NodePath::root());
        assert_eq!((path("/a/b").depth(), NodePath::root().depth()), (2, 0));
    }
}
