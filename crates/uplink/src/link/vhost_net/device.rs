//! What drives the other end of the virtqueues: kernel vhost-net, or a test.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use ringfence_sys::iotlb::Miss;
use ringfence_sys::vhost::{QueueName, VhostEvents, VhostNet};

/// The bells between a driver and its device.
pub trait Device: Send {
    /// Tells the device that a queue has new buffers.
    ///
    /// # Errors
    ///
    /// The kernel's.
    fn kick(&self, queue: QueueName) -> io::Result<()>;

    /// Takes what has happened since the last call.
    ///
    /// # Errors
    ///
    /// The kernel's.
    fn take_events(&self) -> io::Result<VhostEvents>;

    /// Whether the interface has come to its end. It wakes nobody when it does so while nothing is sent, so
    /// it is asked now and then.
    ///
    /// # Errors
    ///
    /// The kernel's.
    fn is_gone(&self) -> io::Result<bool>;

    /// What the device wanted and has no address of, where it said so last ([`VhostEvents::missed`]).
    ///
    /// # Errors
    ///
    /// The kernel's.
    fn take_miss(&self) -> io::Result<Option<Miss>>;

    /// Takes the queues away from the device. What it used before can still be popped.
    ///
    /// # Errors
    ///
    /// The kernel's.
    fn stop(&self) -> io::Result<()>;

    /// Readable when there are events to take.
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
