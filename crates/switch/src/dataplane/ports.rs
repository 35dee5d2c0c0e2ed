//! Ports of a worker: adds and removes them, and reports their counters.

use ringfence_frame::counters::PortLevels;
use ringfence_frame::port::Port;

use super::DataplaneWorker;
use super::handle::{AddPortError, DataplaneStats, PortId, PortKey, PortStats};
use super::port_entry::PortEntry;
use crate::forwarding::{AttachError, Fabric, PORTS_MAX, PortIndex, PortPolicy};

impl DataplaneWorker {
    /// Adds a port; `port` is this worker's part. A worker registers every port, even if it has no part.
    /// Worker 0 gets no `key` and allocates one.
    pub(super) fn add(
        &mut self,
        port: Option<Box<dyn Port>>,
        parts: usize,
        key: Option<PortKey>,
        policy: PortPolicy,
        name: String,
    ) -> Result<PortKey, AddPortError> {
        let full = AttachError::Full { limit: PORTS_MAX };
        let key =
            key.unwrap_or_else(|| PortKey { id: PortId(self.next_id), index: self.unused_index() });
        let PortKey { id, index } = key;
        if index >= PORTS_MAX {
            return Err(full.into());
        }
        let port_index = PortIndex(u16::try_from(index).map_err(|_| full)?);
        if self.ports.len() <= index {
            self.ports.resize_with(index + 1, || None);
        }
        let joins = match self.fabric {
            Fabric::Switch(_) => policy.join,
            Fabric::Patch(_) => policy.join_in_patch,
        };
        self.fabric.attach(port_index, policy)?;
        if let Some(port) = port {
            let mut entry = PortEntry::new(id, name, port, index as u64);
            entry.joins = joins;
            if let Err(error) = entry.watch(&self.epoll) {
                entry.unwatch(&self.epoll);
                self.fabric.detach(port_index);
                return Err(error.into());
            }
            self.ports[index] = Some(entry);
        }
        if let Some(peers) = &mut self.peers {
            peers.register(index, id, parts);
        }
        self.next_id = id.0 + 1;
        // The next round finds frames that the port has already.
        Ok(key)
    }

    /// Returns the first index without a port.
    fn unused_index(&self) -> usize {
        let registered = |index| self.peers.as_ref().is_some_and(|peers| peers.has_port(index));
        let mut indices = 0..self.ports.len();
        let unused = indices.find(|&index| self.ports[index].is_none() && !registered(index));
        unused.unwrap_or(self.ports.len())
    }

    /// Removes a port. Returns this worker's part, if it has one.
    pub(super) fn remove(&mut self, id: PortId) -> Option<Box<dyn Port>> {
        let has_id = |entry: &Option<PortEntry>| entry.as_ref().is_some_and(|entry| entry.id == id);
        let registered = self.peers.as_ref().and_then(|peers| peers.index_of(id));
        let index = registered.or_else(|| self.ports.iter().position(has_id))?;
        let entry = self.take_entry(index);
        self.free_index(index);
        Some(entry?.port)
    }

    /// Removes the port entry at `index` and stops watching the port's files.
    pub(super) fn take_entry(&mut self, index: usize) -> Option<PortEntry> {
        let mut entry = self.ports[index].take()?;
        entry.unwatch(&self.epoll);
        Some(entry)
    }

    /// Detaches the port from the fabric, so another port may get the index.
    pub(super) fn free_index(&mut self, index: usize) {
        if let Ok(port_index) = u16::try_from(index) {
            self.fabric.detach(PortIndex(port_index));
        }
        if let Some(peers) = &mut self.peers {
            peers.unregister(index);
        }
    }

    /// Returns the number of parts of the port at `index`.
    pub(super) fn parts(&self, index: usize) -> usize {
        self.peers.as_ref().map_or(1, |peers| peers.parts(index))
    }

    /// Returns the counters of one port, or of all ports and the handoff.
    pub(super) fn stats(&self, only: Option<PortId>) -> DataplaneStats {
        let is_wanted = |id| only.is_none_or(|only| only == id);
        let ports = self.ports.iter().flatten().filter(|entry| is_wanted(entry.id));
        let ports = ports.map(|entry| PortStats {
            id: entry.id,
            name: entry.name.clone(),
            counters: entry.port.counters().named(),
            levels: entry.port.levels(),
        });
        // The handoff is reported only after workers exchanged frames.
        let peers = self.peers.iter().filter(|peers| peers.is_used() && is_wanted(PortId::HANDOFF));
        let peers = peers.map(|peers| PortStats {
            id: PortId::HANDOFF,
            name: "relay".to_owned(),
            counters: peers.counters.named(),
            levels: PortLevels::default(),
        });
        DataplaneStats { ports: ports.chain(peers).collect(), addresses: self.fabric.addresses() }
    }
}
