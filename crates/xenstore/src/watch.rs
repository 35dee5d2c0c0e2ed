//! Watches: selection of the connections that get an event for a change.
//!
//! The table is keyed by the watched path. A change of a node fires the watches on it and on its ancestors.
//! A removal also fires the watches on nodes below that existed, each with its own path.
//!
//! An unprivileged domain gets only events about facts that it could find out by reading (XSA-115): a
//! change of a node that it may read before or after the change, or the creation or removal of a node whose
//! parent it may read. The special names are for privileged connections only.

use super::access::{Actor, Change, ChangeKind};
use super::path::parent;
use super::server::ConnectionId;
use super::tree::Tree;
use ringfence_wire::grant::DomId;
use ringfence_wire::xenstore::domain_path;
use std::collections::BTreeMap;
use std::ops::Bound;

/// Watch of one connection.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Watch {
    pub(super) connection: ConnectionId,
    pub(super) actor: Actor,
    /// Token that each event carries; contains no NUL.
    pub(super) token: Box<[u8]>,
    /// Number of levels below the path that fire the watch; `None` for all.
    pub(super) depth: Option<u32>,
    /// Set if the watch was requested with a relative path, so that its events carry relative paths.
    pub(super) relative: bool,
}

impl Watch {
    /// Returns `path` in the form that events of this watch carry.
    pub(super) fn event_path<'a>(&self, path: &'a str) -> &'a str {
        if !self.relative {
            return path;
        }
        let below = path.strip_prefix(&*domain_path(self.actor.domain));
        below.and_then(|below| below.strip_prefix('/')).unwrap_or(path)
    }

    fn covers_depth(&self, levels: usize) -> bool {
        self.depth.is_none_or(|depth| usize::try_from(depth).is_ok_and(|depth| levels <= depth))
    }
}

/// Watches of all connections.
#[derive(Default, Debug)]
pub(super) struct WatchTable {
    /// Watches by absolute path or special name. No list is empty.
    by_path: BTreeMap<Box<str>, Vec<Watch>>,
}

/// Trees before and after some changes.
#[derive(Clone, Copy)]
pub(super) struct Versions<'a> {
    pub(super) before: &'a Tree,
    pub(super) after: &'a Tree,
}

impl Versions<'_> {
    fn visible(self, actor: Actor, path: &str) -> bool {
        let reads = |path| actor.may_read(self.before, path) || actor.may_read(self.after, path);
        if actor.privileged || reads(path) {
            return true;
        }
        let came_or_went = self.before.get(path).is_some() != self.after.get(path).is_some();
        came_or_went && parent(path).is_some_and(reads)
    }
}

impl WatchTable {
    /// Returns `true` if `connection` has a watch on `path` with `token`.
    pub(super) fn contains(&self, path: &str, connection: ConnectionId, token: &[u8]) -> bool {
        self.by_path.get(path).is_some_and(|watches| {
            watches.iter().any(|watch| watch.connection == connection && *watch.token == *token)
        })
    }

    pub(super) fn insert(&mut self, path: &str, watch: Watch) {
        self.by_path.entry(path.into()).or_default().push(watch);
    }

    /// Removes a watch. Returns `false` if there was none.
    pub(super) fn remove(&mut self, path: &str, connection: ConnectionId, token: &[u8]) -> bool {
        let Some(watches) = self.by_path.get_mut(path) else {
            return false;
        };
        let before = watches.len();
        watches.retain(|watch| watch.connection != connection || *watch.token != *token);
        let removed = watches.len() < before;
        if watches.is_empty() {
            self.by_path.remove(path);
        }
        removed
    }

    /// Removes all watches of a connection.
    pub(super) fn remove_all(&mut self, connection: ConnectionId) {
        self.by_path.retain(|_, watches| {
            watches.retain(|watch| watch.connection != connection);
            !watches.is_empty()
        });
    }

    /// Returns `true` if the table has no watch.
    #[cfg(any(test, feature = "test-utils"))]
    pub(super) fn is_empty(&self) -> bool {
        self.by_path.is_empty()
    }

    /// Returns the number of watches of all connections of `domain`.
    pub(super) fn count(&self, domain: DomId) -> usize {
        let all = self.by_path.values().flatten();
        all.filter(|watch| watch.actor.domain == domain).count()
    }

    /// Calls `notify` for each watch that `change` fires, with the path of the event.
    pub(super) fn match_change(
        &self,
        change: &Change,
        versions: Versions<'_>,
        mut notify: impl FnMut(&Watch, &str),
    ) {
        let path = change.path.as_str();
        for (levels, watched) in change.path.upwards().enumerate() {
            for watch in self.by_path.get(watched).into_iter().flatten() {
                let redundant = change.kind == ChangeKind::CreatedAncestor && watch.depth.is_none();
                if !redundant && watch.covers_depth(levels) && versions.visible(watch.actor, path) {
                    notify(watch, path);
                }
            }
        }
        if change.kind == ChangeKind::Removed {
            self.match_removed(path, versions, notify);
        }
    }

    /// Calls `notify` for the watches on nodes below `path`, which were removed with it.
    fn match_removed(
        &self,
        path: &str,
        versions: Versions<'_>,
        mut notify: impl FnMut(&Watch, &str),
    ) {
        let below = format!("{path}/");
        let from = Bound::Included(below.as_str());
        for (watched, watches) in self.by_path.range::<str, _>((from, Bound::Unbounded)) {
            if !watched.starts_with(&below) {
                break;
            }
            if versions.before.get(watched).is_none() {
                continue;
            }
            for watch in watches {
                if versions.visible(watch.actor, watched) {
                    notify(watch, watched);
                }
            }
        }
    }

    /// Calls `notify` for each privileged watch on the special name `event_path`.
    pub(super) fn match_special(&self, name: &str, mut notify: impl FnMut(&Watch, &str)) {
        for watch in self.by_path.get(name).into_iter().flatten() {
            if watch.actor.privileged {
                notify(watch, name);
            }
        }
    }
}
