//! Supervisor process as its launcher's child: start, signal, end.

use std::ffi::OsString;
use std::io;
use std::os::fd::RawFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ringfence_sys::{fork, namespaces};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitOptions};

use super::channel::Channel;
use super::ending::Ending;
use super::spawn::{Spawn, THIS_PROGRAM};
use super::supervisor;

/// Time limit for the end of a process that has closed its channel.
const ENDS_WITHIN: Duration = Duration::from_secs(1);

/// Child process that is the supervisor of a domain.
#[derive(Debug)]
pub(super) struct SupervisorProcess {
    pid: Pid,
    /// Set once the process has been waited for: its number may be another's.
    is_reaped: bool,
}

impl SupervisorProcess {
    /// Starts a supervisor. It is a fork of this process if that has one thread, as the launcher of `run` has:
    /// launcher and supervisors trust each other, and a fork starts sooner and shares their memory.
    pub(super) fn start(spawn: &Spawn<'_>, control: Channel) -> io::Result<SupervisorProcess> {
        let pid = if spawn.kind.is_sandboxed() {
            // Descriptors that this process inherited are not for sandboxed domains.
            let inherited = namespaces::inheritable_fds()?;
            with_inheritable(&inherited, false, || start(spawn, control))?
        } else {
            with_inheritable(spawn.inherit, true, || start(spawn, control))?
        };
        Ok(SupervisorProcess { pid, is_reaped: false })
    }

    pub(super) fn id(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Kills the process, unless it has been waited for.
    pub(super) fn kill(&self) {
        if !self.is_reaped {
            // It is not reaped, so the number is still its own.
            let _ = rustix::process::kill_process(self.pid, Signal::KILL);
        }
    }

    /// Blocks until the process has ended.
    pub(super) fn wait(&mut self) {
        self.reap(WaitOptions::empty());
    }

    /// Reaps the process if it has ended.
    pub(super) fn try_wait(&mut self) {
        self.reap(WaitOptions::NOHANG);
    }

    fn reap(&mut self, options: WaitOptions) {
        if self.is_reaped {
            return;
        }
        let waited =
            rustix::io::retry_on_intr(|| rustix::process::waitpid(Some(self.pid), options));
        // An error means that it is no child any more.
        self.is_reaped = !matches!(waited, Ok(None));
    }

    /// Returns the way in which a process ended that has closed its channel. Does not reap it.
    pub(super) fn ending(&self) -> Ending {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        let deadline = Instant::now() + ENDS_WITHIN;
        loop {
            match rustix::process::waitid(WaitId::Pid(self.pid), options) {
                Ok(Some(status)) => return Ending::from_wait_id(&status),
                Ok(None) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                _ => return Ending::Unknown,
            }
        }
    }
}

fn start(spawn: &Spawn<'_>, control: Channel) -> io::Result<Pid> {
    let role = spawn.kind.subcommand();
    if fork::has_one_thread()? {
        let role = OsString::from(role);
        let words: Vec<_> = [role].into_iter().chain(spawn.command.iter().cloned()).collect();
        return fork::fork(control.into_fd(), &words, supervisor::forked_main);
    }
    let mut program = Command::new(THIS_PROGRAM);
    program.arg0("ringfence").args(["internal", "supervisor", role]);
    program.stdin(Stdio::from(control.into_fd()));
    if spawn.kind.is_sandboxed() {
        program.stdout(Stdio::null()).stderr(Stdio::null()).env_clear().current_dir("/");
    } else {
        program.arg("--").args(spawn.command);
    }
    // Dropping the child leaves it running.
    let pid = i32::try_from(program.spawn()?.id()).ok().and_then(Pid::from_raw);
    pid.ok_or_else(|| io::Error::other("a process without a number"))
}

/// Calls `start` while the given descriptors are inheritable, or not inheritable, and reverses that
/// afterwards.
fn with_inheritable<T>(
    fds: &[RawFd],
    inheritable: bool,
    start: impl FnOnce() -> io::Result<T>,
) -> io::Result<T> {
    namespaces::set_inheritable(fds, inheritable)?;
    let child = start();
    namespaces::set_inheritable(fds, !inheritable)?;
    child
}
