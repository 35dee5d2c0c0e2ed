//! Disk of a virtual machine: virtio-blk over vhost-user, on any [`Disk`].
//!
//! ```text
//! driver ── vring ──> chain ── RequestParser ──> Work ── InFlight ──> DiskQueue ──> storage
//!        <─ used ───  status <────────────────── Done <───────────────────┘
//! hypervisor <─ messages ─> Device (memory, vrings, in-flight log)
//! ```
//!
//! One thread serves the messages and all vrings, in rounds ([`VhostUserDisk::round`]). Storage does its I/O on threads of
//! its own, in the memory that the hypervisor handed over.
//!
//! # Ordering and crashes
//!
//! Requests run as they arrive and are answered as they complete. A write waits for an earlier one in progress that
//! touches the same sectors, on whichever vring. The hypervisor keeps the log of the chains in flight
//! ([`ringfence_ring::split::inflight`]). After this process was killed at any instant, the next one serves exactly those
//! again that were not answered, in their order. None of them can overwrite a later, answered write.
//!
//! A driver without [`FLUSH`](blk::FLUSH) gets durable writes.
//!
//! # Messages
//!
//! Before a message changes memory or vrings, and before a client's end, the disk takes no further chains and waits until
//! none is in progress. Other work of the thread goes on meanwhile.
//!
//! # Misbehaving drivers
//!
//! A request that breaks a rule is answered with an error and counted. A chain that cannot be answered, or lies outside
//! of the memory, ends the connection ([`ClientFault`]).

#[cfg(any(test, feature = "test-utils"))]
#[doc(hidden)]
pub mod fuzzing;
mod jobs;
mod request;
#[cfg(any(test, feature = "test-utils"))]
#[doc(hidden)]
pub mod testing;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use ringfence_frame::Fault;
use ringfence_memory::LentSlice;
use ringfence_platform::Counters;
use ringfence_sys::event_signal::EventSignal;
use ringfence_sys::numbers::bounded;
use ringfence_sys::rules::RuleCounters;
use ringfence_vhost_user::clients::{ClientSlot, Clients};
use ringfence_vhost_user::device::{Device, DeviceOffer, Parts};
use ringfence_vhost_user::messages::{self, Incoming, Message};
use ringfence_vhost_user::{ClientFault, ClientReporter, PoolRule, Reporter};
use ringfence_wire::vhost_user::{PROTOCOL_FEATURES, protocol_feature};
use ringfence_wire::virtio::{Descriptor, feature};
use ringfence_wire::virtio_blk::{BlkConfig, BlkStatus, ID_BYTES, SECTOR, feature as blk};

use crate::storage::failure::Failure;
use crate::storage::{self, Disk, DiskQueue, Done, Geometry, Op, Segment};
use crate::work::InFlight;
use jobs::{VringJob, VringJobs};
use request::{Action, ParsedRequest, RANGE_MAX, RequestParser, SEG_MAX, SIZE_MAX};

/// Number of queues that a hypervisor may use.
pub const QUEUES: u16 = 64;
/// Maximum of messages in one round.
const MESSAGES_PER_ROUND: usize = 32;
/// Maximum of chains of a vring in one round. They are few: while the storage works on the next ones, the driver handles the answers to
/// these. With a whole ring in one round, each side would wait for the other.
const CHAINS_PER_ROUND: usize = 8;
/// Number of rounds after which a busy disk looks for messages.
const ROUNDS_PER_LOOK: u32 = 64;
/// Maximum of requests that the storage works on.
const DEPTH: u32 = 256;
/// Identity of the disk.
const IDENTITY: &[u8; ID_BYTES] = b"ringfence-vhost-user";

/// Settings of a disk.
#[derive(Default)]
pub struct DiskOptions {
    /// Rule for the memory of clients.
    pub pool: PoolRule,
    /// Function that receives each change of the clients' state. It must not block.
    pub report: Option<Reporter>,
    /// Source of interrupts, for a process whose sandbox denies the creation of one.
    pub signal: Option<EventSignal>,
}

/// Event that waits until no request is in progress.
enum Held {
    Message(Box<Message>),
    /// End of the client.
    Gone,
    /// Broken rule of the client or the driver.
    Refused(ClientFault),
    /// Other disk on the same storage, of another size.
    Resized(Arc<dyn Disk>),
}

