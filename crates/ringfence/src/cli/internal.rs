//! Command line of Ringfence's own processes.

use std::ffi::OsString;

use clap::{Parser, Subcommand};
use ringfence_sandbox::spawn::DomainKind;

/// Roles of Ringfence's own processes.
#[derive(Debug, Subcommand)]
pub enum Internal {
    /// Creates the namespaces of a domain, and waits for its end
    Supervisor {
        /// Kind of the domain
        #[arg(value_parser = parse_kind)]
        kind: DomainKind,
        /// Command of a guest
        #[arg(last = true)]
        command: Vec<OsString>,
    },
    /// Driver domain of a switch
    Driver,
    /// Frontend of a guest
    Frontend,
    /// Uplink of a guest
    Uplink,
    /// Disk of a virtual machine
    Disk,
    /// Proxy between a virtual machine and a foreign backend
    Proxy,
    /// Network card of a virtual machine
    Card,
    /// Shield between a virtual machine and a foreign backend
    Shield,
    /// Process of `pasta` in the background
    PastaSession {
        /// Arguments of pasta
        #[arg(last = true)]
        words: Vec<OsString>,
    },
    /// Process of `passt` in the background
    PasstSession {
        /// Arguments of passt
        #[arg(last = true)]
        words: Vec<OsString>,
    },
    /// Process in the namespaces that pasta connects
    PastaNamespace {
        /// Command of the namespaces
        #[arg(last = true)]
        words: Vec<OsString>,
    },
    /// Process that becomes pasta's command
    PastaCommand {
        /// Set if it is process 1 of a PID namespace
        #[arg(long)]
        own_pids: bool,
        /// Number of a pipe that is closed with the process that started this one
        #[arg(long, value_name = "FD")]
        parent: i32,
        /// The command and its arguments
        #[arg(last = true)]
        words: Vec<OsString>,
    },
    /// One end of the demonstration's transfer
    DemoPeer {
        /// End of the transfer
        #[command(subcommand)]
        role: crate::demo::peer::Role,
    },
    /// Init process of a guest
    GuestInit {
        /// Command of the guest
        #[arg(last = true)]
        command: Vec<OsString>,
    },
}

/// Command line of Ringfence's own processes. Its parser needs a third of the memory of [`Cli`](super::Cli)'s, which each process
/// would keep.
#[derive(Debug, Parser)]
#[command(name = "ringfence internal", disable_help_subcommand = true)]
pub struct InternalCli {
    /// Role of the process
    #[command(subcommand)]
    pub role: Internal,
}

impl InternalCli {
    /// Parses the words of a command line if it is that of a process of Ringfence's own.
    pub fn of(words: impl Iterator<Item = OsString>) -> Option<Result<InternalCli, clap::Error>> {
        let mut words = words.skip(1).peekable();
        words.peek().is_some_and(|word| word == "internal").then(|| Self::try_parse_from(words))
    }
}

fn parse_kind(text: &str) -> Result<DomainKind, String> {
    DomainKind::ALL
        .into_iter()
        .find(|kind| kind.subcommand() == text)
        .ok_or_else(|| "no such process".to_owned())
}
