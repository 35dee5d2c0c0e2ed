//! Supervisor process of a domain: creates the namespaces, starts the inner process, reports its
//! end.
//!
//! The crate's documentation ([`crate`]) explains why a domain needs it. The steps of [`main`]:
//!
//! 1. Receive [`ToSupervisor::SetUp`] and unshare the user and PID namespaces.
//! 2. Have the id maps written, by itself or by the launcher.
//! 3. Start the inner process, and forward its standard error to the launcher.
//! 4. When it ends, or the launcher closes the channel, report the end and clean up.
//!
//! The supervisor keeps no descriptor that its domain works with. Only a guest's supervisor has the
//! user's terminal and environment.

use std::ffi::OsString;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

use ringfence_sys::namespaces::{self, Fresh};
use ringfence_sys::poll::wait_any;
use ringfence_sys::terminal;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::net::SocketFlags;
use rustix::process::{DumpableBehavior, Pid, PidfdFlags, Signal, WaitOptions};
use rustix::thread::CapabilitySet;
use serde::{Deserialize, Serialize};

use super::cgroup::{CgroupEntry, CgroupSet};
use super::channel::{Channel, ChannelError, expect_fds};
use super::ending::{Ending, die_with_parent};
use super::ids::{MapWriter, Maps, OwnIds};
use super::namespace_settings::Obstacle;
use super::spawn::{DomainKind, SocketFile, THIS_PROGRAM};
use super::{limits, signals};

/// Time limit for a command of the launcher.
const SETUP_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for which a supervisor reports the end of its driver domain to launchers that connect.
const EXIT_REPORT_TIME: Duration = Duration::from_secs(1);
/// Maximum length of the stderr tail in bytes.
const STDERR_TAIL_MAX: usize = 4096;
/// Time limit for the lock of the runtime directory. After it, the socket file is left for the next
/// launcher to remove.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// Commands of the launcher.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToSupervisor {
    /// Create the namespaces. Comes with the inner process's channel. A driver domain's supervisor
    /// also gets the runtime directory and the switch's listening socket. A guest's gets one end of
    /// the channel for the id maps of the nested user namespace ([`Nested`]), and the directories of its cgroups.
    SetUp {
        map_writer: MapWriter,
        /// Socket file to remove after a driver domain has ended.
        socket: Option<SocketFile>,
        /// Cgroups of a guest.
        cgroups: Vec<CgroupEntry>,
    },
    /// The launcher has written the id maps.
    Mapped,
}

/// Messages between a guest's init and its supervisor. Init enters a nested user namespace, and
/// only a process of the outer one may write its id maps.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Nested {
    /// Init has entered the nested namespace and waits for the maps.
    Unshared,
    Mapped,
    /// The maps could not be written, for this reason.
    Failed(String),
}

/// Messages from a supervisor to the process that started it.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromSupervisor {
    /// The user namespace has been created and waits for its maps.
    Unshared,
    /// The inner process has been started.
    Started,
    /// The inner process wrote this to standard error. Dropped if the launcher does not read.
    Stderr(String),
    /// The inner process ended, and with it all processes of its PID namespace.
    Ended {
        ending: Ending,
        stderr_tail: String,
        /// Number of a guest's processes that the kernel killed for lack of memory.
        killed_for_memory: Option<u64>,
    },
    /// Start of the domain failed for this reason.
    Failed(String),
}

/// Exit report of a driver domain. The supervisor sends it to each launcher that connects to the
/// switch's socket shortly after the end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitReport {
    pub ending: Ending,
    /// Last part of the inner process's standard error.
    pub stderr_tail: String,
}

/// Main function of a supervisor process that executed this program. Returns the exit status.
pub fn main(kind: DomainKind, command: &[OsString]) -> u8 {
    Channel::with_stdin(|control| serve(kind, command, control))
}

