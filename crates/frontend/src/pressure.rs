//! Memory pressure: shrinks grant windows when the system is short of memory.
//!
//! The kernel reports pressure stall information: of the system in `/proc/pressure/memory`, of a
//! control group in its `memory.pressure`. A *trigger* on either file becomes ready (`POLLPRI`)
//! when tasks stalled for longer than a threshold within an interval. Without a capability the
//! interval must be a multiple of two seconds. The triggers are opened before the sandbox closes.
//!
//! The first report limits the grant windows to half as many pages as a ring has slots. Each
//! further report halves the limit, down to `LIMIT_MIN`, with which frames still flow. After two
//! intervals without a report the limit doubles, until it is the original one.

// #syscall frontend,card ppoll: pressure on the system's memory

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

/// Reports a stall of 100 ms in 2 s.
const TRIGGER: &[u8] = b"some 100000 2000000\0";
const INTERVAL: Duration = Duration::from_secs(2);
/// Number of slots of a ring.
const RING_SLOTS: u32 = 256;
/// Minimum limit of a grant window in pages: three packets of maximum length. With pages for one
/// alone, a stream of such packets stalled until more were available.
const LIMIT_MIN: u32 = 64;

/// Triggers for memory pressure, and the resulting page limit.
pub struct PressureMonitor {
    triggers: Vec<File>,
    /// Errors of all triggers, if none could be opened.
    errors: Option<String>,
    limit: PageLimit,
}

/// Page limit of a grant window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct PageLimit {
    full: u32,
    bound: u32,
    /// Time of the last change or report. `None` at the original limit.
    since: Option<Instant>,
}

impl PageLimit {
    fn pressed(&mut self, now: Instant) -> u32 {
        self.bound = (self.bound.min(RING_SLOTS) / 2).max(LIMIT_MIN).min(self.full);
        self.since = Some(now);
        self.bound
    }

    /// Returns the time of the next increase.
    fn due(&self) -> Option<Instant> {
        self.since.map(|since| since + 2 * INTERVAL)
    }

    /// Doubles the limit if it is time.
    fn relaxed(&mut self, now: Instant) -> Option<u32> {
        if self.due()? > now {
            return None;
        }
        let more = self.bound.saturating_mul(2);
        // Pages beyond the number of slots are a reserve for pages in transit.
        self.bound = if more >= RING_SLOTS { self.full } else { more.min(self.full) };
        self.since = (self.bound < self.full).then_some(now);
        Some(self.bound)
    }
}

impl PressureMonitor {
    /// Opens the triggers, for windows of `full` pages.
    pub fn new(full: u32) -> PressureMonitor {
        PressureMonitor::with_paths(full, &paths())
    }

    fn with_paths(full: u32, paths: &[String]) -> PressureMonitor {
        let mut triggers = Vec::new();
        let mut errors = Vec::new();
        for path in paths {
            match trigger(path) {
                Ok(file) => triggers.push(file),
                Err(error) => errors.push(format!("{path}: {error}")),
            }
        }
        let errors = triggers.is_empty().then(|| errors.join("; "));
        PressureMonitor { triggers, errors, limit: PageLimit { full, bound: full, since: None } }
    }

    /// Returns the reason why windows do not shrink automatically. For the log, which is opened
    /// later.
    pub fn errors(&self) -> Option<String> {
        let why = self.errors.as_ref()?;
        Some(format!("windows do not shrink under memory pressure by themselves ({why})"))
    }

