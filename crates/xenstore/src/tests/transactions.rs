//! All or nothing, and only if nobody came between.

use super::*;

fn setup() -> (Bench, ConnectionId, ConnectionId) {
    let mut bench = Bench::new();
    let (one, two) = (bench.toolstack(), bench.toolstack());
    bench.write(one, "/a/x", "1").unwrap();
    bench.write(one, "/b/x", "1").unwrap();
    (bench, one, two)
}

fn read_in(bench: &mut Bench, id: ConnectionId, tx: u32, path: &str) -> Answer {
    bench.ask(id, tx, &Request::Read { path: at(path) })
}

#[test]
fn own_writes_are_seen_inside_only_until_the_commit() {
    let (mut bench, one, two) = setup();
    bench.watch(two, "/", "t").unwrap();
    bench.events(two);
    let tx = bench.start(one).unwrap();
    bench.write_in(one, tx, "/a/x", "2").unwrap();
    bench.write_in(one, tx, "/a/new", "3").unwrap();
    assert_eq!(read_in(&mut bench, one, tx, "/a/x").unwrap(), b"2");
    assert_eq!(bench.read(one, "/a/x").unwrap(), b"1");
    assert_eq!(bench.read(two, "/a/new"), Err(ErrorName::NotFound));
    assert_eq!(bench.events(two), [], "nothing happened yet");
    bench.end(one, tx, true).unwrap();
    assert_eq!(bench.read(two, "/a/x").unwrap(), b"2");
    assert_eq!(bench.event_paths(two), ["/a/x", "/a/new"]);
}

#[test]
fn an_abort_leaves_nothing() {
    let (mut bench, one, two) = setup();
    bench.watch(two, "/", "t").unwrap();
    bench.events(two);
    let tx = bench.start(one).unwrap();
    bench.write_in(one, tx, "/a/x", "2").unwrap();
    bench.end(one, tx, false).unwrap();
    assert_eq!(bench.read(two, "/a/x").unwrap(), b"1");
    assert_eq!(bench.events(two), []);
    assert_eq!(bench.end(one, tx, true), Err(ErrorName::NotFound), "it ended already");
}

#[test]
fn a_change_of_what_was_read_is_a_conflict() {
    let (mut bench, one, two) = setup();
    let tx = bench.start(one).unwrap();
    read_in(&mut bench, one, tx, "/a/x").unwrap();
    bench.write_in(one, tx, "/b/x", "2").unwrap();
    bench.write(two, "/a/x", "other").unwrap();
    assert_eq!(bench.end(one, tx, true), Err(ErrorName::Again));
    assert_eq!(bench.read(one, "/b/x").unwrap(), b"1", "nothing of it happened");
    assert_eq!(bench.server.counters().conflicts, 1);
}

#[test]
fn changes_elsewhere_are_no_conflict_and_are_kept() {
    let (mut bench, one, two) = setup();
    let tx = bench.start(one).unwrap();
    bench.write_in(one, tx, "/a/x", "2").unwrap();
    bench.write(two, "/b/x", "other").unwrap();
    bench.write(two, "/b/y", "new").unwrap();
    bench.end(one, tx, true).unwrap();
    assert_eq!(bench.read(one, "/a/x").unwrap(), b"2");
    assert_eq!(bench.read(one, "/b/x").unwrap(), b"other");
    assert_eq!(bench.read(one, "/b/y").unwrap(), b"new");
}

