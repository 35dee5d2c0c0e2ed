use core::net::{Ipv4Addr, Ipv6Addr};

use super::*;
use DropReason::{
    BadHeaders, DhcpServer, RouterMessage, SpoofedAddress, UnknownProtocol as NotKnown,
};

const MAC: Mac = [2, 0, 0, 0, 0, 1];
const OTHER_MAC: Mac = [2, 0, 0, 0, 0, 2];
const OWN: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const OTHER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
const OWN_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1);
const OTHER_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2);
const OWN_LINK_LOCAL: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0xff, 0xfe00, 1);
const OTHER_LINK_LOCAL: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0xff, 0xfe00, 2);

fn filter() -> AddressFilter {
    AddressFilter::new(MAC, [OWN.into(), OWN_V6.into()])
}

/// Returns the verdict of the slow path. Checks that the fast path passes no frame that the slow path drops.
fn check(filter: &AddressFilter, frame: &[u8]) -> Verdict {
    let header = &frame[..frame.len().min(ringfence_frame::batch::HEADER_MAX)];
    let slow = filter.slow_path(header, frame.len());
    assert!(!filter.fast_path_passes(header) || slow.is_ok(), "{slow:?}");
    slow
}

fn ethernet(ethertype: u16, packet: &[u8]) -> Vec<u8> {
    tagged(&[], ethertype, packet)
}

fn tagged(tags: &[u16], ethertype: u16, packet: &[u8]) -> Vec<u8> {
    let mut frame = [OTHER_MAC, MAC].concat();
    for tag in tags {
        frame.extend(tag.to_be_bytes());
        frame.extend([0, 0]);
    }
    frame.extend(ethertype.to_be_bytes());
    frame.extend(packet);
    frame
}

fn arp(operation: u8, mac: Mac, sender: Ipv4Addr, target: Ipv4Addr) -> Vec<u8> {
    let fixed = [0, 1, 8, 0, 6, 4, 0, operation];
    [&fixed[..], &mac, &sender.octets(), &[0; 6], &target.octets()].concat()
}

/// Builds an IPv4 packet; `field` has the flags and the fragment offset.
fn ipv4(source: Ipv4Addr, number: u8, field: u16, body: &[u8]) -> Vec<u8> {
    let len = u16::try_from(20 + body.len()).unwrap().to_be_bytes();
    let [high, low] = field.to_be_bytes();
    let fixed = [0x45, 0, len[0], len[1], 0, 7, high, low, 64, number, 0, 0];
    [&fixed[..], &source.octets(), &OTHER.octets(), body].concat()
}

/// Builds an IPv6 packet whose first header has this number.
fn ipv6(source: Ipv6Addr, number: u8, body: &[u8]) -> Vec<u8> {
    let len = u16::try_from(body.len()).unwrap().to_be_bytes();
    let fixed = [0x60, 0, 0, 0, len[0], len[1], number, 255];
    [&fixed[..], &source.octets(), &OTHER_V6.octets(), body].concat()
}

fn udp(from: u16, to: u16) -> Vec<u8> {
    [&from.to_be_bytes()[..], &to.to_be_bytes(), &[0, 12, 0, 0, 1, 2, 3, 4]].concat()
}

fn tcp() -> Vec<u8> {
    [[0; 12].as_slice(), &[0x50; 8]].concat()
}

/// Builds a neighbour discovery message with one link-layer address option.
fn neighbour(kind: u8, target: Ipv6Addr, option: u8, mac: Mac) -> Vec<u8> {
    let mut message = vec![kind, 0, 0, 0, 0, 0, 0, 0];
    match kind {
        133 => {}
        134 => message.extend([0; 8]),
        137 => message.extend([target.octets(), target.octets()].concat()),
        _ => message.extend(target.octets()),
    }
    message.extend([option, 1]);
    message.extend(mac);
    message
}

fn v4(packet: &[u8]) -> Verdict {
    check(&filter(), &ethernet(0x0800, packet))
}

fn v6(packet: &[u8]) -> Verdict {
    check(&filter(), &ethernet(0x86dd, packet))
}

