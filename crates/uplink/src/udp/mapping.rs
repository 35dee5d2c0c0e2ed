//! Mappings: the host port by which datagrams of a guest's port leave.
//!
//! | the guest's port | host port |
//! |---|---|
//! | of a forwarded port | the forwarded port, by its socket |
//! | with one peer | the same number if it is free, by a socket that is connected to the peer |
//! | with several peers | that of the first peer: its socket is disconnected and shared |
//!
//! IPv6: the socket is replaced by an unconnected one with the same port, because Linux has no other way.
//!
//! So all peers of a port see the same one (RFC 4787, REQ-1), and the socket of a port with one peer stays connected,
//! which is cheaper. Datagrams of hosts that the guest has not addressed are dropped at a shared socket, too, address and
//! port compared. A mapping ends with its last association.
//!
//! Peers at the host itself, and at addresses that stand for others, such as a name server's, have a socket each. So has
//! every peer if the sockets of a host have a fixed source ([`DatagramHost::routes_freely`]).
//!
//! [`DatagramHost::routes_freely`]: crate::host::DatagramHost::routes_freely

use core::net::SocketAddr;

use rustix::io::Errno;

use super::{Listener, Route, Udp};
use crate::context::Context;
use crate::flow::{FlowId, FlowKey, Origin};
use crate::forward::ForwardId;
use crate::host::OwnerKind;
use crate::host::datagrams::Via;
use crate::packet::Marks;

/// Host port of a guest's port without a forwarded one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mapping {
    /// Socket of this association, the only one.
    Own(FlowId),
    Shared(ForwardId),
}

impl Udp {
    /// Opens the route of a new association of the guest.
    pub(super) fn open_route(
        &mut self,
        id: FlowId,
        key: &FlowKey,
        outward: SocketAddr,
        context: &mut Context<'_>,
    ) -> Result<Route, Errno> {
        let is_mapped = key.remote == outward && context.host.routes_freely(outward.ip());
        let via = Via { to: outward, from: None };
        if is_mapped && let Some(index) = self.forwarded_from(key.guest, outward) {
            return Ok(Route::Listener(index, via));
        }
        if is_mapped && let Some(index) = self.share_mapping(key.guest, context) {
            return Ok(Route::Listener(index, via));
        }
        let socket = context.host.open_udp(id.owner(OwnerKind::Udp), key.guest.port(), outward)?;
        if is_mapped {
            self.mappings.entry(key.guest).or_insert(Mapping::Own(id));
        }
        Ok(Route::Socket(socket))
    }

    /// Returns the socket of a forwarded port that leads to a port of the guest, if it can send to `outward`. One with the
    /// same number precedes others.
    fn forwarded_from(&self, guest: SocketAddr, outward: SocketAddr) -> Option<usize> {
        let indices = self.ports.get(&guest.port())?;
        let at = |index: usize| self.listeners.get(index).and_then(|listener| listener.at);
        let can_send = |index: &usize| {
            at(*index).is_some_and(|at| at.is_ipv4() == outward.is_ipv4() && !at.ip().is_loopback())
        };
        let rank = |index: &usize| at(*index).is_none_or(|at| at.port() != guest.port());
        indices.iter().copied().filter(can_send).min_by_key(rank)
    }

    /// Adds an association to the mapping of a guest's port. Returns the index of its socket, if there is one to share.
    fn share_mapping(&mut self, guest: SocketAddr, context: &mut Context<'_>) -> Option<usize> {
        let index = match *self.mappings.get(&guest)? {
            Mapping::Shared(id) => self.listeners.index_of(id.0)?,
            Mapping::Own(first) => self.disconnect(first, guest, context)?,
        };
        let users = self.listeners.get_mut(index)?.users.as_mut()?;
        *users += 1;
        Some(index)
    }

