#![forbid(unsafe_code)]
//! The `ringfence-bench` command.
//!
//! The program starts guests and their domains as `ringfence` does, from its own file. It therefore
//! passes `run` and the roles of `ringfence internal` to the product's command line; under the name `ringfence`,
//! `vhost-user` and `shield`, too.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use ringfence_bench::cli::{Cli, InternalRole};

fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1).map(|word| word.into_string().unwrap_or_default());
    let of_the_product = match words.next().as_deref() {
        Some("run") => true,
        // Benchmarks have a command of this name, too.
        Some("vhost-user" | "shield") => {
            std::env::args_os().next().is_some_and(|name| name == "ringfence")
        }
        Some("internal") => words.next().is_some_and(|role| !InternalRole::has_subcommand(&role)),
        _ => false,
    };
    if of_the_product {
        return ringfence::main_with(ringfence::cli::Cli::parse()).into();
    }
    ringfence_bench::main_with(Cli::parse()).into()
}
