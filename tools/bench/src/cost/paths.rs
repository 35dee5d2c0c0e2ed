//! Paths as the parent starts and measures them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use ringfence_access::Mode;
use ringfence_platform::DomId;
use ringfence_sandbox::channel::{Channel, ChannelError};
use ringfence_sandbox::owned_child::OwnedChild;
use ringfence_sandbox::spawn::THIS_PROGRAM;
use ringfence_testkit::hostile::adversary::SINK_MAC;

use super::args::CostArgs;
use super::components::PathName;
use super::process::{CostAnswer, CostOrder, CostRole, CostSetup, Pace};
use super::uplink;
use crate::affinity::allowed;
use crate::domain::{LINK_HEADER, MTU_MIN};
use crate::harness::{Attempt, Case};
use crate::hostile::launcher::{Attachment, Rendezvous};
use crate::hostile::orders::{
    Entrance, HostileAnswer, HostileRole, NeighbourSetup, RowCommand, SinkSetup,
};
use crate::hostile::process::Process;
use crate::hub::RunningHub;
use crate::params::Verify;
use crate::perf::{INSTRUCTIONS, PerfStat};
use crate::usage::process_ns;

/// Time limit for an answer, in addition to the time that the order takes.
const PATIENCE: Duration = Duration::from_secs(30);
/// Length of the run before the measured one.
const WARM_UP: Duration = Duration::from_millis(200);
/// Time after the last packet in which all processes fall asleep. The kernel's counts are exact then.
const SETTLE: Duration = Duration::from_millis(20);

/// Cores of the parent and of the processes of a path.
#[derive(Clone, Copy)]
pub(super) struct CostCores {
    pub(super) parent: usize,
    pub(super) path: usize,
}

/// Returns the cores: two if there are two.
pub(super) fn cores() -> anyhow::Result<CostCores> {
    let allowed = allowed()?;
    let parent = *allowed.first().context("no core")?;
    let path = *allowed.last().context("no core")?;
    Ok(CostCores { parent, path })
}

/// Path with packets of one size.
#[derive(Clone)]
pub(super) struct PathCase<'a> {
    pub(super) args: &'a CostArgs,
    pub(super) path: PathName,
    pub(super) size: u32,
    pub(super) core: usize,
    /// Ticks of the time-stamp counter in a nanosecond.
    pub(super) ticks: f64,
    /// Set if perf counts instructions.
    pub(super) counts: bool,
}

/// Cost of one run for each packet.
#[derive(Clone, Copy, Debug)]
pub(super) struct PathRun {
    pub(super) cycles: f64,
    pub(super) instructions: Option<f64>,
    /// Share of the core that the path used.
    pub(super) load: f64,
}

impl Case for PathCase<'_> {
    type Measured = PathRun;

    fn name(&self) -> String {
        format!("{}, {} bytes", self.path.name(), self.size)
    }

    fn run(&self, attempt: &Attempt<'_>) -> anyhow::Result<PathRun> {
        let path = self.start(attempt.number)?;
        let pace = |length: Duration| {
            let burst = f64::from(self.args.burst);
            let interval = Duration::from_secs_f64(burst / f64::from(self.args.rate));
            let bursts = length.as_nanos().div_ceil(interval.as_nanos().max(1));
            Pace { bursts: bursts.try_into().unwrap_or(u64::MAX), interval }
        };
        path.send(pace(WARM_UP))?;
        let pids = path.pids();
        let perf = self.counts.then(|| PerfStat::begin(INSTRUCTIONS, &pids)).transpose()?;
        let before = path.cpu_ns()?;
        let sent = path.send(pace(self.args.seconds))?;
        let cpu_ns = path.cpu_ns()?.saturating_sub(before) as f64;
        let counted = perf.map(PerfStat::end).transpose()?;
        ensure!(sent.nanos > 0 && sent.packets > 0, "nothing was sent");
        let packets = sent.packets as f64;
        Ok(PathRun {
            cycles: cpu_ns * self.ticks / packets,
            instructions: counted.map(|count| count as f64 / packets),
            load: cpu_ns / sent.nanos as f64,
        })
    }
}

