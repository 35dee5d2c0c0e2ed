//! Measurement of the cases of a device: one way, one program and one work each.

use std::rc::Rc;
use std::time::Duration;

use super::args::{RunArgs, Way};
use super::front::{FrontEnd, Worked};
use super::report::Row;
use super::servers::Servers;
use crate::harness::{Attempt, Case, Format, Layout, Report, Runs, progress};
use crate::perf::heap::HeapProbes;
use crate::perf::{self, PerfStat, SYSCALLS};

/// Warm-up of a run.
const WARM_UP: Duration = Duration::from_millis(300);
/// Pause behind the warm-up: the device sleeps, so its first request has a notification.
const PAUSE: Duration = Duration::from_millis(50);
/// Time of each count behind the measured time: it makes what it counts slower.
const COUNTED: Duration = Duration::from_millis(300);
/// Minimum number of requests or packets of a count, and how often its time is repeated for them. Of a few, what answers to
/// questions about the state cost would be most.
const COUNTED_LEAST: u64 = 2000;
const COUNTED_TIMES: u32 = 50;

/// Work of a front-end, and the device that it needs.
pub(super) trait Workload: Clone + PartialEq + 'static {
    /// Another program that serves such devices.
    type Peer: Copy + PartialEq;
    /// Sockets of the front-end.
    type Sockets;
    type Front: FrontEnd;

    /// Returns the name of a program.
    fn program(peer: Self::Peer) -> &'static str;

    /// Returns the work in words.
    fn name(&self) -> String;

    /// Starts the processes that serve the device. Returns once their sockets exist.
    ///
    /// # Errors
    ///
    /// Returns [`Skipped`] if the program is not installed, or the error of a process.
    fn start(
        &self,
        program: Program<Self::Peer>,
        way: Way,
        servers: &mut Servers,
    ) -> anyhow::Result<Self::Sockets>;

    /// Returns the number of bytes that the processes have copied so far; `None` if they do not count that.
    ///
    /// # Errors
    ///
    /// Returns an error if a process does not answer.
    fn copied(
        &self,
        program: Program<Self::Peer>,
        way: Way,
        servers: &Servers,
    ) -> anyhow::Result<Option<u64>>;

    /// Connects the front-end, and sets the device up.
    ///
    /// # Errors
    ///
    /// Returns [`Skipped`] if the device cannot do this work, or the error of the set-up.
    fn connect(
        &self,
        program: Program<Self::Peer>,
        way: Way,
        sockets: &Self::Sockets,
    ) -> anyhow::Result<Self::Front>;
}

/// Program that serves the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Program<P> {
    Ringfence,
    Other(P),
}

/// Reason for which a case has no figures.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Skipped(pub(super) String);

/// Combination of a program, a way and a work.
#[derive(Clone)]
pub(super) struct DeviceCase<W: Workload> {
    pub(super) program: Program<W::Peer>,
    pub(super) way: Way,
    pub(super) work: W,
    seconds: Duration,
    counts: Counts,
}

/// Events that this machine counts.
#[derive(Clone)]
struct Counts {
    syscalls: bool,
    /// Probes of allocations.
    heap: Option<Rc<HeapProbes>>,
}

impl Counts {
    /// Finds out which events this machine counts. Says which ones it does not.
    fn new() -> Counts {
        let uncounted = perf::missing(SYSCALLS);
        if let Some(why) = &uncounted {
            eprintln!("ringfence: the count of system calls is SKIPPED: {why}");
        }
        let heap = HeapProbes::place();
        if let Err(why) = &heap {
            eprintln!("ringfence: the count of allocations is SKIPPED: {why}");
        }
        Counts { syscalls: uncounted.is_none(), heap: heap.ok().map(Rc::new) }
    }
}

/// Result of a run.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceRun {
    pub(super) worked: Worked,
    /// CPU time of the backend and of the shield in nanoseconds, with the resolution of one tick.
    pub(super) served_ns: u64,
    /// System calls of the backend and of the shield for each request or packet, if they were counted.
    pub(super) syscalls: Option<f64>,
    /// Allocations of the backend and of the shield for each request or packet, if they were counted.
    pub(super) allocations: Option<f64>,
    /// Bytes that the front-end, the backend and the shield copied, if they are counted.
    pub(super) copied: Option<u64>,
}

