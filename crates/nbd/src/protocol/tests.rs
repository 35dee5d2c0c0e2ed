use proptest::prelude::*;

use super::agree::{ClientHandshake, ClientProgress, Negotiated};
use super::numbers::{command, command_flag, option, reply};
use super::offer::{Agreed, Export, ServerHandshake, ServerProgress, greeting};
use super::replies::{Expect, Replies, ReplyContent};
use super::serve::{NbdCommand, parse_request, reply_allocated, reply_data, reply_end};
use super::*;

const OFFER: Offer = Offer {
    bytes: 1 << 20,
    flags: transmission::HAS_FLAGS | transmission::SEND_FLUSH | transmission::SEND_FUA,
    block_min: 512,
    block_preferred: 4096,
    payload_max: PAYLOAD_MAX,
};

fn export() -> Export {
    Export { name: "disk0".to_owned(), description: "a disk".to_owned(), offer: OFFER }
}

/// Feeds a server in pieces of `piece` bytes. Returns its output, its state and the bytes consumed.
fn serve(input: &[u8], piece: usize) -> Result<(Vec<u8>, ServerProgress, usize), ProtocolError> {
    let mut server = ServerHandshake::new(export());
    let (mut held, mut out, mut last) = (vec![], vec![], ServerProgress::More);
    let mut used_all = 0;
    for bytes in input.chunks(piece) {
        held.extend_from_slice(bytes);
        loop {
            let (used, progress) = server.feed(&held, &mut out)?;
            held.drain(..used);
            used_all += used;
            if progress != ServerProgress::More {
                last = progress;
            }
            if used == 0 {
                break;
            }
        }
    }
    Ok((out, last, used_all))
}

fn with_options(options: &[(u32, &[u8])]) -> Vec<u8> {
    let mut bytes = 3u32.to_be_bytes().to_vec();
    for (number, data) in options {
        bytes.extend(numbers::OPTION.to_be_bytes());
        bytes.extend(number.to_be_bytes());
        bytes.extend(u32::try_from(data.len()).unwrap().to_be_bytes());
        bytes.extend(*data);
    }
    bytes
}

/// Returns the reply types in the output of a server.
fn kinds(out: &[u8]) -> Vec<(u32, u32)> {
    let mut bytes = Bytes(out);
    let mut kinds = vec![];
    while let Some(magic) = bytes.u64() {
        assert_eq!(magic, numbers::OPTION_REPLY);
        kinds.push((bytes.u32().unwrap(), bytes.u32().unwrap()));
        let len = bytes.u32().unwrap();
        bytes.take(len as usize).unwrap();
    }
    kinds
}

#[test]
fn handshake_in_pieces_of_any_length_completes() {
    for piece in [1, 3, 17, 4096] {
        let mut client = ClientHandshake::new("disk0", false).unwrap();
        let mut server = ServerHandshake::new(export());
        let (mut to_client, mut to_server) = (greeting().to_vec(), vec![]);
        let (mut settled, mut agreed) = (None, None);
        for _ in 0..10_000 {
            // A piece is at least as long as one message.
            let given = to_client.len().min(piece + 100);
            let (used, progress) = client.feed(&to_client[..given], &mut to_server).unwrap();
            to_client.drain(..used);
            if let ClientProgress::Ready(ready) = progress {
                settled = Some(ready);
            }
            let (used, progress) = server.feed(&to_server, &mut to_client).unwrap();
            to_server.drain(..used);
            if let ServerProgress::Transmission(ready) = progress {
                agreed = Some(ready);
            }
        }
        assert_eq!(
            settled,
            Some(Negotiated { offer: OFFER, structured: true, block_status: true })
        );
        assert_eq!(agreed, Some(Agreed { structured: true, block_status: true }));
    }
}

