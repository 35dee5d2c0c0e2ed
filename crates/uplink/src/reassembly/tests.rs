#![allow(clippy::unwrap_used, reason = "a test: its panic is the report")]

use std::sync::Arc;

use proptest::prelude::*;
use ringfence_frame::FrameView;
use ringfence_offload::Layers;
use ringfence_offload::packet::Transport;

use super::*;
use crate::host::scripted::ScriptedHost;
use crate::replies::Replies;
use crate::testing::Wire;
use crate::{Config, UplinkCounters};

const GUEST_MAC: Mac = [2, 0, 0, 0, 0, 2];

/// Fragments of a UDP datagram of the guest's.
fn fragments(v4: bool, octets: &[u8], id: u16) -> Vec<Vec<u8>> {
    let addresses = if v4 { ["10.0.0.2", "192.0.2.1"] } else { ["fd00::2", "2001:db8::1"] };
    let [from, to] = addresses.map(|ip| ip.parse().unwrap());
    let ends = Ends { from_mac: GUEST_MAC, to_mac: Config::default().mac, from, to };
    let mut link = Wire::plain();
    crate::fragment::send_udp(&ends, (1000, 2000), octets, id, 1500, &mut link);
    link.frames
}

/// Everything that is told apart.
struct World {
    reassembly: Reassembly,
    counters: Arc<UplinkCounters>,
    now: Duration,
}

impl World {
    fn new() -> World {
        World { reassembly: Reassembly::default(), counters: Arc::default(), now: Duration::ZERO }
    }

    /// The whole datagram's payload, if this fragment was the last one that was missing.
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
            host: &mut host,
            replies: &mut Replies::default(),
            counters: &self.counters,
            now: self.now,
        };
        let whole = self.reassembly.take(&packet, &context)?;
        let view = whole.get(0).unwrap();
        let packet = self::packet(view);
        assert!(!packet.layers.is_fragment() && packet.mac == GUEST_MAC);
        assert!(matches!(packet.layers.transport(), Transport::Udp(_)));
        assert!(crate::packet::checksum_is_right(&packet), "the checksum of all of it is right");
        let mut octets = vec![0; view.len()];
        view.copy_to(&mut octets);
        Some(octets.split_off(packet.payload_start()))
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
fn the_longest_datagram_is_put_together() {
    for v4 in [true, false] {
        let sent = noise(65_507);
        let mut world = World::new();
        assert!(is_equal(world.take_all(&fragments(v4, &sent, 7)), &sent));
        assert_eq!(world.counters.fragments_joined.get(), 1);
        assert_eq!(world.reassembly.held(), 0);
    }
}

#[test]
fn datagrams_under_way_at_once_are_kept_apart() {
    let mut world = World::new();
    let sent: Vec<_> = (1..9).map(|n| noise(n * 1111 + 3000)).collect();
    let all: Vec<_> = (1..).zip(&sent).map(|(id, sent)| fragments(true, sent, id)).collect();
    let mut came = 0;
    for round in 0..10 {
        for (frames, sent) in all.iter().zip(&sent) {
            if let Some(whole) = frames.get(round).and_then(|frame| world.take(frame)) {
                assert!(whole == *sent);
                came += 1;
            }
        }
    }
    assert_eq!(came, 8);
}

#[test]
fn what_overlaps_in_part_ends_its_datagram_and_what_came_already_does_not() {
    let sent = noise(6000);
    let mut frames = fragments(true, &sent, 7);
    let mut world = World::new();
    frames.insert(1, frames[0].clone());
    assert!(is_equal(world.take_all(&frames), &sent), "the same once more");
    frames.remove(1);
    // The second one says that it begins 8 octets further in front.
    let field = u16::from_be_bytes([frames[1][20], frames[1][21]]) - 1;
    frames[1][20..22].copy_from_slice(&field.to_be_bytes());
    assert!(world.take_all(&frames).is_none());
    assert_eq!(world.counters.drop_fragment.get(), 1);
}

