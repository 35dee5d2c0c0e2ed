use super::*;
use crate::blank::reset_pseudo_header;
use crate::checksum::{complete_partial, internet_checksum};
use crate::meta::{Checksum, Gso, GsoKind};
use crate::packet::tcp_flags::{ACK, CWR, ECE, FIN, PSH, RST, SYN, URG};
use crate::rewrite::{get_u16, get_u32, put_u16, put_u32};
use crate::test_frames::{self as frames, grown, len};

const VERIFIED: OffloadMeta = OffloadMeta { checksum: Checksum::Verified, gso: None };

/// A TCP or UDP packet of `payload` more bytes, its checksums right.
fn packet(hex: &str, payload: u16) -> Vec<u8> {
    let mut bytes = grown(hex, payload);
    if hex == frames::TCP_V4 {
        bytes[47] = ACK;
    } else if hex == frames::TCP_V6 {
        bytes[67] = ACK;
    }
    finished(bytes)
}

fn finished(mut bytes: Vec<u8>) -> Vec<u8> {
    let layers = Layers::parse(&bytes, len(&bytes)).unwrap();
    let ip = usize::from(layers.network_offset());
    if bytes[ip] >> 4 == 4 {
        put_u16(&mut bytes, ip + 10, 0);
        let end = ip + usize::from(bytes[ip] & 15) * 4;
        let sum = internet_checksum(&bytes[ip..end]);
        put_u16(&mut bytes, ip + 10, sum);
    }
    if let Ok(place) = reset_pseudo_header(&mut bytes, &layers) {
        complete_partial(&mut bytes, place).unwrap();
    }
    bytes
}

fn altered(bytes: &[u8], alter: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    alter(&mut bytes);
    finished(bytes)
}

/// Builds the segment after `bytes`, a TCP packet over IPv4; the sequence number rises by `len`.
fn after(bytes: &[u8], len: u32) -> Vec<u8> {
    altered(bytes, |next| {
        let (seq, id) = (get_u32(next, 38), get_u16(next, 18));
        put_u32(next, 38, seq.wrapping_add(len));
        put_u16(next, 18, id.wrapping_add(1));
    })
}

/// The datagram after `bytes`, over IPv4.
fn next_datagram(bytes: &[u8]) -> Vec<u8> {
    altered(bytes, |next| {
        let id = get_u16(next, 18);
        put_u16(next, 18, id.wrapping_add(1));
    })
}

/// Frames in each packet of a round.
fn grouped_with(limits: Limits, round: &[(Vec<u8>, OffloadMeta)]) -> Vec<Vec<u32>> {
    let mut coalescer = Coalescer::new(limits);
    push_all(&mut coalescer, round);
    crate::fuzzing::check_round(round, limits);
    let groups = coalescer.finish().map(|packet| match packet {
        Packet::Alone(frame) => vec![frame],
        Packet::Merged(merged) => merged.members().map(|member| member.frame).collect(),
    });
    groups.collect()
}

fn push_all(coalescer: &mut Coalescer, round: &[(Vec<u8>, OffloadMeta)]) {
    for (index, (bytes, meta)) in (0..).zip(round) {
        let layers = Layers::parse(bytes, len(bytes)).ok();
        let frame_bytes = &mut &bytes[..];
        coalescer.push(index, bytes, layers.as_ref(), *meta, frame_bytes).unwrap();
    }
}

fn grouped(round: &[&[u8]]) -> Vec<Vec<u32>> {
    let round: Vec<_> = round.iter().map(|bytes| (bytes.to_vec(), VERIFIED)).collect();
    grouped_with(Limits { udp: true, ..Limits::default() }, &round)
}

fn joins(first: &[u8], second: &[u8]) -> bool {
    grouped(&[first, second]).len() == 1
}

#[test]
fn contiguous_tcp_segments_join() {
    let first = packet(frames::TCP_V4, 500);
    let second = after(&first, 500);
    let third = after(&second, 500);
    let mut coalescer = Coalescer::new(Limits::default());
    let round: Vec<_> = [first, second, third].map(|bytes| (bytes, VERIFIED)).into();
    push_all(&mut coalescer, &round);
    let mut packets = coalescer.finish();
    let Some(Packet::Merged(merged)) = packets.next() else { panic!("joined") };
    assert!(packets.next().is_none());
    assert_eq!((merged.frames, merged.len, merged.header.len()), (3, 74 + 1500, 74));
    let gso = Gso { kind: GsoKind::TcpV4, ecn: false, size: 500 };
    let checksum = Checksum::Partial { start: 34, offset: 16 };
    assert_eq!(merged.meta, OffloadMeta { checksum, gso: Some(gso) });
    assert_eq!(get_u16(merged.header, 16), 60 + 1500);
    assert_eq!(internet_checksum(&merged.header[14..34]), 0);
    let member = |frame| Member { frame, payload: 74..574 };
    assert!(merged.members().eq([member(0), member(1), member(2)]));
}

