//! A guest: its init, process 1 of its PID namespace, and the command it runs.
//!
//! # Theory of operation
//!
//! The launcher orders, init obeys, over the channel on its standard input ([`ToGuest`],
//! [`FromGuest`]):
//!
//! 1. `SetUp`, with the descriptors of the real standard input, of a channel to the supervisor and, where
//!    there are names, of a store connection. Init makes the view of the host's files (`view`), enters a
//!    nested user namespace with the namespaces that it owns, gives itself a host name, `/sys`, an
//!    `eth0`; answers `Ready`, with the TAP's descriptor, which the launcher hands to the
//!    frontend.
//! 2. `Start`, once the frontend is connected. Init runs the command as a child *in the process
//!    group it found itself in*, which is the terminal's foreground group: Ctrl-C, Ctrl-Z and a
//!    changed window size reach the command from the terminal directly, and a shell's job control
//!    works.
//! 3. `Signal`, for those that were sent to the launcher by a process.
//!
//! Meanwhile init reaps every process of the namespace, and a thread of it answers DNS queries
//! ([`crate::names`]). When the command ends, init tells how and ends too, which kills whatever
//! the command left behind. When the launcher is gone, init ends at once.

pub mod address;
mod command;
mod covers;
mod files;
mod mounts;
mod network;
mod places;
mod view;

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use ringfence_sys::descriptors::Descriptors;
use ringfence_sys::namespaces::{self, Fresh};
use ringfence_sys::tap::{Tap, TapError};
use rustix::event::{PollFd, PollFlags};
use rustix::process::{DumpableBehavior, Pid, WaitOptions};
use serde::{Deserialize, Serialize};

pub use address::Address;
pub use view::ViewConfig;

pub use network::{carried, carried_for_host, configure_leg};

use crate::names::{self, store::StoreNames};
use crate::netlink::Route;
use ringfence_sandbox::channel::{Channel, ChannelError};
use ringfence_sandbox::ids::{MapWriter, OwnIds};
use ringfence_sandbox::signals::Signals;
use ringfence_sandbox::supervisor::Nested;
use ringfence_sandbox::{Ending, STATUS_FAILED, die_with_parent, signals};
use ringfence_sys::poll::wait_any;

/// What the launcher orders.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToGuest {
    /// Get ready. With the descriptor of standard input, one of a channel to the supervisor, and one of a
    /// store connection where `names` is set.
    SetUp {
        /// What the guest is to have.
        config: Box<GuestConfig>,
        /// Process that writes the id maps of the nested user namespace: init itself, or its supervisor.
        map_writer: MapWriter,
    },
    /// Run the command.
    Start {
        /// What it is to find in its environment besides [`GuestConfig::environment`].
        environment: Vec<(String, String)>,
    },
    /// Send the command this signal.
    Signal(i32),
}

/// What a guest reports.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromGuest {
    /// It is set up. With the descriptors of the TAP's queues where it was to have an interface, and
    /// then those of the uplink's.
    Ready {
        /// What the kernel leaves to the reader of the TAP ([`ringfence_sys::tap::TapOffloads`]).
        offloads: u32,
        /// The same of the uplink's.
        uplink_offloads: u32,
        /// What could not be had, and is not needed.
        remarks: Vec<String>,
    },
    /// The command runs.
    Running,
    /// The command ended; the guest ends now.
    Ended(Ending),
    /// There is no guest, or no command; the guest ends now.
    Failed {
        /// The status that the launcher should exit with.
        status: u8,
        /// Why, in words for the user.
        why: String,
    },
}

/// What a guest is to have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestConfig {
    /// Its host name.
    pub host_name: String,
    /// Its network interface; without, it has a loopback interface alone.
    pub interface: Option<InterfaceConfig>,
    /// Its way to the host's network.
    pub uplink: Option<UplinkInterface>,
    /// How it finds others.
    pub names: Option<NamesConfig>,
    /// Whom it asks for all other names.
    pub resolver: Option<ResolverConfig>,
    /// The signals that its command is to have blocked.
    pub blocked_signals: Vec<i32>,
    /// What its command is to find in its environment besides what the launcher has in its own.
    pub environment: Vec<(String, String)>,
    /// What its command is not to find there: names of sockets that it does not see.
    pub removed_variables: Vec<String>,
    /// The files that its command sees.
    pub view: ViewConfig,
}

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfaceConfig {
    /// What it is called.
    pub name: String,
    /// Its Ethernet address.
    pub mac: [u8; 6],
    /// The longest IP packet, in bytes.
    pub mtu: u32,
    /// What the kernel is to leave to the reader of the interface's frames ([`carried`]).
    pub offloads: u32,
    /// Its IP addresses.
    pub addresses: Vec<Address>,
    /// Queues of its TAP.
    pub queues: u32,
}

