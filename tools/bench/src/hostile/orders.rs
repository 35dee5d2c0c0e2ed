//! What the parent and the processes of a row say to each other.

use std::path::PathBuf;

use ringfence_platform::DomId;
use ringfence_wire::xenbus::{DeviceId, DeviceKind};
use serde::{Deserialize, Serialize};

use super::args::Behaviour;
use super::disks::DiskOrder;
use super::disks::behaviour::DiskBehaviour;

/// Locally administered: the port that verifies the victim's packets.
pub(super) const SINK_MAC: [u8; 6] = [0x0a, 0, 0, 0, 0, 1];

/// The first message to a process. With it comes, for the driver domain, the listening socket, for an
/// honest guest its connection to the hub.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Setup {
    pub(super) role: Role,
    /// The core to stay on.
    pub(super) core: Option<usize>,
    /// Octets of a packet of the victim's.
    pub(super) size: u32,
}

/// What a process is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Role {
    /// Hub, control, data plane, and the port that verifies.
    Driver,
    /// A guest that keeps the rules and sends as much as it can.
    Honest {
        /// Where it is.
        place: Place,
        /// Whether it also sends to whom it hears from.
        talks: bool,
    },
    /// A guest that does not. It is its own launcher: it must be able to come back.
    Hostile { entrance: Entrance, behaviour: Behaviour },
    /// The same with a disk.
    HostileDisk { entrance: Entrance, behaviour: DiskBehaviour, disk: DiskOrder },
}

impl Role {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Role::Driver => "driver domain",
            Role::Honest { .. } => "honest guest",
            Role::Hostile { .. } | Role::HostileDisk { .. } => "hostile guest",
        }
    }
}

/// Where launchers find the driver domain, and what they ask for.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Entrance {
    pub(super) socket: PathBuf,
    /// Octets behind the Ethernet header.
    pub(super) mtu: u16,
    /// The name of the mode in which guests' pages are reached.
    pub(super) mode: String,
}

/// A guest's place at the switch.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Place {
    pub(super) domain: u16,
    pub(super) mac: [u8; 6],
    /// Octets behind the Ethernet header.
    pub(super) mtu: u16,
}

impl Place {
    pub(super) fn device(&self) -> DeviceId {
        let frontend = DomId(self.domain);
        DeviceId { kind: DeviceKind::Vif, frontend, backend: DomId(0), handle: 0 }
    }

    /// Its first disk.
    pub(super) fn disk(&self) -> DeviceId {
        DeviceId { kind: DeviceKind::Vbd, ..self.device() }
    }
}

/// Orders to a process that is set up.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// To the driver domain: count packets of this address as the victim's.
    Victim([u8; 6]),
    /// To the driver domain: say what arrived so far.
    Arrived,
}

/// What a process says.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// It does what it is there for.
    Ready,
    /// What arrived at the verifying port.
    Arrived(Arrivals),
    /// It could not go on.
    Failed(String),
}

/// What arrived at the verifying port until a moment.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Arrivals {
    /// The moment: monotonic nanoseconds.
    pub(super) at: u64,
    /// Packets of the victim's that were as they should be.
    pub(super) verified: u64,
    /// Packets of the victim's that never came: later ones did.
    pub(super) missing: u64,
    /// Packets of the victim's that were not as they should be, or came twice.
    pub(super) damaged: u64,
    /// Other packets.
    pub(super) others: u64,
}
