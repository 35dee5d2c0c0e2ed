//! Counts that no noise touches: what the data path asked of the platform and of the kernel.

use core::cell::Cell;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        /// Running totals of one domain. Readers may see them slightly out of step.
        #[derive(Default, Debug)]
        pub struct Counters { $($(#[$doc])* pub $name: SharedCounter,)* }

        /// The totals at one moment.
        #[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
        pub struct CounterValues { $($(#[$doc])* pub $name: u64,)* }

        impl Counters {
            /// The totals now.
            pub fn values(&self) -> CounterValues {
                CounterValues { $($name: self.$name.get(),)* }
            }
        }

        impl CounterValues {
            /// What was added since `earlier`.
            #[must_use]
            pub fn since(&self, earlier: &CounterValues) -> CounterValues {
                CounterValues { $($name: self.$name.wrapping_sub(earlier.$name),)* }
            }

            /// Name and value of each.
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }
        }
    };
}

/// One running total.
#[derive(Default, Debug)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. A counter has one writing thread in practice, so no locked instruction is spent.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    /// The total.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Cells of a [`SharedCounter`].
const CELLS: usize = 64;

/// A total of its own for each thread, in a cache line of its own.
#[derive(Default, Debug)]
#[repr(align(64))]
struct Line(Counter);

/// One running total to which several threads add. Each has a cell of its own, so that neither a locked
/// instruction is spent nor an addition lost, as long as there are no more than 64 of them.
#[derive(Debug)]
pub struct SharedCounter(Box<[Line; CELLS]>);

impl Default for SharedCounter {
    fn default() -> SharedCounter {
        SharedCounter(Box::new([const { Line(Counter(AtomicU64::new(0))) }; CELLS]))
    }
}

/// The next thread's cell.
static NEXT_CELL: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// This thread's cell, once it has one.
    static CELL: Cell<usize> = const { Cell::new(usize::MAX) };
}

impl SharedCounter {
    /// Adds `n`.
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

    /// The total.
    pub fn get(&self) -> u64 {
        self.0.iter().fold(0, |sum, line| sum.wrapping_add(line.0.get()))
    }
}

counters! {
    /// Pages mapped.
    grant_maps;
    /// Pages unmapped.
    grant_unmaps;
    /// Copy elements done by the platform.
    grant_copies;
    /// Bytes copied by the platform.
    grant_copy_bytes;
    /// Grants issued through windows.
    window_issues;
    /// Grants of windows taken back, by force or not.
    window_revokes;
    /// Pages of windows emptied before they are used again.
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
    fn what_several_threads_add_is_added() {
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
