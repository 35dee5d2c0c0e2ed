//! Other ways to move packets between two processes, measured in the same run: DPDK's memif and
//! vhost-user, each between two `dpdk-testpmd`.
//!
//! ```text
//!            core of the backend                   core of the frontend
//!  memif       server                                client (owns the memory)
//!  vhost-user  vhost (the device)                    virtio-user (owns the memory)
//! ```
//!
//! Direction `tx` is from the side that owns the memory, as with a frontend. One side is in
//! testpmd's forwarding mode `txonly`, the other in `rxonly`, one queue each; the rate is what the
//! receiver counts. testpmd looks at no payload and numbers nothing, so lost packets do not show.
//!
//! What cannot be run is skipped, with the reason in words: it is a comparison, not a part of
//! Ringfence.

mod testpmd;

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use ringfence::causes::causes;
use serde::Serialize;

use super::args::Direction;

/// The longest packet that one buffer of testpmd's takes (its default, 2048 octets less headroom
/// and the virtio header), and that is measured.
pub(super) const SIZE_MAX: u32 = 1518;

/// A peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
#[value(rename_all = "kebab-case")]
pub enum Peer {
    /// DPDK's shared-memory packet interface
    Memif,
    /// DPDK's vhost-user, with virtio-user as its guest
    VhostUser,
}

impl Peer {
    pub(super) fn name(self) -> &'static str {
        match self {
            Peer::Memif => "memif",
            Peer::VhostUser => "vhost-user",
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What came of a run.
#[derive(Clone, Debug)]
pub(super) enum Outcome {
    /// What the receiver counted, and the kind of memory that was used.
    Rate { pps: f64, memory: &'static str },
    /// Why there is no rate.
    Skipped(String),
}

/// Measures packets of `size` octets for so long.
pub(super) fn measure(
    peer: Peer,
    direction: Direction,
    size: u32,
    cores: Option<[usize; 2]>,
    length: Duration,
) -> Outcome {
    let Some(cores) = cores else {
        return Outcome::Skipped("testpmd polls: it needs two cores".to_owned());
    };
    if size > SIZE_MAX {
        return Outcome::Skipped(format!(
            "packets of more than {SIZE_MAX} octets take two buffers"
        ));
    }
    match testpmd::run(peer, direction, size, cores, length) {
        Ok((pps, memory)) => Outcome::Rate { pps, memory },
        Err(error) => Outcome::Skipped(causes(&error)),
    }
}
