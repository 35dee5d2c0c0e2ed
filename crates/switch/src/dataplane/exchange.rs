//! Exchange with the other workers: frames handed over, and announcements of learned addresses.

use std::sync::Arc;

use ringfence_sys::clock::monotonic;

use super::Dataplane;
use crate::forwarding::Fabric;

impl Dataplane {
    /// Announces learned addresses to the other workers.
    pub(super) fn tell_news(&mut self) {
        if let (Some(relay), Fabric::Switch(switch)) = (&self.relay, &mut self.fabric) {
            relay.tell(switch.table_mut().news());
            switch.table_mut().clear_news();
        }
    }

    /// Reads the announcements of other workers and forwards up to one handoff batch from each of them.
    /// Returns `true` if there was a batch.
    pub(super) fn take_in(&mut self) -> bool {
        let now = self.now.as_secs();
        let Some(relay) = &mut self.relay else { return false };
        relay.awaited = false;
        let fabric = &mut self.fabric;
        relay.collect(|(mac, port)| {
            if let Fabric::Switch(switch) = &mut *fabric {
                switch.table_mut().hear_of(mac, port, now);
            }
        });
        let mut worked = false;
        for plane in 0..relay.inbound.len() {
            worked |= self.take_from(plane);
        }
        worked
    }

    fn take_from(&mut self, plane: usize) -> bool {
        let Some(relay) = self.relay.as_mut().filter(|relay| relay.has_from(plane)) else {
            return false;
        };
        if !self.fairness.admits(&relay.inbound[plane].share) {
            return false;
        }
        let Some(mut parcel) = relay.next_from(plane) else { return false };
        let counters = Arc::clone(&relay.counters);
        let work = parcel.to.len();
        core::mem::swap(&mut self.batch, &mut parcel.batch);
        self.plan.clear();
        parcel.to.iter().for_each(|(port, frame)| self.plan.send(*port, *frame));
        self.hand_out(None, &counters);
        core::mem::swap(&mut self.batch, &mut parcel.batch);
        let now = monotonic();
        let took = now.saturating_sub(self.turned);
        self.turned = now;
        if let Some(relay) = &mut self.relay {
            self.fairness.charge(&mut relay.inbound[plane].share, took, work);
            relay.give_back(parcel);
        }
        true
    }
}
