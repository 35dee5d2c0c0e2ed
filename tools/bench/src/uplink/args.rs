//! Command line of `bench uplink`, and the list of its cases.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::super::params::parse_seconds;
use super::end::WorkloadKind;
use super::lookups::LOOKUPS;
use super::slow::{BUFFERS, PAUSED, SHAPES, Shape};

const NOTES: &str = "\
The loopback interface of a network namespace stands for the host. Servers are threads of this
program there, clients are processes behind each peer. Needs root, and the programs of the peers.
A peer that is not installed is left out, with a message.

Each peer is started afresh for each row. Peers take turns within a row, so that other load of the
machine affects all of them alike. docs/perf/howto.md explains every column.";

/// Throughput and latency of a guest's uplink to the host's network, beside other programs
#[derive(Debug, Args)]
#[command(after_help = NOTES)]
pub struct UplinkArgs {
    /// Programs to compare with in the same run: some of them, or `all`
    #[arg(long = "vs", value_name = "PEER", value_delimiter = ',')]
    pub versus: Vec<Versus>,

    /// Workloads to measure; all by default
    #[arg(long = "case", value_name = "CASE", value_delimiter = ',')]
    pub kinds: Vec<WorkloadKind>,

    /// Measured time of each row
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = parse_seconds)]
    pub seconds: Duration,

    /// Measurements of each row; the median is printed
    #[arg(long, value_name = "N", default_value = "1",
          value_parser = clap::value_parser!(u8).range(1..))]
    pub rounds: u8,

    /// Program to start as pasta, for example one built from source
    #[arg(long, value_name = "FILE", default_value = "pasta")]
    pub pasta: PathBuf,

    /// Another pasta, whose rows are called `pasta-2`
    #[arg(long, value_name = "FILE")]
    pub second_pasta: Option<PathBuf>,

    /// TCP congestion control, at both ends and in between
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_value = "bbr,cubic")]
    pub congestion: Vec<String>,

    /// Link of the Ringfence guest
    #[arg(long, value_name = "LINK", default_value = "auto",
          value_parser = ["auto", "vhost", "tap"])]
    pub link: String,

    /// Queues of the Ringfence guest's interface, each with a thread
    #[arg(long, value_name = "N", default_value = "1",
          value_parser = clap::value_parser!(u8).range(1..=8))]
    pub queues: u8,

    /// Count the system calls of the forwarding process with perf, which slows each one down
    #[arg(long)]
    pub syscalls: bool,

    /// Compare a guest under an egress policy (1,000 rules, 10,000 pinned addresses) with one without
    ///
    /// The cases are tcp-crr, whose connections begin with an HTTP request for an allowed name, and tcp-stream.
    #[arg(long, conflicts_with = "versus")]
    pub policy: bool,

    /// One JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// Program to compare with, as given on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Versus {
    /// pasta, of passt
    Pasta,
    /// slirp4netns
    Slirp4netns,
    /// A pair of interfaces, which needs root
    Veth,
    /// No network of its own: the client is on the host. For slow peers
    Host,
    /// All of them that are installed
    All,
}

/// Program that connects the guest's namespace to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum UplinkPeer {
    Ringfence,
    /// Ringfence with an egress policy
    Policy,
    Pasta,
    /// Another pasta
    #[serde(rename = "pasta-2")]
    SecondPasta,
    Slirp4netns,
    Veth,
    Host,
}

impl UplinkPeer {
    pub(super) fn name(self) -> &'static str {
        match self {
            UplinkPeer::Ringfence => "ringfence",
            UplinkPeer::Policy => "policy",
            UplinkPeer::Pasta => "pasta",
            UplinkPeer::SecondPasta => "pasta-2",
            UplinkPeer::Slirp4netns => "slirp4netns",
            UplinkPeer::Veth => "veth",
            UplinkPeer::Host => "host",
        }
    }
}

/// Direction of the measured data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum UplinkDirection {
    /// From the guest's namespace to the host
    NsHost,
    /// From the host to the guest's namespace
    HostNs,
}

impl UplinkDirection {
    /// Returns the name, as in JSON.
    pub(super) fn name(self) -> &'static str {
        match self {
            UplinkDirection::NsHost => "ns-host",
            UplinkDirection::HostNs => "host-ns",
        }
    }
}

/// Workload of the benchmark: one row for each peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Workload {
    pub(super) name: &'static str,
    pub(super) kind: WorkloadKind,
    pub(super) direction: UplinkDirection,
    pub(super) mtu: u16,
    pub(super) streams: usize,
    /// Bytes of a datagram, or of a slow peer's receive buffer.
    pub(super) size: usize,
    /// Set if the connection comes from the host, through a forwarded port.
    pub(super) inbound: bool,
    /// Shape of the link to the server, if it has one.
    pub(super) shape: Option<Shape>,
}

