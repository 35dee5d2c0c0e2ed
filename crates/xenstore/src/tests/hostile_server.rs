//! Tests of a client against a hostile server.

use crate::{StoreAccess, StoreClient, StoreError};
use proptest::prelude::*;
use ringfence_wire::xenstore::{
    ErrorName, HEADER_LEN, Header, MessageReader, MessageType, emit_error, emit_event, emit_reply,
};
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_millis(60);

fn pair() -> (StoreClient, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (StoreClient::new(ours.into()).unwrap(), theirs)
}

/// Runs `ask` with a client whose request gets the bytes that `answer` writes. Returns the outcome.
fn with_answer<T: Send>(
    ask: impl FnOnce(&mut StoreClient) -> T + Send,
    answer: impl FnOnce(&Header, &mut Vec<u8>),
) -> (T, StoreClient) {
    let (mut client, mut server) = pair();
    client.set_timeout(Duration::from_secs(20));
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let outcome = ask(&mut client);
            (outcome, client)
        });
        let mut reader = MessageReader::new();
        let header = loop {
            let read = server.read(reader.spare()).unwrap();
            reader.commit(read);
            if let Some((header, _)) = reader.next().unwrap() {
                break header;
            }
        };
        let mut message = Vec::new();
        answer(&header, &mut message);
        server.write_all(&message).unwrap();
        asking.join().unwrap()
    })
}

fn assert_broken(mut client: StoreClient) {
    assert_eq!(client.read("/a"), Err(StoreError::Broken));
    assert_eq!(client.next_event(), Err(StoreError::Broken));
}

#[test]
fn reply_to_unknown_request_breaks_connection() {
    let (outcome, client) = with_answer(
        |client| client.read("/a"),
        |header, out| {
            let other = Header { req_id: header.req_id + 1, ..*header };
            emit_reply(&other, b"x", out).unwrap();
        },
    );
    assert_eq!(outcome, Err(StoreError::UnexpectedReply { found: 2 }));
    assert_broken(client);
}

#[test]
fn reply_of_wrong_type_breaks_connection() {
    let (outcome, client) = with_answer(
        |client| client.read("/a"),
        |header, out| {
            emit_reply(&Header { kind: MessageType::Write, ..*header }, b"OK\0", out).unwrap();
        },
    );
    assert!(matches!(outcome, Err(StoreError::Reply(_))), "{outcome:?}");
    assert_broken(client);
}

#[test]
fn header_of_oversized_message_breaks_connection() {
    let (outcome, client) = with_answer(
        |client| client.read("/a"),
        |header, out| out.extend_from_slice(&Header { len: 4097, ..*header }.emit()),
    );
    assert!(matches!(outcome, Err(StoreError::Framing(_))), "{outcome:?}");
    assert_broken(client);
}

#[test]
fn unknown_error_name_in_reply_is_refused() {
    let (outcome, _) = with_answer(
        |client| client.read("/a"),
        |header, out| {
            emit_reply(&Header { kind: MessageType::Error, ..*header }, b"EWHAT\0", out).unwrap();
        },
    );
    assert!(matches!(outcome, Err(StoreError::Reply(_))), "{outcome:?}");
}

#[test]
fn invalid_names_in_listing_are_refused() {
    for name in [&b"a/b\0"[..], b"/etc\0", b"\0", b"..\0", b"a"] {
        let (outcome, _) = with_answer(
            |client| client.directory("/a"),
            |header, out| emit_reply(header, name, out).unwrap(),
        );
        assert!(matches!(outcome, Err(StoreError::Reply(_))), "{name:?}: {outcome:?}");
    }
}

#[test]
fn endless_listing_is_refused_above_limit() {
    let (mut client, mut server) = pair();
    let outcome = std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut reader = MessageReader::new();
            let part = format!("1\0{}", "name\0".repeat(800));
            loop {
                let Ok(read @ 1..) = server.read(reader.spare()) else { return };
                reader.commit(read);
                while let Some((header, _)) = reader.next().unwrap() {
                    let mut reply = Vec::new();
                    if header.kind == MessageType::Directory {
                        emit_error(&header, ErrorName::TooBig, &mut reply);
                    } else {
                        emit_reply(&header, part.as_bytes(), &mut reply).unwrap();
                    }
                    server.write_all(&reply).unwrap();
                }
            }
        });
        let outcome = client.directory("/a");
        drop(client);
        outcome
    });
    assert!(matches!(outcome, Err(StoreError::ListingTooLong { .. })), "{outcome:?}");
}

