use hickory_proto::op::Message;
use hickory_proto::rr::RecordType;
use proptest::prelude::*;

use super::*;
use crate::dns::tests::{answer, query};
use crate::tls::Hello;

pub(super) const NOW: Duration = Duration::from_secs(1000);

pub(super) fn gate(words: &str) -> Gate {
    Gate::new(Policy::new(crate::testing::source(words)).unwrap())
}

fn ends() -> QueryEnds {
    let (guest, server) = ("10.0.0.2:4000".parse().unwrap(), "10.0.0.1:53".parse().unwrap());
    QueryEnds { guest, server, over: Protocol::Udp }
}

pub(super) fn name(text: &str) -> HostName {
    HostName::parse(text).unwrap()
}

/// Asks for a name. Returns the code of the reply, or `None` if the query goes to the server.
fn asked(gate: &mut Gate, host: &str, kind: RecordType) -> Option<u8> {
    match gate.query(ends(), &query(host, kind, 7), NOW).fate {
        QueryFate::Forward(_) => None,
        QueryFate::Reply(reply) => Some(reply[3] & 0xf),
        QueryFate::Drop => panic!("the query was dropped"),
    }
}

/// Asks for a name and answers with these records.
pub(super) fn resolve(gate: &mut Gate, host: &str, records: &[(&str, u32, &str)]) -> AnswerFate {
    let QueryFate::Forward(sent) = gate.query(ends(), &query(host, RecordType::A, 7), NOW).fate
    else {
        panic!("{host} is refused");
    };
    gate.answer(ends(), Protocol::Udp, &mut answer(&sent, records, &[]), NOW)
}

fn connect(gate: &Gate, to: &str) -> Decision {
    gate.connect(to.parse().unwrap(), Protocol::Tcp, NOW + Duration::from_secs(1))
}

fn is_allowed(gate: &Gate, to: &str) -> bool {
    connect(gate, to).verdict.is_allowed()
}

#[test]
fn denied_name_is_refused_and_allowed_name_is_pinned() {
    let mut gate = gate("+a.org:443/tcp");
    assert_eq!(asked(&mut gate, "b.org.", RecordType::A), Some(Code::Refused as u8));
    assert!(!is_allowed(&gate, "203.0.113.1:443"));
    let records = [("a.org.", 300, "x.cdn."), ("x.cdn.", 300, "203.0.113.1")]
        .map(|(owner, ttl, data)| (owner, ttl, data));
    assert_eq!(resolve(&mut gate, "A.org.", &records), AnswerFate::Deliver);
    let decision = connect(&gate, "203.0.113.1:443");
    assert_eq!(decision.verdict, Verdict::allow(Cause::Rule(0)));
    assert_eq!(
        (decision.name, decision.inspection),
        (Some(name("a.org")), Inspection::AllowedNames)
    );
    assert!(!is_allowed(&gate, "203.0.113.1:80") && !is_allowed(&gate, "203.0.113.2:443"));
    let later = gate.connect("203.0.113.1:443".parse().unwrap(), Protocol::Tcp, NOW * 2);
    assert_eq!(later.verdict, Verdict::deny(Cause::NoPin));
    let udp = gate.connect("203.0.113.1:443".parse().unwrap(), Protocol::Udp, NOW);
    assert!(!udp.verdict.is_allowed());
}

#[test]
fn private_address_in_an_answer_is_refused_unless_a_rule_names_it() {
    for ip in ["10.0.0.9", "127.0.0.1", "169.254.169.254", "fd00:ec2::254", "::ffff:10.0.0.1"] {
        let mut closed = gate("+a.org");
        let records = [("a.org.", 1, "203.0.113.1"), ("a.org.", 1, ip)];
        let fate = resolve(&mut closed, "a.org.", &records);
        let AnswerFate::Replace(_, bytes) = fate else { panic!("{ip}: {fate:?}") };
        let reply = Message::from_vec(&bytes).unwrap();
        assert!(reply.answers.is_empty() && bytes[3] & 0xf == 5);
        assert!(closed.pins().is_empty());
    }
    let mut open = gate("+a.org +10.0.0.0/24:443");
    assert_eq!(resolve(&mut open, "a.org.", &[("a.org.", 1, "10.0.0.9")]), AnswerFate::Deliver);
    assert!(is_allowed(&open, "10.0.0.9:443") && !is_allowed(&open, "10.0.0.9:80"));
    assert_eq!(connect(&open, "10.0.0.9:80").verdict.cause, Cause::Special);
}