#[test]
fn frame_with_own_addresses_passes() {
    assert_eq!(check(&filter(), &ethernet(0x0806, &arp(1, MAC, OWN, OTHER))), Ok(()));
    assert_eq!(check(&filter(), &ethernet(0x0806, &arp(2, MAC, OWN, OTHER))), Ok(()));
    assert_eq!(
        check(&filter(), &ethernet(0x0806, &arp(1, MAC, Ipv4Addr::UNSPECIFIED, OWN))),
        Ok(())
    );
    for (number, body) in [(6, tcp()), (17, udp(1000, 2000)), (1, vec![8; 8]), (2, vec![0; 8])] {
        assert_eq!(v4(&ipv4(OWN, number, 0, &body)), Ok(()), "{number}");
    }
    for source in [OWN_V6, OWN_LINK_LOCAL] {
        for (number, body) in [(6, tcp()), (17, udp(1000, 2000)), (58, vec![128; 8])] {
            assert_eq!(v6(&ipv6(source, number, &body)), Ok(()), "{number}");
        }
        assert_eq!(v6(&ipv6(source, 58, &neighbour(135, OTHER_V6, 1, MAC))), Ok(()));
        assert_eq!(v6(&ipv6(source, 58, &neighbour(136, OWN_V6, 2, MAC))), Ok(()));
    }
    assert_eq!(v6(&ipv6(OWN_LINK_LOCAL, 58, &neighbour(133, OTHER_V6, 1, MAC))), Ok(()));
}

#[test]
fn common_packet_passes_in_fast_path() {
    let fast = |frame: Vec<u8>| filter().fast_path_passes(&frame);
    assert!(fast(ethernet(0x0800, &ipv4(OWN, 6, 0x4000, &tcp()))));
    assert!(fast(ethernet(0x0800, &ipv4(OWN, 17, 0x4000, &udp(1, 2)))));
    assert!(fast(ethernet(0x86dd, &ipv6(OWN_V6, 6, &tcp()))));
    assert!(fast(ethernet(0x86dd, &ipv6(OWN_LINK_LOCAL, 17, &udp(1, 2)))));
}

#[test]
fn packet_with_foreign_ip_source_is_dropped() {
    for (number, body) in [(6, tcp()), (17, udp(1000, 2000)), (1, vec![8; 8]), (47, vec![0; 8])] {
        for source in [OTHER, Ipv4Addr::UNSPECIFIED, Ipv4Addr::LOCALHOST, Ipv4Addr::BROADCAST] {
            assert_eq!(v4(&ipv4(source, number, 0, &body)), Err(SpoofedAddress), "{number}");
            assert_eq!(v4(&ipv4(source, number, 4, &body)), Err(SpoofedAddress), "{number}");
        }
    }
    for (number, body) in [(6, tcp()), (17, udp(1000, 2000)), (58, vec![128; 8]), (59, vec![])] {
        for source in [OTHER_V6, OTHER_LINK_LOCAL, Ipv6Addr::UNSPECIFIED, Ipv6Addr::LOCALHOST] {
            assert_eq!(v6(&ipv6(source, number, &body)), Err(SpoofedAddress), "{number}");
        }
    }
}

#[test]
fn arp_with_foreign_sender_is_dropped() {
    let none = Ipv4Addr::UNSPECIFIED;
    for (operation, mac, sender, target) in [
        (2, MAC, OTHER, OTHER),
        (1, MAC, OTHER, OTHER),
        (2, OTHER_MAC, OWN, OTHER),
        (1, MAC, none, OTHER),
        (2, OTHER_MAC, OTHER, OWN),
    ] {
        let frame = ethernet(0x0806, &arp(operation, mac, sender, target));
        assert_eq!(check(&filter(), &frame), Err(SpoofedAddress), "{operation} {sender}");
    }
}

#[test]
fn arp_of_another_form_is_dropped() {
    let good = ethernet(0x0806, &arp(2, MAC, OWN, OTHER));
    for (at, value) in [(15, 6), (16, 9), (18, 8), (19, 6), (21, 3), (21, 8)] {
        let mut frame = good.clone();
        frame[at] = value;
        assert_eq!(check(&filter(), &frame), Err(BadHeaders), "byte {at}");
    }
    assert_eq!(check(&filter(), &good[..40]), Err(BadHeaders));
}

