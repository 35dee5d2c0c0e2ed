//! One run of one row: starts the guests and the stream and reads the counters twice.

use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::path::Path as FilePath;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use ringfence::commands::status::windows_of;
use ringfence::demo::{control_connection, stats};
use ringfence::launch::guest_on;
use ringfence_access::Mode;
use ringfence_access::window::Revocation;
use ringfence_driver::switchboard::{DriverStats, WindowLevels};
use ringfence_hostnet::runtime_dir::RuntimeDir;
use ringfence_sandbox::channel::Channel;
use ringfence_sandbox::owned_child::OwnedChild;

use super::super::messages;
use super::args::{StreamPath, StreamSetup};
use super::cpu;
use super::end::{Arrived, ENOUGH, HOW_MUCH, StreamMessage, interface_addresses};
use super::report::{Moved, StreamRun, reuse_between};
use crate::harness::{Attempt, Case};

/// Time limit of any single step.
const PATIENCE: Duration = Duration::from_secs(20);
/// Time between the start of the stream and the measurement, in which TCP reaches its rate.
const WARM_UP: Duration = Duration::from_millis(500);
/// Time limit for a driver domain to exit after its last guest.
const GONE_WITHIN: Duration = Duration::from_secs(60);
/// Polling interval of a watched stream.
const TICK: Duration = Duration::from_millis(200);
/// Name of the interface on the driver domain's side.
const HOST_LEG: &str = "rfgso0";

/// Access modes for the pages of the two guests of a stream. An end beside the switch has none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Modes {
    pub(crate) sender: Mode,
    pub(crate) receiver: Mode,
}

impl Modes {
    pub(crate) fn both(mode: Mode) -> Modes {
        Modes { sender: mode, receiver: mode }
    }
}

/// One stream: its path, its packets, and the access modes.
#[derive(Clone)]
pub(crate) struct StreamCase {
    pub(crate) path: StreamPath,
    pub(crate) setup: StreamSetup,
    pub(crate) modes: Modes,
    pub(crate) revocation: Revocation,
    /// Measured time of a run.
    pub(crate) length: Duration,
}

impl Case for StreamCase {
    type Measured = StreamRun;

    fn name(&self) -> String {
        format!("{} {}", self.path.name(), self.setup.name())
    }

    fn run(&self, attempt: &Attempt<'_>) -> anyhow::Result<StreamRun> {
        let switch = switch_name(attempt.number);
        let measured = self.measure(&switch)?;
        // All processes of this run are ended. The driver domain, which exits by itself, must not disturb the
        // next run.
        wait_until_gone(&switch)?;
        Ok(measured)
    }
}

/// Returns the name of the switch of a run.
fn switch_name(number: usize) -> String {
    format!("bench-gso-{}-{number}", std::process::id())
}

impl StreamCase {
    /// Runs the stream with all its processes in a control group. Calls `each` periodically with the number
    /// of received bytes, until it returns `false`.
    pub(crate) fn watch(
        &self,
        group: &FilePath,
        mut each: impl FnMut(u64) -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        let switch = switch_name(0);
        let (receiver, sender) = self.connect(&switch, Some(group))?;
        while each(receiver.arrived()?.bytes)? {
            std::thread::sleep(TICK);
        }
        drop((receiver, sender));
        wait_until_gone(&switch)
    }

    /// Starts both ends and the stream.
    fn connect(
        &self,
        switch: &str,
        group: Option<&FilePath>,
    ) -> anyhow::Result<(End, Option<End>)> {
        let guest = |role: &[&str], mode, host_leg| self.guest(switch, group, role, mode, host_leg);
        let send = |host_leg| guest(&["send"], self.modes.sender, host_leg).map(Some);
        let receive = |host_leg| guest(&["receive"], self.modes.receiver, host_leg);
        let (receiver, sender) = match self.path {
            StreamPath::GuestGuest => (receive(false)?, send(false)?),
            StreamPath::GuestDriver => (End::beside("receive")?, send(true)?),
            StreamPath::DriverGuest => (receive(true)?, Some(End::beside("send")?)),
            StreamPath::Loopback => {
                let mtu = self.setup.mtu().to_string();
                let whole = (self.setup == StreamSetup::Whole).then_some("--whole");
                let role: Vec<&str> = ["loopback", &mtu].into_iter().chain(whole).collect();
                (guest(&role, self.modes.receiver, false)?, None)
            }
        };
        if let Some(sender) = &sender {
            let to = self.where_to(&receiver)?;
            match sender.hear()? {
                StreamMessage::Ready => sender.tell(&to.to_string())?,
                other => bail!("the sender said {other:?}"),
            }
        }
        match sender.as_ref().unwrap_or(&receiver).hear()? {
            StreamMessage::Connected => {}
            other => bail!("the sender said {other:?}"),
        }
        Ok((receiver, sender))
    }

