//! A client against a server that means ill.

use crate::{StoreAccess, StoreClient, StoreError};
use proptest::prelude::*;
use ringfence_wire::xenstore::{
    ErrorName, HEADER_LEN, Header, MessageReader, MessageType, emit_error, emit_event, emit_reply,
};
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_millis(60);

fn pair() -> (StoreClient, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (StoreClient::new(ours.into()).unwrap(), theirs)
}

/// What the client gets when `answer` says what comes back for its request.
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
fn a_reply_to_nothing_breaks_the_connection() {
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
fn a_reply_of_the_wrong_type_breaks_the_connection() {
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
fn an_oversized_message_breaks_the_connection_before_it_is_awaited() {
    let (outcome, client) = with_answer(
        |client| client.read("/a"),
        |header, out| out.extend_from_slice(&Header { len: 4097, ..*header }.emit()),
    );
    assert!(matches!(outcome, Err(StoreError::Framing(_))), "{outcome:?}");
    assert_broken(client);
}

#[test]
fn an_unknown_error_name_breaks_the_connection() {
    let (outcome, _) = with_answer(
        |client| client.read("/a"),
        |header, out| {
            emit_reply(&Header { kind: MessageType::Error, ..*header }, b"EWHAT\0", out).unwrap();
        },
    );
    assert!(matches!(outcome, Err(StoreError::Reply(_))), "{outcome:?}");
}

#[test]
fn names_that_would_lead_elsewhere_are_refused() {
    for name in [&b"a/b\0"[..], b"/etc\0", b"\0", b"..\0", b"a"] {
        let (outcome, _) = with_answer(
            |client| client.directory("/a"),
            |header, out| emit_reply(header, name, out).unwrap(),
        );
        assert!(matches!(outcome, Err(StoreError::Reply(_))), "{name:?}: {outcome:?}");
    }
}

#[test]
fn a_listing_without_end_is_cut_off() {
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
fn transaction_zero_is_not_taken_for_a_transaction() {
    let (outcome, client) = with_answer(
        |client| client.transaction(|t| t.write("/a", "x")),
        |header, out| emit_reply(header, b"0\0", out).unwrap(),
    );
    assert_eq!(outcome, Err(StoreError::NoTransaction));
    assert_broken(client);
}

#[test]
fn silence_is_a_timeout_and_the_late_reply_is_thrown_away() {
    let (mut client, mut server) = pair();
    client.set_timeout(PATIENCE);
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
fn bytes_that_trickle_do_not_stretch_the_timeout() {
    let (mut client, mut server) = pair();
    client.set_timeout(PATIENCE);
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
                std::thread::sleep(PATIENCE / 20);
            }
        });
        let begin = Instant::now();
        assert!(matches!(client.read("/a"), Err(StoreError::Timeout { .. })));
        assert!(begin.elapsed() < PATIENCE * 100, "{:?}", begin.elapsed());
        drop(client);
    });
}

#[test]
fn a_stream_of_events_does_not_stretch_the_timeout_or_fill_memory() {
    let (mut client, mut server) = pair();
    client.set_timeout(PATIENCE);
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
        // The watch itself is never answered; it still counts as unset then.
        assert!(matches!(client.watch("/a", "t"), Err(StoreError::Timeout { .. })));
        assert_eq!(client.next_event(), Ok(None));
        assert!(client.foreign_events() > 0);
        drop(client);
    });
}

#[test]
fn a_server_that_neither_reads_nor_answers_is_a_timeout() {
    let (mut client, _server) = pair();
    client.set_timeout(Duration::from_millis(1));
    let mut broken = false;
    // Late replies are remembered for so many requests, and the socket's buffer is finite.
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
fn a_server_that_goes_is_an_error() {
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
    fn arbitrary_bytes_from_the_server(bytes in prop::collection::vec(any::<u8>(), 0..400), kind in 0u32..30) {
        let (mut client, mut server) = pair();
        client.set_timeout(Duration::from_millis(2));
        // A header that passes, so that what follows is looked at.
        let len = u32::try_from(bytes.len()).unwrap();
        let header = Header { kind: MessageType::from_raw(kind), req_id: 1, tx_id: 0, len };
        server.write_all(&header.emit()).unwrap();
        server.write_all(&bytes).unwrap();
        server.write_all(&bytes).unwrap();
        // Whatever comes back, it comes back.
        let _outcome = client.directory("/a");
        let _outcome = client.next_event();
    }
}
