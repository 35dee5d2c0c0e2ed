mod join;

use ringfence_frame::batch::DERIVED_MAX;
use ringfence_frame::port::GsoOffload;
use ringfence_frame::testing::copy_of;
use ringfence_frame::testing::tcp_frame;
use ringfence_offload::checksum::internet_checksum;
use ringfence_offload::{Checksum, Gso, GsoKind, OffloadMeta};

use super::*;

const UDP_PLACE: Checksum = Checksum::Partial { start: 34, offset: 6 };

/// Builds a UDP datagram of `payload` bytes over IPv4.
fn udp(payload: usize) -> Vec<u8> {
    let mut frame = vec![0x5a; 42 + payload];
    frame[12..14].copy_from_slice(&[0x08, 0x00]);
    frame[14..34].fill(0);
    frame[14] = 0x45;
    let ip_len = u16::try_from(28 + payload).unwrap().to_be_bytes();
    frame[16..18].copy_from_slice(&ip_len);
    frame[23] = 17;
    let udp_len = u16::try_from(8 + payload).unwrap().to_be_bytes();
    frame[38..40].copy_from_slice(&udp_len);
    // Zero instead of the pseudo header's sum: the bytes from the UDP header on then sum to zero.
    frame[40..42].fill(0);
    frame
}

fn batch(frame: &[u8], meta: OffloadMeta) -> Batch {
    let mut batch = Batch::with_capacity(1, 1 << 17);
    let offset = batch.reserve(frame.len()).unwrap();
    batch.scratch_mut(offset..offset + frame.len()).unwrap().copy_from_slice(frame);
    batch.push_contiguous(offset, frame.len(), meta).unwrap();
    batch
}

/// Processes the batch for a port. Returns the frames that the port gets, or the reason of the drop if it gets
/// none.
fn processed(
    batch: &mut Batch,
    capabilities: &PortCapabilities,
    counters: &PortCounters,
) -> Result<Vec<(Vec<u8>, OffloadMeta)>, DropReason> {
    let frames: Vec<u32> = (0..u32::try_from(batch.len()).unwrap()).collect();
    let mut got = Vec::new();
    let port = EgressPort { capabilities, counters, joins: false };
    EgressProcessor::default().process(batch, &frames, port, |batch, ready| {
        got.extend(batch.select(ready).map(|frame| (copy_of(&frame), frame.meta())));
        Some(Transmitted { sent: ready.len(), dropped: 0 })
    });
    let dropped = DropReason::ALL.iter().find(|&&reason| counters.drops(reason) > 0);
    assert_eq!(got.is_empty(), dropped.is_some());
    dropped.map_or(Ok(got), |&reason| Err(reason))
}

/// Processes the batch for a port and returns only the reason of a drop.
fn drop_reason(batch: &mut Batch, capabilities: &PortCapabilities) -> Result<(), DropReason> {
    processed(batch, capabilities, &PortCounters::default()).map(|_| ())
}

fn capabilities(checksum: ChecksumOffload) -> PortCapabilities {
    PortCapabilities { checksum, ..PortCapabilities::plain(1500) }
}

#[test]
fn blank_checksum_is_completed_only_for_port_that_cannot_pass_it_on() {
    let meta = OffloadMeta { checksum: UDP_PLACE, gso: None };
    let netif = |ipv4, ipv6| ChecksumOffload::Netif { ipv4, ipv6 };
    for (offload, finished) in [
        (ChecksumOffload::None, true),
        (ChecksumOffload::Any, false),
        (netif(true, false), false),
        (netif(false, true), true),
    ] {
        let mut batch = batch(&udp(501), meta);
        drop_reason(&mut batch, &capabilities(offload)).unwrap();
        let frame = batch.get(0).unwrap();
        assert_eq!(frame.meta().is_finished(), finished, "{offload:?}");
        let sum = internet_checksum(&frame.contiguous().unwrap()[34..]);
        assert_eq!(sum == 0, finished, "{offload:?}");
    }
}

