//! Messages between the launcher and a guest's init.

use std::ffi::OsString;
use std::path::PathBuf;

use ringfence_hostnet::interface::ResolverConfig;
use ringfence_sandbox::Ending;
use ringfence_sandbox::ids::{MapWriter, OwnIds};
use serde::{Deserialize, Serialize};

use crate::config::GuestConfig;

/// TCP ports of a guest at which a process listens, at any address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListeningPorts {
    /// Set if a process listens at the port that was asked for.
    pub has_wanted: bool,
    /// The lowest of all ports, for a message.
    pub lowest: Vec<u16>,
}

/// Commands of the launcher.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToGuest {
    /// Sets up the guest. Comes with the descriptors of standard input, of a channel to the
    /// supervisor and, if `names` is set, of a store connection.
    SetUp {
        config: Box<GuestConfig>,
        /// Process that writes the id maps of the nested user namespace: init itself
        /// ([`MapWriter::Supervisor`]) or its supervisor.
        map_writer: MapWriter,
        /// User and group id of the command. `None`: it is root of its user namespace.
        ids: Option<OwnIds>,
    },
    /// Follows the host's files about names. Comes before `Start`, and again when they change.
    Names {
        /// Set if the order comes with a file: the host's `hosts(5)`.
        hosts: bool,
        /// Resolver configuration, if the guest has an uplink.
        resolver: Option<ResolverConfig>,
    },
    /// Runs the command. Comes with the file of its filter of system calls
    /// ([`CommandFilter`](ringfence_sandbox::command_filter::CommandFilter)).
    Start {
        /// Environment variables besides [`GuestConfig::environment`].
        environment: Vec<(String, String)>,
        /// Set if the command starts in the foreground of its terminal.
        foreground: bool,
        /// Nodes below `/dev` of the guest's disks.
        devices: Vec<PathBuf>,
    },
    /// Sends a signal to the command.
    Signal(i32),
    /// Sends a signal to the command's process group, as a key of the terminal does.
    GroupSignal(i32),
    /// Moves the command to the foreground or background of its terminal, and continues it.
    Continue {
        foreground: bool,
        /// Number of this order, from 1.
        number: u64,
    },
    /// Moves the command to the background of its terminal.
    Background,
    /// Requests a new terminal of the guest for a command of `Exec`.
    Terminal {
        /// Number by which the launcher knows the client that asks.
        id: u64,
    },
    /// Runs another command. Comes with the descriptors of its standard input, output and error and, if it has a terminal of
    /// its own, with the programs' end of that.
    Exec {
        /// Number by which the launcher knows it.
        id: u64,
        command: Vec<OsString>,
        /// Environment variables besides those of the guest's own command.
        environment: Vec<(String, String)>,
    },
    /// Asks for sockets of the guest's network (`relay_sockets`).
    Sockets,
    /// Asks for the TCP ports at which processes of the guest listen.
    Listening {
        /// Number by which the launcher knows the client that asks.
        id: u64,
        /// Port that the client waits for.
        port: u16,
    },
    /// Sends a signal to a command of `Exec`.
    ExecSignal { id: u64, number: i32 },
}

/// Reports of a guest's init.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromGuest {
    /// The guest is set up. Comes with the descriptors of the guest's runtime directory and of the listener of each
    /// disk, if there are disks; then of the queues of the switch's TAP, if there is one, and then those of the uplink's
    /// TAP.
    Ready {
        /// Offloads of the switch's TAP ([`ringfence_sys::tap::TapOffloads`]).
        offloads: u32,
        /// Offloads of the uplink's TAP.
        uplink_offloads: u32,
        /// Optional parts that could not be set up.
        remarks: Vec<String>,
        /// Changes that the user did not ask for and will notice.
        notices: Vec<String>,
        /// Set if the launcher's end of the command's own terminal comes behind the queues.
        terminal: bool,
        /// Set if the file that was opened again for the command's standard input comes last.
        stdin: bool,
    },
    /// The command has been started.
    Running,
    /// The command was stopped.
    Stopped {
        /// Signal that stopped it.
        signal: i32,
        /// Number of the last order [`ToGuest::Continue`] before, or 0.
        number: u64,
    },
    /// The command has ended. The guest ends now.
    Ended(Ending),
    /// Comes with unconnected sockets of the guest's network.
    Sockets,
    /// Answers the order of the same name.
    Listening {
        id: u64,
        ports: ListeningPorts,
    },
    ExecEnded {
        id: u64,
        ending: Ending,
    },
    /// Comes with the launcher's end of a new terminal.
    Terminal {
        id: u64,
    },
    /// A command of `Exec` was not started, or its terminal was not made.
    ExecFailed {
        id: u64,
        /// Exit status for the client.
        status: u8,
        /// Reason, for the user.
        why: String,
    },
    /// Guest or command could not be started. The guest ends now.
    Failed {
        /// Exit status for the launcher.
        status: u8,
        /// Reason, for the user.
        why: String,
    },
}

impl FromGuest {
    /// Returns `true` if the report is about an order of one of the launcher's clients.
    pub fn is_for_client(&self) -> bool {
        matches!(
            self,
            FromGuest::ExecEnded { .. }
                | FromGuest::ExecFailed { .. }
                | FromGuest::Listening { .. }
                | FromGuest::Terminal { .. }
        )
    }
}
