use proptest::prelude::*;
use ringfence_memory::{DeviceAccess, DeviceRange, LentSlice};
use ringfence_wire::virtio::SplitLayout;

use super::*;
use crate::split::{DriverQueue, QueuePages};

const ALL: QueueFeatures = QueueFeatures { indirect: true, event_idx: true, in_order: false };
const NONE: QueueFeatures = QueueFeatures { indirect: false, event_idx: false, in_order: false };

fn aligned(len: usize) -> LentSlice {
    let lent = LentSlice::anonymous(len + 16);
    let at = (0..16).find(|&at| lent.slice(at, 16).unwrap().is_aligned_to(16)).unwrap();
    lent.slice(at, len).unwrap()
}

fn tables(lent: &LentSlice, layout: SplitLayout, event_idx: bool) -> QueueTables {
    let from = |offset| lent.slice(offset, lent.len() - offset).unwrap();
    let tables = [0, layout.avail_flags(), layout.used_flags()].map(from);
    QueueTables::new(layout.size().into(), event_idx, tables.each_ref()).unwrap()
}

/// Driver and backend of one queue, and a function that finds its indirect tables.
struct Pair {
    driver: DriverQueue,
    backend: BackendQueue,
    lent: LentSlice,
}

impl Pair {
    fn new(size: u16, features: QueueFeatures) -> Pair {
        let layout = SplitLayout::new(size).unwrap();
        let lent = aligned(QueuePages::bytes(layout));
        let driver = DriverQueue::new(QueuePages::new(&lent, layout).unwrap(), layout, features);
        let backend = BackendQueue::new(tables(&lent, layout, features.event_idx), features, 0);
        Pair { driver, backend, lent }
    }

    fn take(&mut self) -> Result<Option<(u16, Vec<Descriptor>)>, DriverFault> {
        let mut chain = Vec::new();
        let base = self.lent.device_range(0, 1, DeviceAccess::Read).unwrap().address();
        let memory = |address: u64, len| {
            let offset = usize::try_from(address.checked_sub(base)?).ok()?;
            self.lent.slice(offset, len).ok()
        };
        let head = self.backend.take(memory, &mut chain)?;
        Ok(head.map(|head| (head, chain)))
    }
}

fn range(len: usize, access: DeviceAccess) -> DeviceRange {
    LentSlice::anonymous(len).device_range(0, len, access).unwrap()
}

#[test]
fn chains_of_a_driver_arrive_and_return() {
    for features in [ALL, NONE] {
        let mut pair = Pair::new(8, features);
        for round in 0..70_000_u32 {
            let ranges = [range(12, DeviceAccess::Read), range(300, DeviceAccess::Write)];
            pair.driver.push(&ranges, round).unwrap();
            let _ = pair.driver.publish();
            let (head, chain) = pair.take().unwrap().unwrap();
            assert_eq!(chain.iter().map(|link| link.len).collect::<Vec<_>>(), [12, 300]);
            assert_eq!(pair.take(), Ok(None));
            pair.backend.untake([head]);
            assert_eq!(pair.take().unwrap().unwrap().0, head);
            pair.backend.finish(head, 7);
            let _ = pair.backend.publish();
            let used = pair.driver.pop().unwrap().unwrap();
            assert_eq!((used.token, used.len), (round, 7));
        }
    }
}

#[test]
fn notifications_are_requested_and_suppressed_at_both_ends() {
    for features in [ALL, NONE] {
        let mut pair = Pair::new(8, features);
        assert_eq!(pair.backend.arm(0), Ok(false));
        pair.driver.push(&[range(1, DeviceAccess::Read)], 0).unwrap();
        assert!(pair.driver.publish(), "the backend waits");
        assert_eq!((pair.backend.arm(0), pair.backend.arm(1)), (Ok(true), Ok(false)));
        let (head, _) = pair.take().unwrap().unwrap();
        pair.backend.suppress();
        pair.driver.push(&[range(1, DeviceAccess::Read)], 1).unwrap();
        assert!(!pair.driver.publish(), "the backend polls");
        pair.driver.suppress();
        pair.backend.finish(head, 0);
        assert!(!pair.backend.publish(), "the driver polls");
        pair.driver.pop().unwrap();
        assert_eq!(pair.driver.arm(1), Ok(false));
        let (head, _) = pair.take().unwrap().unwrap();
        pair.backend.finish(head, 0);
        assert!(pair.backend.publish(), "the driver waits");
        assert!(!pair.backend.publish(), "nothing new");
    }
}

