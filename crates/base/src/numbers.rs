//! Conversions between integer types that lose nothing unnoticed.
//!
//! * [`usize_from`] and [`u64_from`] widen. They cannot fail: Ringfence is built for 64-bit processors alone, and
//!   the build stops on any other.
//! * [`bounded`] narrows a number that the caller's invariant already bounds. The call names the bound. A number
//!   above it is an error in Ringfence: a build with debug assertions panics, a release build continues with the bound.
//!
//! A number from a peer has no invariant yet. Check it first (`try_from` with an error, a comparison with a limit);
//! [`bounded`] then states the limit that was checked. Where a number may really be too large and the largest value is
//! the right answer (a metric, an estimate), `T::try_from(n).unwrap_or(T::MAX)` says so.

use core::fmt::Debug;

const _: () = assert!(usize::BITS == u64::BITS, "Ringfence needs a 64-bit processor");

/// Widens an unsigned number to an index or a length in memory.
#[inline]
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "usize has 64 bits, which is asserted above")]
pub fn usize_from(n: impl Into<u64>) -> usize {
    n.into() as usize
}

/// Widens an index or a length in memory to `u64`.
#[inline]
#[must_use]
pub const fn u64_from(n: usize) -> u64 {
    n as u64
}

/// Unsigned integers, the types that [`bounded`] accepts. A signed number has two ends and needs its own check.
pub trait Unsigned: Copy + PartialOrd + Debug {}

impl Unsigned for u8 {}
impl Unsigned for u16 {}
impl Unsigned for u32 {}
impl Unsigned for u64 {}
impl Unsigned for u128 {}
impl Unsigned for usize {}

/// Narrows `n` to the type of `limit`, which the caller's invariant keeps it within.
///
/// Returns `limit` if `n` is above it.
///
/// # Panics
/// With debug assertions, if `n` is above `limit`.
#[inline]
#[must_use]
#[track_caller]
pub fn bounded<N: Unsigned, T: Unsigned + TryFrom<N>>(n: N, limit: T) -> T {
    match T::try_from(n) {
        Ok(narrow) if narrow <= limit => narrow,
        _ => {
            debug_assert!(false, "{n:?} is above the limit {limit:?}");
            limit
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn largest_numbers_widen_to_themselves() {
        assert_eq!(usize_from(u32::MAX), 4_294_967_295);
        assert_eq!(usize_from(u64::MAX), usize::MAX);
        assert_eq!(u64_from(usize::MAX), u64::MAX);
    }

    #[test]
    fn number_at_its_limit_is_narrowed() {
        assert_eq!(bounded(65_535usize, u16::MAX), 65_535);
        assert_eq!(bounded(9_000u64, 9_000u32), 9_000);
        assert_eq!(bounded(0usize, 0u8), 0);
    }

    #[test]
    #[cfg_attr(debug_assertions, should_panic(expected = "9001 is above the limit 9000"))]
    fn number_above_its_limit_panics_or_becomes_the_limit() {
        assert_eq!(bounded(9_001usize, 9_000u16), 9_000);
    }

    #[test]
    #[cfg_attr(debug_assertions, should_panic(expected = "65536 is above the limit 65535"))]
    fn number_above_its_type_panics_or_becomes_the_limit() {
        assert_eq!(bounded(65_536usize, u16::MAX), u16::MAX);
    }
}
