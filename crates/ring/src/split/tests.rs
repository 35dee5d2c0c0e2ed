use std::collections::VecDeque;

use proptest::prelude::*;
use ringfence_memory::{DeviceAccess, DeviceRange, LentSlice};
use ringfence_wire::virtio::{SplitLayout, UsedElement, flag};

use super::device::{DeviceQueue, TakenChain};
use super::*;

const ALL: QueueFeatures = QueueFeatures { indirect: true, event_idx: true, in_order: false };
const NONE: QueueFeatures = QueueFeatures { indirect: false, event_idx: false, in_order: false };
const IN_ORDER: QueueFeatures = QueueFeatures { in_order: true, ..ALL };

fn pair(size: u16, features: QueueFeatures) -> (DriverQueue, DeviceQueue) {
    let layout = SplitLayout::new(size).unwrap();
    let lent = LentSlice::anonymous(QueuePages::bytes(layout) + 16);
    let at = (0..16).find(|&at| lent.slice(at, 16).unwrap().is_aligned_to(16)).unwrap();
    let lent = lent.slice(at, QueuePages::bytes(layout)).unwrap();
    let memory = QueuePages::new(&lent, layout).unwrap();
    let driver = DriverQueue::new(memory.clone(), layout, features);
    (driver, DeviceQueue::new(memory, layout, features))
}

fn range(len: usize, access: DeviceAccess) -> DeviceRange {
    LentSlice::anonymous(len).device_range(0, len, access).unwrap()
}

fn readable(len: usize) -> DeviceRange {
    range(len, DeviceAccess::Read)
}

fn writable(len: usize) -> DeviceRange {
    range(len, DeviceAccess::Write)
}

/// Builds a queue with three writable buffers of 100 bytes in flight, and the device's requests.
fn three_in_flight(features: QueueFeatures) -> (DriverQueue, DeviceQueue, Vec<TakenChain>) {
    let (mut driver, mut device) = pair(8, features);
    for token in 0..3 {
        driver.push(&[writable(100)], token).unwrap();
    }
    let _ = driver.publish();
    let taken = std::iter::from_fn(|| device.take()).collect();
    (driver, device, taken)
}

#[test]
fn pushed_chain_arrives_unchanged() {
    for features in [ALL, NONE] {
        let (mut driver, mut device) = pair(8, features);
        for round in 0..100u32 {
            let ranges = [readable(12), readable(1000), writable(300)];
            driver.push(&ranges, round).unwrap();
            assert!(device.take().is_none(), "not published");
            let _ = driver.publish();
            let request = device.take().unwrap();
            assert_eq!(request.chain.len(), 3);
            for (descriptor, range) in request.chain.iter().zip(&ranges) {
                assert_eq!((descriptor.address, descriptor.len), (range.address(), range.len()));
                let writes = descriptor.flags & flag::WRITE != 0;
                assert_eq!(writes, range.access() == DeviceAccess::Write);
            }
            assert_eq!(driver.pop(), Ok(None));
            device.finish(request.head, 300);
            let _ = device.publish();
            assert_eq!(driver.pop(), Ok(Some(Used { token: round, len: 300 })));
        }
        assert_eq!(driver.free(), 8);
    }
}

#[test]
fn push_into_full_queue_is_refused_and_changes_nothing() {
    let (mut driver, mut device) = pair(4, NONE);
    driver.push(&[readable(1), readable(1), readable(1)], 0).unwrap();
    assert_eq!(driver.push(&[readable(1); 2], 1), Err(PushError::Full { wanted: 2, free: 1 }));
    driver.push(&[readable(1)], 2).unwrap();
    let _ = driver.publish();
    let heads: Vec<u16> = std::iter::from_fn(|| device.take()).map(|r| r.head).collect();
    assert_eq!(heads, [0, 3]);
    assert_eq!(driver.push(&[], 0), Err(PushError::Chain { len: 0 }));
    assert_eq!(driver.push(&[readable(1); 5], 0), Err(PushError::Chain { len: 5 }));
    assert_eq!(driver.push(&[writable(1), readable(1)], 0), Err(PushError::Order));
}

#[test]
fn indirect_chain_takes_one_entry() {
    let (mut driver, mut device) = pair(4, ALL);
    for token in 0..4 {
        driver.push(&[readable(1), readable(2)], token).unwrap();
    }
    assert_eq!(driver.free(), 0);
    let _ = driver.publish();
    let lens: Vec<usize> = std::iter::from_fn(|| device.take()).map(|r| r.chain.len()).collect();
    assert_eq!(lens, [2; 4]);
}

