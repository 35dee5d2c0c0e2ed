//! Event channels, by `/dev/xen/evtchn`.
//!
//! Each channel has the device open for itself, so its descriptor is readable when this channel is
//! pending and not for another's sake; closing it unbinds the port. A port that was read stays
//! masked until it is written back: however often the peer notifies meanwhile, that costs this
//! domain nothing but one more event, when it is written back. The order is read, write back, look
//! at the ring: an event that comes after the look makes the descriptor readable again.

// #syscall daemon read,write: which event channels had events

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;

use super::abi;
use super::device::Device;
use crate::{Channel, ChannelError, Counters, DomId, EventPort, PlatformError};

/// One end. Its port is unbound when it is dropped.
///
/// Xen does not tell that the other end was closed: it puts this end back to unbound and drops what
/// is sent to it. So [`ChannelError::PeerGone`] never comes; the store tells of a peer that is gone.
pub struct XenChannel {
    port: EventPort,
    device: OwnedFd,
    counters: Arc<Counters>,
}

impl XenChannel {
    /// A port that `peer` may bind.
    pub(super) fn alloc(peer: DomId, counters: Arc<Counters>) -> Result<XenChannel, PlatformError> {
        let device = Device::Evtchn.open()?;
        let port = abi::bind_unbound(device.as_fd(), peer)
            .map_err(|errno| PlatformError::system("allocating an event channel", errno))?;
        Ok(XenChannel { port: EventPort(port), device, counters })
    }

    /// The other end of `port`, which `peer` allocated.
    pub(super) fn bind(
        peer: DomId,
        port: EventPort,
        counters: Arc<Counters>,
    ) -> Result<XenChannel, PlatformError> {
        let device = Device::Evtchn.open()?;
        let port = abi::bind_interdomain(device.as_fd(), peer, port.0)
            .map_err(|errno| PlatformError::system("binding an event channel", errno))?;
        Ok(XenChannel { port: EventPort(port), device, counters })
    }

    /// Unmasks the port.
    fn write_back(&self) -> Result<(), ChannelError> {
        self.counters.syscalls.add(1);
        rustix::io::write(&self.device, &self.port.0.to_ne_bytes()).map(drop).map_err(fault)
    }
}

fn fault(errno: Errno) -> ChannelError {
    ChannelError::System(errno.raw_os_error())
}

impl AsFd for XenChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }
}

impl Channel for XenChannel {
    fn port(&self) -> EventPort {
        self.port
    }

    fn notify(&self) -> Result<(), ChannelError> {
        self.counters.notifications.add(1);
        self.counters.syscalls.add(1);
        abi::notify(self.device.as_fd(), self.port.0).map_err(fault)
    }

    fn clear(&self) -> Result<bool, ChannelError> {
        // There is one port, masked once it is in the buffer: so there is one word at most.
        let mut ports = [0; 8];
        self.counters.syscalls.add(1);
        match rustix::io::read(&self.device, &mut ports[..]) {
            Ok(0) | Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Ok(_) => self.write_back().map(|()| true),
            // The buffer overflowed, which with one port it should not. Whether this one was in it
            // is lost, so it counts as pending: an event without work is always possible.
            Err(Errno::FBIG) => {
                self.counters.syscalls.add(1);
                abi::reset(self.device.as_fd()).map_err(fault)?;
                self.write_back().map(|()| true)
            }
            Err(errno) => Err(fault(errno)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, send, socketpair};

    /// A channel whose driver is the other end of a socket: it tells of ports, and is told of them.
    fn channel() -> (XenChannel, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (device, driver) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        (XenChannel { port: EventPort(77), device, counters: Arc::default() }, driver)
    }

    #[test]
    fn a_pending_port_is_written_back_once() {
        let (channel, driver) = channel();
        assert_eq!(channel.clear(), Ok(false));
        send(&driver, &77u32.to_ne_bytes(), rustix::net::SendFlags::empty()).unwrap();
        assert_eq!(channel.clear(), Ok(true));
        assert_eq!(channel.clear(), Ok(false));
        let mut written = [0u8; 16];
        let (len, _) = recv(&driver, &mut written[..], RecvFlags::DONTWAIT).unwrap();
        assert_eq!(written[..len], 77u32.to_ne_bytes());
        assert_eq!(recv(&driver, &mut written[..], RecvFlags::DONTWAIT), Err(Errno::AGAIN));
        assert_eq!(
            channel.counters.values().syscalls,
            4,
            "two reads that find nothing, a read and a write"
        );
    }

    #[test]
    fn a_notification_that_the_driver_refuses_is_an_error_and_counted() {
        let (channel, _driver) = channel();
        assert!(matches!(channel.notify(), Err(ChannelError::System(_))));
        assert_eq!(channel.counters.values().notifications, 1);
    }
}