    /// Makes the socket of an association a shared one, with this association alone.
    fn disconnect(
        &mut self,
        first: FlowId,
        guest: SocketAddr,
        context: &mut Context<'_>,
    ) -> Option<usize> {
        self.flush_if(first, context);
        let flow = self.flows.get_mut(first)?;
        let Route::Socket(mut socket) = core::mem::replace(&mut flow.route, Route::Closed) else {
            return None;
        };
        let via = Via { to: flow.outward, from: None };
        let shared = self.listeners.insert(OwnerKind::UdpListener, |owner| {
            match context.host.share_udp(owner, &mut *socket) {
                Ok(()) => {
                    // The socket may have lost those of before.
                    let marks = Marks { hops: 0, ..Marks::default() };
                    let (at, users, queued) = (None, Some(1), false);
                    Ok(Listener { socket, guest, queued, marks, at, users })
                }
                Err(errno) => {
                    let is_as_before = errno == Errno::OPNOTSUPP;
                    flow.route = if is_as_before { Route::Socket(socket) } else { Route::Closed };
                    Err(errno)
                }
            }
        });
        match shared {
            Ok(shared) => {
                let index = self.listeners.index_of(shared.0)?;
                flow.route = Route::Listener(index, via);
                self.mappings.insert(guest, Mapping::Shared(shared));
                Some(index)
            }
            Err(Errno::OPNOTSUPP) => None,
            Err(_) => {
                // The next datagram opens the association again.
                self.remove(first);
                None
            }
        }
    }

    /// Removes an association, and its mapping if it is the last one.
    pub(super) fn remove(&mut self, id: FlowId) {
        let Some((key, flow)) = self.flows.remove(id) else { return };
        match flow.route {
            Route::Listener(index, _) => {
                let users = self.listeners.get_mut(index).and_then(|one| one.users.as_mut());
                let Some(users) = users else { return };
                *users -= 1;
                if *users == 0
                    && let Some(shared) = self.listeners.id_of(OwnerKind::UdpListener, index)
                {
                    self.listeners.remove(shared);
                    self.mappings.remove(&key.guest);
                }
            }
            _ if self.mappings.get(&key.guest) == Some(&Mapping::Own(id)) => {
                self.mappings.remove(&key.guest);
            }
            _ => {}
        }
    }

    /// Returns the association of a datagram from `client` at a shared socket or a forwarded port. The guest's end of a
    /// forwarded port may be another one of its addresses: the one from which it answers, or from which it has sent first.
    pub(super) fn flow_at(
        &self,
        index: usize,
        client: SocketAddr,
        context: &Context<'_>,
    ) -> Option<FlowId> {
        let listener = self.listeners.get(index)?;
        let (guest, remote) = (listener.guest, context.config.inward(client));
        let find = |guest: SocketAddr| self.flows.find(&FlowKey { guest, remote });
        if listener.users.is_some() {
            return find(guest);
        }
        let network = &context.config.guest;
        find(network.reached_at(guest)).or_else(|| {
            let others = network.addresses.iter().map(|(ip, _)| SocketAddr::new(*ip, guest.port()));
            let is_of_port = |id: &FlowId| {
                let route = self.flows.get(*id).map(|flow| &flow.route);
                matches!(route, Some(Route::Listener(of, _)) if *of == index)
            };
            others.filter_map(find).find(is_of_port)
        })
    }

    /// Returns the association of a forwarded port's client whose datagrams the guest answers from another one of its
    /// addresses. From then on it has that address.
    pub(super) fn answered_from(
        &mut self,
        key: &FlowKey,
        context: &mut Context<'_>,
    ) -> Option<FlowId> {
        let indices = self.ports.get(&key.guest.port())?;
        let found = indices.iter().find_map(|&index| {
            let guest = self.listeners.get(index)?.guest;
            let reached = context.config.guest.reached_at(guest);
            let is_like = reached.is_ipv4() == key.guest.is_ipv4();
            let id = self.flows.find(&FlowKey { guest: reached, remote: key.remote })?;
            let flow = self.flows.get(id)?;
            (is_like && matches!(flow.route, Route::Listener(of, _) if of == index)).then_some(id)
        })?;
        self.flush_if(found, context);
        let origin = self.flows.origin(found)?;
        let (_, flow) = self.flows.remove(found)?;
        self.flows.insert(*key, flow, origin)
    }

    /// Returns the associations that use the socket of a forwarded port.
    pub(super) fn users_of(&self, index: usize) -> Vec<FlowId> {
        let uses = |id: &FlowId| {
            let route = self.flows.get(*id).map(|flow| &flow.route);
            matches!(route, Some(Route::Listener(of, _)) if *of == index)
        };
        let ids = self.flows.ids_of(Origin::Outside).chain(self.flows.ids_of(Origin::Guest));
        ids.filter(uses).collect()
    }
}
