#![forbid(unsafe_code)]
//! Cost of coalescing at the egress port: the check of a round's frames, and the joining itself. `apart` runs
//! with coalescing disabled.
//!
//! `cargo bench --manifest-path crates/offload/bench/Cargo.toml --bench leaving`

use ringfence_switch::egress::{EgressProcessor, EgressPort};
use ringfence_frame::port::{ChecksumOffload, GsoOffload, Transmitted};
use ringfence_frame::{Batch, PortCapabilities, PortCounters};
use ringfence_offload::OffloadMeta;
use ringfence_offload::blank::reset_pseudo_header;
use ringfence_offload::checksum::complete_partial;
use ringfence_offload::checksum::internet_checksum;
use ringfence_offload::packet::Layers;

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};

/// Frames of one round.
const FRAMES: u16 = 64;

fn main() {
    divan::main();
}

/// Traffic of one round.
#[derive(Clone, Copy, Debug)]
enum Round {
    /// TCP with 100 bytes of payload, each frame of another flow.
    Flows,
    /// TCP without payload, all of one flow.
    Acknowledgements,
    /// UDP with 100 bytes of payload, for a port without USO.
    Datagrams,
    /// TCP with 1448 bytes of payload, one flow, checksums to be verified.
    Bulk,
    /// Traffic as [`Round::Bulk`], with blank checksums.
    BulkBlank,
}

const ROUNDS: [Round; 5] =
    [Round::Flows, Round::Acknowledgements, Round::Datagrams, Round::Bulk, Round::BulkBlank];

fn frame(round: Round, n: u16) -> (Vec<u8>, OffloadMeta) {
    let (protocol, port, payload) = match round {
        Round::Flows => (6, n, 100),
        Round::Acknowledgements => (6, 7, 0),
        Round::Datagrams => (17, n, 100),
        Round::Bulk | Round::BulkBlank => (6, 7, 1448),
    };
    let header = if protocol == 6 { 32 } else { 8 };
    let ip_len = (20 + header + payload) as u16;
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0];
    frame.extend(ip_len.to_be_bytes());
    frame.extend(n.to_be_bytes());
    frame.extend([0x40, 0, 64, protocol, 0, 0, 10, 9, 0, 1, 10, 9, 0, 2, 0xc0, 1]);
    frame.extend((port + 1000).to_be_bytes());
    if protocol == 6 {
        frame.extend((u32::from(n) * payload as u32).to_be_bytes());
        frame.extend([5, 6, 7, 8, 0x80, 0x10, 1, 0xf6, 0, 0, 0, 0]);
        frame.extend([1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2]);
    } else {
        frame.extend((8 + payload as u16).to_be_bytes());
        frame.extend([0, 0]);
    }
    frame.extend((0..payload).map(|i| (i * 7 % 251) as u8));
    let sum = internet_checksum(&frame[14..34]).to_be_bytes();
    frame[24..26].copy_from_slice(&sum);
    let layers = Layers::parse(&frame, frame.len() as u32).unwrap();
    let place = reset_pseudo_header(&mut frame, &layers).unwrap();
    if let Round::BulkBlank = round {
        return (frame, OffloadMeta { checksum: place.into(), gso: None });
    }
    complete_partial(&mut frame, place).unwrap();
    (frame, OffloadMeta::PLAIN)
}

fn pass(bencher: Bencher<'_, '_>, round: Round, joins: bool) {
    let mut batch = Batch::default();
    for n in 0..FRAMES {
        let (bytes, meta) = frame(round, n);
        let at = batch.reserve(bytes.len()).unwrap();
        batch.scratch_mut(at..at + bytes.len()).unwrap().copy_from_slice(&bytes);
        batch.push_contiguous(at, bytes.len(), meta).unwrap();
    }
    let frames: Vec<u32> = (0..u32::from(FRAMES)).collect();
    let capabilities = PortCapabilities {
        checksum: ChecksumOffload::Netif { ipv4: true, ipv6: true },
        gso: GsoOffload { tcp_v4: true, tcp_v6: true, ecn: true, udp: false },
        scatter_gather: true,
        mtu: 1500,
    };
    let counters = PortCounters::default();
    let leaving = EgressPort { capabilities: &capabilities, counters: &counters, joins };
    let mut edge = EgressProcessor::default();
    let mut once = || {
        edge.process(&mut batch, &frames, leaving, |batch, ready| {
            black_box((batch.len(), ready.len()));
            Some(Transmitted { sent: ready.len(), dropped: 0 })
        });
    };
    once();
    bencher.counter(ItemsCount::new(usize::from(FRAMES))).bench_local(once);
    let bulk = matches!(round, Round::Bulk | Round::BulkBlank);
    assert_eq!(counters.frames_coalesced.get() > 0, joins && bulk);
}

#[divan::bench(args = ROUNDS)]
fn joining(bencher: Bencher<'_, '_>, round: Round) {
    pass(bencher, round, true);
}

#[divan::bench(args = ROUNDS)]
fn apart(bencher: Bencher<'_, '_>, round: Round) {
    pass(bencher, round, false);
}
