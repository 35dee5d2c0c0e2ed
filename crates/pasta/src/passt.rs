//! `ringfence passt`: the network interface of a virtual machine on the uplink, with the options of passt.
//!
//! The processes are those of pasta, without one in a namespace: the session creates the socket (`machine`),
//! and the uplink serves it in its sandbox. The front exits when the socket accepts connections.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{CommandFactory, FromArgMatches, Parser};

use super::machine::{Endpoint, Place};
use super::passt_args::PasstArgs;
use super::session::Session;
use super::target::Target;
use super::{Started, complain, problem};
use crate::forward_spec::PastaForwardSpec;
use crate::program::{NET, PASST, STATUS_FAILED};
use ringfence_hostnet::causes::causes;
use ringfence_uplink_process::asking::AskArgs;
use ringfence_uplink_process::egress::EgressArgs;
use ringfence_uplink_process::link::{PoolRule, Transport};

/// Answer to --print-capabilities, as programs that start vhost-user backends expect it.
const CAPABILITIES: &str = r#"{
  "type": "net"
}"#;

/// Command line of a process that was started by the name `passt`.
#[derive(Debug, Parser)]
#[command(name = "passt", disable_version_flag = true, max_term_width = 100)]
struct PasstCommandLine {
    #[command(flatten)]
    args: PasstArgs,
}

/// Main function of `passt`, with the arguments behind the program's name. Returns the exit status.
pub fn main(arguments: &[OsString]) -> u8 {
    let args = match parse(arguments) {
        Ok(args) => args,
        Err(error) => return complain(PASST, &error),
    };
    let prints_capabilities = args.print_capabilities;
    let done = started(args).and_then(|started| {
        if prints_capabilities {
            println!("{CAPABILITIES}");
            return Ok(0);
        }
        if started.args.version {
            println!("passt (Ringfence) {}", env!("CARGO_PKG_VERSION"));
            return Ok(0);
        }
        super::run(&started, arguments)
    });
    done.unwrap_or_else(|error| {
        problem(PASST, &causes(&error));
        STATUS_FAILED
    })
}

fn started(args: PasstArgs) -> anyhow::Result<Started> {
    let target = Target::Machine(args.check()?);
    Ok(Started { args: args.network, target })
}

/// Main function of passt's session in the background. Returns the exit status.
pub fn session_main(arguments: &[OsString]) -> u8 {
    super::serve_in_background(|| {
        started(parse(arguments).map_err(|error| anyhow::anyhow!(error.to_string()))?)
    })
}

/// Network card of virtual machines on the host's network: what `ringfence vhost-user net --uplink` adds to passt's
/// defaults.
#[derive(Clone, Debug)]
pub struct UplinkCard {
    /// Socket to create, to which hypervisors connect.
    pub socket: PathBuf,
    /// Number of queue pairs.
    pub pairs: u16,
    /// Rule for the memory of hypervisors.
    pub pool: PoolRule,
    /// Longest IP packet in bytes.
    pub mtu: Option<u16>,
    /// Ports of the host that lead to the machine.
    pub tcp_ports: Vec<PastaForwardSpec>,
    pub udp_ports: Vec<PastaForwardSpec>,
    /// Names and addresses that the machine may reach.
    pub egress: EgressArgs,
    pub ask: AskArgs,
    pub status_socket: Option<PathBuf>,
    pub is_verbose: bool,
}

impl UplinkCard {
    /// Serves virtual machines until a signal ends it. Returns the exit status.
    ///
    /// # Errors
    ///
    /// Returns the reason for which the card cannot be served.
    pub fn serve(self) -> anyhow::Result<u8> {
        let args = parse(&["--foreground".into(), "--vhost-user".into()])?;
        let PasstArgs { mut network, .. } = args;
        network.mtu = self.mtu.unwrap_or(network.mtu);
        (network.tcp_ports, network.udp_ports) = (self.tcp_ports, self.udp_ports);
        (network.egress, network.ask) = (self.egress, self.ask);
        network.status_socket = self.status_socket;
        network.debug = self.is_verbose;
        let endpoint = Endpoint {
            place: Place::Path(self.socket),
            program: NET,
            one_off: false,
            transport: Transport::VhostUser { pool: self.pool, pairs: self.pairs },
        };
        Ok(Session::start(&network, &Target::Machine(endpoint))?.wait())
    }
}

fn parse(arguments: &[OsString]) -> Result<PasstArgs, clap::Error> {
    let words = std::iter::once(OsString::from(PASST)).chain(arguments.iter().cloned());
    let command = PasstCommandLine::command().args_override_self(true).infer_long_args(true);
    let matches = command.try_get_matches_from(words)?;
    PasstCommandLine::from_arg_matches(&matches).map(|named| named.args)
}

#[cfg(test)]
mod tests;
