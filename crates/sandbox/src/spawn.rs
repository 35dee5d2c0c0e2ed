//! The launcher's side of a domain's two processes.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ringfence_sys::namespaces;
use rustix::process::{Pid, WaitId, WaitIdOptions};
use serde::{Deserialize, Serialize};

use super::Ending;
use super::channel::{Channel, ChannelError};
use super::ids::{self, MapWriter, Maps};
use super::supervisor::{FromSupervisor, ToSupervisor};
use ringfence_sys::poll::wait_readable;

/// This program, whatever happened to its file meanwhile.
pub const THIS_PROGRAM: &str = "/proc/self/exe";

/// How long a process of ours may take to start before it counts as stuck.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// How long it may take to end by itself before it is killed.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// What a domain is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DomainKind {
    /// The backends, the hub and the switch. Outlives the launcher that started it.
    Driver,
    /// The frontend of one guest.
    Frontend,
    /// The guest: init and the command.
    Guest,
    /// The uplink of one guest, which has the sockets of the host's network.
    Uplink,
}

impl DomainKind {
    /// What it is called in messages.
    pub fn label(self) -> &'static str {
        match self {
            DomainKind::Driver => "driver domain",
            DomainKind::Frontend => "frontend",
            DomainKind::Guest => "guest",
            DomainKind::Uplink => "uplink",
        }
    }

    /// Whether it lives in the sandbox, in a session of its own.
    pub fn is_sandboxed(self) -> bool {
        !matches!(self, DomainKind::Guest)
    }

    /// The subcommand of `ringfence internal` that its inner process runs.
    pub fn subcommand(self) -> &'static str {
        match self {
            DomainKind::Driver => "driver",
            DomainKind::Frontend => "frontend",
            DomainKind::Guest => "guest-init",
            DomainKind::Uplink => "uplink",
        }
    }
}

/// What is needed to start a domain.
#[derive(Debug)]
pub struct Spawn<'a> {
    /// What it is for.
    pub kind: DomainKind,
    /// The command of a guest and its arguments.
    pub command: &'a [OsString],
    /// Descriptors from 3 on that a guest's command is to inherit by number.
    pub inherit: &'a [RawFd],
    /// What the supervisor of a driver domain does afterwards.
    pub aftermath: Option<Aftermath<'a>>,
}

/// What is left to do when a driver domain has ended.
#[derive(Debug)]
pub struct Aftermath<'a> {
    /// The runtime directory.
    pub directory: BorrowedFd<'a>,
    /// The switch's socket in it, removed if it still is the one meant.
    pub socket: SocketFile,
    /// That socket itself, at which the supervisor tells for a moment how the driver domain ended
    /// ([`super::supervisor::ExitReport`]).
    pub listener: BorrowedFd<'a>,
}

/// A socket's name in a directory, and which file it is: another driver domain may have taken
/// the name over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketFile {
    /// Its name.
    pub name: String,
    /// The device it is on.
    pub device: u64,
    /// Its inode.
    pub inode: u64,
}

/// Why a domain could not be started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// A process could not be started.
    #[error("the {kind} could not be started: {source}", kind = kind.label())]
    Start {
        /// Which.
        kind: DomainKind,
        /// Why.
        source: io::Error,
    },
    /// The supervisor says why.
    #[error("the {kind} could not be started: {why}", kind = kind.label())]
    Refused {
        /// Which.
        kind: DomainKind,
        /// Its words.
        why: String,
    },
    /// The supervisor did not answer as it should.
    #[error("the {kind} could not be started: {source}", kind = kind.label())]
    Channel {
        /// Which.
        kind: DomainKind,
        /// What is wrong.
        source: ChannelError,
    },
    /// The user namespace could not be given its ids.
    #[error("the {kind} could not be given its user ids: {source}", kind = kind.label())]
    Maps {
        /// Which.
        kind: DomainKind,
        /// Why.
        source: io::Error,
    },
}

/// A domain that was started. It is ended, and waited for, when this is dropped; except a driver
/// domain, which ends when its last guest leaves.
#[derive(Debug)]
pub struct DomainProcess {
    kind: DomainKind,
    supervisor: Child,
    control: Option<Channel>,
    channel: Channel,
    nested: Option<NestedMaps>,
}

/// The means by which a guest's init gets the id maps of its nested user namespace.
#[derive(Debug)]
pub struct NestedMaps {
    /// Process that writes the maps.
    pub writer: MapWriter,
    /// Channel to the supervisor, for init.
    pub supervisor: Channel,
}

/// What became of a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Which of its two processes ended first, and took the other along.
    pub first: Process,
    /// How that one ended.
    pub ending: Ending,
    /// The last it said on standard error.
    pub stderr_tail: String,
}

