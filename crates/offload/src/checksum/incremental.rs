//! Incremental update of a checksum, or of a sum, after a few bytes changed.
//!
//! RFC 1624, equation 3: `HC' = ~(~HC + ~m + m')`. RFC 1141's shorter form is wrong for a result of
//! zero, so it is not used. A UDP checksum of zero means "none": do not update such a packet. Pass the new
//! value of any other packet through [`never_zero`](super::partial::never_zero).

use super::{fold, sum};

/// Returns the checksum after one 16-bit word at an even offset changed from `old` to `new`.
#[must_use]
pub fn update(checksum: u16, old: u16, new: u16) -> u16 {
    !replace(!checksum, old, new)
}

/// Returns the checksum after `new` replaced `old`, an address for example, at an even offset.
#[must_use]
pub fn update_bytes<const N: usize>(checksum: u16, old: &[u8; N], new: &[u8; N]) -> u16 {
    update(checksum, sum(old), sum(new))
}

/// Returns a *sum* after its part `old` was replaced by `new`. Segmentation changes the length in a
/// pseudo header's sum with it.
#[must_use]
pub fn replace(sum: u16, old: u16, new: u16) -> u16 {
    fold(u64::from(sum) + u64::from(!old) + u64::from(new))
}
