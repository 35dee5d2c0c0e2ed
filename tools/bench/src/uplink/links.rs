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

use anyhow::{Context, ensure};
use ringfence_platform::vhost;
use ringfence_sys::namespaces::{self, Fresh};

use self::args::LinksArgs;
use self::path::LinkRun;
use super::args::UplinkDirection;
use super::end::{CaseSpec, EndServer, WorkloadKind};
use super::peers::HOST;
use crate::harness::{Format, Layout, Report, Value, left, median, right};

/// Congestion control that every kernel has.
const CONGESTION: &str = "cubic";

/// Link between guest and uplink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
struct LinkSetup {
    mtu: u16,
    /// Set if checksums and segmentation are offloaded in both directions.
    whole: bool,
}

/// Returns the published rates in Gbit/s: by a TAP, by vhost-net. The source does not name the machine.
fn published(direction: UplinkDirection) -> [f64; 2] {
    match direction {
        UplinkDirection::NsHost => [26.3, 36.9],
        UplinkDirection::HostNs => [16.0, 17.26],
    }
}

/// Row: the runs of one link.
struct LinkRow {
    link: LinkName,
    setup: LinkSetup,
    direction: UplinkDirection,
    runs: Vec<LinkRun>,
    /// For vhost-net: ratio of its rate to that of the TAP.
    to_tap: Option<f64>,
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
    let server = EndServer::bind(0)?;
    let port = server.port;
    std::thread::Builder::new().name("serve".to_owned()).spawn(move || server.serve())?;
    let report = Report::begin(layout(), Format::of(args.json))?;
    for setup in setups(args) {
        for direction in [UplinkDirection::NsHost, UplinkDirection::HostNs] {
            let rows = measure(args, setup, direction, port)?;
            rows.iter().try_for_each(|row| report.row(row))?;
        }
    }
    report.end()
}

fn setups(args: &LinksArgs) -> Vec<LinkSetup> {
    let each = |&mtu| [true, false].map(|whole| LinkSetup { mtu, whole });
    args.mtus.iter().flat_map(each).collect()
}

/// Measures a row for each link.
fn measure(
    args: &LinksArgs,
    setup: LinkSetup,
    direction: UplinkDirection,
    port: u16,
) -> anyhow::Result<[LinkRow; 2]> {
    let order = CaseSpec {
        kind: WorkloadKind::TcpStream,
        to: format!("{HOST}:{port}").parse()?,
        down: direction == UplinkDirection::HostNs,
        streams: 1,
        size: 0,
        length: args.seconds,
        pause: std::time::Duration::ZERO,
        names: None,
        name_server: None,
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
    let row = |link, runs| LinkRow { link, setup, direction, runs, to_tap: None };
    let tap = row(LinkName::Tap, tap);
    let mut vhost = row(LinkName::Vhost, vhost);
    let gbps = tap.gbps();
    vhost.to_tap = Some(if gbps > 0.0 { vhost.gbps() / gbps } else { 0.0 });
    Ok([tap, vhost])
}

impl LinkRow {
    fn median(&self, figure: impl Fn(&LinkRun) -> f64) -> f64 {
        median(self.runs.iter().map(figure))
    }

    fn gbps(&self) -> f64 {
        self.median(|run| run.bytes() * 8.0 / run.came.nanos.max(1) as f64)
    }

    fn published_gbps(&self) -> f64 {
        let [tap, vhost] = published(self.direction);
        if self.link == LinkName::Vhost { vhost } else { tap }
    }

    /// Returns the published ratio of vhost-net's rate to that of the TAP.
    fn published_to_tap(&self) -> Option<f64> {
        let [tap, vhost] = published(self.direction);
        self.to_tap.map(|_| vhost / tap)
    }
}

/// Returns the columns of a row.
fn layout() -> Layout<LinkRow> {
    Layout::new()
        .field("experiment", |_: &LinkRow| "vhost")
        .field("peer", |_| "ringfence")
        .column("link", |row| row.link.name(), left("link", 5))
        .field("case", |_| "tcp-stream")
        .column("direction", |row| row.direction.name(), left("way", 7))
        .column("mtu", |row| row.setup.mtu, right("mtu", 5))
        .column("offload", |row| if row.setup.whole { "whole" } else { "none" }, left("offload", 7))
        .field("streams", |_| 1usize)
        .field("rounds", |row| row.runs.len())
        .column("gbps", LinkRow::gbps, right("Gbit/s", 8).digits(3))
        .column(
            "cpu_ns_per_kb",
            |row| row.median(|run| run.cpu_ns as f64 * 1e3 / run.bytes()),
            right("cpu ns/kB", 9),
        )
        .column(
            "syscalls_per_mib",
            |row| row.median(|run| run.per_mib(run.link_calls + run.socket_calls)),
            right("calls/MiB", 9).digits(1),
        )
        .column(
            "link_syscalls_per_mib",
            |row| row.median(|run| run.per_mib(run.link_calls)),
            right("of link", 9).digits(1),
        )
        .column("seed_gbps", LinkRow::published_gbps, right("seed's", 8).digits(2))
        .column("to_tap", |row| Value::if_some(row.to_tap), right("ratio", 6).digits(2))
        .column(
            "seed_to_tap",
            |row| Value::if_some(row.published_to_tap()),
            right("ratio", 6).digits(2),
        )
        .order(&[
            "direction",
            "mtu",
            "offload",
            "link",
            "gbps",
            "cpu_ns_per_kb",
            "syscalls_per_mib",
            "link_syscalls_per_mib",
            "to_tap",
        ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uplink::end::CaseResult;

    fn run(bytes: u64) -> LinkRun {
        let came = CaseResult { nanos: 1_000_000_000, bytes, ..CaseResult::default() };
        LinkRun { came, cpu_ns: bytes, link_calls: 10, socket_calls: 30 }
    }

    fn row(link: LinkName, bytes: &[u64]) -> LinkRow {
        let setup = LinkSetup { mtu: 65520, whole: false };
        let runs = bytes.iter().map(|bytes| run(*bytes)).collect();
        LinkRow { link, setup, direction: UplinkDirection::HostNs, runs, to_tap: None }
    }

    #[test]
    fn system_calls_are_reported_per_mebibyte() {
        let row = row(LinkName::Vhost, &[1 << 20, 2 << 20, 2 << 20]);
        let json: serde_json::Value = serde_json::from_str(&layout().json(&row).unwrap()).unwrap();
        for (field, expected) in [
            ("syscalls_per_mib", 20.0),
            ("link_syscalls_per_mib", 5.0),
            ("cpu_ns_per_kb", 1000.0),
            ("seed_gbps", 17.26),
        ] {
            let is = json[field].as_f64().unwrap();
            assert!((is - expected).abs() < 1e-9, "{field}: {json}");
        }
        assert_eq!(json.get("to_tap").or(json.get("seed_to_tap")), None, "{json}");
    }

    #[test]
    fn vhost_has_its_ratios_to_the_tap() {
        let row = LinkRow { to_tap: Some(1.5), ..row(LinkName::Vhost, &[1 << 20]) };
        let json: serde_json::Value = serde_json::from_str(&layout().json(&row).unwrap()).unwrap();
        assert_eq!((&json["to_tap"], &json["seed_to_tap"]), (&1.5.into(), &(17.26 / 16.0).into()));
    }

    #[test]
    fn row_line_has_one_cell_per_heading() {
        let line = layout().line(&row(LinkName::Tap, &[1 << 20]));
        assert_eq!(line.len(), layout().heading().len());
        assert_eq!(line.split_whitespace().count(), 11);
    }
}
