//! Ports that are added and removed while an uplink runs.
//!
//! ```text
//! session or launcher                         uplink process
//!   opens the socket with the user's rights
//!   ForwardedPortOrder::Open + socket  ──channel──>     first engine: forward_tcp, forward_udp
//!                             <──────────      FromUplink::Port
//!   ForwardedPortOrder::Close          ──channel──>     first engine: remove_forward
//! ```
//!
//! The uplink can open no listening socket itself. It accepts an order only on the channel of the process that
//! started it. The numbers of ports are chosen by that process.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ringfence_sandbox::channel::{Channel, ChannelError, expect_fds};
use ringfence_sys::descriptors::Descriptors;
use ringfence_uplink::Uplink;
use ringfence_uplink::forward::{Destination, ForwardId};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::forward::{Forward, ForwardProtocol, PORTS_MAX};
use crate::messages::FromUplink;
use crate::orders::UplinkOrder;
use ringfence_hostnet::address::Address;

/// Time limit for the answer to an order.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of messages that are kept while an answer is awaited. An uplink has fewer at once: its records are
/// at most 1000 lines and 50 more each second.
const KEPT_MAX: usize = 2048;
/// Maximum number of listening sockets of one guest.
pub const SOCKETS_MAX: usize = 2 * PORTS_MAX;

/// Order to a running uplink.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ForwardedPortOrder {
    /// Forwards the socket that comes with the order.
    Open {
        /// Number of the port, which no open port has.
        id: u32,
        forward: Forward,
    },
    /// Closes the socket of a port. Accepted connections stay.
    Close { id: u32 },
    /// Adds the unconnected sockets of the guest's network that come with the order. None at all: no more will
    /// come. There is no answer.
    Sockets,
}

/// Reasons for which a port cannot be added or removed.
#[derive(Debug, thiserror::Error)]
pub enum ForwardedPortFailure {
    /// Listening failed.
    #[error("cannot listen at {at}/{protocol}: {source}")]
    Listen {
        /// Address and port of the host.
        at: SocketAddr,
        protocol: ForwardProtocol,
        source: std::io::Error,
    },
    /// The guest has too many sockets already.
    #[error("more than {SOCKETS_MAX} listening sockets are not possible")]
    TooMany,
    /// The uplink could not use the socket.
    #[error("the uplink refuses the port: {0}")]
    Refused(String),
    /// The uplink did not answer as it must.
    #[error("the uplink: {0}")]
    Channel(#[from] ChannelError),
    /// The uplink reported its end.
    #[error("the uplink failed: {0}")]
    Failed(String),
    /// The uplink answered to another order.
    #[error("the uplink answered to another order than the last one")]
    ForwardProtocol,
}

impl ForwardedPortFailure {
    /// Returns `true` if only this port is concerned: the uplink runs on.
    pub fn is_of_port(&self) -> bool {
        use ForwardedPortFailure::{Listen, Refused, TooMany};
        matches!(self, Listen { .. } | TooMany | Refused(_))
    }
}

/// Ports of a running uplink, at the side that opens sockets.
#[derive(Debug, Default)]
pub struct ForwardedPorts {
    last: u32,
    open: usize,
    /// Other messages of the uplink that came while an answer was awaited, in their order.
    kept: VecDeque<FromUplink>,
}

impl ForwardedPorts {
    /// Returns the state of an uplink that was started with `sockets` listening sockets. Their numbers are
    /// [`first_ports`].
    pub fn new(sockets: usize) -> ForwardedPorts {
        let last = first_ports(sockets).last().unwrap_or(0);
        ForwardedPorts { last, open: sockets, kept: VecDeque::new() }
    }

    /// Listens at an address of the host, and forwards that to a port of the guest. Returns the number of the
    /// port.
    ///
    /// # Errors
    ///
    /// Returns [`ForwardedPortFailure`].
    pub fn listen(
        &mut self,
        channel: &Channel,
        protocol: ForwardProtocol,
        at: SocketAddr,
        guest_port: u16,
    ) -> Result<u32, ForwardedPortFailure> {
        let socket = super::forward::bind(protocol, at);
        let socket =
            socket.map_err(|source| ForwardedPortFailure::Listen { at, protocol, source })?;
        let ipv6 = at.is_ipv6();
        self.open(channel, Forward { protocol, ipv6, guest_port, to_host: false }, socket)
    }

