//! Vhost-net link: frames move through virtqueues in shared memory, without a system call per frame.
//!
//! A worker of the kernel ([`VhostNet`]) moves frames between two virtqueues and the guest's TAP interface:
//!
//! ```text
//! guest -> TAP -> vhost worker -> receive buffers -> Batch -> engine
//! guest <- TAP <- vhost worker <- FrameRing  <- sockets (engine)
//! ```
//!
//! * **From the guest.** The worker writes frames into 256 receive buffers; a long frame spans several. The
//!   engine sees headers copied and payload in place. [`Port::complete`] posts the buffers of a batch again
//!   with one index update, and kicks only if the worker ran out of buffers and sleeps.
//! * **To the guest.** Frames are assembled in a [`FrameRing`]. [`Port::flush`] makes committed frames
//!   available, headers and payload as separate descriptors, with at most one kick. Completions are
//!   reclaimed when room is needed. The worker signals them only if the sender waits for room.
//!
//! Events are enabled before the thread sleeps, and suppressed otherwise.
//!
//! # Limits
//!
//! [`Protection`] selects the memory that the device reaches: all buffers and the ring, or only blocks in
//! use. In the latter case an access to other memory ends the link. Everything that the device writes into
//! the queues is validated; the first violation ([`LinkFault`]) ends the link. So does an error of the worker,
//! and the removal of the interface.

// #syscall none: the kernel's version is read before the sandbox closes

mod lending;
#[cfg(any(test, feature = "test-utils"))]
pub(crate) mod mock;
mod receive;
mod send;
#[cfg(test)]
mod tests;

use core::time::Duration;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ringfence_access::iommu::AddressSpace;
use ringfence_frame::tap::{capabilities, frame_max};
use ringfence_frame::{
    Batch, DropReason, Fault, Port, PortCapabilities, PortCounters, Received, Transmitted,
};
use ringfence_memory::{LentSlice, Mapping};
use ringfence_platform::Counters;
use ringfence_platform::iotlb::Miss;
use ringfence_platform::vhost::{QueueName, VhostError, VhostNet, VhostSetup};
use ringfence_ring::split::DriverQueue;
use ringfence_sys::clock::Clock;
use ringfence_sys::rules::RuleCounters;
use ringfence_sys::tap::TapOffloads;
use ringfence_uplink::link::{Committed, GuestLink, Slots};

use crate::frame_ring::{FrameRing, FrameShape};
use crate::ring_link::has_room;
use crate::tap::inbound_queue;
use crate::vhost_net::device::Device;
use crate::vhost_net::fault::{LinkFault, worker_failed};
use lending::Lending;
pub use lending::Protection;
use receive::{Receiver, TakenBuffers};
use send::Sender;

/// Interval at which an idle link checks that its interface exists.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Number of receive buffers.
const BUFFERS: u16 = 256;
/// Number of transmit descriptors: two for each frame of a ring of the default shape.
const DESCRIPTORS: u16 = 512;

/// Returns `true` if a kernel of that release may use buffers in order. The feature exists since 6.17 and was
/// repaired in later releases.
fn supports_in_order(release: &str) -> bool {
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    version >= (6, 19)
}

/// One queue of an interface, served by vhost-net.
#[derive(Debug)]
pub struct VhostLink<D = VhostNet> {
    // First field: the device must stop before its memory is freed.
    device: D,
    receiver: Receiver,
    sender: Sender,
    capabilities: PortCapabilities,
    frame_max: usize,
    counters: Arc<PortCounters>,
    system: Arc<Counters>,
    rules: Arc<RuleCounters>,
    /// Failure to be returned by the next call that can return one.
    fault: Option<Fault>,
    clock: Clock,
    /// Time of the next check that the interface exists.
    next_check: Duration,
}

impl VhostLink {
    /// Sets up the device `file` ([`ringfence_platform::vhost::open`]) for the queue behind `tap`, and starts it.
    /// The other parameters are those of [`TapLink::new`](crate::tap::TapLink::new).
    ///
    /// The device uses the memory of the calling process.
    ///
    /// # Errors
    ///
    /// Returns [`VhostError`] if a step of the setup fails.
    pub fn start(
        file: OwnedFd,
        tap: impl AsFd,
        offloads: TapOffloads,
        mtu: u16,
        shape: FrameShape,
        system: Arc<Counters>,
    ) -> Result<VhostLink, VhostError> {
        VhostLink::start_protected(file, tap, offloads, mtu, shape, system, Protection::Fixed)
    }

