//! Frontend queue of a vif: its two rings and its event channels.

use std::sync::Arc;

use ringfence_access::window::SourceLevels;
use ringfence_platform::Channel;
use ringfence_ring::{FrontRing, NETIF_RX, NETIF_TX};

use super::pages::TxPages;
use super::pool::Pool;
use super::windows::WindowPages;
use super::{QueueMemory, ring, rx, tx};
use crate::features::VifFeatures;
use crate::queues::{QueueChannels, channel_fault};
use crate::rules::RuleCounters;
use ringfence_frame::batch::Batch;
use ringfence_frame::counters::PortCounters;
use ringfence_frame::port::{Fault, Received};

pub(super) struct FrontendQueue<C> {
    pub(super) tx: tx::FrontendTx,
    rx: rx::FrontendRx,
    pub(super) channels: QueueChannels<C>,
    pub(super) rules: Arc<RuleCounters>,
}

impl<C: Channel> FrontendQueue<C> {
    pub(super) fn new(
        memory: &mut QueueMemory,
        channels: QueueChannels<C>,
        features: VifFeatures,
        rules: &Arc<RuleCounters>,
        counters: &Arc<PortCounters>,
    ) -> Result<FrontendQueue<C>, Fault> {
        let (tx_ring, rx_ring) = (ring(memory.tx_ring.memory())?, ring(memory.rx_ring.memory())?);
        let windows = memory.windows.as_mut().and_then(|windows| windows.pages.take());
        let (tx_pages, rx_pages) = match windows {
            Some((tx, rx)) => (TxPages::Window(tx), rx::RxPages::Window(rx)),
            None => {
                let pool = Pool::new(&memory.tx_pages);
                (TxPages::Lent(pool), rx::RxPages::Lent(&memory.rx_pages))
            }
        };
        let tx = tx::FrontendTx::new(
            FrontRing::init(tx_ring, NETIF_TX),
            tx_pages,
            &memory.head_pages,
            Arc::clone(rules),
            Arc::clone(counters),
        );
        let mut rx = rx::FrontendRx::new(
            FrontRing::init(rx_ring, NETIF_RX),
            rx_pages,
            features.own,
            Arc::clone(rules),
            Arc::clone(counters),
        );
        // No notification is due: the backend reads the ring when it connects.
        rx.post();
        Ok(FrontendQueue { tx, rx, channels, rules: Arc::clone(rules) })
    }

    /// Replaces the port counters of both rings.
    pub(super) fn count_in(&mut self, counters: &Arc<PortCounters>) {
        self.tx.count_in(Arc::clone(counters));
        self.rx.count_in(Arc::clone(counters));
    }

    pub(super) fn receive(&mut self, batch: &mut Batch, budget: usize) -> Result<Received, Fault> {
        let reaped = self.tx.reap()?;
        self.reclaim()?;
        let mut received = self.rx.receive(batch, budget)?;
        received.work += reaped;
        Ok(received)
    }

    pub(super) fn complete(&mut self) -> Result<(), Fault> {
        if self.rx.post() {
            self.channels.rx().notify().map_err(channel_fault(&self.rules))?;
        }
        Ok(())
    }

    pub(super) fn flush(&mut self) -> Result<(), Fault> {
        if self.tx.publish() {
            self.channels.tx.notify().map_err(channel_fault(&self.rules))?;
        }
        Ok(())
    }

    /// Reclaims pages of the grant windows that the backend holds.
    fn reclaim(&mut self) -> Result<(), Fault> {
        let windows = [self.tx.window(), self.rx.window()];
        let reclaimed = windows.into_iter().flatten().try_for_each(WindowPages::reclaim);
        reclaimed.inspect_err(|_| {
            self.rules.count("window_held_too_long");
        })
    }

    /// Returns true if the queue must be checked again without an event.
    pub(super) fn needs_check(&mut self) -> bool {
        let windows = [self.tx.window(), self.rx.window()];
        windows.into_iter().flatten().any(|pages| pages.has_held_pages()) || self.rx.is_short()
    }

    /// Limits the pages of each grant window to `most`; returns the levels of both windows.
    pub(super) fn resize(&mut self, most: u32) -> Option<SourceLevels> {
        for pages in [self.tx.window()?, self.rx.window()?] {
            pages.resize(most);
        }
        self.levels()
    }

    /// Returns the levels of both windows, if the queue has windows.
    pub(super) fn levels(&mut self) -> Option<SourceLevels> {
        let mut sum = SourceLevels::default();
        for pages in [self.tx.window()?, self.rx.window()?] {
            sum.add(pages.levels());
        }
        Some(sum)
    }

    pub(super) fn arm(&mut self) -> Result<bool, Fault> {
        if self.rx.is_short() {
            self.complete()?;
        }
        // Both rings must be armed, regardless of the first result.
        let (received, room) = (self.rx.arm()?, self.tx.arm()?);
        Ok(received || room)
    }
}
