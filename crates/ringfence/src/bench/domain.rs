//! One side of a benchmark: a process with one end of a vif.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use ringfence_grants::Mode;
use ringfence_net::netfront::{HEADER_STAGED_PAGES, QUEUE_PAGES, TxStaging, WindowSizes};
use ringfence_net::orders::{PortOrder, PortReply};
use ringfence_net::port::Port;
use ringfence_net::rules::RuleCounters;
use ringfence_net::vif::PortHost;
use ringfence_net::vif::backend::{BackendOptions, VifBackend};
use ringfence_net::vif::frontend::VifFrontend;
use ringfence_net::vif::toolstack::{self, VifConfig};
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::{DomId, Platform};
use ringfence_wire::xenbus::{DeviceId, DeviceKind};
use rustix::thread::CpuSet;
use rustix::time::ClockId;

use super::orders::{Amount, Answer, Order, PhaseReport, Setup, Side};
use super::usage::{Usage, clock};
use super::work::{Generator, Idle, Sink};
use super::{STATUS_BENCH_FAILED, bare};
use crate::sys::channel::{Channel, ChannelError, expect_fds};

/// How long connecting may take.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// The least MTU of a vif here; packets are longer or shorter than this as they please.
const MTU_MIN: u32 = 1500;
/// Octets in front of what the MTU counts, as [`ringfence_net::port`] reckons.
const LINK_HEADER: u32 = 18;

/// Runs until the parent closes the channel; returns the exit status.
pub(super) fn main() -> u8 {
    let channel = match Channel::from_stdin() {
        Ok(channel) => channel,
        Err(error) => {
            eprintln!("ringfence: {error}");
            return STATUS_BENCH_FAILED;
        }
    };
    match serve(&channel) {
        Ok(()) => 0,
        Err(error) => {
            // When the parent is gone, nobody is left to tell.
            let _ = channel.send(&Answer::Failed(format!("{error:#}")), &[]);
            STATUS_BENCH_FAILED
        }
    }
}

