//! Command line of `ringfence`: options and help; `pages` has the manual pages and the completions.
//!
//! The doc comments of options are their help text. Other modules define the arguments of `attach`,
//! `serve`, `status` and `hub`.

pub mod hints;
mod internal;
mod limits;
mod pages;
mod view;

pub use internal::{Internal, InternalCli};
pub use limits::LimitArgs;
pub use pages::{ManArgs, write_completions};

use std::ffi::{OsStr, OsString};
use std::net::IpAddr;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use ringfence_access::Mode;
use ringfence_access::window::Revocation;
use ringfence_frontend::options::{mode_parser, revocation_parser, staging_parser};
use ringfence_net::features::OffloadKeys;
use ringfence_net::staging::TxStaging;
use ringfence_net::vif::backend::QUEUES_MAX;
use ringfence_uplink::udp::multicast::service::Service;

use crate::commands::disk::DiskCommand;
use crate::commands::policy::PolicyCommand;
use crate::commands::{
    exec::ExecArgs, logs::LogsArgs, port::PortArgs, ps::PsArgs, stop::StopArgs, wait::WaitArgs,
};
use crate::disk::DiskSpec;
use crate::doctor::DoctorArgs;
use crate::hub::HubArgs;
use crate::launch::report::Loudness;
use crate::launch::{
    FilterArgs, LinkChoice, Options, Protect, SwitchChoice, TerminalChoice, UplinkChoice,
    ViewOptions, parse_shared_switch,
};
use crate::status::StatusArgs;
use crate::top::TopArgs;
use crate::vhost_user::{PoolProxyArgs, ShieldArgs, VhostUserArgs};
use ringfence_driver::xen::args::ServeArgs;
use ringfence_frontend::attach::AttachArgs;
use ringfence_guest::names::parse_name;
use ringfence_hostnet::address::Address;
use ringfence_hostnet::interface::parse_interface;
use ringfence_pasta::args::PastaArgs;
use ringfence_pasta::passt_args::PasstArgs;
use ringfence_pasta::pesto::PestoArgs;
use ringfence_pasta::slirp_args::SlirpArgs;
use ringfence_uplink_process::asking::AskArgs;
use ringfence_uplink_process::egress::EgressArgs;
use ringfence_uplink_process::forward::ForwardSpec;
use ringfence_uplink_process::local::LocalPrefix;
use ringfence_uplink_process::network_plan::UplinkAddress;
use ringfence_uplink_process::queues::parse_queues;
use view::ViewArgs;

/// Minimum MTU: every IPv4 host must be able to receive packets of this length (RFC 791, section 3.2).
const MTU_MIN: i64 = 576;
/// Maximum MTU: 65535 bytes less an Ethernet header.
const MTU_MAX: i64 = 65521;
/// Value of `--switch` for a guest without a switch.
const NO_SWITCH: &str = "none";

/// A driver domain: it serves network interfaces to guests that it does not trust, and that do
/// not trust it.
///
/// It can access only those pages of a guest that the guest has granted to it. Here a guest is a
/// command in namespaces of its own; no hypervisor and no root are needed.
#[derive(Debug, Parser)]
#[command(name = "ringfence", version, arg_required_else_help = true, max_term_width = 100)]
pub struct Cli {
    /// Command to run
    #[command(subcommand)]
    pub command: Command,
}

