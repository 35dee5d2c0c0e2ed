//! Datagrams from loopback to loopback, which do not take the guest's link.
//!
//! ```text
//! client in the guest ──> socket of the guest's loopback ══ copied ══ socket of the host ──> server on the host
//! client on the host  ──> socket of a forwarded port     ══ copied ══ socket of the guest ──> server in the guest
//! ```
//!
//! Each client has a socket of its own at the other side, connected to the server, so answers reach the client that
//! asked. Sockets of the guest's network come from a pool, as for connections ([`crate::relay`]). A client that is idle for
//! [`UNANSWERED`] or [`ANSWERED`] loses its socket. When there are too many clients, the one idle longest does. Datagrams
//! that the other side does not take are lost. If the guest's loopback has no server, those that follow take the link, as
//! the datagrams of all other clients do.

// #syscall uplink getsockopt 1=SOL_SOCKET: address family and type of a socket

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use core::time::Duration;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use ringfence_sys::numbers::bounded;
use rustix::io::Errno;

use super::{ANSWERED, REPORTS, UNANSWERED, Udp};
use crate::context::Context;
use crate::flow::{FlowId, FlowKey, FlowTable, Origin};
use crate::forward::{ForwardId, Reused};
use crate::host::datagrams::{Datagram, DatagramRun, DatagramSocket, ReceiveBuffer, Via};
use crate::host::{OwnerKind, Ready};

/// Maximum of receive calls in one round.
const READS: usize = 16;
/// Number of sockets of one family below which more are requested.
const POOL_LOW: usize = 2;
/// Maximum of sockets of one family in the pool.
const POOL_MAX: usize = 16;

/// Socket of the guest's loopback.
struct Listener {
    socket: Box<dyn DatagramSocket>,
    /// Server on the host.
    to: SocketAddr,
    queued: bool,
}

/// Socket by which a client reaches the relay, and gets its answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entrance {
    /// Socket of the guest's loopback, by its index.
    Inner(usize),
    Port(ForwardId),
}

/// Port on the host whose datagrams go to the guest.
#[derive(Clone, Copy)]
pub(super) struct ForwardedPort {
    pub(super) id: ForwardId,
    /// Address of the guest's server.
    pub(super) guest: SocketAddr,
}

/// Socket of one client at the other side.
struct Association {
    /// `None` while it is being opened, and after the server's side has refused a datagram.
    socket: Option<Box<dyn DatagramSocket>>,
    entrance: Entrance,
    via: Via,
    answered: bool,
    queued: bool,
}

/// Socket that may have datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Listener(usize),
    Association(FlowId),
}

/// Sockets of the guest's network, by family.
#[derive(Default)]
struct Pool {
    v4: Vec<OwnedFd>,
    v6: Vec<OwnedFd>,
}

impl Pool {
    fn of(&mut self, is_v4: bool) -> &mut Vec<OwnedFd> {
        if is_v4 { &mut self.v4 } else { &mut self.v6 }
    }
}

/// All relays of datagrams of one engine.
pub(crate) struct DatagramRelays {
    listeners: Reused<Listener>,
    clients: FlowTable<Association>,
    waiting: VecDeque<Source>,
    buffer: ReceiveBuffer,
    /// `None` unless clients on the host's loopback are relayed.
    pool: Option<Pool>,
    /// Set if the pool was found nearly empty.
    is_low: bool,
}

impl DatagramRelays {
    /// Creates an empty set of at most `max` clients. Those on the host's loopback are not relayed.
    pub(crate) fn new(max: usize) -> DatagramRelays {
        let (listeners, clients) = (Reused::default(), FlowTable::new(max));
        let (waiting, buffer) = (VecDeque::new(), ReceiveBuffer::default());
        DatagramRelays { listeners, clients, waiting, buffer, pool: None, is_low: false }
    }

    /// Relays clients on the host's loopback to the guest's loopback from now on.
    pub(crate) fn enable(&mut self) {
        self.pool = Some(Pool::default());
    }

