//! Forwarded TCP ports: accepts connections of the host's listening sockets and opens them at the guest.
//!
//! The guest sees the client's real address. A listening socket of the guest's network may lead to the host instead
//! ([`Destination`]). Ports can be added and removed while the engine runs. A removed
//! port accepts nothing more; its connections stay. Clients on the host's loopback may be relayed
//! ([`crate::relay`]). Forwarded UDP ports are part of [`crate::udp`].
//!
//! The host reports a listening socket as long as connections wait at it. So a port accepts one connection after a report,
//! which costs one call, and twice as many after each report in a row. It is not reported while it pauses: until the relays
//! have sockets again or the link has room, or for `RETRY_AFTER` after a failure such as a lack of descriptors.

use core::net::SocketAddr;
use core::time::Duration;
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
/// Time after which a port that could not accept a connection tries again. No event tells that descriptors are free.
const RETRY_AFTER: Duration = Duration::from_millis(100);

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

    /// Iterates over the values of all entries.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().filter_map(|(_, value)| value.as_ref())
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

/// Reason for which a port accepts nothing for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pause {
    /// The relays wait for sockets of the guest's network.
    Starving,
    /// The host failed to accept. It is tried again at this time.
    Failed(Duration),
}

/// Forwarded port: a listening socket and its destination.
struct ForwardedPort {
    listener: Box<dyn Listener>,
    to: Destination,
    queued: bool,
    /// Maximum of connections that are accepted after the next report.
    budget: usize,
    /// Round that accepted as many connections as it could.
    full_in: Option<u64>,
    pause: Option<Pause>,
    /// The host reports waiting connections.
    is_watched: bool,
    /// Set after a failure was logged, until a connection is accepted.
    is_failing: bool,
}

impl ForwardedPort {
    fn new(listener: Box<dyn Listener>, to: Destination) -> ForwardedPort {
        ForwardedPort {
            listener,
            to,
            queued: false,
            budget: 1,
            full_in: None,
            pause: None,
            is_watched: true,
            is_failing: false,
        }
    }

    fn watch(&mut self, is_watched: bool) {
        if self.is_watched != is_watched {
            self.is_watched = is_watched;
            self.listener.watch(is_watched);
        }
    }

    /// Returns `true` if the relays have no socket for the next connection.
    fn is_starving(&self, relays: &Relays) -> bool {
        matches!(self.to, Destination::Guest(guest) if relays.is_starving(guest.is_ipv4()))
    }

    /// Pauses the port after a failure.
    fn record_failure(&mut self, errno: Errno, context: &Context<'_>) {
        context.counters.accept_failed.add(1);
        if !self.is_failing {
            let to = self.to;
            tracing::warn!(
                %errno, ?to,
                "a published port cannot accept connections; they wait, and are tried again"
            );
        }
        self.is_failing = true;
        self.pause = Some(Pause::Failed(context.now + RETRY_AFTER));
    }
}

/// Returns `true` for an error of one connection: it was aborted, or the network failed, before it was accepted. Linux
/// passes pending errors of the network on (accept(2)). The next connection can be accepted.
fn concerns_one_connection(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::CONNABORTED
            | Errno::INTR
            | Errno::PROTO
            | Errno::NOPROTOOPT
            | Errno::OPNOTSUPP
            | Errno::NETDOWN
            | Errno::NETUNREACH
            | Errno::HOSTDOWN
            | Errno::HOSTUNREACH
            | Errno::NONET
            | Errno::TIMEDOUT
            | Errno::PERM
    )
}

