//! `ringfence-bench uplink`: throughput and latency of a guest's uplink, beside other programs.
//!
//! # Theory of operation
//!
//! ```text
//!   a network namespace that stands for the host
//!    bench: threads that serve ── lo ── uplink ── TAP ── client, in a guest of `ringfence run`
//!                              ── lo ── pasta  ── TAP ── client
//!                              ── lo ── slirp4netns TAP ── client
//!                              ── veth ─────────────── ── client
//! ```
//!
//! With `--policy`, Ringfence alone is measured, with and without an egress policy (`policy`).
//!
//! For inbound cases the sides are swapped: the server is in the guest, the client is a thread. Each row
//! and peer has a client process of its own behind a peer started for it. Peers alternate.

pub mod args;
pub(crate) mod end;
pub mod links;
mod names;
mod peers;
mod policy;

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use ringfence::causes::causes;
use ringfence::out::Out;
use ringfence_sys::namespaces::{self, Fresh};
use ringfence_sys::tap::Tap;
use serde::Serialize;

use self::args::{Case, Direction, Peer, UplinkArgs};
use self::end::{CaseResult, CaseSpec, EndMessage, Kind, Server};
use self::names::NAMES;
use self::peers::{Behind, GUEST, HOST, PORT};
use self::policy::Outside;
use super::gso::cpu::spent_by_descendants;
use super::perf::PerfStat;
use crate::harness::median;

/// A row as it is printed. Field names are part of the command's interface.
#[derive(Clone, Debug, Serialize)]
struct Row {
    experiment: &'static str,
    peer: Peer,
    case: &'static str,
    direction: Direction,
    mtu: u16,
    streams: usize,
    size: usize,
    congestion: String,
    rounds: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    gbps: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pps: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    loss: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    p50_us: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    p99_us: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    per_second: Option<f64>,
    cpu_ns_per_kb: f64,
    /// System calls of the forwarding process for 2^20 bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    syscalls_per_mib: Option<f64>,
    /// Ratio of Ringfence's figure to that of this peer; Ringfence is better above 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    ours_to_this: Option<f64>,
}

/// Result of one run.
struct UplinkRun {
    came: CaseResult,
    cpu_ns: u64,
    syscalls: Option<u64>,
}

/// Resource usage during a measurement.
struct Meter {
    cpu_ns: u64,
    perf: Option<PerfStat>,
}

impl Meter {
    fn begin(args: &UplinkArgs, behind: &Behind) -> anyhow::Result<Meter> {
        let carriers = if args.syscalls { behind.carriers()? } else { Vec::new() };
        let perf = (!carriers.is_empty()).then(|| PerfStat::begin(&carriers)).transpose()?;
        Ok(Meter { cpu_ns: cpu_ns()?, perf })
    }

    fn end(self, came: CaseResult) -> anyhow::Result<UplinkRun> {
        let cpu_ns = cpu_ns()?.saturating_sub(self.cpu_ns);
        let syscalls = self.perf.map(PerfStat::end).transpose()?;
        Ok(UplinkRun { came, cpu_ns, syscalls })
    }
}

/// Runs every row and prints it.
pub(super) fn run(args: &UplinkArgs) -> anyhow::Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "bench uplink needs root, for the network namespace that stands for the host and for veth"
    );
    let _allowed = Allowed::these(&args.congestion);
    namespaces::unshare(Fresh::MountNetIpcUts).context("a network namespace for the host")?;
    let _network = host_network()?;
    let server = Server::bind(0)?;
    let own = SocketAddr::new(HOST.parse()?, server.port);
    std::thread::Builder::new().name("serve".to_owned()).spawn(move || server.serve())?;
    let mut peers = args.peers();
    peers.retain(|peer| match peers::missing(args, *peer) {
        Some(why) => {
            eprintln!("ringfence: {} is left out: {why}", peer.name());
            false
        }
        None => true,
    });
    for peer in &peers {
        if let Some(version) = peers::version(args, *peer) {
            eprintln!("ringfence: {} is {version}", peer.name());
        }
    }
    let mut out = Out;
    if !args.json {
        writeln!(out, "{}", heading())?;
    }
    for congestion in &args.congestion {
        if let Err(error) = choose_congestion(congestion) {
            eprintln!("ringfence: {congestion} is left out: {}", causes(&error));
            continue;
        }
        let outside = args.policy.then(|| Outside::start(congestion)).transpose()?;
        let to = outside.as_ref().map_or(own, Outside::to);
        for case in args.cases() {
            // Datagrams have no congestion control, so one pass suffices.
            if case.kind == Kind::UdpStream && Some(congestion) != args.congestion.first() {
                continue;
            }
            for row in measure(args, &peers, &case, congestion, to)? {
                let line = if args.json { serde_json::to_string(&row)? } else { row.line() };
                writeln!(out, "{line}")?;
            }
        }
    }
    if !args.json {
        writeln!(out, "{}", LEGEND)?;
    }
    Ok(())
}

