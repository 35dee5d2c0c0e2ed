//! The command line.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::attach::AttachArgs;
use crate::disk::DiskSpec;
use crate::guest::Address;
use crate::hub::HubArgs;
use crate::launch::report::Loudness;
use crate::launch::{Link, Options, Protect, UplinkChoice, ViewOptions};
use crate::names::{parse_name, parse_switch_name};
use crate::serve::ServeArgs;
use crate::serve::show::StatusArgs;
use crate::uplink::forward::ForwardSpec;
use crate::uplink::local::LocalPrefix;
use ringfence_access::Mode;
use ringfence_frame::commands::TxStaging;
use ringfence_net::features::OffloadKeys;
use ringfence_net::vif::backend::QUEUES_MAX;
use ringfence_sandbox::spawn::DomainKind;
use ringfence_sys::tap;

/// The smallest MTU: what every IPv4 host must be able to receive (RFC 791, section 3.2).
const MTU_MIN: i64 = 576;
/// The largest: 65535, less an Ethernet header.
const MTU_MAX: i64 = 65521;
/// Given as a switch: none.
const NO_SWITCH: &str = "none";

/// A driver domain: it serves network interfaces to guests that it does not trust, and that do
/// not trust it.
///
/// It sees no more of a guest's memory than the pages which that guest has lent it. Here a guest
/// is a command in namespaces of its own; no hypervisor and no root are needed.
#[derive(Debug, Parser)]
#[command(name = "ringfence", version, arg_required_else_help = true, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a command as a guest with a network of its own
    Run(RunArgs),
    /// Show what it does: two guests, a TCP transfer in each mode, a short table
    ///
    /// Takes some ten seconds and needs no root.
    Demo,
    /// Serve network interfaces to Xen guests, in dom0 or a driver domain
    Serve(ServeArgs),
    /// Drive one of this Xen guest's network interfaces from user space
    Attach(AttachArgs),
    /// Show what `ringfence serve` serves
    Status(StatusArgs),
    /// Run the hub alone, for domains that are started by other means
    Hub(HubArgs),
    /// Print a script that completes commands and options in a shell
    #[command(after_help = "Example, for bash:\n  ringfence completions bash > \
                            ~/.local/share/bash-completion/completions/ringfence")]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Ringfence's own processes
    #[command(hide = true)]
    Internal {
        /// Which.
        #[command(subcommand)]
        role: Internal,
    },
}

/// The heading of the options that decide about files.
const FILES: &str = "Files";

const RUN_EXAMPLES: &str = "\
Examples:
  A shell with a network interface:
    ringfence run

  A page of the Internet, and a server that the Internet can reach:
    ringfence run -- curl https://example.org/
    ringfence run -p 8080:8000 -- python3 -m http.server

  A web server and a client, in two terminals, in either order:
    ringfence run --name web -- python3 -m http.server
    ringfence run -- curl http://web:8000/

  Two networks that do not see each other:
    ringfence run --switch blue -- CMD
    ringfence run --switch green -- CMD

  A disk, through an NBD client:
    truncate -s 1G disk.img
    ringfence run --disk disk.img -- sh -c 'nbdinfo nbd+unix:///?socket=$RINGFENCE_DISK0'

  A leg on the switch for the host (as root):
    ringfence run --host-tap rf0 --name web -- python3 -m http.server

Exit status:
  The command's own. 128 + N when signal N ended it; 127 when it was not found, 126 when it could
  not be run, 125 when something of Ringfence's failed (the reason is on standard error).";

