//! The backend's end of a vif, as a port: one queue or several.
//!
//! # Theory of operation
//!
//! *From the guest* (`tx`): slots are fetched once each and parsed into packets; the fragments of
//! all packets of a round are brought into reach in one batch ([`ringfence_access::PageAccess::read`]); a packet whose
//! fragments all arrived becomes a frame, any other is answered with ERROR. When the frames were
//! delivered, all slots are answered in ring order with one publication.
//!
//! *To the guest* (`rx`): each frame takes as many posted buffers as it has pages; the bytes of
//! all frames of a call are written in one batch ([`ringfence_access::PageAccess::begin_write`]); the responses are
//! published once a round, in the slots of their requests.
//!
//! A vif with several queues is one port: its queues are asked in turn, and a frame to the guest takes
//! the queue that its flow says ([`ringfence_frame::steer`]). What holds for the guest as a whole (its rate, its
//! multicast filter) is one for all of them (`policy`). Where there is a thread for each queue, the port
//! is split into one for each ([`Port::split_off`]), which have that in common still; whether the guest
//! takes frames is judged for each by itself then.
//!
//! A packet that breaks a rule costs itself. What cannot be a packet any more (a producer index
//! beyond the ring, a chain without an end) costs the device.

mod policy;
mod queue;
mod rx;
mod tx;

pub use policy::{GuestPolicyConfig, STALL_DEFAULT};

use core::time::Duration;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use ringfence_access::Mode;
use ringfence_platform::{Channel, ChannelError, Grantee, WindowRound};
use ringfence_ring::RingPages;

use crate::features::VifFeatures;
use crate::netfront::deal;
use crate::rules::RuleCounters;
use policy::GuestPolicy;
use queue::{Queue, Shared};
use ringfence_frame::batch::Batch;
use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::counters::{DropReason, PortCounters};
use ringfence_frame::port::{Fault, Port, PortCapabilities, Received, Transmitted};
use ringfence_frame::steer::Chooser;

/// One or two event channels of a queue.
pub struct QueueChannels<C> {
    /// For the tx ring, or for both.
    pub tx: C,
    /// For the rx ring, when it has its own (`feature-split-event-channels`).
    pub rx: Option<C>,
}

impl<C: Channel> QueueChannels<C> {
    pub(crate) fn rx(&self) -> &C {
        self.rx.as_ref().unwrap_or(&self.tx)
    }

    /// What to wait for.
    pub(crate) fn wait_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [self.tx.as_fd()].into_iter().chain(self.rx.iter().map(AsFd::as_fd))
    }

    /// Clears the pending state of both.
    pub(crate) fn clear(&self) -> Result<(), ChannelError> {
        self.tx.clear()?;
        self.rx.as_ref().map_or(Ok(()), |rx| rx.clear().map(drop))
    }
}

/// What becomes of a port whose event channel fails. A peer that leaves may close it before its
/// state is seen to change; one that stays has no reason to.
pub(crate) fn channel_fault(rules: &RuleCounters) -> impl FnOnce(ChannelError) -> Fault {
    move |error| match error {
        ChannelError::PeerGone => {
            rules.count("channel_closed");
            Fault::Gone
        }
        ChannelError::System(errno) => {
            rules.count("channel_failed");
            Fault::system("event channel", std::io::Error::from_raw_os_error(errno))
        }
    }
}

/// What a backend queue is made of.
pub struct QueueParts<G, C> {
    /// The mapped tx ring.
    pub tx_ring: RingPages,
    /// The mapped rx ring.
    pub rx_ring: RingPages,
    /// The channels.
    pub channels: QueueChannels<C>,
    /// The peer's pages, for reading packets.
    pub tx_pages: G,
    /// The peer's pages, for writing packets.
    pub rx_pages: G,
    /// The peer's windows.
    pub windows: QueueWindows,
    /// Pages of this side's own that outlive the process, for whoever takes the queue over.
    pub records: Option<QueueRecords>,
}

/// The windows that a frontend made for the rings of a queue; they count in [`Mode::Window`].
#[derive(Default)]
pub struct QueueWindows {
    /// Of the tx ring.
    pub tx: Option<WindowRound>,
    /// Of the rx ring.
    pub rx: Option<WindowRound>,
}

/// What a backend keeps of a queue so that another process can go on with it
/// ([`ringfence_ring::BackRing::attach_recorded`]).
#[derive(Clone, Debug)]
pub struct QueueRecords {
    /// Of the tx ring.
    pub tx: RingPages,
    /// Of the rx ring.
    pub rx: RingPages,
}

/// The queues of a vif.
pub struct NetbackPort<G, C> {
    queues: Vec<Queue<G, C>>,
    /// The queue that is asked first in the next round.
    first: usize,
    chooser: Chooser,
    features: VifFeatures,
    policy: GuestPolicy,
    rules: Arc<RuleCounters>,
    counters: Arc<PortCounters>,
    /// These are every so-manieth of the guest's queues.
    stride: usize,
}

impl<G: Grantee, C: Channel> NetbackPort<G, C> {
    /// Takes up the queues, at least one, of a frontend that has just connected.
    pub fn new(
        queues: Vec<QueueParts<G, C>>,
        mode: Mode,
        features: VifFeatures,
        rules: &Arc<RuleCounters>,
    ) -> Self {
        let counters = Arc::new(PortCounters::default());
        let shared = Shared { features, rules, counters: &counters };
        let queues = queues.into_iter().map(|parts| Queue::new(parts, mode, shared)).collect();
        Self::of(queues, features, rules, &counters)
    }

