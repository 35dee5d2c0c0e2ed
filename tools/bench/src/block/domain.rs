//! Domain process of a disk benchmark: the driver domain or a guest.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use ringfence_block::blkback::BlkbackOptions;
use ringfence_block::blkfront::BlkfrontOptions;
use ringfence_block::storage::file::{FileDisk, FileOptions};
use ringfence_block::storage::memory::MemoryDisk;
use ringfence_block::storage::{Disk, DiskQueue, Done, Op, Request, Segment};
use ringfence_block::vbd::backend::VbdBackend;
use ringfence_block::vbd::frontend::VbdFrontend;
use ringfence_block::vbd::toolstack::{self, VbdConfig};
use ringfence_hostnet::causes::causes;
use ringfence_memory::{LentSlice, Mapping, UringPool};
use ringfence_platform::local::{ArenaShape, LocalPlatform};
use ringfence_platform::{DomId, Platform};
use ringfence_sandbox::channel::{Channel, ChannelError, expect_fds};
use ringfence_wire::xenbus::{DeviceId, DeviceKind};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::ClockId;

use super::args::{Rw, Storage};
use super::latency::Latencies;
use super::orders::{DiskAnswer, DiskCommand, DiskSetup, GuestSetup, HANDLE, Worked};
use crate::affinity::bind;
use crate::harness::STATUS_BENCH_FAILED;
use crate::usage::{Usage, clock};

/// Time limit for connecting.
const CONNECT_WITHIN: Duration = Duration::from_secs(20);
/// Time limit for one response of a disk, long enough for a backend that is replaced under emulation.
const PATIENCE: Duration = Duration::from_secs(240);
/// Maximum pages of a guest's arena.
const PAGES_MAX: u32 = 8192;
/// Entries of a ring of io_uring, as a driver domain has them.
const RING_DEPTH: u32 = 128;
/// Pages of a ring's grant window.
const WINDOW: u32 = 1024;
/// Pages for all other purposes.
const PAGES_OTHER: u32 = 1024;

/// Serves commands until the parent closes the channel. Returns the exit status.
pub(crate) fn main() -> u8 {
    Channel::serve_stdin(
        |channel| serve(channel).map(|()| 0),
        |error| (STATUS_BENCH_FAILED, DiskAnswer::Failed(causes(&error))),
    )
}

fn serve(channel: &Channel) -> anyhow::Result<()> {
    ringfence_sandbox::die_with_parent().context("the parent's death signal")?;
    let (setup, fds) = channel.receive::<DiskSetup>()?;
    let [hub] = expect_fds(fds)?;
    let platform = LocalPlatform::connect(hub)?;
    match setup {
        DiskSetup::Backend { mode, storage, cache, engine, guests, queues, span } => {
            let options = BlkbackOptions {
                mode: ringfence_access::Mode::for_disk(&mode)?,
                queues: queues.into(),
                ..BlkbackOptions::default()
            };
            let disk = FileOptions { cache, engine, ..FileOptions::default() };
            backend(channel, &platform, options, &storage, &disk, &guests, span)
        }
        DiskSetup::Guest(setup) => {
            let blocks = setup.block.div_ceil(4096) + 1;
            let pages = (u32::from(setup.depth) * blocks + 64).min(PAGES_MAX);
            // Reads go into pages that the backend may write. Pages that stay granted are writable for any
            // request.
            let shape = match setup.rw {
                Rw::RandWrite if !setup.frontend.persistent => ArenaShape::of(PAGES_OTHER, pages),
                _ => ArenaShape::of(pages, PAGES_OTHER),
            };
            let platform = platform.with_arena(shape);
            if let Some(core) = setup.core {
                bind(core)?;
            }
            guest(channel, &platform, setup, pages)
        }
    }
}

