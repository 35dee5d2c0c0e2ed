use super::*;
use crate::decimal::NumberError;
use crate::grant::DomId;
use proptest::prelude::*;

/// READ of `/a` with request id 0x0102_0304 in transaction 5.
const READ_A: [u8; 19] = [2, 0, 0, 0, 4, 3, 2, 1, 5, 0, 0, 0, 3, 0, 0, 0, b'/', b'a', 0];

fn read_a_header() -> Header {
    Header { kind: MessageType::Read, req_id: 0x0102_0304, tx_id: 5, len: 3 }
}

fn path(text: &str) -> Path<'_> {
    Path::parse(text.as_bytes()).unwrap()
}

#[test]
fn header_bytes_deconstruct_to_fields() {
    let header = Header::parse(READ_A.first_chunk().unwrap());
    assert_eq!(header.kind, MessageType::Read);
    assert_eq!(header.req_id, 0x0102_0304);
    assert_eq!(header.tx_id, 5);
    assert_eq!(header.len, 3);
}

#[test]
fn header_fields_construct_bytes() {
    assert_eq!(read_a_header().emit(), READ_A[..16]);
}

#[test]
fn read_request_parses() {
    let decoded = decode(&READ_A).unwrap().unwrap();
    assert_eq!(decoded.header, read_a_header());
    assert_eq!(decoded.rest, b"");
    let request = StoreRequest::parse(decoded.header.kind, decoded.payload).unwrap();
    assert_eq!(request, StoreRequest::Read { path: path("/a") });
}

#[test]
fn read_request_emits_its_bytes() {
    let mut out = Vec::new();
    StoreRequest::Read { path: path("/a") }.emit(0x0102_0304, 5, &mut out).unwrap();
    assert_eq!(out, READ_A);
}

#[test]
fn every_message_type_number_round_trips() {
    for raw in (0..64).chain([0xFFFF, u32::MAX]) {
        assert_eq!(MessageType::from_raw(raw).to_raw(), raw);
    }
    assert_eq!(MessageType::DEFINED.len(), 26);
    assert_eq!(MessageType::from_raw(20), MessageType::Unknown(20), "20 was removed");
    assert_eq!(MessageType::from_raw(0xFFFF), MessageType::Unknown(0xFFFF));
}

#[test]
fn every_error_name_round_trips() {
    assert_eq!(ErrorName::ALL.len(), 16);
    for &error in ErrorName::ALL {
        assert_eq!(ErrorName::from_name(error.as_str().as_bytes()), Some(error));
    }
    assert_eq!(ErrorName::from_name(b"EWHATEVER"), None);
    assert_eq!(ErrorName::from_name(b"ENOENT\0"), None);
}

#[test]
fn payload_above_4096_bytes_is_framing_error() {
    let mut bytes = Header { len: PAYLOAD_MAX, ..read_a_header() }.emit().to_vec();
    assert_eq!(decode(&bytes), Ok(None));
    bytes.resize(16 + 4096, b'x');
    assert_eq!(decode(&bytes).unwrap().unwrap().payload.len(), 4096);

    let bytes = Header { len: PAYLOAD_MAX + 1, ..read_a_header() }.emit();
    let error = FramingError::PayloadTooLong { kind: MessageType::Read, len: 4097, limit: 4096 };
    assert_eq!(decode(&bytes), Err(error));
    assert_eq!(decode(&bytes[..15]), Ok(None));
}

#[test]
fn reader_after_framing_error_repeats_error() {
    let mut reader = MessageReader::new();
    let bytes = Header { len: u32::MAX, ..read_a_header() }.emit();
    reader.spare()[..16].copy_from_slice(&bytes);
    reader.commit(16);
    let first = reader.next().unwrap_err();
    assert_eq!(reader.next().unwrap_err(), first);
}

#[test]
fn path_beyond_length_limit_is_rejected() {
    let absolute = format!("/{}", "a".repeat(ABSOLUTE_PATH_MAX - 1));
    assert!(Path::parse(absolute.as_bytes()).is_ok());
    let absolute = format!("/{}", "a".repeat(ABSOLUTE_PATH_MAX));
    assert_eq!(
        Path::parse(absolute.as_bytes()),
        Err(PathError::TooLong { len: 3073, limit: 3072 })
    );
    let relative = "a".repeat(RELATIVE_PATH_MAX);
    assert!(path(&relative).to_absolute(DomId(u16::MAX)).unwrap().len() <= ABSOLUTE_PATH_MAX);
    let relative = "a".repeat(RELATIVE_PATH_MAX + 1);
    assert_eq!(
        Path::parse(relative.as_bytes()),
        Err(PathError::TooLong { len: 2049, limit: 2048 })
    );
}

