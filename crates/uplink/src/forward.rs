//! Forwarded TCP ports: accepts connections of the host's listening sockets and opens them at the guest.
//!
//! The guest sees the client's real address. A listening socket of the guest's network may lead to the host instead
//! ([`Destination`]). Ports can be added and removed while the engine runs. A removed
//! port accepts nothing more; its connections stay. Clients on the host's loopback may be relayed
//! ([`crate::relay`]). Forwarded UDP ports are part of [`crate::udp`].

use core::net::SocketAddr;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

use crate::context::Context;
use crate::host::listen::Listener;
use crate::host::{Owner, OwnerKind, Ready};
use crate::relay::Relays;
use crate::share::Handoff;
use crate::tcp::Tcp;

/// Maximum of connections accepted in one round.
const ACCEPTS: usize = 64;

/// Forwarded port of a running engine, as [`Uplink::remove_forward`](crate::Uplink::remove_forward) takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ForwardId(pub(crate) Owner);

/// End of the connections that a forwarded port accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    Guest(SocketAddr),
    /// Address of the host, for clients in the guest's network.
    Host(SocketAddr),
}

/// Connection that a listening socket has accepted.
#[derive(Debug)]
pub struct Accepted {
    /// Socket of the connection.
    pub file: OwnedFd,
    /// The host's address of the client.
    pub client: SocketAddr,
    /// Address of the guest that the connection leads to.
    pub guest: SocketAddr,
}

/// Table whose entries are reused. Generations tell an entry from an earlier one at the same index. An index has 16
/// bits, so that a flow's key can hold it in the place of a port.
pub(crate) struct Reused<T> {
    entries: Vec<(u32, Option<T>)>,
}

impl<T> Default for Reused<T> {
    fn default() -> Reused<T> {
        Reused { entries: Vec::new() }
    }
}

impl<T> Reused<T> {
    /// Inserts the value that `make` creates for the owner of the entry.
    ///
    /// # Errors
    ///
    /// Returns the error of `make`, and `EMFILE` if the table is full.
    pub(crate) fn insert(
        &mut self,
        kind: OwnerKind,
        make: impl FnOnce(Owner) -> Result<T, Errno>,
    ) -> Result<ForwardId, Errno> {
        let free = self.entries.iter().position(|(_, value)| value.is_none());
        let at = free.unwrap_or(self.entries.len());
        let last = self.entries.get(at).map_or(0, |(generation, _)| *generation);
        let generation = last.wrapping_add(1) & Owner::GENERATION_MASK;
        let index = u16::try_from(at).map_err(|_| Errno::MFILE)?.into();
        let owner = Owner { kind, index, generation };
        let value = Some(make(owner)?);
        match self.entries.get_mut(at) {
            Some(entry) => *entry = (generation, value),
            None => self.entries.push((generation, value)),
        }
        Ok(ForwardId(owner))
    }

    /// Removes an entry. Returns its index and value.
    pub(crate) fn remove(&mut self, id: ForwardId) -> Option<(usize, T)> {
        let index = self.index_of(id.0)?;
        Some((index, self.entries.get_mut(index)?.1.take()?))
    }

    /// Removes all entries. Their ids stay invalid.
    pub(crate) fn clear(&mut self) {
        self.entries.iter_mut().for_each(|(_, value)| *value = None);
    }

    /// Returns the index of an owner's entry, unless it was removed.
    pub(crate) fn index_of(&self, owner: Owner) -> Option<usize> {
        let index = usize::try_from(owner.index).ok()?;
        let (generation, value) = self.entries.get(index)?;
        (value.is_some() && *generation == owner.generation).then_some(index)
    }

    /// Returns the id of the entry at an index, if there is one.
    pub(crate) fn id_of(&self, kind: OwnerKind, index: usize) -> Option<ForwardId> {
        let (generation, value) = self.entries.get(index)?;
        value.as_ref()?;
        let index = u32::try_from(index).ok()?;
        Some(ForwardId(Owner { kind, index, generation: *generation }))
    }

    pub(crate) fn get(&self, index: usize) -> Option<&T> {
        self.entries.get(index)?.1.as_ref()
    }

    pub(crate) fn get_mut(&mut self, index: usize) -> Option<&mut T> {
        self.entries.get_mut(index)?.1.as_mut()
    }

    /// Returns the indices of the entries.
    pub(crate) fn indices(&self) -> Vec<usize> {
        (0..self.entries.len()).filter(|&index| self.get(index).is_some()).collect()
    }

    /// Iterates over the values.
    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().filter_map(|(_, value)| value.as_ref())
    }
}

/// Forwarded port: a listening socket and its destination.
struct ForwardedPort {
    listener: Box<dyn Listener>,
    to: Destination,
    queued: bool,
}

/// All forwarded TCP ports.
#[derive(Default)]
pub(crate) struct Forwards {
    ports: Reused<ForwardedPort>,
    waiting: VecDeque<usize>,
}