    /// Takes the UDP sockets of the guest's network. Returns the other ones.
    pub(crate) fn take_sockets(&mut self, sockets: Vec<OwnedFd>) -> Vec<OwnedFd> {
        let is_datagrams = |socket: &OwnedFd| {
            rustix::net::sockopt::socket_type(socket) == Ok(rustix::net::SocketType::DGRAM)
        };
        let (datagrams, others): (Vec<_>, Vec<_>) = sockets.into_iter().partition(is_datagrams);
        let Some(pool) = &mut self.pool else { return others };
        for socket in datagrams {
            let of = match rustix::net::sockopt::socket_domain(&socket) {
                Ok(rustix::net::AddressFamily::INET) => pool.of(true),
                Ok(rustix::net::AddressFamily::INET6) => pool.of(false),
                _ => continue,
            };
            if of.len() < POOL_MAX {
                of.push(socket);
            }
        }
        others
    }

    /// Returns `true` once if more sockets of the guest's network are needed.
    pub(crate) fn take_need_of_sockets(&mut self) -> bool {
        core::mem::take(&mut self.is_low)
    }

    /// Relays datagrams that arrive at a bound socket to a server on the host.
    pub(crate) fn listen(
        &mut self,
        socket: OwnedFd,
        to: SocketAddr,
        context: &mut Context<'_>,
    ) -> Result<ForwardId, Errno> {
        self.listeners.insert(OwnerKind::RelayListener, |owner| {
            let socket = context.host.adopt_udp(owner, socket)?;
            Ok(Listener { socket, to, queued: false })
        })
    }

    /// Closes a socket of the guest's loopback, and those of its clients.
    pub(crate) fn unlisten(&mut self, id: ForwardId) {
        let Some((index, _)) = self.listeners.remove(id) else { return };
        self.forget(Entrance::Inner(index));
        self.waiting.retain(|source| *source != Source::Listener(index));
    }

    /// Closes the sockets of the clients of a forwarded port.
    pub(crate) fn unforward(&mut self, id: ForwardId) {
        self.forget(Entrance::Port(id));
    }

    fn forget(&mut self, entrance: Entrance) {
        let clients: Vec<_> = self.clients.ids().collect();
        for client in clients {
            if self.clients.get(client).is_some_and(|one| one.entrance == entrance) {
                self.clients.remove(client);
            }
        }
    }

    /// Handles an event of a socket.
    pub(crate) fn ready(&mut self, ready: Ready) {
        let source = match ready.owner.kind {
            OwnerKind::RelayListener => self.listeners.index_of(ready.owner).map(Source::Listener),
            _ => self.clients.owned_by(ready.owner).map(Source::Association),
        };
        let Some(source) = source else { return };
        if ready.what.failed {
            self.take_errors(source);
        }
        self.queue(source);
    }

    /// Reads the reports of undelivered datagrams. A socket with reports does not send.
    fn take_errors(&mut self, source: Source) {
        let mut has_failed = false;
        for _ in 0..REPORTS {
            let Some((socket, _)) = self.entry(source) else { return };
            if socket.error(&mut [0; 8]).is_none() {
                break;
            }
            has_failed = true;
        }
        if let Source::Association(id) = source
            && let Some(one) = self.clients.get_mut(id)
            && has_failed
            && !one.answered
            && matches!(one.entrance, Entrance::Port(_))
        {
            // Nobody listens at the guest's loopback.
            one.socket = None;
        }
    }

    /// Returns the socket of a source, and its mark.
    fn entry(&mut self, source: Source) -> Option<(&mut Box<dyn DatagramSocket>, &mut bool)> {
        match source {
            Source::Listener(index) => {
                self.listeners.get_mut(index).map(|one| (&mut one.socket, &mut one.queued))
            }
            Source::Association(id) => {
                let one = self.clients.get_mut(id)?;
                Some((one.socket.as_mut()?, &mut one.queued))
            }
        }
    }

    fn queue(&mut self, source: Source) {
        if let Some((_, queued)) = self.entry(source)
            && !*queued
        {
            *queued = true;
            self.waiting.push_back(source);
        }
    }