    fn measure(&self, switch: &str) -> anyhow::Result<StreamRun> {
        let (receiver, sender) = self.connect(switch, None)?;
        let guests: Vec<u32> = self.guests(&receiver, sender.as_ref()).collect();
        let control = control_connection(switch)?;
        std::thread::sleep(WARM_UP);
        let before = Reading::take(&receiver, &guests, &control)?;
        std::thread::sleep(self.length);
        let after = Reading::take(&receiver, &guests, &control)?;
        let settled = match &sender {
            Some(sender) => settle(sender, &control)?,
            None => after.stats.clone(),
        };
        Ok(StreamRun {
            bytes: after.arrived.bytes - before.arrived.bytes,
            nanos: after.arrived.at.saturating_sub(before.arrived.at).max(1),
            cpu_ns: after.cpu_ns.saturating_sub(before.cpu_ns),
            split: after.split.since(before.split),
            moved: Moved::between(&before.stats, &after.stats),
            total: Moved::between(&DriverStats::default(), &settled),
            reuse: reuse_between(&before.windows, &after.windows),
        })
    }

    /// Returns the process numbers of the launchers of the guests that lend pages in mode window.
    fn guests(&self, receiver: &End, sender: Option<&End>) -> impl Iterator<Item = u32> {
        let window = |end: &End, mode| (mode == Mode::Window).then(|| end.child.id());
        let (sends, receives) = match self.path {
            StreamPath::GuestGuest => (true, true),
            StreamPath::GuestDriver => (true, false),
            StreamPath::DriverGuest => (false, true),
            // Nothing of the stream passes through the guest's interface.
            StreamPath::Loopback => (false, false),
        };
        let sender = sender.filter(|_| sends).and_then(|end| window(end, self.modes.sender));
        let receiver = Some(receiver).filter(|_| receives);
        let receiver = receiver.and_then(|end| window(end, self.modes.receiver));
        sender.into_iter().chain(receiver)
    }

    /// Returns the address of the receiver.
    fn where_to(&self, receiver: &End) -> anyhow::Result<SocketAddr> {
        let StreamMessage::Listening { addresses, port } = receiver.hear()? else {
            bail!("the receiver does not listen");
        };
        let ip: IpAddr = match self.path {
            // The receiver listens before the interface exists.
            StreamPath::GuestDriver => host_leg_address()?,
            _ => *addresses.first().context("the receiver has no address")?,
        };
        Ok(SocketAddr::new(ip, port))
    }

    fn guest(
        &self,
        switch: &str,
        group: Option<&FilePath>,
        role: &[&str],
        mode: Mode,
        host_leg: bool,
    ) -> anyhow::Result<End> {
        let program = std::env::current_exe().context("finding this program's file")?;
        let (mtu, offload) = (self.setup.mtu().to_string(), self.setup.offload().to_string());
        let mut command = within(group, &program);
        command.args(guest_on(switch, mode.name()));
        command.args(["--mtu", &mtu, "--offload", &offload, "--backend-offload", &offload]);
        command.args(["--revoke", self.revocation.name()]);
        if host_leg {
            command.args(["--host-tap", HOST_LEG, "--host-offload", &offload]);
        }
        command.arg("--").arg(&program).args(["internal", "bench-gso-end"]).args(role);
        End::start(command).context("starting a guest")
    }
}

