//! Share of reused grants. A guest and its backend run in one process and exchange packets in both
//! directions; the guest's caches count the reuse.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use ringfence_access::Mode;
use ringfence_access::window::{ReuseStats, Revocation, SourcePolicy};
use ringfence_frame::batch::Batch;
use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::port::Port;
use ringfence_net::netfront::WindowSizes;
use ringfence_net::vif::backend::{BackendOptions, VifBackend};
use ringfence_net::vif::frontend::VifFrontend;
use ringfence_net::vif::toolstack::{self, VifConfig};
use ringfence_offload::OffloadMeta;
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::{DomId, Platform};
use ringfence_wire::xenbus::{DeviceId, DeviceKind};

use super::args::Experiment;
use crate::domain::Host;
use crate::net::RunningHub;

/// Batches before the count begins, then while it runs.
const WARM_UP: u32 = 100;
const ROUNDS: u32 = 4000;
/// Packets of a batch, with two pages each.
const PACKETS: usize = 8;
const SIZE: usize = 8000;
const MTU: u16 = 9000;
const PAGES: u32 = 1024;

/// Returns the sizes: four times as many pages as entries; one page in 200 is discarded on return.
fn sizes(revocation: Revocation) -> WindowSizes {
    let policy = SourcePolicy { churn: 200, revocation, ..SourcePolicy::default() };
    WindowSizes { pages: PAGES, entries: 256, policy }
}

/// Shares of reused grants, by direction.
pub(super) struct Shares {
    pub(super) receive: f64,
    pub(super) transmit: f64,
}

impl Shares {
    pub(super) fn measure(revocation: Revocation) -> anyhow::Result<Shares> {
        let mut pair = Pair::connect(revocation)?;
        let transmit = pair.share(true)?;
        Ok(Shares { receive: pair.share(false)?, transmit })
    }

    /// Returns the share of an experiment; the lower one for guest to guest.
    pub(super) fn of(&self, experiment: Experiment) -> f64 {
        match experiment {
            Experiment::Receive => self.receive,
            Experiment::Transmit => self.transmit,
            Experiment::GuestGuest => self.receive.min(self.transmit),
        }
    }
}

struct Pair {
    front: Box<dyn Port>,
    back: Box<dyn Port>,
    // Objects that must outlive the ports.
    _ends: (VifBackend, VifFrontend<LocalPlatform>, [LocalPlatform; 2], RunningHub),
}

impl Pair {
    fn connect(revocation: Revocation) -> anyhow::Result<Pair> {
        let hub = RunningHub::start()?;
        let back_platform = LocalPlatform::connect(hub.0.admit(Some(DomId(0)), true)?.1)?;
        let front_platform = LocalPlatform::connect(hub.0.admit(None, false)?.1)?;
        let (kind, frontend) = (DeviceKind::Vif, front_platform.domid());
        let device = DeviceId { kind, frontend, backend: DomId(0), handle: 0 };
        let (mut back_store, mut front_store) = (back_platform.store()?, front_platform.store()?);
        toolstack::create(
            &mut back_store,
            &device,
            VifConfig { mac: [2, 0, 0, 0, 0, 1], mtu: MTU },
        )?;
        let mut back = VifBackend::new(device, BackendOptions { mode: Mode::Window, mtu: MTU });
        let front = VifFrontend::new(&front_platform, device, MTU)?;
        let mut front = front.with_windows(&front_platform, sizes(revocation));
        let (mut back_host, mut front_host) = (Host::default(), Host::default());
        let deadline = Instant::now() + Duration::from_secs(10);
        while !front.is_up() {
            ensure!(Instant::now() < deadline, "no connection");
            back.look(&back_platform, &mut back_store, &mut back_host)?;
            front.look(&front_platform, &mut front_store, &mut front_host)?;
        }
        let (Some(front_port), Some(back_port)) = (front_host.0, back_host.0) else {
            bail!("the vif was connected but is gone");
        };
        let platforms = [back_platform, front_platform];
        Ok(Pair { front: front_port, back: back_port, _ends: (back, front, platforms, hub) })
    }

    fn stats(&mut self) -> anyhow::Result<ReuseStats> {
        match self.front.execute(0, PortCommand::Resize(PAGES)) {
            PortReply::Resized(levels) => Ok(levels.reuse),
            _ => bail!("the guest's port has no windows"),
        }
    }

    /// Returns the share of reused grants of packets from the guest, or to it.
    fn share(&mut self, from_guest: bool) -> anyhow::Result<f64> {
        let mut batch = Batch::default();
        for _ in 0..PACKETS {
            let Some(at) = batch.reserve(SIZE) else { bail!("a batch is too small") };
            batch.push_contiguous(at, SIZE, OffloadMeta::PLAIN)?;
        }
        let all: Vec<u32> = (0..).take(PACKETS).collect();
        (0..WARM_UP).try_for_each(|_| self.round(&batch, &all, from_guest))?;
        let before = self.stats()?;
        (0..ROUNDS).try_for_each(|_| self.round(&batch, &all, from_guest))?;
        let after = self.stats()?;
        let (hits, misses) = (after.hits - before.hits, after.misses - before.misses);
        Ok(ReuseStats { hits, misses, ..ReuseStats::default() }.reused_share())
    }

    fn round(&mut self, batch: &Batch, all: &[u32], from_guest: bool) -> anyhow::Result<()> {
        let (from, to) = match from_guest {
            true => (&mut self.front, &mut self.back),
            false => (&mut self.back, &mut self.front),
        };
        let done = from.transmit(batch, all)?;
        ensure!(done.sent == all.len(), "{} packets were dropped", done.dropped);
        from.flush()?;
        let mut into = Batch::default();
        to.receive(&mut into, all.len())?;
        into.clear();
        to.complete()?;
        // Makes the sender process its responses.
        from.receive(&mut into, 0)?;
        Ok(())
    }
}