#[test]
fn neighbour_message_with_foreign_address_is_dropped() {
    let none = Ipv6Addr::UNSPECIFIED;
    for (source, message) in [
        (OWN_LINK_LOCAL, neighbour(136, OTHER_V6, 2, MAC)),
        (OWN_LINK_LOCAL, neighbour(136, OWN_V6, 2, OTHER_MAC)),
        (OTHER_V6, neighbour(136, OWN_V6, 2, MAC)),
        (OTHER_V6, neighbour(135, OWN_V6, 1, MAC)),
        (OWN_V6, neighbour(135, OTHER_V6, 1, OTHER_MAC)),
        (none, neighbour(136, OWN_V6, 2, MAC)),
        // Duplicate address detection of another station's address.
        (none, neighbour(135, OTHER_V6, 14, MAC)),
        (none, neighbour(135, OWN_V6, 1, MAC)),
        (OWN_LINK_LOCAL, neighbour(133, OWN_V6, 1, OTHER_MAC)),
    ] {
        assert_eq!(v6(&ipv6(source, 58, &message)), Err(SpoofedAddress), "{message:x?}");
        let forwarding = filter().forwarding(true);
        let frame = ethernet(0x86dd, &ipv6(source, 58, &message));
        assert_eq!(
            check(&forwarding, &frame),
            Err(SpoofedAddress),
            "a router has assigned addresses too"
        );
    }
    assert_eq!(v6(&ipv6(none, 58, &neighbour(135, OWN_V6, 14, MAC))), Ok(()), "a nonce");
}

#[test]
fn second_link_layer_option_is_checked() {
    let mut message = neighbour(136, OWN_V6, 2, MAC);
    message.extend([2, 1]);
    message.extend(OTHER_MAC);
    assert_eq!(v6(&ipv6(OWN_V6, 58, &message)), Err(SpoofedAddress));
}

#[test]
fn malformed_neighbour_option_is_dropped() {
    let message = neighbour(136, OWN_V6, 2, MAC);
    for (units, expected) in [(0, BadHeaders), (2, BadHeaders), (1, SpoofedAddress)] {
        let mut message = message.clone();
        message[25] = units;
        message[31] ^= 1;
        assert_eq!(v6(&ipv6(OWN_V6, 58, &message)), Err(expected));
    }
    for len in [20, 25, 31] {
        assert_eq!(v6(&ipv6(OWN_V6, 58, &message[..len])), Err(BadHeaders), "{len}");
    }
}

#[test]
fn router_message_is_dropped_unless_advertising() {
    let advertising = filter().advertising(true);
    let redirect = neighbour(137, OTHER_V6, 2, OTHER_MAC);
    for message in [neighbour(134, OWN_V6, 1, MAC), redirect, vec![138; 16], vec![151; 8]] {
        let frame = ethernet(0x86dd, &ipv6(OWN_LINK_LOCAL, 58, &message));
        assert_eq!(check(&filter(), &frame), Err(RouterMessage));
        assert_eq!(check(&filter().forwarding(true), &frame), Err(RouterMessage));
        assert_eq!(check(&advertising, &frame), Ok(()), "{message:x?}");
    }
    for kind in [5, 9] {
        let frame = ethernet(0x0800, &ipv4(OWN, 1, 0, &[kind; 16]));
        assert_eq!(check(&filter(), &frame), Err(RouterMessage));
        assert_eq!(check(&advertising, &frame), Ok(()));
    }
    let spoofed = ethernet(0x86dd, &ipv6(OTHER_LINK_LOCAL, 58, &neighbour(134, OWN_V6, 1, MAC)));
    assert_eq!(check(&advertising, &spoofed), Err(SpoofedAddress));
}

#[test]
fn dhcp_server_message_is_dropped_unless_advertising() {
    let advertising = filter().advertising(true);
    for (from, to) in [(67, 68), (67, 67), (1000, 68)] {
        let frame = ethernet(0x0800, &ipv4(OWN, 17, 0, &udp(from, to)));
        assert_eq!(check(&filter(), &frame), Err(DhcpServer), "{from} {to}");
        assert_eq!(check(&advertising, &frame), Ok(()));
    }
    for (from, to) in [(547, 546), (1000, 546), (547, 547)] {
        let frame = ethernet(0x86dd, &ipv6(OWN_LINK_LOCAL, 17, &udp(from, to)));
        assert_eq!(check(&filter(), &frame), Err(DhcpServer), "{from} {to}");
        assert_eq!(check(&advertising, &frame), Ok(()));
    }
}

#[test]
fn dhcp_client_message_passes() {
    assert_eq!(v4(&ipv4(Ipv4Addr::UNSPECIFIED, 17, 0, &udp(68, 67))), Ok(()));
    assert_eq!(v4(&ipv4(OWN, 17, 0, &udp(68, 67))), Ok(()));
    assert_eq!(v6(&ipv6(OWN_LINK_LOCAL, 17, &udp(546, 547))), Ok(()));
    assert_eq!(v4(&ipv4(Ipv4Addr::UNSPECIFIED, 17, 0, &udp(68, 53))), Err(SpoofedAddress));
}

