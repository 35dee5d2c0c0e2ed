use ringfence_policy::quic::testing::hello;

use super::super::datagrams::tests::{egress, egress_with};
use super::*;
use crate::UplinkCounters;
use crate::egress::{Answer, AskLimits};

const NOW: Duration = Duration::from_secs(1000);
const SECOND: Duration = Duration::from_secs(1);
const CCS: [u8; 6] = [20, 3, 3, 0, 1, 1];

/// Creates the inspection of a connection to the address that `a.org` and `b.org` share. Only `a.org` is allowed.
fn first_bytes() -> Box<FirstBytes> {
    let (egress, to) = (egress("a.org"), ([203, 0, 113, 1], 443).into());
    let allowed = egress.connect(to, Protocol::Tcp, NOW, &UplinkCounters::default()).unwrap();
    FirstBytes::new(&egress, to, allowed).unwrap()
}

/// Returns a hello in one record.
fn record(name: &str) -> Vec<u8> {
    let message = hello(name);
    let len = u16::try_from(message.len()).unwrap().to_be_bytes();
    [&[22, 3, 1][..], &len, &message].concat()
}

/// Adds bytes, and lets the socket take those that may go. Returns the verdict and their number.
fn add(first: &mut FirstBytes, bytes: &[u8]) -> (FirstVerdict, usize) {
    let verdict = first.add(bytes, false, NOW);
    let passed = first.passed().len();
    first.sent(passed);
    (verdict, passed)
}

#[test]
fn second_hello_waits_for_a_verdict_of_its_own() {
    let (allowed, denied) = (record("a.org"), record("b.org"));
    let mut first = first_bytes();
    assert_eq!(add(&mut first, &allowed), (FirstVerdict::Pass, allowed.len()));
    assert!(!first.is_done() && first.deadline().is_none());
    assert_eq!(add(&mut first, &CCS), (FirstVerdict::Pass, 6));
    assert_eq!(add(&mut first, &denied[..100]), (FirstVerdict::Wait, 0));
    assert!(first.held() == 100 && first.deadline().is_some());
    assert_eq!(add(&mut first, &denied[100..]), (FirstVerdict::Deny, 0));

    let mut first = first_bytes();
    add(&mut first, &allowed);
    add(&mut first, &allowed[..100]);
    assert_eq!(add(&mut first, &allowed[100..]), (FirstVerdict::Pass, allowed.len()));
    assert!(first.is_done() && first.held() == 0 && first.deadline().is_none());
    assert_eq!(first.egress.state().waiting, 0);
}

#[test]
fn second_hello_in_the_same_segment_is_denied() {
    let mut first = first_bytes();
    let both = [record("a.org"), record("b.org")].concat();
    assert_eq!(first.add(&both, false, NOW), FirstVerdict::Deny);
    let mut first = first_bytes();
    let late = [record("a.org"), CCS.to_vec(), record("b.org")[..9].to_vec()].concat();
    assert_eq!(add(&mut first, &late), (FirstVerdict::Pass, late.len() - 9));
    assert_eq!(first.held(), 9);
}

#[test]
fn ordinary_connection_is_read_no_further_than_its_next_record() {
    let mut first = first_bytes();
    let finished = [&CCS[..], &[23, 3, 3, 0, 3, 1, 2, 3]].concat();
    add(&mut first, &record("a.org"));
    assert_eq!(add(&mut first, &finished), (FirstVerdict::Pass, finished.len()));
    assert!(first.is_done());
}

#[test]
fn end_inside_a_second_hello_is_denied() {
    let mut first = first_bytes();
    add(&mut first, &record("a.org"));
    assert_eq!(first.add(&[], true, NOW + SECOND), FirstVerdict::Wait);
    assert_eq!(first.held(), 0);
    add(&mut first, &record("a.org")[..50]);
    assert_eq!(first.add(&[], true, NOW + SECOND), FirstVerdict::Deny);
}

#[test]
fn bytes_that_may_go_stay_until_the_socket_takes_them() {
    let mut first = first_bytes();
    let hello = record("a.org");
    assert_eq!(first.add(&hello, false, NOW), FirstVerdict::Pass);
    first.sent(100);
    assert_eq!(first.passed(), &hello[100..]);
    assert_eq!(first.egress.state().waiting, hello.len() - 100);
    let egress = Arc::clone(&first.egress);
    drop(first);
    assert_eq!(egress.state().waiting, 0);
}

#[test]
fn word_of_another_protocol_passes_after_a_pause_and_reading_goes_on() {
    // A command of four letters; the answer ends the connection.
    let mut first = first_bytes();
    assert_eq!(add(&mut first, b"ruok"), (FirstVerdict::Wait, 0));
    assert_eq!(first.deadline(), Some(NOW + WORD_PASSES_AFTER));
    assert_eq!(first.on_deadline(NOW + FIRST_BYTES_WITHIN), FirstVerdict::Pass);
    assert_eq!(first.passed(), b"ruok");
    first.sent(4);
    assert!(first.held() == 0 && first.deadline().is_none() && !first.is_done());
    assert_eq!(first.add(&[], true, NOW), FirstVerdict::Wait);
    assert!(first.is_done());

    for request in ["GET / HTTP/1.1\r\nHost: b.org\r\n\r\n", "PROXY TCP4 x\r\n", "GET /\r\n"] {
        let mut first = first_bytes();
        add(&mut first, &request.as_bytes()[..3]);
        assert_eq!(first.on_deadline(NOW + FIRST_BYTES_WITHIN), FirstVerdict::Pass);
        first.sent(3);
        assert_eq!(add(&mut first, &request.as_bytes()[3..]), (FirstVerdict::Deny, 0), "{request}");
        let egress = Arc::clone(&first.egress);
        drop(first);
        assert_eq!(egress.state().waiting, 0);
    }

    let mut first = first_bytes();
    add(&mut first, b"GET");
    first.on_deadline(NOW + FIRST_BYTES_WITHIN);
    first.sent(3);
    let (verdict, passed) = add(&mut first, b" / HTTP/1.1\r\nHost: a.org\r\n\r\n");
    assert_eq!((verdict, passed), (FirstVerdict::Pass, 28));
    assert!(first.is_done() && first.egress.state().waiting == 0);
}

