//! Messages between the parent of a packet benchmark and its two domains.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::params::{Direction, Spoil, Verify};
use super::usage::Usage;

/// One side of a vif.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) enum Side {
    Frontend,
    Backend,
}

impl Side {
    pub(super) fn name(self) -> &'static str {
        match self {
            Side::Frontend => "frontend",
            Side::Backend => "backend",
        }
    }

    /// Returns `true` if this side generates the packets.
    pub(super) fn generates(self, direction: Direction) -> bool {
        (self == Side::Frontend) == (direction == Direction::Tx)
    }
}

/// First message to a domain; its connection to the hub comes with it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct PacketSetup {
    pub(super) side: Side,
    pub(super) direction: Direction,
    pub(super) size: u32,
    /// Name of the access mode.
    pub(super) mode: String,
    /// Domain number of the frontend.
    pub(super) frontend: u16,
    /// Name of the [`ringfence_net::staging::TxStaging`] of the TX pages.
    pub(super) staging: String,
    pub(super) verify: Verify,
    /// Packets of a batch.
    pub(super) batch: u16,
    /// Set if the domain busy-polls.
    pub(super) poll: bool,
    pub(super) queues: u32,
    /// Set if the frontend asks for huge pages.
    pub(super) huge_pages: bool,
    /// CPU core of each queue's thread. Empty: the scheduler chooses.
    pub(super) cores: Vec<usize>,
}

/// Extent of a phase.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum Amount {
    Packets(u64),
    Time(Duration),
}

/// Command to a domain that is set up.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum VifCommand {
    /// Run one phase.
    Phase { amount: Amount, spoil: Option<Spoil> },
    /// Measure the bare kernel copy.
    Bare,
}

/// Message of a domain to the parent.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum PacketAnswer {
    /// The backend has created the device: the frontend may connect.
    DeviceMade,
    Connected {
        /// Set if this side lends memory in huge pages.
        huge_pages: bool,
    },
    Phase(PhaseReport),
    /// Nanoseconds of one bare kernel copy.
    Bare(f64),
    /// The domain failed, with the reason.
    Failed(String),
}

/// Result of a phase as one domain measured it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct PhaseReport {
    /// Packets sent, or received and verified.
    pub(super) packets: u64,
    /// Moments just before the first packet was sent and after the last one was verified, in
    /// nanoseconds of the monotonic clock, which all processes share.
    pub(super) began: u64,
    pub(super) ended: u64,
    pub(super) usage: Usage,
}
