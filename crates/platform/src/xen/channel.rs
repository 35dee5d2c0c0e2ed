//! Event channels on Xen, through `/dev/xen/evtchn`.
//!
//! Each channel opens the device separately, so its descriptor is readable only while this channel is
//! pending. Closing the descriptor unbinds the port. A port that was read stays masked until it is
//! written back. Notifications in between merge into one event after the write. The order is: read, write
//! back, inspect the ring. An event after the inspection makes the descriptor readable again.

// #syscall daemon read,write: which event channels had events

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ringfence_sys::counters::Counters;
use ringfence_wire::grant::DomId;
use rustix::io::Errno;

use super::abi;
use super::device::XenDevice;
use crate::error::PlatformError;
use crate::events::{Channel, ChannelError, EventPort};

/// One end of an event channel. Dropping it unbinds the port.
///
/// Xen does not report that the other end was closed: it unbinds this end and drops notifications. So
/// [`ChannelError::PeerGone`] is never returned; callers learn from the store that a peer is gone.
pub struct XenChannel {
    port: EventPort,
    device: OwnedFd,
    counters: Arc<Counters>,
}

impl XenChannel {
    /// Allocates a port that `peer` may bind.
    pub(super) fn alloc(peer: DomId, counters: Arc<Counters>) -> Result<XenChannel, PlatformError> {
        let device = XenDevice::Evtchn.open()?;
        let port = abi::bind_unbound(device.as_fd(), peer)
            .map_err(|errno| PlatformError::system("allocating an event channel", errno))?;
        Ok(XenChannel { port: EventPort(port), device, counters })
    }

    /// Binds to `port`, which `peer` allocated.
    pub(super) fn bind(
        peer: DomId,
        port: EventPort,
        counters: Arc<Counters>,
    ) -> Result<XenChannel, PlatformError> {
        let device = XenDevice::Evtchn.open()?;
        let port = abi::bind_interdomain(device.as_fd(), peer, port.0)
            .map_err(|errno| PlatformError::system("binding an event channel", errno))?;
        Ok(XenChannel { port: EventPort(port), device, counters })
    }

    /// Writes the port back, which unmasks it.
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
        // The only port is masked once it is in the buffer, so there is at most one word.
        let mut ports = [0; 8];
        self.counters.syscalls.add(1);
        match rustix::io::read(&self.device, &mut ports[..]) {
            Ok(0) | Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Ok(_) => self.write_back().map(|()| true),
            // Overflow of the buffer, unexpected with one port. The port may have been in it, so it counts
            // as pending: an event without work is always possible.
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

    /// Creates a channel with a socket in place of the device; the test plays the driver.
    fn channel() -> (XenChannel, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (device, driver) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        (XenChannel { port: EventPort(77), device, counters: Arc::default() }, driver)
    }

    #[test]
    fn clear_of_pending_port_writes_it_back_once() {
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
    fn notify_refused_by_driver_returns_error_and_is_counted() {
        let (channel, _driver) = channel();
        assert!(matches!(channel.notify(), Err(ChannelError::System(_))));
        assert_eq!(channel.counters.values().notifications, 1);
    }
}
