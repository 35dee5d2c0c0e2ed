//! Backend port of a vif, with one queue or several.
//!
//! # Theory of operation
//!
//! *From the guest* (`tx`): the port fetches each slot once and parses the slots into packets. It reads the
//! fragments of all packets of a round in one batch ([`ringfence_access::PageAccess::read`]). A packet whose
//! fragments were all read becomes a frame; any other gets the response ERROR. After the delivery of the
//! frames, the port responds to all slots in ring order, with one publication.
//!
//! *To the guest* (`rx`): a frame takes one posted buffer per page. The port writes the bytes of all frames
//! of a call in one batch ([`ringfence_access::PageAccess::begin_write`]). It publishes the responses once a
//! round, in the slots of their requests.
//!
//! A vif with several queues is one port. It serves the queues in round-robin order, and selects the queue
//! of an egress frame by its flow ([`ringfence_frame::steer`]). The rate limit and the multicast filter
//! apply to the guest as a whole (`policy`). With a worker per queue, the port is split
//! ([`Port::split_off`]); the parts still share both. Each part detects a stalled guest on its own.
//!
//! A packet that breaks a rule is refused alone. A violation after which the ring cannot be parsed (a
//! producer index beyond the ring, a chain without an end) ends the device.

mod policy;
mod queue;
mod rx;
mod tx;

pub use policy::{GuestPolicyConfig, STALL_DEFAULT};

use core::time::Duration;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ringfence_access::Mode;
use ringfence_platform::{Channel, Grantee, WindowRound};
use ringfence_ring::RingPages;

use crate::commands::{VifReply, VifSettings};
use crate::features::VifFeatures;
pub use crate::queues::QueueChannels;
use crate::queues::{clear_channel, deal};
use crate::rules::RuleCounters;
use policy::GuestPolicy;
use queue::{BackendQueue, Shared};
use ringfence_frame::batch::Batch;
use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::counters::{DropReason, PortCounters, PortLevels};
use ringfence_frame::port::{Fault, Port, PortCapabilities, Received, Transmitted};
use ringfence_frame::steer::Chooser;

/// Resources of a backend queue.
pub struct QueueParts<G, C> {
    pub tx_ring: RingPages,
    pub rx_ring: RingPages,
    pub channels: QueueChannels<C>,
    /// Access to the peer's pages that hold packets.
    pub tx_pages: G,
    /// Access to the peer's buffers.
    pub rx_pages: G,
    /// Grant windows of the peer.
    pub windows: QueueWindows,
    /// Crash journals of the rings, for a process that takes the queue over.
    pub records: Option<QueueRecords>,
}

/// Grant windows that a frontend made for the rings of a queue; only [`Mode::Window`] uses them.
#[derive(Default)]
pub struct QueueWindows {
    /// Grant window of the TX ring.
    pub tx: Option<WindowRound>,
    /// Grant window of the RX ring.
    pub rx: Option<WindowRound>,
}

/// Crash journals of a backend queue, with which another process continues
/// ([`ringfence_ring::BackRing::attach_recorded`]). They are memory of the backend that outlives it.
#[derive(Clone, Debug)]
pub struct QueueRecords {
    /// Crash journal of the TX ring.
    pub tx: RingPages,
    /// Crash journal of the RX ring.
    pub rx: RingPages,
}

/// Backend port of a vif, or of a part of its queues.
pub struct NetbackPort<G, C> {
    queues: Vec<BackendQueue<G, C>>,
    /// Index of the queue that is served first in the next round.
    first: usize,
    chooser: Chooser,
    features: VifFeatures,
    policy: GuestPolicy,
    rules: Arc<RuleCounters>,
    counters: Arc<PortCounters>,
    /// Queue stride: these are every `stride`th of the guest's queues.
    stride: usize,
}

impl<G: Grantee, C: Channel> NetbackPort<G, C> {
    /// Makes the port of a frontend that has just connected, with at least one queue.
    pub fn new(
        queues: Vec<QueueParts<G, C>>,
        mode: Mode,
        features: VifFeatures,
        rules: &Arc<RuleCounters>,
    ) -> Self {
        let counters = Arc::new(PortCounters::default());
        let shared = Shared { features, rules, counters: &counters };
        let queues =
            queues.into_iter().map(|parts| BackendQueue::new(parts, mode, shared)).collect();
        Self::of(queues, features, rules, &counters)
    }

