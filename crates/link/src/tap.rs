//! TAP link: one `read` for each frame from the guest, one `write` for each frame to it.
//!
//! It works wherever `/dev/net/tun` exists. An interface with several queues
//! ([`Tap::create_queues`](ringfence_sys::tap::Tap::create_queues)) has one [`TapLink`] and one thread per
//! queue.
//!
//! A `write` is synchronous, so the [`FrameRing`](crate::frame_ring::FrameRing) is empty after each
//! [`flush`](ringfence_frame::Port::flush). A frame that the kernel refuses is dropped and counted. Its data
//! is still in the sender's queue and is retransmitted.

// #syscall uplink write: frames to a TAP

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use ringfence_frame::tap::TapPort;
use ringfence_frame::{Batch, Fault, Port, PortCapabilities, Received, Transmitted};
use ringfence_platform::Counters;
use ringfence_sys::tap::TapOffloads;

use crate::frame_ring::FrameShape;
use crate::ring_link::{FrameQueue, RingLink, RingTransport};

/// Number of frames that the kernel queues for the reader of a TAP interface (its default `txqueuelen`).
const TAP_QUEUE: usize = 1000;

/// Link on one queue of a TAP interface.
pub type TapLink = RingLink<TapTransport>;

/// One queue of a TAP interface.
#[derive(Debug)]
pub struct TapTransport {
    port: TapPort,
    /// Second descriptor of the port's file.
    file: OwnedFd,
}

impl TapLink {
    /// Creates a link over the queue behind `file`. The file must be non-blocking with virtio-net headers of
    /// 12 bytes; `offloads` are those that the kernel granted. System calls are counted in `system`.
    ///
    /// # Errors
    ///
    /// Returns an error if memory or descriptors are exhausted, or `shape` is invalid.
    pub fn new(
        file: OwnedFd,
        offloads: TapOffloads,
        mtu: u16,
        shape: FrameShape,
        system: Arc<Counters>,
    ) -> io::Result<TapLink> {
        let port = TapPort::new(file.try_clone()?, offloads, mtu, Arc::clone(&system));
        let counters = Arc::clone(port.counters());
        RingLink::from_transport(TapTransport { port, file }, shape, counters, system)
    }
}

impl RingTransport for TapTransport {
    fn receive(
        &mut self,
        queue: &mut FrameQueue,
        batch: &mut Batch,
        budget: usize,
    ) -> Result<Received, Fault> {
        let first = batch.len();
        let received = self.port.receive(batch, budget)?;
        queue.record_received(batch, first);
        Ok(received)
    }

    fn send_waiting(&mut self, queue: &mut FrameQueue) -> Result<(), Fault> {
        while let Some(frame) = queue.frames.next_waiting() {
            queue.system.syscalls.add(1);
            match rustix::io::write(&self.file, queue.frames.bytes(&frame)) {
                Ok(_) => queue.finish_sent(),
                Err(errno) => {
                    queue.finish_dropped(ringfence_frame::tap::why_not_written(errno)?);
                }
            }
        }
        Ok(())
    }

    fn complete(&mut self, _: &FrameQueue) -> Result<(), Fault> {
        self.port.complete()
    }

    /// Writes frames at once, after those that are already committed.
    fn transmit_directly(
        &mut self,
        queue: &mut FrameQueue,
        batch: &Batch,
        frames: &[u32],
    ) -> Result<Option<Transmitted>, Fault> {
        self.send_waiting(queue)?;
        self.port.transmit(batch, frames).map(Some)
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        self.port.arm()
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        self.port.wait_fds()
    }

    fn is_polled_by_calls(&self) -> bool {
        true
    }

    fn capabilities(&self) -> PortCapabilities {
        self.port.capabilities()
    }

    fn inbound_queue(&self) -> Option<usize> {
        inbound_queue(&self.port.capabilities())
    }
}

/// Returns the bytes that the kernel queues for the reader before it drops. Returns `None` for a link with TCP
/// super-packets, since each takes only one entry of the queue.
pub(super) fn inbound_queue(capabilities: &PortCapabilities) -> Option<usize> {
    let whole = capabilities.gso.tcp_v4 && capabilities.gso.tcp_v6;
    (!whole).then(|| TAP_QUEUE * usize::from(capabilities.mtu))
}
