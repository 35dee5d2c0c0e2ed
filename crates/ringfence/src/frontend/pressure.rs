//! Windows give memory back when the system is short of it.
//!
//! # Theory of operation
//!
//! The kernel tells of tasks that wait for memory (pressure stall information): of the system's in
//! `/proc/pressure/memory`, of a control group's in its `memory.pressure`. A *trigger* in either becomes
//! ready when tasks stood still for longer than a threshold within a window of time. Without a capability
//! the window is a multiple of two seconds. Triggers are opened before the sandbox closes.
//!
//! At the first sign the windows of the guest's queues keep half as many pages as a ring has slots, and
//! at each further one half of that, down to [`LEAST`], with which frames still flow. When all was quiet
//! for two windows of time they may have twice as many, until they have what they began with.

// #syscall frontend ppoll: pressure on the system's memory

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::{Duration, Instant};

/// Standing still for 100 ms of 2 s is pressure.
const TRIGGER: &[u8] = b"some 100000 2000000\0";
const WINDOW: Duration = Duration::from_secs(2);
/// Slots of a ring.
const SLOTS: u32 = 256;
/// Pages that a window keeps whatever happens: three of the longest packets. With room for one alone a
/// stream of those stood still until there was more.
const LEAST: u32 = 64;

/// Pressure on memory, and what follows from it.
pub(super) struct PressureMonitor {
    triggers: Vec<File>,
    /// Where there is no trigger: what the system said.
    refused: Option<String>,
    level: Level,
}

/// How many pages a window may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Level {
    full: u32,
    bound: u32,
    /// When it was last changed, or confirmed.
    since: Option<Instant>,
}

impl Level {
    fn pressed(&mut self, now: Instant) -> u32 {
        self.bound = (self.bound.min(SLOTS) / 2).max(LEAST).min(self.full);
        self.since = Some(now);
        self.bound
    }

    /// When more may be had.
    fn due(&self) -> Option<Instant> {
        self.since.map(|since| since + 2 * WINDOW)
    }

    /// More, if it is time.
    fn relaxed(&mut self, now: Instant) -> Option<u32> {
        if self.due()? > now {
            return None;
        }
        let more = self.bound.saturating_mul(2);
        // Beyond a ring's slots pages are for those that come and go.
        self.bound = if more >= SLOTS { self.full } else { more.min(self.full) };
        self.since = (self.bound < self.full).then_some(now);
        Some(self.bound)
    }
}

impl PressureMonitor {
    /// For windows of `full` pages.
    pub(super) fn new(full: u32) -> PressureMonitor {
        PressureMonitor::by(full, &paths())
    }

    fn by(full: u32, paths: &[String]) -> PressureMonitor {
        let mut triggers = Vec::new();
        let mut refused = Vec::new();
        for path in paths {
            match trigger(path) {
                Ok(file) => triggers.push(file),
                Err(error) => refused.push(format!("{path}: {error}")),
            }
        }
        let refused = triggers.is_empty().then(|| refused.join("; "));
        PressureMonitor { triggers, refused, level: Level { full, bound: full, since: None } }
    }

    /// Why windows do not shrink by themselves, where that is so. Said once, when there is a log.
    pub(super) fn refused(&self) -> Option<String> {
        let why = self.refused.as_ref()?;
        Some(format!("windows do not shrink under memory pressure by themselves ({why})"))
    }

    /// Its files.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = RawFd> + '_ {
        self.triggers.iter().map(AsRawFd::as_raw_fd)
    }

    /// What has priority data when there is pressure.
    pub(super) fn wait_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.triggers.iter().map(AsFd::as_fd)
    }

    /// When [`PressureMonitor::relaxed`] is worth a call.
    pub(super) fn due(&self) -> Option<Instant> {
        self.level.due()
    }

    /// There is pressure: the pages that each window may have from now on.
    pub(super) fn pressed(&mut self) -> u32 {
        self.level.pressed(Instant::now())
    }

    /// The same if there has been none for a while, and they may have more.
    pub(super) fn relaxed(&mut self) -> Option<u32> {
        self.level.relaxed(Instant::now())
    }

    /// A trigger is of no use any more: its control group is gone.
    pub(super) fn give_up(&mut self) {
        self.triggers.clear();
    }
}

/// The system's file, and that of this process's control group.
fn paths() -> Vec<String> {
    let mut paths = vec!["/proc/pressure/memory".to_owned()];
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    paths.extend(group_in(&groups).map(|group| format!("/sys/fs/cgroup{group}/memory.pressure")));
    paths
}

/// The path of the control group of version 2; the root's is the system's.
fn group_in(text: &str) -> Option<&str> {
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
    fn under_pressure_there_is_less_and_after_two_quiet_windows_more() {
        let mut level = Level { full: 1024, bound: 1024, since: None };
        let mut now = Instant::now();
        assert_eq!(level.relaxed(now), None);
        assert_eq!([0; 4].map(|_| level.pressed(now)), [128, 64, 64, 64]);
        assert_eq!(level.relaxed(now + WINDOW), None);
        let mut grown = Vec::new();
        while level.due().is_some() {
            now += 2 * WINDOW;
            grown.extend(level.relaxed(now));
        }
        assert_eq!(grown, [128, 1024]);
        // Where there are few anyway.
        let mut level = Level { full: 20, bound: 20, since: None };
        assert_eq!(level.pressed(now), 20);
        assert_eq!(level.relaxed(now + 2 * WINDOW), Some(20));
        assert_eq!(level.due(), None);
    }

    #[test]
    fn without_pressure_stall_information_one_message_says_so_and_the_order_works() {
        let none = ["/nonexistent/one".to_owned(), "/nonexistent/two".to_owned()];
        let mut squeeze = PressureMonitor::by(1024, &none);
        let why = squeeze.refused().unwrap();
        assert!(why.contains("/nonexistent/one: No such file"), "{why}");
        assert!(why.contains("; /nonexistent/two: No such file"), "{why}");
        assert_eq!(squeeze.wait_fds().count(), 0);
        assert_eq!((squeeze.pressed(), squeeze.relaxed()), (128, None));
    }

    #[test]
    fn the_control_group_is_found() {
        assert_eq!(
            group_in("4:memory:/a\n0::/system.slice/x.service\n"),
            Some("/system.slice/x.service")
        );
        assert_eq!(group_in("0::/\n"), None);
        assert_eq!(group_in("4:memory:/a\n"), None);
    }
}
