//! Control protocol between launchers and the driver domain of a switch.
//!
//! A launcher connects to the switch's socket and keeps the connection for the lifetime of its
//! guest. When the launcher closes it, the driver domain detaches the guest. When the driver domain
//! closes it, the guest has lost its network and ends.
//!
//! ```text
//! launcher                               driver domain
//!   Hello + user namespace ─────────────>  proof of being a launcher
//!   Attach ─────────────────────────────>  assigns a domain number and addresses, creates the vif
//!   <───────────────────────── Attached    + frontend's hub connection, guest's store connection
//!   HostLeg + TAP ──────────────────────>  (with --host-tap) a port for the host
//!   <────────────────────────── LegAdded
//!   Disk + file ────────────────────────>  creates a vbd of an open, locked file or of a connection
//!   <───────────────────────── DiskAdded
//!   <────────────────────────────── Dial   the connection to that disk's server was lost
//!   Dialled + socket ───────────────────>  a new connection
//!   Snapshot + files, ResizeDisk ───────>  another disk for that vbd
//!   <───────────────────────── DiskChanged
//!   Stats, GuestStats ──────────────────>
//!   <───────────────────────────── Stats
//!   Listen + listening socket ──────────>  the runtime directory was removed and made anew
//!   <── DeviceClosed, DiskClosed, or Bye   after a failure, with the reason
//! ```
//!
//! The module also has the messages of the domains' own channels: [`DriverConfig`],
//! [`FrontendConfig`] and their reports.

use std::collections::BTreeMap;

use ringfence_access::Mode;
use ringfence_access::window::SourceLevels;
use ringfence_block::storage::file::{FileFacts, FileOptions};
use ringfence_block::storage::qcow2::ChainFacts;
use ringfence_nbd::client::NbdFacts;
use ringfence_net::features::OffloadKeys;
use ringfence_net::staging::TxStaging;
use ringfence_platform::local::PageSize;
use ringfence_vhost_user::{MachineState, PoolRule};
use serde::{Deserialize, Serialize};

use ringfence_hostnet::address::Address;

/// Maximum number of disks of one guest. The frontend's messages carry one socket for each.
pub const DISKS_MAX: usize = 8;

/// Version of this protocol. Both ends must be of the same build; others are refused.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Configuration of a driver domain: the first message on its own channel. Comes with the listening
/// socket and the launcher's user namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverConfig {
    pub switch: String,
    /// Logs debug messages to standard error.
    pub verbose: bool,
    /// Number of io_uring rings that the domain makes before its sandbox closes, for disks in files.
    pub rings: u16,
}

/// Report of a driver domain on its own channel, after its sandbox is closed and it listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DriverReport {
    Ready,
    Failed(String),
}

/// Requests of a launcher.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToDriver {
    /// First message: proof of being a launcher, with a descriptor of its user namespace
    /// ([`proof`](crate::proof)). The only answer is [`FromDriver::Refused`].
    Hello {
        /// Protocol version of the launcher ([`VERSION`]).
        version: String,
    },
    /// Attaches a guest and creates its vif.
    Attach(Box<AttachRequest>),
    /// Adds a port for the host; with the descriptors of its TAP's queues.
    HostLeg {
        /// Name of the host's interface, for messages.
        name: String,
        /// TAP offloads: work that the kernel leaves to the reader of frames.
        offloads: u32,
        /// Maximum length of a frame without its Ethernet header, in bytes.
        mtu: u16,
    },
    /// Adds a disk; with the descriptor of its file or of a connection to its server. The
    /// connection may follow later.
    Disk(Box<DiskRequest>),
    /// Answers [`FromDriver::Dial`]; with the connection's descriptor, unless `problem` is set.
    Dialled {
        /// Number of the guest's disk.
        handle: u16,
        /// Reason for which no connection could be made.
        problem: Option<String>,
    },
    /// Replaces a disk by an image above it, whose files come with it in the order of the chain.
    Snapshot {
        /// Number of the guest's disk.
        handle: u16,
        /// Properties of the files, as the launcher's client measured them.
        chain: Box<ChainFacts>,
        options: FileOptions,
    },
    /// Accepts the size that the launcher measured of a disk's storage.
    ResizeDisk {
        /// Number of the guest's disk.
        handle: u16,
        bytes: u64,
    },
    /// Requests the counters of all guests. With many of them the answer exceeds a message.
    Stats,
    /// Requests the counters of the connection's guest, and those of the driver domain.
    GuestStats,
    /// Replaces the switch's listening socket, whose name is gone; with the descriptor of the new one. No answer, unless
    /// the request is refused.
    Listen,
}

