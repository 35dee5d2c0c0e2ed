//! Fuzz target of the address filter: frames of a hostile port, compared with a receiver that checks nothing.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ringfence_frame::batch::HEADER_MAX;
use ringfence_frame::counters::DropReason;

use crate::forwarding::Mac;
use crate::forwarding::filter::AddressFilter;

const MAC: Mac = [0x02, 0x72, 0x66, 0x80, 0, 2];
const V4: [u8; 4] = [10, 128, 0, 2];
const V6: [u8; 16] = [0xfd, 0x72, 0x66, 0x72, 0x66, 0x63, 0, 128, 0, 0, 0, 0, 0, 0, 0, 2];
const LINK_LOCAL: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0x72, 0x66, 0xff, 0xfe, 0x80, 0, 2];

/// Runs one case: a byte of settings, then a frame. Bit 0 sets the filter's `forwarding`, bit 1 its
/// `advertising`. Bits 2 to 5 write the port's own addresses at the source offsets of common frames.
///
/// # Panics
///
/// Panics if the filter passes a frame with a foreign address, or a message of a router or DHCP server, as
/// parsed by a receiver without checks. Panics if the fast path passes a frame that the slow path drops,
/// unless the transport header is incomplete.
pub fn address_filter(data: &[u8]) {
    let Some((&settings, frame)) = data.split_first() else { return };
    let bit = |n: u8| settings >> n & 1 == 1;
    let own = [IpAddr::from(Ipv4Addr::from(V4)), IpAddr::from(Ipv6Addr::from(V6))];
    let filter = AddressFilter::new(MAC, own).forwarding(bit(0)).advertising(bit(1));
    let mut frame = frame.to_vec();
    let patches: [(bool, usize, &[u8]); 5] = [
        (bit(2), 6, &MAC),
        (bit(3), 26, &V4),
        (bit(4), 22, &V6),
        (bit(5), 22, &MAC),
        (bit(5), 28, &V4),
    ];
    for (_, at, bytes) in patches.into_iter().filter(|(wanted, ..)| *wanted) {
        if let Some(field) = frame.get_mut(at..at + bytes.len()) {
            field.copy_from_slice(bytes);
        }
    }
    let header = &frame[..frame.len().min(HEADER_MAX)];
    let (fast, slow) = (filter.fast_path_passes(header), filter.slow_path(header, frame.len()));
    // The fast path does not check that the transport header is complete; no receiver accepts it if not.
    assert!(!fast || matches!(slow, Ok(()) | Err(DropReason::BadHeaders)), "{slow:?}: {frame:x?}");
    if fast || slow.is_ok() {
        let harm = harm(&frame, bit(0), bit(1));
        assert_eq!(harm, None, "passed: {frame:x?}");
    }
}

/// Returns the first forbidden content that a receiver without checks finds in a frame of the port. The
/// receiver has no security association, so it parses nothing behind an AH or ESP header.
fn harm(frame: &[u8], forwarding: bool, advertising: bool) -> Option<&'static str> {
    let mut at = 12;
    while matches!(read_u16(frame, at)?, 0x8100 | 0x88a8) {
        at += 4;
    }
    let packet = &frame[at + 2..];
    match read_u16(frame, at)? {
        0x0806 => arp_harm(packet),
        0x0800 => {
            let source = packet.get(12..16)?;
            let start = usize::from(packet[0] & 15) * 4;
            let first = read_u16(packet, 6)? & 0x1fff == 0;
            let body = packet.get(start..).filter(|_| first).unwrap_or_default();
            let ports = || Some((read_u16(body, 0)?, read_u16(body, 2)?));
            let ports = ports().filter(|_| packet[9] == 17);
            if source != V4 && !forwarding && (source != [0; 4] || ports != Some((68, 67))) {
                return Some("IPv4 source");
            }
            match (packet[9], body.first(), ports) {
                _ if advertising => None,
                (1, Some(5 | 9), _) => Some("ICMP of a router"),
                (_, _, Some((67, _) | (_, 68))) => Some("DHCP server"),
                _ => None,
            }
        }
        0x86dd => ipv6_harm(packet, forwarding, advertising),
        0x0600.. if forwarding => None,
        _ => Some("protocol"),
    }
}

fn arp_harm(packet: &[u8]) -> Option<&'static str> {
    let (hardware, sender) = (packet.get(8..14)?, packet.get(14..18)?);
    let asks_for_own = sender == [0; 4] && packet.get(24..28)? == V4;
    (hardware != MAC || (sender != V4 && !asks_for_own)).then_some("ARP sender")
}