#[test]
fn answer_without_query_pins_nothing() {
    let mut gate = gate("+a.org");
    let bytes = query("a.org.", RecordType::A, 7);
    let mut forged = answer(&bytes, &[("a.org.", 9, "203.0.113.1")], &[]);
    assert_eq!(gate.answer(ends(), Protocol::Udp, &mut forged, NOW), AnswerFate::Drop);
    gate.query(ends(), &bytes, NOW);
    let other = QueryEnds { server: "10.0.0.3:53".parse().unwrap(), ..ends() };
    assert_eq!(gate.answer(other, Protocol::Udp, &mut forged, NOW), AnswerFate::Drop);
    assert_eq!(
        gate.answer(ends(), Protocol::Udp, &mut forged, NOW + ANSWER_WITHIN),
        AnswerFate::Drop
    );
    assert_eq!(gate.answer(ends(), Protocol::Udp, &mut forged, NOW), AnswerFate::Deliver);
    assert_eq!(
        gate.answer(ends(), Protocol::Udp, &mut forged, NOW),
        AnswerFate::Drop,
        "one answer a query"
    );
}

#[test]
fn question_about_a_name_is_answered_here_unless_a_rule_allows_it() {
    let mut gate = gate("+x.org:443 +why.y.org");
    let asked = |gate: &mut Gate, host: &str, kind| gate.query(ends(), &query(host, kind, 7), NOW);
    for (host, text) in [
        ("why.z.org.", "denied z.org, no rule; the host allows it by --allow z.org:443"),
        ("why.x.org.", "allowed x.org, allow x.org:443"),
    ] {
        let resolution = asked(&mut gate, host, RecordType::TXT);
        let QueryFate::Reply(reply) = resolution.fate else { panic!("{host} left the host") };
        let message = Message::from_vec(&reply).unwrap();
        assert_eq!(message.answers[0].data.to_string().trim_matches('"'), text);
        assert!(resolution.name.is_none() && resolution.verdict == Verdict::allow(Cause::Why));
    }
    assert!(matches!(asked(&mut gate, "why.y.org.", RecordType::TXT).fate, QueryFate::Forward(_)));
    for (host, kind) in
        [("why.z.org.", RecordType::A), ("z.org.", RecordType::TXT), ("why.", RecordType::TXT)]
    {
        let resolution = asked(&mut gate, host, kind);
        assert!(!resolution.verdict.is_allowed(), "{host}");
    }
    // The longest name.
    let long =
        format!("why.{}.{}.{}.{}.", "a".repeat(63), "b".repeat(63), "c".repeat(63), "d".repeat(57));
    let QueryFate::Reply(reply) = asked(&mut gate, &long, RecordType::TXT).fate else { panic!() };
    assert!(Message::from_vec(&reply).unwrap().answers.len() == 1 && reply.len() < 1232);
}

/// Returns an answer to a query with `count` addresses.
fn long_answer(sent: &[u8], count: u32) -> Vec<u8> {
    let ips: Vec<String> =
        (0..count).map(|n| core::net::Ipv4Addr::from_bits(0xcb00_7100 + n).to_string()).collect();
    let records: Vec<_> = ips.iter().map(|ip| ("a.org.", 300, ip.as_str())).collect();
    answer(sent, &records, &[])
}

#[test]
fn incomplete_answer_is_asked_for_over_tcp_once() {
    let mut gate = gate("+a.org");
    let sent = query("a.org.", RecordType::A, 7);
    gate.query(ends(), &sent, NOW);
    let mut cut = long_answer(&sent, 2);
    cut[2] |= 2;
    let fate = gate.answer(ends(), Protocol::Udp, &mut cut.clone(), NOW);
    let AnswerFate::AskOverTcp(again) = fate else { panic!("{fate:?}") };
    assert_eq!(again[..2], sent[..2]);
    assert!(gate.pins().is_empty());
    assert_eq!(gate.answer(ends(), Protocol::Udp, &mut cut, NOW), AnswerFate::Drop);
    let mut whole = long_answer(&sent, 101);
    assert_eq!(gate.answer(ends(), Protocol::Tcp, &mut whole, NOW), AnswerFate::Deliver);
    assert!(is_allowed(&gate, "203.0.113.100:443"));
}

