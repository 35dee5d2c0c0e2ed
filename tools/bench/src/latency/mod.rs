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

use self::end::{LatencyMessage, LatencyProtocol, SliceSpec};
use super::messages;
use super::params::{parse_mode, parse_seconds};
use crate::harness::{Format, Layout, Report, Value, left, right};
use ringfence::launch::guest_on;
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
    pub protocols: Vec<LatencyProtocol>,

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

/// Latency of one mode and protocol.
struct LatencyRow {
    mode: Mode,
    protocol: LatencyProtocol,
    size: u16,
    /// Nanoseconds of each request.
    times: Histogram<u64>,
    lost: u64,
    /// Quantiles of mode `copy` in the same run.
    copy: Option<[f64; 3]>,
}

impl LatencyRow {
    /// Returns the reported quantiles in microseconds.
    fn quantiles(&self) -> [f64; 3] {
        quantiles(&self.times)
    }

    /// Returns the ratios of the quantiles to those of mode `copy`.
    fn ratios(&self) -> Option<[f64; 3]> {
        let [p50, p99, p999] = self.copy.filter(|_| self.mode != Mode::Copy)?;
        let [p50_us, p99_us, p999_us] = self.quantiles();
        Some([p50_us / p50.max(1e-3), p99_us / p99.max(1e-3), p999_us / p999.max(1e-3)])
    }

    /// Returns `true` if no ratio exceeds [`NO_WORSE`].
    fn is_no_worse(&self) -> Option<bool> {
        Some(self.ratios()?.iter().all(|ratio| *ratio <= NO_WORSE))
    }

    fn compared(&self) -> String {
        let Some([p50, p99, p999]) = self.ratios() else { return String::new() };
        let words = if self.is_no_worse() == Some(true) { "no worse" } else { "worse" };
        format!("   {p50:.2} {p99:.2} {p999:.2} {words}")
    }
}

fn layout() -> Layout<LatencyRow> {
    let [p50, p99, p999] = QUANTILES.map(|(name, _)| right(name, 9).digits(1));
    Layout::new()
        .field("experiment", |_: &LatencyRow| "latency")
        .column("mode", |row| row.mode.name(), left("mode", 8))
        .written(
            "protocol",
            |row| Value::json(&row.protocol),
            left("protocol", 8),
            |row| row.protocol.name().to_owned(),
        )
        .field("size", |row| row.size)
        .column("requests", |row| row.times.len(), right("requests", 9))
        .column("lost", |row| row.lost, right("lost", 5))
        .column("p50_us", |row| row.quantiles()[0], p50)
        .column("p99_us", |row| row.quantiles()[1], p99)
        .column("p999_us", |row| row.quantiles()[2], p999)
        .column("max_us", |row| row.times.max() as f64 / 1e3, right("max", 9).digits(1))
        .field("ratios", |row| row.ratios().map_or(Value::Omitted, |ratios| Value::json(&ratios)))
        .field("no_worse", |row| Value::if_some(row.is_no_worse()))
        .tail("   to copy", LatencyRow::compared)
        .legend(format!(
            "Microseconds. `to copy`: at p50, p99 and p99.9; no worse is at most {NO_WORSE}."
        ))
}

/// Measures every mode and protocol and prints the rows.
pub(super) fn run(args: &LatencyArgs) -> anyhow::Result<()> {
    let mut pairs = Vec::new();
    for &mode in &args.modes {
        pairs.push(Pair::start(mode).with_context(|| format!("mode {mode}"))?);
    }
    let report = Report::begin(layout(), Format::of(args.json))?;
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
        for (&mode, (times, lost)) in args.modes.iter().zip(times) {
            report.row(&LatencyRow { mode, protocol, size: args.size, times, lost, copy })?;
        }
    }
    report.end()
}

/// Returns the reported quantiles in microseconds.
fn quantiles(times: &Histogram<u64>) -> [f64; 3] {
    QUANTILES.map(|(_, part)| times.value_at_quantile(part) as f64 / 1e3)
}

/// Two guests on one switch: client and server.
struct Pair {
    to: SocketAddr,
    asks: LatencyGuest,
    _answers: LatencyGuest,
}

impl Pair {
    fn start(mode: Mode) -> anyhow::Result<Pair> {
        let switch = format!("bench-latency-{}-{mode}", std::process::id());
        let answers = LatencyGuest::start(&switch, mode, "answer")?;
        let asks = LatencyGuest::start(&switch, mode, "ask")?;
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
struct LatencyGuest {
    _child: OwnedChild,
    orders: ChildStdin,
    said: Receiver<LatencyMessage>,
}

impl LatencyGuest {
    fn start(switch: &str, mode: Mode, role: &str) -> anyhow::Result<LatencyGuest> {
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
        Ok(LatencyGuest { _child: OwnedChild(child), orders, said })
    }

    fn hear(&self) -> anyhow::Result<LatencyMessage> {
        match self.said.recv_timeout(PATIENCE).context("a guest is gone, or says nothing")? {
            LatencyMessage::Failed(why) => bail!(why),
            said => Ok(said),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(mode: Mode, us: u64) -> LatencyRow {
        let mut times = end::histogram().unwrap();
        times.saturating_record_n(us * 1000, 100);
        let (protocol, copy) = (LatencyProtocol::Udp, Some([10.0, 10.0, 10.0]));
        LatencyRow { mode, protocol, size: 64, times, lost: 2, copy }
    }

    #[test]
    fn other_modes_are_compared_with_copy() {
        let copy: serde_json::Value =
            serde_json::from_str(&layout().json(&row(Mode::Copy, 10)).unwrap()).unwrap();
        assert_eq!(copy.get("ratios").or(copy.get("no_worse")), None, "{copy}");
        assert_eq!((&copy["requests"], &copy["lost"]), (&100.into(), &2.into()));
        assert_eq!(row(Mode::Map, 10).is_no_worse(), Some(true));
        assert_eq!(row(Mode::Map, 20).is_no_worse(), Some(false));
        assert!(layout().line(&row(Mode::Map, 20)).ends_with(" worse"));
    }

    #[test]
    fn row_line_has_one_cell_per_heading() {
        let line = layout().line(&row(Mode::Copy, 10));
        let heading = layout().heading();
        assert_eq!(Some(line.len()), heading.find("   to copy"), "{line}");
    }
}
