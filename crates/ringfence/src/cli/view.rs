//! Options of `run` for the command's view of the host's files, sockets and devices.

use std::path::PathBuf;

use super::heading;
use crate::launch::{PrivatePlace, ViewOptions};

/// Options for the view.
#[derive(Debug, clap::Args)]
pub struct ViewArgs {
    /// Let the command reach the host's Unix sockets and the directory of your session
    ///
    /// Without this option, D-Bus, the display, ssh-agent, gpg-agent, Podman, Docker and all other sockets on
    /// this computer are hidden, $XDG_RUNTIME_DIR is empty, and the variables that name them are not set.
    /// Ringfence's own directory is hidden in any case.
    #[arg(long, help_heading = heading::ISOLATION)]
    pub share_runtime: bool,

    /// Make this directory the command's root directory
    ///
    /// The directory must contain /dev, /proc and /sys, and /run if there are disks. They get the devices of --dev and
    /// the guest's own processes and interfaces. Root directory, --ro, --rw, --private, --tmpfs and --hide take effect in
    /// this order, whatever their order on the command line.
    #[arg(long, value_name = "DIR", help_heading = heading::ISOLATION)]
    pub root: Option<PathBuf>,

    /// Make everything below this path read-only; may be given several times
    #[arg(long = "ro", value_name = "PATH", help_heading = heading::ISOLATION)]
    pub read_only: Vec<PathBuf>,

    /// Make everything below this path writable, as an exception of --ro; may be given several times
    #[arg(long = "rw", value_name = "PATH", help_heading = heading::ISOLATION)]
    pub writable: Vec<PathBuf>,

    /// Give the command directories of its own, in memory: tmp, run, home, dev, or several of them
    ///
    /// `tmp`: /tmp, /var/tmp and /dev/shm are empty. `run`: /run is empty. `home`: the home directory is empty. In each
    /// of them the working directory and the paths of --ro and --rw stay visible, at their places. `dev`: /dev has null, zero, full, random,
    /// urandom, tty, net/tun and fuse, terminals of its own, and what --dev names; device nodes elsewhere cannot be used. The command
    /// has such a /dev in any case with --root, with --ro / and if you are root.
    #[arg(long = "private", value_name = "tmp,run,home,dev", value_delimiter = ',', value_enum,
          hide_possible_values = true, help_heading = heading::ISOLATION)]
    pub private: Vec<PrivatePlace>,

    /// Give the command a device, or a directory of devices, such as /dev/dri; may be given several times
    ///
    /// This matters if the command has a /dev of its own: as root, with --root, with --ro / and with --private dev.
    /// /dev stands for all devices of the host.
    #[arg(long = "dev", value_name = "PATH", help_heading = heading::ISOLATION)]
    pub devices: Vec<PathBuf>,

    /// Replace this directory by an empty one in memory; may be given several times
    #[arg(long = "tmpfs", value_name = "PATH", help_heading = heading::ISOLATION)]
    pub empty: Vec<PathBuf>,

    /// Hide this file or directory from the command; may be given several times
    #[arg(long = "hide", value_name = "PATH", help_heading = heading::ISOLATION)]
    pub hidden: Vec<PathBuf>,
}

impl From<ViewArgs> for ViewOptions {
    fn from(args: ViewArgs) -> ViewOptions {
        ViewOptions {
            share_runtime: args.share_runtime,
            root: args.root,
            read_only: args.read_only,
            writable: args.writable,
            private: args.private,
            empty: args.empty,
            hidden: args.hidden,
            devices: args.devices,
        }
    }
}
