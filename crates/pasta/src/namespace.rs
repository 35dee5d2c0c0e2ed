//! Process that enters or creates the namespaces, makes the interface there, and runs the command.
//!
//! ```text
//! session                             this process
//!   Order + namespaces, or stdin ──>
//!                                <──  Ready + queues of the TAP     existing namespaces: it exits
//!   Start                        ──>  starts the command in a PID namespace of its own, and waits
//!                                <──  Ended
//! ```
//!
//! Only this process is ever in the namespaces with rights over them. It handles no packet.

use std::ffi::OsString;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use ringfence_sandbox::channel::{Channel, ChannelError};
use ringfence_sandbox::ids::OwnIds;
use ringfence_sandbox::namespace_settings::Obstacle;
use ringfence_sandbox::spawn::THIS_PROGRAM;
use ringfence_sandbox::{
    Ending, STATUS_CANNOT_EXECUTE, STATUS_FAILED, STATUS_NOT_FOUND, die_with_parent,
    die_with_parent_of, limits, signals,
};
use ringfence_sys::namespaces::{self, Fresh};
use rustix::mount::{MountFlags, MountPropagationFlags};
use rustix::pipe::PipeFlags;
use rustix::process::DumpableBehavior;
use rustix::thread::{CapabilitySet, CapabilitySets, LinkNameSpaceType};
use serde::{Deserialize, Serialize};

use super::forwards_to_host::ForwardToHost;
use ringfence_hostnet::interface::UplinkInterface;
use ringfence_uplink_process::forward::{Forward, ForwardProtocol};

/// Order of the session.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Makes the interface in existing namespaces. Comes with the network namespace and, if it is to be joined,
    /// the user namespace.
    Join(NamespaceInterface),
    /// Makes namespaces for a command, and the interface in them. Comes with the command's standard input.
    Create {
        connection: NamespaceInterface,
        own_pids: bool,
        blocked: Vec<i32>,
        open_files: Option<u64>,
    },
    /// The uplink carries packets: the command may start.
    Start,
    /// Enters existing namespaces, and then creates sockets. Comes with them, as [`Order::Join`] does.
    Serve,
    /// Asks for sockets of the namespace ([`super::namespace_process`]).
    Sockets,
    /// Asks for a socket that listens at an address of the namespace.
    Listen(ForwardProtocol, SocketAddr),
}

/// Interface to make in the namespace.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct NamespaceInterface {
    pub(crate) interface: UplinkInterface,
    /// Set if the interface gets its addresses and routes.
    pub(crate) configured: bool,
    /// Set if the session wants a process of its own in the namespaces of the command.
    pub(crate) relayed: bool,
    /// Ports that lead to the host.
    pub(crate) to_host: Vec<ForwardToHost>,
    /// Set if the session wants to see the listeners of the namespace.
    pub(crate) shows_listeners: bool,
}

/// Report of the process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Report {
    /// Comes with the queues of the TAP, and the files of `/proc/net` that the session wants.
    Ready {
        offloads: u32,
        remarks: Vec<String>,
    },
    /// Comes with the namespaces of the command, in which the session may want a process of its own.
    Namespaces,
    /// Comes with a listening socket of the namespace for each entry. Without an entry it is the last one.
    ToHost(Vec<Forward>),
    /// Comes with unconnected sockets of the namespace.
    Sockets,
    Ended(Ending),
    Failed(String),
}

