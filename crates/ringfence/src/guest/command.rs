//! Start of the guest's command.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

use rustix::process::Pid;

use ringfence_sandbox::signals;
use ringfence_sandbox::{STATUS_CANNOT_EXECUTE, STATUS_FAILED, STATUS_NOT_FOUND};

/// Reasons for which the command cannot be started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StartError {
    /// The file does not exist, in `PATH` or at the given path.
    #[error("{}: command not found", .0.display())]
    NotFound(OsString),
    /// The file exists but cannot be executed.
    #[error("{}: cannot be run: {source}", command.display())]
    CannotExecute { command: OsString, source: io::Error },
    /// The command line is empty.
    #[error("there is no command to run")]
    Nothing,
}

impl StartError {
    /// Returns the exit status that a shell reports for this error.
    pub(crate) fn status(&self) -> u8 {
        match self {
            StartError::NotFound(_) => STATUS_NOT_FOUND,
            StartError::CannotExecute { .. } => STATUS_CANNOT_EXECUTE,
            StartError::Nothing => STATUS_FAILED,
        }
    }
}

/// Changes of the command's environment.
pub(crate) struct Variables {
    pub(crate) set: Vec<(String, String)>,
    pub(crate) removed: Vec<String>,
}

/// Starts the command in this process's group, session and directory, with its standard output and
/// standard error. `blocked` are the signals that the command has blocked.
pub(crate) fn start(
    command: &[OsString],
    stdin: OwnedFd,
    blocked: &[i32],
    variables: &Variables,
) -> Result<Pid, StartError> {
    let (program, arguments) = command.split_first().ok_or(StartError::Nothing)?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::from(stdin));
    for name in &variables.removed {
        command.env_remove(name);
    }
    command.envs(variables.set.iter().map(|(name, value)| (name, value)));
    let child = signals::with_blocked(blocked, || command.spawn()).and_then(|spawned| spawned);
    let child = child.map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => StartError::NotFound(program.clone()),
        _ => StartError::CannotExecute { command: program.clone(), source },
    })?;
    // Init reaps the command with all other children. Dropping this handle neither waits nor kills.
    i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(StartError::Nothing)
}