/// Run a command as a guest with a network of its own.
///
/// The command runs in user, network, mount, PID, IPC and UTS namespaces of its own. Its eth0 is
/// fed by a network frontend, a process of its own, which shares rings and lent pages with the
/// backend in the switch's driver domain, and nothing else. Guests of one switch reach each other
/// by address and by name. The first one starts the driver domain; the last one to leave ends it.
///
/// Its up0 leads to the host's network, with the host's own addresses and routes: another process,
/// which has no right but to open sockets, turns its packets into the host's connections. The host's
/// own addresses, loopback among them, and link-local ones are out of reach, and nobody outside reaches
/// the guest, unless that is asked for.
///
/// Files are those of the host, with the rights of whoever runs this. (As an ordinary user the
/// command sees itself as root, and cannot do more than that user. As root it can change every file of
/// the computer.) The sockets of the host's programs are hidden.
#[derive(Debug, Args)]
#[command(after_help = RUN_EXAMPLES)]
pub struct RunArgs {
    /// The switch to be on; it is made when it is not there. `none`: the guest is on no switch
    #[arg(long, value_name = "NAME", default_value = "default", value_parser = parse_switch_name)]
    pub switch: String,

    /// The name by which others on the switch find this guest; also its host name
    #[arg(long, value_name = "HOST", value_parser = parse_name)]
    pub name: Option<String>,

    /// An address on the switch in place of those that are chosen; may be given several times
    #[arg(long = "address", value_name = "IP/LEN", value_parser = Address::parse_assignable)]
    pub addresses: Vec<Address>,

    /// Let the guest route: its packets may have any IP source, and be of other protocols than IP
    ///
    /// Without this option, the switch drops what the guest sends from an address other than its own.
    /// Its Ethernet address, ARP and IPv6 neighbour discovery are checked in any case.
    #[arg(long)]
    pub forwarding: bool,

    /// Let the guest configure others: router advertisements, ICMP redirects, DHCP and DHCPv6 replies
    ///
    /// Without this option, the switch drops these messages from the guest.
    #[arg(long)]
    pub advertise: bool,

    /// Where the guest's packets go that are for nobody on the switch [default: host]
    #[arg(long, value_enum)]
    pub uplink: Option<UplinkChoice>,

    /// What connects the guest to the world
    #[arg(long, value_enum, default_value_t)]
    pub link: Link,

    /// With --link vhost: how much of the uplink's memory the kernel's worker reaches
    #[arg(long, value_enum, default_value_t)]
    pub protect: Protect,

    /// Have a port of the host lead to the guest; may be given several times
    ///
    /// For example `8080:80`, `127.0.0.1:8080:80`, `[::1]:8080:80`, `8000-8010`, `5353:53/udp`. The
    /// command sees the addresses that clients really have. Without IP the port listens at every address
    /// of the host, IPv4 and IPv6, as it does with Docker and Podman: whoever reaches the host reaches the
    /// command. --publish-default changes that.
    #[arg(short, long = "publish", value_name = "[IP:]PORT[-LAST][:GUESTPORT][/udp]")]
    pub publish: Vec<ForwardSpec>,

    /// The address at which ports of -p listen that name none, such as 127.0.0.1; may be given several
    /// times, for IPv4 and IPv6 [default: every address of the host]
    #[arg(long, value_name = "IP")]
    pub publish_default: Vec<IpAddr>,

    /// An address on the host's network in place of the host's own; may be given several times
    #[arg(long = "uplink-address", value_name = "IP/LEN")]
    pub uplink_addresses: Vec<Address>,

    /// The router there in place of the host's own; one for IPv4, one for IPv6
    #[arg(long = "uplink-gateway", value_name = "IP")]
    pub uplink_gateways: Vec<IpAddr>,

    /// Ask this name server in place of the host's own; may be given several times
    #[arg(long = "dns", value_name = "IP")]
    pub name_servers: Vec<IpAddr>,

    /// Let this address, in the guest, lead to the host's loopback: 127.0.0.1 or ::1
    #[arg(long, value_name = "IP")]
    pub host_loopback: Vec<IpAddr>,

    /// Let the guest reach these addresses of the host itself, or of its link; may be given several times
    ///
    /// Without it every address of the host and every link-local one (169.254.0.0/16, fe80::/10: among
    /// them the metadata services of clouds) is out of reach, but for the host's name servers, on port 53.
    #[arg(long, value_name = "IP[/LEN]")]
    pub allow_local: Vec<LocalPrefix>,