/// One of a domain's processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Process {
    /// The one that does the domain's work.
    Inner,
    /// The one that waits for it.
    Supervisor,
}

/// What a supervisor tells while its domain runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The inner process wrote this to standard error.
    Said(String),
    /// The inner process ended.
    Ended(Ended),
}

impl DomainProcess {
    /// Starts a domain. Its inner process runs when this returns, and waits for orders on
    /// [`DomainProcess::channel`].
    ///
    /// To be called from the main thread: a domain is killed when the thread that started it ends.
    ///
    /// # Errors
    ///
    /// [`SpawnError`]; nothing of the domain is left then.
    pub fn start(spawn: &Spawn<'_>) -> Result<DomainProcess, SpawnError> {
        let kind = spawn.kind;
        let fail = |source| SpawnError::Start { kind, source };
        let (control, supervisor_end) = Channel::pair().map_err(fail)?;
        let (channel, inner_end) = Channel::pair().map_err(fail)?;
        let supervisor = spawn_supervisor(spawn, supervisor_end).map_err(fail)?;
        let mut domain =
            DomainProcess { kind, supervisor, control: Some(control), channel, nested: None };
        domain.set_up(spawn, &inner_end)?;
        Ok(domain)
    }

    fn set_up(&mut self, spawn: &Spawn<'_>, inner_end: &Channel) -> Result<(), SpawnError> {
        let kind = self.kind;
        let maps = self.choose_maps().map_err(|source| SpawnError::Maps { kind, source })?;
        let map_writer = if maps.is_some() { MapWriter::Launcher } else { MapWriter::Supervisor };
        let mut fds = vec![inner_end.as_fd()];
        if let Some(aftermath) = &spawn.aftermath {
            fds.extend([aftermath.directory, aftermath.listener]);
        }
        let nested = (kind == DomainKind::Guest).then(Channel::pair).transpose();
        let nested = nested.map_err(|source| SpawnError::Start { kind, source })?;
        fds.extend(nested.iter().map(|(supervisor_end, _)| supervisor_end.as_fd()));
        let socket = spawn.aftermath.as_ref().map(|aftermath| aftermath.socket.clone());
        self.tell(&ToSupervisor::SetUp { map_writer, socket }, &fds)?;
        if let Some(maps) = maps {
            self.hear(&FromSupervisor::Unshared)?;
            maps.write_for(self.supervisor.id())
                .map_err(|source| SpawnError::Maps { kind, source })?;
            self.tell(&ToSupervisor::Mapped, &[])?;
        }
        self.hear(&FromSupervisor::Started)?;
        self.nested = nested.map(|(_, supervisor)| NestedMaps { writer: map_writer, supervisor });
        Ok(())
    }

    /// Takes what a guest's init needs for its nested user namespace.
    pub fn take_nested_maps(&mut self) -> Option<NestedMaps> {
        self.nested.take()
    }

    fn choose_maps(&self) -> io::Result<Option<Maps>> {
        if !ids::may_map_any()? {
            Ok(None)
        } else if self.kind.is_sandboxed() {
            Maps::single_unused(self.supervisor.id())
        } else {
            Maps::identity().map(Some)
        }
    }

    fn control(&self) -> Result<&Channel, SpawnError> {
        let closed = SpawnError::Channel { kind: self.kind, source: ChannelError::Closed };
        self.control.as_ref().ok_or(closed)
    }

    fn tell(&self, order: &ToSupervisor, fds: &[BorrowedFd<'_>]) -> Result<(), SpawnError> {
        match self.control()?.send(order, fds) {
            Ok(()) => Ok(()),
            // It has gone, but may have said why.
            Err(ChannelError::Closed) => self.hear(&FromSupervisor::Started),
            Err(source) => Err(SpawnError::Channel { kind: self.kind, source }),
        }
    }

    fn hear(&self, expected: &FromSupervisor) -> Result<(), SpawnError> {
        let kind = self.kind;
        let (heard, _) = self
            .control()?
            .receive_within::<FromSupervisor>(START_TIMEOUT)
            .map_err(|source| SpawnError::Channel { kind, source })?;
        match heard {
            heard if heard == *expected => Ok(()),
            FromSupervisor::Failed(why) => Err(SpawnError::Refused { kind, why }),
            other => Err(SpawnError::Refused { kind, why: format!("unexpected: {other:?}") }),
        }
    }

    /// The channel to the inner process.
    pub fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Something to poll: readable when [`DomainProcess::next_event`] has news.
    pub fn events(&self) -> BorrowedFd<'_> {
        self.control.as_ref().map_or(self.channel.as_fd(), Channel::as_fd)
    }

