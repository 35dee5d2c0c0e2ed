//! Honest guest: sends as much as its ring accepts, receives all packets, and sleeps when idle.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use ringfence_frame::batch::Batch;
use ringfence_frame::port::Port;
use ringfence_net::vif::frontend::VifFrontend;
use ringfence_offload::OffloadMeta;
use ringfence_platform::Platform;
use ringfence_platform::local::LocalPlatform;

use super::super::domain::Host;
use super::super::packet::Template;
use super::super::work::{Idle, Waiting};
use super::orders::{GuestIdentity, HostileAnswer, NeighbourSetup};
use ringfence_sandbox::channel::Channel;
use ringfence_testkit::hostile::adversary::SINK_MAC;

/// Time limit for connecting.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// Packets of a batch.
const ROUND: usize = 64;
/// One packet in this number is broadcast, as ARP requests are.
const BROADCAST_EVERY: u64 = 256;
/// One packet in this number goes to the neighbour, if the guest talks to it.
const NEIGHBOUR_EVERY: usize = 4;

/// Sends until the parent ends the process.
pub(super) fn serve(
    channel: &Channel,
    setup: &NeighbourSetup,
    place: &GuestIdentity,
    talks: bool,
    hub: OwnedFd,
) -> anyhow::Result<()> {
    let platform = LocalPlatform::connect(hub)?;
    let mut store = platform.store()?;
    let mut frontend = VifFrontend::new(&platform, place.device(), place.mtu)?;
    let mut host = Host::default();
    let deadline = Instant::now() + CONNECT_WITHIN;
    while !frontend.is_up() {
        ensure!(Instant::now() < deadline, "no connection within {CONNECT_WITHIN:?}");
        frontend.look(&platform, &mut store, &mut host)?;
        std::thread::sleep(Duration::from_millis(1));
    }
    let port = host.0.as_mut().context("the vif was connected but is gone")?;
    channel.send(&HostileAnswer::Ready, &[])?;
    let mut idle = Idle::new(platform.counters(), Waiting::OnASharedCore);
    let mut sender = Sender::new(setup.size, place);
    let mut taken = Batch::default();
    loop {
        taken.clear();
        let received = port.receive(&mut taken, ROUND).context("receiving")?;
        if talks && sender.neighbour.is_none() {
            let from = taken.iter().find_map(|frame| frame.header().get(6..12)?.try_into().ok());
            sender.neighbour = from.map(|mac| Template::between(setup.size, mac, place.mac));
        }
        taken.clear();
        port.complete().context("answering")?;
        let sent = sender.send(&mut **port)?;
        if sent == 0 && received.frames == 0 {
            idle.wait(&mut **port, "the driver domain did not take a packet")?;
        } else {
            idle.reset();
        }
    }
}

/// Packet generator of an honest guest.
struct Sender {
    /// Packets to the verifying port, and broadcast packets.
    templates: [Template; 2],
    /// Packet to the neighbour, which is not verified: one in [`NEIGHBOUR_EVERY`].
    neighbour: Option<Template>,
    batch: Batch,
    indices: Vec<u32>,
    room: usize,
    sequence: u64,
}

impl Sender {
    fn new(size: u32, place: &GuestIdentity) -> Sender {
        let to = |destination| Template::between(size, destination, place.mac);
        let room = (size as usize).next_multiple_of(64);
        Sender {
            templates: [to(SINK_MAC), to([0xff; 6])],
            neighbour: None,
            batch: Batch::with_capacity(ROUND, ROUND * room),
            indices: (0..).take(ROUND).collect(),
            room,
            sequence: 0,
        }
    }

    /// Sends at most one batch, as large as the port's room. Returns the number of packets.
    fn send(&mut self, port: &mut dyn Port) -> anyhow::Result<usize> {
        let count = port.room().context("looking for room")?.min(ROUND);
        if count == 0 {
            return Ok(0);
        }
        self.batch.clear();
        for n in 1..=count {
            let everybody = self.sequence.is_multiple_of(BROADCAST_EVERY);
            let neighbour = self.neighbour.as_ref().filter(|_| n % NEIGHBOUR_EVERY == 0);
            let template = neighbour.unwrap_or(&self.templates[usize::from(everybody)]);
            let len = template.bytes().len();
            let at = self.batch.reserve(self.room).context("a full batch")?;
            let packet = self.batch.scratch_mut(at..at + len)?;
            packet.copy_from_slice(template.bytes());
            template.number(packet, self.sequence, false);
            self.sequence += u64::from(neighbour.is_none());
            self.batch.push_contiguous(at, len, OffloadMeta::PLAIN)?;
        }
        let done = port.transmit(&self.batch, &self.indices[..count]).context("sending")?;
        ensure!(done.sent == count, "{} of {count} packets were dropped", count - done.sent);
        port.flush().context("flushing")?;
        Ok(count)
    }
}
