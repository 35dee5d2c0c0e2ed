//! `cargo xtask soak`: tests that take too long for the suite. They run by hand and before a release. Each
//! prints a series of figures and fails if data is lost or damaged, or if a figure grows.
//!
//! * [`transfer`]: a large file, many times, while the driver domain is stopped at random.
//! * [`attach`]: guests that start and end beside one that stays.
//! * [`flows`]: TCP connections opened and closed between two guests.
//! * [`features`]: a vif with every set of offload keys at each end.
//! * [`window`]: a grant window between two processes, with ten million grants issued and revoked.
//! * [`tests`]: the tests of the default set beside a load.
//! * [`network`]: real programs over an uplink whose network changes, loses and reorders.
//! * [`disk`]: a disk whose frontend, driver domain or both are killed under load.

mod attach;
mod disk;
mod features;
mod flows;
mod network;
mod series;
mod testbed;
mod tests;
mod transfer;
mod window;

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use taskkit::exec::Cmd;

use crate::packages::target_directory;
use testbed::Testbed;

/// Arguments of `cargo xtask soak`.
#[derive(Args)]
pub(crate) struct SoakArgs {
    #[command(subcommand)]
    soak: Soak,
    /// Use this `ringfence` instead of building one
    #[arg(long, global = true, value_name = "FILE")]
    program: Option<PathBuf>,
    /// Access mode of the guests' pages
    #[arg(long, global = true, default_value = "copy")]
    mode: String,
}

#[derive(Subcommand)]
enum Soak {
    /// Run the tests of the default set many times beside a load
    ///
    /// After the rounds the property tests run once with 20 times the cases. Each test that fails leaves its output in
    /// `xtask/soak/ROUND-TEST.log` in the target directory. A later call on the same commit, with the same load, omits the
    /// rounds that are done, until there are as many as wanted.
    Tests {
        /// Number of rounds
        #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
        rounds: u32,
        /// Number of busy loops beside the tests
        #[arg(long, default_value_t = 6)]
        load: u32,
        /// Run only tests whose names contain one of these
        filter: Vec<String>,
    },
    /// Fetch a large file while the driver domain is stopped at random
    ///
    /// A web server runs in one guest, curl in another. The driver domain gets SIGSTOP and SIGCONT after
    /// random times of up to 40 ms. Every copy must have the right SHA-256.
    Transfer {
        /// Number of transfers
        #[arg(long, default_value_t = 20)]
        times: u32,
        /// Size of the file in MiB
        #[arg(long, default_value_t = 1024)]
        mebibytes: u64,
    },
    /// Attach and detach guests beside one that stays
    ///
    /// Descriptors and memory of the driver domain must not grow. Only root can count the
    /// descriptors of a process that is not dumpable.
    Attach {
        /// Number of guests, one after the other
        #[arg(long, default_value_t = 1000)]
        times: u32,
    },
    /// Open and close TCP connections between two guests
    ///
    /// Descriptors and memory of the driver domain and both frontends must not grow.
    Flows {
        /// Number of connections
        #[arg(long, default_value_t = 1_000_000)]
        times: u32,
    },
    /// Connect a vif with every set of offload keys at each end, in each mode
    ///
    /// 32 times 32 sets. Kernel TCP runs in both directions over IPv4 and IPv6; the data must have the
    /// right SHA-256, and no end may use an offload that the other end does not accept. The test is
    /// part of crates/net, which otherwise spreads the modes over the pairs. It needs no `ringfence`.
    Features,
    /// Issue, use and revoke grants of a window, as fast as two processes can
    ///
    /// Each page carries a generation that its user checks. The test is part of tools/testkit
    /// (`window_peer`), which otherwise runs fewer rounds.
    Window {
        /// Number of rounds
        #[arg(long, default_value_t = 10_000_000)]
        rounds: u64,
    },
    /// Kill the processes that serve a disk, repeatedly, under load
    ///
    /// Kills the frontend, the driver domain, or both, at random times, in each mode. Every flushed write
    /// must be on the disk, no sector may be torn, and a kernel file system must hold the synchronised
    /// data. The test is part of crates/ringfence (`disks`), which otherwise kills less often.
    Disk {
        /// Number of kills
        #[arg(long, default_value_t = 200)]
        times: u32,
    },
    /// Run real programs in a guest over a network that changes, loses and reorders
    ///
    /// git, package managers, curl, ssh, a browser and flows that are silent for long. No attempt may fail but with an
    /// address of the host that is removed. In four pauses all flows end, and descriptors and memory of the uplink must
    /// not grow. Programs that are not installed are left out. The test is part of crates/ringfence (`network`). Run it as
    /// root.
    Network {
        /// Time without the pauses
        #[arg(long, default_value_t = 120, value_parser = clap::value_parser!(u32).range(1..))]
        minutes: u32,
    },
}

/// End of the connections of `soak flows` that runs in a guest.
#[derive(Subcommand)]
pub(crate) enum Peer {
    /// Accepts connections and closes them
    Serve,
    /// Opens connections
    Connect {
        /// Name of the server
        host: String,
        /// Number of connections
        times: u32,
    },
}

/// Runs a soak test. Returns `false` if it failed.
pub(crate) fn run(args: &SoakArgs, root: &Path) -> anyhow::Result<bool> {
    match &args.soak {
        Soak::Tests { rounds, load, filter } => tests::run(root, *rounds, *load, filter),
        Soak::Transfer { times, mebibytes } => {
            transfer::run(&testbed(args, root)?, *times, *mebibytes)
        }
        Soak::Attach { times } => attach::run(&testbed(args, root)?, *times),
        Soak::Flows { times } => flows::run(&testbed(args, root)?, *times),
        Soak::Window { rounds } => window::run(root, *rounds),
        Soak::Features => features::run(root),
        Soak::Disk { times } => disk::run(root, *times),
        Soak::Network { minutes } => network::run(root, *minutes),
    }
}

fn testbed(args: &SoakArgs, root: &Path) -> anyhow::Result<Testbed> {
    let program = match &args.program {
        Some(program) => std::path::absolute(program)?,
        None => build(root)?,
    };
    Testbed::new(program, args.mode.clone())
}

/// Runs one end of `soak flows`.
pub(crate) fn peer(peer: &Peer) -> anyhow::Result<bool> {
    match peer {
        Peer::Serve => flows::serve(),
        Peer::Connect { host, times } => flows::connect(host, *times),
    }
}

fn build(root: &Path) -> anyhow::Result<PathBuf> {
    let built = Cmd::cargo().args(["build", "--release", "--package", "ringfence"]).run(root)?;
    anyhow::ensure!(built, "ringfence does not build");
    Ok(target_directory(root)?.join("release/ringfence"))
}