    /// What the supervisor told since, if anything. When the supervisor itself is gone, its domain is too.
    pub fn next_event(&self) -> Option<Event> {
        let ended = |ending, stderr_tail| {
            Some(Event::Ended(Ended { first: Process::Inner, ending, stderr_tail }))
        };
        match self.control.as_ref()?.try_receive::<FromSupervisor>() {
            Ok(None) => None,
            Ok(Some((FromSupervisor::Said(text), _))) => Some(Event::Said(text)),
            Ok(Some((FromSupervisor::Ended { ending, stderr_tail }, _))) => {
                ended(ending, stderr_tail)
            }
            Ok(Some((FromSupervisor::Failed(why), _))) => ended(Ending::Unknown, why),
            Ok(Some(_)) | Err(_) => Some(Event::Ended(Ended {
                first: Process::Supervisor,
                ending: self.supervisor_ending(),
                stderr_tail: String::new(),
            })),
        }
    }

    /// How the supervisor ended, which has closed its channel. It stays to be waited for.
    fn supervisor_ending(&self) -> Ending {
        let pid = i32::try_from(self.supervisor.id()).ok().and_then(Pid::from_raw);
        let Some(pid) = pid else { return Ending::Unknown };
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        let deadline = Instant::now() + Duration::from_millis(100);
        loop {
            match rustix::process::waitid(WaitId::Pid(pid), look) {
                Ok(Some(status)) => return Ending::from_wait_id(&status),
                Ok(None) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                _ => return Ending::Unknown,
            }
        }
    }

    /// The process id of the supervisor, the parent of the domain's process 1.
    pub fn supervisor_pid(&self) -> u32 {
        self.supervisor.id()
    }

    /// Waits until the domain has ended by itself; `None` after `timeout`.
    pub fn wait_ended(&self, timeout: Duration) -> Option<Ended> {
        let deadline = Instant::now() + timeout;
        loop {
            match self.next_event() {
                Some(Event::Ended(ended)) => return Some(ended),
                Some(Event::Said(_)) => continue,
                None => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || !wait_readable(self.events(), Some(left)).ok()? {
                return None;
            }
        }
    }

    /// Ends the domain now and waits until its processes are gone.
    fn end(&mut self) {
        let Some(control) = self.control.take() else { return };
        if self.kind == DomainKind::Driver {
            // Others may be using it. If it was never set up, it ends with the channel. It is a
            // child still: if it has ended, nothing of it stays.
            drop(control);
            let _ = self.supervisor.try_wait();
            return;
        }
        // The supervisor ends its domain when this end closes, and itself after that; its own death
        // closes its end.
        let fd = control.into_fd();
        // Nothing is sent from here on, so the supervisor sees the end of the stream.
        let _ = rustix::net::shutdown(&fd, rustix::net::Shutdown::Write);
        if !read_to_end(&fd, END_TIMEOUT) {
            // It is stuck or stopped. Its death kills its domain.
            let _ = self.supervisor.kill();
        }
        let _ = self.supervisor.wait();
    }
}

impl Drop for DomainProcess {
    fn drop(&mut self) {
        self.end();
    }
}

/// Waits until the other end is closed, reading away what is still said; `false` when that takes
/// too long.
fn read_to_end(fd: &OwnedFd, timeout: Duration) -> bool {
    let deadline = Instant::now() + timeout;
    let mut buffer = [0; 512];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match wait_readable(fd, Some(left)) {
            Ok(true) => {}
            Ok(false) | Err(_) => return false,
        }
        match rustix::net::recv(fd, &mut buffer, rustix::net::RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return true,
            Ok(_) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            Err(_) => return true,
        }
    }
}

fn spawn_supervisor(spawn: &Spawn<'_>, control: Channel) -> io::Result<Child> {
    let mut supervisor = Command::new(THIS_PROGRAM);
    supervisor.arg0("ringfence").args(["internal", "keeper", spawn.kind.subcommand()]);
    supervisor.stdin(Stdio::from(control.into_fd()));
    if spawn.kind.is_sandboxed() {
        supervisor.stdout(Stdio::null()).stderr(Stdio::null()).env_clear().current_dir("/");
        // What was handed to this process is not for them.
        let not_theirs = namespaces::inheritable_fds()?;
        return with_inheritable(&not_theirs, false, || supervisor.spawn());
    }
    supervisor.arg("--").args(spawn.command);
    with_inheritable(spawn.inherit, true, || supervisor.spawn())
}

/// Starts something while these descriptors are inherited, or not, and puts that back.
fn with_inheritable(
    fds: &[RawFd],
    inheritable: bool,
    start: impl FnOnce() -> io::Result<Child>,
) -> io::Result<Child> {
    namespaces::set_inheritable(fds, inheritable)?;
    let child = start();
    namespaces::set_inheritable(fds, !inheritable)?;
    child
}
