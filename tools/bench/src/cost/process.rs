//! Processes of a path: the source of the packets, and the domains that they pass.
//!
//! The source sends a burst whenever an interval is over, and sleeps meanwhile. A sink sleeps until an event; it never
//! spins, which would count as cost.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use ringfence_access::Mode;
use ringfence_frame::batch::Batch;
use ringfence_frame::port::Port;
use ringfence_hostnet::causes::causes;
use ringfence_net::netfront::WindowSizes;
use ringfence_net::staging::TxStaging;
use ringfence_net::vif::backend::{BackendOptions, VifBackend};
use ringfence_net::vif::frontend::VifFrontend;
use ringfence_net::vif::toolstack::{self, VifConfig};
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::{DomId, Platform};
use ringfence_sandbox::channel::{Channel, ChannelError, expect_fds};
use ringfence_testkit::hostile::adversary::SINK_MAC;
use ringfence_wire::xenbus::{DeviceId, DeviceKind};
use serde::{Deserialize, Serialize};

use super::components::PathName;
use super::uplink::UplinkLine;
use crate::affinity::bind;
use crate::domain::{
    Connected, Host, LINK_HEADER, MTU_MIN, connect_backend, connect_frontend, staged_pages,
    until_connected,
};
use crate::harness::STATUS_BENCH_FAILED;
use crate::hostile::orders::{GuestIdentity, SinkSetup};
use crate::hostile::sink::{SinkPort, Tally};
use crate::hub::RunningHub;
use crate::packet::{Checker, Template};
use crate::params::Verify;
use crate::work::{Generator, Slept, sleep};

/// Packets of a batch of a sink.
const ROUND: usize = 64;
/// Address of the source where it needs none of its own.
const SOURCE_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
/// Time limit for a burst that finds no room: far beyond any scheduling delay.
const ROOM_WITHIN: Duration = Duration::from_secs(10);
/// Pause before a burst that found no room looks again.
const NAP: Duration = Duration::from_micros(50);

/// First message to a process. A domain receives its connection to the hub with it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct CostSetup {
    pub(super) role: CostRole,
    pub(super) core: usize,
    /// Bytes of a packet.
    pub(super) size: u32,
    /// Packets of a burst.
    pub(super) burst: u16,
}

/// Role of a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum CostRole {
    /// Whole path in one process.
    Single(PathName),
    /// Backend of a vif, which verifies the packets itself.
    Backend { frontend: u16 },
    /// Frontend of a vif whose backend is another process.
    Frontend { frontend: u16 },
    /// Guest of a driver domain that sends to this address.
    Sender { place: GuestIdentity, to: [u8; 6] },
    /// Guest of a driver domain that verifies the packets.
    Receiver { place: GuestIdentity },
}

impl CostRole {
    pub(super) fn name(&self) -> &'static str {
        match self {
            CostRole::Single(_) => "path",
            CostRole::Backend { .. } => "backend",
            CostRole::Frontend { .. } => "frontend",
            CostRole::Sender { .. } => "guest that sends",
            CostRole::Receiver { .. } => "guest that receives",
        }
    }
}

/// Offered load of a run.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Pace {
    pub(super) bursts: u64,
    /// Time between the beginnings of two bursts.
    pub(super) interval: Duration,
}

/// Order to a process.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum CostOrder {
    /// To a source: send at this pace.
    Send(Pace),
    /// To a sink: report the packets so far.
    Count,
}

/// Message of a process to the parent.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum CostAnswer {
    Ready,
    /// All packets of a run are sent, and verified if the source is the sink.
    Sent {
        packets: u64,
        nanos: u64,
    },
    Counted(u64),
    /// The process failed, with the reason.
    Failed(String),
}

/// Runs `ringfence-bench internal bench-cost`. Returns the exit status.
pub(crate) fn main() -> u8 {
    Channel::serve_stdin(
        |channel| serve(channel).map(|()| 0),
        |error| (STATUS_BENCH_FAILED, CostAnswer::Failed(causes(&error))),
    )
}

