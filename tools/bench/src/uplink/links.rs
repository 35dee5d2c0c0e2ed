//! `ringfence-bench seeds vhost`: a guest's link to its uplink by reads and writes of a TAP, and by
//! kernel vhost-net, as measured when vhost-net was proposed for pasta.
//!
//! # Theory of operation
//!
//! ```text
//!   the host's namespace                               the guest's
//!    server ── lo ── uplink's thread ── TAP file ──────── bench1 ── client
//!                                    ══ vhost-net ── TAP ── bench1
//! ```
//!
//! Only the link differs. The links alternate within a round.

pub mod args;
mod path;

use std::io::Write;

use anyhow::{Context, ensure};
use ringfence::out::Out;
use ringfence_sys::namespaces::{self, Fresh};
use ringfence_sys::vhost;
use serde::Serialize;

use self::args::LinksArgs;
use self::path::Measured;
use super::args::Direction;
use super::end::{CaseSpec, Kind, Server};
use super::peers::HOST;
use crate::harness::median;

/// Congestion control that every kernel has.
const CONGESTION: &str = "cubic";

/// Link between guest and uplink.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum LinkName {
    Tap,
    Vhost,
}

impl LinkName {
    const ALL: [LinkName; 2] = [LinkName::Tap, LinkName::Vhost];

    fn name(self) -> &'static str {
        match self {
            LinkName::Tap => "tap",
            LinkName::Vhost => "vhost",
        }
    }
}

/// Packet size and offloads of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Setup {
    mtu: u16,
    /// Set if checksums and segmentation are offloaded in both directions.
    whole: bool,
}

/// Returns the published rates in Gbit/s: by a TAP, by vhost-net. The source does not name the machine.
fn published(direction: Direction) -> [f64; 2] {
    match direction {
        Direction::NsHost => [26.3, 36.9],
        Direction::HostNs => [16.0, 17.26],
    }
}

/// Row as it is printed. Field names are part of the command's interface.
#[derive(Clone, Debug, Serialize)]
struct Row {
    experiment: &'static str,
    peer: &'static str,
    link: LinkName,
    case: &'static str,
    direction: Direction,
    mtu: u16,
    offload: &'static str,
    streams: usize,
    rounds: usize,
    gbps: f64,
    cpu_ns_per_kb: f64,
    syscalls_per_mib: f64,
    link_syscalls_per_mib: f64,
    seed_gbps: f64,
    /// For vhost-net: ratio of its rate to that of the TAP.
    #[serde(skip_serializing_if = "Option::is_none")]
    to_tap: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed_to_tap: Option<f64>,
}

/// Runs every row and prints it.
pub(crate) fn run(args: &LinksArgs) -> anyhow::Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "bench seeds vhost needs root, for the network namespaces at both ends"
    );
    drop(vhost::open()?);
    namespaces::unshare(Fresh::MountNetIpcUts).context("a network namespace for the host")?;
    let _network = super::host_network()?;
    super::choose_congestion(CONGESTION)?;
    let server = Server::bind(0)?;
    let port = server.port;
    std::thread::Builder::new().name("serve".to_owned()).spawn(move || server.serve())?;
    let mut out = Out;
    if !args.json {
        writeln!(out, "{}", heading())?;
    }
    for setup in setups(args) {
        for direction in [Direction::NsHost, Direction::HostNs] {
            for row in measure(args, setup, direction, port)? {
                let line = if args.json { serde_json::to_string(&row)? } else { row.line() };
                writeln!(out, "{line}")?;
            }
        }
    }
    Ok(())
}

fn setups(args: &LinksArgs) -> Vec<Setup> {
    let each = |&mtu| [true, false].map(|whole| Setup { mtu, whole });
    args.mtus.iter().flat_map(each).collect()
}

