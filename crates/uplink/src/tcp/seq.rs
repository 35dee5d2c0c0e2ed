//! Sequence numbers: 32 bits that wrap (RFC 9293, 3.4).

use core::cmp::Ordering;
use core::ops::{Add, AddAssign, Sub};

/// A place in one direction of a connection. Two places can be compared while they are less than
/// 2^31 octets apart, which windows are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub struct Seq(pub u32);

impl Seq {
    /// Octets from `earlier` to here; `None` if this is before it.
    pub fn since(self, earlier: Seq) -> Option<u32> {
        let distance = self.0.wrapping_sub(earlier.0);
        (distance < 1 << 31).then_some(distance)
    }

    /// The later of two places.
    #[must_use]
    pub fn max(self, other: Seq) -> Seq {
        if self < other { other } else { self }
    }

    /// The earlier of two places.
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

    fn add(self, octets: u32) -> Seq {
        Seq(self.0.wrapping_add(octets))
    }
}

impl Sub<u32> for Seq {
    type Output = Seq;

    fn sub(self, octets: u32) -> Seq {
        Seq(self.0.wrapping_sub(octets))
    }
}

impl AddAssign<u32> for Seq {
    fn add_assign(&mut self, octets: u32) {
        *self = *self + octets;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn order_survives_the_wrap(start: u32, a in 0u32..1 << 30, b in 0u32..1 << 30) {
            let (x, y) = (Seq(start) + a, Seq(start) + b);
            prop_assert_eq!(x.partial_cmp(&y), a.partial_cmp(&b));
            prop_assert_eq!(x.since(y), a.checked_sub(b));
            prop_assert_eq!(x.max(y), Seq(start) + a.max(b));
            prop_assert_eq!(x.min(y), Seq(start) + a.min(b));
        }
    }
}