/// Disk of the virtual machines that connect to a socket, one at a time. See the [module](self).
pub struct VhostUserDisk {
    clients: ClientSlot,
    device: Device,
    reporter: ClientReporter,
    geometry: Geometry,
    queue: Box<dyn DiskQueue>,
    parser: RequestParser,
    jobs: VringJobs,
    in_flight: InFlight,
    /// Job that was taken and may not start yet, and its memory.
    waiting: Option<(VringJob, Vec<Segment>)>,
    held: Option<Held>,
    /// Disk that replaces this one once no other event is held back.
    resized: Option<Arc<dyn Disk>>,
    /// Result of the last replacement, until it is taken.
    was_resized: Option<io::Result<u64>>,
    /// A message or a client may be there.
    has_messages: bool,
    rounds: u32,
    done: Vec<Done>,
    chain: Vec<Descriptor>,
    spare: Vec<Vec<Segment>>,
    rules: Arc<RuleCounters>,
    system: Arc<Counters>,
}

/// Returns the offer of a disk.
fn offer(geometry: &Geometry) -> DeviceOffer {
    let when = |is_offered, feature| if is_offered { feature } else { 0 };
    let features = feature::INDIRECT
        | feature::EVENT_IDX
        | feature::VERSION_1
        | PROTOCOL_FEATURES
        | blk::SIZE_MAX
        | blk::SEG_MAX
        | blk::BLK_SIZE
        | blk::TOPOLOGY
        | blk::MQ
        | when(geometry.flush, blk::FLUSH)
        | when(geometry.read_only, blk::RO)
        | when(geometry.discard.is_some() && !geometry.read_only, blk::DISCARD)
        | when(geometry.write_zeroes && !geometry.read_only, blk::WRITE_ZEROES);
    let protocol =
        protocol_feature::CONFIG | protocol_feature::MULTIQUEUE | protocol_feature::INFLIGHT;
    DeviceOffer { features, protocol, vrings: QUEUES.into(), queues: QUEUES, mtu: 0 }
}

/// Returns the configuration space of a disk.
fn config(geometry: &Geometry) -> BlkConfig {
    let sectors = |bytes: u32| bytes / bounded(SECTOR, u32::MAX);
    let blocks = geometry.physical_sector_size / geometry.sector_size.max(1);
    let whole = geometry.sector_size / bounded(SECTOR, u32::MAX);
    BlkConfig {
        capacity: geometry.bytes / SECTOR,
        size_max: SIZE_MAX,
        seg_max: SEG_MAX,
        blk_size: geometry.sector_size,
        physical_block_exp: bounded(blocks.max(1).ilog2(), 31),
        queues: QUEUES,
        max_discard_sectors: RANGE_MAX,
        discard_alignment: geometry.discard.map_or(whole, |found| sectors(found.granularity)),
        max_write_zeroes_sectors: RANGE_MAX,
        write_zeroes_may_unmap: geometry.discard.is_some(),
    }
}

impl VhostUserDisk {
    /// Creates a disk for these clients.
    ///
    /// # Errors
    ///
    /// Returns an error if memory or descriptors are exhausted.
    pub fn new(clients: Clients, disk: &dyn Disk, options: DiskOptions) -> io::Result<Self> {
        let geometry = disk.geometry();
        let signal = options.signal.map_or_else(EventSignal::new, Ok)?;
        let config = config(&geometry).to_bytes().to_vec();
        Ok(VhostUserDisk {
            clients: ClientSlot::new(clients)?,
            device: Device::new(offer(&geometry), config, options.pool, signal)?,
            reporter: ClientReporter::new(options.report),
            queue: disk.queue(DEPTH)?,
            geometry,
            parser: RequestParser::default(),
            jobs: VringJobs::new(DEPTH, QUEUES.into()),
            in_flight: InFlight::default(),
            waiting: None,
            held: None,
            resized: None,
            was_resized: None,
            has_messages: true,
            rounds: 0,
            done: Vec::new(),
            chain: Vec::new(),
            spare: Vec::new(),
            rules: Arc::default(),
            system: Arc::default(),
        })
    }

    /// Adds a file for an in-flight log, as [`Device::add_log_file`] does.
    pub fn add_log_file(&mut self, file: OwnedFd) {
        self.device.add_log_file(file);
    }