#[test]
fn path_that_breaks_rule_is_rejected() {
    for (text, error) in [
        ("", PathError::Empty),
        ("@releaseDomain", PathError::Special),
        ("/a//b", PathError::EmptyComponent { position: 3 }),
        ("//", PathError::EmptyComponent { position: 1 }),
        ("/a/", PathError::TrailingSlash),
        ("a/", PathError::TrailingSlash),
        ("/a.b", PathError::BadCharacter { position: 2, byte: b'.' }),
        ("/a\0b", PathError::BadCharacter { position: 2, byte: 0 }),
        ("/ä", PathError::BadCharacter { position: 1, byte: 0xC3 }),
    ] {
        assert_eq!(Path::parse(text.as_bytes()), Err(error), "{text:?}");
    }
    for text in ["/", "a", "/a", "a/b-c_d@e/0"] {
        assert!(Path::parse(text.as_bytes()).is_ok(), "{text:?}");
    }
}

#[test]
fn watch_path_of_unknown_special_name_is_rejected() {
    assert_eq!(WatchPath::parse(b"@introduceDomain"), Ok(WatchPath::IntroduceDomain));
    assert_eq!(WatchPath::parse(b"@releaseDomain"), Ok(WatchPath::ReleaseDomain));
    assert_eq!(WatchPath::parse(b"@else"), Err(PathError::Special));
    assert_eq!(WatchPath::parse(b"/a"), Ok(WatchPath::Node(path("/a"))));
}

