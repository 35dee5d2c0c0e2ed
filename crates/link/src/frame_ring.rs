//! Frame ring: memory in which frames for the guest are assembled, and from which the kernel reads them.
//!
//! Sockets are read straight into the ring, and the kernel takes frames from it, so no payload is copied in
//! between. Three free-running cursors walk the ring:
//!
//! ```text
//!   tail             tap_head          sock_head
//!    |                  |                 |
//!    v                  v                 v
//!  [ . . . offered . . . . committed . . . . free . . . ] (tail again)
//! ```
//!
//! * **`sock_head`** advances when a frame is committed ([`FrameRing::commit`]): its bytes are complete.
//! * **`tap_head`** advances when a frame is offered to the kernel ([`FrameRing::hand_over`]). Its bytes do
//!   not change from then on.
//! * **`tail`** advances when the kernel has completed the oldest frame ([`FrameRing::finish`]). Frames may
//!   complete in any order; `tail` stops at the first one that has not.
//!
//! Frames that are not yet offered can be withdrawn, which moves `sock_head` back ([`FrameRing::withdraw`]).
//!
//! A frame lies in one *room*, behind a virtio-net header. Each frame has a short room of [`SHORT_ROOM`]
//! bytes. Long frames use one of fewer rooms of [`LONG_ROOM`] bytes, allocated in order by two more cursors.
//! Most frames are short (acknowledgements, datagrams), and bulk data cycles through few pages that stay in
//! the cache.
//!
//! # Guarantees
//!
//! `tail ≤ tap_head ≤ sock_head ≤ tail + frames`. Completions are written by the other side, so
//! [`FrameRing::finish`] validates them.

mod header;

use std::io;

use ringfence_frame::batch::HEADER_MAX;
use ringfence_frame::{DropReason, PortCounters};
use ringfence_memory::{DeviceRange, DeviceRegion, PAGE_SIZE, SendArea};
use ringfence_offload::OffloadMeta;
use ringfence_offload::vnet::{EmitError, MODERN_LEN};
use ringfence_uplink::link::Committed;

use header::{headers_len, vnet_header};

/// Size of the room of a short frame, virtio-net header included, in bytes.
pub const SHORT_ROOM: usize = 2048;

/// Size of the room of a long frame, virtio-net header included, in bytes: the largest frame, rounded up to
/// a page.
pub const LONG_ROOM: usize = 65_536 + PAGE_SIZE;

/// Dimensions of a [`FrameRing`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameShape {
    /// Number of frames, a power of two.
    pub frames: u32,
    /// Number of rooms for long frames, a power of two.
    pub long: u32,
}

impl Default for FrameShape {
    /// Returns the default: 256 frames and 64 long rooms, 4.75 MiB.
    fn default() -> FrameShape {
        FrameShape { frames: 256, long: 64 }
    }
}

impl FrameShape {
    /// Returns the size of the ring's memory in bytes, a whole number of pages.
    pub fn bytes(self) -> usize {
        self.short_bytes() + self.long as usize * LONG_ROOM
    }

    /// Returns the size of all short rooms, which come first, rounded up to pages.
    pub(crate) fn short_bytes(self) -> usize {
        (self.frames as usize * SHORT_ROOM).next_multiple_of(PAGE_SIZE)
    }

    fn is_valid(self) -> bool {
        const MOST: u32 = 1 << 15;
        [self.frames, self.long].iter().all(|n| n.is_power_of_two() && *n <= MOST)
    }
}

/// Reasons for which a frame is not committed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CommitError {
    /// No room is reserved, or all reserved rooms are used.
    #[error("no room is reserved for the frame")]
    NotReserved,
    /// Frame is longer than its room.
    #[error("a frame of {len} bytes in a room of {room}")]
    TooLong {
        /// Length of the frame in bytes.
        len: usize,
        /// Size of the room in bytes.
        room: usize,
    },
    /// Metadata that no virtio-net header can express.
    #[error(transparent)]
    Meta(#[from] EmitError),
}

