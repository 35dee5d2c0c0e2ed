//! What Xen's security advisories on xenstore teach, each under its number, and the bounds.

use super::*;
use crate::Leftovers;
use crate::quota::DEPTH_MAX;

/// Limits in which one bound is small.
fn limits(change: impl FnOnce(&mut Limits)) -> Limits {
    let mut limits = Limits::default();
    change(&mut limits);
    limits
}

/// A bench with a toolstack and guest 5, which owns `/local/domain/5/data`.
fn guest_with(limits: Limits) -> (Bench, ConnectionId, ConnectionId) {
    let mut bench = Bench::with(limits);
    let toolstack = bench.toolstack();
    bench.home(toolstack, 5);
    let guest = bench.guest(5);
    (bench, toolstack, guest)
}

#[test]
fn xsa_115_events_tell_only_what_may_be_read() {
    let (mut bench, toolstack, guest) = guest_with(Limits::default());
    bench.write(toolstack, "/secret/x", "1").unwrap();
    bench.write(toolstack, "/shown/x", "1").unwrap();
    bench.write(toolstack, "/shown/hidden", "1").unwrap();
    for (path, list) in [("/shown", "r0"), ("/shown/x", "r0"), ("/shown/hidden", "n0")] {
        bench.set_perms(toolstack, path, list).unwrap();
    }
    bench.watch(guest, "/", "t").unwrap();
    bench.events(guest);

    bench.write(toolstack, "/secret/x", "2").unwrap();
    bench.write(toolstack, "/secret/new", "2").unwrap();
    bench.rm(toolstack, "/secret").unwrap();
    bench.write(toolstack, "/shown/hidden", "2").unwrap();
    assert_eq!(bench.events(guest), []);

    bench.write(toolstack, "/shown/x", "2").unwrap();
    // That it is there could be seen in the listing of /shown as well.
    bench.rm(toolstack, "/shown/hidden").unwrap();
    bench.set_perms(toolstack, "/shown/x", "n0").unwrap();
    assert_eq!(bench.event_paths(guest), ["/shown/x", "/shown/hidden"]);
    bench.write(toolstack, "/shown/x", "3").unwrap();
    assert_eq!(bench.events(guest), []);
}

#[test]
fn xsa_115_a_removal_tells_of_no_hidden_node_below() {
    let (mut bench, toolstack, guest) = guest_with(Limits::default());
    bench.write(toolstack, "/dir/hidden", "1").unwrap();
    bench.watch(guest, "/dir/hidden", "t").unwrap();
    bench.events(guest);
    bench.rm(toolstack, "/dir").unwrap();
    assert_eq!(bench.events(guest), []);
}

#[test]
fn xsa_322_417_a_number_used_again_inherits_nothing() {
    for leftovers in [Leftovers::Remove, Leftovers::Keep] {
        let (mut bench, toolstack, guest) = guest_with(Limits::default());
        bench.write(toolstack, "/backend/5", "x").unwrap();
        bench.set_perms(toolstack, "/backend/5", "n0 r5").unwrap();
        bench.mkdir(toolstack, "/elsewhere").unwrap();
        bench.set_perms(toolstack, "/elsewhere", "n0 b5").unwrap();
        bench.write(guest, "/elsewhere/mine", "x").unwrap();
        bench.server.release(DomId(5), leftovers);

        let next = bench.guest(5);
        for path in ["/backend/5", "/elsewhere", "/elsewhere/mine", "/local/domain/5/data"] {
            assert_eq!(bench.read(next, path), Err(ErrorName::Access), "{path}");
        }
        assert_eq!(bench.get_perms(toolstack, "/backend/5").unwrap(), "n0");
        let mine = bench.read(toolstack, "/elsewhere/mine").is_ok();
        let home = bench.read(toolstack, "/local/domain/5").is_ok();
        let kept = leftovers == Leftovers::Keep;
        assert_eq!((mine, home), (kept, kept));
    }
}

