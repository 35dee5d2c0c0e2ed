//! Relays: connections from the host's loopback to a forwarded port, joined with a socket of the guest's network.
//!
//! ```text
//! client on the host ──> listening socket ──> client socket ══ splice ══ inner socket ──> server in the guest
//! ```
//!
//! The guest's link carries none of it. The inner socket was created in the guest's network namespace by a process
//! that may enter it, and passed to the uplink. Connected there, it reaches the guest's own loopback. The relays keep a
//! pool of such sockets, and ask for more ([`Refill`]) when it is nearly empty. While it is empty, no connection is
//! accepted. Datagrams have relays of their own (`udp::relay`).
//!
//! In the other direction, a listening socket of the guest's network leads to the host's loopback:
//!
//! ```text
//! client in the guest ──> listening socket ──> client socket ══ splice ══ host socket ──> server on the host
//! ```
//!
//! Such a connection is reset if the host refuses it, or if it is beyond the maximum.
//!
//! A connection from the host that the guest refuses there, or that is beyond the maximum, takes the way of all others: through the
//! link, from the router's address.

// #syscall uplink getsockopt 1=SOL_SOCKET: address family of a socket

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

use crate::context::Context;
use crate::forward::{Accepted, ForwardId, Reused};
use crate::host::relay::{Progress, Relay, RelayEvents};
use crate::host::{OwnerKind, Ready};

/// Number of sockets of one family below which more are requested.
const POOL_LOW: usize = 8;
/// Maximum of sockets of one family in the pool.
const POOL_MAX: usize = 64;
/// Number of descriptors of one relay: two sockets and two pipes.
pub const DESCRIPTORS: usize = 6;

/// Request for more sockets of the guest's network. It must not block.
pub type Refill = Box<dyn FnMut() + Send>;

/// Address of the guest to which connections from the host's loopback lead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RelayTarget {
    /// The guest's own address, as for all other clients.
    Own,
    /// The guest's loopback.
    Loopback,
}

enum TcpRelayState {
    /// The inner socket is being connected.
    Connecting { client: Client, inner: OwnedFd },
    Joined {
        relay: Box<dyn Relay>,
        /// Set if the guest is the client.
        is_of_guest: bool,
    },
    /// Replaced in the same call.
    Changing,
}

/// Accepted connection of a relay.
enum Client {
    OfHost(Accepted),
    OfGuest(OwnedFd),
}

struct TcpRelayEntry {
    state: TcpRelayState,
    queued: bool,
    /// Events since the entry was last served.
    events: RelayEvents,
}

impl TcpRelayEntry {
    fn connecting(client: Client, inner: OwnedFd) -> TcpRelayEntry {
        let state = TcpRelayState::Connecting { client, inner };
        TcpRelayEntry { state, queued: false, events: RelayEvents::default() }
    }
}

/// Settings and pool of relays that are switched on.
struct Pool {
    target: RelayTarget,
    v4: Vec<OwnedFd>,
    v6: Vec<OwnedFd>,
    refill: Refill,
    is_asked: bool,
}

/// All relays of one engine.
pub(crate) struct Relays {
    entries: Reused<TcpRelayEntry>,
    count: usize,
    max: usize,
    waiting: VecDeque<usize>,
    pool: Option<Pool>,
}

impl Relays {
    /// Creates an empty set of at most `max` relays, which are off.
    pub(crate) fn new(max: usize) -> Relays {
        let (entries, waiting) = (Reused::default(), VecDeque::new());
        Relays { entries, count: 0, max, waiting, pool: None }
    }

    /// Switches relays on. The first sockets are on their way.
    pub(crate) fn enable(&mut self, target: RelayTarget, refill: Refill) {
        let (v4, v6) = (Vec::new(), Vec::new());
        self.pool = Some(Pool { target, v4, v6, refill, is_asked: true });
    }

