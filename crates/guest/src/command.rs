//! Start of the guest's command.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use rustix::process::Pid;

use ringfence_sandbox::command_filter::CommandFilter;
use ringfence_sandbox::signals;
use ringfence_sandbox::{STATUS_CANNOT_EXECUTE, STATUS_FAILED, STATUS_NOT_FOUND};
use ringfence_sys::child::{Job, Preparation, prepare};

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
    /// Returns the error of an attempt to execute `program`.
    pub(crate) fn of(program: &OsStr, source: io::Error) -> StartError {
        let command = program.to_owned();
        match source.kind() {
            io::ErrorKind::NotFound => StartError::NotFound(command),
            io::ErrorKind::PermissionDenied if !exists(program) => StartError::NotFound(command),
            _ => StartError::CannotExecute { command, source },
        }
    }

    /// Returns the exit status that a shell reports for this error.
    pub(crate) fn status(&self) -> u8 {
        match self {
            StartError::NotFound(_) => STATUS_NOT_FOUND,
            StartError::CannotExecute { .. } => STATUS_CANNOT_EXECUTE,
            StartError::Nothing => STATUS_FAILED,
        }
    }
}

/// Returns `true` if the program is named by a path, or a directory of `PATH` has it. For a name that no directory has,
/// execvp(3) reports the permissions of a directory that it could not search.
fn exists(program: &OsStr) -> bool {
    let has = |directory: PathBuf| directory.join(program).symlink_metadata().is_ok();
    program.as_bytes().contains(&b'/')
        || env::split_paths(&env::var_os("PATH").unwrap_or_default()).any(has)
}

/// Changes of the command's environment.
#[derive(Clone)]
pub(crate) struct Variables {
    pub set: Vec<(String, String)>,
    pub removed: Vec<String>,
}

impl Variables {
    /// Makes the changes for a command.
    pub(crate) fn apply(&self, command: &mut Command) {
        for name in &self.removed {
            command.env_remove(name);
        }
        command.envs(self.set.iter().map(|(name, value)| (name, value)));
    }
}

/// Properties that the commands of a guest share.
#[derive(Clone)]
pub(crate) struct Properties<'a> {
    /// Signals that a command has blocked.
    pub blocked: &'a [i32],
    /// Signals that a command ignores, besides those that this process ignores.
    pub ignored: &'a [i32],
    pub variables: Variables,
    /// Filter of system calls.
    pub filter: &'a CommandFilter,
}

/// Streams and job of one command.
pub(crate) struct Start {
    pub stdin: OwnedFd,
    /// Descriptors that the command inherits under the given numbers, besides those that this process inherited.
    pub descriptors: Vec<(OwnedFd, RawFd)>,
    pub job: Job,
}

/// Starts a command in this process's directory.
pub(crate) fn start(
    command: &[OsString],
    start: Start,
    properties: &Properties<'_>,
) -> Result<Pid, StartError> {
    let (program, arguments) = command.split_first().ok_or(StartError::Nothing)?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::from(start.stdin));
    properties.variables.apply(&mut command);
    let ignored = properties.ignored.iter().copied().collect();
    prepare(&mut command, Preparation { job: start.job, descriptors: start.descriptors, ignored });
    // Last: the filter holds for the calls that prepare the command, too.
    properties.filter.hold(&mut command);
    let spawned = signals::with_blocked(properties.blocked, || command.spawn());
    let child = spawned.and_then(|spawned| spawned);
    let child = child.map_err(|source| StartError::of(program, source))?;
    // Init reaps the command with all other children. Dropping this handle neither waits nor kills.
    i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(StartError::Nothing)
}
