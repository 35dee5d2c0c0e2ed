//! Listening sockets of Linux, and the opening of datagram sockets.

// #syscall uplink accept4: connections from outside, to forwarded ports
// #syscall uplink epoll_ctl: waiting for connections
// #syscall uplink ioctl 1=0x5421: FIONBIO: O_NONBLOCK

use core::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::datagrams::{Counted, RealDatagrams};
use super::tcp::prepare_listening;
use super::{RealHost, Source};
use crate::counters::UplinkCounters;
use crate::host::Owner;
use crate::host::datagrams::{DatagramHost, DatagramSocket};
use crate::host::listen::{ListenHost, Listener};
use crate::udp::multicast::service::Group;

impl RealHost {
    /// Adds a socket that its user owns to the epoll. Closing it removes it.
    fn watch(&self, owner: Owner, file: impl AsFd) -> Result<(), Errno> {
        self.count();
        let data = epoll::EventData::new_u64(owner.to_word());
        epoll::add(&self.epoll, file, data, EventFlags::IN | EventFlags::ET)
    }

    fn watched(
        &self,
        owner: Owner,
        socket: RealDatagrams,
    ) -> Result<Box<dyn DatagramSocket>, Errno> {
        self.watch(owner, &socket)?;
        Ok(Box::new(Counted { socket, counters: Arc::clone(&self.counters) }))
    }
}

impl DatagramHost for RealHost {
    fn open_udp(
        &mut self,
        owner: Owner,
        from: u16,
        to: SocketAddr,
    ) -> Result<Box<dyn DatagramSocket>, Errno> {
        // socket, bind, connect and four options
        self.counters.syscalls.add(7);
        let socket = RealDatagrams::udp(from, to, self.source(to.ip()))?;
        self.watched(owner, socket)
    }

    fn open_question(
        &mut self,
        owner: Owner,
        from: u16,
        group: &Group,
    ) -> Result<Box<dyn DatagramSocket>, Errno> {
        self.counters.syscalls.add(7);
        self.watched(owner, RealDatagrams::question(from, group)?)
    }

    fn share_udp(&mut self, owner: Owner, socket: &mut dyn DatagramSocket) -> Result<(), Errno> {
        // getsockname, connect and getsockname; or a new socket
        self.counters.syscalls.add(3);
        let fd = socket.disconnect()?;
        self.count();
        let data = epoll::EventData::new_u64(owner.to_word());
        let flags = EventFlags::IN | EventFlags::ET;
        match epoll::modify(&self.epoll, fd, data, flags) {
            // The descriptor is another one.
            Err(Errno::NOENT) => epoll::add(&self.epoll, fd, data, flags),
            done => done,
        }
    }

    fn routes_freely(&self, to: IpAddr) -> bool {
        self.source(to).is_some_and(|source| *source == Source::default())
    }

    fn connect_udp(
        &mut self,
        owner: Owner,
        socket: OwnedFd,
        to: SocketAddr,
    ) -> Result<Box<dyn DatagramSocket>, Errno> {
        self.counters.syscalls.add(5);
        self.watched(owner, RealDatagrams::connected(socket, to)?)
    }

    fn open_echo(
        &mut self,
        owner: Owner,
        id: u16,
        to: IpAddr,
    ) -> Result<Box<dyn DatagramSocket>, Errno> {
        self.counters.syscalls.add(4);
        let socket = RealDatagrams::echo(id, to, self.source(to))?;
        self.watched(owner, socket)
    }

    fn adopt_udp(
        &mut self,
        owner: Owner,
        socket: OwnedFd,
    ) -> Result<Box<dyn DatagramSocket>, Errno> {
        self.watched(owner, RealDatagrams::adopted(socket)?)
    }
}

struct RealListener {
    file: OwnedFd,
    epoll: Arc<OwnedFd>,
    owner: Owner,
    counters: Arc<UplinkCounters>,
}

impl Listener for RealListener {
    fn accept(&mut self) -> Result<(OwnedFd, SocketAddr), Errno> {
        self.counters.syscalls.add(1);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (file, client) = rustix::net::acceptfrom_with(&self.file, flags)?;
        let client = client.ok_or(Errno::INVAL)?;
        Ok((file, SocketAddr::try_from(client)?))
    }

    fn watch(&mut self, is_watched: bool) {
        self.counters.syscalls.add(1);
        let data = epoll::EventData::new_u64(self.owner.to_word());
        let flags = if is_watched { EventFlags::IN } else { EventFlags::empty() };
        // It cannot fail for a socket that is in the epoll.
        let _ = epoll::modify(&self.epoll, &self.file, data, flags);
    }
}

impl ListenHost for RealHost {
    fn listen(&mut self, owner: Owner, socket: OwnedFd) -> Result<Box<dyn Listener>, Errno> {
        self.counters.syscalls.add(5);
        rustix::io::ioctl_fionbio(&socket, true)?;
        prepare_listening(&socket)?;
        // Level-triggered: the epoll tells of further connections in the call that is made anyway. Edge-triggered, each
        // connection would cost a second accept4, which finds none.
        let data = epoll::EventData::new_u64(owner.to_word());
        epoll::add(&self.epoll, &socket, data, EventFlags::IN)?;
        let (epoll, counters) = (Arc::clone(&self.epoll), Arc::clone(&self.counters));
        Ok(Box::new(RealListener { file: socket, epoll, owner, counters }))
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use rustix::net::sockopt;

    use super::*;
    use crate::host::{OwnerKind, TcpHost};

    #[test]
    fn accepted_connection_has_the_options_of_the_listening_socket() {
        let mut host = RealHost::new(Arc::default()).unwrap();
        let owner = |kind| Owner { kind, index: 0, generation: 0 };
        let socket = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = socket.local_addr().unwrap();
        let mut listener = host.listen(owner(OwnerKind::TcpListener), socket.into()).unwrap();
        let _client = TcpStream::connect(at).unwrap();
        let before = host.counters.syscalls.get();
        let (file, _) = listener.accept().unwrap();
        let second = rustix::io::dup(&file).unwrap();
        host.adopt(owner(OwnerKind::Tcp), file).unwrap();
        assert_eq!(host.counters.syscalls.get() - before, 2, "accept, epoll");
        assert!(sockopt::tcp_nodelay(&second).unwrap());
        assert!(sockopt::socket_oobinline(&second).unwrap());
        assert!(sockopt::socket_keepalive(&second).unwrap());
        let flags = rustix::fs::fcntl_getfl(&second).unwrap();
        assert!(flags.contains(rustix::fs::OFlags::NONBLOCK));
    }
}