fn serve(channel: &Channel) -> anyhow::Result<()> {
    crate::sys::die_with_parent().context("the parent's death signal")?;
    let (setup, fds) = channel.receive::<Setup>()?;
    let [hub] = expect_fds(fds)?;
    if let Some(core) = setup.core {
        let mut cores = CpuSet::new();
        cores.set(core);
        rustix::thread::sched_setaffinity(None, &cores).context("choosing a core")?;
    }
    let platform = LocalPlatform::connect(hub)?;
    let mut connected = connect(&platform, &setup, channel)?;
    let port = connected.host.port()?;
    let mut end = End::new(&setup, port)?;
    channel.send(&Answer::Connected, &[])?;
    loop {
        let order = match channel.receive::<Order>() {
            Ok((order, _)) => order,
            Err(ChannelError::Closed) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let answer = match order {
            Order::Phase { amount, spoil } => {
                let report =
                    phase(&platform, port, &mut end, (amount, spoil), setup.core.is_some())?;
                connected.rules.check(port)?;
                Answer::Phase(report)
            }
            Order::Bare => Answer::Bare(bare::measure(setup.direction, setup.size)?),
        };
        channel.send(&answer, &[])?;
    }
}

/// What this side does with packets.
enum End {
    Generator(Generator),
    Sink(Sink),
}

impl End {
    fn new(setup: &Setup, port: &mut dyn Port) -> anyhow::Result<End> {
        if setup.side.generates(setup.direction) {
            Ok(End::Generator(Generator::new(setup.size, port)?))
        } else {
            Ok(End::Sink(Sink::new(setup.size, setup.verify)))
        }
    }

    fn fetched(&self) -> u64 {
        match self {
            End::Generator(_) => 0,
            End::Sink(sink) => sink.fetched(),
        }
    }
}

fn phase(
    platform: &LocalPlatform,
    port: &mut dyn Port,
    end: &mut End,
    (amount, spoil): (Amount, Option<super::args::Spoil>),
    own_core: bool,
) -> anyhow::Result<PhaseReport> {
    let counters = Arc::clone(port.counters());
    let mut idle = Idle::new(platform.counters(), own_core);
    let before = Usage::now(platform.counters(), &counters, end.fetched())?;
    let began = clock(ClockId::Monotonic);
    let packets = match end {
        End::Generator(generator) => generator.send(port, amount, spoil, &mut idle)?,
        End::Sink(sink) => sink.take(port, &mut idle)?,
    };
    let ended = clock(ClockId::Monotonic);
    let after = Usage::now(platform.counters(), &counters, end.fetched())?;
    Ok(PhaseReport { packets, began, ended, usage: after.since(&before) })
}

/// The rules the peer broke: none, in a benchmark.
struct Rules(Arc<RuleCounters>);

impl Rules {
    fn check(&self, port: &dyn Port) -> anyhow::Result<()> {
        let (broken, dropped) = (self.0.all(), port.counters().drops_total());
        ensure!(broken.is_empty(), "the peer broke rules: {broken:?}");
        ensure!(dropped == 0, "{dropped} packets were dropped: {:?}", port.counters().named());
        Ok(())
    }
}

/// Holds the port once it is connected.
#[derive(Default)]
struct Host(Option<Box<dyn Port>>);

impl Host {
    fn port(&mut self) -> anyhow::Result<&mut dyn Port> {
        match &mut self.0 {
            Some(port) => Ok(&mut **port),
            None => bail!("the vif was connected but is gone"),
        }
    }
}

impl PortHost for Host {
    fn attach(&mut self, _: &DeviceId, port: Box<dyn Port>) {
        self.0 = Some(port);
    }

    fn detach(&mut self, _: &DeviceId) {
        self.0 = None;
    }

    fn order(&mut self, _: &DeviceId, queue: u16, order: PortOrder) -> Option<PortReply> {
        self.0.as_mut().map(|port| port.obey(queue, order))
    }
}

/// A connected side. The frontend's memory lives as long as its port.
struct Connected {
    host: Host,
    rules: Rules,
    _frontend: Option<VifFrontend<LocalPlatform>>,
}

fn connect(
    platform: &LocalPlatform,
    setup: &Setup,
    channel: &Channel,
) -> anyhow::Result<Connected> {
    let backend = DomId(0);
    let device =
        DeviceId { kind: DeviceKind::Vif, frontend: DomId(setup.frontend), backend, handle: 0 };
    // So that the port reckons with frames of just this size.
    let mtu = u16::try_from(setup.size.saturating_sub(LINK_HEADER).max(MTU_MIN))?;
    match setup.side {
        Side::Backend => {
            let mut store = platform.store()?;
            toolstack::create(&mut store, &device, VifConfig { mac: [2, 0, 0, 0, 0, 1], mtu })?;
            channel.send(&Answer::DeviceMade, &[])?;
            let options = BackendOptions { mode: setup.mode.parse()?, mtu };
            connect_backend(platform, device, options, setup.staging.parse()?)
        }
        Side::Frontend => {
            let windows = setup.mode.parse::<Mode>()? == Mode::Window;
            connect_frontend(platform, device, mtu, (setup.staging.parse()?, windows))
        }
    }
}

fn connect_backend(
    platform: &LocalPlatform,
    device: DeviceId,
    options: BackendOptions,
    staging: TxStaging,
) -> anyhow::Result<Connected> {
    let mut store = platform.store()?;
    let mut backend = VifBackend::new(device, options);
    let mut host = Host::default();
    until_connected(|| {
        backend.look(platform, &mut store, &mut host)?;
        backend.serve_control(&mut host);
        let pages = match staging {
            TxStaging::Off => 0,
            TxStaging::Full => QUEUE_PAGES,
            TxStaging::Heads => HEADER_STAGED_PAGES,
        };
        Ok(host.0.is_some() && usize::try_from(backend.staged())? == pages)
    })?;
    Ok(Connected { host, rules: Rules(Arc::clone(backend.rules())), _frontend: None })
}

fn connect_frontend(
    platform: &LocalPlatform,
    device: DeviceId,
    mtu: u16,
    (staging, windows): (TxStaging, bool),
) -> anyhow::Result<Connected> {
    let mut store = platform.store()?;
    let mut frontend = VifFrontend::new(platform, device, mtu)?.with_staging(staging);
    if windows {
        frontend = frontend.with_windows(platform, WindowSizes::default());
    }
    let mut host = Host::default();
    until_connected(|| {
        frontend.look(platform, &mut store, &mut host)?;
        let staged = frontend.staging().is_some_and(|progress| progress.done);
        Ok(frontend.is_up() && (staged || staging == TxStaging::Off))
    })?;
    ensure!(frontend.has_windows() == windows, "the backend did not open the windows");
    let refused = frontend.staging().map_or(0, |progress| progress.refused);
    ensure!(refused == 0, "the backend did not stage {refused} pages");
    let rules = Rules(Arc::clone(frontend.rules()));
    Ok(Connected { host, rules, _frontend: Some(frontend) })
}

/// Looks until it is done. The handshake takes a few steps; it is not worth a watch.
fn until_connected(mut look: impl FnMut() -> anyhow::Result<bool>) -> anyhow::Result<()> {
    let deadline = Instant::now() + CONNECT_WITHIN;
    while !look()? {
        ensure!(Instant::now() < deadline, "no connection within {CONNECT_WITHIN:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}
