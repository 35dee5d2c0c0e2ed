#![forbid(unsafe_code)]
//! Segmentation of 64 KiB of TCP over IPv4 into segments of 1448 bytes, and coalescing of the segments.
//!
//! tun-rs splits IP packets; it copies headers and payload into a buffer for each segment (`gso_split`,
//! public though hidden from its documentation). Ours is measured three ways on the same packet under
//! Ethernet: with blank checksums (headers only), with completed checksums (payload read once, not copied),
//! and with the payload copied as in tun-rs. The benchmark first checks that both sides make the same bytes.
//!
//! `cargo bench --manifest-path crates/offload/bench/Cargo.toml`

use ringfence_offload::blank::reset_pseudo_header;
use ringfence_offload::coalesce::{Coalescer, Limits, Packet};
use ringfence_offload::segment::{HEADER_MAX, Segmenter};
use ringfence_offload::{Gso, GsoKind, Layers, OffloadMeta};

use divan::counter::BytesCount;
use divan::{Bencher, black_box};
use tun_rs::{VIRTIO_NET_HDR_GSO_TCPV4, VirtioNetHdr, gso_split};

const ETHERNET: usize = 14;
/// Length of the headers: IPv4 without options, TCP with a timestamp.
const HEADERS: usize = ETHERNET + 20 + 32;
const MSS: u16 = 1448;
/// Largest payload of an IPv4 packet under these headers.
const PAYLOAD: usize = 65_535 - 52;
const SEGMENTS: usize = PAYLOAD.div_ceil(MSS as usize);

fn main() {
    assert_eq!(ours_copied(&super_packet()), theirs(&super_packet().0), "both make the same");
    divan::main();
}

fn super_packet() -> (Vec<u8>, OffloadMeta) {
    let mut frame = vec![0u8; HEADERS];
    frame[..12].copy_from_slice(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2]);
    frame[12..14].copy_from_slice(&[8, 0]);
    frame[14..18].copy_from_slice(&[0x45, 0, 0xff, 0xff]);
    frame[18..26].copy_from_slice(&[0x12, 0x34, 0x40, 0, 64, 6, 0, 0]);
    frame[26..34].copy_from_slice(&[10, 9, 0, 1, 10, 9, 0, 2]);
    frame[34..46].copy_from_slice(&[0xc0, 1, 0, 80, 1, 2, 3, 4, 5, 6, 7, 8]);
    frame[46..54].copy_from_slice(&[0x80, 0x18, 1, 0xf6, 0, 0, 0, 0]);
    frame[54..58].copy_from_slice(&[1, 1, 8, 10]);
    frame.extend((0..PAYLOAD).map(|i| (i * 7 % 251) as u8));
    let layers = Layers::parse(&frame, frame.len() as u32).unwrap();
    let place = reset_pseudo_header(&mut frame, &layers).unwrap();
    let gso = Some(Gso { kind: GsoKind::TcpV4, ecn: false, size: MSS });
    (frame, OffloadMeta { checksum: place.into(), gso })
}

fn segmenter(frame: &[u8], meta: OffloadMeta) -> Segmenter {
    let layers = Layers::parse(&frame[..HEADER_MAX], frame.len() as u32).unwrap();
    Segmenter::new(&frame[..HEADER_MAX], &layers, meta).unwrap()
}

fn split_blank(frame: &[u8], meta: OffloadMeta, headers: &mut [[u8; HEADER_MAX]]) {
    let mut segmenter = segmenter(frame, meta);
    for room in headers.iter_mut() {
        black_box(segmenter.next_partial(room).unwrap());
    }
}

fn split_finished(frame: &[u8], meta: OffloadMeta, headers: &mut [[u8; HEADER_MAX]]) {
    let mut segmenter = segmenter(frame, meta);
    for room in headers.iter_mut() {
        black_box(segmenter.next_complete(room, &mut &frame[..]).unwrap());
    }
}

/// Makes whole segments, as tun-rs does.
fn split_copied(frame: &[u8], meta: OffloadMeta, out: &mut [Vec<u8>], sizes: &mut [usize]) {
    let mut segmenter = segmenter(frame, meta);
    for (out, size) in out.iter_mut().zip(sizes) {
        let segment = segmenter.next_complete(&mut out[..], &mut &frame[..]).unwrap().unwrap();
        let payload = &frame[segment.payload.start as usize..segment.payload.end as usize];
        *size = segment.header_len + payload.len();
        out[segment.header_len..*size].copy_from_slice(payload);
    }
}

