#![forbid(unsafe_code)]
//! Xenbus device life cycle: the part of the handshake that all kinds of devices share.
//!
//! * [`steps`]: the next step of each end, as a pure function of both states.
//! * [`end`]: reads and writes of both states in the store.
//! * [`connect`]: the rings, channels and grant windows of a connection, and its errors.
//! * [`toolstack`]: creation and removal of a device's directories.
//!
//! A backend or frontend reads a view by its end, passes it to [`steps`], carries out the step and
//! repeats, at most [`end::STEPS_MAX`] times per look.

pub mod connect;
pub mod end;
#[doc(hidden)]
#[cfg(any(test, feature = "test-utils"))]
pub mod fuzzing;
pub mod steps;
pub mod toolstack;
