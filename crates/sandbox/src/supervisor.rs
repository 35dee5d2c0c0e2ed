//! The keeper: makes the namespaces of a domain, starts its inner process, and waits.
//!
//! See [`super`] for why it exists. It holds nothing of what its domain works with: no
//! descriptor of the domain's, no terminal (but a guest's), no environment (but a guest's).

use std::ffi::OsString;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ringfence_sys::namespaces::{self, Fresh};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::net::SocketFlags;
use rustix::process::{DumpableBehavior, Pid, PidfdFlags, WaitOptions};
use rustix::thread::CapabilitySet;
use serde::{Deserialize, Serialize};

use super::channel::{Channel, ChannelError, expect_fds};
use super::ids::{MapWriter, Maps, OwnIds};
use super::spawn::{DomainKind, SocketFile, THIS_PROGRAM};
use super::{Ending, die_with_parent, limits, signals};
use ringfence_sys::poll::wait_any;

/// How long the launcher may take to give its orders.
const SETUP_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a keeper tells launchers how their driver domain ended.
const EXIT_REPORT_TIME: Duration = Duration::from_millis(300);
/// How much of what the inner process says last is kept, in bytes.
const STDERR_TAIL_MAX: usize = 4096;
/// How long the runtime directory's lock is waited for before the socket file is left to the
/// next launcher to remove.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// What the launcher orders.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToSupervisor {
    /// Make the namespaces. With the inner process's channel; for a driver domain also the runtime
    /// directory and the switch's listening socket; for a guest one end of the channel on which its init
    /// has the id maps of its nested user namespace written ([`Nested`]).
    SetUp {
        /// Who writes the id maps.
        map_writer: MapWriter,
        /// What to remove in the end.
        socket: Option<SocketFile>,
    },
    /// The id maps are written.
    Mapped,
}

/// Messages between a guest's init and its keeper: init enters a nested user namespace, whose id maps only
/// a process of the outer one may write.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Nested {
    /// Init is in the nested namespace and waits for its maps.
    Unshared,
    /// The maps are written.
    Mapped,
    /// They could not be written.
    Failed(String),
}

/// What the keeper reports.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromSupervisor {
    /// The user namespace waits for its maps.
    Unshared,
    /// The inner process runs.
    Started,
    /// The inner process wrote this to standard error. Dropped when nobody reads it in time.
    Said(String),
    /// The inner process ended, and everything else in its PID namespace with it.
    Ended {
        /// How.
        ending: Ending,
        /// The end of what it wrote to standard error.
        stderr_tail: String,
    },
    /// It could not be started.
    Failed(String),
}

/// How a driver domain ended: what a keeper sends to each launcher that connects to the switch's
/// socket afterwards, whose guest has just lost it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExitReport {
    /// How.
    pub ending: Ending,
    /// The end of what it wrote to standard error.
    pub stderr_tail: String,
}

/// Runs as the keeper of a domain; returns the exit status.
pub fn main(kind: DomainKind, command: &[OsString]) -> u8 {
    Channel::with_stdin(|control| match keep(kind, command, control.as_fd(), control) {
        Ok(ending) => ending.exit_status(),
        Err(error) => {
            // A launcher that does not listen must not keep it from ending, and what it keeps with it.
            control.send_or_drop(&FromSupervisor::Failed(error.to_string()));
            super::STATUS_FAILED
        }
    })
}

fn keep(
    kind: DomainKind,
    command: &[OsString],
    control_fd: BorrowedFd<'_>,
    control: &Channel,
) -> Result<Ending, SupervisorError> {
    prepare_self(kind)?;
    let (order, fds) = control.receive_within::<ToSupervisor>(SETUP_TIMEOUT)?;
    let ToSupervisor::SetUp { map_writer, socket } = order else {
        return Err(SupervisorError::Protocol);
    };
    let (inner_channel, aftermath, nested) = match socket {
        None if kind == DomainKind::Guest => {
            let [inner, nested] = expect_fds(fds)?;
            (inner, None, Some(Channel::from_fd(nested)))
        }
        None => {
            let [inner] = expect_fds(fds)?;
            (inner, None, None)
        }
        Some(socket) => {
            let [inner, directory, listener] = expect_fds(fds)?;
            (inner, Some(Aftermath { socket, directory, listener }), None)
        }
    };
    enter_namespaces(kind, map_writer, control)?;
    let inner = start_inner(kind, command, inner_channel)?;
    control.send(&FromSupervisor::Started, &[])?;
    let (ending, stderr_tail) = watch(kind, inner, control_fd, control, nested)?;
    if let Some(aftermath) = aftermath {
        aftermath.settle(&ExitReport { ending, stderr_tail: stderr_tail.clone() });
    }
    control.send_or_drop(&FromSupervisor::Ended { ending, stderr_tail });
    Ok(ending)
}