    /// Returns the number of files for in-flight logs.
    pub fn log_files(&self) -> usize {
        self.device.log_files()
    }

    /// Returns the counters of the rules that drivers broke.
    pub fn rules(&self) -> &Arc<RuleCounters> {
        &self.rules
    }

    /// Serves one round: messages, available chains, completed requests. Returns `true` if any work was done.
    ///
    /// # Errors
    ///
    /// Returns a [`Fault`] if no other client can come, or the system fails.
    pub fn round(&mut self) -> Result<bool, Fault> {
        self.rounds = self.rounds.wrapping_add(1);
        let mut worked = false;
        if self.has_messages || self.rounds.is_multiple_of(ROUNDS_PER_LOOK) {
            worked |= self.attend()?;
        }
        if self.held.is_none() {
            self.held = self.resized.take().map(Held::Resized);
        }
        worked |= self.take_chains();
        worked |= self.complete();
        if self.may_release() {
            worked = true;
            self.release()?;
        }
        self.reporter.report(self.device.memory().handed_over());
        Ok(worked)
    }

    /// Replaces the disk by one on the same storage, of another size, and tells the hypervisor. Requests in progress end
    /// first. [`VhostUserDisk::take_resized`] returns the result.
    pub fn resize(&mut self, disk: Arc<dyn Disk>) {
        self.resized = Some(disk);
    }

    /// Returns the size in bytes that the last replacement has led to, or its failure, once.
    pub fn take_resized(&mut self) -> Option<io::Result<u64>> {
        self.was_resized.take()
    }

    /// Requests an event for new work. Returns `true` if there is work already.
    pub fn arm(&mut self) -> bool {
        if self.resized.is_some() && self.held.is_none() {
            return true;
        }
        if self.held.is_some() {
            // The storage ends what is in progress, or has.
            return self.may_release();
        }
        let mut is_ready = self.has_messages;
        if self.waiting.is_none() && !self.jobs.is_full() {
            for vring in &mut self.device.vrings {
                // A driver that breaks a rule is found by the next round.
                is_ready |= vring.queue.as_mut().is_some_and(|queue| queue.arm(0).unwrap_or(true));
            }
        }
        is_ready
    }

