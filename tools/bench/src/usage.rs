//! Resource usage of a process: counters of the data path, CPU time and page faults.

use std::fs;

use anyhow::Context;
use ringfence_frame::counters::PortCounters;
use ringfence_platform::Counters;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

macro_rules! usage {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Totals of one domain, or the difference of two readings.
        #[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
        pub(super) struct Usage { $($(#[$doc])* pub(super) $name: u64,)* }

        impl Usage {
            /// Returns the difference to an earlier reading.
            pub(super) fn since(&self, earlier: &Usage) -> Usage {
                Usage { $($name: self.$name.saturating_sub(earlier.$name),)* }
            }

            /// Returns the sum of two domains.
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
    /// Bytes copied: by grant copies, and by the ports to or from lent memory.
    copied_bytes,
    /// Bytes that the sink fetched from lent memory to verify them.
    fetched_bytes,
    /// System calls of the data path.
    syscalls,
    /// Wakeups from sleep.
    wakeups,
    notifications,
    faults,
    /// CPU time of all threads in nanoseconds, the kernel's io_uring workers included.
    cpu_ns,
    /// Part of `cpu_ns` that io_uring workers took.
    kernel_thread_cpu_ns,
}

impl Usage {
    /// Reads the totals of this process and these ports. Makes about a dozen system calls, which are not
    /// counted, so it must not be called while packets flow.
    pub(super) fn now<'a>(
        platform: &Counters,
        ports: impl IntoIterator<Item = &'a PortCounters>,
        fetched: u64,
    ) -> anyhow::Result<Usage> {
        let copied: u64 = ports.into_iter().map(|port| port.copied_bytes.get()).sum();
        let usage = Usage::of(platform)?;
        Ok(Usage { copied_bytes: usage.copied_bytes + copied, fetched_bytes: fetched, ..usage })
    }

    /// Reads the totals of a process without a port, as [`Usage::now`] does.
    pub(super) fn of(platform: &Counters) -> anyhow::Result<Usage> {
        let counted = platform.values();
        Ok(Usage {
            maps: counted.grant_maps,
            unmaps: counted.grant_unmaps,
            copies: counted.grant_copies,
            copied_bytes: counted.grant_copy_bytes,
            fetched_bytes: 0,
            syscalls: counted.syscalls,
            wakeups: counted.wakeups,
            notifications: counted.notifications,
            faults: page_faults()?,
            cpu_ns: clock(ClockId::ProcessCPUTime),
            kernel_thread_cpu_ns: io_worker_ns()?,
        })
    }
}

/// Reads a clock in nanoseconds.
pub(super) fn clock(id: ClockId) -> u64 {
    let time = clock_gettime(id);
    // The clocks begin at 0 and never go back.
    let (seconds, nanos) = (time.tv_sec.max(0), time.tv_nsec.max(0));
    seconds.cast_unsigned() * 1_000_000_000 + nanos.cast_unsigned()
}

/// Returns the page faults of all threads of this process (`minflt` and `majflt` of proc_pid_stat(5)).
fn page_faults() -> anyhow::Result<u64> {
    let stat = fs::read_to_string("/proc/self/stat").context("/proc/self/stat")?;
    // The name before the last parenthesis may hold anything.
    let fields = stat.rsplit_once(')').map(|(_, rest)| rest.split_whitespace());
    let mut faults = fields.into_iter().flatten().skip(7).step_by(2).map(str::parse::<u64>);
    let (minor, major) = (faults.next(), faults.next());
    let (minor, major) = minor.zip(major).context("/proc/self/stat: no page faults")?;
    Ok(minor? + major?)
}

/// Returns the CPU time of this process's io_uring workers in nanoseconds. The kernel creates them as
/// threads of the process whose names begin with `iou-`.
fn io_worker_ns() -> anyhow::Result<u64> {
    named_ns("/proc/self/task", |name| name.starts_with("iou-"))
}

/// Returns the CPU time of the kernel's vhost workers in nanoseconds. Since Linux 6.4 they are threads of the process
/// that created them, and its time includes theirs.
pub(super) fn vhost_worker_ns(is_worker: impl Fn(&str) -> bool) -> anyhow::Result<u64> {
    named_ns("/proc", |name| name.starts_with("vhost-") && is_worker(name))
}

/// Returns the CPU time of all threads of a process in nanoseconds. It is exact while they sleep.
pub(super) fn process_ns(pid: u32) -> anyhow::Result<u64> {
    named_ns(&format!("/proc/{pid}/task"), |_| true)
}

/// Returns the CPU time in nanoseconds of the entries of a directory of `/proc` whose names `is_counted` accepts.
fn named_ns(directory: &str, is_counted: impl Fn(&str) -> bool) -> anyhow::Result<u64> {
    let mut sum = 0;
    for entry in fs::read_dir(directory).context(directory.to_owned())? {
        let entry = entry?.path();
        // A process or thread may exit meanwhile.
        let Ok(name) = fs::read_to_string(entry.join("comm")) else { continue };
        if is_counted(name.trim_end()) {
            let times = fs::read_to_string(entry.join("schedstat")).unwrap_or_default();
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
    fn usage_difference_counts_work_between_readings() {
        let (platform, port) = (Counters::default(), PortCounters::default());
        let before = Usage::now(&platform, [&port], 0).unwrap();
        platform.syscalls.add(7);
        platform.grant_copy_bytes.add(64);
        port.copied_bytes.add(64);
        // The kernel must fault in each page of freshly touched memory.
        let touched = vec![1u8; 8 << 20];
        let spent = Usage::now(&platform, [&port], 3).unwrap().since(&before);
        assert_eq!((spent.syscalls, spent.copied_bytes, spent.fetched_bytes), (7, 128, 3));
        assert!(spent.faults > 0 && spent.cpu_ns > 0, "{spent:?} {}", touched.len());
        assert_eq!(spent.kernel_thread_cpu_ns, 0, "nothing here uses io_uring");
        assert_eq!(spent.plus(&spent).syscalls, 14);
    }
}
