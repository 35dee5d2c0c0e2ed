//! Command line of `ringfence-bench`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use ringfence_access::Mode;
use ringfence_net::staging::TxStaging;
use ringfence_net::vif::backend::QUEUES_MAX;

use super::block::args::{BlockArgs, PersistentArgs};
use super::copy::CopyArgs;
use super::cost::args::CostArgs;
use super::full_report::args::ReportArgs;
use super::grant::args::GrantArgs;
use super::gso::args::GsoArgs;
use super::hostile::args::HostileArgs;
use super::hostile::tail::args::TailArgs;
use super::idle::IdleArgs;
use super::iommu::args::IommuArgs;
use super::latency::LatencyArgs;
use super::packet::{SIZE_MAX, SIZE_MIN};
use super::params::{Direction, Pages, Spoil, Verify, parse_mode, parse_seconds};
use super::peers::ForwardingPeer;
use super::pressure::args::PressureArgs;
use super::redesigned::args::RedesignedArgs;
use super::staging::args::StagingArgs;
use super::uplink::args::UplinkArgs;
use super::uplink::links::args::LinksArgs;
use super::vhost_user::args::VhostUserArgs;
use super::work::ROUND;
use ringfence_frontend::options::staging_parser;

/// Benchmark of the command line.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Packets through netfront, rings and netback, from one process to another
    Net(NetArgs),
    /// Effect of a neighbour that breaks rules on a guest that does not
    Hostile(HostileArgs),
    /// Latency of a guest alone, beside an honest neighbour and beside hostile ones
    Tail(TailArgs),
    /// Marginal cost of each component of a packet's path, at a fixed offered load
    Cost(CostArgs),
    /// Disks through blkfront, rings and blkback, by many guests at once
    Block(BlockArgs),
    /// Repeat the experiments that the source documents describe
    Seeds(SeedsArgs),
    /// Latency of a request and its answer between two guests
    Latency(LatencyArgs),
    /// Cost of idle guests: CPU time, wakeups and memory
    Idle(IdleArgs),
    /// Benefit of unsegmented super-packets: TCP between guests, three setups
    Gso(GsoArgs),
    /// Cost of each operation on a grant: windows beside ordinary grants
    Grant(GrantArgs),
    /// Time of each copy routine of lent memory, beside memcpy
    Copy(CopyArgs),
    /// Windows that shrink under memory pressure and grow again, in the middle of a transfer
    Pressure(PressureArgs),
    /// Throughput and latency of a guest's uplink to the host's network, beside other programs
    Uplink(UplinkArgs),
    /// Devices of virtual machines: memory that is lent, behind a shield, and trusted, beside other programs
    VhostUser(VhostUserArgs),
    /// The experiments of the source documents and the comparisons with other programs, on one page
    Report(ReportArgs),
}

/// Repeat the experiments that the source documents describe
#[derive(Debug, Args)]
pub struct SeedsArgs {
    /// Experiment to repeat
    #[command(subcommand)]
    pub experiment: SeedExperiment,

    /// Print the rows of this file as well: those that a scenario of `cargo xtask vm xen` measured
    #[arg(long, value_name = "FILE", global = true)]
    pub xen: Option<PathBuf>,
}

/// Experiment of the source documents.
#[derive(Debug, Subcommand)]
pub enum SeedExperiment {
    /// IOPS against the number of guests on memory disks, with and without persistent grants
    Persistent(PersistentArgs),
    /// Kernel vhost-net behind its I/O translation table: not protected, coarsely, finely, with grants reused
    Iommu(IommuArgs),
    /// Packets by size and number of queues, copied and with staging grants
    Staging(StagingArgs),
    /// Bulk TCP with grants mapped for each packet, copied, and issued and revoked by the guest alone
    Redesigned(RedesignedArgs),
    /// TCP to and from a namespace by reads and writes of a TAP, and by kernel vhost-net
    Vhost(LinksArgs),
    /// Benefit of unsegmented super-packets, as `ringfence-bench gso` has it
    Gso(GsoArgs),
}

impl SeedExperiment {
    /// Returns the name in the rows that were measured on Xen.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            SeedExperiment::Persistent(_) => "persistent",
            SeedExperiment::Iommu(_) => "iommu",
            SeedExperiment::Staging(_) => "staging",
            SeedExperiment::Redesigned(_) => "redesigned",
            SeedExperiment::Vhost(_) => "vhost",
            SeedExperiment::Gso(_) => "gso",
        }
    }

    /// Returns `true` if the results are lines of JSON.
    pub(crate) fn json(&self) -> bool {
        match self {
            SeedExperiment::Persistent(args) => args.json,
            SeedExperiment::Iommu(args) => args.json,
            SeedExperiment::Staging(args) => args.json,
            SeedExperiment::Redesigned(args) => args.json,
            SeedExperiment::Vhost(args) => args.json,
            SeedExperiment::Gso(args) => args.json,
        }
    }
}

