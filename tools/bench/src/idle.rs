//! `ringfence-bench idle`: cost of idle guests.
//!
//! Guests of `ringfence run` on one switch each run `sleep`. After all have started and settled, the
//! benchmark reads the CPU time and the wakeups of all its descendant processes twice: launchers, inits,
//! frontends and the driver domain.

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use ringfence_access::Mode;
use serde::Serialize;

use super::gso::cpu;
use super::params::{parse_mode, parse_seconds};
use ringfence::launch::guest_on;
use ringfence_hostnet::out::Out;
use ringfence_sandbox::owned_child::OwnedChild;

/// Maximum total CPU time that counts as idle: a hundredth of one core.
const SHARE_MAX: f64 = 0.01;
/// Time limit for the start of a guest.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time between the start of all guests and the measurement. By then their kernels have stopped
/// soliciting neighbours and routers (RFC 4861: three solicitations, four seconds apart).
const SETTLE: Duration = Duration::from_secs(14);

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

    /// One JSON object
    #[arg(long)]
    pub json: bool,
}

/// Row as it is printed. Field names are part of the command's interface.
#[derive(Clone, Debug, Serialize)]
struct Row {
    experiment: &'static str,
    guests: u16,
    mode: &'static str,
    seconds: f64,
    processes: usize,
    cpu_ms_per_second: f64,
    /// CPU time as a share of one core.
    cpu_share: f64,
    /// Voluntary context switches of all threads.
    wakeups_per_second: f64,
    judgement: &'static str,
}

pub(super) fn run(args: &IdleArgs) -> anyhow::Result<()> {
    let switch = format!("bench-idle-{}", std::process::id());
    let mut guests = Vec::new();
    for _ in 0..args.guests {
        guests.push(Guest::start(&switch, args.mode)?);
    }
    // The command of a guest starts once its interface is up, and prints a line.
    guests.iter_mut().try_for_each(Guest::wait)?;
    std::thread::sleep(SETTLE);
    let (began, before) = (Instant::now(), cpu::spent_by_descendants()?);
    ensure!(before.nanos > 0, "the kernel does not say what processor time processes take");
    std::thread::sleep(args.seconds);
    let after = cpu::spent_by_descendants()?;
    let seconds = began.elapsed().as_secs_f64();
    let cpu = after.nanos.saturating_sub(before.nanos) as f64 / 1e9 / seconds;
    let row = Row {
        experiment: "idle",
        guests: args.guests,
        mode: args.mode.name(),
        seconds,
        processes: after.processes,
        cpu_ms_per_second: cpu * 1e3,
        cpu_share: cpu,
        wakeups_per_second: after.sleeps.saturating_sub(before.sleeps) as f64 / seconds,
        judgement: if cpu < SHARE_MAX { "met" } else { "not met" },
    };
    let mut out = Out;
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&row)?)?;
    } else {
        writeln!(
            out,
            "{} idle guests, mode {}: {} processes take {:.3} % of one core, and wake {:.1} times a \
             second (below {} %: {})",
            row.guests,
            row.mode,
            row.processes,
            100.0 * row.cpu_share,
            row.wakeups_per_second,
            100.0 * SHARE_MAX,
            row.judgement
        )?;
    }
    Ok(())
}

/// Guest process, ended on drop.
struct Guest(OwnedChild);

impl Guest {
    fn start(switch: &str, mode: Mode) -> anyhow::Result<Guest> {
        let program = std::env::current_exe().context("finding this program's file")?;
        let mut command = Command::new(program);
        command.args(guest_on(switch, mode.name()));
        command.arg("--");
        command.args(["sh", "-c", "echo there; exec sleep 1000000"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        Ok(Guest(OwnedChild(command.spawn().context("starting a guest")?)))
    }

    fn wait(&mut self) -> anyhow::Result<()> {
        let output = self.0.stdout.as_ref().context("a guest without output")?;
        let heard = ringfence_sys::poll::wait_readable(output, Some(PATIENCE))?;
        let ended = self.0.try_wait()?;
        ensure!(heard && ended.is_none(), "a guest did not start within {PATIENCE:?} ({ended:?})");
        Ok(())
    }
}
