//! Link over any port, for programs that do not need the links of `ringfence-link`.

use core::time::Duration;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use ringfence_frame::port::{LINK_HEADER_MAX, SUPER_FRAME_MAX};
use ringfence_frame::{
    Batch, DropReason, Fault, Port, PortCapabilities, PortCounters, Received, Transmitted,
};

use crate::link::{Committed, GuestLink, RESERVE_MAX, Slots};

/// Link that sends frames by a port: a TAP interface, for example. Each frame is copied once on its way to the port.
pub struct PortLink<P> {
    port: P,
    /// Reserved buffers, each of `buffer_len` bytes.
    buffers: Vec<u8>,
    buffer_len: usize,
    batch: Batch,
    indices: Vec<u32>,
    /// Failure to be returned by the next call that can return one.
    fault: Option<Fault>,
}

impl<P: Port> PortLink<P> {
    /// Creates a link over a port.
    pub fn new(port: P) -> PortLink<P> {
        let batch =
            Batch::with_capacity(RESERVE_MAX, RESERVE_MAX * (SUPER_FRAME_MAX + LINK_HEADER_MAX));
        PortLink {
            port,
            buffers: Vec::new(),
            buffer_len: 1,
            batch,
            indices: Vec::new(),
            fault: None,
        }
    }

    /// Adds a frame to the batch for the port. Returns `None` if the batch has no room.
    fn push(&mut self, number: usize, frame: Committed) -> Option<()> {
        let bytes = self.buffers.chunks_exact(self.buffer_len).nth(number)?.get(..frame.len)?;
        let offset = self.batch.reserve(frame.len)?;
        self.batch.scratch_mut(offset..offset + frame.len).ok()?.copy_from_slice(bytes);
        self.indices.push(self.batch.push_contiguous(offset, frame.len, frame.meta).ok()?);
        Some(())
    }
}

impl<P: Port> GuestLink for PortLink<P> {
    fn capabilities(&self) -> PortCapabilities {
        self.port.capabilities()
    }

    fn reserve<'a>(&'a mut self, count: usize, len: usize, slots: &mut Slots<'a>) {
        let count = count.min(slots.remaining_capacity());
        self.buffer_len = len.max(1);
        self.buffers.resize(count * self.buffer_len, 0);
        slots.extend(self.buffers.chunks_exact_mut(self.buffer_len));
    }

    fn commit(&mut self, frames: &[Committed]) {
        self.batch.clear();
        self.indices.clear();
        for (number, frame) in frames.iter().enumerate() {
            if self.push(number, *frame).is_none() {
                self.port.counters().dropped(DropReason::PortFull);
            }
        }
        if let Err(fault) = self.port.transmit(&self.batch, &self.indices) {
            self.fault = Some(fault);
        }
    }

    /// Publishes committed frames. The next [`receive`](Port::receive) returns a failure.
    fn flush(&mut self) {
        if let Err(fault) = self.port.flush() {
            self.fault = Some(fault);
        }
    }
}

impl<P: Port> Port for PortLink<P> {
    fn receive(&mut self, batch: &mut Batch, budget: usize) -> Result<Received, Fault> {
        self.fault.take().map_or(Ok(()), Err)?;
        self.port.receive(batch, budget)
    }

    fn complete(&mut self) -> Result<(), Fault> {
        self.port.complete()
    }

    fn transmit(&mut self, batch: &Batch, frames: &[u32]) -> Result<Transmitted, Fault> {
        self.port.transmit(batch, frames)
    }

    fn flush(&mut self) -> Result<(), Fault> {
        self.port.flush()
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        if self.fault.is_some() {
            return Ok(true);
        }
        self.port.arm()
    }

    fn deadline(&self) -> Option<Duration> {
        self.port.deadline()
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        self.port.wait_fds()
    }

    fn clear_events(&mut self) -> Result<(), Fault> {
        self.port.clear_events()
    }

    fn capabilities(&self) -> PortCapabilities {
        self.port.capabilities()
    }

    fn counters(&self) -> &Arc<PortCounters> {
        self.port.counters()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixDatagram;

    use ringfence_frame::tap::TapPort;
    use ringfence_offload::OffloadMeta;
    use ringfence_sys::tap::TapOffloads;

    use super::*;

    #[test]
    fn committed_frames_leave_by_the_port_in_order() {
        // A socket that keeps boundaries stands for the TAP.
        let (own, other) = UnixDatagram::pair().unwrap();
        own.set_nonblocking(true).unwrap();
        let port = TapPort::new(OwnedFd::from(own), TapOffloads(0), 1500, Arc::default());
        let mut link = PortLink::new(port);
        let mut slots = Slots::new();
        link.reserve(2, 100, &mut slots);
        assert_eq!(slots.len(), 2);
        slots[0][..60].fill(1);
        slots[1][..70].fill(2);
        drop(slots);
        link.commit(&[60, 70].map(|len| Committed { len, meta: OffloadMeta::PLAIN }));
        GuestLink::flush(&mut link);
        for (value, len) in [(1, 60), (2, 70)] {
            let mut bytes = [0; 200];
            let n = other.recv(&mut bytes).unwrap();
            assert_eq!(bytes[12..n], vec![value; len]);
        }
        assert_eq!(link.counters().tx_frames.get(), 2);
    }

    #[test]
    fn failure_to_send_is_returned_by_receive() {
        let (own, other) = UnixDatagram::pair().unwrap();
        drop(other);
        let port = TapPort::new(OwnedFd::from(own), TapOffloads(0), 1500, Arc::default());
        let mut link = PortLink::new(port);
        let mut slots = Slots::new();
        link.reserve(1, 60, &mut slots);
        drop(slots);
        link.commit(&[Committed { len: 60, meta: OffloadMeta::PLAIN }]);
        assert!(matches!(link.arm(), Ok(true)));
        assert!(link.receive(&mut Batch::default(), 1).is_err());
    }
}