impl UplinkArgs {
    /// Returns Ringfence and the peers that were requested.
    pub(super) fn peers(&self) -> Vec<UplinkPeer> {
        if self.policy {
            return vec![UplinkPeer::Ringfence, UplinkPeer::Policy];
        }
        let asked = |versus| self.versus.iter().any(|v| *v == versus || *v == Versus::All);
        let mut others = vec![
            (Versus::Pasta, UplinkPeer::Pasta),
            (Versus::Pasta, UplinkPeer::SecondPasta),
            (Versus::Slirp4netns, UplinkPeer::Slirp4netns),
            (Versus::Veth, UplinkPeer::Veth),
            (Versus::Host, UplinkPeer::Host),
        ];
        others.retain(|(_, peer)| *peer != UplinkPeer::SecondPasta || self.second_pasta.is_some());
        let others = others.into_iter().filter(|(versus, _)| asked(*versus)).map(|(_, peer)| peer);
        [UplinkPeer::Ringfence].into_iter().chain(others).collect()
    }

    /// Returns the cases of the requested workloads.
    pub(super) fn cases(&self) -> Vec<Workload> {
        let both = [UplinkDirection::NsHost, UplinkDirection::HostNs];
        let mut cases = Vec::new();
        let row = |name, kind, direction| Workload {
            name,
            kind,
            direction,
            mtu: 65520,
            streams: 1,
            size: 0,
            inbound: false,
            shape: None,
        };
        for (mtu, streams) in [(65520, 1), (1500, 1), (65520, 8)] {
            cases.extend(both.map(|direction| Workload {
                mtu,
                streams,
                ..row("tcp-stream", WorkloadKind::TcpStream, direction)
            }));
        }
        for size in [64, 1400] {
            let row =
                |d| Workload { size, mtu: 1500, ..row("udp-stream", WorkloadKind::UdpStream, d) };
            cases.extend(both.map(row));
        }
        cases.push(row("tcp-rr", WorkloadKind::TcpRr, UplinkDirection::NsHost));
        cases.push(row("tcp-crr", WorkloadKind::TcpCrr, UplinkDirection::NsHost));
        cases.push(Workload {
            streams: 32,
            ..row("http-32", WorkloadKind::Http, UplinkDirection::NsHost)
        });
        cases.extend(both.map(|direction| Workload {
            inbound: true,
            ..row("tcp-inbound", WorkloadKind::TcpStream, direction)
        }));
        cases.push(Workload {
            inbound: true,
            ..row("tcp-crr-inbound", WorkloadKind::TcpCrr, UplinkDirection::HostNs)
        });
        cases.push(Workload {
            streams: LOOKUPS,
            ..row("bulk-dns", WorkloadKind::BulkDns, UplinkDirection::NsHost)
        });
        cases.extend(slow_peers());
        cases.retain(|case| self.kinds.is_empty() || self.kinds.contains(&case.kind));
        if self.policy {
            let is_of_outside =
                |case: &Workload| !case.inbound && case.mtu == 65520 && case.streams == 1;
            cases.retain(|case| {
                is_of_outside(case)
                    && matches!(case.kind, WorkloadKind::TcpCrr | WorkloadKind::TcpStream)
            });
        }
        cases
    }
}

/// Returns the rows of slow peers.
fn slow_peers() -> Vec<Workload> {
    let row = |name, mtu, size, shape| Workload {
        name,
        kind: WorkloadKind::SlowPeer,
        direction: UplinkDirection::NsHost,
        mtu,
        streams: 1,
        size,
        inbound: false,
        shape,
    };
    let windows = [65520, 1500]
        .into_iter()
        .flat_map(|mtu| BUFFERS.map(|size| row("slow-window", mtu, size, None)));
    let pauses = [65520, 1500].map(|mtu| row(PAUSED, mtu, 0, None));
    let shaped = SHAPES
        .into_iter()
        .flat_map(|shape| [0, 8 << 10].map(|size| row(shape.name, 65520, size, Some(shape))));
    windows.chain(pauses).chain(shaped).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct CommandLine {
        #[command(flatten)]
        args: UplinkArgs,
    }

    #[test]
    fn options_select_peers_and_cases() {
        let args = CommandLine::parse_from(["x", "--vs", "all"]).args;
        assert_eq!(args.peers().len(), 5);
        assert_eq!(args.cases().len(), 17 + 16);
        let line = ["x", "--vs", "pasta", "--second-pasta", "/old/pasta"];
        let peers = CommandLine::parse_from(line).args.peers();
        assert_eq!(peers, [UplinkPeer::Ringfence, UplinkPeer::Pasta, UplinkPeer::SecondPasta]);
        let args =
            CommandLine::parse_from(["x", "--vs", "veth", "--case", "tcp-rr,udp-stream"]).args;
        assert_eq!(args.peers(), [UplinkPeer::Ringfence, UplinkPeer::Veth]);
        assert_eq!(args.cases().len(), 5);
        let args = CommandLine::parse_from(["x", "--policy"]).args;
        assert_eq!(args.peers(), [UplinkPeer::Ringfence, UplinkPeer::Policy]);
        let cases = args.cases();
        assert_eq!(cases.iter().filter(|case| case.kind == WorkloadKind::TcpStream).count(), 2);
        assert_eq!(cases.len(), 3);
        assert!(CommandLine::try_parse_from(["x", "--policy", "--vs", "veth"]).is_err());
    }
}