/// Completion of a frame that the kernel was not offered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("frame {frame} is not with the kernel")]
pub struct NotOffered {
    /// Free-running number of the frame.
    pub frame: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum FrameState {
    #[default]
    Free,
    Filled,
    Offered,
    Finished,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Room {
    Short,
    Long,
}

#[derive(Clone, Copy, Debug, Default)]
struct Frame {
    state: FrameState,
    /// Offset of the virtio-net header in the ring's memory.
    offset: usize,
    is_long: bool,
    /// Length of the virtio-net header and all headers if the payload is a separate range; otherwise 0.
    headers: usize,
    /// Length in bytes, virtio-net header included.
    len: usize,
    meta: OffloadMeta,
}

/// Committed frame that is not yet offered, and its position.
#[derive(Clone, Copy, Debug)]
pub struct PendingFrame {
    /// Offset of the virtio-net header in the ring's memory.
    pub offset: usize,
    /// Length of the virtio-net header and all headers of a long frame; 0 for a short one.
    pub headers: usize,
    /// Length in bytes, virtio-net header included.
    pub len: usize,
    /// Offload work left to do.
    pub meta: OffloadMeta,
}

impl PendingFrame {
    /// Returns the length of the frame without the virtio-net header.
    pub fn frame_len(&self) -> usize {
        self.len.saturating_sub(MODERN_LEN)
    }
}

/// Ring of frames for the guest. See the [module](self).
#[derive(Debug)]
pub struct FrameRing {
    area: SendArea,
    shape: FrameShape,
    frames: Vec<Frame>,
    sock_head: u32,
    tap_head: u32,
    tail: u32,
    long_head: u32,
    long_tail: u32,
    /// Rooms that are reserved and not yet committed.
    reserved: (Room, usize),
}

impl FrameRing {
    /// Creates a ring in memory of its own.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error, or `InvalidInput` if a number of the shape is no power of two up to 32768.
    pub fn new(shape: FrameShape) -> io::Result<FrameRing> {
        if !shape.is_valid() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(FrameRing {
            area: SendArea::new(shape.bytes())?,
            shape,
            frames: vec![Frame::default(); shape.frames as usize],
            sock_head: 0,
            tap_head: 0,
            tail: 0,
            long_head: 0,
            long_tail: 0,
            reserved: (Room::Short, 0),
        })
    }

    /// Returns the dimensions of the ring.
    pub fn shape(&self) -> FrameShape {
        self.shape
    }

    /// Returns the offset of a frame that is offered to the kernel.
    pub fn offered_at(&self, number: u32) -> Option<usize> {
        let frame = self.frames[self.frame_place(number)];
        (frame.state == FrameState::Offered).then_some(frame.offset)
    }

    /// Returns the ring's memory, to be mapped for a device.
    pub fn region(&self) -> DeviceRegion {
        self.area.device_region()
    }

    /// Returns the number of frames of `len` bytes that can be committed now.
    pub fn free(&self, len: usize) -> usize {
        match room_for(len) {
            None => 0,
            Some(Room::Short) => self.free_frames(),
            Some(Room::Long) => {
                let used = self.long_head.wrapping_sub(self.long_tail);
                self.free_frames().min((self.shape.long - used) as usize)
            }
        }
    }

    /// Reserves at most `count` rooms of at least `len` bytes, and passes them to `give` in the order in which
    /// they must be committed. Cancels an earlier reservation that was not committed.
    pub fn reserve<'a>(&'a mut self, count: usize, len: usize, mut give: impl FnMut(&'a mut [u8])) {
        let count = count.min(self.free(len));
        let room = room_for(len).unwrap_or(Room::Short);
        self.reserved = (room, count);
        let (short, long) = self.area.bytes_mut().split_at_mut(self.shape.short_bytes());
        let (rooms, size, first) = match room {
            Room::Short => (short, SHORT_ROOM, self.sock_head & (self.shape.frames - 1)),
            Room::Long => (long, LONG_ROOM, self.long_head & (self.shape.long - 1)),
        };
        // Rooms up to the end of the ring come first, then those from its beginning.
        let (behind, ahead) = rooms.split_at_mut(first as usize * size);
        let in_order = ahead.chunks_exact_mut(size).chain(behind.chunks_exact_mut(size));
        in_order.take(count).for_each(|room| give(&mut room[MODERN_LEN..]));
    }

    /// Commits a frame of `len` bytes in the next reserved room: `sock_head` advances.
    ///
    /// # Errors
    ///
    /// Returns [`CommitError`]; the ring is unchanged.
    pub fn commit(&mut self, len: usize, meta: OffloadMeta) -> Result<(), CommitError> {
        let (room, left) = self.reserved;
        if left == 0 {
            return Err(CommitError::NotReserved);
        }
        let (offset, size) = match room {
            Room::Short => (self.frame_place(self.sock_head) * SHORT_ROOM, SHORT_ROOM),
            Room::Long => {
                let place = (self.long_head & (self.shape.long - 1)) as usize;
                (self.shape.short_bytes() + place * LONG_ROOM, LONG_ROOM)
            }
        };
        if len > size - MODERN_LEN {
            return Err(CommitError::TooLong { len, room: size - MODERN_LEN });
        }
        let memory = &mut self.area.bytes_mut()[offset..offset + size];
        let (vnet, frame) = memory.split_at_mut(MODERN_LEN);
        let header = &frame[..len.min(HEADER_MAX)];
        let is_long = room == Room::Long;
        let headers = if is_long || meta.gso.is_some() { headers_len(header, len) } else { 0 };
        vnet.copy_from_slice(&vnet_header(headers, meta)?);
        let headers = if headers > 0 { MODERN_LEN + usize::from(headers) } else { 0 };
        let len = MODERN_LEN + len;
        let place = self.frame_place(self.sock_head);
        self.frames[place] =
            Frame { state: FrameState::Filled, offset, is_long, headers, len, meta };
        self.sock_head = self.sock_head.wrapping_add(1);
        self.long_head = self.long_head.wrapping_add(is_long.into());
        self.reserved = (room, left - 1);
        Ok(())
    }

    /// Commits the frames in the next reserved rooms. Counts those that cannot be committed as dropped, and returns the
    /// number of those that were committed.
    pub(crate) fn commit_all(&mut self, frames: &[Committed], counters: &PortCounters) -> usize {
        let mut done = 0;
        for frame in frames {
            match self.commit(frame.len, frame.meta) {
                Ok(()) => done += 1,
                Err(CommitError::NotReserved) => counters.dropped(DropReason::PortFull),
                Err(CommitError::TooLong { .. }) => counters.dropped(DropReason::TooLong),
                Err(CommitError::Meta(_)) => counters.dropped(DropReason::GsoUnsupported),
            }
        }
        done
    }

    /// Returns the number of frames that are committed and not offered.
    pub fn waiting(&self) -> usize {
        self.sock_head.wrapping_sub(self.tap_head) as usize
    }

    /// Returns the number of offered frames, completed ones behind an incomplete one included.
    pub fn offered(&self) -> usize {
        self.tap_head.wrapping_sub(self.tail) as usize
    }

    /// Returns the oldest committed frame that is not offered.
    pub fn next_waiting(&self) -> Option<PendingFrame> {
        self.all_waiting().next()
    }

    /// Iterates over all committed frames that are not offered, the oldest first.
    pub fn all_waiting(&self) -> impl Iterator<Item = PendingFrame> + '_ {
        (0..self.sock_head.wrapping_sub(self.tap_head)).map(|ahead| {
            let number = self.tap_head.wrapping_add(ahead);
            let &Frame { offset, headers, len, meta, .. } = &self.frames[self.frame_place(number)];
            PendingFrame { offset, headers, len, meta }
        })
    }

    /// Returns the bytes of a frame that is not offered.
    pub fn bytes(&self, frame: &PendingFrame) -> &[u8] {
        self.area.bytes().get(frame.offset..frame.offset + frame.len).unwrap_or_default()
    }

    /// Returns the bytes of a frame that is not offered, as a range for a device.
    pub fn device_range(&self, frame: &PendingFrame) -> Option<DeviceRange> {
        self.area.device_range(frame.offset, frame.len).ok()
    }

    /// Returns the bytes at a device's address, for a mock device.
    #[cfg(any(test, feature = "test-utils"))]
    #[doc(hidden)]
    pub fn bytes_at(&self, address: u64, len: u32) -> Option<&[u8]> {
        let offset = address.checked_sub(self.area.device_region().address())?;
        let offset = usize::try_from(offset).ok()?;
        self.area.bytes().get(offset..)?.get(..len as usize)
    }

    /// Marks the frame of [`FrameRing::next_waiting`] as offered: `tap_head` advances. Returns the frame's
    /// number, for [`FrameRing::finish`], or `None` if no frame waits.
    pub fn hand_over(&mut self) -> Option<u32> {
        if self.waiting() == 0 {
            return None;
        }
        let number = self.tap_head;
        let place = self.frame_place(number);
        self.frames[place].state = FrameState::Offered;
        self.tap_head = number.wrapping_add(1);
        Some(number)
    }

    /// Completes frame `number`: `tail` advances as far as possible.
    ///
    /// # Errors
    ///
    /// Returns [`NotOffered`] if the kernel does not have the frame; the ring is unchanged.
    pub fn finish(&mut self, number: u32) -> Result<(), NotOffered> {
        let place = self.frame_place(number);
        let with_kernel = number.wrapping_sub(self.tail) < self.tap_head.wrapping_sub(self.tail);
        if !with_kernel || self.frames[place].state != FrameState::Offered {
            return Err(NotOffered { frame: number });
        }
        self.frames[place].state = FrameState::Finished;
        while self.tail != self.tap_head {
            let place = self.frame_place(self.tail);
            if self.frames[place].state != FrameState::Finished {
                break;
            }
            self.long_tail = self.long_tail.wrapping_add(self.frames[place].is_long.into());
            self.frames[place].state = FrameState::Free;
            self.tail = self.tail.wrapping_add(1);
        }
        Ok(())
    }

    /// Withdraws all frames that are not offered: `sock_head` moves back. Returns their number. Cancels the
    /// reservation.
    pub fn withdraw(&mut self) -> usize {
        let taken = self.waiting();
        self.reserved = (Room::Short, 0);
        while self.sock_head != self.tap_head {
            self.sock_head = self.sock_head.wrapping_sub(1);
            let place = self.frame_place(self.sock_head);
            self.long_head = self.long_head.wrapping_sub(self.frames[place].is_long.into());
            self.frames[place].state = FrameState::Free;
        }
        taken
    }

    fn free_frames(&self) -> usize {
        (self.shape.frames - self.sock_head.wrapping_sub(self.tail)) as usize
    }

    fn frame_place(&self, number: u32) -> usize {
        (number & (self.shape.frames - 1)) as usize
    }
}

/// Returns the kind of room for a frame of `len` bytes, or `None` if it is too long.
fn room_for(len: usize) -> Option<Room> {
    if len <= SHORT_ROOM - MODERN_LEN {
        Some(Room::Short)
    } else {
        (len <= LONG_ROOM - MODERN_LEN).then_some(Room::Long)
    }
}

#[cfg(test)]
mod tests;
