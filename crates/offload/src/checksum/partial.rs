//! Completion of a blank ("partial") checksum.
//!
//! The sum covers the bytes from the place's `start` to the end of the frame. The field itself holds the
//! pseudo header's sum, lies inside, and is summed with them. No other property of the packet matters, so
//! this works for any protocol whose field is at an even offset.
//!
//! A result of zero is stored as 0xFFFF. UDP needs that, because zero means "no checksum" (RFC 768). For
//! all other protocols both forms are the same number, and Linux's `skb_checksum_help` stores 0xFFFF too.

use super::Accumulator;
use crate::meta::ChecksumPlace;

/// Reasons for which a blank checksum cannot be completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartialError {
    /// Checksum field outside the private header bytes, the only writable ones.
    #[error("checksum field ends at byte {end}, but only {headers} header bytes are private")]
    FieldOutside {
        /// First byte after the field.
        end: usize,
        /// Number of header bytes.
        headers: usize,
    },
}

/// Returns a computed checksum as it may be stored: 0xFFFF in place of zero.
#[must_use]
pub fn never_zero(checksum: u16) -> u16 {
    if checksum == 0 { 0xffff } else { checksum }
}

/// Incremental completion of a blank checksum over a frame in pieces.
///
/// The caller passes the header bytes first, then every payload piece in order, then calls
/// [`finish`](Self::finish). Pieces may be copies of small chunks, so payload in granted memory can be
/// summed through a small private buffer.
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
    /// Returns [`PartialError::FieldOutside`] if the checksum field is not within `headers`.
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

    /// Adds the frame's next bytes.
    pub fn add(&mut self, payload: &[u8]) {
        self.sum.add(payload);
    }

    /// Stores the checksum in `headers`, the same bytes that `begin` received, and returns it.
    ///
    /// # Errors
    /// Returns [`PartialError::FieldOutside`] if `headers` is now too short for the field.
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

/// Completes the blank checksum of a frame in one slice; returns the stored value.
///
/// # Errors
/// Returns [`PartialError::FieldOutside`] if the field is not inside the frame.
pub fn complete_partial(frame: &mut [u8], place: ChecksumPlace) -> Result<u16, PartialError> {
    Completion::begin(place, frame)?.finish(frame)
}

/// Completes the blank checksum of a frame: private `headers` followed by the `payload` pieces.
///
/// # Errors
/// Returns [`PartialError::FieldOutside`] if the field is not inside `headers`.
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
