//! Command line of `ringfence serve`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use ringfence_platform::PlatformChoice;

use super::config::PATH_DEFAULT;
use super::setup::RUNTIME_DIR;

const EXAMPLES: &str = "\
Examples:
  Check a configuration:
    ringfence serve --check

  A guest whose interface it serves (in the guest's xl configuration):
    vif = [ 'bridge=xenbr0,script=vif-ringfence' ]

  A guest whose disk it serves, a file, a device, or what an NBD server exports:
    disk = [ 'vdev=xvda,script=block-ringfence,target=/var/lib/xen/images/a.img' ]

  From a driver domain called `net` instead of dom0:
    vif = [ 'bridge=xenbr0,backend=net,script=vif-ringfence' ]

Signals:
    SIGTERM ends the daemon. Guests stay connected, and the next daemon takes them over.
    --on-exit=close closes their interfaces and disks instead. SIGHUP reads the configuration again.";

/// Serve network interfaces and disks to Xen guests, in dom0 or a driver domain
///
/// Finds the interfaces and disks that the toolstack makes for this domain and serves them to
/// unmodified guests, in place of the kernel's xen-netback and xen-blkback, which must not be loaded. It
/// can be stopped (or killed) and started again while guests run: their devices are taken over as they
/// are, and no request to a disk is lost.
///
/// Needs root, and the kernel's xen-gntdev, xen-evtchn and tun.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ServeArgs {
    /// Configuration file; the default one may be missing
    #[arg(long, value_name = "FILE", default_value = PATH_DEFAULT)]
    pub config: PathBuf,

    /// Check the configuration, print the result, and exit
    #[arg(long)]
    pub check: bool,

    /// Action on the guests' devices when the daemon ends
    #[arg(long, value_enum, value_name = "WHAT", default_value_t)]
    pub on_exit: OnExit,

    /// `xen`, or `local:SOCKET` for domains of a hub
    #[arg(long, default_value = "xen", value_parser = PlatformChoice::parse, hide = true)]
    pub platform: PlatformChoice,

    /// Directory of files that outlive the daemon
    #[arg(long, value_name = "DIR", default_value = RUNTIME_DIR, hide = true)]
    pub runtime_dir: PathBuf,
}

/// Action on the guests' devices when the daemon ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, ValueEnum)]
pub enum OnExit {
    /// Leave them connected, for the next daemon to take over
    #[default]
    Keep,
    /// Close them; guests can use them again after they are unplugged and plugged in
    Close,
}
