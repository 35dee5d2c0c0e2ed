//! Multicast filter of a guest (`feature-multicast-control`).
//!
//! A guest that set `request-multicast-control` receives only the multicast groups that it added by extra
//! infos. Broadcast frames always pass. As with Linux's netback, a guest can add groups before it sets the
//! key, and the list remains after it clears the key.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringfence_wire::netif::extra::MulticastChange;

use arrayvec::ArrayVec;

use ringfence_switch::forwarding::Mac;

/// Maximum number of groups of one guest, as in Linux's netback.
pub(crate) const GROUPS_MAX: usize = 64;

const BROADCAST: Mac = [0xFF; 6];

/// Multicast filter of one guest. Clones share the list of groups.
#[derive(Clone, Debug, Default)]
pub(crate) struct MulticastFilter {
    /// Set if the guest requested filtering.
    pub(crate) asked: bool,
    /// Set if the guest sent its groups to a previous process, so that the list is unknown.
    pub(crate) unknown: bool,
    groups: Arc<Mutex<Groups>>,
}

/// List of a guest's groups.
#[derive(Debug, Default)]
pub(crate) struct Groups(ArrayVec<Mac, GROUPS_MAX>);

impl MulticastFilter {
    /// Adds or removes a group.
    ///
    /// # Errors
    ///
    /// Returns the name of the rule that the change breaks; the list is unchanged.
    pub(crate) fn change(&mut self, change: MulticastChange) -> Result<(), &'static str> {
        let Groups(groups) = &mut *self.groups();
        match change {
            MulticastChange::Add(group) if !is_group(&group) => Err("tx_multicast_no_group"),
            MulticastChange::Add(group) if groups.contains(&group) => Ok(()),
            MulticastChange::Add(group) => {
                groups.try_push(group).map_err(|_| "tx_multicast_list_full")
            }
            // Removing an absent group is permitted.
            MulticastChange::Del(group) => {
                groups.retain(|known| *known != group);
                Ok(())
            }
        }
    }

    /// Locks the list of groups.
    pub(crate) fn groups(&self) -> MutexGuard<'_, Groups> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if frames are filtered.
    pub(crate) fn is_active(&self) -> bool {
        self.asked && !self.unknown
    }
}

impl Groups {
    /// Returns true if the filter passes a frame with these first bytes.
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
    fn added_groups_and_broadcast_pass_filter() {
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
    fn filters_of_port_parts_share_groups() {
        let mut one = MulticastFilter { asked: true, ..MulticastFilter::default() };
        let mut other = one.clone();
        assert_eq!(one.change(Add(group(1))), Ok(()));
        assert!(other.groups().passes(&group(1)));
        assert_eq!(other.change(Del(group(1))), Ok(()));
        assert!(!one.groups().passes(&group(1)));
    }

    #[test]
    fn group_beyond_limit_is_refused_and_duplicate_accepted() {
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
    fn filter_with_unknown_list_is_inactive() {
        let mut filter = MulticastFilter { asked: true, ..MulticastFilter::default() };
        assert!(filter.is_active());
        filter.unknown = true;
        assert!(!filter.is_active());
    }

    proptest! {
        #[test]
        fn group_list_behaves_as_set(changes in prop::collection::vec((any::<bool>(), 0u8..80), 0..400)) {
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
