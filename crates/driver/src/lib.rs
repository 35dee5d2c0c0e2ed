#![forbid(unsafe_code)]
//! Driver domain: the control thread of the process that serves vifs and vbds.
//!
//! * [`switchboard`]: messages between launchers and driver domains; [`proof`]: the proof of a launcher's user namespace.
//! * [`workers`]: worker threads, and the ports that ended on them; [`ports`]: ports of devices.

pub mod ports;
pub mod proof;
pub mod switchboard;
pub mod workers;
