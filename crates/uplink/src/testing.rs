//! Recording link for tests: stores the frames that the uplink sends to the guest.

use ringfence_frame::{ChecksumOffload, GsoOffload, PortCapabilities};

use crate::link::{Committed, GuestLink, Slots};

/// Link that accepts every kind of frame and stores them.
#[derive(Debug)]
pub struct Wire {
    /// Maximum of frames per reservation.
    room: usize,
    capabilities: PortCapabilities,
    buffers: Vec<Vec<u8>>,
    /// Frames sent to the guest, in order.
    pub frames: Vec<Vec<u8>>,
}

impl Wire {
    /// Creates a link with room for `room` frames at a time.
    pub fn new(room: usize) -> Wire {
        let capabilities = PortCapabilities {
            checksum: ChecksumOffload::Any,
            gso: GsoOffload { tcp_v4: true, tcp_v6: true, ecn: true, udp: true },
            scatter_gather: true,
            mtu: 1500,
        };
        Wire { room, capabilities, buffers: Vec::new(), frames: Vec::new() }
    }

    /// Creates a link for one frame at a time and without offloads.
    pub fn plain() -> Wire {
        Wire { capabilities: PortCapabilities::plain(1500), ..Wire::new(1) }
    }
}

impl GuestLink for Wire {
    fn capabilities(&self) -> PortCapabilities {
        self.capabilities
    }

    fn reserve<'a>(&'a mut self, count: usize, len: usize, slots: &mut Slots<'a>) {
        // A pattern other than zeros, so that unwritten bytes show.
        self.buffers = vec![vec![0xAA; len]; count.min(self.room)];
        slots.extend(self.buffers.iter_mut().map(Vec::as_mut_slice));
    }

    fn commit(&mut self, frames: &[Committed]) {
        for (buffer, frame) in self.buffers.iter().zip(frames) {
            self.frames.push(buffer.get(..frame.len).unwrap_or_default().to_vec());
        }
    }
}