/// Commands that `ringfence` offers. The text of a command is the comment of its arguments: a comment here would take the
/// place of all its paragraphs.
#[derive(Debug, Subcommand)]
pub enum Command {
    Run(RunArgs),
    Ps(PsArgs),
    Exec(ExecArgs),
    Logs(LogsArgs),
    Stop(StopArgs),
    Wait(WaitArgs),
    Port(PortArgs),
    /// Demonstrate it: two guests, a TCP transfer in each mode, a short table
    ///
    /// Takes about ten seconds and needs no root.
    Demo,
    Serve(ServeArgs),
    Attach(AttachArgs),
    Status(StatusArgs),
    Top(TopArgs),
    Doctor(DoctorArgs),
    Pasta(Box<PastaArgs>),
    Passt(Box<PasstArgs>),
    Pesto(PestoArgs),
    Slirp4netns(Box<SlirpArgs>),
    VhostUser(VhostUserArgs),
    PoolProxy(PoolProxyArgs),
    Shield(ShieldArgs),
    Hub(HubArgs),
    /// Check, explain, print and replace egress policies
    Policy {
        /// Action on a policy
        #[command(subcommand)]
        command: PolicyCommand,
    },
    /// Describe disks
    Disk {
        /// Action on a disk
        #[command(subcommand)]
        command: DiskCommand,
    },
    /// Print a script that completes commands and options in a shell
    #[command(after_help = "Example, for bash:\n  ringfence completions bash > \
                            ~/.local/share/bash-completion/completions/ringfence")]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print a manual page, or install all of them
    Man(ManArgs),
    /// Processes that Ringfence starts itself
    #[command(hide = true)]
    Internal {
        /// Role of the process
        #[command(subcommand)]
        role: Internal,
    },
}

impl Cli {
    /// Parses the words of a command line. For commands that scripts start often, the parser of that command alone is
    /// built first: the one of all commands takes as long as a tenth of the start of a guest. Whatever it does not
    /// accept is parsed again by that one, for its help and errors.
    ///
    /// # Errors
    ///
    /// An error that tells the user what is wrong, or that carries the help or the version that was asked for.
    pub fn of<W: Iterator<Item = OsString>>(words: impl Fn() -> W) -> Result<Cli, clap::Error> {
        let name = words().nth(1);
        let command = match name.as_deref().and_then(OsStr::to_str) {
            Some("run") => parse_alone("run", words()).map(Command::Run),
            Some("exec") => parse_alone("exec", words()).map(Command::Exec),
            _ => None,
        };
        match command {
            Some(command) => Ok(Cli { command }),
            None => Cli::try_parse_from(words()),
        }
    }
}

/// Parses the words of a command line by a parser that knows this command alone. `None` if it does not accept them.
fn parse_alone<T: Args>(name: &'static str, words: impl Iterator<Item = OsString>) -> Option<T> {
    let command = T::augment_args(clap::Command::new(name));
    let matches = command.try_get_matches_from(words.skip(1)).ok()?;
    T::from_arg_matches(&matches).ok()
}

/// Headings of the options of `run` in its help and its manual page.
mod heading {
    pub(super) const NETWORK: &str = "Network";
    pub(super) const PORTS: &str = "Ports";
    pub(super) const DISKS: &str = "Disks";
    pub(super) const ISOLATION: &str = "Isolation";
    pub(super) const MEMORY: &str = "Lent memory and links";
    pub(super) const OUTPUT: &str = "Output";
}

const RUN_EXAMPLES: &str = "\
Examples:
  A shell with a network interface:
    ringfence run

  A page of the Internet, and a server that the Internet can reach:
    ringfence run -- curl https://example.org/
    ringfence run -p 8080:8000 -- python3 -m http.server

  A web server and a client on one switch, in two terminals, in either order:
    ringfence run --switch lab --name web -- python3 -m http.server
    ringfence run --switch lab -- curl http://web:8000/

  A disk, through an NBD client:
    truncate -s 1G disk.img
    ringfence run --disk disk.img -- sh -c 'nbdinfo $RINGFENCE_DISK0_URI'

  An interface of the host on the switch (as root):
    ringfence run --host-tap rf0 --name web -- python3 -m http.server

Names:
    Names of guests come first, then those of the host's /etc/hosts and of its name servers, with
    its search list and options. Changes of /etc/hosts and /etc/resolv.conf are followed while the
    guest runs.

