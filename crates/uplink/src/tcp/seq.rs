//! Sequence numbers: 32 bits that wrap (RFC 9293, 3.4).

use core::cmp::Ordering;
use core::ops::{Add, AddAssign, Sub};

/// Sequence number in one direction of a connection. Two numbers compare correctly while they are less
/// than 2^31 bytes apart, which windows guarantee.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub struct Seq(pub u32);

impl Seq {
    /// Returns the bytes from `earlier` to `self`; `None` if `self` is before it.
    pub fn since(self, earlier: Seq) -> Option<u32> {
        let distance = self.0.wrapping_sub(earlier.0);
        (distance < 1 << 31).then_some(distance)
    }

    /// Returns the later of two sequence numbers.
    #[must_use]
    pub fn max(self, other: Seq) -> Seq {
        if self < other { other } else { self }
    }

    /// Returns the earlier of two sequence numbers.
    #[must_use]
    pub fn min(self, other: Seq) -> Seq {
        if self < other { self } else { other }
    }
}

impl PartialOrd for Seq {
    fn partial_cmp(&self, other: &Seq) -> Option<Ordering> {
        Some(match self.0.wrapping_sub(other.0) {
            0 => Ordering::Equal,
            distance if distance < 1 << 31 => Ordering::Greater,
            _ => Ordering::Less,
        })
    }
}

impl Add<u32> for Seq {
    type Output = Seq;

    fn add(self, bytes: u32) -> Seq {
        Seq(self.0.wrapping_add(bytes))
    }
}

impl Sub<u32> for Seq {
    type Output = Seq;

    fn sub(self, bytes: u32) -> Seq {
        Seq(self.0.wrapping_sub(bytes))
    }
}

impl AddAssign<u32> for Seq {
    fn add_assign(&mut self, bytes: u32) {
        *self = *self + bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn order_across_wraparound_is_preserved(start: u32, a in 0u32..1 << 30, b in 0u32..1 << 30) {
            let (x, y) = (Seq(start) + a, Seq(start) + b);
            prop_assert_eq!(x.partial_cmp(&y), a.partial_cmp(&b));
            prop_assert_eq!(x.since(y), a.checked_sub(b));
            prop_assert_eq!(x.max(y), Seq(start) + a.max(b));
            prop_assert_eq!(x.min(y), Seq(start) + a.min(b));
        }
    }
}
