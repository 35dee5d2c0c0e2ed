//! Search for guests by name or process number.

use std::time::Duration;

use anyhow::{Context, bail};
use ringfence_sandbox::channel::Channel;
use rustix::net::sockopt::socket_peercred;

use super::{Description, Reply, Request};
use ringfence_hostnet::runtime_dir::RuntimeDir;

/// Time limit for the answer of a launcher.
const ANSWER: Duration = Duration::from_secs(2);

/// Guest that answered, with a connection to its launcher.
pub(super) struct Found {
    /// Process number of the launcher.
    pub(super) pid: i32,
    pub(super) guest: Description,
    pub(super) channel: Channel,
}

/// Asks every launcher of this user for its guest. Sorted by start. Launchers that do not answer in time are left out
/// with a message on standard error.
pub(super) fn all() -> anyhow::Result<Vec<Found>> {
    let directory = RuntimeDir::open()?;
    let mut found = Vec::new();
    for socket in directory.connect_to_guests()? {
        let peer = socket_peercred(&socket).context("a launcher's user")?;
        let pid = peer.pid.as_raw_nonzero().get();
        if peer.uid != rustix::process::geteuid() {
            continue;
        }
        let channel = Channel::from_fd(socket);
        let answer = channel.send(&Request::Describe, &[]);
        match answer.and_then(|()| channel.receive_within(ANSWER)) {
            Ok((Reply::Guest(guest), _)) => found.push(Found { pid, guest: *guest, channel }),
            // The guest ended meanwhile.
            Err(ringfence_sandbox::ChannelError::Closed) => {}
            Ok(_) => eprintln!("ringfence: process {pid} is of another version of Ringfence"),
            Err(error) => eprintln!("ringfence: process {pid}: {error}"),
        }
    }
    found.sort_by_key(|found| (found.guest.since, found.pid));
    Ok(found)
}

/// Returns the guest of the launcher with that process number, once its command runs.
pub(crate) fn of_launcher(pid: u32) -> Option<Description> {
    for socket in RuntimeDir::open().ok()?.connect_to_guests().ok()? {
        let peer = socket_peercred(&socket).ok()?;
        let is_it = u32::try_from(peer.pid.as_raw_nonzero().get()) == Ok(pid);
        if is_it && peer.uid == rustix::process::geteuid() {
            let channel = Channel::from_fd(socket);
            channel.send(&Request::Describe, &[]).ok()?;
            let (Reply::Guest(guest), _) = channel.receive_within(ANSWER).ok()? else {
                return None;
            };
            return Some(*guest);
        }
    }
    None
}

/// Returns the guest of that name, or whose launcher has that process number.
pub(super) fn one(wanted: &str) -> anyhow::Result<Found> {
    match at_most_one(wanted)? {
        Some(found) => Ok(found),
        None => bail!(
            "no guest of yours is called `{wanted}`: `ringfence ps` lists all, and `ringfence wait {wanted}` waits until \
             it runs"
        ),
    }
}

/// Returns the guest of that name, or whose launcher has that process number, if it runs.
pub(super) fn at_most_one(wanted: &str) -> anyhow::Result<Option<Found>> {
    let mut matching: Vec<Found> = all()?
        .into_iter()
        .filter(|found| found.guest.name == wanted || found.pid.to_string() == wanted)
        .collect();
    if matching.len() > 1 {
        let list: Vec<String> = matching.iter().map(|found| found.pid.to_string()).collect();
        bail!(
            "{} guests are called `{wanted}`: name one by its PID: {}",
            list.len(),
            list.join(", ")
        )
    }
    Ok(matching.pop())
}
