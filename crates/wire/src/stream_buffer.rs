//! Receive buffer of a byte stream: bytes that were read and are not parsed yet.

/// Buffer of a fixed size. The caller reads into [`spare`](Self::spare), reports the count with
/// [`commit`](Self::commit), looks at [`bytes`](Self::bytes), and removes what it has parsed with
/// [`take`](Self::take).
#[derive(Debug)]
pub struct StreamBuffer {
    buffer: Box<[u8]>,
    /// First byte not yet taken.
    start: usize,
    /// First byte not yet filled; `start <= end <= buffer.len()`.
    end: usize,
}

impl StreamBuffer {
    /// Creates an empty buffer of `capacity` bytes.
    pub fn new(capacity: usize) -> StreamBuffer {
        StreamBuffer { buffer: vec![0; capacity].into_boxed_slice(), start: 0, end: 0 }
    }

    /// Returns the space for the next bytes of the stream. It is at least half of the capacity if at most half
    /// is filled.
    pub fn spare(&mut self) -> &mut [u8] {
        let is_empty = self.start == self.end;
        if is_empty || self.buffer.len() - self.end < self.buffer.len() / 2 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        &mut self.buffer[self.end..]
    }

    /// Marks the first `filled` bytes of the last [`spare`](Self::spare) as read from the stream.
    ///
    /// # Panics
    /// Panics if `filled` exceeds the spare space. The count is the caller's own, never the peer's.
    pub fn commit(&mut self, filled: usize) {
        assert!(filled <= self.buffer.len() - self.end, "more bytes committed than were spare");
        self.end += filled;
    }

    /// Returns the bytes that were read and not taken.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Removes the first `len` bytes, or all if there are fewer, and returns them.
    pub fn take(&mut self, len: usize) -> &[u8] {
        let start = self.start;
        self.start += len.min(self.end - start);
        &self.buffer[start..self.start]
    }

    /// Removes all bytes at once.
    pub fn clear(&mut self) {
        (self.start, self.end) = (0, 0);
    }
}
