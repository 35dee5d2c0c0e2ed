use hickory_proto::op::Query as Asked;
use hickory_proto::rr::{Name, RData, Record, rdata};
use proptest::prelude::*;

use super::*;

/// Writes a query for a name.
pub(crate) fn query(name: &str, kind: RecordType, id: u16) -> Vec<u8> {
    let mut message = Message::new(id, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Asked::query(Name::from_ascii(name).unwrap(), kind));
    message.to_vec().unwrap()
}

/// Records in text form: owner, time to live, and an address or the target of an alias.
pub(crate) fn record((owner, ttl, data): (&str, u32, &str)) -> Record {
    let data = match data.parse::<IpAddr>() {
        Ok(IpAddr::V4(ip)) => RData::A(ip.into()),
        Ok(IpAddr::V6(ip)) => RData::AAAA(ip.into()),
        Err(_) => RData::CNAME(rdata::CNAME(Name::from_ascii(data).unwrap())),
    };
    Record::from_rdata(Name::from_ascii(owner).unwrap(), ttl, data)
}

/// Writes the answer to a query, with these records in the answer section and in the additional one.
pub(crate) fn answer(
    query: &[u8],
    answers: &[(&str, u32, &str)],
    additional: &[(&str, u32, &str)],
) -> Vec<u8> {
    let asked = Message::from_vec(query).unwrap();
    let mut message = Message::response(asked.metadata.id, OpCode::Query);
    message.add_query(asked.queries[0].clone());
    message.add_answers(answers.iter().map(|one| record(*one)));
    message.add_additionals(additional.iter().map(|one| record(*one)));
    message.to_vec().unwrap()
}

fn read(answers: &[(&str, u32, &str)], additional: &[(&str, u32, &str)]) -> Vec<(String, u32)> {
    let query = query("www.a.org.", RecordType::A, 7);
    let mut bytes = answer(&query, answers, additional);
    let answer = Query::parse(&query).unwrap().read_answer(&mut bytes).unwrap();
    answer.addresses.unwrap().into_iter().map(|(ip, ttl)| (ip.to_string(), ttl)).collect()
}

#[test]
fn addresses_follow_aliases_in_any_order() {
    let found = read(
        &[
            ("x.cdn.", 30, "192.0.2.9"),
            ("b.org.", 20, "x.cdn."),
            ("www.a.org.", 10, "b.org."),
            ("other.", 10, "192.0.2.66"),
        ],
        &[],
    );
    assert_eq!(found, [("192.0.2.9".to_owned(), 30)]);
}

#[test]
fn additional_section_is_ignored() {
    let lie = [("www.a.org.", 10, "192.0.2.66")];
    assert_eq!(read(&[("www.a.org.", 10, "192.0.2.1")], &lie), [("192.0.2.1".to_owned(), 10)]);
    assert_eq!(read(&[], &lie), []);
}

#[test]
fn endless_chain_of_aliases_ends() {
    let names: Vec<String> = (0..100).map(|n| format!("n{n}.org.")).collect();
    let mut chain = vec![("www.a.org.", 1, names[0].as_str()), ("n99.org.", 1, "192.0.2.1")];
    chain.extend(names.windows(2).map(|pair| (pair[0].as_str(), 1, pair[1].as_str())));
    assert_eq!(read(&chain, &[]), []);
    let circle = [("www.a.org.", 1, "b.org."), ("b.org.", 1, "www.a.org.")];
    assert_eq!(read(&circle, &[]), []);
}

#[test]
fn answer_to_another_question_is_refused() {
    let (asked, other) = (query("a.org.", RecordType::A, 7), query("b.org.", RecordType::A, 7));
    let parsed = Query::parse(&asked).unwrap();
    assert!(parsed.read_answer(&mut answer(&other, &[], &[])).is_none());
    let aaaa = query("a.org.", RecordType::AAAA, 7);
    assert!(parsed.read_answer(&mut answer(&aaaa, &[], &[])).is_none());
    let late = query("a.org.", RecordType::A, 8);
    assert!(parsed.read_answer(&mut answer(&late, &[], &[])).is_none());
    assert!(parsed.read_answer(&mut asked.clone()).is_none(), "a query is no answer");
}

#[test]
fn query_for_the_server_carries_nothing_of_the_guest_but_name_and_id() {
    let mut bytes = query("A.oRg.", RecordType::A, 0x1234);
    // An EDNS option with data of the guest, and reserved flags.
    bytes[2] |= 0x06;
    bytes[3] |= 0x4f;
    bytes[11] = 1;
    write_opt(&mut bytes, 4096, 0x8000, &[0, 10, 0, 4, 1, 2, 3, 4]);
    let query = Query::parse(&bytes).unwrap();
    let sent = query.to_server();
    assert_eq!(sent[..12], [0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1]);
    assert_eq!(sent[12..23], *b"\x01a\x03org\0\0\x01\0\x01");
    assert_eq!(sent[23..], [0, 0, 41, 16, 0, 0, 0, 0x80, 0, 0, 0]);
    // The guest finds its own spelling in the answer.
    let mut reply = answer(&sent, &[("a.org.", 5, "192.0.2.1")], &[]);
    assert_eq!(query.read_answer(&mut reply).unwrap().addresses.unwrap().len(), 1);
    assert_eq!(reply[12..23], *b"\x01A\x03oRg\0\0\x01\0\x01");
}

