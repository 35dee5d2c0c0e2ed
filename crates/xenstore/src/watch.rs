//! Watches: who is told of which change.
//!
//! Watches are kept by the path they are on. A change of a node is told to those on it and on every
//! node above; a removal as well to those on nodes that went with it, who get their own path.
//!
//! An unprivileged domain is told only of what it could find out by looking (XSA-115): a node that
//! it may read, before or after the change; or that a node came or went whose parent it may read.
//! The special names are for privileged connections alone.

use super::access::{Actor, Change, ChangeKind};
use super::path::parent;
use super::server::ConnectionId;
use super::tree::Tree;
use ringfence_wire::grant::DomId;
use ringfence_wire::xenstore::domain_path;
use std::collections::BTreeMap;
use std::ops::Bound;

/// One watch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Watch {
    pub(super) connection: ConnectionId,
    pub(super) actor: Actor,
    /// Comes back in each event; no NUL.
    pub(super) token: Box<[u8]>,
    /// How many levels below the path count; all when absent.
    pub(super) depth: Option<u32>,
    /// Whether it was set with a relative path, so that events have one as well.
    pub(super) relative: bool,
}

impl Watch {
    /// The form in which this watch is told of `path`.
    pub(super) fn name<'a>(&self, path: &'a str) -> &'a str {
        if !self.relative {
            return path;
        }
        let below = path.strip_prefix(&*domain_path(self.actor.domain));
        below.and_then(|below| below.strip_prefix('/')).unwrap_or(path)
    }

    fn reaches(&self, levels: usize) -> bool {
        self.depth.is_none_or(|depth| usize::try_from(depth).is_ok_and(|depth| levels <= depth))
    }
}

/// All watches.
#[derive(Default, Debug)]
pub(super) struct WatchTable {
    /// By absolute path or special name; no list is empty.
    by_path: BTreeMap<Box<str>, Vec<Watch>>,
}

/// The tree before and after some changes.
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
    /// Whether `connection` has a watch on `path` with `token`.
    pub(super) fn contains(&self, path: &str, connection: ConnectionId, token: &[u8]) -> bool {
        self.by_path.get(path).is_some_and(|watches| {
            watches.iter().any(|watch| watch.connection == connection && *watch.token == *token)
        })
    }

    pub(super) fn insert(&mut self, path: &str, watch: Watch) {
        self.by_path.entry(path.into()).or_default().push(watch);
    }

    /// Removes a watch; `false` if there was none.
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

    /// Whether there are none.
    #[cfg(any(test, feature = "test-utils"))]
    pub(super) fn is_empty(&self) -> bool {
        self.by_path.is_empty()
    }

    /// How many watches all connections of `domain` have.
    pub(super) fn count(&self, domain: DomId) -> usize {
        let all = self.by_path.values().flatten();
        all.filter(|watch| watch.actor.domain == domain).count()
    }

    /// Calls `tell` for each watch that has to know of `change`, with the path to tell.
    pub(super) fn match_change(
        &self,
        change: &Change,
        versions: Versions<'_>,
        mut tell: impl FnMut(&Watch, &str),
    ) {
        let path = change.path.as_str();
        for (levels, place) in change.path.upwards().enumerate() {
            for watch in self.by_path.get(place).into_iter().flatten() {
                let twice = change.kind == ChangeKind::MadeOnTheWay && watch.depth.is_none();
                if !twice && watch.reaches(levels) && versions.visible(watch.actor, path) {
                    tell(watch, path);
                }
            }
        }
        if change.kind == ChangeKind::Removed {
            self.match_removed(path, versions, tell);
        }
    }

    /// The watches on nodes below `path`, which went with it.
    fn match_removed(
        &self,
        path: &str,
        versions: Versions<'_>,
        mut tell: impl FnMut(&Watch, &str),
    ) {
        let below = format!("{path}/");
        let from = Bound::Included(below.as_str());
        for (place, watches) in self.by_path.range::<str, _>((from, Bound::Unbounded)) {
            if !place.starts_with(&below) {
                break;
            }
            if versions.before.get(place).is_none() {
                continue;
            }
            for watch in watches {
                if versions.visible(watch.actor, place) {
                    tell(watch, place);
                }
            }
        }
    }

    /// Calls `tell` for each privileged watch on the special name `name`.
    pub(super) fn match_special(&self, name: &str, mut tell: impl FnMut(&Watch, &str)) {
        for watch in self.by_path.get(name).into_iter().flatten() {
            if watch.actor.privileged {
                tell(watch, name);
            }
        }
    }
}
