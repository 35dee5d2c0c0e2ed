//! Commands that take the place of pasta, slirp4netns, pesto and passt.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod dpdk;
mod passt;
mod pasta;
mod pasta_ports;
#[path = "../support/mod.rs"]
mod support;
mod vhost_user_net;