/// All forwarded TCP ports.
#[derive(Default)]
pub(crate) struct Forwards {
    ports: Reused<ForwardedPort>,
    waiting: VecDeque<usize>,
    /// Ports that pause.
    paused: Vec<usize>,
    /// Number of calls of [`accept`](Self::accept).
    round: u64,
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
            Ok(ForwardedPort::new(context.host.listen(owner, socket)?, to))
        })
    }

    /// Closes a listening socket. Connections that it has accepted stay.
    pub(crate) fn remove(&mut self, id: ForwardId) {
        if let Some((removed, _)) = self.ports.remove(id) {
            self.waiting.retain(|index| *index != removed);
            self.paused.retain(|index| *index != removed);
        }
    }

    /// Handles an event of a listening socket.
    pub(crate) fn ready(&mut self, ready: Ready) {
        let Some(index) = self.ports.index_of(ready.owner) else { return };
        let Some(port) = self.ports.get_mut(index) else { return };
        if port.queued {
            // Nothing is accepted while the link is full. Reports would keep the runner busy meanwhile.
            return port.watch(false);
        }
        let is_next = port.full_in.is_some_and(|round| round.wrapping_add(1) == self.round);
        port.budget = if is_next { (port.budget * 2).min(ACCEPTS) } else { 1 };
        self.queue(index);
    }

    fn queue(&mut self, index: usize) {
        if let Some(port) = self.ports.get_mut(index)
            && !port.queued
            && port.pause.is_none()
        {
            port.queued = true;
            self.waiting.push_back(index);
        }
    }

    /// Returns the time at which [`run_timers`](Self::run_timers) must be called next.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        let pauses = self.paused.iter().filter_map(|&index| self.ports.get(index)?.pause);
        let ends = pauses.filter_map(|pause| match pause {
            Pause::Failed(until) => Some(until),
            Pause::Starving => None,
        });
        ends.min()
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
        self.resume(|port| port.pause == Some(Pause::Starving) && !port.is_starving(relays));
        let mut left = ACCEPTS;
        for _ in 0..self.waiting.len() {
            if left == 0 {
                break;
            }
            let Some(index) = self.waiting.pop_front() else { break };
            let Some(port) = self.ports.get_mut(index) else { continue };
            port.queued = false;
            let budget = port.budget.min(left);
            port.full_in = None;
            let accepted = accept_from(port, budget, relays, context, |accepted, context| {
                open(accepted, tcp, handoffs, context);
            });
            left -= accepted;
            port.watch(port.pause.is_none());
            if port.pause.is_some() {
                self.paused.push(index);
            } else if accepted == budget {
                port.full_in = Some(self.round);
            }
        }
        self.round = self.round.wrapping_add(1);
        !self.waiting.is_empty()
    }

    /// Ends the pauses whose time is over. The next [`accept`](Self::accept) tries again.
    pub(crate) fn run_timers(&mut self, now: Duration) {
        self.resume(|port| matches!(port.pause, Some(Pause::Failed(until)) if until <= now));
    }

    /// Ends the pauses that are over. The ports accept without a report: connections may have come before.
    fn resume(&mut self, is_over: impl Fn(&ForwardedPort) -> bool) {
        if self.paused.is_empty() {
            return;
        }
        for index in core::mem::take(&mut self.paused) {
            let Some(port) = self.ports.get_mut(index) else { continue };
            if is_over(port) {
                port.pause = None;
                self.queue(index);
            } else {
                self.paused.push(index);
            }
        }
    }
}

/// Accepts up to `budget` connections of a port. Returns their number, with those that were aborted.
fn accept_from(
    port: &mut ForwardedPort,
    budget: usize,
    relays: &mut Relays,
    context: &mut Context<'_>,
    mut open: impl FnMut(Accepted, &mut Context<'_>),
) -> usize {
    for accepted in 0..budget {
        if port.is_starving(relays) {
            port.pause = Some(Pause::Starving);
            return accepted;
        }
        match (port.listener.accept(), port.to) {
            (Ok((file, client)), Destination::Guest(guest)) => {
                port.is_failing = false;
                let accepted = Accepted { file, client, guest };
                if let Err(accepted) = relays.start(accepted, context) {
                    open(accepted, context);
                }
            }
            (Ok((file, _)), Destination::Host(to)) => {
                port.is_failing = false;
                relays.start_to_host(file, to, context);
            }
            (Err(errno), _) if concerns_one_connection(errno) => {}
            (Err(Errno::AGAIN), _) => return accepted,
            (Err(errno), _) => {
                port.record_failure(errno, context);
                return accepted;
            }
        }
    }
    budget
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
