//! `ringfence vhost-user net`: the network card of a virtual machine on the host's network, on a switch, or on a TAP.
//!
//! ```text
//! --uplink   session of passt (ringfence_pasta) ──> uplink process <── socket ──> hypervisor
//! --switch   session ── attaches a guest ──> driver domain of the switch
//!                    └─ spawns ──> card process <── socket ──> hypervisor      (ringfence_frontend::card)
//! --tap      session ── spawns ──> card process <── socket ──> hypervisor
//! ```
//!
//! A client can end the card process in one way: it shrinks the file of its memory under it. The session counts that
//! client, and starts the next process on the same socket. On a switch, that one is attached anew.

mod switch;

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use anyhow::Context;
use clap::{ArgGroup, Args};
use ringfence_driver::switchboard::{CardConfig, CardEnd, FromFrontend, ToFrontend};
use ringfence_guest::names::parse_name;
use ringfence_hostnet::address::Address;
use ringfence_pasta::forward_spec::PastaForwardSpec;
use ringfence_pasta::passt::UplinkCard;
use ringfence_pasta::program::NET;
use ringfence_pasta::session_status::SessionNames;
use ringfence_pasta::values::{MacArg, PoolArg};
use ringfence_sandbox::DomainKind;
use ringfence_sandbox::channel::Channel;
use ringfence_sys::tap::Tap;
use ringfence_uplink_process::asking::AskArgs;
use ringfence_uplink_process::egress::EgressArgs;
use ringfence_uplink_process::link::PAIRS_MAX;
use ringfence_vhost_user::PoolRule;

use super::common::{listen, say};
use super::session::{DeviceReport, DeviceSession, Outcome, Report, exit_status};
use crate::launch::parse_shared_switch;

/// MTU on a switch or a TAP: that of Ethernet.
const MTU_DEFAULT: u16 = 1500;

const OF_UPLINK: &str = "With --uplink";
const OF_SWITCH: &str = "With --switch";

const EXAMPLES: &str = "\
Examples:
  The host's network, for a QEMU that lends a pool of 64 MiB:
    ringfence vhost-user net --socket /run/vm.net --uplink --require-pool 64M

  A switch, which the machine shares with guests of `run`:
    ringfence vhost-user net --socket /run/vm.net --switch lab --address 10.0.0.2/24
    ringfence run --switch lab --address 10.0.0.3/24 -- ping 10.0.0.2

  QEMU's options for it (before QEMU 9.2 reconnect=1):
    -chardev socket,id=c,path=/run/vm.net,reconnect-ms=1000 -netdev vhost-user,id=n,chardev=c
    -device virtio-net-pci,netdev=n,disable-legacy=on,iommu_platform=on";

/// Serve a network card to virtual machines: virtio-net over vhost-user
///
/// One hypervisor at a time is served, and another one after it. Super-packets of TCP and UDP pass whole where the other
/// end takes them. With --uplink the machine configures itself by DHCP; on a switch it has the addresses that are printed.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, group = ArgGroup::new("end").required(true).args(["uplink", "switch", "tap"]))]
pub struct NetArgs {
    /// Socket to create, to which the hypervisor connects
    #[arg(long, short, value_name = "PATH")]
    pub socket: PathBuf,

    /// Connect the machine to the host's network, as `passt` does
    #[arg(long)]
    pub uplink: bool,

    /// Connect the machine to the switch of this name, with the guests of `run --switch`
    #[arg(long, value_name = "NAME", value_parser = parse_shared_switch)]
    pub switch: Option<String>,

    /// Connect the machine to this TAP interface, which is created unless it exists
    #[arg(long, value_name = "INTERFACE")]
    pub tap: Option<String>,

