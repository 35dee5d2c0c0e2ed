//! Tests of the limits, and of Xen's security advisories on xenstore, named by their numbers.

use super::*;
use crate::Leftovers;
use crate::quota::DEPTH_MAX;

/// Returns the default limits after `change`.
fn limits(change: impl FnOnce(&mut Limits)) -> Limits {
    let mut limits = Limits::default();
    change(&mut limits);
    limits
}

/// Returns a store with a toolstack and guest 5, which owns `/local/domain/5/data`.
fn guest_with(limits: Limits) -> (TestStore, ConnectionId, ConnectionId) {
    let mut store = TestStore::with(limits);
    let toolstack = store.toolstack();
    store.home(toolstack, 5);
    let guest = store.guest(5);
    (store, toolstack, guest)
}

#[test]
fn xsa_115_guest_gets_events_of_readable_nodes_only() {
    let (mut store, toolstack, guest) = guest_with(Limits::default());
    store.write(toolstack, "/secret/x", "1").unwrap();
    store.write(toolstack, "/shown/x", "1").unwrap();
    store.write(toolstack, "/shown/hidden", "1").unwrap();
    for (path, list) in [("/shown", "r0"), ("/shown/x", "r0"), ("/shown/hidden", "n0")] {
        store.set_perms(toolstack, path, list).unwrap();
    }
    store.watch(guest, "/", "t").unwrap();
    store.events(guest);

    store.write(toolstack, "/secret/x", "2").unwrap();
    store.write(toolstack, "/secret/new", "2").unwrap();
    store.rm(toolstack, "/secret").unwrap();
    store.write(toolstack, "/shown/hidden", "2").unwrap();
    assert_eq!(store.events(guest), []);

    store.write(toolstack, "/shown/x", "2").unwrap();
    // The listing of /shown also reveals the removal.
    store.rm(toolstack, "/shown/hidden").unwrap();
    store.set_perms(toolstack, "/shown/x", "n0").unwrap();
    assert_eq!(store.event_paths(guest), ["/shown/x", "/shown/hidden"]);
    store.write(toolstack, "/shown/x", "3").unwrap();
    assert_eq!(store.events(guest), []);
}

#[test]
fn xsa_115_removal_sends_no_event_of_hidden_node_below() {
    let (mut store, toolstack, guest) = guest_with(Limits::default());
    store.write(toolstack, "/dir/hidden", "1").unwrap();
    store.watch(guest, "/dir/hidden", "t").unwrap();
    store.events(guest);
    store.rm(toolstack, "/dir").unwrap();
    assert_eq!(store.events(guest), []);
}

#[test]
fn xsa_322_417_reused_domain_id_inherits_no_access() {
    for leftovers in [Leftovers::Remove, Leftovers::Keep] {
        let (mut store, toolstack, guest) = guest_with(Limits::default());
        store.write(toolstack, "/backend/5", "x").unwrap();
        store.set_perms(toolstack, "/backend/5", "n0 r5").unwrap();
        store.mkdir(toolstack, "/elsewhere").unwrap();
        store.set_perms(toolstack, "/elsewhere", "n0 b5").unwrap();
        store.write(guest, "/elsewhere/mine", "x").unwrap();
        store.server.release(DomId(5), leftovers);

        let next = store.guest(5);
        for path in ["/backend/5", "/elsewhere", "/elsewhere/mine", "/local/domain/5/data"] {
            assert_eq!(store.read(next, path), Err(ErrorName::Access), "{path}");
        }
        assert_eq!(store.get_perms(toolstack, "/backend/5").unwrap(), "n0");
        let mine = store.read(toolstack, "/elsewhere/mine").is_ok();
        let home = store.read(toolstack, "/local/domain/5").is_ok();
        let kept = leftovers == Leftovers::Keep;
        assert_eq!((mine, home), (kept, kept));
    }
}

#[test]
fn xsa_483_release_of_domain_frees_its_quota() {
    let (mut store, _, guest) = guest_with(limits(|limits| limits.nodes = 3));
    for round in 0..3 {
        store.write(guest, "data/x", "1").unwrap();
        store.write(guest, "data/y", "1").unwrap();
        assert_eq!(store.write(guest, "data/z", "1"), Err(ErrorName::NoSpace), "round {round}");
        store.rm(guest, "data/x").unwrap();
        store.rm(guest, "data/y").unwrap();
    }
    store.server.release(DomId(5), Leftovers::Remove);
    assert_eq!((store.server.nodes_of(DomId(5)), store.server.bytes_of(DomId(5))), (0, 0));
    store.server.audit().unwrap();
}