#[test]
fn transaction_id_zero_breaks_connection() {
    let (outcome, client) = with_answer(
        |client| client.transaction(|t| t.write("/a", "x")),
        |header, out| emit_reply(header, b"0\0", out).unwrap(),
    );
    assert_eq!(outcome, Err(StoreError::NoTransaction));
    assert_broken(client);
}

#[test]
fn missing_reply_is_timeout_and_late_reply_is_discarded() {
    let (mut client, mut server) = pair();
    client.set_timeout(TIMEOUT);
    assert!(matches!(client.read("/a"), Err(StoreError::Timeout { .. })));
    client.set_timeout(Duration::from_secs(20));
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut reader = MessageReader::new();
            let mut headers = Vec::new();
            while headers.len() < 2 {
                let read = server.read(reader.spare()).unwrap();
                reader.commit(read);
                while let Some((header, _)) = reader.next().unwrap() {
                    headers.push(header);
                }
            }
            let mut replies = Vec::new();
            emit_reply(&headers[0], b"late", &mut replies).unwrap();
            emit_reply(&headers[1], b"in time", &mut replies).unwrap();
            server.write_all(&replies).unwrap();
        });
        assert_eq!(client.read("/a").unwrap(), b"in time");
    });
}

#[test]
fn slowly_arriving_reply_does_not_extend_timeout() {
    let (mut client, mut server) = pair();
    client.set_timeout(TIMEOUT);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut message = Vec::new();
            let header = Header { kind: MessageType::Read, req_id: 1, tx_id: 0, len: 4000 };
            message.extend_from_slice(&header.emit());
            message.resize(HEADER_LEN + 4000, b'x');
            for byte in message {
                if server.write_all(&[byte]).is_err() {
                    return;
                }
                std::thread::sleep(TIMEOUT / 20);
            }
        });
        let begin = Instant::now();
        assert!(matches!(client.read("/a"), Err(StoreError::Timeout { .. })));
        assert!(begin.elapsed() < TIMEOUT * 100, "{:?}", begin.elapsed());
        drop(client);
    });
}

#[test]
fn constant_events_do_not_extend_timeout_or_fill_memory() {
    let (mut client, mut server) = pair();
    client.set_timeout(TIMEOUT);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for n in 0u64.. {
                let mut events = Vec::new();
                for k in 0..50 {
                    emit_event(&format!("/a/{n}-{k}"), b"t", &mut events).unwrap();
                }
                if server.write_all(&events).is_err() {
                    return;
                }
            }
        });
        // The server never answers, so the watch counts as not set and its events as foreign. Its thread may begin after
        // the first timeout.
        while client.foreign_events() == 0 {
            assert!(matches!(client.watch("/a", "t"), Err(StoreError::Timeout { .. })));
            // The server may have a processor only while the client waits.
            assert_eq!(client.wait_event(TIMEOUT), Ok(None));
        }
        drop(client);
    });
}

#[test]
fn server_without_reads_and_replies_is_timeout_then_broken() {
    let (mut client, _server) = pair();
    client.set_timeout(Duration::from_millis(1));
    let mut broken = false;
    // The number of late replies and the socket's buffer are both limited.
    for _ in 0..2000 {
        match client.write("/a", [b'x'; 4000]) {
            Err(StoreError::Timeout { .. }) => {}
            Err(StoreError::Broken) => {
                broken = true;
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(broken, "half a request out means that the next one would be misread");
}

#[test]
fn close_by_server_breaks_connection() {
    let (mut client, server) = pair();
    drop(server);
    assert_eq!(client.read("/a"), Err(StoreError::Closed));
    assert_broken(client);
    let (mut client, server) = pair();
    drop(server);
    assert_eq!(client.next_event(), Err(StoreError::Closed));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn arbitrary_bytes_from_server_never_block_client(bytes in prop::collection::vec(any::<u8>(), 0..400), kind in 0u32..30) {
        let (mut client, mut server) = pair();
        client.set_timeout(Duration::from_millis(2));
        // The header is valid, so that the client parses the bytes after it.
        let len = u32::try_from(bytes.len()).unwrap();
        let header = Header { kind: MessageType::from_raw(kind), req_id: 1, tx_id: 0, len };
        server.write_all(&header.emit()).unwrap();
        server.write_all(&bytes).unwrap();
        server.write_all(&bytes).unwrap();
        // Either call may succeed or fail; both must return.
        let _outcome = client.directory("/a");
        let _outcome = client.next_event();
    }
}
