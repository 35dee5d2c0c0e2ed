//! Allocator of a pool: buddy blocks of [`UNIT`] bytes times a power of two. Its state is private; it allocates memory only
//! when it is created.

/// Length of the shortest block in bytes.
pub(super) const UNIT: usize = 2048;

/// Number of orders: the longest block has 2^15 units, 64 MiB.
const ORDERS: u32 = 16;
/// Mark of a unit with which no free block begins.
const TAKEN: u32 = u32::MAX;
/// End of a list.
const NONE: u32 = u32::MAX;

/// Block of an arena.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Block {
    /// First unit in the arena.
    unit: u32,
    order: u32,
}

impl Block {
    /// Returns the offset in bytes from the start of the pool.
    pub(super) fn offset(self, arena: &Arena) -> usize {
        arena.start + self.unit as usize * UNIT
    }

    /// Returns the length in bytes.
    #[cfg(test)]
    fn len(self) -> usize {
        UNIT << self.order
    }
}

/// Part of a pool, from which blocks are taken.
#[derive(Debug)]
pub(super) struct Arena {
    /// Offset in the pool in bytes.
    start: usize,
    /// First free block of each order.
    heads: [u32; ORDERS as usize],
    /// For each free block its neighbours in the list of its order.
    links: Vec<[u32; 2]>,
    /// For each unit the order of the free block that begins there, or [`TAKEN`].
    free: Vec<u32>,
}

impl Arena {
    /// Creates an arena of all whole units in `len` bytes from `start`.
    pub(super) fn new(start: usize, len: usize) -> Arena {
        let units = u32::try_from(len / UNIT).unwrap_or(NONE - 1);
        let mut arena = Arena {
            start,
            heads: [NONE; ORDERS as usize],
            links: vec![[NONE; 2]; units as usize],
            free: vec![TAKEN; units as usize],
        };
        let mut unit = 0;
        while unit < units {
            let aligned = if unit == 0 { u32::MAX } else { unit.trailing_zeros() };
            let fits = (units - unit).ilog2();
            let order = aligned.min(fits).min(ORDERS - 1);
            arena.push(Block { unit, order });
            unit += 1 << order;
        }
        arena
    }

    /// Returns the length of the longest free block in bytes.
    pub(super) fn longest(&self) -> usize {
        let order = self.heads.iter().rposition(|head| *head != NONE);
        order.map_or(0, |order| UNIT << order)
    }

    /// Takes a block of at least `len` bytes. Returns `None` if there is none at present.
    pub(super) fn allocate(&mut self, len: usize) -> Option<Block> {
        let units = len.div_ceil(UNIT).max(1).checked_next_power_of_two()?;
        let order = units.trailing_zeros();
        let found = (order..ORDERS).find(|order| self.heads[*order as usize] != NONE)?;
        let unit = self.heads[found as usize];
        self.remove(Block { unit, order: found });
        for half in (order..found).rev() {
            self.push(Block { unit: unit + (1 << half), order: half });
        }
        Some(Block { unit, order })
    }

    /// Returns a block, and joins it with its free neighbours.
    pub(super) fn release(&mut self, block: Block) {
        let Block { mut unit, mut order } = block;
        while order + 1 < ORDERS {
            let buddy = unit ^ (1 << order);
            if self.free.get(buddy as usize) != Some(&order) {
                break;
            }
            self.remove(Block { unit: buddy, order });
            unit = unit.min(buddy);
            order += 1;
        }
        self.push(Block { unit, order });
    }

    fn push(&mut self, Block { unit, order }: Block) {
        let head = std::mem::replace(&mut self.heads[order as usize], unit);
        self.links[unit as usize] = [NONE, head];
        self.free[unit as usize] = order;
        if head != NONE {
            self.links[head as usize][0] = unit;
        }
    }

    fn remove(&mut self, Block { unit, order }: Block) {
        let [before, after] = self.links[unit as usize];
        self.free[unit as usize] = TAKEN;
        match before {
            NONE => self.heads[order as usize] = after,
            before => self.links[before as usize][1] = after,
        }
        if after != NONE {
            self.links[after as usize][0] = before;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn block_is_as_long_as_the_next_power_of_two() {
        let mut arena = Arena::new(4096, 64 * UNIT);
        let lens = [0, 1, UNIT, UNIT + 1, 5 * UNIT].map(|len| arena.allocate(len).unwrap().len());
        assert_eq!(lens, [1, 1, 1, 2, 8].map(|units| units * UNIT));
        assert_eq!(arena.allocate(33 * UNIT), None);
    }

    proptest! {
        #[test]
        fn blocks_in_use_never_overlap_and_all_join_again(
            units in 1_usize..200,
            steps in proptest::collection::vec((any::<bool>(), 0_usize..40 * UNIT), 1..200),
        ) {
            let mut arena = Arena::new(4096, units * UNIT + 7);
            let longest = arena.longest();
            let mut taken: Vec<Block> = Vec::new();
            for (takes, number) in steps {
                if takes {
                    if let Some(block) = arena.allocate(number) {
                        prop_assert!(block.len() >= number);
                        prop_assert!(block.offset(&arena) >= 4096);
                        prop_assert!(block.offset(&arena) + block.len() <= 4096 + units * UNIT);
                        let [start, end] = [block.offset(&arena), block.offset(&arena) + block.len()];
                        for other in &taken {
                            let at = other.offset(&arena);
                            prop_assert!(end <= at || at + other.len() <= start);
                        }
                        taken.push(block);
                    }
                } else if !taken.is_empty() {
                    let block = taken.swap_remove(number % taken.len());
                    arena.release(block);
                }
            }
            taken.into_iter().for_each(|block| arena.release(block));
            prop_assert_eq!(arena.longest(), longest);
        }
    }
}
