//! Tests of single requests: values, listings, permissions, unsupported types.

use super::*;

#[test]
fn write_creates_missing_ancestors() {
    let mut store = TestStore::new();
    let toolstack = store.toolstack();
    store.write(toolstack, "/a/b/c", "value").unwrap();
    assert_eq!(store.read(toolstack, "/a/b/c").unwrap(), b"value");
    assert_eq!(store.read(toolstack, "/a/b").unwrap(), b"");
    assert_eq!(store.directory(toolstack, "/a").unwrap(), ["b"]);
    assert_eq!(store.directory(toolstack, "/").unwrap(), ["a"]);
    assert_eq!(store.read(toolstack, "/a/x"), Err(ErrorName::NotFound));
}

#[test]
fn value_with_any_bytes_is_kept() {
    let mut store = TestStore::new();
    let toolstack = store.toolstack();
    let value = [0, 255, b'\n', 0];
    let request = StoreRequest::Write { path: at("/a"), value: &value };
    store.ask(toolstack, 0, &request).unwrap();
    assert_eq!(store.read(toolstack, "/a").unwrap(), value);
}

#[test]
fn mkdir_of_existing_node_keeps_value() {
    let mut store = TestStore::new();
    let toolstack = store.toolstack();
    store.write(toolstack, "/a", "kept").unwrap();
    store.mkdir(toolstack, "/a").unwrap();
    assert_eq!(store.read(toolstack, "/a").unwrap(), b"kept");
    store.mkdir(toolstack, "/b/c").unwrap();
    assert_eq!(store.read(toolstack, "/b/c").unwrap(), b"");
}

#[test]
fn rm_removes_subtree_and_accepts_missing_node_with_parent() {
    let mut store = TestStore::new();
    let toolstack = store.toolstack();
    store.write(toolstack, "/a/b/c", "x").unwrap();
    store.rm(toolstack, "/a/b").unwrap();
    assert_eq!(store.read(toolstack, "/a/b/c"), Err(ErrorName::NotFound));
    store.rm(toolstack, "/a/b").unwrap();
    assert_eq!(store.rm(toolstack, "/a/b/c"), Err(ErrorName::NotFound));
    assert_eq!(store.rm(toolstack, "/"), Err(ErrorName::Invalid));
}

#[test]
fn relative_path_resolves_to_home_of_caller() {
    let mut store = TestStore::new();
    let toolstack = store.toolstack();
    store.home(toolstack, 5);
    let guest = store.guest(5);
    store.write(guest, "data/x", "mine").unwrap();
    assert_eq!(store.read(toolstack, "/local/domain/5/data/x").unwrap(), b"mine");
}

#[test]
fn new_node_inherits_permissions_and_belongs_to_unprivileged_writer() {
    let mut store = TestStore::new();
    let toolstack = store.toolstack();
    store.mkdir(toolstack, "/shared").unwrap();
    store.set_perms(toolstack, "/shared", "r0 b5 n6").unwrap();
    let guest = store.guest(5);
    store.write(guest, "/shared/a/b", "x").unwrap();
    assert_eq!(store.get_perms(toolstack, "/shared/a").unwrap(), "r5 b5 n6");
    assert_eq!(store.get_perms(guest, "/shared/a/b").unwrap(), "r5 b5 n6");
    store.write(toolstack, "/shared/c", "x").unwrap();
    assert_eq!(store.get_perms(toolstack, "/shared/c").unwrap(), "r0 b5 n6");
}

#[test]
fn permission_letter_decides_read_and_write() {
    let mut store = TestStore::new();
    let toolstack = store.toolstack();
    store.mkdir(toolstack, "/top").unwrap();
    for (domain, entry) in [(1, "n0"), (2, "r2"), (3, "w3"), (4, "b4")] {
        let path = format!("/top/{domain}");
        store.write(toolstack, &path, "v").unwrap();
        let list = if domain == 1 { entry.to_owned() } else { format!("n0 {entry}") };
        store.set_perms(toolstack, &path, &list).unwrap();
        let guest = store.guest(domain);
        let reads = store.read(guest, &path).is_ok();
        let writes = store.write(guest, &path, "w").is_ok();
        let expected = [(false, false), (true, false), (false, true), (true, true)];
        assert_eq!((reads, writes), expected[usize::from(domain) - 1], "{entry}");
    }
}

#[test]
fn first_permission_entry_names_owner_and_default() {
    let mut store = TestStore::new();
    let toolstack = store.toolstack();
    store.write(toolstack, "/a", "v").unwrap();
    store.set_perms(toolstack, "/a", "r7 n8").unwrap();
    let [owner, barred, other] = [7, 8, 9].map(|domain| store.guest(domain));
    assert!(store.write(owner, "/a", "w").is_ok());
    assert_eq!(store.read(barred, "/a"), Err(ErrorName::Access));
    assert!(store.read(other, "/a").is_ok());
    assert_eq!(store.write(other, "/a", "x"), Err(ErrorName::Access));
}

