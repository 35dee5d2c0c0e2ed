//! Command line of `ringfence pasta`: the options of pasta's manual page, 2023 to 2026.
//!
//! Every option is of one of three kinds. Implemented ones are fields of [`PastaArgs`]. Those that have nothing to
//! do here, because Ringfence behaves so in any case, are `WITHOUT_EFFECT`. The rest is refused with a reason
//! (`REFUSED`). An option of none of these is unknown.
//! The options about egress are Ringfence's own, as `run` has them ([`EgressArgs`], [`AskArgs`]).

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use ringfence_uplink::udp::multicast::service::Service;

use super::values::{AddressArg, MacArg, NetmaskArg, OrNone, RunAs};
use crate::forward_spec::PastaForwardSpec;
use ringfence_hostnet::interface::parse_interface;
use ringfence_uplink_process::asking::AskArgs;
use ringfence_uplink_process::egress::EgressArgs;
use ringfence_uplink_process::local::LocalPrefix;
use ringfence_uplink_process::queues::{QUEUES_MAX, parse_queues};

/// Names of an option: long, short, and whether it has a value.
type Names = (&'static str, Option<char>, bool);

/// Options that change nothing, with the reason.
pub(crate) const WITHOUT_EFFECT: &[(Names, &str)] = &[
    (
        ("stderr", Some('e'), false),
        "messages go to standard error until the process is in the background",
    ),
    (("netns-only", None, false), "the user namespace is joined only if --userns or PID names one"),
    (("chroot-fallback", None, false), "the sandbox needs no such fallback"),
    (("no-dhcp-dns", None, false), "DHCP offers no name servers without --dhcp-dns"),
    (("no-dhcp-search", None, false), "DHCP offers no search domains without --dhcp-search"),
];

/// Options that are refused, with the reason.
pub(crate) const REFUSED: &[(Names, &str)] = &[
    (("stats", None, true), "the uplink prints no statistics"),
    (("hostname", Some('H'), true), "DHCP offers no host name"),
    (("fqdn", None, true), "DHCP offers no host name"),
    (("splice-only", None, false), "the interface always exists"),
    (("socket", Some('s'), true), "this is an option of passt, for virtual machines"),
    (("socket-path", None, true), "this is an option of passt, for virtual machines"),
    (("fd", Some('F'), true), "this is an option of passt, for virtual machines"),
    (("one-off", Some('1'), false), "this is an option of passt, for virtual machines"),
    (("vhost-user", None, false), "this is an option of passt, for virtual machines"),
    (("vfkit", None, false), "this is an option of passt, for virtual machines"),
    (("print-capabilities", None, false), "this is an option of passt, for virtual machines"),
    (("repair-path", None, true), "this is an option of passt, for virtual machines"),
    (("migrate-exit", None, false), "this is an option of passt, for virtual machines"),
    (("migrate-no-linger", None, false), "this is an option of passt, for virtual machines"),
];

const HEAD: &str = "Namespace";
const SETTINGS: &str = "Network of the namespace";
const HOST: &str = "Access to the host";
const PORTS: &str = "Ports";

const EXAMPLES: &str = "\
Examples:
  A shell in new namespaces, with the host's addresses:
    ringfence pasta --config-net

  The network of a container that exists already, as Podman sets it up:
    ringfence pasta --config-net -t 8080:80 -u none -T none -U none --no-map-gw --netns PATH

Exit status:
    0 once the network is up, in the background. 1 if it could not be set up (standard error has the
    reason). With COMMAND, the command's own.";

/// Connect network namespaces to the host's network, with the options of pasta.
///
/// It connects the namespaces of process PID, or those of --netns and --userns, and then runs in the background.
/// With COMMAND, or with neither, it runs a command or a shell in new namespaces, and ends with it.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, args_override_self = true, infer_long_args = true)]
pub struct PastaArgs {
    /// Network namespace to connect: a path, or a name in /run/netns
    #[arg(long, value_name = "PATH|NAME", help_heading = HEAD)]
    pub netns: Option<PathBuf>,

    /// User namespace to join before the network namespace, as a path
    #[arg(long, value_name = "PATH", help_heading = HEAD)]
    pub userns: Option<PathBuf>,

    /// Keep running when the network namespace's file is deleted, or its process ends
    #[arg(long, help_heading = HEAD)]
    pub no_netns_quit: bool,

    /// Run COMMAND in the PID namespace of this program
    #[arg(long, help_heading = HEAD)]
    pub no_pidns: bool,

    /// Configure the interface in the namespace: addresses, routes, and bring it up
    #[arg(long, help_heading = SETTINGS)]
    pub config_net: bool,

    /// Name of the interface in the namespace [default: that of the host's interface, or tap0]
    #[arg(short = 'I', long, value_name = "NAME", value_parser = parse_interface, help_heading = SETTINGS)]
    pub ns_ifname: Option<String>,

    /// Ethernet address of the interface in the namespace
    #[arg(long, value_name = "ADDR", help_heading = SETTINGS)]
    pub ns_mac_addr: Option<MacArg>,

    /// Ethernet address of the other end of the interface
    #[arg(short = 'M', long, value_name = "ADDR", help_heading = SETTINGS)]
    pub mac_addr: Option<MacArg>,

    /// Longest IP packet in bytes
    #[arg(short, long, value_name = "BYTES", default_value_t = ringfence_uplink_process::MTU_DEFAULT,
          value_parser = clap::value_parser!(u16).range(576..=65520), help_heading = SETTINGS)]
    pub mtu: u16,

    /// Address of the namespace; one for IPv4, one for IPv6 [default: the host's own]
    #[arg(short, long, value_name = "IP[/LEN]", help_heading = SETTINGS)]
    pub address: Vec<AddressArg>,

    /// Netmask of the IPv4 address: a number of bits, or 255.255.255.0
    #[arg(short = 'n', long, value_name = "MASK", help_heading = SETTINGS)]
    pub netmask: Option<NetmaskArg>,

    /// Default gateway; one for IPv4, one for IPv6 [default: the host's own]
    #[arg(short, long, value_name = "IP", help_heading = SETTINGS)]
    pub gateway: Vec<IpAddr>,

    /// Interface of the host whose addresses and routes are copied [default: that of the default route]
    #[arg(short, long, value_name = "NAME", value_parser = parse_interface, help_heading = SETTINGS)]
    pub interface: Option<String>,

    /// Source address of connections to other hosts; one for IPv4, one for IPv6 [default: the routing table's choice]
    #[arg(short, long, value_name = "IP", help_heading = HOST)]
    pub outbound: Vec<IpAddr>,

    /// Interface of the host by which all IPv4 leaves, and which is copied without -i [default: the routing table's choice]
    #[arg(long, value_name = "NAME", value_parser = parse_interface, help_heading = HOST)]
    pub outbound_if4: Option<String>,

    /// The same for IPv6: the interface by which all of it leaves
    #[arg(long, value_name = "NAME", value_parser = parse_interface, help_heading = HOST)]
    pub outbound_if6: Option<String>,

    /// Copy only the default route
    #[arg(long, help_heading = SETTINGS)]
    pub no_copy_routes: bool,

    /// Copy only one address of each family
    #[arg(long, help_heading = SETTINGS)]
    pub no_copy_addrs: bool,

    /// IPv4 only
    #[arg(short = '4', long, overrides_with = "ipv6_only", help_heading = SETTINGS)]
    pub ipv4_only: bool,

    /// IPv6 only
    #[arg(short = '6', long, overrides_with = "ipv4_only", help_heading = SETTINGS)]
    pub ipv6_only: bool,

    /// Name server for --dhcp-dns, in place of the host's; may be given several times, or `none`
    #[arg(short = 'D', long, value_name = "IP|none", help_heading = SETTINGS)]
    pub dns: Vec<OrNone<IpAddr>>,

    /// Address in the namespace that leads to a name server of the host, on port 53; one for each family
    #[arg(long, value_name = "IP", help_heading = SETTINGS)]
    pub dns_forward: Vec<IpAddr>,

    /// Name server of the host to which --dns-forward leads; one for each family
    #[arg(long, value_name = "IP", help_heading = SETTINGS)]
    pub dns_host: Vec<IpAddr>,

    /// Search domains for --dhcp-search, separated by spaces, or `none` [default: the host's]
    #[arg(short = 'S', long, value_name = "LIST", help_heading = SETTINGS)]
    pub search: Option<String>,

    /// Offer name servers by DHCP, DHCPv6 and router advertisements
    #[arg(long, help_heading = SETTINGS)]
    pub dhcp_dns: bool,

    /// Offer search domains by DHCP and DHCPv6
    #[arg(long, help_heading = SETTINGS)]
    pub dhcp_search: bool,

    /// Carry no TCP
    #[arg(long, help_heading = SETTINGS)]
    pub no_tcp: bool,

    /// Carry no UDP
    #[arg(long, help_heading = SETTINGS)]
    pub no_udp: bool,

    /// Carry no echo requests
    #[arg(long, help_heading = SETTINGS)]
    pub no_icmp: bool,

    /// Do not answer DHCP
    #[arg(long, help_heading = SETTINGS)]
    pub no_dhcp: bool,

    /// Do not answer DHCPv6
    #[arg(long, help_heading = SETTINGS)]
    pub no_dhcpv6: bool,

    /// Do not answer neighbour discovery
    #[arg(long, help_heading = SETTINGS)]
    pub no_ndp: bool,

    /// Do not answer router solicitations
    #[arg(long, help_heading = SETTINGS)]
    pub no_ra: bool,

    /// Address in the namespace that leads to the host's loopback, or `none`; one for each family
    #[arg(long, value_name = "IP|none", help_heading = HOST)]
    pub map_host_loopback: Vec<OrNone<IpAddr>>,

    /// Let the gateway's address lead to the host's loopback
    #[arg(long, overrides_with = "no_map_gw", help_heading = HOST)]
    pub map_gw: bool,

    /// Do not let the gateway's address lead to the host's loopback. This is the default
    #[arg(long, overrides_with = "map_gw", help_heading = HOST)]
    pub no_map_gw: bool,

    /// Address in the namespace that leads to the host's own address, or `none`; one for each family
    #[arg(long, value_name = "IP|none", help_heading = HOST)]
    pub map_guest_addr: Vec<OrNone<IpAddr>>,

    /// Addresses of the host itself, or of its link, that the namespace may reach; may be given several times
    #[arg(long, value_name = "IP[/LEN]", help_heading = HOST)]
    pub allow_local: Vec<LocalPrefix>,

    /// Services that find each other across the host's link by multicast: mdns, ssdp, or both [default: none]
    #[arg(long, value_name = "mdns,ssdp", value_delimiter = ',', help_heading = HOST)]
    pub multicast: Vec<Service>,

    /// TCP ports of the host that lead to the namespace; may be given several times [default: none]
    ///
    /// `none`, or [ADDRESS[%INTERFACE]/] and a list of PORT[-LAST][:PORT[-LAST]] and excluded ~PORT[-LAST],
    /// separated by commas.
    #[arg(short = 't', long, value_name = "SPEC", help_heading = PORTS)]
    pub tcp_ports: Vec<PastaForwardSpec>,

    /// UDP ports of the host that lead to the namespace, as with -t
    #[arg(short = 'u', long, value_name = "SPEC", help_heading = PORTS)]
    pub udp_ports: Vec<PastaForwardSpec>,

    /// TCP ports of the namespace's loopback that lead to the host's: `none`, or PORT[-LAST][:PORT[-LAST]], `~PORT`,
    /// `auto` (each port that has a listener at the host's loopback); may be given several times [default: none]
    #[arg(short = 'T', long, value_name = "SPEC", help_heading = PORTS)]
    pub tcp_ns: Vec<PastaForwardSpec>,

    /// UDP ports of the namespace's loopback that lead to the host's, as with -T [default: none]
    #[arg(short = 'U', long, value_name = "SPEC", help_heading = PORTS)]
    pub udp_ns: Vec<PastaForwardSpec>,

    /// Let connections from the host's loopback to a port of -t lead to the namespace's loopback
    #[arg(long, help_heading = PORTS)]
    pub host_lo_to_ns_lo: bool,

    /// Let connections from the host's loopback take the way through the interface, as all others do
    #[arg(long, help_heading = PORTS)]
    pub no_splice: bool,

    /// Unix socket at which `pesto` adds, lists and removes ports while it runs
    #[arg(short, long, value_name = "PATH", help_heading = PORTS)]
    pub conf_path: Option<PathBuf>,

    /// Listen also at addresses that the host does not have yet
    #[arg(long, help_heading = PORTS)]
    pub freebind: bool,

    /// Number of queues of the interface, each with a thread, or `auto` for one per processor; packets of one connection
    /// take one queue
    #[arg(long, value_name = "N|auto", default_value = "1",
          value_parser = |text: &str| parse_queues(text, QUEUES_MAX), help_heading = SETTINGS)]
    pub queues: u32,

    /// Rules for names and addresses that the namespace may reach.
    #[command(flatten)]
    pub egress: EgressArgs,

    /// Party that answers questions about the rest.
    #[command(flatten)]
    pub ask: AskArgs,

    /// Stay in the foreground
    #[arg(short, long)]
    pub foreground: bool,

    /// Write the process id to this file once the network is up
    #[arg(short = 'P', long, value_name = "FILE")]
    pub pid: Option<PathBuf>,

    /// Unix socket at which `ringfence status --socket` and `ringfence top --socket` read the state while it runs
    #[arg(long, value_name = "PATH")]
    pub status_socket: Option<PathBuf>,

    /// Write all packets of the interface to this file, in the format of tcpdump; at most 1 GiB
    #[arg(short, long, value_name = "FILE")]
    pub pcap: Option<PathBuf>,

    /// Append messages to this file, in place of the system log
    #[arg(short, long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,

    /// Size of the log file at which its older half is removed, in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 1 << 20,
          value_parser = clap::value_parser!(u64).range(4096..=1 << 40))]
    pub log_size: u64,

    /// User, and group, of the command and of the process in the background, if root starts it [default: nobody]
    #[arg(long, value_name = "USER[:GROUP]")]
    pub runas: Option<RunAs>,

    /// Print only errors
    #[arg(short, long)]
    pub quiet: bool,

    /// Explain each step
    #[arg(short, long)]
    pub debug: bool,

    /// As --debug; single packets are not shown
    #[arg(long)]
    pub trace: bool,

    /// Print the version
    #[arg(long)]
    pub version: bool,

    #[command(flatten)]
    pub(crate) others: OtherArgs,

    /// PID of a process whose namespaces are connected, or a command and its arguments
    #[arg(value_name = "PID|COMMAND", trailing_var_arg = true)]
    pub command: Vec<OsString>,
}

