//! Bounded reads from the private copy of a frame's first bytes.

use super::error::{Layer, ParseError};
use ringfence_base::numbers::{bounded, usize_from};

/// Copied bytes, and the end of the frame or of the packet in it.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    bytes: &'a [u8],
    end: u32,
}

impl<'a> View<'a> {
    /// Creates a view of the first bytes of a frame of `end` bytes. Bytes past the frame's end, or past a
    /// 16-bit offset, are excluded.
    #[inline]
    pub(super) fn new(bytes: &'a [u8], end: u32) -> Self {
        let limit = usize_from(end).min(usize::from(u16::MAX));
        Self { bytes: bytes.get(..limit).unwrap_or(bytes), end }
    }

    /// Returns the same bytes for a packet that ends at `end`.
    pub(super) fn shortened(self, end: u32) -> Self {
        Self { bytes: self.bytes, end: self.end.min(end) }
    }

    /// Returns the number of copied bytes.
    #[inline]
    pub(super) fn captured(&self) -> u16 {
        bounded(self.bytes.len(), u16::MAX)
    }

    /// Returns the end of the frame or packet.
    pub(super) fn end(&self) -> u32 {
        self.end
    }

    /// Returns `offset + len` if a header of that length fits the packet and the copy.
    pub(super) fn checked_end(
        &self,
        layer: Layer,
        offset: u16,
        len: u16,
    ) -> Result<u16, ParseError> {
        let needed = u32::from(offset) + u32::from(len);
        if needed > self.end {
            return Err(ParseError::Truncated { layer, needed, end: self.end });
        }
        match u16::try_from(needed) {
            Ok(position) if position <= self.captured() => Ok(position),
            _ => Err(ParseError::NotCaptured { layer, needed, captured: self.captured() }),
        }
    }

    /// Returns the `N` bytes at `offset`.
    pub(super) fn array<const N: usize>(
        &self,
        layer: Layer,
        offset: u16,
    ) -> Result<&'a [u8; N], ParseError> {
        const { assert!(N <= 64, "a fixed header part") };
        #[expect(clippy::cast_possible_truncation, reason = "N ≤ 64, asserted above")]
        let len = N as u16;
        let position = self.checked_end(layer, offset, len)?;
        self.bytes.get(usize::from(offset)..).and_then(|rest| rest.first_chunk()).ok_or(
            ParseError::NotCaptured {
                layer,
                needed: u32::from(position),
                captured: self.captured(),
            },
        )
    }
}
