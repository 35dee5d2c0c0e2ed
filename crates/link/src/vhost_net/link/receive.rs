//! Receive side of a vhost-net link: buffers that the device fills, and the frames in them.

use ringfence_frame::batch::{HEADER_MAX, LentRange};
use ringfence_frame::tap::accept;
use ringfence_frame::{Batch, DropReason};
use ringfence_memory::{DeviceAccess, DeviceRange, LentSlice};
use ringfence_offload::OffloadMeta;
use ringfence_offload::vnet::{MODERN_LEN, VnetHeader};
use ringfence_platform::vhost::QueueName;
use ringfence_ring::split::{DriverQueue, QueueFault, Used};
use ringfence_sys::numbers::bounded;

use super::lending::Blocks;
use crate::vhost_net::fault::LinkFault;

/// Size of a receive buffer in bytes. The largest frame spans five. A short one wastes only address space,
/// since unwritten pages use no memory.
pub(super) const BUFFER: usize = 16 << 10;

/// Length of the shortest frame: an Ethernet header.
const SHORTEST: usize = 14;

/// Receive queue with its buffers.
#[derive(Debug)]
pub(super) struct Receiver {
    queue: DriverQueue,
    /// Memory of all buffers; a buffer's offset is its number times its size.
    memory: LentSlice,
    /// Mappings of buffers, if they are mapped one by one.
    lent: Option<Blocks>,
    /// Buffers that frames of the batch may lie in, to be posted again once it is cleared.
    held: Vec<u32>,
    /// Buffers of the current frame.
    pieces: Vec<Used>,
}

/// Results of taking a frame.
pub(super) enum TakenBuffers {
    /// Frame of this length was added.
    Frame(usize),
    /// Frame was dropped for this reason.
    Dropped(DropReason),
    /// No used buffer is waiting.
    Nothing,
}

impl Receiver {
    /// Creates a receiver without posted buffers.
    pub(super) fn new(queue: DriverQueue, memory: LentSlice, lent: Option<Blocks>) -> Receiver {
        let buffers = usize::from(queue.size()).min(memory.len() / BUFFER);
        let held = (0..bounded(buffers, u32::MAX)).rev().collect();
        Receiver { queue, memory, lent, held, pieces: Vec::new() }
    }

    /// Returns the size of the buffers of a queue with `size` entries, in bytes.
    pub(super) fn bytes(size: u16) -> usize {
        usize::from(size) * BUFFER
    }

    /// Posts the held buffers again. Returns `true` if the device needs a kick.
    pub(super) fn post(&mut self) -> bool {
        while let Some(&number) = self.held.last() {
            if self.queue.free() == 0 {
                break;
            }
            // A buffer that cannot be mapped is not used any more.
            self.held.pop();
            let Some(range) = self.range(number as usize) else { continue };
            if self.queue.push(&[range], number).is_err() {
                // Unreachable: the queue had a free entry.
                break;
            }
        }
        self.queue.publish()
    }

    /// Returns a buffer as a range for the device.
    fn range(&mut self, number: usize) -> Option<DeviceRange> {
        match &mut self.lent {
            Some(blocks) => blocks.lend(number, 0, BUFFER),
            None => self.memory.device_range(number * BUFFER, BUFFER, DeviceAccess::Write).ok(),
        }
    }

