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
//!
//! ```
//! use ringfence_wire::xenbus::XenbusState;
//! use ringfence_xenbus::steps::{BackendStep, BackendView, backend_step};
//!
//! let view = BackendView {
//!     own: XenbusState::InitWait,
//!     peer: Some(XenbusState::Initialised),
//!     attached: false,
//!     online: true,
//!     penalized: false,
//! };
//! assert_eq!(backend_step(view), BackendStep::Connect);
//! // Once connected, the same state of the frontend requires nothing more.
//! let view = BackendView { own: XenbusState::Connected, attached: true, ..view };
//! assert_eq!(backend_step(view), BackendStep::Wait);
//! ```

pub mod connect;
pub mod end;
#[doc(hidden)]
#[cfg(any(test, feature = "test-utils"))]
pub mod fuzzing;
pub mod steps;
pub mod toolstack;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
