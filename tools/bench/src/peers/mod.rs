//! Peers of `bench net`: DPDK's memif and vhost-user, each between two `dpdk-testpmd` processes and
//! measured in the same run.
//!
//! ```text
//!            core of the backend                   core of the frontend
//!  memif       server                                client (owns the memory)
//!  vhost-user  vhost (the device)                    virtio-user (owns the memory)
//! ```
//!
//! Direction `tx` is from the side that owns the memory, as with a frontend. One side is in
//! testpmd's forwarding mode `txonly`, the other in `rxonly`, with one queue each. The rate is the
//! receiver's. testpmd neither reads payload nor numbers packets, so lost packets are not detected.
//!
//! A peer that cannot be run is skipped with a reason: the comparison is optional.

mod testpmd;

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use serde::Serialize;

use super::params::{Direction, Pages};
use ringfence_hostnet::causes::causes;
pub(super) use testpmd::{MISSING, PROGRAM as TESTPMD, is_installed};

/// Maximum measured packet size: the capacity of one testpmd buffer (by default 2048 bytes minus
/// headroom and virtio header), rounded down to a full Ethernet frame.
pub(super) const SIZE_MAX: u32 = 1518;

/// Packet interface to compare with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
#[value(rename_all = "kebab-case")]
pub enum ForwardingPeer {
    /// DPDK's shared-memory packet interface
    Memif,
    /// DPDK's vhost-user, with virtio-user as its guest
    VhostUser,
}

impl ForwardingPeer {
    pub(super) fn name(self) -> &'static str {
        match self {
            ForwardingPeer::Memif => "memif",
            ForwardingPeer::VhostUser => "vhost-user",
        }
    }
}

impl fmt::Display for ForwardingPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Rate of a peer, or the reason for which there is none.
#[derive(Clone, Debug)]
pub(super) enum PeerOutcome {
    /// Rate that the receiver counted, and the kind of memory in use.
    Rate { pps: f64, memory: &'static str },
    /// Reason for which there is no rate.
    Skipped(String),
}

/// Measures packets of `size` bytes for `length`, in pages of that size and on those cores.
pub(super) fn measure(
    peer: ForwardingPeer,
    direction: Direction,
    size: u32,
    pages: Pages,
    cores: Option<[usize; 2]>,
    length: Duration,
) -> PeerOutcome {
    let Some(cores) = cores else {
        return PeerOutcome::Skipped("testpmd polls: it needs two cores".to_owned());
    };
    if size > SIZE_MAX {
        return PeerOutcome::Skipped(format!(
            "packets of more than {SIZE_MAX} bytes take two buffers"
        ));
    }
    match testpmd::run(peer, direction, size, pages, cores, length) {
        Ok((pps, memory)) => PeerOutcome::Rate { pps, memory },
        Err(error) => PeerOutcome::Skipped(causes(&error)),
    }
}
