//! Frontend port of a vif, with one queue or several.
//!
//! # Theory of operation
//!
//! On connection, a frontend grants a pool of pages to the backend: read-only pages for the packets that it
//! sends, writable ones for those that it receives. The grants last as long as the connection. With grant
//! windows (`windows`), the frontend issues and revokes the pages without the backend instead. To *send*, the
//! port copies a packet into read-only pages and posts their references. The responses free the pages. A
//! *received* packet is a view of the writable pages, which are posted again after its delivery. Each slot of
//! the RX ring has its own page, so a packet of several slots lies in adjacent pages.
//!
//! The frontend does not trust the backend. It validates response indices, ids, sizes and chains. A
//! violation ends the device ([`Fault::Misbehaved`]).

mod heads;
mod pages;
mod pool;
mod queue;
mod rx;
mod tx;
mod windows;

use core::time::Duration;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ringfence_access::window::RECLAIM_INTERVAL;
use ringfence_memory::LentSlice;
use ringfence_platform::{Access, Channel, Granter, Gref, Lease, LendError, WindowName, take_back};
use ringfence_ring::RingPages;

use crate::commands::{VifCommand, VifReply};
use crate::features::VifFeatures;
use crate::queues::{QueueChannels, clear_channel, deal};
use crate::rules::RuleCounters;
use crate::staging::TxStaging;
use heads::HEAD_PAGES;
use queue::FrontendQueue;
use ringfence_frame::batch::Batch;
use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::counters::PortCounters;
use ringfence_frame::port::{Fault, Port, PortCapabilities, Received, Transmitted};
use ringfence_frame::steer::Chooser;
use ringfence_sys::clock::monotonic;
pub use windows::WindowSizes;
pub(crate) use windows::{QueueStock, QueueWindows};

/// Number of pages for sending: a full ring stops the sender before the pages run out.
const TX_PAGES: usize = 256;
/// Number of pages for receiving: one per slot of the ring.
const RX_PAGES: usize = 256;
/// Number of buffer pages of a queue.
pub const QUEUE_PAGES: usize = TX_PAGES + RX_PAGES + HEAD_PAGES;
/// Number of pages that are staged if only header buffers are staged for sending.
pub const HEADER_STAGED_PAGES: usize = RX_PAGES + HEAD_PAGES;

/// Pages of a queue, granted while it is connected.
pub struct QueueMemory {
    tx_ring: Lease,
    rx_ring: Lease,
    tx_pages: Vec<Lease>,
    /// Pages with header buffers.
    head_pages: Vec<Lease>,
    rx_pages: Vec<Lease>,
    /// Grant windows that replace all buffers above.
    windows: Option<QueueWindows>,
}

impl QueueMemory {
    /// Grants a queue's rings and buffers.
    ///
    /// # Errors
    ///
    /// Returns [`LendError`]; grants made before the error are revoked.
    pub fn lend(granter: &mut impl Granter) -> Result<QueueMemory, LendError> {
        let mut leases = Vec::with_capacity(QUEUE_PAGES + 2);
        let kinds = core::iter::repeat_n(Access::ReadWrite, 2 + RX_PAGES)
            .chain(core::iter::repeat_n(Access::ReadOnly, TX_PAGES + HEAD_PAGES));
        for access in kinds {
            match granter.lend(access) {
                Ok(lease) => leases.push(lease),
                Err(error) => {
                    let left = take_back(granter, leases);
                    debug_assert!(left.is_empty(), "the peer was not told of them yet");
                    return Err(error);
                }
            }
        }
        let head_pages = leases.split_off(2 + RX_PAGES + TX_PAGES);
        let tx_pages = leases.split_off(2 + RX_PAGES);
        let rx_pages = leases.split_off(2);
        let rings = <[Lease; 2]>::try_from(leases);
        let Ok([tx_ring, rx_ring]) = rings else { return Err(LendError::NoPage { limit: 2 }) };
        Ok(QueueMemory { tx_ring, rx_ring, tx_pages, head_pages, rx_pages, windows: None })
    }

