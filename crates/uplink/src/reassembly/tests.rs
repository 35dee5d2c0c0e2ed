#![allow(clippy::unwrap_used, reason = "a test: its panic is the report")]

use std::sync::Arc;

use proptest::prelude::*;
use ringfence_frame::FrameView;
use ringfence_offload::Layers;
use ringfence_offload::packet::Transport;

use super::*;
use crate::emit::UdpEnds;
use crate::fragment::Fields;
use crate::host::scripted::ScriptedHost;
use crate::packet::Fragmentation;
use crate::replies::Replies;
use crate::testing::Wire;
use crate::{Config, UplinkCounters};

const GUEST_MAC: Mac = [2, 0, 0, 0, 0, 2];

/// Builds the fragments of a UDP datagram from the guest.
fn fragments(v4: bool, bytes: &[u8], id: u16) -> Vec<Vec<u8>> {
    let addresses = if v4 { ["10.0.0.2", "192.0.2.1"] } else { ["fd00::2", "2001:db8::1"] };
    let [from, to] = addresses.map(|ip| ip.parse().unwrap());
    let ends = Ends { from_mac: GUEST_MAC, to_mac: Config::default().mac, from, to };
    let mut link = Wire::plain();
    let ends = UdpEnds { ends, from: 1000, to: 2000 };
    let marks = Marks { hops: 9, class: 0xb9, ..Marks::default() };
    crate::fragment::send_udp(&ends, bytes, Fields { id, marks, mtu: 1500 }, &mut link);
    link.frames
}

/// Reassembly with the state it needs.
struct Fixture {
    reassembly: Reassembly,
    counters: Arc<UplinkCounters>,
    now: Duration,
}

impl Fixture {
    fn new() -> Fixture {
        Fixture { reassembly: Reassembly::default(), counters: Arc::default(), now: Duration::ZERO }
    }

    /// Adds a fragment. Returns the payload of the datagram if it is complete.
    fn take(&mut self, frame: &[u8]) -> Option<Vec<u8>> {
        let mut batch = Batch::with_capacity(1, frame.len());
        let offset = batch.reserve(frame.len()).unwrap();
        batch.scratch_mut(offset..offset + frame.len()).unwrap().copy_from_slice(frame);
        let index = batch.push_contiguous(offset, frame.len(), OffloadMeta::PLAIN).unwrap();
        let view = batch.get(index).unwrap();
        let packet = packet(view);
        assert!(packet.layers.is_fragment());
        let mut host = ScriptedHost::new(1).unwrap();
        let context = Context {
            config: &Config::default(),
            egress: &None,
            host: &mut host,
            replies: &mut Replies::default(),
            queries: &mut Vec::new(),
            held: &mut crate::held::HeldPackets::default(),
            counters: &self.counters,
            now: self.now,
        };
        let whole = self.reassembly.take(&packet, &context)?;
        let view = whole.get(0).unwrap();
        let packet = self::packet(view);
        assert!(!packet.layers.is_fragment() && packet.mac == GUEST_MAC);
        assert_eq!((packet.marks().hops, packet.marks().class), (9, 0xb9));
        let fragmentation = packet.fragmentation();
        assert!(matches!(fragmentation, Fragmentation::Short | Fragmentation::Allowed));
        assert!(matches!(packet.layers.transport(), Transport::Udp(_)));
        assert!(crate::packet::has_valid_checksum(&packet), "the checksum of all of it is right");
        let mut bytes = vec![0; view.len()];
        view.copy_to(&mut bytes);
        Some(bytes.split_off(packet.payload_start()))
    }

    fn take_all(&mut self, frames: &[Vec<u8>]) -> Option<Vec<u8>> {
        let mut whole = frames.iter().filter_map(|frame| self.take(frame)).collect::<Vec<_>>();
        assert!(whole.len() <= 1);
        whole.pop()
    }
}

fn packet(view: FrameView<'_>) -> Packet<'_> {
    let layers = Layers::parse(view.header(), u32::try_from(view.len()).unwrap()).unwrap();
    Packet::read(view, layers).unwrap()
}

fn noise(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n * 31 % 251).to_le_bytes()[0]).collect()
}

fn is_equal(one: Option<Vec<u8>>, other: &[u8]) -> bool {
    one.is_some_and(|one| one == other)
}

#[test]
fn longest_datagram_is_joined() {
    for v4 in [true, false] {
        let sent = noise(65_507);
        let mut fixture = Fixture::new();
        assert!(is_equal(fixture.take_all(&fragments(v4, &sent, 7)), &sent));
        assert_eq!(fixture.counters.fragments_joined.get(), 1);
        assert_eq!(fixture.reassembly.held(), 0);
    }
}

#[test]
fn concurrent_datagrams_are_joined_separately() {
    let mut fixture = Fixture::new();
    let sent: Vec<_> = (1..9).map(|n| noise(n * 1111 + 3000)).collect();
    let all: Vec<_> = (1..).zip(&sent).map(|(id, sent)| fragments(true, sent, id)).collect();
    let mut came = 0;
    for round in 0..10 {
        for (frames, sent) in all.iter().zip(&sent) {
            if let Some(whole) = frames.get(round).and_then(|frame| fixture.take(frame)) {
                assert!(whole == *sent);
                came += 1;
            }
        }
    }
    assert_eq!(came, 8);
}

