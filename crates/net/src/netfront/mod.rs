//! The frontend's end of a vif queue, as a port.
//!
//! # Theory of operation
//!
//! When it connects, a frontend lends a pool of pages to the backend: read-only ones for packets it
//! sends, writable ones for packets it receives. They stay lent. A packet is *sent* by copying it into pages of the first kind and posting
//! their references; the pages are free again when their responses came. A packet is *received* as
//! a view of the pages it was written to; they are posted again when it was delivered. Each slot of
//! the rx ring has its own page, so that a packet of several slots lies in neighbouring pages.
//!
//! The frontend trusts nothing of the backend: response indices, ids, sizes and chains are checked,
//! and a backend that breaks a rule costs the device ([`Fault::Misbehaved`]).

mod pool;
mod rx;
mod tx;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use ringfence_memory::LentSlice;
use ringfence_platform::{Access, Channel, Granter, Gref, Lease, LendError};
use ringfence_ring::{FrontRing, NETIF_RX, NETIF_TX, RingPages};

use crate::batch::Batch;
use crate::counters::PortCounters;
use crate::features::VifFeatures;
use crate::netback::{QueueChannels, channel_fault};
use crate::port::{Fault, Port, PortCapabilities, Received, Transmitted};
use crate::rules::RuleCounters;

/// Pages lent for sending: two packets of the largest size beyond a full ring would find none, but a
/// full ring stops sending first.
const TX_PAGES: usize = 256;
/// Pages lent for receiving: one for each slot of the ring.
const RX_PAGES: usize = 256;
/// Buffers of a queue.
pub const QUEUE_PAGES: usize = TX_PAGES + RX_PAGES;

/// The pages of a queue: what stays lent while it is connected.
pub struct QueueMemory {
    tx_ring: Lease,
    rx_ring: Lease,
    tx_pages: Vec<Lease>,
    rx_pages: Vec<Lease>,
}

impl QueueMemory {
    /// Lends a queue's rings and buffers.
    ///
    /// # Errors
    ///
    /// [`LendError`]; what was lent before is taken back.
    pub fn lend(granter: &mut impl Granter) -> Result<QueueMemory, LendError> {
        let mut leases = Vec::with_capacity(TX_PAGES + RX_PAGES + 2);
        let kinds = core::iter::repeat_n(Access::ReadWrite, 2 + RX_PAGES)
            .chain(core::iter::repeat_n(Access::ReadOnly, TX_PAGES));
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
        let tx_pages = leases.split_off(2 + RX_PAGES);
        let rx_pages = leases.split_off(2);
        let rings = <[Lease; 2]>::try_from(leases);
        let Ok([tx_ring, rx_ring]) = rings else { return Err(LendError::NoPage { limit: 2 }) };
        Ok(QueueMemory { tx_ring, rx_ring, tx_pages, rx_pages })
    }

    /// References of the tx and the rx ring.
    pub fn ring_refs(&self) -> (Gref, Gref) {
        (self.tx_ring.gref(), self.rx_ring.gref())
    }

    /// The buffers, for whoever stages them: those for receiving first, which save more.
    pub fn pages(&self) -> Vec<(Gref, Access)> {
        let all = self.rx_pages.iter().chain(&self.tx_pages);
        all.map(|lease| (lease.gref(), lease.access())).collect()
    }

    /// Takes everything back that the backend let go of; returns what it did not.
    pub fn give_up(self, granter: &mut impl Granter) -> Vec<Lease> {
        let mut leases = vec![self.tx_ring, self.rx_ring];
        leases.extend(self.tx_pages);
        leases.extend(self.rx_pages);
        take_back(granter, leases)
    }
}

/// Takes leases back; those the peer is using go by force where the platform can, else they are
/// returned.
pub fn take_back(granter: &mut impl Granter, leases: Vec<Lease>) -> Vec<Lease> {
    let mut busy = Vec::new();
    for lease in leases {
        if let Err(still) = granter.take_back(lease) {
            busy.push(still.lease);
        }
    }
    if busy.is_empty() {
        return busy;
    }
    match granter.revoke_forced(busy) {
        Ok(()) => Vec::new(),
        Err((left, _)) => left,
    }
}