/// Main function of a supervisor process that the launcher forked, with the control channel. The first word is the
/// subcommand of its inner process ([`DomainKind::subcommand`]), the others are the command. Returns the exit status.
pub(super) fn forked_main(control: OwnedFd, words: &[OsString]) -> u8 {
    let kind = words.first().and_then(|word| DomainKind::from_subcommand(word.to_str()?));
    let Some(kind) = kind else { return super::ending::STATUS_FAILED };
    let control = Channel::from_fd(control);
    match leave_surroundings(kind) {
        Ok(()) => serve(kind, &words[1..], &control),
        Err(error) => {
            let error = SupervisorError::system("preparing the supervisor")(error);
            control.send_or_drop(&FromSupervisor::Failed(error.to_string()));
            super::ending::STATUS_FAILED
        }
    }
}

/// Gives a forked supervisor the surroundings of one that was executed: no standard input; in front of a sandboxed
/// domain no output and no working directory of the user either.
fn leave_surroundings(kind: DomainKind) -> io::Result<()> {
    let null = std::fs::File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    if kind.is_sandboxed() {
        rustix::stdio::dup2_stdout(&null)?;
        rustix::stdio::dup2_stderr(&null)?;
        rustix::process::chdir("/")?;
    }
    Ok(())
}

fn serve(kind: DomainKind, command: &[OsString], control: &Channel) -> u8 {
    match supervise(kind, command, control.as_fd(), control) {
        Ok(ending) => ending.exit_status(),
        Err(error) => {
            // Never block on a stuck launcher: the supervisor and its domain must still end.
            control.send_or_drop(&FromSupervisor::Failed(error.to_string()));
            super::ending::STATUS_FAILED
        }
    }
}

fn supervise(
    kind: DomainKind,
    command: &[OsString],
    control_fd: BorrowedFd<'_>,
    control: &Channel,
) -> Result<Ending, SupervisorError> {
    prepare_self(kind)?;
    let (order, fds) = control.receive_within::<ToSupervisor>(SETUP_TIMEOUT)?;
    let ToSupervisor::SetUp { map_writer, socket, cgroups } = order else {
        return Err(SupervisorError::Protocol);
    };
    let mut own_cgroups = CgroupSet::default();
    let (inner_channel, cleanup, nested) = match socket {
        None if kind == DomainKind::Guest => {
            let mut fds = fds.into_vec().into_iter();
            let (Some(inner), Some(nested)) = (fds.next(), fds.next()) else {
                return Err(SupervisorError::Protocol);
            };
            own_cgroups = CgroupSet(cgroups.into_iter().zip(fds).collect());
            (inner, None, Some(Channel::from_fd(nested)))
        }
        None => {
            let [inner] = expect_fds(fds)?;
            (inner, None, None)
        }
        Some(socket) => {
            let [inner, directory, listener] = expect_fds(fds)?;
            (inner, Some(Cleanup { socket, directory, listener }), None)
        }
    };
    // The supervisor of a guest with cgroups removes them after the launcher was killed. It is continued if it is stopped,
    // reads the end of its channel, and ends the guest.
    let signal = if own_cgroups.is_empty() { Signal::KILL } else { Signal::CONT };
    enter_namespaces(kind, map_writer, signal, control)?;
    let inner = start_inner(kind, command, inner_channel, &own_cgroups)?;
    control.send(&FromSupervisor::Started, &[])?;
    ringfence_sys::code::unmap();
    let (ending, stderr_tail) = watch(kind, inner, control_fd, control, nested)?;
    if let Some(cleanup) = cleanup {
        cleanup.settle(&ExitReport { ending, stderr_tail: stderr_tail.clone() });
    }
    // The launcher cannot ask any more: the cgroups are removed with this process.
    let killed_for_memory = own_cgroups.killed_for_memory();
    control.send_or_drop(&FromSupervisor::Ended { ending, stderr_tail, killed_for_memory });
    Ok(ending)
}

/// Inner process of a domain.
struct Inner {
    pid: Pid,
    stderr: Option<ChildStderr>,
}

#[derive(Debug, thiserror::Error)]
enum SupervisorError {
    #[error("{what}: {source}")]
    System { what: &'static str, source: io::Error },
    #[error(
        "this system does not allow it to make a user namespace ({0}): {why}",
        why = Obstacle::of(.0).sentence()
    )]
    NoUserNamespaces(io::Error),
    #[error("{}", Obstacle::root_without_setfcap().sentence())]
    RootWithoutCapability,
    #[error(
        "no more namespaces may be made ({0}): {why}",
        why = Obstacle::of(.0).sentence()
    )]
    TooManyNamespaces(io::Error),
    #[error("an order that does not belong here")]
    Protocol,
    #[error("{0}")]
    Channel(#[from] ChannelError),
}

