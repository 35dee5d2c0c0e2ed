//! Bodies of fuzz targets. Property tests run them, too.

use core::time::Duration;

use crate::dns::Query;
use crate::first::{self, FIRST_BYTES_MAX, Shown};
use crate::gate::{AnswerFate, Gate, QueryEnds, QueryFate};
use crate::http::{FirstLine, Line};
use crate::policy::{Policy, PolicySource, RuleSource};
use crate::quic::{self, CONNECTIONS_MAX, Client, STREAM_MAX, Seen};
use crate::rule::{Action, Protocol, Rule};
use crate::tls::Hello;
use crate::tls::second::{Later, Next, first_len};

/// Parses a text as a rule and as a policy file.
///
/// # Panics
///
/// Panics if an accepted rule is printed in another form than it parses from, or an error points outside.
pub fn rule_text(data: &[u8]) {
    let Ok(text) = core::str::from_utf8(data) else { return };
    match text.parse::<Rule>() {
        Ok(rule) => assert_eq!(rule.to_string().parse::<Rule>(), Ok(rule)),
        Err(error) => {
            assert!(text.is_char_boundary(error.at), "{error:?}");
            error.caret(text);
        }
    }
    let _ = crate::file::parse("fuzz.toml", text);
}

/// Reads the data as the first bytes of a connection, whole and in a shorter form.
///
/// # Panics
///
/// Panics if a verdict depends on how the bytes arrive.
pub fn first_bytes(data: &[u8]) {
    let whole = first::inspect(data, false);
    assert!(whole.is_some() || data.len() < FIRST_BYTES_MAX, "more than the limit is needed");
    assert!(first::inspect(data, true).is_some());
    for end in 0..data.len().min(512) {
        match first::inspect(&data[..end], false) {
            None => {}
            // The first line is read on.
            Some(Shown::Unknown) if whole == Some(Shown::Malformed) => {
                let mut line = FirstLine::default();
                assert_eq!(line.read(&data[..end]), Line::Open, "at {end}");
                assert_eq!(line.read(&data[end..]), Line::Request, "at {end}");
                break;
            }
            // Later bytes cannot change a verdict, except that more of an unknown message may be malformed.
            early => {
                assert_eq!(early, whole, "at {end}");
                break;
            }
        }
    }
    if let Some(Shown::Tls(hello)) = &whole {
        later_records(hello, &data[first_len(data)..]);
    }
}

/// Reads records behind a hello whole, and in two pieces.
fn later_records(first: &Hello, bytes: &[u8]) {
    let whole = Later::new(first).read(bytes);
    let cut = bytes.len() / 2;
    let mut reader = Later::new(first);
    let passed = match reader.read(&bytes[..cut]) {
        Next::More(passed) => passed,
        verdict => return assert_eq!(verdict, whole),
    };
    assert!(passed <= cut, "{passed} of {cut} bytes");
    match (reader.read(&bytes[passed..]), whole) {
        (Next::More(more), Next::More(all)) => assert_eq!(passed + more, all),
        (verdict, whole) => assert_eq!(verdict, whole),
    }
}

/// Handles the data as a query, then as an answer to a query.
///
/// # Panics
///
/// Panics if a rewritten query does not parse, or an answer pins what a rule must not open.
pub fn dns_messages(data: &[u8]) {
    let rule = |text: &str| RuleSource {
        action: Action::Allow,
        text: text.to_owned(),
        origin: String::new(),
    };
    let source =
        PolicySource { rules: vec![rule("*.org"), rule("a.org")], ..PolicySource::default() };
    let Ok(policy) = Policy::new(source) else { return };
    let mut gate = Gate::new(policy);
    let (guest, server) = (([10, 0, 0, 2], 4000).into(), ([10, 0, 0, 1], 53).into());
    let ends = QueryEnds { guest, server, over: Protocol::Udp };
    let now = Duration::from_secs(1);
    if let QueryFate::Forward(sent) = gate.query(ends, data, now).fate {
        assert!(Query::parse(&sent).is_ok(), "{sent:02x?}");
    }
    // Every id leads to a query for a.org.
    let id = data.first_chunk::<2>().copied().unwrap_or_default();
    let query = [&id[..], b"\x01\0\0\x01\0\0\0\0\0\0\x01a\x03org\0\0\x01\0\x01"].concat();
    gate.query(ends, &query, now);
    let mut answer = data.to_vec();
    if gate.answer(ends, Protocol::Udp, &mut answer, now) == AnswerFate::Deliver {
        assert_eq!(answer[12..23], *b"\x01a\x03org\0\0\x01\0\x01");
    }
    for ip in [[10, 0, 0, 1], [127, 0, 0, 1], [169, 254, 169, 254]] {
        assert_eq!(gate.pins().names(ip.into(), now).count(), 0);
    }
}

/// Reads the data as datagrams of a QUIC client: as they are, or as the frames of Initial packets.
///
/// A datagram is a byte with its form, a byte with its length and these bytes.
///
/// # Panics
///
/// Panics if a table exceeds its limit, or the same datagram shows a hello twice.
pub fn quic_datagrams(data: &[u8]) {
    let (mut client, mut rest, mut number) = (Client::default(), data, 0);
    while let [form, len, more @ ..] = rest {
        let (body, behind) = more.split_at(usize::from(*len).min(more.len()));
        rest = behind;
        number += u64::from(form >> 6);
        let id = [form >> 2 & 1; 8];
        let version = if form & 2 == 0 { 1 } else { quic::testing::V2 };
        let datagram = if form & 1 == 0 {
            body.to_vec()
        } else {
            let frames = if form & 8 == 0 {
                // The beginning of a hello, so that short data reach its end.
                let start = [&[1, 0, 0, 60, 3, 3][..], &[0; 33], &[0, 2, 0x13, 1, 1, 0]].concat();
                [quic::testing::crypto(0, &start), body.to_vec(), vec![0; 40]].concat()
            } else {
                [body, &[0; 40]].concat()
            };
            let initial = quic::testing::Initial::new(&id, number);
            quic::testing::Initial {
                version,
                number_len: 1 + usize::from(form >> 4 & 3),
                ..initial
            }
            .seal(&frames)
        };
        let now = Duration::from_secs(number);
        match client.read(&datagram, now) {
            Seen::Hello(_) => assert_eq!(client.read(&datagram, now), Seen::Known),
            Seen::Malformed => {
                client.refuse_last();
                assert_ne!(client.read(&datagram, now), Seen::Known);
            }
            _ => {}
        }
        assert!(client.memory() <= CONNECTIONS_MAX * 4 * STREAM_MAX);
    }
}
