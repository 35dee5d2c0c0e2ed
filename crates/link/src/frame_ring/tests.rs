use std::collections::VecDeque;

use proptest::prelude::*;
use ringfence_offload::{Checksum, Gso, GsoKind};

use super::*;

const SMALL: FrameShape = FrameShape { frames: 8, long: 4 };
const LONG: usize = 60_000;

/// Reserves rooms and writes the beginning of each.
fn fill(ring: &mut FrameRing, len: usize, values: &[&[u8]]) {
    let mut values = values.iter();
    let mut filled = 0;
    let count = values.len();
    ring.reserve(count, len, |room| {
        let value = values.next().unwrap();
        room[..value.len()].copy_from_slice(value);
        filled += 1;
    });
    assert_eq!(filled, count);
}

fn offer_and_finish(ring: &mut FrameRing) -> Vec<u8> {
    let frame = ring.next_waiting().unwrap();
    let bytes = ring.bytes(&frame)[MODERN_LEN..].to_vec();
    let number = ring.hand_over().unwrap();
    ring.finish(number).unwrap();
    bytes
}

#[test]
fn committed_frames_leave_unchanged_and_in_order() {
    let mut ring = FrameRing::new(SMALL).unwrap();
    for round in 0..20u8 {
        fill(&mut ring, LONG, &[b"aaaa", b"bbbb", b"cccc"]);
        ring.commit(4, OffloadMeta::PLAIN).unwrap();
        ring.commit(3, OffloadMeta::PLAIN).unwrap();
        // The third one is not committed. A short one follows.
        fill(&mut ring, 100, &[&[round; 5]]);
        ring.commit(5, OffloadMeta::PLAIN).unwrap();
        assert_eq!(offer_and_finish(&mut ring), b"aaaa");
        assert_eq!(offer_and_finish(&mut ring), b"bbb");
        assert_eq!(offer_and_finish(&mut ring), [round; 5]);
        assert!(ring.next_waiting().is_none());
    }
}

#[test]
fn frames_share_no_byte() {
    let mut ring = FrameRing::new(SMALL).unwrap();
    let mut rooms = Vec::new();
    for len in [LONG, 64, LONG, 64, LONG, 64, LONG, 64] {
        ring.reserve(1, len, |room| {
            rooms.push(room.as_ptr() as usize..room.as_ptr() as usize + room.len())
        });
        ring.commit(len, OffloadMeta::PLAIN).unwrap();
    }
    assert_eq!((ring.free(1), ring.free(LONG)), (0, 0));
    rooms.sort_by_key(|room| room.start);
    assert!(rooms.windows(2).all(|pair| pair[0].end + MODERN_LEN <= pair[1].start), "{rooms:?}");
    let region = ring.region();
    while let Some(frame) = ring.next_waiting() {
        assert!(region.contains(ring.device_range(&frame).unwrap()));
        ring.hand_over();
    }
}

#[test]
fn partial_checksum_is_in_virtio_net_header() {
    let mut ring = FrameRing::new(SMALL).unwrap();
    fill(&mut ring, 10, &[b"0123456789"]);
    let meta = OffloadMeta { checksum: Checksum::Partial { start: 34, offset: 16 }, gso: None };
    ring.commit(10, meta).unwrap();
    let frame = ring.next_waiting().unwrap();
    assert_eq!(frame.frame_len(), 10);
    assert_eq!(ring.bytes(&frame), b"\x01\0\0\0\0\0\x22\0\x10\0\0\x000123456789");
}

#[test]
fn tail_stops_at_oldest_incomplete_frame() {
    let mut ring = FrameRing::new(SMALL).unwrap();
    fill(&mut ring, LONG, &[&b"x"[..]; 3]);
    for _ in 0..3 {
        ring.commit(1, OffloadMeta::PLAIN).unwrap();
        ring.hand_over();
    }
    ring.finish(2).unwrap();
    ring.finish(1).unwrap();
    assert_eq!((ring.offered(), ring.free(LONG)), (3, 1));
    ring.finish(0).unwrap();
    assert_eq!((ring.offered(), ring.free(LONG)), (0, 4));
}

#[test]
fn finish_of_frame_not_offered_is_refused() {
    let mut ring = FrameRing::new(SMALL).unwrap();
    assert_eq!(ring.finish(0), Err(NotOffered { frame: 0 }), "nothing was ever committed");
    fill(&mut ring, 1, &[&b"x"[..]; 2]);
    ring.commit(1, OffloadMeta::PLAIN).unwrap();
    assert_eq!(ring.finish(0), Err(NotOffered { frame: 0 }), "it waits");
    ring.hand_over();
    ring.commit(1, OffloadMeta::PLAIN).unwrap();
    ring.hand_over();
    ring.finish(1).unwrap();
    assert_eq!(ring.finish(1), Err(NotOffered { frame: 1 }), "twice");
    assert_eq!(ring.finish(8), Err(NotOffered { frame: 8 }), "the same place, another round");
    assert_eq!(ring.finish(u32::MAX), Err(NotOffered { frame: u32::MAX }));
    assert_eq!(ring.offered(), 2);
}

