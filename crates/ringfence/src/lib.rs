#![forbid(unsafe_code)]
//! Guests for Rust programs ([`Guest`]), and the modules of the `ringfence` command.
//!
//! The command line ([`cli`]) selects one of the commands:
//!
//! * [`launch`]: `ringfence run`, the process in the user's terminal.
//! * [`commands`]: `ringfence ps`, `exec`, `logs`, `stop`, `port` and `wait`.
//! * [`ringfence_driver::xen`]: `ringfence serve`; [`status`]: `ringfence status`; [`top`]: `ringfence top`.
//! * [`ringfence_frontend::attach`]: `ringfence attach`.
//! * [`demo`]: `ringfence demo`.
//! * [`doctor`]: `ringfence doctor`.
//! * [`hub`]: `ringfence hub`. [`vhost_user`]: `ringfence vhost-user`, `pool-proxy` and `shield`.
//! * [`ringfence_pasta`]: `ringfence pasta`, `passt`, `pesto` and `slirp4netns`, and the programs of these names.
//!
//! `ringfence run` starts processes of its own, with these roles:
//!
//! * [`ringfence_driver::switch`]: driver domain of a switch.
//! * [`ringfence_frontend::process`]: frontend of a guest.
//! * [`ringfence_guest`]: init process of a guest.
//! * [`ringfence_uplink_process`]: connection of a guest to the host's network.
//!
//! `ringfence vhost-user` starts [`ringfence_driver::machine`], `ringfence pool-proxy` [`ringfence_driver::pool_proxy`],
//! `ringfence shield` [`ringfence_driver::shield`].
//!
//! Modules for several of them:
//!
//! * [`disk`]: options about disks.

pub mod cli;
pub mod commands;
pub mod demo;
pub mod disk;
pub mod doctor;
pub mod hub;
pub mod launch;
mod library;
pub mod status;
mod terminal;
pub mod top;
pub mod vhost_user;

use std::io::Write;

pub use library::{Guest, GuestBuilder, GuestError, Running};

use cli::{Cli, Command, Internal};
use ringfence_hostnet::out;
use ringfence_sandbox::{STATUS_FAILED, supervisor};

/// Runs the command that the command line selects. Returns the exit status.
pub fn main_with(cli: Cli) -> u8 {
    match cli.command {
        Command::Run(args) => Guest::from(args).run(),
        Command::Ps(args) => commands::ps::main(&args),
        Command::Exec(args) => commands::exec::main(&args),
        Command::Logs(args) => commands::logs::main(&args),
        Command::Stop(args) => commands::stop::main(&args),
        Command::Wait(args) => commands::wait::main(&args),
        Command::Port(args) => commands::port::main(&args),
        Command::Demo => demo::main(),
        Command::Serve(args) => ringfence_driver::xen::process::main(&args),
        Command::Status(args) => status::main(&args),
        Command::Top(args) => top::main(&args),
        Command::Doctor(args) => doctor::main(&args),
        Command::Attach(args) => ringfence_frontend::attach::main(&args),
        Command::Hub(args) => hub::main(&args),
        Command::VhostUser(args) => vhost_user::main(&args),
        Command::PoolProxy(args) => vhost_user::pool_proxy(&args),
        Command::Shield(args) => vhost_user::shield(&args),
        Command::Policy { command } => match commands::policy::run(&command) {
            Ok((text, status)) => print(text.as_bytes()).max(status),
            Err(error) => fail(&ringfence_hostnet::causes::causes(&error)),
        },
        Command::Disk { command } => match commands::disk::run(&command) {
            Ok((text, status)) => print(text.as_bytes()).max(status),
            Err(error) => fail(&ringfence_hostnet::causes::causes(&error)),
        },
        // Their own parsers run before this one.
        Command::Pasta(_) | Command::Passt(_) | Command::Pesto(_) | Command::Slirp4netns(_) => {
            start_by_name(std::env::args_os).unwrap_or(STATUS_FAILED)
        }
        Command::Completions { shell } => {
            let mut script = Vec::new();
            cli::write_completions(shell, &mut script);
            print(&script)
        }
        Command::Man(args) => {
            let mut page = Vec::new();
            match args.run(&mut page) {
                Ok(()) => print(&page),
                Err(error) => match error.downcast_ref::<clap::Error>() {
                    Some(usage) => out::tell(usage),
                    None => fail(&ringfence_hostnet::causes::causes(&error)),
                },
            }
        }
        Command::Internal { role } => internal_main(role),
    }
}

/// Runs a process of Ringfence's own. Returns the exit status.
pub fn internal_main(role: Internal) -> u8 {
    match role {
        Internal::Supervisor { kind, command } => supervisor::main(kind, &command),
        Internal::Driver => ringfence_driver::switch::process::main(),
        Internal::Frontend => ringfence_frontend::process::main(),
        Internal::Uplink => ringfence_uplink_process::process::main(),
        Internal::Disk => ringfence_driver::machine::main(),
        Internal::Proxy => ringfence_driver::pool_proxy::main(),
        Internal::Card => ringfence_frontend::card::main(),
        Internal::Shield => ringfence_driver::shield::main(),
        Internal::PastaSession { words } => ringfence_pasta::session_main(&words),
        Internal::PasstSession { words } => ringfence_pasta::passt::session_main(&words),
        Internal::PastaNamespace { words } => ringfence_pasta::namespace::main(&words),
        Internal::PastaCommand { own_pids, parent, words } => {
            ringfence_pasta::namespace::start_command(&words, own_pids, parent)
        }
        Internal::DemoPeer { role } => demo::peer::main(&role),
        Internal::GuestInit { command } => ringfence_guest::main(&command),
    }
}

/// Runs one of the programs whose place Ringfence takes, if this one was started by its name or by a command of that
/// name. Returns the exit status.
pub fn start_by_name<W: Iterator<Item = std::ffi::OsString>>(words: impl Fn() -> W) -> Option<u8> {
    if let Some(arguments) = ringfence_pasta::arguments(ringfence_pasta::program::PASTA, words()) {
        return Some(ringfence_pasta::main(&arguments));
    }
    if let Some(arguments) = ringfence_pasta::arguments(ringfence_pasta::program::PASST, words()) {
        return Some(ringfence_pasta::passt::main(&arguments));
    }
    if let Some(arguments) = ringfence_pasta::arguments(ringfence_pasta::pesto::NAME, words()) {
        return Some(ringfence_pasta::pesto::main(&arguments));
    }
    let arguments = ringfence_pasta::arguments(ringfence_pasta::slirp4netns::NAME, words())?;
    Some(ringfence_pasta::slirp4netns::main(&arguments))
}

/// Checks that the stack may grow as far as the command line's parser needs. Otherwise prints an error.
///
/// # Errors
///
/// Returns the exit status if the limit is too low.
pub fn check_stack() -> Result<(), u8> {
    /// Stack size in bytes. Release builds need about 100 KiB.
    const NEEDED: u64 = 256 * 1024;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Stack).current;
    match limit.filter(|bytes| *bytes < NEEDED) {
        None => Ok(()),
        Some(bytes) => Err(fail(&format_args!(
            "the limit of the stack is {} KiB, and {} KiB are needed: `ulimit -s 8192`",
            bytes / 1024,
            NEEDED / 1024
        ))),
    }
}

fn print(text: &[u8]) -> u8 {
    match out::Out.write_all(text) {
        Ok(()) => 0,
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => 0,
        Err(error) => fail(&error),
    }
}

fn fail(error: &dyn std::fmt::Display) -> u8 {
    eprintln!("ringfence: {error}");
    STATUS_FAILED
}
