//! Command line of `ringfence slirp4netns`: the options of slirp4netns's manual page, and those about egress, which are
//! Ringfence's own.

use std::ffi::OsString;
use std::net::Ipv4Addr;
use std::os::fd::RawFd;
use std::str::FromStr;

use super::values::MacArg;
use ringfence_base::address::IpPrefix;
use ringfence_uplink_process::asking::AskArgs;
use ringfence_uplink_process::egress::EgressArgs;
use ringfence_uplink_process::queues::{QUEUES_MAX, parse_queues};

/// IPv4 network of the namespace: its base address and the length of its prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cidr {
    pub(crate) base: Ipv4Addr,
    /// Length of the prefix in bits.
    pub(crate) prefix: u8,
}

impl FromStr for Cidr {
    type Err = String;

    fn from_str(text: &str) -> Result<Cidr, String> {
        let wrong = || {
            format!(
                "`{text}` is not a network of 10.0.2.0/24's form, with a prefix of 1 to 25 bits"
            )
        };
        let (base, prefix) = text.split_once('/').ok_or_else(wrong)?;
        let base: Ipv4Addr = base.parse().map_err(|_| wrong())?;
        // The namespace has the address number 100.
        let prefix =
            prefix.parse().ok().filter(|bits| (1..=25).contains(bits)).ok_or_else(wrong)?;
        let network = IpPrefix::new(base, prefix);
        if network.masked() == network { Ok(Cidr { base, prefix }) } else { Err(wrong()) }
    }
}

impl Cidr {
    /// Returns the n-th address of the network.
    pub(crate) fn address(self, number: u32) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.base.to_bits() | number)
    }
}

/// Kind of the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum NetnsType {
    /// Process id
    Pid,
    /// Path of a network namespace
    Path,
}

/// Connect a network namespace to the host's network, with the options of slirp4netns.
#[derive(Debug, clap::Args)]
pub struct SlirpArgs {
    /// Configure the interface in the namespace, and bring it up
    #[arg(short, long)]
    pub configure: bool,

    /// End when the other end of this descriptor is closed
    #[arg(short, long, value_name = "FD")]
    pub exit_fd: Option<RawFd>,

    /// Write `1` to this descriptor when the network is usable
    #[arg(short, long, value_name = "FD")]
    pub ready_fd: Option<RawFd>,

    /// Longest IP packet in bytes
    #[arg(short, long, value_name = "BYTES", default_value_t = 1500,
          value_parser = clap::value_parser!(u16).range(576..=65521))]
    pub mtu: u16,

    /// IPv4 network of the namespace, which has the address number 100
    #[arg(long, default_value = "10.0.2.0/24")]
    pub cidr: Cidr,

    /// Do not let the router's address lead to the host's loopback
    #[arg(long)]
    pub disable_host_loopback: bool,

    /// Let no address lead to the host's name server
    #[arg(long)]
    pub disable_dns: bool,

    /// Give the namespace an IPv6 network, too
    #[arg(short = '6', long)]
    pub enable_ipv6: bool,

    /// Ethernet address of the interface
    #[arg(long, value_name = "ADDR")]
    pub macaddress: Option<MacArg>,

    /// Kind of the target
    #[arg(long, value_enum, default_value = "pid")]
    pub netns_type: NetnsType,

    /// User namespace to join before the network namespace
    #[arg(long, value_name = "PATH")]
    pub userns_path: Option<OsString>,

    /// Changes nothing: the uplink runs in a sandbox in any case
    #[arg(long)]
    pub enable_sandbox: bool,

    /// Changes nothing: the uplink has a list of system calls in any case
    #[arg(long)]
    pub enable_seccomp: bool,

    /// Unix socket at which clients add, list and remove ports
    #[arg(short, long, value_name = "PATH")]
    pub api_socket: Option<OsString>,

    /// Source address of IPv4 to other hosts, or interface by which it leaves
    #[arg(long, value_name = "IP|NAME")]
    pub outbound_addr: Option<String>,

    /// The same for IPv6: source address, or interface
    #[arg(long, value_name = "IP|NAME")]
    pub outbound_addr6: Option<String>,

    /// Number of queues of the interface, each with a thread, or `auto` for one per processor; packets of one connection
    /// take one queue
    #[arg(long, value_name = "N|auto", default_value = "1",
          value_parser = |text: &str| parse_queues(text, QUEUES_MAX))]
    pub queues: u32,

    /// Rules for names and addresses that the namespace may reach.
    #[command(flatten)]
    pub egress: EgressArgs,

    /// Party that answers questions about the rest.
    #[command(flatten)]
    pub ask: AskArgs,

    /// Not supported, unless it is `netns`
    #[arg(long, value_name = "TYPE", hide = true, default_value = "netns")]
    pub target_type: String,

    /// Print the version
    #[arg(short, long)]
    pub version: bool,

    /// Process id, or path of a network namespace
    #[arg(value_name = "PID|PATH", required_unless_present = "version")]
    pub target: Option<OsString>,

    /// Name of the interface
    #[arg(value_name = "NAME", required_unless_present = "version")]
    pub interface: Option<String>,
}
