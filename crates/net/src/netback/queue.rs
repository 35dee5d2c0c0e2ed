//! Backend queue of a vif: its two rings, its staging table and its event channels.

use std::sync::Arc;

use ringfence_access::staging::StagingTable;
use ringfence_access::{Mode, PageAccess};
use ringfence_platform::{Channel, Grantee};
use ringfence_ring::{BackRing, NETIF_RX, NETIF_TX, ResumeError, RingPages};

use super::policy::GuestPolicy;
use super::{QueueParts, QueueRecords, rx, tx};
use crate::commands::{VifCommand, VifReply};
use crate::features::VifFeatures;
use crate::queues::{QueueChannels, channel_fault};
use crate::rules::RuleCounters;
use ringfence_frame::batch::Batch;
use ringfence_frame::commands::{PortCommand, PortReply};
use ringfence_frame::counters::{PortCounters, PortLevels};
use ringfence_frame::port::{Fault, Received, Transmitted};

/// Features and counters that the queues of a vif share.
#[derive(Clone, Copy)]
pub(super) struct Shared<'a> {
    pub(super) features: VifFeatures,
    pub(super) rules: &'a Arc<RuleCounters>,
    pub(super) counters: &'a Arc<PortCounters>,
}

pub(super) struct BackendQueue<G, C> {
    tx: tx::BackendTx<G>,
    pub(super) rx: rx::BackendRx<G>,
    staging: StagingTable,
    pub(super) channels: QueueChannels<C>,
    pub(super) rules: Arc<RuleCounters>,
}

/// Backend ends of both rings.
struct Rings {
    tx: BackRing<RingPages>,
    rx: BackRing<RingPages>,
}

impl<G: Grantee, C: Channel> BackendQueue<G, C> {
    pub(super) fn new(parts: QueueParts<G, C>, mode: Mode, shared: Shared<'_>) -> Self {
        let rings = match parts.records.clone() {
            Some(QueueRecords { tx, rx }) => Rings {
                tx: BackRing::attach_recorded(parts.tx_ring.clone(), tx, NETIF_TX),
                rx: BackRing::attach_recorded(parts.rx_ring.clone(), rx, NETIF_RX),
            },
            None => Rings {
                tx: BackRing::attach(parts.tx_ring.clone(), NETIF_TX),
                rx: BackRing::attach(parts.rx_ring.clone(), NETIF_RX),
            },
        };
        Self::with_rings(parts, rings, mode, shared)
    }

    pub(super) fn adopt(
        parts: QueueParts<G, C>,
        mode: Mode,
        shared: Shared<'_>,
    ) -> Result<Self, Fault> {
        let impossible = |why: ResumeError| {
            shared.rules.count("adopted_ring_index");
            Fault::misbehaved(why)
        };
        let resume = |ring: &RingPages, record: Option<RingPages>, layout| match record {
            Some(record) => BackRing::resume(ring.clone(), record, layout),
            None => {
                let ring = BackRing::attach(ring.clone(), layout);
                ring.unconsumed()?;
                Ok(ring)
            }
        };
        let records = parts.records.clone();
        let (tx, rx) = records.map_or((None, None), |QueueRecords { tx, rx }| (Some(tx), Some(rx)));
        let rings = Rings {
            tx: resume(&parts.tx_ring, tx, NETIF_TX).map_err(impossible)?,
            rx: resume(&parts.rx_ring, rx, NETIF_RX).map_err(impossible)?,
        };
        Ok(Self::with_rings(parts, rings, mode, shared))
    }

    fn with_rings(
        parts: QueueParts<G, C>,
        rings: Rings,
        mode: Mode,
        Shared { features, rules, counters }: Shared<'_>,
    ) -> Self {
        BackendQueue {
            tx: tx::BackendTx::new(
                rings.tx,
                PageAccess::new(parts.tx_pages, mode).with_window(parts.windows.tx),
                features.own,
                Arc::clone(rules),
                Arc::clone(counters),
            ),
            rx: rx::BackendRx::new(
                rings.rx,
                PageAccess::new(parts.rx_pages, mode).with_window(parts.windows.rx),
                Arc::clone(rules),
                Arc::clone(counters),
            ),
            staging: StagingTable::new(),
            channels: parts.channels,
            rules: Arc::clone(rules),
        }
    }

    /// Replaces the port counters of both rings.
    pub(super) fn count_in(&mut self, counters: &Arc<PortCounters>) {
        self.tx.count_in(Arc::clone(counters));
        self.rx.count_in(Arc::clone(counters));
    }

    /// Returns the levels of both rings. An impossible index counts as an empty ring: the next poll reports it.
    pub(super) fn levels(&self) -> PortLevels {
        PortLevels {
            requests_waiting: self.tx.waiting().into(),
            buffers_posted: self.rx.posted().into(),
        }
    }

    fn notify_channel(&self, channel: &C) -> Result<(), Fault> {
        channel.notify().map_err(channel_fault(&self.rules))
    }

    /// Notifies the frontend on both channels.
    pub(super) fn notify(&self) -> Result<(), Fault> {
        self.notify_channel(&self.channels.tx)?;
        self.channels.rx.as_ref().map_or(Ok(()), |rx| self.notify_channel(rx))
    }

    pub(super) fn receive(
        &mut self,
        batch: &mut Batch,
        budget: usize,
        policy: &mut GuestPolicy,
    ) -> Result<Received, Fault> {
        self.tx.receive(batch, budget, policy, &self.staging)
    }

    pub(super) fn complete(&mut self) -> Result<(), Fault> {
        if self.tx.answer() { self.notify_channel(&self.channels.tx) } else { Ok(()) }
    }

    pub(super) fn transmit(&mut self, batch: &Batch, frames: &[u32]) -> Result<Transmitted, Fault> {
        self.rx.transmit(batch, frames, &self.staging)
    }

    pub(super) fn flush(&mut self) -> Result<(), Fault> {
        if self.rx.publish() { self.notify_channel(self.channels.rx()) } else { Ok(()) }
    }

    /// Requests events: for new packets if `receiving`, and for new buffers if a sender waits for them.
    pub(super) fn arm(&mut self, receiving: bool) -> Result<bool, Fault> {
        // Both rings must be armed, regardless of the first result.
        let waiting = receiving && self.tx.arm()?;
        let room = self.rx.arm()?;
        Ok(waiting || room)
    }

    /// Executes a command for this queue. The result is [`PortReply::Unsupported`] for a frontend's commands.
    pub(super) fn execute(&mut self, command: PortCommand) -> PortReply {
        if let PortCommand::Hash(config) = command {
            self.rx.hash_by(config);
            return PortReply::Hashing;
        }
        match VifCommand::of(command) {
            Some(VifCommand::Stage(pages)) => match self.staging.add(pages) {
                Ok(()) => VifReply::Staged.into(),
                Err((pages, why)) => VifReply::NotStaged(pages, why).into(),
            },
            Some(VifCommand::Unstage(grefs)) => {
                let taken = grefs.into_iter().filter_map(|gref| self.staging.take(gref));
                VifReply::Unstaged(taken.collect()).into()
            }
            Some(
                VifCommand::SendStaged(_)
                | VifCommand::Resize(_)
                | VifCommand::ReadLevels
                | VifCommand::ReadUnanswered,
            )
            | None => PortReply::Unsupported,
        }
    }
}
