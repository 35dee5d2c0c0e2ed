#![forbid(unsafe_code)]
//! Guest: init (process 1 of its PID namespace) and the command that it runs.
//!
//! The launcher controls init over the channel on its standard input ([`ToGuest`], [`FromGuest`]):
//!
//! 1. `SetUp` comes with the descriptors of the real standard input, of a channel to the supervisor
//!    and, with names, of a store connection. Init builds the view of the host's files (`view`). It
//!    enters a nested user namespace and the namespaces that this one owns. It sets the host name,
//!    mounts `/sys` and creates `eth0`. It answers `Ready` with the descriptors of the TAP's
//!    queues, which the launcher passes to the frontend. For an ordinary user it enters a third user
//!    namespace, with that user's own ids ([`ringfence_sandbox::ids`]).
//! 2. `Start` comes once the frontend is connected. Init runs the command as a child, in a process group of the
//!    command's own and on a terminal of the guest's own (`terminal.rs`). Ctrl-C, Ctrl-Z and changes of the window
//!    size reach the command from that terminal, and a shell's job control works.
//! 3. `Signal` passes on a signal that a process sent to the launcher, `GroupSignal` one that the caller's terminal sent.
//!    Init reports when the command was `Stopped`, and `Continue` continues it.
//! 4. `Sockets` asks for sockets of the guest's network: connections from the host's loopback to a published port
//!    reach the guest's loopback by them.
//! 5. `Listening` asks for the ports at which the guest's processes listen, for `ringfence wait`.
//! 6. `Exec` runs another command, for `ringfence exec`, in a session of its own (`session.rs`).
//!
//! Meanwhile init reaps every process of the namespace, and one of its threads answers DNS queries
//! ([`crate::names`]). When the command ends, init reports it and exits, which ends all remaining
//! processes of the guest. Init exits too when the launcher is gone.

mod bound_sockets;
mod command;
pub mod config;
mod covers;
mod devices;
mod directories;
mod disk_sockets;
mod files;
mod kernel_mounts;
mod locations;
pub mod messages;
mod mounts;
pub mod name_files;
pub mod names;
mod network;
pub mod other_processes;
mod own_run;
mod private;
mod read_only_files;
pub mod relay_sockets;
mod session;
mod socket_search;
mod ssh_config;
mod streams;
mod terminal;
mod view;

use std::ffi::OsString;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use ringfence_sys::descriptors::Descriptors;
use ringfence_sys::keyring;
use ringfence_sys::namespaces::{self, Fresh};
use ringfence_sys::tap::{Tap, TapError};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{DumpableBehavior, Pid, Signal, WaitOptions};

pub use config::{
    CgroupConfig, DeviceConfig, GuestConfig, HostPath, NamesConfig, TerminalKind, ViewConfig,
};
pub use disk_sockets::name as disk_socket_name;
pub use messages::{FromGuest, ListeningPorts, ToGuest};

pub use network::connect;
pub use network::{carried, carried_for_host, configure_leg};

use self::command::Properties;
use self::devices::LateDevices;
use self::disk_sockets::DiskSockets;
use self::name_files::SharedNameFiles;
use self::session::{Reaped, Refusal, Sessions};
use self::streams::Streams;
use self::terminal::{CallersTerminal, CommandTerminal};
use crate::names::store::StoreNames;
use ringfence_hostnet::interface::ResolverConfig;
use ringfence_hostnet::name_files::FILE_MAX;
use ringfence_sandbox::channel::{Channel, ChannelError};
use ringfence_sandbox::command_filter::CommandFilter;
use ringfence_sandbox::ids::{MapWriter, OwnIds};
use ringfence_sandbox::limits;
use ringfence_sandbox::signals::Signals;
use ringfence_sandbox::supervisor::Nested;
use ringfence_sandbox::{Ending, STATUS_FAILED, die_with_parent, signals};
use ringfence_sys::poll::wait_any;

/// Maximum delay of a guest's end for data that was not acknowledged.
const LINGER: Duration = Duration::from_secs(1);

