//! Messages between the launcher and a guest's init.

use std::ffi::OsString;

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
    },
    /// Sends a signal to the command.
    Signal(i32),
    /// Runs another command. Comes with the descriptors of its standard input, output and error.
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
    ExecSignal {
        id: u64,
        /// Signal number.
        number: i32,
    },
}

/// Reports of a guest's init.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromGuest {
    /// The guest is set up. Comes with the descriptors of the queues of the switch's TAP, if there
    /// is one, and then those of the uplink's TAP.
    Ready {
        /// Offloads of the switch's TAP ([`ringfence_sys::tap::TapOffloads`]).
        offloads: u32,
        /// Offloads of the uplink's TAP.
        uplink_offloads: u32,
        /// Optional parts that could not be set up.
        remarks: Vec<String>,
    },
    /// The command has been started.
    Running,
    /// The command has ended. The guest ends now.
    Ended(Ending),
    /// Comes with unconnected sockets of the guest's network.
    Sockets,
    /// Answers the order of the same name.
    Listening { id: u64, ports: ListeningPorts },
    /// A command of `Exec` has ended.
    ExecEnded { id: u64, ending: Ending },
    /// A command of `Exec` was not started.
    ExecFailed {
        id: u64,
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
