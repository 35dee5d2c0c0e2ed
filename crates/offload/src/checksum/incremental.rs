//! Correcting a checksum, or a sum, after a few octets changed.
//!
//! RFC 1624, equation 3: `HC' = ~(~HC + ~m + m')`. RFC 1141's shorter form is wrong when the
//! result should be zero, so it is not used. A UDP checksum of zero means "none": leave such a
//! packet alone, and pass the new value of any other through [`never_zero`](super::partial::never_zero).

use super::{fold, sum};

/// The checksum after one 16-bit word at an even place changed from `old` to `new`.
#[must_use]
pub fn update(checksum: u16, old: u16, new: u16) -> u16 {
    !replace(!checksum, old, new)
}

/// The checksum after `old`, at an even place, was overwritten by `new` (an address, say).
#[must_use]
pub fn update_bytes<const N: usize>(checksum: u16, old: &[u8; N], new: &[u8; N]) -> u16 {
    update(checksum, sum(old), sum(new))
}

/// The same for a *sum*: what it becomes when its part `old` is replaced by `new`. Segmentation
/// changes the length inside a pseudo header's sum this way.
#[must_use]
pub fn replace(sum: u16, old: u16, new: u16) -> u16 {
    fold(u64::from(sum) + u64::from(!old) + u64::from(new))
}
