//! Ports: the contract between a datapath worker and a source and destination of frames.
//!
//! # Contract
//!
//! One datapath worker owns a port and calls it in rounds:
//!
//! 1. [`Port::receive`] appends frames to a batch. It never blocks.
//! 2. The worker delivers the frames: it calls [`Port::transmit`] of other ports with the batch.
//!    `transmit` never blocks and is synchronous. When it returns, each frame was copied, written, or
//!    dropped and counted.
//! 3. The worker clears the batch, which then refers to no memory of the port. It calls
//!    [`Port::complete`], which returns the buffers to the sender with one publication and at most one
//!    notification.
//! 4. At the end of the round, the worker calls [`Port::flush`] of every port that transmitted. It
//!    publishes to the receiver in the same way.
//!
//! Before the worker sleeps, it *arms* every port ([`Port::arm`]): the port requests an event and checks
//! once more for work. Then the worker waits until one of [`Port::wait_fds`] is readable.
//!
//! Ports are isolated from each other. A port drops and counts the frames that it cannot accept
//! ([`Port::counters`]). A port that cannot continue returns a [`Fault`], and the worker removes that port
//! only.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::batch::Batch;
pub use crate::capabilities::{
    ChecksumOffload, GsoOffload, LINK_HEADER_MAX, PortCapabilities, SUPER_FRAME_MAX,
};
use crate::commands::{PortCommand, PortReply};
use crate::counters::{PortCounters, PortLevels};

/// Frames and work found by [`Port::receive`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Received {
    /// Frames appended to the batch.
    pub frames: usize,
    /// Work items found: frames, refused requests, responses, new buffers. Zero marks a spurious event.
    pub work: usize,
}

/// Numbers of frames that [`Port::transmit`] sent and dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Transmitted {
    pub sent: usize,
    /// Frames that were dropped, each counted by reason.
    pub dropped: usize,
}

/// Reasons for which a port cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// Protocol violation of the peer that ends the connection.
    #[error("the peer misbehaved: {0}")]
    Misbehaved(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Peer or device that has gone away.
    #[error("the other end is gone")]
    Gone,
    /// Error of the operating system that the port cannot recover from.
    #[error("{what}: {source}")]
    System {
        /// Operation that failed.
        what: &'static str,
        source: std::io::Error,
    },
}

impl Fault {
    /// Makes the fault for a protocol violation of the peer.
    pub fn misbehaved(why: impl std::error::Error + Send + Sync + 'static) -> Fault {
        Fault::Misbehaved(Box::new(why))
    }

    /// Makes the fault for an error of the operating system.
    pub fn system(what: &'static str, source: impl Into<std::io::Error>) -> Fault {
        Fault::System { what, source: source.into() }
    }
}

/// Source and destination of frames. See the [module](self) for the contract.
pub trait Port: Send {
    /// Appends at most `budget` frames to `batch`, within its room ([`Batch::has_room_for`] included), and
    /// counts them. It never blocks. `budget` also bounds the refused requests that it processes.
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the port. Frames that the same call appended are not delivered.
    fn receive(&mut self, batch: &mut Batch, budget: usize) -> Result<Received, Fault>;

    /// Returns `true` if the last `receive` ended with a system call that found no frame. The worker then leaves the port out of
    /// one round, unless a file of [`Port::wait_fds`] became readable.
    fn is_drained(&self) -> bool {
        false
    }

    /// Publishes the responses for the sender, with at most one notification. The worker calls it after it
    /// delivered or dropped the frames of the last `receive` and cleared the batch.
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the port.
    fn complete(&mut self) -> Result<(), Fault>;

    /// Sends `frames` (indices into the batch) in this order, and counts them. It never blocks: it drops
    /// frames without room. All frames conform to [`Port::capabilities`].
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the port.
    fn transmit(&mut self, batch: &Batch, frames: &[u32]) -> Result<Transmitted, Fault>;

    /// Keeps every `parts`th queue, from queue 0 on, and returns the others as ports: port `n` has queues
    /// `n`, `n + parts`, and so on. It returns fewer than `parts` ports if there are fewer queues, and none
    /// for a port without queues. The worker calls it once, before the first round. Then each part can run on
    /// its own worker.
    fn split_off(&mut self, parts: usize) -> Vec<Box<dyn Port>> {
        let _ = parts;
        Vec::new()
    }

    /// Executes a command of the control side on a queue. `queue` is the number in the whole device, even
    /// for a part of a port. The worker calls it between rounds, when no frame refers to the port's pages.
    fn execute(&mut self, queue: u16, command: PortCommand) -> PortReply {
        drop((queue, command));
        PortReply::Unsupported
    }

    /// Publishes the frames transmitted in the round, with at most one notification.
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the port.
    fn flush(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    /// Returns the number of maximum-size frames that fit. If it is zero, the next [`Port::arm`] requests an
    /// event for new room.
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the port.
    fn room(&mut self) -> Result<usize, Fault> {
        Ok(usize::MAX)
    }

    /// Returns the number of free slots of a page each, for backpressure ([`Batch::limit`]). A port without
    /// slots is unbounded.
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the port.
    fn slots(&mut self) -> Result<usize, Fault> {
        Ok(usize::MAX)
    }

    /// Registers a sender that waits for `slots` free slots: the next [`Port::arm`] requests an event then.
    fn await_slots(&mut self, _slots: usize) {}

    /// Requests an event for new work, then checks once more: `true` means that there is work already and
    /// the worker must not sleep.
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the port.
    fn arm(&mut self) -> Result<bool, Fault>;

    /// Returns the time (monotonic clock) at which the worker must call the port again even without an
    /// event; `None` if events suffice. After [`Port::arm`] the time is in the future.
    fn deadline(&self) -> Option<core::time::Duration> {
        None
    }

    /// Returns the files that become readable when there is work. They are constant while a worker owns
    /// the port, and are polled level-triggered.
    fn wait_fds(&self) -> Vec<BorrowedFd<'_>>;

    /// Clears the events that made a file of [`Port::wait_fds`] readable. A file that is readable because
    /// frames wait in it needs no action.
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the port.
    fn clear_events(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    /// Clears the events of one file: the one at `file` in [`Port::wait_fds`].
    ///
    /// # Errors
    ///
    /// A [`Fault`] ends the port.
    fn clear_event(&mut self, file: usize) -> Result<(), Fault> {
        let _ = file;
        self.clear_events()
    }

    /// Returns the egress capabilities.
    fn capabilities(&self) -> PortCapabilities;

    /// Returns the port's counters.
    fn counters(&self) -> &Arc<PortCounters>;

    /// Returns the port's levels. The control side asks for them now and then.
    fn levels(&self) -> PortLevels {
        PortLevels::default()
    }
}
