//! Rings on plain memory without another domain: arithmetic, bounds, and an oracle.

use std::collections::VecDeque;

use proptest::prelude::*;
use ringfence_memory::LentSlice;

use super::*;

fn ring() -> (LentSlice, FrontRing<RingPages>, BackRing<RingPages>) {
    let page = LentSlice::anonymous(4096);
    let pages = RingPages::new(page.clone(), 4096).unwrap();
    let front = FrontRing::init(pages.clone(), NETIF_TX);
    (page, front, BackRing::attach(pages, NETIF_TX))
}

#[test]
fn ring_layouts_match_header() {
    assert_eq!(RingLayout::new(4096, 12, 4, 4), Some(NETIF_TX));
    assert_eq!(RingLayout::new(4096, 8, 8, 4), Some(NETIF_RX));
    let blkif = |pages: usize| RingLayout::new(pages * 4096, 112, 16, 8).map(RingLayout::count);
    assert_eq!([1, 2, 4, 8, 16].map(blkif), [32, 64, 128, 256, 512].map(Some));
    assert_eq!(RingLayout::new(4096, 108, 12, 4).map(RingLayout::count), Some(32));
    assert_eq!(RingLayout::new(4096, 16, 12, 4).map(RingLayout::count), Some(128));
    assert_eq!(RingLayout::new(64, 12, 4, 4), None);
}

#[test]
fn fresh_ring_header_has_initial_words() {
    let (page, _front, _back) = ring();
    let word = |at| page.load_u32(at, core::sync::atomic::Ordering::Relaxed).unwrap();
    assert_eq!([word(0), word(4), word(8), word(12)], [0, 1, 0, 1]);
}

#[test]
fn xsa_39_producer_beyond_ring_is_fatal() {
    let (page, _front, back) = ring();
    page.store_u32(0, 257, core::sync::atomic::Ordering::Relaxed).unwrap();
    assert_eq!(back.unconsumed(), Err(ProducerOverflow { announced: 257, count: 256 }));
    page.store_u32(0, u32::MAX, core::sync::atomic::Ordering::Relaxed).unwrap();
    assert!(back.unconsumed().is_err());
}

#[test]
fn decremented_producer_gives_no_requests() {
    let (page, mut front, mut back) = ring();
    for _ in 0..10 {
        assert!(front.request(&[0; 12]));
    }
    front.publish();
    back.consume(back.unconsumed().unwrap());
    page.store_u32(0, 5, core::sync::atomic::Ordering::Relaxed).unwrap();
    assert_eq!(back.unconsumed(), Ok(0));
}

#[test]
fn responses_beyond_requests_are_refused() {
    let (page, mut front, _back) = ring();
    front.request(&[0; 12]);
    front.publish();
    page.store_u32(8, 2, core::sync::atomic::Ordering::Relaxed).unwrap();
    assert_eq!(front.unconsumed(), Err(ProducerOverflow { announced: 2, count: 1 }));
}

#[test]
fn response_without_request_is_refused() {
    let (_page, _front, mut back) = ring();
    assert!(!back.respond(&[1; 4]));
}

#[test]
fn attach_continues_at_first_unanswered_request() {
    let (page, mut front, mut back) = ring();
    for i in 0..6u8 {
        front.request(&[i; 12]);
    }
    front.publish();
    back.consume(4);
    for _ in 0..2 {
        back.respond(&[0; 4]);
    }
    back.publish();
    let again = BackRing::attach(RingPages::new(page, 4096).unwrap(), NETIF_TX);
    assert_eq!(again.unconsumed(), Ok(4));
    assert_eq!(again.request::<12>(0).into_unchecked(), [2; 12]);
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Request(u8),
    FrontPublish,
    Consume,
    Respond,
    BackPublish,
    Reap,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        any::<u8>().prop_map(Op::Request),
        Just(Op::FrontPublish),
        Just(Op::Consume),
        Just(Op::Respond),
        Just(Op::BackPublish),
        Just(Op::Reap),
    ];
    proptest::collection::vec(op, 0..3000)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Compares both ends with queues of the standard library, from any start index, including wrap-around.
    #[test]
    fn ring_from_any_index_matches_two_queues(start in prop_oneof![Just(0u32), any::<u32>(), Just(u32::MAX - 3)], ops in ops()) {
        let (_page, mut front, mut back) = ring();
        front.start_at(start);
        back = BackRing::attach(back.into_memory(), NETIF_TX);
        let (mut written, mut published) = (VecDeque::new(), VecDeque::new());
        let (mut answers, mut visible) = (VecDeque::new(), VecDeque::new());
        let (mut consumed, mut in_ring) = (VecDeque::new(), 0u32);
        for op in ops {
            match op {
                Op::Request(b) => {
                    prop_assert_eq!(front.free(), 256 - in_ring);
                    if front.request(&[b; 12]) { written.push_back(b); in_ring += 1; }
                }
                Op::FrontPublish => { front.publish(); published.append(&mut written); }
                Op::Consume => {
                    prop_assert_eq!(back.unconsumed().unwrap() as usize, published.len());
                    if let Some(b) = published.pop_front() {
                        prop_assert_eq!(back.request::<12>(0).into_unchecked(), [b; 12]);
                        back.consume(1);
                        consumed.push_back(b);
                    }
                }
                Op::Respond => if let Some(b) = consumed.pop_front() {
                    prop_assert!(back.respond(&[b; 4]));
                    answers.push_back(b);
                } else {
                    prop_assert!(!back.respond(&[0; 4]));
                },
                Op::BackPublish => { back.publish(); visible.append(&mut answers); }
                Op::Reap => {
                    prop_assert_eq!(front.unconsumed().unwrap() as usize, visible.len());
                    if let Some(b) = visible.pop_front() {
                        prop_assert_eq!(front.response::<4>(0).into_unchecked(), [b; 4]);
                        front.consume(1);
                        in_ring -= 1;
                    }
                }
            }
        }
    }

    /// Checks that a consumer is notified exactly when the producer passes its event index.
    #[test]
    fn passes_event_is_true_only_after_event_index(old: u32, step in 0u32..256, ahead in 1u32..256) {
        let event = old.wrapping_add(ahead);
        prop_assert_eq!(passes_event(old, old.wrapping_add(step), event), step >= ahead);
    }

    /// Checks that neither end panics or reports more entries than the ring holds, for any header words.
    #[test]
    fn hostile_header_words_give_bounded_counts(words: [u32; 4], sent in 0u32..=256) {
        let (page, mut front, mut back) = ring();
        for _ in 0..sent { front.request(&[7; 12]); }
        front.publish();
        for (i, w) in words.iter().enumerate() {
            page.store_u32(i * 4, *w, core::sync::atomic::Ordering::Relaxed).unwrap();
        }
        if let Ok(n) = back.unconsumed() { prop_assert!(n <= 256); }
        if let Ok(n) = front.unconsumed() { prop_assert!(n <= sent); }
        let _ = back.final_check();
        let _ = front.final_check();
        back.publish();
        front.publish();
    }
}

impl<M: RingMemory> FrontRing<M> {
    fn start_at(&mut self, index: u32) {
        self.set_indices(index);
    }
}
