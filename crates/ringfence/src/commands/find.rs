//! Search for guests by name or process number.
//!
//! All launchers of the user are asked at the same time and have one time limit together, so a launcher that is stopped
//! delays a command by this limit and no more.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::bail;
use ringfence_sandbox::channel::{Channel, ChannelError};
use ringfence_sandbox::limits;
use ringfence_sys::poll::wait_any;
use ringfence_sys::socket::{
    peer_is_in_own_pid_namespace, peer_is_in_own_user_namespace, peer_user,
};
use rustix::event::{PollFd, PollFlags};
use serde::de::DeserializeOwned;

use super::{Description, Reply, Request};
use ringfence_hostnet::guest_sockets::{GuestEntry, ListenerKind};
use ringfence_hostnet::runtime_dir::RuntimeDir;
use ringfence_hostnet::text::printable;
use ringfence_pasta::live_policy::{SessionDescription, SessionReply, SessionRequest};

/// Time limit for the answers of launchers.
const ANSWER: Duration = Duration::from_secs(2);

/// Advice for a launcher that does not serve its clients.
const IS_IT_STOPPED: &str = "if it is stopped (Ctrl-Z), `kill -CONT` with this number continues it";

/// Guest that answered, with a connection to its launcher or session.
pub(crate) struct Found<D = Description> {
    /// Process number of the launcher.
    pub(crate) pid: i32,
    pub(crate) guest: D,
    pub(crate) channel: Channel,
}

/// Description of a guest, as its launcher or session gives it.
pub(crate) trait Described: Sized {
    /// Message of the process.
    type Reply: DeserializeOwned;

    /// Asks for the description.
    fn ask(channel: &Channel) -> Result<(), ChannelError>;

    /// Returns the description in a reply, or the reason for which there is none.
    fn take(reply: Self::Reply) -> Result<Self, String>;

    /// Returns the reason for which the process at the other end of a socket is not asked: a guest's command may be that process,
    /// in a runtime directory that was made after the guest.
    fn refuse(socket: &OwnedFd) -> Option<&'static str>;

    fn name(&self) -> &str;

    /// Returns the start of the command in seconds since 1970, by which guests are sorted.
    fn since(&self) -> u64;
}

impl Described for Description {
    type Reply = Reply;

    fn ask(channel: &Channel) -> Result<(), ChannelError> {
        channel.send_now(&Request::Describe, &[])
    }

    fn take(reply: Reply) -> Result<Description, String> {
        match reply {
            Reply::Guest(guest) => Ok(*guest),
            Reply::Failed { why, .. } => Err(printable(&why)),
            _ => Err("it is of another version of Ringfence".to_owned()),
        }
    }

    fn refuse(socket: &OwnedFd) -> Option<&'static str> {
        let is_own = peer_is_in_own_user_namespace(socket);
        (!is_own).then_some("it is in another user namespace than this command")
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn since(&self) -> u64 {
        self.since
    }
}

impl Described for SessionDescription {
    type Reply = SessionReply;

    fn ask(channel: &Channel) -> Result<(), ChannelError> {
        channel.send_now(&SessionRequest::Describe, &[])
    }

    fn take(reply: SessionReply) -> Result<SessionDescription, String> {
        match reply {
            SessionReply::Session(session) => Ok(session),
            SessionReply::Policy(_) => Err("it is of another version of Ringfence".to_owned()),
        }
    }

    fn refuse(socket: &OwnedFd) -> Option<&'static str> {
        let is_own = peer_is_in_own_pid_namespace(socket);
        (!is_own).then_some("it is in another PID namespace than this command")
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn since(&self) -> u64 {
        0
    }
}

/// Launcher that did not answer.
pub(crate) struct Silent {
    /// Process number of the launcher.
    pub(crate) pid: i32,
    /// Reason, for the user.
    why: String,
}

impl std::fmt::Display for Silent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the guest of process {} does not answer: {}", self.pid, self.why)
    }
}

/// Guests of this user, sorted by start, and launchers that did not answer.
pub(crate) struct Listing<D = Description> {
    pub(crate) found: Vec<Found<D>>,
    pub(crate) silent: Vec<Silent>,
}

/// Asks every launcher of this user for its guest.
pub(crate) fn all() -> anyhow::Result<Listing> {
    // One descriptor for each guest. Where the limit cannot be raised, the last guests are reported as silent.
    let _ = limits::raise_open_files();
    Ok(ask(RuntimeDir::open()?.listeners(ListenerKind::Launcher, None)?, ANSWER))
}

/// Asks every session of this user for its guest.
pub(crate) fn sessions() -> anyhow::Result<Listing<SessionDescription>> {
    let _ = limits::raise_open_files();
    Ok(ask(RuntimeDir::open()?.listeners(ListenerKind::Session, None)?, ANSWER))
}

