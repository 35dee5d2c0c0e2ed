//! Test agents: processes that run in a guest or in dom0, and that the scenarios of `cargo xtask vm` drive.
//!
//! `ringfence-bench internal` starts them. Each agent has the options of its role (`clap::Args`) and a function `run`.
//! An agent prints one line for each thing that it has tried; its scenario reads them.
//!
//! * [`conformance`]: one half of the platform's conformance suite on Xen.
//! * [`control_ring`]: every message of the control ring to a vif's backend.
//! * [`disk_frontend`]: a frontend of a disk in user space, with reads, writes and load.
//! * [`hostile_guest`]: every behaviour of an adversary on a vif or vbd.

pub mod conformance;
pub mod control_ring;
pub mod disk_frontend;
pub mod hostile_guest;