#[test]
fn each_option_gets_its_reply() {
    let go = |name: &str| {
        let mut data = u32::try_from(name.len()).unwrap().to_be_bytes().to_vec();
        data.extend(name.as_bytes());
        data.extend([0, 0]);
        data
    };
    let contexts = |query: &str| {
        let mut data = [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0].to_vec();
        data.push(u8::try_from(query.len()).unwrap());
        data.extend(query.as_bytes());
        data
    };
    let (set, list) = (option::SET_META_CONTEXT, option::LIST_META_CONTEXT);
    let (ack, context) = (reply::ACK, reply::META_CONTEXT);
    let input = with_options(&[
        (set, &contexts("base:allocation")),
        (option::STRUCTURED_REPLY, b""),
        (option::STRUCTURED_REPLY, b"x"),
        (list, &contexts("base:")),
        (list, &contexts("qemu:")),
        (set, &contexts("base:allocation")),
        (option::LIST, b""),
        (option::STARTTLS, b""),
        (4711, b"?"),
        (option::INFO, &go("")),
        (option::GO, &go("another")),
        (option::GO, b"\xff\xff\xff\xff"),
        (option::GO, &go("disk0")),
    ]);
    let (out, progress, used) = serve(&input, 1).unwrap();
    assert_eq!(used, input.len());
    assert_eq!(
        progress,
        ServerProgress::Transmission(Agreed { structured: true, block_status: true })
    );
    let go = option::GO;
    assert_eq!(
        kinds(&out),
        [
            (set, reply::INVALID),
            (option::STRUCTURED_REPLY, ack),
            (option::STRUCTURED_REPLY, reply::INVALID),
            (list, context),
            (list, ack),
            (list, ack),
            (set, context),
            (set, ack),
            (option::LIST, reply::SERVER),
            (option::LIST, ack),
            (option::STARTTLS, reply::POLICY),
            (4711, reply::UNSUPPORTED),
            (option::INFO, reply::INFO),
            (option::INFO, reply::INFO),
            (option::INFO, ack),
            (go, reply::UNKNOWN),
            (go, reply::INVALID),
            (go, reply::INFO),
            (go, reply::INFO),
            (go, ack),
        ]
    );
}

#[test]
fn export_name_option_is_served_with_and_without_zeros() {
    let mut input = with_options(&[(option::EXPORT_NAME, b"disk0")]);
    let (out, progress, _) = serve(&input, 7).unwrap();
    assert_eq!((out.len(), progress), (10, ServerProgress::Transmission(Agreed::default())));
    input[3] = 1;
    assert_eq!(serve(&input, 7).unwrap().0.len(), 134);
    assert!(serve(&with_options(&[(option::EXPORT_NAME, b"other")]), 7).is_err());
}

#[test]
fn invalid_client_handshake_is_refused() {
    assert_eq!(serve(&[0, 0, 0, 8], 4).unwrap_err(), ProtocolError::Flags { flags: 8 });
    let mut input = with_options(&[(option::LIST, b"")]);
    input[4] = 0;
    assert!(matches!(serve(&input, 4), Err(ProtocolError::Magic { .. })));
    let long = vec![0; 20_000];
    let (out, _, used) = serve(&with_options(&[(4711, &long), (option::LIST, b"")]), 1000).unwrap();
    assert_eq!(kinds(&out)[0], (4711, reply::TOO_BIG), "skipped, not kept");
    assert_eq!(used, 4 + 16 + 20_000 + 16);
    let name = with_options(&[(option::EXPORT_NAME, &long)]);
    assert!(matches!(serve(&name, 1000), Err(ProtocolError::TooLong { .. })));
    let many: Vec<(u32, &[u8])> = vec![(option::LIST, b""); 300];
    assert!(matches!(serve(&with_options(&many), 1000), Err(ProtocolError::TooMany { .. })));
}

fn request(flags: u16, kind: u16, offset: u64, len: u32) -> [u8; 28] {
    let mut bytes = [0; 28];
    bytes[..4].copy_from_slice(&numbers::REQUEST.to_be_bytes());
    bytes[4..6].copy_from_slice(&flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&kind.to_be_bytes());
    bytes[8..16].copy_from_slice(&77u64.to_be_bytes());
    bytes[16..24].copy_from_slice(&offset.to_be_bytes());
    bytes[24..].copy_from_slice(&len.to_be_bytes());
    bytes
}

