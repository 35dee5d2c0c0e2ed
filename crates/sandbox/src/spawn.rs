//! Start of a domain from the launcher: [`DomainProcess`] starts the supervisor, gives it the id
//! maps and the inner process's channel, and receives its reports.
//!
//! ```text
//! launcher                       supervisor
//!   SetUp + descriptors   ─────>
//!                         <─────   Unshared    only if the launcher writes the id maps
//!   Mapped                ─────>
//!                         <─────   Started
//!                         <─────   Stderr …    output of the inner process
//!                         <─────   Ended
//! ```
//!
//! Closing the launcher's end of the control channel ends the domain, except for a driver domain.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use ringfence_sys::poll::wait_readable;
use serde::{Deserialize, Serialize};

use super::cgroup::GuestCgroup;
use super::channel::{Channel, ChannelError};
use super::ending::Ending;
use super::ids::{self, MapWriter, Maps};
use super::supervisor::{FromSupervisor, ToSupervisor};
use super::supervisor_process::SupervisorProcess;

/// Path of this program. It stays valid when the program's file is replaced or removed.
pub const THIS_PROGRAM: &str = "/proc/self/exe";

/// Time limit for each report of the supervisor while a domain starts.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for the end of a domain before its supervisor is killed.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// Kinds of processes that get namespaces and a supervisor of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DomainKind {
    /// Backends, hub and switch. Outlives the launcher that started it.
    Driver,
    Frontend,
    /// Guest: init and the command.
    Guest,
    /// Uplink of one guest, which owns the sockets of the host's network.
    Uplink,
    /// Disk of a virtual machine.
    Disk,
    /// Proxy between a virtual machine and a foreign backend.
    Proxy,
    /// Network card of a virtual machine, on a switch or a TAP.
    Card,
    /// Shield between a virtual machine and a foreign backend.
    Shield,
}

impl DomainKind {
    /// All kinds.
    pub const ALL: [DomainKind; 8] = [
        DomainKind::Driver,
        DomainKind::Frontend,
        DomainKind::Guest,
        DomainKind::Uplink,
        DomainKind::Disk,
        DomainKind::Proxy,
        DomainKind::Card,
        DomainKind::Shield,
    ];

    /// Returns the role's name in messages.
    pub fn label(self) -> &'static str {
        match self {
            DomainKind::Driver => "driver domain",
            DomainKind::Frontend => "frontend",
            DomainKind::Guest => "guest",
            DomainKind::Uplink => "uplink",
            DomainKind::Disk => "disk",
            DomainKind::Proxy => "proxy",
            DomainKind::Card => "card",
            DomainKind::Shield => "shield",
        }
    }

    /// Returns `true` if the inner process is sandboxed. It has no controlling terminal.
    pub fn is_sandboxed(self) -> bool {
        !matches!(self, DomainKind::Guest)
    }

    /// Returns the subcommand of `ringfence internal` that the inner process runs.
    pub fn subcommand(self) -> &'static str {
        match self {
            DomainKind::Driver => "driver",
            DomainKind::Frontend => "frontend",
            DomainKind::Guest => "guest-init",
            DomainKind::Uplink => "uplink",
            DomainKind::Disk => "disk",
            DomainKind::Proxy => "proxy",
            DomainKind::Card => "card",
            DomainKind::Shield => "shield",
        }
    }

    /// Returns the role whose inner process runs this subcommand.
    pub(super) fn from_subcommand(subcommand: &str) -> Option<DomainKind> {
        DomainKind::ALL.into_iter().find(|kind| kind.subcommand() == subcommand)
    }
}

/// Parameters for starting a domain.
#[derive(Debug)]
pub struct Spawn<'a> {
    pub kind: DomainKind,
    /// Command of a guest, with its arguments.
    pub command: &'a [OsString],
    /// Descriptors from 3 on that a guest's command inherits by number.
    pub inherit: &'a [RawFd],
    /// Cleanup by the supervisor of a driver domain.
    pub cleanup: Option<Cleanup<'a>>,
    /// Cgroup of a guest. Its supervisor starts init there and removes it.
    pub cgroup: Option<&'a GuestCgroup>,
}

