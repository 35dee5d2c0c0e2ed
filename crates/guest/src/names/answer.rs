//! DNS messages (RFC 1035): parses queries and encodes answers. No I/O.
//!
//! Programs of the guest send the queries, so these are untrusted.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};
use ringfence_sys::numbers::bounded;

use super::name::DOMAIN;

/// Maximum length of a query in bytes. A question has at most 255 + 4; the rest is for the options
/// of RFC 6891.
pub const QUERY_MAX: usize = 1232;

/// Time to live of an answer in seconds. A guest may return with another address.
const TTL: u32 = 1;

/// Maximum number of addresses in an answer. It then fits the 512 bytes that every client accepts.
const ADDRESSES_MAX: usize = 8;

/// Subject of a DNS query, as the stub classifies it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Question {
    /// Addresses of the guest with this name, in lower case.
    Guest(String),
    /// A name of one label, in lower case: a guest's, or one that the host's name servers know.
    Short(String),
    /// Loopback addresses.
    Localhost,
    /// Name of an address.
    Reverse(IpAddr),
    /// A name that no guest and no address can have.
    Foreign,
}

/// DNS query that the stub understands, with its message.
#[derive(Clone, Debug)]
pub struct AnswerableQuery {
    message: Message,
    query: Query,
    question: Question,
}

/// Result of a look-up, from which a DNS reply is encoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Addresses of the name. Those of the requested family are encoded.
    Addresses(Vec<IpAddr>),
    Name(String),
    /// The name does not exist.
    NoSuchName,
    /// The answer is temporarily unavailable.
    Failure,
}

/// Results of bytes that are no answerable query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rejected {
    /// Ignore the bytes: they are not a query.
    Ignore,
    /// Send this message back.
    Reply(Vec<u8>),
}

impl AnswerableQuery {
    /// Parses a query. `switch` is the name of this switch.
    ///
    /// # Errors
    ///
    /// Returns [`Rejected`] if the query cannot be answered.
    pub fn parse(bytes: &[u8], switch: &str) -> Result<AnswerableQuery, Rejected> {
        if bytes.len() > QUERY_MAX {
            return Err(Rejected::Ignore);
        }
        let message = Message::from_vec(bytes).map_err(|_| reject_malformed(bytes))?;
        if message.metadata.message_type != MessageType::Query {
            return Err(Rejected::Ignore);
        }
        if message.metadata.op_code != OpCode::Query {
            return Err(refuse(&message, ResponseCode::NotImp));
        }
        let [query] = &message.queries[..] else {
            return Err(refuse(&message, ResponseCode::FormErr));
        };
        if query.query_class != DNSClass::IN {
            return Err(refuse(&message, ResponseCode::Refused));
        }
        let query = query.clone();
        let question = classify(&query.name, switch);
        Ok(AnswerableQuery { message, query, question })
    }

    /// Returns the first label of the name, in lower case, if the rest of it is a domain of the list.
    pub fn label_below(&self, domains: &[String]) -> Option<String> {
        let mut labels = self.query.name.iter();
        let label = super::name::parse_name(std::str::from_utf8(labels.next()?).ok()?).ok()?;
        let rest: Vec<&[u8]> = labels.collect();
        let is_rest = |domain: &String| {
            let domain = domain.trim_end_matches('.').split('.').map(str::as_bytes);
            let mut pairs = domain.clone().zip(&rest);
            domain.count() == rest.len() && pairs.all(|(a, b)| a.eq_ignore_ascii_case(b))
        };
        domains.iter().any(is_rest).then_some(label)
    }

    /// Returns the question of the query.
    pub fn question(&self) -> &Question {
        &self.question
    }

    /// Encodes an answer to the query.
    pub fn reply(&self, answer: &Answer) -> Vec<u8> {
        let mut reply = reply_to(&self.message, response_code(answer));
        reply.add_query(self.query.clone());
        let name = &self.query.name;
        let kind = self.query.query_type;
        match answer {
            Answer::Addresses(addresses) => {
                let wanted = addresses.iter().filter_map(|&address| address_record(kind, address));
                for data in wanted.take(ADDRESSES_MAX) {
                    reply.add_answer(Record::from_rdata(name.clone(), TTL, data));
                }
            }
            Answer::Name(target) => {
                let target = Name::from_ascii(format!("{target}.{DOMAIN}."));
                if let (RecordType::PTR | RecordType::ANY, Ok(target)) = (kind, target) {
                    let data = RData::PTR(hickory_proto::rr::rdata::PTR(target));
                    reply.add_answer(Record::from_rdata(name.clone(), TTL, data));
                }
            }
            Answer::NoSuchName | Answer::Failure => {}
        }
        encode(&reply)
    }
}

