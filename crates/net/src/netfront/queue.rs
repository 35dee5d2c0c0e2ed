//! One queue of a vif: its two rings and its channels.

use std::sync::Arc;

use ringfence_platform::Channel;
use ringfence_ring::{FrontRing, NETIF_RX, NETIF_TX};

use super::{QueueMemory, ring, rx, tx};
use crate::batch::Batch;
use crate::counters::PortCounters;
use crate::features::VifFeatures;
use crate::netback::{QueueChannels, channel_fault};
use crate::port::{Fault, Received, Transmitted};
use crate::rules::RuleCounters;

pub(super) struct Queue<C> {
    tx: tx::ToBackend,
    rx: rx::FromBackend,
    pub(super) channels: QueueChannels<C>,
    rules: Arc<RuleCounters>,
}

impl<C: Channel> Queue<C> {
    pub(super) fn new(
        memory: &QueueMemory,
        channels: QueueChannels<C>,
        features: VifFeatures,
        rules: &Arc<RuleCounters>,
        counters: &Arc<PortCounters>,
    ) -> Result<Queue<C>, Fault> {
        let (tx_ring, rx_ring) = (ring(memory.tx_ring.memory())?, ring(memory.rx_ring.memory())?);
        let tx = tx::ToBackend::new(
            FrontRing::init(tx_ring, NETIF_TX),
            (&memory.tx_pages, &memory.head_pages),
            Arc::clone(rules),
            Arc::clone(counters),
        );
        let mut rx = rx::FromBackend::new(
            FrontRing::init(rx_ring, NETIF_RX),
            &memory.rx_pages,
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
        let mut received = self.rx.receive(batch, budget)?;
        received.work += reaped;
        Ok(received)
    }

    pub(super) fn stage(&mut self, staging: tx::TxStaging) {
        self.tx.stage(staging);
    }

    pub(super) fn complete(&mut self) -> Result<(), Fault> {
        if self.rx.post() {
            self.channels.rx().notify().map_err(channel_fault(&self.rules))?;
        }
        Ok(())
    }

    pub(super) fn transmit(&mut self, batch: &Batch, frames: &[u32]) -> Result<Transmitted, Fault> {
        self.tx.transmit(batch, frames)
    }

    pub(super) fn flush(&mut self) -> Result<(), Fault> {
        if self.tx.publish() {
            self.channels.tx.notify().map_err(channel_fault(&self.rules))?;
        }
        Ok(())
    }

    pub(super) fn room(&mut self, frame_max: usize) -> Result<usize, Fault> {
        self.tx.room(frame_max)
    }

    pub(super) fn slots(&mut self) -> Result<usize, Fault> {
        self.tx.slots()
    }

    pub(super) fn await_slots(&mut self) {
        self.tx.await_slots();
    }

    pub(super) fn arm(&mut self) -> Result<bool, Fault> {
        // Both, whatever the first says.
        let (received, room) = (self.rx.arm()?, self.tx.arm()?);
        Ok(received || room)
    }

    pub(super) fn clear_events(&self) -> Result<(), Fault> {
        self.channels.clear().map_err(channel_fault(&self.rules))
    }
}