/// Cleanup after a driver domain has ended, carried out by its supervisor.
#[derive(Debug)]
pub struct Cleanup<'a> {
    pub directory: BorrowedFd<'a>,
    /// Socket of the switch in the directory. It is removed only if the name still denotes this
    /// file.
    pub socket: SocketFile,
    /// The listening socket itself. The supervisor answers connections there for a short time with
    /// an [`super::supervisor::ExitReport`].
    pub listener: BorrowedFd<'a>,
}

/// Name of a socket in a directory, and the identity of the file. Another driver domain may have
/// reused the name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketFile {
    pub name: String,
    /// Device number of the file system.
    pub device: u64,
    /// Inode number of the socket file.
    pub inode: u64,
}

/// Errors that prevent a domain from starting.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// A process could not be started.
    #[error("the {kind} could not be started: {source}", kind = kind.label())]
    Start { kind: DomainKind, source: io::Error },
    /// The supervisor reported a failure.
    #[error("the {kind} could not be started: {why}", kind = kind.label())]
    Refused {
        kind: DomainKind,
        /// Reason, as the supervisor reported it.
        why: String,
    },
    /// The supervisor did not answer, or not as expected.
    #[error("the {kind} could not be started: {source}", kind = kind.label())]
    Channel { kind: DomainKind, source: ChannelError },
    /// The id maps of the user namespace could not be chosen or written.
    #[error("the {kind} could not be given its user ids: {source}", kind = kind.label())]
    Maps { kind: DomainKind, source: io::Error },
}

/// A running domain. Dropping it ends the domain and waits for its processes, except for a driver
/// domain, which ends when its last guest leaves.
#[derive(Debug)]
pub struct DomainProcess {
    kind: DomainKind,
    supervisor: SupervisorProcess,
    control: Option<Channel>,
    channel: Channel,
    /// Id maps that the launcher has yet to write.
    maps: Option<Maps>,
    nested: Option<NestedMaps>,
}

/// Access to the writer of the id maps of a guest init's nested user namespace.
#[derive(Debug)]
pub struct NestedMaps {
    /// Process that writes the maps.
    pub writer: MapWriter,
    /// Channel to the supervisor, for init.
    pub supervisor: Channel,
}

/// Exit report of a supervisor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Process that ended first. The other one ended as a consequence.
    pub first: Process,
    /// Way in which that process ended.
    pub ending: Ending,
    /// Last part of the inner process's standard error.
    pub stderr_tail: String,
    /// Number of a guest's processes that the kernel killed for lack of memory, if its cgroup counted them.
    pub killed_for_memory: Option<u64>,
}

/// One of a domain's two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Process {
    Inner,
    Supervisor,
}

/// Report of a supervisor while its domain runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The inner process wrote this to standard error.
    Stderr(String),
    Ended(Ended),
}

impl DomainProcess {
    /// Starts a domain. When this returns, its inner process runs and waits for a message on
    /// [`DomainProcess::channel`].
    ///
    /// Call this from the main thread: the kernel kills a domain when the thread that started it
    /// ends.
    ///
    /// # Errors
    ///
    /// [`SpawnError`]; all processes of the domain have ended then.
    pub fn start(spawn: &Spawn<'_>) -> Result<DomainProcess, SpawnError> {
        let mut domain = DomainProcess::begin(spawn)?;
        domain.complete()?;
        Ok(domain)
    }

    /// Begins to start a domain, as [`DomainProcess::start`] does, without waiting for its supervisor. Several domains
    /// start at the same time this way. Call [`DomainProcess::complete`] before any other method.
    ///
    /// # Errors
    ///
    /// [`SpawnError`]; all processes of the domain have ended then.
    pub fn begin(spawn: &Spawn<'_>) -> Result<DomainProcess, SpawnError> {
        let kind = spawn.kind;
        let fail = |source| SpawnError::Start { kind, source };
        let (control, supervisor_end) = Channel::pair().map_err(fail)?;
        let (channel, inner_end) = Channel::pair().map_err(fail)?;
        let supervisor = SupervisorProcess::start(spawn, supervisor_end).map_err(fail)?;
        let control = Some(control);
        let mut domain =
            DomainProcess { kind, supervisor, control, channel, maps: None, nested: None };
        domain.set_up(spawn, &inner_end)?;
        Ok(domain)
    }