impl SupervisorError {
    fn system(what: &'static str) -> impl Fn(io::Error) -> SupervisorError {
        move |source| SupervisorError::System { what, source }
    }
}

fn prepare_self(kind: DomainKind) -> Result<(), SupervisorError> {
    let fail = SupervisorError::system("preparing the supervisor");
    // The terminal signals the command itself; the supervisor only waits for it.
    signals::block_all().map_err(&fail)?;
    let name = match kind {
        DomainKind::Driver => c"rf-keep-driver",
        DomainKind::Frontend => c"rf-keep-front",
        DomainKind::Guest => c"rf-keep-guest",
        DomainKind::Uplink => c"rf-keep-uplink",
        DomainKind::Disk => c"rf-keep-disk",
        DomainKind::Proxy => c"rf-keep-proxy",
        DomainKind::Card => c"rf-keep-card",
        DomainKind::Shield => c"rf-keep-shield",
    };
    rustix::thread::set_name(name).map_err(|errno| fail(errno.into()))?;
    match kind {
        DomainKind::Guest => {}
        DomainKind::Uplink
        | DomainKind::Disk
        | DomainKind::Proxy
        | DomainKind::Card
        | DomainKind::Shield => {
            leave_terminal().map_err(&fail)?;
        }
        DomainKind::Driver | DomainKind::Frontend => {
            rustix::process::setsid().map_err(|errno| fail(errno.into()))?;
        }
    }
    if kind == DomainKind::Driver {
        limits::lift();
    } else {
        die_with_parent().map_err(&fail)?;
    }
    Ok(())
}

/// Leaves the terminal and the process group of its keys, but stays in the launcher's session if possible. The kernel
/// divides the processors among sessions first, and an uplink works for the command of this one.
fn leave_terminal() -> io::Result<()> {
    if terminal::detach().unwrap_or(false) {
        rustix::process::setpgid(None, None)?;
    } else {
        rustix::process::setsid()?;
    }
    Ok(())
}

fn enter_namespaces(
    kind: DomainKind,
    map_writer: MapWriter,
    with_launcher: Signal,
    control: &Channel,
) -> Result<(), SupervisorError> {
    let own = OwnIds::current();
    let is_root = rustix::process::geteuid().is_root();
    namespaces::unshare(Fresh::UserAndPid).map_err(|error| match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EUSERS) => SupervisorError::TooManyNamespaces(error),
        _ => SupervisorError::NoUserNamespaces(error),
    })?;
    match map_writer {
        MapWriter::Supervisor => own.map_to_root().map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied if is_root => SupervisorError::RootWithoutCapability,
            _ => SupervisorError::NoUserNamespaces(error),
        })?,
        MapWriter::Launcher => {
            control.send(&FromSupervisor::Unshared, &[])?;
            let (order, _) = control.receive_within::<ToSupervisor>(SETUP_TIMEOUT)?;
            if order != ToSupervisor::Mapped {
                return Err(SupervisorError::Protocol);
            }
        }
    }
    if kind != DomainKind::Driver {
        // Entering a user namespace cleared the death signal. If the launcher ended before this
        // call, its end of the channel is closed, and `watch` ends the domain.
        rustix::process::set_parent_process_death_signal(Some(with_launcher))
            .map_err(|errno| SupervisorError::system("PR_SET_PDEATHSIG")(errno.into()))?;
    }
    if kind.is_sandboxed() {
        keep_capabilities_over_exec().map_err(SupervisorError::system("raising capabilities"))?;
        rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
            .map_err(|errno| SupervisorError::system("PR_SET_DUMPABLE")(errno.into()))?;
    }
    Ok(())
}

/// Lets the inner process keep its capabilities in the new user namespace across `execve`, also if
/// it is not root there. It needs them to build its sandbox, which drops them.
fn keep_capabilities_over_exec() -> io::Result<()> {
    let mut sets = rustix::thread::capabilities(None)?;
    sets.inheritable = sets.permitted;
    rustix::thread::set_capabilities(None, sets)?;
    for bit in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << bit);
        if sets.permitted.contains(capability) {
            rustix::thread::configure_capability_in_ambient_set(capability, true)?;
        }
    }
    Ok(())
}

