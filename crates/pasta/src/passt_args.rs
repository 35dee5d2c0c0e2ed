//! Command line of `ringfence passt`: the options of passt's manual page, 2023 to 2026.
//!
//! Most are those of pasta ([`super::args`]), and are parsed by the same code. [`PasstArgs`] adds the options of
//! passt, takes the texts about namespaces for a virtual machine, and refuses the options of pasta by name
//! (`OF_PASTA`).

use std::os::fd::RawFd;
use std::path::PathBuf;

use anyhow::bail;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, value_parser};

use super::args::PastaArgs;
use super::machine::{Endpoint, Place};
use super::values::PoolArg;
use crate::forward_spec::PastaForwardSpec;
use crate::program::PASST;
use ringfence_uplink_process::link::{PoolRule, Transport};

/// Options of pasta, about namespaces: name in the parser, long name.
pub(crate) const OF_PASTA: &[(&str, &str)] = &[
    ("netns", "netns"),
    ("userns", "userns"),
    ("netns-only", "netns-only"),
    ("no_netns_quit", "no-netns-quit"),
    ("no_pidns", "no-pidns"),
    ("config_net", "config-net"),
    ("ns_ifname", "ns-ifname"),
    ("ns_mac_addr", "ns-mac-addr"),
    ("no_copy_routes", "no-copy-routes"),
    ("no_copy_addrs", "no-copy-addrs"),
    ("tcp_ns", "tcp-ns"),
    ("udp_ns", "udp-ns"),
    ("host_lo_to_ns_lo", "host-lo-to-ns-lo"),
    ("no_splice", "no-splice"),
    ("splice-only", "splice-only"),
    ("queues", "queues"),
];

/// Reasons for which other options of passt are refused.
pub(crate) const REFUSED: &[(&str, &str)] = &[
    ("repair-path", "connections are not migrated"),
    ("migrate-exit", "connections are not migrated"),
    ("migrate-no-linger", "connections are not migrated"),
];

const HEAD: &str = "Socket";
const OF_GUEST: &str = "Network of the guest";

const EXAMPLES: &str = "\
Examples:
  A virtual machine of QEMU, with the host's addresses:
    ringfence passt --socket /tmp/vm.socket
    qemu-system-x86_64 ... -device virtio-net-pci,netdev=n \\
        -netdev stream,id=n,server=off,addr.type=unix,addr.path=/tmp/vm.socket

  The same by vhost-user, which is faster:
    ringfence passt --vhost-user --socket /tmp/vm.socket
    qemu-system-x86_64 ... -m 1G -object memory-backend-memfd,id=m,size=1G,share=on \\
        -machine memory-backend=m -chardev socket,id=c,path=/tmp/vm.socket \\
        -netdev vhost-user,id=n,chardev=c -device virtio-net-pci,netdev=n

  The same with nothing lent but a pool of 64 MiB (docs/vhost-user.md):
    ringfence passt --vhost-user --require-pool 64M --socket /tmp/vm.socket

  vfkit and libkrun (krun_add_net_unixgram):
    ringfence passt --vfkit --socket /tmp/vm.socket
    vfkit ... --device virtio-net,unixSocketPath=/tmp/vm.socket

  Port 2222 of the host leads to port 22 of the machine; ends with it:
    ringfence passt --one-off -t 2222:22 --socket /tmp/vm.socket

Exit status:
    0 once the socket accepts connections, in the background. 1 if that fails (standard error has
    the reason). With --foreground: 0 after SIGTERM, and after the client of --fd or --one-off
    has gone.";

/// Connect a virtual machine to the host's network, with the options of passt.
#[derive(Debug)]
pub struct PasstArgs {
    /// Options that pasta has as well.
    pub network: PastaArgs,
    socket: Option<PathBuf>,
    fd: Option<RawFd>,
    one_off: bool,
    vhost_user: bool,
    vfkit: bool,
    require_pool: Option<PoolArg>,
    /// Set if the capabilities of --vhost-user are to be printed, and nothing else done.
    pub(crate) print_capabilities: bool,
    /// Refused options, with the reason.
    refused: Vec<(&'static str, &'static str)>,
}