/// Sets up the host's network: the loopback, and a default route that some peers require.
fn host_network() -> anyhow::Result<Tap> {
    let tap = Tap::create("bench0").context("an interface for the host")?;
    peers::run(&["ip", "link", "set", "lo", "up"])?;
    peers::run(&["ip", "addr", "add", "192.0.2.2/24", "dev", "bench0"])?;
    peers::run(&["ip", "link", "set", "bench0", "up"])?;
    peers::run(&["ip", "route", "add", "default", "via", "192.0.2.1"])?;
    Ok(tap)
}

/// Previous list of congestion controls that network namespaces may choose, restored on drop.
struct Allowed {
    file: File,
    before: String,
}

impl Allowed {
    /// Adds to the list. Returns `None` if nothing is to be added or the list cannot be written.
    fn these(names: &[String]) -> Option<Allowed> {
        let path = "/proc/sys/net/ipv4/tcp_allowed_congestion_control";
        let before = std::fs::read_to_string(path).ok()?;
        let known = |name: &&String| before.split_whitespace().any(|known| known == *name);
        let more: Vec<_> = names.iter().filter(|name| !known(name)).map(String::as_str).collect();
        if more.is_empty() {
            return None;
        }
        // The open file reaches the list from another network namespace too.
        let file = OpenOptions::new().write(true).open(path).ok()?;
        file.write_at(format!("{} {}", before.trim(), more.join(" ")).as_bytes(), 0).ok()?;
        Some(Allowed { file, before })
    }
}

impl Drop for Allowed {
    fn drop(&mut self) {
        // Best effort: additional entries do no harm.
        let _ = self.file.write_at(self.before.as_bytes(), 0);
    }
}

/// Sets the default congestion control of this network namespace.
fn choose_congestion(name: &str) -> anyhow::Result<()> {
    let path = "/proc/sys/net/ipv4/tcp_congestion_control";
    std::fs::write(path, name).with_context(|| format!("choosing TCP {name}"))
}

/// Runs a row in all rounds. Returns a row for each peer with at least one successful run.
fn measure(
    args: &UplinkArgs,
    peers: &[Peer],
    case: &Case,
    congestion: &str,
    to: SocketAddr,
) -> anyhow::Result<Vec<Row>> {
    let mut runs: Vec<Vec<UplinkRun>> = peers.iter().map(|_| Vec::new()).collect();
    for _ in 0..args.rounds {
        for (peer, runs) in peers.iter().zip(&mut runs) {
            if *peer == Peer::Slirp4netns && case.inbound {
                continue;
            }
            let run = if case.inbound {
                inbound(args, *peer, case, congestion)
            } else {
                outbound(args, *peer, case, congestion, to)
            };
            match run.with_context(|| format!("{} {}", peer.name(), case.name)) {
                Ok(run) => runs.push(run),
                // A failure of another program does not end the benchmark.
                Err(error) if !matches!(peer, Peer::Ringfence | Peer::Policy) => {
                    eprintln!("ringfence: {}", causes(&error))
                }
                Err(error) => return Err(error),
            }
        }
    }
    let mut rows: Vec<Row> = Vec::new();
    for (peer, runs) in peers.iter().zip(&runs).filter(|(_, runs)| !runs.is_empty()) {
        let mut row = Row::new(*peer, case, congestion, runs)?;
        row.ours_to_this = rows
            .first()
            .and_then(|ours| ours.figure())
            .zip(row.figure())
            .map(|(ours, this)| if this > 0.0 { ours / this } else { 0.0 });
        rows.push(row);
    }
    Ok(rows)
}

