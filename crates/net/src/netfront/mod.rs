//! The frontend's end of a vif, as a port: one queue or several.
//!
//! # Theory of operation
//!
//! When it connects, a frontend lends a pool of pages to the backend: read-only ones for packets it
//! sends, writable ones for packets it receives. They stay lent; or they are pages of windows, which it
//! grants and takes back alone as it likes (`windows`). A packet is *sent* by copying it into pages of the first kind and posting
//! their references; the pages are free again when their responses came. A packet is *received* as
//! a view of the pages it was written to; they are posted again when it was delivered. Each slot of
//! the rx ring has its own page, so that a packet of several slots lies in neighbouring pages.
//!
//! The frontend trusts nothing of the backend: response indices, ids, sizes and chains are checked,
//! and a backend that breaks a rule costs the device ([`Fault::Misbehaved`]).

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

use ringfence_memory::LentSlice;
use ringfence_platform::{
    Access, Channel, Granter, Gref, Lease, LendError, WindowHandle, take_back,
};
use ringfence_ring::RingPages;

use crate::features::VifFeatures;
use crate::netback::QueueChannels;
use crate::rules::RuleCounters;
use heads::HEAD_PAGES;
use queue::Queue;
use ringfence_frame::batch::Batch;
use ringfence_frame::commands::{PortCommand, PortReply, TxStaging};
use ringfence_frame::counters::PortCounters;
use ringfence_frame::port::{Fault, Port, PortCapabilities, Received, Transmitted};
use ringfence_frame::steer::Chooser;
use ringfence_sys::clock::monotonic;
pub(crate) use windows::QueueWindows;
pub use windows::{WindowSizes, WindowStock};

/// Pages lent for sending: two packets of the largest size beyond a full ring would find none, but a
/// full ring stops sending first.
const TX_PAGES: usize = 256;
/// Pages lent for receiving: one for each slot of the ring.
const RX_PAGES: usize = 256;
/// Buffers of a queue.
pub const QUEUE_PAGES: usize = TX_PAGES + RX_PAGES + HEAD_PAGES;
/// Those of them that are staged where only the first bytes of what is sent are.
pub const HEADER_STAGED_PAGES: usize = RX_PAGES + HEAD_PAGES;

/// The pages of a queue: what stays lent while it is connected.
pub struct QueueMemory {
    tx_ring: Lease,
    rx_ring: Lease,
    tx_pages: Vec<Lease>,
    /// For the first bytes of packets.
    head_pages: Vec<Lease>,
    rx_pages: Vec<Lease>,
    /// In place of all buffers above.
    windows: Option<QueueWindows>,
}

impl QueueMemory {
    /// Lends a queue's rings and buffers.
    ///
    /// # Errors
    ///
    /// [`LendError`]; what was lent before is taken back.
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

    /// Lends a queue's rings. Its buffers are in windows.
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

    /// The names of the windows of the tx and the rx ring, if the buffers are in windows.
    pub fn windows(&self) -> Option<(WindowHandle, WindowHandle)> {
        self.windows.as_ref().map(|windows| windows.handles)
    }

    /// References of the tx and the rx ring.
    pub fn ring_refs(&self) -> (Gref, Gref) {
        (self.tx_ring.gref(), self.rx_ring.gref())
    }

    /// The buffers to be staged: those for receiving first, which save more.
    pub fn pages(&self, staging: TxStaging) -> Vec<(Gref, Access)> {
        let tx_pages: &[Lease] = if staging == TxStaging::Full { &self.tx_pages } else { &[] };
        let all = self.rx_pages.iter().chain(&self.head_pages).chain(tx_pages);
        all.map(|lease| (lease.gref(), lease.access())).collect()
    }

    /// Takes everything back that the backend let go of; returns what it did not.
    pub fn give_up(self, granter: &mut impl Granter) -> Vec<Lease> {
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

/// Deals queues out like cards.
pub(crate) fn deal<Q>(queues: Vec<Q>, parts: usize) -> Vec<Vec<Q>> {
    let mut shares: Vec<Vec<Q>> = (0..parts).map(|_| Vec::new()).collect();
    for (number, queue) in queues.into_iter().enumerate() {
        shares[number % parts].push(queue);
    }
    shares
}

/// The queues of a vif, from the frontend's side.
pub struct NetfrontPort<C> {
    queues: Vec<Queue<C>>,
    /// The queue that is asked first in the next round.
    first: usize,
    chooser: Chooser,
    features: VifFeatures,
    counters: Arc<PortCounters>,
    /// These are every so-manieth of the vif's queues.
    stride: usize,
    /// When to look after what the backend holds on to.
    again: Option<Duration>,
}

impl<C: Channel> NetfrontPort<C> {
    /// Initialises the rings in `memory`, a queue each, and posts receive buffers. The memory must
    /// outlive the port: whoever owns it takes the pages back when the port is gone.
    ///
    /// # Errors
    ///
    /// A [`Fault`] when the pages cannot hold rings, which no platform's pages do.
    pub fn new(
        memory: &mut [QueueMemory],
        channels: Vec<QueueChannels<C>>,
        features: VifFeatures,
        rules: &Arc<RuleCounters>,
    ) -> Result<NetfrontPort<C>, Fault> {
        let counters = Arc::new(PortCounters::default());
        let queue = |(memory, channels)| Queue::new(memory, channels, features, rules, &counters);
        let queues = memory.iter_mut().zip(channels).map(queue).collect::<Result<Vec<_>, _>>()?;
        let chooser = Chooser::new(queues.len());
        let (first, stride, again) = (0, 1, None);
        Ok(NetfrontPort { queues, first, chooser, features, counters, stride, again })
    }

    /// The least of what the queues have: it is not known which of them will be asked.
    fn least(
        &mut self,
        of: impl Fn(&mut Queue<C>) -> Result<usize, Fault>,
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
        for turn in 0..count {
            let left = budget.saturating_sub(sum.frames);
            let queue = &mut self.queues[(self.first + turn) % count];
            let received = queue.receive(batch, left)?;
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
        self.queues.iter_mut().try_for_each(Queue::flush)
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
        // Each, whatever the others say: each asks for an event of its own.
        let mut work = false;
        for queue in &mut self.queues {
            work |= queue.arm()?;
        }
        let troubled = self.queues.iter_mut().any(Queue::is_troubled);
        self.again = troubled.then(|| monotonic() + windows::TEND);
        Ok(work)
    }

    fn deadline(&self) -> Option<Duration> {
        self.again
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
        self.chooser = Chooser::new(self.queues.len());
        self.stride = parts;
        let others = shares.map(|mut queues| {
            // A counter is written by one thread.
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
        match (self.queues.get_mut(usize::from(queue) / self.stride), command) {
            (Some(queue), PortCommand::SendStaged(staging)) => {
                queue.tx.stage(staging);
                PortReply::Staged
            }
            (Some(queue), PortCommand::Resize(most)) => match queue.resize(most) {
                Some(levels) => PortReply::Resized(levels),
                None => PortReply::Unsupported,
            },
            _ => PortReply::Unsupported,
        }
    }

    fn capabilities(&self) -> PortCapabilities {
        self.features.capabilities()
    }

    fn counters(&self) -> &Arc<PortCounters> {
        &self.counters
    }
}
