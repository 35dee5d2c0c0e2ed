//! Event queue of a client: waiting watch events in bounded memory.

use ringfence_wire::xenstore::{Path, WatchPath};
use std::collections::VecDeque;

/// Event of a watch.
///
/// An event asks the receiver to read the store again; it does not stand for exactly one change. Equal
/// waiting events are merged. While many events wait, further events of a watch are merged into one event
/// with the watch's own path. So an event with the path of the watch stands for any change at or below it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WatchEvent {
    /// Path of the changed node, relative or absolute as in the request that set the watch.
    pub path: String,
    pub token: String,
}

/// Watch of this client.
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

/// Watches of a client, and their waiting events.
#[derive(Debug)]
pub(super) struct EventQueue {
    watches: Vec<OwnWatch>,
    queue: VecDeque<WatchEvent>,
    /// Number of waiting events from which on events are merged by watch. The queue holds at most this
    /// number and one event for each watch.
    merge_from: usize,
    foreign: u64,
}

impl EventQueue {
    pub(super) fn new(merge_from: usize) -> EventQueue {
        EventQueue { watches: Vec::new(), queue: VecDeque::new(), merge_from, foreign: 0 }
    }

    pub(super) fn watches(&self) -> &[OwnWatch] {
        &self.watches
    }

    pub(super) fn add(&mut self, watch: OwnWatch) {
        self.watches.push(watch);
    }

    /// Removes a watch and its waiting events.
    pub(super) fn remove(&mut self, path: &str, token: &str) {
        self.watches.retain(|watch| watch.path != path || watch.token != token);
        let watches = &self.watches;
        self.queue.retain(|event| {
            // Another watch with the same token may cover the event.
            event.token != token
                || WatchPath::parse(event.path.as_bytes())
                    .is_ok_and(|path| watches.iter().any(|w| w.covers(path, token.as_bytes())))
        });
    }

    /// Queues an event from the server. An event that matches no watch is counted and dropped: the server
    /// may have sent it before it removed the watch.
    pub(super) fn push(&mut self, path: WatchPath<'_>, token: &[u8]) {
        let Some(watch) = self.watches.iter().find(|watch| watch.covers(path, token)) else {
            self.foreign = self.foreign.saturating_add(1);
            return;
        };
        let merging = self.queue.len() >= self.merge_from;
        let path = if merging { watch.path.as_str() } else { path.as_str() };
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

    /// Returns the number of events that matched no watch.
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

    fn popped(queue: &mut EventQueue) -> Vec<(String, String)> {
        std::iter::from_fn(|| queue.pop()).map(|event| (event.path, event.token)).collect()
    }

    fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
        list.iter().map(|(path, token)| ((*path).into(), (*token).into())).collect()
    }

    #[test]
    fn equal_waiting_events_are_merged_in_order() {
        let mut queue = queue(&[("/a", "t"), ("@releaseDomain", "r")]);
        for (path, token) in [("/a/x", "t"), ("@releaseDomain", "r"), ("/a/x", "t"), ("/a", "t")] {
            push(&mut queue, path, token);
        }
        assert_eq!(
            popped(&mut queue),
            pairs(&[("/a/x", "t"), ("@releaseDomain", "r"), ("/a", "t")])
        );
    }

    #[test]
    fn event_without_watch_is_counted_and_dropped() {
        let mut queue = queue(&[("/a", "t"), ("b", "t")]);
        for (path, token) in [("/a", "u"), ("/ab", "t"), ("/b", "t"), ("@introduceDomain", "t")] {
            push(&mut queue, path, token);
        }
        assert_eq!((popped(&mut queue), queue.foreign()), (vec![], 4));
    }

    #[test]
    fn xsa_349_event_flood_is_merged_by_watch() {
        let mut queue = queue(&[("/a", "t"), ("/b", "u")]);
        for n in 0..10_000 {
            push(&mut queue, &format!("/a/{n}"), "t");
            push(&mut queue, &format!("/b/{n}"), "u");
        }
        assert_eq!(queue.len(), 4 + 2, "the bound, and one for each watch");
        let popped = popped(&mut queue);
        assert!(popped.ends_with(&pairs(&[("/a", "t"), ("/b", "u")])), "{popped:?}");
    }

    #[test]
    fn events_of_removed_watch_are_dropped() {
        let mut queue = queue(&[("/a", "t"), ("/a/b", "t"), ("/c", "u")]);
        for (path, token) in [("/a/x", "t"), ("/a/b/y", "t"), ("/c", "u")] {
            push(&mut queue, path, token);
        }
        queue.remove("/a", "t");
        assert_eq!(popped(&mut queue), pairs(&[("/a/b/y", "t"), ("/c", "u")]));
    }
}
