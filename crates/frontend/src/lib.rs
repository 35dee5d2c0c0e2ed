#![forbid(unsafe_code)]
//! Frontend: the processes that lend a guest's memory and drive its vif and its disks.
//!
//! * [`process`]: frontend of a guest of `ringfence run`, with its disks, which it exports over NBD.
//! * [`card`]: network card of a virtual machine on a switch or a TAP, for `ringfence vhost-user net`.
//! * [`attach`]: frontend of a vif or a vbd in a Xen guest, for `ringfence attach`.
//! * `drain`: last frames of a guest that has ended.
//! * `disks`: blkfront and an NBD export for each disk of a frontend.
//! * [`link`]: vif and TAP, between which workers move packets.
//! * [`options`]: values of options on lent memory.

pub mod attach;
pub mod card;
mod disks;
mod drain;
pub mod link;
pub mod options;
pub mod process;