#[test]
fn request_is_parsed_or_answered_with_error() {
    let agreed = Agreed { structured: true, block_status: true };
    let parse = |flags, kind, offset, len| {
        parse_request(&request(flags, kind, offset, len), &OFFER, agreed).unwrap().command
    };
    let (fua, end) = (command_flag::FUA, OFFER.bytes);
    assert_eq!(parse(0, command::READ, 512, 1024), Ok(NbdCommand::Read));
    assert_eq!(parse(command_flag::DF, command::READ, 512, 1024), Ok(NbdCommand::Read));
    assert_eq!(parse(fua, command::WRITE, 0, 512), Ok(NbdCommand::Write { fua: true }));
    assert_eq!(parse(0, command::FLUSH, 0, 0), Ok(NbdCommand::Flush));
    assert_eq!(parse(fua, command::TRIM, 0, 512), Ok(NbdCommand::Trim { fua: true }));
    let hole = command_flag::NO_HOLE;
    assert_eq!(
        parse(hole, command::WRITE_ZEROES, 0, 512),
        Ok(NbdCommand::WriteZeroes { allocate: true, fua: false })
    );
    assert_eq!(
        parse(fua, command::WRITE_ZEROES, 0, 512),
        Ok(NbdCommand::WriteZeroes { allocate: false, fua: true })
    );
    assert_eq!(parse(0, command::BLOCK_STATUS, 0, 512), Ok(NbdCommand::BlockStatus { one: false }));
    assert_eq!(parse(0, command::DISCONNECT, 0, 0), Ok(NbdCommand::Disconnect));
    assert_eq!(parse(0, command::WRITE, end - 512, 1024), Err(error::NOSPC));
    assert_eq!(parse(0, command::READ, u64::MAX - 511, 512), Err(error::INVAL));
    assert_eq!(parse(0, command::READ, 100, 512), Ok(NbdCommand::Read));
    assert_eq!(parse(0, command::READ, 0, 100), Ok(NbdCommand::Read));
    assert_eq!(parse(0, command::WRITE, end - 1, 1), Ok(NbdCommand::Write { fua: false }));
    assert_eq!(parse(0, command::WRITE, end - 1, 2), Err(error::NOSPC));
    assert_eq!(parse(0, command::READ, 0, 0), Err(error::INVAL));
    let large = Offer { bytes: 1 << 30, ..OFFER };
    for (flags, refused) in [(0, error::INVAL), (command_flag::DF, error::OVERFLOW)] {
        let long = request(flags, command::READ, 0, PAYLOAD_MAX + 1);
        assert_eq!(parse_request(&long, &large, agreed).unwrap().command, Err(refused));
    }
    assert_eq!(parse(command_flag::DF, command::WRITE, 0, 512), Err(error::INVAL));
    assert_eq!(parse(0, 99, 0, 512), Err(error::INVAL));
    let read_only = Offer { flags: OFFER.flags | transmission::READ_ONLY, ..OFFER };
    let write = request(0, command::WRITE, 0, 512);
    let refused = parse_request(&write, &read_only, agreed).unwrap();
    assert_eq!((refused.command, refused.payload), (Err(error::PERM), 512));
    let status = request(0, command::BLOCK_STATUS, 0, 512);
    let refused = parse_request(&status, &OFFER, Agreed::default()).unwrap();
    assert_eq!(refused.command, Err(error::INVAL), "it was not agreed on");
    let long = request(0, command::WRITE, 0, PAYLOAD_MAX + 512);
    assert!(matches!(parse_request(&long, &OFFER, agreed), Err(ProtocolError::TooLong { .. })));
    assert!(parse_request(&[0; 28], &OFFER, agreed).is_err());
}

/// Returns the parsed content of replies fed in pieces.
fn parsed(replies: &mut Replies, bytes: &[u8], piece: usize) -> Result<Vec<String>, ProtocolError> {
    let mut heard = vec![];
    for bytes in bytes.chunks(piece) {
        replies.feed(bytes, |answer| match answer {
            ReplyContent::Data { at, bytes, .. } => heard.push(format!("{at}+{}", bytes.len())),
            ReplyContent::Zeros { at, len, .. } => heard.push(format!("{at}+{len} zeros")),
            ReplyContent::Extent { len, flags, .. } => heard.push(format!("extent {len} {flags}")),
            ReplyContent::Over { cookie, result } => heard.push(format!("{cookie} {result:?}")),
        })?;
    }
    Ok(heard)
}