#[test]
fn blank_checksum_at_other_offset_is_completed_for_netif_port() {
    let elsewhere = Checksum::Partial { start: 44, offset: 16 };
    let mut batch = batch(&udp(100), OffloadMeta { checksum: elsewhere, gso: None });
    let netif = ChecksumOffload::Netif { ipv4: true, ipv6: true };
    drop_reason(&mut batch, &capabilities(netif)).unwrap();
    assert!(batch.get(0).unwrap().meta().is_finished());
}

#[test]
fn frame_with_checksum_field_outside_header_is_dropped() {
    let outside = Checksum::Partial { start: 300, offset: 6 };
    let mut batch = batch(&udp(1000), OffloadMeta { checksum: outside, gso: None });
    let dropped = drop_reason(&mut batch, &capabilities(ChecksumOffload::None));
    assert_eq!(dropped, Err(DropReason::ChecksumUnfinished));
}

#[test]
fn frame_longer_than_port_takes_is_dropped() {
    let any = capabilities(ChecksumOffload::Any);
    let mut fits = batch(&udp(1500 + 18 - 42), OffloadMeta::PLAIN);
    assert_eq!(drop_reason(&mut fits, &any), Ok(()));
    let mut long = batch(&udp(1500 + 18 - 41), OffloadMeta::PLAIN);
    assert_eq!(drop_reason(&mut long, &any), Err(DropReason::TooLong));
}

/// Builds a TCP super-packet as a guest sends it, with its metadata.
fn tcp(v6: bool, payload: usize, size: u16) -> (Vec<u8>, OffloadMeta) {
    let kind = if v6 { GsoKind::TcpV6 } else { GsoKind::TcpV4 };
    let start = if v6 { 54 } else { 34 };
    let gso = Some(Gso { kind, ecn: false, size });
    (tcp_frame(v6, payload), OffloadMeta { checksum: Checksum::Partial { start, offset: 16 }, gso })
}

fn takes_all() -> PortCapabilities {
    PortCapabilities {
        gso: GsoOffload { tcp_v4: true, tcp_v6: true, ecn: true, udp: true },
        scatter_gather: true,
        ..capabilities(ChecksumOffload::Any)
    }
}

/// Returns the segments that [`Segmenter`] makes of a super-packet.
fn expected(bytes: &[u8], meta: OffloadMeta, complete: bool) -> Vec<(Vec<u8>, OffloadMeta)> {
    let headers = &bytes[..bytes.len().min(HEADER_MAX)];
    let layers = Layers::parse(headers, u32::try_from(bytes.len()).unwrap()).unwrap();
    let mut segmenter = Segmenter::new(headers, &layers, meta).unwrap();
    let mut header = [0; HEADER_MAX];
    let mut all = Vec::new();
    loop {
        let next = if complete {
            segmenter.next_complete(&mut header, &mut &bytes[..]).unwrap()
        } else {
            segmenter.next_partial(&mut header).unwrap()
        };
        let Some(segment) = next else { return all };
        let payload = segment.payload.start as usize..segment.payload.end as usize;
        all.push(([&header[..segment.header_len], &bytes[payload]].concat(), segment.meta));
    }
}

#[test]
fn super_packet_passes_whole_only_to_port_that_takes_it() {
    let takes = takes_all();
    for v6 in [false, true] {
        let (bytes, meta) = tcp(v6, 9000, 1000);
        let counters = PortCounters::default();
        let whole = processed(&mut batch(&bytes, meta), &takes, &counters).unwrap();
        assert!(whole == [(bytes.clone(), meta)]);
        assert_eq!((counters.frames_whole.get(), counters.segments_made.get()), (1, 0));
        assert_eq!((counters.frames_segmented.get(), counters.checksums_computed.get()), (0, 0));
        let netif = |ipv4, ipv6| ChecksumOffload::Netif { ipv4, ipv6 };
        for (lacks, complete) in [
            (PortCapabilities { gso: GsoOffload::default(), ..takes }, false),
            (PortCapabilities { scatter_gather: false, ..takes }, false),
            (PortCapabilities { checksum: ChecksumOffload::None, ..takes }, true),
            (PortCapabilities { checksum: netif(v6, !v6), ..takes }, true),
            (PortCapabilities::plain(1500), true),
        ] {
            let counters = PortCounters::default();
            let got = processed(&mut batch(&bytes, meta), &lacks, &counters).unwrap();
            assert!(got == expected(&bytes, meta, complete), "{lacks:?}");
            assert_eq!(got.len(), 9);
            let summed = if complete { 9 } else { 0 };
            assert_eq!((counters.frames_whole.get(), counters.frames_segmented.get()), (0, 1));
            assert_eq!(counters.segments_made.get(), 9);
            assert_eq!(counters.checksums_computed.get(), summed);
        }
    }
}