#[test]
fn query_without_an_answer_over_tcp_fails_at_once() {
    let mut gate = gate("+a.org");
    let sent = query("a.org.", RecordType::A, 7);
    gate.query(ends(), &sent, NOW);
    let reply = gate.fail(ends(), &sent).unwrap();
    assert_eq!(reply[3] & 0xf, Code::ServFail as u8);
    assert_eq!(gate.fail(ends(), &sent), None);
    assert_eq!(
        gate.answer(ends(), Protocol::Udp, &mut long_answer(&sent, 1), NOW),
        AnswerFate::Drop
    );
}

#[test]
fn answer_longer_than_the_guest_accepts_makes_it_ask_over_tcp() {
    let mut gate = gate("+a.org");
    let mut sent = query("a.org.", RecordType::A, 7);
    // EDNS with 1232 bytes.
    sent[11] = 1;
    sent.extend_from_slice(&[0, 0, 41, 4, 208, 0, 0, 0, 0, 0, 0]);
    let bare = query("a.org.", RecordType::A, 7);
    for (sent, count, fits) in
        [(&sent, 70, true), (&sent, 80, false), (&bare, 80, true), (&bare, 300, false)]
    {
        gate.query(ends(), sent, NOW);
        let fate = gate.answer(ends(), Protocol::Udp, &mut long_answer(&bare, count), NOW);
        match fate {
            AnswerFate::Deliver => assert!(fits, "{count}"),
            AnswerFate::Reply(reply) => assert!(!fits && reply[2] & 2 != 0 && reply.len() < 100),
            other => panic!("{other:?}"),
        }
        let over_tcp = QueryEnds { over: Protocol::Tcp, ..ends() };
        gate.query(over_tcp, sent, NOW);
        let fate = gate.answer(over_tcp, Protocol::Tcp, &mut long_answer(&bare, count), NOW);
        assert_eq!(fate, AnswerFate::Deliver, "{count}");
    }
}

#[test]
fn answer_that_cannot_be_read_is_replaced_by_a_failure() {
    let mut gate = gate("+a.org");
    let sent = query("a.org.", RecordType::A, 7);
    gate.query(ends(), &sent, NOW);
    let mut cut = long_answer(&sent, 2);
    cut.pop();
    let AnswerFate::Reply(reply) = gate.answer(ends(), Protocol::Udp, &mut cut, NOW) else {
        panic!("the answer was used");
    };
    assert!(reply[3] & 0xf == Code::ServFail as u8 && gate.pins().is_empty());
}

#[test]
fn query_for_service_bindings_or_all_records_stays_here() {
    let mut gate = gate("+a.org");
    assert_eq!(asked(&mut gate, "a.org.", RecordType::HTTPS), Some(Code::NoData as u8));
    assert_eq!(asked(&mut gate, "a.org.", RecordType::ANY), Some(Code::Refused as u8));
    assert_eq!(asked(&mut gate, "a.org.", RecordType::TXT), None);
}

#[test]
fn new_names_below_a_wildcard_are_limited_in_length_and_rate() {
    let mut gate = gate("+*.a.org +b.a.org");
    let long = format!("{}.a.org.", "x".repeat(63));
    assert_eq!(asked(&mut gate, &long, RecordType::A), None);
    let too_long = format!("{}.{}.a.org.", "x".repeat(32), "y".repeat(32));
    assert_eq!(asked(&mut gate, &too_long, RecordType::A), Some(Code::Refused as u8));
    let mut forwarded = 0;
    for number in 0..1000 {
        forwarded +=
            u32::from(asked(&mut gate, &format!("{number}.a.org."), RecordType::A).is_none());
    }
    assert_eq!(forwarded, WILDCARD_BURST - 1);
    assert_eq!(asked(&mut gate, "0.a.org.", RecordType::A), None, "a known name");
    assert_eq!(asked(&mut gate, "b.a.org.", RecordType::A), None, "a rule has the name itself");
}