impl DeviceRun {
    /// Returns the requests or packets each second.
    pub(super) fn rate(&self) -> f64 {
        self.worked.done as f64 / self.worked.seconds
    }

    pub(super) fn each(&self, count: u64) -> f64 {
        count as f64 / self.worked.done.max(1) as f64
    }
}

impl<W: Workload> DeviceCase<W> {
    pub(super) fn program_name(&self) -> &'static str {
        match self.program {
            Program::Ringfence => "ringfence",
            Program::Other(peer) => W::program(peer),
        }
    }

    /// Returns `true` for the case of Ringfence that has all memory, for the same work.
    fn is_baseline_of(&self, other: &DeviceCase<W>) -> bool {
        (self.program, self.way) == (Program::Ringfence, Way::Trust) && self.work == other.work
    }

    fn measure(&self, servers: &mut Servers) -> anyhow::Result<DeviceRun> {
        let sockets = self.work.start(self.program, self.way, servers)?;
        let mut front = self.work.connect(self.program, self.way, &sockets)?;
        front.work(WARM_UP)?;
        std::thread::sleep(PAUSE);
        let copied = || self.work.copied(self.program, self.way, servers);
        let (copied_before, before) = (copied()?, servers.cpu_ns()?);
        let worked = front.work(self.seconds)?;
        let served_ns = servers.cpu_ns()?.saturating_sub(before);
        let by_servers = copied()?.zip(copied_before).map(|(after, before)| after - before);
        let copied = by_servers.map(|bytes| bytes + worked.copied);
        let Counts { syscalls, heap } = &self.counts;
        let mut counted = |event: &str| count(event, servers, &mut front);
        let syscalls = syscalls.then(|| counted(SYSCALLS)).transpose()?;
        let allocations = heap.as_ref().map(|heap| counted(&heap.event())).transpose()?;
        Ok(DeviceRun { worked, served_ns, syscalls, allocations, copied })
    }
}

/// Returns the events of the processes for each request or packet.
fn count(event: &str, servers: &Servers, front: &mut impl FrontEnd) -> anyhow::Result<f64> {
    let perf = PerfStat::begin(event, &servers.pids()?)?;
    let mut done = 0;
    for _ in 0..COUNTED_TIMES {
        done += front.work(COUNTED)?.done;
        if done >= COUNTED_LEAST {
            break;
        }
    }
    Ok(perf.end()? as f64 / done.max(1) as f64)
}

impl<W: Workload> Case for DeviceCase<W> {
    type Measured = Result<DeviceRun, Skipped>;

    fn name(&self) -> String {
        format!("{}, {}, {}", self.program_name(), self.way.name(), self.work.name())
    }

    fn run(&self, _: &Attempt<'_>) -> anyhow::Result<Self::Measured> {
        let mut servers = Servers::new()?;
        match self.measure(&mut servers) {
            Ok(run) => Ok(Ok(run)),
            Err(error) => match error.downcast::<Skipped>() {
                Ok(skipped) => Ok(Err(skipped)),
                // The messages of a server that has ended say more than the error of the front-end.
                Err(error) => servers.check().and(Err(error)),
            },
        }
    }
}

/// Measures each work by every way, and with other programs. Prints the rows.
pub(super) fn measure<W: Workload>(
    args: &RunArgs,
    works: &[W],
    peers: &[W::Peer],
    layout: Layout<Row<W>>,
) -> anyhow::Result<()> {
    let counts = Counts::new();
    let mut cases = Vec::new();
    for work in works {
        let case = |program, way| {
            let (work, counts) = (work.clone(), counts.clone());
            DeviceCase { program, way, work, seconds: args.seconds, counts }
        };
        cases.extend(args.ways.iter().map(|way| case(Program::Ringfence, *way)));
        cases.extend(peers.iter().map(|peer| case(Program::Other(*peer), Way::Trust)));
    }
    let progress = progress(cases.len() * args.rounds as usize);
    let report = Report::begin(layout, Format::of(args.json))?.beside(&progress);
    Runs::measure(&cases, args.rounds, &progress, |case, runs| {
        report.row(&runs.summary(case, |other| other.is_baseline_of(case)))
    })?;
    report.end()
}