fn response_code(answer: &Answer) -> ResponseCode {
    match answer {
        Answer::Addresses(_) | Answer::Name(_) => ResponseCode::NoError,
        Answer::NoSuchName => ResponseCode::NXDomain,
        Answer::Failure => ResponseCode::ServFail,
    }
}

fn address_record(kind: RecordType, address: IpAddr) -> Option<RData> {
    match address {
        IpAddr::V4(ip) if matches!(kind, RecordType::A | RecordType::ANY) => {
            Some(RData::A(ip.into()))
        }
        IpAddr::V6(ip) if matches!(kind, RecordType::AAAA | RecordType::ANY) => {
            Some(RData::AAAA(ip.into()))
        }
        _ => None,
    }
}

fn classify(name: &Name, switch: &str) -> Question {
    // A label that is not UTF-8 belongs to no guest.
    let labels: Option<Vec<String>> = name
        .iter()
        .map(|label| std::str::from_utf8(label).ok().map(str::to_ascii_lowercase))
        .collect();
    let Some(labels) = labels else { return Question::Foreign };
    let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
    match labels[..] {
        [.., "localhost"] => Question::Localhost,
        [.., "arpa"] => parse_arpa(&labels).map_or(Question::Foreign, Question::Reverse),
        [name] => super::name::parse_name(name).map_or(Question::Foreign, Question::Short),
        [name, domain] if domain == DOMAIN || domain.eq_ignore_ascii_case(switch) => guest(name),
        _ => Question::Foreign,
    }
}

fn guest(name: &str) -> Question {
    super::name::parse_name(name).map_or(Question::Foreign, Question::Guest)
}

/// Parses the address of a name under `in-addr.arpa` or `ip6.arpa`, least significant part first
/// (RFC 1035, section 3.5; RFC 3596, section 2.5).
fn parse_arpa(labels: &[&str]) -> Option<IpAddr> {
    match labels {
        [d, c, b, a, "in-addr", "arpa"] => {
            let byte = |label: &str| label.parse::<u8>().ok();
            Some(Ipv4Addr::new(byte(a)?, byte(b)?, byte(c)?, byte(d)?).into())
        }
        [nibbles @ .., "ip6", "arpa"] if nibbles.len() == 32 => {
            let mut bits = 0u128;
            for nibble in nibbles.iter().rev() {
                let one = nibble.len() == 1;
                let value = u128::from_str_radix(nibble, 16).ok().filter(|_| one)?;
                bits = bits << 4 | value;
            }
            Some(Ipv6Addr::from_bits(bits).into())
        }
        _ => None,
    }
}

/// Rejects a query whose question cannot be parsed. Its id may be readable.
fn reject_malformed(bytes: &[u8]) -> Rejected {
    match bytes {
        // The first bit of the third byte distinguishes answers from queries.
        [high, low, flags, ..] if bytes.len() >= 12 && flags & 0x80 == 0 => {
            let id = u16::from_be_bytes([*high, *low]);
            let message = Message::error_msg(id, OpCode::Query, ResponseCode::FormErr);
            Rejected::Reply(encode(&message))
        }
        _ => Rejected::Ignore,
    }
}

fn refuse(to: &Message, code: ResponseCode) -> Rejected {
    Rejected::Reply(encode(&reply_to(to, code)))
}

fn reply_to(to: &Message, code: ResponseCode) -> Message {
    let mut reply = Message::response(to.metadata.id, to.metadata.op_code);
    reply.metadata.recursion_desired = to.metadata.recursion_desired;
    reply.metadata.recursion_available = true;
    reply.metadata.authoritative = true;
    reply.metadata.response_code = code;
    if to.edns.is_some() {
        let mut edns = Edns::new();
        edns.set_max_payload(bounded(QUERY_MAX, u16::MAX));
        reply.set_edns(edns);
    }
    reply
}