    /// Makes a port of queues that a previous process has served. If it kept crash journals, the port completes
    /// the publications that it had decided on. The port continues with the first request without a response. It
    /// notifies the frontend once, since the previous process may have crashed before its notification.
    ///
    /// Frames that were delivered but not responded to are delivered again.
    ///
    /// # Errors
    ///
    /// Returns a [`Fault`] if the shared indices are invalid, or an event channel fails.
    pub fn adopt(
        queues: Vec<QueueParts<G, C>>,
        mode: Mode,
        features: VifFeatures,
        rules: &Arc<RuleCounters>,
    ) -> Result<Self, Fault> {
        let counters = Arc::new(PortCounters::default());
        let shared = Shared { features, rules, counters: &counters };
        let queues = queues.into_iter().map(|parts| BackendQueue::adopt(parts, mode, shared));
        let port = Self::of(queues.collect::<Result<_, _>>()?, features, rules, &counters);
        port.queues.iter().try_for_each(BackendQueue::notify)?;
        Ok(port)
    }

    fn of(
        queues: Vec<BackendQueue<G, C>>,
        features: VifFeatures,
        rules: &Arc<RuleCounters>,
        counters: &Arc<PortCounters>,
    ) -> Self {
        NetbackPort {
            chooser: Chooser::new(queues.len()),
            queues,
            first: 0,
            features,
            policy: GuestPolicy::new(GuestPolicyConfig::default(), rules, counters),
            rules: Arc::clone(rules),
            counters: Arc::clone(counters),
            stride: 1,
        }
    }

    /// Sets the policy that the port enforces.
    #[must_use]
    pub fn with_policy(mut self, config: GuestPolicyConfig) -> Self {
        self.policy = GuestPolicy::new(config, &self.rules, &self.counters);
        self
    }

    fn longest(&self) -> usize {
        self.features.capabilities().longest()
    }