    /// Carries datagrams of the sockets that are ready. Answers to clients on the host leave by the sockets of `udp`.
    /// Returns the number of sockets with more.
    pub(crate) fn run(&mut self, udp: &mut Udp, context: &mut Context<'_>) -> usize {
        for _ in 0..READS {
            let Some(source) = self.waiting.pop_front() else { break };
            let mut buffer = core::mem::take(&mut self.buffer);
            let received = self.entry(source).map(|(socket, queued)| {
                *queued = false;
                socket.receive(&mut buffer)
            });
            match received.unwrap_or(Err(Errno::AGAIN)) {
                Ok(drained) => {
                    if !drained {
                        self.queue(source);
                    }
                    match source {
                        Source::Listener(index) => self.carry_out(index, &buffer, context),
                        Source::Association(id) => self.carry_back(id, &buffer, udp, context),
                    }
                }
                Err(Errno::AGAIN) => {}
                Err(_) => {
                    self.take_errors(source);
                    self.queue(source);
                }
            }
            self.buffer = buffer;
        }
        self.waiting.len()
    }

    /// Carries datagrams of clients in the guest to the host.
    fn carry_out(&mut self, index: usize, buffer: &ReceiveBuffer, context: &mut Context<'_>) {
        for datagram in buffer.datagrams() {
            let Some(to) = self.listeners.get(index).map(|listener| listener.to) else { return };
            let Some(from) = datagram.from else { continue };
            let via = Via { to: from, from: datagram.to };
            // The number of the listener is in the place of a port: a client may use several.
            let number = bounded(index, u16::MAX);
            let key = FlowKey { guest: from, remote: SocketAddr::new(to.ip(), number) };
            let id = self.clients.find(&key).or_else(|| {
                // Port 0: the kernel chooses one.
                self.open(key, Entrance::Inner(index), via, context, |owner, context| {
                    context.host.open_udp(owner, 0, to)
                })
            });
            match id {
                Some(id) => self.send(id, datagram, buffer.bytes(datagram), context),
                None => context.counters.udp_refused.add(1),
            }
        }
    }

    /// Carries answers of a server back to its client.
    fn carry_back(
        &mut self,
        id: FlowId,
        buffer: &ReceiveBuffer,
        udp: &mut Udp,
        context: &mut Context<'_>,
    ) {
        let Some(one) = self.clients.get_mut(id) else { return };
        one.answered |= !buffer.datagrams().is_empty();
        let (entrance, via) = (one.entrance, one.via);
        for datagram in buffer.datagrams() {
            let bytes = buffer.bytes(datagram);
            match entrance {
                Entrance::Inner(index) => {
                    let Some(listener) = self.listeners.get_mut(index) else { return };
                    // A client that is gone is reported by the socket; the datagram is lost.
                    let _ = listener.socket.send(bytes, datagram.segment, Some(via));
                }
                Entrance::Port(port) => udp.answer(port, bytes, datagram.segment, via),
            }
            context.counters.relay_bytes.add(bytes.len() as u64);
        }
        self.extend(id, context.now);
    }

    /// Relays datagrams that a client on the host's loopback has sent to a forwarded port. Returns `false` if they must take
    /// the link.
    pub(super) fn carry_in(
        &mut self,
        port: ForwardedPort,
        via: Via,
        run: DatagramRun<'_>,
        context: &mut Context<'_>,
    ) -> bool {
        if self.pool.is_none() || !via.to.ip().to_canonical().is_loopback() {
            return false;
        }
        let number = bounded(port.id.0.index, u16::MAX);
        let key = FlowKey { guest: via.to, remote: SocketAddr::new(port.guest.ip(), number) };
        let id = match self.clients.find(&key) {
            Some(id) => id,
            None => match self.open_inner(key, port, via, context) {
                Some(id) => id,
                None => return false,
            },
        };
        if self.clients.get(id).is_none_or(|one| one.socket.is_none()) {
            return false;
        }
        for (datagram, bytes) in run.iter() {
            self.send(id, datagram, bytes, context);
        }
        true
    }

    /// Opens the association of a client on the host, with a socket of the pool.
    fn open_inner(
        &mut self,
        key: FlowKey,
        port: ForwardedPort,
        via: Via,
        context: &mut Context<'_>,
    ) -> Option<FlowId> {
        let guest = port.guest;
        let pool = self.pool.as_mut()?.of(guest.is_ipv4());
        let socket = pool.pop();
        self.is_low |= pool.len() < POOL_LOW;
        let (socket, ip) = (socket?, loopback(guest.is_ipv4()));
        let to = SocketAddr::new(ip, guest.port());
        self.open(key, Entrance::Port(port.id), via, context, |owner, context| {
            context.host.connect_udp(owner, socket, to)
        })
    }

