//! Tests of watches: the changes that fire each watch, and the paths in the events.

use super::*;
use crate::Leftovers;

fn owned(list: &[&str]) -> Vec<String> {
    list.iter().map(|text| (*text).to_owned()).collect()
}

#[test]
fn new_watch_fires_once_even_on_missing_node() {
    let mut store = TestStore::new();
    let guest = store.guest(5);
    store.watch(guest, "/nowhere", "token").unwrap();
    assert_eq!(store.events(guest), [("/nowhere".into(), "token".into())]);
    assert_eq!(store.events(guest), []);
}

#[test]
fn watch_fires_for_changes_at_and_below_its_path_only() {
    let mut store = TestStore::new();
    let toolstack = store.toolstack();
    let watcher = store.toolstack();
    store.watch(watcher, "/a/b", "t").unwrap();
    store.events(watcher);
    for path in ["/a", "/a/b", "/a/b/c", "/a/bc", "/a/b/c/d/e"] {
        store.write(toolstack, path, "x").unwrap();
    }
    assert_eq!(store.event_paths(watcher), owned(&["/a/b", "/a/b/c", "/a/b/c/d/e"]));
    store.set_perms(toolstack, "/a/b", "r0").unwrap();
    store.mkdir(toolstack, "/a/b/m").unwrap();
    store.mkdir(toolstack, "/a/b/m").unwrap();
    store.rm(toolstack, "/a/b/c").unwrap();
    assert_eq!(store.event_paths(watcher), owned(&["/a/b", "/a/b/m", "/a/b/c"]));
}

#[test]
fn removal_of_parent_fires_watch_with_its_own_path() {
    let mut store = TestStore::new();
    let toolstack = store.toolstack();
    store.write(toolstack, "/a/b/c", "x").unwrap();
    let watcher = store.toolstack();
    for (path, token) in [("/a/b/c", "there"), ("/a/b/x", "missing"), ("/a", "above")] {
        store.watch(watcher, path, token).unwrap();
    }
    store.events(watcher);
    store.rm(toolstack, "/a/b").unwrap();
    let mut events = store.events(watcher);
    events.sort();
    assert_eq!(events, [("/a/b".into(), "above".into()), ("/a/b/c".into(), "there".into())]);
}

#[test]
fn relative_watch_gets_relative_paths() {
    let mut store = TestStore::new();
    let toolstack = store.toolstack();
    store.home(toolstack, 5);
    let guest = store.guest(5);
    store.watch(guest, "data", "t").unwrap();
    store.write(guest, "data/x", "1").unwrap();
    assert_eq!(store.event_paths(guest), owned(&["data", "data/x"]));
    store.write(toolstack, "/local/domain/5/data/x", "1").unwrap();
    assert_eq!(store.event_paths(guest), owned(&["data/x"]));
    store.rm(toolstack, "/local/domain/5").unwrap();
    assert_eq!(store.event_paths(guest), owned(&["data"]));
}

#[test]
fn depth_limits_events_of_watch() {
    let mut store = TestStore::new();
    let toolstack = store.toolstack();
    let [exact, one] = [0, 1].map(|depth| {
        let watcher = store.toolstack();
        store.watch_depth(watcher, "/a", "t", Some(depth)).unwrap();
        store.events(watcher);
        watcher
    });
    store.write(toolstack, "/a/b/c", "x").unwrap();
    assert_eq!(store.event_paths(exact), owned(&["/a"]), "created as an ancestor");
    assert_eq!(store.event_paths(one), owned(&["/a", "/a/b"]));
    store.write(toolstack, "/a/b/c", "y").unwrap();
    assert_eq!(store.event_paths(one), owned(&[]));
}

#[test]
fn duplicate_watch_and_unwatch_of_unknown_watch_are_refused() {
    let mut store = TestStore::new();
    let guest = store.guest(5);
    store.watch(guest, "data", "t").unwrap();
    assert_eq!(store.watch(guest, "data", "t"), Err(ErrorName::Exists));
    assert_eq!(store.watch(guest, "/local/domain/5/data", "t"), Err(ErrorName::Exists));
    store.watch(guest, "data", "u").unwrap();
    assert_eq!(store.unwatch(guest, "data", "x"), Err(ErrorName::NotFound));
    store.unwatch(guest, "/local/domain/5/data", "t").unwrap();
    assert_eq!(store.unwatch(guest, "data", "t"), Err(ErrorName::NotFound));
    let other = store.guest(6);
    assert_eq!(store.unwatch(other, "/local/domain/5/data", "u"), Err(ErrorName::NotFound));
}

#[test]
fn watch_on_unknown_special_name_is_refused() {
    let mut store = TestStore::new();
    let guest = store.guest(5);
    let answer = store.ask_raw(guest, MessageType::Watch, b"@other\0t\0");
    assert_eq!(answer, Err(ErrorName::Invalid));
}

#[test]
fn special_watches_fire_for_toolstacks_only() {
    let mut store = TestStore::new();
    let (toolstack, guest) = (store.toolstack(), store.guest(5));
    for id in [toolstack, guest] {
        store.watch(id, "@introduceDomain", "in").unwrap();
        store.watch(id, "@releaseDomain", "out").unwrap();
        store.events(id);
    }
    store.server.introduce(DomId(6));
    store.server.introduce(DomId(6));
    assert_eq!(store.events(toolstack), [("@introduceDomain".into(), "in".into())]);
    store.server.release(DomId(6), Leftovers::Remove);
    store.server.release(DomId(6), Leftovers::Remove);
    assert_eq!(store.events(toolstack), [("@releaseDomain".into(), "out".into())]);
    assert_eq!(store.events(guest), []);
}

#[test]
fn reset_drops_watches_and_transactions_of_its_connection_only() {
    let mut store = TestStore::new();
    let (one, two) = (store.toolstack(), store.toolstack());
    for id in [one, two] {
        store.watch(id, "/", "t").unwrap();
        store.events(id);
    }
    let (tx, kept) = (store.start(one).unwrap(), store.start(two).unwrap());
    store.ask(one, 0, &StoreRequest::ResetWatches).unwrap();
    store.write(two, "/a", "x").unwrap();
    assert_eq!(store.event_paths(one), owned(&[]));
    assert_eq!(store.event_paths(two), owned(&["/a"]));
    assert_eq!(store.end(one, tx, true), Err(ErrorName::NotFound));
    store.end(two, kept, true).unwrap();
}

#[test]
fn release_of_domain_fires_watches_on_removed_nodes() {
    let mut store = TestStore::new();
    let toolstack = store.toolstack();
    store.home(toolstack, 5);
    let guest = store.guest(5);
    store.write(guest, "data/state", "4").unwrap();
    store.watch(toolstack, "/local/domain/5/data/state", "t").unwrap();
    store.events(toolstack);
    store.server.release(DomId(5), Leftovers::Remove);
    assert_eq!(store.event_paths(toolstack), owned(&["/local/domain/5/data/state"]));
    assert!(!store.server.is_connected(guest));
}