#[test]
fn request_for_unreadable_node_is_eacces_whether_it_exists_or_not() {
    let mut store = TestStore::new();
    let toolstack = store.toolstack();
    store.write(toolstack, "/secret/there", "v").unwrap();
    let guest = store.guest(5);
    for path in ["/secret", "/secret/there", "/secret/missing", "/missing", "/"] {
        let path = at(path);
        let permissions = permissions("b5");
        for request in [
            StoreRequest::Read { path },
            StoreRequest::Directory { path },
            StoreRequest::DirectoryPart { path, offset: 0 },
            StoreRequest::GetPerms { path },
            StoreRequest::Write { path, value: b"x" },
            StoreRequest::Mkdir { path },
            StoreRequest::Rm { path },
            StoreRequest::SetPerms { path, permissions },
        ] {
            let answer = store.ask(guest, 0, &request);
            assert_eq!(answer, Err(ErrorName::Access), "{request:?}");
        }
    }
    assert_eq!(store.server.counters().denied, 40);
}

#[test]
fn missing_node_below_readable_node_is_enoent() {
    let mut store = TestStore::new();
    let toolstack = store.toolstack();
    store.home(toolstack, 5);
    let guest = store.guest(5);
    assert_eq!(store.read(guest, "data/missing/deeper"), Err(ErrorName::NotFound));
}

#[test]
fn permission_change_by_non_owner_is_refused() {
    let mut store = TestStore::new();
    let toolstack = store.toolstack();
    store.home(toolstack, 5);
    let (guest, other) = (store.guest(5), store.guest(6));
    store.set_perms(guest, "data", "n5 b6").unwrap();
    let path = "/local/domain/5/data";
    assert_eq!(store.set_perms(other, path, "n5 b6"), Err(ErrorName::Access));
    assert_eq!(store.set_perms(other, path, "b6"), Err(ErrorName::Access));
    store.set_perms(toolstack, path, "n6").unwrap();
    assert_eq!(store.get_perms(other, path).unwrap(), "n6");
    assert_eq!(store.set_perms(toolstack, "/missing", "n6"), Err(ErrorName::NotFound));
}

#[test]
fn long_listing_is_returned_in_parts() {
    let mut store = TestStore::new();
    let toolstack = store.toolstack();
    let names: Vec<String> = (0..700).map(|n| format!("node-{n:04}")).collect();
    for name in &names {
        store.mkdir(toolstack, &format!("/dir/{name}")).unwrap();
    }
    assert_eq!(store.directory(toolstack, "/dir"), Err(ErrorName::TooBig));

    let mut listing = Vec::new();
    let mut number = None;
    loop {
        let offset = u32::try_from(listing.len()).unwrap();
        let part =
            store.ask(toolstack, 0, &StoreRequest::DirectoryPart { path: at("/dir"), offset });
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

    let beyond = StoreRequest::DirectoryPart { path: at("/dir"), offset: 1_000_000 };
    assert!(store.ask(toolstack, 0, &beyond).unwrap().ends_with(b"\0\0"));
    store.mkdir(toolstack, "/dir/new").unwrap();
    let first = StoreRequest::DirectoryPart { path: at("/dir"), offset: 0 };
    let first = store.ask(toolstack, 0, &first).unwrap();
    assert!(!first.starts_with(&number.unwrap()), "the generation changes with the listing");
}

#[test]
fn introduced_domain_is_known_until_release() {
    let mut store = TestStore::new();
    let guest = store.guest(5);
    let home = store.ask(guest, 0, &StoreRequest::GetDomainPath { domain: DomId(9) });
    assert_eq!(home.unwrap(), b"/local/domain/9\0");
    let known = |store: &mut TestStore| {
        store.ask(guest, 0, &StoreRequest::IsDomainIntroduced { domain: DomId(9) }).unwrap()
    };
    assert_eq!(known(&mut store), b"F\0");
    store.server.introduce(DomId(9));
    assert_eq!(known(&mut store), b"T\0");
    store.server.release(DomId(9), crate::Leftovers::Remove);
    assert_eq!(known(&mut store), b"F\0");
}

#[test]
fn unsupported_requests_get_errors_of_xenstored() {
    let mut store = TestStore::new();
    let (toolstack, guest) = (store.toolstack(), store.guest(5));
    for kind in [
        MessageType::Control,
        MessageType::Introduce,
        MessageType::Release,
        MessageType::Resume,
        MessageType::SetTarget,
    ] {
        assert_eq!(store.ask_raw(guest, kind, b"1\0"), Err(ErrorName::Access), "{kind:?}");
        assert_eq!(store.ask_raw(toolstack, kind, b"1\0"), Err(ErrorName::NotImplemented));
    }
    for kind in [MessageType::GetFeature, MessageType::WatchEvent, MessageType::Unknown(0xFFFF)] {
        assert_eq!(store.ask_raw(guest, kind, b"1\0"), Err(ErrorName::NotImplemented), "{kind:?}");
    }
}

#[test]
fn malformed_requests_are_einval_and_counted() {
    let mut store = TestStore::new();
    let guest = store.guest(5);
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
        assert_eq!(store.ask_raw(guest, kind, payload), Err(ErrorName::Invalid), "{kind:?}");
    }
    assert_eq!(store.server.counters().malformed, 8);
}