    /// Starts the device as [`VhostLink::start`] does, with the given protection of the link's memory.
    ///
    /// # Errors
    ///
    /// Returns [`VhostError`] if a step of the setup fails.
    pub fn start_protected(
        file: OwnedFd,
        tap: impl AsFd,
        offloads: TapOffloads,
        mtu: u16,
        shape: FrameShape,
        system: Arc<Counters>,
        protection: Protection,
    ) -> Result<VhostLink, VhostError> {
        let no_memory = |source| VhostError::Setting { what: "memory for frames", source };
        let frames = FrameRing::new(shape).map_err(no_memory)?;
        let buffers = Mapping::private(Receiver::bytes(BUFFERS)).map_err(no_memory)?.lent();
        let fine = matches!(protection, Protection::Fine | Protection::FineWithoutReuse);
        let all = || vec![buffers.device_region(), frames.region()];
        let setup = VhostSetup {
            sizes: [BUFFERS, DESCRIPTORS],
            regions: if fine { Vec::new() } else { all() },
            in_order: supports_in_order(&rustix::system::uname().release().to_string_lossy()),
        };
        let (device, queues, space) = if protection.is_translated() {
            let (device, space, queues) = VhostNet::start_translated(file, tap.as_fd(), setup)?;
            (device, queues, Some(space))
        } else {
            let (device, queues) = VhostNet::start(file, tap.as_fd(), setup)?;
            (device, queues, None)
        };
        let lending = match space {
            Some(space) if fine => {
                let (space, reuse) =
                    (space as Arc<dyn AddressSpace>, protection == Protection::Fine);
                Lending::new(buffers.device_region(), &frames, reuse, &space, &system)
                    .map_err(no_memory)?
            }
            _ => Lending::default(),
        };
        let takes = capabilities(offloads, mtu);
        let link = VhostLink::from_parts(device, queues, buffers, frames, lending, takes, system);
        link.map_err(|source| VhostError::Setting { what: "the first kick", source })
    }

    /// Returns the vhost-net device.
    pub fn device(&self) -> &VhostNet {
        &self.device
    }
}

impl<D: Device> VhostLink<D> {
    fn from_parts(
        device: D,
        [receive, transmit]: [DriverQueue; 2],
        buffers: LentSlice,
        frames: FrameRing,
        lending: Lending,
        capabilities: PortCapabilities,
        system: Arc<Counters>,
    ) -> io::Result<VhostLink<D>> {
        let mut link = VhostLink {
            device,
            receiver: Receiver::new(receive, buffers, lending.receive),
            sender: Sender::new(transmit, frames, lending.send),
            frame_max: frame_max(&capabilities),
            capabilities,
            counters: Arc::default(),
            system,
            rules: Arc::default(),
            fault: None,
            clock: Clock::default(),
            next_check: Duration::ZERO,
        };
        if link.receiver.post() {
            link.kick(QueueName::Receive)?;
        }
        Ok(link)
    }

    /// Returns the ring of frames for the guest. Committed frames leave with the next [`flush`](Port::flush).
    pub fn frames(&mut self) -> &mut FrameRing {
        self.sender.frames()
    }

    /// Returns the counters of rule violations by the device.
    pub fn rules(&self) -> &Arc<RuleCounters> {
        &self.rules
    }

    fn kick(&self, queue: QueueName) -> io::Result<()> {
        self.system.syscalls.add(1);
        self.device.kick(queue)
    }

    /// Ends the link after the device accessed an address that is not mapped for it. The device is stopped and
    /// its last completions are validated first.
    fn end_on_miss(&mut self) -> Result<(), Fault> {
        let cannot = |source| Fault::system("cannot hear what vhost-net missed", source);
        let Some(Miss { address, .. }) = self.device.take_miss().map_err(cannot)? else {
            return Ok(());
        };
        // If the stop fails, the device stops when the link is dropped.
        let _ = self.device.stop();
        let last = self.sender.reclaim();
        self.checked(last)?;
        self.checked(Err(LinkFault::Miss { address }))
    }

    /// Checks at intervals that the interface exists. Returns `true` if it was removed.
    fn was_removed(&mut self) -> Result<bool, Fault> {
        let now = self.clock.now();
        if now < self.next_check {
            return Ok(false);
        }
        self.next_check = now + CHECK_INTERVAL;
        self.system.syscalls.add(1);
        let gone = self.device.is_gone();
        gone.map_err(|source| Fault::system("cannot look after the interface", source))
    }

    fn kick_if(&self, wanted: bool, queue: QueueName) -> Result<(), Fault> {
        if wanted {
            self.kick(queue).map_err(|source| Fault::system("cannot wake vhost-net", source))?;
        }
        Ok(())
    }

    /// Counts the violation of a failed result and converts it to a fault.
    fn checked<T>(&self, result: Result<T, LinkFault>) -> Result<T, Fault> {
        result.map_err(|fault| {
            self.rules.count(fault.rule());
            Fault::misbehaved(fault)
        })
    }

