//! The ring of frames on their way to the guest.
//!
//! # Theory of operation
//!
//! What a host socket has received is read straight into this memory, the kernel takes it from here,
//! and nothing in between copies it. Three cursors, all free-running, walk the ring:
//!
//! ```text
//!   tail           tap_head          sock_head
//!    |                |                 |
//!    v  with the      v  filled, not    v
//!  [ . . . kernel . . . yet offered . . . free . . . ] (tail again)
//! ```
//!
//! * **`sock_head`** moves when a frame was put together ([`FrameRing::commit`]): its bytes are in the ring.
//! * **`tap_head`** moves when the frame was offered to the kernel ([`FrameRing::hand_over`]). From then on
//!   its bytes do not change.
//! * **`tail`** moves when the kernel is done with the oldest frame ([`FrameRing::finish`]). Frames may be
//!   finished in any order; `tail` stops at the first one that is not.
//!
//! `tail ≤ tap_head ≤ sock_head ≤ tail + frames`, always. What was not offered yet can be taken back:
//! `sock_head` moves backwards ([`FrameRing::withdraw`]).
//!
//! A frame lies in one *room*, behind a virtio-net header: a short one in the [`SHORT_ROOM`] octets that each
//! frame has, a long one in one of fewer [`LONG_ROOM`]s, which are taken and come back in order, by two
//! cursors of their own. Most frames are short (acknowledgements, datagrams), so there are many of them, and
//! a bulk stream goes round in few, warm, pages all the same.
//!
//! Which frames the kernel has finished is the word of the other side, so [`FrameRing::finish`] checks it.

use std::io;

use ringfence_frame::batch::HEADER_MAX;
use ringfence_memory::{DeviceRange, DeviceRegion, PAGE_SIZE, SendArea};
use ringfence_offload::OffloadMeta;
use ringfence_offload::vnet::{EmitError, MODERN_LEN};

use crate::link::vhost_net::header::{headers_len, vnet_header};

/// Octets of a room for a short frame, its virtio-net header included.
pub const SHORT_ROOM: usize = 2048;

/// Octets of a room for a long frame, its virtio-net header included: the largest frame there is, and up to
/// the next page.
pub const LONG_ROOM: usize = 65_536 + PAGE_SIZE;

/// How large a [`FrameRing`] is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameShape {
    /// Frames, a power of two.
    pub frames: u32,
    /// Rooms for long frames, a power of two.
    pub long: u32,
}

impl Default for FrameShape {
    /// 256 frames, 64 of them long: 4.75 MiB.
    fn default() -> FrameShape {
        FrameShape { frames: 256, long: 64 }
    }
}

impl FrameShape {
    /// Octets of memory that the ring takes: a whole number of pages.
    pub fn bytes(self) -> usize {
        self.short_bytes() + self.long as usize * LONG_ROOM
    }

    /// The short rooms come first, in a whole number of pages.
    pub(crate) fn short_bytes(self) -> usize {
        (self.frames as usize * SHORT_ROOM).next_multiple_of(PAGE_SIZE)
    }

    fn is_valid(self) -> bool {
        const MOST: u32 = 1 << 15;
        [self.frames, self.long].iter().all(|n| n.is_power_of_two() && *n <= MOST)
    }
}

/// Why a frame was not committed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CommitError {
    /// No room is reserved, or all that were are used up.
    #[error("no room is reserved for the frame")]
    NotReserved,
    /// Longer than the room.
    #[error("a frame of {len} octets in a room of {room}")]
    TooLong {
        /// Octets of the frame.
        len: usize,
        /// Octets of the room.
        room: usize,
    },
    /// The metadata cannot be put into a virtio-net header.
    #[error(transparent)]
    Meta(#[from] EmitError),
}

/// A frame was called finished that is not with the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("frame {frame} is not with the kernel")]
pub struct NotOffered {
    /// The free-running number of the frame.
    pub frame: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum State {
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
    state: State,
    /// The first octet in the area, where the virtio-net header is.
    offset: usize,
    is_long: bool,
    /// Octets of the virtio-net header and all headers, where the payload is to be told apart; else 0.
    headers: usize,
    /// Octets, with the virtio-net header.
    len: usize,
    meta: OffloadMeta,
}

/// A frame that waits, and where it lies.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    /// The first octet in the ring's memory, where the virtio-net header is.
    pub offset: usize,
    /// Octets of the virtio-net header and all other headers, of a long frame; 0 for short ones.
    pub headers: usize,
    /// Octets of all of it.
    pub len: usize,
    /// What is left to be done to the frame.
    pub meta: OffloadMeta,
}

impl Waiting {
    /// Octets of the frame, without the virtio-net header.
    pub fn frame_len(&self) -> usize {
        self.len.saturating_sub(MODERN_LEN)
    }
}

/// See the [module](self).
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
    /// Rooms that were given out and not committed yet.
    reserved: (Room, usize),
}

impl FrameRing {
    /// A ring, in memory of its own.
    ///
    /// # Errors
    ///
    /// The kernel's, or `InvalidInput` when a number of the shape is no power of two up to 32768.
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

    /// How large it is.
    pub fn shape(&self) -> FrameShape {
        self.shape
    }

    /// Where in the ring's memory a frame lies that is with the kernel.
    pub fn offered_at(&self, number: u32) -> Option<usize> {
        let frame = self.frames[self.frame_place(number)];
        (frame.state == State::Offered).then_some(frame.offset)
    }

    /// The ring's memory, for a device's table.
    pub fn region(&self) -> DeviceRegion {
        self.area.device_region()
    }

