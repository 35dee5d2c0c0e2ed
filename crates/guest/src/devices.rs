//! Guest's own `/dev`: the devices that every program needs, and those that options name.
//!
//! ```text
//! /dev                in memory, read-only
//!   null zero full random urandom tty net/tun fuse    mounts of the host's nodes
//!   pts, ptmx         terminals of the guest's own
//!   console           the caller's terminal, if the command shares it
//!   shm, mqueue       memory and message queues of the guest's own
//!   fd stdin stdout stderr
//! ```
//!
//! All other mounts become `nodev`, so that a node elsewhere (in a directory tree for chroot(8)) is of no use. Nodes of the guest's
//! disks appear later ([`LateDevices`]): the launcher makes them when the disks are served.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use ringfence_sys::namespaces;
use rustix::mount::MountFlags;

use crate::config::DeviceConfig;
use crate::covers;
use crate::private::make_point;

const DEV: &str = "/dev";
/// Nodes that every guest has. `net/tun` and `fuse` give no rights: both act on the namespaces of their user.
const NODES: [&str; 8] = ["null", "zero", "full", "random", "urandom", "tty", "net/tun", "fuse"];
const LINKS: [(&str, &str); 5] = [
    ("/proc/self/fd", "fd"),
    ("/proc/self/fd/0", "stdin"),
    ("/proc/self/fd/1", "stdout"),
    ("/proc/self/fd/2", "stderr"),
    ("pts/ptmx", "ptmx"),
];

/// Mounts of device nodes, detached.
#[derive(Debug)]
pub(super) struct Devices {
    /// Each with its path, and `true` for a directory.
    nodes: Vec<(OwnedFd, PathBuf, bool)>,
    late: LateDevices,
}

/// Device nodes that are shown once the guest is set up.
#[derive(Debug, Default)]
pub(crate) struct LateDevices(Vec<(OwnedFd, PathBuf)>);

/// Error of a path that an option names.
#[derive(Debug, thiserror::Error)]
#[error("{}: {source}", path.display())]
pub(super) struct DeviceError {
    pub path: PathBuf,
    pub source: io::Error,
}

impl Devices {
    /// Clones the nodes' mounts, then takes the use of devices from all mounts.
    pub(super) fn take(config: &DeviceConfig) -> Result<Devices, DeviceError> {
        let mut nodes = vec![];
        for path in NODES.map(|name| Path::new(DEV).join(name)) {
            if let Ok(tree) = covers::detach_copy(&path, false) {
                nodes.push((tree, path, false));
            }
        }
        if let Some(terminal) = &config.terminal
            && let Ok(tree) = covers::detach_copy(terminal, false)
        {
            nodes.push((tree, Path::new(DEV).join("console"), false));
        }
        for path in &config.given {
            let fail = |source| DeviceError { path: path.clone(), source };
            let is_directory = path.metadata().map_err(fail)?.is_dir();
            nodes.push((
                covers::detach_copy(path, true).map_err(fail)?,
                path.clone(),
                is_directory,
            ));
        }
        let late = LateDevices::take(&config.late);
        namespaces::make_tree_without_devices(c"/")
            .map_err(|source| DeviceError { path: "/".into(), source })?;
        Ok(Devices { nodes, late })
    }

    /// Mounts the guest's `/dev`.
    pub(super) fn mount(self) -> io::Result<LateDevices> {
        let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
        covers::cover_directory(Path::new(DEV), 0o755)?;
        for directory in ["pts", "shm", "mqueue"] {
            fs::create_dir(Path::new(DEV).join(directory))?;
        }
        let options = Some(c"newinstance,ptmxmode=0666,mode=620");
        rustix::mount::mount("devpts", "/dev/pts", "devpts", flags, options)?;
        covers::cover_directory(Path::new("/dev/shm"), 0o1777)?;
        for (target, name) in LINKS {
            std::os::unix::fs::symlink(target, Path::new(DEV).join(name))?;
        }
        for (_, path) in &self.late.0 {
            make_point(path, false)?;
        }
        for (tree, path, is_directory) in &self.nodes {
            make_point(path, *is_directory)?;
            covers::attach(tree, path)?;
        }
        namespaces::make_mount_read_only(c"/dev")?;
        Ok(self.late)
    }
}

impl LateDevices {
    fn take(paths: &[PathBuf]) -> LateDevices {
        let nodes = paths.iter().filter_map(|path| {
            let tree = covers::detach_copy(path, false).ok()?;
            Some((tree, path.clone()))
        });
        LateDevices(nodes.collect())
    }

    /// Shows the nodes at these paths. The rest will not be shown.
    pub(crate) fn show(self, paths: &[PathBuf]) -> io::Result<()> {
        let mut shown = self.0.iter().filter(|(_, path)| paths.contains(path));
        shown.try_for_each(|(tree, path)| covers::attach(tree, path))
    }
}