#[test]
fn forbidden_packet_behind_vlan_tags_is_dropped() {
    let advertisement = ipv6(OWN_LINK_LOCAL, 58, &neighbour(134, OWN_V6, 1, MAC));
    let spoof = arp(2, MAC, OTHER, OTHER);
    for tags in [&[0x8100][..], &[0x88a8], &[0x88a8, 0x8100], &[0x8100, 0x8100]] {
        let checked = |ethertype, packet: &[u8]| check(&filter(), &tagged(tags, ethertype, packet));
        assert_eq!(checked(0x86dd, &advertisement), Err(RouterMessage));
        assert_eq!(checked(0x0806, &spoof), Err(SpoofedAddress));
        assert_eq!(checked(0x0800, &ipv4(OTHER, 6, 0, &tcp())), Err(SpoofedAddress));
        assert_eq!(checked(0x0800, &ipv4(OWN, 6, 0, &tcp())), Ok(()));
    }
    let deep = tagged(&[0x88a8, 0x8100, 0x8100], 0x86dd, &advertisement);
    assert_eq!(check(&filter(), &deep), Err(NotKnown));
    assert_eq!(check(&filter().forwarding(true), &deep), Err(NotKnown));
}

#[test]
fn unknown_ethertype_is_dropped_unless_forwarding() {
    // LLC with SNAP, PPPoE discovery, LLDP, MPLS, an experiment.
    for ethertype in [0x0026, 0x8863, 0x88cc, 0x8847, 0x88b5] {
        let frame = ethernet(ethertype, &[0xaa; 46]);
        assert_eq!(check(&filter(), &frame), Err(NotKnown), "{ethertype:#x}");
        let forwarding = check(&filter().forwarding(true), &frame);
        assert_eq!(forwarding.is_ok(), ethertype >= 0x0600, "{ethertype:#x}");
    }
}

/// Prepends a fragment header with this offset and flags to `body`.
fn fragment(field: u16, next: u8, body: &[u8]) -> Vec<u8> {
    let [high, low] = field.to_be_bytes();
    [&[next, 0, high, low, 0, 0, 0, 1], body].concat()
}

#[test]
fn forbidden_message_behind_extension_headers_is_dropped() {
    let options = |next: u8, body: &[u8]| [&[next, 0, 1, 4, 0, 0, 0, 0], body].concat();
    let advertisement = neighbour(134, OWN_V6, 1, MAC);
    for first in [0, 43, 60] {
        let hidden = ipv6(OWN_LINK_LOCAL, first, &options(58, &advertisement));
        assert_eq!(v6(&hidden), Err(RouterMessage), "{first}");
        let twice = options(60, &options(58, &neighbour(136, OTHER_V6, 2, MAC)));
        assert_eq!(v6(&ipv6(OWN_LINK_LOCAL, first, &twice)), Err(SpoofedAddress), "{first}");
        let dhcp = ipv6(OWN_LINK_LOCAL, first, &options(17, &udp(547, 546)));
        assert_eq!(v6(&dhcp), Err(DhcpServer), "{first}");
        let echo = ipv6(OWN_LINK_LOCAL, first, &options(58, &[128; 8]));
        assert_eq!(v6(&echo), Ok(()), "{first}");
    }
    // The advertisement is beyond the private copy.
    let mut long = vec![58, 31, 1, 4];
    long.resize(256, 0);
    long.extend(&advertisement);
    assert_eq!(v6(&ipv6(OWN_LINK_LOCAL, 60, &long)), Err(BadHeaders));
    // Ten extension headers exceed the limit of the parser.
    let mut many = options(58, &advertisement);
    for _ in 0..9 {
        many = options(60, &many);
    }
    assert_eq!(v6(&ipv6(OWN_LINK_LOCAL, 60, &many)), Err(BadHeaders));
}