#[test]
fn bytes_that_cannot_begin_a_request_pass_at_once_and_their_line_is_read() {
    for bytes in
        [&b"0033git-upload-pack /x\0host=a.org\0"[..], b"\0\0\0\x08\x04\xd2\x16\x2f", &[b'x'; 40]]
    {
        let mut first = first_bytes();
        assert_eq!(add(&mut first, bytes), (FirstVerdict::Pass, bytes.len()));
        assert!(first.deadline().is_none());
        assert_eq!(add(&mut first, b"more\n"), (FirstVerdict::Pass, 5));
        assert!(first.is_done());
    }
    for request in [" GET / HTTP/1.1\r\nHost: b.org\r\n\r\n", " GET /\r\nHost: b.org\r\n\r\n"] {
        let mut first = first_bytes();
        assert_eq!(add(&mut first, b" "), (FirstVerdict::Pass, 1));
        assert_eq!(add(&mut first, &request.as_bytes()[1..]), (FirstVerdict::Deny, 0), "{request}");
    }
}

#[test]
fn beginning_of_a_hello_does_not_pass_after_a_pause() {
    for bytes in [&b"GET /x"[..], &[22, 3, 1], &[21], &[0x80, 46]] {
        let mut first = first_bytes();
        assert_eq!(add(&mut first, bytes), (FirstVerdict::Wait, 0));
        assert_eq!(first.deadline(), Some(NOW + FIRST_BYTES_WITHIN), "{bytes:?}");
        assert_eq!(first.on_deadline(NOW + FIRST_BYTES_WITHIN), FirstVerdict::Deny);
    }
}

#[test]
fn only_a_denied_request_of_http_on_port_80_has_a_page() {
    let page = |port: u16, bytes: &[u8]| {
        let (egress, to) = (egress("a.org"), SocketAddr::from(([203, 0, 113, 1], port)));
        let allowed = egress.connect(to, Protocol::Tcp, NOW, &UplinkCounters::default()).unwrap();
        let mut first = FirstBytes::new(&egress, to, allowed).unwrap();
        let verdict = first.add(bytes, false, NOW);
        let page = first.take_page().map(|page| String::from_utf8(page).unwrap());
        first.clear();
        assert!(first.is_done() && first.held() == 0 && egress.hold(FIRST_BYTES_HELD_MAX));
        (verdict, page)
    };
    let denied = b"GET / HTTP/1.1\r\nHost: c.org\r\n\r\n";
    let (verdict, text) = page(80, denied);
    assert_eq!(verdict, FirstVerdict::Deny);
    let text = text.unwrap();
    assert!(
        text.ends_with("\r\n\r\ndenied c.org, no rule; the host allows it by --allow c.org:80\n"),
        "{text}"
    );
    let (_, head) = page(80, b"HEAD / HTTP/1.1\r\nHost: c.org\r\n\r\n");
    assert!(head.unwrap().ends_with("\r\n\r\n"));
    for (port, bytes) in [
        (8080, &denied[..]),
        (80, &record("c.org")[..]),
        (443, &record("c.org")[..]),
        (80, b"GET / HTTP/9.9\r\nHost: c.org\r\n\r\n"),
        (80, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    ] {
        assert_eq!(page(port, bytes), (FirstVerdict::Deny, None), "{port}");
    }
    let (verdict, none) = page(80, b"GET / HTTP/1.1\r\nHost: a.org\r\n\r\n");
    assert_eq!((verdict, none), (FirstVerdict::Pass, None));
}

#[test]
fn hello_for_an_unknown_name_waits_for_the_answer() {
    let limits = AskLimits { within: SECOND * 30, at_a_time: 8 };
    // Another port of `b.org` has a rule, so its address is known.
    let unknown = record("b.org");
    for (answer, verdict) in [
        (Some(Answer::Run), FirstVerdict::Pass),
        (Some(Answer::Deny), FirstVerdict::Deny),
        (None, FirstVerdict::Deny),
    ] {
        let (queue, notes) = std::sync::mpsc::sync_channel(100);
        let egress = egress_with("a.org", Some(queue), Some(limits));
        let to = ([203, 0, 113, 1], 443).into();
        let allowed = egress.connect(to, Protocol::Tcp, NOW, &UplinkCounters::default()).unwrap();
        let mut first = FirstBytes::new(&egress, to, allowed).unwrap();
        assert_eq!(add(&mut first, &unknown), (FirstVerdict::Wait, 0));
        assert!(first.is_asking() && !first.is_answered());
        assert_eq!(first.deadline(), Some(NOW + limits.within));
        assert_eq!(add(&mut first, &CCS), (FirstVerdict::Wait, 0));
        assert_eq!(egress.questions(), 1);
        let resumed = match answer {
            Some(answer) => {
                assert!(egress.answer_question(1, answer, NOW + SECOND) && first.is_answered());
                first.resume(NOW + SECOND)
            }
            None => first.on_deadline(NOW + limits.within),
        };
        assert_eq!(resumed, verdict, "{answer:?}");
        let length = if verdict == FirstVerdict::Pass { unknown.len() + CCS.len() } else { 0 };
        assert_eq!(first.passed().len(), length);
        drop((first, notes));
        assert_eq!(egress.state().waiting, 0);
    }
}