#[test]
fn each_kind_of_answer_is_guarded() {
    type Look = fn(Path<'static>) -> Request<'static>;
    type Meddle = fn(&mut Bench, ConnectionId) -> Result<(), ErrorName>;
    let directory: Look = |path| Request::Directory { path };
    let read: Look = |path| Request::Read { path };
    let perms: Look = |path| Request::GetPerms { path };
    let cases: [(&str, Look, &str, Meddle); 6] = [
        ("a listing", directory, "/a", |bench, id| bench.write(id, "/a/y", "")),
        ("a listing, removal", directory, "/a", |bench, id| bench.rm(id, "/a/x")),
        ("absence", read, "/a/y", |bench, id| bench.write(id, "/a/y", "")),
        ("deep absence", read, "/c/d/e", |bench, id| bench.mkdir(id, "/c")),
        ("permissions", perms, "/a", |bench, id| bench.set_perms(id, "/a", "n0")),
        ("the same made again", read, "/a/x", |bench, id| {
            bench.rm(id, "/a/x")?;
            bench.write(id, "/a/x", "1")
        }),
    ];
    for (name, look, path, meddle) in cases {
        let (mut bench, one, two) = setup();
        let tx = bench.start(one).unwrap();
        let _answer = bench.ask(one, tx, &look(at(path)));
        bench.write_in(one, tx, "/b/x", "2").unwrap();
        meddle(&mut bench, two).unwrap();
        assert_eq!(bench.end(one, tx, true), Err(ErrorName::Again), "{name}");
    }
}

#[test]
fn removal_in_a_transaction_takes_what_came_below_meanwhile() {
    let (mut bench, one, two) = setup();
    let tx = bench.start(one).unwrap();
    bench.ask(one, tx, &Request::Rm { path: at("/a") }).unwrap();
    bench.write(two, "/a/x", "deeper than what was looked at").unwrap();
    bench.end(one, tx, true).unwrap();
    assert_eq!(bench.read(one, "/a/x"), Err(ErrorName::NotFound));
    bench.server.audit().unwrap();
}

#[test]
fn a_transaction_that_only_read_ends_well() {
    let (mut bench, one, two) = setup();
    let tx = bench.start(one).unwrap();
    read_in(&mut bench, one, tx, "/a/x").unwrap();
    bench.write(two, "/a/x", "2").unwrap();
    assert_eq!(read_in(&mut bench, one, tx, "/a/x").unwrap(), b"1", "still what it began with");
    bench.end(one, tx, true).unwrap();
}

#[test]
fn ids_are_per_connection_and_never_zero() {
    let (mut bench, one, two) = setup();
    let tx = bench.start(one).unwrap();
    assert_ne!(tx, 0);
    assert_eq!(bench.write_in(two, tx, "/a/x", "2"), Err(ErrorName::NotFound));
    assert_eq!(bench.ask(one, tx, &Request::TransactionStart), Err(ErrorName::Busy));
    assert_eq!(bench.ask(one, 99, &Request::TransactionStart), Err(ErrorName::NotFound));
    assert_eq!(bench.end(one, 0, true), Err(ErrorName::NotFound));
}

#[test]
fn a_guest_that_keeps_interfering_has_to_wait_after_the_first_conflict() {
    let mut bench = Bench::new();
    let toolstack = bench.toolstack();
    bench.home(toolstack, 5);
    let guest = bench.guest(5);
    let path = "/local/domain/5/data/x";
    let tx = bench.start(toolstack).unwrap();
    bench.write_in(toolstack, tx, path, "toolstack").unwrap();
    bench.write(guest, path, "guest").unwrap();
    assert_eq!(bench.end(toolstack, tx, true), Err(ErrorName::Again));
    assert!(bench.server.may_read(guest));

    let tx = bench.start(toolstack).unwrap();
    assert!(!bench.server.may_read(guest), "held up until the transaction ends");
    assert!(bench.server.may_read(toolstack));
    bench.write_in(toolstack, tx, path, "toolstack").unwrap();
    bench.end(toolstack, tx, true).unwrap();
    assert!(bench.server.may_read(guest));

    // Neither does a toolstack that goes away hold anybody up.
    let tx = bench.start(toolstack).unwrap();
    bench.write_in(toolstack, tx, path, "x").unwrap();
    bench.write(guest, path, "guest").unwrap();
    assert_eq!(bench.end(toolstack, tx, true), Err(ErrorName::Again));
    bench.start(toolstack).unwrap();
    assert!(!bench.server.may_read(guest));
    bench.server.disconnect(toolstack);
    assert!(bench.server.may_read(guest));
}
