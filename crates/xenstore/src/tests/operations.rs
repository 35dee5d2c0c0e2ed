//! One request at a time: values, listings, permissions, what is not served.

use super::*;

#[test]
fn a_write_makes_the_nodes_above() {
    let mut bench = Bench::new();
    let toolstack = bench.toolstack();
    bench.write(toolstack, "/a/b/c", "value").unwrap();
    assert_eq!(bench.read(toolstack, "/a/b/c").unwrap(), b"value");
    assert_eq!(bench.read(toolstack, "/a/b").unwrap(), b"");
    assert_eq!(bench.directory(toolstack, "/a").unwrap(), ["b"]);
    assert_eq!(bench.directory(toolstack, "/").unwrap(), ["a"]);
    assert_eq!(bench.read(toolstack, "/a/x"), Err(ErrorName::NotFound));
}

#[test]
fn values_are_bytes() {
    let mut bench = Bench::new();
    let toolstack = bench.toolstack();
    let value = [0, 255, b'\n', 0];
    let request = Request::Write { path: at("/a"), value: &value };
    bench.ask(toolstack, 0, &request).unwrap();
    assert_eq!(bench.read(toolstack, "/a").unwrap(), value);
}

#[test]
fn mkdir_leaves_a_value_alone() {
    let mut bench = Bench::new();
    let toolstack = bench.toolstack();
    bench.write(toolstack, "/a", "kept").unwrap();
    bench.mkdir(toolstack, "/a").unwrap();
    assert_eq!(bench.read(toolstack, "/a").unwrap(), b"kept");
    bench.mkdir(toolstack, "/b/c").unwrap();
    assert_eq!(bench.read(toolstack, "/b/c").unwrap(), b"");
}

#[test]
fn rm_takes_all_below_and_needs_a_parent_only() {
    let mut bench = Bench::new();
    let toolstack = bench.toolstack();
    bench.write(toolstack, "/a/b/c", "x").unwrap();
    bench.rm(toolstack, "/a/b").unwrap();
    assert_eq!(bench.read(toolstack, "/a/b/c"), Err(ErrorName::NotFound));
    bench.rm(toolstack, "/a/b").unwrap();
    assert_eq!(bench.rm(toolstack, "/a/b/c"), Err(ErrorName::NotFound));
    assert_eq!(bench.rm(toolstack, "/"), Err(ErrorName::Invalid));
}

#[test]
fn relative_paths_are_the_callers_own() {
    let mut bench = Bench::new();
    let toolstack = bench.toolstack();
    bench.home(toolstack, 5);
    let guest = bench.guest(5);
    bench.write(guest, "data/x", "mine").unwrap();
    assert_eq!(bench.read(toolstack, "/local/domain/5/data/x").unwrap(), b"mine");
}

#[test]
fn new_nodes_inherit_permissions_and_belong_to_their_unprivileged_writer() {
    let mut bench = Bench::new();
    let toolstack = bench.toolstack();
    bench.mkdir(toolstack, "/shared").unwrap();
    bench.set_perms(toolstack, "/shared", "r0 b5 n6").unwrap();
    let guest = bench.guest(5);
    bench.write(guest, "/shared/a/b", "x").unwrap();
    assert_eq!(bench.get_perms(toolstack, "/shared/a").unwrap(), "r5 b5 n6");
    assert_eq!(bench.get_perms(guest, "/shared/a/b").unwrap(), "r5 b5 n6");
    bench.write(toolstack, "/shared/c", "x").unwrap();
    assert_eq!(bench.get_perms(toolstack, "/shared/c").unwrap(), "r0 b5 n6");
}

#[test]
fn each_letter_allows_what_it_says() {
    let mut bench = Bench::new();
    let toolstack = bench.toolstack();
    bench.mkdir(toolstack, "/top").unwrap();
    for (domain, entry) in [(1, "n0"), (2, "r2"), (3, "w3"), (4, "b4")] {
        let path = format!("/top/{domain}");
        bench.write(toolstack, &path, "v").unwrap();
        let list = if domain == 1 { entry.to_owned() } else { format!("n0 {entry}") };
        bench.set_perms(toolstack, &path, &list).unwrap();
        let guest = bench.guest(domain);
        let reads = bench.read(guest, &path).is_ok();
        let writes = bench.write(guest, &path, "w").is_ok();
        let expected = [(false, false), (true, false), (false, true), (true, true)];
        assert_eq!((reads, writes), expected[usize::from(domain) - 1], "{entry}");
    }
}

#[test]
fn the_first_entry_is_the_default_and_the_owner_has_all() {
    let mut bench = Bench::new();
    let toolstack = bench.toolstack();
    bench.write(toolstack, "/a", "v").unwrap();
    bench.set_perms(toolstack, "/a", "r7 n8").unwrap();
    let [owner, barred, other] = [7, 8, 9].map(|domain| bench.guest(domain));
    assert!(bench.write(owner, "/a", "w").is_ok());
    assert_eq!(bench.read(barred, "/a"), Err(ErrorName::Access));
    assert!(bench.read(other, "/a").is_ok());
    assert_eq!(bench.write(other, "/a", "x"), Err(ErrorName::Access));
}

#[test]
fn nobody_learns_of_nodes_they_may_not_read() {
    let mut bench = Bench::new();
    let toolstack = bench.toolstack();
    bench.write(toolstack, "/secret/there", "v").unwrap();
    let guest = bench.guest(5);
    for path in ["/secret", "/secret/there", "/secret/missing", "/missing", "/"] {
        let path = at(path);
        let permissions = permissions("b5");
        for request in [
            Request::Read { path },
            Request::Directory { path },
            Request::DirectoryPart { path, offset: 0 },
            Request::GetPerms { path },
            Request::Write { path, value: b"x" },
            Request::Mkdir { path },
            Request::Rm { path },
            Request::SetPerms { path, permissions },
        ] {
            let answer = bench.ask(guest, 0, &request);
            assert_eq!(answer, Err(ErrorName::Access), "{request:?}");
        }
    }
    assert_eq!(bench.server.counters().denied, 40);
}

