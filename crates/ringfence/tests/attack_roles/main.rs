//! Attacks on driver domains and daemons, in which the program plays the attacker: a process that connects to the
//! control socket of a switch, a frontend, and the daemons `serve` and `attach` that were taken over.
//!
//! The first words of the command line choose the role, so the program has no test harness. Started as `run` it plays
//! launcher, supervisors and domains as `ringfence` does.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod control;
mod descriptors;
mod serve;
#[path = "../support/mod.rs"]
mod support;

use std::process::ExitCode;

use clap::Parser;
use ringfence::cli::Cli;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[1..] {
        ["connect", directory, switch] => control::connect(directory, switch),
        ["hold"] => descriptors::hold(),
        ["internal", "frontend"] => descriptors::main_of_frontend(),
        ["run" | "internal", ..] => ringfence::main_with(Cli::parse()).into(),
        ["serve", ..] => serve::main_taken_over("found"),
        ["attach", ..] => serve::main_taken_over("connected"),
        ["unboxed", ..] => serve::main_unboxed(),
        _ => support::harness::main(&[control::TESTS, descriptors::TESTS, serve::TESTS].concat()),
    }
}