#[test]
fn path_parent_components_and_absolute_form_match() {
    assert_eq!(path("device/vif").to_absolute(DomId(3)).unwrap(), "/local/domain/3/device/vif");
    assert_eq!(path("/tool").to_absolute(DomId(3)).unwrap(), "/tool");
    assert_eq!(path("/a/b").parent(), Some(path("/a")));
    assert_eq!(path("/a").parent(), Some(Path::ROOT));
    assert_eq!(Path::ROOT.parent(), None);
    assert_eq!(path("a").parent(), None);
    assert_eq!(path("a/b").parent(), Some(path("a")));
    assert_eq!(path("/a/b").components().collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(Path::ROOT.components().count(), 0);
}

#[test]
fn is_within_covers_node_and_descendants_only() {
    assert!(path("/a/b").is_within(path("/a/b")));
    assert!(path("/a/b/c").is_within(path("/a/b")));
    assert!(!path("/a/bc").is_within(path("/a/b")));
    assert!(!path("/a").is_within(path("/a/b")));
    assert!(path("/a").is_within(Path::ROOT));
    assert!(!path("a").is_within(Path::ROOT));
}

#[test]
fn malformed_permission_is_rejected() {
    let permission = Permission::parse(b"r5").unwrap();
    assert_eq!(permission, Permission { access: NodeAccess::Read, domain: DomId(5) });
    assert_eq!(permission.to_string(), "r5");
    assert_eq!(Permission::parse(b""), Err(PermissionError::Empty));
    assert_eq!(Permission::parse(b"x1"), Err(PermissionError::BadLetter { letter: b'x' }));
    assert_eq!(Permission::parse(b"n"), Err(PermissionError::BadDomain(NumberError::Empty)));
    assert_eq!(
        Permission::parse(b"n65536"),
        Err(PermissionError::BadDomain(NumberError::TooLarge { value: 65536, limit: 65535 }))
    );
}

#[test]
fn first_permission_sets_owner_and_default_access() {
    let list = parse_permissions(b"r1\0n2\0b3\0").unwrap();
    assert_eq!(list.owner(), DomId(1));
    assert_eq!(list.access_of(DomId(1)), NodeAccess::Both);
    assert_eq!(list.access_of(DomId(2)), NodeAccess::None);
    assert_eq!(list.access_of(DomId(3)), NodeAccess::Both);
    assert_eq!(list.access_of(DomId(4)), NodeAccess::Read);
    let list = PermissionList::owned_by(DomId(7), NodeAccess::None);
    assert_eq!(list.access_of(DomId(7)), NodeAccess::Both);
    assert_eq!(list.access_of(DomId(1)), NodeAccess::None);
}

#[test]
fn permission_list_empty_or_too_long_is_rejected() {
    assert_eq!(parse_permissions(b""), Err(PermissionError::NoOwner));
    assert_eq!(parse_permissions(b"n0"), Err(PermissionError::Unterminated));
    assert_eq!(parse_permissions(b"\0"), Err(PermissionError::Empty));
    assert!(parse_permissions(&b"n0\0".repeat(PERMISSIONS_MAX)).is_ok());
    assert_eq!(
        parse_permissions(&b"n0\0".repeat(PERMISSIONS_MAX + 1)),
        Err(PermissionError::TooMany { limit: PERMISSIONS_MAX })
    );
    assert_eq!(PermissionList::new(&[]), Err(PermissionError::NoOwner));
}

#[test]
fn requests_of_linux_and_libxenstore_parse() {
    let cases: [(MessageType, &[u8], StoreRequest<'_>); 9] = [
        (MessageType::TransactionStart, b"\0", StoreRequest::TransactionStart),
        (MessageType::TransactionStart, b"", StoreRequest::TransactionStart),
        (MessageType::TransactionEnd, b"T\0", StoreRequest::TransactionEnd { commit: true }),
        (MessageType::ResetWatches, b"\0", StoreRequest::ResetWatches),
        (MessageType::GetDomainPath, b"4\0", StoreRequest::GetDomainPath { domain: DomId(4) }),
        (
            MessageType::Write,
            b"state\x004",
            StoreRequest::Write { path: path("state"), value: b"4" },
        ),
        (MessageType::Write, b"x\0", StoreRequest::Write { path: path("x"), value: b"" }),
        (
            MessageType::Watch,
            b"device\0tok\0",
            StoreRequest::Watch {
                path: WatchPath::Node(path("device")),
                token: b"tok",
                depth: None,
            },
        ),
        (
            MessageType::Watch,
            b"@releaseDomain\0\x002\0",
            StoreRequest::Watch { path: WatchPath::ReleaseDomain, token: b"", depth: Some(2) },
        ),
    ];
    for (kind, payload, request) in cases {
        assert_eq!(StoreRequest::parse(kind, payload), Ok(request));
    }
}

#[test]
fn invalid_request_is_rejected_with_error_name() {
    use MessageType as T;
    let count = |kind, found, least, most| RequestError::ArgumentCount { kind, found, least, most };
    let cases: [(MessageType, &[u8], RequestError); 11] = [
        (T::Read, b"/a", RequestError::Unterminated { kind: T::Read }),
        (T::Read, b"", count(T::Read, 0, 1, 1)),
        (T::Read, b"/a\0/b\0", count(T::Read, 2, 1, 1)),
        (T::Read, b"\0", RequestError::Path(PathError::Empty)),
        (T::Write, b"/a", RequestError::Unterminated { kind: T::Write }),
        (T::Watch, b"/a\0", count(T::Watch, 1, 2, 3)),
        (
            T::Watch,
            b"/a\0t\0-1\0",
            RequestError::Number(NumberError::NotADigit { position: 0, byte: b'-' }),
        ),
        (T::TransactionEnd, b"X\0", RequestError::BadDecision),
        (T::SetPerms, b"/a\0", RequestError::Permission(PermissionError::NoOwner)),
        (T::WatchEvent, b"/a\0t\0", RequestError::Unsupported { kind: T::WatchEvent }),
        (T::Unknown(20), b"", RequestError::Unsupported { kind: T::Unknown(20) }),
    ];
    for (kind, payload, error) in cases {
        assert_eq!(StoreRequest::parse(kind, payload), Err(error), "{kind:?} {payload:?}");
        let name = match error {
            RequestError::Unsupported { .. } => ErrorName::NotImplemented,
            _ => ErrorName::Invalid,
        };
        assert_eq!(error.error_name(), name);
    }
}

#[test]
fn replies_and_events_round_trip() {
    let mut out = Vec::new();
    let request = read_a_header();
    emit_reply(&request, b"value", &mut out).unwrap();
    emit_ok(&request, &mut out);
    emit_error(&request, ErrorName::NotFound, &mut out);
    emit_event("/a", b"tok", &mut out).unwrap();

    let one = decode(&out).unwrap().unwrap();
    assert_eq!(one.header, Header { len: 5, ..request });
    assert_eq!(
        Reply::parse(MessageType::Read, &one.header, one.payload),
        Ok(Reply::Success(b"value"))
    );
    let two = decode(one.rest).unwrap().unwrap();
    assert_eq!(two.payload, b"OK\0");
    let three = decode(two.rest).unwrap().unwrap();
    assert_eq!(three.payload, b"ENOENT\0");
    assert_eq!(three.header.req_id, request.req_id);
    assert_eq!(
        Reply::parse(MessageType::Read, &three.header, three.payload),
        Ok(Reply::Failure(ErrorName::NotFound))
    );
    let four = decode(three.rest).unwrap().unwrap();
    assert_eq!((four.header.req_id, four.header.tx_id), (0, 0));
    assert_eq!(
        WatchEvent::parse(four.payload),
        Ok(WatchEvent { path: WatchPath::Node(path("/a")), token: b"tok" })
    );
    assert_eq!(four.rest, b"");
}

#[test]
fn invalid_server_message_is_rejected() {
    let header = read_a_header();
    assert_eq!(
        Reply::parse(MessageType::Write, &header, b"OK\0"),
        Err(ReplyError::WrongType { expected: MessageType::Write, found: MessageType::Read })
    );
    let header = Header { kind: MessageType::Error, ..header };
    assert_eq!(
        Reply::parse(MessageType::Read, &header, b"EODD\0"),
        Err(ReplyError::UnknownErrorName { len: 5 })
    );
    assert_eq!(WatchEvent::parse(b"/a\0"), Err(ReplyError::EventStrings { found: 1 }));
    assert_eq!(WatchEvent::parse(b"/a\0t\0u\0"), Err(ReplyError::EventStrings { found: 3 }));
    assert_eq!(WatchEvent::parse(b"/a\0t"), Err(ReplyError::Unterminated));
    assert_eq!(parse_transaction_id(b"12\0"), Ok(12));
    assert_eq!(parse_transaction_id(b"12"), Err(ReplyError::Unterminated));
}

#[test]
fn oversized_message_is_rejected_and_buffer_unchanged() {
    let mut out = b"before".to_vec();
    let value = vec![0; 4096];
    let request = StoreRequest::Write { path: path("a"), value: &value };
    assert_eq!(
        request.emit(1, 0, &mut out),
        Err(EmitError::PayloadTooLong { len: 4098, limit: 4096 })
    );
    assert_eq!(emit_event("/a", b"t\0u", &mut out), Err(EmitError::NulInText { position: 1 }));
    assert_eq!(out, b"before");
}

fn any_path() -> impl Strategy<Value = String> {
    "/?[a-zA-Z0-9_-][a-zA-Z0-9_@-]{0,8}(/[a-zA-Z0-9_@-]{1,8}){0,5}"
}

fn any_permissions() -> impl Strategy<Value = PermissionList> {
    let access = prop::sample::select(vec![
        NodeAccess::None,
        NodeAccess::Read,
        NodeAccess::Write,
        NodeAccess::Both,
    ]);
    let entry = (access, any::<u16>())
        .prop_map(|(access, domain)| Permission { access, domain: DomId(domain) });
    prop::collection::vec(entry, 1..=PERMISSIONS_MAX)
        .prop_map(|entries| PermissionList::new(&entries).unwrap())
}

/// Builds every kind of request from the same parts.
fn all_requests<'a>(
    path: Path<'a>,
    token: &'a [u8],
    value: &'a [u8],
    number: u32,
    permissions: PermissionList,
) -> Vec<StoreRequest<'a>> {
    let domain = DomId((number & 0xFFFF) as u16);
    let watched = WatchPath::Node(path);
    vec![
        StoreRequest::Directory { path },
        StoreRequest::DirectoryPart { path, offset: number },
        StoreRequest::Read { path },
        StoreRequest::GetPerms { path },
        StoreRequest::Watch { path: watched, token, depth: None },
        StoreRequest::Watch { path: watched, token, depth: Some(number) },
        StoreRequest::Watch { path: WatchPath::IntroduceDomain, token, depth: None },
        StoreRequest::Unwatch { path: watched, token },
        StoreRequest::TransactionStart,
        StoreRequest::TransactionEnd { commit: number.is_multiple_of(2) },
        StoreRequest::GetDomainPath { domain },
        StoreRequest::IsDomainIntroduced { domain },
        StoreRequest::Write { path, value },
        StoreRequest::Mkdir { path },
        StoreRequest::Rm { path },
        StoreRequest::SetPerms { path, permissions },
        StoreRequest::ResetWatches,
    ]
}