#[test]
fn xsa_483_a_released_domain_gives_its_quota_back() {
    let (mut bench, _, guest) = guest_with(limits(|limits| limits.nodes = 3));
    for round in 0..3 {
        bench.write(guest, "data/x", "1").unwrap();
        bench.write(guest, "data/y", "1").unwrap();
        assert_eq!(bench.write(guest, "data/z", "1"), Err(ErrorName::NoSpace), "round {round}");
        bench.rm(guest, "data/x").unwrap();
        bench.rm(guest, "data/y").unwrap();
    }
    bench.server.release(DomId(5), Leftovers::Remove);
    assert_eq!((bench.server.nodes_of(DomId(5)), bench.server.bytes_of(DomId(5))), (0, 0));
    bench.server.audit().unwrap();
}

#[test]
fn xsa_326_nodes_and_their_bytes_are_bounded() {
    let (mut bench, toolstack, guest) = guest_with(limits(|limits| {
        limits.nodes = 10;
        limits.node_bytes = 4000;
    }));
    for n in 0..9 {
        bench.mkdir(guest, &format!("data/{n}")).unwrap();
    }
    assert_eq!(bench.mkdir(guest, "data/9"), Err(ErrorName::NoSpace));
    let value = "x".repeat(2048);
    bench.write(guest, "data/0", &value).unwrap();
    assert_eq!(bench.write(guest, "data/1", &value), Err(ErrorName::NoSpace));
    assert_eq!(bench.write(guest, "data/1", &"x".repeat(2049)), Err(ErrorName::NoSpace));
    bench.write(guest, "data/0", "less").unwrap();
    bench.write(guest, "data/1", &value).unwrap();
    // The toolstack is exempt.
    bench.write(toolstack, "/local/domain/5/data/more", &value).unwrap();
    let refused = bench.server.refusals();
    assert_eq!((refused.nodes, refused.node_bytes, refused.value_bytes), (1, 1, 1));
}

#[test]
fn xsa_326_watches_transactions_connections_and_permissions_are_bounded() {
    let (mut bench, _, guest) = guest_with(limits(|limits| limits.connections = 2));
    for n in 0..128 {
        bench.watch(guest, "data", &n.to_string()).unwrap();
    }
    let second = bench.guest(5);
    assert_eq!(bench.watch(second, "data", "t"), Err(ErrorName::NoSpace), "all together");
    for _ in 0..9 {
        bench.start(guest).unwrap();
    }
    bench.start(second).unwrap();
    assert_eq!(bench.start(guest), Err(ErrorName::NoSpace));
    bench.set_perms(guest, "data", "n5 r1 r2 r3 r4").unwrap();
    assert_eq!(bench.set_perms(guest, "data", "n5 r1 r2 r3 r4 r6"), Err(ErrorName::NoSpace));
    assert!(bench.server.connect(DomId(5), false).is_err());
    let refused = *bench.server.refusals();
    assert_eq!((refused.watches, refused.transactions), (1, 1));
    assert_eq!((refused.permissions, refused.connections), (1, 1));
    bench.server.disconnect(guest);
    bench.watch(second, "data", "t").unwrap();
    bench.start(second).unwrap();
}

#[test]
fn xsa_326_what_a_transaction_remembers_is_bounded() {
    let (mut bench, toolstack, guest) = guest_with(limits(|limits| {
        limits.transaction_nodes = 20;
        limits.transaction_bytes = 8000;
    }));
    let tx = bench.start(guest).unwrap();
    let mut answers = (0..50).map(|n| {
        let path = format!("data/{n}");
        bench.ask(guest, tx, &Request::Read { path: at(&path) })
    });
    assert!(answers.by_ref().take(19).all(|answer| answer == Err(ErrorName::NotFound)));
    assert!(answers.all(|answer| answer == Err(ErrorName::NoSpace)));

    let tx = bench.start(guest).unwrap();
    let value = "x".repeat(2000);
    let mut written = 0;
    while bench.write_in(guest, tx, "data/x", &value).is_ok() {
        written += 1;
        assert!(written < 5, "8000 bytes hold fewer values of 2000");
    }
    assert_eq!(written, 3);
    let refused = *bench.server.refusals();
    assert_eq!((refused.transaction_nodes, refused.transaction_bytes), (31, 1));

    let tx = bench.start(toolstack).unwrap();
    for n in 0..50 {
        bench.write_in(toolstack, tx, &format!("/many/{n}"), &value).unwrap();
    }
    bench.end(toolstack, tx, true).unwrap();
}