fn order(args: &UplinkArgs, case: &Case, to: SocketAddr) -> CaseSpec {
    // The connection's origin is the client's side.
    let down = (case.direction == Direction::HostNs) != case.inbound;
    let (kind, streams, size) = (case.kind, case.streams, case.size);
    let names = args.policy.then_some(NAMES);
    CaseSpec { kind, to, down, streams, size, length: args.seconds, names }
}

fn outbound(
    args: &UplinkArgs,
    peer: Peer,
    case: &Case,
    congestion: &str,
    to: SocketAddr,
) -> anyhow::Result<UplinkRun> {
    let order = serde_json::to_string(&order(args, case, to))?;
    let behind = Behind::start(args, peer, case, &["client", congestion, &order])?;
    match behind.hear(Duration::ZERO)? {
        EndMessage::Begins => {}
        other => bail!("the client said {other:?}"),
    }
    let meter = Meter::begin(args, &behind)?;
    match behind.hear(args.seconds)? {
        EndMessage::Done(came) => meter.end(*came),
        other => bail!("the client said {other:?}"),
    }
}

fn inbound(
    args: &UplinkArgs,
    peer: Peer,
    case: &Case,
    congestion: &str,
) -> anyhow::Result<UplinkRun> {
    let behind = Behind::start(args, peer, case, &["server", congestion, &PORT.to_string()])?;
    match behind.hear(Duration::ZERO)? {
        EndMessage::Listening(_) => {}
        other => bail!("the server said {other:?}"),
    }
    let to = match peer {
        Peer::Veth => SocketAddr::new(GUEST.parse()?, PORT),
        _ => SocketAddr::new(Ipv4Addr::LOCALHOST.into(), PORT),
    };
    let mut meter = None;
    let came = end::ask(&order(args, case, to), || {
        meter = Some(Meter::begin(args, &behind)?);
        Ok(())
    })?;
    meter.context("it never began")?.end(came)
}

/// Returns the CPU time of this process and its descendants in nanoseconds.
fn cpu_ns() -> anyhow::Result<u64> {
    let own = super::usage::clock(rustix::time::ClockId::ProcessCPUTime);
    Ok(own + spent_by_descendants()?.nanos)
}

impl Row {
    fn new(peer: Peer, case: &Case, congestion: &str, runs: &[UplinkRun]) -> anyhow::Result<Row> {
        let seconds = |run: &UplinkRun| run.came.nanos.max(1) as f64 / 1e9;
        let is_datagrams = case.kind == Kind::UdpStream;
        let is_timed = matches!(case.kind, Kind::TcpRr | Kind::TcpCrr | Kind::Http);
        let gbps = median(runs.iter().map(|run| run.came.bytes as f64 * 8.0 / 1e9 / seconds(run)));
        let rate = median(runs.iter().map(|run| run.came.arrived as f64 / seconds(run)));
        let loss = median(
            runs.iter().map(|run| 1.0 - run.came.arrived as f64 / run.came.sent.max(1) as f64),
        );
        let per_mib = |run: &UplinkRun| {
            let mib = run.came.bytes.max(1) as f64 / f64::from(1 << 20);
            run.syscalls.map(|calls| calls as f64 / mib)
        };
        let syscalls: Vec<f64> = runs.iter().filter_map(per_mib).collect();
        let cpu = |run: &UplinkRun| run.cpu_ns as f64 * 1e3 / run.came.bytes.max(1) as f64;
        let mut times = end::histogram()?;
        for (value, count) in runs.iter().flat_map(|run| &run.came.times) {
            times.saturating_record_n(*value, *count);
        }
        let quantile = |part| is_timed.then(|| times.value_at_quantile(part) as f64 / 1e3);
        Ok(Row {
            experiment: "uplink",
            peer,
            case: case.name,
            direction: case.direction,
            mtu: case.mtu,
            streams: case.streams,
            size: case.size,
            congestion: if is_datagrams { "none".to_owned() } else { congestion.to_owned() },
            rounds: runs.len(),
            gbps: (!matches!(case.kind, Kind::TcpRr | Kind::TcpCrr)).then_some(gbps),
            pps: is_datagrams.then_some(rate),
            loss: is_datagrams.then_some(loss),
            p50_us: quantile(0.5),
            p99_us: quantile(0.99),
            per_second: is_timed.then_some(rate),
            cpu_ns_per_kb: median(runs.iter().map(cpu)),
            syscalls_per_mib: (!syscalls.is_empty()).then(|| median(syscalls.into_iter())),
            ours_to_this: None,
        })
    }

