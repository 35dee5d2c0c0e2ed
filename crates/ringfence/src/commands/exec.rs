//! `ringfence exec`: another command in a running guest.

use std::ffi::OsString;
use std::os::fd::AsFd;

use clap::Args;
use ringfence_sandbox::channel::Channel;
use ringfence_sandbox::signals::Signals;
use ringfence_sandbox::{ChannelError, Ending, STATUS_FAILED};
use ringfence_sys::poll::wait_any;
use rustix::event::{PollFd, PollFlags};
use rustix::process::Signal;

use super::pty::Pty;
use super::{Reply, Request, find};
use ringfence_hostnet::causes::causes;

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
/// The command has the guest's network, files, processes and rights. If standard input and output are a terminal, it gets
/// a terminal of its own. It ends with the guest.
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
    ])?;
    let channel = find::one(&args.guest)?.channel;
    let command = if args.command.is_empty() {
        vec![std::env::var_os("SHELL").unwrap_or_else(|| "/bin/sh".into())]
    } else {
        args.command.clone()
    };
    let term = std::env::var("TERM").ok().map(|term| ("TERM".to_owned(), term));
    let request = Request::Exec { command, environment: term.into_iter().collect() };
    let mut pty = None;
    match Pty::open()? {
        Some((opened, slave)) => {
            channel.send(&request, &[slave.as_fd(), slave.as_fd(), slave.as_fd()])?;
            pty.insert(opened).start()?;
        }
        None => {
            let (stdin, stdout) = (rustix::stdio::stdin(), rustix::stdio::stdout());
            channel.send(&request, &[stdin, stdout, rustix::stdio::stderr()])?;
        }
    }
    let ended = wait(&channel, &signals, pty.as_ref());
    if let Some(pty) = &pty {
        pty.finish();
    }
    // Restores the terminal before a message is printed.
    drop(pty);
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

/// Forwards signals until the launcher reports the end.
fn wait(channel: &Channel, signals: &Signals, pty: Option<&Pty>) -> anyhow::Result<Reply> {
    loop {
        match channel.try_receive::<Reply>() {
            Ok(Some((reply, _))) => return Ok(reply),
            Ok(None) => {}
            Err(ChannelError::Closed) => {
                eprintln!("ringfence: exec: the guest ended, and the command with it");
                return Ok(Reply::Ended(Ending::Killed(Signal::KILL.as_raw())));
            }
            Err(error) => return Err(error.into()),
        }
        let mut fds = [PollFd::new(channel, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
        wait_any(&mut fds, None)?;
        while let Some(arrived) = signals.next()? {
            match pty {
                Some(pty) if arrived.number == Signal::WINCH.as_raw() => pty.resize(),
                None if arrived.number == Signal::WINCH.as_raw() => {}
                _ => match channel.send(&Request::Signal(arrived.number), &[]) {
                    // The next round reads the end of the channel.
                    Ok(()) | Err(ChannelError::Closed) => {}
                    Err(error) => return Err(error.into()),
                },
            }
        }
    }
}