impl PasstArgs {
    /// Rejects options that are not supported, and options that contradict each other. Returns the endpoint.
    pub(crate) fn check(&self) -> anyhow::Result<Endpoint> {
        if let Some((name, why)) = self.refused.first() {
            bail!("--{name} is not supported: {why}");
        }
        if !self.network.command.is_empty() {
            bail!("`{}`: passt takes no command; pasta does", self.network.command[0].display());
        }
        let ports = self.network.tcp_ports.iter().chain(&self.network.udp_ports);
        for spec in ports {
            if let PastaForwardSpec::Listen(listen) = spec
                && listen.auto
            {
                bail!("{listen}: the ports of a virtual machine cannot be seen: name them");
            }
        }
        let place = match (&self.socket, self.fd) {
            (Some(_), Some(_)) => bail!("--fd passes a connected socket: leave out --socket"),
            (None, Some(fd)) => Place::Inherited(fd),
            (Some(path), None) => Place::Path(path.clone()),
            (None, None) => Place::Probed,
        };
        let transport = match (self.vhost_user, self.vfkit) {
            (true, true) => {
                bail!("--vfkit has frames on the socket, and --vhost-user none: choose")
            }
            (true, false) => {
                let pool = self.require_pool.map_or(PoolRule::Any, |PoolArg(pool)| pool);
                Transport::VhostUser { pool, pairs: 1 }
            }
            (false, _) if self.require_pool.is_some() => {
                bail!("--require-pool is about memory that is shared by --vhost-user: give both")
            }
            (false, true) => Transport::Datagram,
            (false, false) => Transport::Stream,
        };
        let one_off = self.one_off || self.vfkit;
        Ok(Endpoint { place, program: PASST, one_off, transport })
    }
}