/// Launcher whose answer is pending.
struct AskedLauncher {
    pid: i32,
    channel: Channel,
}

/// Asks these launchers for their guests.
fn ask<D: Described>(entries: Vec<GuestEntry>, within: Duration) -> Listing<D> {
    let deadline = Instant::now() + within;
    let mut listing: Listing<D> = Listing { found: Vec::new(), silent: Vec::new() };
    let mut asked: Vec<AskedLauncher> = Vec::new();
    for GuestEntry { pid, connection } in entries {
        let socket = match connection {
            Ok(socket) => socket,
            Err(error) => {
                let why = format!("{error}; {IS_IT_STOPPED}");
                listing.silent.push(Silent { pid, why });
                continue;
            }
        };
        // Nobody else can make a socket in the directory, unless its mode was changed.
        if peer_user(&socket).is_ok_and(|user| user != rustix::process::geteuid().as_raw()) {
            continue;
        }
        if let Some(why) = D::refuse(&socket) {
            listing.silent.push(Silent { pid, why: why.to_owned() });
            continue;
        }
        let channel = Channel::from_fd(socket);
        match D::ask(&channel) {
            // A launcher that has closed the connection may have said why.
            Ok(()) | Err(ChannelError::Closed) => asked.push(AskedLauncher { pid, channel }),
            Err(error) => listing.silent.push(Silent { pid, why: error.to_string() }),
        }
    }
    loop {
        asked = asked.into_iter().filter_map(|one| listing.receive(one)).collect();
        let mut fds: Vec<_> =
            asked.iter().map(|one| PollFd::new(&one.channel, PollFlags::IN)).collect();
        if fds.is_empty() || !matches!(wait_any(&mut fds, Some(deadline)), Ok(1..)) {
            break;
        }
    }
    let why = format!("not within {within:?}; {IS_IT_STOPPED}");
    let late = |one: AskedLauncher| Silent { pid: one.pid, why: why.clone() };
    listing.silent.extend(asked.into_iter().map(late));
    listing.found.sort_by_key(|found| (found.guest.since(), found.pid));
    listing
}

impl<D: Described> Listing<D> {
    /// Receives the answer of a launcher, and returns the launcher if there is none yet.
    fn receive(&mut self, asked: AskedLauncher) -> Option<AskedLauncher> {
        let AskedLauncher { pid, channel } = asked;
        let why = match channel.try_receive().map(|reply| reply.map(|(reply, _)| D::take(reply))) {
            Ok(None) => return Some(AskedLauncher { pid, channel }),
            Ok(Some(Ok(guest))) => {
                self.found.push(Found { pid, guest, channel });
                return None;
            }
            // The guest ended meanwhile.
            Err(ChannelError::Closed) => return None,
            Ok(Some(Err(why))) => why,
            Err(error) => error.to_string(),
        };
        self.silent.push(Silent { pid, why });
        None
    }

    /// Returns the texts of the launchers that did not answer, joined to one.
    fn silent_texts(&self) -> String {
        let texts: Vec<String> = self.silent.iter().map(Silent::to_string).collect();
        texts.join("; ")
    }

    /// Returns the guest of that name, or whose launcher has that process number, if it is listed.
    fn at_most_one(self, wanted: &str) -> anyhow::Result<Option<Found<D>>> {
        let mut matching: Vec<Found<D>> = self
            .found
            .into_iter()
            .filter(|found| found.guest.name() == wanted || found.pid.to_string() == wanted)
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
}

/// Returns the guest of the launcher with that process number, once its command runs.
pub(crate) fn of_launcher(pid: u32) -> Option<Description> {
    let pid = i32::try_from(pid).ok()?;
    let entries = RuntimeDir::open().ok()?.listeners(ListenerKind::Launcher, Some(pid)).ok()?;
    ask::<Description>(entries, ANSWER).found.pop().map(|found| found.guest)
}

/// Returns the guest of that name, or whose launcher has that process number.
pub(super) fn one(wanted: &str) -> anyhow::Result<Found> {
    let listing = all()?;
    let silent = listing.silent_texts();
    match listing.at_most_one(wanted)? {
        Some(found) => Ok(found),
        None if silent.is_empty() => bail!(
            "no guest of yours is called `{wanted}`: `ringfence ps` lists all, and `ringfence wait {wanted}` waits until \
             it runs"
        ),
        None => bail!("no guest of yours that answers is called `{wanted}`; {silent}"),
    }
}

/// Returns the session of that name, or with that process number, if it runs.
pub(super) fn session(wanted: &str) -> anyhow::Result<Option<Found<SessionDescription>>> {
    sessions()?.at_most_one(wanted)
}

/// Returns the guest of that name, or whose launcher has that process number, if it runs.
pub(super) fn at_most_one(wanted: &str) -> anyhow::Result<Option<Found>> {
    all()?.at_most_one(wanted)
}
