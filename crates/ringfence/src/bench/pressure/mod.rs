//! `ringfence bench pressure`: windows that shrink under memory pressure and grow again, in the middle of a
//! transfer.
//!
//! # Theory of operation
//!
//! The stream is that of `bench gso` between two guests, in mode `window`; launchers, frontends, driver
//! domain and ends are all in one control group ([`group`]). A frontend's shared resident memory is read from
//! `/proc`: the pages of its windows, and a few of rings. It counts pages that are there, whatever the
//! frontend believes of them: one that left a pool and was not punched would still be counted.

pub(super) mod args;
mod group;
mod report;

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::ensure;
use ringfence_grants::Mode;

use self::args::PressureArgs;
use self::group::Group;
use self::report::{Phase, Reading, Report};
use super::gso::args::{Path, Setup};
use super::gso::case::{Case, End};
use crate::sys::out::Out;

/// How long the stream flows before anything is measured, and then before there is pressure.
const WARM_UP: Duration = Duration::from_secs(3);
const CALM: Duration = Duration::from_secs(5);

/// Runs everything.
pub(super) fn run(args: &PressureArgs) -> anyhow::Result<()> {
    let group = Group::create()?;
    let report = watch(&group, args.seconds)?;
    let mut out = Out;
    if args.json {
        report.json()?.iter().try_for_each(|line| writeln!(out, "{line}"))?;
    } else {
        write!(out, "{}", report.text())?;
    }
    if let Some(path) = &args.html {
        report.page()?.write(path)?;
    }
    let wrong = report.outcome().wrong();
    ensure!(wrong.is_empty(), "{}", wrong.join("; "));
    Ok(())
}

/// Lets the stream flow, and everything happen.
fn watch(group: &Group, pressed: Duration) -> anyhow::Result<Report> {
    let began = Instant::now();
    let mut report = Report::default();
    let (mut phase, mut until) = (Phase::Before, WARM_UP);
    let mut eater = None;
    let case = Case { path: Path::GuestGuest, setup: Setup::Whole, mode: Mode::Window, number: 0 };
    case.watch(group.path(), |octets| {
        let now = began.elapsed();
        let current = group.current()?;
        let (rss, pool) = frontends(&group.processes()?)?;
        let seconds = now.as_secs_f64();
        report.readings.push(Reading { seconds, phase, current, rss, pool, octets });
        if phase == Phase::Before && pool == 0 {
            // The guests are on their way.
            until = now + WARM_UP;
        }
        if now < until {
            return Ok(true);
        }
        match phase {
            Phase::Before => {
                // What comes and goes is more than half of what is used at most, and the rest fits.
                eater = Some(End::eater(group.path(), current + current / 2)?);
                (phase, until) = (Phase::Calm, now + CALM);
            }
            Phase::Calm => {
                let most = report.most(Phase::Calm, |reading| reading.current);
                report.stalled_before = group.stalled()?;
                group.limit("memory.max", Some(most * 2))?;
                group.limit("memory.high", Some(most / 2))?;
                report.high = most / 2;
                (phase, until) = (Phase::Pressed, now + pressed);
            }
            Phase::Pressed => {
                report.stalled = group.stalled()?.saturating_sub(report.stalled_before);
                group.limit("memory.high", None)?;
                group.limit("memory.max", None)?;
                (phase, until) = (Phase::Lifted, now + pressed);
            }
            Phase::Lifted => return Ok(false),
        }
        Ok(true)
    })?;
    drop(eater);
    report.killed = group.killed()?;
    Ok(report)
}

/// What the frontends among these processes have resident, and of that what is shared, in bytes.
fn frontends(processes: &[u32]) -> anyhow::Result<(u64, u64)> {
    let (mut rss, mut pool) = (0, 0);
    for process in processes {
        // One that has just ended is none.
        let read = |file| std::fs::read(format!("/proc/{process}/{file}")).unwrap_or_default();
        let words = read("cmdline");
        if !words.split(|byte| *byte == 0).skip(1).take(2).eq([&b"internal"[..], b"frontend"]) {
            continue;
        }
        let status = String::from_utf8_lossy(&read("status")).into_owned();
        rss += field(&status, "VmRSS:");
        pool += field(&status, "RssShmem:");
    }
    Ok((rss, pool))
}

/// A field of `/proc/PID/status` that is in kilobytes.
fn field(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    number.unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_in_bytes() {
        let status = "Name:\tringfence\nVmRSS:\t   5120 kB\nRssShmem:\t      12 kB\n";
        assert_eq!(field(status, "VmRSS:"), 5120 * 1024);
        assert_eq!(field(status, "RssShmem:"), 12 * 1024);
        assert_eq!(field(status, "RssAnon:"), 0);
    }
}
