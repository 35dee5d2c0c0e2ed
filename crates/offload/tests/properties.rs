//! Segmentation and coalescing of the corpus of `tests/kernel.rs`, without a kernel: etherparse accepts every
//! segment, fragments reassemble, and coalescing the segments restores the super-packet.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod common;

use ringfence_offload::coalesce::{Coalescer, Limits, Packet};
use ringfence_offload::{Checksum, Layers, OffloadMeta};

use common::{Kind, Recipe, corpus, difference, segments};
use etherparse::{NetSlice, SlicedPacket, TransportSlice};

/// Returns the corpus without large payloads: a debug build sums slowly.
fn recipes(kind: Kind) -> impl Iterator<Item = Recipe> {
    corpus().into_iter().filter(move |recipe| recipe.kind == kind && recipe.payload < 20_000)
}

/// Checks a segment with etherparse: lengths, IPv4's checksum, the transport's checksum.
fn check_with_etherparse(recipe: &Recipe, segment: &[u8]) {
    let sliced = SlicedPacket::from_ethernet(segment).unwrap_or_else(|e| panic!("{recipe:?}: {e}"));
    assert_eq!(sliced.link_exts.len(), common::TAGS[recipe.tags].len());
    let transport = sliced.transport.unwrap_or_else(|| panic!("{recipe:?}: no transport"));
    let expected = match (sliced.net.as_ref().unwrap(), &transport) {
        (NetSlice::Ipv4(ip), TransportSlice::Tcp(tcp)) => {
            let (from, to) = (ip.header().source(), ip.header().destination());
            tcp.calc_checksum_ipv4(from, to).unwrap()
        }
        (NetSlice::Ipv6(ip), TransportSlice::Tcp(tcp)) => {
            let (from, to) = (ip.header().source(), ip.header().destination());
            tcp.calc_checksum_ipv6(from, to).unwrap()
        }
        (NetSlice::Ipv4(ip), TransportSlice::Udp(udp)) => {
            udp.to_header().calc_checksum_ipv4(&ip.header().to_header(), udp.payload()).unwrap()
        }
        (NetSlice::Ipv6(ip), TransportSlice::Udp(udp)) => {
            udp.to_header().calc_checksum_ipv6(&ip.header().to_header(), udp.payload()).unwrap()
        }
        other => panic!("{recipe:?}: {other:?}"),
    };
    let (stored, payload) = match &transport {
        TransportSlice::Tcp(tcp) => (tcp.checksum(), tcp.payload().len()),
        TransportSlice::Udp(udp) => (udp.checksum(), udp.payload().len()),
        other => panic!("{recipe:?}: {other:?}"),
    };
    assert_eq!(stored, expected, "{recipe:?}");
    let headers = segment.len() - payload;
    assert_eq!(headers, recipe.header_len(), "{recipe:?}: nothing behind the packet");
    if let Some(NetSlice::Ipv4(ip)) = sliced.net {
        let header = ip.header().to_header();
        assert_eq!(header.header_checksum, header.calc_header_checksum(), "{recipe:?}");
    }
}

#[test]
fn etherparse_accepts_every_segment() {
    for recipe in recipes(Kind::Tcp).chain(recipes(Kind::Uso)) {
        let (frame, meta) = recipe.build();
        for (segment, meta) in segments(&frame, meta, true) {
            assert_eq!(meta.checksum, Checksum::Verified);
            check_with_etherparse(&recipe, &segment);
        }
    }
}

