#![forbid(unsafe_code)]
//! The `ringfence` command: everything that is not a crate of its own.
//!
//! * [`cli`]: the command line.
//! * [`launch`]: `ringfence run`, the process in the user's terminal.
//! * [`sys`]: processes, namespaces, the sandbox.
//! * [`guest`]: a guest's init.
//! * [`names`]: how guests find each other.

pub mod cli;
pub mod guest;
pub mod launch;
pub mod names;
pub mod sys;

use std::io::Write;

use cli::{Cli, Command, Internal};
use sys::inner::{self, DriverStart, FrontendStart, Prepare};
use sys::{STATUS_FAILED, keeper};

/// What the processes of this program do that differ between the program and its tests.
pub struct Roles {
    /// The driver domain.
    pub driver: Prepare<DriverStart>,
    /// A guest's frontend.
    pub frontend: Prepare<FrontendStart>,
    /// Names, by a store connection.
    pub names: guest::OpenNames,
    /// The launcher's dealings with a hub.
    pub switchboard: &'static dyn launch::switchboard::Switchboard,
    /// `ringfence hub`.
    pub hub: fn(&cli::HubArgs) -> anyhow::Result<()>,
}

/// Does what the command line says; returns the exit status.
pub fn main_with(roles: &Roles, cli: Cli) -> u8 {
    match cli.command {
        Command::Run(args) => launch::run(&args.into_options(), roles.switchboard),
        Command::Hub(args) => status((roles.hub)(&args)),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            cli::write_completions(shell, &mut script);
            status(print(&script))
        }
        Command::Internal { role } => match role {
            Internal::Keeper { kind, command } => keeper::main(kind, &command),
            Internal::Driver => inner::driver(roles.driver),
            Internal::Frontend => inner::frontend(roles.frontend),
            Internal::GuestInit { command } => guest::main(&command, roles.names),
            Internal::Man => {
                let mut page = Vec::new();
                status(cli::write_manual(&mut page).map_err(Into::into).and_then(|()| print(&page)))
            }
        },
    }
}

fn print(text: &[u8]) -> anyhow::Result<()> {
    Ok(std::io::stdout().write_all(text)?)
}

fn status(outcome: anyhow::Result<()>) -> u8 {
    match outcome {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("ringfence: {error:#}");
            STATUS_FAILED
        }
    }
}
