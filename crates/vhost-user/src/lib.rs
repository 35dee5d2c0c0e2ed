#![forbid(unsafe_code)]
//! Backend of vhost-user devices: the part that does not depend on the kind of device.
//!
//! ```text
//! hypervisor <-> socket  <-> ClientSlot, messages <-> Device: features, regions of memory, vrings, in-flight log
//! driver     <-> vrings  <-> BackendQueue of each vring <-> network card, disk
//! ```
//!
//! A device says what it offers ([`device::DeviceOffer`]). Its thread accepts clients ([`clients::ClientSlot`]), receives
//! messages ([`messages::receive`]) and lets the [`device::Device`] carry them out. It takes the chains of vrings that
//! run, and looks every address up in the one table of memory ([`memory::GuestMemory`]).
//!
//! Other backends can stand behind a [`proxy`], which keeps all memory but a pool from them, or behind a [`shield`], which
//! lends them a pool of its own.
//!
//! # Guarantees
//!
//! * A device reaches the memory that the hypervisor hands over, and no other. Every address and length is checked, and
//!   read once. A [`PoolRule`] refuses a client that hands over more than a pool.
//! * No client blocks a device: a device signals eventfds in a way that never blocks
//!   ([`EventSignal`](ringfence_sys::event_signal::EventSignal)), sends to sockets without waiting, and writes to no other
//!   descriptor of a client.
//! * A client or driver that breaks a rule ([`ClientFault`]) loses its connection. The client can shrink its memory's file
//!   under the device; that ends the process, which serves no other client.

pub mod clients;
pub mod device;
pub mod dirty;
mod fault;
mod inflight;
pub mod memory;
pub mod messages;
mod pool;
pub mod proxy;
mod report;
pub mod shield;
#[cfg(any(test, feature = "test-utils"))]
#[doc(hidden)]
pub mod testing;

pub use fault::ClientFault;
pub use pool::{HandedOver, PoolFault, PoolRule};
pub use report::{ClientReport, ClientReporter, MachineMemory, MachineState, Reporter};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
