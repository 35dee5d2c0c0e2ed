#![forbid(unsafe_code)]
//! Driver domain: the process that serves vifs and vbds to guests, and its control loop.
//!
//! The loop is the same for both commands, and generic over the platform:
//!
//! * `control`: the loop. `domain`: what it asks a driver domain for. `devices`: devices that are due, and retry.
//! * `vifs`, `vif_steps`: vifs, their control rings and ports. `vbds`, `vbd_steps`: vbds and their teardown.
//!   `replacement`: another disk for a vbd in use.
//! * [`ports`]: ports of devices. [`workers`]: worker threads, and the ports that ended on them. `host_leg`: the host's
//!   port on a switch.
//!
//! The two driver domains have a folder each, and so have processes for virtual machines:
//!
//! * [`switch`]: the driver domain of `ringfence run`. Its devices are requested by launchers ([`switchboard`],
//!   [`proof`]).
//! * [`xen`]: `ringfence serve`. Its devices are created by a toolstack.
//! * [`machine`]: `ringfence vhost-user blk`. [`pool_proxy`]: `ringfence pool-proxy`.
//!   [`shield`]: `ringfence shield`. `device_process`: their start and their failures.

mod control;
mod device_process;
mod devices;
mod domain;
mod host_leg;
pub mod machine;
pub mod pool_proxy;
pub mod ports;
pub mod proof;
mod replacement;
pub mod shield;
pub mod switch;
pub mod switchboard;
#[cfg(test)]
mod testing;
mod vbd_steps;
mod vbds;
mod vif_steps;
mod vifs;
pub mod workers;
pub mod xen;