/// Reassembles fragments by RFC 791, 3.2 and RFC 8200, 4.5, then parses the whole with etherparse.
#[test]
fn fragments_reassemble_to_datagram() {
    for recipe in recipes(Kind::Ufo) {
        let (frame, meta) = recipe.build();
        let udp_at = recipe.header_len() - 8;
        let mut datagram = Vec::new();
        let mut finished = false;
        for (fragment, meta) in segments(&frame, meta, true) {
            assert!(!finished, "{recipe:?}: more after the last");
            assert_eq!(meta, OffloadMeta::PLAIN);
            let sliced = SlicedPacket::from_ethernet(&fragment).unwrap();
            let payload = sliced.ip_payload().unwrap();
            assert!(payload.fragmented, "{recipe:?}");
            let field = |at| u16::from_be_bytes([fragment[at], fragment[at + 1]]);
            let (offset, more) = if recipe.is_v6 {
                (field(udp_at + 2) & 0xfff8, field(udp_at + 2) & 1 != 0)
            } else {
                let ip = udp_at - 20 - common::OPTIONS_V4[recipe.ip_options].len();
                let flags = field(ip + 6);
                ((flags & 0x1fff) << 3, flags & 0x2000 != 0)
            };
            assert_eq!(usize::from(offset), datagram.len(), "{recipe:?}");
            assert!(payload.payload.len() <= recipe.size.into(), "{recipe:?}");
            datagram.extend_from_slice(payload.payload);
            finished = !more;
        }
        assert!(finished, "{recipe:?}");
        let whole = [&frame[..udp_at], &datagram].concat();
        let rest = udp_at + 8;
        assert!(whole[rest..] == frame[rest..], "{}", difference(&whole[rest..], &frame[rest..]));
        check_with_etherparse(&recipe, &whole);
    }
}

fn coalescer() -> Coalescer {
    Coalescer::new(Limits {
        frames: 9000,
        packet_len: u32::MAX,
        packet_frames: u32::MAX,
        udp: true,
        ..Limits::default()
    })
}

/// Returns `true` if Linux would join such segments.
fn joins(recipe: &Recipe) -> bool {
    let count = recipe.payload.div_ceil(recipe.size.into());
    match recipe.kind {
        // SYN, RST and URG never join.
        Kind::Tcp => recipe.flags & 0x26 == 0,
        Kind::Uso => count <= 64,
        Kind::Ufo => false,
    }
}

#[test]
fn coalesced_segments_restore_super_packet() {
    let mut coalescer = coalescer();
    let mut joined = 0;
    for recipe in corpus().into_iter().filter(joins) {
        let (frame, meta) = recipe.build();
        // Blank checksums, completed ones of unknown state, and a mixture.
        let finished = segments(&frame, meta, true).into_iter();
        let finished = finished.map(|(bytes, _)| (bytes, OffloadMeta::PLAIN));
        let made: Vec<_> = match recipe.seed % 3 {
            0 => segments(&frame, meta, false),
            1 => finished.collect(),
            _ => finished.zip(segments(&frame, meta, false)).enumerate().map(mixed_frame).collect(),
        };
        for (index, (bytes, meta)) in (0..).zip(&made) {
            let layers = Layers::parse(bytes, u32::try_from(bytes.len()).unwrap()).unwrap();
            let headers = &bytes[..bytes.len().min(256)];
            coalescer.push(index, headers, Some(&layers), *meta, &mut &bytes[..]).unwrap();
        }
        let packets: Vec<_> = coalescer.finish().collect();
        let [Packet::Merged(merged)] = &packets[..] else {
            panic!("{recipe:?}: {} packets", packets.len());
        };
        assert_eq!(merged.meta, meta, "{recipe:?}");
        let mut back = merged.header.to_vec();
        for member in merged.members() {
            let payload = member.payload.start as usize..member.payload.end as usize;
            back.extend_from_slice(&made[member.frame as usize].0[payload]);
        }
        assert!(back == frame, "{recipe:?}: {}", difference(&back, &frame));
        joined += 1;
        coalescer.clear();
    }
    assert!(joined > 5000, "{joined}");
}

type Frame = (Vec<u8>, OffloadMeta);

/// Selects the completed form of every other frame.
fn mixed_frame((index, (finished, blank)): (usize, (Frame, Frame))) -> Frame {
    if index % 2 == 0 { finished } else { blank }
}