fn encode(message: &Message) -> Vec<u8> {
    // Messages of the stub never exceed the format's limits. With an empty message the client would
    // repeat the query and then time out.
    message.to_vec().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn query(name: &str, kind: RecordType) -> Vec<u8> {
        let mut message = Message::new(77, MessageType::Query, OpCode::Query);
        message.add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
        message.to_vec().unwrap()
    }

    fn asked(name: &str) -> Question {
        AnswerableQuery::parse(&query(name, RecordType::A), "Lab").unwrap().question().clone()
    }

    #[test]
    fn guest_name_is_parsed_alone_and_under_both_domains() {
        assert_eq!(asked("WEB."), Question::Short("web".into()));
        for name in ["web.lab.", "WEB.Lab.", "web.ringfence."] {
            assert_eq!(asked(name), Question::Guest("web".into()), "{name}");
        }
        assert_eq!(asked("web.example.org."), Question::Foreign);
        assert_eq!(asked("a.web.lab."), Question::Foreign);
        assert_eq!(asked("ringfence."), Question::Foreign);
        assert_eq!(asked("."), Question::Foreign);
        assert_eq!(asked("a.localhost."), Question::Localhost);
    }

    #[test]
    fn label_is_found_below_search_domains_only() {
        let domains = ["corp.example".to_owned(), "lab.".to_owned()];
        for (name, label) in [
            ("web.corp.example.", Some("web")),
            ("WEB.Corp.Example.", Some("web")),
            ("web.lab.", Some("web")),
            ("a.web.corp.example.", None),
            ("corp.example.", None),
            ("web.example.", None),
            ("web.", None),
        ] {
            let request = AnswerableQuery::parse(&query(name, RecordType::A), "s").unwrap();
            assert_eq!(request.label_below(&domains).as_deref(), label, "{name}");
        }
    }

    #[test]
    fn arpa_name_is_parsed_to_its_address() {
        let v4 = "2.0.0.10.in-addr.arpa.";
        assert_eq!(asked(v4), Question::Reverse("10.0.0.2".parse().unwrap()));
        let v6 = format!("2.{}d.f.ip6.arpa.", "0.".repeat(29));
        assert_eq!(asked(&v6), Question::Reverse("fd00::2".parse().unwrap()));
        for wrong in ["0.0.10.in-addr.arpa.", "256.0.0.10.in-addr.arpa.", "2.d.f.ip6.arpa."] {
            assert_eq!(asked(wrong), Question::Foreign, "{wrong}");
        }
    }

    #[test]
    fn answer_contains_only_the_requested_family() {
        let addresses = vec!["10.0.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
        for (kind, expected) in [
            (RecordType::A, vec!["10.0.0.2"]),
            (RecordType::AAAA, vec!["fd00::2"]),
            (RecordType::ANY, vec!["10.0.0.2", "fd00::2"]),
            (RecordType::MX, vec![]),
        ] {
            let request = AnswerableQuery::parse(&query("web.", kind), "s").unwrap();
            let reply = request.reply(&Answer::Addresses(addresses.clone()));
            let reply = Message::from_vec(&reply).unwrap();
            assert_eq!(
                (reply.metadata.id, reply.metadata.response_code),
                (77, ResponseCode::NoError)
            );
            let found: Vec<String> = reply.answers.iter().map(|r| r.data.to_string()).collect();
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn unknown_name_differs_from_name_without_records() {
        let request = AnswerableQuery::parse(&query("web.", RecordType::A), "s").unwrap();
        let code = |answer| {
            let reply = Message::from_vec(&request.reply(&answer)).unwrap();
            (reply.metadata.response_code, reply.answers.len())
        };
        assert_eq!(code(Answer::NoSuchName), (ResponseCode::NXDomain, 0));
        assert_eq!(code(Answer::Failure), (ResponseCode::ServFail, 0));
        assert_eq!(code(Answer::Addresses(vec![])), (ResponseCode::NoError, 0));
    }

    #[test]
    fn largest_answer_fits_512_bytes() {
        let name = format!("{}.ringfence.", "a".repeat(63));
        let request = AnswerableQuery::parse(&query(&name, RecordType::AAAA), "s").unwrap();
        let many = (0..100).map(|i| IpAddr::V6(Ipv6Addr::from_bits(i))).collect();
        assert!(request.reply(&Answer::Addresses(many)).len() <= 512);
    }

    #[test]
    fn malformed_query_is_ignored_or_refused() {
        let mut response = query("web.", RecordType::A);
        response[2] |= 0x80;
        assert_eq!(AnswerableQuery::parse(&response, "s").unwrap_err(), Rejected::Ignore);
        assert_eq!(AnswerableQuery::parse(b"short", "s").unwrap_err(), Rejected::Ignore);
        assert_eq!(AnswerableQuery::parse(&[0; QUERY_MAX + 1], "s").unwrap_err(), Rejected::Ignore);
        let mut torn = query("web.", RecordType::A);
        torn.truncate(14);
        let Rejected::Reply(reply) = AnswerableQuery::parse(&torn, "s").unwrap_err() else {
            panic!("not refused");
        };
        assert_eq!(
            Message::from_vec(&reply).unwrap().metadata.response_code,
            ResponseCode::FormErr
        );
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_answered_refused_or_ignored(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            if let Ok(request) = AnswerableQuery::parse(&bytes, "s") {
                request.reply(&Answer::NoSuchName);
            }
        }

        #[test]
        fn damaged_query_never_panics(at in 0usize..30, byte in any::<u8>()) {
            let mut bytes = query("web.lab.", RecordType::A);
            if let Some(slot) = bytes.get_mut(at) {
                *slot = byte;
            }
            if let Ok(request) = AnswerableQuery::parse(&bytes, "lab") {
                let reply = request.reply(&Answer::Addresses(vec!["10.0.0.2".parse().unwrap()]));
                prop_assert!(reply.len() <= 512);
            }
        }
    }
}
