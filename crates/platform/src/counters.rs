//! Counts that no noise touches: what the data path asked of the platform and of the kernel.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        /// Running totals of one domain. Readers may see them slightly out of step.
        #[derive(Default, Debug)]
        pub struct Counters { $($(#[$doc])* pub $name: Counter,)* }

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

counters! {
    /// Pages mapped.
    grant_maps;
    /// Pages unmapped.
    grant_unmaps;
    /// Copy elements done by the platform.
    grant_copies;
    /// Bytes copied by the platform.
    grant_copy_bytes;
    /// System calls of the data path.
    syscalls;
    /// Notifications sent.
    notifications;
    /// Times a data-path thread woke from sleep.
    wakeups;
}
