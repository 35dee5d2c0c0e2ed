//! Further commands in a guest (`ringfence exec`), and the process that becomes each of them.
//!
//! Init starts this program again as `ringfence internal session`. It makes a session of its own, with the terminal on its
//! standard input if that is one, and then replaces itself by the command. It does nothing else: from its start
//! the guest's processes can trace it.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use ringfence_sandbox::command_filter::CommandFilter;
use ringfence_sandbox::{Ending, STATUS_FAILED, signals};
use rustix::process::Pid;

use super::command::{StartError, Variables};

/// Maximum number of further commands at a time.
const COMMANDS_MAX: usize = 256;

/// Further commands that run.
#[derive(Default)]
pub(super) struct Sessions {
    running: Vec<(Pid, u64)>,
}

impl Sessions {
    /// Starts a command under a number of the launcher's.
    pub(super) fn start(
        &mut self,
        id: u64,
        command: &[OsString],
        stdio: [OwnedFd; 3],
        blocked: &[i32],
        variables: &Variables,
        filter: &CommandFilter,
    ) -> io::Result<()> {
        if self.running.len() >= COMMANDS_MAX {
            return Err(io::Error::other(format!("the guest has {COMMANDS_MAX} further commands")));
        }
        let [stdin, stdout, stderr] = stdio.map(Stdio::from);
        // The link works also if the guest does not see the file.
        let mut session = Command::new("/proc/self/exe");
        session.arg0("ringfence").args(["internal", "session", "--"]).args(command);
        session.stdin(stdin).stdout(stdout).stderr(stderr);
        variables.apply(&mut session);
        filter.hold(&mut session);
        let child = signals::with_blocked(blocked, || session.spawn())??;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        self.running.extend(pid.map(|pid| (pid, id)));
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

/// Process that was reaped.
pub(super) type Reaped = (Pid, Ending);

/// Main function of `ringfence internal session`. Returns the exit status if the command cannot be run.
pub fn main(command: &[OsString]) -> u8 {
    if let Err(errno) = rustix::process::setsid() {
        eprintln!("ringfence: setsid: {}", io::Error::from(errno));
        return STATUS_FAILED;
    }
    // Fails if standard input is no terminal.
    let _ = rustix::process::ioctl_tiocsctty(rustix::stdio::stdin());
    let Some((program, arguments)) = command.split_first() else { return STATUS_FAILED };
    let error = StartError::of(program, Command::new(program).args(arguments).exec());
    eprintln!("ringfence: {error}");
    error.status()
}