#[test]
fn resolver_that_a_rule_opens_answers_for_all_names_but_denied_ones() {
    let mut gate = gate("+10.0.0.1/32:53 +a.org -c.org");
    assert_eq!(asked(&mut gate, "b.org.", RecordType::A), None);
    assert_eq!(asked(&mut gate, "c.org.", RecordType::A), Some(Code::Refused as u8));
    assert_eq!(resolve(&mut gate, "b.org.", &[("b.org.", 9, "203.0.113.9")]), AnswerFate::Deliver);
    assert!(!is_allowed(&gate, "203.0.113.9:443"));
}

fn tls(text: &str) -> Shown {
    Shown::Tls(Hello { name: Some(name(text)), ..Hello::default() })
}

#[test]
fn shown_name_decides_on_a_shared_address() {
    let check = |words: &str, port: u16, shown: &Shown| {
        let mut gate = gate(words);
        resolve(&mut gate, "a.org.", &[("a.org.", 300, "203.0.113.1")]);
        let to = SocketAddr::new("203.0.113.1".parse().unwrap(), port);
        let allowed = gate.connect(to, Protocol::Tcp, NOW);
        assert!(allowed.verdict.is_allowed());
        gate.check(to, Protocol::Tcp, &allowed, shown, NOW).verdict
    };
    let words = "+a.org +b.org:443";
    assert_eq!(check(words, 443, &tls("a.org")), Verdict::allow(Cause::Rule(0)));
    assert_eq!(check(words, 443, &tls("b.org")), Verdict::allow(Cause::Rule(1)));
    assert!(!check(words, 8443, &tls("b.org")).is_allowed());
    assert_eq!(check(words, 443, &tls("c.org")), Verdict::deny(Cause::NoRule));
    assert_eq!(check(words, 80, &Shown::Http(Host::Name(name("c.org")))).cause, Cause::NoRule);
    let other = Shown::Http(Host::Address("203.0.113.2".parse().unwrap()));
    assert!(!check(words, 80, &other).is_allowed());
    assert_eq!(check(words, 80, &Shown::Malformed), Verdict::deny(Cause::Malformed));
    let nameless = Shown::Tls(Hello::default());
    let hidden = Shown::Tls(Hello { name: Some(name("a.org")), has_ech: true, ..Hello::default() });
    let no_host = Shown::Http(Host::Absent);
    for shown in [&nameless, &hidden, &no_host, &Shown::Unknown] {
        assert!(check(words, 443, shown).is_allowed(), "{shown:?}");
        let strict = check("+a.org strict", 443, shown);
        assert_eq!(strict, Verdict::deny(Cause::NoReadableName), "{shown:?}");
    }
    assert!(check("+a.org strict", 22, &Shown::Unknown).is_allowed());
}

#[test]
fn denied_name_is_found_behind_any_address() {
    for words in ["-c.org", "+0.0.0.0/0 -c.org"] {
        let gate = gate(words);
        let to: SocketAddr = "203.0.113.7:443".parse().unwrap();
        let allowed = gate.connect(to, Protocol::Tcp, NOW);
        assert_eq!(allowed.inspection, Inspection::DeniedNames);
        assert!(gate.check(to, Protocol::Tcp, &allowed, &tls("x.org"), NOW).verdict.is_allowed());
        assert!(!gate.check(to, Protocol::Tcp, &allowed, &tls("c.org"), NOW).verdict.is_allowed());
    }
}

#[test]
fn udp_to_web_port_must_be_quic_unless_the_rule_says_udp() {
    let to: SocketAddr = "203.0.113.1:443".parse().unwrap();
    let check = |words: &str, to: SocketAddr, shown: &Shown| {
        let mut gate = gate(words);
        resolve(&mut gate, "a.org.", &[("a.org.", 300, "203.0.113.1")]);
        let allowed = gate.connect(to, Protocol::Udp, NOW);
        assert!(allowed.verdict.is_allowed() && allowed.inspection == Inspection::AllowedNames);
        gate.check(to, Protocol::Udp, &allowed, shown, NOW).verdict
    };
    for words in ["+a.org", "+a.org:443/udp", "+a.org:443/udp strict"] {
        assert!(check(words, to, &tls("a.org")).is_allowed(), "{words}");
        assert_eq!(check(words, to, &tls("b.org")), Verdict::deny(Cause::NoRule), "{words}");
        assert_eq!(check(words, to, &Shown::OtherQuic), Verdict::deny(Cause::Quic), "{words}");
    }
    assert_eq!(check("+a.org", to, &Shown::Unknown), Verdict::deny(Cause::Quic));
    assert!(check("+a.org:443/udp", to, &Shown::Unknown).is_allowed());
    let strict = check("+a.org:443/udp strict", to, &Shown::Unknown);
    assert_eq!(strict, Verdict::deny(Cause::NoReadableName));
    let time = "203.0.113.1:123".parse().unwrap();
    assert!(check("+a.org", time, &Shown::Unknown).is_allowed());
}