    fn offer(&mut self) -> Result<(), Fault> {
        let counters = &self.counters;
        let offered = self.sender.offer(|frame| {
            counters.sent(1, frame.frame_len() as u64);
            counters.sent_with(frame.meta, 1 + usize::from(frame.headers > 0));
        });
        let kick = self.checked(offered)?;
        self.kick_if(kick, QueueName::Transmit)
    }

    /// Copies a frame of a batch into the ring. Returns `false` if there is no room.
    fn copy_in(&mut self, frame: ringfence_frame::FrameView<'_>) -> Result<bool, Fault> {
        let room = self.sender.room(1, frame.len());
        if self.checked(room)? == 0 {
            self.counters.dropped(DropReason::PortFull);
            return Ok(false);
        }
        self.sender.frames().reserve(1, frame.len(), |room| {
            frame.copy_to(room);
        });
        let committed = Committed { len: frame.len(), meta: frame.meta() };
        Ok(self.sender.frames().commit_all(&[committed], &self.counters) == 1)
    }
}

impl<D: Device> Port for VhostLink<D> {
    fn receive(&mut self, batch: &mut Batch, budget: usize) -> Result<Received, Fault> {
        self.fault.take().map_or(Ok(()), Err)?;
        let mut received = Received::default();
        while received.work < budget && has_room(batch, self.frame_max) {
            let taken = self.receiver.take(batch, self.frame_max);
            match self.checked(taken)? {
                TakenBuffers::Nothing => break,
                TakenBuffers::Frame(len) => {
                    received.frames += 1;
                    self.counters.received(1, len as u64);
                }
                TakenBuffers::Dropped(reason) => self.counters.dropped(reason),
            }
            received.work += 1;
        }
        Ok(received)
    }

    fn complete(&mut self) -> Result<(), Fault> {
        let kick = self.receiver.post();
        self.kick_if(kick, QueueName::Receive)
    }

    /// Copies frames into the ring, after those already committed. The next [`flush`](Port::flush) offers them.
    fn transmit(&mut self, batch: &Batch, frames: &[u32]) -> Result<Transmitted, Fault> {
        let mut done = Transmitted::default();
        for frame in batch.select(frames) {
            if self.copy_in(frame)? {
                done.sent += 1;
            } else {
                done.dropped += 1;
            }
        }
        Ok(done)
    }

    fn flush(&mut self) -> Result<(), Fault> {
        self.offer()
    }

    fn room(&mut self) -> Result<usize, Fault> {
        let longest = self.capabilities.longest();
        let room = self.sender.room(1, longest);
        self.checked(room)?;
        Ok(self.sender.frames().free(longest))
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        let armed = self.receiver.arm();
        if self.checked(armed)? {
            return Ok(true);
        }
        let armed = self.sender.arm();
        self.checked(armed)
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.device.wait_fd()]
    }

    fn clear_events(&mut self) -> Result<(), Fault> {
        self.receiver.suppress();
        self.sender.suppress();
        self.system.syscalls.add(1);
        let events = match self.device.take_events() {
            Ok(events) => events,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            Err(source) => return Err(Fault::system("cannot hear vhost-net", source)),
        };
        if let Some(queue) = events.failed {
            return Err(worker_failed(queue));
        }
        if events.missed {
            self.end_on_miss()?;
        }
        if events.backend_gone || self.was_removed()? { Err(Fault::Gone) } else { Ok(()) }
    }

    /// Returns the time of the next check, because removal of an idle interface raises no event.
    fn deadline(&self) -> Option<Duration> {
        Some(self.next_check)
    }

    fn capabilities(&self) -> PortCapabilities {
        self.capabilities
    }

    fn counters(&self) -> &Arc<PortCounters> {
        &self.counters
    }
}

impl<D: Device> GuestLink for VhostLink<D> {
    fn capabilities(&self) -> PortCapabilities {
        self.capabilities
    }

    fn reserve<'a>(&'a mut self, count: usize, len: usize, slots: &mut Slots<'a>) {
        if self.fault.is_some() {
            return;
        }
        let count = count.min(slots.remaining_capacity());
        let room = self.sender.room(count, len);
        match self.checked(room) {
            Ok(room) => self.sender.frames().reserve(room, len, |room| slots.push(room)),
            Err(fault) => self.fault = Some(fault),
        }
    }

    fn commit(&mut self, frames: &[Committed]) {
        self.sender.frames().commit_all(frames, &self.counters);
    }

    /// Offers committed frames. The next [`receive`](Port::receive) returns a failure.
    fn flush(&mut self) {
        if self.fault.is_some() {
            return;
        }
        if let Err(fault) = self.offer() {
            self.sender.frames().withdraw();
            self.fault = Some(fault);
        }
    }

    fn is_full(&self) -> bool {
        self.sender.is_full()
    }

    fn inbound_queue(&self) -> Option<usize> {
        inbound_queue(&self.capabilities)
    }
}
