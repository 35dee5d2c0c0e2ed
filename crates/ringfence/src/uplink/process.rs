//! The process of an uplink.

/// The inner process of an uplink. Returns its exit status.
pub fn main() -> u8 {
    0
}
