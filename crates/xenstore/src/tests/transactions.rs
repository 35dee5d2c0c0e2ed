//! Tests of transactions: isolation, commit, conflicts.

use super::*;

fn setup() -> (TestStore, ConnectionId, ConnectionId) {
    let mut store = TestStore::new();
    let (one, two) = (store.toolstack(), store.toolstack());
    store.write(one, "/a/x", "1").unwrap();
    store.write(one, "/b/x", "1").unwrap();
    (store, one, two)
}

fn read_in(store: &mut TestStore, id: ConnectionId, tx: u32, path: &str) -> Answer {
    store.ask(id, tx, &StoreRequest::Read { path: at(path) })
}

#[test]
fn writes_in_transaction_are_visible_outside_after_commit_only() {
    let (mut store, one, two) = setup();
    store.watch(two, "/", "t").unwrap();
    store.events(two);
    let tx = store.start(one).unwrap();
    store.write_in(one, tx, "/a/x", "2").unwrap();
    store.write_in(one, tx, "/a/new", "3").unwrap();
    assert_eq!(read_in(&mut store, one, tx, "/a/x").unwrap(), b"2");
    assert_eq!(store.read(one, "/a/x").unwrap(), b"1");
    assert_eq!(store.read(two, "/a/new"), Err(ErrorName::NotFound));
    assert_eq!(store.events(two), [], "no event before the commit");
    store.end(one, tx, true).unwrap();
    assert_eq!(store.read(two, "/a/x").unwrap(), b"2");
    assert_eq!(store.event_paths(two), ["/a/x", "/a/new"]);
}

#[test]
fn abort_changes_nothing() {
    let (mut store, one, two) = setup();
    store.watch(two, "/", "t").unwrap();
    store.events(two);
    let tx = store.start(one).unwrap();
    store.write_in(one, tx, "/a/x", "2").unwrap();
    store.end(one, tx, false).unwrap();
    assert_eq!(store.read(two, "/a/x").unwrap(), b"1");
    assert_eq!(store.events(two), []);
    assert_eq!(store.end(one, tx, true), Err(ErrorName::NotFound), "the transaction ended");
}

#[test]
fn change_of_read_node_is_conflict() {
    let (mut store, one, two) = setup();
    let tx = store.start(one).unwrap();
    read_in(&mut store, one, tx, "/a/x").unwrap();
    store.write_in(one, tx, "/b/x", "2").unwrap();
    store.write(two, "/a/x", "other").unwrap();
    assert_eq!(store.end(one, tx, true), Err(ErrorName::Again));
    assert_eq!(store.read(one, "/b/x").unwrap(), b"1", "no write was applied");
    assert_eq!(store.server.counters().conflicts, 1);
}

#[test]
fn change_outside_read_set_is_kept_without_conflict() {
    let (mut store, one, two) = setup();
    let tx = store.start(one).unwrap();
    store.write_in(one, tx, "/a/x", "2").unwrap();
    store.write(two, "/b/x", "other").unwrap();
    store.write(two, "/b/y", "new").unwrap();
    store.end(one, tx, true).unwrap();
    assert_eq!(store.read(one, "/a/x").unwrap(), b"2");
    assert_eq!(store.read(one, "/b/x").unwrap(), b"other");
    assert_eq!(store.read(one, "/b/y").unwrap(), b"new");
}