    /// Returns the files that become readable when there is work.
    pub fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        let messages = self.held.is_none().then(|| self.clients.epoll());
        messages.into_iter().chain([self.queue.wait_fd()]).collect()
    }

    /// Clears the events that made a file of [`VhostUserDisk::wait_fds`] readable.
    ///
    /// # Errors
    ///
    /// Returns a [`Fault`] if the system fails.
    pub fn clear_events(&mut self) -> Result<(), Fault> {
        for vring in &mut self.device.vrings {
            if let Some(queue) = &mut vring.queue {
                queue.suppress();
            }
        }
        self.has_messages |= self.clients.take_events()?;
        Ok(())
    }

    /// Returns `true` if no request is in progress.
    fn is_idle(&self) -> bool {
        self.in_flight.running() == 0 && self.waiting.is_none()
    }

    /// Returns `true` if an event is held back, and nothing is in progress any more for which it waits.
    fn may_release(&self) -> bool {
        match &self.held {
            None => false,
            // A vring that stops has served the chains of an earlier backend.
            Some(Held::Message(_) | Held::Resized(_)) => self.is_idle() && !self.has_left_over(),
            Some(Held::Gone | Held::Refused(_)) => self.is_idle(),
        }
    }

    /// Handles clients and messages that are there. Returns `true` if there were any.
    fn attend(&mut self) -> Result<bool, Fault> {
        self.has_messages = false;
        let mut work = usize::from(self.clients.accept(&self.system)?);
        while work < MESSAGES_PER_ROUND && self.held.is_none() {
            let Some(client) = self.clients.client() else { return Ok(work > 0) };
            let held = match messages::receive(client, &self.system) {
                Ok(Incoming::Nothing) => return Ok(work > 0),
                Ok(Incoming::Message(message)) if message.request.is_question() => {
                    match self.handle(message) {
                        Ok(true) => None,
                        Ok(false) => Some(Held::Gone),
                        Err(fault) => Some(Held::Refused(fault)),
                    }
                }
                Ok(Incoming::Message(message)) => Some(Held::Message(Box::new(message))),
                Ok(Incoming::Gone) => Some(Held::Gone),
                Err(fault) => Some(Held::Refused(fault)),
            };
            work += 1;
            self.held = held;
            if self.may_release() {
                self.release()?;
            }
        }
        self.has_messages = work >= MESSAGES_PER_ROUND;
        Ok(work > 0)
    }

    /// Returns `true` if chains of an earlier backend were not taken yet.
    fn has_left_over(&self) -> bool {
        let mut queues = self.device.vrings.iter().filter_map(|vring| vring.queue.as_ref());
        queues.any(|queue| queue.has_left_over())
    }

    /// Handles the event that was held back. No request is in progress.
    fn release(&mut self) -> Result<(), Fault> {
        let fault = match self.held.take() {
            None => return Ok(()),
            Some(Held::Message(message)) => match self.handle(*message) {
                Ok(true) => {
                    self.has_messages = true;
                    return Ok(());
                }
                Ok(false) => None,
                Err(fault) => Some(fault),
            },
            Some(Held::Gone) => None,
            Some(Held::Refused(fault)) => Some(fault),
            Some(Held::Resized(disk)) => match self.replace(&*disk) {
                Ok(()) => {
                    self.has_messages = true;
                    return Ok(());
                }
                Err(fault) => Some(fault),
            },
        };
        self.device.reset(self.clients.epoll());
        self.jobs.forget_heads();
        self.has_messages = true;
        match fault {
            None => self.clients.disconnect(),
            Some(fault) => {
                self.reporter.refused();
                self.clients.refuse(fault)
            }
        }
    }

    /// Takes another disk on the same storage into use. Nothing is in progress. Without a queue to it this disk stays.
    fn replace(&mut self, disk: &dyn Disk) -> Result<(), ClientFault> {
        let geometry = disk.geometry();
        match disk.queue(DEPTH) {
            Ok(queue) => self.queue = queue,
            Err(error) => {
                self.was_resized = Some(Err(error));
                return Ok(());
            }
        }
        self.geometry = geometry;
        self.was_resized = Some(Ok(geometry.bytes));
        self.device.set_config(config(&geometry).to_bytes().to_vec())
    }

    /// Carries a message out. Returns `false` if the client has gone.
    fn handle(&mut self, message: Message) -> Result<bool, ClientFault> {
        let Message { header, request, files } = message;
        let answer = self.device.handle(request, files, self.clients.epoll())?;
        let Some(client) = self.clients.client() else { return Ok(false) };
        messages::answer(client, &header, &answer, self.device.acknowledges(), &self.system)
    }

    /// Takes available chains and starts their requests. Returns `true` if there were any.
    fn take_chains(&mut self) -> bool {
        let mut worked = self.start_waiting();
        for number in 0..self.device.vrings.len() {
            for _ in 0..CHAINS_PER_ROUND {
                if self.waiting.is_some() || self.jobs.is_full() {
                    break;
                }
                let is_quiet = match &self.held {
                    None => false,
                    Some(Held::Message(_) | Held::Resized(_)) => {
                        let queue = self.device.vrings[number].queue.as_ref();
                        !queue.is_some_and(|queue| queue.has_left_over())
                    }
                    Some(Held::Gone | Held::Refused(_)) => true,
                };
                if is_quiet {
                    break;
                }
                match self.take_chain(number) {
                    Ok(true) => worked = true,
                    Ok(false) => break,
                    Err(fault) => {
                        self.held = Some(Held::Refused(fault));
                        worked = true;
                    }
                }
            }
        }
        self.queue.kick();
        worked
    }

    /// Takes the next chain of a vring. Returns `false` if there is none.
    fn take_chain(&mut self, number: usize) -> Result<bool, ClientFault> {
        let Parts { memory, vrings, .. } = self.device.parts();
        let Some(queue) = &mut vrings[number].queue else { return Ok(false) };
        let table = |address, len| {
            let (lent, offset) = memory.at(address, len).ok()?;
            lent.slice(offset, len).ok()
        };
        let Some(head) = queue.take(table, &mut self.chain)? else { return Ok(false) };
        self.jobs.begin(number, head)?;
        let mut segments = self.spare.pop().unwrap_or_default();
        let parsed = self.parser.parse(&self.chain, memory, &self.geometry, &mut segments)?;
        let ParsedRequest { action, status } = parsed;
        match action {
            Action::Run(work) => {
                let fills = matches!(work.first(), Op::Read);
                let bytes: usize = segments.iter().map(|segment| segment.memory.len()).sum();
                let readable = if fills { bounded(bytes, u32::MAX) } else { 0 };
                self.start(VringJob { vring: number, head, work, status, readable }, segments);
            }
            Action::Identify => {
                let written = identify(&segments);
                self.answer(number, head, &status, (BlkStatus::Okay, written));
                self.put_back(segments);
            }
            Action::Refuse(rule, outcome) => {
                if self.rules.count(rule) == 0 {
                    tracing::warn!(
                        rule,
                        "a request of a virtual machine was refused (logged once a rule)"
                    );
                }
                self.answer(number, head, &status, (outcome, 0));
                self.put_back(segments);
            }
        }
        Ok(true)
    }

    /// Starts the job that waited, if it may. Returns `true` if it did.
    fn start_waiting(&mut self) -> bool {
        let Some((job, segments)) = self.waiting.take() else { return false };
        self.start(job, segments);
        self.waiting.is_none()
    }

    /// Passes a job to the storage, or makes it wait.
    fn start(&mut self, job: VringJob, segments: Vec<Segment>) {
        let work = job.work;
        if !self.in_flight.may_start(work) {
            self.waiting = Some((job, segments));
            return;
        }
        let op = match work.first() {
            Op::Flush if !self.geometry.flush => {
                self.answer(job.vring, job.head, &job.status, (BlkStatus::Okay, 0));
                return self.put_back(segments);
            }
            Op::Write { .. } => {
                Op::Write { fua: self.geometry.flush && !self.device.has(blk::FLUSH) }
            }
            op => op,
        };
        let (sector, sectors) = work.range(op);
        match self.jobs.insert(job) {
            Ok(token) => {
                self.in_flight.started(work);
                let (offset, len) = (sector * SECTOR, sectors * SECTOR);
                self.queue.submit(storage::Request { token, op, offset, len, segments });
            }
            Err(job) => self.waiting = Some((job, segments)),
        }
    }

    /// Answers completed requests. Returns `true` if there were any.
    fn complete(&mut self) -> bool {
        let mut done = std::mem::take(&mut self.done);
        self.queue.reap(&mut done);
        let worked = !done.is_empty();
        for Done { token, result, segments } in done.drain(..) {
            let Some(job) = self.jobs.remove(token) else {
                debug_assert!(false, "the storage completes what it was given");
                continue;
            };
            self.in_flight.ended(job.work);
            let outcome = match result {
                Ok(()) => (BlkStatus::Okay, job.readable),
                Err(errno) if Failure::of(errno) == Failure::Unsupported => {
                    (BlkStatus::Unsupported, 0)
                }
                Err(_) => (BlkStatus::Error, 0),
            };
            self.answer(job.vring, job.head, &job.status, outcome);
            self.put_back(segments);
        }
        self.done = done;
        let Parts { vrings, signal, .. } = self.device.parts();
        for vring in vrings {
            if vring.publish(signal) {
                self.system.syscalls.add(1);
            }
        }
        worked
    }

    /// Returns a chain with its status, and `written` bytes of data before it.
    fn answer(
        &mut self,
        vring: usize,
        head: u16,
        status: &LentSlice,
        (outcome, written): (BlkStatus, u32),
    ) {
        let stored = status.copy_from(0, &[outcome as u8]);
        debug_assert!(stored.is_ok(), "the range was looked up");
        self.jobs.end(vring, head);
        if let Some(queue) = &mut self.device.vrings[vring].queue {
            queue.finish(head, written.saturating_add(1));
        }
    }

    /// Keeps a vector for reuse, without its memory.
    fn put_back(&mut self, mut segments: Vec<Segment>) {
        segments.clear();
        self.spare.push(segments);
    }
}

/// Stores the identity of the disk. Returns the number of bytes.
fn identify(segments: &[Segment]) -> u32 {
    let mut written = 0;
    for Segment { memory, .. } in segments {
        let len = memory.len().min(ID_BYTES - written);
        let stored = memory.copy_from(0, &IDENTITY[written..written + len]);
        debug_assert!(stored.is_ok(), "the range was looked up");
        written += len;
    }
    bounded(written, u32::MAX)
}
