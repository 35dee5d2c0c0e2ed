//! `ringfence-bench pressure`: grant windows shrink under memory pressure during a transfer and grow
//! again.
//!
//! # Theory of operation
//!
//! The stream is that of `bench gso` between two guests, in mode `window`. Launchers, frontends and
//! driver domain are in one control group ([`group`]). The ends of the stream are moved out of it after
//! their start: the kernel stalls tasks of a group under pressure for seconds, and TCP allocates memory
//! all the time, so the ends would measure their own stalls. The group's shared memory consists of grant
//! windows and a few ring pages. The kernel counts present pages, so a page that left a pool without
//! being punched is still counted.

pub(super) mod args;
mod group;
mod report;

use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::ensure;
use ringfence_access::Mode;
use ringfence_access::window::Revocation;
use ringfence_hostnet::out::Out;

use self::args::PressureArgs;
use self::group::Group;
use self::report::{Phase, PressureReport, Reading};
use super::gso::args::{StreamPath, StreamSetup};
use super::gso::case::{Modes, StreamCase};

/// Time before the first reading, and again before the pressure begins.
const WARM_UP: Duration = Duration::from_secs(3);
const CALM: Duration = Duration::from_secs(5);

/// Runs the experiment and prints the report.
pub(super) fn run(args: &PressureArgs) -> anyhow::Result<()> {
    let group = Group::create()?;
    let report = watch(&group, args)?;
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

/// Runs the stream through all phases and takes readings.
fn watch(group: &Group, args: &PressureArgs) -> anyhow::Result<PressureReport> {
    let pressed = args.seconds;
    let began = Instant::now();
    let mut report = PressureReport::default();
    let (mut phase, mut until) = (Phase::Before, WARM_UP);
    let case = StreamCase {
        path: StreamPath::GuestGuest,
        setup: StreamSetup::Whole,
        modes: Modes::both(Mode::Window),
        revocation: Revocation::Plain,
        length: Duration::ZERO,
    };
    case.watch(group.path(), |bytes| {
        let now = began.elapsed();
        let current = group.current()?;
        let (rss, pool) = (frontends(&group.processes()?), group.shared()?);
        let seconds = now.as_secs_f64();
        report.readings.push(Reading { seconds, phase, current, rss, pool, bytes });
        if phase == Phase::Before && bytes == 0 {
            // The guests have just started.
            until = now + WARM_UP;
        }
        if now < until {
            return Ok(true);
        }
        match phase {
            Phase::Before => {
                group
                    .processes()?
                    .into_iter()
                    .filter(|pid| is_end(*pid))
                    .try_for_each(|end| group.release(end))?;
                (phase, until) = (Phase::Calm, now + CALM);
            }
            Phase::Calm => {
                let most = report.most(Phase::Calm, |reading| reading.current);
                report.stalled_before = group.stalled()?;
                group.limit("memory.max", Some(most * 2))?;
                report.high = most / 100 * args.leave;
                group.limit("memory.high", Some(report.high))?;
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
    report.killed = group.killed()?;
    Ok(report)
}

/// Returns the command line of a process; empty after its exit.
fn role_of(process: u32) -> Vec<u8> {
    let words = std::fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
    words
        .split(|byte| *byte == 0)
        .skip_while(|word| *word != b"internal")
        .nth(1)
        .unwrap_or_default()
        .to_vec()
}

/// Returns `true` if the process is an end of the stream.
fn is_end(process: u32) -> bool {
    role_of(process) == b"bench-gso-end"
}

/// Returns the resident memory of the frontends among these processes in bytes.
fn frontends(processes: &[u32]) -> u64 {
    let resident = |process: &u32| {
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
        field(&status, "VmRSS:")
    };
    processes.iter().filter(|process| role_of(**process) == b"frontend").map(resident).sum()
}

/// Returns a field of `/proc/PID/status` that is in kilobytes, in bytes.
fn field(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    number.unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_fields_convert_to_bytes() {
        let status = "Name:\tringfence\nVmRSS:\t   5120 kB\nRssShmem:\t      12 kB\n";
        assert_eq!(field(status, "VmRSS:"), 5120 * 1024);
        assert_eq!(field(status, "RssShmem:"), 12 * 1024);
        assert_eq!(field(status, "RssAnon:"), 0);
    }
}
