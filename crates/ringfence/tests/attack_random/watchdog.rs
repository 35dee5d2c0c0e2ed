//! Watchdog over the processes that serve several parties. It finds threads that are stuck, processes that have ended,
//! and growing memory or numbers of descriptors.
//!
//! A thread counts as stuck if it was not scheduled for a second, and the kernel had it in one of these states: in a
//! close (`__fput` or `task_work_run` on its stack), in an uninterruptible wait, or in a system call that does not
//! wait for events. Disposal threads are exempt, because a close that blocks is their job and nothing waits for them;
//! their number is bounded instead. Only root can read stacks and system calls of a process that is not dumpable. For
//! an ordinary user, the latency of the control socket and of the datapath are the only signs.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::support::processes::Process;

/// Time without progress after which a thread inside a call that should not wait counts as stuck.
pub(crate) const STUCK: Duration = Duration::from_secs(1);
const PERIOD: Duration = Duration::from_millis(100);
/// Name of the threads that close foreign descriptors.
const DISPOSAL_THREAD: &str = "dispose\n";
/// Maximum number of disposal threads in a process: 32 for descriptors and 256 for the disks of guests that left.
const DISPOSAL_THREADS_MAX: usize = 32 + 256;
/// Memory in KiB that an allocator may keep.
const NOISE_KIB: u64 = 2048;

/// System calls in which a thread may wait without limit.
const WAITS: [i64; 14] = [
    libc::SYS_ppoll,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_futex,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_read,
    libc::SYS_recvmsg,
    libc::SYS_recvfrom,
    libc::SYS_accept4,
    libc::SYS_io_uring_enter,
];
#[cfg(target_arch = "x86_64")]
const OLD_WAITS: [i64; 2] = [libc::SYS_poll, libc::SYS_epoll_wait];
#[cfg(not(target_arch = "x86_64"))]
const OLD_WAITS: [i64; 0] = [];
/// System calls of storage threads. A slow disk of the machine is no finding.
const STORAGE: [i64; 9] = [
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_fsync,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_fdatasync,
    libc::SYS_fallocate,
];

/// Sample of a thread: how often it was scheduled, and the call in which the kernel has it.
#[derive(Clone, PartialEq, Eq)]
struct Sample {
    slices: String,
    call: String,
}

/// Sampling thread, which ends with this.
pub(crate) struct Watchdog {
    end: Arc<AtomicBool>,
    /// Maximum lateness of a timer since the last read, in microseconds: the delay of the machine itself.
    lateness: Arc<AtomicU64>,
    thread: std::thread::JoinHandle<Vec<String>>,
}

impl Watchdog {
    /// Starts the sampling thread.
    pub(crate) fn start(processes: Vec<(String, Process)>) -> Watchdog {
        let (end, lateness) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (ends, late) = (Arc::clone(&end), Arc::clone(&lateness));
        let thread = std::thread::spawn(move || watch(&processes, &ends, &late));
        Watchdog { end, lateness, thread }
    }

    /// Returns the maximum lateness of a timer, and resets it.
    pub(crate) fn lateness(&self) -> Duration {
        Duration::from_micros(self.lateness.swap(0, Relaxed))
    }

    /// Stops the thread. Returns the findings.
    pub(crate) fn stop(self) -> Vec<String> {
        self.end.store(true, Relaxed);
        self.thread.join().unwrap()
    }
}