    /// Takes over queues that a backend which is no more has served: finishes what that one had
    /// decided to publish (if it kept records), goes on with the first request that has no answer,
    /// and notifies the frontend once, as the one before may have died just before it did.
    ///
    /// Frames that it had passed on without answering are passed on again.
    ///
    /// # Errors
    ///
    /// A [`Fault`] when the shared indices are impossible, or the channels of no use.
    pub fn adopt(
        queues: Vec<QueueParts<G, C>>,
        mode: Mode,
        features: VifFeatures,
        rules: &Arc<RuleCounters>,
    ) -> Result<Self, Fault> {
        let counters = Arc::new(PortCounters::default());
        let shared = Shared { features, rules, counters: &counters };
        let queues = queues.into_iter().map(|parts| Queue::adopt(parts, mode, shared));
        let port = Self::of(queues.collect::<Result<_, _>>()?, features, rules, &counters);
        port.queues.iter().try_for_each(Queue::notify)?;
        Ok(port)
    }

    fn of(
        queues: Vec<Queue<G, C>>,
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

    /// The same port, which enforces this.
    #[must_use]
    pub fn with_policy(mut self, config: GuestPolicyConfig) -> Self {
        self.policy = GuestPolicy::new(config, &self.rules, &self.counters);
        self
    }

    fn longest(&self) -> usize {
        self.features.capabilities().longest()
    }

    /// Whether the largest frame finds buffers, whichever queue it takes.
    fn fits(&self) -> Result<bool, Fault> {
        let longest = self.longest();
        for queue in &self.queues {
            if !queue.rx.fits(longest)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Nothing was taken, and the largest frame does not fit.
    fn refused(&mut self) {
        if self.policy.refused() {
            let posted = self.least(|queue| queue.rx.slots()).unwrap_or_default();
            self.policy.say_stalled(self.queues.len(), posted, self.longest());
        }
    }

    /// The least of what the queues have: it is not known which of them will be asked.
    fn least(
        &mut self,
        of: impl Fn(&mut Queue<G, C>) -> Result<usize, Fault>,
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
        if self.policy.holds_up() {
            return Ok(Received::default());
        }
        let count = self.queues.len();
        let mut sum = Received::default();
        for turn in 0..count {
            let left = budget.saturating_sub(sum.work.max(sum.frames));
            // Who asks for nothing wants to hear of each queue all the same.
            if left == 0 && budget > 0 {
                break;
            }
            let queue = &mut self.queues[(self.first + turn) % count];
            let received = queue.receive(batch, left, &mut self.policy)?;
            sum.frames += received.frames;
            sum.work += received.work;
        }
        self.first = (self.first + 1) % count.max(1);
        Ok(sum)
    }

    fn complete(&mut self) -> Result<(), Fault> {
        self.queues.iter_mut().try_for_each(Queue::complete)
    }

    fn transmit(&mut self, batch: &Batch, frames: &[u32]) -> Result<Transmitted, Fault> {
        if self.policy.is_stalled() {
            if !self.fits()? {
                self.counters.dropped_many(DropReason::LinkDown, frames.len() as u64);
                return Ok(Transmitted { sent: 0, dropped: frames.len() });
            }
            self.policy.fits();
        }
        let wanted = self.policy.wanted(batch, frames);
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
            self.policy.taken();
        } else if done.dropped > filtered && !self.fits()? {
            self.refused();
        }
        Ok(done)
    }

    fn flush(&mut self) -> Result<(), Fault> {
        self.queues.iter_mut().try_for_each(Queue::flush)
    }

    fn room(&mut self) -> Result<usize, Fault> {
        let longest = self.longest();
        let room = self.least(|queue| queue.rx.room(longest))?;
        if room > 0 {
            self.policy.fits();
        } else {
            self.refused();
        }
        // Who sends to a guest that takes nothing is not held up for ever: what it sends is dropped.
        Ok(if self.policy.is_stalled() { usize::MAX } else { room })
    }

    fn slots(&mut self) -> Result<usize, Fault> {
        if self.fits()? {
            self.policy.fits();
        }
        // Who sends to a guest that takes nothing is not held up for ever: what it sends is dropped.
        if self.policy.is_stalled() { Ok(usize::MAX) } else { self.least(|queue| queue.rx.slots()) }
    }

    fn await_slots(&mut self, slots: usize) {
        self.queues.iter_mut().for_each(|queue| queue.rx.await_slots(slots));
        self.refused();
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        if self.policy.is_overdue() {
            match self.fits()? {
                true => self.policy.fits(),
                false => self.refused(),
            }
        }
        let taken_from = !self.policy.holds_up();
        // Each, whatever the others say: each asks for an event of its own.
        let mut work = false;
        for queue in &mut self.queues {
            work |= queue.arm(taken_from)?;
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
        self.queues.iter().try_for_each(Queue::clear_events)
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
            // A counter is written by one thread.
            let counters = Arc::new(PortCounters::default());
            queues.iter_mut().for_each(|queue| queue.count_in(&counters));
            let part = NetbackPort {
                chooser: Chooser::strided(queues.len(), parts),
                queues,
                first: 0,
                features: self.features,
                policy: self.policy.of_part(&counters),
                rules: Arc::clone(&self.rules),
                counters,
                stride: parts,
            };
            Box::new(part) as Box<dyn Port>
        });
        others.collect()
    }

    fn execute(&mut self, queue: u16, command: PortCommand) -> PortReply {
        if let PortCommand::SetPolicy(wanted) = command {
            self.policy.follow(wanted);
            return PortReply::PolicySet;
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
}
