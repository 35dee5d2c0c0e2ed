//! Event channels between processes: a Unix stream socket pair.
//!
//! Any byte in the socket means "pending". A notification is a write with `MSG_DONTWAIT`. If the socket
//! is full, the other end is pending already, so nothing is lost. Clearing reads and discards a bounded
//! number of bytes. The peer cannot send descriptors ([`ByteSocket`]); where the kernel does not refuse
//! them, the channel fails.
//!
//! An eventfd would be slightly cheaper, but both sides would share its blocking mode. A peer could set
//! it to blocking, fill the counter, and block the next notification.

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Weak};

use ringfence_sys::counters::Counters;
use ringfence_sys::descriptors::{ByteSocket, StreamReceived};
use rustix::io::Errno;

use super::hub::client::HubClient;
use crate::events::{Channel, ChannelError, EventPort};

/// One end of an event channel. Dropping it closes the port at the hub.
pub struct LocalChannel {
    port: EventPort,
    socket: ByteSocket,
    /// Weak: a leftover channel does not keep the domain alive at the hub.
    hub: Weak<HubClient>,
    counters: Arc<Counters>,
}

impl LocalChannel {
    pub(crate) fn new(
        port: EventPort,
        socket: ByteSocket,
        hub: Weak<HubClient>,
        counters: Arc<Counters>,
    ) -> LocalChannel {
        LocalChannel { port, socket, hub, counters }
    }
}

impl Drop for LocalChannel {
    fn drop(&mut self) {
        if let Some(hub) = self.hub.upgrade() {
            hub.close_port(self.port);
        }
    }
}

impl AsFd for LocalChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn fault(errno: Errno) -> ChannelError {
    match errno.kind() {
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::NotConnected => {
            ChannelError::PeerGone
        }
        _ => ChannelError::System(errno.raw_os_error()),
    }
}

impl Channel for LocalChannel {
    fn port(&self) -> EventPort {
        self.port
    }

    fn notify(&self) -> Result<(), ChannelError> {
        self.counters.notifications.add(1);
        self.counters.syscalls.add(1);
        match self.socket.send(&[1]) {
            Ok(_) => Ok(()),
            // Full: the other end has events that it has not read.
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(()),
            Err(e) => Err(fault(e)),
        }
    }

    fn clear(&self) -> Result<bool, ChannelError> {
        // One read consumes many notifications. A peer that sent more leaves the channel pending, and
        // the caller's event loop calls again.
        let mut events = [0u8; 512];
        self.counters.syscalls.add(1);
        match self.socket.receive(&mut events) {
            Ok(StreamReceived::Closed) => Err(ChannelError::PeerGone),
            Ok(StreamReceived::Bytes(_)) => Ok(true),
            Ok(StreamReceived::Empty) => Ok(false),
            Ok(StreamReceived::Descriptors) => Err(fault(Errno::BADMSG)),
            Err(e) => Err(fault(e)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    fn pair() -> (LocalChannel, LocalChannel) {
        let (a, b) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .unwrap();
        let end = |fd, port| {
            let socket = ByteSocket::new(fd).unwrap();
            LocalChannel::new(EventPort(port), socket, Weak::new(), Arc::default())
        };
        (end(a, 1), end(b, 2))
    }

    #[test]
    fn notifications_before_clear_merge_into_one_event() {
        let (a, b) = pair();
        assert_eq!(b.clear(), Ok(false));
        for _ in 0..3 {
            a.notify().unwrap();
        }
        assert_eq!(b.clear(), Ok(true));
        assert_eq!(b.clear(), Ok(false));
    }

    #[test]
    fn notify_to_peer_that_never_reads_does_not_block() {
        let (a, b) = pair();
        for _ in 0..100_000 {
            a.notify().unwrap();
        }
        assert_eq!(b.clear(), Ok(true));
    }

    #[test]
    fn notify_and_clear_after_peer_closed_return_peer_gone() {
        let (a, b) = pair();
        drop(b);
        // Another thread closes a socket that may hold descriptors.
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while a.notify().is_ok() && std::time::Instant::now() < end {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(a.notify(), Err(ChannelError::PeerGone));
        assert_eq!(a.clear(), Err(ChannelError::PeerGone));
    }
}
