use core::net::Ipv4Addr;

use ringfence_frame::Batch;
use ringfence_offload::{Checksum, OffloadMeta};
use ringfence_policy::gate::{QueryEnds, QueryFate};
use ringfence_policy::quic::testing::{Initial, crypto, first_datagram, hello};
use ringfence_policy::{Action, Policy, PolicySource, RuleSource};

use super::*;
use crate::egress::{Answered, AskLimits, Asked, NoteQueue, PolicyInForce};
use crate::emit::Ends;
use crate::host::scripted::ScriptedHost;
use crate::testing::Wire;
use crate::{Config, Uplink, UplinkCounters};

const NOW: Duration = Duration::from_secs(1000);
const SHARED: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 1);
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
/// Datagram of an open QUIC connection.
const SHORT: [u8; 30] = [0x40; 30];

/// Creates a policy under which `a.org` and `b.org` have one address.
pub(in crate::egress) fn egress(rule: &str) -> Arc<Egress> {
    egress_with(rule, None, None)
}

/// Creates the same policy, with a queue of records and limits of questions.
pub(in crate::egress) fn egress_with(
    rule: &str,
    notes: Option<NoteQueue>,
    limits: Option<AskLimits>,
) -> Arc<Egress> {
    let allow = |text: &str| RuleSource {
        action: Action::Allow,
        text: text.to_owned(),
        origin: String::new(),
    };
    let rules = vec![allow(rule), allow("b.org:1")];
    let policy = Policy::new(PolicySource { rules, ..PolicySource::default() }).unwrap();
    let egress = Arc::new(Egress::with_questions(policy, notes, false, limits));
    let (guest, server) = ((GUEST, 4000).into(), ([10, 0, 0, 1], 53).into());
    let ends = QueryEnds { guest, server, over: Protocol::Udp };
    let counters = UplinkCounters::default();
    for name in [b'a', b'b'] {
        let question = [&[1, name, 3][..], b"org\0\0\x01\0\x01"].concat();
        let query = [&b"\0\x07\x01\0\0\x01\0\0\0\0\0\0"[..], &question].concat();
        let asked = egress.query(ends, &query, false, None, NOW, &counters);
        let Asked::Decided(QueryFate::Forward(sent)) = asked else { panic!() };
        let record = [&b"\xc0\x0c\0\x01\0\x01\0\0\x0e\x10\0\x04"[..], &SHARED.octets()].concat();
        let answer =
            [&sent[..2], b"\x81\x80\0\x01\0\x01\0\0\0\0", &sent[12..12 + question.len()], &record];
        let answered = egress.answer(ends, answer.concat(), NOW, &counters);
        assert!(matches!(answered, Answered::Send(_)));
    }
    egress
}

fn inspector(rule: &str) -> Box<DatagramInspector> {
    let egress = egress(rule);
    let to = (SHARED, 443).into();
    let allowed = egress.connect(to, Protocol::Udp, NOW, &UplinkCounters::default()).unwrap();
    DatagramInspector::new(&egress, to, allowed).unwrap()
}

/// Splits a hello into two datagrams.
fn halves(id: &[u8], name: &str) -> [Vec<u8>; 2] {
    let hello = hello(name);
    let seal = |number, at: usize, part: &[u8]| {
        Initial::new(id, number).seal(&[crypto(at, part), vec![0; 40]].concat())
    };
    [seal(0, 0, &hello[..90]), seal(1, 90, &hello[90..])]
}

#[test]
fn hello_in_two_datagrams_waits_until_it_is_complete() {
    let mut inspector = inspector("a.org:443");
    let [first, second] = halves(b"12345678", "a.org");
    assert_eq!(inspector.judge(&first, NOW), DatagramVerdict::Wait);
    assert_eq!(inspector.judge(&SHORT, NOW), DatagramVerdict::Wait);
    assert!(inspector.take_held().is_empty() && !inspector.is_open());
    assert_eq!(inspector.deadline(), Some(NOW + FIRST_BYTES_WITHIN));
    assert_eq!(inspector.judge(&second, NOW), DatagramVerdict::Pass);
    assert_eq!(inspector.take_held(), [&first[..], &SHORT]);
    assert_eq!(inspector.deadline(), None);
    assert_eq!(inspector.judge(&SHORT, NOW), DatagramVerdict::Pass);
}

#[test]
fn hello_of_later_connection_is_held_and_denied() {
    let mut inspector = inspector("a.org:443");
    assert_eq!(inspector.judge(&first_datagram(b"12345678", "a.org"), NOW), DatagramVerdict::Pass);
    let [first, second] = halves(b"another1", "b.org");
    assert_eq!(inspector.judge(&first, NOW), DatagramVerdict::Wait);
    // The open connection goes on, and releases nothing.
    assert_eq!(inspector.judge(&SHORT, NOW), DatagramVerdict::Pass);
    assert!(inspector.take_held().is_empty());
    assert_eq!(inspector.judge(&second, NOW), DatagramVerdict::Deny);
    assert!(inspector.take_held().is_empty());
    assert_eq!(inspector.judge(&second, NOW), DatagramVerdict::Drop);
    assert_eq!(inspector.judge(&SHORT, NOW), DatagramVerdict::Pass);
}

