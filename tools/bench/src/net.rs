//! `ringfence-bench net`: starts the domains of each row, sends them commands, and compares their
//! reports.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use indicatif::ProgressBar;
use ringfence_access::Mode;
use ringfence_frame::port::Fault;
use ringfence_hostnet::causes::causes;
use ringfence_net::staging::TxStaging;
use ringfence_platform::DomId;
use ringfence_sandbox::channel::{Channel, ChannelError};
use ringfence_sandbox::owned_child::OwnedChild;
use ringfence_sandbox::spawn::THIS_PROGRAM;
use ringfence_sys::poll::{wait_any, wait_readable};
use rustix::event::{PollFd, PollFlags};

use super::affinity;
use super::args::NetArgs;
use super::beside::{self, Beside};
use super::cores::round_trip_ns;
use super::hub::RunningHub;
use super::orders::{Amount, PacketAnswer, PacketSetup, PhaseReport, Side, VifCommand};
use super::params::{Direction, Pages};
use super::perf::{PerfStat, SYSCALLS};
use super::report::{self, PacketRow};
use crate::harness::{Format, Report, progress};

/// Time limit for an answer, in addition to the time that the command takes. It exceeds a domain's own
/// time limit, whose error message is more specific.
const PATIENCE: Duration = Duration::from_secs(30);
/// Time limit of a phase with a given number of packets.
const PHASE_MAX: Duration = Duration::from_secs(24 * 3600);
/// Warm-up of a row with a measured time.
const WARM_UP: Duration = Duration::from_millis(200);
/// Warm-up of a row with a number of packets: enough to use all rings and pages a few times.
const WARM_UP_PACKETS: u64 = 2048;

/// Runs every row and prints it.
pub(super) fn run(args: &NetArgs) -> anyhow::Result<()> {
    let cores = affinity::pair()?;
    let cases = cases(args);
    if cores.is_none() {
        eprintln!("ringfence: one core only: both domains share it, and take turns");
    }
    let beside = Beside::rows(args);
    let progress = progress(cases.len() + beside.len());
    let report = Report::begin(report::layout(), Format::of(args.json))?.beside(&progress);
    let mut ours = Vec::new();
    for case in cases {
        progress.set_message(format!("{} {} {}", case.mode, case.direction, case.size));
        let row = case.run(args, cores, &progress).with_context(|| {
            format!("mode {}, {}, {} bytes", case.mode, case.direction, case.size)
        })?;
        report.row(&row)?;
        progress.inc(1);
        ours.push(row);
    }
    let peers = report.continued(beside::layout());
    for other in beside {
        progress.set_message(other.name());
        peers.row(&other.run(args, cores, &ours))?;
        progress.inc(1);
    }
    progress.finish_and_clear();
    report.end()
}

/// Returns the rows to measure.
fn cases(args: &NetArgs) -> Vec<PacketCase> {
    let mut cases = Vec::new();
    for &mode in &args.modes {
        for &direction in &args.directions {
            let case = |&size| PacketCase { mode, direction, size, queues: args.queues };
            cases.extend(args.sizes.iter().map(case));
        }
    }
    cases
}

/// CPU cores of both sides' threads.
struct Threads {
    backend: Vec<usize>,
    frontend: Vec<usize>,
    /// Set if there are fewer cores than threads.
    oversubscribed: bool,
}

/// Assigns cores to the threads of all queues; `pair` is for one queue.
fn threads(queues: u32, pair: Option<[usize; 2]>) -> anyhow::Result<Threads> {
    let queues = usize::try_from(queues)?;
    let mut backend: Vec<usize> = match (queues, pair) {
        (1, Some(pair)) => pair.to_vec(),
        (1, None) => Vec::new(),
        _ => affinity::allowed()?,
    };
    let oversubscribed = backend.len() < 2 * queues;
    if oversubscribed {
        backend.clear();
    }
    let mut frontend = backend.split_off(queues.min(backend.len()));
    frontend.truncate(queues);
    Ok(Threads { backend, frontend, oversubscribed })
}

/// Parameters of one row.
pub(super) struct PacketCase {
    pub(super) mode: Mode,
    pub(super) direction: Direction,
    pub(super) size: u32,
    pub(super) queues: u32,
}

