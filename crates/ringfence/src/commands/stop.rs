//! `ringfence stop`: ends guests.

use std::time::Duration;

use anyhow::bail;
use clap::Args;
use ringfence_sandbox::{STATUS_FAILED, channel::Channel};
use ringfence_sys::poll::wait_hung_up;
use rustix::process::Signal;

use super::{Request, find};
use ringfence_hostnet::causes::causes;

/// Time limit for the end of a guest whose command was killed.
const KILLED: Duration = Duration::from_secs(10);

/// End guests
///
/// The guest's command gets SIGTERM, and SIGKILL if it has not ended in time. All processes of the guest end with it.
#[derive(Debug, Args)]
pub struct StopArgs {
    /// Name of the guest, or PID of its `ringfence run`
    #[arg(required = true, value_name = "GUEST")]
    pub guests: Vec<String>,

    /// Seconds until SIGKILL
    #[arg(short, long, value_name = "SECONDS", default_value = "10",
          value_parser = clap::value_parser!(u16).range(0..=3600))]
    pub time: u16,
}

/// Ends the guests, one after the other. Returns the exit status.
pub fn main(args: &StopArgs) -> u8 {
    let mut status = 0;
    for guest in &args.guests {
        if let Err(error) = stop(guest, Duration::from_secs(args.time.into())) {
            eprintln!("ringfence: stop: {}", causes(&error));
            status = STATUS_FAILED;
        }
    }
    status
}

fn stop(guest: &str, patience: Duration) -> anyhow::Result<()> {
    let channel = find::one(guest)?.channel;
    if order(&channel, Signal::TERM)? || wait_hung_up(&channel, patience)? {
        return Ok(());
    }
    if order(&channel, Signal::KILL)? || wait_hung_up(&channel, KILLED)? {
        return Ok(());
    }
    bail!(
        "{guest} has not ended {KILLED:?} after SIGKILL: a process of it may be blocked by a disk"
    )
}

/// Sends a signal to the guest's command. Returns `true` if the guest has ended already.
fn order(channel: &Channel, signal: Signal) -> anyhow::Result<bool> {
    match channel.send(&Request::Stop(signal.as_raw()), &[]) {
        Ok(()) => Ok(false),
        Err(ringfence_sandbox::ChannelError::Closed) => Ok(true),
        Err(error) => Err(error.into()),
    }
}