    /// Adds sockets of the guest's network. None at all means that no more will come: relays are off from now on.
    pub(crate) fn add_sockets(&mut self, sockets: Vec<OwnedFd>) {
        if sockets.is_empty() {
            self.pool = None;
        }
        let Some(pool) = &mut self.pool else { return };
        pool.is_asked = false;
        for socket in sockets {
            let family = rustix::net::sockopt::socket_domain(&socket);
            let of = match family {
                Ok(rustix::net::AddressFamily::INET) => &mut pool.v4,
                Ok(rustix::net::AddressFamily::INET6) => &mut pool.v6,
                _ => continue,
            };
            if of.len() < POOL_MAX {
                of.push(socket);
            }
        }
    }

    /// Asks for more sockets of the guest's network, unless some are on their way.
    pub(crate) fn request_sockets(&mut self) {
        if let Some(pool) = self.pool.as_mut().filter(|pool| !pool.is_asked) {
            pool.is_asked = true;
            (pool.refill)();
        }
    }

    /// Returns `true` while there is no socket of a family, and some are on their way.
    pub(crate) fn is_starving(&self, is_v4: bool) -> bool {
        let is_empty = |pool: &Pool| if is_v4 { pool.v4.is_empty() } else { pool.v6.is_empty() };
        self.pool.as_ref().is_some_and(|pool| pool.is_asked && is_empty(pool))
    }

    /// Relays an accepted connection if its client is on the host's loopback. Otherwise it returns the connection.
    pub(crate) fn start(
        &mut self,
        accepted: Accepted,
        context: &mut Context<'_>,
    ) -> Result<(), Accepted> {
        let is_local = accepted.client.ip().to_canonical().is_loopback();
        let guest = accepted.guest;
        let Some(pool) = self.pool.as_mut().filter(|_| is_local && self.count < self.max) else {
            return Err(accepted);
        };
        let of_family = if guest.is_ipv4() { &mut pool.v4 } else { &mut pool.v6 };
        let socket = of_family.pop();
        if of_family.len() < POOL_LOW && !pool.is_asked {
            pool.is_asked = true;
            (pool.refill)();
        }
        let Some(inner) = socket else { return Err(accepted) };
        let to = match (pool.target, guest.ip()) {
            (RelayTarget::Own, ip) => ip,
            (RelayTarget::Loopback, IpAddr::V4(_)) => Ipv4Addr::LOCALHOST.into(),
            (RelayTarget::Loopback, IpAddr::V6(_)) => Ipv6Addr::LOCALHOST.into(),
        };
        let mut accepted = Some(accepted);
        let made = self.entries.insert(OwnerKind::Relay, |owner| {
            context.host.connect_inner(owner, &inner, SocketAddr::new(to, guest.port()))?;
            let accepted = accepted.take().ok_or(Errno::INVAL)?;
            let client = Client::OfHost(accepted);
            Ok(TcpRelayEntry::connecting(client, inner))
        });
        match (made, accepted) {
            (Err(_), Some(accepted)) => Err(accepted),
            _ => {
                self.count += 1;
                Ok(())
            }
        }
    }

    /// Relays a connection from the guest's network to an address of the host.
    pub(crate) fn start_to_host(
        &mut self,
        file: OwnedFd,
        to: SocketAddr,
        context: &mut Context<'_>,
    ) {
        if self.count >= self.max {
            return context.host.reset(file);
        }
        let mut file = Some(file);
        let made = self.entries.insert(OwnerKind::Relay, |owner| {
            let inner = context.host.open_inner(to.is_ipv4())?;
            context.host.connect_inner(owner, &inner, to)?;
            let client = Client::OfGuest(file.take().ok_or(Errno::INVAL)?);
            Ok(TcpRelayEntry::connecting(client, inner))
        });
        match (made, file) {
            (Err(_), Some(file)) => context.host.reset(file),
            _ => self.count += 1,
        }
    }