fn serve(channel: &Channel) -> anyhow::Result<()> {
    ringfence_sandbox::die_with_parent().context("the parent's death signal")?;
    let (setup, fds) = channel.receive::<CostSetup>()?;
    // Before the driver domain starts threads: on a single core they do not spin.
    bind(setup.core)?;
    match &setup.role {
        CostRole::Single(path) => single(channel, &setup, *path),
        CostRole::Backend { frontend } => {
            let [hub] = expect_fds(fds)?;
            let platform = LocalPlatform::connect(hub)?;
            let (device, mtu) = (vif(*frontend), mtu(setup.size)?);
            let mut store = platform.store()?;
            toolstack::create(&mut store, &device, VifConfig { mac: SOURCE_MAC, mtu })?;
            channel.send(&CostAnswer::Ready, &[])?;
            let backend = VifBackend::new(device, BackendOptions { mode: Mode::Staging, mtu });
            let mut connected = connect_backend(&platform, backend, TxStaging::Full, 1)?;
            take(channel, &setup, &mut connected)
        }
        CostRole::Frontend { frontend } => {
            let [hub] = expect_fds(fds)?;
            let platform = connect(hub)?;
            let frontend = VifFrontend::new(&platform, vif(*frontend), mtu(setup.size)?)?;
            let template = Template::between(setup.size, SINK_MAC, SOURCE_MAC);
            send(channel, &setup, &platform, (frontend, template))
        }
        CostRole::Sender { place, to } => {
            let [hub] = expect_fds(fds)?;
            let platform = connect(hub)?;
            let frontend = VifFrontend::new(&platform, place.device(), place.mtu)?;
            let template = Template::between(setup.size, *to, place.mac);
            send(channel, &setup, &platform, (frontend, template))
        }
        CostRole::Receiver { place } => {
            let [hub] = expect_fds(fds)?;
            let platform = connect(hub)?;
            let frontend = VifFrontend::new(&platform, place.device(), place.mtu)?;
            let mut connected = connect_frontend(&platform, frontend, TxStaging::Full, None)?;
            take(channel, &setup, &mut connected)
        }
    }
}

/// Connects a domain with a frontend to its hub.
fn connect(hub: OwnedFd) -> anyhow::Result<LocalPlatform> {
    Ok(LocalPlatform::connect(hub)?.with_arena(ringfence_frontend::process::arena(1, 0)))
}

fn vif(frontend: u16) -> DeviceId {
    DeviceId { kind: DeviceKind::Vif, frontend: DomId(frontend), backend: DomId(0), handle: 0 }
}

fn mtu(size: u32) -> anyhow::Result<u16> {
    Ok(u16::try_from(size.saturating_sub(LINK_HEADER).max(MTU_MIN))?)
}