#[test]
fn forged_used_index_beyond_in_flight_is_refused() {
    let (mut driver, mut device, _) = three_in_flight(ALL);
    let _ = device.publish_index(4);
    assert_eq!(driver.pop(), Err(QueueFault::Overrun { announced: 4, in_flight: 3 }));
    let (mut driver, mut device, _) = three_in_flight(ALL);
    // Backwards.
    let _ = device.publish_index(u16::MAX);
    assert_eq!(driver.pop(), Err(QueueFault::Overrun { announced: u16::MAX, in_flight: 3 }));
}

#[test]
fn forged_used_id_beyond_table_is_refused() {
    for id in [8, 0x1_0000, u32::MAX] {
        let (mut driver, mut device, _) = three_in_flight(ALL);
        device.put_used(UsedElement { id, len: 0 }, 1);
        let _ = device.publish();
        assert_eq!(driver.pop(), Err(QueueFault::UnknownId { id, size: 8 }));
    }
}

#[test]
fn forged_second_use_of_buffer_is_refused() {
    let (mut driver, mut device, taken) = three_in_flight(ALL);
    device.finish(taken[1].head, 1);
    device.finish(taken[1].head, 1);
    let _ = device.publish();
    assert_eq!(driver.pop(), Ok(Some(Used { token: 1, len: 1 })));
    assert_eq!(driver.pop(), Err(QueueFault::NotInFlight { id: taken[1].head }));
}

#[test]
fn forged_use_of_unpublished_buffer_is_refused() {
    let (mut driver, mut device, taken) = three_in_flight(ALL);
    let next = taken[2].head + 1;
    driver.push(&[writable(100)], 3).unwrap();
    device.finish(next, 0);
    let _ = device.publish();
    assert_eq!(driver.pop(), Err(QueueFault::NotInFlight { id: next }));
}

#[test]
fn forged_used_id_in_middle_of_chain_is_refused() {
    let (mut driver, mut device) = pair(8, NONE);
    driver.push(&[readable(1), writable(1)], 0).unwrap();
    let _ = driver.publish();
    let head = device.take().unwrap().head;
    device.finish(head + 1, 0);
    let _ = device.publish();
    assert_eq!(driver.pop(), Err(QueueFault::NotInFlight { id: head + 1 }));
}

#[test]
fn forged_length_beyond_buffer_is_refused() {
    let (mut driver, mut device, taken) = three_in_flight(ALL);
    device.finish(taken[0].head, 101);
    let _ = device.publish();
    let id = taken[0].head;
    assert_eq!(driver.pop(), Err(QueueFault::Length { id, len: 101, capacity: 100 }));
    // Readable bytes do not count.
    let (mut driver, mut device) = pair(8, ALL);
    driver.push(&[readable(100), writable(10)], 0).unwrap();
    let _ = driver.publish();
    let head = device.take().unwrap().head;
    device.finish(head, 11);
    let _ = device.publish();
    assert!(matches!(driver.pop(), Err(QueueFault::Length { capacity: 10, .. })));
}

/// Checks virtio 1.x, 2.7.8: one element for a batch; the buffers before the last were filled.
#[test]
fn in_order_element_covers_batch() {
    let (mut driver, mut device, taken) = three_in_flight(IN_ORDER);
    device.finish_batch(taken[2].head, 40, 3);
    let _ = device.publish();
    for (token, len) in [(0, 100), (1, 100), (2, 40)] {
        assert_eq!(driver.pop(), Ok(Some(Used { token, len })));
    }
    assert_eq!(driver.pop(), Ok(None));
}

#[test]
fn in_order_descriptors_rotate_through_table() {
    let (mut driver, mut device) = pair(4, QueueFeatures { indirect: false, ..IN_ORDER });
    let mut next = 0;
    for round in 0..50 {
        let len = 1 + round % 2;
        driver.push(&vec![readable(1); len], 0).unwrap();
        let _ = driver.publish();
        let request = device.take().unwrap();
        assert_eq!(request.head, next);
        next = (next + u16::try_from(len).unwrap()) % 4;
        device.finish(request.head, 0);
        let _ = device.publish();
        assert!(driver.pop().unwrap().is_some());
    }
}

#[test]
fn forged_batch_beyond_used_index_is_refused() {
    let (mut driver, mut device, taken) = three_in_flight(IN_ORDER);
    device.finish_batch(taken[2].head, 0, 2);
    let _ = device.publish();
    assert_eq!(driver.pop(), Err(QueueFault::Batch { batch: 3, announced: 2 }));
}