#[test]
fn mapped_and_private_addresses_need_a_rule_for_addresses() {
    let gate = gate("+*.org");
    for to in
        ["[::ffff:203.0.113.1]:443", "[fd00:ec2::254]:80", "169.254.169.254:80", "10.0.0.1:53"]
    {
        assert_eq!(connect(&gate, to).verdict, Verdict::deny(Cause::Special), "{to}");
    }
}

#[test]
fn replaced_policy_decides_on_old_pins() {
    let mut gate = gate("+a.org");
    resolve(&mut gate, "a.org.", &[("a.org.", 300, "203.0.113.1")]);
    assert!(is_allowed(&gate, "203.0.113.1:443"));
    gate.replace(Policy::new(crate::testing::source("+b.org")).unwrap());
    assert!(!is_allowed(&gate, "203.0.113.1:443"));
}

#[test]
fn open_flow_stays_by_its_name_after_its_pin_has_expired() {
    let mut gate = gate("+a.org");
    resolve(&mut gate, "a.org.", &[("a.org.", 300, "203.0.113.1")]);
    let (to, later) = ("203.0.113.1:443".parse().unwrap(), NOW + Duration::from_secs(1 << 20));
    let name = HostName::parse("a.org").unwrap();
    let keeps = |gate: &Gate, name| {
        gate.decide_again(to, Protocol::Tcp, name, FirstRead::Named, later).is_some()
    };
    assert!(keeps(&gate, Some(&name)));
    assert!(!keeps(&gate, None), "without a name there is only the pin");
    for (rules, stays) in [
        ("+*.org", true),
        ("+*.com", false),
        ("+a.org -203.0.113.0/24", false),
        ("+203.0.113.0/24", true),
    ] {
        gate.replace(Policy::new(crate::testing::source(rules)).unwrap());
        assert_eq!(keeps(&gate, Some(&name)), stays, "{rules}");
    }
}

proptest! {
    #[test]
    fn pending_queries_stay_bounded(ids in prop::collection::vec(any::<u16>(), 1..3000)) {
        let mut gate = gate("+a.org");
        for (at, id) in ids.into_iter().enumerate() {
            let now = NOW + Duration::from_millis(u64::try_from(at).unwrap() * 7);
            gate.query(ends(), &query("a.org.", RecordType::A, id), now);
            prop_assert!(gate.pending.len() <= gate.pending_order.len());
            prop_assert!(gate.pending_order.len() <= PENDING_MAX);
        }
    }
}

fn subject(host: &str, port: u16) -> Subject {
    let host = SubjectHost::Name(name(host));
    Subject { host, port, protocol: Protocol::Tcp }
}