/// Receives the next order; `None` if the parent closed the channel.
fn order(channel: &Channel) -> anyhow::Result<Option<CostOrder>> {
    match channel.receive::<CostOrder>() {
        Ok((order, _)) => Ok(Some(order)),
        Err(ChannelError::Closed) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Runs `burst` at a pace. It returns the number of packets that it sent.
fn paced(
    pace: Pace,
    mut burst: impl FnMut() -> anyhow::Result<usize>,
) -> anyhow::Result<CostAnswer> {
    let (began, mut packets) = (Instant::now(), 0);
    let mut due = began;
    for _ in 0..pace.bursts {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        packets += burst()? as u64;
        due += pace.interval;
    }
    Ok(CostAnswer::Sent { packets, nanos: u64::try_from(began.elapsed().as_nanos())? })
}

/// Serves the orders of a source, whose bursts are `burst`.
fn serve_source(
    channel: &Channel,
    mut burst: impl FnMut() -> anyhow::Result<usize>,
    mut ended: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    channel.send(&CostAnswer::Ready, &[])?;
    while let Some(order) = order(channel)? {
        let answer = match order {
            CostOrder::Send(pace) => paced(pace, &mut burst)?,
            CostOrder::Count => bail!("a source counts no packets"),
        };
        ended()?;
        channel.send(&answer, &[])?;
    }
    Ok(())
}

/// Connects a frontend and sends its packets.
fn send(
    channel: &Channel,
    setup: &CostSetup,
    platform: &LocalPlatform,
    (frontend, template): (VifFrontend<LocalPlatform>, Template),
) -> anyhow::Result<()> {
    let mut connected = connect_frontend(platform, frontend, TxStaging::Full, None)?;
    let port = connected.host.0.as_mut().context("the vif was connected but is gone")?;
    let mut generator = Generator::of(template, setup.burst, &mut **port)?;
    let burst = || {
        let since = Instant::now();
        // At a fixed load there is room, unless the peer was held up.
        generator.burst(&mut **port, || {
            ensure!(
                since.elapsed() < ROOM_WITHIN,
                "the peer took no packet within {ROOM_WITHIN:?}"
            );
            std::thread::sleep(NAP);
            Ok(())
        })
    };
    serve_source(channel, burst, || Ok(()))
}

/// Verifies packets and answers the parent until it closes the channel.
fn take(channel: &Channel, setup: &CostSetup, connected: &mut Connected) -> anyhow::Result<()> {
    let port = connected.host.0.as_mut().context("the vif was connected but is gone")?;
    channel.send(&CostAnswer::Ready, &[])?;
    let mut sink = CostSink::new(setup.size);
    loop {
        if sink.receive(&mut **port)? > 0 {
            continue;
        }
        if sleep(&mut **port, Some(channel.as_fd()), None)? == Slept::Other {
            match order(channel)? {
                None => return Ok(()),
                Some(CostOrder::Count) => {
                    channel.send(&CostAnswer::Counted(sink.checker.packets()), &[])?;
                }
                Some(CostOrder::Send(_)) => bail!("a sink sends no packets"),
            }
        }
    }
}

/// Sink of packets, which verifies length and number.
struct CostSink {
    checker: Checker,
    batch: Batch,
}

impl CostSink {
    fn new(size: u32) -> CostSink {
        CostSink { checker: Checker::verifying(size, Verify::Sequence), batch: Batch::default() }
    }

    /// Receives a batch. Returns the work that was found.
    fn receive(&mut self, port: &mut dyn Port) -> anyhow::Result<usize> {
        self.batch.clear();
        let got = port.receive(&mut self.batch, ROUND).context("receiving")?;
        for frame in self.batch.iter() {
            self.checker.take(frame)?;
        }
        self.batch.clear();
        port.complete().context("answering")?;
        Ok(got.work)
    }
}

/// Serves a path within this process.
fn single(channel: &Channel, setup: &CostSetup, path: PathName) -> anyhow::Result<()> {
    if path.is_uplink() {
        let line = UplinkLine::new(setup.size, setup.burst.into(), path == PathName::Policy)?;
        let line = std::cell::RefCell::new(line);
        let count = usize::from(setup.burst);
        let burst = || line.borrow_mut().burst(count).map(|()| count);
        return serve_source(channel, burst, || line.borrow().check());
    }
    if let Some(mode) = path.ring() {
        let mut line = RingLine::new(setup, mode)?;
        return serve_source(channel, || line.burst(), || Ok(()));
    }
    let template = Template::between(setup.size, SINK_MAC, SOURCE_MAC);
    let tally = Arc::new(Tally::default());
    tally.set_victim(SOURCE_MAC);
    let verify = SinkSetup { verify: Verify::Sequence, answers: false };
    let mut port = SinkPort::new(setup.size, verify, &tally);
    let mut generator = Generator::of(template, setup.burst, &mut port)?;
    let mut sent = 0;
    let burst = || {
        sent += generator.burst(&mut port, no_room)?;
        let verified = tally.now().verified;
        ensure!(verified == sent as u64, "{verified} of {sent} packets were right");
        Ok(generator.round())
    };
    serve_source(channel, burst, || Ok(()))
}

/// Fails: nothing else in this thread would make room.
fn no_room() -> anyhow::Result<()> {
    bail!("the ring has no room for a burst")
}

/// Frontend and backend of a vif in one thread.
struct RingLine {
    generator: Generator,
    sink: CostSink,
    front: Box<dyn Port>,
    back: Box<dyn Port>,
    /// Device ends and platforms, which the ports need.
    _frontend: VifFrontend<LocalPlatform>,
    _backend: VifBackend,
    _platforms: [LocalPlatform; 2],
    _hub: RunningHub,
}

impl RingLine {
    fn new(setup: &CostSetup, mode: Mode) -> anyhow::Result<RingLine> {
        let hub = RunningHub::start()?;
        let driver = LocalPlatform::connect(hub.0.admit(Some(DomId(0)), true)?.1)?;
        let (frontend, connection) = hub.0.admit(None, false)?;
        let guest = LocalPlatform::connect(connection)?
            .with_arena(ringfence_frontend::process::arena(1, 0));
        let (device, mtu) = (vif(frontend.0), mtu(setup.size)?);
        let mut stores = (driver.store()?, guest.store()?);
        toolstack::create(&mut stores.0, &device, VifConfig { mac: SOURCE_MAC, mtu })?;
        let staging = if mode == Mode::Staging { TxStaging::Full } else { TxStaging::Off };
        let mut backend = VifBackend::new(device, BackendOptions { mode, mtu });
        let mut frontend = VifFrontend::new(&guest, device, mtu)?.with_staging(staging);
        if mode == Mode::Window {
            frontend = frontend.with_windows(&guest, WindowSizes::for_queues(1));
        }
        let (mut back, mut front) = (Host::default(), Host::default());
        until_connected(|| {
            backend.look(&driver, &mut stores.0, &mut back)?;
            backend.serve_control(&mut back);
            frontend.look(&guest, &mut stores.1, &mut front)?;
            let is_staged = usize::try_from(backend.staged())? == staged_pages(staging);
            Ok(back.0.is_some() && frontend.is_up() && is_staged)
        })?;
        ensure!(frontend.has_windows() == (mode == Mode::Window), "the windows were not opened");
        let (mut front, back) = (front.take()?, back.take()?);
        let template = Template::between(setup.size, SINK_MAC, SOURCE_MAC);
        let generator = Generator::of(template, setup.burst, &mut *front)?;
        Ok(RingLine {
            generator,
            sink: CostSink::new(setup.size),
            front,
            back,
            _frontend: frontend,
            _backend: backend,
            _platforms: [driver, guest],
            _hub: hub,
        })
    }

    /// Sends a burst and takes it at the other end.
    fn burst(&mut self) -> anyhow::Result<usize> {
        // It also takes the responses of the burst before.
        let sent = self.generator.burst(&mut *self.front, no_room)?;
        let wanted = self.sink.checker.packets() + sent as u64;
        while self.sink.checker.packets() < wanted {
            let work = self.sink.receive(&mut *self.back)?;
            ensure!(work > 0, "packet {} is missing", self.sink.checker.packets());
        }
        Ok(sent)
    }
}
