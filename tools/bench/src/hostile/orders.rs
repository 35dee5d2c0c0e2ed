//! Messages between the parent process and the processes of a row.

use std::path::PathBuf;
use std::time::Duration;

use ringfence_platform::DomId;
use ringfence_wire::xenbus::{DeviceId, DeviceKind};
use serde::{Deserialize, Serialize};

use super::super::params::Verify;
use ringfence_testkit::hostile::behaviour::Behaviour;
use ringfence_testkit::hostile::disk::behaviour::DiskBehaviour;

/// First message to a process. The driver domain receives the listening socket with it, an honest
/// guest its connection to the hub.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NeighbourSetup {
    pub(crate) role: HostileRole,
    /// CPU core to pin the process to.
    pub(crate) core: Option<usize>,
    /// Bytes of a packet of the victim.
    pub(crate) size: u32,
    /// Set for a process that runs only when no other one wants its core.
    pub(crate) yields: bool,
}

/// Role of a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum HostileRole {
    /// Driver domain: hub, control, switch workers, and the verifying port.
    Driver(SinkSetup),
    /// Guest that keeps the rules and sends at its maximum rate.
    Honest {
        place: GuestIdentity,
        /// Set if it also sends to the senders that it receives from.
        talks: bool,
    },
    /// Guest that sends one packet at a time and waits for the port's answer.
    Asking {
        place: GuestIdentity,
        /// Set if it also sends to the senders that it receives from.
        talks: bool,
    },
    /// Adversary guest. It is its own launcher, since it must be able to reconnect.
    Hostile { entrance: Entrance, behaviour: Behaviour },
    /// Adversary guest with a disk.
    HostileDisk { entrance: Entrance, behaviour: DiskBehaviour, disk: DiskSpec },
}

impl HostileRole {
    pub(super) fn name(&self) -> &'static str {
        match self {
            HostileRole::Driver(_) => "driver domain",
            HostileRole::Honest { .. } | HostileRole::Asking { .. } => "honest guest",
            HostileRole::Hostile { .. } | HostileRole::HostileDisk { .. } => "hostile guest",
        }
    }
}

/// Work of the verifying port.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct SinkSetup {
    pub(crate) verify: Verify,
    /// Set if it answers each packet of the victim.
    pub(crate) answers: bool,
}

impl SinkSetup {
    /// Port of the packet rows.
    pub(super) const VERIFYING: SinkSetup = SinkSetup { verify: Verify::Full, answers: false };
}

/// Address of the driver domain's hub, and the parameters of a launcher's request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Entrance {
    pub(crate) socket: PathBuf,
    /// Bytes after the Ethernet header.
    pub(crate) mtu: u16,
    /// Name of the access mode.
    pub(crate) mode: String,
}

/// Identity of a guest at the switch.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct GuestIdentity {
    pub(crate) domain: u16,
    pub(crate) mac: [u8; 6],
    /// Bytes after the Ethernet header.
    pub(crate) mtu: u16,
}

impl GuestIdentity {
    pub(crate) fn device(&self) -> DeviceId {
        let frontend = DomId(self.domain);
        DeviceId { kind: DeviceKind::Vif, frontend, backend: DomId(0), handle: 0 }
    }

    /// Returns the device id of its first disk.
    pub(super) fn disk(&self) -> DeviceId {
        DeviceId { kind: DeviceKind::Vbd, ..self.device() }
    }
}

/// Command to a process that is set up.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum RowCommand {
    /// To the driver domain: count packets of this address as the victim's.
    Victim([u8; 6]),
    /// To the driver domain: report the arrivals so far.
    Arrived,
    /// To a guest that asks: ask for so long.
    Ask(Duration),
}

/// Message of a process to the parent.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum HostileAnswer {
    /// The process has begun its work.
    Ready,
    /// Counters of the verifying port.
    Arrived(Arrivals),
    /// Times of a guest's packets and their answers.
    Asked(RoundTrips),
    /// The process failed, with the reason.
    Failed(String),
}

/// Times from a packet to its answer.
#[derive(Clone, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct RoundTrips {
    pub(super) answered: u64,
    /// Packets without an answer.
    pub(super) lost: u64,
    /// p50, p99 and p99.9 in nanoseconds.
    pub(super) quantiles: [u64; 3],
    pub(super) longest: u64,
}

/// Counters of the verifying port at one moment.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Arrivals {
    /// Monotonic clock of the reading in nanoseconds.
    pub(crate) at: u64,
    /// Packets of the victim that were correct.
    pub(crate) verified: u64,
    /// Packets of the victim that did not arrive although later ones did.
    pub(crate) missing: u64,
    /// Packets of the victim that were damaged or arrived twice.
    pub(crate) damaged: u64,
    /// Packets of other senders.
    pub(crate) others: u64,
}

/// Disk to create for a guest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct DiskSpec {
    /// Name of the access mode.
    pub(crate) mode: String,
    pub(super) bytes: u64,
}
