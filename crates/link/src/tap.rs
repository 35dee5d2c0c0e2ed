//! TAP link: one `read` for each frame from the guest, one `write` for each frame to it.
//!
//! It works wherever `/dev/net/tun` exists. An interface with several queues
//! ([`Tap::create_queues`](ringfence_sys::tap::Tap::create_queues)) has one [`TapLink`] and one thread per
//! queue.
//!
//! A `write` is synchronous, so the [`FrameRing`] is empty after each
//! [`flush`](ringfence_frame::Port::flush). A frame that the kernel refuses is dropped and counted. Its data
//! is still in the sender's queue and is retransmitted.

// #syscall uplink write: frames to a TAP

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::capture::Capture;
use crate::waiting::{self, RingLink};
use ringfence_frame::tap::TapPort;
use ringfence_frame::{Batch, Fault, Port, PortCapabilities, PortCounters, Received, Transmitted};
use ringfence_offload::vnet::MODERN_LEN;
use ringfence_platform::Counters;
use ringfence_sys::tap::TapOffloads;
use ringfence_uplink::link::{Committed, GuestLink, Slots};

use crate::frame_ring::{FrameRing, FrameShape};

/// Number of frames that the kernel queues for the reader of a TAP interface (its default `txqueuelen`).
const TAP_QUEUE: usize = 1000;

/// One queue of a TAP interface, with a ring of frames to write.
#[derive(Debug)]
pub struct TapLink {
    port: TapPort,
    /// Second descriptor of the port's file.
    file: OwnedFd,
    frames: FrameRing,
    system: Arc<Counters>,
    /// Failure to be returned by the next call that can return one.
    fault: Option<Fault>,
    /// File that gets a copy of each frame.
    capture: Option<Capture>,
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
        let frames = FrameRing::new(shape)?;
        let port = TapPort::new(file.try_clone()?, offloads, mtu, Arc::clone(&system));
        Ok(TapLink { port, file, frames, system, fault: None, capture: None })
    }

    /// From now on, the frames of the link are captured.
    pub fn capture(&mut self, capture: Capture) {
        self.capture = Some(capture);
    }

    /// Returns the ring of frames for the guest. Committed frames leave with the next [`flush`](Port::flush).
    pub fn frames(&mut self) -> &mut FrameRing {
        &mut self.frames
    }
}

impl RingLink for TapLink {
    fn ring(&mut self) -> &mut FrameRing {
        &mut self.frames
    }

    fn send_waiting(&mut self) -> Result<(), Fault> {
        while let Some(frame) = self.frames.next_waiting() {
            self.system.syscalls.add(1);
            match rustix::io::write(&self.file, self.frames.bytes(&frame)) {
                Ok(_) => {
                    if let Some(capture) = &mut self.capture {
                        let bytes = self.frames.bytes(&frame).get(MODERN_LEN..).unwrap_or_default();
                        capture.record(bytes.len(), |record| record.copy_from_slice(bytes));
                    }
                    self.port.counters().sent(1, frame.frame_len() as u64);
                    self.port.counters().sent_with(frame.meta, 1);
                }
                Err(errno) => {
                    let reason = ringfence_frame::tap::why_not_written(errno)?;
                    self.port.counters().dropped(reason);
                }
            }
            let finished = self.frames.hand_over().map(|number| self.frames.finish(number));
            debug_assert!(matches!(finished, Some(Ok(()))), "it was waiting");
        }
        Ok(())
    }

    fn fail(&mut self, fault: Fault) {
        self.frames.withdraw();
        self.fault = Some(fault);
    }
}

impl Port for TapLink {
    fn receive(&mut self, batch: &mut Batch, budget: usize) -> Result<Received, Fault> {
        self.fault.take().map_or(Ok(()), Err)?;
        let first = batch.len();
        let received = self.port.receive(batch, budget)?;
        if let Some(capture) = &mut self.capture {
            capture.record_received(batch, first);
        }
        Ok(received)
    }

    fn complete(&mut self) -> Result<(), Fault> {
        self.port.complete()
    }

    /// Writes frames at once, after those that are already committed.
    fn transmit(&mut self, batch: &Batch, frames: &[u32]) -> Result<Transmitted, Fault> {
        self.send_waiting()?;
        self.port.transmit(batch, frames)
    }

    fn flush(&mut self) -> Result<(), Fault> {
        self.send_waiting()
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        self.port.arm()
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        self.port.wait_fds()
    }

    fn capabilities(&self) -> PortCapabilities {
        self.port.capabilities()
    }

    fn counters(&self) -> &Arc<PortCounters> {
        self.port.counters()
    }
}

impl GuestLink for TapLink {
    fn capabilities(&self) -> PortCapabilities {
        self.port.capabilities()
    }

    fn reserve<'a>(&'a mut self, count: usize, len: usize, slots: &mut Slots<'a>) {
        waiting::reserve(self, count, len, slots);
    }

    fn commit(&mut self, frames: &[Committed]) {
        self.frames.commit_all(frames, self.port.counters());
    }

    fn flush(&mut self) {
        waiting::flush(self);
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
