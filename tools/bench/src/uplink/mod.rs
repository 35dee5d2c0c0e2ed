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
mod lookups;
mod names;
mod peers;
mod policy;
mod report;
mod slow;

use std::fs::{File, OpenOptions};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use ringfence_hostnet::causes::causes;
use ringfence_sys::namespaces::{self, Fresh};
use ringfence_sys::tap::Tap;

use self::args::{UplinkArgs, UplinkDirection, UplinkPeer, Workload};
use self::end::{CaseResult, CaseSpec, EndMessage, EndServer, WorkloadKind};
use self::lookups::NameServer;
use self::names::NAMES;
use self::peers::{Behind, GUEST, HOST, PORT};
use self::policy::Outside;
use self::report::{UplinkRow, UplinkRun};
use self::slow::Shaped;
use super::gso::cpu::spent_by_descendants;
use super::perf::{PerfStat, SYSCALLS};
use crate::harness::{Format, Report, STATUS_BENCH_FAILED};

/// Resource usage during a measurement.
struct Meter {
    cpu_ns: u64,
    perf: Option<PerfStat>,
}

impl Meter {
    fn begin(args: &UplinkArgs, behind: &Behind) -> anyhow::Result<Meter> {
        let carriers = if args.syscalls { behind.carriers()? } else { Vec::new() };
        let perf =
            (!carriers.is_empty()).then(|| PerfStat::begin(SYSCALLS, &carriers)).transpose()?;
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
    let server = EndServer::bind(0)?;
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
    let has_lookups = args.cases().iter().any(|case| case.kind == WorkloadKind::BulkDns);
    let _name_server = has_lookups.then(|| NameServer::start(peers::run)).transpose()?;
    let report = Report::begin(report::layout(), Format::of(args.json))?;
    let (mut passes, mut measured) = (0, 0);
    for congestion in &args.congestion {
        if let Err(error) = choose_congestion(congestion) {
            eprintln!("ringfence: {congestion} is left out: {}", causes(&error));
            continue;
        }
        passes += 1;
        let outside = args.policy.then(|| Outside::start(congestion)).transpose()?;
        let to = outside.as_ref().map_or(own, Outside::to);
        for case in args.cases() {
            // Datagrams have no congestion control, so one pass suffices.
            let is_datagrams = matches!(case.kind, WorkloadKind::UdpStream | WorkloadKind::BulkDns);
            if is_datagrams && passes > 1 {
                continue;
            }
            let rows = measure(args, &peers, &case, congestion, to)?;
            rows.iter().try_for_each(|row| report.row(row))?;
            measured += rows.len();
        }
    }
    ensure!(measured > 0, "nothing was measured: each peer or congestion control was left out");
    report.end()
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
    peers: &[UplinkPeer],
    case: &Workload,
    congestion: &str,
    to: SocketAddr,
) -> anyhow::Result<Vec<UplinkRow>> {
    let mut runs: Vec<Vec<UplinkRun>> = peers.iter().map(|_| Vec::new()).collect();
    for _ in 0..args.rounds {
        for (peer, runs) in peers.iter().zip(&mut runs) {
            if !is_measured(*peer, case) {
                continue;
            }
            let _shaped = case.shape.map(Shaped::begin).transpose()?;
            let run = if case.inbound {
                inbound(args, *peer, case, congestion)
            } else {
                outbound(args, *peer, case, congestion, to)
            };
            match run.with_context(|| format!("{} {}", peer.name(), case.name)) {
                Ok(run) => runs.push(run),
                // A failure of another program does not end the benchmark.
                Err(error) if !matches!(peer, UplinkPeer::Ringfence | UplinkPeer::Policy) => {
                    eprintln!("ringfence: {}", causes(&error))
                }
                Err(error) => return Err(error),
            }
        }
    }
    let mut rows: Vec<UplinkRow> = Vec::new();
    for (peer, runs) in peers.iter().zip(runs).filter(|(_, runs)| !runs.is_empty()) {
        let mut row = UplinkRow::new(*peer, *case, congestion, runs)?;
        row.ours_to_this = rows
            .first()
            .and_then(|ours| ours.figure())
            .zip(row.figure())
            .map(|(ours, this)| if this > 0.0 { ours / this } else { 0.0 });
        rows.push(row);
    }
    Ok(rows)
}

/// Returns `true` if a peer can carry a row.
fn is_measured(peer: UplinkPeer, case: &Workload) -> bool {
    match peer {
        UplinkPeer::Slirp4netns => !case.inbound,
        // Its traffic does not pass the loopback that is shaped, nor reach the name server there.
        UplinkPeer::Veth => case.shape.is_none() && case.kind != WorkloadKind::BulkDns,
        UplinkPeer::Host => {
            matches!(case.kind, WorkloadKind::SlowPeer | WorkloadKind::BulkDns)
        }
        _ => true,
    }
}

fn order(args: &UplinkArgs, case: &Workload, to: SocketAddr) -> CaseSpec {
    // The connection's origin is the client's side.
    let down = (case.direction == UplinkDirection::HostNs) != case.inbound;
    let (kind, streams, size) = (case.kind, case.streams, case.size);
    let names = args.policy.then_some(NAMES);
    let pause = slow::pause(case.name, args.seconds);
    let (length, name_server) = (args.seconds, None);
    CaseSpec { kind, to, down, streams, size, length, names, pause, name_server }
}

fn outbound(
    args: &UplinkArgs,
    peer: UplinkPeer,
    case: &Workload,
    congestion: &str,
    to: SocketAddr,
) -> anyhow::Result<UplinkRun> {
    let to = match peer {
        UplinkPeer::Host => SocketAddr::new(Ipv4Addr::LOCALHOST.into(), to.port()),
        _ => to,
    };
    let order = CaseSpec { name_server: peers::name_server(peer), ..order(args, case, to) };
    let order = serde_json::to_string(&order)?;
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
    peer: UplinkPeer,
    case: &Workload,
    congestion: &str,
) -> anyhow::Result<UplinkRun> {
    let behind = Behind::start(args, peer, case, &["server", congestion, &PORT.to_string()])?;
    match behind.hear(Duration::ZERO)? {
        EndMessage::Listening(_) => {}
        other => bail!("the server said {other:?}"),
    }
    let to = match peer {
        UplinkPeer::Veth => SocketAddr::new(GUEST.parse()?, PORT),
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
    match (role, what.parse()) {
        ("client", _) => end::client_main(what),
        ("outside", Ok(port)) => end::outside_main(port),
        (_, Ok(port)) => end::server_main(port),
        (_, Err(error)) => {
            eprintln!("ringfence: the port {what}: {error}");
            STATUS_BENCH_FAILED
        }
    }
}