proptest! {
    #[test]
    fn any_requests_in_any_stream_pieces_round_trip(
        text in any_path(),
        token in prop::collection::vec(1u8.., 0..20),
        value in prop::collection::vec(any::<u8>(), 0..100),
        number: u32,
        permissions in any_permissions(),
        cuts in prop::collection::vec(1usize..64, 1..20),
    ) {
        let requests = all_requests(path(&text), &token, &value, number, permissions);
        let mut stream = Vec::new();
        for (id, request) in (0..).zip(&requests) {
            request.emit(id, number, &mut stream).unwrap();
        }
        let mut reader = MessageReader::new();
        let mut cuts = cuts.into_iter().cycle();
        let mut left = &stream[..];
        let mut seen = 0;
        while !left.is_empty() {
            let cut = cuts.next().unwrap().min(left.len());
            let (piece, rest) = left.split_at(cut);
            reader.spare()[..cut].copy_from_slice(piece);
            reader.commit(cut);
            left = rest;
            while let Some((header, payload)) = reader.next().unwrap() {
                prop_assert_eq!(header.req_id as usize, seen);
                prop_assert_eq!(header.tx_id, number);
                let request = StoreRequest::parse(header.kind, payload);
                prop_assert_eq!(request.as_ref(), Ok(&requests[seen]));
                seen += 1;
            }
        }
        prop_assert_eq!(seen, requests.len());
        prop_assert_eq!(reader.pending(), 0);
    }

    #[test]
    fn any_permission_list_round_trips(list in any_permissions()) {
        let mut bytes = Vec::new();
        emit_permissions(&list, &mut bytes);
        prop_assert_eq!(parse_permissions(&bytes), Ok(list));
    }

    #[test]
    fn path_of_any_text_matches_naive_oracle(text in "[/a@.]{0,6}") {
        let naive = !text.is_empty()
            && !text.starts_with('@')
            && !text.contains('.')
            && !text.contains("//")
            && (text == "/" || !text.ends_with('/'));
        prop_assert_eq!(Path::parse(text.as_bytes()).is_ok(), naive);
    }
}