#[test]
fn kicks_and_interrupts_are_sent_only_when_armed() {
    for features in [ALL, NONE] {
        let (mut driver, mut device) = pair(8, features);
        assert!(!device.arm());
        driver.push(&[readable(1)], 0).unwrap();
        assert!(driver.publish(), "the device sleeps");
        let first = device.take().unwrap();
        device.suppress();
        driver.push(&[readable(1)], 1).unwrap();
        assert!(!driver.publish(), "the device is at work");
        assert!(device.arm(), "it came meanwhile");
        let second = device.take().unwrap();
        device.finish(first.head, 0);
        assert!(!device.publish(), "the driver does not sleep");
        assert_eq!(driver.arm(2), Ok(!features.event_idx), "the second is not used yet");
        device.finish(second.head, 0);
        assert!(device.publish());
        driver.suppress();
        assert!(driver.pop().unwrap().is_some() && driver.pop().unwrap().is_some());
    }
}

#[test]
fn queue_memory_too_short_or_unaligned_is_rejected() {
    let layout = SplitLayout::new(8).unwrap();
    let lent = LentSlice::anonymous(QueuePages::bytes(layout) + 32);
    let at = (0..16).find(|&at| lent.slice(at, 16).unwrap().is_aligned_to(16)).unwrap();
    let bytes = QueuePages::bytes(layout);
    assert!(QueuePages::new(&lent.slice(at, bytes - 1).unwrap(), layout).is_err());
    assert!(QueuePages::new(&lent.slice(at + 8, bytes).unwrap(), layout).is_err());
    assert!(QueuePages::new(&lent.slice(at, bytes).unwrap(), layout).is_ok());
}

#[derive(Clone, Debug)]
enum Step {
    Push(usize),
    Publish,
    Finish { which: usize },
    Pop,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (1..=CHAIN_MAX).prop_map(Step::Push),
        2 => Just(Step::Publish),
        3 => any::<usize>().prop_map(|which| Step::Finish { which }),
        3 => Just(Step::Pop),
    ]
}

proptest! {
    /// Checks that buffers return exactly once with their tokens, in any order of use, also where indices wrap. In
    /// the end every descriptor is free.
    #[test]
    fn correct_device_returns_every_buffer_once(
        features in prop::sample::select(vec![ALL, NONE, IN_ORDER]),
        start in prop_oneof![Just(0u16), 65500u16..=65535],
        steps in prop::collection::vec(step(), 0..300),
    ) {
        let (mut driver, mut device) = pair(8, features);
        driver.start_at(start);
        device.start_at(start);
        let (mut token, mut taken, mut finished) = (0u32, Vec::new(), VecDeque::new());
        let mut owed = VecDeque::new();
        for step in steps {
            match step {
                Step::Push(len) => {
                    let wanted = if features.indirect { 1 } else { len };
                    let fits = wanted <= usize::from(driver.free());
                    prop_assert_eq!(driver.push(&vec![writable(10); len], token).is_ok(), fits);
                    if fits {
                        owed.push_back(token);
                        token += 1;
                    }
                }
                Step::Publish => {
                    let _ = driver.publish();
                    while let Some(request) = device.take() {
                        taken.push((request, owed.pop_front().unwrap()));
                    }
                }
                Step::Finish { which } if !taken.is_empty() => {
                    let at = if features.in_order { 0 } else { which % taken.len() };
                    let (request, token) = taken.remove(at);
                    let len = request.capacity() / 2;
                    device.finish(request.head, len);
                    let _ = device.publish();
                    finished.push_back(Used { token, len });
                }
                Step::Finish { .. } => {}
                Step::Pop => prop_assert_eq!(driver.pop(), Ok(finished.pop_front())),
            }
            prop_assert!(usize::from(driver.in_flight()) == taken.len() + finished.len());
        }
        let _ = driver.publish();
        taken.extend(std::iter::from_fn(|| device.take()).map(|request| (request, 0)));
        taken.iter().for_each(|(request, _)| device.finish(request.head, 0));
        let _ = device.publish();
        while driver.pop().unwrap().is_some() {}
        prop_assert_eq!((driver.free(), driver.in_flight()), (8, 0));
    }

    /// Checks a device that writes any used ring. No buffer returns twice or without being in flight, and no length
    /// exceeds the buffer. The first broken rule ends the test.
    #[test]
    fn hostile_device_is_rejected_or_bounded(
        features in prop::sample::select(vec![ALL, NONE, IN_ORDER]),
        elements in prop::collection::vec((prop_oneof![0u32..10, any::<u32>()],
            prop_oneof![0u32..120, any::<u32>()]), 8),
        index in prop_oneof![0u16..10, any::<u16>()],
    ) {
        let (mut driver, mut device, taken) = three_in_flight(features);
        for (id, len) in elements {
            device.put_used(UsedElement { id, len }, 1);
        }
        let _ = device.publish_index(index);
        let mut tokens = Vec::new();
        while let Ok(Some(used)) = driver.pop() {
            prop_assert!(used.len <= 100 && (used.token as usize) < taken.len());
            prop_assert!(!tokens.contains(&used.token), "twice");
            tokens.push(used.token);
        }
        prop_assert!(tokens.len() <= 3);
    }
}