    /// How pages are shared with the driver domain
    #[arg(long, default_value = "copy", value_parser = mode_parser())]
    pub mode: Mode,

    /// In mode `staging`: which pages stay mapped. `header` is for a guest that is to lend little for
    /// good; what is longer than 256 octets is then copied
    #[arg(long, value_name = "PAGES", default_value = "full", value_parser = staging_parser())]
    pub staging: TxStaging,

    /// Queues of the interface; packets of one connection take one queue
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=QUEUES_MAX.into()))]
    pub queues: u32,

    /// The longest IP packet, in bytes; below 1280 there is no IPv6 [default: 65520 to the host, 1500
    /// on the switch]
    #[arg(long, value_name = "BYTES",
          value_parser = clap::value_parser!(u16).range(MTU_MIN..=MTU_MAX))]
    pub mtu: Option<u16>,

    /// Give the command a disk: a file, a block device, or one on an NBD server; may be given several times
    ///
    /// The command finds the disk as an NBD server, at the Unix socket that RINGFENCE_DISK0 names
    /// (the second disk: RINGFENCE_DISK1). Options: `ro`, nothing may be written; `mode=`, how pages
    /// are shared: persistent (the default), map, copy or window; `cache=`, as in QEMU: none (the
    /// default), writeback, writethrough, directsync or unsafe; `bounce=`, whether bytes go through private
    /// memory: auto, always or never; `sector=512` or `4096`; `discard`, ranges that are given up
    /// are given back to the file system. Where the kernel has the driver nbd and the user is root,
    /// RINGFENCE_DISK0_DEVICE names a block device, too.
    ///
    /// In place of PATH: `nbd://HOST[:PORT]/EXPORT` or nbd+unix:///EXPORT?socket=PATH; with TLS nbds://
    /// or nbds+unix://, and ?tls-certificates=DIRECTORY. Options then: `ro`, `mode=`; `timeout=`,
    /// seconds after which a request fails (120); `stall=`, seconds without an answer after which
    /// another connection is tried (30); `connect=`, seconds that connecting may take (10).
    #[arg(long = "disk", value_name = "PATH|URI[,ro][,mode=…][,cache=…]")]
    pub disks: Vec<DiskSpec>,

    /// Give the host a leg on the switch, an interface of this name (needs CAP_NET_ADMIN)
    #[arg(long, value_name = "NAME", value_parser = parse_interface)]
    pub host_tap: Option<String>,

    /// Let the command reach the host's Unix sockets and the directory of your session
    ///
    /// Without it, D-Bus, the display, ssh-agent, gpg-agent, Podman, Docker and whatever else listens at a
    /// socket on this computer are hidden, $XDG_RUNTIME_DIR is empty, and the variables that name them
    /// are not set. Ringfence's own directory is hidden in any case.
    #[arg(long, help_heading = FILES)]
    pub share_runtime: bool,

    /// Make this directory the command's root directory
    ///
    /// It must have the directories /dev, /proc and /sys, which get the host's devices and the guest's own
    /// processes and interfaces.
    #[arg(long, value_name = "DIR", help_heading = FILES)]
    pub root: Option<PathBuf>,

    /// Let the command write nothing below this path; may be given several times
    #[arg(long = "ro", value_name = "PATH", help_heading = FILES)]
    pub read_only: Vec<PathBuf>,

    /// Let it write below this path all the same: an exception of --ro; may be given several times
    #[arg(long = "rw", value_name = "PATH", help_heading = FILES)]
    pub writable: Vec<PathBuf>,

    /// Put an empty directory, in memory, in the place of this one; may be given several times
    #[arg(long = "tmpfs", value_name = "PATH", help_heading = FILES)]
    pub empty: Vec<PathBuf>,

    /// Hide this file or directory from the command; may be given several times
    #[arg(long = "hide", value_name = "PATH", help_heading = FILES)]
    pub hidden: Vec<PathBuf>,

    /// What the guest takes unfinished: `all`, `none`, or some of sg,tso4,tso6,csum4,csum6
    #[arg(long, value_name = "LIST", default_value_t = OffloadKeys::ALL, hide = true)]
    pub offload: OffloadKeys,

    /// The same of the driver domain, from this guest
    #[arg(long, value_name = "LIST", default_value_t = OffloadKeys::ALL, hide = true)]
    pub backend_offload: OffloadKeys,

    /// Join no small packets to large ones on their way to this guest, or to its leg of the host
    #[arg(long, hide = true)]
    pub no_coalesce: bool,

    /// The same of the host's leg
    #[arg(long, value_name = "LIST", default_value_t = OffloadKeys::ALL, hide = true)]
    pub host_offload: OffloadKeys,

    /// Say nothing but what goes wrong
    #[arg(short, long, conflicts_with = "verbose")]
    pub quiet: bool,

    /// Explain each step
    #[arg(short, long)]
    pub verbose: bool,

    /// The command and its arguments [default: $SHELL]
    #[arg(value_name = "CMD", trailing_var_arg = true)]
    pub command: Vec<OsString>,
}

