//! Watch events that wait to be taken, in bounded memory.

use ringfence_wire::xenstore::{Path, WatchPath};
use std::collections::VecDeque;

/// A watch fired.
///
/// Events say "look again", not "this happened once": equal ones that wait are merged, and when too
/// many wait, the ones of a watch are merged into a single one for the watch's own path. So an event
/// with the path of the watch stands for any change at or below it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WatchEvent {
    /// What changed, in the form (relative, absolute) that the watch was set with.
    pub path: String,
    /// The token of the watch.
    pub token: String,
}

/// A watch of this client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct OwnWatch {
    pub(super) path: String,
    pub(super) token: String,
}

impl OwnWatch {
    fn covers(&self, path: WatchPath<'_>, token: &[u8]) -> bool {
        if self.token.as_bytes() != token {
            return false;
        }
        match (path, WatchPath::parse(self.path.as_bytes())) {
            (WatchPath::Node(path), Ok(WatchPath::Node(own))) => within(path, own),
            _ => path.as_str() == self.path,
        }
    }
}

fn within(path: Path<'_>, own: Path<'_>) -> bool {
    path.is_absolute() == own.is_absolute() && path.is_within(own)
}

/// The watches of a client, and their events.
#[derive(Debug)]
pub(super) struct EventQueue {
    watches: Vec<OwnWatch>,
    queue: VecDeque<WatchEvent>,
    /// Above this many events, they are merged by watch. So the queue never holds more than this
    /// and one for each watch.
    crowded: usize,
    foreign: u64,
}

impl EventQueue {
    pub(super) fn new(crowded: usize) -> EventQueue {
        EventQueue { watches: Vec::new(), queue: VecDeque::new(), crowded, foreign: 0 }
    }

    pub(super) fn watches(&self) -> &[OwnWatch] {
        &self.watches
    }

    pub(super) fn add(&mut self, watch: OwnWatch) {
        self.watches.push(watch);
    }

    /// Forgets a watch and its events.
    pub(super) fn remove(&mut self, path: &str, token: &str) {
        self.watches.retain(|watch| watch.path != path || watch.token != token);
        let watches = &self.watches;
        self.queue.retain(|event| {
            // Another watch with the same token may be above or below this one.
            event.token != token
                || WatchPath::parse(event.path.as_bytes())
                    .is_ok_and(|path| watches.iter().any(|w| w.covers(path, token.as_bytes())))
        });
    }

    /// Takes in an event from the server. One that belongs to no watch is not kept: it may have
    /// been on its way when the watch was removed.
    pub(super) fn push(&mut self, path: WatchPath<'_>, token: &[u8]) {
        let Some(watch) = self.watches.iter().find(|watch| watch.covers(path, token)) else {
            self.foreign = self.foreign.saturating_add(1);
            return;
        };
        let crowded = self.queue.len() >= self.crowded;
        let path = if crowded { watch.path.as_str() } else { path.as_str() };
        let waits = |event: &WatchEvent| event.path == path && event.token.as_bytes() == token;
        if !self.queue.iter().any(waits) {
            let event = WatchEvent { path: path.to_owned(), token: watch.token.clone() };
            self.queue.push_back(event);
        }
    }

    pub(super) fn pop(&mut self) -> Option<WatchEvent> {
        self.queue.pop_front()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Events that belonged to no watch.
    pub(super) fn foreign(&self) -> u64 {
        self.foreign
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(watches: &[(&str, &str)]) -> EventQueue {
        let mut queue = EventQueue::new(4);
        for (path, token) in watches {
            queue.add(OwnWatch { path: (*path).into(), token: (*token).into() });
        }
        queue
    }

    fn push(queue: &mut EventQueue, path: &str, token: &str) {
        queue.push(WatchPath::parse(path.as_bytes()).unwrap(), token.as_bytes());
    }

    fn taken(queue: &mut EventQueue) -> Vec<(String, String)> {
        std::iter::from_fn(|| queue.pop()).map(|event| (event.path, event.token)).collect()
    }

    fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter().map(|(path, token)| ((*path).into(), (*token).into())).collect()
    }

    #[test]
    fn equal_events_are_one_and_the_order_stays() {
        let mut queue = queue(&[("/a", "t"), ("@releaseDomain", "r")]);
        for (path, token) in [("/a/x", "t"), ("@releaseDomain", "r"), ("/a/x", "t"), ("/a", "t")] {
            push(&mut queue, path, token);
        }
        assert_eq!(
            taken(&mut queue),
            pairs(&[("/a/x", "t"), ("@releaseDomain", "r"), ("/a", "t")])
        );
    }

    #[test]
    fn what_no_watch_covers_is_counted_and_dropped() {
        let mut queue = queue(&[("/a", "t"), ("b", "t")]);
        for (path, token) in [("/a", "u"), ("/ab", "t"), ("/b", "t"), ("@introduceDomain", "t")] {
            push(&mut queue, path, token);
        }
        assert_eq!((taken(&mut queue), queue.foreign()), (vec![], 4));
    }

    #[test]
    fn xsa_349_a_flood_of_events_is_merged_by_watch() {
        let mut queue = queue(&[("/a", "t"), ("/b", "u")]);
        for n in 0..10_000 {
            push(&mut queue, &format!("/a/{n}"), "t");
            push(&mut queue, &format!("/b/{n}"), "u");
        }
        assert_eq!(queue.len(), 4 + 2, "the bound, and one for each watch");
        let taken = taken(&mut queue);
        assert!(taken.ends_with(&pairs(&[("/a", "t"), ("/b", "u")])), "{taken:?}");
    }

    #[test]
    fn events_of_a_removed_watch_go_with_it() {
        let mut queue = queue(&[("/a", "t"), ("/a/b", "t"), ("/c", "u")]);
        for (path, token) in [("/a/x", "t"), ("/a/b/y", "t"), ("/c", "u")] {
            push(&mut queue, path, token);
        }
        queue.remove("/a", "t");
        assert_eq!(taken(&mut queue), pairs(&[("/a/b/y", "t"), ("/c", "u")]));
    }
}