#[test]
fn change_of_any_reply_is_conflict() {
    type Query = fn(Path<'static>) -> StoreRequest<'static>;
    type Interfere = fn(&mut TestStore, ConnectionId) -> Result<(), ErrorName>;
    let directory: Query = |path| StoreRequest::Directory { path };
    let read: Query = |path| StoreRequest::Read { path };
    let perms: Query = |path| StoreRequest::GetPerms { path };
    let cases: [(&str, Query, &str, Interfere); 6] = [
        ("a listing", directory, "/a", |store, id| store.write(id, "/a/y", "")),
        ("a listing, removal", directory, "/a", |store, id| store.rm(id, "/a/x")),
        ("absence", read, "/a/y", |store, id| store.write(id, "/a/y", "")),
        ("deep absence", read, "/c/d/e", |store, id| store.mkdir(id, "/c")),
        ("permissions", perms, "/a", |store, id| store.set_perms(id, "/a", "n0")),
        ("the same made again", read, "/a/x", |store, id| {
            store.rm(id, "/a/x")?;
            store.write(id, "/a/x", "1")
        }),
    ];
    for (name, query, path, interfere) in cases {
        let (mut store, one, two) = setup();
        let tx = store.start(one).unwrap();
        let _answer = store.ask(one, tx, &query(at(path)));
        store.write_in(one, tx, "/b/x", "2").unwrap();
        interfere(&mut store, two).unwrap();
        assert_eq!(store.end(one, tx, true), Err(ErrorName::Again), "{name}");
    }
}

#[test]
fn removal_in_transaction_removes_later_changes_below() {
    let (mut store, one, two) = setup();
    let tx = store.start(one).unwrap();
    store.ask(one, tx, &StoreRequest::Rm { path: at("/a") }).unwrap();
    store.write(two, "/a/x", "deeper than what was looked at").unwrap();
    store.end(one, tx, true).unwrap();
    assert_eq!(store.read(one, "/a/x"), Err(ErrorName::NotFound));
    store.server.audit().unwrap();
}

#[test]
fn transaction_without_writes_commits() {
    let (mut store, one, two) = setup();
    let tx = store.start(one).unwrap();
    read_in(&mut store, one, tx, "/a/x").unwrap();
    store.write(two, "/a/x", "2").unwrap();
    assert_eq!(read_in(&mut store, one, tx, "/a/x").unwrap(), b"1", "the value at its start");
    store.end(one, tx, true).unwrap();
}

#[test]
fn transaction_ids_belong_to_connection_and_are_never_zero() {
    let (mut store, one, two) = setup();
    let tx = store.start(one).unwrap();
    assert_ne!(tx, 0);
    assert_eq!(store.write_in(two, tx, "/a/x", "2"), Err(ErrorName::NotFound));
    assert_eq!(store.ask(one, tx, &StoreRequest::TransactionStart), Err(ErrorName::Busy));
    assert_eq!(store.ask(one, 99, &StoreRequest::TransactionStart), Err(ErrorName::NotFound));
    assert_eq!(store.end(one, 0, true), Err(ErrorName::NotFound));
}

#[test]
fn guest_is_paused_during_transaction_after_conflict() {
    let mut store = TestStore::new();
    let toolstack = store.toolstack();
    store.home(toolstack, 5);
    let guest = store.guest(5);
    let path = "/local/domain/5/data/x";
    let tx = store.start(toolstack).unwrap();
    store.write_in(toolstack, tx, path, "toolstack").unwrap();
    store.write(guest, path, "guest").unwrap();
    assert_eq!(store.end(toolstack, tx, true), Err(ErrorName::Again));
    assert!(store.server.may_read(guest));

    let tx = store.start(toolstack).unwrap();
    assert!(!store.server.may_read(guest), "paused until the transaction ends");
    assert!(store.server.may_read(toolstack));
    store.write_in(toolstack, tx, path, "toolstack").unwrap();
    store.end(toolstack, tx, true).unwrap();
    assert!(store.server.may_read(guest));

    // A toolstack that disconnects resumes the guest too.
    let tx = store.start(toolstack).unwrap();
    store.write_in(toolstack, tx, path, "x").unwrap();
    store.write(guest, path, "guest").unwrap();
    assert_eq!(store.end(toolstack, tx, true), Err(ErrorName::Again));
    store.start(toolstack).unwrap();
    assert!(!store.server.may_read(guest));
    store.server.disconnect(toolstack);
    assert!(store.server.may_read(guest));
}