#[test]
fn xsa_326_who_does_not_read_replies_is_not_read_either() {
    let (mut bench, toolstack, guest) = guest_with(Limits::default());
    bench.write(guest, "data/x", &"x".repeat(2000)).unwrap();
    let mut sent = 0;
    while bench.server.may_read(guest) {
        bench.send(guest, 0, &Request::Read { path: at("data/x") });
        sent += 1;
        assert!(sent < 1000, "64 KiB hold fewer replies of 2 KB");
    }
    assert!(bench.server.may_read(toolstack), "nobody else is held up");
    assert_eq!(bench.server.counters().output_paused, 1);
    assert_eq!(bench.receive(guest).len(), sent);
    assert!(bench.server.may_read(guest));
}

#[test]
fn xsa_349_events_nobody_reads_are_merged_and_then_end_the_connection() {
    let (mut bench, toolstack, guest) = guest_with(limits(|limits| {
        limits.output_soft = 4 << 10;
        limits.output_hard = 16 << 10;
    }));
    let neighbour = bench.guest(6);
    for n in 0..100 {
        bench.watch(guest, "data", &format!("token-{n}")).unwrap();
    }
    bench.write(guest, "data/x", "1").unwrap();
    bench.events(guest);

    for _ in 0..1000 {
        bench.write(toolstack, "/local/domain/5/data/x", "same").unwrap();
    }
    assert!(bench.server.is_connected(guest), "equal events cost nothing more");
    assert!(!bench.server.may_read(guest));
    assert_eq!(bench.server.counters().events_merged, 999 * 100);

    for n in 0..10 {
        bench.write(toolstack, &format!("/local/domain/5/data/other-{n}"), "1").unwrap();
    }
    assert!(!bench.server.is_connected(guest), "beyond the hard bound");
    assert!(bench.server.outbox(guest).is_none());
    assert!(bench.server.is_connected(neighbour) && bench.server.is_connected(toolstack));
    assert_eq!(bench.server.counters().output_overrun, 1);
    let named: Vec<_> = std::iter::from_fn(|| bench.server.take_ready()).collect();
    assert!(named.contains(&guest), "whoever holds the socket is told");
    bench.server.audit().unwrap();
}

#[test]
fn xsa_349_a_guest_cannot_flood_a_toolstack_off_the_store() {
    let (mut bench, toolstack, guest) = guest_with(Limits::default());
    let idle = bench.toolstack();
    bench.watch(idle, "/local/domain", "t").unwrap();
    bench.events(idle);
    let mut written = 0u32;
    while bench.server.may_read(guest) {
        // A new name each time, within the quota of nodes.
        bench.write(guest, &format!("data/{written}"), "1").unwrap();
        bench.rm(guest, &format!("data/{written}")).unwrap();
        written += 1;
        assert!(written < 10_000, "64 KiB hold fewer events");
    }
    assert!(bench.server.is_connected(idle));
    assert!(bench.server.may_read(toolstack), "toolstacks go on");
    bench.events(idle);
    assert!(bench.server.may_read(guest));
}

#[test]
fn xsa_352_419_only_the_toolstack_gives_nodes_away() {
    let (mut bench, toolstack, guest) = guest_with(Limits::default());
    assert_eq!(bench.set_perms(guest, "data", "b6"), Err(ErrorName::NotPermitted));
    assert_eq!(bench.set_perms(guest, "data", "b6 b5"), Err(ErrorName::NotPermitted));
    assert_eq!(bench.get_perms(toolstack, "/local/domain/5/data").unwrap(), "n5");
    bench.set_perms(toolstack, "/local/domain/5/data", "n6").unwrap();
    assert_eq!(bench.server.nodes_of(DomId(5)), 0, "and with the node goes the charge");
    assert_eq!(bench.server.nodes_of(DomId(6)), 1);
}

