use std::collections::HashMap;

use hickory_proto::op::Message;
use hickory_proto::rr::{RData, RecordType};
use proptest::prelude::*;

use super::*;
use crate::dns::tests::query;

const SECOND: Duration = Duration::from_secs(1);
const BOTH: [bool; 2] = [true, true];

fn name(text: &str) -> HostName {
    HostName::parse(text).unwrap()
}

fn ask(table: &mut Substitutes, host: &str, kind: RecordType, now: Duration) -> Message {
    let query = Query::parse(&query(host, kind, 7)).unwrap();
    Message::from_vec(&table.answer(&query, now)).unwrap()
}

/// Returns the address that a name gets.
fn address(table: &mut Substitutes, host: &str, kind: RecordType, now: Duration) -> Option<IpAddr> {
    match &ask(table, host, kind, now).answers[..] {
        [] => None,
        [record] => match &record.data {
            RData::A(ip) => Some(ip.0.into()),
            RData::AAAA(ip) => Some(ip.0.into()),
            other => panic!("{other:?}"),
        },
        more => panic!("{more:?}"),
    }
}

fn code(table: &mut Substitutes, host: &str, kind: RecordType) -> u8 {
    u16::from(ask(table, host, kind, SECOND).metadata.response_code).to_be_bytes()[1]
}

#[test]
fn name_gets_an_address_of_each_family_and_keeps_it() {
    let mut table = Substitutes::new(8, BOTH);
    let v4 = address(&mut table, "A.org.", RecordType::A, SECOND).unwrap();
    let v6 = address(&mut table, "a.org.", RecordType::AAAA, SECOND).unwrap();
    assert_eq!([v4.to_string(), v6.to_string()], ["198.18.1.0", "2001:2::100"]);
    assert_eq!(
        address(&mut table, "b.org.", RecordType::A, SECOND).unwrap().to_string(),
        "198.18.1.1"
    );
    assert_eq!(address(&mut table, "a.org.", RecordType::A, SECOND), Some(v4));
    assert_eq!([v4, v6].map(|ip| table.name(ip)), [Some(&name("a.org")); 2]);
    assert_eq!(table.len(), 2);
    for foreign in ["198.18.0.53", "198.17.1.0", "198.20.0.0", "2001:2:1::100", "10.0.0.1"] {
        assert_eq!(table.name(foreign.parse().unwrap()), None, "{foreign}");
    }
    let beyond = "2001:2::1:0:0:100".parse().unwrap();
    assert!(is_substitute(beyond) && table.name(beyond).is_none());
    assert!(NAME_SERVERS.into_iter().all(|ip| is_substitute(ip) && table.name(ip).is_none()));
}

#[test]
fn other_records_and_families_have_no_data() {
    let mut table = Substitutes::new(8, [true, false]);
    for kind in [RecordType::AAAA, RecordType::MX, RecordType::TXT, RecordType::PTR] {
        assert_eq!(code(&mut table, "a.org.", kind), Code::NoData as u8, "{kind}");
    }
    assert!(table.is_empty());
}

#[test]
fn name_that_a_proxy_could_read_as_an_address_does_not_exist() {
    let mut table = Substitutes::new(8, BOTH);
    for host in ["localhost.", "a.LocalHost.", "0x7f000001.", "0xa9fea9fe.", "1.0x1."] {
        assert_eq!(code(&mut table, host, RecordType::A), Code::NxDomain as u8, "{host}");
    }
    // No rule can have such a name.
    for host in ["127.0.0.1.", "2130706433."] {
        assert_eq!(code(&mut table, host, RecordType::A), Code::Refused as u8, "{host}");
    }
    for host in ["localhost.org.", "0x7f000001.org.", "x0.", "0xg."] {
        assert!(address(&mut table, host, RecordType::A, SECOND).is_some(), "{host}");
    }
}

#[test]
fn address_in_use_or_young_is_never_given_to_another_name() {
    let mut table = Substitutes::new(2, BOTH);
    let get = |table: &mut Substitutes, host: &str, now| address(table, host, RecordType::A, now);
    let a = get(&mut table, "a.org.", SECOND).unwrap();
    let b = get(&mut table, "b.org.", SECOND).unwrap();
    assert!(table.acquire(a, SECOND));
    // Both are young, and then only the one without a connection is old.
    assert_eq!(get(&mut table, "c.org.", LIFE), None);
    let c = get(&mut table, "c.org.", LIFE + SECOND).unwrap();
    assert!(![a, b].contains(&c), "addresses rest as long as possible");
    assert_eq!((table.name(a), table.name(b)), (Some(&name("a.org")), None));
    assert!(!table.acquire(b, LIFE + SECOND));
    assert_eq!(get(&mut table, "d.org.", LIFE + 2 * SECOND), None);
    // The end of the last connection begins a new life.
    table.release(a);
    assert_eq!(get(&mut table, "d.org.", 2 * LIFE), None);
    assert!(get(&mut table, "d.org.", 2 * LIFE + 2 * SECOND).is_some());
    assert_eq!(table.len(), 2);
}

#[test]
fn all_numbers_one_after_another_stay_within_the_ranges() {
    let mut table = Substitutes::new(1, BOTH);
    for round in 0..u64::from(LAST) + 100 {
        let now = (LIFE + SECOND) * u32::try_from(round + 1).unwrap();
        let number = table.assign(&name(&format!("n{round}.org")), now).unwrap();
        assert!((FIRST..=LAST).contains(&number));
    }
}

proptest! {
    #[test]
    fn address_means_the_name_of_its_last_answer(
        steps in prop::collection::vec((0..3_u8, 0..8_u8, 0..400_u64), 0..200),
    ) {
        let mut table = Substitutes::new(4, BOTH);
        let (mut now, mut held, mut answered) = (Duration::ZERO, Vec::new(), HashMap::new());
        for (action, host, pause) in steps {
            now += Duration::from_secs(pause);
            let host = format!("n{host}.org.");
            let ip = address(&mut table, &host, RecordType::A, now);
            match (action, ip) {
                (1, Some(ip)) => {
                    prop_assert!(table.acquire(ip, now));
                    held.push((ip, host.clone()));
                }
                (2, _) if !held.is_empty() => table.release(held.remove(0).0),
                _ => {}
            }
            if let Some(ip) = ip {
                answered.insert(ip, (host, now));
            }
            prop_assert!(table.len() <= 4);
            for (ip, host) in &held {
                prop_assert_eq!(table.name(*ip), Some(&name(host)));
            }
            for (ip, (host, at)) in &answered {
                if *at + LIFE > now {
                    prop_assert_eq!(table.name(*ip), Some(&name(host)));
                }
            }
            prop_assert_eq!(table.by_name.len(), table.by_number.len());
            let idle = table.by_number.values().filter(|entry| entry.uses == 0).count();
            prop_assert_eq!(table.by_end.len(), idle);
        }
    }
}