    /// Iterates over the descriptors of the triggers.
    pub fn descriptors(&self) -> impl Iterator<Item = RawFd> + '_ {
        self.triggers.iter().map(AsRawFd::as_raw_fd)
    }

    /// Iterates over the descriptors to poll for priority data.
    pub fn wait_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.triggers.iter().map(AsFd::as_fd)
    }

    /// Returns the time at which [`PressureMonitor::adapt`] may raise the limit.
    pub fn due(&self) -> Option<Instant> {
        self.limit.due()
    }

    /// Handles the results of a poll of [`PressureMonitor::wait_fds`], also of one without any. Returns the new limit of
    /// each window in pages, if it changed.
    pub fn adapt(&mut self, polled: impl Iterator<Item = PollFlags>) -> Option<u32> {
        let any = polled.fold(PollFlags::empty(), |all, flags| all | flags);
        if any.contains(PollFlags::ERR) {
            // A control group is gone.
            self.triggers.clear();
            None
        } else if any.contains(PollFlags::PRI) {
            Some(self.limit.pressed(Instant::now()))
        } else {
            self.limit.relaxed(Instant::now())
        }
    }
}

/// Returns the file of the system, and that of this process's control group.
fn paths() -> Vec<String> {
    let mut paths = vec!["/proc/pressure/memory".to_owned()];
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    paths.extend(v2_group(&groups).map(|group| format!("/sys/fs/cgroup{group}/memory.pressure")));
    paths
}

/// Returns the path of the version 2 control group. The root group's file is the system's.
fn v2_group(text: &str) -> Option<&str> {
    let group = text.lines().find_map(|line| line.strip_prefix("0::"))?;
    (group != "/").then_some(group)
}

fn trigger(path: &str) -> io::Result<File> {
    let mut file = File::options().read(true).write(true).open(path)?;
    file.write_all(TRIGGER)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_halves_under_pressure_and_doubles_after_two_quiet_intervals() {
        let mut limit = PageLimit { full: 1024, bound: 1024, since: None };
        let mut now = Instant::now();
        assert_eq!(limit.relaxed(now), None);
        assert_eq!([0; 4].map(|_| limit.pressed(now)), [128, 64, 64, 64]);
        assert_eq!(limit.relaxed(now + INTERVAL), None);
        let mut grown = Vec::new();
        while limit.due().is_some() {
            now += 2 * INTERVAL;
            grown.extend(limit.relaxed(now));
        }
        assert_eq!(grown, [128, 1024]);
        // A limit below the minimum stays.
        let mut limit = PageLimit { full: 20, bound: 20, since: None };
        assert_eq!(limit.pressed(now), 20);
        assert_eq!(limit.relaxed(now + 2 * INTERVAL), Some(20));
        assert_eq!(limit.due(), None);
    }

    #[test]
    fn missing_pressure_files_are_reported_and_limits_still_work() {
        let none = ["/nonexistent/one".to_owned(), "/nonexistent/two".to_owned()];
        let mut monitor = PressureMonitor::with_paths(1024, &none);
        let why = monitor.errors().unwrap();
        assert!(why.contains("/nonexistent/one: No such file"), "{why}");
        assert!(why.contains("; /nonexistent/two: No such file"), "{why}");
        assert_eq!(monitor.wait_fds().count(), 0);
        assert_eq!(monitor.adapt([PollFlags::PRI].into_iter()), Some(128));
        assert_eq!(monitor.adapt([PollFlags::empty()].into_iter()), None);
    }

    #[test]
    fn failed_trigger_is_dropped_and_changes_no_limit() {
        let files = [tempfile::NamedTempFile::new().unwrap()];
        let paths = files.each_ref().map(|file| file.path().display().to_string());
        let mut monitor = PressureMonitor::with_paths(1024, &paths);
        assert_eq!(monitor.wait_fds().count(), 1);
        let failed = PollFlags::PRI | PollFlags::ERR;
        assert_eq!(monitor.adapt([failed].into_iter()), None);
        assert_eq!((monitor.wait_fds().count(), monitor.due()), (0, None));
    }

    #[test]
    fn control_group_of_version_2_is_parsed() {
        assert_eq!(
            v2_group("4:memory:/a\n0::/system.slice/x.service\n"),
            Some("/system.slice/x.service")
        );
        assert_eq!(v2_group("0::/\n"), None);
        assert_eq!(v2_group("4:memory:/a\n"), None);
    }
}
