//! Event channels between processes: a Unix stream socket pair.
//!
//! An eventfd would be a little cheaper, but its blocking mode belongs to the file that both sides
//! share: a peer could clear it, fill the counter, and hold up the next notification. A socket is
//! written with `MSG_DONTWAIT` each time; when it is full, the other end is pending already, which
//! is all that a notification means. Whatever the peer sends (bytes, file descriptors) is read and
//! thrown away in bounded pieces.

// #syscall driver,frontend,daemon sendto,recvfrom: event channels

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

use rustix::net::{RecvFlags, SendFlags};

use super::hub::client::HubClient;
use crate::{Channel, ChannelError, Counters, EventPort};

/// One end. When it is dropped, the hub forgets the port.
pub struct LocalChannel {
    port: EventPort,
    socket: OwnedFd,
    /// Weak: a channel that is left over does not keep the domain in being.
    hub: Weak<HubClient>,
    counters: Arc<Counters>,
}

impl LocalChannel {
    pub(crate) fn new(
        port: EventPort,
        socket: OwnedFd,
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

fn fault(errno: rustix::io::Errno) -> ChannelError {
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
        match rustix::net::send(&self.socket, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(_) => Ok(()),
            // Full: the other end has events that it did not look at yet.
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(()),
            Err(e) => Err(fault(e)),
        }
    }

    fn clear(&self) -> Result<bool, ChannelError> {
        // One read takes what several notifications left; a peer that sends more than this in the
        // meantime leaves the channel pending, and the caller comes back in its own time.
        let mut events = [0u8; 512];
        self.counters.syscalls.add(1);
        match rustix::net::recv(&self.socket, &mut events[..], RecvFlags::DONTWAIT) {
            Ok((_, 0)) => Err(ChannelError::PeerGone),
            Ok(_) => Ok(true),
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(false),
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
        let end = |fd, port| LocalChannel::new(EventPort(port), fd, Weak::new(), Arc::default());
        (end(a, 1), end(b, 2))
    }

    #[test]
    fn events_merge_and_clear() {
        let (a, b) = pair();
        assert_eq!(b.clear(), Ok(false));
        for _ in 0..3 {
            a.notify().unwrap();
        }
        assert_eq!(b.clear(), Ok(true));
        assert_eq!(b.clear(), Ok(false));
    }

    #[test]
    fn a_peer_that_never_reads_does_not_block_a_notification() {
        let (a, b) = pair();
        for _ in 0..100_000 {
            a.notify().unwrap();
        }
        assert_eq!(b.clear(), Ok(true));
    }

    #[test]
    fn a_closed_end_is_told_apart() {
        let (a, b) = pair();
        drop(b);
        assert_eq!(a.notify(), Err(ChannelError::PeerGone));
        assert_eq!(a.clear(), Err(ChannelError::PeerGone));
    }
}
