#![forbid(unsafe_code)]
//! The xenbus handshake, as far as it is the same for every kind of device.
//!
//! * [`steps`]: what is due, by both sides' states.
//! * [`end`]: what each side reads and writes of them.
//! * [`toolstack`]: making a device and taking it away.

pub mod end;
#[doc(hidden)]
#[cfg(any(test, feature = "test-utils"))]
pub mod fuzzing;
pub mod steps;
pub mod toolstack;
