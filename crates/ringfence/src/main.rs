#![forbid(unsafe_code)]
//! The `ringfence` command.

use std::process::ExitCode;

use clap::Parser;
use ringfence::cli::Cli;

fn main() -> ExitCode {
    ringfence::main_with(Cli::parse()).into()
}
