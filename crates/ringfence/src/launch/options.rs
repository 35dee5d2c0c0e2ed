//! Options of `ringfence run`.

use std::ffi::OsString;
use std::net::IpAddr;

use ringfence_access::Mode;
use ringfence_access::window::Revocation;
use ringfence_net::features::OffloadKeys;
use ringfence_net::staging::TxStaging;
use ringfence_sandbox::cgroup::Limits;
use ringfence_sandbox::command_filter::FilterOptions;
use ringfence_sandbox::ids::OwnIds;
use ringfence_uplink::udp::multicast::service::Service;

use super::report::Loudness;
use super::view::ViewOptions;
use crate::disk::DiskSpec;
use ringfence_hostnet::address::Address;
use ringfence_uplink_process::MTU_DEFAULT;
use ringfence_uplink_process::asking::{AskArgs, AskBy};
use ringfence_uplink_process::egress::EgressArgs;
use ringfence_uplink_process::forward::ForwardSpec;
use ringfence_uplink_process::local::LocalPrefix;

/// Default MTU of a switch: that of Ethernet.
const SWITCH_MTU_DEFAULT: u16 = 1500;

/// Links of a guest to its networks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum LinkChoice {
    /// To the host's network by a TAP (vhost only if asked for, so far), netif to the switch
    #[default]
    Auto,
    /// To the host's network by kernel vhost-net; needs /dev/vhost-net
    Vhost,
    /// To the host's network by reading and writing a TAP
    Tap,
    /// To the switch alone, by a Xen network frontend and backend over shared rings
    Netif,
}

/// Memory of the uplink that the worker of vhost-net can access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Protect {
    /// All receive buffers and the ring of frames to send, once and for all
    #[default]
    Coarse,
    /// Only the pages of frames that are under way, or were and are kept to be used again
    Fine,
}

/// Terminal of a guest's command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum TerminalChoice {
    /// A terminal of the guest's own, connected to yours while this job is in the foreground
    #[default]
    Own,
    /// Your terminal itself. The command may read its keys while the job is in the background, and change its modes
    Shared,
}

/// Destination of a guest's uplink.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum UplinkChoice {
    /// To the host's network, through sockets of the host
    Host,
    /// No host network; the guest reaches only its switch
    None,
}

/// Switch of a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SwitchChoice {
    /// A switch that no other guest joins. It ends with the guest.
    Private,
    /// The switch of this name, with all guests that name it.
    Shared(String),
    None,
}

/// Parsed arguments of `run`.
#[derive(Clone, Debug)]
pub struct Options {
    pub switch: SwitchChoice,
    /// Name by which other guests find the guest, in lower case.
    pub name: Option<String>,
    /// Addresses on the switch. If empty, the driver domain assigns them.
    pub addresses: Vec<Address>,
    /// Permits the guest to send packets from any IP address to the switch.
    pub forwarding: bool,
    /// Permits the guest to send messages of routers and DHCP servers to the switch.
    pub advertise: bool,
    /// Destination of the uplink. `None`: the host, if it has a network.
    pub uplink: Option<UplinkChoice>,
    /// Addresses on the host's network. If empty, the host's are copied.
    pub uplink_addresses: Vec<Address>,
    /// Gives the guest a private network of its own, whatever addresses the host has.
    pub uplink_is_private: bool,
    /// Routers. If empty, the host's are copied.
    pub uplink_gateways: Vec<IpAddr>,
    /// Name servers. If empty, the host's are copied.
    pub name_servers: Vec<IpAddr>,
    /// Addresses that are translated to the host's loopback.
    pub host_loopback: Vec<IpAddr>,
    /// Addresses of the host itself, or of its link, that the guest may reach.
    pub allow_local: Vec<LocalPrefix>,
    /// Services whose multicast is carried.
    pub multicast: Vec<Service>,
    /// Names and addresses that the guest may reach.
    pub egress: EgressArgs,
    /// Questions about destinations that no rule covers.
    pub ask: AskArgs,
    /// Ports of the host that are forwarded to the guest.
    pub forwards: Vec<ForwardSpec>,
    /// Default addresses of forwarded ports. If empty, every address of the host.
    pub publish_default: Vec<IpAddr>,
    pub link: LinkChoice,
    /// Memory of the uplink that vhost-net can access.
    pub protect: Protect,
    /// Access mode of the backend.
    pub mode: Mode,
    /// Pages that stay mapped in mode `staging`.
    pub staging: TxStaging,
    /// Time at which the content of a revoked page of a window leaves the driver domain's reach.
    pub revocation: Revocation,
    /// Number of queues of the interface.
    pub queues: u32,
    /// Maximum length of an IP packet in bytes. `None`: the default of each interface.
    pub mtu: Option<u16>,
    /// Offloads that the guest accepts.
    pub offload: OffloadKeys,
    /// Offloads that the driver domain accepts from the guest.
    pub backend_offload: OffloadKeys,
    /// Joins small TCP segments on their way to the guest.
    pub coalesce: bool,
    /// Offloads that the host's port accepts.
    pub host_offload: OffloadKeys,
    /// Name of the host's interface on the switch.
    pub host_tap: Option<String>,
    pub disks: Vec<DiskSpec>,
    pub view: ViewOptions,
    /// Terminal of the command, if the user has one.
    pub terminal: TerminalChoice,
    /// Limits of the guest's processes.
    pub limits: Limits,
    /// System calls that the command may make.
    pub filter: FilterOptions,
    /// Makes the command of an ordinary user root of its namespaces.
    pub as_root: bool,
    /// Amount of messages.
    pub loudness: Loudness,
    /// Command and arguments. Empty for a shell.
    pub command: Vec<OsString>,
}

impl Options {
    /// Returns the pages that the frontend asks the backend to keep mapped.
    pub(super) fn staged_pages(&self) -> TxStaging {
        if self.mode == Mode::Staging { self.staging } else { TxStaging::Off }
    }

    /// Returns the ids of the command, if they are not those of root.
    pub(super) fn ids(&self) -> Option<OwnIds> {
        let is_root = self.as_root || rustix::process::geteuid().is_root();
        (!is_root).then(OwnIds::current)
    }

    /// Checks that the command cannot answer its own questions.
    ///
    /// # Errors
    ///
    /// Returns the reason for which it could.
    pub(super) fn check_questions(&self) -> anyhow::Result<()> {
        if self.ask.ask == Some(AskBy::Terminal) && self.terminal == TerminalChoice::Shared {
            anyhow::bail!(
                "--ask terminal: with --terminal shared the command could type the answers itself; leave out one of them"
            );
        }
        Ok(())
    }

    /// Returns `true` if the guest is on a switch.
    pub(super) fn has_switch(&self) -> bool {
        self.switch != SwitchChoice::None
    }

    /// Returns the maximum length of an IP packet on the switch.
    pub(super) fn switch_mtu(&self) -> u16 {
        self.mtu.unwrap_or(SWITCH_MTU_DEFAULT)
    }

    /// Returns the maximum length of an IP packet to the host's network.
    pub(super) fn uplink_mtu(&self) -> u16 {
        self.mtu.unwrap_or(MTU_DEFAULT)
    }
}
