use ringfence_frame::port::Port as _;
use ringfence_frame::testing::MemoryPort;

use super::*;

type Frames = Vec<(Vec<u8>, OffloadMeta)>;

/// Processes frames of one round, in lent or private memory. Returns the frames that a port gets, with its
/// counters.
fn joined(sent: &Frames, lent: bool, capabilities: &PortCapabilities) -> (Frames, PortCounters) {
    let (mut port, peer) = MemoryPort::pair(0, *capabilities).unwrap();
    port = if lent { port.lending() } else { port };
    for (bytes, meta) in sent {
        peer.send(bytes, *meta);
    }
    let mut batch = Batch::default();
    assert_eq!(port.receive(&mut batch, 64).unwrap().frames, sent.len());
    let processed = process_all(&mut batch, capabilities);
    assert_eq!(
        (batch.len(), batch.derivable()),
        (sent.len(), DERIVED_MAX),
        "no derived frame stays in the batch"
    );
    processed
}

/// Processes all frames of the batch for a port that joins.
fn process_all(batch: &mut Batch, capabilities: &PortCapabilities) -> (Frames, PortCounters) {
    let frames: Vec<u32> = (0..u32::try_from(batch.len()).unwrap()).collect();
    let (mut got, counters) = (Vec::new(), PortCounters::default());
    let port = EgressPort { capabilities, counters: &counters, joins: true };
    EgressProcessor::default().process(batch, &frames, port, |batch, ready| {
        got.extend(batch.select(ready).map(|frame| (copy_of(&frame), frame.meta())));
        Some(Transmitted { sent: ready.len(), dropped: 0 })
    });
    (got, counters)
}

/// Returns the segments of a super-packet with complete checksums that nothing has verified.
fn segments(bytes: &[u8], meta: OffloadMeta) -> Frames {
    let finished = expected(bytes, meta, true).into_iter();
    finished.map(|(bytes, _)| (bytes, OffloadMeta::PLAIN)).collect()
}

/// Writes the pseudo header's sum into the blank checksum.
fn with_blank_checksum(mut bytes: Vec<u8>) -> Vec<u8> {
    let headers = bytes.len().min(HEADER_MAX);
    let layers = Layers::parse(&bytes[..headers], u32::try_from(bytes.len()).unwrap()).unwrap();
    ringfence_offload::blank::reset_pseudo_header(&mut bytes[..headers], &layers).unwrap();
    bytes
}

#[test]
fn segments_of_super_packet_are_joined_to_same_super_packet() {
    for (v6, lent) in [(false, false), (false, true), (true, false), (true, true)] {
        let (bytes, meta) = tcp(v6, 60_000, 1400);
        let sent = segments(&bytes, meta);
        let (got, counters) = joined(&sent, lent, &takes_all());
        assert!(got == [(bytes, meta)], "v6 {v6}, lent {lent}: {} frames", got.len());
        assert_eq!(counters.frames_coalesced.get(), 43);
        assert_eq!((counters.frames_whole.get(), counters.segments_made.get()), (1, 0));
        assert_eq!(counters.checksums_computed.get(), 0);
    }
}

#[test]
fn segments_for_port_without_super_packets_are_not_joined() {
    for v6 in [false, true] {
        let (bytes, meta) = tcp(v6, 9000, 1000);
        let sent = segments(&bytes, meta);
        let all = takes_all();
        let other = GsoOffload { tcp_v4: v6, tcp_v6: !v6, ..all.gso };
        let netif = ChecksumOffload::Netif { ipv4: v6, ipv6: !v6 };
        for lacks in [
            PortCapabilities { gso: other, ..all },
            PortCapabilities { scatter_gather: false, ..all },
            PortCapabilities { checksum: ChecksumOffload::None, ..all },
            PortCapabilities { checksum: netif, ..all },
            PortCapabilities::plain(1500),
        ] {
            let (got, counters) = joined(&sent, false, &lacks);
            assert!(got == sent, "{lacks:?}");
            assert_eq!(counters.frames_coalesced.get(), 0);
        }
    }
}