Exit status:
    The command's own. 128 + N if signal N ended it; 127 if it was not found, 126 if it could not
    be run, 125 if Ringfence itself failed (standard error has the reason). Errors of usage have the
    status 125, too.";

/// Run a command as a guest with a network of its own.
///
/// The command runs in user, network, mount, PID, IPC and UTS namespaces of its own. A separate process,
/// the network frontend, serves its eth0. The frontend shares only rings and granted pages with the
/// backend in the switch's driver domain. A guest has a switch of its own, unless --switch names one: then it
/// reaches all guests that name it, by address and by name, and they reach it. The first guest of a switch starts
/// its driver domain, which ends after the last guest.
///
/// Its up0 leads to the host's network, with the host's own addresses and routes. A separate process,
/// which may only open sockets, turns its packets into connections of the host. The guest cannot reach
/// the host's own addresses (loopback included) or link-local ones, and nobody outside can reach the
/// guest, unless an option allows it.
///
/// The command sees the host's files with the ids and the rights of the user who runs this. (An ordinary
/// user's command is root inside with --as-root, with no more rights over files. Root's command can change
/// every file of the computer.) The sockets of the host's programs are hidden.
#[derive(Debug, Args)]
#[command(after_help = RUN_EXAMPLES)]
pub struct RunArgs {
    /// Switch that the guest shares with all guests that name it; created if it does not exist. `none`: the guest is
    /// on no switch [default: a switch of its own]
    ///
    /// Guests of one switch reach each other. A guest without this option is alone on a switch that ends with it;
    /// `ringfence ps` shows such a switch as `private-PID`.
    #[arg(long, value_name = "NAME", value_parser = parse_shared_switch, help_heading = heading::NETWORK)]
    pub switch: Option<String>,

    /// Name by which other guests on the switch find this guest; also its host name
    #[arg(long, value_name = "HOST", value_parser = parse_name, help_heading = heading::NETWORK)]
    pub name: Option<String>,