    /// Opens an association, evicting the one idle longest if there are too many.
    fn open(
        &mut self,
        key: FlowKey,
        entrance: Entrance,
        via: Via,
        context: &mut Context<'_>,
        make: impl FnOnce(
            crate::host::Owner,
            &mut Context<'_>,
        ) -> Result<Box<dyn DatagramSocket>, Errno>,
    ) -> Option<FlowId> {
        if self.clients.is_full(Origin::Guest) {
            let oldest = self.clients.oldest(Origin::Guest)?;
            self.clients.remove(oldest);
            context.counters.udp_evicted.add(1);
        }
        let one = Association { socket: None, entrance, via, answered: false, queued: false };
        let id = self.clients.insert(key, one, Origin::Guest)?;
        match make(id.owner(OwnerKind::RelayClient), context) {
            Ok(socket) => {
                self.clients.get_mut(id)?.socket = Some(socket);
                context.counters.relays_opened.add(1);
                Some(id)
            }
            Err(_) => {
                self.clients.remove(id);
                None
            }
        }
    }

    /// Sends a client's datagram to the server.
    fn send(&mut self, id: FlowId, datagram: &Datagram, bytes: &[u8], context: &mut Context<'_>) {
        if let Some((socket, _)) = self.entry(Source::Association(id)) {
            // A server that is not there is reported by the socket; the datagram is lost.
            let _ = socket.send(bytes, datagram.segment, None);
            context.counters.relay_bytes.add(bytes.len() as u64);
        }
        self.extend(id, context.now);
    }

    fn extend(&mut self, id: FlowId, now: Duration) {
        let Some(one) = self.clients.get(id) else { return };
        let life = if one.answered { ANSWERED } else { UNANSWERED };
        self.clients.touch(id);
        self.clients.set_deadline(id, Some(now + life));
    }

    /// Closes the sockets of clients whose idle time is over.
    pub(crate) fn run_timers(&mut self, context: &mut Context<'_>) {
        while let Some(id) = self.clients.take_due(context.now) {
            self.clients.remove(id);
            context.counters.udp_aged.add(1);
        }
    }

    /// Returns the time at which [`DatagramRelays::run_timers`] must be called next.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.clients.next_timer()
    }
}