#[test]
fn xsa_326_nodes_and_their_bytes_above_limit_are_refused() {
    let (mut store, toolstack, guest) = guest_with(limits(|limits| {
        limits.nodes = 10;
        limits.node_bytes = 4000;
    }));
    for n in 0..9 {
        store.mkdir(guest, &format!("data/{n}")).unwrap();
    }
    assert_eq!(store.mkdir(guest, "data/9"), Err(ErrorName::NoSpace));
    let value = "x".repeat(2048);
    store.write(guest, "data/0", &value).unwrap();
    assert_eq!(store.write(guest, "data/1", &value), Err(ErrorName::NoSpace));
    assert_eq!(store.write(guest, "data/1", &"x".repeat(2049)), Err(ErrorName::NoSpace));
    store.write(guest, "data/0", "less").unwrap();
    store.write(guest, "data/1", &value).unwrap();
    // The toolstack is exempt.
    store.write(toolstack, "/local/domain/5/data/more", &value).unwrap();
    let refused = store.server.refusals();
    assert_eq!((refused.nodes, refused.node_bytes, refused.value_bytes), (1, 1, 1));
}

#[test]
fn xsa_326_watches_transactions_connections_and_permissions_above_limit_are_refused() {
    let (mut store, _, guest) = guest_with(limits(|limits| limits.connections = 2));
    for n in 0..128 {
        store.watch(guest, "data", &n.to_string()).unwrap();
    }
    let second = store.guest(5);
    assert_eq!(store.watch(second, "data", "t"), Err(ErrorName::NoSpace), "all together");
    for _ in 0..9 {
        store.start(guest).unwrap();
    }
    store.start(second).unwrap();
    assert_eq!(store.start(guest), Err(ErrorName::NoSpace));
    store.set_perms(guest, "data", "n5 r1 r2 r3 r4").unwrap();
    assert_eq!(store.set_perms(guest, "data", "n5 r1 r2 r3 r4 r6"), Err(ErrorName::NoSpace));
    assert!(store.server.connect(DomId(5), false).is_err());
    let refused = *store.server.refusals();
    assert_eq!((refused.watches, refused.transactions), (1, 1));
    assert_eq!((refused.permissions, refused.connections), (1, 1));
    store.server.disconnect(guest);
    store.watch(second, "data", "t").unwrap();
    store.start(second).unwrap();
}

#[test]
fn xsa_326_transaction_above_its_limits_is_refused() {
    let (mut store, toolstack, guest) = guest_with(limits(|limits| {
        limits.transaction_nodes = 20;
        limits.transaction_bytes = 8000;
    }));
    let tx = store.start(guest).unwrap();
    let mut answers = (0..50).map(|n| {
        let path = format!("data/{n}");
        store.ask(guest, tx, &StoreRequest::Read { path: at(&path) })
    });
    assert!(answers.by_ref().take(19).all(|answer| answer == Err(ErrorName::NotFound)));
    assert!(answers.all(|answer| answer == Err(ErrorName::NoSpace)));

    let tx = store.start(guest).unwrap();
    let value = "x".repeat(2000);
    let mut written = 0;
    while store.write_in(guest, tx, "data/x", &value).is_ok() {
        written += 1;
        assert!(written < 5, "8000 bytes hold fewer values of 2000");
    }
    assert_eq!(written, 3);
    let refused = *store.server.refusals();
    assert_eq!((refused.transaction_nodes, refused.transaction_bytes), (31, 1));

    let tx = store.start(toolstack).unwrap();
    for n in 0..50 {
        store.write_in(toolstack, tx, &format!("/many/{n}"), &value).unwrap();
    }
    store.end(toolstack, tx, true).unwrap();
}

#[test]
fn xsa_326_client_with_unread_replies_is_paused() {
    let (mut store, toolstack, guest) = guest_with(Limits::default());
    store.write(guest, "data/x", &"x".repeat(2000)).unwrap();
    let mut sent = 0;
    while store.server.may_read(guest) {
        store.send(guest, 0, &StoreRequest::Read { path: at("data/x") });
        sent += 1;
        assert!(sent < 1000, "64 KiB hold fewer replies of 2 KB");
    }
    assert!(store.server.may_read(toolstack), "no other connection is paused");
    assert_eq!(store.server.counters().output_paused, 1);
    assert_eq!(store.receive(guest).len(), sent);
    assert!(store.server.may_read(guest));
}

#[test]
fn xsa_349_unread_events_are_merged_and_end_connection_above_limit() {
    let (mut store, toolstack, guest) = guest_with(limits(|limits| {
        limits.output_soft = 4 << 10;
        limits.output_hard = 16 << 10;
    }));
    let other = store.guest(6);
    for n in 0..100 {
        store.watch(guest, "data", &format!("token-{n}")).unwrap();
    }
    store.write(guest, "data/x", "1").unwrap();
    store.events(guest);

    for _ in 0..1000 {
        store.write(toolstack, "/local/domain/5/data/x", "same").unwrap();
    }
    assert!(store.server.is_connected(guest), "equal events cost nothing more");
    assert!(!store.server.may_read(guest));
    assert_eq!(store.server.counters().events_merged, 999 * 100);

    for n in 0..10 {
        store.write(toolstack, &format!("/local/domain/5/data/other-{n}"), "1").unwrap();
    }
    assert!(!store.server.is_connected(guest), "above the hard limit");
    assert!(store.server.output(guest).is_none());
    assert!(store.server.is_connected(other) && store.server.is_connected(toolstack));
    assert_eq!(store.server.counters().output_overrun, 1);
    let ready: Vec<_> = std::iter::from_fn(|| store.server.take_ready()).collect();
    assert!(ready.contains(&guest), "the owner of the socket learns of the drop");
    store.server.audit().unwrap();
}