    /// Address on the switch, in place of the automatic ones; may be given several times
    ///
    /// The switch drops packets from any other address of the guest, unless --forwarding is given. An address that
    /// the guest adds to eth0 by itself cannot be used.
    #[arg(long = "address", value_name = "IP/LEN", value_parser = Address::parse_assignable,
          help_heading = heading::NETWORK)]
    pub addresses: Vec<Address>,

    /// Let the guest route: its packets may have any IP source address and other protocols than IP
    ///
    /// Without this option, the switch drops packets from an address other than the guest's own. The
    /// Ethernet source address, ARP and IPv6 neighbour discovery are checked in any case.
    #[arg(long, help_heading = heading::NETWORK)]
    pub forwarding: bool,

    /// Let the guest send router advertisements, ICMP redirects, and DHCP and DHCPv6 replies
    ///
    /// Without this option, the switch drops these messages from the guest.
    #[arg(long, help_heading = heading::NETWORK)]
    pub advertise: bool,

    /// Network for the guest's packets that are for no guest on the switch [default: host]
    ///
    /// Without this option, a guest whose addresses on the host's network overlap with its switch gets no uplink,
    /// and `run` says so.
    #[arg(long, value_enum, help_heading = heading::NETWORK)]
    pub uplink: Option<UplinkChoice>,

    /// Address on the host's network, in place of the host's own; may be given several times. `private`: a network that
    /// stays as it is while the host's changes
    ///
    /// With `private` the guest has 10.0.2.100/24 and fd00::100/64, also where the host has no network or only one
    /// address family now. It is the default where the host has no network.
    #[arg(long = "uplink-address", value_name = "IP/LEN|private", help_heading = heading::NETWORK)]
    pub uplink_addresses: Vec<UplinkAddress>,

    /// Router on the host's network, in place of the host's own; one for IPv4, one for IPv6
    #[arg(long = "uplink-gateway", value_name = "IP", help_heading = heading::NETWORK)]
    pub uplink_gateways: Vec<IpAddr>,

    /// Name server, in place of the host's own, whose changes are then not followed; may be given several times
    #[arg(long = "dns", value_name = "IP", help_heading = heading::NETWORK)]
    pub name_servers: Vec<IpAddr>,

    /// Longest IP packet of both interfaces, in bytes; below 1280 there is no IPv6 [default: 65520 on up0, to the host;
    /// 1500 on eth0, the switch]
    #[arg(long, value_name = "BYTES",
          value_parser = clap::value_parser!(u16).range(MTU_MIN..=MTU_MAX),
          help_heading = heading::NETWORK)]
    pub mtu: Option<u16>,

    /// Give the host an interface of this name on the switch (needs CAP_NET_ADMIN)
    #[arg(long, value_name = "NAME", value_parser = parse_interface,
          help_heading = heading::NETWORK)]
    pub host_tap: Option<String>,

    /// Forward a port of the host to the guest; may be given several times
    ///
    /// Examples: `8080:80`, `127.0.0.1:8080:80`, `[::1]:8080:80`, `8000-8010`, `5353:53/udp`. The command
    /// sees the clients' real addresses. Without IP the port listens at every address of the host, IPv4 and
    /// IPv6, as it does with Docker and Podman: everyone who reaches the host reaches the command.
    /// --publish-default changes that. For clients from elsewhere the command must listen at 0.0.0.0, at :: or at an
    /// address of up0. A TCP or UDP client at the host's loopback also reaches the guest's own 127.0.0.1 or ::1, if a
    /// server listens there; otherwise it appears as the router of up0. A guest has at most 1024 ports; a range leads
    /// to as many ports, from GUESTPORT on.
    #[arg(short, long = "publish", value_name = "[IP:]PORT[-LAST][:GUESTPORT][/udp]",
          help_heading = heading::PORTS)]
    pub publish: Vec<ForwardSpec>,

    /// Address at which ports of -p without an IP listen, such as 127.0.0.1; may be given several times, for
    /// IPv4 and IPv6 [default: every address of the host]
    #[arg(long, value_name = "IP", help_heading = heading::PORTS)]
    pub publish_default: Vec<IpAddr>,

    /// Address in the guest that leads to the host's loopback: 127.0.0.1 or ::1
    #[arg(long, value_name = "IP", help_heading = heading::PORTS)]
    pub host_loopback: Vec<IpAddr>,

    /// Addresses of the host itself, or of its link, that the guest may reach; may be given several times
    ///
    /// Without this option the guest reaches no address of the host and no link-local one (169.254.0.0/16,
    /// fe80::/10, which include the metadata services of clouds), except the host's name servers on port 53.
    #[arg(long, value_name = "IP[/LEN]", help_heading = heading::PORTS)]
    pub allow_local: Vec<LocalPrefix>,

    /// Let the guest find services on the host's link, and be found, by multicast: mdns, ssdp, or both [default: none]
    ///
    /// The groups of mDNS (224.0.0.251 and ff02::fb, names under .local) and SSDP (239.255.255.250, ff02::c and ff05::c, UPnP)
    /// are carried in both directions, on the interface of the host's default route. All other multicast stays inside.
    #[arg(long, value_name = "mdns,ssdp", value_delimiter = ',', help_heading = heading::PORTS)]
    pub multicast: Vec<Service>,

    #[command(flatten)]
    pub egress: EgressArgs,

    #[command(flatten)]
    pub ask: AskArgs,

    /// Give the command a disk: a file, a block device, or one on an NBD server; may be given several times
    ///
    /// The command finds the disk as an NBD server, at the address RINGFENCE_DISK0_URI, the Unix socket RINGFENCE_DISK0
    /// (the second disk: RINGFENCE_DISK1). If the kernel has the driver nbd and the user is root,
    /// RINGFENCE_DISK0_DEVICE names a block device too. Options:
    ///
    /// `ro`: the disk is read-only.
    ///
    /// `mode=`: the access mode. `persistent` (the default) keeps lent pages mapped, `map` maps them for each
    /// request, `copy` has the kernel copy them, `window` looks up pages that the guest issues and revokes alone.
    ///
    /// `cache=`: as in QEMU. `none` (the default) bypasses the host's page cache (O_DIRECT), `writeback` uses it,
    /// `writethrough` makes each write durable at once, `directsync` does both, `unsafe` makes nothing durable.
    ///
    /// `bounce=auto`, `always` or `never`: copying of bytes through private memory. A guest may change a page while
    /// it is written, and storage that computes checksums (btrfs, ZFS) cannot read such a block again; `auto`, the
    /// default, copies for such storage.
    ///
    /// `engine=auto`, `io_uring` or `threads`: what does the I/O of a raw file. `auto`, the default, is io_uring where the
    /// kernel allows it.
    ///
    /// `sector=512` or `4096`: the unit of requests; by default the device's, and 512 for files.
    ///
    /// `discard`: ranges that the guest discards, or zeroes, are returned to the file system. Zeros are stored as holes
    /// of a file that has holes already even without it.
    ///
    /// `format=raw`: the file is raw although it begins like an image of another format or a LUKS volume; such a
    /// file is refused otherwise.
    ///
    /// `format=qcow2`: the file is a qcow2 image, which may have backing files in its folder; with `backing=any` in
    /// any folder. `ringfence disk info` describes it.
    ///
    /// In place of PATH: `nbd://HOST[:PORT]/EXPORT` or nbd+unix:///EXPORT?socket=PATH; with TLS nbds://
    /// or nbds+unix://, and ?tls-certificates=DIRECTORY. Options then: `ro`, `mode=`; `timeout=`, seconds
    /// after which a request fails (120); `stall=`, seconds without an answer after which another
    /// connection is tried (30); `connect=`, seconds that connecting may take (10).
    ///
    /// A file is locked while it is a disk; a second user waits at most ten seconds.
    #[arg(long = "disk", value_name = "PATH|URI[,ro][,mode=…][,cache=…]", allow_hyphen_values = true,
          value_parser = OsStringValueParser::new().try_map(|text| DiskSpec::parse(&text)),
          help_heading = heading::DISKS)]
    pub disks: Vec<DiskSpec>,

    /// Make the command root inside, for an ordinary user
    ///
    /// Without this option the command has the user's own uid and gid, as on the host, and no capability. With
    /// it, the command sees itself as root of its namespaces: it may change its interfaces and addresses, open
    /// raw sockets (tcpdump) and mount file systems (nbdfuse too). Over the host's files it has the user's rights in both
    /// cases. For root this changes nothing.
    #[arg(long, help_heading = heading::ISOLATION)]
    pub as_root: bool,

    /// Terminal of the command, where you have one
    ///
    /// With `shared` the command is in your session. It then may not write to the input of a terminal, and gets no new
    /// privileges.
    #[arg(long, value_enum, value_name = "WHICH", default_value_t, help_heading = heading::ISOLATION)]
    pub terminal: TerminalChoice,

    #[command(flatten)]
    pub view: ViewArgs,

    #[command(flatten)]
    pub filter: FilterArgs,

    #[command(flatten)]
    pub limits: LimitArgs,

    /// Access mode: the way in which the driver domain reaches the guest's pages
    #[arg(long, default_value = "copy", value_parser = mode_parser(),
          help_heading = heading::MEMORY)]
    pub mode: Mode,

    /// Pages that stay mapped in mode `staging`. With `header` the guest grants little memory permanently, and
    /// packets longer than 256 bytes are copied
    #[arg(long, value_name = "PAGES", default_value = "full", value_parser = staging_parser(),
          help_heading = heading::MEMORY)]
    pub staging: TxStaging,

    /// Time at which the content of a page that was revoked in mode `window` of the network or a disk leaves the driver
    /// domain's reach
    #[arg(long = "revoke", value_name = "WHEN", default_value = "plain", value_parser = revocation_parser(),
          help_heading = heading::MEMORY)]
    pub revocation: Revocation,

    /// Number of queues of the interfaces, or `auto` for one per processor; packets of one connection take one queue
    #[arg(long, value_name = "N|auto", default_value = "1",
          value_parser = |text: &str| parse_queues(text, QUEUES_MAX), help_heading = heading::MEMORY)]
    pub queues: u32,

    /// Link between the guest and the uplink process
    #[arg(long, value_enum, default_value_t, help_heading = heading::MEMORY)]
    pub link: LinkChoice,

    /// Protection of the uplink's memory against the kernel's worker, with --link vhost
    #[arg(long, value_enum, default_value_t, help_heading = heading::MEMORY)]
    pub protect: Protect,

    /// Offloads that the guest accepts: `all`, `none`, or some of sg,tso4,tso6,csum4,csum6
    #[arg(long, value_name = "LIST", default_value_t = OffloadKeys::ALL, hide = true)]
    pub offload: OffloadKeys,

    /// Offloads that the driver domain accepts from this guest
    #[arg(long, value_name = "LIST", default_value_t = OffloadKeys::ALL, hide = true)]
    pub backend_offload: OffloadKeys,

    /// Do not coalesce small packets on their way to this guest, or to its host interface
    #[arg(long, hide = true)]
    pub no_coalesce: bool,

    /// Offloads that the host's interface accepts
    #[arg(long, value_name = "LIST", default_value_t = OffloadKeys::ALL, hide = true)]
    pub host_offload: OffloadKeys,

    /// Print only errors
    #[arg(short, long, conflicts_with = "verbose", help_heading = heading::OUTPUT)]
    pub quiet: bool,

    /// Explain each step
    #[arg(short, long, help_heading = heading::OUTPUT)]
    pub verbose: bool,

    /// Command and its arguments [default: $SHELL]
    #[arg(value_name = "CMD", trailing_var_arg = true)]
    pub command: Vec<OsString>,
}