#[test]
fn what_is_held_is_bounded_and_given_up_in_time() {
    let mut world = World::new();
    for id in 0..1000 {
        // The last one alone makes room for all of it.
        let frames = fragments(id % 2 == 0, &noise(60_000), id);
        assert!(world.take(frames.last().unwrap()).is_none());
        assert!(world.reassembly.held() <= DATAGRAMS_MAX << 16, "{}", world.reassembly.held());
    }
    assert_eq!(world.counters.drop_incomplete.get(), 1000 - DATAGRAMS_MAX as u64);
    assert_eq!(world.reassembly.deadline(), Some(LIFETIME));
    world.now = LIFETIME;
    assert!(world.take(&fragments(true, &noise(3000), 5000)[0]).is_none());
    assert_eq!(world.counters.drop_incomplete.get(), 1000);
    assert_eq!(world.reassembly.datagrams.len(), 1);
}

#[test]
fn fragment_beyond_the_longest_packet_ends_the_datagram() {
    let mut world = World::new();
    let mut frame = fragments(true, &noise(3000), 7).remove(0);
    // More fragments, and this one ends at byte 65,520: with its header the packet is longer than 65,535.
    frame[20..22].copy_from_slice(&(0x2000_u16 | (64_040 / 8)).to_be_bytes());
    assert!(world.take(&frame).is_none());
    assert_eq!(world.reassembly.held(), 0);
    assert_eq!(world.counters.drop_fragment.get(), 1);
}

#[test]
fn too_many_gaps_end_a_datagram() {
    let mut world = World::new();
    let frames = fragments(true, &noise(60_000), 7);
    assert!(frames.len() > 2 * PARTS_MAX);
    let with_gaps: Vec<_> = frames.iter().step_by(2).cloned().collect();
    assert!(world.take_all(&with_gaps).is_none());
    assert_eq!(world.counters.drop_fragment.get(), 1);
}

#[test]
fn a_last_fragment_that_ends_before_others_ends_the_datagram() {
    let mut world = World::new();
    let frames = fragments(false, &noise(6000), 7);
    assert!(world.take(&frames[2]).is_none());
    let mut early = frames[1].clone();
    // The flag "more", in the fragment header.
    early[14 + 40 + 3] &= !1;
    assert!(world.take(&early).is_none());
    assert_eq!(world.counters.drop_fragment.get(), 1);
    assert!(world.reassembly.datagrams.is_empty());
}

proptest! {
    #[test]
    fn fragments_in_any_order_make_the_datagram(
        v4: bool,
        len in 1500_usize..16_000,
        order in prop::collection::vec(any::<u32>(), 16),
    ) {
        let sent = noise(len);
        let mut frames: Vec<_> = fragments(v4, &sent, 9).into_iter().zip(order).collect();
        frames.sort_by_key(|(_, key)| *key);
        let frames: Vec<_> = frames.into_iter().map(|(frame, _)| frame).collect();
        prop_assert!(is_equal(World::new().take_all(&frames), &sent));
    }

    /// Headers of any kind: nothing panics, and no more is held than may be.
    #[test]
    fn fragments_of_any_kind_are_taken(
        fields in prop::collection::vec((any::<u16>(), 0_usize..100, 0_u16..40), 1..80),
    ) {
        let mut world = World::new();
        let template = fragments(true, &noise(3000), 0).remove(0);
        for (flags, len, id) in fields {
            let mut frame = template[..34 + len].to_vec();
            frame[16..18].copy_from_slice(&u16::try_from(20 + len).unwrap().to_be_bytes());
            frame[18..20].copy_from_slice(&id.to_be_bytes());
            frame[20..22].copy_from_slice(&flags.to_be_bytes());
            let length = u32::try_from(frame.len()).unwrap();
            // What the parser refuses does not come here.
            let part = Layers::parse(&frame, length).is_ok_and(|layers| layers.is_fragment());
            // Whatever comes of it has no right checksum, which is looked at later.
            if part && flags & 0x1fff != 0 {
                let _ = world.take(&frame);
            }
            prop_assert!(world.reassembly.held() <= DATAGRAMS_MAX << 16);
        }
    }
}