#[test]
fn partial_overlap_discards_datagram_and_duplicate_is_ignored() {
    let sent = noise(6000);
    let mut frames = fragments(true, &sent, 7);
    let mut fixture = Fixture::new();
    frames.insert(1, frames[0].clone());
    assert!(is_equal(fixture.take_all(&frames), &sent), "the same once more");
    frames.remove(1);
    // The second fragment claims to begin 8 bytes earlier.
    let field = u16::from_be_bytes([frames[1][20], frames[1][21]]) - 1;
    frames[1][20..22].copy_from_slice(&field.to_be_bytes());
    assert!(fixture.take_all(&frames).is_none());
    assert_eq!(fixture.counters.drop_fragment.get(), 1);
}

#[test]
fn held_bytes_are_bounded_and_expire() {
    let mut fixture = Fixture::new();
    for id in 0..1000 {
        // The last fragment alone makes the buffer as long as the datagram.
        let frames = fragments(id % 2 == 0, &noise(60_000), id);
        assert!(fixture.take(frames.last().unwrap()).is_none());
        assert!(fixture.reassembly.held() <= DATAGRAMS_MAX << 16, "{}", fixture.reassembly.held());
    }
    assert_eq!(fixture.counters.drop_incomplete.get(), 1000 - DATAGRAMS_MAX as u64);
    assert_eq!(fixture.reassembly.deadline(), Some(LIFETIME));
    fixture.now = LIFETIME;
    assert!(fixture.take(&fragments(true, &noise(3000), 5000)[0]).is_none());
    assert_eq!(fixture.counters.drop_incomplete.get(), 1000);
    assert_eq!(fixture.reassembly.datagrams.len(), 1);
}

#[test]
fn fragment_beyond_longest_packet_discards_datagram() {
    let mut fixture = Fixture::new();
    let mut frame = fragments(true, &noise(3000), 7).remove(0);
    // Fragment with "more" set that ends at byte 65,520: with its header the packet exceeds 65,535 bytes.
    frame[20..22].copy_from_slice(&(0x2000_u16 | (64_040 / 8)).to_be_bytes());
    assert!(fixture.take(&frame).is_none());
    assert_eq!(fixture.reassembly.held(), 0);
    assert_eq!(fixture.counters.drop_fragment.get(), 1);
}

#[test]
fn too_many_gaps_discard_datagram() {
    let mut fixture = Fixture::new();
    let frames = fragments(true, &noise(60_000), 7);
    assert!(frames.len() > 2 * PARTS_MAX);
    let with_gaps: Vec<_> = frames.iter().step_by(2).cloned().collect();
    assert!(fixture.take_all(&with_gaps).is_none());
    assert_eq!(fixture.counters.drop_fragment.get(), 1);
}

#[test]
fn last_fragment_before_others_discards_datagram() {
    let mut fixture = Fixture::new();
    let frames = fragments(false, &noise(6000), 7);
    assert!(fixture.take(&frames[2]).is_none());
    let mut early = frames[1].clone();
    // Flag "more fragments" in the fragment header.
    early[14 + 40 + 3] &= !1;
    assert!(fixture.take(&early).is_none());
    assert_eq!(fixture.counters.drop_fragment.get(), 1);
    assert!(fixture.reassembly.datagrams.is_empty());
}

proptest! {
    #[test]
    fn fragments_in_any_order_are_joined(
        v4: bool,
        len in 1500_usize..16_000,
        order in prop::collection::vec(any::<u32>(), 16),
    ) {
        let sent = noise(len);
        let mut frames: Vec<_> = fragments(v4, &sent, 9).into_iter().zip(order).collect();
        frames.sort_by_key(|(_, key)| *key);
        let frames: Vec<_> = frames.into_iter().map(|(frame, _)| frame).collect();
        prop_assert!(is_equal(Fixture::new().take_all(&frames), &sent));
    }

    /// Checks that arbitrary headers cause no panic and exceed no limit.
    #[test]
    fn arbitrary_fragments_stay_within_limits(
        fields in prop::collection::vec((any::<u16>(), 0_usize..100, 0_u16..40), 1..80),
    ) {
        let mut fixture = Fixture::new();
        let template = fragments(true, &noise(3000), 0).remove(0);
        for (flags, len, id) in fields {
            let mut frame = template[..34 + len].to_vec();
            frame[16..18].copy_from_slice(&u16::try_from(20 + len).unwrap().to_be_bytes());
            frame[18..20].copy_from_slice(&id.to_be_bytes());
            frame[20..22].copy_from_slice(&flags.to_be_bytes());
            let length = u32::try_from(frame.len()).unwrap();
            // Frames that the parser rejects do not reach reassembly.
            let part = Layers::parse(&frame, length).is_ok_and(|layers| layers.is_fragment());
            // A packet joined from these has a wrong checksum, which is verified later.
            if part && flags & 0x1fff != 0 {
                let _ = fixture.take(&frame);
            }
            prop_assert!(fixture.reassembly.held() <= DATAGRAMS_MAX << 16);
        }
    }
}