/// Ringfence's own processes, and what is made from this command line.
#[derive(Debug, Subcommand)]
pub enum Internal {
    /// Makes the namespaces of a domain, and waits for it
    Keeper {
        /// What the domain is for.
        #[arg(value_parser = parse_kind)]
        kind: DomainKind,
        /// The command of a guest.
        #[arg(last = true)]
        command: Vec<OsString>,
    },
    /// The driver domain
    Driver,
    /// A guest's frontend
    Frontend,
    /// A guest's uplink
    Uplink,
    /// One end of the demonstration's transfer
    DemoPeer {
        /// Which.
        #[command(subcommand)]
        role: crate::demo::peer::Role,
    },
    /// A guest's init
    GuestInit {
        /// The command.
        #[arg(last = true)]
        command: Vec<OsString>,
    },
    /// Prints the manual page
    Man,
}

impl RunArgs {
    /// What they ask for.
    pub fn into_options(self) -> Options {
        let loudness = match (self.quiet, self.verbose) {
            (true, _) => Loudness::Quiet,
            (false, true) => Loudness::Verbose,
            (false, false) => Loudness::Normal,
        };
        Options {
            switch: Some(self.switch).filter(|switch| switch != NO_SWITCH),
            name: self.name,
            addresses: self.addresses,
            forwarding: self.forwarding,
            advertise: self.advertise,
            uplink: self.uplink,
            uplink_addresses: self.uplink_addresses,
            uplink_gateways: self.uplink_gateways,
            name_servers: self.name_servers,
            host_loopback: self.host_loopback,
            allow_local: self.allow_local,
            forwards: self.publish,
            publish_default: self.publish_default,
            link: self.link,
            protect: self.protect,
            mode: self.mode,
            staging: self.staging,
            queues: self.queues,
            mtu: self.mtu,
            offload: self.offload,
            backend_offload: self.backend_offload,
            coalesce: !self.no_coalesce,
            host_offload: self.host_offload,
            host_tap: self.host_tap,
            disks: self.disks,
            view: ViewOptions {
                share_runtime: self.share_runtime,
                root: self.root,
                read_only: self.read_only,
                writable: self.writable,
                empty: self.empty,
                hidden: self.hidden,
            },
            loudness,
            command: self.command,
        }
    }
}

/// Reads the name of a mode; the help lists them with their meanings.
pub fn mode_parser() -> impl TypedValueParser<Value = Mode> {
    let named = |mode: Mode| PossibleValue::new(mode.name()).help(mode.meaning());
    PossibleValuesParser::new(Mode::ALL.map(named)).try_map(|word| word.parse::<Mode>())
}