impl PathCase<'_> {
    fn setup(&self, role: CostRole) -> CostSetup {
        CostSetup { role, core: self.core, size: self.size, burst: self.args.burst }
    }

    /// Starts the processes of the path.
    fn start(&self, number: usize) -> anyhow::Result<PathProcesses> {
        match self.path {
            PathName::Domain => self.two_domains(),
            PathName::Switch => self.switch(number, false),
            PathName::Guest => self.switch(number, true),
            path => self.single(path),
        }
    }

    fn single(&self, path: PathName) -> anyhow::Result<PathProcesses> {
        let command = if path.is_uplink() {
            let mut command = uplink::isolated();
            command.arg(std::env::current_exe().context("finding this program's file")?);
            command
        } else {
            Command::new(THIS_PROGRAM)
        };
        let source = CostProcess::start(command, &self.setup(CostRole::Single(path)), &[])?;
        source.wait_ready()?;
        Ok(PathProcesses { source, sink: SinkProcess::InSource, _ends: Ends::None })
    }

    /// Starts a frontend and a backend without a switch.
    fn two_domains(&self) -> anyhow::Result<PathProcesses> {
        let hub = RunningHub::start()?;
        let (_, back_hub) = hub.0.admit(Some(DomId(0)), true)?;
        let (frontend, front_hub) = hub.0.admit(None, false)?;
        let start = |role, hub: &OwnedFd| {
            CostProcess::start(Command::new(THIS_PROGRAM), &self.setup(role), &[hub.as_fd()])
        };
        let sink = start(CostRole::Backend { frontend: frontend.0 }, &back_hub)?;
        // The device is there: the frontend may connect.
        sink.wait_ready()?;
        let source = start(CostRole::Frontend { frontend: frontend.0 }, &front_hub)?;
        source.wait_ready()?;
        sink.wait_ready()?;
        Ok(PathProcesses { source, sink: SinkProcess::Domain(sink), _ends: Ends::Hub(hub) })
    }

    /// Starts a guest, the driver domain with its switch and, on request, a second guest that receives.
    fn switch(&self, number: usize, to_guest: bool) -> anyhow::Result<PathProcesses> {
        let (rendezvous, listener) = Rendezvous::new(number)?;
        let mtu = u16::try_from(self.size.saturating_sub(LINK_HEADER).max(MTU_MIN))?;
        let mode = Mode::Staging.name().to_owned();
        let entrance = Entrance { socket: rendezvous.path(), mtu, mode };
        let sink = SinkSetup { verify: Verify::Sequence, answers: false };
        let (role, core) = (HostileRole::Driver(sink), Some(self.core));
        let setup = NeighbourSetup { role, core, size: self.size, yields: false };
        let driver = Process::start(&setup, &[listener.as_fd()])?;
        driver.wait_ready()?;
        let guest = |attachment: &Attachment, role| {
            let fds = [attachment.hub.as_fd()];
            let guest = CostProcess::start(Command::new(THIS_PROGRAM), &self.setup(role), &fds)?;
            guest.wait_ready()?;
            anyhow::Ok(guest)
        };
        let sender = Attachment::take(&entrance)?;
        let (receiver, to) = if to_guest {
            let attachment = Attachment::take(&entrance)?;
            let (place, mac) = (attachment.place.clone(), attachment.place.mac);
            (Some((guest(&attachment, CostRole::Receiver { place })?, attachment)), mac)
        } else {
            match driver.ask(RowCommand::Victim(sender.place.mac))? {
                HostileAnswer::Ready => (None, SINK_MAC),
                other => bail!("the driver domain said {other:?}"),
            }
        };
        let source = guest(&sender, CostRole::Sender { place: sender.place.clone(), to })?;
        let mut attachments = vec![sender];
        let sink = match receiver {
            None => SinkProcess::Driver(driver),
            Some((guest, attachment)) => {
                attachments.push(attachment);
                SinkProcess::Guest { guest, driver }
            }
        };
        Ok(PathProcesses { source, sink, _ends: Ends::Switch(attachments, rendezvous) })
    }
}

/// Processes of a path, all started.
struct PathProcesses {
    source: CostProcess,
    sink: SinkProcess,
    /// Connections that the path needs.
    _ends: Ends,
}

/// Connections of the parent that end with a path.
enum Ends {
    None,
    Hub(#[expect(dead_code, reason = "held until the path ends")] RunningHub),
    Switch(
        #[expect(dead_code, reason = "held until the path ends")] Vec<Attachment>,
        #[expect(dead_code, reason = "held until the path ends")] Rendezvous,
    ),
}

/// Process that receives the packets.
enum SinkProcess {
    /// The source itself.
    InSource,
    Domain(CostProcess),
    Driver(Process),
    Guest {
        guest: CostProcess,
        driver: Process,
    },
}

/// Packets of a run, and its length.
#[derive(Clone, Copy, Debug)]
struct Sent {
    packets: u64,
    nanos: u64,
}

impl PathProcesses {
    fn pids(&self) -> Vec<u32> {
        let others = match &self.sink {
            SinkProcess::InSource => Vec::new(),
            SinkProcess::Domain(domain) => vec![domain.pid()],
            SinkProcess::Driver(driver) => vec![driver.pid()],
            SinkProcess::Guest { guest, driver } => vec![guest.pid(), driver.pid()],
        };
        [vec![self.source.pid()], others].concat()
    }

