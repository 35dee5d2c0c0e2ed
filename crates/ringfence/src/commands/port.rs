//! `ringfence port`: lists, adds and removes the published ports of a running guest.

use std::io::Write;
use std::time::Duration;

use anyhow::bail;
use clap::{Args, Subcommand};
use ringfence_sandbox::STATUS_FAILED;

use super::{Reply, Request, find};
use ringfence_hostnet::causes::causes;
use ringfence_hostnet::out::{Out, is_closed};
use ringfence_hostnet::text::printable;
use ringfence_uplink_process::forward::ForwardSpec;

/// Time limit for a change of the ports of one specification.
const CHANGED: Duration = Duration::from_secs(10);

const EXAMPLES: &str = "\
Examples:
  The ports of the guest `web`, one specification a line:
    ringfence port web

  A port of the host's loopback that leads to port 8000 of the guest, until it is removed:
    ringfence port web add 127.0.0.1:8080:8000
    ringfence port web remove 127.0.0.1:8080:8000";

/// List, add or remove the published ports of a running guest
///
/// Without an action, the published ports are listed.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct PortArgs {
    /// Name of the guest, or PID of its `ringfence run`
    pub guest: String,

    /// Change of the ports
    #[command(subcommand)]
    pub action: Option<PortAction>,
}

/// Change of a guest's ports.
#[derive(Debug, Subcommand)]
pub enum PortAction {
    /// Publish ports, as `run -p` does
    ///
    /// Without IP they listen where --publish-default of the guest says, or at every address of the host.
    Add {
        #[arg(required = true, value_name = "[IP:]PORT[-LAST][:GUESTPORT][/udp]")]
        ports: Vec<ForwardSpec>,
    },
    /// Remove published ports, by the specifications that the list shows
    ///
    /// TCP connections that were accepted before stay.
    Remove {
        #[arg(required = true, value_name = "[IP:]PORT[-LAST][:GUESTPORT][/udp]")]
        ports: Vec<ForwardSpec>,
    },
}

/// Lists or changes ports. Returns the exit status.
pub fn main(args: &PortArgs) -> u8 {
    let done = match &args.action {
        None => list(&args.guest),
        Some(PortAction::Add { ports }) => {
            change(&args.guest, ports, |spec| Request::AddPort(spec.to_string()))
        }
        Some(PortAction::Remove { ports }) => {
            change(&args.guest, ports, |spec| Request::RemovePort(spec.to_string()))
        }
    };
    match done {
        Ok(()) => 0,
        Err(error) if is_closed(&error) => 0,
        Err(error) => {
            eprintln!("ringfence: port: {}", causes(&error));
            STATUS_FAILED
        }
    }
}

fn list(guest: &str) -> anyhow::Result<()> {
    let lines = find::one(guest)?.guest.ports.into_iter().map(|port| printable(&port) + "\n");
    Ok(Out.write_all(lines.collect::<String>().as_bytes())?)
}

/// Sends one request for each specification. Ends with the first that fails.
fn change(
    guest: &str,
    ports: &[ForwardSpec],
    request: impl Fn(&ForwardSpec) -> Request,
) -> anyhow::Result<()> {
    let channel = find::one(guest)?.channel;
    for spec in ports {
        channel.send(&request(spec), &[])?;
        match channel.receive_within(CHANGED)? {
            (Reply::PortsChanged, _) => {}
            (Reply::Failed { why, .. }, _) => bail!("{guest}: {why}"),
            _ => bail!("{guest} is of another version of Ringfence"),
        }
    }
    Ok(())
}