impl PastaArgs {
    /// Returns `true` if an egress policy reads the queries of the namespace.
    pub(crate) fn has_policy(&self) -> bool {
        self.egress.are_given() || self.ask.ask.is_some()
    }
}

/// Given options that are not implemented: their long names.
#[derive(Clone, Debug, Default)]
pub(crate) struct OtherArgs {
    /// Refused options, with the reason.
    pub(crate) refused: Vec<(&'static str, &'static str)>,
    /// Options without effect, with the reason.
    pub(crate) without_effect: Vec<(&'static str, &'static str)>,
}

impl FromArgMatches for OtherArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<OtherArgs, clap::Error> {
        let given = |table: &[(Names, &'static str)]| {
            let is_given = |name: &str| {
                matches.value_source(name) == Some(clap::parser::ValueSource::CommandLine)
            };
            table
                .iter()
                .map(|((name, ..), why)| (*name, *why))
                .filter(|(n, _)| is_given(n))
                .collect()
        };
        Ok(OtherArgs { refused: given(REFUSED), without_effect: given(WITHOUT_EFFECT) })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = OtherArgs::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for OtherArgs {
    fn augment_args(command: Command) -> Command {
        let all = REFUSED.iter().chain(WITHOUT_EFFECT);
        all.fold(command, |command, ((name, short, has_value), why)| {
            let action = if *has_value { ArgAction::Append } else { ArgAction::SetTrue };
            let arg = Arg::new(*name).long(*name).action(action).help(*why).hide(true);
            command.arg(match short {
                Some(short) => arg.short(*short),
                None => arg,
            })
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        OtherArgs::augment_args(command)
    }
}
