use super::*;
use proptest::prelude::*;

/// Message that pesto of passt 20260728 sends for `--add -t 0.0.0.0/8080:80 -u 5353:53`, as a literal.
fn from_pesto() -> Vec<u8> {
    let mut bytes = vec![1, 0, 0, 0, 2];
    // 0.0.0.0, no target, no interface, 8080-8080 to 80, TCP, no flag.
    bytes.extend_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 0, 0]);
    bytes.extend_from_slice(&[0; 32]);
    bytes.extend_from_slice(&[0x1f, 0x90, 0x1f, 0x90, 0, 80, 6, 0]);
    // All addresses of both families, 5353-5353 to 53, UDP.
    bytes.extend_from_slice(&[0; 48]);
    bytes.extend_from_slice(&[0x14, 0xe9, 0x14, 0xe9, 0, 53, 17, 1]);
    bytes.push(0);
    bytes
}

fn rule(is_udp: bool, address: Option<&str>, (first, last, to): (u16, u16, u16)) -> Rule {
    let address = address.map(|ip| ip.parse().unwrap());
    let (target, interface) = (None, None);
    let (is_optional, follows_listeners) = (false, false);
    Rule { is_udp, address, target, interface, first, last, to, is_optional, follows_listeners }
}

#[test]
fn update_of_pesto_is_parsed_and_written() {
    let rules =
        vec![rule(false, Some("0.0.0.0"), (8080, 8080, 80)), rule(true, None, (5353, 5353, 53))];
    let updates = vec![Update { number: INBOUND.0, rules }];
    assert_eq!(parse_updates(&from_pesto()), Ok(Some(updates.clone())));
    assert_eq!(write_updates(&updates), from_pesto());
    let texts: Vec<_> = updates[0].rules.iter().map(Rule::to_string).collect();
    assert_eq!(texts, ["tcp 0.0.0.0 8080 -> 80", "udp * 5353 -> 53"]);
}

#[test]
fn incomplete_message_waits_for_more() {
    let whole = from_pesto();
    for len in 0..whole.len() {
        assert_eq!(parse_updates(&whole[..len]), Ok(None), "{len}");
    }
    let rules = vec![rule(false, None, (1, 9, 11))];
    let table =
        RuleTable { number: 1, name: "HOST".to_owned(), capabilities: capabilities::IPV4, rules };
    let whole = write_tables(std::slice::from_ref(&table));
    assert_eq!(whole.len(), 20 + 1 + 128 + 8 + 56 + 1);
    for len in 0..whole.len() {
        assert_eq!(parse_tables(&whole[..len]), Ok(None), "{len}");
    }
    assert_eq!(parse_tables(&whole), Ok(Some(vec![table])));
}

#[test]
fn greeting_of_another_program_or_version_is_rejected() {
    let whole = write_tables(&[]);
    let with = |at: usize, byte: u8| {
        let mut bytes = whole.clone();
        bytes[at] = byte;
        parse_tables(&bytes)
    };
    assert_eq!(with(0, b'B'), Err(RuleError::Greeting));
    assert_eq!(with(11, 1), Err(RuleError::Version(1)));
    assert_eq!(with(15, 64), Err(RuleError::Lengths));
    assert_eq!(with(19, 32), Err(RuleError::Lengths));
}

#[test]
fn values_outside_of_the_protocol_are_rejected() {
    let first_rule = 5;
    let with = |at: usize, byte: u8| {
        let mut bytes = from_pesto();
        bytes[first_rule + at] = byte;
        parse_updates(&bytes)
    };
    // A port 0, a range that runs backwards, and one that leads beyond the last port.
    assert_eq!(with(53, 0), Err(RuleError::Ports { first: 8080, last: 8080, to: 0 }));
    assert_eq!(with(50, 0x1e), Err(RuleError::Ports { first: 8080, last: 0x1e90, to: 80 }));
    let mut bytes = from_pesto();
    bytes[first_rule + 50..first_rule + 54].copy_from_slice(&[0xff, 0xff, 0xf0, 0]);
    assert!(matches!(parse_updates(&bytes), Err(RuleError::Ports { to: 0xf000, .. })));
    assert_eq!(with(54, 132), Err(RuleError::Protocol(132)));
    assert_eq!(with(55, 9), Err(RuleError::Flags(8)));
    // Both families, and an address of IPv4.
    assert_eq!(with(55, 1), Err(RuleError::Families));
    assert_eq!(with(32, b'\n'), Err(RuleError::Name));
    let mut bytes = from_pesto();
    bytes[first_rule + 32..first_rule + 48].fill(b'x');
    assert_eq!(parse_updates(&bytes), Err(RuleError::Name));
}

#[test]
fn message_with_too_much_is_rejected_before_it_is_read() {
    assert_eq!(parse_updates(&[1, 0, 0, 1, 0]), Err(RuleError::TooMany));
    assert_eq!(parse_updates(&[1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]), Err(RuleError::Twice(1)));
    let four = [1, 0, 0, 0, 0, 2, 0, 0, 0, 0, 3, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0];
    assert_eq!(parse_updates(&four), Err(RuleError::TooMany));
}

fn any_rule() -> impl Strategy<Value = Rule> {
    let address = prop_oneof![
        any::<u32>().prop_map(|ip| IpAddr::from(Ipv4Addr::from(ip))),
        any::<u128>().prop_map(|ip| IpAddr::from(Ipv6Addr::from(ip))).prop_filter(
            "mapped",
            |ip| matches!(ip, IpAddr::V6(ip) if ip.to_ipv4_mapped().is_none())
        ),
    ];
    let target =
        proptest::option::of(address.clone()).prop_map(|ip| ip.filter(|ip| !ip.is_unspecified()));
    let ports = (1..=u16::MAX, 1..=u16::MAX, 1..=u16::MAX);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    (proptest::option::of(address), target, proptest::option::of("[!-~]{1,15}"), ports, flags)
        .prop_map(
            |(
                address,
                target,
                interface,
                (one, other, to),
                (is_udp, is_optional, follows_listeners),
            )| {
                let (first, last) = (
                    one.min(other),
                    one.max(other)
                        .min(one.min(other) + (u16::MAX - to).min(u16::MAX - one.min(other))),
                );
                Rule {
                    is_udp,
                    address,
                    target,
                    interface,
                    first,
                    last,
                    to,
                    is_optional,
                    follows_listeners,
                }
            },
        )
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_parsed_or_rejected(data in proptest::collection::vec(any::<u8>(), 0..200)) {
        fuzzing::port_rules(&data);
    }

    #[test]
    fn changed_message_is_parsed_or_rejected(at in 0_usize..118, byte in any::<u8>()) {
        let mut bytes = from_pesto();
        bytes[at] = byte;
        fuzzing::port_rules(&bytes);
    }

    #[test]
    fn rules_survive_a_round_trip(rules in proptest::collection::vec(any_rule(), 0..5)) {
        let updates = vec![Update { number: 1, rules }];
        let bytes = write_updates(&updates);
        prop_assert_eq!(parse_updates(&bytes), Ok(Some(updates)));
        fuzzing::port_rules(&bytes);
    }
}