fn watch(processes: &[(String, Process)], end: &AtomicBool, late: &AtomicU64) -> Vec<String> {
    let mut findings = Vec::new();
    let mut since: BTreeMap<(i32, String), (Sample, Instant, bool)> = BTreeMap::new();
    while !end.load(Relaxed) {
        let before = Instant::now();
        std::thread::sleep(PERIOD);
        let lateness = before.elapsed().saturating_sub(PERIOD);
        late.fetch_max(u64::try_from(lateness.as_micros()).unwrap_or(u64::MAX), Relaxed);
        for (name, process) in processes {
            let pid = process.pid.as_raw_nonzero().get();
            let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { continue };
            let mut disposal_threads = 0;
            for task in tasks.flatten() {
                let path = task.path();
                if fs::read_to_string(path.join("comm")).is_ok_and(|comm| comm == DISPOSAL_THREAD) {
                    disposal_threads += 1;
                    continue;
                }
                let key = (pid, task.file_name().to_string_lossy().into_owned());
                let Some(sample) = sample(&path) else {
                    since.remove(&key);
                    continue;
                };
                let entry = since.entry(key).or_insert((sample.clone(), before, false));
                if entry.0 != sample {
                    *entry = (sample, before, false);
                } else if before.elapsed() + before.saturating_duration_since(entry.1)
                    > STUCK + PERIOD
                    && !entry.2
                {
                    entry.2 = true;
                    let stack = fs::read_to_string(path.join("stack")).unwrap_or_default();
                    let stack: Vec<&str> = stack.lines().take(8).collect();
                    findings.push(format!(
                        "a thread of the {name} is stuck in {} for over {STUCK:?}: {}",
                        entry.0.call,
                        stack.join(" ")
                    ));
                }
            }
            if disposal_threads > DISPOSAL_THREADS_MAX {
                findings.push(format!("the {name} has {disposal_threads} disposal threads"));
            }
        }
    }
    findings
}

/// Returns the sample of a thread that may be stuck, or `None` if it runs or waits for events.
fn sample(task: &std::path::Path) -> Option<Sample> {
    let stat = fs::read_to_string(task.join("stat")).ok()?;
    let state = stat.rsplit_once(") ")?.1.chars().next()?;
    if state == 'R' {
        return None;
    }
    let slices = fs::read_to_string(task.join("schedstat")).ok()?;
    let slices = slices.split_whitespace().nth(2)?.to_owned();
    let call = fs::read_to_string(task.join("syscall")).unwrap_or_default();
    let number: Option<i64> = call.split_whitespace().next().and_then(|word| word.parse().ok());
    if number.is_some_and(|number| STORAGE.contains(&number)) {
        return None;
    }
    let may_wait =
        number.is_none_or(|number| WAITS.contains(&number) || OLD_WAITS.contains(&number));
    let is_closing = || {
        let stack = fs::read_to_string(task.join("stack")).unwrap_or_default();
        stack.contains("__fput") || stack.contains("task_work_run")
    };
    (state == 'D' || !may_wait || is_closing())
        .then(|| Sample { slices, call: format!("state {state}, system call {call:?}") })
}

/// Series of a process's descriptors and memory, sampled between rounds.
pub(crate) struct Series {
    name: String,
    process: Process,
    samples: Vec<(usize, u64)>,
}

impl Series {
    /// Creates an empty series.
    pub(crate) fn new(name: String, process: Process) -> Series {
        Series { name, process, samples: Vec::new() }
    }

    /// Takes a sample. Returns `false` if the process has ended.
    pub(crate) fn sample(&mut self) -> bool {
        self.samples.push((self.process.descriptors(), self.process.own_memory_kib()));
        self.process.is_alive()
    }

    /// Prints the series. Returns findings if it grows. The first third is only printed, because buffers reach their sizes
    /// in it.
    pub(crate) fn judge(&self) -> Option<String> {
        let warm = &self.samples[self.samples.len() / 3..];
        let lowest = |part: &[(usize, u64)]| {
            (part.iter().map(|s| s.0).min(), part.iter().map(|s| s.1).min())
        };
        let half = warm.len().div_ceil(2);
        let ((Some(fds), Some(kib)), (Some(last_fds), Some(last_kib))) =
            (lowest(&warm[..half]), lowest(&warm[warm.len() - half..]))
        else {
            return Some(format!("{}: no sample", self.name));
        };
        println!(
            "  {}: descriptors {:?} to {:?}, own memory {} KiB to {} KiB",
            self.name,
            self.samples.first().map(|s| s.0),
            last_fds,
            self.samples.first().map_or(0, |s| s.1),
            last_kib
        );
        let grows = last_fds > fds || last_kib > kib + NOISE_KIB;
        let line = format!(
            "{}: descriptors {fds} to {last_fds}, own memory {kib} KiB to {last_kib} KiB: IT GROWS",
            self.name
        );
        grows.then_some(line)
    }
}