fn ipv6_harm(packet: &[u8], forwarding: bool, advertising: bool) -> Option<&'static str> {
    let source = packet.get(8..24)?;
    let (own, none) = (source == V6 || source == LINK_LOCAL, source == [0; 16]);
    let (mut next, mut at, mut fragment) = (packet[6], 40, false);
    loop {
        let unit = packet.get(at + 1).map(|units| usize::from(*units));
        let (Some(after), Some(units)) = (packet.get(at).copied(), unit) else { break };
        match next {
            0 | 43 | 60 => at += 8 * (units + 1),
            44 if read_u16(packet, at + 2)? & 0xfff8 != 0 => return source_harm(own, forwarding),
            44 => {
                fragment = true;
                at += 8;
            }
            _ => break,
        }
        next = after;
    }
    let body = packet.get(at..).unwrap_or_default();
    match (next, body.first()) {
        (58, Some(133..=137)) if fragment => Some("neighbour discovery in a fragment"),
        (58, Some(134 | 137 | 138 | 151 | 153)) if !advertising => Some("ICMPv6 of a router"),
        (58, Some(kind @ 133..=136)) => neighbour_harm(*kind, body, own, none),
        (58, Some(131 | 132 | 143)) if none => None,
        (17, _) if !advertising && (read_u16(body, 0)? == 547 || read_u16(body, 2)? == 546) => {
            Some("DHCPv6 server")
        }
        _ => source_harm(own, forwarding),
    }
}

fn source_harm(own: bool, forwarding: bool) -> Option<&'static str> {
    (!own && !forwarding).then_some("IPv6 source")
}

fn neighbour_harm(kind: u8, body: &[u8], own: bool, none: bool) -> Option<&'static str> {
    let may_lack_source = none && matches!(kind, 133 | 135);
    if !(own || may_lack_source) {
        return Some("neighbour discovery source");
    }
    let target = body.get(8..24);
    let is_own = target.is_some_and(|target| target == V6 || target == LINK_LOCAL);
    if !is_own && target.is_some() && (kind == 136 || kind == 135 && none) {
        return Some("neighbour discovery target");
    }
    let mut at = match kind {
        133 => 8,
        134 => 16,
        _ => 24,
    };
    while let Some([option, units]) = body.get(at..at + 2) {
        if matches!(option, 1 | 2) && (none || body.get(at + 2..at + 8)? != MAC) {
            return Some("link-layer address");
        }
        if *units == 0 {
            break;
        }
        at += usize::from(*units) * 8;
    }
    None
}

fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::select;

    const OTHER_V4: [u8; 4] = [10, 128, 0, 3];
    const OTHER_V6: [u8; 16] = [0xfd, 0x72, 0x66, 0x72, 0x66, 0x63, 0, 128, 0, 0, 0, 0, 0, 0, 0, 3];

    fn v6() -> impl Strategy<Value = [u8; 16]> {
        select(vec![V6, V6, LINK_LOCAL, OTHER_V6, [0; 16]])
    }

    fn v4() -> impl Strategy<Value = [u8; 4]> {
        select(vec![V4, V4, OTHER_V4, [0; 4]])
    }

    fn hardware() -> impl Strategy<Value = Mac> {
        select(vec![MAC, MAC, [2, 0, 0, 0, 0, 9]])
    }

    /// Generates UDP, ICMP, ICMPv6 and TCP messages with their protocol number, mostly with types and ports
    /// that the filter checks.
    fn body() -> impl Strategy<Value = (u8, Vec<u8>)> {
        let ports = || select(vec![67u16, 68, 546, 547, 9, 53]);
        let udp = (ports(), ports()).prop_map(|(from, to)| {
            let ports = [from.to_be_bytes(), to.to_be_bytes()].concat();
            (17, [ports, vec![0, 12, 0, 0, 1, 2, 3, 4]].concat())
        });
        let icmp = select(vec![0u8, 5, 8, 9]).prop_map(|kind| (1, vec![kind, 0, 0, 0, 0, 0, 0, 0]));
        let option = (select(vec![1u8, 2, 14]), 0u8..3, hardware());
        let kinds = select(vec![128u8, 131, 133, 134, 135, 136, 137, 138, 143, 151]);
        let nd = (kinds, v6(), vec(option, 0..3)).prop_map(|(kind, target, options)| {
            let skipped = match kind {
                133 => 8,
                134 => 16,
                137 => 40,
                _ => 24,
            };
            let mut message = vec![0; skipped];
            message[0] = kind;
            if skipped >= 24 {
                message[8..24].copy_from_slice(&target);
            }
            for (option, units, mac) in options {
                message.extend([option, units]);
                message.extend(mac);
                message.resize(message.len() + 8 * usize::from(units.saturating_sub(1)), 0);
            }
            (58, message)
        });
        let tcp = Just((6, [vec![0; 12], vec![0x50; 8]].concat()));
        prop_oneof![2 => udp, 1 => icmp, 3 => nd, 1 => tcp]
    }

    /// Generates an IPv6 extension header: its number, and its bytes without the next-header field.
    fn extension() -> impl Strategy<Value = (u8, Vec<u8>)> {
        let options = (select(vec![0u8, 43, 60]), 0u8..2);
        let options = options.prop_map(|(number, units)| {
            let len = 7 + 8 * usize::from(units);
            let mut bytes = vec![0; len];
            bytes[0] = units;
            (number, bytes)
        });
        let field = select(vec![0u16, 1, 8, 9]);
        let fragment = field.prop_map(|field| {
            let [high, low] = field.to_be_bytes();
            (44, vec![0, high, low, 0, 0, 0, 1])
        });
        prop_oneof![options, fragment]
    }

    fn ipv6() -> impl Strategy<Value = Vec<u8>> {
        (v6(), vec(extension(), 0..4), body()).prop_map(|(source, extensions, (last, body))| {
            let mut packet = vec![0x60, 0, 0, 0, 0, 0, 0, 255];
            packet.extend(source);
            packet.extend(OTHER_V6);
            let mut numbers = extensions.iter().map(|(number, _)| *number).chain([last]);
            packet[6] = numbers.next().unwrap();
            for ((_, bytes), next) in extensions.iter().zip(numbers) {
                packet.push(next);
                packet.extend(bytes);
            }
            packet.extend(body);
            let len = u16::try_from(packet.len() - 40).unwrap();
            packet[4..6].copy_from_slice(&len.to_be_bytes());
            packet
        })
    }

    fn ipv4() -> impl Strategy<Value = Vec<u8>> {
        let field = select(vec![0u16, 0, 0x2000, 1, 0x4000]);
        (v4(), field, 0u8..3, body()).prop_map(|(source, field, options, (number, body))| {
            let start = 20 + 4 * usize::from(options);
            let mut packet = vec![0; start];
            packet[0] = 0x45 + options;
            let len = u16::try_from(start + body.len()).unwrap();
            packet[2..4].copy_from_slice(&len.to_be_bytes());
            packet[6..8].copy_from_slice(&field.to_be_bytes());
            packet[9] = number;
            packet[12..16].copy_from_slice(&source);
            packet[16..20].copy_from_slice(&OTHER_V4);
            packet.extend(body);
            packet
        })
    }

    fn arp() -> impl Strategy<Value = Vec<u8>> {
        let kinds = select(vec![[0, 1, 8, 0, 6, 4], [0, 6, 8, 0, 6, 4], [0, 1, 8, 0, 8, 4]]);
        (kinds, 0u8..4, hardware(), v4(), v4()).prop_map(
            |(kind, operation, mac, sender, target)| {
                [&kind[..], &[0, operation], &mac, &sender, &[0; 6], &target].concat()
            },
        )
    }

    prop_compose! {
        fn frame()(
            tags in vec(select(vec![0x8100u16, 0x88a8]), 0..4),
            (ethertype, packet) in prop_oneof![
                3 => ipv6().prop_map(|packet| (0x86ddu16, packet)),
                2 => ipv4().prop_map(|packet| (0x0800, packet)),
                1 => arp().prop_map(|packet| (0x0806, packet)),
                1 => (any::<u16>(), vec(any::<u8>(), 0..64)),
            ],
            flips in vec((any::<prop::sample::Index>(), any::<u8>()), 0..2),
            cut in prop_oneof![3 => Just(usize::MAX), 1 => 0usize..120],
        ) -> Vec<u8> {
            let mut frame = [[2, 0, 0, 0, 0, 3], MAC].concat();
            for tag in tags {
                frame.extend(tag.to_be_bytes());
                frame.extend([0, 0]);
            }
            frame.extend(ethertype.to_be_bytes());
            frame.extend(packet);
            for (position, value) in flips {
                let position = position.index(frame.len());
                frame[position] = value;
            }
            frame.truncate(cut);
            frame
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(30_000))]

        #[test]
        fn passed_frame_has_no_foreign_address(settings in 0u8..4, frame in frame()) {
            address_filter(&[vec![settings], frame].concat());
        }
    }

    proptest! {
        #[test]
        fn any_bytes_pass_or_are_dropped_without_panic(data in vec(any::<u8>(), 0..400)) {
            address_filter(&data);
        }
    }
}