#[test]
fn xsa_349_event_flood_pauses_guest_and_keeps_toolstack_connected() {
    let (mut store, toolstack, guest) = guest_with(Limits::default());
    let idle = store.toolstack();
    store.watch(idle, "/local/domain", "t").unwrap();
    store.events(idle);
    let mut written = 0u32;
    while store.server.may_read(guest) {
        // A new name each time, within the quota of nodes.
        store.write(guest, &format!("data/{written}"), "1").unwrap();
        store.rm(guest, &format!("data/{written}")).unwrap();
        written += 1;
        assert!(written < 10_000, "64 KiB hold fewer events");
    }
    assert!(store.server.is_connected(idle));
    assert!(store.server.may_read(toolstack), "toolstacks are not paused");
    store.events(idle);
    assert!(store.server.may_read(guest));
}

#[test]
fn xsa_352_419_owner_change_by_guest_is_refused() {
    let (mut store, toolstack, guest) = guest_with(Limits::default());
    assert_eq!(store.set_perms(guest, "data", "b6"), Err(ErrorName::NotPermitted));
    assert_eq!(store.set_perms(guest, "data", "b6 b5"), Err(ErrorName::NotPermitted));
    assert_eq!(store.get_perms(toolstack, "/local/domain/5/data").unwrap(), "n5");
    store.set_perms(toolstack, "/local/domain/5/data", "n6").unwrap();
    assert_eq!(store.server.nodes_of(DomId(5)), 0, "the charge moves with the node");
    assert_eq!(store.server.nodes_of(DomId(6)), 1);
}

#[test]
fn xsa_353_guest_access_to_root_is_refused() {
    let (mut store, toolstack, guest) = guest_with(Limits::default());
    for answer in [
        store.directory(guest, "/").map(drop),
        store.write(guest, "/", "x"),
        store.mkdir(guest, "/mine"),
        store.rm(guest, "/"),
        store.set_perms(guest, "/", "b5"),
    ] {
        assert_eq!(answer, Err(ErrorName::Access));
    }
    assert_eq!(store.get_perms(toolstack, "/").unwrap(), "n0");
}

#[test]
fn xsa_418_path_deeper_than_limit_is_refused() {
    let mut store = TestStore::with(limits(|limits| limits.depth = usize::MAX));
    let toolstack = store.toolstack();
    let deepest = "/a".repeat(DEPTH_MAX);
    store.mkdir(toolstack, &deepest).unwrap();
    let deeper = "/a".repeat(DEPTH_MAX + 1);
    assert_eq!(store.mkdir(toolstack, &deeper), Err(ErrorName::NoSpace));
    assert_eq!(store.read(toolstack, &deeper), Err(ErrorName::NotFound));
    assert_eq!(store.server.refusals().depth, 1);
    store.server.audit().unwrap();
    store.rm(toolstack, "/a").unwrap();
}

#[test]
fn xsa_420_commit_above_current_quota_is_refused() {
    let (mut store, toolstack, guest) = guest_with(limits(|limits| limits.nodes = 6));
    // Each transaction stays within the quota, relative to the tree at its start.
    let transactions: Vec<u32> = (0..3)
        .map(|n| {
            store.mkdir(toolstack, &format!("/room/{n}")).unwrap();
            store.set_perms(toolstack, &format!("/room/{n}"), "n0 b5").unwrap();
            let tx = store.start(guest).unwrap();
            for child in 0..3 {
                store.write_in(guest, tx, &format!("/room/{n}/{child}"), "x").unwrap();
            }
            tx
        })
        .collect();
    let ends: Vec<_> = transactions.iter().map(|tx| store.end(guest, *tx, true)).collect();
    assert_eq!(ends, [Ok(()), Err(ErrorName::NoSpace), Err(ErrorName::NoSpace)]);
    assert_eq!(store.directory(toolstack, "/room/1").unwrap(), [] as [&str; 0], "all or nothing");
    assert_eq!(store.server.nodes_of(DomId(5)), 4);
}

#[test]
fn xsa_481_path_with_empty_name_is_refused() {
    let mut store = TestStore::new();
    let guest = store.guest(5);
    for path in ["/local/domain/\0", "//\0", "/a//b\0", "a/\0", "\0"] {
        let answer = store.ask_raw(guest, MessageType::Read, path.as_bytes());
        assert_eq!(answer, Err(ErrorName::Invalid), "{path:?}");
    }
}

#[test]
fn token_too_long_for_event_is_refused() {
    let mut store = TestStore::new();
    let guest = store.guest(5);
    let path = format!("/{}", "p".repeat(3071));
    let token = "t".repeat(4096 - 3072 - 2);
    store.watch(guest, &path, &token).unwrap();
    assert_eq!(store.events(guest), [(path.clone(), token.clone())]);
    let token = format!("{token}t");
    let mut payload = [b"/a\0".as_slice(), token.as_bytes()].concat();
    payload.push(0);
    assert_eq!(store.ask_raw(guest, MessageType::Watch, &payload), Err(ErrorName::Invalid));
}