#[test]
fn queue_continues_in_other_tables() {
    let mut pair = Pair::new(8, NONE);
    for round in 0..3 {
        pair.driver.push(&[range(1, DeviceAccess::Read)], round).unwrap();
    }
    let _ = pair.driver.publish();
    let (head, _) = pair.take().unwrap().unwrap();
    let moved = tables(&pair.lent, SplitLayout::new(8).unwrap(), false);
    pair.backend.move_to(moved.clone());
    pair.backend.finish(head, 0);
    let _ = pair.backend.publish();
    assert_eq!(pair.driver.pop().unwrap().unwrap().token, 0);
    pair.backend = BackendQueue::new(moved, NONE, pair.backend.next_available());
    assert_eq!(pair.take().unwrap().unwrap().0, 1);
}

/// Queue of 8 entries whose driver is the test: it writes descriptors and makes `head` available.
fn written(features: QueueFeatures, links: &[(u16, Descriptor)], head: u16) -> Pair {
    let layout = SplitLayout::new(8).unwrap();
    let pair = Pair::new(8, features);
    for (at, descriptor) in links {
        pair.lent.copy_from(usize::from(*at) * 16, &descriptor.to_bytes()).unwrap();
    }
    pair.lent.store_u16(layout.avail_entry(0), head, Ordering::Relaxed).unwrap();
    pair.lent.store_u16(layout.avail_idx(), 1, Ordering::Relaxed).unwrap();
    pair
}

fn link(len: u32, flags: u16, next: u16) -> Descriptor {
    Descriptor { address: 0, len, flags, next }
}

#[test]
fn each_rule_of_the_driver_has_its_fault() {
    let (next, write) = (flag::NEXT, flag::WRITE);
    let indirect = |len, flags| link(len, flag::INDIRECT | flags, 0);
    for (features, links, head, fault) in [
        (NONE, vec![], 8, DriverFault::Index { index: 8, len: 8 }),
        (NONE, vec![(0, link(1, next, 9))], 0, DriverFault::Index { index: 9, len: 8 }),
        (NONE, vec![(0, link(1, next, 0))], 0, DriverFault::Links { limit: 8 }),
        (NONE, vec![(0, link(1, next | write, 1)), (1, link(1, 0, 0))], 0, DriverFault::Order),
        (NONE, vec![(0, indirect(16, 0))], 0, DriverFault::Indirect { len: 16 }),
        (ALL, vec![(0, indirect(0, 0))], 0, DriverFault::Indirect { len: 0 }),
        (ALL, vec![(0, indirect(17, 0))], 0, DriverFault::Indirect { len: 17 }),
        (ALL, vec![(0, indirect(16, next))], 0, DriverFault::Indirect { len: 16 }),
        (ALL, vec![(0, indirect(1 << 20, 0))], 0, DriverFault::Indirect { len: 1 << 20 }),
        (ALL, vec![(0, indirect(16, 0))], 0, DriverFault::Unmapped { address: 0 }),
        (
            ALL,
            vec![(0, link(1, next, 1)), (1, indirect(16, 0))],
            0,
            DriverFault::Unmapped { address: 0 },
        ),
        (
            ALL,
            vec![(0, link(1, next, 1)), (1, indirect(16, next))],
            0,
            DriverFault::Indirect { len: 16 },
        ),
        (
            NONE,
            vec![(0, link(1, next, 1)), (1, indirect(16, 0))],
            0,
            DriverFault::Indirect { len: 16 },
        ),
    ] {
        assert_eq!(written(features, &links, head).take(), Err(fault));
    }
}

