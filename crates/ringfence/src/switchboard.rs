//! What launchers and the driver domain of a switch say to each other.
//!
//! A launcher connects to the switch's socket and holds the connection as long as its guest lives:
//! when it closes, the guest is taken off the switch; when the driver domain closes it, the guest
//! has no network any more and ends.
//!
//! ```text
//! launcher                               driver domain
//!   Hello + user namespace ─────────────>  proof of being a launcher
//!   Attach ─────────────────────────────>  gives a domain number, addresses, makes the vif
//!   <───────────────────────── Attached    + frontend's hub connection, guest's store connection
//!   HostLeg + TAP ──────────────────────>  (with --host-tap) the host's own leg
//!   <────────────────────────── LegAdded
//!   Disk + file ────────────────────────>  makes a vbd of an open, locked file, or of a connection
//!   <───────────────────────── DiskAdded
//!   <────────────────────────────── Dial   the connection to that disk's server is lost
//!   Dialled + socket ───────────────────>  another one
//!   Stats ──────────────────────────────>
//!   <───────────────────────────── Stats
//!   <── DeviceClosed, DiskClosed, or Bye   when something went wrong, with the reason
//! ```

use std::collections::BTreeMap;

use ringfence_access::Mode;
use ringfence_block::blkback::Mode as DiskMode;
use ringfence_block::storage::file::{FileFacts, FileOptions};
use ringfence_nbd::client::NbdFacts;
use ringfence_net::features::OffloadKeys;
use serde::{Deserialize, Serialize};

use crate::guest::Address;

/// The version of this protocol; both ends are of one build, or they refuse each other.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The first order to a driver domain, over its own channel, with the listening socket and the
/// launcher's user namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverConfig {
    /// The switch's name.
    pub switch: String,
    /// Say more on standard error.
    pub verbose: bool,
}

/// The driver domain's answer over its own channel, once its sandbox is closed and it listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DriverReport {
    /// It serves.
    Ready,
    /// It cannot.
    Failed(String),
}

/// From a launcher.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToDriver {
    /// The first message: proof of being a launcher, with a descriptor of its user namespace
    /// ([`crate::launch::proof`]). It is not answered, unless by [`FromDriver::Refused`].
    Hello {
        /// [`VERSION`].
        version: String,
    },
    /// A guest wants a vif.
    Attach(Box<AttachRequest>),
    /// The host's leg was made; with the descriptors of its TAP's queues.
    HostLeg {
        /// The interface's name, for messages.
        name: String,
        /// What the kernel leaves to the reader.
        offloads: u32,
        /// Octets behind the Ethernet header.
        mtu: u16,
    },
    /// The guest wants a disk; with the descriptor of its file, or of a connection to its server (that
    /// may come later).
    Disk(Box<DiskRequest>),
    /// Another connection was wanted; with its descriptor, unless there is none.
    Dialled {
        /// For which of the guest's disks.
        handle: u16,
        /// Why there is none.
        problem: Option<String>,
    },
    /// Asks for the counters.
    Stats,
}

/// What a guest is to get.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachRequest {
    /// [`VERSION`].
    pub version: String,
    /// The name others find it by.
    pub name: Option<String>,
    /// Its addresses; none: the driver domain picks.
    pub addresses: Vec<Address>,
    /// Octets behind the Ethernet header.
    pub mtu: u16,
    /// How the backend reaches its pages ([`Mode::name`]).
    pub mode: String,
    /// Queues to offer.
    pub queues: u32,
    /// What the backend takes unfinished ([`OffloadKeys`] as text).
    pub offloads: String,
    /// Join small packets on their way to it.
    pub coalesce: bool,
    /// The guest routes: it may send packets from any IP address.
    pub forwarding: bool,
    /// The guest configures others: it may send messages of routers and of DHCP servers.
    pub advertise: bool,
    /// Also reserve addresses for a leg of the host.
    pub host_leg: bool,
}

impl AttachRequest {
    /// The mode, if this build has it.
    pub fn mode(&self) -> Option<Mode> {
        self.mode.parse().ok()
    }

    /// What the backend is to take, if this build knows it all.
    pub fn offloads(&self) -> Option<OffloadKeys> {
        self.offloads.parse().ok()
    }
}