    /// Number of queue pairs that the card offers. One thread serves all of them
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=i64::from(PAIRS_MAX)))]
    pub queues: u16,

    /// Longest IP packet in bytes [default: 65520 with --uplink, or else 1500]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u16).range(576..=65520))]
    pub mtu: Option<u16>,

    /// Refuse a hypervisor that hands over more than this much memory, or with `auto` other memory than marked pools
    #[arg(long, value_name = "SIZE|auto")]
    pub require_pool: Option<PoolArg>,

    /// Socket at which `ringfence status --socket PATH` reads the state
    #[arg(long, value_name = "PATH")]
    pub status_socket: Option<PathBuf>,

    /// Ethernet address of the machine's card. The switch drops packets from another one
    #[arg(long, value_name = "MAC", default_value = "52:54:00:12:34:56", conflicts_with_all = ["uplink", "tap"],
          help_heading = OF_SWITCH)]
    pub mac: MacArg,

    /// Address of the machine on the switch; may be given several times. The switch drops packets from another one
    #[arg(long = "address", value_name = "IP/LEN", value_parser = Address::parse_assignable,
          conflicts_with_all = ["uplink", "tap"], help_heading = OF_SWITCH)]
    pub addresses: Vec<Address>,

    /// Name by which guests of the switch find the machine
    #[arg(long, value_name = "NAME", value_parser = parse_name, conflicts_with_all = ["uplink", "tap"],
          help_heading = OF_SWITCH)]
    pub name: Option<String>,

    /// TCP ports of the host that lead to the machine, as with `passt -t`
    #[arg(short = 't', long, value_name = "SPEC", conflicts_with_all = ["switch", "tap"], help_heading = OF_UPLINK)]
    pub tcp_ports: Vec<PastaForwardSpec>,

    /// UDP ports of the host that lead to the machine, as with `passt -u`
    #[arg(short = 'u', long, value_name = "SPEC", conflicts_with_all = ["switch", "tap"], help_heading = OF_UPLINK)]
    pub udp_ports: Vec<PastaForwardSpec>,

    #[command(flatten)]
    pub egress: EgressArgs,

    #[command(flatten)]
    pub ask: AskArgs,

    /// Explain each step
    #[arg(long, short)]
    pub verbose: bool,
}

impl NetArgs {
    fn pool(&self) -> PoolRule {
        self.require_pool.map_or(PoolRule::Any, |PoolArg(rule)| rule)
    }

    fn switch_mtu(&self) -> u16 {
        self.mtu.unwrap_or(MTU_DEFAULT)
    }

    /// Returns the configuration of a card process with this other end.
    fn card(&self, other_end: CardEnd) -> CardConfig {
        CardConfig { other_end, pairs: self.queues, pool: self.pool(), verbose: self.verbose }
    }
}

/// Messages of a card process.
impl DeviceReport for FromFrontend {
    const ASK: Option<fn(&Channel) -> bool> =
        Some(|channel| channel.send_now(&ToFrontend::Traffic, &[]).is_ok());

    fn sort(self) -> Report<FromFrontend> {
        match self {
            FromFrontend::Up { .. } => Report::Ready,
            FromFrontend::Down(why) | FromFrontend::Failed(why) => Report::Failed(why),
            FromFrontend::Machine(state) => Report::Machine(state),
            FromFrontend::Traffic(traffic) => Report::Traffic(traffic),
            answer @ (FromFrontend::Levels(_)
            | FromFrontend::HasSize { .. }
            | FromFrontend::Drained) => Report::Own(answer),
        }
    }
}

/// Serves the card until a signal ends it. Returns the exit status.
///
/// # Errors
///
/// Returns an error if an end of the card cannot be opened, or its process fails.
pub(super) fn serve(args: &NetArgs) -> anyhow::Result<u8> {
    let asks = args.egress.are_given() || args.ask.ask.is_some();
    if args.uplink {
        return uplink(args);
    }
    anyhow::ensure!(!asks, "rules of egress are about the host's network: they need --uplink");
    match (&args.switch, &args.tap) {
        (Some(name), _) => switch::serve(args, name),
        (None, Some(interface)) => serve_tap(args, interface),
        // The parser requires one of the three.
        (None, None) => anyhow::bail!("one of --uplink, --switch and --tap is needed"),
    }
}