/// Takes the chain of an ordinary descriptor and an indirect table with these two descriptors.
fn behind_ordinary_one(table: [Descriptor; 2]) -> Result<Vec<u32>, DriverFault> {
    // The table lies in the queue's own descriptors 4 and 5.
    let links = [(0, link(1, flag::NEXT, 1)), (4, table[0]), (5, table[1])];
    let mut pair = written(ALL, &links, 0);
    let base = pair.lent.device_range(0, 1, DeviceAccess::Read).unwrap().address();
    // The flag about writing counts in the table alone.
    let flags = flag::INDIRECT | flag::WRITE;
    let of_table = Descriptor { address: base + 64, ..link(32, flags, 0) };
    pair.lent.copy_from(16, &of_table.to_bytes()).unwrap();
    pair.take().map(|taken| taken.unwrap().1.iter().map(|link| link.len).collect())
}

#[test]
fn indirect_table_behind_ordinary_descriptors_continues_their_chain() {
    let (next, write) = (flag::NEXT, flag::WRITE);
    assert_eq!(behind_ordinary_one([link(2, next, 1), link(3, write, 0)]), Ok(vec![1, 2, 3]));
    assert_eq!(
        behind_ordinary_one([link(2, next, 1), link(16, flag::INDIRECT, 0)]),
        Err(DriverFault::Indirect { len: 16 })
    );
    assert_eq!(
        behind_ordinary_one([link(2, next, 1), link(3, next, 0)]),
        Err(DriverFault::Links { limit: 3 })
    );
    assert_eq!(
        behind_ordinary_one([link(2, next, 2), link(3, 0, 0)]),
        Err(DriverFault::Index { index: 2, len: 2 })
    );
}

#[test]
fn available_index_too_far_ahead_is_a_fault() {
    let mut pair = Pair::new(8, NONE);
    let layout = SplitLayout::new(8).unwrap();
    pair.lent.store_u16(layout.avail_idx(), 9, Ordering::Relaxed).unwrap();
    let fault = DriverFault::Overrun { announced: 9, size: 8 };
    assert_eq!((pair.backend.arm(0), pair.take()), (Err(fault), Err(fault)));
}

#[test]
fn tables_that_are_too_short_or_not_aligned_are_rejected() {
    let lent = aligned(4096);
    let slice = |at| lent.slice(at, 4096 - at).unwrap();
    for size in [0, 3, 65_536] {
        let all = [&lent, &lent, &lent];
        assert_eq!(QueueTables::new(size, false, all).unwrap_err(), TableFault::Size { size });
    }
    for (starts, name) in [
        ([8, 0, 0], "descriptor table"),
        ([0, 1, 0], "available ring"),
        ([0, 0, 2], "used ring"),
        ([4096 - 112, 0, 0], "descriptor table"),
        ([0, 4096 - 18, 0], "available ring"),
        ([0, 0, 4096 - 64], "used ring"),
    ] {
        let parts = starts.map(slice);
        let fault = QueueTables::new(8, false, parts.each_ref()).unwrap_err();
        assert!(matches!(fault, TableFault::Table { table, .. } if table == name), "{fault}");
    }
    // The event indices belong to the tables if they are negotiated.
    let parts = [0, 4096 - 20, 4096 - 68].map(slice);
    assert!(QueueTables::new(8, false, parts.each_ref()).is_ok());
    assert!(QueueTables::new(8, true, parts.each_ref()).is_err());
}

proptest! {
    #[test]
    fn arbitrary_tables_end_in_chains_or_a_fault(
        bytes in proptest::collection::vec(any::<u8>(), 400),
        indirect: bool,
        event_idx: bool,
    ) {
        let features = QueueFeatures { indirect, event_idx, in_order: false };
        let mut pair = Pair::new(8, features);
        pair.lent.copy_from(0, &bytes).unwrap();
        for _ in 0..20 {
            match pair.take() {
                Ok(Some((head, chain))) => {
                    prop_assert!((1..=LINKS_MAX).contains(&chain.len()));
                    pair.backend.finish(head, 0);
                    let _ = pair.backend.publish();
                }
                Ok(None) | Err(_) => break,
            }
        }
    }
}
