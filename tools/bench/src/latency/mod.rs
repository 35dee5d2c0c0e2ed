//! `ringfence-bench latency`: latency of a request and its answer between two guests.
//!
//! Each mode has two guests of `ringfence run` on a switch of their own; all guests run from the
//! start. Requests are sent one at a time, by UDP or TCP of the guests' kernels (`end`). The modes
//! are measured alternately in short slices, so that interference affects all modes alike. The
//! guests of the other modes sleep meanwhile.

pub(crate) mod end;

use std::io::Write;
use std::net::SocketAddr;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::Receiver;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use hdrhistogram::Histogram;
use ringfence_access::Mode;
use serde::Serialize;

use self::end::{LatencyMessage, Protocol, SliceSpec};
use super::messages;
use super::params::{parse_mode, parse_seconds};
use ringfence::launch::guest_on;
use ringfence_hostnet::out::Out;
use ringfence_sandbox::owned_child::OwnedChild;

/// Time limit of any step, in addition to a slice.
const PATIENCE: Duration = Duration::from_secs(30);
/// Length of a slice.
const SLICE: Duration = Duration::from_millis(250);
/// Maximum ratio to copy that counts as no worse: the spread between runs of one mode.
const NO_WORSE: f64 = 1.05;
/// Reported quantiles of the latency.
const QUANTILES: [(&str, f64); 3] = [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)];

/// Latency of a request and its answer between two guests
#[derive(Debug, Args)]
pub struct LatencyArgs {
    /// Access modes for the guests' pages
    #[arg(long, value_name = "MODE", value_delimiter = ',', default_value = "copy,map,staging",
          value_parser = parse_mode)]
    pub modes: Vec<Mode>,

    /// Transport protocols
    #[arg(
        long = "protocol",
        value_name = "PROTOCOL",
        value_delimiter = ',',
        default_value = "udp,tcp"
    )]
    pub protocols: Vec<Protocol>,

    /// Bytes of a request, and of its answer
    #[arg(long, value_name = "BYTES", default_value = "64",
          value_parser = clap::value_parser!(u16).range(1..=1400))]
    pub size: u16,

    /// Measured time of each mode and protocol, in slices of a quarter of a second
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = parse_seconds)]
    pub seconds: Duration,

    /// One JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// A row as it is printed. Field names are part of the command's interface.
#[derive(Clone, Debug, Serialize)]
struct Row {
    experiment: &'static str,
    mode: &'static str,
    protocol: Protocol,
    size: u16,
    requests: u64,
    lost: u64,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    max_us: f64,
    /// Ratios to mode `copy` at p50, p99 and p99.9.
    #[serde(skip_serializing_if = "Option::is_none")]
    ratios: Option<[f64; 3]>,
    /// Set if no ratio exceeds [`NO_WORSE`].
    #[serde(skip_serializing_if = "Option::is_none")]
    no_worse: Option<bool>,
}

/// Measures every mode and protocol and prints the rows.
pub(super) fn run(args: &LatencyArgs) -> anyhow::Result<()> {
    let mut pairs = Vec::new();
    for &mode in &args.modes {
        pairs.push(Pair::start(mode).with_context(|| format!("mode {mode}"))?);
    }
    let mut out = Out;
    if !args.json {
        writeln!(out, "{}", heading())?;
    }
    for &protocol in &args.protocols {
        let order = |to, length| SliceSpec { protocol, to, size: args.size.into(), length };
        for pair in &pairs {
            pair.ask(&order(pair.to, SLICE))?;
        }
        let mut times = Vec::new();
        for _ in &pairs {
            times.push((end::histogram()?, 0));
        }
        let slices = (args.seconds.as_secs_f64() / SLICE.as_secs_f64()).ceil();
        for _ in (1..).map(f64::from).take_while(|slice| *slice <= slices) {
            for (pair, (times, lost)) in pairs.iter().zip(&mut times) {
                let (counts, gone) = pair.ask(&order(pair.to, SLICE))?;
                *lost += gone;
                for (value, count) in counts {
                    times.saturating_record_n(value, count);
                }
            }
        }
        let copy = args.modes.iter().zip(&times).find(|(mode, _)| **mode == Mode::Copy);
        let copy = copy.map(|(_, (times, _))| quantiles(times));
        for (&mode, (times, lost)) in args.modes.iter().zip(&times) {
            let row = Row::new(args, (mode, protocol), times, *lost, copy);
            let line = if args.json { serde_json::to_string(&row)? } else { row.line() };
            writeln!(out, "{line}")?;
        }
    }
    if !args.json {
        writeln!(
            out,
            "Microseconds. `to copy`: at p50, p99 and p99.9; no worse is at most {NO_WORSE}."
        )?;
    }
    Ok(())
}

