//! Domain process of a packet benchmark, with one end of a vif.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use ringfence_access::Mode;
use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::port::Port;
use ringfence_hostnet::causes::causes;
use ringfence_net::netfront::{HEADER_STAGED_PAGES, QUEUE_PAGES, WindowSizes};
use ringfence_net::rules::RuleCounters;
use ringfence_net::staging::TxStaging;
use ringfence_net::vif::PortHost;
use ringfence_net::vif::backend::{BackendOptions, VifBackend};
use ringfence_net::vif::frontend::VifFrontend;
use ringfence_net::vif::toolstack::{self, VifConfig};
use ringfence_platform::local::{LocalPlatform, PageSize};
use ringfence_platform::{DomId, Platform};
use ringfence_sandbox::channel::{Channel, ChannelError, expect_fds};
use ringfence_wire::xenbus::{DeviceId, DeviceKind};
use rustix::time::ClockId;

use super::affinity::bind;
use super::bare;
use super::orders::{Amount, PacketAnswer, PacketSetup, PhaseReport, Side, VifCommand};
use super::usage::{Usage, clock};
use super::work::{Generator, Idle, Sink, Waiting};
use crate::harness::STATUS_BENCH_FAILED;

/// Time limit for connecting.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// Minimum MTU of a vif here; packets may be longer or shorter.
pub(super) const MTU_MIN: u32 = 1500;
/// Bytes that the MTU does not include, as in [`ringfence_frame::port`].
pub(super) const LINK_HEADER: u32 = 18;

/// Serves commands until the parent closes the channel. Returns the exit status.
pub(super) fn main() -> u8 {
    Channel::serve_stdin(
        |channel| serve(channel).map(|()| 0),
        |error| (STATUS_BENCH_FAILED, PacketAnswer::Failed(causes(&error))),
    )
}

