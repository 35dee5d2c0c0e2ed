//! Random attack: three guests whose commands and frontends attack everything that they can reach, beside two correct
//! guests that verify every byte.
//!
//! The program has no usual test harness, because it also plays the attackers' launchers and frontends and the correct
//! guests' commands. As a test it runs one round. `cargo xtask attack random` runs it for a given time, set by these
//! variables:
//!
//! | variable | meaning |
//! |---|---|
//! | `RINGFENCE_ATTACK_MINUTES` | duration; without it, one round of 20 s |
//! | `RINGFENCE_ATTACK_SEED` | seed of everything random but the scheduling |
//! | `RINGFENCE_ATTACK_FAMILIES` | families of attacks, separated by commas; without it, all |
//! | `RINGFENCE_ATTACK_PROGRAM` | the `ringfence` of the correct guests and the driver domain |

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

mod frontend;
mod honest;
mod soak;
mod stranger;
#[path = "../support/mod.rs"]
mod support;
mod watchdog;

use std::process::ExitCode;

use clap::Parser;
use ringfence::cli::Cli;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[1..] {
        ["internal", "frontend"] => frontend::main().into(),
        ["honest", peer, seed] => honest::main(peer, seed.parse().unwrap()),
        ["stranger", directory, seed] => stranger::main(directory, seed.parse().unwrap()),
        ["run" | "internal", ..] => ringfence::main_with(Cli::parse()).into(),
        _ => support::harness::main(&[(
            "random_attackers_harm_no_correct_guest",
            random_attackers_harm_no_correct_guest,
        )]),
    }
}

fn random_attackers_harm_no_correct_guest() {
    let Some(findings) = soak::run(&soak::Settings::from_environment()) else { return };
    for finding in &findings {
        println!("FINDING {finding}");
    }
    println!("attack random: {} findings", findings.len());
    assert_eq!(findings, [] as [String; 0]);
}
