//! `ringfence exec`: another command in a running guest.

use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use clap::Args;
use ringfence_sandbox::channel::{Channel, expect_fds};
use ringfence_sandbox::signals::Signals;
use ringfence_sandbox::{ChannelError, Ending, STATUS_FAILED};
use ringfence_sys::poll::wait_any;
use rustix::event::{PollFd, PollFlags};
use rustix::process::Signal;

use super::{Reply, Request, find};
use crate::terminal::{Relay, UserTerminal};
use ringfence_hostnet::causes::causes;

/// Time limit for the launcher to make a terminal.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval of looks at the modes of the command's terminal while it has no keys.
const MODES_LOOK: Duration = Duration::from_millis(100);

const NOTES: &str = "\
Examples:
  A shell in the guest `web`:
    ringfence exec web

  Its connections:
    ringfence exec web -- ss -tn

Exit status:
  The command's own. 128 + N if signal N ended it (137 if the guest ended first); 127 if it was not
  found, 126 if it could not be run, 125 if Ringfence itself failed (standard error has the reason).";

/// Run another command in a running guest
///
/// The command has the guest's network, files, processes and rights. It does not get your terminal: where a standard stream is
/// one, it gets a terminal of the guest. It ends with the guest.
#[derive(Debug, Args)]
#[command(after_help = NOTES)]
pub struct ExecArgs {
    /// Name of the guest, or PID of its `ringfence run`
    #[arg(value_name = "GUEST")]
    pub guest: String,

    /// Command and its arguments [default: $SHELL]
    #[arg(value_name = "CMD", trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<OsString>,
}

/// Runs the command. Returns its exit status.
pub fn main(args: &ExecArgs) -> u8 {
    match run(args) {
        Ok(status) => status,
        Err(error) => {
            eprintln!("ringfence: exec: {}", causes(&error));
            STATUS_FAILED
        }
    }
}

fn run(args: &ExecArgs) -> anyhow::Result<u8> {
    // Before any thread starts, so that all threads leave these to the loop below.
    let signals = Signals::new(&[
        Signal::INT,
        Signal::QUIT,
        Signal::TERM,
        Signal::HUP,
        Signal::USR1,
        Signal::USR2,
        Signal::WINCH,
        // The terminal's modes are restored from the background, too.
        Signal::TTOU,
    ])?;
    let channel = find::one(&args.guest)?.channel;
    let command = if args.command.is_empty() {
        vec![std::env::var_os("SHELL").unwrap_or_else(|| "/bin/sh".into())]
    } else {
        args.command.clone()
    };
    let term = std::env::var("TERM").ok().map(|term| ("TERM".to_owned(), term));
    let request = Request::Exec { command, environment: term.into_iter().collect() };
    let mut relay = start(&channel, &request)?;
    let ended = wait(&channel, &signals, relay.as_mut());
    if let Some(relay) = &mut relay {
        relay.drain(&signals);
    }
    // Restores the terminal before a message is printed.
    drop(relay);
    let (status, problem) = match ended? {
        Reply::Ended(ending) => (ending.exit_status(), None),
        Reply::Failed { status, why } => (status, Some(why)),
        _ => anyhow::bail!("the launcher is of another version of Ringfence"),
    };
    if let Some(problem) = problem {
        eprintln!("ringfence: exec: {}", ringfence_hostnet::text::printable(&problem));
    }
    Ok(status)
}

/// Starts the command. Each standard stream that is the user's terminal is replaced by a terminal of the guest.
fn start(channel: &Channel, request: &Request) -> anyhow::Result<Option<Relay>> {
    let streams = [rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr()];
    let user = UserTerminal::open();
    let is_terminal = [0, 1, 2].map(|at| user.as_ref().is_some_and(|user| user.is_stream(at)));
    let Some(user) = user.filter(|_| is_terminal.contains(&true)) else {
        channel.send(request, &streams)?;
        return Ok(None);
    };
    let mut relay = Relay::new(user, new_terminal(channel)?)?;
    let terminal = relay.open_programs_end()?;
    let replaced = |at: usize| if is_terminal[at] { terminal.as_fd() } else { streams[at] };
    channel.send(request, &[replaced(0), replaced(1), replaced(2), terminal.as_fd()])?;
    if is_terminal[0] && relay.is_foreground() {
        relay.attach(false);
    }
    Ok(Some(relay))
}

/// Requests a terminal of the guest. Returns the end that this process serves.
fn new_terminal(channel: &Channel) -> anyhow::Result<OwnedFd> {
    channel.send(&Request::Terminal, &[])?;
    match channel.receive_within::<Reply>(ANSWER_TIMEOUT)? {
        (Reply::Terminal, fds) => {
            let [master] = expect_fds(fds)?;
            Ok(master)
        }
        (Reply::Failed { why, .. }, _) => {
            anyhow::bail!("{}", ringfence_hostnet::text::printable(&why))
        }
        _ => anyhow::bail!("the launcher is of another version of Ringfence"),
    }
}

/// Forwards signals and copies between the terminals until the launcher reports the end.
fn wait(
    channel: &Channel,
    signals: &Signals,
    mut relay: Option<&mut Relay>,
) -> anyhow::Result<Reply> {
    loop {
        if let Some(relay) = &mut relay {
            relay.advance();
            // A command whose standard input is no terminal reads the keys of its own: a password, or a pager.
            if !relay.is_attached() && relay.has_changed_modes() && relay.is_foreground() {
                relay.attach(true);
            }
        }
        match channel.try_receive::<Reply>() {
            Ok(Some((reply, _))) => return Ok(reply),
            Ok(None) => {}
            Err(ChannelError::Closed) => {
                eprintln!("ringfence: exec: the guest ended, and the command with it");
                return Ok(Reply::Ended(Ending::Killed(Signal::KILL.as_raw())));
            }
            Err(error) => return Err(error.into()),
        }
        let mut fds =
            vec![PollFd::new(channel, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
        let terminals: Vec<_> = relay.iter().flat_map(|relay| relay.polled()).collect();
        fds.extend(terminals.iter().map(|(fd, flags)| PollFd::new(fd, *flags)));
        // No event tells that a program has changed the modes of its terminal.
        let looks = relay.as_ref().is_some_and(|relay| !relay.is_attached());
        wait_any(&mut fds, looks.then(|| Instant::now() + MODES_LOOK))?;
        drop(fds);
        drop(terminals);
        while let Some(arrived) = signals.next()? {
            let of_terminal = [Signal::WINCH, Signal::TTOU].map(Signal::as_raw);
            match &relay {
                Some(relay) if arrived.number == Signal::WINCH.as_raw() => relay.resize(),
                _ if of_terminal.contains(&arrived.number) => {}
                _ => match channel.send(&Request::Signal(arrived.number), &[]) {
                    // The next round reads the end of the channel.
                    Ok(()) | Err(ChannelError::Closed) => {}
                    Err(error) => return Err(error.into()),
                },
            }
        }
    }
}