/// The interface that leads to the host's network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UplinkInterface {
    /// As any other.
    pub interface: InterfaceConfig,
    /// What is reached by it.
    pub(crate) routes: Vec<Route>,
}

/// Who is asked for names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResolverConfig {
    /// Name servers.
    pub name_servers: Vec<std::net::IpAddr>,
    /// Domains to look in.
    pub search: Vec<String>,
}

/// Names on a switch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamesConfig {
    /// The switch.
    pub switch: String,
    /// The name that others find this guest by.
    pub own: Option<String>,
}

/// How long a guest is kept at most for data that was not acknowledged.
const LINGER: Duration = Duration::from_secs(1);

/// Why a guest could not be set up.
#[derive(Debug, thiserror::Error)]
enum SetUpError {
    #[error("{what}: {source}")]
    System { what: &'static str, source: io::Error },
    #[error(transparent)]
    Tap(#[from] TapError),
    #[error(transparent)]
    Network(#[from] network::NetworkError),
    #[error(transparent)]
    View(#[from] view::ViewError),
    #[error("names: {0}")]
    Names(#[source] io::Error),
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

/// Runs as a guest's init; returns the exit status.
pub fn main(command: &[OsString]) -> u8 {
    Channel::serve_stdin(
        |channel| live(channel, command).map(Ending::exit_status),
        |Failure { status, why }| (status, FromGuest::Failed { status, why }),
    )
}

struct Failure {
    status: u8,
    why: String,
}

impl From<SetUpError> for Failure {
    fn from(error: SetUpError) -> Failure {
        Failure { status: STATUS_FAILED, why: error.to_string() }
    }
}

impl From<ChannelError> for Failure {
    fn from(error: ChannelError) -> Failure {
        SetUpError::Channel(error).into()
    }
}

fn live(channel: &Channel, command: &[OsString]) -> Result<Ending, Failure> {
    let fail = |error| Failure::from(SetUpError::system("preparing init")(error));
    die_with_parent().map_err(fail)?;
    let child_ends = Signals::new(&[nix::sys::signal::Signal::SIGCHLD]).map_err(fail)?;
    let (order, fds) = channel.receive::<ToGuest>()?;
    let ToGuest::SetUp { config, map_writer } = order else {
        return Err(SetUpError::Protocol.into());
    };
    let (stdin, guest) = set_up(&config, map_writer, fds)?;
    let uplink = guest.uplink.iter().map(|tap| tap.fd.as_fd());
    let taps: Vec<_> = guest.taps.iter().map(|tap| tap.fd.as_fd()).chain(uplink).collect();
    let ready = FromGuest::Ready {
        offloads: guest.taps.first().map_or(0, |tap| tap.offloads.0),
        uplink_offloads: guest.uplink.first().map_or(0, |tap| tap.offloads.0),
        remarks: guest.remarks,
    };
    channel.send(&ready, &taps)?;
    drop(taps);
    // Frontend and uplink alone hold them from here on, so that they end with those.
    drop((guest.taps, guest.uplink));
    let more = match channel.receive::<ToGuest>()?.0 {
        ToGuest::Start { environment } => environment,
        // There is nobody to be signalled yet: what would end the command ends the guest.
        ToGuest::Signal(number) => {
            let ending = Ending::Killed(number);
            channel.send(&FromGuest::Ended(ending), &[])?;
            return Ok(ending);
        }
        ToGuest::SetUp { .. } => return Err(SetUpError::Protocol.into()),
    };
    let variables = command::Variables {
        set: [&config.environment[..], &more].concat(),
        removed: config.removed_variables.clone(),
    };
    let pid = command::start(command, stdin, &config.blocked_signals, &variables)
        .map_err(|error| Failure { status: error.status(), why: error.to_string() })?;
    channel.send(&FromGuest::Running, &[])?;
    if let Some(stub) = guest.stub {
        stub.run_in_background().map_err(|e| Failure::from(SetUpError::Names(e)))?;
    }
    let ending = watch(channel, &child_ends, pid)?;
    if config.interface.is_some() || config.uplink.is_some() {
        linger();
    }
    channel.send(&FromGuest::Ended(ending), &[])?;
    Ok(ending)
}

/// Gives the guest's kernel a moment to deliver what the command had written when it ended: the
/// network goes with the guest, and data under way would be lost without a word to the receiver.
fn linger() {
    let until = Instant::now() + LINGER;
    while names::something_is_unsent() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// What was made for a guest.
struct Guest {
    taps: Vec<Tap>,
    uplink: Vec<Tap>,
    stub: Option<names::Stub>,
    remarks: Vec<String>,
}

fn set_up(
    config: &GuestConfig,
    map_writer: MapWriter,
    fds: Descriptors,
) -> Result<(OwnedFd, Guest), SetUpError> {
    let mut fds = fds.into_vec().into_iter();
    let (Some(stdin), Some(supervisor), store, None) =
        (fds.next(), fds.next(), fds.next(), fds.next())
    else {
        return Err(SetUpError::Protocol);
    };
    let mut remarks = Vec::new();
    namespaces::unshare(Fresh::Mount).map_err(SetUpError::system("mount namespace"))?;
    let mounted = view::prepare(config, &mut remarks)?;
    enter_nested(map_writer, &Channel::from_fd(supervisor))?;
    rustix::system::sethostname(config.host_name.as_bytes())
        .map_err(|errno| SetUpError::system("host name")(errno.into()))?;
    if let Err(error) = mounts::mount_sys(config.view.is_host_root) {
        remarks.push(format!("/sys shows the network of outside: it cannot be mounted ({error})"));
    }
    let (taps, uplink) =
        network::set_up(config.interface.as_ref(), config.uplink.as_ref(), &mut remarks)?;
    let stub = match (&config.names, store) {
        (Some(names), Some(store)) => {
            let source = StoreNames::open(store).map_err(SetUpError::Names)?;
            let addresses = config.interface.iter().flat_map(|i| &i.addresses);
            let own = names.own.clone().map(|name| names::Own {
                name,
                addresses: addresses.map(|address| address.ip()).collect(),
            });
            let others = config.resolver.iter().flat_map(|r| &r.name_servers).copied().collect();
            let ours = mounted.resolver_is_ours;
            let stub = names::Stub::bind(source, &names.switch, own, ours, others)
                .map_err(SetUpError::Names)?;
            Some(stub)
        }
        (None, None) => None,
        _ => return Err(SetUpError::Protocol),
    };
    Ok((stdin, Guest { taps, uplink, stub, remarks }))
}

/// Enters the user namespace of the command, nested in that of the covers, and the namespaces it owns: so the
/// command rules over its network, and not over the mounts made before.
fn enter_nested(map_writer: MapWriter, supervisor: &Channel) -> Result<(), SetUpError> {
    /// The supervisor writes two small files.
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
    // Init's memory belongs to the outer user namespace, where it was started: while it is not dumpable, the
    // command can neither trace it nor take its descriptors.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(|errno| SetUpError::system("PR_SET_DUMPABLE")(errno.into()))?;
    // Entering a user namespace changes credentials, which clears it.
    die_with_parent().map_err(SetUpError::system("PR_SET_PDEATHSIG"))
}

/// Reaps, and passes signals on, until the command has ended.
fn watch(channel: &Channel, child_ends: &Signals, command: Pid) -> Result<Ending, Failure> {
    let fail = |error| Failure::from(SetUpError::system("waiting for the command")(error));
    loop {
        if let Some(ending) = reap(command) {
            return Ok(ending);
        }
        let mut fds = [PollFd::new(child_ends, PollFlags::IN), PollFd::new(channel, PollFlags::IN)];
        wait_any(&mut fds, None).map_err(fail)?;
        let [child_ended, ordered] = fds.map(|fd| !fd.revents().is_empty());
        if child_ended {
            while child_ends.next().map_err(fail)?.is_some() {}
        }
        if ordered {
            match channel.receive::<ToGuest>()?.0 {
                ToGuest::Signal(number) => {
                    let pid = u32::try_from(command.as_raw_pid()).unwrap_or(0);
                    // It may have ended this very moment, which the next round finds out.
                    let _ = signals::send(pid, number);
                }
                ToGuest::SetUp { .. } | ToGuest::Start { .. } => {
                    return Err(SetUpError::Protocol.into());
                }
            }
        }
    }
}

/// Collects every process that has ended, and tells if the command was among them.
fn reap(command: Pid) -> Option<Ending> {
    let mut ending = None;
    while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
        if pid == command {
            ending = Some(Ending::from_wait(status));
        }
    }
    ending
}
