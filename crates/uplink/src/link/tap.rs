//! The link by a TAP interface: one `read` for each frame from the guest, one `write` for each to it.
//!
//! It works wherever there is `/dev/net/tun`, and it is what the link by vhost-net is measured against. An
//! interface with several queues ([`Tap::create_queues`](ringfence_sys::tap::Tap::create_queues)) has
//! one [`TapLink`] for each, so that each has a thread of its own.
//!
//! A `write` is over when it returns, so the [`FrameRing`] is empty after each
//! [`flush`](ringfence_frame::Port::flush): `tap_head` and `tail` move together. A frame that the kernel does
//! not take is dropped and counted; whoever sent it has its bytes still, and sends it again.

// #syscall uplink write: frames to a TAP

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use ringfence_frame::tap::TapPort;
use ringfence_frame::{Batch, Fault, Port, PortCapabilities, PortCounters, Received, Transmitted};
use ringfence_platform::Counters;
use ringfence_sys::tap::TapOffloads;

use crate::GuestSide;
use crate::link::{Committed, Slots};

use crate::link::vhost_net::frames::{FrameRing, FrameShape};
use crate::link::vhost_net::{commit_all, inbound_queue};

/// One queue of a TAP interface, with a ring of frames in front of it.
#[derive(Debug)]
pub struct TapLink {
    port: TapPort,
    /// The same file as the port's.
    file: OwnedFd,
    frames: FrameRing,
    system: Arc<Counters>,
    /// Why the link ended, where nobody could be told yet.
    fault: Option<Fault>,
}

impl TapLink {
    /// A link by the queue behind `file`, which is non-blocking and has virtio-net headers of 12 octets;
    /// `offloads` are those granted by the kernel. System calls are counted in `system`.
    ///
    /// # Errors
    ///
    /// When there is no memory, or no descriptor, or `shape` is none.
    pub fn new(
        file: OwnedFd,
        offloads: TapOffloads,
        mtu: u16,
        shape: FrameShape,
        system: Arc<Counters>,
    ) -> io::Result<TapLink> {
        let frames = FrameRing::new(shape)?;
        let port = TapPort::new(file.try_clone()?, offloads, mtu, Arc::clone(&system));
        Ok(TapLink { port, file, frames, system, fault: None })
    }

    /// The frames on their way to the guest. What is committed leaves with the next
    /// [`flush`](Port::flush).
    pub fn frames(&mut self) -> &mut FrameRing {
        &mut self.frames
    }

    /// Writes the frames that wait.
    fn write_waiting(&mut self) -> Result<(), Fault> {
        while let Some(frame) = self.frames.next_waiting() {
            self.system.syscalls.add(1);
            match rustix::io::write(&self.file, self.frames.bytes(&frame)) {
                Ok(_) => {
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
}

impl Port for TapLink {
    fn receive(&mut self, batch: &mut Batch, budget: usize) -> Result<Received, Fault> {
        self.fault.take().map_or(Ok(()), Err)?;
        self.port.receive(batch, budget)
    }

    fn complete(&mut self) -> Result<(), Fault> {
        self.port.complete()
    }

    /// Written at once, behind what waits already.
    fn transmit(&mut self, batch: &Batch, frames: &[u32]) -> Result<Transmitted, Fault> {
        self.write_waiting()?;
        self.port.transmit(batch, frames)
    }

    fn flush(&mut self) -> Result<(), Fault> {
        self.write_waiting()
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

impl GuestSide for TapLink {
    fn capabilities(&self) -> PortCapabilities {
        self.port.capabilities()
    }

    fn reserve<'a>(&'a mut self, count: usize, len: usize, slots: &mut Slots<'a>) {
        let count = count.min(slots.remaining_capacity());
        if self.frames.free(len) < count {
            // The ring is only full of what was not written yet.
            GuestSide::flush(self);
        }
        self.frames.reserve(count, len, |room| slots.push(room));
    }

    fn commit(&mut self, frames: &[Committed]) {
        commit_all(&mut self.frames, frames, self.port.counters());
    }

    /// A failure ends the next [`receive`](Port::receive).
    fn flush(&mut self) {
        if let Err(fault) = self.write_waiting() {
            self.frames.withdraw();
            self.fault = Some(fault);
        }
    }

    fn inbound_queue(&self) -> Option<usize> {
        inbound_queue(&self.port.capabilities())
    }
}
