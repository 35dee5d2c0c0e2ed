//! Virtqueue device: notifications between the link and kernel vhost-net, or a mock device in tests.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use ringfence_platform::iotlb::Miss;
use ringfence_platform::vhost::{QueueName, VhostEvents, VhostNet};

/// Notifications and control of the device that serves the virtqueues.
pub trait Device: Send {
    /// Notifies the device that a queue has new buffers.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    fn kick(&self, queue: QueueName) -> io::Result<()>;

    /// Returns the events since the last call.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    fn take_events(&self) -> io::Result<VhostEvents>;

    /// Returns `true` if the TAP interface was removed. Without traffic the removal raises no event, so the
    /// link asks periodically.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    fn is_gone(&self) -> io::Result<bool>;

    /// Returns the device's last access to an unmapped address, if there was one ([`VhostEvents::missed`]).
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    fn take_miss(&self) -> io::Result<Option<Miss>>;

    /// Detaches the device from its queues. Completions that it has written can still be popped.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error.
    fn stop(&self) -> io::Result<()>;

    /// Returns a descriptor that is readable when there are events.
    fn wait_fd(&self) -> BorrowedFd<'_>;
}

impl Device for VhostNet {
    fn kick(&self, queue: QueueName) -> io::Result<()> {
        VhostNet::kick(self, queue)
    }

    fn take_events(&self) -> io::Result<VhostEvents> {
        VhostNet::take_events(self)
    }

    fn is_gone(&self) -> io::Result<bool> {
        VhostNet::is_gone(self)
    }

    fn take_miss(&self) -> io::Result<Option<Miss>> {
        self.space().map_or(Ok(None), |space| space.take_miss())
    }

    fn stop(&self) -> io::Result<()> {
        VhostNet::stop(self).map(|_| ()).map_err(io::Error::other)
    }

    fn wait_fd(&self) -> BorrowedFd<'_> {
        self.as_fd()
    }
}
