//! Crashes of a backend at any instruction, and its successor, on plain memory.

use std::cell::Cell;
use std::rc::Rc;

use proptest::prelude::*;
use ringfence_memory::LentSlice;

use super::*;
use crate::sync::Ordering;

/// Memory whose writer crashes after a number of writes: later writes have no effect.
#[derive(Clone)]
struct CrashingMemory {
    pages: RingPages,
    writes_left: Rc<Cell<usize>>,
}

impl CrashingMemory {
    fn can_store(&self) -> bool {
        let left = self.writes_left.get();
        self.writes_left.set(left.saturating_sub(1));
        left > 0
    }
}

impl RingMemory for CrashingMemory {
    fn load(&self, word: Word, order: Ordering) -> u32 {
        self.pages.load(word, order)
    }
    fn store(&self, word: Word, value: u32, order: Ordering) {
        if self.can_store() {
            self.pages.store(word, value, order);
        }
    }
    fn fetch(&self, offset: usize, into: &mut [u8]) {
        self.pages.fetch(offset, into);
    }
    /// Writes byte by byte, so that a crash may fall between any two bytes.
    fn put(&self, offset: usize, bytes: &[u8]) {
        for (at, byte) in bytes.iter().enumerate() {
            if self.can_store() {
                self.pages.put(offset + at, &[*byte]);
            }
        }
    }
}

fn pages() -> (LentSlice, RingPages) {
    let page = LentSlice::anonymous(4096);
    let ring = RingPages::new(page.clone(), 4096).unwrap();
    (page, ring)
}

/// Builds a request that carries its index in every byte pattern and differs from any response.
fn request(n: u32) -> [u8; 12] {
    let [low, high, ..] = n.to_le_bytes();
    [0x80 | low, 0x80, high, 0x80, 0x80, 0x80, 0x80, 0x80, low, high, 0, 0]
}

fn response(n: u32) -> [u8; 4] {
    let [low, high, ..] = n.to_le_bytes();
    [low, high, 0, 0]
}

/// Runs a backend until it crashes, if it does: consumes, answers and publishes in rounds.
fn serve<M: RingMemory>(
    back: &mut BackRing<M>,
    rounds: &[(u32, u32)],
    mut next: u32,
    alive: impl Fn() -> bool,
) {
    for &(take, answer) in rounds {
        let take = take.min(back.unconsumed().unwrap());
        for ahead in 0..take {
            let seen = back.request::<12>(ahead).into_unchecked();
            let index = back.consumed_index().wrapping_add(ahead);
            if alive() {
                assert_eq!(seen, request(index), "a request was overwritten");
            }
        }
        back.consume(take);
        for _ in 0..answer.min(back.owed()) {
            assert!(back.respond(&response(next)));
            next = next.wrapping_add(1);
        }
        back.publish();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Checks that the frontend gets one answer for each request, in order, wherever the first backend crashed. The
    /// second backend must see each request as the frontend wrote it.
    #[test]
    fn resume_after_crash_at_any_write_answers_each_request_once(
        start in prop_oneof![Just(0u32), any::<u32>(), Just(u32::MAX - 3)],
        sent in 1u32..=256,
        rounds in proptest::collection::vec((0u32..40, 0u32..40), 1..12),
        writes in 0usize..6000,
    ) {
        let (_shared, ring) = pages();
        let (_kept, record) = pages();
        let mut front = FrontRing::init(ring.clone(), NETIF_TX);
        front.set_indices(start);
        for n in 0..sent {
            prop_assert!(front.request(&request(start.wrapping_add(n))));
        }
        front.publish();
        // A backend that does not crash initialises the journal.
        drop(BackRing::attach_recorded(ring.clone(), record.clone(), NETIF_TX));
        let writes_left = Rc::new(Cell::new(writes));
        let crashing = |pages: &RingPages| CrashingMemory {
            pages: pages.clone(),
            writes_left: Rc::clone(&writes_left),
        };
        let mut first = BackRing::attach_recorded(crashing(&ring), crashing(&record), NETIF_TX);
        serve(&mut first, &rounds, start, || writes_left.get() > 0);
        drop(first);

        let mut second = BackRing::resume(ring, record, NETIF_TX).unwrap();
        let next = second.consumed_index();
        serve(&mut second, &[(256, 256)], next, || true);
        prop_assert_eq!(front.unconsumed().unwrap(), sent);
        for n in 0..sent {
            let answer = front.response::<4>(n).into_unchecked();
            prop_assert_eq!(answer, response(start.wrapping_add(n)));
        }
    }

    /// Checks that resuming neither panics nor reports more than the ring holds, for any header (XSA-39).
    #[test]
    fn xsa_39_resume_with_hostile_indices_is_refused(words: [u32; 4], recorded: u32) {
        let (shared, ring) = pages();
        let (kept, record) = pages();
        for (i, word) in words.iter().enumerate() {
            shared.store_u32(i * 4, *word, Ordering::Relaxed).unwrap();
        }
        drop(BackRing::attach_recorded(pages().1, record.clone(), NETIF_TX));
        kept.store_u32(8, recorded, Ordering::Relaxed).unwrap();
        let possible = recorded.wrapping_sub(words[2]) <= 256 && words[0].wrapping_sub(recorded) <= 256;
        match BackRing::resume(ring, record, NETIF_TX) {
            Ok(back) => {
                prop_assert!(possible);
                prop_assert!(back.unconsumed().unwrap() <= 256);
            }
            Err(_) => prop_assert!(!possible),
        }
    }
}

#[test]
fn crash_without_journal_before_publishing_overwrites_request() {
    // The journal exists for this reason: the successor would parse the response as a request.
    let (_shared, ring) = pages();
    let mut front = FrontRing::init(ring.clone(), NETIF_TX);
    front.request(&request(0));
    front.publish();
    let mut first = BackRing::attach(ring.clone(), NETIF_TX);
    first.consume(1);
    first.respond(&response(0));
    drop(first);
    let second = BackRing::attach(ring, NETIF_TX);
    assert_ne!(second.request::<12>(0).into_unchecked(), request(0));
}

#[test]
fn resume_with_moved_response_index_is_refused() {
    let (shared, ring) = pages();
    let (_kept, record) = pages();
    let _front = FrontRing::init(ring.clone(), NETIF_TX);
    drop(BackRing::attach_recorded(ring.clone(), record.clone(), NETIF_TX));
    shared.store_u32(8, 5, Ordering::Relaxed).unwrap();
    let refused = BackRing::resume(ring, record, NETIF_TX).unwrap_err();
    assert_eq!(refused, ResumeError::Responses { shared: 5, recorded: 0, count: 256 });
}

#[test]
fn resume_with_uninitialised_journal_continues_at_ring_indices() {
    let (shared, ring) = pages();
    let (_kept, record) = pages();
    let mut front = FrontRing::init(ring.clone(), NETIF_TX);
    for n in 0..3 {
        front.request(&request(n));
    }
    front.publish();
    shared.store_u32(8, 2, Ordering::Relaxed).unwrap();
    let back = BackRing::resume(ring.clone(), record, NETIF_TX).unwrap();
    assert_eq!((back.consumed_index(), back.unconsumed()), (2, Ok(1)));
    shared.store_u32(8, 1000, Ordering::Relaxed).unwrap();
    assert!(BackRing::resume(ring, pages().1, NETIF_TX).is_err());
}
