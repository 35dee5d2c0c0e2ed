//! Further commands in a guest (`ringfence exec`), each in a session of its own.
//!
//! Init starts each command itself. A helper that executed this program again would be a handle of the host's file for
//! the guest's processes, by `/proc/PID/exe`: with it they change the file's mode and times, whatever mounts are read-only.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;

use ringfence_sandbox::{Ending, STATUS_FAILED, signals};
use ringfence_sys::child::Job;
use ringfence_sys::descriptors::Descriptors;
use rustix::process::Pid;
use rustix::pty::OpenptFlags;

use super::command::{self, Properties, Start};

/// Maximum number of further commands at a time.
const COMMANDS_MAX: usize = 256;

/// Further commands that run.
#[derive(Default)]
pub(super) struct Sessions {
    running: Vec<(Pid, u64)>,
}

/// Reason for which a further command was not started, with the exit status for it.
pub(super) type Refusal = (u8, String);

/// Streams of a further command, and its terminal if it has one.
type Streams = ([OwnedFd; 3], Option<OwnedFd>);

impl Sessions {
    /// Starts a command under a number of the launcher's, with the streams that came with the order.
    pub(super) fn start(
        &mut self,
        id: u64,
        command: &[OsString],
        fds: Descriptors,
        properties: &Properties<'_>,
    ) -> Result<(), Refusal> {
        let ([stdin, stdout, stderr], terminal) = streams(fds)?;
        if self.running.len() >= COMMANDS_MAX {
            let why = format!("the guest has {COMMANDS_MAX} further commands");
            return Err((STATUS_FAILED, why));
        }
        let start = Start {
            stdin,
            descriptors: vec![(stdout, 1), (stderr, 2)],
            job: Job::Session { terminal },
        };
        match command::start(command, start, properties) {
            Ok(pid) => self.running.push((pid, id)),
            Err(error) => return Err((error.status(), error.to_string())),
        }
        Ok(())
    }

    /// Sends a signal to a command. No effect if it has ended.
    pub(super) fn signal(&self, id: u64, number: i32) {
        for (pid, _) in self.running.iter().filter(|(_, of)| *of == id) {
            let _ = signals::send(pid.as_raw_nonzero().get().unsigned_abs(), number);
        }
    }

    /// Removes a process that was reaped. Returns the number of its command if it was one.
    pub(super) fn ended(&mut self, pid: Pid) -> Option<u64> {
        let at = self.running.iter().position(|(of, _)| *of == pid)?;
        Some(self.running.swap_remove(at).1)
    }
}

fn streams(fds: Descriptors) -> Result<Streams, Refusal> {
    let mut fds = fds.into_vec().into_iter();
    match (fds.next(), fds.next(), fds.next(), fds.next(), fds.next()) {
        (Some(stdin), Some(stdout), Some(stderr), terminal, None) => {
            Ok(([stdin, stdout, stderr], terminal))
        }
        _ => Err((STATUS_FAILED, "the command came with other than 3 or 4 descriptors".to_owned())),
    }
}

/// Makes a new terminal of the guest. Returns the end of the process that serves it; the other one is reached through it.
pub(super) fn new_terminal() -> io::Result<OwnedFd> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = rustix::pty::openpt(flags)?;
    rustix::pty::unlockpt(&master)?;
    Ok(master)
}

/// Process that was reaped.
pub(super) type Reaped = (Pid, Ending);
