#![forbid(unsafe_code)]
//! Ringfence's build and test tasks, run as `cargo xtask COMMAND`.
//!
//! * `test`: a table of steps ([`steps`]) in a default set and a long set ([`run`]). It uses the installer of the
//!   required programs ([`taskkit::tools`]), one build of all test programs ([`built`], [`links`]), their runner
//!   ([`programs`]), the marks of long tests ([`marks`]), the report at the end ([`report`]) and the record of the long set
//!   ([`record`]).
//! * `tidy`: the project's rules for the sources ([`tidy`]); `syscalls` writes the list that they imply.
//! * `attack`: the attack suite ([`attack`]); `mutate`: removal of each guard ([`mutate`]).
//! * `soak`: tests that take too long for the suite ([`soak`]).
//! * `clients`: Podman and RootlessKit with `ringfence pasta` ([`clients`]).
//! * `package`: Debian packages of the program and the kernel modules ([`package`]); `dist`: archives of the program ([`dist`]);
//!   both have the files of [`contents`]. `release`: a version of all of them ([`release`]). `fresh`, a step: a new Debian system ([`fresh`]).
//! * `book`: the documentation as a site ([`book`]). It and `tidy` read pages by [`markdown`].
//! * `vm`: tests on machines under emulation, `xen`: the hypervisor with grant windows ([`vm_lab`]).

mod attack;
mod book;
mod built;
mod clients;
mod clone;
mod contents;
mod context;
mod dist;
mod fresh;
mod links;
mod markdown;
mod marks;
mod mutate;
mod new_system;
mod package;
mod packages;
mod product;
mod programs;
mod record;
mod release;
mod report;
mod run;
mod soak;
mod steps;
mod test_program;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Parser, Subcommand};

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
    /// Run the checks and tests of the default set; CI runs only this
    ///
    /// First installs the programs that the tests need, as far as it may: Debian packages under root, Rust
    /// components under any user, and with --long cargo-deny, which is built from source. Otherwise it prints the
    /// missing programs and the commands that install them, and reports what cannot run as SKIPPED. Every step
    /// runs, even after a failed one. The exit status is 1 if a step failed, and 0 otherwise; with --no-skips it is 2
    /// if something was skipped.
    Test(run::TestArgs),
    /// Check the sources against the project's rules (exceptions: xtask/tidy.toml)
    Tidy,
    /// Write the sandboxes' list of system calls from the `#syscall` lines in the sources
    Syscalls,
    /// Run tests that take too long for the suite: many transfers, guests, connections
    Soak(soak::SoakArgs),
    /// Run the attack suite, as root and as an ordinary user; `random` for random adversaries
    Attack(attack::AttackArgs),
    /// Remove each guard in xtask/mutations.toml and require that its test fails
    Mutate(mutate::MutateArgs),
    /// Run Podman and RootlessKit with Ringfence in the place of pasta, and with pasta
    ///
    /// Needs root and debootstrap, which installs a Debian system below the target directory; the versions of
    /// RootlessKit that Debian does not have need Go. clients/README.md explains scenarios.
    Clients(clients::ClientsArgs),
    /// Make Debian packages of the program and of the kernel modules; `--try` installs, uses and removes them
    Package(package::PackageArgs),
    /// Make packages for Debian, RPM and Arch, the static tarball, the Python wheel, the bill of materials and their checksums
    ///
    /// Two runs on one commit make equal bytes. Needs objcopy and strip (binutils), xz, zip, and a static glibc (libc6-dev).
    Dist(dist::DistArgs),
    /// Make a release as far as it stays on this computer: versions, changelog, text of the tag, packages and archives
    ///
    /// Commits version and changelog, and prints the commands that tag, sign and send.
    Release(release::ReleaseArgs),
    /// Make a site of docs/, with the manual pages and search, by mdBook; check its links
    ///
    /// Without mdBook (`cargo install --locked mdbook`) only the sources of the site are made.
    Book(book::BookArgs),
    /// Run tests on whole machines under emulation: Xen with its guests, or a plain Linux kernel
    ///
    /// Needs QEMU and xz. Everything else is downloaded as Debian packages and unpacked below the target
    /// directory. vm/README.md explains scenarios.
    Vm(vm_lab::VmArgs),
    /// Build Xen with grant windows (xen/) from Debian's source
    Xen(vm_lab::window_xen::WindowXenArgs),
    /// Program that `soak flows` runs in its guests
    #[command(hide = true)]
    FlowPeer {
        #[command(subcommand)]
        peer: soak::Peer,
    },
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match cli.command {
        Command::Test(args) => {
            return match repository_root()
                .and_then(context::Context::new)
                .and_then(|context| run::run(&args, context))
            {
                Ok(status) => ExitCode::from(status),
                Err(error) => failure(&error),
            };
        }
        Command::Tidy => run_tidy(),
        Command::Syscalls => write_syscalls(),
        Command::Soak(args) => repository_root().and_then(|root| soak::run(&args, &root)),
        Command::Attack(args) => repository_root().and_then(|root| attack::run(&args, &root)),
        Command::Mutate(args) => repository_root()
            .and_then(|root| mutate::run(&args, &root, &packages::target_directory(&root)?)),
        Command::Clients(args) => repository_root()
            .and_then(|root| clients::run(&args, &root, &packages::target_directory(&root)?)),
        Command::Package(args) => repository_root()
            .and_then(|root| package::run(&args, &root, &packages::target_directory(&root)?)),
        Command::Dist(args) => repository_root()
            .and_then(|root| dist::run(&args, &root, &packages::target_directory(&root)?)),
        Command::Release(args) => repository_root()
            .and_then(|root| release::run(&args, &root, &packages::target_directory(&root)?)),
        Command::Book(args) => repository_root()
            .and_then(|root| book::run(&args, &root, &packages::target_directory(&root)?)),
        Command::Vm(args) => repository_root()
            .and_then(|root| vm_lab::run(&args, &root, &packages::target_directory(&root)?)),
        Command::Xen(args) => repository_root().and_then(|root| {
            vm_lab::window_xen::run(&args, &root, &packages::target_directory(&root)?)
        }),
        Command::FlowPeer { peer } => soak::peer(&peer),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => failure(&error),
    }
}

fn failure(error: &anyhow::Error) -> ExitCode {
    eprintln!("xtask: {error:#}");
    ExitCode::FAILURE
}

/// Checks the tidy rules. Returns `false` after a finding.
fn run_tidy() -> anyhow::Result<bool> {
    let findings = tidy::check(&repository_root()?)?;
    print!("{}", tidy::describe(&findings));
    Ok(findings.is_empty())
}

/// Writes the list of system calls. Returns `false` if a line cannot be parsed.
fn write_syscalls() -> anyhow::Result<bool> {
    let findings = tidy::write_syscalls(&repository_root()?)?;
    for finding in &findings {
        println!("{finding}");
    }
    Ok(findings.is_empty())
}

/// Returns the top of the checkout: the parent of this package's directory.
fn repository_root() -> anyhow::Result<PathBuf> {
    let package = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    package.parent().map(Path::to_path_buf).context("xtask is not in a checkout")
}