fn loopback(is_v4: bool) -> IpAddr {
    if is_v4 { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;
    use crate::config::Config;
    use crate::engine::Uplink;
    use crate::forward::Destination;
    use crate::host::real::RealHost;

    /// Relay of `port` on this host's loopback, as if it were the guest's, to a server.
    struct Relayed {
        uplink: Uplink,
        id: ForwardId,
        at: SocketAddr,
        server: UdpSocket,
    }

    fn relayed(clients_max: usize) -> Relayed {
        let counters = std::sync::Arc::default();
        let host = Box::new(RealHost::new(std::sync::Arc::clone(&counters)).unwrap());
        let mut config = Config { datagram_relays_max: clients_max, ..Config::default() };
        config.guest.mac = Some([2, 0, 0, 0, 0, 2]);
        config.guest.gateways = vec![IpAddr::from([192, 0, 2, 1])];
        let mut uplink = Uplink::new(config, host, counters);
        let (socket, server) = (bound(), bound());
        let at = socket.local_addr().unwrap();
        let to = Destination::Host(server.local_addr().unwrap());
        let id = uplink.forward_udp(socket.into(), to).unwrap();
        Relayed { uplink, id, at, server }
    }

    fn bound() -> UdpSocket {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_nonblocking(true).unwrap();
        socket
    }

    impl Relayed {
        /// Runs the engine until a datagram has arrived at `socket`. Returns its bytes and its sender.
        fn arrival(&mut self, socket: &UdpSocket, now: Duration) -> Option<(Vec<u8>, SocketAddr)> {
            let mut bytes = [0; 2048];
            for _ in 0..200 {
                self.uplink.poll_host(now).unwrap();
                if let Ok((len, from)) = socket.recv_from(&mut bytes) {
                    return Some((bytes[..len].to_vec(), from));
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            None
        }

        /// Sends a datagram to the relay. Returns the address by which the server knows the client.
        fn ask(&mut self, client: &UdpSocket, text: &[u8], now: Duration) -> Option<SocketAddr> {
            client.send_to(text, self.at).unwrap();
            let server = self.server.try_clone().unwrap();
            let (bytes, from) = self.arrival(&server, now)?;
            assert_eq!(bytes, text);
            Some(from)
        }
    }

    const NOW: Duration = Duration::from_secs(1);

    #[test]
    fn answers_reach_the_client_that_asked_from_the_address_that_it_asked() {
        let mut relayed = relayed(8);
        let (first, second) = (bound(), bound());
        let by_first = relayed.ask(&first, b"one", NOW).unwrap();
        let by_second = relayed.ask(&second, b"two", NOW).unwrap();
        assert_ne!(by_first, by_second);
        relayed.server.send_to(b"second", by_second).unwrap();
        relayed.server.send_to(b"first", by_first).unwrap();
        let at = relayed.at;
        assert_eq!(relayed.arrival(&first, NOW), Some((b"first".to_vec(), at)));
        assert_eq!(relayed.arrival(&second, NOW), Some((b"second".to_vec(), at)));
        // The client keeps its socket.
        assert_eq!(relayed.ask(&first, b"again", NOW), Some(by_first));
    }

    #[test]
    fn stranger_cannot_answer_in_the_place_of_the_server() {
        let mut relayed = relayed(8);
        let client = bound();
        let by_client = relayed.ask(&client, b"one", NOW).unwrap();
        bound().send_to(b"forged", by_client).unwrap();
        relayed.server.send_to(b"honest", by_client).unwrap();
        assert_eq!(relayed.arrival(&client, NOW).unwrap().0, b"honest");
    }

    #[test]
    fn clients_beyond_the_maximum_displace_the_one_idle_longest() {
        let mut relayed = relayed(2);
        let clients = [bound(), bound(), bound()];
        let known: Vec<_> =
            clients.iter().map(|client| relayed.ask(client, b"x", NOW).unwrap()).collect();
        assert_eq!(relayed.uplink.counters().udp_evicted.get(), 1);
        // The first one has lost its socket, the others have theirs.
        relayed.server.send_to(b"late", known[0]).unwrap();
        relayed.server.send_to(b"answer", known[2]).unwrap();
        assert_eq!(relayed.arrival(&clients[2], NOW).unwrap().0, b"answer");
        assert!(relayed.arrival(&clients[0], NOW).is_none());
    }

    #[test]
    fn idle_client_loses_its_socket_later_if_it_was_answered() {
        let mut relayed = relayed(8);
        let (silent, answered) = (bound(), bound());
        relayed.ask(&silent, b"x", NOW).unwrap();
        let by_answered = relayed.ask(&answered, b"x", NOW).unwrap();
        relayed.server.send_to(b"y", by_answered).unwrap();
        assert!(relayed.arrival(&answered, NOW).is_some());
        for (after, aged) in [(UNANSWERED, 1), (ANSWERED, 2)] {
            assert_eq!(relayed.uplink.deadline(), Some(NOW + after));
            relayed.uplink.run_timers(NOW + after);
            assert_eq!(relayed.uplink.counters().udp_aged.get(), aged);
        }
    }

    #[test]
    fn removed_port_carries_nothing_more() {
        let mut relayed = relayed(8);
        let client = bound();
        let by_client = relayed.ask(&client, b"x", NOW).unwrap();
        relayed.uplink.remove_forward(relayed.id);
        let _ = relayed.server.send_to(b"y", by_client);
        assert!(relayed.arrival(&client, NOW).is_none());
    }

    /// Forwarded port of this host that leads to the guest's loopback, which is this host's own.
    fn forwarded(guest_port: u16) -> Relayed {
        let mut relayed = relayed(8);
        let (socket, guest) = (bound(), SocketAddr::from(([192, 0, 2, 2], guest_port)));
        relayed.at = socket.local_addr().unwrap();
        let to = Destination::Guest(guest);
        relayed.id = relayed.uplink.forward_udp(socket.into(), to).unwrap();
        relayed
    }

    impl Relayed {
        /// Runs the engine with a link, as `arrival` does without.
        fn arrival_by_link(&mut self, socket: &UdpSocket) -> Option<(Vec<u8>, SocketAddr)> {
            let mut bytes = [0; 2048];
            for _ in 0..200 {
                self.uplink.poll_host(NOW).unwrap();
                self.uplink.output(&mut Cut::default(), NOW);
                if let Ok((len, from)) = socket.recv_from(&mut bytes) {
                    return Some((bytes[..len].to_vec(), from));
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            None
        }
    }

    /// Link that takes every frame, and loses it.
    #[derive(Default)]
    struct Cut(Vec<u8>);

    impl crate::link::GuestLink for Cut {
        fn capabilities(&self) -> ringfence_frame::PortCapabilities {
            ringfence_frame::PortCapabilities::plain(1500)
        }

        fn reserve<'a>(&'a mut self, _: usize, len: usize, slots: &mut crate::link::Slots<'a>) {
            self.0.resize(len, 0);
            slots.push(&mut self.0);
        }

        fn commit(&mut self, _: &[crate::link::Committed]) {}
    }

    #[test]
    fn client_on_the_hosts_loopback_reaches_the_guests_loopback() {
        let server = bound();
        let mut relayed = forwarded(server.local_addr().unwrap().port());
        relayed.uplink.relay(crate::relay::RelayTarget::Loopback, Box::new(|| {}));
        let inner = (0..4).map(|_| udp_socket()).collect();
        relayed.uplink.add_relay_sockets(inner);
        let client = bound();
        client.send_to(b"one", relayed.at).unwrap();
        let (bytes, from) = relayed.arrival_by_link(&server).unwrap();
        assert_eq!((&bytes[..], from.ip()), (&b"one"[..], relayed.at.ip()));
        server.send_to(b"two", from).unwrap();
        let at = relayed.at;
        assert_eq!(relayed.arrival_by_link(&client), Some((b"two".to_vec(), at)));
        // The port is removed: nobody answers any more.
        relayed.uplink.remove_forward(relayed.id);
        let _ = server.send_to(b"late", from);
        assert!(relayed.arrival_by_link(&client).is_none());
    }

    #[test]
    fn datagrams_take_the_link_if_the_guests_loopback_has_no_server() {
        let unused = bound().local_addr().unwrap().port();
        let mut relayed = forwarded(unused);
        relayed.uplink.relay(crate::relay::RelayTarget::Loopback, Box::new(|| {}));
        relayed.uplink.add_relay_sockets(vec![udp_socket()]);
        let client = bound();
        let sent = |relayed: &Relayed| relayed.uplink.counters().udp_accepted.get();
        for _ in 0..3 {
            client.send_to(b"x", relayed.at).unwrap();
            assert!(relayed.arrival_by_link(&client).is_none());
        }
        assert_eq!((relayed.uplink.counters().relays_opened.get(), sent(&relayed)), (1, 1));
    }

    #[test]
    fn guests_loopback_is_not_reached_unless_that_is_switched_on() {
        let server = bound();
        let mut relayed = forwarded(server.local_addr().unwrap().port());
        relayed.uplink.relay(crate::relay::RelayTarget::Own, Box::new(|| {}));
        relayed.uplink.add_relay_sockets(vec![udp_socket()]);
        let client = bound();
        client.send_to(b"x", relayed.at).unwrap();
        assert!(relayed.arrival_by_link(&server).is_none());
        assert_eq!(relayed.uplink.counters().relays_opened.get(), 0);
    }

    fn udp_socket() -> OwnedFd {
        use rustix::net::{AddressFamily, SocketFlags, SocketType};
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None).unwrap()
    }

    #[test]
    fn server_that_is_not_there_does_not_stop_the_relay() {
        let mut relayed = relayed(8);
        let client = bound();
        let at = relayed.server.local_addr().unwrap();
        relayed.server = bound();
        client.send_to(b"lost", relayed.at).unwrap();
        assert!(relayed.arrival(&client, NOW).is_none());
        relayed.server = UdpSocket::bind(at).unwrap();
        relayed.server.set_nonblocking(true).unwrap();
        assert!(relayed.ask(&client, b"found", NOW).is_some());
    }
}