/// Waits for the address of the driver domain's interface.
fn host_leg_address() -> anyhow::Result<IpAddr> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(&ip) = interface_addresses(Some(HOST_LEG))?.first() {
            return Ok(ip);
        }
        if Instant::now() >= deadline {
            bail!("{HOST_LEG} has no address after {PATIENCE:?}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn wait_until_gone(switch: &str) -> anyhow::Result<()> {
    // A connection would count as that of a guest and keep the driver domain running.
    let socket = RuntimeDir::open()?.path().join(format!("{switch}.sock"));
    let deadline = Instant::now() + GONE_WITHIN;
    while socket.exists() {
        if Instant::now() >= deadline {
            bail!("the driver domain of switch {switch} did not end within {GONE_WITHIN:?}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Counters at one moment.
struct Reading {
    arrived: Arrived,
    stats: DriverStats,
    /// Levels of each guest with grant windows.
    windows: Vec<WindowLevels>,
    cpu_ns: u64,
    split: cpu::Split,
}

impl Reading {
    fn take(receiver: &End, guests: &[u32], control: &Channel) -> anyhow::Result<Reading> {
        let windows = |launcher: &u32| {
            let levels = windows_of(&launcher.to_string())?;
            levels.with_context(|| format!("guest {launcher} has no grant windows"))
        };
        let windows = guests.iter().map(windows).collect::<anyhow::Result<_>>()?;
        let arrived = receiver.arrived()?;
        let split = cpu::split_of_descendants()?;
        let (stats, cpu_ns) = (stats(control)?, cpu::of_descendants()?);
        Ok(Reading { arrived, stats, windows, cpu_ns, split })
    }
}

/// Stops the sender, and returns the driver domain's counters once nothing moves any more: then each frame that was counted
/// has been copied as often as it ever will be.
fn settle(sender: &End, control: &Channel) -> anyhow::Result<DriverStats> {
    sender.tell(ENOUGH)?;
    let deadline = Instant::now() + PATIENCE;
    let mut last = stats(control)?;
    loop {
        std::thread::sleep(TICK);
        let now = stats(control)?;
        if Moved::between(&last, &now) == Moved::default() {
            return Ok(now);
        }
        if Instant::now() >= deadline {
            bail!("frames still move {PATIENCE:?} after the sender stopped");
        }
        last = now;
    }
}

/// Returns a command that starts in a control group.
fn within(group: Option<&FilePath>, program: &FilePath) -> Command {
    let Some(group) = group else { return Command::new(program) };
    let mut command = Command::new("sh");
    command.args(["-c", "echo $$ >\"$0\" && exec \"$@\""]);
    command.arg(group.join("cgroup.procs")).arg(program);
    command
}

/// End of the stream: a process in a guest or beside the switch, ended on drop.
pub(crate) struct End {
    child: OwnedChild,
    orders: ChildStdin,
    said: Receiver<StreamMessage>,
}

impl End {
    /// Starts an end in the network namespace of this process.
    fn beside(role: &str) -> anyhow::Result<End> {
        let program = std::env::current_exe().context("finding this program's file")?;
        let mut command = Command::new(program);
        command.args(["internal", "bench-gso-end", role]);
        End::start(command).context("starting the driver domain's end")
    }

    fn start(mut command: Command) -> anyhow::Result<End> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let orders = child.stdin.take().context("an end without input")?;
        let output = child.stdout.take().context("an end without output")?;
        let said = messages::listen(output, StreamMessage::Failed)?;
        Ok(End { child: OwnedChild(child), orders, said })
    }

    /// Queries a receiver's progress.
    fn arrived(&self) -> anyhow::Result<Arrived> {
        self.tell(HOW_MUCH)?;
        match self.hear()? {
            StreamMessage::Arrived(arrived) => Ok(arrived),
            other => bail!("the receiver said {other:?}"),
        }
    }

    fn tell(&self, order: &str) -> anyhow::Result<()> {
        writeln!(&self.orders, "{order}").context("telling an end of the stream")
    }

    fn hear(&self) -> anyhow::Result<StreamMessage> {
        let said = self.said.recv_timeout(PATIENCE);
        match said.context("an end of the stream is gone, or says nothing")? {
            StreamMessage::Failed(why) => bail!(why),
            said => Ok(said),
        }
    }
}