impl Forwards {
    /// Forwards connections of a listening socket.
    pub(crate) fn add(
        &mut self,
        socket: OwnedFd,
        to: Destination,
        context: &mut Context<'_>,
    ) -> Result<ForwardId, Errno> {
        self.ports.insert(OwnerKind::TcpListener, |owner| {
            let listener = context.host.listen(owner, socket)?;
            Ok(ForwardedPort { listener, to, queued: false })
        })
    }

    /// Closes a listening socket. Connections that it has accepted stay.
    pub(crate) fn remove(&mut self, id: ForwardId) {
        if let Some((removed, _)) = self.ports.remove(id) {
            self.waiting.retain(|index| *index != removed);
        }
    }

    /// Handles an event of a listening socket.
    pub(crate) fn ready(&mut self, ready: Ready) {
        let Some(index) = self.ports.index_of(ready.owner) else { return };
        if let Some(port) = self.ports.get_mut(index)
            && !port.queued
        {
            port.queued = true;
            self.waiting.push_back(index);
        }
    }

    /// Accepts connections. Those of another engine are appended to `handoffs`. Returns `true` if more may be
    /// waiting.
    pub(crate) fn accept(
        &mut self,
        tcp: &mut Tcp,
        relays: &mut Relays,
        handoffs: &mut Vec<(usize, Handoff)>,
        context: &mut Context<'_>,
    ) -> bool {
        for _ in 0..ACCEPTS {
            let Some(&index) = self.waiting.front() else { return false };
            let Some(port) = self.ports.get_mut(index) else { return false };
            if matches!(port.to, Destination::Guest(guest) if relays.is_starving(guest.is_ipv4())) {
                return false;
            }
            match (port.listener.accept(), port.to) {
                (Ok((file, client)), Destination::Guest(guest)) => {
                    let accepted = Accepted { file, client, guest };
                    if let Err(accepted) = relays.start(accepted, context) {
                        open(accepted, tcp, handoffs, context);
                    }
                }
                (Ok((file, _)), Destination::Host(to)) => relays.start_to_host(file, to, context),
                // The connection was aborted before it was accepted.
                (Err(Errno::CONNABORTED | Errno::INTR), _) => {}
                // None left, or no descriptor: the next connection raises the next event.
                (Err(_), _) => {
                    port.queued = false;
                    self.waiting.pop_front();
                }
            }
        }
        !self.waiting.is_empty()
    }
}

/// Opens an accepted connection at the guest, or hands it over to the engine that owns its flow.
pub(crate) fn open(
    accepted: Accepted,
    tcp: &mut Tcp,
    handoffs: &mut Vec<(usize, Handoff)>,
    context: &mut Context<'_>,
) {
    let Some(mac) = context.config.guest.mac else { return };
    let Accepted { file, client, guest } = accepted;
    let client = context.config.inward(client);
    let guest = context.config.guest.reached_at(guest);
    match context.config.share.of_flow(guest, client) {
        own if own == context.config.share.index => tcp.accept(file, client, guest, mac, context),
        engine => handoffs.push((engine, Handoff::Connection { file, client, guest })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_reused_after_removal_has_another_generation() {
        let mut table = Reused::default();
        let add = |table: &mut Reused<u8>, value| {
            table.insert(OwnerKind::TcpListener, |_| Ok(value)).unwrap()
        };
        let (first, second) = (add(&mut table, 1), add(&mut table, 2));
        assert_eq!(table.remove(first), Some((0, 1)));
        assert_eq!(table.remove(first), None);
        let third = add(&mut table, 3);
        assert_eq!((third.0.index, second.0.index), (first.0.index, 1));
        // An event of the removed entry reaches nobody.
        assert_eq!(table.index_of(first.0), None);
        assert_eq!(table.index_of(third.0), Some(0));
        assert_eq!(table.values().copied().collect::<Vec<_>>(), [3, 2]);
    }

    #[test]
    fn entry_beyond_the_largest_16_bit_index_is_refused() {
        let entries = vec![(0, Some(1u8)); usize::from(u16::MAX)];
        let mut table = Reused { entries };
        let last = table.insert(OwnerKind::RelayListener, |_| Ok(2)).unwrap();
        assert_eq!(last.0.index, u32::from(u16::MAX));
        let beyond = table.insert(OwnerKind::RelayListener, |_| Ok(3));
        assert_eq!(beyond, Err(Errno::MFILE));
        assert_eq!(table.values().count(), 1 << 16);
    }

    #[test]
    fn value_that_is_not_made_leaves_no_entry() {
        let mut table = Reused::<u8>::default();
        let made = table.insert(OwnerKind::UdpListener, |_| Err(Errno::MFILE));
        assert_eq!(made, Err(Errno::MFILE));
        assert_eq!(table.values().count(), 0);
    }
}
