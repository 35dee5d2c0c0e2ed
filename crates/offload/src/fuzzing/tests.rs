//! Fuzz bodies on generated input and on the stored corpus.
//!
//! `tests/corpus` holds seeds and inputs that a fuzzer found. To write the seeds again:
//! `RINGFENCE_WRITE_CORPUS=1 cargo test -p ringfence-offload --lib corpus`. To fuzz from them:
//! `cargo +nightly fuzz run segment corpus/segment ../crates/offload/tests/corpus/segment`.

use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::{coalesce, segment};
use crate::blank::reset_pseudo_header;
use crate::meta::{Gso, GsoKind, OffloadMeta};
use crate::packet::Layers;
use crate::test_frames::{self as frames, grown, len};
use crate::vnet::VnetHeader;

fn corpus(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(target)
}

/// Builds a super-packet with its virtio-net header; `which` selects protocol and IP version.
fn super_packet(which: usize, tags: usize, payload: u16, size: u16) -> ([u8; 12], Vec<u8>) {
    let (hex, kind) = [
        (frames::TCP_V4, GsoKind::TcpV4),
        (frames::TCP_V6, GsoKind::TcpV6),
        (frames::UDP_V4, GsoKind::Udp),
        (frames::UDP_V6, GsoKind::Udp),
        (frames::UDP_V4, GsoKind::UdpFragment),
        (frames::UDP_V6, GsoKind::UdpFragment),
    ][which];
    let mut bytes = grown(hex, payload);
    if kind.is_tcp() {
        let flags = if kind == GsoKind::TcpV4 { 47 } else { 67 };
        bytes[flags] = 0x98; // CWR, ACK, PSH in place of SYN
    }
    for _ in 0..tags {
        bytes.splice(12..12, [0x81, 0x00, 0x00, 0x07]);
    }
    let layers = Layers::parse(&bytes, len(&bytes)).unwrap();
    let place = reset_pseudo_header(&mut bytes, &layers).unwrap();
    let ip = usize::from(layers.network_offset());
    if bytes[ip] == 0x45 {
        bytes[ip + 10..ip + 12].fill(0);
        let sum = crate::checksum::internet_checksum(&bytes[ip..ip + 20]);
        bytes[ip + 10..ip + 12].copy_from_slice(&sum.to_be_bytes());
    }
    let gso = Some(Gso { kind, ecn: kind.is_tcp(), size });
    let meta = OffloadMeta { checksum: place.into(), gso };
    (VnetHeader::for_frame(meta, layers.header_len()).unwrap().to_modern(), bytes)
}

fn segment_input(vnet: [u8; 12], settings: [u16; 3], frame: &[u8]) -> Vec<u8> {
    let settings = settings.map(u16::to_le_bytes).concat();
    [&vnet[..], &settings, frame].concat()
}

fn coalesce_input(settings: u8, vnet: [u8; 12], frame: &[u8], script: &[[u8; 3]]) -> Vec<u8> {
    let len = u16::try_from(frame.len()).unwrap().to_le_bytes();
    [&[settings][..], &vnet, &len, frame, &script.concat()].concat()
}

/// Steps of a round: segments blank, completed or verified; damage, repeat, skip, pad.
const SCRIPTS: [&[[u8; 3]]; 5] = [
    &[[0, 0, 0]; 8],
    &[[1, 0, 0]; 8],
    &[[2, 0, 0], [1, 0, 0], [0, 0, 0], [3, 0, 0], [1, 0, 0], [1, 0, 0], [5, 0, 0]],
    &[[1, 0, 0], [1, 0, 0], [6, 47, 8], [1, 0, 0], [6, 60, 1], [1, 0, 0], [7, 0, 0]],
    &[[4, 0, 0], [6, 41, 1], [1, 0, 0], [6, 35, 1], [6, 35, 1], [1, 0, 0]],
];

fn seeds() -> Vec<(&'static str, String, Vec<u8>)> {
    let mut seeds = Vec::new();
    for which in 0..6 {
        for tags in 0..3 {
            let (vnet, frame) = super_packet(which, tags, 900, 200);
            let input = segment_input(vnet, [256, 0, 0], &frame);
            seeds.push(("segment", format!("kind{which}-tags{tags}"), input));
        }
        let (vnet, frame) = super_packet(which, 0, 600, 100);
        for (index, script) in SCRIPTS.iter().enumerate().filter(|_| which < 4) {
            let input = coalesce_input(0, vnet, &frame, script);
            seeds.push(("coalesce", format!("kind{which}-script{index}"), input));
        }
    }
    seeds
}

#[test]
fn corpus_files_pass_fuzz_bodies() {
    if std::env::var_os("RINGFENCE_WRITE_CORPUS").is_some() {
        for (target, name, input) in seeds() {
            std::fs::create_dir_all(corpus(target)).unwrap();
            std::fs::write(corpus(target).join(name), input).unwrap();
        }
    }
    for (target, run) in [("segment", segment as fn(&[u8])), ("coalesce", coalesce)] {
        let mut files = 0;
        for file in std::fs::read_dir(corpus(target)).unwrap() {
            run(&std::fs::read(file.unwrap().path()).unwrap());
            files += 1;
        }
        assert!(files >= 18, "{files} files for {target}");
    }
}

#[test]
fn corpus_seeds_match_stored_files() {
    for (target, name, input) in seeds() {
        assert_eq!(std::fs::read(corpus(target).join(&name)).unwrap(), input, "{target}/{name}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn segment_and_coalesce_of_any_bytes_keep_guarantees(data in prop::collection::vec(any::<u8>(), 0..300)) {
        segment(&data);
        coalesce(&data);
    }

    #[test]
    fn damaged_super_packet_is_segmented_or_refused(
        which in 0usize..6,
        tags in 0usize..3,
        payload in 0u16..5000,
        size in prop_oneof![8u16..2000, any::<u16>()],
        captured in prop_oneof![Just(256u16), 0u16..300],
        missing in prop_oneof![Just(0u16), any::<u16>()],
        damage in prop::collection::vec((0usize..120, any::<u8>()), 0..3),
    ) {
        let (vnet, mut frame) = super_packet(which, tags, payload, size);
        for (at, value) in damage {
            frame[at % 50] = value;
        }
        segment(&segment_input(vnet, [captured, missing, 0], &frame));
    }

    #[test]
    fn round_of_altered_segments_keeps_guarantees(
        settings in any::<u8>(),
        which in 0usize..4,
        tags in 0usize..3,
        payload in 0u16..5000,
        size in 1u16..1000,
        script in prop::collection::vec((0u8..8, 0u8..90, 0u8..10).prop_map(|(a, b, c)| [a, b, c]), 0..40),
    ) {
        let (vnet, frame) = super_packet(which, tags, payload, size);
        coalesce(&coalesce_input(settings, vnet, &frame, &script));
    }
}