fn start_inner(
    kind: DomainKind,
    command: &[OsString],
    channel: OwnedFd,
    cgroups: &CgroupSet,
) -> Result<Inner, SupervisorError> {
    let mut inner = Command::new(THIS_PROGRAM);
    inner.arg0("ringfence").args(["internal", kind.subcommand()]).stdin(Stdio::from(channel));
    if kind.is_sandboxed() {
        // A forked supervisor has the launcher's environment, which is not for the domain.
        inner.stdout(Stdio::null()).stderr(Stdio::piped()).env_clear();
    } else {
        inner.arg("--").args(command);
    }
    let fail = SupervisorError::system("starting the inner process");
    if cgroups.is_empty() {
        let child = inner.spawn().map_err(fail)?;
        return Ok(Inner { pid: pid_of(&child)?, stderr: child.stderr });
    }
    let started = cgroups.start(|| {
        let error = inner.exec();
        eprintln!("ringfence: starting the guest's init: {error}");
        super::ending::STATUS_FAILED
    });
    // Where the kernel or a seccomp list refuses to start it there, it is moved.
    let is_in_unified = started.is_ok();
    let pid = match started {
        Ok(pid) => pid,
        Err(_) => pid_of(&inner.spawn().map_err(&fail)?)?,
    };
    if let Err(error) = cgroups.enter(pid, is_in_unified) {
        // It is this process's child, and waits for its orders.
        let _ = rustix::process::kill_process(pid, Signal::KILL);
        let _ = rustix::process::waitpid(Some(pid), WaitOptions::empty());
        return Err(SupervisorError::system("the guest's cgroup")(error));
    }
    Ok(Inner { pid, stderr: None })
}

fn pid_of(child: &Child) -> Result<Pid, SupervisorError> {
    i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(SupervisorError::Protocol)
}

/// Waits for the inner process and forwards its standard error. Ends it when the launcher is gone.
fn watch(
    kind: DomainKind,
    mut inner: Inner,
    control_fd: BorrowedFd<'_>,
    control: &Channel,
    mut nested: Option<Channel>,
) -> Result<(Ending, String), SupervisorError> {
    let fail = SupervisorError::system("waiting for the inner process");
    let pid = inner.pid;
    let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())
        .map_err(|errno| fail(errno.into()))?;
    let mut stderr = inner.stderr.take();
    let mut tail = StderrTail::default();
    let mut launcher_is_there = true;
    loop {
        let mut fds = vec![PollFd::new(&pidfd, PollFlags::IN)];
        if launcher_is_there {
            fds.push(PollFd::new(&control_fd, PollFlags::IN));
        }
        let stderr_at = fds.len();
        if let Some(stderr) = &stderr {
            fds.push(PollFd::new(stderr, PollFlags::IN));
        }
        let nested_at = fds.len();
        if let Some(nested) = &nested {
            fds.push(PollFd::new(nested, PollFlags::IN));
        }
        wait_any(&mut fds, None).map_err(&fail)?;
        let is_ready = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
        let (ended, launcher_event) = (is_ready(0), launcher_is_there && is_ready(1));
        let has_output = stderr.is_some() && is_ready(stderr_at);
        let unshared = nested.is_some() && is_ready(nested_at);
        // Init sends one request, before the guest's command runs.
        if let Some(nested) = nested.take_if(|_| unshared) {
            map_nested(&nested, pid.as_raw_nonzero().get().unsigned_abs());
        }
        if has_output && !tail.read_from(&mut stderr, control) {
            stderr = None;
        }
        if ended {
            break;
        }
        if launcher_event {
            // No further command exists, so this is the end of the stream or a protocol error.
            launcher_is_there = false;
            if kind != DomainKind::Driver {
                // It is not reaped, so the number is still its own.
                rustix::process::kill_process(pid, Signal::KILL).map_err(|e| fail(e.into()))?;
            }
        }
    }
    while stderr.is_some() && tail.read_from(&mut stderr, control) {}
    let status =
        rustix::io::retry_on_intr(|| rustix::process::waitpid(Some(pid), WaitOptions::empty()))
            .map_err(|errno| fail(errno.into()))?;
    let ending = status.map_or(Ending::Unknown, |(_, status)| Ending::from_wait(status));
    Ok((ending, tail.into_text()))
}