#[test]
fn super_packet_with_segments_longer_than_port_takes_is_dropped() {
    let small = |gso| PortCapabilities { mtu: 576, gso, ..takes_all() };
    for gso in [GsoOffload::default(), takes_all().gso] {
        let (bytes, meta) = tcp(false, 65_000, 1448);
        assert_eq!(drop_reason(&mut batch(&bytes, meta), &small(gso)), Err(DropReason::TooLong));
        let (bytes, meta) = tcp(false, 65_000, 536);
        assert_eq!(drop_reason(&mut batch(&bytes, meta), &small(gso)), Ok(()));
    }
}

#[test]
fn segments_beyond_room_of_batch_are_transmitted_in_several_calls() {
    let (bytes, meta) = tcp(false, 65_000, 100);
    let counters = PortCounters::default();
    let plain = PortCapabilities::plain(1500);
    let (mut batch, mut calls, mut got) = (batch(&bytes, meta), 0, Vec::new());
    let port = EgressPort { capabilities: &plain, counters: &counters, joins: false };
    EgressProcessor::default().process(&mut batch, &[0], port, |batch, ready| {
        calls += 1;
        got.extend(batch.select(ready).map(|frame| (copy_of(&frame), frame.meta())));
        Some(Transmitted { sent: ready.len(), dropped: 0 })
    });
    assert!(got == expected(&bytes, meta, true));
    assert_eq!((got.len(), calls), (650, 650usize.div_ceil(DERIVED_MAX)));
    assert_eq!(
        (batch.len(), batch.derivable()),
        (1, DERIVED_MAX),
        "no derived frame stays in the batch"
    );
}

#[test]
fn port_without_room_ends_segmentation() {
    let (bytes, meta) = tcp(false, 65_000, 100);
    let counters = PortCounters::default();
    let plain = PortCapabilities::plain(1500);
    let port = EgressPort { capabilities: &plain, counters: &counters, joins: false };
    let mut calls = 0;
    EgressProcessor::default().process(&mut batch(&bytes, meta), &[0], port, |_, ready| {
        calls += 1;
        Some(Transmitted { sent: 0, dropped: ready.len() })
    });
    assert_eq!(calls, 1);
    assert_eq!(counters.segments_made.get(), DERIVED_MAX as u64);
    assert_eq!(counters.drops(DropReason::PortFull), 650 - DERIVED_MAX as u64);
}

#[test]
fn super_packet_beyond_segment_limit_is_dropped() {
    // 8125 segments of 8 bytes.
    let (bytes, meta) = tcp(false, 65_000, 8);
    let plain = PortCapabilities::plain(1500);
    assert_eq!(drop_reason(&mut batch(&bytes, meta), &plain), Err(DropReason::SegmentLimit));
    let (bytes, meta) = tcp(false, 65_000, 16);
    assert_eq!(drop_reason(&mut batch(&bytes, meta), &plain), Ok(()));
}

#[test]
fn super_packet_beyond_maximum_frame_length_is_segmented_for_every_port() {
    let (mut bytes, meta) = tcp(false, 65_495, 1400);
    let counters = PortCounters::default();
    assert!(bytes.len() > SUPER_FRAME_MAX);
    bytes[60] ^= 1;
    let got = processed(&mut batch(&bytes, meta), &takes_all(), &counters).unwrap();
    assert!(got == expected(&bytes, meta, false));
}