/// A disk that a guest is to get.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskRequest {
    /// Which of the guest's disks: from 0 on.
    pub handle: u16,
    /// How the backend reaches the guest's pages ([`ringfence_block::blkback::Mode::name`]).
    pub mode: String,
    /// Where its content is.
    pub medium: Medium,
}

/// Where the content of a disk is, as the launcher found it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Medium {
    /// A file.
    File {
        /// What the launcher found out about it.
        facts: FileFacts,
        /// How it is to be used.
        options: FileOptions,
    },
    /// An NBD server, and what was agreed on with it.
    Nbd(NbdFacts),
}

/// From the driver domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromDriver {
    /// The guest has a vif. With two descriptors: the frontend's hub connection, and a store
    /// connection for the guest's names.
    Attached(Box<Attached>),
    /// The host's leg is on the switch.
    LegAdded,
    /// The guest has a vbd.
    DiskAdded,
    /// Another connection to the server of one of the guest's disks is wanted.
    Dial {
        /// Which disk.
        handle: u16,
    },
    /// The counters.
    Stats(Box<DriverStats>),
    /// It will not be done.
    Refused(String),
    /// The guest's network interface was closed because of what its frontend did.
    DeviceClosed(String),
    /// One of the guest's disks was, or because of its storage.
    DiskClosed {
        /// Which disk.
        handle: u16,
        /// Why.
        why: String,
    },
    /// The driver domain ends.
    Bye(String),
}

/// A vif as it was given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    /// The guest's domain number.
    pub domain: u16,
    /// Its Ethernet address.
    pub mac: [u8; 6],
    /// Its addresses.
    pub addresses: Vec<Address>,
    /// The host's leg, where one was asked for.
    pub host_leg: Option<LegConfig>,
}

/// Addresses of the host's leg.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LegConfig {
    /// Its Ethernet address.
    pub mac: [u8; 6],
    /// Its addresses.
    pub addresses: Vec<Address>,
}

/// Counters of a driver domain at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverStats {
    /// Of the data path: grant operations, system calls.
    pub path: BTreeMap<String, u64>,
    /// Of each port; under `gone` the sums of those that are no more.
    pub ports: BTreeMap<String, BTreeMap<String, u64>>,
    /// Of each disk that is connected.
    pub disks: BTreeMap<String, BTreeMap<String, u64>>,
    /// Rules broken by each guest; under `gone` the sums of those that have left.
    pub rules: BTreeMap<String, BTreeMap<String, u64>>,
    /// Rules of the hub's protocol broken by any domain.
    pub hub: BTreeMap<String, u64>,
}

/// The order to a frontend, with its descriptors: its hub connection, the TAP's queues, and for each
/// disk the socket at which it is to be served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrontendConfig {
    /// Octets behind the Ethernet header.
    pub mtu: u16,
    /// What the kernel leaves to the reader of the TAP.
    pub offloads: u32,
    /// Which of the guest's pages to have the driver domain keep mapped, if it can: a
    /// [`TxStaging`](ringfence_frame::commands::TxStaging)'s name.
    pub staging: String,
    /// Have the buffers in windows, which the frontend issues and takes back alone.
    pub windows: bool,
    /// Queues to have.
    pub queues: u32,
    /// Queues of the TAP: threads to have.
    pub tap_queues: u32,
    /// What the frontend takes unfinished ([`OffloadKeys`] as text).
    pub takes: String,
    /// Disks, by handle from 0 on, and how they share pages.
    pub disks: Vec<DiskFrontend>,
}

/// How a frontend uses a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskFrontend {
    /// Pages stay lent from one request to the next.
    pub persistent: bool,
    /// Pages are in windows, if the backend opens them.
    pub windows: bool,
}

impl DiskFrontend {
    /// What a frontend does for a backend in this mode.
    pub fn of(mode: DiskMode) -> DiskFrontend {
        let windows = mode == DiskMode::Window;
        DiskFrontend { persistent: windows || mode == DiskMode::Persistent, windows }
    }
}

/// What a frontend reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromFrontend {
    /// Backend and frontend are connected.
    Up,
    /// They were, and are not any more.
    Down(String),
    /// The frontend cannot go on.
    Failed(String),
}
