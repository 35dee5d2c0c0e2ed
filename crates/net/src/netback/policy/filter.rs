//! Which multicast frames a guest wants (`feature-multicast-control`).
//!
//! A guest that asked for it with `request-multicast-control` gets frames to those groups alone that it
//! added by extra infos. Broadcast is no multicast here. Guests may add groups before they ask, and the
//! list stays when they no longer do, as with Linux's netback.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arrayvec::ArrayVec;
use ringfence_wire::netif::extra::MulticastChange;

use ringfence_switch::forwarding::Mac;

/// Groups of one guest, as many as Linux's netback has.
pub(crate) const GROUPS_MAX: usize = 64;

const BROADCAST: Mac = [0xFF; 6];

/// What a guest wants. A clone has the same list: what is added to one is in the other.
#[derive(Clone, Debug, Default)]
pub(crate) struct MulticastFilter {
    /// Whether the guest asked for it.
    pub(crate) asked: bool,
    /// The guest's list is not known: it told it to whoever served it before.
    pub(crate) unknown: bool,
    groups: Arc<Mutex<Groups>>,
}

/// The groups of one guest.
#[derive(Debug, Default)]
pub(crate) struct Groups(ArrayVec<Mac, GROUPS_MAX>);

impl MulticastFilter {
    /// Changes the list.
    ///
    /// # Errors
    ///
    /// The rule that the change breaks; the list is as it was.
    pub(crate) fn change(&mut self, change: MulticastChange) -> Result<(), &'static str> {
        let Groups(groups) = &mut *self.groups();
        match change {
            MulticastChange::Add(group) if !is_group(&group) => Err("tx_multicast_no_group"),
            MulticastChange::Add(group) if groups.contains(&group) => Ok(()),
            MulticastChange::Add(group) => {
                groups.try_push(group).map_err(|_| "tx_multicast_list_full")
            }
            // To forget what is not there is no fault: it is not there afterwards.
            MulticastChange::Del(group) => {
                groups.retain(|known| *known != group);
                Ok(())
            }
        }
    }

    /// The list.
    pub(crate) fn groups(&self) -> MutexGuard<'_, Groups> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether anything is filtered at all.
    pub(crate) fn is_active(&self) -> bool {
        self.asked && !self.unknown
    }
}

impl Groups {
    /// Whether the guest wants a frame that begins with this.
    pub(crate) fn passes(&self, header: &[u8]) -> bool {
        let Some(to) = header.first_chunk::<6>() else { return true };
        !is_group(to) || *to == BROADCAST || self.0.contains(to)
    }
}

fn is_group(address: &Mac) -> bool {
    address[0] & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use MulticastChange::{Add, Del};
    use proptest::prelude::*;

    fn group(n: u8) -> Mac {
        [0x33, 0x33, 0, 0, 0, n]
    }

    #[test]
    fn a_guest_gets_the_groups_that_it_added_and_broadcast() {
        let mut filter = MulticastFilter { asked: true, ..MulticastFilter::default() };
        assert_eq!(filter.change(Add(group(1))), Ok(()));
        assert!(filter.groups().passes(&group(1)) && !filter.groups().passes(&group(2)));
        assert!(filter.groups().passes(&BROADCAST) && filter.groups().passes(&[2, 0, 0, 0, 0, 1]));
        assert_eq!(filter.change(Del(group(1))), Ok(()));
        assert_eq!(filter.change(Del(group(1))), Ok(()));
        assert!(!filter.groups().passes(&group(1)));
        assert_eq!(filter.change(Add([2, 0, 0, 0, 0, 1])), Err("tx_multicast_no_group"));
    }

    #[test]
    fn parts_of_one_port_have_one_list() {
        let mut one = MulticastFilter { asked: true, ..MulticastFilter::default() };
        let mut other = one.clone();
        assert_eq!(one.change(Add(group(1))), Ok(()));
        assert!(other.groups().passes(&group(1)));
        assert_eq!(other.change(Del(group(1))), Ok(()));
        assert!(!one.groups().passes(&group(1)));
    }

    #[test]
    fn the_list_is_bounded_and_one_group_is_in_it_once() {
        let mut filter = MulticastFilter::default();
        for n in 0..64 {
            assert_eq!(
                (filter.change(Add(group(n))), filter.change(Add(group(n)))),
                (Ok(()), Ok(()))
            );
        }
        assert_eq!(filter.change(Add(group(64))), Err("tx_multicast_list_full"));
        assert_eq!(filter.change(Add(group(63))), Ok(()), "known already");
        assert_eq!(filter.change(Del(group(0))), Ok(()));
        assert_eq!(filter.change(Add(group(64))), Ok(()));
    }

    #[test]
    fn a_list_that_is_not_known_filters_nothing() {
        let mut filter = MulticastFilter { asked: true, ..MulticastFilter::default() };
        assert!(filter.is_active());
        filter.unknown = true;
        assert!(!filter.is_active());
    }

    proptest! {
        #[test]
        fn the_list_is_a_set(changes in prop::collection::vec((any::<bool>(), 0u8..80), 0..400)) {
            let mut filter = MulticastFilter::default();
            let mut model = std::collections::BTreeSet::new();
            for (add, n) in changes {
                if add {
                    let room = model.len() < GROUPS_MAX || model.contains(&n);
                    prop_assert_eq!(filter.change(Add(group(n))).is_ok(), room);
                    if room {
                        model.insert(n);
                    }
                } else {
                    prop_assert_eq!(filter.change(Del(group(n))), Ok(()));
                    model.remove(&n);
                }
            }
            for n in 0..80 {
                prop_assert_eq!(filter.groups().passes(&group(n)), model.contains(&n));
            }
        }
    }
}