/// Why a keeper failed.
#[derive(Debug, thiserror::Error)]
enum SupervisorError {
    #[error("{what}: {source}")]
    System { what: &'static str, source: io::Error },
    #[error(
        "this system does not allow it to make a user namespace ({0}). Where sysctl \
         kernel.apparmor_restrict_unprivileged_userns is 1 (Ubuntu), set it to 0; where \
         kernel.unprivileged_userns_clone is 0, set it to 1; a container must be started with \
         `--security-opt seccomp=unconfined`, or the like"
    )]
    NoUserNamespaces(io::Error),
    #[error("no more namespaces may be made ({0}): see `sysctl user.max_user_namespaces`")]
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
    let fail = SupervisorError::system("preparing the keeper");
    // The terminal's signals are for the command; the keeper only waits.
    signals::block_all().map_err(&fail)?;
    let name = match kind {
        DomainKind::Driver => c"rf-keep-driver",
        DomainKind::Frontend => c"rf-keep-front",
        DomainKind::Guest => c"rf-keep-guest",
        DomainKind::Uplink => c"rf-keep-uplink",
    };
    rustix::thread::set_name(name).map_err(|errno| fail(errno.into()))?;
    if kind.is_sandboxed() {
        rustix::process::setsid().map_err(|errno| fail(errno.into()))?;
    }
    if kind == DomainKind::Driver {
        limits::lift();
    } else {
        die_with_parent().map_err(&fail)?;
    }
    Ok(())
}

fn enter_namespaces(
    kind: DomainKind,
    map_writer: MapWriter,
    control: &Channel,
) -> Result<(), SupervisorError> {
    let own = OwnIds::current();
    namespaces::unshare(Fresh::UserAndPid).map_err(|error| match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EUSERS) => SupervisorError::TooManyNamespaces(error),
        _ => SupervisorError::NoUserNamespaces(error),
    })?;
    match map_writer {
        MapWriter::Supervisor => own.map_to_root().map_err(SupervisorError::NoUserNamespaces)?,
        MapWriter::Launcher => {
            control.send(&FromSupervisor::Unshared, &[])?;
            let (order, _) = control.receive_within::<ToSupervisor>(SETUP_TIMEOUT)?;
            if order != ToSupervisor::Mapped {
                return Err(SupervisorError::Protocol);
            }
        }
    }
    if kind != DomainKind::Driver {
        // Entering a user namespace changes credentials. If the launcher died before this, its
        // end of the channel is closed, which ends the watch below.
        die_with_parent().map_err(SupervisorError::system("PR_SET_PDEATHSIG"))?;
    }
    if kind.is_sandboxed() {
        keep_capabilities_over_exec().map_err(SupervisorError::system("raising capabilities"))?;
        rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
            .map_err(|errno| SupervisorError::system("PR_SET_DUMPABLE")(errno.into()))?;
    }
    Ok(())
}

/// Lets the inner process start with the capabilities in the new user namespace, whatever its
/// id there: it needs them to build its sandbox, in which it drops them.
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
) -> Result<Child, SupervisorError> {
    let mut inner = Command::new(THIS_PROGRAM);
    inner.arg0("ringfence").args(["internal", kind.subcommand()]).stdin(Stdio::from(channel));
    if kind.is_sandboxed() {
        inner.stdout(Stdio::null()).stderr(Stdio::piped());
    } else {
        inner.arg("--").args(command);
    }
    inner.spawn().map_err(SupervisorError::system("starting the inner process"))
}