    /// Hands a listening socket over. Returns the number of the port.
    ///
    /// # Errors
    ///
    /// Returns [`ForwardedPortFailure`]. The socket is closed.
    pub fn open(
        &mut self,
        channel: &Channel,
        forward: Forward,
        socket: OwnedFd,
    ) -> Result<u32, ForwardedPortFailure> {
        let id = self.order_open(channel, forward, &socket)?;
        match self.answer(channel, id) {
            Ok(()) => Ok(id),
            Err(failure) => {
                self.has_failed();
                Err(failure)
            }
        }
    }

    /// Closes the socket of a port.
    ///
    /// # Errors
    ///
    /// Returns [`ForwardedPortFailure`] if the uplink does not confirm it.
    pub fn close(&mut self, channel: &Channel, id: u32) -> Result<(), ForwardedPortFailure> {
        self.order_close(channel, id)?;
        self.answer(channel, id)
    }

    /// Hands a listening socket over, without waiting for [`FromUplink::Port`]. Returns the number of the port.
    ///
    /// # Errors
    ///
    /// Returns [`ForwardedPortFailure`] if there is no order.
    pub fn order_open(
        &mut self,
        channel: &Channel,
        forward: Forward,
        socket: &OwnedFd,
    ) -> Result<u32, ForwardedPortFailure> {
        if self.open >= SOCKETS_MAX {
            return Err(ForwardedPortFailure::TooMany);
        }
        self.last = self.last.wrapping_add(1);
        let id = self.last;
        let order = UplinkOrder::Port(ForwardedPortOrder::Open { id, forward });
        channel.send_now(&order, &[socket.as_fd()])?;
        self.open += 1;
        Ok(id)
    }

    /// Orders to close the socket of a port, without waiting for [`FromUplink::Port`].
    ///
    /// # Errors
    ///
    /// Returns [`ForwardedPortFailure`] if there is no order.
    pub fn order_close(&mut self, channel: &Channel, id: u32) -> Result<(), ForwardedPortFailure> {
        channel.send_now(&UplinkOrder::Port(ForwardedPortOrder::Close { id }), &[])?;
        self.open = self.open.saturating_sub(1);
        Ok(())
    }

    /// Records that the uplink could not open the port of an order.
    pub fn has_failed(&mut self) {
        self.open = self.open.saturating_sub(1);
    }

    /// Returns `true` if messages that came while an answer was awaited are still to be received.
    pub fn has_messages(&self) -> bool {
        !self.kept.is_empty()
    }

    /// Takes the first message that came while an answer was awaited.
    pub fn take_message(&mut self) -> Option<FromUplink> {
        self.kept.pop_front()
    }

    /// Returns the next message of the uplink: those that came while an answer was awaited come first.
    pub fn try_receive(&mut self, channel: &Channel) -> Option<FromUplink> {
        let next = || channel.try_receive().ok().flatten().map(|(message, _)| message);
        self.take_message().or_else(next)
    }

    /// Waits for the answer to an order. A compromised uplink can delay it until the time limit.
    fn answer(&mut self, channel: &Channel, id: u32) -> Result<(), ForwardedPortFailure> {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            return match channel.receive_within(left)?.0 {
                FromUplink::Port { id: answered, error: None } if answered == id => Ok(()),
                FromUplink::Port { id: answered, error: Some(why) } if answered == id => {
                    Err(ForwardedPortFailure::Refused(why))
                }
                FromUplink::Failed(why) => Err(ForwardedPortFailure::Failed(why)),
                // No order of a port has these results.
                FromUplink::Up { .. } | FromUplink::Port { .. } => {
                    Err(ForwardedPortFailure::ForwardProtocol)
                }
                // Reports that the uplink sends at any time, and answers to other orders.
                other @ (FromUplink::Policy { .. }
                | FromUplink::Sockets
                | FromUplink::Machine(_)
                | FromUplink::Records(_)
                | FromUplink::Learned(_)
                | FromUplink::Question(_)
                | FromUplink::QuestionOver(_)
                | FromUplink::Totals(_)
                | FromUplink::Drained) => {
                    self.keep(other);
                    continue;
                }
            };
        }
    }