    /// Adds the next frame, of at most `frame_max` bytes, to the batch, which must have room for it.
    pub(super) fn take(
        &mut self,
        batch: &mut Batch,
        frame_max: usize,
    ) -> Result<TakenBuffers, LinkFault> {
        let posted = self.queue.in_flight();
        let Some(first) = self.pop()? else { return Ok(TakenBuffers::Nothing) };
        if (first.len as usize) < MODERN_LEN {
            return Err(LinkFault::Header { len: first.len });
        }
        let header = self.memory.fetch::<MODERN_LEN>(first.token as usize * BUFFER);
        let Ok(header) = header else { return Err(LinkFault::Header { len: first.len }) };
        let header = VnetHeader::from_modern(&header.into_unchecked());
        let buffers = header.num_buffers;
        if buffers == 0 || buffers > posted {
            return Err(LinkFault::Buffers { buffers, posted });
        }
        self.pieces.clear();
        self.pieces.push(first);
        for used in 1..buffers {
            let piece = self.pop()?.ok_or(LinkFault::Incomplete { buffers, used })?;
            self.pieces.push(piece);
        }
        let bytes: usize = self.pieces.iter().map(|piece| piece.len as usize).sum();
        let len = bytes - MODERN_LEN;
        Ok(match len {
            _ if len < SHORTEST => TakenBuffers::Dropped(DropReason::Runt),
            _ if len > frame_max => TakenBuffers::Dropped(DropReason::Oversize),
            _ => self
                .add(batch, header, len)
                .map_or_else(TakenBuffers::Dropped, |()| TakenBuffers::Frame(len)),
        })
    }

    /// Pops a used buffer. The next [`post`](Self::post) posts it again.
    fn pop(&mut self) -> Result<Option<Used>, LinkFault> {
        let used = self.queue.pop().map_err(fault)?;
        if let Some(used) = used {
            self.held.push(used.token);
            if let Some(blocks) = &mut self.lent {
                blocks.release(used.token as usize);
            }
        }
        Ok(used)
    }

    /// Adds a frame of `len` bytes in the current pieces.
    fn add(&self, batch: &mut Batch, header: VnetHeader, len: usize) -> Result<(), DropReason> {
        let private = len.min(HEADER_MAX);
        let [only] = *self.pieces.as_slice() else {
            return self.add_pieces(batch, header, len, private);
        };
        let offset = only.token as usize * BUFFER + MODERN_LEN;
        let from = offset + private;
        let rest = LentRange { slice: &self.memory, offset: from, len: len - private };
        let rest = (len > private).then_some(rest);
        let fill = |headers: &mut [u8]| {
            self.memory.copy_to(offset, headers).map_err(|_| DropReason::Unreadable)?;
            accept(header, headers, len).ok_or(DropReason::BadOffload)
        };
        batch.push(private, rest, fill).map_err(|why| why.unwrap_or(DropReason::Unreadable))
    }

    /// Adds a frame that spans several buffers.
    fn add_pieces(
        &self,
        batch: &mut Batch,
        header: VnetHeader,
        len: usize,
        private: usize,
    ) -> Result<(), DropReason> {
        let at = batch.reserve(private).ok_or(DropReason::Unreadable)?;
        let mut skip = MODERN_LEN;
        let mut wanted = private;
        let mut frame = batch.frame(at, private).map_err(|_| DropReason::Unreadable)?;
        for used in &self.pieces {
            let skipped = skip.min(used.len as usize);
            skip -= skipped;
            let offset = used.token as usize * BUFFER + skipped;
            let bytes = used.len as usize - skipped;
            let own = wanted.min(bytes);
            let filled = private - wanted;
            let headers = &mut frame.header_mut()[filled..filled + own];
            self.memory.copy_to(offset, headers).map_err(|_| DropReason::Unreadable)?;
            wanted -= own;
            let lent = frame.lent(self.memory.clone(), offset + own, bytes - own);
            lent.map_err(|_| DropReason::Unreadable)?;
        }
        let meta: Option<OffloadMeta> = accept(header, frame.header_mut(), len);
        frame.finish(meta.ok_or(DropReason::BadOffload)?);
        Ok(())
    }

    /// Suppresses events of the queue.
    pub(super) fn suppress(&mut self) {
        self.queue.suppress();
    }

    /// Requests an event for the next frame. Returns `true` if one is already there.
    pub(super) fn arm(&mut self) -> Result<bool, LinkFault> {
        self.queue.arm(1).map_err(fault)
    }
}

fn fault(fault: QueueFault) -> LinkFault {
    LinkFault::Queue { queue: QueueName::Receive, fault }
}
