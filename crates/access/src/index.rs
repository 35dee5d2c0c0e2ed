//! Grant reference index: maps a grant reference to a position in a table, in constant time.
//!
//! Every ring slot causes a look-up, and the peer selects the references. So neither the worst case nor
//! the memory may depend on them. An attacker can construct the worst case of a hash table, and a tree
//! takes several steps. This index is a radix table of two levels. The upper level covers every permitted
//! reference. The lower level consists of leaves of 64 positions; there are never more leaves than
//! entries. A look-up is two loads.

use ringfence_platform::Gref;

/// Exclusive limit of references: 2^20, which a grant table of version 1 reaches at 2048 frames. (Xen's
/// default is 64 frames.)
pub const GREF_LIMIT: u32 = 1 << 20;

/// Maximum number of entries of one index.
pub const ENTRIES_MAX: u16 = u16::MAX - 1;

const LEAF_BITS: u32 = 6;
const LEAF: usize = 1 << LEAF_BITS;
/// Marker for "no leaf" and "no entry".
const NONE: u16 = u16::MAX;

#[derive(Clone)]
struct Leaf {
    places: [u16; LEAF],
    used: u8,
}

/// Reasons for which a reference is not entered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum EnterError {
    /// Reference that is not below [`GREF_LIMIT`].
    #[error("grant reference {gref} is not below {GREF_LIMIT}")]
    TooLarge { gref: Gref },
    /// Reference that has an entry already.
    #[error("grant reference {gref} is in the table already")]
    Present { gref: Gref },
    /// Position above [`ENTRIES_MAX`].
    #[error("a table has no more than {ENTRIES_MAX} entries")]
    Place,
}

/// Map from grant references to positions of 16 bits.
#[derive(Clone)]
pub struct GrefIndex {
    /// Leaf numbers, by the upper bits of the reference. It grows up to the highest reference entered.
    upper: Vec<u16>,
    leaves: Vec<Leaf>,
    free: Vec<u16>,
    len: usize,
}

impl Default for GrefIndex {
    fn default() -> GrefIndex {
        GrefIndex::new()
    }
}

impl GrefIndex {
    /// Makes an empty index.
    pub fn new() -> GrefIndex {
        GrefIndex { upper: Vec::new(), leaves: Vec::new(), free: Vec::new(), len: 0 }
    }

    /// Returns the number of entries.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if there are no entries.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the position of `gref`.
    #[inline]
    pub fn get(&self, gref: Gref) -> Option<u16> {
        let leaf = *self.upper.get((gref.0 >> LEAF_BITS) as usize)?;
        let leaf = self.leaves.get(usize::from(leaf))?;
        let place = leaf.places[gref.0 as usize % LEAF];
        (place != NONE).then_some(place)
    }

    /// Enters the position `place` for `gref`.
    ///
    /// # Errors
    ///
    /// Returns [`EnterError`]; the index is unchanged.
    pub fn enter(&mut self, gref: Gref, place: u16) -> Result<(), EnterError> {
        if gref.0 >= GREF_LIMIT {
            return Err(EnterError::TooLarge { gref });
        }
        if place > ENTRIES_MAX {
            return Err(EnterError::Place);
        }
        if self.get(gref).is_some() {
            return Err(EnterError::Present { gref });
        }
        let upper = (gref.0 >> LEAF_BITS) as usize;
        if self.upper.len() <= upper {
            self.upper.resize(upper + 1, NONE);
        }
        if self.upper[upper] == NONE {
            self.upper[upper] = self.leaf()?;
        }
        let leaf = &mut self.leaves[usize::from(self.upper[upper])];
        leaf.places[gref.0 as usize % LEAF] = place;
        leaf.used += 1;
        self.len += 1;
        Ok(())
    }

    /// Returns the number of an empty leaf. There are never more leaves than entries, so `NONE` stays unused.
    fn leaf(&mut self) -> Result<u16, EnterError> {
        if let Some(leaf) = self.free.pop() {
            return Ok(leaf);
        }
        let number = u16::try_from(self.leaves.len()).ok().filter(|n| *n <= ENTRIES_MAX);
        let number = number.ok_or(EnterError::Place)?;
        self.leaves.push(Leaf { places: [NONE; LEAF], used: 0 });
        Ok(number)
    }

    /// Removes the entry of `gref` and returns its position.
    pub fn remove(&mut self, gref: Gref) -> Option<u16> {
        let place = self.get(gref)?;
        let upper = (gref.0 >> LEAF_BITS) as usize;
        let number = self.upper[upper];
        let leaf = &mut self.leaves[usize::from(number)];
        leaf.places[gref.0 as usize % LEAF] = NONE;
        leaf.used -= 1;
        if leaf.used == 0 {
            self.upper[upper] = NONE;
            self.free.push(number);
        }
        self.len -= 1;
        Some(place)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn reference_beyond_limit_is_refused() {
        let mut index = GrefIndex::new();
        for gref in [GREF_LIMIT, u32::MAX] {
            let gref = Gref(gref);
            assert_eq!(index.enter(gref, 0), Err(EnterError::TooLarge { gref }));
            assert_eq!(index.get(gref), None);
            assert_eq!(index.remove(gref), None);
        }
        assert!(index.enter(Gref(GREF_LIMIT - 1), 7).is_ok());
        assert_eq!(index.get(Gref(GREF_LIMIT - 1)), Some(7));
    }

    #[test]
    fn leaves_are_reused_for_scattered_references() {
        let mut index = GrefIndex::new();
        for round in 0..100u32 {
            for n in 0..64u32 {
                index.enter(Gref((n * 64 * 37 + round * 64) % GREF_LIMIT), 1).unwrap();
            }
            for n in 0..64u32 {
                index.remove(Gref((n * 64 * 37 + round * 64) % GREF_LIMIT)).unwrap();
            }
        }
        assert!(index.is_empty());
        assert_eq!(index.leaves.len(), 64);
    }

    proptest! {
        #[test]
        fn index_behaves_as_map(steps in prop::collection::vec((any::<bool>(), 0u32..300, 0u16..99), 0..400)) {
            let mut index = GrefIndex::new();
            let mut model = HashMap::new();
            for (enter, gref, place) in steps {
                // References in few leaves, and references in many.
                let gref = Gref(gref * if gref % 2 == 0 { 1 } else { 3001 });
                if enter {
                    let present = model.contains_key(&gref);
                    prop_assert_eq!(index.enter(gref, place).is_err(), present);
                    model.entry(gref).or_insert(place);
                } else {
                    prop_assert_eq!(index.remove(gref), model.remove(&gref));
                }
                prop_assert_eq!(index.len(), model.len());
                prop_assert!(index.leaves.len() - index.free.len() <= model.len());
            }
            for (gref, place) in &model {
                prop_assert_eq!(index.get(*gref), Some(*place));
            }
        }
    }
}