fn split_tun_rs(packet: &mut [u8], out: &mut [Vec<u8>], sizes: &mut [usize]) -> usize {
    let header = VirtioNetHdr {
        flags: 1,
        gso_type: VIRTIO_NET_HDR_GSO_TCPV4,
        hdr_len: (HEADERS - ETHERNET) as u16,
        gso_size: MSS,
        csum_start: 20,
        csum_offset: 16,
    };
    gso_split(packet, header, out, sizes, 0, false).unwrap()
}

fn buffers() -> (Vec<Vec<u8>>, Vec<usize>) {
    (vec![vec![0; 1600]; SEGMENTS], vec![0; SEGMENTS])
}

fn ours_copied((frame, meta): &(Vec<u8>, OffloadMeta)) -> Vec<Vec<u8>> {
    let (mut out, mut sizes) = buffers();
    split_copied(frame, *meta, &mut out, &mut sizes);
    let whole = out.iter().zip(sizes);
    whole.map(|(out, size)| out[ETHERNET..size].to_vec()).collect()
}

fn theirs(frame: &[u8]) -> Vec<Vec<u8>> {
    let (mut out, mut sizes) = buffers();
    let mut packet = frame[ETHERNET..].to_vec();
    assert_eq!(split_tun_rs(&mut packet, &mut out, &mut sizes), SEGMENTS);
    out.iter().zip(sizes).map(|(out, size)| out[..size].to_vec()).collect()
}

#[divan::bench]
fn tun_rs(bencher: Bencher<'_, '_>) {
    let mut packet = super_packet().0.split_off(ETHERNET);
    let (mut out, mut sizes) = buffers();
    bencher
        .counter(BytesCount::new(PAYLOAD))
        .bench_local(|| split_tun_rs(black_box(&mut packet), &mut out, &mut sizes));
}

#[divan::bench]
fn ours_payload_copied(bencher: Bencher<'_, '_>) {
    let (frame, meta) = super_packet();
    let (mut out, mut sizes) = buffers();
    bencher
        .counter(BytesCount::new(PAYLOAD))
        .bench_local(|| split_copied(black_box(&frame), meta, &mut out, &mut sizes));
}

#[divan::bench]
fn ours_finished(bencher: Bencher<'_, '_>) {
    let (frame, meta) = super_packet();
    let mut headers = vec![[0; HEADER_MAX]; SEGMENTS];
    bencher
        .counter(BytesCount::new(PAYLOAD))
        .bench_local(|| split_finished(black_box(&frame), meta, &mut headers));
}

#[divan::bench]
fn ours_blank(bencher: Bencher<'_, '_>) {
    let (frame, meta) = super_packet();
    let mut headers = vec![[0; HEADER_MAX]; SEGMENTS];
    bencher
        .counter(BytesCount::new(PAYLOAD))
        .bench_local(|| split_blank(black_box(&frame), meta, &mut headers));
}

/// Coalesces segments whose checksums are summed, or known to be right.
#[divan::bench(args = [false, true])]
fn ours_coalesced(bencher: Bencher<'_, '_>, verified: bool) {
    let (frame, meta) = super_packet();
    let (mut out, mut sizes) = buffers();
    split_copied(&frame, meta, &mut out, &mut sizes);
    let checksum = if verified {
        ringfence_offload::Checksum::Verified
    } else {
        ringfence_offload::Checksum::None
    };
    let meta = OffloadMeta { checksum, gso: None };
    let mut coalescer = Coalescer::new(Limits { packet_len: u32::MAX, ..Limits::default() });
    bencher.counter(BytesCount::new(PAYLOAD)).bench_local(|| {
        coalescer.clear();
        for (index, (out, size)) in (0..).zip(out.iter().zip(&sizes)) {
            let bytes = &out[..*size];
            let layers = Layers::parse(bytes, *size as u32).unwrap();
            coalescer.push(index, bytes, Some(&layers), meta, &mut { bytes }).unwrap();
        }
        let mut packets = coalescer.finish();
        assert!(matches!(packets.next(), Some(Packet::Merged(_))));
        assert!(packets.next().is_none());
    });
}