/// Maps every id of this user namespace to itself in the nested one of a guest's init.
fn map_nested(nested: &Channel, init: u32) {
    let answer = match nested.try_receive::<Nested>() {
        Ok(Some((Nested::Unshared, _))) => match Maps::identity().and_then(|m| m.write_for(init)) {
            Ok(()) => Nested::Mapped,
            Err(error) => Nested::Failed(error.to_string()),
        },
        // Init wrote the maps itself, or has ended.
        _ => return,
    };
    nested.send_or_drop(&answer);
}

/// Last part of the inner process's standard error.
#[derive(Default)]
struct StderrTail {
    tail: Vec<u8>,
}

impl StderrTail {
    /// Reads once. Returns `false` at the end of the stream. Call this only if data can be read or
    /// the writer is gone; it blocks otherwise.
    fn read_from(&mut self, stderr: &mut Option<ChildStderr>, control: &Channel) -> bool {
        let mut buffer = [0; STDERR_TAIL_MAX];
        let Some(length) = stderr.as_mut().and_then(|stderr| stderr.read(&mut buffer).ok()) else {
            return false;
        };
        let tail = &buffer[..length];
        self.tail.extend_from_slice(tail);
        let surplus = self.tail.len().saturating_sub(STDERR_TAIL_MAX);
        self.tail.drain(..surplus);
        if length > 0 {
            control
                .send_or_drop(&FromSupervisor::Stderr(String::from_utf8_lossy(tail).into_owned()));
        }
        length > 0
    }

    fn into_text(self) -> String {
        String::from_utf8_lossy(&self.tail).into_owned()
    }
}

/// Cleanup after a driver domain has ended.
struct Cleanup {
    socket: SocketFile,
    directory: OwnedFd,
    listener: OwnedFd,
}

impl Cleanup {
    fn settle(self, exit_report: &ExitReport) {
        // After an orderly end no guest is attached, so no launcher asks.
        if exit_report.ending != Ending::Exited(0) {
            self.report_end(exit_report);
        }
        // No process is left to report a failure to. The next launcher removes a socket file at
        // which no process listens.
        let _ = remove_socket(&self.directory, &self.socket);
    }

    /// Sends the report to each launcher that connects within [`EXIT_REPORT_TIME`]. A launcher that
    /// wants to attach gets the report and a closed connection, and tries again.
    fn report_end(&self, exit_report: &ExitReport) {
        let until = Instant::now() + EXIT_REPORT_TIME;
        // A driver domain that came far enough has set this already.
        let _ = rustix::io::ioctl_fionbio(&self.listener, true);
        loop {
            let mut fds = [PollFd::new(&self.listener, PollFlags::IN)];
            if !matches!(wait_any(&mut fds, Some(until)), Ok(1..)) {
                return;
            }
            let accepted = rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC);
            if let Ok(launcher) = accepted {
                Channel::from_fd(launcher).send_or_drop(exit_report);
            }
            if Instant::now() >= until {
                return;
            }
        }
    }
}

/// Removes the socket file, unless another driver domain has reused its name.
fn remove_socket(directory: &OwnedFd, socket: &SocketFile) -> io::Result<()> {
    // A file lock belongs to an open file description, and the launcher may hold one on this
    // description. Open the directory again.
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
    let own = rustix::fs::openat(directory, c".", flags, Mode::empty())?;
    let deadline = Instant::now() + LOCK_TIMEOUT;
    while rustix::fs::flock(&own, FlockOperation::NonBlockingLockExclusive).is_err() {
        if Instant::now() >= deadline {
            return Err(io::ErrorKind::TimedOut.into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let stat = rustix::fs::statat(&own, &socket.name, AtFlags::SYMLINK_NOFOLLOW)?;
    if (stat.st_dev, stat.st_ino) == (socket.device, socket.inode) {
        rustix::fs::unlinkat(&own, &socket.name, AtFlags::empty())?;
    }
    Ok(())
}