fn serve(channel: &Channel) -> anyhow::Result<()> {
    ringfence_sandbox::die_with_parent().context("the parent's death signal")?;
    let (setup, fds) = channel.receive::<PacketSetup>()?;
    let [hub] = expect_fds(fds)?;
    // Pinned first, so that caches are warm on the core that is measured.
    if let Some(&core) = setup.cores.first() {
        bind(core)?;
    }
    let mut platform = LocalPlatform::connect(hub)?;
    if setup.side == Side::Frontend {
        let size = if setup.huge_pages { PageSize::Huge } else { PageSize::Small };
        let arena = ringfence_frontend::process::arena(setup.queues, 0);
        platform = platform.with_arena(arena).with_page_size(size);
    }
    let mut connected = connect(&platform, &setup, channel)?;
    let mut queues = queues(&setup, connected.host.take()?)?;
    let huge_pages = platform.page_size() == PageSize::Huge;
    channel.send(&PacketAnswer::Connected { huge_pages }, &[])?;
    loop {
        let order = match channel.receive::<VifCommand>() {
            Ok((order, _)) => order,
            Err(ChannelError::Closed) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let answer = match order {
            VifCommand::Phase { amount, spoil } => {
                let report = phase(&platform, &mut queues, (amount, spoil), &setup)?;
                for queue in &queues {
                    connected.rules.check(&*queue.port)?;
                }
                PacketAnswer::Phase(report)
            }
            VifCommand::Bare => PacketAnswer::Bare(bare::measure(setup.direction, setup.size)?),
        };
        channel.send(&answer, &[])?;
    }
}

/// Queue with its generator or sink.
struct Queue {
    port: Box<dyn Port>,
    end: End,
}

/// Splits a port into its queues.
fn queues(setup: &PacketSetup, mut port: Box<dyn Port>) -> anyhow::Result<Vec<Queue>> {
    let wanted = usize::try_from(setup.queues)?;
    let mut ports = port.split_off(wanted);
    ports.insert(0, port);
    ensure!(ports.len() == wanted, "{} queues were connected instead of {wanted}", ports.len());
    let queue = |mut port: Box<dyn Port>| Ok(Queue { end: End::new(setup, &mut *port)?, port });
    ports.into_iter().map(queue).collect()
}

/// Generator or sink of a queue.
enum End {
    Generator(Generator),
    Sink(Sink),
}

impl End {
    fn new(setup: &PacketSetup, port: &mut dyn Port) -> anyhow::Result<End> {
        if setup.side.generates(setup.direction) {
            Ok(End::Generator(Generator::new(setup.size, setup.batch, port)?))
        } else {
            Ok(End::Sink(Sink::new(setup.size, setup.batch, setup.verify)))
        }
    }

    fn fetched(&self) -> u64 {
        match self {
            End::Generator(_) => 0,
            End::Sink(sink) => sink.fetched(),
        }
    }
}

/// Amount of packets of a phase, and the fault to inject.
type Phase = (Amount, Option<super::params::Spoil>);

fn phase(
    platform: &LocalPlatform,
    queues: &mut [Queue],
    (amount, spoil): Phase,
    setup: &PacketSetup,
) -> anyhow::Result<PhaseReport> {
    let before = used(platform, queues)?;
    let began = clock(ClockId::Monotonic);
    let packets = match &mut *queues {
        [queue] => queue.run(platform, (amount, spoil), waiting(setup, !setup.cores.is_empty()))?,
        several => on_threads(platform, several, (amount, spoil), setup)?,
    };
    let ended = clock(ClockId::Monotonic);
    let after = used(platform, queues)?;
    Ok(PhaseReport { packets, began, ended, usage: after.since(&before) })
}

/// Returns the idle strategy of a thread.
fn waiting(setup: &PacketSetup, own_core: bool) -> Waiting {
    match (setup.poll, own_core) {
        (true, _) => Waiting::Polls,
        (false, true) => Waiting::OnItsOwnCore,
        (false, false) => Waiting::OnASharedCore,
    }
}

fn used(platform: &LocalPlatform, queues: &[Queue]) -> anyhow::Result<Usage> {
    let fetched = queues.iter().map(|queue| queue.end.fetched()).sum();
    Usage::now(platform.counters(), queues.iter().map(|queue| &**queue.port.counters()), fetched)
}

/// Runs the phase of each queue in a thread of its own; a number of packets is divided among them.
fn on_threads(
    platform: &LocalPlatform,
    queues: &mut [Queue],
    (amount, spoil): Phase,
    setup: &PacketSetup,
) -> anyhow::Result<u64> {
    let count = queues.len() as u64;
    let each = match amount {
        Amount::Packets(packets) => Amount::Packets(packets.div_ceil(count)),
        time @ Amount::Time(_) => time,
    };
    std::thread::scope(|scope| {
        let start = |(number, queue): (usize, _)| {
            let core = setup.cores.get(number).copied();
            // One fault is injected, in the first queue.
            let phase = (each, spoil.filter(|_| number == 0));
            scope.spawn(move || {
                core.map_or(Ok(()), bind)?;
                Queue::run(queue, platform, phase, waiting(setup, core.is_some()))
            })
        };
        let threads: Vec<_> = queues.iter_mut().enumerate().map(start).collect();
        let mut packets = 0;
        let mut failure = None;
        for thread in threads {
            match thread.join() {
                Ok(Ok(count)) => packets += count,
                Ok(Err(error)) => failure = failure.or(Some(error)),
                Err(_) => bail!("a thread panicked"),
            }
        }
        failure.map_or(Ok(packets), Err)
    })
}

impl Queue {
    fn run(
        &mut self,
        platform: &LocalPlatform,
        (amount, spoil): Phase,
        waiting: Waiting,
    ) -> anyhow::Result<u64> {
        let mut idle = Idle::new(platform.counters(), waiting);
        let port = &mut *self.port;
        match &mut self.end {
            End::Generator(generator) => generator.send(port, amount, spoil, &mut idle),
            End::Sink(sink) => sink.take(port, &mut idle),
        }
    }
}

/// Counters of rule violations, which must stay zero in a benchmark.
struct Rules(Arc<RuleCounters>);

impl Rules {
    fn check(&self, port: &dyn Port) -> anyhow::Result<()> {
        let (broken, dropped) = (self.0.all(), port.counters().drops_total());
        ensure!(broken.is_empty(), "the peer broke rules: {broken:?}");
        ensure!(dropped == 0, "{dropped} packets were dropped: {:?}", port.counters().named());
        Ok(())
    }
}

/// Port host that keeps the port once it is connected.
#[derive(Default)]
pub(crate) struct Host(pub(crate) Option<Box<dyn Port>>);

impl Host {
    pub(super) fn take(&mut self) -> anyhow::Result<Box<dyn Port>> {
        self.0.take().context("the vif was connected but is gone")
    }
}

impl PortHost for Host {
    fn attach(&mut self, _: &DeviceId, port: Box<dyn Port>) {
        self.0 = Some(port);
    }

    fn detach(&mut self, _: &DeviceId) {
        self.0 = None;
    }

    fn execute(&mut self, _: &DeviceId, queue: u16, command: PortCommand) -> Option<PortReply> {
        self.0.as_mut().map(|port| port.execute(queue, command))
    }
}

/// Connected side. The frontend is kept, since its memory must outlive the port.
pub(super) struct Connected {
    pub(super) host: Host,
    rules: Rules,
    _frontend: Option<VifFrontend<LocalPlatform>>,
}

fn connect(
    platform: &LocalPlatform,
    setup: &PacketSetup,
    channel: &Channel,
) -> anyhow::Result<Connected> {
    let backend = DomId(0);
    let device =
        DeviceId { kind: DeviceKind::Vif, frontend: DomId(setup.frontend), backend, handle: 0 };
    // The MTU makes the port provide for frames of exactly this size.
    let mtu = u16::try_from(setup.size.saturating_sub(LINK_HEADER).max(MTU_MIN))?;
    match setup.side {
        Side::Backend => {
            let mut store = platform.store()?;
            toolstack::create(&mut store, &device, VifConfig { mac: [2, 0, 0, 0, 0, 1], mtu })?;
            channel.send(&PacketAnswer::DeviceMade, &[])?;
            let options = BackendOptions { mode: Mode::for_network(&setup.mode)?, mtu };
            let backend = VifBackend::new(device, options).with_queues(setup.queues);
            let queues = usize::try_from(setup.queues)?;
            connect_backend(platform, backend, setup.staging.parse()?, queues)
        }
        Side::Frontend => {
            let frontend = VifFrontend::new(platform, device, mtu)?.with_queues(setup.queues);
            let windows = Mode::for_network(&setup.mode)? == Mode::Window;
            let windows = windows.then(|| WindowSizes::for_queues(setup.queues));
            connect_frontend(platform, frontend, setup.staging.parse()?, windows)
        }
    }
}

/// Connects a backend and waits until the pages that the frontend stages are there.
pub(super) fn connect_backend(
    platform: &LocalPlatform,
    mut backend: VifBackend,
    staging: TxStaging,
    queues: usize,
) -> anyhow::Result<Connected> {
    let mut store = platform.store()?;
    let mut host = Host::default();
    until_connected(|| {
        backend.look(platform, &mut store, &mut host)?;
        backend.serve_control(&mut host);
        Ok(host.0.is_some() && usize::try_from(backend.staged())? == staged_pages(staging) * queues)
    })?;
    Ok(Connected { host, rules: Rules(Arc::clone(backend.rules())), _frontend: None })
}

/// Returns the number of pages of a queue that a frontend stages.
pub(super) fn staged_pages(staging: TxStaging) -> usize {
    match staging {
        TxStaging::Off => 0,
        TxStaging::Full => QUEUE_PAGES,
        TxStaging::Heads => HEADER_STAGED_PAGES,
    }
}

/// Connects a frontend and waits until its pages are staged.
pub(super) fn connect_frontend(
    platform: &LocalPlatform,
    frontend: VifFrontend<LocalPlatform>,
    staging: TxStaging,
    windows: Option<WindowSizes>,
) -> anyhow::Result<Connected> {
    let mut store = platform.store()?;
    let mut frontend = frontend.with_staging(staging);
    if let Some(sizes) = windows {
        frontend = frontend.with_windows(platform, sizes);
    }
    let mut host = Host::default();
    until_connected(|| {
        frontend.look(platform, &mut store, &mut host)?;
        let staged = frontend.staging().is_some_and(|progress| progress.done);
        Ok(frontend.is_up() && (staged || staging == TxStaging::Off))
    })?;
    ensure!(frontend.has_windows() == windows.is_some(), "the backend did not open the windows");
    let refused = frontend.staging().map_or(0, |progress| progress.refused);
    ensure!(refused == 0, "the backend did not stage {refused} pages");
    let rules = Rules(Arc::clone(frontend.rules()));
    Ok(Connected { host, rules, _frontend: Some(frontend) })
}

/// Polls until `look` returns `true`. A watch is not worthwhile for the few steps of a handshake.
pub(super) fn until_connected(
    mut look: impl FnMut() -> anyhow::Result<bool>,
) -> anyhow::Result<()> {
    let deadline = Instant::now() + CONNECT_WITHIN;
    while !look()? {
        ensure!(Instant::now() < deadline, "no connection within {CONNECT_WITHIN:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}
