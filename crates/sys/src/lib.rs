//! Linux interfaces that the other crates share: ioctl wrappers, sockets, namespaces, clocks, counters.
//!
//! Each module wraps one interface of the kernel ([`tap`], [`nbd`], [`blkdev`],
//! [`socket`], [`datagrams`], [`descriptors`], [`signals`], [`namespaces`], [`fork`], [`child`], [`code`],
//! [`terminal`], [`keyring`], [`seccomp`]) or serves threads that poll
//! ([`clock`], [`counters`], [`rules`], [`pace`], [`pressure`], [`priority`]). None of them knows a guest.
//!
//! This crate is one of the few that may use `unsafe`: for system calls that rustix does not offer.

pub mod blkdev;
pub mod byte_lock;
pub mod child;
pub mod clock;
pub mod code;
pub mod counters;
pub mod datagrams;
pub mod descriptors;
pub mod event_signal;
pub mod fork;
#[cfg(feature = "images")]
pub mod images;
pub mod keyring;
pub mod mailbox;
pub mod namespaces;
pub mod nbd;
pub mod pace;
pub mod poll;
pub mod pressure;
pub mod priority;
pub mod rules;
pub mod seccomp;
pub mod signals;
pub mod socket;
pub mod tap;
pub mod terminal;
#[cfg(feature = "test-utils")]
pub mod testing;

pub use ringfence_base::{numbers, prerequisite};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