/// Measures a row for each link.
fn measure(
    args: &LinksArgs,
    setup: Setup,
    direction: Direction,
    port: u16,
) -> anyhow::Result<[Row; 2]> {
    let order = CaseSpec {
        kind: Kind::TcpStream,
        to: format!("{HOST}:{port}").parse()?,
        down: direction == Direction::HostNs,
        streams: 1,
        size: 0,
        length: args.seconds,
        names: None,
    };
    let order = serde_json::to_string(&order)?;
    let mut runs = [Vec::new(), Vec::new()];
    for _ in 0..args.rounds {
        for (link, runs) in LinkName::ALL.into_iter().zip(&mut runs) {
            let measured = path::measure(link, setup, &order, args.seconds);
            runs.push(measured.with_context(|| link.name())?);
        }
    }
    let [tap, vhost] = runs;
    let tap = Row::new(LinkName::Tap, setup, direction, &tap);
    let mut vhost = Row::new(LinkName::Vhost, setup, direction, &vhost);
    let [seed_tap, seed_vhost] = published(direction);
    vhost.to_tap = Some(if tap.gbps > 0.0 { vhost.gbps / tap.gbps } else { 0.0 });
    vhost.seed_to_tap = Some(seed_vhost / seed_tap);
    Ok([tap, vhost])
}

impl Row {
    fn new(link: LinkName, setup: Setup, direction: Direction, runs: &[Measured]) -> Row {
        let bytes = |run: &Measured| run.came.bytes.max(1) as f64;
        let per_mib = |calls: u64, run: &Measured| calls as f64 * f64::from(1 << 20) / bytes(run);
        Row {
            experiment: "vhost",
            peer: "ringfence",
            link,
            case: "tcp-stream",
            direction,
            mtu: setup.mtu,
            offload: if setup.whole { "whole" } else { "none" },
            streams: 1,
            rounds: runs.len(),
            gbps: median(runs.iter().map(|run| bytes(run) * 8.0 / run.came.nanos.max(1) as f64)),
            cpu_ns_per_kb: median(runs.iter().map(|run| run.cpu_ns as f64 * 1e3 / bytes(run))),
            syscalls_per_mib: median(
                runs.iter().map(|run| per_mib(run.link_calls + run.socket_calls, run)),
            ),
            link_syscalls_per_mib: median(runs.iter().map(|run| per_mib(run.link_calls, run))),
            seed_gbps: published(direction)[usize::from(link == LinkName::Vhost)],
            to_tap: None,
            seed_to_tap: None,
        }
    }

    fn line(&self) -> String {
        let ratio = |value: Option<f64>| {
            value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"))
        };
        format!(
            "{:<7} {:>5} {:<7} {:<5} {:>8.3} {:>9.0} {:>9.1} {:>9.1} {:>6} {:>8.2} {:>6}",
            if self.direction == Direction::NsHost { "ns-host" } else { "host-ns" },
            self.mtu,
            self.offload,
            self.link.name(),
            self.gbps,
            self.cpu_ns_per_kb,
            self.syscalls_per_mib,
            self.link_syscalls_per_mib,
            ratio(self.to_tap),
            self.seed_gbps,
            ratio(self.seed_to_tap),
        )
    }
}

fn heading() -> String {
    format!(
        "{:<7} {:>5} {:<7} {:<5} {:>8} {:>9} {:>9} {:>9} {:>6} {:>8} {:>6}",
        "way",
        "mtu",
        "offload",
        "link",
        "Gbit/s",
        "cpu ns/kB",
        "calls/MiB",
        "of link",
        "ratio",
        "seed's",
        "ratio"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uplink::end::CaseResult;

    fn measured(bytes: u64) -> Measured {
        let came = CaseResult { nanos: 1_000_000_000, bytes, ..CaseResult::default() };
        Measured { came, cpu_ns: bytes, link_calls: 10, socket_calls: 30 }
    }

    #[test]
    fn system_calls_are_reported_per_mebibyte() {
        let setup = Setup { mtu: 1500, whole: true };
        let runs = [measured(1 << 20), measured(2 << 20), measured(2 << 20)];
        let row = Row::new(LinkName::Vhost, setup, Direction::HostNs, &runs);
        assert!((row.syscalls_per_mib - 20.0).abs() < 1e-9);
        assert!((row.link_syscalls_per_mib - 5.0).abs() < 1e-9);
        assert!((row.cpu_ns_per_kb - 1000.0).abs() < 1e-9);
        assert!((row.seed_gbps - 17.26).abs() < 1e-9);
    }

    #[test]
    fn row_line_has_one_cell_per_heading() {
        let setup = Setup { mtu: 65520, whole: false };
        let row = Row::new(LinkName::Tap, setup, Direction::NsHost, &[measured(1 << 20)]);
        assert_eq!(row.line().len(), heading().len());
        assert_eq!(row.line().split_whitespace().count(), 11);
    }
}