fn uplink(args: &NetArgs) -> anyhow::Result<u8> {
    let card = UplinkCard {
        socket: args.socket.clone(),
        pairs: args.queues,
        pool: args.pool(),
        mtu: args.mtu,
        tcp_ports: args.tcp_ports.clone(),
        udp_ports: args.udp_ports.clone(),
        egress: args.egress.clone(),
        ask: args.ask.clone(),
        status_socket: args.status_socket.clone(),
        is_verbose: args.verbose,
    };
    card.serve()
}

/// Session of a card process, and its socket.
struct CardSession {
    session: DeviceSession,
    listener: OwnedFd,
    /// File of the socket, removed at the end.
    _file: ringfence_hostnet::socket_file::SocketFile,
}

impl CardSession {
    fn new(args: &NetArgs) -> anyhow::Result<CardSession> {
        let names = SessionNames {
            program: NET,
            guest: args.name.clone().unwrap_or_default(),
            process: "the card's process",
            link: "vhost-user",
        };
        let status = args.status_socket.as_deref();
        let session = DeviceSession::new(DomainKind::Card, status, names, args.verbose)?;
        let named = || format!("--socket {}", args.socket.display());
        let (listener, file) = listen(&args.socket).with_context(named)?;
        Ok(CardSession { session, listener, _file: file })
    }
}

/// Serves a card on a TAP.
fn serve_tap(args: &NetArgs, interface: &str) -> anyhow::Result<u8> {
    let CardSession { mut session, listener, _file } = CardSession::new(args)?;
    let named = || format!("--tap {interface}");
    // The interface stays while the process starts again.
    let taps = Tap::take_up_queues(interface, 1).with_context(named)?;
    let tap = taps.into_iter().next().context("an interface without queues").with_context(named)?;
    let end = CardEnd::Tap { offloads: tap.offloads.0, mtu: args.switch_mtu() };
    let config = args.card(end);
    loop {
        let fds = [listener.as_fd(), tap.fd.as_fd()];
        let domain = session.start::<FromFrontend>(&config, &fds)?;
        say(format_args!("{} leads to {}", args.socket.display(), tap.name));
        match session.wait::<FromFrontend>(&domain, &mut ())? {
            Outcome::Signal(number) => return Ok(exit_status(number)),
            Outcome::Truncated => session.prepare_restart(),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: NetArgs,
    }

    fn read(words: &str) -> Result<NetArgs, String> {
        let words = ["net", "-s", "s"].into_iter().chain(words.split_whitespace());
        Line::try_parse_from(words).map(|line| line.args).map_err(|error| error.to_string())
    }

    #[test]
    fn card_has_exactly_one_other_end() {
        for words in ["--uplink", "--switch lab", "--tap tap0"] {
            assert!(read(words).is_ok(), "{words}");
        }
        for words in ["", "--uplink --switch lab", "--switch lab --tap tap0"] {
            assert!(read(words).is_err(), "{words}");
        }
    }

    #[test]
    fn option_of_another_end_is_refused() {
        for words in [
            "--uplink --mac 02:00:00:00:00:01",
            "--tap tap0 --address 10.0.0.2/24",
            "--uplink --name web",
            "--switch lab -t 8080:80",
            "--tap tap0 --udp-ports 53:53",
        ] {
            assert!(read(words).is_err(), "{words}");
        }
        let args = read("--switch lab --allow example.org").unwrap();
        let refused = serve(&args).unwrap_err().to_string();
        assert!(refused.contains("--uplink"), "{refused}");
    }

    #[test]
    fn number_of_queue_pairs_is_bounded() {
        assert_eq!(read("--uplink --queues 16").unwrap().queues, PAIRS_MAX);
        assert!(read("--uplink --queues 17").is_err() && read("--uplink --queues 0").is_err());
    }
}