#[test]
fn frame_that_does_not_fit_changes_nothing() {
    let mut ring = FrameRing::new(SMALL).unwrap();
    assert_eq!(ring.commit(1, OffloadMeta::PLAIN), Err(CommitError::NotReserved));
    fill(&mut ring, 100, &[b"x"]);
    let room = SHORT_ROOM - MODERN_LEN;
    let too_long = Err(CommitError::TooLong { len: room + 1, room });
    assert_eq!(ring.commit(room + 1, OffloadMeta::PLAIN), too_long);
    let gso = Some(Gso { kind: GsoKind::TcpV4, ecn: false, size: 1448 });
    let unfinished = OffloadMeta { checksum: Checksum::None, gso };
    assert!(matches!(ring.commit(1, unfinished), Err(CommitError::Meta(_))));
    assert_eq!((ring.waiting(), ring.free(1)), (0, 8));
    ring.commit(room, OffloadMeta::PLAIN).unwrap();
    assert_eq!(ring.commit(1, OffloadMeta::PLAIN), Err(CommitError::NotReserved));
    ring.reserve(1, LONG_ROOM, |_| panic!("there is no such room"));
    assert_eq!(ring.free(LONG_ROOM), 0);
}

#[test]
fn invalid_shape_is_refused() {
    for (frames, long) in [(0, 4), (8, 3), (1 << 16, 4), (8, 0)] {
        assert!(FrameRing::new(FrameShape { frames, long }).is_err(), "{frames} {long}");
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Commit { long: bool },
    HandOver,
    Finish { which: u32 },
    Withdraw,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => any::<bool>().prop_map(|long| Step::Commit { long }),
        4 => Just(Step::HandOver),
        4 => (0..12u32).prop_map(|which| Step::Finish { which }),
        1 => Just(Step::Withdraw),
    ]
}

/// Model of the ring: a queue of frames.
#[derive(Default)]
struct Oracle {
    frames: VecDeque<(bool, FrameState)>,
    first: u32,
}

impl Oracle {
    fn longs(&self) -> usize {
        self.frames.iter().filter(|(long, _)| *long).count()
    }

    fn commit(&mut self, long: bool) -> bool {
        let fits = self.frames.len() < 8 && (!long || self.longs() < 4);
        if fits {
            self.frames.push_back((long, FrameState::Filled));
        }
        fits
    }

    fn hand_over(&mut self) -> Option<u32> {
        let at = self.frames.iter().position(|(_, state)| *state == FrameState::Filled)?;
        self.frames[at].1 = FrameState::Offered;
        Some(self.first.wrapping_add(u32::try_from(at).unwrap()))
    }

    fn finish(&mut self, number: u32) -> bool {
        let at = number.wrapping_sub(self.first) as usize;
        match self.frames.get_mut(at) {
            Some((_, state)) if *state == FrameState::Offered => *state = FrameState::Finished,
            _ => return false,
        }
        while self.frames.front().is_some_and(|(_, state)| *state == FrameState::Finished) {
            self.frames.pop_front();
            self.first = self.first.wrapping_add(1);
        }
        true
    }

    fn withdraw(&mut self) -> usize {
        let before = self.frames.len();
        self.frames.retain(|(_, state)| *state != FrameState::Filled);
        before - self.frames.len()
    }
}

proptest! {
    /// Checks the cursors against a plain queue for any order of calls and completions, wraparound included.
    #[test]
    fn cursors_match_queue_model(
        start in prop_oneof![Just(0u32), (u32::MAX - 20)..=u32::MAX],
        steps in prop::collection::vec(step(), 0..200),
    ) {
        let mut ring = FrameRing::new(SMALL).unwrap();
        (ring.sock_head, ring.tap_head, ring.tail) = (start, start, start);
        (ring.long_head, ring.long_tail) = (start, start);
        let mut oracle = Oracle { first: start, ..Oracle::default() };
        for step in steps {
            match step {
                Step::Commit { long } => {
                    ring.reserve(1, if long { LONG } else { 1 }, |_| {});
                    prop_assert_eq!(ring.commit(1, OffloadMeta::PLAIN).is_ok(), oracle.commit(long));
                }
                Step::HandOver => prop_assert_eq!(ring.hand_over(), oracle.hand_over()),
                Step::Finish { which } => {
                    let number = oracle.first.wrapping_add(which).wrapping_sub(2);
                    prop_assert_eq!(ring.finish(number).is_ok(), oracle.finish(number));
                }
                Step::Withdraw => prop_assert_eq!(ring.withdraw(), oracle.withdraw()),
            }
            prop_assert_eq!(ring.free(1), 8 - oracle.frames.len());
            prop_assert_eq!(ring.free(LONG), (4 - oracle.longs()).min(8 - oracle.frames.len()));
        }
    }
}
