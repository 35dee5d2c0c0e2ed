//! Exchange with the other workers: frames handed over, and announcements of learned addresses.

use std::sync::Arc;

use ringfence_sys::clock::monotonic;

use super::DataplaneWorker;
use crate::forwarding::Fabric;

impl DataplaneWorker {
    /// Announces newly learned addresses to the other workers.
    pub(super) fn announce_addresses(&mut self) {
        if let (Some(peers), Fabric::Switch(switch)) = (&self.peers, &mut self.fabric) {
            peers.announce(switch.table_mut().announcements());
            switch.table_mut().clear_announcements();
        }
    }

    /// Reads the announcements of other workers and forwards up to one handoff batch from each of them.
    /// Returns `true` if there was a batch.
    pub(super) fn poll_workers(&mut self) -> bool {
        let now = self.now.as_secs();
        let Some(peers) = &mut self.peers else { return false };
        peers.sender_waits = false;
        let fabric = &mut self.fabric;
        peers.drain_mailbox(|(mac, port)| {
            if let Fabric::Switch(switch) = &mut *fabric {
                switch.table_mut().apply_announcement(mac, port, now);
            }
        });
        let mut worked = false;
        for worker in 0..peers.inbound.len() {
            worked |= self.poll_worker(worker);
        }
        worked
    }

    /// Forwards the oldest handoff batch of that worker, unless the worker is skipped for fairness.
    fn poll_worker(&mut self, worker: usize) -> bool {
        let Some(peers) = self.peers.as_mut().filter(|peers| peers.has_inbound(worker)) else {
            return false;
        };
        if !self.fairness.admits(&peers.inbound[worker].account) {
            return false;
        }
        let Some(mut handoff) = peers.dequeue(worker) else { return false };
        let counters = Arc::clone(&peers.counters);
        let work = handoff.targets.len();
        core::mem::swap(&mut self.batch, &mut handoff.batch);
        self.plan.clear();
        handoff.targets.iter().for_each(|(port, frame)| self.plan.add(*port, *frame));
        self.transmit_plan(None, &counters);
        core::mem::swap(&mut self.batch, &mut handoff.batch);
        let now = monotonic();
        let took = now.saturating_sub(self.charge_start);
        self.charge_start = now;
        if let Some(peers) = &mut self.peers {
            self.fairness.charge(&mut peers.inbound[worker].account, took, work);
            peers.return_batch(handoff);
        }
        true
    }
}