    fn set_up(&mut self, spawn: &Spawn<'_>, inner_end: &Channel) -> Result<(), SpawnError> {
        let kind = self.kind;
        self.maps = self.choose_maps().map_err(|source| SpawnError::Maps { kind, source })?;
        let map_writer =
            if self.maps.is_some() { MapWriter::Launcher } else { MapWriter::Supervisor };
        let mut fds = vec![inner_end.as_fd()];
        if let Some(cleanup) = &spawn.cleanup {
            fds.extend([cleanup.directory, cleanup.listener]);
        }
        let nested = (kind == DomainKind::Guest).then(Channel::pair).transpose();
        let nested = nested.map_err(|source| SpawnError::Start { kind, source })?;
        fds.extend(nested.iter().map(|(supervisor_end, _)| supervisor_end.as_fd()));
        let socket = spawn.cleanup.as_ref().map(|cleanup| cleanup.socket.clone());
        let (cgroups, directories): (Vec<_>, Vec<_>) =
            spawn.cgroup.into_iter().flat_map(GuestCgroup::cgroups).unzip();
        fds.extend(directories);
        self.send_command(&ToSupervisor::SetUp { map_writer, socket, cgroups }, &fds)?;
        self.nested = nested.map(|(_, supervisor)| NestedMaps { writer: map_writer, supervisor });
        Ok(())
    }

    /// Continues the start after [`DomainProcess::begin`]: waits until the supervisor needs its id maps, and writes them.
    /// The inner process starts then. No effect if the supervisor writes them, or the second time.
    ///
    /// # Errors
    ///
    /// [`SpawnError`]. Drop the domain then.
    pub fn map_ids(&mut self) -> Result<(), SpawnError> {
        let kind = self.kind;
        if let Some(maps) = self.maps.take() {
            self.expect_report(&FromSupervisor::Unshared)?;
            maps.write_for(self.supervisor.id())
                .map_err(|source| SpawnError::Maps { kind, source })?;
            self.send_command(&ToSupervisor::Mapped, &[])?;
        }
        Ok(())
    }

    /// Completes the start after [`DomainProcess::begin`]: writes the id maps, unless [`DomainProcess::map_ids`] has, and
    /// waits until the inner process runs.
    ///
    /// # Errors
    ///
    /// [`SpawnError`]. Drop the domain then.
    pub fn complete(&mut self) -> Result<(), SpawnError> {
        self.map_ids()?;
        self.expect_report(&FromSupervisor::Started)
    }

    /// Takes the means by which a guest's init gets the maps of its nested user namespace. `None`
    /// for other domains, and after the first call.
    pub fn take_nested_maps(&mut self) -> Option<NestedMaps> {
        self.nested.take()
    }

    fn choose_maps(&self) -> io::Result<Option<Maps>> {
        if !ids::may_map_any()? {
            Ok(None)
        } else if self.kind.is_sandboxed() {
            Maps::single_unused(self.supervisor.id())
        } else {
            // The supervisor can map the only id of this namespace by itself. The launcher could not always: in a PID
            // namespace without a /proc of its own, as in pasta, it does not find the supervisor there.
            Maps::identity().map(|maps| (!maps.have_one_id()).then_some(maps))
        }
    }

    fn control(&self) -> Result<&Channel, SpawnError> {
        let closed = SpawnError::Channel { kind: self.kind, source: ChannelError::Closed };
        self.control.as_ref().ok_or(closed)
    }

    fn send_command(
        &self,
        command: &ToSupervisor,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), SpawnError> {
        match self.control()?.send(command, fds) {
            Ok(()) => Ok(()),
            // The supervisor has ended. Its last message may tell the reason.
            Err(ChannelError::Closed) => self.expect_report(&FromSupervisor::Started),
            Err(source) => Err(SpawnError::Channel { kind: self.kind, source }),
        }
    }