#[test]
fn xsa_353_the_root_has_permissions_too() {
    let (mut bench, toolstack, guest) = guest_with(Limits::default());
    for answer in [
        bench.directory(guest, "/").map(drop),
        bench.write(guest, "/", "x"),
        bench.mkdir(guest, "/mine"),
        bench.rm(guest, "/"),
        bench.set_perms(guest, "/", "b5"),
    ] {
        assert_eq!(answer, Err(ErrorName::Access));
    }
    assert_eq!(bench.get_perms(toolstack, "/").unwrap(), "n0");
}

#[test]
fn xsa_418_no_path_is_so_deep_that_recursion_hurts() {
    let mut bench = Bench::with(limits(|limits| limits.depth = usize::MAX));
    let toolstack = bench.toolstack();
    let deepest = "/a".repeat(DEPTH_MAX);
    bench.mkdir(toolstack, &deepest).unwrap();
    let deeper = "/a".repeat(DEPTH_MAX + 1);
    assert_eq!(bench.mkdir(toolstack, &deeper), Err(ErrorName::NoSpace));
    assert_eq!(bench.read(toolstack, &deeper), Err(ErrorName::NotFound));
    assert_eq!(bench.server.refusals().depth, 1);
    bench.server.audit().unwrap();
    bench.rm(toolstack, "/a").unwrap();
}

#[test]
fn xsa_420_a_commit_obeys_the_quota_of_now() {
    let (mut bench, toolstack, guest) = guest_with(limits(|limits| limits.nodes = 6));
    // The nodes made inside are within the quota, seen from where each transaction started.
    let transactions: Vec<u32> = (0..3)
        .map(|n| {
            bench.mkdir(toolstack, &format!("/room/{n}")).unwrap();
            bench.set_perms(toolstack, &format!("/room/{n}"), "n0 b5").unwrap();
            let tx = bench.start(guest).unwrap();
            for child in 0..3 {
                bench.write_in(guest, tx, &format!("/room/{n}/{child}"), "x").unwrap();
            }
            tx
        })
        .collect();
    let ends: Vec<_> = transactions.iter().map(|tx| bench.end(guest, *tx, true)).collect();
    assert_eq!(ends, [Ok(()), Err(ErrorName::NoSpace), Err(ErrorName::NoSpace)]);
    assert_eq!(bench.directory(toolstack, "/room/1").unwrap(), [] as [&str; 0], "all or nothing");
    assert_eq!(bench.server.nodes_of(DomId(5)), 4);
}

#[test]
fn xsa_481_a_trailing_slash_is_refused() {
    let mut bench = Bench::new();
    let guest = bench.guest(5);
    for path in ["/local/domain/\0", "//\0", "/a//b\0", "a/\0", "\0"] {
        let answer = bench.ask_raw(guest, MessageType::Read, path.as_bytes());
        assert_eq!(answer, Err(ErrorName::Invalid), "{path:?}");
    }
}

#[test]
fn a_token_so_long_that_no_event_could_carry_it_is_refused() {
    let mut bench = Bench::new();
    let guest = bench.guest(5);
    let path = format!("/{}", "p".repeat(3071));
    let token = "t".repeat(4096 - 3072 - 2);
    bench.watch(guest, &path, &token).unwrap();
    assert_eq!(bench.events(guest), [(path.clone(), token.clone())]);
    let token = format!("{token}t");
    let mut payload = [b"/a\0".as_slice(), token.as_bytes()].concat();
    payload.push(0);
    assert_eq!(bench.ask_raw(guest, MessageType::Watch, &payload), Err(ErrorName::Invalid));
}
