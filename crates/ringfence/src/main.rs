#![forbid(unsafe_code)]
//! Entry point of the `ringfence` command.

use std::process::ExitCode;

use ringfence::cli::{Cli, InternalCli, hints};

fn main() -> ExitCode {
    if let Err(status) = ringfence::check_stack() {
        return status.into();
    }
    if let Some(status) = ringfence::start_by_name(std::env::args_os) {
        return status.into();
    }
    match InternalCli::of(std::env::args_os()) {
        Some(Ok(cli)) => return ringfence::internal_main(cli.role).into(),
        Some(Err(error)) => return ringfence_hostnet::out::tell(&error).into(),
        None => {}
    }
    match Cli::of(std::env::args_os) {
        Ok(cli) => ringfence::main_with(cli).into(),
        Err(error) => {
            ringfence_hostnet::out::tell(&hints::explained(error, std::env::args_os())).into()
        }
    }
}