impl PacketCase {
    pub(super) fn run(
        &self,
        args: &NetArgs,
        cores: Option<[usize; 2]>,
        progress: &ProgressBar,
    ) -> anyhow::Result<PacketRow> {
        let hub = RunningHub::start()?;
        let (_, back_hub) = hub.0.admit(Some(DomId(0)), true)?;
        let (frontend, front_hub) = hub.0.admit(None, false)?;
        let staging = staging_of(self.mode, args);
        let threads = threads(self.queues, cores)?;
        let setup = |side, cores: &[usize]| PacketSetup {
            side,
            direction: self.direction,
            size: self.size,
            mode: self.mode.name().to_owned(),
            staging: staging.to_string(),
            verify: args.verify,
            batch: args.batch,
            poll: args.poll,
            frontend: frontend.0,
            queues: self.queues,
            huge_pages: self.mode == Mode::Staging && args.pages == Pages::Auto,
            cores: cores.to_vec(),
        };
        let back = PacketDomain::start(setup(Side::Backend, &threads.backend), back_hub)?;
        match back.hear(PATIENCE)? {
            PacketAnswer::DeviceMade => {}
            other => bail!("the backend said {other:?}"),
        }
        let front = PacketDomain::start(setup(Side::Frontend, &threads.frontend), front_hub)?;
        let domains = Pair { domains: [back, front], direction: self.direction };
        if args.verbose {
            let [back, front] = domains.pids();
            progress.suspend(|| {
                eprintln!(
                    "{} {} {}: backend is process {back}, frontend is process {front}",
                    self.mode, self.direction, self.size
                );
            });
        }
        // The frontend lends the memory.
        let huge_pages = match domains.hear(PATIENCE)? {
            [PacketAnswer::Connected { .. }, PacketAnswer::Connected { huge_pages }] => huge_pages,
            others => bail!("the domains said {others:?}"),
        };
        let before = cores.map(round_trip_ns).transpose()?;
        let measured = self.measure(args, &domains, threads.oversubscribed)?;
        let after = cores.map(round_trip_ns).transpose()?;
        let core_round_trip_ns = before.zip(after).map(|(before, after)| [before, after]);
        Ok(PacketRow { core_round_trip_ns, huge_pages, ..measured })
    }

    fn measure(
        &self,
        args: &NetArgs,
        domains: &Pair,
        oversubscribed: bool,
    ) -> anyhow::Result<PacketRow> {
        let (warm_up, amount) = match args.packets {
            Some(packets) => (Amount::Packets(WARM_UP_PACKETS), Amount::Packets(packets)),
            None => (Amount::Time(WARM_UP), Amount::Time(args.seconds)),
        };
        domains.phase(VifCommand::Phase { amount: warm_up, spoil: None }, warm_up)?;
        let perf =
            if args.perf_check { Some(PerfStat::begin(SYSCALLS, &domains.pids())?) } else { None };
        let (sent, received) =
            domains.phase(VifCommand::Phase { amount, spoil: args.spoil }, amount)?;
        let perf_syscalls = perf.map(PerfStat::end).transpose()?;
        let [back, _] = &domains.domains;
        back.tell(VifCommand::Bare)?;
        let bare_copy_ns = match back.hear(PATIENCE)? {
            PacketAnswer::Bare(nanos) => nanos,
            other => bail!("the backend said {other:?}"),
        };
        ensure!(
            sent.packets == received.packets,
            "{} packets were sent, {} arrived",
            sent.packets,
            received.packets
        );
        let (backend, frontend) = match self.direction {
            Direction::Tx => (received.usage, sent.usage),
            Direction::Rx => (sent.usage, received.usage),
        };
        Ok(PacketRow {
            mode: self.mode,
            direction: self.direction,
            size: self.size,
            queues: self.queues,
            oversubscribed,
            staging: staging_of(self.mode, args),
            verify: args.verify,
            packets: received.packets,
            nanos: received.ended.saturating_sub(sent.began),
            backend,
            frontend,
            bare_copy_ns,
            perf_syscalls,
            core_round_trip_ns: None,
            huge_pages: false,
        })
    }
}

/// Returns the pages to be staged in a mode.
fn staging_of(mode: Mode, args: &NetArgs) -> TxStaging {
    if mode == Mode::Staging { args.staging } else { TxStaging::Off }
}

/// Process of one side, ended on drop.
struct PacketDomain {
    side: Side,
    child: OwnedChild,
    channel: Channel,
}