/// Launcher's request for a place on the switch, or for a driver domain of disks alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachRequest {
    /// Protocol version of the launcher ([`VERSION`]).
    pub version: String,
    /// Name by which other guests find the guest.
    pub name: Option<String>,
    /// Requested Ethernet address. If there is none, the driver domain chooses it.
    pub mac: Option<[u8; 6]>,
    /// Requested addresses. If empty, the driver domain chooses them.
    pub addresses: Vec<Address>,
    /// Networks that the guest reaches by its uplink. The switch's own do not overlap with those of its first
    /// guest.
    pub avoid: Vec<Address>,
    /// Maximum length of a frame without its Ethernet header, in bytes.
    pub mtu: u16,
    /// Access mode of the backend ([`Mode::name`]).
    pub mode: String,
    /// Maximum number of queues that the backend offers.
    pub queues: u32,
    /// Offloads that the backend accepts ([`OffloadKeys`] as text).
    pub offloads: String,
    /// Joins small TCP segments on their way to the guest.
    pub coalesce: bool,
    /// The guest routes: it may send packets from any IP address.
    pub forwarding: bool,
    /// The guest configures others: it may send messages of routers and DHCP servers.
    pub advertise: bool,
    /// Also reserves addresses for a port of the host.
    pub host_leg: bool,
    /// Creates a vif. Without it the guest has only disks, and the driver domain no switch.
    pub interface: bool,
}

impl AttachRequest {
    /// Returns the access mode, if this build has it.
    pub fn mode(&self) -> Option<Mode> {
        Mode::for_network(&self.mode).ok()
    }

    /// Returns the accepted offloads, if this build knows all of them.
    pub fn offloads(&self) -> Option<OffloadKeys> {
        self.offloads.parse().ok()
    }
}

/// Launcher's request to serve one more disk of its guest. The medium's descriptors come with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskRequest {
    /// Number of the guest's disk, from 0.
    pub handle: u16,
    /// Access mode of the backend ([`ringfence_access::Mode::name`]).
    pub mode: String,
    pub medium: Medium,
}

/// Storage of a disk, as the launcher opened it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Medium {
    /// File, whose mark comes with it if it has one ([`OpenFile`](ringfence_block::storage::file::OpenFile)).
    File {
        /// Properties of the file, as the launcher measured them.
        facts: FileFacts,
        options: FileOptions,
    },
    /// qcow2 image with its backing files, whose descriptors come in the order of the chain.
    Image {
        /// Properties of the files, as the launcher measured them.
        chain: ChainFacts,
        options: FileOptions,
    },
    /// Connection to an NBD server, with the negotiated properties.
    Nbd(NbdFacts),
}

/// Answers and events of the driver domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromDriver {
    /// The guest has a vif. Comes with two descriptors: the frontend's hub connection, and a store
    /// connection for the guest's names.
    Attached(Box<Attached>),
    /// The host has a port on the switch.
    LegAdded,
    /// The guest has the vbd.
    DiskAdded,
    /// Requests a new connection to the server of one of the guest's disks.
    Dial {
        handle: u16,
    },
    /// Answers [`ToDriver::Snapshot`] and [`ToDriver::ResizeDisk`].
    DiskChanged {
        handle: u16,
        /// Reason for which the disk is as it was.
        problem: Option<String>,
    },
    Stats(Box<DriverStats>),
    /// The request is refused, for this reason.
    Refused(String),
    /// The guest's vif was closed because its frontend broke rules.
    DeviceClosed(String),
    /// One of the guest's disks was closed because its frontend broke rules or its storage failed.
    DiskClosed {
        handle: u16,
        why: String,
    },
    /// The driver domain ends, for this reason.
    Bye(String),
}