#[test]
fn a_missing_node_below_a_readable_one_is_just_missing() {
    let mut bench = Bench::new();
    let toolstack = bench.toolstack();
    bench.home(toolstack, 5);
    let guest = bench.guest(5);
    assert_eq!(bench.read(guest, "data/missing/deeper"), Err(ErrorName::NotFound));
}

#[test]
fn only_the_owner_changes_permissions() {
    let mut bench = Bench::new();
    let toolstack = bench.toolstack();
    bench.home(toolstack, 5);
    let (guest, other) = (bench.guest(5), bench.guest(6));
    bench.set_perms(guest, "data", "n5 b6").unwrap();
    let path = "/local/domain/5/data";
    assert_eq!(bench.set_perms(other, path, "n5 b6"), Err(ErrorName::Access));
    assert_eq!(bench.set_perms(other, path, "b6"), Err(ErrorName::Access));
    bench.set_perms(toolstack, path, "n6").unwrap();
    assert_eq!(bench.get_perms(other, path).unwrap(), "n6");
    assert_eq!(bench.set_perms(toolstack, "/missing", "n6"), Err(ErrorName::NotFound));
}

#[test]
fn a_long_listing_comes_in_parts() {
    let mut bench = Bench::new();
    let toolstack = bench.toolstack();
    let names: Vec<String> = (0..700).map(|n| format!("node-{n:04}")).collect();
    for name in &names {
        bench.mkdir(toolstack, &format!("/dir/{name}")).unwrap();
    }
    assert_eq!(bench.directory(toolstack, "/dir"), Err(ErrorName::TooBig));

    let mut listing = Vec::new();
    let mut number = None;
    loop {
        let offset = u32::try_from(listing.len()).unwrap();
        let part = bench.ask(toolstack, 0, &Request::DirectoryPart { path: at("/dir"), offset });
        let part = part.unwrap();
        let end = part.iter().position(|byte| *byte == 0).unwrap();
        assert_eq!(*number.get_or_insert(part[..end].to_vec()), part[..end]);
        let body = &part[end + 1..];
        if let Some(last) = body.strip_suffix(b"\0\0") {
            listing.extend_from_slice(last);
            listing.push(0);
            break;
        }
        listing.extend_from_slice(body);
    }
    assert_eq!(strings(&listing), names);

    let beyond = Request::DirectoryPart { path: at("/dir"), offset: 1_000_000 };
    assert!(bench.ask(toolstack, 0, &beyond).unwrap().ends_with(b"\0\0"));
    bench.mkdir(toolstack, "/dir/new").unwrap();
    let first = Request::DirectoryPart { path: at("/dir"), offset: 0 };
    let first = bench.ask(toolstack, 0, &first).unwrap();
    assert!(!first.starts_with(&number.unwrap()), "the number tells that the listing changed");
}

#[test]
fn domains_and_their_homes() {
    let mut bench = Bench::new();
    let guest = bench.guest(5);
    let home = bench.ask(guest, 0, &Request::GetDomainPath { domain: DomId(9) });
    assert_eq!(home.unwrap(), b"/local/domain/9\0");
    let known = |bench: &mut Bench| {
        bench.ask(guest, 0, &Request::IsDomainIntroduced { domain: DomId(9) }).unwrap()
    };
    assert_eq!(known(&mut bench), b"F\0");
    bench.server.introduce(DomId(9));
    assert_eq!(known(&mut bench), b"T\0");
    bench.server.release(DomId(9), crate::Leftovers::Remove);
    assert_eq!(known(&mut bench), b"F\0");
}

#[test]
fn what_is_not_served_is_refused_as_xenstored_does() {
    let mut bench = Bench::new();
    let (toolstack, guest) = (bench.toolstack(), bench.guest(5));
    for kind in [
        MessageType::Control,
        MessageType::Introduce,
        MessageType::Release,
        MessageType::Resume,
        MessageType::SetTarget,
    ] {
        assert_eq!(bench.ask_raw(guest, kind, b"1\0"), Err(ErrorName::Access), "{kind:?}");
        assert_eq!(bench.ask_raw(toolstack, kind, b"1\0"), Err(ErrorName::NotImplemented));
    }
    for kind in [MessageType::GetFeature, MessageType::WatchEvent, MessageType::Unknown(0xFFFF)] {
        assert_eq!(bench.ask_raw(guest, kind, b"1\0"), Err(ErrorName::NotImplemented), "{kind:?}");
    }
}

#[test]
fn malformed_requests_are_einval_and_counted() {
    let mut bench = Bench::new();
    let guest = bench.guest(5);
    for (kind, payload) in [
        (MessageType::Read, &b""[..]),
        (MessageType::Read, b"/a"),
        (MessageType::Read, b"/a\0b\0"),
        (MessageType::Write, b"no-terminator"),
        (MessageType::SetPerms, b"/a\0"),
        (MessageType::SetPerms, b"/a\0q5\0"),
        (MessageType::TransactionEnd, b"X\0"),
        (MessageType::Watch, b"/a\0"),
    ] {
        assert_eq!(bench.ask_raw(guest, kind, payload), Err(ErrorName::Invalid), "{kind:?}");
    }
    assert_eq!(bench.server.counters().malformed, 8);
}