/// Returns the reported quantiles in microseconds.
fn quantiles(times: &Histogram<u64>) -> [f64; 3] {
    QUANTILES.map(|(_, part)| times.value_at_quantile(part) as f64 / 1e3)
}

impl Row {
    fn new(
        args: &LatencyArgs,
        (mode, protocol): (Mode, Protocol),
        times: &Histogram<u64>,
        lost: u64,
        copy: Option<[f64; 3]>,
    ) -> Row {
        let [p50_us, p99_us, p999_us] = quantiles(times);
        let ratios = copy.filter(|_| mode != Mode::Copy).map(|[p50, p99, p999]| {
            [p50_us / p50.max(1e-3), p99_us / p99.max(1e-3), p999_us / p999.max(1e-3)]
        });
        Row {
            experiment: "latency",
            mode: mode.name(),
            protocol,
            size: args.size,
            requests: times.len(),
            lost,
            p50_us,
            p99_us,
            p999_us,
            max_us: times.max() as f64 / 1e3,
            ratios,
            no_worse: ratios.map(|ratios| ratios.iter().all(|ratio| *ratio <= NO_WORSE)),
        }
    }

    fn line(&self) -> String {
        let mut line = format!(
            "{:<8} {:<8} {:>9} {:>5} {:>9.1} {:>9.1} {:>9.1} {:>9.1}",
            self.mode,
            self.protocol.name(),
            self.requests,
            self.lost,
            self.p50_us,
            self.p99_us,
            self.p999_us,
            self.max_us
        );
        if let Some([p50, p99, p999]) = self.ratios {
            let words = if self.no_worse == Some(true) { "no worse" } else { "worse" };
            line += &format!("   {p50:.2} {p99:.2} {p999:.2} {words}");
        }
        line
    }
}

fn heading() -> String {
    let [p50, p99, p999] = QUANTILES.map(|(name, _)| name);
    format!(
        "{:<8} {:<8} {:>9} {:>5} {p50:>9} {p99:>9} {p999:>9} {:>9}   to copy",
        "mode", "protocol", "requests", "lost", "max"
    )
}

/// Two guests on one switch: client and server.
struct Pair {
    to: SocketAddr,
    asks: Guest,
    _answers: Guest,
}

impl Pair {
    fn start(mode: Mode) -> anyhow::Result<Pair> {
        let switch = format!("bench-latency-{}-{mode}", std::process::id());
        let answers = Guest::start(&switch, mode, "answer")?;
        let asks = Guest::start(&switch, mode, "ask")?;
        let to = match answers.hear()? {
            LatencyMessage::Listening { addresses, port } => {
                SocketAddr::new(*addresses.first().context("a guest without an address")?, port)
            }
            other => bail!("the one that answers said {other:?}"),
        };
        match asks.hear()? {
            LatencyMessage::Ready => Ok(Pair { to, asks, _answers: answers }),
            other => bail!("the one that asks said {other:?}"),
        }
    }

    /// Runs one slice. Returns pairs of nanoseconds and count, and the number of lost answers.
    fn ask(&self, order: &SliceSpec) -> anyhow::Result<(Vec<(u64, u64)>, u64)> {
        writeln!(&self.asks.orders, "{}", serde_json::to_string(order)?).context("an order")?;
        match self.asks.hear()? {
            LatencyMessage::Asked { counts, lost } => Ok((counts, lost)),
            other => bail!("the one that asks said {other:?}"),
        }
    }
}

/// Guest process, ended on drop.
struct Guest {
    _child: OwnedChild,
    orders: ChildStdin,
    said: Receiver<LatencyMessage>,
}

impl Guest {
    fn start(switch: &str, mode: Mode, role: &str) -> anyhow::Result<Guest> {
        let program = std::env::current_exe().context("finding this program's file")?;
        let mut command = Command::new(&program);
        command.args(guest_on(switch, mode.name()));
        command.arg("--");
        command.arg(&program).args(["internal", "bench-latency-end", role]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("starting a guest")?;
        let orders = child.stdin.take().context("a guest without input")?;
        let output = child.stdout.take().context("a guest without output")?;
        let said = messages::listen(output, LatencyMessage::Failed)?;
        Ok(Guest { _child: OwnedChild(child), orders, said })
    }

    fn hear(&self) -> anyhow::Result<LatencyMessage> {
        match self.said.recv_timeout(PATIENCE).context("a guest is gone, or says nothing")? {
            LatencyMessage::Failed(why) => bail!(why),
            said => Ok(said),
        }
    }
}
