//! Answers in any order, and crashes at any store.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::rc::Rc;

use proptest::prelude::*;
use ringfence_memory::LentSlice;

use super::*;
use crate::{FrontRing, RingPages};

const PAGES: usize = 2;

fn layout() -> RingLayout {
    RingLayout::new(PAGES * 4096, 112, 16, 8).unwrap()
}

fn pages() -> RingPages {
    RingPages::paged((0..PAGES).map(|_| LentSlice::anonymous(4096)).collect()).unwrap()
}

/// Builds a request that repeats its id in every byte.
fn request(id: u8) -> [u8; 112] {
    [id; 112]
}

fn response(id: u8) -> [u8; 16] {
    [id; 16]
}

/// Memory whose writer crashes after a number of stores, in the middle of the last one.
#[derive(Clone)]
struct CrashingMemory {
    memory: RingPages,
    left: Rc<Cell<usize>>,
}

impl CrashingMemory {
    fn can_store(&self) -> bool {
        self.left.set(self.left.get().saturating_sub(1));
        self.left.get() > 0
    }
}

impl RingMemory for CrashingMemory {
    fn load(&self, word: Word, order: Ordering) -> u32 {
        self.memory.load(word, order)
    }
    fn store(&self, word: Word, value: u32, order: Ordering) {
        if self.can_store() {
            self.memory.store(word, value, order);
        }
    }
    fn fetch(&self, offset: usize, into: &mut [u8]) {
        self.memory.fetch(offset, into);
    }
    fn put(&self, offset: usize, bytes: &[u8]) {
        let before = self.left.get();
        if self.can_store() {
            self.memory.put(offset, bytes);
        } else if before == 1 && bytes.len() > 4 {
            self.memory.put(offset, &bytes[..bytes.len() / 2]);
        }
    }
}

/// Consumes the responses and checks that each is whole and answers a new request.
fn reap(front: &mut FrontRing<RingPages>, answered: &mut BTreeSet<u8>) {
    for _ in 0..front.unconsumed().unwrap() {
        let bytes: [u8; 16] = front.response(0).into_unchecked();
        assert_eq!(bytes, response(bytes[0]), "a response is whole");
        assert!(answered.insert(bytes[0]), "one response a request");
        front.consume(1);
    }
}

/// Consumes all requests and checks that each is whole.
fn take_all<M: RingMemory>(ring: &mut AnyOrderRing<M>, requests: &mut Vec<(u32, u8)>) {
    for _ in 0..ring.unconsumed().unwrap() {
        let (index, bytes) = ring.take::<112>();
        let bytes = bytes.into_unchecked();
        assert_eq!(bytes, request(bytes[0]), "a request is whole");
        requests.push((index, bytes[0]));
    }
}