/// Errors that prevent a guest's set-up.
#[derive(Debug, thiserror::Error)]
enum SetUpError {
    #[error("{what}: {source}")]
    System { what: &'static str, source: io::Error },
    #[error(
        "the seccomp list of the container or sandbox around it refuses sethostname(2) and others: start the container \
         with `--cap-add SYS_ADMIN`, or with `--security-opt seccomp=unconfined`; it needs `--device /dev/net/tun`, too"
    )]
    Filtered,
    #[error(transparent)]
    Tap(#[from] TapError),
    #[error(transparent)]
    Network(#[from] network::NetworkError),
    #[error(transparent)]
    View(#[from] view::ViewError),
    #[error("names: {0}")]
    Names(#[source] io::Error),
    #[error(
        "the command's terminal: /dev/ptmx: {0}; `--terminal shared` leaves the command your own terminal"
    )]
    Terminal(#[source] io::Error),
    #[error(
        "the command's session keyring: {0}; as root, raise the limit: `sysctl kernel.keys.maxkeys`"
    )]
    Keyring(#[source] io::Error),
    #[error("{0}")]
    Channel(#[from] ChannelError),
    #[error("an order that does not belong here")]
    Protocol,
}

impl SetUpError {
    fn system(what: &'static str) -> impl FnOnce(io::Error) -> SetUpError {
        move |source| SetUpError::System { what, source }
    }
}

/// Main function of a guest's init. Returns the exit status.
pub fn main(command: &[OsString]) -> u8 {
    Channel::serve_stdin(
        |channel| run(channel, command).map(Ending::exit_status),
        |InitFailure { status, why }| (status, FromGuest::Failed { status, why }),
    )
}

struct InitFailure {
    status: u8,
    why: String,
}

impl From<SetUpError> for InitFailure {
    fn from(error: SetUpError) -> InitFailure {
        InitFailure { status: STATUS_FAILED, why: error.to_string() }
    }
}

impl From<ChannelError> for InitFailure {
    fn from(error: ChannelError) -> InitFailure {
        SetUpError::Channel(error).into()
    }
}

fn run(channel: &Channel, command: &[OsString]) -> Result<Ending, InitFailure> {
    let fail = |error| InitFailure::from(SetUpError::system("preparing init")(error));
    die_with_parent().map_err(fail)?;
    let child_signals = Signals::new(&[Signal::CHILD]).map_err(fail)?;
    let (order, fds) = channel.receive::<ToGuest>()?;
    let ToGuest::SetUp { config, map_writer, ids } = order else {
        return Err(SetUpError::Protocol.into());
    };
    let (streams, guest) = set_up(&config, map_writer, ids, fds)?;
    report_ready(channel, &streams, &guest)?;
    // From here on only frontend and uplink hold the TAPs and the disks' sockets, so that these end with them.
    drop((guest.taps, guest.uplink, guest.disks));
    let start = match wait_for_start(channel, guest.name_files.as_ref())? {
        Ok(start) => start,
        Err(ending) => {
            channel.send(&FromGuest::Ended(ending), &[])?;
            return Ok(ending);
        }
    };
    let shown = guest.late_devices.show(&start.devices);
    shown.map_err(|error| InitFailure::from(SetUpError::system("the disks' devices")(error)))?;
    let variables = command::Variables {
        set: [&config.environment[..], &start.environment].concat(),
        removed: config.removed_variables.clone(),
    };
    limits::lower_open_files(config.open_files)
        .map_err(|error| InitFailure::from(SetUpError::system("RLIMIT_NOFILE")(error)))?;
    let own_sockets = names::tcp_sockets();
    let properties = Properties {
        blocked: &config.blocked_signals,
        ignored: &config.ignored_signals,
        variables,
        filter: &start.filter,
    };
    let fail = |error| InitFailure::from(SetUpError::Terminal(error));
    streams.terminal.restrict().map_err(fail)?;
    let (streams, terminal) = streams.into_start(start.foreground).map_err(fail)?;
    let pid = command::start(command, streams, &properties)
        .map_err(|error| InitFailure { status: error.status(), why: error.to_string() })?;
    channel.send(&FromGuest::Running, &[])?;
    if let Some(stub) = guest.stub {
        stub.run_in_background().map_err(|e| InitFailure::from(SetUpError::Names(e)))?;
    }
    ringfence_sys::code::unmap();
    let mut further = Further {
        properties: &properties,
        sessions: Sessions::default(),
        name_files: guest.name_files.as_ref(),
    };
    let mut command = RunningCommand { pid, terminal, is_stopped: false, resumed: 0 };
    let ending = watch(channel, &child_signals, &mut command, &mut further)?;
    if config.interface.is_some() || config.uplink.is_some() {
        linger(own_sockets);
    }
    channel.send(&FromGuest::Ended(ending), &[])?;
    Ok(ending)
}

/// Order to start the command.
struct StartOrder {
    /// Environment variables besides those of the configuration.
    environment: Vec<(String, String)>,
    /// Set if the command starts in the foreground of its terminal.
    foreground: bool,
    /// Nodes below `/dev` of the guest's disks.
    devices: Vec<PathBuf>,
    filter: CommandFilter,
}

/// Waits for the order to start the command. Returns its end if a signal came first: one that would end it ends the guest.
fn wait_for_start(
    channel: &Channel,
    files: Option<&SharedNameFiles>,
) -> Result<Result<StartOrder, Ending>, InitFailure> {
    loop {
        match channel.receive::<ToGuest>()? {
            (ToGuest::Names { hosts, resolver }, fds) => follow_host(files, hosts, resolver, fds)?,
            (ToGuest::Start { environment, foreground, devices }, fds) => {
                let filter = received_filter(fds)?;
                return Ok(Ok(StartOrder { environment, foreground, devices, filter }));
            }
            (ToGuest::Signal(number), _) => return Ok(Err(Ending::Killed(number))),
            _ => return Err(SetUpError::Protocol.into()),
        }
    }
}

/// Reports that the guest is set up, with the descriptors of disks, queues and streams that the launcher is to have.
fn report_ready(
    channel: &Channel,
    streams: &Streams,
    guest: &GuestResources,
) -> Result<(), ChannelError> {
    let uplink = guest.uplink.iter().map(|tap| tap.fd.as_fd());
    let taps = guest.taps.iter().map(|tap| tap.fd.as_fd()).chain(uplink);
    let others = streams.launchers.iter().chain(streams.is_reopened.then_some(&streams.stdin));
    let fds: Vec<_> =
        guest.disks.descriptors().chain(taps).chain(others.map(AsFd::as_fd)).collect();
    let ready = FromGuest::Ready {
        offloads: guest.taps.first().map_or(0, |tap| tap.offloads.0),
        uplink_offloads: guest.uplink.first().map_or(0, |tap| tap.offloads.0),
        remarks: guest.remarks.clone(),
        notices: guest.notices.clone(),
        terminal: streams.launchers.is_some(),
        stdin: streams.is_reopened,
    };
    channel.send(&ready, &fds)
}

/// Returns the filter of the guest's commands, which comes with the order to start.
fn received_filter(fds: Descriptors) -> Result<CommandFilter, SetUpError> {
    let [file] = fds.exactly::<1>().map_err(|_| SetUpError::Protocol)?;
    CommandFilter::from_file(file).map_err(SetUpError::system("the filter of system calls"))
}

/// Waits a short time until the guest's kernel has delivered the data that the command wrote last.
/// The network namespace ends with the guest, and unsent data is lost without an error. `own_sockets` is the number of
/// TCP sockets before the command started: if there are no more, the kernel's long tables need not be read.
fn linger(own_sockets: Option<u64>) {
    let until = Instant::now() + LINGER;
    let is_idle = || own_sockets.is_some() && names::tcp_sockets() == own_sockets;
    while !is_idle() && names::something_is_unsent() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Resources created for a guest.
struct GuestResources {
    taps: Vec<Tap>,
    uplink: Vec<Tap>,
    stub: Option<names::Stub>,
    name_files: Option<SharedNameFiles>,
    disks: DiskSockets,
    late_devices: LateDevices,
    remarks: Vec<String>,
    notices: Vec<String>,
}

/// Follows the host's files about names, as the launcher has read them.
fn follow_host(
    files: Option<&SharedNameFiles>,
    hosts: bool,
    resolver: Option<ResolverConfig>,
    fds: Descriptors,
) -> Result<(), SetUpError> {
    let mut text = Vec::new();
    if hosts {
        let [file] = fds.exactly::<1>().map_err(|_| SetUpError::Protocol)?;
        let read = std::fs::File::from(file).take(FILE_MAX).read_to_end(&mut text);
        read.map_err(SetUpError::Names)?;
    }
    let hosts = hosts.then_some(&text[..]);
    files.map_or(Ok(()), |files| files.follow_host(hosts, resolver)).map_err(SetUpError::Names)
}

fn set_up(
    config: &GuestConfig,
    map_writer: MapWriter,
    ids: Option<OwnIds>,
    fds: Descriptors,
) -> Result<(Streams, GuestResources), SetUpError> {
    let mut fds = fds.into_vec().into_iter();
    let (Some(stdin), Some(supervisor), store, None) =
        (fds.next(), fds.next(), fds.next(), fds.next())
    else {
        return Err(SetUpError::Protocol);
    };
    let (mut remarks, mut notices) = (Vec::new(), Vec::new());
    let callers = CallersTerminal::find(config.terminal, stdin.as_raw_fd());
    let callers = callers.map_err(SetUpError::system("the caller's terminal"))?;
    namespaces::unshare(Fresh::Mount).map_err(SetUpError::system("mount namespace"))?;
    kernel_mounts::enter_cgroup_namespace(&config.cgroups, &mut remarks);
    let view::View { mounted, disks, late_devices } =
        view::prepare(config, &mut remarks, &mut notices)?;
    let (terminal, launchers) = callers.replace().map_err(SetUpError::Terminal)?;
    let streams = Streams::new(stdin, terminal, launchers, !config.view.read_only.is_empty())
        .map_err(SetUpError::system("inherited descriptors"))?;
    let queues = kernel_mounts::confine(&config.cgroups, &mut remarks)
        .map_err(SetUpError::system("cgroups and message queues"))?;
    enter_nested(map_writer, &Channel::from_fd(supervisor))?;
    kernel_mounts::mount_own_queues(&queues, &mut remarks);
    // This process has the capability for it, so a refusal is that of a seccomp list.
    rustix::system::sethostname(config.host_name.as_bytes()).map_err(|errno| match errno {
        Errno::PERM => SetUpError::Filtered,
        errno => SetUpError::system("host name")(errno.into()),
    })?;
    if let Err(error) = mounts::mount_sys(config.view.is_host_root) {
        remarks.push(format!("/sys shows the network of outside: it cannot be mounted ({error})"));
    }
    let (taps, uplink) =
        network::set_up(config.interface.as_ref(), config.uplink.as_ref(), &mut remarks)?;
    // The interfaces end with the guest's network namespace. Otherwise the process that closes the last descriptor
    // would have to wait until no CPU uses the interface: 15 ms and more at the end of frontend and uplink.
    for tap in [taps.first(), uplink.first()].into_iter().flatten() {
        tap.keep(true)?;
    }
    if ids.is_some() {
        network::allow_low_ports(&mut remarks);
    }
    let stub = match (&config.names, store) {
        (Some(names), Some(store)) => {
            let source = StoreNames::open(store).map_err(SetUpError::Names)?;
            let addresses = config.interface.iter().flat_map(|i| &i.addresses);
            let own = names.own.clone().map(|name| names::Own {
                name,
                addresses: addresses.map(|address| address.ip()).collect(),
            });
            let (files, ours) = (mounted.name_files.clone(), mounted.resolver_is_ours);
            let resolver = config.resolver.as_ref();
            let stub = names::Stub::bind(source, &names.switch, own, ours, resolver, files)
                .map_err(SetUpError::Names)?;
            Some(stub)
        }
        (None, None) => None,
        _ => return Err(SetUpError::Protocol),
    };
    let name_files = mounted.name_files;
    if let Some(ids) = ids {
        take_ids(ids)?;
    }
    leave_keys()?;
    let resources =
        GuestResources { taps, uplink, stub, name_files, disks, late_devices, remarks, notices };
    Ok((streams, resources))
}

/// Enters a user namespace nested in that of the covers, with the namespaces that it owns. Root of it
/// controls the guest's network, but not the mounts made before.
fn enter_nested(map_writer: MapWriter, supervisor: &Channel) -> Result<(), SetUpError> {
    /// Time limit for writing the id maps.
    const MAPS_TIMEOUT: Duration = Duration::from_secs(10);
    let own = OwnIds::current();
    namespaces::unshare(Fresh::UserMountNetIpcUts).map_err(SetUpError::system("namespaces"))?;
    match map_writer {
        MapWriter::Supervisor => own.map_to_root().map_err(SetUpError::system("user ids"))?,
        MapWriter::Launcher => {
            supervisor.send(&Nested::Unshared, &[])?;
            match supervisor.receive_within(MAPS_TIMEOUT)?.0 {
                Nested::Mapped => {}
                Nested::Failed(why) => {
                    return Err(SetUpError::system("user ids")(io::Error::other(why)));
                }
                Nested::Unshared => return Err(SetUpError::Protocol),
            }
        }
    }
    protect_init()
}

/// Enters a user namespace in which init and the command have the ids of the user who started the guest.
/// It owns nothing: init loses all capabilities over network and mounts, and the command never has one.
/// Call it last.
fn take_ids(ids: OwnIds) -> Result<(), SetUpError> {
    let fail = SetUpError::system("the user's own ids");
    let own = OwnIds::current();
    let entered = namespaces::unshare(Fresh::User).and_then(|()| own.map_to(ids));
    entered.map_err(fail)?;
    protect_init()
}

/// Leaves the keys of the caller's session keyring, also for all commands of the guest.
fn leave_keys() -> Result<(), SetUpError> {
    match keyring::join_new_session() {
        // A kernel without keyrings, or a seccomp list around this guest that denies them to the command, too.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => Ok(()),
        joined => joined.map_err(SetUpError::Keyring),
    }
}

/// Protects init from the command, after a user namespace was entered.
fn protect_init() -> Result<(), SetUpError> {
    // Init was started in the outermost user namespace, to which its memory belongs. While it is not
    // dumpable, the command can neither trace it nor take its descriptors.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(|errno| SetUpError::system("PR_SET_DUMPABLE")(errno.into()))?;
    // Entering a user namespace cleared the death signal.
    die_with_parent().map_err(SetUpError::system("PR_SET_PDEATHSIG"))
}

/// Commands of `Exec`, and the properties that they share with the guest's own command.
struct Further<'a> {
    properties: &'a Properties<'a>,
    sessions: Sessions,
    name_files: Option<&'a SharedNameFiles>,
}

impl Further<'_> {
    fn start(
        &mut self,
        id: u64,
        command: &[OsString],
        environment: Vec<(String, String)>,
        fds: Descriptors,
    ) -> Result<(), Refusal> {
        let mut properties = self.properties.clone();
        properties.variables.set.extend(environment);
        self.sessions.start(id, command, fds, &properties)
    }
}

/// The guest's command, while it runs.
struct RunningCommand {
    pid: Pid,
    terminal: CommandTerminal,
    is_stopped: bool,
    /// Number of the last order to continue it.
    resumed: u64,
}

/// Reaps processes, forwards signals and starts further commands until the command has ended.
fn watch(
    channel: &Channel,
    child_signals: &Signals,
    command: &mut RunningCommand,
    further: &mut Further<'_>,
) -> Result<Ending, InitFailure> {
    let fail = |error| InitFailure::from(SetUpError::system("waiting for the command")(error));
    loop {
        let (reaped, stopped) = reap(command.pid);
        for (pid, ending) in reaped {
            if pid == command.pid {
                return Ok(ending);
            }
            if let Some(id) = further.sessions.ended(pid) {
                channel.send(&FromGuest::ExecEnded { id, ending }, &[])?;
            }
        }
        if let Some(signal) = stopped {
            command.is_stopped = true;
            channel.send(&FromGuest::Stopped { signal, number: command.resumed }, &[])?;
        }
        let mut fds =
            [PollFd::new(child_signals, PollFlags::IN), PollFd::new(channel, PollFlags::IN)];
        wait_any(&mut fds, None).map_err(fail)?;
        let [child_ended, ordered] = fds.map(|fd| !fd.revents().is_empty());
        if child_ended {
            while child_signals.next().map_err(fail)?.is_some() {}
        }
        if ordered {
            let (order, fds) = channel.receive::<ToGuest>()?;
            follow_order(channel, command, further, order, fds)?;
        }
    }
}

/// Carries out an order of the launcher while the command runs.
fn follow_order(
    channel: &Channel,
    command: &mut RunningCommand,
    further: &mut Further<'_>,
    order: ToGuest,
    fds: Descriptors,
) -> Result<(), InitFailure> {
    match order {
        ToGuest::Signal(number) => {
            let pid = command.pid.as_raw_nonzero().get().unsigned_abs();
            // The command may have ended just now. The next round reaps it.
            let _ = signals::send(pid, number);
        }
        ToGuest::GroupSignal(number) => {
            let _ = signals::send_to_group(command.pid, number);
        }
        ToGuest::Continue { foreground, number } => {
            command.resumed = number;
            let was_stopped = std::mem::take(&mut command.is_stopped);
            command.terminal.resume(command.pid, foreground, was_stopped);
        }
        ToGuest::Background => command.terminal.to_background(),
        ToGuest::Terminal { id } => match session::new_terminal() {
            Ok(terminal) => channel.send(&FromGuest::Terminal { id }, &[terminal.as_fd()])?,
            Err(error) => {
                let why = format!("a terminal: /dev/ptmx: {error}");
                channel.send(&FromGuest::ExecFailed { id, status: STATUS_FAILED, why }, &[])?;
            }
        },
        ToGuest::Exec { id, command, environment } => {
            if let Err((status, why)) = further.start(id, &command, environment, fds) {
                channel.send(&FromGuest::ExecFailed { id, status, why }, &[])?;
            }
        }
        ToGuest::Sockets => relay_sockets::report(channel, &FromGuest::Sockets)?,
        ToGuest::Listening { id, port } => {
            let ports = names::listening_ports(port);
            channel.send(&FromGuest::Listening { id, ports }, &[])?;
        }
        ToGuest::ExecSignal { id, number } => further.sessions.signal(id, number),
        ToGuest::Names { hosts, resolver } => {
            // A file system without room keeps the names as they were.
            let _ = follow_host(further.name_files, hosts, resolver, fds);
        }
        ToGuest::SetUp { .. } | ToGuest::Start { .. } => return Err(SetUpError::Protocol.into()),
    }
    Ok(())
}

/// Reaps all processes that have ended. Returns them, and the signal that stopped the command if one did.
fn reap(command: Pid) -> (Vec<Reaped>, Option<i32>) {
    let (mut reaped, mut stopped) = (Vec::new(), None);
    while let Ok(Some((pid, status))) =
        rustix::process::wait(WaitOptions::NOHANG | WaitOptions::UNTRACED)
    {
        match status.stopping_signal() {
            None => reaped.push((pid, Ending::from_wait(status))),
            Some(signal) if pid == command => stopped = Some(signal),
            Some(_) => {}
        }
    }
    (reaped, stopped)
}
