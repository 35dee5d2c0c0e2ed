//! `ringfence-bench idle`: cost of idle guests.
//!
//! Guests of `ringfence run` on one switch each run `sleep`. After all have started and settled, the
//! benchmark reads the CPU time and the wakeups of all its descendant processes twice: launchers, inits,
//! frontends and the driver domain.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use ringfence_access::Mode;

use super::gso::cpu;
use super::params::{parse_mode, parse_seconds};
use crate::harness::{Format, Layout, Report};
use ringfence::launch::guest_on;
use ringfence_sandbox::owned_child::OwnedChild;

/// Maximum total CPU time that counts as idle: a hundredth of one core.
const SHARE_MAX: f64 = 0.01;
/// Time limit for the start of a guest.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time between the start of all guests and the measurement. By then their kernels have stopped
/// soliciting neighbours and routers (RFC 4861: three solicitations, four seconds apart).
const SETTLE: &str = "14";

/// Cost of idle guests: CPU time and wakeups
#[derive(Debug, Args)]
pub struct IdleArgs {
    /// Guests on the switch
    #[arg(long, value_name = "N", default_value = "10",
          value_parser = clap::value_parser!(u16).range(1..=64))]
    pub guests: u16,

    /// Access mode of the driver domain for the guests' pages
    #[arg(long, value_name = "MODE", default_value = "staging", value_parser = parse_mode)]
    pub mode: Mode,

    /// Measured time in seconds
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = parse_seconds)]
    pub seconds: Duration,

    /// Seconds between the start of all guests and the measurement
    #[arg(long, value_name = "SECONDS", default_value = SETTLE, value_parser = parse_seconds)]
    pub settle: Duration,

    /// One JSON object
    #[arg(long)]
    pub json: bool,
}

/// Cost of all guests of a switch in the measured time.
struct IdleCost {
    guests: u16,
    mode: Mode,
    seconds: f64,
    processes: usize,
    /// CPU time as a share of one core.
    cpu_share: f64,
    /// Voluntary context switches of all threads.
    wakeups_per_second: f64,
}

impl IdleCost {
    fn judgement(&self) -> &'static str {
        if self.cpu_share < SHARE_MAX { "met" } else { "not met" }
    }

    fn sentence(&self) -> String {
        format!(
            "{} idle guests, mode {}: {} processes take {:.3} % of one core, and wake {:.1} times a \
             second (below {} %: {})",
            self.guests,
            self.mode.name(),
            self.processes,
            100.0 * self.cpu_share,
            self.wakeups_per_second,
            100.0 * SHARE_MAX,
            self.judgement()
        )
    }
}

/// Returns the fields of the cost; the table has it as a sentence.
fn layout() -> Layout<IdleCost> {
    Layout::new()
        .field("experiment", |_: &IdleCost| "idle")
        .field("guests", |cost| cost.guests)
        .field("mode", |cost| cost.mode.name())
        .field("seconds", |cost| cost.seconds)
        .field("processes", |cost| cost.processes)
        .field("cpu_ms_per_second", |cost| cost.cpu_share * 1e3)
        .field("cpu_share", |cost| cost.cpu_share)
        .field("wakeups_per_second", |cost| cost.wakeups_per_second)
        .field("judgement", IdleCost::judgement)
        .tail("", IdleCost::sentence)
}

pub(super) fn run(args: &IdleArgs) -> anyhow::Result<()> {
    let switch = format!("bench-idle-{}", std::process::id());
    let mut guests = Vec::new();
    for _ in 0..args.guests {
        guests.push(IdleGuest::start(&switch, args.mode)?);
    }
    // The command of a guest starts once its interface is up, and prints a line.
    guests.iter_mut().try_for_each(IdleGuest::wait)?;
    std::thread::sleep(args.settle);
    let (began, before) = (Instant::now(), cpu::spent_by_descendants()?);
    ensure!(before.nanos > 0, "the kernel does not say what processor time processes take");
    std::thread::sleep(args.seconds);
    let after = cpu::spent_by_descendants()?;
    let seconds = began.elapsed().as_secs_f64();
    let cpu = after.nanos.saturating_sub(before.nanos) as f64 / 1e9 / seconds;
    let report = Report::begin(layout(), Format::of(args.json))?;
    report.row(&IdleCost {
        guests: args.guests,
        mode: args.mode,
        seconds,
        processes: after.processes,
        cpu_share: cpu,
        wakeups_per_second: after.sleeps.saturating_sub(before.sleeps) as f64 / seconds,
    })?;
    report.end()
}

/// Guest process, ended on drop.
struct IdleGuest(OwnedChild);

impl IdleGuest {
    fn start(switch: &str, mode: Mode) -> anyhow::Result<IdleGuest> {
        let program = std::env::current_exe().context("finding this program's file")?;
        let mut command = Command::new(program);
        command.args(guest_on(switch, mode.name()));
        command.arg("--");
        command.args(["sh", "-c", "echo there; exec sleep 1000000"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        Ok(IdleGuest(OwnedChild(command.spawn().context("starting a guest")?)))
    }

    fn wait(&mut self) -> anyhow::Result<()> {
        let output = self.0.stdout.as_ref().context("a guest without output")?;
        let heard = ringfence_sys::poll::wait_readable(output, Some(PATIENCE))?;
        let ended = self.0.try_wait()?;
        ensure!(heard && ended.is_none(), "a guest did not start within {PATIENCE:?} ({ended:?})");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cost_is_a_sentence_or_an_object() {
        let cost = IdleCost {
            guests: 10,
            mode: Mode::Copy,
            seconds: 5.0,
            processes: 31,
            cpu_share: 0.0025,
            wakeups_per_second: 3.0,
        };
        assert_eq!(
            layout().line(&cost),
            "10 idle guests, mode copy: 31 processes take 0.250 % of one core, and wake 3.0 times a \
             second (below 1 %: met)"
        );
        let json = layout().json(&cost).unwrap();
        assert!(json.contains("\"cpu_ms_per_second\":2.5,\"cpu_share\":0.0025"), "{json}");
    }
}