#[test]
fn hello_that_stays_incomplete_is_refused_in_time() {
    let mut inspector = inspector("a.org:443");
    let [first, second] = halves(b"12345678", "a.org");
    assert_eq!(inspector.judge(&first, NOW), DatagramVerdict::Wait);
    assert!(!inspector.expire(NOW + FIRST_BYTES_WITHIN / 2));
    assert!(inspector.expire(NOW + FIRST_BYTES_WITHIN) && !inspector.is_open());
    assert_eq!(inspector.judge(&second, NOW + FIRST_BYTES_WITHIN), DatagramVerdict::Deny);
}

#[test]
fn held_datagrams_are_bounded_for_association_and_guest() {
    let mut inspector = inspector("a.org:443");
    assert_eq!(inspector.judge(&halves(b"12345678", "a.org")[0], NOW), DatagramVerdict::Wait);
    let verdicts: Vec<_> = (0..40).map(|_| inspector.judge(&[0x40; 1200], NOW)).collect();
    assert_eq!(verdicts.iter().filter(|verdict| **verdict == DatagramVerdict::Wait).count(), 27);
    assert_eq!(verdicts.last(), Some(&DatagramVerdict::Drop));
    let egress = Arc::clone(&inspector.egress);
    let kept = egress.state().waiting;
    assert!((27 * 1200..FIRST_BYTES_HELD_MAX).contains(&kept), "{kept}");
    egress.state().waiting += FIRST_BYTES_HELD_MAX;
    let (to, allowed) = (inspector.to, inspector.admitted.decision.clone());
    let mut other = DatagramInspector::new(&egress, to, allowed).unwrap();
    assert_eq!(other.judge(&halves(b"12345678", "a.org")[0], NOW), DatagramVerdict::Deny);
    egress.state().waiting -= FIRST_BYTES_HELD_MAX;
    drop((inspector, other));
    assert_eq!(egress.state().waiting, 0);
}

#[test]
fn other_protocols_pass_only_under_a_rule_with_udp() {
    assert_eq!(inspector("a.org:443").judge(&SHORT, NOW), DatagramVerdict::Deny);
    let mut explicit = inspector("a.org:443/udp");
    assert_eq!(explicit.judge(&SHORT, NOW), DatagramVerdict::Pass);
    // A hello behind other datagrams is read nevertheless.
    assert_eq!(explicit.judge(&first_datagram(b"12345678", "b.org"), NOW), DatagramVerdict::Deny);
    let draft = [&[0xc3, 0xff, 0, 0, 29][..], &[0; 1195]].concat();
    assert_eq!(explicit.judge(&draft, NOW), DatagramVerdict::Deny);
    assert_eq!(explicit.judge(&SHORT, NOW), DatagramVerdict::Pass);
}

/// Sends datagrams of a guest to port 443 of the shared address through an engine. Returns the lengths of what a
/// server that echoes them received, and the number of ICMP errors.
fn through_engine(datagrams: &[&[u8]]) -> (Vec<usize>, usize) {
    let policy = PolicyInForce::new(Some(egress("a.org:443")));
    let mut config = Config { mtu: 1500, policy, ..Config::default() };
    config.guest.addresses = vec![(GUEST.into(), 24)];
    config.guest.gateways = vec![Ipv4Addr::new(10, 0, 0, 1).into()];
    let mac = config.mac;
    let host = Box::new(ScriptedHost::new(4).unwrap());
    let mut uplink = Uplink::new(config, host, Arc::default());
    let mut wire = Wire::plain();
    let ends =
        Ends { from_mac: [2, 0, 0, 0, 0, 2], to_mac: mac, from: GUEST.into(), to: SHARED.into() };
    for datagram in datagrams {
        let len = datagram.len() + 8;
        let mut frame = vec![0; ends.header_len()];
        for field in [5000, 443, u16::try_from(len).unwrap(), 0] {
            frame.extend(field.to_be_bytes());
        }
        frame.extend(*datagram);
        ends.write(&mut frame, 17, len, 1).unwrap();
        let mut batch = Batch::with_capacity(1, 1 << 16);
        let offset = batch.reserve(frame.len()).unwrap();
        batch.scratch_mut(offset..offset + frame.len()).unwrap().copy_from_slice(&frame);
        let meta = OffloadMeta { checksum: Checksum::Verified, gso: None };
        let index = batch.push_contiguous(offset, frame.len(), meta).unwrap();
        uplink.input(&batch, &[index], NOW);
        uplink.poll_host(NOW).unwrap();
        while uplink.output(&mut wire, NOW) {
            uplink.poll_host(NOW).unwrap();
        }
    }
    let header = ends.header_len();
    let (echoed, errors): (Vec<_>, Vec<_>) =
        wire.frames.iter().partition(|frame| frame[header - 20 + 9] == 17);
    (echoed.into_iter().map(|frame| frame.len() - header - 8).collect(), errors.len())
}

#[test]
fn server_receives_nothing_of_a_denied_hello() {
    let allowed = first_datagram(b"12345678", "a.org");
    assert_eq!(through_engine(&[&allowed, &SHORT]), (vec![1200, 30], 0));
    let denied = first_datagram(b"12345678", "b.org");
    assert_eq!(through_engine(&[&denied, &SHORT]), (vec![], 2));
    let [first, second] = halves(b"12345678", "a.org");
    let lengths = vec![first.len(), second.len()];
    assert_eq!(through_engine(&[&first]), (vec![], 0));
    assert_eq!(through_engine(&[&first, &second]), (lengths, 0));
    let [first, second] = halves(b"another1", "b.org");
    assert_eq!(through_engine(&[&allowed, &first, &SHORT, &second]), (vec![1200, 30], 1));
}
