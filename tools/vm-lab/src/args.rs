//! Command line of `cargo xtask vm`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::apt::Release;

/// Arguments of `cargo xtask vm`.
#[derive(Args)]
pub struct VmArgs {
    #[command(subcommand)]
    pub(crate) suite: Suite,
}

#[derive(Subcommand)]
pub(crate) enum Suite {
    /// Xen, a dom0 and its guests
    Xen(XenArgs),
    /// A plain Linux kernel
    Linux(LinuxArgs),
    /// Compile the kernel modules of linux/ for the newest kernels of this Debian release and of its backports
    Modules(ModulesArgs),
}

#[derive(Args)]
pub(crate) struct ModulesArgs {
    /// Directory for packages; by default `vm` in the target directory
    #[arg(long, value_name = "FOLDER", env = "RINGFENCE_VM_CACHE")]
    pub(crate) cache: Option<PathBuf>,
    /// Install nothing
    #[arg(long)]
    pub(crate) no_install: bool,
}

#[derive(Args)]
pub(crate) struct XenArgs {
    #[command(flatten)]
    pub(crate) common: SuiteArgs,
    /// Debian release of Xen, its tools and the kernels; by default this computer's
    #[arg(long, value_enum)]
    pub(crate) suite: Option<Release>,
    /// Boot a debug build of the hypervisor, which names every bad grant on the console and counts grant
    /// operations; it is built from Debian's source first, which takes about a minute
    #[arg(long)]
    pub(crate) debug_xen: bool,
    /// Boot the hypervisor with grant windows (folder xen/) for every scenario, also those that need none
    #[arg(long)]
    pub(crate) window_xen: bool,
    /// Boot the hypervisor with grant windows without these guards, a sum of the numbers in xen/README.md; for trials of
    /// tests
    #[arg(long, value_name = "SUM", requires = "debug_xen")]
    pub(crate) without_guards: Option<u32>,
    /// Boot this hypervisor (its ELF file) instead of Debian's; with --debug-xen it is a debug build, and nothing is built
    #[arg(long, value_name = "FILE", conflicts_with_all = ["window_xen", "without_guards"])]
    pub(crate) hypervisor: Option<PathBuf>,
}

#[derive(Args)]
pub(crate) struct LinuxArgs {
    #[command(flatten)]
    pub(crate) common: SuiteArgs,
    /// Debian release of the kernel; by default this computer's
    #[arg(long, value_enum)]
    pub(crate) suite: Option<Release>,
    /// Debian release of QEMU and passt; by default this computer's
    #[arg(long, value_enum, value_name = "SUITE")]
    pub(crate) qemu: Option<Release>,
}

#[derive(Args)]
pub(crate) struct SuiteArgs {
    /// Run these scenarios instead of the core set
    #[arg(value_name = "SCENARIO")]
    pub(crate) scenarios: Vec<String>,
    /// Run every scenario except those that only run by name
    #[arg(long)]
    pub(crate) all: bool,
    /// Print the scenarios, and run nothing
    #[arg(long)]
    pub(crate) list: bool,
    /// Boot, run the named scenarios if any, and start a shell on the console
    #[arg(long)]
    pub(crate) shell: bool,
    /// Use this statically linked `ringfence` instead of building one
    #[arg(long, value_name = "FILE")]
    pub(crate) program: Option<PathBuf>,
    /// Multiply every time limit by this factor, for a busy or slow computer
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) patience: u32,
    /// Number of processors of a machine; with two, dom0 and guests run at the same time
    #[arg(long, value_name = "N", default_value_t = PROCESSORS, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) processors: u32,
    /// Let an instruction take a nanosecond of the machine's time, so that processor time is a number of instructions.
    /// Machines have one processor then
    #[arg(long, conflicts_with = "processors")]
    pub(crate) count_instructions: bool,
    /// Number of machines that run at the same time
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) machines: u32,
    /// Directory for packages and images; by default `vm` in the target directory
    #[arg(long, value_name = "FOLDER", env = "RINGFENCE_VM_CACHE")]
    pub(crate) cache: Option<PathBuf>,
    /// Set a variable of the scenarios, such as the length of a run
    #[arg(long = "set", value_name = "NAME=VALUE", value_parser = parse_variable)]
    pub(crate) variables: Vec<String>,
    /// Print the scenarios' notes in addition to their checks
    #[arg(long, short)]
    pub(crate) verbose: bool,
    /// Install nothing
    #[arg(long)]
    pub(crate) no_install: bool,
}

/// Default number of processors of a machine. On a computer with two processors, two machines of one processor are
/// faster than one of two: emulated processors stop and wait for each other whenever one changes a mapping.
pub(crate) const PROCESSORS: u32 = 1;

/// Accepts a variable and a value that the shell takes as they are.
fn parse_variable(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_.,:/-".contains(c);
    match text.split_once('=') {
        Some((name, value))
            if name.starts_with(|c: char| c.is_ascii_uppercase())
                && name.chars().all(|c| c.is_ascii_uppercase() || c == '_')
                && value.chars().all(plain) =>
        {
            Ok(text.to_owned())
        }
        _ => Err("NAME=VALUE, with a name of A-Z and _, and a value without blanks".to_owned()),
    }
}