/// Properties of an attached guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    /// Domain number of the guest.
    pub domain: u16,
    /// Ethernet address of the vif. Zero without one.
    pub mac: [u8; 6],
    /// IP addresses assigned to the guest. None without a vif.
    pub addresses: Vec<Address>,
    /// Addresses of the host's port, if one was requested.
    pub host_leg: Option<LegConfig>,
}

/// Addresses of the host's port on the switch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LegConfig {
    pub mac: [u8; 6],
    pub addresses: Vec<Address>,
}

/// Snapshot of a driver domain's counters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverStats {
    /// Counters of the data path: grant operations, system calls.
    pub path: BTreeMap<String, u64>,
    /// Counters of each port. `gone` has the sums of removed ports.
    pub ports: BTreeMap<String, BTreeMap<String, u64>>,
    /// Counters of each connected disk.
    pub disks: BTreeMap<String, BTreeMap<String, u64>>,
    /// Levels of each port and disk: numbers that rise and fall.
    pub levels: BTreeMap<String, BTreeMap<String, u64>>,
    /// Rule violations of each guest. `gone` has the sums of guests that have left.
    pub rules: BTreeMap<String, BTreeMap<String, u64>>,
    /// Rule violations of the hub's protocol by any domain.
    pub hub: BTreeMap<String, u64>,
}

/// Configuration of a frontend. Comes with descriptors: its hub connection, the TAP's queues, and
/// for each disk the socket of its export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrontendConfig {
    /// Maximum length of a frame without its Ethernet header, in bytes.
    pub mtu: u16,
    /// TAP offloads: work that the kernel leaves to the reader of frames.
    pub offloads: u32,
    /// Pages that the frontend asks the backend to keep mapped: the name of a
    /// [`TxStaging`].
    pub staging: String,
    /// Puts the buffers into grant windows, if the backend opens them.
    pub windows: bool,
    /// Takes the content of a page of a window out of the backend's reach as soon as the page is revoked.
    pub strict_revocation: bool,
    /// Number of queues of the vif.
    pub queues: u32,
    /// Number of queues of the TAP, and of worker threads. 0 for a guest without a vif.
    pub tap_queues: u32,
    /// Offloads that the frontend accepts ([`OffloadKeys`] as text).
    pub takes: String,
    /// Disks by handle, from 0.
    pub disks: Vec<DiskFrontend>,
}

/// Configuration of a card process: the network card of a virtual machine. Comes with the listening socket for
/// hypervisors, and then the descriptors of its other end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardConfig {
    pub other_end: CardEnd,
    /// Number of queue pairs that the card offers.
    pub pairs: u16,
    /// Rule for the memory of hypervisors.
    pub pool: PoolRule,
    /// Logs debug messages to standard error.
    pub verbose: bool,
}

/// Other end of a virtual machine's network card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CardEnd {
    /// Vif on a switch. With the connection to the hub.
    Switch(FrontendConfig),
    /// TAP. With its file.
    Tap {
        /// TAP offloads: work that the kernel leaves to the reader of frames.
        offloads: u32,
        /// Maximum length of a frame without its Ethernet header, in bytes.
        mtu: u16,
    },
}

/// Page sharing between a frontend and one disk's backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskFrontend {
    /// Keeps pages granted from one request to the next.
    pub persistent: bool,
    /// Puts pages into grant windows, if the backend opens them.
    pub windows: bool,
}

impl FrontendConfig {
    /// Returns the size of pages to ask for. Huge ones are for devices that lend their pages once, for as long as they
    /// last: forced revocation of a single page would split a huge one.
    pub fn page_size(&self) -> PageSize {
        let vif = self.tap_queues == 0 || (self.staging != TxStaging::Off.name() && !self.windows);
        if vif && self.disks.iter().all(|disk| disk.persistent && !disk.windows) {
            PageSize::Huge
        } else {
            PageSize::Small
        }
    }
}

impl DiskFrontend {
    /// Returns the frontend's part of a backend's access mode.
    pub fn of(mode: Mode) -> DiskFrontend {
        let windows = mode == Mode::Window;
        DiskFrontend { persistent: windows || mode == Mode::Persistent, windows }
    }
}

