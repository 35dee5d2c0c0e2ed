//! Guests of a user: `ringfence ps`, `exec`, `logs`, `status`, `stop`, `port`, `wait` and `policy`.
//!
//! ```text
//!  ringfence exec ──Request, descriptors──> launcher ──ToGuest──> init ──> command
//!                 <────────Reply──────────          <─FromGuest──
//! ```
//!
//! Each launcher listens at a Unix socket in the runtime directory while its command runs
//! ([`guest_sockets`](ringfence_hostnet::guest_sockets)). Neither guests nor other users enter the directory; launcher and client
//! compare user ids all the same. A client has one connection for one guest; if it closes the connection, the command
//! that it started gets SIGHUP.

pub mod disk;
pub mod exec;
pub(crate) mod find;
pub mod logs;
pub(crate) mod metrics;
pub mod policy;
pub mod port;
pub mod ps;
pub mod status;
pub mod stop;
pub mod wait;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;

use ringfence_sandbox::Ending;
use ringfence_sandbox::cgroup::{Limits, Usage};
use serde::{Deserialize, Serialize};

use ringfence_block::storage::file::FileOptions;
use ringfence_block::storage::qcow2::{ChainFacts, MemberFormat};
use ringfence_driver::switchboard::FrontendLevels;
use ringfence_guest::ListeningPorts;
use ringfence_uplink_process::egress::live::{PolicyReply, PolicyRequest};
use ringfence_uplink_process::totals::UplinkTotals;

/// Orders of a client to the launcher of a guest.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Describes the guest.
    Describe,
    /// Requests a new terminal of the guest.
    Terminal,
    /// Starts another command in the guest, at most one for each connection. Comes with the descriptors of its
    /// standard input, output and error and, if it has a terminal of its own, with the programs' end of that.
    Exec {
        command: Vec<OsString>,
        /// Environment variables besides those of the guest's own command.
        environment: Vec<(String, String)>,
    },
    /// Sends a signal to the command that this client started.
    Signal(i32),
    /// Sends a signal to the guest's own command.
    Stop(i32),
    /// Concerns the egress policy.
    Policy(PolicyRequest),
    /// Asks for the messages that follow the one of this number.
    Messages {
        after: u64,
        /// Waits for one if there is none yet.
        wait: bool,
    },
    /// Asks for the counters of the guest's devices.
    Counters,
    /// Publishes ports, as `-p` does ([`ForwardSpec`](ringfence_uplink_process::forward::ForwardSpec)).
    AddPort(String),
    /// Removes published ports.
    RemovePort(String),
    /// Requests the totals of the uplink.
    UplinkTotals,
    /// Requests the levels of the memory that the guest lends.
    Levels,
    /// Asks how a disk of the guest is served.
    Disk(u16),
    /// Replaces a disk by an overlay above it. Comes with the files of the overlay's chain.
    Snapshot {
        /// Number of the guest's disk.
        number: u16,
        overlay: Box<OverlayFacts>,
    },
    /// Enlarges a disk to a size in bytes, or accepts the size that its storage has.
    ResizeDisk {
        /// Number of the guest's disk.
        number: u16,
        bytes: Option<u64>,
    },
    /// Asks for the TCP ports at which processes of the guest listen, and for this one among them.
    Listening(u16),
}

/// Answers of a launcher.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum Reply {
    Guest(Box<Description>),
    /// Comes with the end of a new terminal that the client serves.
    Terminal,
    /// The command that the client asked for has ended.
    Ended(Ending),
    /// Answer to [`Request::Policy`].
    Policy(PolicyReply),
    /// Messages in their order, as many as fit. None: there are no others.
    Messages(Vec<Message>),
    Counters(Box<Counters>),
    /// The ports are published or removed.
    PortsChanged,
    /// Totals of the uplink, if there is one.
    UplinkTotals(Option<Box<UplinkTotals>>),
    Levels(FrontendLevels),
    /// Answer to [`Request::Disk`].
    Disk(Box<ServedFacts>),
    /// The disk is replaced or enlarged, and has this size.
    DiskChanged {
        bytes: u64,
    },
    /// TCP ports at which processes of the guest listen.
    Listening(ListeningPorts),
    /// The request failed: for example, the command that the client asked for was not started.
    Failed {
        /// Exit status for the client.
        status: u8,
        /// Reason, for the user.
        why: String,
    },
}

