//! One queue of a vif: its two rings and its channels.

use std::sync::Arc;

use ringfence_access::window::SourceLevels;
use ringfence_platform::Channel;
use ringfence_ring::{FrontRing, NETIF_RX, NETIF_TX};

use super::pages::TxPages;
use super::pool::Pool;
use super::windows::WindowPages;
use super::{QueueMemory, ring, rx, tx};
use crate::features::VifFeatures;
use crate::netback::{QueueChannels, channel_fault};
use crate::rules::RuleCounters;
use ringfence_frame::batch::Batch;
use ringfence_frame::counters::PortCounters;
use ringfence_frame::port::{Fault, Received};

pub(super) struct Queue<C> {
    pub(super) tx: tx::FrontendTx,
    rx: rx::FrontendRx,
    pub(super) channels: QueueChannels<C>,
    rules: Arc<RuleCounters>,
}

impl<C: Channel> Queue<C> {
    pub(super) fn new(
        memory: &mut QueueMemory,
        channels: QueueChannels<C>,
        features: VifFeatures,
        rules: &Arc<RuleCounters>,
        counters: &Arc<PortCounters>,
    ) -> Result<Queue<C>, Fault> {
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
            (tx_pages, &memory.head_pages),
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
        // Nobody listens yet; the backend looks at the ring when it connects.
        rx.post();
        Ok(Queue { tx, rx, channels, rules: Arc::clone(rules) })
    }

    /// Counts there from now on.
    pub(super) fn count_in(&mut self, counters: &Arc<PortCounters>) {
        self.tx.count_in(Arc::clone(counters));
        self.rx.count_in(Arc::clone(counters));
    }

    pub(super) fn receive(&mut self, batch: &mut Batch, budget: usize) -> Result<Received, Fault> {
        let reaped = self.tx.reap()?;
        self.tend()?;
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

    /// Looks after pages of the windows that the backend holds on to.
    fn tend(&mut self) -> Result<(), Fault> {
        let windows = [self.tx.window(), self.rx.window()];
        let tended = windows.into_iter().flatten().try_for_each(WindowPages::tend);
        tended.inspect_err(|_| {
            self.rules.count("window_held_too_long");
        })
    }

    /// Whether there is something to look after even if no event comes.
    pub(super) fn is_troubled(&mut self) -> bool {
        let windows = [self.tx.window(), self.rx.window()];
        windows.into_iter().flatten().any(|pages| pages.is_troubled()) || self.rx.is_short()
    }

    /// Keeps at most so many pages of each window; what is in both then.
    pub(super) fn resize(&mut self, most: u32) -> Option<SourceLevels> {
        let mut sum = SourceLevels::default();
        for pages in [self.tx.window()?, self.rx.window()?] {
            pages.resize(most);
            sum.add(pages.levels());
        }
        Some(sum)
    }

    pub(super) fn arm(&mut self) -> Result<bool, Fault> {
        if self.rx.is_short() {
            self.complete()?;
        }
        // Both, whatever the first says.
        let (received, room) = (self.rx.arm()?, self.tx.arm()?);
        Ok(received || room)
    }

    pub(super) fn clear_events(&self) -> Result<(), Fault> {
        self.channels.clear().map_err(channel_fault(&self.rules))
    }
}