/// Answers the `nth` of the consumed requests and updates the indices of the others.
fn answer<M: RingMemory>(ring: &mut AnyOrderRing<M>, requests: &mut Vec<(u32, u8)>, nth: usize) {
    let (index, id) = requests.swap_remove(nth);
    let oldest = ring.oldest();
    assert!(ring.answer(index, &response(id)));
    if let Some(moved) = requests.iter_mut().find(|(at, _)| *at == oldest) {
        moved.0 = index;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn crash_at_any_store_leaves_each_request_once(
        count in 1u8..60,
        first in 1u8..60,
        order in prop::collection::vec(any::<prop::sample::Index>(), 60),
        crash_after in 1usize..200,
    ) {
        let memory = pages();
        let mut front = FrontRing::init(memory.clone(), layout());
        let mut answered = BTreeSet::new();
        let crashing = CrashingMemory { memory: memory.clone(), left: Rc::new(Cell::new(crash_after)) };
        let (mut ring, fresh) = AnyOrderRing::attach(crashing.clone(), layout(), 16).unwrap();
        prop_assert_eq!(fresh, AttachState { unanswered: 0, finished: false });
        let mut requests = vec![];
        // Some requests come before the first answer, the others between answers.
        let mut next = 1..=count;
        for id in next.by_ref().take(first.into()) {
            prop_assert!(front.request(&request(id)));
        }
        front.publish();
        for pick in order {
            take_all(&mut ring, &mut requests);
            if crashing.left.get() == 0 || requests.is_empty() {
                break;
            }
            let nth = pick.index(requests.len());
            answer(&mut ring, &mut requests, nth);
            reap(&mut front, &mut answered);
            if crashing.left.get() == 0 {
                break;
            }
            if let Some(id) = next.next() {
                prop_assert!(front.request(&request(id)));
                front.publish();
            }
        }
        let posted: BTreeSet<u8> = (1..next.next().unwrap_or(count + 1)).collect();
        let (mut successor, left) = AnyOrderRing::attach(memory, layout(), 16).unwrap();
        reap(&mut front, &mut answered);
        prop_assert_eq!(left.unanswered as usize, posted.len() - answered.len());
        let mut requests = vec![];
        take_all(&mut successor, &mut requests);
        while !requests.is_empty() {
            answer(&mut successor, &mut requests, 0);
        }
        reap(&mut front, &mut answered);
        prop_assert_eq!(answered, posted);
    }

    #[test]
    fn attach_with_hostile_journal_stays_bounded(
        journal in prop::collection::vec(0u8..4, 28),
        stage in 0..4,
        req_prod in 0u32..80,
    ) {
        let memory = pages();
        FrontRing::init(memory.clone(), layout());
        memory.put(STAGE, if stage < 2 { &MOVING } else { &ANSWERING });
        memory.put(JOURNAL, &journal[..JOURNAL_BYTES]);
        memory.store(Word::ReqProd, req_prod, Ordering::Relaxed);
        if let Ok((ring, left)) = AnyOrderRing::attach(memory, layout(), 16) {
            prop_assert!(ring.unconsumed().unwrap() <= 64);
            prop_assert!(left.unanswered + u32::from(left.finished) <= req_prod);
        }
    }
}

#[test]
fn answer_without_unanswered_request_is_refused() {
    let memory = pages();
    let mut front = FrontRing::init(memory.clone(), layout());
    let (mut ring, _) = AnyOrderRing::attach(memory, layout(), 16).unwrap();
    assert!(!ring.answer(0, &response(1)));
    front.request(&request(1));
    front.publish();
    let (index, _) = ring.take::<112>();
    assert!(!ring.answer(index.wrapping_add(1), &response(1)));
    assert!(!ring.answer(index.wrapping_sub(1), &response(1)));
    assert!(!ring.answer(index, &[0; 8]));
    assert!(ring.answer(index, &response(1)));
    assert!(ring.notify_due());
    assert!(!ring.notify_due());
    assert!(!ring.answer(index, &response(1)));
}

#[test]
fn ring_of_sixteen_pages_behaves_as_one_ring() {
    let pages = (0..16).map(|_| LentSlice::anonymous(4096)).collect();
    let memory = RingPages::paged(pages).unwrap();
    let layout = RingLayout::new(16 * 4096, 112, 16, 8).unwrap();
    assert_eq!(layout.count(), 512);
    let mut front = FrontRing::init(memory.clone(), layout);
    let (mut ring, _) = AnyOrderRing::attach(memory, layout, 16).unwrap();
    for round in 0..3 {
        for id in 0..512usize {
            let id = u8::try_from((id * 7 + round) % 251).unwrap();
            assert!(front.request(&request(id)));
        }
        front.publish();
        let mut requests = vec![];
        take_all(&mut ring, &mut requests);
        for (id, (_, found)) in requests.iter().enumerate() {
            assert_eq!(usize::from(*found), (id * 7 + round) % 251);
        }
        for (index, id) in requests {
            ring.answer(index, &response(id));
        }
        for _ in 0..front.unconsumed().unwrap() {
            let bytes: [u8; 16] = front.response(0).into_unchecked();
            assert_eq!(bytes, [bytes[0]; 16]);
            front.consume(1);
        }
    }
    assert!(RingPages::paged(vec![]).is_err());
    assert!(RingPages::paged(vec![LentSlice::anonymous(4000)]).is_err());
}