#[test]
fn approved_name_opens_its_addresses_alone_and_a_rule_that_denies_wins() {
    let mut gate = gate("+a.org:443 -bad.org");
    let query_of = |host| query(host, RecordType::A, 7);
    let resolution = gate.query(ends(), &query_of("new.org."), NOW);
    assert_eq!(resolution.subject, Some(subject("new.org", 443)));
    for (host, kind) in [("bad.org.", RecordType::A), ("new.org.", RecordType::TXT)] {
        assert_eq!(gate.query(ends(), &query(host, kind, 7), NOW).subject, None, "{host}");
    }
    for host in ["new.org", "bad.org"] {
        assert!(gate.approve(&subject(host, 443), None));
    }
    assert_eq!(asked(&mut gate, "bad.org.", RecordType::A), Some(Code::Refused as u8));
    // A name that has a private address by now opens nothing.
    let private = resolve(&mut gate, "new.org.", &[("new.org.", 60, "10.0.0.1")]);
    assert!(matches!(private, AnswerFate::Replace(..)));
    for special in ["10.0.0.1:443", "169.254.169.254:443", "203.0.113.1:443"] {
        assert!(!is_allowed(&gate, special), "{special}");
    }
    resolve(&mut gate, "new.org.", &[("new.org.", 60, "203.0.113.1")]);
    let decision = connect(&gate, "203.0.113.1:443");
    assert_eq!((decision.verdict, decision.inspection), (APPROVED, Inspection::AllowedNames));
    let to = "203.0.113.1:443".parse().unwrap();
    let shown = |host| Shown::Http(Host::Name(name(host)));
    let is_served =
        |host| gate.check(to, Protocol::Tcp, &decision, &shown(host), NOW).verdict.is_allowed();
    assert!(is_served("new.org") && !is_served("other.org"));
    assert!(!is_allowed(&gate, "203.0.113.1:80") && !is_allowed(&gate, "203.0.113.2:443"));
    assert!(!gate.connect_by_rules(to, Protocol::Tcp, NOW).verdict.is_allowed());
    let denied = connect(&gate, "203.0.113.1:80");
    let asks = Gate::subject(&denied, "203.0.113.1:80".parse().unwrap(), Protocol::Tcp);
    assert_eq!(asks, Some(subject("new.org", 80)));
    // A name never opens the address of a metadata service that is public.
    resolve(&mut gate, "new.org.", &[("new.org.", 60, "168.63.129.16")]);
    assert!(!is_allowed(&gate, "168.63.129.16:443"));
}

#[test]
fn approval_for_a_time_opens_new_flows_for_it_and_keeps_them() {
    let mut gate = gate("+a.org:443");
    let once = NOW + Duration::from_secs(10);
    gate.approve(&subject("new.org", 443), Some(once));
    resolve(&mut gate, "new.org.", &[("new.org.", 600, "203.0.113.1")]);
    let to = "203.0.113.1:443".parse().unwrap();
    let decision = gate.connect(to, Protocol::Tcp, NOW);
    assert!(decision.verdict.is_allowed());
    assert!(!gate.connect(to, Protocol::Tcp, once).verdict.is_allowed());
    assert_eq!(asked(&mut gate, "new.org.", RecordType::A), None);
    let late = gate.query(ends(), &query("new.org.", RecordType::A, 7), once).fate;
    assert!(matches!(late, QueryFate::Reply(_)));
    let shown = Shown::Http(Host::Name(name("new.org")));
    // Its hello may come later.
    assert!(gate.check(to, Protocol::Tcp, &decision, &shown, once).verdict.is_allowed());
    let keeps = |gate: &Gate, now| {
        gate.decide_again(to, Protocol::Tcp, Some(&name("new.org")), FirstRead::Named, now)
            .is_some()
    };
    assert!(keeps(&gate, once));
    gate.replace(Policy::new(crate::testing::source("+a.org:443")).unwrap());
    assert!(!keeps(&gate, NOW));
    assert!(!gate.connect(to, Protocol::Tcp, NOW).verdict.is_allowed());
}

#[test]
fn approved_address_opens_its_port_alone() {
    let mut gate = gate("+a.org:443");
    for (to, can_be_asked) in [
        ("203.0.113.9:22", true),
        ("10.0.0.9:22", true),
        ("169.254.169.254:80", false),
        ("168.63.129.16:80", false),
        ("127.0.0.1:80", false),
    ] {
        let denied = connect(&gate, to);
        let subject = Gate::subject(&denied, to.parse().unwrap(), Protocol::Tcp);
        assert_eq!(subject.is_some(), can_be_asked, "{to}");
        subject.iter().for_each(|subject| assert!(gate.approve(subject, None)));
        assert_eq!(is_allowed(&gate, to), can_be_asked, "{to}");
    }
    assert!(!is_allowed(&gate, "203.0.113.9:23") && !is_allowed(&gate, "203.0.113.8:22"));
    let to = "203.0.113.9:22".parse().unwrap();
    assert!(gate.decide_again(to, Protocol::Tcp, None, FirstRead::Unread, NOW).is_some());
    // It opens no name that has a private address.
    let private = resolve(&mut gate, "a.org.", &[("a.org.", 60, "10.0.0.9")]);
    assert!(matches!(private, AnswerFate::Replace(..)));
}