/// A frontend queue.
pub struct NetfrontPort<C> {
    tx: tx::ToBackend,
    rx: rx::FromBackend,
    channels: QueueChannels<C>,
    features: VifFeatures,
    rules: Arc<RuleCounters>,
    counters: Arc<PortCounters>,
}

pub(crate) fn ring(lent: &LentSlice) -> Result<RingPages, Fault> {
    lent.zero(0, lent.len()).map_err(|e| Fault::system("a ring page", std::io::Error::other(e)))?;
    RingPages::new(lent.clone(), lent.len())
        .map_err(|e| Fault::system("a ring page", std::io::Error::other(e)))
}

impl<C: Channel> NetfrontPort<C> {
    /// Initialises the rings in `memory` and posts receive buffers. The memory must outlive the
    /// port: whoever owns it takes the pages back when the port is gone.
    ///
    /// # Errors
    ///
    /// A [`Fault`] when the pages cannot hold rings, which no platform's pages do.
    pub fn new(
        memory: &QueueMemory,
        channels: QueueChannels<C>,
        features: VifFeatures,
        rules: &Arc<RuleCounters>,
    ) -> Result<NetfrontPort<C>, Fault> {
        let counters = Arc::new(PortCounters::default());
        let (tx_ring, rx_ring) = (ring(memory.tx_ring.memory())?, ring(memory.rx_ring.memory())?);
        let tx = tx::ToBackend::new(
            FrontRing::init(tx_ring, NETIF_TX),
            &memory.tx_pages,
            Arc::clone(rules),
            Arc::clone(&counters),
        );
        let mut rx = rx::FromBackend::new(
            FrontRing::init(rx_ring, NETIF_RX),
            &memory.rx_pages,
            features.own,
            Arc::clone(rules),
            Arc::clone(&counters),
        );
        // Nobody listens yet; the backend looks at the ring when it connects.
        rx.post();
        Ok(NetfrontPort { tx, rx, channels, features, rules: Arc::clone(rules), counters })
    }

    fn rx_channel(&self) -> &C {
        self.channels.rx.as_ref().unwrap_or(&self.channels.tx)
    }
}

impl<C: Channel> Port for NetfrontPort<C> {
    fn receive(&mut self, batch: &mut Batch, budget: usize) -> Result<Received, Fault> {
        let reaped = self.tx.reap()?;
        let mut received = self.rx.receive(batch, budget)?;
        received.work += reaped;
        Ok(received)
    }

    fn complete(&mut self) -> Result<(), Fault> {
        if self.rx.post() {
            self.rx_channel().notify().map_err(channel_fault(&self.rules))?;
        }
        Ok(())
    }

    fn transmit(&mut self, batch: &Batch, frames: &[u32]) -> Result<Transmitted, Fault> {
        self.tx.transmit(batch, frames)
    }

    fn flush(&mut self) -> Result<(), Fault> {
        if self.tx.publish() {
            self.channels.tx.notify().map_err(channel_fault(&self.rules))?;
        }
        Ok(())
    }

    fn room(&mut self) -> Result<usize, Fault> {
        self.tx.room(self.features.capabilities().longest())
    }

    fn slots(&mut self) -> Result<usize, Fault> {
        self.tx.slots()
    }

    fn await_slots(&mut self, _: usize) {
        self.tx.await_slots();
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        // Both, whatever the first says: each asks for an event of its own.
        let (received, room) = (self.rx.arm()?, self.tx.arm()?);
        Ok(received || room)
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        let mut fds = vec![self.channels.tx.as_fd()];
        fds.extend(self.channels.rx.iter().map(AsFd::as_fd));
        fds
    }

    fn clear_events(&mut self) -> Result<(), Fault> {
        self.channels.tx.clear().map_err(channel_fault(&self.rules))?;
        if let Some(rx) = &self.channels.rx {
            rx.clear().map_err(channel_fault(&self.rules))?;
        }
        Ok(())
    }

    fn capabilities(&self) -> PortCapabilities {
        self.features.capabilities()
    }

    fn counters(&self) -> &Arc<PortCounters> {
        &self.counters
    }
}
