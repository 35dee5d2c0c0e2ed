//! The backend's end of a vif queue, as a port.
//!
//! # Theory of operation
//!
//! *From the guest* (`tx`): slots are fetched once each and parsed into packets; the fragments of
//! all packets of a round are brought into reach in one batch ([`Reach::read`]); a packet whose
//! fragments all arrived becomes a frame, any other is answered with ERROR. When the frames were
//! delivered, all slots are answered in ring order with one publication.
//!
//! *To the guest* (`rx`): each frame takes as many posted buffers as it has pages; the bytes of
//! all frames of a call are written in one batch ([`Reach::begin_write`]); the responses are
//! published once a round, in the slots of their requests.
//!
//! A packet that breaks a rule costs itself. What cannot be a packet any more (a producer index
//! beyond the ring, a chain without an end) costs the device.

mod police;
mod rx;
mod tx;

pub use police::{PoliceConfig, STALL_DEFAULT};
pub(crate) use rx::spread;

use core::time::Duration;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use ringfence_grants::staging::StagingTable;
use ringfence_grants::{Mode, Reach};
use ringfence_platform::{Channel, ChannelError, Grantee};
use ringfence_ring::{BackRing, NETIF_RX, NETIF_TX, ResumeError, RingPages};

use crate::batch::Batch;
use crate::counters::{DropReason, PortCounters};
use crate::features::VifFeatures;
use crate::orders::{PortOrder, PortReply};
use crate::port::{Fault, Port, PortCapabilities, Received, Transmitted};
use crate::rules::RuleCounters;
use police::Police;

/// One or two event channels of a queue.
pub struct QueueChannels<C> {
    /// For the tx ring, or for both.
    pub tx: C,
    /// For the rx ring, when it has its own (`feature-split-event-channels`).
    pub rx: Option<C>,
}

impl<C: Channel> QueueChannels<C> {
    fn rx(&self) -> &C {
        self.rx.as_ref().unwrap_or(&self.tx)
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
    /// Pages of this side's own that outlive the process, for whoever takes the queue over.
    pub records: Option<QueueRecords>,
}

/// What a backend keeps of a queue so that another process can go on with it
/// ([`BackRing::attach_recorded`]).
#[derive(Clone, Debug)]
pub struct QueueRecords {
    /// Of the tx ring.
    pub tx: RingPages,
    /// Of the rx ring.
    pub rx: RingPages,
}

/// A backend queue.
pub struct NetbackPort<G, C> {
    tx: tx::FromGuest<G>,
    rx: rx::ToGuest<G>,
    staging: StagingTable,
    channels: QueueChannels<C>,
    features: VifFeatures,
    police: Police,
    rules: Arc<RuleCounters>,
    counters: Arc<PortCounters>,
}

impl<G: Grantee, C: Channel> NetbackPort<G, C> {
    /// Takes up a queue whose frontend has just connected.
    pub fn new(
        parts: QueueParts<G, C>,
        mode: Mode,
        features: VifFeatures,
        rules: &Arc<RuleCounters>,
    ) -> Self {
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
        Self::with_rings(parts, rings, mode, features, rules)
    }

    /// Takes over a queue that a backend which is no more has served: finishes what that one had
    /// decided to publish (if it kept records), goes on with the first request that has no answer,
    /// and notifies the frontend once, as the one before may have died just before it did.
    ///
    /// Frames that it had passed on without answering are passed on again.
    ///
    /// # Errors
    ///
    /// A [`Fault`] when the shared indices are impossible, or the channels of no use.
    pub fn adopt(
        parts: QueueParts<G, C>,
        mode: Mode,
        features: VifFeatures,
        rules: &Arc<RuleCounters>,
    ) -> Result<Self, Fault> {
        let impossible = |why: ResumeError| {
            rules.count("adopted_ring_index");
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
        let port = Self::with_rings(parts, rings, mode, features, rules);
        port.channels.tx.notify().map_err(channel_fault(rules))?;
        if let Some(rx) = &port.channels.rx {
            rx.notify().map_err(channel_fault(rules))?;
        }
        Ok(port)
    }

    fn with_rings(
        parts: QueueParts<G, C>,
        rings: Rings,
        mode: Mode,
        features: VifFeatures,
        rules: &Arc<RuleCounters>,
    ) -> Self {
        let counters = Arc::new(PortCounters::default());
        NetbackPort {
            tx: tx::FromGuest::new(
                rings.tx,
                Reach::new(parts.tx_pages, mode),
                features.own,
                Arc::clone(rules),
                Arc::clone(&counters),
            ),
            rx: rx::ToGuest::new(
                rings.rx,
                Reach::new(parts.rx_pages, mode),
                Arc::clone(rules),
                Arc::clone(&counters),
            ),
            staging: StagingTable::new(),
            channels: parts.channels,
            features,
            police: Police::new(PoliceConfig::default(), rules, &counters),
            rules: Arc::clone(rules),
            counters,
        }
    }

    /// The same port, which enforces this.
    #[must_use]
    pub fn policed(mut self, config: PoliceConfig) -> Self {
        self.police = Police::new(config, &self.rules, &self.counters);
        self
    }
}

/// The backend's ends of both rings.
struct Rings {
    tx: BackRing<RingPages>,
    rx: BackRing<RingPages>,
}

impl<G: Grantee, C: Channel> Port for NetbackPort<G, C> {
    fn receive(&mut self, batch: &mut Batch, budget: usize) -> Result<Received, Fault> {
        if self.police.holds_up() {
            return Ok(Received::default());
        }
        self.tx.receive(batch, budget, &mut self.police, &self.staging)
    }

