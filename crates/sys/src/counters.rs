//! Data-path counters: grant operations, system calls, notifications and wake-ups.
//!
//! A counter is exact whatever else the machine does. Each thread adds to a cell of its own, so adding
//! needs no locked instruction.

use core::cell::Cell;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        /// Running totals of one domain. A reader may see counters of different instants.
        #[derive(Default, Debug)]
        pub struct Counters { $($(#[$doc])* pub $name: SharedCounter,)* }

        /// Snapshot of the totals at one moment.
        #[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
        pub struct CounterValues { $($(#[$doc])* pub $name: u64,)* }

        impl Counters {
            /// Returns a snapshot of the totals.
            pub fn values(&self) -> CounterValues {
                CounterValues { $($name: self.$name.get(),)* }
            }
        }

        impl CounterValues {
            /// Returns the differences to an earlier snapshot.
            #[must_use]
            pub fn since(&self, earlier: &CounterValues) -> CounterValues {
                CounterValues { $($name: self.$name.wrapping_sub(earlier.$name),)* }
            }

            /// Returns the name and the value of each total.
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }
        }
    };
}

/// Running total with one writing thread.
#[derive(Default, Debug)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n` without a locked instruction. Concurrent writers could lose additions.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    /// Returns the current total.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Number that rises and falls, with one writing thread.
#[derive(Default, Debug)]
pub struct Level(AtomicU64);

impl Level {
    /// Replaces the number by another one.
    #[inline]
    pub fn set(&self, n: u64) {
        self.0.store(n, Relaxed);
    }

    /// Returns the number of this moment.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Number of cells of a [`SharedCounter`].
const CELLS: usize = 64;

/// Cell of one thread, in a cache line of its own.
#[derive(Default, Debug)]
#[repr(align(64))]
struct Line(Counter);

/// Running total of several threads. Each thread adds to a cell of its own, without a locked
/// instruction. With more than 64 threads two share a cell and may lose additions.
#[derive(Debug)]
pub struct SharedCounter(Box<[Line; CELLS]>);

impl Default for SharedCounter {
    fn default() -> SharedCounter {
        SharedCounter(Box::new([const { Line(Counter(AtomicU64::new(0))) }; CELLS]))
    }
}

/// Cell number for the next thread.
static NEXT_CELL: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Cell number of this thread, once it has one.
    static CELL: Cell<usize> = const { Cell::new(usize::MAX) };
}

impl SharedCounter {
    /// Adds `n` to this thread's cell.
    #[inline]
    pub fn add(&self, n: u64) {
        let cell = CELL.with(|cell| {
            if cell.get() == usize::MAX {
                cell.set(NEXT_CELL.fetch_add(1, Relaxed) % CELLS);
            }
            cell.get()
        });
        if let Some(line) = self.0.get(cell) {
            line.0.add(n);
        }
    }

    /// Returns the sum over all cells.
    pub fn get(&self) -> u64 {
        self.0.iter().fold(0, |sum, line| sum.wrapping_add(line.0.get()))
    }
}

counters! {
    /// Pages mapped.
    grant_maps;
    /// Pages unmapped.
    grant_unmaps;
    /// Copy elements that the platform completed.
    grant_copies;
    /// Bytes that the platform copied.
    grant_copy_bytes;
    /// Grants issued through windows.
    window_issues;
    /// Grants of windows revoked, cooperatively or by force.
    window_revokes;
    /// Pages of windows emptied before reuse.
    window_scrubs;
    /// System calls of the data path.
    syscalls;
    /// Notifications sent.
    notifications;
    /// Times a data-path thread woke from sleep.
    wakeups;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn additions_of_several_threads_are_all_counted() {
        let counters = Counters::default();
        std::thread::scope(|scope| {
            for n in 1..=8 {
                let counters = &counters;
                scope.spawn(move || (0..10_000).for_each(|_| counters.syscalls.add(n)));
            }
        });
        assert_eq!(counters.values().syscalls, 360_000);
    }
}