    fn expect_report(&self, expected: &FromSupervisor) -> Result<(), SpawnError> {
        let kind = self.kind;
        let (report, _) = self
            .control()?
            .receive_within::<FromSupervisor>(START_TIMEOUT)
            .map_err(|source| SpawnError::Channel { kind, source })?;
        match report {
            report if report == *expected => Ok(()),
            FromSupervisor::Failed(why) => Err(SpawnError::Refused { kind, why }),
            other => Err(SpawnError::Refused { kind, why: format!("unexpected: {other:?}") }),
        }
    }

    /// Returns the channel to the inner process.
    pub fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Returns the descriptor to poll: readable when [`DomainProcess::next_event`] has an event.
    pub fn events(&self) -> BorrowedFd<'_> {
        self.control.as_ref().map_or(self.channel.as_fd(), Channel::as_fd)
    }

    /// Returns the next report of the supervisor, if there is one. A supervisor that is gone counts
    /// as the end of its domain.
    pub fn next_event(&self) -> Option<Event> {
        let ended = |first, ending, stderr_tail, killed_for_memory| {
            Some(Event::Ended(Ended { first, ending, stderr_tail, killed_for_memory }))
        };
        match self.control.as_ref()?.try_receive::<FromSupervisor>() {
            Ok(None) => None,
            Ok(Some((FromSupervisor::Stderr(text), _))) => Some(Event::Stderr(text)),
            Ok(Some((FromSupervisor::Ended { ending, stderr_tail, killed_for_memory }, _))) => {
                ended(Process::Inner, ending, stderr_tail, killed_for_memory)
            }
            Ok(Some((FromSupervisor::Failed(why), _))) => {
                ended(Process::Inner, Ending::Unknown, why, None)
            }
            Ok(Some(_)) | Err(_) => {
                ended(Process::Supervisor, self.supervisor.ending(), String::new(), None)
            }
        }
    }

    /// Returns the process id of the supervisor, the parent of the domain's process 1.
    pub fn supervisor_pid(&self) -> u32 {
        self.supervisor.id()
    }

    /// Blocks until the domain ends by itself. Returns `None` after `timeout`.
    pub fn wait_ended(&self, timeout: Duration) -> Option<Ended> {
        let deadline = Instant::now() + timeout;
        loop {
            match self.next_event() {
                Some(Event::Ended(ended)) => return Some(ended),
                Some(Event::Stderr(_)) => continue,
                None => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || !wait_readable(self.events(), Some(left)).ok()? {
                return None;
            }
        }
    }

    /// Tells the supervisor to end the domain, and does not wait. Several domains end at the same time this way. No
    /// effect on a driver domain, which other guests may use.
    pub fn begin_end(&self) {
        if self.kind != DomainKind::Driver
            && let Some(control) = &self.control
        {
            // The supervisor reads the end of the stream. Only a closed channel fails.
            let _ = rustix::net::shutdown(control, rustix::net::Shutdown::Write);
        }
    }

    /// Ends the domain and waits until its processes are gone.
    fn terminate(&mut self) {
        self.begin_end();
        let Some(control) = self.control.take() else { return };
        if self.kind == DomainKind::Driver {
            // Other guests may use it. If it was never set up, the closed channel ends it. It is
            // still a child of this process: reap it if it has ended.
            drop(control);
            self.supervisor.try_wait();
            return;
        }
        // The supervisor ends its domain and then itself. The kernel closes its end then.
        if !read_to_end(&control.into_fd(), END_TIMEOUT) {
            // The supervisor hangs or is stopped. Its death ends its domain.
            self.supervisor.kill();
        }
        self.supervisor.wait();
    }
}

impl Drop for DomainProcess {
    fn drop(&mut self) {
        self.terminate();
    }
}

/// Reads and discards data until the other end is closed. Returns `false` after `timeout`.
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
