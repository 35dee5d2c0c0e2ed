//! A TAP interface as link to the guest.
//!
//! Frames for the guest are put together in a few buffers that are used again and again, so they
//! stay in the processor's cache between the read that fills them and the write that empties them.
//! The virtio-net header lies in front of the frame, so that each is one plain `write`.

use std::os::fd::OwnedFd;

use ringfence_net::{ChecksumOffload, GsoOffload, PortCapabilities};
use ringfence_offload::vnet::{MODERN_LEN, VnetHeader};
use ringfence_platform::tap::TapOffloads;
use rustix::io::Errno;

use crate::link::{Committed, GuestSide, Slots};

/// Buffers: together they are to fit the second-level cache beside what else is in use.
const BUFFERS: usize = 4;

/// Octets of a buffer: the longest frame behind its virtio-net header.
const BUFFER_LEN: usize = MODERN_LEN + 65_535 + 18;

/// What became of frames that were written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Frames that the kernel took.
    pub frames: u64,
    /// Frames that it refused.
    pub lost: u64,
}

/// The sending half of a TAP interface with virtio-net headers of 12 octets.
#[derive(Debug)]
pub struct TapLink {
    file: OwnedFd,
    capabilities: PortCapabilities,
    buffers: Box<[u8]>,
    written: Written,
    /// The interface is gone.
    gone: bool,
}

impl TapLink {
    /// A link by the interface behind `file`, which is non-blocking; `offloads` are those the kernel
    /// granted.
    pub fn new(file: OwnedFd, offloads: TapOffloads, mtu: u16) -> TapLink {
        let gso = GsoOffload {
            tcp_v4: offloads.contains(TapOffloads::TSO4),
            tcp_v6: offloads.contains(TapOffloads::TSO6),
            ecn: offloads.contains(TapOffloads::TSO_ECN),
            udp: offloads.contains(TapOffloads::USO4.union(TapOffloads::USO6)),
        };
        let capabilities =
            PortCapabilities { checksum: ChecksumOffload::Any, gso, scatter_gather: true, mtu };
        let buffers = vec![0; BUFFERS * BUFFER_LEN].into_boxed_slice();
        TapLink { file, capabilities, buffers, written: Written::default(), gone: false }
    }

    /// What became of the frames so far.
    pub fn written(&self) -> Written {
        self.written
    }

    /// Whether the interface was removed.
    pub fn is_gone(&self) -> bool {
        self.gone
    }
}

impl GuestSide for TapLink {
    fn capabilities(&self) -> PortCapabilities {
        self.capabilities
    }

    fn reserve<'a>(&'a mut self, count: usize, len: usize, slots: &mut Slots<'a>) {
        let fitting = if len <= BUFFER_LEN - MODERN_LEN { count } else { 0 };
        let frames = self.buffers.chunks_exact_mut(BUFFER_LEN).map(|buffer| {
            let (_, frame) = buffer.split_at_mut(MODERN_LEN);
            frame
        });
        slots.extend(frames.take(fitting.min(slots.remaining_capacity())));
    }

    fn commit(&mut self, frames: &[Committed]) {
        for (buffer, frame) in self.buffers.chunks_exact_mut(BUFFER_LEN).zip(frames) {
            let bytes = &mut buffer[..MODERN_LEN + frame.len];
            // Only a receiver that segments looks at the length of the headers, and it finds out itself.
            let Ok(header) = VnetHeader::for_frame(frame.meta, 0) else { continue };
            bytes[..MODERN_LEN].copy_from_slice(&header.to_modern());
            match rustix::io::write(&self.file, bytes) {
                Ok(_) => self.written.frames += 1,
                Err(errno) => {
                    self.written.lost += 1;
                    self.gone |= matches!(errno, Errno::BADFD | Errno::NODEV);
                }
            }
        }
    }
}
