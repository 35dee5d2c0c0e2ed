//! Messages between the parent process and the processes of a row.

use std::path::PathBuf;

use ringfence_platform::DomId;
use ringfence_wire::xenbus::{DeviceId, DeviceKind};
use serde::{Deserialize, Serialize};

use ringfence_testkit::hostile::behaviour::Behaviour;
use ringfence_testkit::hostile::disk::behaviour::DiskBehaviour;

/// First message to a process. The driver domain receives the listening socket with it, an honest
/// guest its connection to the hub.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct NeighbourSetup {
    pub(super) role: HostileRole,
    /// CPU core to pin the process to.
    pub(super) core: Option<usize>,
    /// Bytes of a packet of the victim.
    pub(super) size: u32,
}

/// Role of a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum HostileRole {
    /// Driver domain: hub, control, switch workers, and the verifying port.
    Driver,
    /// Guest that keeps the rules and sends at its maximum rate.
    Honest {
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
            HostileRole::Driver => "driver domain",
            HostileRole::Honest { .. } => "honest guest",
            HostileRole::Hostile { .. } | HostileRole::HostileDisk { .. } => "hostile guest",
        }
    }
}

/// Address of the driver domain's hub, and the parameters of a launcher's request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Entrance {
    pub(super) socket: PathBuf,
    /// Bytes after the Ethernet header.
    pub(super) mtu: u16,
    /// Name of the access mode.
    pub(super) mode: String,
}

/// Identity of a guest at the switch.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct GuestIdentity {
    pub(super) domain: u16,
    pub(super) mac: [u8; 6],
    /// Bytes after the Ethernet header.
    pub(super) mtu: u16,
}

impl GuestIdentity {
    pub(super) fn device(&self) -> DeviceId {
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
pub(super) enum RowCommand {
    /// To the driver domain: count packets of this address as the victim's.
    Victim([u8; 6]),
    /// To the driver domain: report the arrivals so far.
    Arrived,
}

/// Message of a process to the parent.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum HostileAnswer {
    /// The process has begun its work.
    Ready,
    /// Counters of the verifying port.
    Arrived(Arrivals),
    /// The process failed, with the reason.
    Failed(String),
}

/// Counters of the verifying port at one moment.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Arrivals {
    /// Monotonic clock of the reading in nanoseconds.
    pub(super) at: u64,
    /// Packets of the victim that were correct.
    pub(super) verified: u64,
    /// Packets of the victim that did not arrive although later ones did.
    pub(super) missing: u64,
    /// Packets of the victim that were damaged or arrived twice.
    pub(super) damaged: u64,
    /// Packets of other senders.
    pub(super) others: u64,
}

/// Disk to create for a guest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct DiskSpec {
    /// Name of the access mode.
    pub(super) mode: String,
    pub(super) bytes: u64,
}
