//! Who is told of what.

use super::*;
use crate::Leftovers;

fn owned(list: &[&str]) -> Vec<String> {
    list.iter().map(|text| (*text).to_owned()).collect()
}

#[test]
fn a_watch_fires_once_at_once_even_on_nothing() {
    let mut bench = Bench::new();
    let guest = bench.guest(5);
    bench.watch(guest, "/nowhere", "token").unwrap();
    assert_eq!(bench.events(guest), [("/nowhere".into(), "token".into())]);
    assert_eq!(bench.events(guest), []);
}

#[test]
fn changes_at_and_below_are_told_and_others_not() {
    let mut bench = Bench::new();
    let toolstack = bench.toolstack();
    let watcher = bench.toolstack();
    bench.watch(watcher, "/a/b", "t").unwrap();
    bench.events(watcher);
    for path in ["/a", "/a/b", "/a/b/c", "/a/bc", "/a/b/c/d/e"] {
        bench.write(toolstack, path, "x").unwrap();
    }
    assert_eq!(bench.event_paths(watcher), owned(&["/a/b", "/a/b/c", "/a/b/c/d/e"]));
    bench.set_perms(toolstack, "/a/b", "r0").unwrap();
    bench.mkdir(toolstack, "/a/b/m").unwrap();
    bench.mkdir(toolstack, "/a/b/m").unwrap();
    bench.rm(toolstack, "/a/b/c").unwrap();
    assert_eq!(bench.event_paths(watcher), owned(&["/a/b", "/a/b/m", "/a/b/c"]));
}

#[test]
fn removal_of_a_parent_reports_the_watched_path() {
    let mut bench = Bench::new();
    let toolstack = bench.toolstack();
    bench.write(toolstack, "/a/b/c", "x").unwrap();
    let watcher = bench.toolstack();
    for (path, token) in [("/a/b/c", "there"), ("/a/b/x", "missing"), ("/a", "above")] {
        bench.watch(watcher, path, token).unwrap();
    }
    bench.events(watcher);
    bench.rm(toolstack, "/a/b").unwrap();
    let mut events = bench.events(watcher);
    events.sort();
    assert_eq!(events, [("/a/b".into(), "above".into()), ("/a/b/c".into(), "there".into())]);
}

#[test]
fn relative_watches_get_relative_events() {
    let mut bench = Bench::new();
    let toolstack = bench.toolstack();
    bench.home(toolstack, 5);
    let guest = bench.guest(5);
    bench.watch(guest, "data", "t").unwrap();
    bench.write(guest, "data/x", "1").unwrap();
    assert_eq!(bench.event_paths(guest), owned(&["data", "data/x"]));
    bench.write(toolstack, "/local/domain/5/data/x", "1").unwrap();
    assert_eq!(bench.event_paths(guest), owned(&["data/x"]));
    bench.rm(toolstack, "/local/domain/5").unwrap();
    assert_eq!(bench.event_paths(guest), owned(&["data"]));
}

#[test]
fn a_depth_bounds_what_is_told() {
    let mut bench = Bench::new();
    let toolstack = bench.toolstack();
    let [exact, one] = [0, 1].map(|depth| {
        let watcher = bench.toolstack();
        bench.watch_depth(watcher, "/a", "t", Some(depth)).unwrap();
        bench.events(watcher);
        watcher
    });
    bench.write(toolstack, "/a/b/c", "x").unwrap();
    assert_eq!(bench.event_paths(exact), owned(&["/a"]), "made on the way");
    assert_eq!(bench.event_paths(one), owned(&["/a", "/a/b"]));
    bench.write(toolstack, "/a/b/c", "y").unwrap();
    assert_eq!(bench.event_paths(one), owned(&[]));
}

#[test]
fn duplicates_and_strangers() {
    let mut bench = Bench::new();
    let guest = bench.guest(5);
    bench.watch(guest, "data", "t").unwrap();
    assert_eq!(bench.watch(guest, "data", "t"), Err(ErrorName::Exists));
    assert_eq!(bench.watch(guest, "/local/domain/5/data", "t"), Err(ErrorName::Exists));
    bench.watch(guest, "data", "u").unwrap();
    assert_eq!(bench.unwatch(guest, "data", "x"), Err(ErrorName::NotFound));
    bench.unwatch(guest, "/local/domain/5/data", "t").unwrap();
    assert_eq!(bench.unwatch(guest, "data", "t"), Err(ErrorName::NotFound));
    let other = bench.guest(6);
    assert_eq!(bench.unwatch(other, "/local/domain/5/data", "u"), Err(ErrorName::NotFound));
}

#[test]
fn unknown_special_names_are_refused() {
    let mut bench = Bench::new();
    let guest = bench.guest(5);
    let answer = bench.ask_raw(guest, MessageType::Watch, b"@other\0t\0");
    assert_eq!(answer, Err(ErrorName::Invalid));
}

#[test]
fn domains_that_come_and_go_are_told_to_toolstacks_alone() {
    let mut bench = Bench::new();
    let (toolstack, guest) = (bench.toolstack(), bench.guest(5));
    for id in [toolstack, guest] {
        bench.watch(id, "@introduceDomain", "in").unwrap();
        bench.watch(id, "@releaseDomain", "out").unwrap();
        bench.events(id);
    }
    bench.server.introduce(DomId(6));
    bench.server.introduce(DomId(6));
    assert_eq!(bench.events(toolstack), [("@introduceDomain".into(), "in".into())]);
    bench.server.release(DomId(6), Leftovers::Remove);
    bench.server.release(DomId(6), Leftovers::Remove);
    assert_eq!(bench.events(toolstack), [("@releaseDomain".into(), "out".into())]);
    assert_eq!(bench.events(guest), []);
}

#[test]
fn reset_drops_watches_and_transactions_of_that_connection_alone() {
    let mut bench = Bench::new();
    let (one, two) = (bench.toolstack(), bench.toolstack());
    for id in [one, two] {
        bench.watch(id, "/", "t").unwrap();
        bench.events(id);
    }
    let (tx, kept) = (bench.start(one).unwrap(), bench.start(two).unwrap());
    bench.ask(one, 0, &Request::ResetWatches).unwrap();
    bench.write(two, "/a", "x").unwrap();
    assert_eq!(bench.event_paths(one), owned(&[]));
    assert_eq!(bench.event_paths(two), owned(&["/a"]));
    assert_eq!(bench.end(one, tx, true), Err(ErrorName::NotFound));
    bench.end(two, kept, true).unwrap();
}

#[test]
fn a_release_tells_of_the_nodes_that_went() {
    let mut bench = Bench::new();
    let toolstack = bench.toolstack();
    bench.home(toolstack, 5);
    let guest = bench.guest(5);
    bench.write(guest, "data/state", "4").unwrap();
    bench.watch(toolstack, "/local/domain/5/data/state", "t").unwrap();
    bench.events(toolstack);
    bench.server.release(DomId(5), Leftovers::Remove);
    assert_eq!(bench.event_paths(toolstack), owned(&["/local/domain/5/data/state"]));
    assert!(!bench.server.is_connected(guest));
}