#[test]
fn segments_with_different_header_fields_do_not_join() {
    let first = packet(frames::TCP_V4, 500);
    let second = after(&first, 500);
    assert!(joins(&first, &second));
    // Destination MAC, TOS, TTL, address, port, acknowledgement, window, urgent pointer, an option.
    for at in [0, 15, 22, 29, 35, 45, 49, 53, 64] {
        assert!(!joins(&first, &altered(&second, |b| b[at] ^= 1)), "byte {at}");
    }
    // Flags "don't fragment" and the reserved one.
    for bit in [0x40, 0x80] {
        assert!(!joins(&first, &altered(&second, |b| b[20] ^= bit)), "flag {bit:#x}");
    }
    let v6 = packet(frames::TCP_V6, 500);
    let next = altered(&v6, |b| {
        let seq = get_u32(b, 58);
        put_u32(b, 58, seq.wrapping_add(500));
    });
    assert!(joins(&v6, &next));
    // Traffic class, flow label, hop limit.
    for at in [15, 16, 17, 21] {
        assert!(!joins(&v6, &altered(&next, |b| b[at] ^= 1)), "byte {at}");
    }
}

#[test]
fn segment_with_wrong_sequence_or_size_does_not_join() {
    let first = packet(frames::TCP_V4, 500);
    for len in [499, 501, 0, u32::MAX] {
        assert!(!joins(&first, &after(&first, len)), "{len}");
    }
    let longer = altered(&packet(frames::TCP_V4, 501), |b| {
        let next = after(&first, 500);
        b[14..16].copy_from_slice(&next[14..16]);
        b[18..20].copy_from_slice(&next[18..20]);
        b[38..42].copy_from_slice(&next[38..42]);
    });
    assert!(!joins(&first, &longer));
    let around = altered(&first, |b| put_u32(b, 38, u32::MAX - 100));
    assert!(joins(&around, &after(&around, 500)), "sequence numbers wrap around");
}

#[test]
fn short_segment_ends_packet() {
    let first = packet(frames::TCP_V4, 500);
    let short = altered(&packet(frames::TCP_V4, 100), |b| {
        let next = after(&first, 500);
        b[18..20].copy_from_slice(&next[18..20]);
        b[38..42].copy_from_slice(&next[38..42]);
    });
    let third = after(&short, 100);
    assert_eq!(grouped(&[&first, &short, &third]), [vec![0, 1], vec![2]]);
}

/// `accept` would refuse the order.
#[test]
fn tiny_segment_begins_no_packet_but_may_end_one() {
    let tiny = packet(frames::TCP_V4, 7);
    assert!(!joins(&tiny, &after(&tiny, 7)));
    let first = packet(frames::TCP_V4, 8);
    let last = altered(&tiny, |b| {
        put_u32(b, 38, get_u32(&first, 38) + 8);
        put_u16(b, 18, get_u16(&first, 18) + 1);
    });
    assert!(joins(&first, &last));
}

#[test]
fn tcp_flags_join_by_linux_rules() {
    let first = packet(frames::TCP_V4, 500);
    let flagged = |bytes: &[u8], flags: u8| altered(bytes, |b| b[47] = flags);
    let second = after(&first, 500);
    let third = after(&second, 500);
    for flag in [SYN, RST, URG] {
        let frames = [&flagged(&first, ACK | flag)[..], &flagged(&second, ACK | flag), &third];
        assert_eq!(grouped(&frames).len(), 3, "{flag:#x} never joins");
    }
    for flag in [PSH, FIN] {
        let ending = flagged(&second, ACK | flag);
        assert_eq!(grouped(&[&first, &ending, &third]), [vec![0, 1], vec![2]]);
    }
    // CWR begins a packet; ECE must be the same throughout.
    let cwr = flagged(&second, ACK | CWR);
    assert_eq!(grouped(&[&first, &cwr, &third]), [vec![0], vec![1, 2]]);
    assert!(!joins(&first, &flagged(&second, ACK | ECE)));
    let ece = [flagged(&first, ACK | ECE), flagged(&second, ACK | ECE)];
    assert!(joins(&ece[0], &ece[1]));
}

#[test]
fn joined_header_carries_flags_of_later_segments() {
    let first = altered(&packet(frames::TCP_V4, 500), |b| b[47] = ACK | CWR);
    let last = altered(&after(&first, 500), |b| b[47] = ACK | PSH | FIN);
    let mut coalescer = Coalescer::new(Limits::default());
    push_all(&mut coalescer, &[(first, VERIFIED), (last, VERIFIED)]);
    let Some(Packet::Merged(merged)) = coalescer.finish().next() else { panic!("joined") };
    assert_eq!(merged.header[47], ACK | CWR | PSH | FIN);
    assert!(merged.meta.gso.unwrap().ecn);
}