    /// Keeps a message until it is received. A flood of a compromised uplink is dropped.
    fn keep(&mut self, message: FromUplink) {
        if self.kept.len() < KEPT_MAX {
            self.kept.push_back(message);
        }
    }
}

/// Sends the uplink sockets of the guest's network, or none if there are no more.
///
/// # Errors
///
/// Returns the error of the channel.
pub fn send_sockets(uplink: &Channel, sockets: &[BorrowedFd<'_>]) -> Result<(), ChannelError> {
    uplink.send_now(&UplinkOrder::Port(ForwardedPortOrder::Sockets), sockets)
}

/// Returns the numbers of the ports with which an uplink is started.
pub fn first_ports(sockets: usize) -> impl Iterator<Item = u32> {
    (1_u32..).take(sockets)
}

/// Ports of a running uplink, at the side of the uplink.
pub(super) struct ForwardedPortTable {
    addresses: Vec<IpAddr>,
    open: HashMap<u32, ForwardId>,
}

impl ForwardedPortTable {
    pub(super) fn new(addresses: &[Address]) -> ForwardedPortTable {
        let addresses = addresses.iter().map(|address| address.ip()).collect();
        ForwardedPortTable { addresses, open: HashMap::new() }
    }

    /// Returns the destination of a port, if the guest has an address of the family.
    fn target(&self, forward: Forward) -> Option<Destination> {
        let Forward { ipv6, guest_port: port, to_host, .. } = forward;
        if to_host {
            let v4 = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
            let v6 = SocketAddr::from((Ipv6Addr::LOCALHOST, port));
            return Some(Destination::Host(if ipv6 { v6 } else { v4 }));
        }
        let own = self.addresses.iter().find(|own| own.is_ipv6() == ipv6)?;
        Some(Destination::Guest(SocketAddr::new(*own, port)))
    }

    /// Carries out an order. Returns the answer, if the order has one.
    ///
    /// # Errors
    ///
    /// Returns an error if the descriptors are not those of the order.
    pub(super) fn carry_out(
        &mut self,
        order: ForwardedPortOrder,
        fds: Descriptors,
        uplink: &mut Uplink,
    ) -> Result<Option<FromUplink>, ChannelError> {
        let (id, done) = match order {
            ForwardedPortOrder::Sockets => {
                uplink.add_relay_sockets(fds.into_vec());
                return Ok(None);
            }
            ForwardedPortOrder::Open { id, forward } => {
                let [socket] = expect_fds(fds)?;
                (id, self.open(id, forward, socket, uplink))
            }
            ForwardedPortOrder::Close { id } => (id, self.close(id, uplink)),
        };
        Ok(Some(FromUplink::Port { id, error: done.err() }))
    }

    /// Forwards the sockets with which the uplink was started. A port without an address of the guest is left out.
    pub(super) fn open_first(
        &mut self,
        forwards: &[Forward],
        sockets: Vec<OwnedFd>,
        uplink: &mut Uplink,
    ) -> Result<(), Errno> {
        for ((id, forward), socket) in first_ports(forwards.len()).zip(forwards).zip(sockets) {
            if let Some(target) = self.target(*forward) {
                self.open.insert(id, add(uplink, forward.protocol, socket, target)?);
            }
        }
        Ok(())
    }

    fn open(
        &mut self,
        id: u32,
        forward: Forward,
        socket: OwnedFd,
        uplink: &mut Uplink,
    ) -> Result<(), String> {
        let target = self.target(forward).ok_or("the guest has no address of this family")?;
        let made = add(uplink, forward.protocol, socket, target);
        self.open.insert(id, made.map_err(|errno| errno.to_string())?);
        Ok(())
    }

    fn close(&mut self, id: u32, uplink: &mut Uplink) -> Result<(), String> {
        let removed = self.open.remove(&id).ok_or("there is no such port")?;
        uplink.remove_forward(removed);
        Ok(())
    }
}

/// Forwards a listening or bound socket.
fn add(
    uplink: &mut Uplink,
    protocol: ForwardProtocol,
    socket: OwnedFd,
    to: Destination,
) -> Result<ForwardId, Errno> {
    match protocol {
        ForwardProtocol::Tcp => uplink.forward_tcp(socket, to),
        ForwardProtocol::Udp => uplink.forward_udp(socket, to),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::MachineState;

    const FORWARD: Forward =
        Forward { protocol: ForwardProtocol::Tcp, ipv6: false, guest_port: 80, to_host: false };

    fn socket() -> OwnedFd {
        std::net::TcpListener::bind("127.0.0.1:0").unwrap().into()
    }

    /// Runs a peer that sends `reply` after it has received an order.
    fn answered(reply: FromUplink) -> Result<u32, ForwardedPortFailure> {
        let (near, far) = Channel::pair().unwrap();
        let peer = std::thread::spawn(move || {
            let (order, fds) = far.receive::<UplinkOrder>().unwrap();
            assert_eq!(
                (order, fds.len()),
                (UplinkOrder::Port(ForwardedPortOrder::Open { id: 1, forward: FORWARD }), 1)
            );
            far.send(&reply, &[]).unwrap();
        });
        let opened = ForwardedPorts::new(0).open(&near, FORWARD, socket());
        peer.join().unwrap();
        opened
    }

    #[test]
    fn port_is_open_only_after_the_uplink_has_confirmed_it() {
        assert_eq!(answered(FromUplink::Port { id: 1, error: None }).unwrap(), 1);
        let refused = answered(FromUplink::Port { id: 1, error: Some("full".into()) });
        assert!(matches!(refused, Err(ForwardedPortFailure::Refused(why)) if why == "full"));
        let other = answered(FromUplink::Port { id: 2, error: None });
        assert!(matches!(other, Err(ForwardedPortFailure::ForwardProtocol)));
        let failed = answered(FromUplink::Failed("gone".into()));
        assert!(matches!(failed, Err(ForwardedPortFailure::Failed(_))));
    }

    #[test]
    fn reports_that_come_before_the_answer_are_received_after_it() {
        let (near, far) = Channel::pair().unwrap();
        let machine = MachineState { clients_refused: 3, ..MachineState::default() };
        let reports = [
            FromUplink::Records("{}\n".to_owned()),
            FromUplink::Machine(machine),
            FromUplink::Learned(vec!["allow example.org".to_owned()]),
            FromUplink::Sockets,
            FromUplink::Totals(Box::default()),
        ];
        let later = FromUplink::Records("{ }\n".to_owned());
        reports.iter().for_each(|report| far.send(report, &[]).unwrap());
        far.send(&FromUplink::Port { id: 1, error: None }, &[]).unwrap();
        far.send(&later, &[]).unwrap();
        let mut ports = ForwardedPorts::new(0);
        assert_eq!(ports.open(&near, FORWARD, socket()).unwrap(), 1);
        assert!(ports.has_messages());
        let received: Vec<_> = std::iter::from_fn(|| ports.try_receive(&near)).collect();
        assert_eq!(received.split_last(), Some((&later, &reports[..])));
        assert!(!ports.has_messages());
    }

    #[test]
    fn flood_of_reports_before_the_answer_is_bounded() {
        let (near, far) = Channel::pair().unwrap();
        let flood = std::thread::spawn(move || {
            for _ in 0..KEPT_MAX + 9 {
                far.send(&FromUplink::Sockets, &[]).unwrap();
            }
            far.send(&FromUplink::Port { id: 1, error: None }, &[]).unwrap();
        });
        let mut ports = ForwardedPorts::new(0);
        assert_eq!(ports.open(&near, FORWARD, socket()).unwrap(), 1);
        flood.join().unwrap();
        assert_eq!(std::iter::from_fn(|| ports.try_receive(&near)).count(), KEPT_MAX);
    }

    #[test]
    fn socket_beyond_the_limit_is_refused_without_an_order() {
        let (near, far) = Channel::pair().unwrap();
        let mut ports = ForwardedPorts::new(SOCKETS_MAX);
        let refused = ports.open(&near, FORWARD, socket());
        assert!(matches!(refused, Err(ForwardedPortFailure::TooMany)));
        assert!(far.try_receive::<UplinkOrder>().unwrap().is_none());
    }
}