/// Reads which pages are staged; the help lists the choices with their meanings.
pub fn staging_parser() -> impl TypedValueParser<Value = TxStaging> {
    let named = |staging: TxStaging| PossibleValue::new(staging.name()).help(staging.meaning());
    PossibleValuesParser::new(TxStaging::CHOICES.map(named))
        .try_map(|word| word.parse::<TxStaging>())
}

fn parse_kind(text: &str) -> Result<DomainKind, String> {
    [DomainKind::Driver, DomainKind::Frontend, DomainKind::Guest, DomainKind::Uplink]
        .into_iter()
        .find(|kind| kind.subcommand() == text)
        .ok_or_else(|| "no such process".to_owned())
}

/// Validates the name of a network interface.
///
/// # Errors
///
/// The rule that the name breaks.
pub fn parse_interface(text: &str) -> Result<String, String> {
    let valid = (1..=tap::NAME_MAX).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        && !matches!(text, "." | "..");
    if valid {
        Ok(text.to_owned())
    } else {
        Err(format!(
            "an interface's name has 1 to {} letters, digits, `-`, `_`, `.`",
            tap::NAME_MAX
        ))
    }
}

/// Writes the manual page.
///
/// # Errors
///
/// Those of `out`.
pub fn write_manual(out: &mut dyn std::io::Write) -> std::io::Result<()> {
    let command = Cli::command();
    clap_mangen::Man::new(command.clone()).render(out)?;
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        let title = format!("ringfence-{}", sub.get_name());
        clap_mangen::Man::new(sub.clone()).title(title).render(out)?;
    }
    Ok(())
}

/// Writes a completion script.
pub fn write_completions(shell: clap_complete::Shell, out: &mut dyn std::io::Write) {
    clap_complete::generate(shell, &mut Cli::command(), "ringfence", out);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(line: &str) -> Result<Options, clap::Error> {
        let words = ["ringfence", "run"].into_iter().chain(line.split_whitespace());
        match Cli::try_parse_from(words)?.command {
            Command::Run(args) => Ok(args.into_options()),
            other => panic!("{other:?}"),
        }
    }

    fn options_of_uplink(line: &str) -> Options {
        options(line).unwrap()
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_command_keeps_its_own_options() {
        for line in ["-v -- ls -l --name x", "-v ls -l --name x"] {
            let options = options(line).unwrap();
            assert_eq!(options.command, ["ls", "-l", "--name", "x"]);
            assert_eq!((options.name, options.loudness), (None, Loudness::Verbose));
        }
        let options = options("--name Web --address 10.0.0.2/24 --address fd00::2/64").unwrap();
        assert_eq!(options.name.as_deref(), Some("web"));
        assert_eq!(options.addresses.len(), 2);
        assert!(options.command.is_empty());
        assert_eq!((options.switch.as_deref(), options.mtu), (Some("default"), None));
        let options =
            options_of_uplink("--switch none -p 8080:80 -p 53/udp --host-loopback 10.0.0.9");
        assert_eq!((options.switch, options.forwards.len()), (None, 2));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for line in [
            "--switch ../x",
            "--name a_b",
            "--mtu 575",
            "--mtu 65522",
            "--address 10.0.0.2",
            "--mode fast",
            "--link rope",
            "--protect none",
            "--uplink moon",
            "-p http",
            "--dns one",
            "--allow-local 127.0.0.1",
            "--allow-local 10.0.0.0/40",
            "--publish-default moon",
            "--host-tap a/b",
            "--disk x,cache=fast",
            "--host-tap 1234567890123456",
            "-q -v",
        ] {
            assert!(options(line).is_err(), "{line}");
        }
    }

    #[test]
    fn the_manual_names_every_option_of_run() {
        let mut page = Vec::new();
        write_manual(&mut page).unwrap();
        let page = String::from_utf8(page).unwrap().replace('\\', "");
        for option in ["--switch", "--host-tap", "--mtu", "http://web:8000/"] {
            assert!(page.contains(option), "{option}");
        }
    }
}