const NET_NOTES: &str = "\
Each row is a run of its own: a generator and a sink, two processes, each on its own core where
there are two. Every packet carries a sequence number and a checksum that the sink verifies. A
packet that is lost, repeated, out of order or damaged fails the benchmark (exit status 1).

`bare ns` is the time in which the kernel alone copies one packet of that size (pread for tx, pwrite
for rx), measured in the same run. `share` is the part of the run's time that one such copy for each
packet takes. Near 1, the kernel's copies bound mode `copy`, and not Ringfence.

With --vs the same packets also go between two DPDK testpmd on the same two cores (Debian:
dpdk-dev; with huge pages if enough are free), which verify nothing: compare with --verify sequence.

With several queues, each queue has a generator and a sink of its own, which number its packets. A
row with fewer cores than threads is marked oversubscribed, and its figures do not show the effect
of the queues.

docs/perf/howto.md explains every column.";

/// Packets through netfront, rings and netback, from one process to another
#[derive(Debug, Args)]
#[command(after_help = NET_NOTES)]
pub struct NetArgs {
    /// Bytes of a packet, Ethernet header included
    #[arg(long = "size", value_name = "BYTES", value_delimiter = ',', default_value = "64,1500,65000",
          value_parser = clap::value_parser!(u32).range(SIZE_MIN..=SIZE_MAX))]
    pub sizes: Vec<u32>,

    /// Queues of the interface, each with a thread on both sides
    #[arg(long, value_name = "N", default_value = "1",
          value_parser = clap::value_parser!(u32).range(1..=QUEUES_MAX.into()))]
    pub queues: u32,

    /// Ways to reach the frontend's pages
    #[arg(long, value_name = "MODE", value_delimiter = ',', default_value = "copy,map,staging,window",
          value_parser = parse_mode)]
    pub modes: Vec<Mode>,

    /// tx: from the frontend to the backend; rx: the other way
    #[arg(
        long = "direction",
        value_name = "DIRECTION",
        value_delimiter = ',',
        default_value = "tx,rx"
    )]
    pub directions: Vec<Direction>,

    /// Measured time of each row
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = parse_seconds)]
    pub seconds: Duration,

    /// Measure this many packets a row, however long they take
    #[arg(long, value_name = "N", conflicts_with = "seconds",
          value_parser = clap::value_parser!(u64).range(1..))]
    pub packets: Option<u64>,

    /// Extent of the sink's verification
    #[arg(long, value_enum, default_value = "full")]
    pub verify: Verify,

    /// In mode `staging`: pages of the frontend that stay mapped
    #[arg(long, value_name = "PAGES", default_value = "full", value_parser = staging_parser())]
    pub staging: TxStaging,

    /// Packets that a side handles in one batch
    #[arg(long, value_name = "PACKETS", default_value_t = ROUND,
          value_parser = clap::value_parser!(u16).range(1..=256))]
    pub batch: u16,

    /// Poll without end: never offer a core to others, and never sleep
    #[arg(long)]
    pub poll: bool,

    /// Size of the pages that are lent, and of the memory of programs of --vs
    #[arg(long, value_enum, default_value = "auto")]
    pub pages: Pages,

    /// Measure these as well, with sizes up to 1518: memif, vhost-user (DPDK's testpmd)
    #[arg(long, value_name = "PEER", value_delimiter = ',')]
    pub vs: Vec<ForwardingPeer>,

    /// One JSON object a line
    #[arg(long)]
    pub json: bool,

    /// Name the processes of each row on standard error
    #[arg(short, long)]
    pub verbose: bool,

    /// Compare with the system calls that `perf stat` counts (needs perf, and the right to use
    /// its tracepoints)
    #[arg(long)]
    pub perf_check: bool,

    /// Spoil one packet of the measured phase, to test that the benchmark notices
    #[arg(long, value_enum, hide = true)]
    pub spoil: Option<Spoil>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser, Debug)]
    struct CommandLine {
        #[command(subcommand)]
        bench: BenchCommand,
    }

    fn net(line: &str) -> Result<NetArgs, clap::Error> {
        let words = ["ringfence", "net"].into_iter().chain(line.split_whitespace());
        match CommandLine::try_parse_from(words)?.bench {
            BenchCommand::Net(args) => Ok(args),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn defaults_measure_every_mode_in_both_directions() {
        let args = net("").unwrap();
        assert_eq!(args.sizes, [64, 1500, 65_000]);
        assert_eq!(args.modes, Mode::NETWORK);
        assert_eq!(args.directions, [Direction::Tx, Direction::Rx]);
        assert_eq!(args.seconds, Duration::from_secs(2));
    }

    #[test]
    fn arguments_out_of_range_are_rejected() {
        for line in [
            "--size 59",
            "--size 65536",
            "--modes fast",
            "--direction up",
            "--seconds 0",
            "--seconds nan",
            "--packets 0",
            "--queues 0",
            "--queues 17",
            "--packets 5 --seconds 1",
        ] {
            assert!(net(line).is_err(), "{line}");
        }
    }
}
