//! Memory pressure: the share of its pages that each pool keeps while the system is short of memory.
//!
//! The kernel reports pressure stall information: of the system in `/proc/pressure/memory`, of a
//! control group in its `memory.pressure`. A *trigger* on either file becomes ready (`POLLPRI`)
//! when tasks stalled for longer than a threshold within an interval. Without a capability the
//! interval must be a multiple of two seconds. The triggers are opened before the sandbox closes.
//!
//! Each report halves the share, `HALVINGS_MAX` times at most. After two intervals without a report it doubles, until it is
//! whole again: it falls at once and rises slowly, so that a pool does not swing with its own effect on the system. Each pool
//! has a number of pages of its own below which it does not go ([`Share::of`]).

// #syscall frontend,card,driver,daemon ppoll: pressure on the system's memory

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::poll::wait_any;

/// Reports a stall of 100 ms in 2 s.
const TRIGGER: &[u8] = b"some 100000 2000000\0";
const INTERVAL: Duration = Duration::from_secs(2);
/// Maximum number of times that pressure halves a share: a sixteenth is left.
const HALVINGS_MAX: u8 = 4;

/// Share of its pages that a pool keeps: all of them, halved a number of times.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Share {
    halvings: u8,
}

impl Share {
    /// Share without pressure.
    pub const WHOLE: Share = Share { halvings: 0 };

    /// Returns `true` without pressure.
    pub fn is_whole(self) -> bool {
        self == Share::WHOLE
    }

    /// Returns the share of `full` pages, and at least `least` of them.
    pub fn of(self, full: u32, least: u32) -> u32 {
        (full >> self.halvings).max(least).min(full)
    }

    /// Returns the share that one more report leaves.
    #[must_use]
    pub fn halved(self) -> Share {
        Share { halvings: (self.halvings + 1).min(HALVINGS_MAX) }
    }

    /// Returns the share after two intervals without a report.
    fn doubled(self) -> Share {
        Share { halvings: self.halvings.saturating_sub(1) }
    }
}

impl core::fmt::Display for Share {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "1/{}", 1u32 << self.halvings)
    }
}

/// Share of the present, and the time of its next change.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Course {
    share: Share,
    /// Time of the last change or report. `None` while the share is whole.
    since: Option<Instant>,
}

impl Course {
    fn pressed(&mut self, now: Instant) -> Share {
        self.share = self.share.halved();
        self.since = Some(now);
        self.share
    }

    /// Returns the time of the next increase.
    fn due(&self) -> Option<Instant> {
        self.since.map(|since| since + 2 * INTERVAL)
    }

    /// Doubles the share if it is time.
    fn relaxed(&mut self, now: Instant) -> Option<Share> {
        if self.due()? > now {
            return None;
        }
        self.share = self.share.doubled();
        self.since = (!self.share.is_whole()).then_some(now);
        Some(self.share)
    }
}

/// Triggers for memory pressure, and the resulting share.
#[derive(Debug)]
pub struct PressureMonitor {
    triggers: Vec<File>,
    /// Errors of all triggers, if none could be opened.
    errors: Option<String>,
    course: Course,
}

impl PressureMonitor {
    /// Opens the triggers of the system and of this process's control group. Fails never; see [`PressureMonitor::errors`].
    pub fn open() -> PressureMonitor {
        PressureMonitor::with_paths(&paths())
    }

    /// Makes a monitor without triggers, which never reports pressure.
    pub fn without_triggers() -> PressureMonitor {
        PressureMonitor::with_paths(&[])
    }

    fn with_paths(paths: &[String]) -> PressureMonitor {
        let mut triggers = Vec::new();
        let mut errors = Vec::new();
        for path in paths {
            match trigger(path) {
                Ok(file) => triggers.push(file),
                Err(error) => errors.push(format!("{path}: {error}")),
            }
        }
        let none_opened = triggers.is_empty() && !paths.is_empty();
        let errors = none_opened.then(|| errors.join("; "));
        PressureMonitor { triggers, errors, course: Course::default() }
    }

    /// Returns the reason for which pools do not shrink by themselves. For the log, which is opened
    /// later.
    pub fn errors(&self) -> Option<String> {
        let why = self.errors.as_ref()?;
        Some(format!("pools of pages do not shrink under memory pressure by themselves ({why})"))
    }