impl PacketDomain {
    fn start(setup: PacketSetup, hub: OwnedFd) -> anyhow::Result<PacketDomain> {
        let (channel, theirs) = Channel::pair().context("a channel")?;
        let child = Command::new(THIS_PROGRAM)
            .arg0("ringfence")
            .args(["internal", "bench-domain"])
            .stdin(Stdio::from(theirs.into_fd()))
            .stdout(Stdio::null())
            .spawn()
            .with_context(|| format!("starting the {}", setup.side.name()))?;
        let domain = PacketDomain { side: setup.side, child: OwnedChild(child), channel };
        domain.channel.send(&setup, &[hub.as_fd()])?;
        Ok(domain)
    }

    fn tell(&self, order: VifCommand) -> anyhow::Result<()> {
        self.channel.send(&order, &[]).with_context(|| format!("telling the {}", self.side.name()))
    }

    fn hear(&self, patience: Duration) -> anyhow::Result<PacketAnswer> {
        let side = self.side.name();
        match self.channel.receive_within::<PacketAnswer>(patience) {
            Ok((PacketAnswer::Failed(why), _)) => bail!("{side}: {why}"),
            Ok((answer, _)) => Ok(answer),
            Err(ChannelError::Closed) => bail!("the {side} is gone (process {})", self.child.id()),
            Err(error) => Err(error).with_context(|| format!("waiting for the {side}")),
        }
    }
}

/// Processes of both sides: the backend, the frontend.
struct Pair {
    domains: [PacketDomain; 2],
    direction: Direction,
}

/// Time limit for a failed domain to report its error.
const FAILURE_WITHIN: Duration = Duration::from_secs(2);

impl Pair {
    fn pids(&self) -> [u32; 2] {
        self.domains.each_ref().map(|domain| domain.child.id())
    }

    /// Runs a phase. Returns the reports of the generator and of the sink.
    fn phase(
        &self,
        order: VifCommand,
        amount: Amount,
    ) -> anyhow::Result<(PhaseReport, PhaseReport)> {
        let [back, front] = &self.domains;
        let (generator, sink) = match self.direction {
            Direction::Tx => (front, back),
            Direction::Rx => (back, front),
        };
        sink.tell(order)?;
        generator.tell(order)?;
        let patience = match amount {
            Amount::Time(length) => length + PATIENCE,
            Amount::Packets(_) => PHASE_MAX,
        };
        match (self.hear(patience)?, self.direction) {
            ([PacketAnswer::Phase(back), PacketAnswer::Phase(front)], Direction::Tx) => {
                Ok((front, back))
            }
            ([PacketAnswer::Phase(back), PacketAnswer::Phase(front)], Direction::Rx) => {
                Ok((back, front))
            }
            (others, _) => bail!("the domains said {others:?}"),
        }
    }

    /// Waits for both sides' answers and returns the first failure; the other side's error would only be
    /// that its peer is missing.
    fn hear(&self, patience: Duration) -> anyhow::Result<[PacketAnswer; 2]> {
        let deadline = Instant::now() + patience;
        let mut answers = [None, None];
        while answers.iter().any(Option::is_none) {
            let waiting = self.domains.iter().zip(&answers).filter(|(_, answer)| answer.is_none());
            let mut fds: Vec<_> =
                waiting.map(|(domain, _)| PollFd::new(&domain.channel, PollFlags::IN)).collect();
            let ready = wait_any(&mut fds, Some(deadline))?;
            ensure!(ready > 0, "no answer within {patience:?}");
            let [back, front] = &self.domains;
            let pairs = [(back, front), (front, back)];
            for ((domain, other), answer) in pairs.into_iter().zip(&mut answers) {
                if answer.is_none() && wait_readable(&domain.channel, Some(Duration::ZERO))? {
                    let heard = domain.hear(patience);
                    *answer = Some(heard.map_err(|error| first_failure(error, other))?);
                }
            }
        }
        match answers {
            [Some(back), Some(front)] => Ok([back, front]),
            _ => bail!("a domain did not answer"),
        }
    }
}

/// Returns the original failure of two. A domain whose peer has failed reports a missing peer, possibly
/// before the peer's own report, since the failed domain first releases its resources.
fn first_failure(error: anyhow::Error, other: &PacketDomain) -> anyhow::Error {
    let misses = causes(&error).contains(&Fault::Gone.to_string());
    if !misses || !wait_readable(&other.channel, Some(FAILURE_WITHIN)).unwrap_or(false) {
        return error;
    }
    other.hear(FAILURE_WITHIN).err().unwrap_or(error)
}
