//! Ports of a worker: adds and removes them.

use ringfence_frame::port::Port;

use super::Dataplane;
use super::handle::{AddPortError, DataplaneStats, PortEntry, PortId, PortStats};
use super::slot::Slot;
use crate::forwarding::{AttachError, Fabric, PORTS_MAX, PortIndex, PortPolicy};

impl Dataplane {
    /// Adds this plane's part of a port, if it has one; all planes know of all ports.
    pub(super) fn add(
        &mut self,
        port: Option<Box<dyn Port>>,
        parts: usize,
        entry: Option<PortEntry>,
        policy: PortPolicy,
        name: String,
    ) -> Result<PortEntry, AddPortError> {
        let full = AttachError::Full { limit: PORTS_MAX };
        let entry =
            entry.unwrap_or_else(|| PortEntry { id: PortId(self.next_id), place: self.free() });
        let PortEntry { id, place } = entry;
        if place >= PORTS_MAX {
            return Err(full.into());
        }
        let index = PortIndex(u16::try_from(place).map_err(|_| full)?);
        if self.slots.len() <= place {
            self.slots.resize_with(place + 1, || None);
        }
        let join = policy.join;
        self.fabric.attach(index, policy)?;
        if let Some(port) = port {
            let mut slot = Slot::new(id, name, port, place as u64);
            slot.joins = join && matches!(self.fabric, Fabric::Switch(_));
            if let Err(error) = slot.watch(&self.epoll) {
                slot.unwatch(&self.epoll);
                self.fabric.detach(index);
                return Err(error.into());
            }
            self.slots[place] = Some(slot);
        }
        if let Some(relay) = &mut self.relay {
            relay.note(place, id, parts);
        }
        self.next_id = id.0 + 1;
        // What it already has is found by the round that follows.
        Ok(entry)
    }

    /// The first place that no port has.
    fn free(&self) -> usize {
        let known = |place| self.relay.as_ref().is_some_and(|relay| relay.is_known(place));
        let mut places = 0..self.slots.len();
        let free = places.find(|&place| self.slots[place].is_none() && !known(place));
        free.unwrap_or(self.slots.len())
    }

    pub(super) fn remove(&mut self, id: PortId) -> Option<Box<dyn Port>> {
        let seated = |slot: &Option<Slot>| slot.as_ref().is_some_and(|slot| slot.id == id);
        let known = self.relay.as_ref().and_then(|relay| relay.place(id));
        let place = known.or_else(|| self.slots.iter().position(seated))?;
        let slot = self.take(place);
        self.forget(place);
        Some(slot?.port)
    }

    /// Takes a port out; nothing refers to it afterwards.
    pub(super) fn take(&mut self, place: usize) -> Option<Slot> {
        let mut slot = self.slots[place].take()?;
        slot.unwatch(&self.epoll);
        Some(slot)
    }

    /// Another port may have the place.
    pub(super) fn forget(&mut self, place: usize) {
        if let Ok(index) = u16::try_from(place) {
            self.fabric.detach(PortIndex(index));
        }
        if let Some(relay) = &mut self.relay {
            relay.forget(place);
        }
    }

    /// The parts of the port at that place.
    pub(super) fn parts(&self, place: usize) -> usize {
        self.relay.as_ref().map_or(1, |relay| relay.parts(place))
    }

    pub(super) fn stats(&self) -> DataplaneStats {
        let ports = self.slots.iter().flatten().map(|slot| PortStats {
            id: slot.id,
            name: slot.name.clone(),
            counters: slot.port.counters().named(),
        });
        // Where there are no devices of several queues there is nothing to tell.
        let relay = self.relay.iter().filter(|relay| relay.is_used());
        let relay = relay.map(|relay| PortStats {
            id: PortId::RELAY,
            name: "relay".to_owned(),
            counters: relay.counters.named(),
        });
        DataplaneStats { ports: ports.chain(relay).collect(), addresses: self.fabric.addresses() }
    }
}
