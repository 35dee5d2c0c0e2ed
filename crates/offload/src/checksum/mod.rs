//! Internet checksum (RFC 1071): over one slice, over pieces, incremental, and blank ("partial").
//!
//! # Theory of operation
//!
//! The checksum is the complement of the one's complement sum of the data as 16-bit words, most
//! significant byte first, with an odd last byte padded with zero. This module uses three properties:
//!
//! * *Order and width do not matter.* Words of 32 bits are added in 64-bit lanes, which keep the carries;
//!   [`fold`] adds the carries once, at the end.
//! * *Byte order does not matter.* A sum of byte-swapped words is the byte-swapped sum. So words are added
//!   as the machine loads them, and the result is swapped once, after folding.
//! * *A piece at an odd offset is a swapped piece.* [`Accumulator`] tracks the parity of the bytes so far.
//!   It swaps the next piece's sum if the parity is odd. So scatter-gather lists may be cut anywhere.
//!
//! A *sum* is folded to 16 bits and not complemented; a *checksum* is the complement of a sum. Both are
//! plain `u16` in host order: `to_be_bytes` gives the field's bytes. A sum of zero arises only from
//! all-zero data; otherwise zero appears as 0xFFFF.
//!
//! * [`pseudo`]: sums of the IPv4 and IPv6 pseudo headers.
//! * [`incremental`]: update of a checksum after a few bytes changed (RFC 1624).
//! * [`partial`]: completion of a blank checksum.
//! * [`verify`]: verification of a parsed packet's checksums.

pub mod incremental;
pub mod partial;
pub mod pseudo;
mod sum;
pub mod verify;

#[cfg(test)]
mod tests;

pub use partial::{Completion, PartialError, complete_partial, complete_scattered, never_zero};

/// Folds the carries of a wide one's complement sum back into 16 bits.
#[must_use]
pub fn fold(sum: u64) -> u16 {
    sum::fold(sum)
}

/// Returns the one's complement sum of `bytes`: folded, not complemented, host order.
#[must_use]
pub fn sum(bytes: &[u8]) -> u16 {
    u16::from_be(sum::sum_native(bytes))
}

/// Returns the Internet checksum of `bytes`, the complement of their [`sum()`].
///
/// The result is zero over data that includes a correct checksum field.
#[must_use]
pub fn internet_checksum(bytes: &[u8]) -> u16 {
    !sum(bytes)
}

/// One's complement sum over pieces of any length.
///
/// ```
/// use ringfence_offload::checksum::{Accumulator, internet_checksum};
///
/// let data = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]; // RFC 1071, section 3
/// let mut sum = Accumulator::new();
/// sum.add(&data[..3]);
/// sum.add(&data[3..]);
/// assert_eq!(sum.fold(), 0xddf2);
/// assert_eq!(sum.checksum(), internet_checksum(&data));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accumulator {
    /// Sum of folded pieces, of words as the machine loads them. Each piece adds at most 0xFFFF, so 2^48
    /// pieces fit.
    native: u64,
    /// Set after an odd number of bytes.
    odd: bool,
}

impl Accumulator {
    /// Creates an empty sum.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates a sum that starts from `seed`, for example a pseudo header's sum.
    #[must_use]
    pub fn with_sum(seed: u16) -> Self {
        Self { native: u64::from(seed.to_be()), odd: false }
    }

    /// Adds the data's next piece.
    pub fn add(&mut self, bytes: &[u8]) {
        let piece = sum::sum_native(bytes);
        let piece = if self.odd { piece.swap_bytes() } else { piece };
        self.native += u64::from(piece);
        self.odd ^= bytes.len() % 2 == 1;
    }

    /// Adds a sum computed elsewhere, over data of even length and offset, such as a pseudo header.
    pub fn add_sum(&mut self, sum: u16) {
        self.native += u64::from(sum.to_be());
    }

    /// Returns the sum so far: folded, not complemented, host order.
    #[must_use]
    pub fn fold(&self) -> u16 {
        u16::from_be(sum::fold(self.native))
    }

    /// Returns the checksum of the data so far.
    #[must_use]
    pub fn checksum(&self) -> u16 {
        !self.fold()
    }
}