    /// Returns true if every queue has buffers for the longest frame.
    fn fits(&self) -> Result<bool, Fault> {
        let longest = self.longest();
        for queue in &self.queues {
            if !queue.rx.fits(longest)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Records that the guest accepted nothing and the longest frame does not fit.
    fn refused(&mut self) {
        if self.policy.record_refusal() {
            let posted = self.least(|queue| queue.rx.slots()).unwrap_or_default();
            self.policy.log_stalled(self.queues.len(), posted, self.longest());
        }
    }

    /// Returns the minimum over the queues: the queue of the next frame is not known.
    fn least(
        &mut self,
        of: impl Fn(&mut BackendQueue<G, C>) -> Result<usize, Fault>,
    ) -> Result<usize, Fault> {
        let mut least = usize::MAX;
        for queue in &mut self.queues {
            least = least.min(of(queue)?);
        }
        Ok(least)
    }
}

impl<G: Grantee + 'static, C: Channel + 'static> Port for NetbackPort<G, C> {
    fn receive(&mut self, batch: &mut Batch, budget: usize) -> Result<Received, Fault> {
        if self.policy.waits_for_credit() {
            return Ok(Received::default());
        }
        let count = self.queues.len();
        let mut sum = Received::default();
        for offset in 0..count {
            let left = budget.saturating_sub(sum.work.max(sum.frames));
            // With a budget of zero, every queue still reports its work.
            if left == 0 && budget > 0 {
                break;
            }
            let queue = &mut self.queues[(self.first + offset) % count];
            let received = queue.receive(batch, left, &mut self.policy)?;
            sum.frames += received.frames;
            sum.work += received.work;
        }
        self.first = (self.first + 1) % count.max(1);
        Ok(sum)
    }

    fn complete(&mut self) -> Result<(), Fault> {
        self.queues.iter_mut().try_for_each(BackendQueue::complete)
    }

    fn transmit(&mut self, batch: &Batch, frames: &[u32]) -> Result<Transmitted, Fault> {
        if self.policy.is_stalled() {
            if !self.fits()? {
                self.counters.dropped_many(DropReason::LinkDown, frames.len() as u64);
                return Ok(Transmitted { sent: 0, dropped: frames.len() });
            }
            self.policy.record_fit();
        }
        let wanted = self.policy.filter_frames(batch, frames);
        let filtered = frames.len() - wanted.len();
        let mut done = Transmitted { sent: 0, dropped: filtered };
        if let [queue] = self.queues.as_mut_slice() {
            done = queue.transmit(batch, wanted)?;
            done.dropped += filtered;
        } else {
            let shares = self.chooser.split(batch, wanted);
            for (queue, share) in self.queues.iter_mut().zip(shares) {
                if !share.is_empty() {
                    let part = queue.transmit(batch, share)?;
                    done.sent += part.sent;
                    done.dropped += part.dropped;
                }
            }
        }
        if done.sent > 0 {
            self.policy.record_accepted();
        } else if done.dropped > filtered && !self.fits()? {
            self.refused();
        }
        Ok(done)
    }

    fn flush(&mut self) -> Result<(), Fault> {
        self.queues.iter_mut().try_for_each(BackendQueue::flush)
    }

    fn room(&mut self) -> Result<usize, Fault> {
        let longest = self.longest();
        let room = self.least(|queue| queue.rx.room(longest))?;
        if room > 0 {
            self.policy.record_fit();
        } else {
            self.refused();
        }
        // Backpressure of a stalled guest ends: its frames are dropped.
        Ok(if self.policy.is_stalled() { usize::MAX } else { room })
    }

    fn slots(&mut self) -> Result<usize, Fault> {
        if self.fits()? {
            self.policy.record_fit();
        }
        // Backpressure of a stalled guest ends: its frames are dropped.
        if self.policy.is_stalled() { Ok(usize::MAX) } else { self.least(|queue| queue.rx.slots()) }
    }

    fn await_slots(&mut self, slots: usize) {
        self.queues.iter_mut().for_each(|queue| queue.rx.await_slots(slots));
        self.refused();
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        if self.policy.is_overdue() {
            match self.fits()? {
                true => self.policy.record_fit(),
                false => self.refused(),
            }
        }
        let receiving = !self.policy.waits_for_credit();
        // Each queue must be armed, regardless of the others.
        let mut work = false;
        for queue in &mut self.queues {
            work |= queue.arm(receiving)?;
        }
        Ok(work)
    }

    fn deadline(&self) -> Option<Duration> {
        self.policy.deadline()
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        self.queues.iter().flat_map(|queue| queue.channels.wait_fds()).collect()
    }

    fn clear_events(&mut self) -> Result<(), Fault> {
        (0..self.wait_fds().len()).try_for_each(|file| self.clear_event(file))
    }

    fn clear_event(&mut self, file: usize) -> Result<(), Fault> {
        let queues = self.queues.iter().map(|queue| (&queue.channels, &*queue.rules));
        clear_channel(queues, file)
    }

    fn split_off(&mut self, parts: usize) -> Vec<Box<dyn Port>> {
        let parts = parts.min(self.queues.len());
        if parts < 2 {
            return Vec::new();
        }
        let mut shares = deal(core::mem::take(&mut self.queues), parts).into_iter();
        self.queues = shares.next().unwrap_or_default();
        self.chooser = Chooser::strided(self.queues.len(), parts);
        self.stride = parts;
        let others = shares.map(|mut queues| {
            // Each counter has one writing thread.
            let counters = Arc::new(PortCounters::default());
            queues.iter_mut().for_each(|queue| queue.count_in(&counters));
            let part = NetbackPort {
                chooser: Chooser::strided(queues.len(), parts),
                queues,
                first: 0,
                features: self.features,
                policy: self.policy.for_part(&counters),
                rules: Arc::clone(&self.rules),
                counters,
                stride: parts,
            };
            Box::new(part) as Box<dyn Port>
        });
        others.collect()
    }

    fn execute(&mut self, queue: u16, command: PortCommand) -> PortReply {
        if let Some(wanted) = VifSettings::of(&command) {
            self.policy.apply(wanted);
            return VifReply::PolicySet.into();
        }
        if let PortCommand::SetMtu(mtu) = command {
            self.features.mtu = mtu;
            return PortReply::MtuSet;
        }
        let Some(addressed) = self.queues.get_mut(usize::from(queue) / self.stride) else {
            return PortReply::Unsupported;
        };
        if let PortCommand::Hash(steering) = &command {
            self.chooser.follow(steering.clone());
        }
        addressed.execute(command)
    }

    fn capabilities(&self) -> PortCapabilities {
        self.features.capabilities()
    }

    fn counters(&self) -> &Arc<PortCounters> {
        &self.counters
    }

    fn levels(&self) -> PortLevels {
        self.queues.iter().fold(PortLevels::default(), |mut sum, queue| {
            sum.add(queue.levels());
            sum
        })
    }
}