/// Generates a message whose header announces its length, so that the parsers behind framing run.
fn any_message() -> impl Strategy<Value = Vec<u8>> {
    let pieces = prop::sample::select(vec![
        "/a",
        "a/b",
        "/",
        "\0",
        "\0",
        "\0",
        "T",
        "F",
        "12",
        "n0",
        "r5",
        "b70000",
        "@releaseDomain",
        "tok",
        "/a//b",
        "ENOENT",
        "é",
    ]);
    let payload = prop::collection::vec(pieces, 0..6).prop_map(|pieces| pieces.concat());
    (0u32..28, any::<u32>(), any::<u32>(), payload).prop_map(|(kind, req_id, tx_id, payload)| {
        let len = u32::try_from(payload.len()).unwrap();
        let header = Header { kind: MessageType::from_raw(kind), req_id, tx_id, len };
        [&header.emit()[..], payload.as_bytes()].concat()
    })
}

proptest! {
    #[test]
    fn fuzz_xenstore_message_any_bytes(data in prop::collection::vec(any::<u8>(), 0..200)) {
        crate::fuzzing::xenstore_message(&data);
    }

    #[test]
    fn fuzz_xenstore_message_plausible(
        cut: u8,
        messages in prop::collection::vec(any_message(), 0..10),
        tail in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        crate::fuzzing::xenstore_message(&[&[cut][..], &messages.concat(), &tail].concat());
    }

    #[test]
    fn fuzz_xenstore_message_paths(text in "[/@]?[a-z/@-]{0,20}") {
        crate::fuzzing::xenstore_message(format!("x{text}").as_bytes());
    }
}