fn chunk_of(kind: u16, done: bool, cookie: u64, payload: &[&[u8]]) -> Vec<u8> {
    let mut bytes = numbers::STRUCTURED_REPLY.to_be_bytes().to_vec();
    bytes.extend(u16::from(done).to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    let payload = payload.concat();
    bytes.extend(u32::try_from(payload.len()).unwrap().to_be_bytes());
    bytes.extend(payload);
    bytes
}

#[test]
fn encoded_replies_parse_to_their_content() {
    for structured in [true, false] {
        let mut replies = Replies::new(structured);
        replies.expect(1, Expect::Data { offset: 4096, len: 1024 });
        replies.expect(2, Expect::Done);
        replies.expect(3, Expect::Done);
        replies.expect(4, Expect::Data { offset: 0, len: 512 });
        let mut bytes = reply_data(1, 4096, 1024, structured).to_vec();
        bytes.extend([7; 1024]);
        bytes.extend(reply_end(3, 0, structured));
        bytes.extend(reply_end(2, error::NOSPC, structured));
        bytes.extend(reply_end(4, error::IO, structured));
        let said = parsed(&mut replies, &bytes, 5000).unwrap();
        assert_eq!(said, ["0+1024", "1 Ok(())", "3 Ok(())", "2 Err(28)", "4 Err(5)"]);
        assert_eq!(replies.open(), 0);
    }
    assert_eq!(reply_allocated(1, 512).len(), 32);
}

#[test]
fn chunks_in_any_order_are_accepted_once_and_complete() {
    let data = |done, offset: u64, len: usize| {
        chunk_of(1, done, 9, &[&offset.to_be_bytes(), &vec![1; len]])
    };
    let hole = |done, offset: u64, len: u32| {
        chunk_of(2, done, 9, &[&offset.to_be_bytes(), &len.to_be_bytes()])
    };
    let none = chunk_of(0, true, 9, &[]);
    let run = |chunks: &[Vec<u8>]| {
        let mut replies = Replies::new(true);
        replies.expect(9, Expect::Data { offset: 1000, len: 300 });
        parsed(&mut replies, &chunks.concat(), 10_000)
    };
    assert!(run(&[data(false, 1200, 100), hole(false, 1000, 100), data(true, 1100, 100)]).is_ok());
    assert!(run(&[hole(true, 1000, 300)]).is_ok());
    assert!(run(&[data(false, 1000, 300), none.clone()]).is_ok());
    for broken in [
        vec![data(true, 1000, 299)],
        vec![none.clone()],
        vec![data(false, 1000, 200), data(true, 1199, 101)],
        vec![data(false, 1100, 100), data(true, 1000, 200)],
        vec![data(false, 1100, 100), data(false, 1100, 100)],
        vec![data(true, 999, 300)],
        vec![data(true, 1001, 300)],
        vec![data(true, u64::MAX, 300)],
        vec![hole(true, 1000, u32::MAX)],
        vec![hole(true, 1000, 0)],
    ] {
        assert!(matches!(run(&broken), Err(ProtocolError::Range { .. })), "{broken:?}");
    }
}

#[test]
fn reply_that_breaks_a_rule_is_refused() {
    let mut bytes = numbers::SIMPLE_REPLY.to_be_bytes().to_vec();
    bytes.extend([0; 12]);
    let run = |structured, expect: Expect, bytes: &[u8]| {
        let mut replies = Replies::new(structured);
        replies.expect(0, expect);
        parsed(&mut replies, bytes, 1).unwrap_err()
    };
    let read = Expect::Data { offset: 0, len: 512 };
    assert!(matches!(run(true, read, &bytes), ProtocolError::Kind { .. }), "not in chunks");
    bytes[15] = 1;
    assert_eq!(run(true, read, &bytes), ProtocolError::Cookie { cookie: 1 });
    let data = chunk_of(1, true, 0, &[&[0; 8], &[1; 512]]);
    assert!(matches!(run(false, read, &data), ProtocolError::Magic { .. }), "not agreed on");
    assert!(matches!(run(true, Expect::Done, &data), ProtocolError::Kind { .. }));
    let status = chunk_of(5, true, 0, &[&[0; 12]]);
    assert!(matches!(run(true, Expect::Done, &status), ProtocolError::Kind { .. }));
    let refused = |entries: &[u8]| {
        let reply = chunk_of(5, true, 0, &[&[0, 0, 0, 1], entries]);
        let mut replies = Replies::new(true);
        replies.expect(0, Expect::Extents(1024));
        replies.feed(&reply, |_| {}).unwrap_err()
    };
    assert!(matches!(refused(&[0; 8]), ProtocolError::Range { .. }), "an extent of nothing");
    assert!(matches!(refused(&[0; 7]), ProtocolError::Length { .. }));
    let beyond = [0, 0, 4, 0, 0, 0, 0, 3, 0, 0, 2, 0, 0, 0, 0, 0];
    assert!(matches!(refused(&beyond), ProtocolError::Range { .. }), "an extent beyond the range");
    assert!(matches!(run(true, Expect::Extents(512), &data), ProtocolError::Kind { .. }));
    let huge = chunk_of(0x8001, true, 0, &[&[0; 9000]]);
    assert!(matches!(run(true, Expect::Done, &huge), ProtocolError::Length { .. }));
    // An unknown error with a message is an error.
    let error = chunk_of(0x80FF, true, 0, &[&[0, 0, 0, 0, 0, 3], b"why and where"]);
    let mut replies = Replies::new(true);
    replies.expect(0, Expect::Done);
    assert_eq!(parsed(&mut replies, &error, 2).unwrap(), ["0 Err(5)"]);
}

#[test]
fn extents_in_pieces_of_any_length_are_parsed() {
    let entries = [0, 0, 2, 0, 0, 0, 0, 3, 0, 0, 4, 0, 0, 0, 0, 0];
    let mut input = chunk_of(5, false, 0, &[&[0, 0, 0, 1], &entries]);
    input.extend(chunk_of(0, true, 0, &[]));
    for piece in 1..input.len() {
        let mut replies = Replies::new(true);
        replies.expect(0, Expect::Extents(1536));
        let found = parsed(&mut replies, &input, piece).unwrap();
        assert_eq!(found, ["extent 512 3", "extent 1024 0", "0 Ok(())"]);
    }
}

/// Returns the result of a client's handshake for these option replies.
fn offered(answers: &[(u32, u32, Vec<u8>)]) -> Result<ClientProgress, ProtocolError> {
    let mut client = ClientHandshake::new("x", false).unwrap();
    let mut input = greeting().to_vec();
    for (option, kind, data) in answers {
        input.extend(numbers::OPTION_REPLY.to_be_bytes());
        input.extend(option.to_be_bytes());
        input.extend(kind.to_be_bytes());
        input.extend(u32::try_from(data.len()).unwrap().to_be_bytes());
        input.extend(data);
    }
    let (mut out, mut last) = (vec![], ClientProgress::More);
    loop {
        let (used, progress) = client.feed(&input, &mut out)?;
        input.drain(..used);
        if used == 0 {
            return Ok(last);
        }
        last = progress;
    }
}

#[test]
fn invalid_server_handshake_is_refused() {
    let (go, structured) = (option::GO, (option::STRUCTURED_REPLY, reply::UNSUPPORTED, vec![]));
    let info = |bytes: &[u8]| (go, reply::INFO, bytes.to_vec());
    let ack = (go, reply::ACK, vec![]);
    let size = info(&[0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 1]);
    let ready = offered(&[structured.clone(), size.clone(), ack.clone()]).unwrap();
    assert!(matches!(ready, ClientProgress::Ready(Negotiated { structured: false, .. })));
    let refused = |answers: &[(u32, u32, Vec<u8>)]| offered(answers).unwrap_err();
    let nothing = refused(&[structured.clone(), ack.clone()]);
    assert_eq!(nothing, ProtocolError::NoExport);
    assert!(matches!(refused(std::slice::from_ref(&ack)), ProtocolError::Option { .. }));
    let policy = (go, reply::POLICY, b"no\x1b[2J".to_vec());
    let text = refused(&[structured.clone(), policy]).to_string();
    assert!(text.contains("no\\u{1b}[2J"), "{text}");
    for sizes in [[3, 4096, 1 << 20], [512, 256, 1 << 20], [512, 4096, 1024], [1 << 20; 3]] {
        let blocks = [&[0, 3], sizes.map(|n: u32| n.to_be_bytes()).as_flattened()].concat();
        let refusal = refused(&[structured.clone(), info(&blocks)]);
        assert!(matches!(refusal, ProtocolError::BlockSizes { .. }), "{sizes:?}");
    }
    assert!(matches!(refused(&[structured.clone(), info(&[0])]), ProtocolError::Length { .. }));
    let many: Vec<_> = std::iter::once(structured).chain(vec![size; 300]).collect();
    assert!(matches!(refused(&many), ProtocolError::TooMany { .. }));
}

proptest! {
    #[test]
    fn any_bytes_are_parsed_with_bounded_output(data in proptest::collection::vec(any::<u8>(), 0..600)) {
        fuzzing::handshakes(&data);
        fuzzing::replies(&data);
    }

    #[test]
    fn data_of_complete_reply_lies_within_request(
        cuts in proptest::collection::vec((0u64..64, 1u64..16, any::<bool>()), 1..40),
    ) {
        let mut input = vec![];
        for (at, len, zeros) in cuts {
            let (at, len) = (at * 8, len * 8);
            input.extend(if zeros {
                chunk_of(2, false, 0, &[&at.to_be_bytes(), &u32::try_from(len).unwrap().to_be_bytes()])
            } else {
                chunk_of(1, false, 0, &[&at.to_be_bytes(), &vec![9; usize::try_from(len).unwrap()]])
            });
        }
        let mut replies = Replies::new(true);
        replies.expect(0, Expect::Data { offset: 0, len: 512 });
        let mut seen = [false; 512];
        let _ = replies.feed(&input, |answer| {
            let (at, len) = match answer {
                ReplyContent::Data { at, bytes, .. } => (at, bytes.len() as u64),
                ReplyContent::Zeros { at, len, .. } => (at, len),
                ReplyContent::Over { .. } | ReplyContent::Extent { .. } => return,
            };
            for place in &mut seen[usize::try_from(at).unwrap()..usize::try_from(at + len).unwrap()] {
                assert!(!std::mem::replace(place, true), "twice");
            }
        });
    }
}
