//! A guest's side of the link that keeps what it is given, for tests.

use ringfence_frame::{ChecksumOffload, GsoOffload, PortCapabilities};

use crate::link::{Committed, GuestSide, Slots};

/// Takes every kind of frame, and keeps them.
#[derive(Debug)]
pub struct Wire {
    /// Frames that it has room for at a time.
    room: usize,
    capabilities: PortCapabilities,
    buffers: Vec<Vec<u8>>,
    /// What was sent to the guest, in order.
    pub frames: Vec<Vec<u8>>,
}

impl Wire {
    /// One with room for so many frames at a time.
    pub fn new(room: usize) -> Wire {
        let capabilities = PortCapabilities {
            checksum: ChecksumOffload::Any,
            gso: GsoOffload { tcp_v4: true, tcp_v6: true, ecn: true, udp: true },
            scatter_gather: true,
            mtu: 1500,
        };
        Wire { room, capabilities, buffers: Vec::new(), frames: Vec::new() }
    }

    /// One that takes a single frame at a time, and none that is unfinished.
    pub fn plain() -> Wire {
        Wire { capabilities: PortCapabilities::plain(1500), ..Wire::new(1) }
    }
}

impl GuestSide for Wire {
    fn capabilities(&self) -> PortCapabilities {
        self.capabilities
    }

    fn reserve<'a>(&'a mut self, count: usize, len: usize, slots: &mut Slots<'a>) {
        // Not zeros: what nobody writes is to be seen.
        self.buffers = vec![vec![0xAA; len]; count.min(self.room)];
        slots.extend(self.buffers.iter_mut().map(Vec::as_mut_slice));
    }

    fn commit(&mut self, frames: &[Committed]) {
        for (buffer, frame) in self.buffers.iter().zip(frames) {
            self.frames.push(buffer.get(..frame.len).unwrap_or_default().to_vec());
        }
    }
}