    /// Returns the processor time of all processes, which must be asleep.
    fn cpu_ns(&self) -> anyhow::Result<u64> {
        std::thread::sleep(SETTLE);
        self.pids().into_iter().map(process_ns).sum()
    }

    /// Returns the packets that arrived so far; `None` if the source itself verifies them.
    fn arrived(&self) -> anyhow::Result<Option<u64>> {
        match &self.sink {
            SinkProcess::InSource => Ok(None),
            SinkProcess::Domain(sink) | SinkProcess::Guest { guest: sink, .. } => {
                match sink.ask(CostOrder::Count, Duration::ZERO)? {
                    CostAnswer::Counted(count) => Ok(Some(count)),
                    other => bail!("the sink said {other:?}"),
                }
            }
            SinkProcess::Driver(driver) => match driver.ask(RowCommand::Arrived)? {
                HostileAnswer::Arrived(found) => {
                    let (missing, damaged) = (found.missing, found.damaged);
                    ensure!(
                        missing + damaged == 0,
                        "{missing} packets are missing, {damaged} damaged"
                    );
                    Ok(Some(found.verified))
                }
                other => bail!("the driver domain said {other:?}"),
            },
        }
    }

    /// Runs a phase and checks that every packet arrived.
    fn send(&self, pace: Pace) -> anyhow::Result<Sent> {
        let before = self.arrived()?;
        let length = pace.interval.mul_f64(pace.bursts as f64);
        let sent = match self.source.ask(CostOrder::Send(pace), length)? {
            CostAnswer::Sent { packets, nanos } => Sent { packets, nanos },
            other => bail!("the source said {other:?}"),
        };
        std::thread::sleep(SETTLE);
        if let Some((before, after)) = before.zip(self.arrived()?) {
            let arrived = after - before;
            ensure!(arrived == sent.packets, "{arrived} of {} packets arrived", sent.packets);
        }
        Ok(sent)
    }
}

/// Process of a path, ended on drop.
struct CostProcess {
    name: &'static str,
    child: OwnedChild,
    channel: Channel,
}

impl CostProcess {
    /// Starts `ringfence-bench internal bench-cost` by a command that lacks these words.
    fn start(
        mut command: Command,
        setup: &CostSetup,
        fds: &[BorrowedFd<'_>],
    ) -> anyhow::Result<CostProcess> {
        let name = setup.role.name();
        let (channel, theirs) = Channel::pair().context("a channel")?;
        if command.get_program() == THIS_PROGRAM {
            command.arg0("ringfence");
        }
        command.args(["internal", "bench-cost"]);
        command.stdin(Stdio::from(theirs.into_fd())).stdout(Stdio::null());
        let child = command.spawn().with_context(|| format!("starting the {name}"))?;
        let process = CostProcess { name, child: OwnedChild(child), channel };
        process.channel.send(setup, fds)?;
        Ok(process)
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn wait_ready(&self) -> anyhow::Result<()> {
        match self.hear(Duration::ZERO)? {
            CostAnswer::Ready => Ok(()),
            other => bail!("the {} said {other:?}", self.name),
        }
    }

    /// Sends an order that takes so long, and waits for its answer.
    fn ask(&self, order: CostOrder, length: Duration) -> anyhow::Result<CostAnswer> {
        self.channel.send(&order, &[]).with_context(|| format!("asking the {}", self.name))?;
        self.hear(length)
    }

    fn hear(&self, length: Duration) -> anyhow::Result<CostAnswer> {
        let name = self.name;
        match self.channel.receive_within::<CostAnswer>(PATIENCE + length) {
            Ok((CostAnswer::Failed(why), _)) => bail!("{name}: {why}"),
            Ok((answer, _)) => Ok(answer),
            Err(ChannelError::Closed) => bail!("the {name} is gone (process {})", self.pid()),
            Err(error) => Err(error).with_context(|| format!("waiting for the {name}")),
        }
    }
}