/// Reasons for which the namespaces cannot be used.
#[derive(Debug, thiserror::Error)]
enum NamespaceFailure {
    #[error("{what}: {source}")]
    System { what: &'static str, source: io::Error },
    #[error("the namespaces of the command cannot be made ({0}): {why}", why = Obstacle::of(.0).sentence())]
    NoNamespaces(io::Error),
    #[error("{0}")]
    Channel(#[from] ChannelError),
    #[error("an order that does not belong here")]
    Protocol,
    #[error("the interface in the namespace: {0}")]
    Network(String),
    #[error("{0}")]
    ToHost(String),
}

impl NamespaceFailure {
    fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> NamespaceFailure {
        move |source| NamespaceFailure::System { what, source: source.into() }
    }
}

/// Main function of the process. Returns the exit status.
pub fn main(command: &[OsString]) -> u8 {
    Channel::serve_stdin(
        |channel| serve(channel, command),
        |error: NamespaceFailure| (STATUS_FAILED, Report::Failed(error.to_string())),
    )
}

fn serve(channel: &Channel, command: &[OsString]) -> Result<u8, NamespaceFailure> {
    die_with_parent().map_err(NamespaceFailure::system("PR_SET_PDEATHSIG"))?;
    let (order, fds) = channel.receive::<Order>()?;
    let mut fds = fds.into_vec().into_iter();
    let first = fds.next().ok_or(NamespaceFailure::Protocol)?;
    match order {
        Order::Join(connection) => {
            join(&first, fds.next().as_ref())?;
            connect(channel, &connection, false)?;
            Ok(0)
        }
        Order::Create { connection, own_pids, blocked, open_files } => {
            create(own_pids)?;
            connect(channel, &connection, true)?;
            if connection.relayed {
                let open = |name: &str| std::fs::File::open(format!("/proc/self/ns/{name}"));
                let opened = open("net").and_then(|net| Ok([net, open("user")?]));
                let [net, user] =
                    opened.map_err(NamespaceFailure::system("the namespaces of the command"))?;
                channel.send(&Report::Namespaces, &[net.as_fd(), user.as_fd()])?;
            }
            if !matches!(channel.receive::<Order>()?.0, Order::Start) {
                return Err(NamespaceFailure::Protocol);
            }
            limits::lower_open_files(open_files)
                .map_err(NamespaceFailure::system("RLIMIT_NOFILE"))?;
            let ending = run(command, first, own_pids, &blocked)?;
            channel.send(&Report::Ended(ending), &[])?;
            Ok(ending.exit_status())
        }
        Order::Serve => {
            join(&first, fds.next().as_ref())?;
            give_up_rights().map_err(NamespaceFailure::system("giving up rights"))?;
            super::namespace_process::serve(channel)?;
            Ok(0)
        }
        Order::Start | Order::Sockets | Order::Listen(..) => Err(NamespaceFailure::Protocol),
    }
}

/// Enters existing namespaces. The kernel checks the right to do so: `CAP_SYS_ADMIN` over both.
fn join(netns: &OwnedFd, userns: Option<&OwnedFd>) -> Result<(), NamespaceFailure> {
    if let Some(userns) = userns {
        let entered = rustix::thread::move_into_link_name_space(
            userns.as_fd(),
            Some(LinkNameSpaceType::User),
        );
        match entered {
            // The kernel refuses the namespace that the process is in already.
            Err(rustix::io::Errno::INVAL) if is_own_user_namespace(userns) => {}
            entered => entered.map_err(NamespaceFailure::system("joining the user namespace"))?,
        }
    }
    rustix::thread::move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network))
        .map_err(NamespaceFailure::system("joining the network namespace"))?;
    // Entering a user namespace cleared the death signal.
    die_with_parent().map_err(NamespaceFailure::system("PR_SET_PDEATHSIG"))
}

/// Gives up all capabilities, and the possibility to be traced by other processes of the namespace.
fn give_up_rights() -> rustix::io::Result<()> {
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    rustix::thread::set_capabilities(None, sets)?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
}

fn is_own_user_namespace(userns: &OwnedFd) -> bool {
    let own = rustix::fs::stat("/proc/self/ns/user");
    let other = rustix::fs::fstat(userns);
    own.ok().zip(other.ok()).is_some_and(|(a, b)| (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino))
}