    /// Grants a queue's rings, for a queue whose buffers are in grant windows.
    pub(crate) fn lend_rings(
        granter: &mut impl Granter,
        windows: QueueWindows,
    ) -> Result<QueueMemory, LendError> {
        let tx_ring = granter.lend(Access::ReadWrite)?;
        let rx_ring = match granter.lend(Access::ReadWrite) {
            Ok(lease) => lease,
            Err(error) => {
                let left = take_back(granter, vec![tx_ring]);
                debug_assert!(left.is_empty(), "the peer was not told of it yet");
                return Err(error);
            }
        };
        let none = Vec::new;
        let (tx_pages, head_pages, rx_pages) = (none(), none(), none());
        let windows = Some(windows);
        Ok(QueueMemory { tx_ring, rx_ring, tx_pages, head_pages, rx_pages, windows })
    }

    /// Returns the names of the TX and RX grant windows, if the buffers are in grant windows.
    pub fn windows(&self) -> Option<(WindowName, WindowName)> {
        self.windows.as_ref().map(|windows| windows.names)
    }

    /// Returns the references of the TX and the RX ring.
    pub fn ring_refs(&self) -> (Gref, Gref) {
        (self.tx_ring.gref(), self.rx_ring.gref())
    }

    /// Returns the buffers to stage. The receive buffers come first: they gain the most.
    pub fn pages(&self, staging: TxStaging) -> Vec<(Gref, Access)> {
        let tx_pages: &[Lease] = if staging == TxStaging::Full { &self.tx_pages } else { &[] };
        let all = self.rx_pages.iter().chain(&self.head_pages).chain(tx_pages);
        all.map(|lease| (lease.gref(), lease.access())).collect()
    }

    /// Revokes all grants; returns the leases that the backend still uses.
    pub fn revoke_all(self, granter: &mut impl Granter) -> Vec<Lease> {
        let mut leases = vec![self.tx_ring, self.rx_ring];
        leases.extend(self.tx_pages);
        leases.extend(self.head_pages);
        leases.extend(self.rx_pages);
        take_back(granter, leases)
    }
}

pub(crate) fn ring(lent: &LentSlice) -> Result<RingPages, Fault> {
    lent.zero(0, lent.len()).map_err(|e| Fault::system("a ring page", std::io::Error::other(e)))?;
    RingPages::new(lent.clone(), lent.len())
        .map_err(|e| Fault::system("a ring page", std::io::Error::other(e)))
}

/// Frontend port of a vif, or of a part of its queues.
pub struct NetfrontPort<C> {
    queues: Vec<FrontendQueue<C>>,
    /// Index of the queue that is served first in the next round.
    first: usize,
    chooser: Chooser,
    features: VifFeatures,
    counters: Arc<PortCounters>,
    /// Queue stride: these are every `stride`th of the vif's queues.
    stride: usize,
    /// Time of the next check for held pages and for slots without a page.
    again: Option<Duration>,
}

impl<C: Channel> NetfrontPort<C> {
    /// Initialises the rings in `memory`, one queue each, and posts receive buffers. The owner of the memory
    /// keeps it until the port is dropped, and then revokes the pages.
    ///
    /// # Errors
    ///
    /// Returns a [`Fault`] if the pages cannot hold rings, which no platform causes.
    pub fn new(
        memory: &mut [QueueMemory],
        channels: Vec<QueueChannels<C>>,
        features: VifFeatures,
        rules: &Arc<RuleCounters>,
    ) -> Result<NetfrontPort<C>, Fault> {
        let counters = Arc::new(PortCounters::default());
        let queue =
            |(memory, channels)| FrontendQueue::new(memory, channels, features, rules, &counters);
        let queues = memory.iter_mut().zip(channels).map(queue).collect::<Result<Vec<_>, _>>()?;
        let chooser = Chooser::new(queues.len());
        let (first, stride, again) = (0, 1, None);
        Ok(NetfrontPort { queues, first, chooser, features, counters, stride, again })
    }

