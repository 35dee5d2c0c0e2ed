//! What the parent of a benchmark and its two domains say to each other.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::args::{Direction, Spoil, Verify};
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

    /// Whether packets begin here.
    pub(super) fn generates(self, direction: Direction) -> bool {
        (self == Side::Frontend) == (direction == Direction::Tx)
    }
}

/// The first message to a domain; its connection to the hub comes with it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Setup {
    pub(super) side: Side,
    pub(super) direction: Direction,
    pub(super) size: u32,
    /// The mode's name.
    pub(super) mode: String,
    /// The frontend's domain number.
    pub(super) frontend: u16,
    /// How pages to be sent from are staged ([`ringfence_frame::commands::TxStaging`]'s name).
    pub(super) staging: String,
    pub(super) verify: Verify,
    /// Packets of a round.
    pub(super) batch: u16,
    /// Whether it polls without end.
    pub(super) poll: bool,
    pub(super) queues: u32,
    /// The core that each queue's thread is to stay on; none: wherever the system likes.
    pub(super) cores: Vec<usize>,
}

/// How much is sent in a phase.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum Amount {
    Packets(u64),
    Time(Duration),
}

/// Orders to a domain that is set up.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// Take part in a phase.
    Phase { amount: Amount, spoil: Option<Spoil> },
    /// Measure the bare kernel copy.
    Bare,
}

/// What a domain says.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// The backend's part of a toolstack is done: the frontend may come.
    DeviceMade,
    /// The vif is connected.
    Connected,
    /// A phase is over.
    Phase(PhaseReport),
    /// Nanoseconds of one bare kernel copy.
    Bare(f64),
    /// It could not go on.
    Failed(String),
}

/// One domain's view of a phase.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct PhaseReport {
    /// Packets sent, or received and verified.
    pub(super) packets: u64,
    /// When the first packet was about to be sent, when the last one had been verified (monotonic
    /// nanoseconds, the same clock in all processes).
    pub(super) began: u64,
    pub(super) ended: u64,
    pub(super) usage: Usage,
}