/// Creates the namespaces of a command, in which the user is root.
fn create(own_pids: bool) -> Result<(), NamespaceFailure> {
    let own = OwnIds::current();
    let first = if own_pids { Fresh::UserAndPid } else { Fresh::UserMountNetIpcUts };
    namespaces::unshare(first).map_err(NamespaceFailure::NoNamespaces)?;
    own.map_to_root().map_err(NamespaceFailure::NoNamespaces)?;
    if own_pids {
        namespaces::unshare(Fresh::MountNetIpcUts).map_err(NamespaceFailure::NoNamespaces)?;
    }
    die_with_parent().map_err(NamespaceFailure::system("PR_SET_PDEATHSIG"))
}

fn connect(
    channel: &Channel,
    connection: &NamespaceInterface,
    is_own: bool,
) -> Result<(), NamespaceFailure> {
    let mut remarks = Vec::new();
    let made = ringfence_guest::connect(
        &connection.interface,
        is_own,
        connection.configured,
        &mut remarks,
    );
    let taps = made.map_err(|error| NamespaceFailure::Network(error.to_string()))?;
    let wanted = if connection.shows_listeners { &super::auto_forwards::TABLES[..] } else { &[] };
    let open = |name: &&str| std::fs::File::open(format!("/proc/self/net/{name}"));
    let tables: Vec<_> = wanted
        .iter()
        .map(open)
        .collect::<Result<_, _>>()
        .map_err(NamespaceFailure::system("the listeners of the namespace: /proc/self/net"))?;
    let fds: Vec<_> =
        taps.iter().map(|tap| tap.fd.as_fd()).chain(tables.iter().map(AsFd::as_fd)).collect();
    let offloads = taps.first().map_or(0, |tap| tap.offloads.0);
    channel.send(&Report::Ready { offloads, remarks }, &fds)?;
    if !connection.to_host.is_empty() {
        super::forwards_to_host::open(channel, &connection.to_host)
            .map_err(NamespaceFailure::ToHost)?;
    }
    Ok(())
}

/// Runs the command and waits for its end. The kernel kills the command with this process, from the command's first moment on.
fn run(
    command: &[OsString],
    stdin: OwnedFd,
    own_pids: bool,
    blocked: &[i32],
) -> Result<Ending, NamespaceFailure> {
    let fail = || NamespaceFailure::system("starting the command");
    let (parent, _held) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)
        .map_err(NamespaceFailure::system("a pipe to the command"))?;
    let number = parent.as_raw_fd();
    namespaces::set_inheritable(&[number], true).map_err(fail())?;
    let mut starter = Command::new(THIS_PROGRAM);
    starter.arg0("ringfence").args(["internal", "pasta-command", "--parent", &number.to_string()]);
    starter.args(own_pids.then_some("--own-pids")).arg("--").args(command);
    starter.stdin(Stdio::from(stdin));
    let child = signals::with_blocked(blocked, || starter.spawn()).map_err(fail())?;
    let status = child.map_err(fail())?.wait().map_err(fail())?;
    Ok(Ending::from_status(status))
}

/// Main function of the process that becomes the command. Returns the exit status if it does not. `parent` is the number of an
/// inherited pipe, for [`die_with_parent_of`].
pub fn start_command(command: &[OsString], own_pids: bool, parent: RawFd) -> u8 {
    let shell = [std::env::var_os("SHELL").unwrap_or_else(|| "/bin/sh".into())];
    let words = if command.is_empty() { &shell[..] } else { command };
    let Some((program, arguments)) = words.split_first() else { return STATUS_FAILED };
    if let Err(error) = namespaces::take_inherited(parent).and_then(die_with_parent_of) {
        eprintln!("pasta: {error}");
        return STATUS_FAILED;
    }
    if own_pids && let Err(error) = mount_proc() {
        eprintln!("pasta: /proc shows the processes of outside: it cannot be mounted ({error})");
    }
    let error = Command::new(program).args(arguments).exec();
    eprintln!("pasta: {}: {error}", program.display());
    if error.kind() == io::ErrorKind::NotFound { STATUS_NOT_FOUND } else { STATUS_CANNOT_EXECUTE }
}

fn mount_proc() -> io::Result<()> {
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    Ok(rustix::mount::mount("proc", "/proc", "proc", flags, None)?)
}