    /// Returns the minimum over the queues: the queue of the next frame is not known.
    fn least(
        &mut self,
        of: impl Fn(&mut FrontendQueue<C>) -> Result<usize, Fault>,
    ) -> Result<usize, Fault> {
        let mut least = usize::MAX;
        for queue in &mut self.queues {
            least = least.min(of(queue)?);
        }
        Ok(least)
    }
}

impl<C: Channel + 'static> Port for NetfrontPort<C> {
    fn receive(&mut self, batch: &mut Batch, budget: usize) -> Result<Received, Fault> {
        let count = self.queues.len();
        let mut sum = Received::default();
        for offset in 0..count {
            let left = budget.saturating_sub(sum.frames);
            let queue = &mut self.queues[(self.first + offset) % count];
            let received = queue.receive(batch, left)?;
            sum.frames += received.frames;
            sum.work += received.work;
        }
        self.first = (self.first + 1) % count.max(1);
        Ok(sum)
    }

    fn complete(&mut self) -> Result<(), Fault> {
        self.queues.iter_mut().try_for_each(FrontendQueue::complete)
    }

    fn transmit(&mut self, batch: &Batch, frames: &[u32]) -> Result<Transmitted, Fault> {
        if let [queue] = self.queues.as_mut_slice() {
            return queue.tx.transmit(batch, frames);
        }
        let mut done = Transmitted::default();
        let shares = self.chooser.split(batch, frames);
        for (queue, share) in self.queues.iter_mut().zip(shares) {
            if !share.is_empty() {
                let part = queue.tx.transmit(batch, share)?;
                done.sent += part.sent;
                done.dropped += part.dropped;
            }
        }
        Ok(done)
    }

    fn flush(&mut self) -> Result<(), Fault> {
        self.queues.iter_mut().try_for_each(FrontendQueue::flush)
    }

    fn room(&mut self) -> Result<usize, Fault> {
        let longest = self.features.capabilities().longest();
        self.least(|queue| queue.tx.room(longest))
    }

    fn slots(&mut self) -> Result<usize, Fault> {
        self.least(|queue| queue.tx.slots())
    }

    fn await_slots(&mut self, _: usize) {
        self.queues.iter_mut().for_each(|queue| queue.tx.await_slots());
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        // Each queue must be armed, regardless of the others.
        let mut work = false;
        for queue in &mut self.queues {
            work |= queue.arm()?;
        }
        let troubled = self.queues.iter_mut().any(FrontendQueue::needs_check);
        self.again = troubled.then(|| monotonic() + RECLAIM_INTERVAL);
        Ok(work)
    }

    fn deadline(&self) -> Option<Duration> {
        self.again
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
        self.chooser = Chooser::new(self.queues.len());
        self.stride = parts;
        let others = shares.map(|mut queues| {
            // Each counter has one writing thread.
            let counters = Arc::new(PortCounters::default());
            queues.iter_mut().for_each(|queue| queue.count_in(&counters));
            let (chooser, features) = (Chooser::new(queues.len()), self.features);
            let part = NetfrontPort {
                queues,
                first: 0,
                chooser,
                features,
                counters,
                stride: parts,
                again: None,
            };
            Box::new(part) as Box<dyn Port>
        });
        others.collect()
    }

    fn execute(&mut self, queue: u16, command: PortCommand) -> PortReply {
        let Some(queue) = self.queues.get_mut(usize::from(queue) / self.stride) else {
            return PortReply::Unsupported;
        };
        let levels = match VifCommand::of(command) {
            Some(VifCommand::SendStaged(staging)) => {
                queue.tx.stage(staging);
                return VifReply::Staged.into();
            }
            Some(VifCommand::Resize(most)) => queue.resize(most),
            Some(VifCommand::ReadLevels) => queue.levels(),
            Some(VifCommand::ReadUnanswered) => {
                return VifReply::Unanswered(queue.tx.unanswered()).into();
            }
            Some(VifCommand::Stage(_) | VifCommand::Unstage(_)) | None => None,
        };
        levels.map_or(PortReply::Unsupported, |levels| VifReply::Levels(levels).into())
    }

    fn capabilities(&self) -> PortCapabilities {
        self.features.capabilities()
    }

    fn counters(&self) -> &Arc<PortCounters> {
        &self.counters
    }
}