#[test]
fn ipv4_identifications_must_increment_or_stay_constant() {
    let first = altered(&packet(frames::TCP_V4, 500), |b| put_u16(b, 18, 0xffff));
    let second = after(&first, 500);
    let third = after(&second, 500);
    assert_eq!(grouped(&[&first, &second, &third]), [vec![0, 1, 2]], "identifications wrap around");
    let with_id = |bytes: &[u8], id| altered(bytes, |b| put_u16(b, 18, id));
    for id in [1, 2, 9, 0x100, 0x7fff, 0xfffe] {
        assert!(!joins(&first, &with_id(&second, id)), "{id}");
    }
    // The same throughout, if "don't fragment" is set; a change of mind ends it.
    let same = [with_id(&second, 0xffff), with_id(&third, 0xffff)];
    assert_eq!(grouped(&[&first, &same[0], &same[1]]), [vec![0, 1, 2]]);
    assert_eq!(grouped(&[&first, &same[0], &third]), [vec![0, 1], vec![2]]);
    assert_eq!(grouped(&[&first, &second, &same[1]]), [vec![0, 1], vec![2]]);
    let may_fragment = |bytes: &[u8]| altered(bytes, |b| b[20] = 0);
    assert!(!joins(&may_fragment(&first), &may_fragment(&same[0])));
    assert!(joins(&may_fragment(&first), &may_fragment(&second)));
}

#[test]
fn frame_with_wrong_checksum_does_not_join() {
    let first = packet(frames::TCP_V4, 500);
    let second = after(&first, 500);
    let mut damaged = second.clone();
    damaged[100] ^= 1;
    let round = |second: &[u8], meta| {
        let round = [(first.clone(), OffloadMeta::PLAIN), (second.to_vec(), meta)];
        grouped_with(Limits::default(), &round).len()
    };
    assert_eq!(round(&second, OffloadMeta::PLAIN), 1);
    assert_eq!(round(&damaged, OffloadMeta::PLAIN), 2);
    let mut header = second.clone();
    header[24] ^= 1;
    assert_eq!(round(&header, VERIFIED), 2, "IPv4's own checksum is always checked");
    let elsewhere = Checksum::Partial { start: 34, offset: 6 };
    assert_eq!(round(&second, OffloadMeta { checksum: elsewhere, gso: None }), 2);
}

#[test]
fn udp_datagrams_join_if_enabled() {
    let first = packet(frames::UDP_V4, 191);
    let second = next_datagram(&first);
    let short = altered(&packet(frames::UDP_V4, 50), |b| put_u16(b, 18, get_u16(&first, 18) + 2));
    let last = altered(&short, |b| put_u16(b, 18, get_u16(&first, 18) + 3));
    let round = [&first[..], &second, &short, &last];
    assert_eq!(grouped(&round), [vec![0, 1, 2], vec![3]]);
    assert_eq!(grouped(&[&short, &first]).len(), 2, "the longer one cannot follow");
    let plain: Vec<_> = round.iter().map(|bytes| (bytes.to_vec(), VERIFIED)).collect();
    assert_eq!(grouped_with(Limits::default(), &plain).len(), 4);
    let without = |bytes: &[u8]| {
        let mut bytes = bytes.to_vec();
        bytes[40..42].fill(0);
        bytes
    };
    assert!(!joins(&without(&first), &without(&second)), "no checksum");
}

#[test]
fn udp_packet_of_64_datagrams_is_closed() {
    let mut round = vec![packet(frames::UDP_V4, 1)];
    while round.len() < 70 {
        round.push(next_datagram(&round[round.len() - 1]));
    }
    let round: Vec<_> = round.into_iter().map(|bytes| (bytes, VERIFIED)).collect();
    let limits = Limits { udp: true, frames: 70, packet_frames: 100, ..Limits::default() };
    let groups = grouped_with(limits, &round);
    assert_eq!(groups.iter().map(Vec::len).collect::<Vec<_>>(), [64, 6]);
}

#[test]
fn joined_packet_stays_within_limits() {
    let mut round = vec![packet(frames::TCP_V4, 1400)];
    while round.len() < 64 {
        round.push(after(&round[round.len() - 1], 1400));
    }
    let round: Vec<_> = round.into_iter().map(|bytes| (bytes, VERIFIED)).collect();
    let lens = |limits| grouped_with(limits, &round).iter().map(Vec::len).collect::<Vec<_>>();
    assert_eq!(lens(Limits::default()), [46, 18], "64 KiB");
    assert_eq!(lens(Limits { packet_len: 9000, ..Limits::default() })[..2], [6, 6]);
    assert_eq!(lens(Limits { packet_frames: 30, ..Limits::default() }), [30, 30, 4]);
    let none = Limits { tcp_v4: false, ..Limits::default() };
    assert_eq!(grouped_with(none, &round).len(), 64);
}

