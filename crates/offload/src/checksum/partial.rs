//! Finishing a blank ("partial") checksum.
//!
//! The sum runs from the place's `start` to the end of the frame; the field itself, which holds
//! the pseudo header's sum, lies inside and is summed along. Nothing else about the packet needs to
//! be known, so this serves any protocol whose field sits at an even offset.
//!
//! A result of zero is stored as 0xFFFF. UDP needs that (zero says "no checksum", RFC 768); for all
//! others the two are the same number, and Linux's `skb_checksum_help` stores 0xFFFF for all too.

use super::Accumulator;
use crate::meta::ChecksumPlace;

/// Why a blank checksum cannot be finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartialError {
    /// The checksum field is not within the private header bytes, the only ones that can be
    /// written.
    #[error("checksum field ends at octet {end}, but only {headers} header octets are at hand")]
    FieldOutside {
        /// First octet after the field.
        end: usize,
        /// Header octets given.
        headers: usize,
    },
}

/// A computed checksum as it may be stored: 0xFFFF in place of zero.
#[must_use]
pub fn never_zero(checksum: u16) -> u16 {
    if checksum == 0 { 0xffff } else { checksum }
}

/// A blank checksum being finished over a frame in pieces.
///
/// The header bytes come first, then every payload piece in order, then [`finish`](Self::finish).
/// Pieces may be copies made in small chunks, so payload in lent memory can be summed through a
/// small private buffer.
#[derive(Clone, Copy, Debug)]
#[must_use = "the checksum is stored by `finish`"]
pub struct Completion {
    sum: Accumulator,
    place: ChecksumPlace,
}

impl Completion {
    /// Starts with the frame's first bytes.
    ///
    /// # Errors
    /// [`PartialError::FieldOutside`] if the checksum field is not within `headers`.
    pub fn begin(place: ChecksumPlace, headers: &[u8]) -> Result<Self, PartialError> {
        let outside = PartialError::FieldOutside { end: place.field_end(), headers: headers.len() };
        if place.field_end() > headers.len() {
            return Err(outside);
        }
        let summed = headers.get(usize::from(place.start)..).ok_or(outside)?;
        let mut sum = Accumulator::new();
        sum.add(summed);
        Ok(Self { sum, place })
    }

    /// Adds the next bytes of the frame.
    pub fn add(&mut self, payload: &[u8]) {
        self.sum.add(payload);
    }

    /// Stores the checksum into `headers`, the same bytes `begin` was given, and returns it.
    ///
    /// # Errors
    /// [`PartialError::FieldOutside`] if `headers` is now too short for the field.
    pub fn finish(self, headers: &mut [u8]) -> Result<u16, PartialError> {
        let checksum = never_zero(self.sum.checksum());
        let len = headers.len();
        let field = headers
            .get_mut(self.place.field()..self.place.field_end())
            .ok_or(PartialError::FieldOutside { end: self.place.field_end(), headers: len })?;
        field.copy_from_slice(&checksum.to_be_bytes());
        Ok(checksum)
    }
}

/// Finishes the blank checksum of a frame in one piece; returns the value stored.
///
/// # Errors
/// [`PartialError::FieldOutside`] if the field is not inside the frame.
pub fn complete_partial(frame: &mut [u8], place: ChecksumPlace) -> Result<u16, PartialError> {
    Completion::begin(place, frame)?.finish(frame)
}

/// Finishes the blank checksum of a frame of private `headers` followed by `payload` pieces.
///
/// # Errors
/// [`PartialError::FieldOutside`] if the field is not inside `headers`.
pub fn complete_scattered<'a>(
    headers: &mut [u8],
    payload: impl IntoIterator<Item = &'a [u8]>,
    place: ChecksumPlace,
) -> Result<u16, PartialError> {
    let mut completion = Completion::begin(place, headers)?;
    for piece in payload {
        completion.add(piece);
    }
    completion.finish(headers)
}