#[test]
fn approval_of_a_metadata_link_local_or_loopback_address_itself_opens_nothing() {
    let mut gate = gate("+a.org:443");
    for ip in [
        "169.254.169.254",
        "fd00:ec2::254",
        "100.100.100.200",
        "168.63.129.16",
        "64:ff9b::a9fe:a9fe",
        "fe80::1",
        "127.0.0.1",
    ] {
        let ip = ip.parse().unwrap();
        let to = SocketAddr::new(ip, 80);
        let host = SubjectHost::Address(ip);
        let subject = Subject { host, port: 80, protocol: Protocol::Tcp };
        for until in [Some(NOW * 2), None] {
            // Neither the question nor the answer is checked here.
            assert!(gate.approve(&subject, until));
            let decision = gate.connect(to, Protocol::Tcp, NOW);
            assert!(!decision.verdict.is_allowed(), "{ip}: {decision:?}");
            let again = gate.decide_again(to, Protocol::Tcp, None, FirstRead::Unread, NOW);
            assert_eq!(again, None, "{ip}");
        }
    }
}

#[test]
fn substitute_answers_allowed_names_and_asks_no_server() {
    let mut gate = gate("+a.org:443/tcp");
    let mut table = Substitutes::new(8, [true, true]);
    let mut ask = |gate: &mut Gate, host: &str| {
        let query = query(host, RecordType::A, 7);
        match gate.query_or_substitute(ends(), &query, Some(&mut table), NOW).fate {
            QueryFate::Reply(reply) => Message::from_vec(&reply).unwrap(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(ask(&mut gate, "a.org.").answers.len(), 1);
    assert_eq!(ask(&mut gate, "b.org.").answers.len(), 0);
    assert!(gate.pending.is_empty() && gate.pins().is_empty());
    assert_eq!(table.len(), 1, "a denied name has no address");
}

#[test]
fn connection_to_name_of_a_proxy_is_decided_by_rules_for_names_alone() {
    let closed = gate("+*.org:443 -b.org +198.18.0.0/15");
    let decide = |gate: &Gate, host: &str, port| gate.connect_to_name(&name(host), port, true, NOW);
    let allowed = decide(&closed, "a.org", 443);
    assert_eq!(allowed.verdict, Verdict::allow(Cause::Rule(0)));
    assert_eq!((allowed.name, allowed.inspection), (Some(name("a.org")), Inspection::AllowedNames));
    assert_eq!(decide(&closed, "a.org", 80).verdict, Verdict::deny(Cause::NoRule));
    assert_eq!(decide(&closed, "b.org", 443).verdict, Verdict::deny(Cause::Rule(1)));
    assert_eq!(decide(&closed, "c.net", 443).verdict, Verdict::deny(Cause::NoRule));
    let keeps =
        |gate: &Gate, host, read| gate.decide_again_on_name(&name(host), 443, read).is_some();
    assert!(
        keeps(&closed, "a.org", FirstRead::Named) && !keeps(&closed, "a.org", FirstRead::Unread)
    );
    assert!(!keeps(&closed, "b.org", FirstRead::Named));
    let open = gate("-b.org");
    assert_eq!(decide(&open, "a.org", 1).inspection, Inspection::DeniedNames);
    assert_eq!(decide(&open, "b.org", 1).verdict, Verdict::deny(Cause::Rule(0)));
}

#[test]
fn approval_opens_a_name_of_a_proxy() {
    let mut gate = gate("+x.org");
    let decide =
        |gate: &Gate, by_approval| gate.connect_to_name(&name("a.org"), 443, by_approval, NOW);
    let to = "198.18.1.0:443".parse().unwrap();
    let subject = Gate::subject(&decide(&gate, true), to, Protocol::Tcp).unwrap();
    assert!(gate.approve(&subject, None));
    assert_eq!(decide(&gate, true).verdict, APPROVED);
    assert!(!decide(&gate, false).verdict.is_allowed());
    assert!(gate.decide_again_on_name(&name("a.org"), 443, FirstRead::Pending).is_some());
}