    /// Iterates over the descriptors of the triggers.
    pub fn descriptors(&self) -> impl Iterator<Item = RawFd> + '_ {
        self.triggers.iter().map(AsRawFd::as_raw_fd)
    }

    /// Blocks until one of `fds` is ready, memory pressure is reported, the share may rise, or `until`. Returns the events of
    /// `fds` in their order, and the share of each pool if it changed.
    ///
    /// # Errors
    ///
    /// Those of [`wait_any`].
    pub fn wait(
        &mut self,
        fds: Vec<PollFd<'_>>,
        until: Option<Instant>,
    ) -> io::Result<(Vec<PollFlags>, Option<Share>)> {
        let others = fds.len();
        let triggers = self.triggers.iter().map(|file| PollFd::new(file, PollFlags::PRI));
        let mut all: Vec<_> = fds.into_iter().chain(triggers).collect();
        wait_any(&mut all, until.into_iter().chain(self.course.due()).min())?;
        let mut events: Vec<_> = all.iter().map(PollFd::revents).collect();
        let share = self.adapt(events.drain(others..));
        Ok((events, share))
    }

    /// Handles the events of the triggers.
    fn adapt(&mut self, polled: impl Iterator<Item = PollFlags>) -> Option<Share> {
        let any = polled.fold(PollFlags::empty(), |all, flags| all | flags);
        if any.contains(PollFlags::ERR) {
            // A control group is gone.
            self.triggers.clear();
            None
        } else if any.contains(PollFlags::PRI) {
            Some(self.course.pressed(Instant::now()))
        } else {
            self.course.relaxed(Instant::now())
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
    fn share_halves_with_each_report_and_doubles_after_two_quiet_intervals() {
        let mut course = Course::default();
        let mut now = Instant::now();
        assert_eq!(course.relaxed(now), None);
        let left = [0; 6].map(|_| course.pressed(now).of(1024, 100));
        assert_eq!(left, [512, 256, 128, 100, 100, 100]);
        assert_eq!(course.share.to_string(), "1/16");
        assert_eq!(course.relaxed(now + INTERVAL), None);
        let mut grown = Vec::new();
        while course.due().is_some() {
            now += 2 * INTERVAL;
            grown.extend(course.relaxed(now).map(|share| share.of(1024, 0)));
        }
        assert_eq!(grown, [128, 256, 512, 1024]);
        assert!(course.share.is_whole());
        // A pool below its minimum stays as it is.
        assert_eq!(course.pressed(now).of(20, 64), 20);
    }

    #[test]
    fn missing_pressure_files_are_reported_and_limits_still_work() {
        let none = ["/nonexistent/one".to_owned(), "/nonexistent/two".to_owned()];
        let mut monitor = PressureMonitor::with_paths(&none);
        let why = monitor.errors().unwrap();
        assert!(why.contains("/nonexistent/one: No such file"), "{why}");
        assert!(why.contains("; /nonexistent/two: No such file"), "{why}");
        assert_eq!(monitor.descriptors().count(), 0);
        assert_eq!(monitor.adapt([PollFlags::PRI].into_iter()), Some(Share::WHOLE.halved()));
        assert_eq!(monitor.adapt([PollFlags::empty()].into_iter()), None);
    }

    #[test]
    fn wait_returns_the_events_of_other_files_and_the_share_that_is_due() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let (silent, _held) = rustix::pipe::pipe().unwrap();
        let mut monitor = PressureMonitor::without_triggers();
        assert_eq!(monitor.errors(), None);
        rustix::io::write(&writer, b"x").unwrap();
        let fds = || [&silent, &reader].map(|fd| PollFd::new(fd, PollFlags::IN)).to_vec();
        let events = vec![PollFlags::empty(), PollFlags::IN];
        assert_eq!(monitor.wait(fds(), None).unwrap(), (events.clone(), None));

        let long_ago = Instant::now().checked_sub(3 * INTERVAL).unwrap();
        monitor.course.pressed(long_ago);
        assert_eq!(monitor.wait(fds(), None).unwrap(), (events, Some(Share::WHOLE)));
    }

    #[test]
    fn failed_trigger_is_dropped_and_changes_no_limit() {
        let files = [tempfile::NamedTempFile::new().unwrap()];
        let paths = files.each_ref().map(|file| file.path().display().to_string());
        let mut monitor = PressureMonitor::with_paths(&paths);
        assert_eq!(monitor.descriptors().count(), 1);
        let failed = PollFlags::PRI | PollFlags::ERR;
        assert_eq!(monitor.adapt([failed].into_iter()), None);
        assert_eq!((monitor.descriptors().count(), monitor.course.due()), (0, None));
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