    /// Handles an event of one of a relay's sockets.
    pub(crate) fn ready(&mut self, ready: Ready) {
        let Some(index) = self.entries.index_of(ready.owner) else { return };
        let Some(entry) = self.entries.get_mut(index) else { return };
        entry.events.add(ready);
        if !entry.queued {
            entry.queued = true;
            self.waiting.push_back(index);
        }
    }

    /// Advances the relays that are ready. Returns the number of those with more to carry, and the connections that
    /// the guest has refused.
    pub(crate) fn run(&mut self, context: &mut Context<'_>) -> (usize, Vec<Accepted>) {
        let mut refused = Vec::new();
        for _ in 0..self.waiting.len() {
            let Some(index) = self.waiting.pop_front() else { break };
            let Some(id) = self.entries.id_of(OwnerKind::Relay, index) else { continue };
            let Some(entry) = self.entries.get_mut(index) else { continue };
            entry.queued = false;
            if let TcpRelayState::Connecting { .. } = entry.state {
                match connect(id, entry, context) {
                    Ok(()) => {}
                    Err(client) => {
                        match client {
                            Client::OfHost(accepted) => refused.push(accepted),
                            Client::OfGuest(file) => context.host.reset(file),
                        }
                        self.remove(id);
                        continue;
                    }
                }
            }
            let TcpRelayState::Joined { relay, .. } = &mut entry.state else { continue };
            let events = core::mem::take(&mut entry.events);
            let (more, out, back) = match relay.advance(events) {
                Progress::Ended => {
                    if let Some(TcpRelayState::Joined { relay, .. }) = self.remove(id) {
                        context.host.recycle(relay);
                    }
                    continue;
                }
                Progress::More(out, back) => (true, out, back),
                Progress::Waiting(out, back) => (false, out, back),
            };
            context.counters.relay_bytes.add(out + back);
            if more {
                entry.queued = true;
                self.waiting.push_back(index);
            }
        }
        (self.waiting.len(), refused)
    }

    /// Returns `true` if a relay may still have data of the guest: its stream has not ended, or the other end does not have
    /// all of it.
    pub(crate) fn have_data_of_guest(&self) -> bool {
        self.entries.iter().any(|entry| match &entry.state {
            TcpRelayState::Joined { relay, is_of_guest } => {
                let (client, inner) = relay.ended_streams();
                !(if *is_of_guest { client } else { inner })
            }
            TcpRelayState::Connecting { client, .. } => matches!(client, Client::OfGuest(_)),
            TcpRelayState::Changing => false,
        })
    }

    fn remove(&mut self, id: ForwardId) -> Option<TcpRelayState> {
        let (_, entry) = self.entries.remove(id)?;
        self.count -= 1;
        Some(entry.state)
    }
}

/// Joins the sockets of a relay whose inner socket may be connected. Returns the connection if it was refused.
fn connect(
    id: ForwardId,
    entry: &mut TcpRelayEntry,
    context: &mut Context<'_>,
) -> Result<(), Client> {
    let TcpRelayState::Connecting { client, inner } =
        std::mem::replace(&mut entry.state, TcpRelayState::Changing)
    else {
        return Ok(());
    };
    match context.host.connected(&inner, entry.events.inner) {
        Ok(false) => {
            entry.state = TcpRelayState::Connecting { client, inner };
            Ok(())
        }
        Ok(true) => {
            let (file, ends) = match client {
                Client::OfHost(Accepted { file, client, guest }) => (file, Some((client, guest))),
                Client::OfGuest(file) => (file, None),
            };
            match context.host.join(id.0, file, inner) {
                Ok(relay) => {
                    context.counters.relays_opened.add(1);
                    entry.state = TcpRelayState::Joined { relay, is_of_guest: ends.is_none() };
                    Ok(())
                }
                Err((file, _)) => Err(match ends {
                    Some((client, guest)) => Client::OfHost(Accepted { file, client, guest }),
                    None => Client::OfGuest(file),
                }),
            }
        }
        Err(_) => Err(client),
    }
}
