#![forbid(unsafe_code)]
//! `ringfence pasta`: the uplink for network namespaces and virtual machines of other programs, with the options of pasta
//! and passt.
//!
//! ```text
//! client (Podman, RootlessKit)
//!   │ starts
//! front ──spawn──> session ──spawn──> process in the namespace    makes the interface, and exits or
//!  parses,          the user's rights  (`namespace`)              waits for the command
//!  exits when it      │
//!  is ready           └─────spawn──> uplink                       carries packets, in a sandbox
//! ```
//!
//! * [`args`], [`values`], [`forward_spec`]: command line and grammar of forwarded ports.
//! * `target`: namespaces to connect, and their end.
//! * `network`: the plan that follows from options and host.
//! * [`namespace`]: the process in the namespace.
//! * `namespace_process`: process that makes sockets of the namespace, for connections from loopback to loopback.
//! * `outbound`: sources of the host's sockets.
//! * `forwards_to_host`: forwarded ports of the namespace that lead to the host.
//! * `auto`: ports that follow the listeners of the namespace.
//! * `session`: the process that starts the others and waits.
//! * [`passt`], [`passt_args`]: the same for a virtual machine; `machine`: its socket; [`session_status`]: their state.
//! * [`live_policy`]: clients of the egress policy; `questions`: its questions.
//! * [`slirp4netns`], [`slirp_args`]: another command line for the same processes.
//! * `api`: the socket by which clients change ports; [`pesto`]: such a client.
//! * `messages`: standard error, log file, system log.
//!
//! With --foreground, and for a command, front and session are one process. Otherwise the session is a process of
//! its own from the start. The front exits with 0 after the session has reported that the network is usable. It
//! prints one line and exits with 1 if that fails.

mod api;
pub mod args;
mod auto;
mod auto_forwards;
mod client;
mod control;
pub mod forward_rules;
pub mod forward_spec;
mod forwards_to_host;
mod greeting;
pub mod hostfwd;
pub mod live_policy;
mod machine;
mod messages;
pub mod namespace;
mod namespace_process;
mod network;
mod outbound;
pub mod passt;
pub mod passt_args;
pub mod pesto;
pub mod program;
mod questions;
mod session;
mod session_files;
pub mod session_status;
pub mod slirp4netns;
pub mod slirp_args;
mod target;
pub mod values;

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use clap::{CommandFactory, FromArgMatches, Parser};
use ringfence_sandbox::channel::{Channel, ChannelError};
use ringfence_sandbox::spawn::THIS_PROGRAM;
use ringfence_sys::namespaces;
use serde::{Deserialize, Serialize};

use args::PastaArgs;
use program::STATUS_FAILED;
use ringfence_hostnet::causes::causes;
use session::Session;
use target::Target;

/// Command line of a process that was started by the name `pasta`.
#[derive(Debug, Parser)]
#[command(name = "pasta", disable_version_flag = true, max_term_width = 100)]
struct PastaCommandLine {
    #[command(flatten)]
    args: PastaArgs,
}

/// Report of the session to the front.
#[derive(Debug, Serialize, Deserialize)]
enum FromSession {
    /// The network is usable, and the session holds no descriptor of the front's any more.
    Ready,
    Failed(String),
}

/// Returns the arguments of the program `name` if this one was started by that name, or as `ringfence NAME`.
pub fn arguments(name: &str, words: impl Iterator<Item = OsString>) -> Option<Vec<OsString>> {
    let mut words = words.peekable();
    let program = words.next()?;
    if Path::new(&program).file_name() != Some(OsStr::new(name)) {
        words.next_if(|word| word == name)?;
    }
    Some(words.collect())
}

/// Main function of `pasta`, with the arguments behind the program's name. Returns the exit status.
pub fn main(arguments: &[OsString]) -> u8 {
    match parse(arguments) {
        Ok(args) => front(args, arguments),
        Err(error) => complain(program::PASTA, &error),
    }
}

fn parse(arguments: &[OsString]) -> Result<PastaArgs, clap::Error> {
    let words = std::iter::once(OsString::from(program::PASTA)).chain(arguments.iter().cloned());
    let matches = PastaCommandLine::command()
        .args_override_self(true)
        .infer_long_args(true)
        .try_get_matches_from(words)?;
    PastaCommandLine::from_arg_matches(&matches).map(|named| named.args)
}

