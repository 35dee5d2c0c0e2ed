//! `cargo xtask soak`: what takes too long for the suite, run by hand and before a release. Each
//! soak prints a series of figures and fails when something is lost, damaged or grows.
//!
//! * [`transfer`]: a large file, again and again, while the driver domain is stopped at random.
//! * [`attach`]: guests that come and go beside one that stays.
//! * [`flows`]: TCP connections opened and closed between two guests.
//! * [`features`]: a vif with every set of offload keys at each end.
//! * [`window`]: a window between two processes, issued and revoked ten million times.
//! * [`disk`]: a disk whose frontend, driver domain or both are killed under load.

mod attach;
mod disk;
mod features;
mod flows;
mod series;
mod stage;
mod transfer;
mod window;

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};

use crate::exec::Cmd;
use crate::packages::target_directory;
use stage::Stage;

/// Which soak.
#[derive(Args)]
pub(crate) struct SoakArgs {
    #[command(subcommand)]
    soak: Soak,
    /// Use this `ringfence` instead of building one
    #[arg(long, global = true, value_name = "FILE")]
    program: Option<PathBuf>,
    /// How guests share their pages
    #[arg(long, global = true, default_value = "copy")]
    mode: String,
}

#[derive(Subcommand)]
enum Soak {
    /// Fetch a large file while the driver domain is stopped at random
    ///
    /// A web server in one guest, curl in another; the driver domain gets SIGSTOP and SIGCONT after
    /// random times of up to 40 ms. Every copy must have the right SHA-256.
    Transfer {
        /// How many times
        #[arg(long, default_value_t = 20)]
        times: u32,
        /// The file's size in MiB
        #[arg(long, default_value_t = 1024)]
        mebibytes: u64,
    },
    /// Attach and detach guests beside one that stays
    ///
    /// Descriptors and memory of the driver domain must not grow. Only root can count the
    /// descriptors of a process that is not dumpable.
    Attach {
        /// How many guests, one after the other
        #[arg(long, default_value_t = 1000)]
        times: u32,
    },
    /// Open and close TCP connections between two guests
    ///
    /// Descriptors and memory of the driver domain and both frontends must not grow.
    Flows {
        /// How many connections
        #[arg(long, default_value_t = 1_000_000)]
        times: u32,
    },
    /// Connect a vif with every set of offload keys at each end, in each mode
    ///
    /// 32 times 32 sets. TCP of the kernel runs both ways over IPv4 and IPv6 and must arrive
    /// with the right SHA-256, and no offload may be used that the other end does not take. This
    /// needs no `ringfence`: it is a test of crates/net, which otherwise spreads the modes over the
    /// pairs.
    Features,
    /// Issue, use and revoke pages of a window, as fast as two processes can
    ///
    /// Each page carries a generation that its user checks. It is a test of tools/testkit
    /// (`window_peer`), which otherwise does fewer rounds.
    Window {
        /// How many rounds
        #[arg(long, default_value_t = 10_000_000)]
        rounds: u64,
    },
    /// Kill whatever serves a disk, again and again, under load
    ///
    /// The frontend, the driver domain, or both, at random moments, in each mode. Every write that
    /// was acknowledged and then flushed is there, no sector is torn, and a file system of the
    /// kernel's holds what was synchronised. It is a test of the command (`disk_killed`), which
    /// otherwise kills less often.
    Disk {
        /// How many times
        #[arg(long, default_value_t = 200)]
        times: u32,
    },
}

/// One end of the connections of `soak flows`: what its guests run.
#[derive(Subcommand)]
pub(crate) enum Peer {
    /// Accepts connections and closes them
    Serve,
    /// Opens connections
    Connect {
        /// The server's name
        host: String,
        /// How many
        times: u32,
    },
}

/// Runs a soak; false if it failed.
pub(crate) fn run(args: &SoakArgs, root: &Path) -> anyhow::Result<bool> {
    match args.soak {
        Soak::Transfer { times, mebibytes } => transfer::run(&stage(args, root)?, times, mebibytes),
        Soak::Attach { times } => attach::run(&stage(args, root)?, times),
        Soak::Flows { times } => flows::run(&stage(args, root)?, times),
        Soak::Window { rounds } => window::run(root, rounds),
        Soak::Features => features::run(root),
        Soak::Disk { times } => disk::run(root, times),
    }
}

fn stage(args: &SoakArgs, root: &Path) -> anyhow::Result<Stage> {
    let program = match &args.program {
        Some(program) => std::path::absolute(program)?,
        None => build(root)?,
    };
    Stage::new(program, args.mode.clone())
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