/// Reports of a frontend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromFrontend {
    /// Frontend and backend are connected.
    Up {
        /// Set if the memory that the guest lends is in huge pages.
        huge_pages: bool,
    },
    /// The connection ended, for this reason.
    Down(String),
    /// The frontend cannot continue, for this reason.
    Failed(String),
    /// Answer to [`ToFrontend::Levels`].
    Levels(FrontendLevels),
    /// Answer to [`ToFrontend::Traffic`]: counters that are not zero.
    Traffic(BTreeMap<String, u64>),
    /// Answer to [`ToFrontend::AwaitSize`]: new connections to the disk have the size.
    HasSize { disk: u16 },
    /// Answer to [`ToFrontend::Drain`]: the driver domain has the last frames of the guest.
    Drained,
    /// State of the hypervisor of now, after each change. Only a card process reports it.
    Machine(MachineState),
}

/// Requests of a launcher to its frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToFrontend {
    /// Requests the levels of the memory that the guest lends.
    Levels,
    /// Requests the counters of the guest's end.
    Traffic,
    /// Asks for a message when a disk has at least this size; answered with [`FromFrontend::HasSize`].
    AwaitSize { disk: u16, bytes: u64 },
    /// Has the frontend carry the last frames of a guest whose programs have ended; answered with
    /// [`FromFrontend::Drained`].
    Drain,
}

/// Levels of the memory that a guest lends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrontendLevels {
    /// Pages of 4 KiB that the driver domain can use now under ordinary grants.
    pub lent_pages: u64,
    /// Grant windows of the network interface, if it has any.
    pub windows: Option<WindowLevels>,
}

/// Levels of the grant windows of a guest's network interface, over all queues. The field names are those of `ringfence
/// status GUEST --json`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowLevels {
    /// Uses of pages that were issued already.
    pub reused: u64,
    /// Uses of pages that were issued for it.
    pub issued: u64,
    /// Pages revoked to free their entry for another page.
    pub evicted: u64,
    /// Pages with memory, free or in use.
    pub pages: u32,
    pub pages_in_use: u32,
}

impl WindowLevels {
    /// Returns the share of uses without a grant operation; `None` if there was no use.
    pub fn reused_share(&self) -> Option<f64> {
        let uses = self.reused + self.issued;
        // The counts are far below 2^52.
        #[allow(clippy::cast_precision_loss, reason = "a share for people")]
        let share = self.reused as f64 / uses as f64;
        (uses > 0).then_some(share)
    }
}

impl From<SourceLevels> for WindowLevels {
    fn from(levels: SourceLevels) -> WindowLevels {
        WindowLevels {
            reused: levels.reuse.hits,
            issued: levels.reuse.misses,
            evicted: levels.reuse.evictions,
            pages: levels.present,
            pages_in_use: levels.in_use,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_are_for_guests_whose_devices_all_keep_their_pages_lent() {
        let config = |tap_queues, staging: TxStaging, windows, disks: &[Mode]| FrontendConfig {
            mtu: 1500,
            offloads: 0,
            staging: staging.to_string(),
            windows,
            strict_revocation: false,
            queues: 1,
            tap_queues,
            takes: String::new(),
            disks: disks.iter().copied().map(DiskFrontend::of).collect(),
        };
        let (off, full, heads) = (TxStaging::Off, TxStaging::Full, TxStaging::Heads);
        let cases: [(u32, TxStaging, bool, &[Mode], PageSize); 9] = [
            (1, full, false, &[], PageSize::Huge),
            (1, heads, false, &[Mode::Persistent], PageSize::Huge),
            (0, off, false, &[Mode::Persistent, Mode::Persistent], PageSize::Huge),
            (1, off, false, &[], PageSize::Small),
            (1, off, false, &[Mode::Persistent], PageSize::Small),
            (1, off, true, &[], PageSize::Small),
            (1, full, false, &[Mode::Copy], PageSize::Small),
            (1, full, false, &[Mode::Persistent, Mode::Window], PageSize::Small),
            (0, off, false, &[Mode::Map], PageSize::Small),
        ];
        for (tap_queues, staging, windows, disks, expected) in cases {
            let found = config(tap_queues, staging, windows, disks).page_size();
            assert_eq!(found, expected, "{tap_queues} {staging} {windows} {disks:?}");
        }
    }
}