    /// Frames of `len` octets that can be committed now.
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

    /// Gives the rooms of the next frames, at most `count`, each of `len` octets or more, in the order in
    /// which they are to be committed. What was reserved before and not committed is void.
    pub fn reserve<'a>(&'a mut self, count: usize, len: usize, mut give: impl FnMut(&'a mut [u8])) {
        let count = count.min(self.free(len));
        let room = room_for(len).unwrap_or(Room::Short);
        self.reserved = (room, count);
        let (short, long) = self.area.bytes_mut().split_at_mut(self.shape.short_bytes());
        let (rooms, size, first) = match room {
            Room::Short => (short, SHORT_ROOM, self.sock_head & (self.shape.frames - 1)),
            Room::Long => (long, LONG_ROOM, self.long_head & (self.shape.long - 1)),
        };
        // Those up to the end of the ring come first, then those from its beginning.
        let (behind, ahead) = rooms.split_at_mut(first as usize * size);
        let in_order = ahead.chunks_exact_mut(size).chain(behind.chunks_exact_mut(size));
        in_order.take(count).for_each(|room| give(&mut room[MODERN_LEN..]));
    }

    /// The next room that was reserved holds a frame of `len` octets: `sock_head` moves.
    ///
    /// # Errors
    ///
    /// [`CommitError`]; nothing has moved.
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
        self.frames[place] = Frame { state: State::Filled, offset, is_long, headers, len, meta };
        self.sock_head = self.sock_head.wrapping_add(1);
        self.long_head = self.long_head.wrapping_add(is_long.into());
        self.reserved = (room, left - 1);
        Ok(())
    }

    /// Frames that were committed and not offered to the kernel.
    pub fn waiting(&self) -> usize {
        self.sock_head.wrapping_sub(self.tap_head) as usize
    }

    /// Frames that are with the kernel, or are kept behind one that is.
    pub fn offered(&self) -> usize {
        self.tap_head.wrapping_sub(self.tail) as usize
    }

    /// The oldest frame that was not offered yet.
    pub fn next_waiting(&self) -> Option<Waiting> {
        if self.waiting() == 0 {
            return None;
        }
        let &Frame { offset, headers, len, meta, .. } =
            &self.frames[self.frame_place(self.tap_head)];
        Some(Waiting { offset, headers, len, meta })
    }

    /// The bytes of a frame that waits.
    pub fn bytes(&self, frame: &Waiting) -> &[u8] {
        self.area.bytes().get(frame.offset..frame.offset + frame.len).unwrap_or_default()
    }

    /// The bytes of a frame that waits, for a device.
    pub fn device_range(&self, frame: &Waiting) -> Option<DeviceRange> {
        self.area.device_range(frame.offset, frame.len).ok()
    }

    /// The bytes at an address of a device's, for one that is made up.
    #[cfg(any(test, feature = "test-utils"))]
    #[doc(hidden)]
    pub fn bytes_at(&self, address: u64, len: u32) -> Option<&[u8]> {
        let offset = address.checked_sub(self.area.device_region().address())?;
        let offset = usize::try_from(offset).ok()?;
        self.area.bytes().get(offset..)?.get(..len as usize)
    }

    /// The frame of [`FrameRing::next_waiting`] is with the kernel now: `tap_head` moves. Returns the
    /// frame's number, for [`FrameRing::finish`]; `None` when no frame was waiting.
    pub fn hand_over(&mut self) -> Option<u32> {
        if self.waiting() == 0 {
            return None;
        }
        let number = self.tap_head;
        let place = self.frame_place(number);
        self.frames[place].state = State::Offered;
        self.tap_head = number.wrapping_add(1);
        Some(number)
    }

    /// The kernel is done with frame `number`: `tail` moves as far as it can. Returns what the frame was.
    ///
    /// # Errors
    ///
    /// [`NotOffered`] when that frame is not with the kernel; nothing has moved.
    pub fn finish(&mut self, number: u32) -> Result<(), NotOffered> {
        let place = self.frame_place(number);
        let with_kernel = number.wrapping_sub(self.tail) < self.tap_head.wrapping_sub(self.tail);
        if !with_kernel || self.frames[place].state != State::Offered {
            return Err(NotOffered { frame: number });
        }
        self.frames[place].state = State::Finished;
        while self.tail != self.tap_head {
            let place = self.frame_place(self.tail);
            if self.frames[place].state != State::Finished {
                break;
            }
            self.long_tail = self.long_tail.wrapping_add(self.frames[place].is_long.into());
            self.frames[place].state = State::Free;
            self.tail = self.tail.wrapping_add(1);
        }
        Ok(())
    }

    /// Takes back all frames that were not offered: `sock_head` moves backwards. Returns how many. What was
    /// reserved is void.
    pub fn withdraw(&mut self) -> usize {
        let taken = self.waiting();
        self.reserved = (Room::Short, 0);
        while self.sock_head != self.tap_head {
            self.sock_head = self.sock_head.wrapping_sub(1);
            let place = self.frame_place(self.sock_head);
            self.long_head = self.long_head.wrapping_sub(self.frames[place].is_long.into());
            self.frames[place].state = State::Free;
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

/// The room for a frame of `len` octets; `None` when there is none so large.
fn room_for(len: usize) -> Option<Room> {
    if len <= SHORT_ROOM - MODERN_LEN {
        Some(Room::Short)
    } else {
        (len <= LONG_ROOM - MODERN_LEN).then_some(Room::Long)
    }
}

#[cfg(test)]
mod tests;