    /// Returns the figure by which peers are compared.
    fn figure(&self) -> Option<f64> {
        self.per_second.or(self.pps).or(self.gbps)
    }

    fn line(&self) -> String {
        let cell = |value: Option<f64>, digits: usize| {
            value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
        };
        format!(
            "{:<15} {:<7} {:>5} {:>3} {:>5} {:<6} {:<11} {:>8} {:>9} {:>7} {:>9} {:>9} {:>9} {:>9.0} {:>9} {:>6}",
            self.case,
            if self.direction == Direction::NsHost { "ns-host" } else { "host-ns" },
            self.mtu,
            self.streams,
            self.size,
            self.congestion,
            self.peer.name(),
            cell(self.gbps, 3),
            cell(self.pps.map(|pps| pps / 1e3), 1),
            cell(self.loss.map(|loss| loss * 100.0), 1),
            cell(self.p50_us, 1),
            cell(self.p99_us, 1),
            cell(self.per_second, 0),
            self.cpu_ns_per_kb,
            cell(self.syscalls_per_mib, 1),
            cell(self.ours_to_this, 2),
        )
    }
}

fn heading() -> String {
    format!(
        "{:<15} {:<7} {:>5} {:>3} {:>5} {:<6} {:<11} {:>8} {:>9} {:>7} {:>9} {:>9} {:>9} {:>9} {:>9} {:>6}",
        "case",
        "way",
        "mtu",
        "n",
        "size",
        "tcp",
        "peer",
        "Gbit/s",
        "kpps",
        "loss %",
        "p50 us",
        "p99 us",
        "per s",
        "cpu ns/kB",
        "calls/MiB",
        "ratio"
    )
}

const LEGEND: &str = "\
`ratio`: ours to this one's, of what each row is about (requests, datagrams, bytes a second): above 1
we are ahead. `n`: connections. `cpu`: of all processes, clients and servers included. `loss`: of what
was sent as fast as it could be; kpps are those that arrived. `calls`: system calls of the process that
carries packets, with --syscalls.";

/// Runs `internal bench-uplink-end`. Returns the exit status.
pub(crate) fn end_main(role: &str, congestion: &str, what: &str) -> u8 {
    // A server that outlives its peer would hold the port of the next row's server. pasta, ended by a
    // signal, leaves its command running.
    if let Err(error) = ringfence_sandbox::die_with_parent() {
        eprintln!("ringfence: a server may outlive its peer: {error}");
    }
    // The new network namespace starts with the host's default. If the choice is refused, that default
    // stays in effect.
    if let Err(error) = choose_congestion(congestion) {
        eprintln!("ringfence: {}", causes(&error));
    }
    match role {
        "client" => end::client_main(what),
        "outside" => end::outside_main(what.parse().unwrap_or(PORT)),
        _ => end::server_main(what.parse().unwrap_or(PORT)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_line_has_one_cell_per_heading() {
        let case = Case {
            name: "tcp-rr",
            kind: Kind::TcpRr,
            direction: Direction::NsHost,
            mtu: 1500,
            streams: 1,
            size: 0,
            inbound: false,
        };
        let came = CaseResult {
            nanos: 1_000_000_000,
            bytes: 1000,
            sent: 100,
            arrived: 100,
            times: vec![(5000, 99), (90_000, 1)],
        };
        let row = Row::new(
            Peer::Pasta,
            &case,
            "bbr",
            &[UplinkRun { came, cpu_ns: 7, syscalls: Some(1) }],
        )
        .unwrap();
        assert_eq!(row.per_second, Some(100.0));
        assert!(row.gbps.is_none() && row.p50_us.is_some_and(|us| (us - 5.0).abs() < 0.1));
        assert_eq!(row.line().len(), heading().len(), "{}", row.line());
        assert_eq!(row.line().split_whitespace().count(), 16);
    }
}