impl RunArgs {
    /// Converts the arguments to the launcher's options.
    pub fn into_options(self) -> Options {
        let loudness = match (self.quiet, self.verbose) {
            (true, _) => Loudness::Quiet,
            (false, true) => Loudness::Verbose,
            (false, false) => Loudness::Normal,
        };
        let mut view: ViewOptions = self.view.into();
        if self.filter.strict {
            view.make_strict();
        }
        Options {
            limits: self.limits.into(),
            switch: match self.switch {
                None => SwitchChoice::Private,
                Some(name) if name == NO_SWITCH => SwitchChoice::None,
                Some(name) => SwitchChoice::Shared(name),
            },
            name: self.name,
            addresses: self.addresses,
            forwarding: self.forwarding,
            advertise: self.advertise,
            uplink: self.uplink,
            uplink_is_private: self.uplink_addresses.contains(&UplinkAddress::Private),
            uplink_addresses: self
                .uplink_addresses
                .iter()
                .filter_map(UplinkAddress::given)
                .collect(),
            uplink_gateways: self.uplink_gateways,
            name_servers: self.name_servers,
            host_loopback: self.host_loopback,
            allow_local: self.allow_local,
            multicast: self.multicast,
            egress: self.egress,
            ask: self.ask,
            forwards: self.publish,
            publish_default: self.publish_default,
            link: self.link,
            protect: self.protect,
            mode: self.mode,
            staging: self.staging,
            revocation: self.revocation,
            queues: self.queues,
            mtu: self.mtu,
            offload: self.offload,
            backend_offload: self.backend_offload,
            coalesce: !self.no_coalesce,
            host_offload: self.host_offload,
            host_tap: self.host_tap,
            disks: self.disks,
            view,
            terminal: self.terminal,
            filter: self.filter.into_options(),
            as_root: self.as_root,
            loudness,
            command: self.command,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn options(line: &str) -> Result<Options, clap::Error> {
        let words = || ["ringfence", "run"].into_iter().chain(line.split_whitespace());
        let alone = parse_alone::<RunArgs>("run", words().map(OsString::from));
        let among_all = Cli::try_parse_from(words());
        assert_eq!(
            alone.map(|args| format!("{:?}", Command::Run(args))),
            among_all.as_ref().ok().map(|cli| format!("{:?}", cli.command))
        );
        match among_all?.command {
            Command::Run(args) => Ok(args.into_options()),
            other => panic!("{other:?}"),
        }
    }

    fn options_of_uplink(line: &str) -> Options {
        options(line).unwrap()
    }

    #[test]
    fn clap_accepts_command_definition() {
        Cli::command().debug_assert();
    }

    #[test]
    fn options_behind_command_belong_to_command() {
        for line in ["-v -- ls -l --name x", "-v ls -l --name x"] {
            let options = options(line).unwrap();
            assert_eq!(options.command, ["ls", "-l", "--name", "x"]);
            assert_eq!((options.name, options.loudness), (None, Loudness::Verbose));
        }
        let options = options("--name Web --address 10.0.0.2/24 --address fd00::2/64").unwrap();
        assert_eq!(options.name.as_deref(), Some("web"));
        assert_eq!(options.addresses.len(), 2);
        assert!(options.command.is_empty());
        assert_eq!((options.switch, options.mtu), (SwitchChoice::Private, None));
        let options =
            options_of_uplink("--switch none -p 8080:80 -p 53/udp --host-loopback 10.0.0.9");
        assert_eq!((options.switch, options.forwards.len()), (SwitchChoice::None, 2));
        let shared = options_of_uplink("--switch private-net").switch;
        assert_eq!(shared, SwitchChoice::Shared("private-net".into()));
    }

    #[test]
    fn limits_have_the_values_of_podman() {
        let given = options_of_uplink("-m 512m --cpus 1.5 --pids-limit 100").limits;
        assert_eq!(given.to_string(), "memory 512 MiB, 1.5 processors, 100 processes");
        assert!(options_of_uplink("--memory 0 --cpus 0 --pids -1").limits.is_empty());
    }

    #[test]
    fn path_of_disk_may_begin_with_dash_and_have_any_bytes() {
        use std::os::unix::ffi::OsStrExt;
        for path in [&b"-dash"[..], b"--ro", b"\xff\xfe"] {
            let words = [b"ringfence", &b"run"[..], b"--disk", path, b"--", b"true"];
            let words = words.map(std::ffi::OsStr::from_bytes);
            let Command::Run(args) = Cli::try_parse_from(words).unwrap().command else {
                panic!("another command")
            };
            let options = args.into_options();
            assert_eq!(options.disks[0], DiskSpec::parse(words[3]).unwrap());
            assert_eq!(options.command, ["true"]);
        }
    }

    #[test]
    fn invalid_option_value_is_refused() {
        for line in [
            "--switch ../x",
            "--switch private-4711",
            "--name a_b",
            "--mtu 575",
            "--mtu 65522",
            "--address 10.0.0.2",
            "--mode fast",
            "--link rope",
            "--protect none",
            "--terminal none",
            "--uplink moon",
            "-p http",
            "--dns one",
            "--upstream-proxy https://proxy.example:443",
            "--upstream-proxy-credentials file",
            "--allow-local 127.0.0.1",
            "--allow-local 10.0.0.0/40",
            "--publish-default moon",
            "--host-tap a/b",
            "--memory much",
            "--memory 1m",
            "--cpus -1",
            "--pids 1",
            "--disk x,cache=fast",
            "--allow-family tokenring",
            "--strict --as-root",
            "--strict --share-runtime",
            "--host-tap 1234567890123456",
            "-q -v",
        ] {
            assert!(options(line).is_err(), "{line}");
        }
    }
}