/// Waits for the inner process, passing on what it says; ends it when the launcher is gone.
fn watch(
    kind: DomainKind,
    mut inner: Child,
    control_fd: BorrowedFd<'_>,
    control: &Channel,
    mut nested: Option<Channel>,
) -> Result<(Ending, String), SupervisorError> {
    let fail = SupervisorError::system("waiting for the inner process");
    let pid =
        i32::try_from(inner.id()).ok().and_then(Pid::from_raw).ok_or(SupervisorError::Protocol)?;
    let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())
        .map_err(|errno| fail(errno.into()))?;
    let mut said = inner.stderr.take();
    let mut words = StderrTail::default();
    let mut launcher_is_there = true;
    loop {
        let mut fds = vec![PollFd::new(&pidfd, PollFlags::IN)];
        if launcher_is_there {
            fds.push(PollFd::new(&control_fd, PollFlags::IN));
        }
        let said_at = fds.len();
        if let Some(said) = &said {
            fds.push(PollFd::new(said, PollFlags::IN));
        }
        let nested_at = fds.len();
        if let Some(nested) = &nested {
            fds.push(PollFd::new(nested, PollFlags::IN));
        }
        wait_any(&mut fds, None).map_err(&fail)?;
        let is_ready = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
        let (ended, hears_launcher) = (is_ready(0), launcher_is_there && is_ready(1));
        let speaks = said.is_some() && is_ready(said_at);
        let unshared = nested.is_some() && is_ready(nested_at);
        // One request is served, before the guest's command runs.
        if let Some(nested) = nested.take_if(|_| unshared) {
            map_nested(&nested, inner.id());
        }
        if speaks && !words.listen(&mut said, control) {
            said = None;
        }
        if ended {
            break;
        }
        if hears_launcher {
            // There is nothing more to be ordered: this is the end of the stream, or nonsense.
            launcher_is_there = false;
            if kind != DomainKind::Driver {
                inner.kill().map_err(&fail)?;
            }
        }
    }
    while said.is_some() && words.listen(&mut said, control) {}
    let status =
        rustix::io::retry_on_intr(|| rustix::process::waitpid(Some(pid), WaitOptions::empty()))
            .map_err(|errno| fail(errno.into()))?;
    let ending = status.map_or(Ending::Unknown, |(_, status)| Ending::from_wait(status));
    Ok((ending, words.into_text()))
}

/// Gives the nested user namespace of a guest's init every id of this one, as it is.
fn map_nested(nested: &Channel, init: u32) {
    let answer = match nested.try_receive::<Nested>() {
        Ok(Some((Nested::Unshared, _))) => match Maps::identity().and_then(|m| m.write_for(init)) {
            Ok(()) => Nested::Mapped,
            Err(error) => Nested::Failed(error.to_string()),
        },
        // Init wrote them itself, or is gone.
        _ => return,
    };
    nested.send_or_drop(&answer);
}

/// The end of what the inner process wrote to standard error.
#[derive(Default)]
struct StderrTail {
    tail: Vec<u8>,
}

impl StderrTail {
    /// Reads once; `false` at the end of the stream. Only to be called when there is something to
    /// read, or the writer is gone.
    fn listen(&mut self, said: &mut Option<std::process::ChildStderr>, control: &Channel) -> bool {
        let mut buffer = [0; STDERR_TAIL_MAX];
        let Some(length) = said.as_mut().and_then(|said| said.read(&mut buffer).ok()) else {
            return false;
        };
        let words = &buffer[..length];
        self.tail.extend_from_slice(words);
        let surplus = self.tail.len().saturating_sub(STDERR_TAIL_MAX);
        self.tail.drain(..surplus);
        if length > 0 {
            control
                .send_or_drop(&FromSupervisor::Said(String::from_utf8_lossy(words).into_owned()));
        }
        length > 0
    }

    fn into_text(self) -> String {
        String::from_utf8_lossy(&self.tail).into_owned()
    }
}

/// What is left to do when a driver domain has ended.
struct Aftermath {
    socket: SocketFile,
    directory: OwnedFd,
    listener: OwnedFd,
}

impl Aftermath {
    fn settle(self, exit_report: &ExitReport) {
        // When it ended in order there is no guest left that would ask.
        if exit_report.ending != Ending::Exited(0) {
            self.tell(exit_report);
        }
        // Nobody is left to hear of a failure. The next launcher removes a socket file that
        // nobody listens at.
        let _ = remove_socket(&self.directory, &self.socket);
    }

    /// Answers launchers for a while. One that comes anew is hung up on, which tells it to try
    /// again.
    fn tell(&self, exit_report: &ExitReport) {
        let until = Instant::now() + EXIT_REPORT_TIME;
        // Already so where the driver domain came far enough.
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

/// Removes the socket file unless another driver domain has taken its name over.
fn remove_socket(directory: &OwnedFd, socket: &SocketFile) -> io::Result<()> {
    // A lock belongs to an open file; the launcher holds the one this descriptor came from.
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
