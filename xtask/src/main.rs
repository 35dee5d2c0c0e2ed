#![forbid(unsafe_code)]
//! Ringfence's build and test tasks, run as `cargo xtask COMMAND`.
//!
//! `test` is a table of steps ([`steps`]) over three services: what must be installed and how
//! ([`tools`]), how a command is run and its tests are counted ([`exec`]), and what the reader is
//! told at the end ([`report`]). `attack` runs the attack suite ([`attack`]), `mutate` removes guards ([`mutate`]). `soak` is what takes too long for it ([`soak`]); `vm` is what needs a
//! machine of its own ([`vm`]). `tidy` enforces the rules of the house on the sources ([`tidy`]).

mod attack;
mod exec;
mod mutate;
mod packages;
mod report;
mod soak;
mod steps;
mod tidy;
mod tools;
mod vm;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::builder::PossibleValuesParser;
use clap::{Args, Parser, Subcommand};

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    about = "Ringfence's build and test tasks"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run every check and test there is; CI runs this and nothing else
    ///
    /// First installs what the tests need, where it may: Debian packages when run as root, Rust
    /// components and cargo-deny for any user. Where it may not, it says what is missing and how
    /// to get it; what cannot run without it is reported as SKIPPED. Every step runs, even after
    /// one failed. The exit status is 0 if no step failed.
    Test(TestArgs),
    /// Check the sources against the rules of the house (xtask/tidy.toml has the exceptions)
    Tidy,
    /// Write the sandboxes' list of system calls anew, from the `#syscall` lines of the sources
    Syscalls,
    /// Run what takes too long for the suite: many transfers, guests, connections
    Soak(soak::SoakArgs),
    /// Run the attack suite, as root and as an ordinary user; `random` for random attackers
    Attack(attack::AttackArgs),
    /// Remove each guard of xtask/mutations.toml, and demand that its test fails
    Mutate(mutate::MutateArgs),
    /// Run whole machines under emulation: real Xen with its guests, or a plain Linux kernel
    ///
    /// Needs QEMU and xz; everything else is downloaded as Debian packages and unpacked below the
    /// target directory. How to write a scenario: vm/README.md.
    Vm(vm::VmArgs),
    /// Build Xen with grant windows (xen/) from Debian's source
    Xen(vm::window_xen::WindowXenArgs),
    /// What the guests of `soak flows` run
    #[command(hide = true)]
    FlowPeer {
        #[command(subcommand)]
        peer: soak::Peer,
    },
}

#[derive(Args)]
struct TestArgs {
    /// Run only these steps (see --list)
    #[arg(long, value_name = "STEP", value_delimiter = ',', value_parser = step_names())]
    only: Vec<String>,
    /// Leave these steps out (see --list)
    #[arg(long, value_name = "STEP", value_delimiter = ',', value_parser = step_names())]
    skip: Vec<String>,
    /// Print the steps and what each checks, and run nothing
    #[arg(long)]
    list: bool,
    /// Install nothing and change nothing outside the target directory
    #[arg(long)]
    no_install: bool,
    /// How long fuzz-smoke runs each fuzz target, in seconds
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    fuzz_seconds: u32,
}

fn step_names() -> PossibleValuesParser {
    PossibleValuesParser::new(steps::STEPS.iter().map(|step| step.name))
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match cli.command {
        Command::Test(args) => run_steps(&args),
        Command::Tidy => run_tidy(),
        Command::Syscalls => write_syscalls(),
        Command::Soak(args) => repository_root().and_then(|root| soak::run(&args, &root)),
        Command::Attack(args) => repository_root().and_then(|root| attack::run(&args, &root)),
        Command::Mutate(args) => repository_root()
            .and_then(|root| mutate::run(&args, &root, &packages::target_directory(&root)?)),
        Command::Vm(args) => repository_root()
            .and_then(|root| vm::run(&args, &root, &packages::target_directory(&root)?)),
        Command::Xen(args) => repository_root().and_then(|root| {
            vm::window_xen::run(&args, &root, &packages::target_directory(&root)?)
        }),
        Command::FlowPeer { peer } => soak::peer(&peer),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the selected steps; false if one failed.
fn run_steps(args: &TestArgs) -> anyhow::Result<bool> {
    let selected: Vec<&steps::Step> = steps::STEPS
        .iter()
        .filter(|s| args.only.is_empty() || args.only.iter().any(|name| name == s.name))
        .filter(|s| !args.skip.iter().any(|name| name == s.name))
        .collect();
    if args.list {
        print!("{}", report::listing(&selected));
        return Ok(true);
    }
    anyhow::ensure!(!selected.is_empty(), "no step is left to run; `cargo xtask test --list`");
    let context = steps::Context::new(repository_root()?, args.fuzz_seconds)?;
    Ok(steps::run(&selected, context, !args.no_install))
}

/// Runs the tidy rules alone; false if something is untidy.
fn run_tidy() -> anyhow::Result<bool> {
    let findings = tidy::check(&repository_root()?)?;
    print!("{}", tidy::describe(&findings));
    Ok(findings.is_empty())
}

/// Writes the list of system calls; false if a line cannot be read.
fn write_syscalls() -> anyhow::Result<bool> {
    let findings = tidy::write_syscalls(&repository_root()?)?;
    for finding in &findings {
        println!("{finding}");
    }
    Ok(findings.is_empty())
}

/// The top of the checkout: the folder above the one this package was built from.
fn repository_root() -> anyhow::Result<PathBuf> {
    let package = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    package.parent().map(Path::to_path_buf).context("xtask is not in a checkout")
}
