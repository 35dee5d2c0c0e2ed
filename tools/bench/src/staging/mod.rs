//! `ringfence-bench seeds staging`: reproduces the experiment that introduced staging grants.
//!
//! # Theory of operation
//!
//! The plan is a list of points ([`Point`]): direction, number of queues, size, and forwarder. Every
//! round measures all points; points that are compared with each other are adjacent. Rates are medians
//! over the rounds, and a ratio is the median of the ratios within rounds. Interference thus affects
//! both sides of a ratio alike.
//!
//! Each point of Ringfence is a row of `bench net` with two processes of its own ([`super::net`]). A
//! peer's point is two testpmd processes on the same cores ([`super::peers`]). [`report`] writes
//! tables, lines of JSON and the page, and evaluates the ratios. [`published`] has the reference
//! figures, [`bound`] measures the limit for long packets.

pub(super) mod args;
mod bound;
mod plots;
mod published;
mod report;
mod text;

use std::io::Write;

use ringfence_access::Mode;

use anyhow::Context;
use clap::Parser;
use indicatif::ProgressBar;
use ringfence_hostnet::out::Out;

use self::args::StagingArgs;
pub(crate) use self::published::text as published_text;
use self::report::Results;
use super::affinity;
use super::args::NetArgs;
use super::net::PacketCase;
use super::params::{Direction, Pages};
use super::peers::{self, ForwardingPeer, PeerOutcome};
use super::report::PacketRow;

/// Extent of a packet's verification; testpmd verifies nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum VerifyExtent {
    /// Its length and its sequence number.
    Sequence,
    /// Every byte as well.
    Full,
}

impl VerifyExtent {
    fn name(self) -> &'static str {
        match self {
            VerifyExtent::Sequence => "sequence",
            VerifyExtent::Full => "full",
        }
    }
}

/// Program that forwards the packets of a point.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Forwarder {
    Ringfence(Mode, VerifyExtent),
    Peer(ForwardingPeer),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Point {
    direction: Direction,
    queues: u32,
    size: u32,
    forwarder: Forwarder,
}

/// Result of a point in one round.
#[derive(Clone, Debug)]
enum Sample {
    Ringfence(Box<PacketRow>),
    Peer { pps: f64, memory: &'static str },
    Skipped(String),
}

impl Sample {
    fn pps(&self) -> Option<f64> {
        match self {
            Sample::Ringfence(row) => Some(row.pps()),
            Sample::Peer { pps, .. } => Some(*pps),
            Sample::Skipped(_) => None,
        }
    }
}

/// Runs all rounds and prints the report.
pub(super) fn run(args: &StagingArgs) -> anyhow::Result<()> {
    let points = points(args);
    let cores = affinity::pair()?;
    let progress = crate::harness::progress(points.len() * args.rounds as usize);
    let mut results = Results::new(args, affinity::allowed()?.len());
    for round in 1..=args.rounds {
        for &size in args.sizes.iter().filter(|size| **size >= published::BULK) {
            if let Some(cores) = cores {
                results.add_hand_over(size, bound::hand_over(size, cores)?);
            }
        }
        for &point in &points {
            progress.set_message(format!("round {round}: {}", point.name()));
            let sample = measure(args, point, cores, &progress)?;
            results.add(point, sample);
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    let mut out = Out;
    if args.json {
        for line in results.json()? {
            writeln!(out, "{line}")?;
        }
    } else {
        write!(out, "{}", results.text())?;
    }
    if let Some(path) = &args.html {
        plots::page(&results)?.write(path)?;
    }
    Ok(())
}

fn measure(
    args: &StagingArgs,
    point: Point,
    cores: Option<[usize; 2]>,
    progress: &ProgressBar,
) -> anyhow::Result<Sample> {
    let Point { direction, queues, size, forwarder } = point;
    Ok(match forwarder {
        Forwarder::Ringfence(mode, verify) => {
            let net = match net_args(args, queues, verify) {
                Ok(net) => net,
                Err(refused) => return Ok(Sample::Skipped(refused)),
            };
            let row = PacketCase { mode, direction, size, queues }.run(&net, cores, progress);
            Sample::Ringfence(Box::new(row.with_context(|| point.name())?))
        }
        Forwarder::Peer(peer) => {
            match peers::measure(peer, direction, size, Pages::Auto, cores, args.seconds) {
                PeerOutcome::Rate { pps, memory } => Sample::Peer { pps, memory },
                PeerOutcome::Skipped(why) => Sample::Skipped(why),
            }
        }
    })
}

/// Parses the arguments of a `bench net` row. Returns the reason if there is no such row.
fn net_args(args: &StagingArgs, queues: u32, verify: VerifyExtent) -> Result<NetArgs, String> {
    #[derive(Parser)]
    struct CommandLine {
        #[command(flatten)]
        net: NetArgs,
    }
    let seconds = args.seconds.as_secs_f64().to_string();
    let queues = queues.to_string();
    let words = ["net", "--seconds", &seconds, "--queues", &queues, "--verify", verify.name()];
    match CommandLine::try_parse_from(words) {
        Ok(asked) => Ok(asked.net),
        Err(refused) => Err(refused.to_string().lines().next().unwrap_or_default().to_owned()),
    }
}

/// Returns all points of a round without duplicates; compared points are adjacent.
fn points(args: &StagingArgs) -> Vec<Point> {
    let mut points: Vec<Point> = Vec::new();
    let mut add = |direction, queues, size, forwarder| {
        let point = Point { direction, queues, size, forwarder };
        if !points.contains(&point) {
            points.push(point);
        }
    };
    let ours = Forwarder::Ringfence;
    for &size in &args.sizes {
        for &queues in &args.queues {
            for &direction in &args.directions {
                for mode in [Mode::Copy, Mode::Staging] {
                    add(direction, queues, size, ours(mode, VerifyExtent::Sequence));
                    if queues == 1 {
                        add(direction, queues, size, ours(mode, VerifyExtent::Full));
                    }
                }
            }
        }
    }
    for &direction in &args.directions {
        let beside: &[u32] = if args.vs.is_empty() { &[] } else { &args.vs_size };
        for &size in beside {
            add(direction, 1, size, ours(Mode::Staging, VerifyExtent::Sequence));
            args.vs.iter().for_each(|peer| add(direction, 1, size, Forwarder::Peer(*peer)));
            add(direction, 1, size, ours(Mode::Staging, VerifyExtent::Full));
        }
        let plotted: &[u32] = if args.html.is_some() { &args.plot_size } else { &[] };
        for &size in plotted {
            for mode in Mode::NETWORK {
                add(direction, 1, size, ours(mode, VerifyExtent::Sequence));
            }
            let short = size <= peers::SIZE_MAX;
            let peers = args.vs.iter().filter(|_| short);
            peers.for_each(|peer| add(direction, 1, size, Forwarder::Peer(*peer)));
        }
    }
    points
}

impl Point {
    fn name(&self) -> String {
        let Point { direction, queues, size, forwarder } = self;
        let forwarder = match forwarder {
            Forwarder::Ringfence(mode, VerifyExtent::Sequence) => mode.name().to_owned(),
            Forwarder::Ringfence(mode, VerifyExtent::Full) => format!("{mode}, fully verified"),
            Forwarder::Peer(peer) => peer.name().to_owned(),
        };
        let queues = if *queues == 1 { "1 queue".to_owned() } else { format!("{queues} queues") };
        format!("{forwarder}, {direction}, {queues}, {size} bytes")
    }

    /// Returns the same point with another forwarder.
    fn with(self, forwarder: Forwarder) -> Point {
        Point { forwarder, ..self }
    }
}