/// Prints an error of the command line, or the help. Returns the exit status.
fn complain(name: &str, error: &clap::Error) -> u8 {
    use clap::error::{ContextKind, ContextValue, ErrorKind};
    if matches!(error.kind(), ErrorKind::DisplayHelp) {
        return ringfence_hostnet::out::tell(error);
    }
    let unknown = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(option)) if error.kind() == ErrorKind::UnknownArgument => {
            Some(option)
        }
        _ => None,
    };
    let text = error.to_string();
    let first = text.lines().next().unwrap_or_default();
    let text = match unknown {
        // Podman looks for this text, and then does without the option.
        Some(option) => format!("unrecognized option '{option}'"),
        None => first.trim_start_matches("error: ").to_owned(),
    };
    problem(name, &text);
    STATUS_FAILED
}

fn problem(name: &str, text: &str) {
    // Standard error may be closed, and the exit status says the same.
    let _ = messages::writeln_once(&mut io::stderr(), name, text);
}

/// Command line of pasta or passt after its checks.
struct Started {
    args: PastaArgs,
    target: Target,
}

fn front(args: PastaArgs, arguments: &[OsString]) -> u8 {
    let done = check(&args).and_then(|target| {
        if args.version {
            println!("pasta (Ringfence) {}", env!("CARGO_PKG_VERSION"));
            return Ok(0);
        }
        run(&Started { args, target }, arguments)
    });
    done.unwrap_or_else(|error| {
        problem(program::PASTA, &causes(&error));
        STATUS_FAILED
    })
}

/// Runs the session in this process, or in the background. Returns the exit status.
fn run(started: &Started, arguments: &[OsString]) -> anyhow::Result<u8> {
    match &started.target {
        Target::Existing { .. } | Target::Machine(_) if !started.args.foreground => {
            if started.args.egress.egress_log.as_deref() == Some(Path::new("-")) {
                bail!(
                    "--egress-log -: standard error is closed in the background; name a file, or say --foreground"
                );
            }
            daemonize(&started.target, arguments)
        }
        target => Ok(Session::start(&started.args, target)?.wait()),
    }
}

/// Rejects options that are not supported, and options that contradict each other.
fn check(args: &PastaArgs) -> anyhow::Result<Target> {
    if let Some((name, why)) = args.others.refused.first() {
        bail!("--{name} is not supported: {why}");
    }
    if args.pcap.is_some() && args.queues > 1 {
        bail!("--pcap captures one queue: leave out --queues");
    }
    if args.version { Ok(Target::Command(Vec::new())) } else { Target::new(args) }
}

/// Starts the session in the background, and waits until it is ready.
fn daemonize(target: &Target, arguments: &[OsString]) -> anyhow::Result<u8> {
    let (role, kept) = match target {
        Target::Machine(endpoint) => ("passt-session", endpoint.inherited()),
        _ => ("pasta-session", None),
    };
    let mut inherited = namespaces::inheritable_fds()?;
    inherited.retain(|fd| Some(*fd) != kept);
    namespaces::set_inheritable(&inherited, false)?;
    let (channel, session) = Channel::pair()?;
    let mut command = Command::new(THIS_PROGRAM);
    command.arg0("ringfence").args(["internal", role, "--"]).args(arguments);
    command.stdin(Stdio::from(session.into_fd()));
    let mut child = command.spawn().context("starting the process in the background")?;
    // The session limits the time of each step.
    match channel.receive::<FromSession>() {
        Ok((FromSession::Ready, _)) => Ok(0),
        Ok((FromSession::Failed(why), _)) => bail!("{why}"),
        Err(ChannelError::Closed) => {
            let status = child.wait()?;
            bail!("the process in the background is gone ({status})")
        }
        Err(error) => Err(error.into()),
    }
}

/// Main function of pasta's session in the background. Returns the exit status.
pub fn session_main(arguments: &[OsString]) -> u8 {
    serve_in_background(|| {
        let args = parse(arguments).map_err(|error| anyhow::anyhow!(error.to_string()))?;
        let target = check(&args)?;
        Ok(Started { args, target })
    })
}

/// Runs a session in the background. Returns the exit status.
fn serve_in_background(read: impl FnOnce() -> anyhow::Result<Started>) -> u8 {
    let mut session = None;
    let status = Channel::serve_stdin(
        |channel| {
            session = Some(start_session(channel, read()?)?);
            Ok(0)
        },
        |error: anyhow::Error| (STATUS_FAILED, FromSession::Failed(causes(&error))),
    );
    session.map_or(status, Session::wait)
}

fn start_session(channel: &Channel, started: Started) -> anyhow::Result<Session> {
    rustix::process::setsid().context("setsid")?;
    let Started { args, target } = started;
    let mut session = Session::start(&args, &target)?;
    // A client waits for the end of these files, not only for the front's exit.
    let null = std::fs::File::options().write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    std::env::set_current_dir("/").context("the root directory")?;
    session.leave_terminal();
    channel.send(&FromSession::Ready, &[])?;
    Ok(session)
}

#[cfg(test)]
mod tests;
