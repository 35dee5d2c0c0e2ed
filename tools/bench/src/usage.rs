//! What a process has used up so far.

use std::fs;

use anyhow::Context;
use nix::sys::resource::{UsageWho, getrusage};
use ringfence_frame::counters::PortCounters;
use ringfence_platform::Counters;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

macro_rules! usage {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Totals of one domain, or what was added to them.
        #[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
        pub(super) struct Usage { $($(#[$doc])* pub(super) $name: u64,)* }

        impl Usage {
            /// What was added since `earlier`.
            pub(super) fn since(&self, earlier: &Usage) -> Usage {
                Usage { $($name: self.$name.saturating_sub(earlier.$name),)* }
            }

            /// Both domains together.
            pub(super) fn plus(&self, other: &Usage) -> Usage {
                Usage { $($name: self.$name.saturating_add(other.$name),)* }
            }
        }
    };
}

usage! {
    /// Grants mapped.
    maps,
    /// Grants unmapped.
    unmaps,
    /// Grants copied.
    copies,
    /// Octets copied: by grant copies, and by the ports to or from lent memory.
    copied_octets,
    /// Octets the sink fetched from lent memory to verify them.
    fetched_octets,
    /// System calls of the data path.
    syscalls,
    /// Times it woke from sleep.
    wakeups,
    /// Notifications sent.
    notifications,
    /// Page faults.
    faults,
    /// Processor time of all threads, those of the kernel's io_uring workers included, in
    /// nanoseconds.
    cpu_ns,
    /// The part of it that such workers took.
    kernel_thread_cpu_ns,
}

impl Usage {
    /// The totals of this process, whose ports these are. A system call or a dozen, none of which is
    /// counted: not to be called while packets flow.
    pub(super) fn now<'a>(
        platform: &Counters,
        ports: impl IntoIterator<Item = &'a PortCounters>,
        fetched: u64,
    ) -> anyhow::Result<Usage> {
        let copied: u64 = ports.into_iter().map(|port| port.copied_bytes.get()).sum();
        let usage = Usage::of(platform)?;
        Ok(Usage { copied_octets: usage.copied_octets + copied, fetched_octets: fetched, ..usage })
    }

    /// As [`Usage::now`], for a process without a port.
    pub(super) fn of(platform: &Counters) -> anyhow::Result<Usage> {
        let counted = platform.values();
        let process = getrusage(UsageWho::RUSAGE_SELF).context("getrusage")?;
        let faults = process.minor_page_faults() + process.major_page_faults();
        Ok(Usage {
            maps: counted.grant_maps,
            unmaps: counted.grant_unmaps,
            copies: counted.grant_copies,
            copied_octets: counted.grant_copy_bytes,
            fetched_octets: 0,
            syscalls: counted.syscalls,
            wakeups: counted.wakeups,
            notifications: counted.notifications,
            faults: u64::try_from(faults).unwrap_or(0),
            cpu_ns: clock(ClockId::ProcessCPUTime),
            kernel_thread_cpu_ns: io_worker_ns()?,
        })
    }
}

/// A clock in nanoseconds.
pub(super) fn clock(id: ClockId) -> u64 {
    let time = clock_gettime(id);
    let (seconds, nanos) = (u64::try_from(time.tv_sec), u64::try_from(time.tv_nsec));
    seconds.unwrap_or(0) * 1_000_000_000 + nanos.unwrap_or(0)
}

/// Processor time of this process's io_uring threads. They are threads of the process that the
/// kernel made; their names begin with `iou-`.
fn io_worker_ns() -> anyhow::Result<u64> {
    let mut sum = 0;
    for task in fs::read_dir("/proc/self/task").context("/proc/self/task")? {
        let task = task?.path();
        // A thread may end while it is looked at.
        let Ok(name) = fs::read_to_string(task.join("comm")) else { continue };
        let Ok(times) = fs::read_to_string(task.join("schedstat")) else { continue };
        if name.starts_with("iou-") {
            let ran = times.split_whitespace().next().and_then(|field| field.parse::<u64>().ok());
            sum += ran.unwrap_or(0);
        }
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_counts_what_was_done_in_between() {
        let (platform, port) = (Counters::default(), PortCounters::default());
        let before = Usage::now(&platform, [&port], 0).unwrap();
        platform.syscalls.add(7);
        platform.grant_copy_bytes.add(64);
        port.copied_bytes.add(64);
        // Fresh memory, touched: the kernel must fault each page in.
        let touched = vec![1u8; 8 << 20];
        let spent = Usage::now(&platform, [&port], 3).unwrap().since(&before);
        assert_eq!((spent.syscalls, spent.copied_octets, spent.fetched_octets), (7, 128, 3));
        assert!(spent.faults > 0 && spent.cpu_ns > 0, "{spent:?} {}", touched.len());
        assert_eq!(spent.kernel_thread_cpu_ns, 0, "nothing here uses io_uring");
        assert_eq!(spent.plus(&spent).syscalls, 14);
    }
}