#[test]
fn forbidden_message_in_first_fragment_is_dropped() {
    let message = neighbour(136, OWN_V6, 2, MAC);
    let advertisement = neighbour(134, OWN_V6, 1, MAC);
    for field in [0, 1] {
        let v6 = |next, body: &[u8]| v6(&ipv6(OWN_LINK_LOCAL, 44, &fragment(field, next, body)));
        assert_eq!(v6(58, &message), Err(BadHeaders), "neighbour discovery is never fragmented");
        assert_eq!(v6(58, &advertisement), Err(RouterMessage));
        assert_eq!(v6(17, &[udp(547, 546), vec![0; 4]].concat()), Err(DhcpServer));
        assert_eq!(v6(17, &[udp(1, 2), vec![0; 4]].concat()), Ok(()));
        // The header chain continues in the next fragment.
        assert_eq!(v6(60, &[58, 1, 1, 4, 0, 0, 0, 0]), Err(BadHeaders));
        assert_eq!(v6(58, &[]), Err(BadHeaders));
        assert_eq!(v6(44, &fragment(1, 58, &advertisement)), Err(RouterMessage));
        assert_eq!(v6(44, &fragment(1, 58, &[])), Err(BadHeaders));
    }
    let later = |source| v6(&ipv6(source, 44, &fragment(9, 58, &advertisement)));
    assert_eq!((later(OWN_V6), later(OTHER_V6)), (Ok(()), Err(SpoofedAddress)));

    const MORE: u16 = 0x2000;
    assert_eq!(v4(&ipv4(OWN, 17, MORE, &[udp(67, 68), vec![0; 4]].concat())), Err(DhcpServer));
    assert_eq!(v4(&ipv4(OWN, 1, MORE, &[5; 8])), Err(RouterMessage));
    assert_eq!(v4(&ipv4(OWN, 17, MORE, &[])), Err(BadHeaders));
    assert_eq!(v4(&ipv4(OWN, 17, 4, &udp(67, 68))), Ok(()), "the bytes are data, not ports");
    let asking = ipv4(Ipv4Addr::UNSPECIFIED, 17, 4, &udp(68, 67));
    assert_eq!(v4(&asking), Err(SpoofedAddress));
}

#[test]
fn forbidden_packet_with_ipv4_options_is_dropped() {
    let with_options = |source, body: &[u8]| {
        let mut packet = ipv4(source, 17, 0, &[&[1; 8], body].concat());
        packet[0] = 0x47;
        packet
    };
    assert_eq!(v4(&with_options(OWN, &udp(67, 68))), Err(DhcpServer));
    assert_eq!(v4(&with_options(OTHER, &udp(1, 2))), Err(SpoofedAddress));
    assert_eq!(v4(&with_options(OWN, &udp(1, 2))), Ok(()));
}

#[test]
fn frame_with_contradictory_headers_is_dropped() {
    let mut short = ethernet(0x0800, &ipv4(OWN, 1, 0, &[8; 8]));
    short[17] = 200;
    assert_eq!(check(&filter(), &short), Err(BadHeaders));
    assert_eq!(check(&filter(), &ethernet(0x0800, &ipv6(OWN_V6, 6, &tcp()))), Err(BadHeaders));
    assert_eq!(check(&filter(), &ethernet(0x86dd, &ipv4(OWN, 6, 0, &tcp()))), Err(BadHeaders));
    assert_eq!(check(&filter(), &[0; 13]), Err(BadHeaders));
}

#[test]
fn forwarding_station_sends_from_any_ip_source_and_keeps_its_own_arp_address() {
    let forwarding = filter().forwarding(true);
    for frame in [
        ethernet(0x0800, &ipv4(OTHER, 6, 0, &tcp())),
        ethernet(0x0800, &ipv4(OTHER, 1, 0, &[8; 8])),
        ethernet(0x86dd, &ipv6(OTHER_V6, 17, &udp(1, 2))),
        ethernet(0x86dd, &ipv6(OTHER_V6, 58, &[128; 8])),
    ] {
        assert_eq!(check(&forwarding, &frame), Ok(()));
        assert_eq!(check(&filter(), &frame), Err(SpoofedAddress));
    }
    let arp = ethernet(0x0806, &arp(2, MAC, OTHER, OTHER));
    assert_eq!(check(&forwarding, &arp), Err(SpoofedAddress));
    let offer = ethernet(0x0800, &ipv4(OTHER, 17, 0, &udp(67, 68)));
    assert_eq!(check(&forwarding, &offer), Err(DhcpServer));
}

#[test]
fn addresses_beyond_limit_are_ignored() {
    let many = (0..100u32).map(|n| Ipv4Addr::from_bits(0x0a00_0000 + n).into());
    assert_eq!(AddressFilter::new(MAC, many).v4.len(), FILTER_ADDRESSES_MAX);
}