/// File or image of a disk, as it is served now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ServedFacts {
    pub(crate) path: OsString,
    pub(crate) format: MemberFormat,
    /// Backing files may lie in other folders.
    pub(crate) any_folder: bool,
    /// Size of the disk in bytes.
    pub(crate) bytes: u64,
    pub(crate) sector_size: u32,
    pub(crate) options: FileOptions,
}

/// Overlay that takes the place of a disk.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OverlayFacts {
    pub(crate) path: OsString,
    /// Backing files may lie in other folders.
    pub(crate) any_folder: bool,
    pub(crate) chain: Box<ChainFacts>,
}

/// Description of a guest. The field names are those of `ringfence ps --json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Description {
    pub(crate) name: String,
    /// Name of its switch, if it is on one.
    pub(crate) switch: Option<String>,
    /// Command and arguments.
    pub(crate) command: Vec<String>,
    /// Addresses on the switch.
    pub(crate) addresses: Vec<String>,
    /// Addresses on the host's network.
    pub(crate) uplink: Vec<String>,
    /// Published ports, as in `-p`.
    pub(crate) ports: Vec<String>,
    /// Disks, as in `--disk`.
    pub(crate) disks: Vec<String>,
    /// Size of the pages of the memory that it lends.
    pub(crate) pages: LentPages,
    /// List of system calls of its commands, with exceptions. Empty from a launcher of an earlier version.
    #[serde(default)]
    pub(crate) filter: String,
    /// Rules of its egress policy, and the places where they are written. `None` without a policy.
    #[serde(default)]
    pub(crate) policy: Option<String>,
    /// Start of the command in seconds since 1970.
    pub(crate) since: u64,
    /// Path of its cgroup in the hierarchy, if it has one of its own.
    pub(crate) cgroup: Option<String>,
    /// Limits of its processes.
    pub(crate) limits: Limits,
    /// Resources that its processes use, as its cgroup counts them.
    pub(crate) usage: Usage,
}

/// Size of the pages of the memory that a guest lends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LentPages {
    /// Pages of 4 KiB.
    Small,
    /// Pages of 2 MiB.
    Huge,
}

impl fmt::Display for LentPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LentPages::Small => "pages of 4 KiB",
            LentPages::Huge => "huge pages of 2 MiB",
        })
    }
}

/// Process that a message is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Source {
    Launcher,
    Driver,
    Frontend,
    Uplink,
}

impl Source {
    pub(crate) const ALL: [Source; 4] =
        [Source::Launcher, Source::Driver, Source::Frontend, Source::Uplink];

    /// Returns the name in messages.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Source::Launcher => "launcher",
            Source::Driver => "driver domain",
            Source::Frontend => "frontend",
            Source::Uplink => "uplink",
        }
    }
}

/// Message about a guest. The field names are those of `ringfence logs --json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Message {
    /// Number, in the order of arrival, from 1.
    pub(crate) number: u64,
    /// Time of arrival in milliseconds since 1970.
    pub(crate) time: u64,
    pub(crate) source: Source,
    pub(crate) text: String,
}

/// Counters of one device by name.
pub(crate) type CounterTable = BTreeMap<String, u64>;

/// Counters of a guest's devices. The field names are those of `ringfence status GUEST --json`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Counters {
    /// Counters of its port on the switch.
    pub(crate) ports: BTreeMap<String, CounterTable>,
    pub(crate) disks: BTreeMap<String, CounterTable>,
    /// Rules of the protocols that its frontend broke, with their numbers.
    pub(crate) rules: BTreeMap<String, CounterTable>,
    /// Numbers of its port and its disks that rise and fall.
    pub(crate) levels: BTreeMap<String, CounterTable>,
    /// Grant operations, system calls and similar costs of its driver domain, for all guests of that.
    pub(crate) driver: CounterTable,
}