#[test]
fn datagrams_are_joined_only_for_port_with_uso() {
    let bytes = with_blank_checksum(ringfence_frame::testing::udp_frame(5000));
    let gso = Some(Gso { kind: GsoKind::Udp, ecn: false, size: 900 });
    let meta = OffloadMeta { checksum: UDP_PLACE, gso };
    let sent = segments(&bytes, meta);
    assert_eq!(sent.len(), 6);
    let (got, counters) = joined(&sent, true, &takes_all());
    assert!(got == [(bytes, meta)]);
    assert_eq!(counters.frames_coalesced.get(), 6);
    let without = GsoOffload { udp: false, ..takes_all().gso };
    let (got, _) = joined(&sent, true, &PortCapabilities { gso: without, ..takes_all() });
    assert!(got == sent);
}

/// Checks that joined TCP over IPv4 stays intact while a super-packet of TCP over IPv6 in between is segmented
/// in several calls.
#[test]
fn joined_frames_survive_segmentation_of_other_frame() {
    let gso = GsoOffload { tcp_v6: false, ..takes_all().gso };
    let takes = PortCapabilities { gso, ..takes_all() };
    let (first, first_meta) = tcp(false, 9000, 1000);
    let (large, large_meta) = tcp(true, 40_000, 100);
    let (mut last, last_meta) = tcp(false, 4000, 1000);
    last[35] ^= 1;
    let last = with_blank_checksum(last);
    let mut sent = segments(&first, first_meta);
    sent.insert(3, (large.clone(), large_meta));
    sent.extend(segments(&last, last_meta));
    let (got, counters) = joined(&sent, true, &takes);
    let split = expected(&large, large_meta, false);
    assert_eq!(got.len(), 1 + split.len() + 1);
    assert!(got[0] == (first, first_meta) && got[got.len() - 1] == (last, last_meta));
    assert!(got[1..=split.len()] == split);
    assert_eq!(counters.frames_coalesced.get(), 13);
    assert_eq!(counters.drops_total(), 0);
}

#[test]
fn damaged_segment_is_not_joined_and_stays_damaged() {
    let (bytes, meta) = tcp(false, 9000, 1000);
    let mut sent = segments(&bytes, meta);
    sent[4].0[500] ^= 1;
    let (got, counters) = joined(&sent, false, &takes_all());
    assert_eq!(got.len(), 3);
    assert!(got[1] == sent[4]);
    assert_eq!(counters.frames_coalesced.get(), 8);
}

#[test]
fn segment_too_long_for_port_is_dropped_alone() {
    let (bytes, meta) = tcp(false, 9000, 2000);
    let sent = segments(&bytes, meta);
    let (got, counters) = joined(&sent, false, &takes_all());
    assert!(got == sent[4..]);
    assert_eq!(counters.drops(DropReason::TooLong), 4);
}

/// Checks frames whose pieces together exceed the limit of one frame.
#[test]
fn frames_in_too_many_pieces_are_not_joined() {
    let (bytes, meta) = tcp(false, 30_000, 500);
    let sent = segments(&bytes, meta);
    let mut batch = Batch::default();
    for (bytes, meta) in &sent {
        let at = batch.reserve(bytes.len()).unwrap();
        batch.scratch_mut(at..at + bytes.len()).unwrap().copy_from_slice(bytes);
        let mut frame = batch.frame(at, 60).unwrap();
        let lent = ringfence_memory::LentSlice::anonymous(2048);
        for (piece, bytes) in bytes[60..].chunks(150).enumerate() {
            lent.copy_from(piece * 200, bytes).unwrap();
            frame.lent(lent.clone(), piece * 200, bytes.len()).unwrap();
        }
        frame.finish(*meta);
    }
    let (got, counters) = process_all(&mut batch, &takes_all());
    assert!(got == sent);
    assert_eq!(counters.frames_coalesced.get(), 0);
}