impl FromArgMatches for PasstArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<PasstArgs, clap::Error> {
        let mut network = PastaArgs::from_arg_matches(matches)?;
        let is_given =
            |name: &str| matches.value_source(name) == Some(clap::parser::ValueSource::CommandLine);
        let of_pasta = OF_PASTA.iter().filter(|(id, _)| is_given(id));
        let of_pasta =
            of_pasta.map(|(_, name)| (*name, "this is an option of pasta, for namespaces"));
        let reason = |name| REFUSED.iter().find(|(refused, _)| *refused == name).copied();
        let is_own = |name: &str| OWN.contains(&name);
        let others = network.others.refused.iter().filter(|(name, _)| !is_own(name));
        let refused = others.map(|&(name, why)| reason(name).unwrap_or((name, why)));
        let refused = refused.chain(of_pasta).collect();
        let last =
            |name| matches.get_many::<PathBuf>(name).and_then(|mut all| all.next_back().cloned());
        let is_without =
            |name| network.others.without_effect.iter().any(|(given, _)| *given == name);
        // DHCP offers what the host has, unless an option says otherwise.
        network.dhcp_dns = !is_without("no-dhcp-dns");
        network.dhcp_search = !is_without("no-dhcp-search");
        let has_effect = |name: &str| name.starts_with("no-dhcp-");
        network.others.without_effect.retain(|(name, _)| !has_effect(name));
        network.others.refused.clear();
        // Every connection takes the way through the interface of the machine.
        network.no_splice = true;
        network.ns_ifname = Some("guest".to_owned());
        Ok(PasstArgs {
            network,
            socket: last("socket").or_else(|| last("socket-path")),
            fd: matches.get_many::<RawFd>("fd").and_then(|mut all| all.next_back().copied()),
            one_off: matches.get_flag("one-off"),
            vhost_user: matches.get_flag("vhost-user"),
            vfkit: matches.get_flag("vfkit"),
            require_pool: matches
                .get_many("require-pool")
                .and_then(|mut all| all.next_back().copied()),
            print_capabilities: matches.get_flag("print-capabilities"),
            refused,
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = PasstArgs::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Names of passt's own options that are implemented, in the parser of pasta.
const OWN: &[&str] =
    &["socket", "socket-path", "fd", "one-off", "vhost-user", "vfkit", "print-capabilities"];

impl Args for PasstArgs {
    fn augment_args(command: Command) -> Command {
        let own = |arg: Arg, help: &'static str| arg.help(help).help_heading(HEAD).hide(false);
        let added = |name: &'static str, help, value: &'static str| {
            own(Arg::new(name).long(name).action(ArgAction::Append).value_name(value), help)
        };
        let command = PastaArgs::augment_args(command)
            .about("Connect a virtual machine to the host's network, with the options of passt")
            .long_about(LONG_ABOUT)
            .after_help(EXAMPLES)
            .mut_args(for_guest)
            .mut_arg("socket", |arg| {
                own(arg, SOCKET).value_name("PATH").value_parser(value_parser!(PathBuf))
            })
            .mut_arg("socket-path", |arg| arg.value_parser(value_parser!(PathBuf)))
            .mut_arg("fd", |arg| own(arg, FD).value_name("FD").value_parser(value_parser!(RawFd)))
            .mut_arg("one-off", |arg| own(arg, "End with the first client"))
            .mut_arg("vhost-user", |arg| own(arg, VHOST_USER))
            .mut_arg("vfkit", |arg| own(arg, VFKIT))
            .arg(
                added("require-pool", REQUIRE_POOL, "SIZE|auto")
                    .value_parser(value_parser!(PoolArg)),
            )
            .mut_arg("print-capabilities", |arg| {
                own(arg, "Print what --vhost-user offers to programs that look for a backend")
            })
            .mut_arg("no-dhcp-dns", |arg| own(arg, "Offer no name servers").help_heading(OF_GUEST))
            .mut_arg("no-dhcp-search", |arg| {
                own(arg, "Offer no search domains").help_heading(OF_GUEST)
            });
        let hidden =
            OF_PASTA.iter().map(|(id, _)| *id).chain(["command", "dhcp_dns", "dhcp_search"]);
        hidden.fold(command, |command, id| command.mut_arg(id, |arg| arg.hide(true)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        PasstArgs::augment_args(command)
    }
}

const LONG_ABOUT: &str = "\
Connect a virtual machine to the host's network, with the options of passt.

QEMU, libkrun and libvirt connect to its Unix socket. The machine configures itself by DHCP, DHCPv6 and router \
advertisements. The program runs in the background once the socket accepts connections, and serves one client after \
another.";
const SOCKET: &str = "Path of the socket to create [default: the first free one of /tmp/passt_1.socket to /tmp/passt_64.socket]";
const VHOST_USER: &str =
    "Exchange packets by virtqueues in the machine's memory, which the client of the socket shares";
const REQUIRE_POOL: &str = "With --vhost-user, refuse a hypervisor that shares more than a pool of this size, or with `auto` memory without the mark of a pool";
const VFKIT: &str =
    "Datagram socket with one frame each, as vfkit and libkrun use it; ends with its client";
const FD: &str = "Connected socket, inherited from the parent process; ends with its client";

/// Words about namespaces, and those about virtual machines. The first match counts.
const WORDS: &[(&str, &str)] = &[
    (
        "Name server for --dhcp-dns, in place of the host's",
        "Name server to offer, in place of the host's",
    ),
    ("Search domains for --dhcp-search", "Search domains to offer"),
    ("the namespace's loopback", "the guest's loopback"),
    ("the namespace", "the guest"),
    ("once the network is up", "once the socket accepts connections"),
    (" of the command and of the process", " of the process"),
];

/// Takes the texts of an option for a virtual machine.
fn for_guest(arg: Arg) -> Arg {
    let replaced = |text: String| {
        WORDS.iter().fold(text, |text, (namespace, machine)| text.replace(namespace, machine))
    };
    let help = arg.get_help().map(|help| replaced(help.to_string()));
    let long = arg.get_long_help().map(|help| replaced(help.to_string()));
    let arg = match arg.get_help_heading() {
        Some("Network of the namespace") => arg.help_heading(OF_GUEST),
        _ => arg,
    };
    let arg = if let Some(help) = help { arg.help(help) } else { arg };
    if let Some(long) = long { arg.long_help(long) } else { arg }
}