#[test]
fn reply_without_records_parses_and_names_the_reason() {
    let query = Query::parse(&query("a.org.", RecordType::HTTPS, 9)).unwrap();
    assert!(query.is_service_binding() && !query.is_bulk());
    let reply = Message::from_vec(&query.reply(Code::Refused)).unwrap();
    assert_eq!(u16::from(reply.metadata.response_code), 5);
    assert_eq!((reply.metadata.id, reply.queries.len(), reply.answers.len()), (9, 1, 0));
    let Err(NotAQuery::Reply(bytes)) = Query::parse(&[0, 9, 1, 0, 0, 2, 0, 0, 0, 0, 0, 0]) else {
        panic!("a query without its questions was accepted");
    };
    assert_eq!(bytes[3] & 0xf, Code::FormErr as u8);
}

/// Appends a record to the last section of a message, and counts it at this offset of the header.
fn append(message: &mut Vec<u8>, count_at: usize, record: &[u8]) {
    message[count_at + 1] += 1;
    message.extend_from_slice(record);
}

#[test]
fn records_of_unused_sections_and_types_do_not_matter() {
    let query = query("www.a.org.", RecordType::A, 7);
    let parsed = Query::parse(&query).unwrap();
    let good = answer(&query, &[("www.a.org.", 9, "192.0.2.1")], &[]);
    // An HTTPS record that is cut, a record of an unknown type, and one whose owner is no name.
    let strange: [&[u8]; 3] = [
        b"\x01x\0\0\x41\0\x01\0\0\0\x09\0\x03\0\x01\x40",
        b"\x01x\0\xff\x42\0\x01\0\0\0\x09\0\x02\x07\x08",
        b"\x80x\0\0\x01\0\x01\0\0\0\x09\0\x04\x01\x02\x03\x04",
    ];
    let expected = Some(vec![([192, 0, 2, 1].into(), 9)]);
    for record in strange {
        for section in [8, 10] {
            let mut bytes = good.clone();
            append(&mut bytes, section, record);
            assert_eq!(parsed.read_answer(&mut bytes).unwrap().addresses, expected, "{record:x?}");
        }
    }
    for (record, addresses) in strange.into_iter().zip([&expected, &expected, &None]) {
        let mut bytes = good.clone();
        append(&mut bytes, 6, record);
        assert_eq!(parsed.read_answer(&mut bytes).unwrap().addresses, *addresses, "{record:x?}");
    }
}

#[test]
fn name_with_a_pointer_that_does_not_lead_back_is_malformed() {
    let query = query("www.a.org.", RecordType::A, 7);
    let parsed = Query::parse(&query).unwrap();
    let behind = query.len();
    for to in [behind, behind + 1, 0x3fff] {
        let mut bytes = answer(&query, &[], &[]);
        let owner = (0xc000 | u16::try_from(to).unwrap()).to_be_bytes();
        append(
            &mut bytes,
            6,
            &[&owner[..], b"\0\x01\0\x01\0\0\0\x09\0\x04\x01\x02\x03\x04"].concat(),
        );
        assert_eq!(parsed.read_answer(&mut bytes).unwrap().addresses, None, "{to}");
    }
}

#[test]
fn answer_without_a_question_or_with_a_cut_record_is_an_answer_that_cannot_be_read() {
    let query = query("www.a.org.", RecordType::A, 7);
    let parsed = Query::parse(&query).unwrap();
    let mut bare = b"\0\x07\x81\x81\0\0\0\0\0\0\0\0".to_vec();
    assert_eq!(parsed.read_answer(&mut bare).unwrap().addresses, None);
    let whole = answer(&query, &[("www.a.org.", 9, "192.0.2.1")], &[]);
    let mut cut = whole[..whole.len() - 1].to_vec();
    assert_eq!(parsed.read_answer(&mut cut).unwrap().addresses, None);
}

proptest! {
    /// The reader of records agrees with that of another library.
    #[test]
    fn addresses_are_those_that_hickory_reads(
        records in prop::collection::vec(("[ab]\\.org\\.", any::<u32>(), any::<bool>()), 0..9)
    ) {
        let query = query("a.org.", RecordType::A, 7);
        let texts: Vec<_> = records
            .iter()
            .map(|(owner, bits, is_v4)| {
                let v4 = core::net::Ipv4Addr::from_bits(*bits);
                let ip: IpAddr = if *is_v4 { v4.into() } else { v4.to_ipv6_compatible().into() };
                (owner.as_str(), *bits >> 1, ip.to_string())
            })
            .collect();
        let texts: Vec<_> = texts.iter().map(|(owner, ttl, ip)| (*owner, *ttl, ip.as_str())).collect();
        let mut bytes = answer(&query, &texts, &[]);
        let message = Message::from_vec(&bytes).unwrap();
        let expected: Vec<(IpAddr, u32)> = message
            .answers
            .iter()
            .filter(|record| record.name == message.queries[0].name)
            .filter_map(|record| match &record.data {
                RData::A(ip) => Some((ip.0.into(), record.ttl)),
                RData::AAAA(ip) => Some((ip.0.into(), record.ttl)),
                _ => None,
            })
            .collect();
        let read = Query::parse(&query).unwrap().read_answer(&mut bytes).unwrap().addresses;
        prop_assert_eq!(read, Some(expected));
    }

    #[test]
    fn any_bytes_are_parsed_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        crate::fuzzing::dns_messages(&bytes);
    }

    #[test]
    fn damaged_answer_is_parsed_without_panic(at in 0..60_usize, value: u8) {
        let query = query("www.a.org.", RecordType::A, 7);
        let mut bytes = answer(&query, &[("www.a.org.", 1, "b.org."), ("b.org.", 1, "192.0.2.1")], &[]);
        let index = at % bytes.len();
        bytes[index] = value;
        Query::parse(&query).unwrap().read_answer(&mut bytes);
    }
}