/// Receives the next command; `None` once the parent has closed the channel.
fn order(channel: &Channel) -> anyhow::Result<Option<DiskCommand>> {
    match channel.receive::<DiskCommand>() {
        Ok((order, _)) => Ok(Some(order)),
        Err(ChannelError::Closed) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn device(guest: u16, handle: u32) -> DeviceId {
    DeviceId { kind: DeviceKind::Vbd, frontend: DomId(guest), backend: DomId(0), handle }
}

fn backend(
    channel: &Channel,
    platform: &LocalPlatform,
    options: BlkbackOptions,
    storage: &Storage,
    used: &FileOptions,
    guests: &[u16],
    span: u64,
) -> anyhow::Result<()> {
    let mut store = platform.store()?;
    let file: Option<Arc<dyn Disk>> = match storage {
        Storage::Memory => None,
        // The rings are those that `ringfence run` makes for its sandbox.
        Storage::File(path) => {
            let rings = UringPool::new(guests.len() * options.queues as usize, RING_DEPTH);
            Some(Arc::new(FileDisk::open(path, used)?.with_rings(Arc::new(rings))))
        }
    };
    if let Some(file) = &file {
        let wanted = span * guests.len() as u64;
        let found = file.geometry().bytes;
        ensure!(
            found >= wanted,
            "the file has {found} bytes, {wanted} are needed: truncate -s {wanted} it"
        );
    }
    let mut devices = Vec::new();
    for guest in guests {
        let disk = match &file {
            Some(file) => Arc::clone(file),
            None => Arc::new(MemoryDisk::new(span, 512)?) as Arc<dyn Disk>,
        };
        let device = device(*guest, HANDLE);
        toolstack::create(&mut store, &device, VbdConfig::default())?;
        devices.push(VbdBackend::new(device, options, disk, Arc::new(|| {})));
    }
    channel.send(&DiskAnswer::DevicesMade, &[])?;
    let deadline = Instant::now() + CONNECT_WITHIN;
    while !devices.iter().all(|device| device.connection().is_some()) {
        ensure!(Instant::now() < deadline, "no connection within {CONNECT_WITHIN:?}");
        for device in &mut devices {
            device.look(platform, &mut store)?;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    channel.send(&DiskAnswer::Ready, &[])?;
    while let Some(order) = order(channel)? {
        for device in &devices {
            let broken = device.rules().all();
            ensure!(broken.is_empty(), "a guest broke rules: {broken:?}");
        }
        match order {
            DiskCommand::Usage => {
                channel.send(&DiskAnswer::Usage(Usage::of(platform.counters())?), &[])?;
            }
            DiskCommand::Work(_) => bail!("the driver domain does not work"),
        }
    }
    Ok(())
}

fn guest(
    channel: &Channel,
    platform: &LocalPlatform,
    setup: GuestSetup,
    pages: u32,
) -> anyhow::Result<()> {
    let mut store = platform.store()?;
    let options = BlkfrontOptions {
        queues: setup.queues.into(),
        // The ring has room for all requests in flight.
        ring_order: u32::from(setup.depth).div_ceil(32).next_power_of_two().ilog2(),
        persistent: setup.frontend.persistent,
        pages: pages as usize - 16,
        window: if setup.frontend.windows { WINDOW } else { 0 },
        ..BlkfrontOptions::default()
    };
    let device = device(setup.domain, setup.handle);
    let mut front = VbdFrontend::new(platform, device, options, Arc::new(|| {}))?;
    let deadline = Instant::now() + CONNECT_WITHIN;
    while !front.is_up() {
        ensure!(Instant::now() < deadline, "no connection within {CONNECT_WITHIN:?}");
        front.look(platform, &mut store)?;
        std::thread::sleep(Duration::from_millis(1));
    }
    let disk = front.disk().context("the disk is gone")?;
    let mut worker = Worker::new(disk.queue(setup.depth.into())?, setup)?;
    worker.fill()?;
    channel.send(&DiskAnswer::Ready, &[])?;
    while let Some(order) = order(channel)? {
        match order {
            DiskCommand::Work(length) => {
                let before = Usage::of(platform.counters())?;
                let (began, requests) = (clock(ClockId::Monotonic), worker.requests);
                worker.latencies = Latencies::default();
                worker.work(length)?;
                let nanos = clock(ClockId::Monotonic) - began;
                let usage = Usage::of(platform.counters())?.since(&before);
                let latencies = core::mem::take(&mut worker.latencies);
                let requests = worker.requests - requests;
                let worked = Worked { requests, nanos, latencies, usage };
                channel.send(&DiskAnswer::Worked(worked), &[])?;
            }
            DiskCommand::Usage => bail!("a guest says what it used after its work"),
        }
    }
    Ok(())
}

/// Request generator of a guest.
pub(crate) struct Worker {
    queue: Box<dyn DiskQueue>,
    setup: GuestSetup,
    /// Memory of each request slot.
    memory: Vec<LentSlice>,
    /// Block and start time of each request.
    begun: Vec<(u64, u64)>,
    free: Vec<usize>,
    in_flight: usize,
    random: u64,
    next: u64,
    requests: u64,
    latencies: Latencies,
    done: Vec<Done>,
}

impl Worker {
    pub(crate) fn new(queue: Box<dyn DiskQueue>, setup: GuestSetup) -> io::Result<Worker> {
        let depth = usize::from(setup.depth);
        let memory = (0..depth).map(|_| Ok(Mapping::private(setup.block as usize)?.lent()));
        Ok(Worker {
            queue,
            setup,
            memory: memory.collect::<io::Result<_>>()?,
            begun: vec![(0, 0); depth],
            free: (0..depth).collect(),
            in_flight: 0,
            random: 0x9E37_79B9_7F4A_7C15 ^ u64::from(setup.domain),
            next: 0,
            requests: 0,
            latencies: Latencies::default(),
            done: Vec::new(),
        })
    }

    /// Returns the number of requests that completed.
    pub(crate) fn requests(&self) -> u64 {
        self.requests
    }

    fn blocks(&self) -> u64 {
        self.setup.span / u64::from(self.setup.block)
    }

    /// Returns the stamp at the start of a block.
    fn stamp(&self, block: u64) -> [u8; 8] {
        (block << 16 | u64::from(self.setup.domain)).to_le_bytes()
    }

    /// Writes every block, so that each read can be verified.
    pub(crate) fn fill(&mut self) -> anyhow::Result<()> {
        for block in 0..self.blocks() {
            while self.free.is_empty() {
                self.reap(Rw::RandWrite)?;
            }
            self.submit(block, Rw::RandWrite)?;
        }
        self.finish(Rw::RandWrite)
    }

    /// Issues requests for this time.
    pub(crate) fn work(&mut self, length: Duration) -> anyhow::Result<()> {
        let until = Instant::now() + length;
        let rw = self.setup.rw;
        while Instant::now() < until {
            while !self.free.is_empty() {
                let block = self.pick();
                self.submit(block, rw)?;
            }
            self.reap(rw)?;
        }
        self.finish(rw)
    }

    fn pick(&mut self) -> u64 {
        if self.setup.rw == Rw::SeqRead {
            self.next = (self.next + 1) % self.blocks();
            return self.next;
        }
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % self.blocks()
    }

    fn submit(&mut self, block: u64, rw: Rw) -> anyhow::Result<()> {
        let place = self.free.pop().context("no room for a request")?;
        let memory = &self.memory[place];
        let op = match rw {
            Rw::RandWrite => {
                memory.copy_from(0, &self.stamp(block))?;
                Op::Write { fua: false }
            }
            Rw::RandRead | Rw::SeqRead => Op::Read,
        };
        let len = u64::from(self.setup.block);
        let segments = vec![Segment::from(memory.clone())];
        self.begun[place] = (block, clock(ClockId::Monotonic));
        let offset = self.setup.base + block * len;
        let token = place as u64;
        self.queue.submit(Request { token, op, offset, len, segments });
        self.in_flight += 1;
        Ok(())
    }

    fn finish(&mut self, rw: Rw) -> anyhow::Result<()> {
        while self.in_flight > 0 {
            self.reap(rw)?;
        }
        Ok(())
    }

    /// Consumes completions; waits for one if there is none.
    fn reap(&mut self, rw: Rw) -> anyhow::Result<()> {
        self.queue.kick();
        let until = Instant::now() + PATIENCE;
        loop {
            let mut done = core::mem::take(&mut self.done);
            self.queue.reap(&mut done);
            let any = !done.is_empty();
            for done in done.drain(..) {
                self.over(done, rw)?;
            }
            self.done = done;
            if any {
                return Ok(());
            }
            ensure!(Instant::now() < until, "no answer within {PATIENCE:?}");
            wait(self.queue.wait_fd())?;
        }
    }

    fn over(&mut self, done: Done, rw: Rw) -> anyhow::Result<()> {
        let place = usize::try_from(done.token)?;
        let (block, begun) = self.begun[place];
        if let Err(errno) = done.result {
            bail!("block {block}: {}", io::Error::from_raw_os_error(errno));
        }
        if rw != Rw::RandWrite {
            let found: [u8; 8] = self.memory[place].fetch(0)?.into_unchecked();
            ensure!(found == self.stamp(block), "block {block} holds what was not written there");
        }
        self.latencies.add(clock(ClockId::Monotonic).saturating_sub(begun));
        self.requests += 1;
        self.in_flight -= 1;
        self.free.push(place);
        Ok(())
    }
}

/// Waits for a completion, one second at most.
fn wait(file: BorrowedFd<'_>) -> io::Result<()> {
    let mut files = [PollFd::from_borrowed_fd(file, PollFlags::IN)];
    match poll(&mut files, Some(&Timespec { tv_sec: 1, tv_nsec: 0 })) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