    fn complete(&mut self) -> Result<(), Fault> {
        if self.tx.answer() {
            self.channels.tx.notify().map_err(channel_fault(&self.rules))?;
        }
        Ok(())
    }

    fn transmit(&mut self, batch: &Batch, frames: &[u32]) -> Result<Transmitted, Fault> {
        let longest = self.features.capabilities().longest();
        if self.police.is_stalled() {
            if !self.rx.fits(longest)? {
                self.counters.dropped_many(DropReason::LinkDown, frames.len() as u64);
                return Ok(Transmitted { sent: 0, dropped: frames.len() });
            }
            self.police.fits();
        }
        let wanted = self.police.wanted(batch, frames);
        let filtered = frames.len() - wanted.len();
        let done = self.rx.transmit(batch, wanted, &self.staging)?;
        if done.sent > 0 {
            self.police.taken();
        } else if done.dropped > 0 && !self.rx.fits(longest)? {
            self.police.refused();
        }
        Ok(Transmitted { dropped: done.dropped + filtered, ..done })
    }

    fn flush(&mut self) -> Result<(), Fault> {
        if self.rx.publish() {
            self.channels.rx().notify().map_err(channel_fault(&self.rules))?;
        }
        Ok(())
    }

    fn room(&mut self) -> Result<usize, Fault> {
        let room = self.rx.room(self.features.capabilities().longest())?;
        if room > 0 {
            self.police.fits();
        } else {
            self.police.refused();
        }
        // Who sends to a guest that takes nothing is not held up for ever: what it sends is dropped.
        Ok(if self.police.is_stalled() { usize::MAX } else { room })
    }

    fn slots(&mut self) -> Result<usize, Fault> {
        if self.rx.fits(self.features.capabilities().longest())? {
            self.police.fits();
        }
        // Who sends to a guest that takes nothing is not held up for ever: what it sends is dropped.
        if self.police.is_stalled() { Ok(usize::MAX) } else { self.rx.slots() }
    }

    fn await_slots(&mut self, slots: usize) {
        self.rx.await_slots(slots);
        self.police.refused();
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        if self.police.is_overdue() {
            match self.rx.fits(self.features.capabilities().longest())? {
                true => self.police.fits(),
                false => self.police.refused(),
            }
        }
        // Both, whatever the first says: each asks for an event of its own.
        let waiting = !self.police.holds_up() && self.tx.arm()?;
        let room = self.rx.arm()?;
        Ok(waiting || room)
    }

    fn deadline(&self) -> Option<Duration> {
        self.police.deadline()
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

    fn obey(&mut self, order: PortOrder) -> PortReply {
        match order {
            PortOrder::Stage(pages) => match self.staging.add(pages) {
                Ok(()) => PortReply::Staged,
                Err((pages, why)) => PortReply::NotStaged(pages, why),
            },
            PortOrder::Unstage(grefs) => {
                let taken = grefs.into_iter().filter_map(|gref| self.staging.take(gref));
                PortReply::Unstaged(taken.collect())
            }
            PortOrder::Hash(config) => {
                self.rx.hash_by(config);
                PortReply::Hashing
            }
        }
    }

    fn capabilities(&self) -> PortCapabilities {
        self.features.capabilities()
    }

    fn counters(&self) -> &Arc<PortCounters> {
        &self.counters
    }
}
