use proptest::prelude::*;

use super::*;

fn key(n: u16) -> FlowKey {
    FlowKey { guest: ([10, 0, 0, 2], n).into(), remote: ([192, 0, 2, 1], 80).into() }
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[test]
fn entry_from_outside_never_evicts_entry_of_guest() {
    let mut table = FlowTable::with_outside(2, 2);
    let guest = table.insert(key(1), 1, Origin::Guest).unwrap();
    let first = table.insert(key(2), 2, Origin::Outside).unwrap();
    table.insert(key(3), 3, Origin::Outside).unwrap();
    assert!(table.is_full(Origin::Outside) && !table.is_full(Origin::Guest));
    assert_eq!(table.insert(key(4), 4, Origin::Outside), None);
    // The guest's entry is the oldest of all, and is not evicted.
    assert_eq!(table.oldest(Origin::Outside), Some(first));
    assert_eq!(table.oldest(Origin::Guest), Some(guest));
    table.remove(first);
    assert!(table.insert(key(4), 4, Origin::Outside).is_some());
    assert_eq!(table.get(guest), Some(&1));
    assert_eq!(table.len(), 3);
}

#[test]
fn untouched_entry_becomes_the_oldest() {
    let mut table = FlowTable::new(3);
    let ids: Vec<_> = (0..3).map(|n| table.insert(key(n), n, Origin::Guest).unwrap()).collect();
    assert!(table.is_full(Origin::Guest));
    assert_eq!(table.insert(key(3), 3, Origin::Guest), None);
    table.touch(ids[0]);
    assert_eq!(table.oldest(Origin::Guest), Some(ids[1]));
    assert_eq!(table.remove(ids[1]), Some((key(1), 1)));
    assert_eq!(table.oldest(Origin::Guest), Some(ids[2]));
    let reused = table.insert(key(9), 9, Origin::Guest).unwrap();
    assert_eq!(table.get(ids[1]), None, "an id outlives its entry, not its generation");
    assert_eq!(table.get(reused), Some(&9));
}

#[test]
fn postponed_deadline_is_due_at_the_new_time() {
    let mut table = FlowTable::new(3);
    let id = table.insert(key(1), (), Origin::Guest).unwrap();
    table.set_deadline(id, Some(at(5)));
    table.set_deadline(id, Some(at(9)));
    assert_eq!(table.take_due(at(6)), None);
    assert_eq!(table.next_timer(), Some(at(9)));
    assert_eq!(table.take_due(at(9)), Some(id));
    assert_eq!(table.take_due(at(99)), None);
    table.set_deadline(id, Some(at(100)));
    table.set_deadline(id, Some(at(50)));
    assert_eq!(table.take_due(at(60)), Some(id));
    assert_eq!(table.next_timer(), None);
}

#[derive(Clone, Debug)]
enum Op {
    Insert(u16),
    Remove(u16),
    Touch(u16),
    Deadline(u16, Option<u64>),
    Due(u64),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let one = prop_oneof![
        (0u16..12).prop_map(Op::Insert),
        (0u16..12).prop_map(Op::Remove),
        (0u16..12).prop_map(Op::Touch),
        (0u16..12, prop::option::of(0u64..40)).prop_map(|(n, d)| Op::Deadline(n, d)),
        (0u64..40).prop_map(Op::Due),
    ];
    prop::collection::vec(one, 1..200)
}

proptest! {
    /// Checks the table against a model: a list in order of use.
    #[test]
    fn table_matches_list_model(ops in ops()) {
        let mut table = FlowTable::new(6);
        let mut list: Vec<(u16, Option<u64>)> = Vec::new();
        for op in ops {
            match op {
                Op::Insert(n) => {
                    let expected = list.len() < 6 && list.iter().all(|&(m, _)| m != n);
                    prop_assert_eq!(table.insert(key(n), n, Origin::Guest).is_some(), expected);
                    if expected {
                        list.push((n, None));
                    }
                }
                Op::Remove(n) => {
                    let removed = table.find(&key(n)).and_then(|id| table.remove(id));
                    let slot = list.iter().position(|&(m, _)| m == n);
                    prop_assert_eq!(removed.map(|(_, v)| v), slot.map(|_| n));
                    if let Some(slot) = slot {
                        list.remove(slot);
                    }
                }
                Op::Touch(n) => {
                    if let Some(slot) = list.iter().position(|&(m, _)| m == n) {
                        let entry = list.remove(slot);
                        list.push(entry);
                        table.touch(table.find(&key(n)).unwrap());
                    }
                }
                Op::Deadline(n, deadline) => {
                    if let Some(entry) = list.iter_mut().find(|(m, _)| *m == n) {
                        entry.1 = deadline;
                        let id = table.find(&key(n)).unwrap();
                        table.set_deadline(id, deadline.map(at));
                    }
                }
                Op::Due(now) => {
                    while let Some(id) = table.take_due(at(now)) {
                        let n = *table.get(id).unwrap();
                        let entry = list.iter_mut().find(|(m, _)| *m == n).unwrap();
                        prop_assert!(entry.1.is_some_and(|deadline| deadline <= now));
                        entry.1 = None;
                    }
                    prop_assert!(list.iter().all(|(_, d)| d.is_none_or(|deadline| deadline > now)));
                }
            }
            prop_assert_eq!(table.len(), list.len());
            let oldest = table.oldest(Origin::Guest).map(|id| *table.get(id).unwrap());
            prop_assert_eq!(oldest, list.first().map(|&(n, _)| n));
            let soonest = list.iter().filter_map(|&(_, d)| d).min().map(at);
            prop_assert!(soonest.is_none() || table.next_timer() <= soonest);
            prop_assert!(table.timers.len() <= list.len(), "one look for each entry");
        }
    }
}