#[test]
fn super_packets_of_same_segment_size_join() {
    let order = |bytes: &[u8]| {
        let mut bytes = bytes.to_vec();
        let layers = Layers::parse(&bytes, len(&bytes)).unwrap();
        let place = reset_pseudo_header(&mut bytes, &layers).unwrap();
        let gso = Some(Gso { kind: GsoKind::TcpV4, ecn: false, size: 500 });
        (bytes, OffloadMeta { checksum: place.into(), gso })
    };
    let first = packet(frames::TCP_V4, 1500);
    let second = altered(&after(&first, 1500), |b| {
        let id = get_u16(b, 18) + 2;
        put_u16(b, 18, id);
    });
    assert_eq!(grouped_with(Limits::default(), &[order(&first), order(&second)]).len(), 1);
    let (bytes, mut meta) = order(&second);
    meta.gso = meta.gso.map(|gso| Gso { size: 499, ..gso });
    assert_eq!(grouped_with(Limits::default(), &[order(&first), (bytes, meta)]).len(), 2);
}

#[test]
fn interleaved_flows_join_separately() {
    let ones = packet(frames::TCP_V4, 500);
    let others = altered(&packet(frames::TCP_V4, 500), |b| b[35] ^= 1);
    let tagged = {
        let mut bytes = packet(frames::TCP_V4, 500);
        bytes.splice(12..12, [0x81, 0, 0, 7]);
        bytes
    };
    let arp = frames::frame(frames::ARP);
    let round = [&ones[..], &others, &arp, &tagged, &after(&ones, 500), &after(&others, 500)];
    assert_eq!(grouped(&round), [vec![0, 4], vec![1, 5], vec![2], vec![3]]);
}

/// A pure acknowledgement between two segments: the second must not overtake it.
#[test]
fn unjoinable_frame_closes_flow() {
    let first = packet(frames::TCP_V4, 500);
    let empty = packet(frames::TCP_V4, 0);
    assert_eq!(grouped(&[&first, &empty, &after(&first, 500)]).len(), 3);
}

#[test]
fn flows_beyond_table_size_do_not_join() {
    let flow = |port: u8| altered(&packet(frames::TCP_V4, 100), |b| b[35] = port);
    let mut round: Vec<_> = (0..=200).map(|port| (flow(port), VERIFIED)).collect();
    round.extend((0..=200).map(|port| (after(&flow(port), 100), VERIFIED)));
    let limits = Limits { frames: round.len(), flows: 8, ..Limits::default() };
    let groups = grouped_with(limits, &round);
    assert_eq!(groups.len(), 402, "each was pushed out before its second segment came");
    let limits = Limits { flows: 1 << 12, ..limits };
    assert_eq!(grouped_with(limits, &round).len(), 201);
}

#[test]
fn push_into_full_round_returns_error() {
    let bytes = packet(frames::TCP_V4, 100);
    let mut coalescer = Coalescer::new(Limits { frames: 1, ..Limits::default() });
    push_all(&mut coalescer, &[(bytes.clone(), VERIFIED)]);
    let full = coalescer.push(1, &bytes, None, VERIFIED, &mut &bytes[..]);
    assert_eq!(full, Err(RoundFull { limit: 1 }));
    assert_eq!((coalescer.len(), coalescer.finish().len()), (1, 1));
    coalescer.clear();
    assert!(coalescer.is_empty());
    assert_eq!(coalescer.push(1, &bytes, None, VERIFIED, &mut &bytes[..]), Ok(()));
}

#[test]
fn coalescer_storage_does_not_grow() {
    let mut coalescer = Coalescer::new(Limits { udp: true, ..Limits::default() });
    let capacities =
        |c: &Coalescer| (c.entries.capacity(), c.groups.capacity(), c.headers.capacity());
    let before = capacities(&coalescer);
    // The longest headers, each of another flow.
    let mut long = packet(frames::UDP_V6, 100);
    long[20] = 60;
    let options = [[17, 21].as_slice(), &[1, 172], &[0; 172]].concat();
    long.splice(54..54, options);
    put_u16(&mut long, 18, u16::try_from(18 + 100 + 176).unwrap());
    for _ in 0..3 {
        let flow = |port: u8| altered(&long, |b| b[230] = port);
        let round: Vec<_> = (0..64).map(|port| (flow(port), VERIFIED)).collect();
        assert!(Layers::parse(&round[0].0, len(&round[0].0)).unwrap().header_len() > 200);
        push_all(&mut coalescer, &round);
        assert_eq!(coalescer.finish().count(), 64);
        assert_eq!(capacities(&coalescer), before);
        coalescer.clear();
    }
}
