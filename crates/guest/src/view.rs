//! Guest's view of the host's files.
//!
//! Init builds the view in two steps:
//!
//! ```text
//! outer user namespace    mount namespace: Ringfence's runtime directories and the host's sockets are
//!                         covered, paths are changed by the user's options, /proc is the guest's
//!   nested user namespace   mount namespace: a copy, in which all of these mounts are locked; /sys is
//!                           the guest's. Init and the command run here
//! ```
//!
//! Order of the changes: `--root`, `--ro` with the exceptions of `--rw`, the guest's own `/run`, `--private`, `--tmpfs`, `--hide`; then
//! the covers, so that no option uncovers anything; then the guest's own `/dev`. A cover that cannot be made ends the
//! guest. Optional changes that fail are left out with a remark.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ringfence_sys::namespaces;
use rustix::mount::{MountPropagationFlags, UnmountFlags};

use crate::config::{GuestConfig, ViewConfig};
use crate::covers::{self, Cover, CoverError};
use crate::devices::{DeviceError, Devices, LateDevices};
use crate::directories::{Directory, Walker};
use crate::disk_sockets::{self, DiskSockets};
use crate::locations::{self, Mounts};
use crate::own_run::{self, Replacement};
use crate::private;
use crate::socket_search::{self, HostSockets, Places};
use crate::{mounts, ssh_config};

/// Directory of POSIX shared memory.
const SHARED_MEMORY: &str = "/dev/shm";

/// Files of `/etc` that are links on some systems.
const OFTEN_LINKS: [&str; 4] =
    ["/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/localtime"];

/// Errors that prevent the view.
#[derive(Debug, thiserror::Error)]
pub(super) enum ViewError {
    #[error(
        "{0}. Without that the command would reach other guests; `--share-runtime` leaves out all but \
         Ringfence's own directory"
    )]
    Cover(#[from] CoverError),
    #[error("the host's Unix sockets cannot be hidden: {0}. `--share-runtime` leaves them visible")]
    Sockets(io::Error),
    #[error("{option} {}: {source}", path.display())]
    Option { option: &'static str, path: PathBuf, source: io::Error },
    #[error("--dev {0}")]
    Device(#[from] DeviceError),
    #[error("{what}: {source}")]
    System { what: &'static str, source: io::Error },
    #[error("mounts: {0}")]
    Mounts(#[from] io::Error),
}

impl ViewError {
    fn system(what: &'static str) -> impl FnOnce(io::Error) -> ViewError {
        move |source| ViewError::System { what, source }
    }

    fn option(option: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ViewError {
        let path = path.to_owned();
        move |source| ViewError::Option { option, path, source }
    }
}

/// Result of the changes in the outer mount namespace.
#[derive(Debug)]
pub(super) struct View {
    pub mounted: mounts::Mounted,
    pub disks: DiskSockets,
    pub late_devices: LateDevices,
}

/// Makes the mounts of the outer mount namespace, which the process has just entered.
pub(super) fn prepare(
    config: &GuestConfig,
    remarks: &mut Vec<String>,
    notices: &mut Vec<String>,
) -> Result<View, ViewError> {
    let view = &config.view;
    // Mounts that the host makes later arrive here. Mounts made here do not reach the host.
    let downstream = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", downstream)
        .map_err(|errno| ViewError::system("mount propagation")(errno.into()))?;
    let directory = std::env::current_dir();
    let own_proc = locations::open_own_proc().map_err(ViewError::system("/proc/self"))?;
    let read_mounts =
        || Mounts::read(own_proc.as_fd()).map_err(ViewError::system("/proc/self/mountinfo"));
    let host = Host::examine(view, directory.as_deref().ok(), &read_mounts()?, own_proc.as_fd())?;
    let devices = view.devices.as_ref().map(Devices::take).transpose()?;
    apply_changes(view)?;
    mounts::with_scratch(|scratch| {
        host.replace_directories(view, directory.as_deref().ok(), scratch, notices)?;
        apply_hiding(view, scratch)?;
        covers::lay(&host.covers, &read_mounts()?, &mounts::hidden_file(scratch)?)?;
        if !view.is_host_root {
            ssh_config::copy(scratch, remarks);
        }
        Ok::<_, ViewError>(())
    })?;
    let late_devices = devices.map_or_else(|| Ok(LateDevices::default()), Devices::mount);
    let late_devices = late_devices.map_err(ViewError::system("the guest's /dev"))?;
    let disks =
        disk_sockets::make(view).map_err(ViewError::system("the sockets of the guest's disks"))?;
    let mounted = mounts::prepare(config, remarks).map_err(ViewError::system("mounts"))?;
    // Enter the directory by path: the open one lies below the covers.
    let entered = directory.and_then(std::env::set_current_dir);
    if let Err(error) = entered {
        std::env::set_current_dir("/").map_err(ViewError::system("/"))?;
        remarks.push(format!("the command starts in /: the working directory is hidden ({error})"));
    }
    Ok(View { mounted, disks, late_devices })
}

/// Directories and sockets of the host that are to be hidden, as they were before any change.
struct Host {
    covers: Vec<Cover>,
    sockets: HostSockets,
    /// Listing of `/run`, if the guest gets one of its own.
    run: Option<Directory>,
    /// Directories of sockets, with the modes of the empty ones that replace them.
    replaced: Vec<(PathBuf, u32)>,
}

impl Host {
    fn examine(
        view: &ViewConfig,
        directory: Option<&Path>,
        mounts: &Mounts,
        own_proc: BorrowedFd<'_>,
    ) -> Result<Host, ViewError> {
        /// Mode that admits only the owner.
        const PRIVATE: u32 = 0o700;
        let private = view.runtime_dirs.iter().map(|path| (path.clone(), PRIVATE));
        let mut replaced: Vec<(PathBuf, u32)> = private.collect();
        let mut host =
            Host { covers: vec![], sockets: HostSockets::default(), run: None, replaced: vec![] };
        if !view.share_runtime {
            replaced.extend(view.session.iter().map(|path| (path.clone(), PRIVATE)));
            replaced.extend(covers::socket_directories(view.user));
            let walker = Walker::new(mounts.points());
            host.run = own_run::list(&walker, &replacements(&replaced));
            let listed: Vec<PathBuf> =
                view.socket_directories.iter().map(|path| path.0.clone()).collect();
            let home = view.home.as_deref();
            let places = Places { home, working_directory: directory, listed: &listed };
            let hidden: Vec<&Path> = replaced.iter().map(|(path, _)| path.as_path()).collect();
            let found = socket_search::find(&places, &walker, own_proc, &hidden, host.run.as_ref());
            host.sockets = found.map_err(ViewError::Sockets)?;
        }
        host.covers = covers::of_socket_directories(mounts, &replaced);
        host.covers.extend(covers::of_host_sockets(mounts, &host.sockets));
        host.replaced = replaced;
        Ok(host)
    }

    /// Makes the guest's own `/run` and the directories of `--private`, and replaces those with too many sockets.
    fn replace_directories(
        &self,
        view: &ViewConfig,
        directory: Option<&Path>,
        scratch: &Path,
        notices: &mut Vec<String>,
    ) -> Result<(), ViewError> {
        let fail = || ViewError::system("the guest's own directories");
        let private = self.own_directories(view, notices);
        let run = self.run.as_ref().filter(|_| has_own_run(view));
        let mut replaced: Vec<PathBuf> = private.iter().map(|(path, _)| path.clone()).collect();
        replaced.extend(run.map(|run| run.path.clone()));
        // Files of /etc may be links to /run.
        let named = view.read_only.iter().chain(&view.writable).map(PathBuf::as_path);
        let named = named.chain(directory).chain(OFTEN_LINKS.map(Path::new)).filter_map(real);
        // A working directory that is a private one, or contains it, would show it.
        let shows_private = |path: &PathBuf| private.iter().any(|(own, _)| own.starts_with(path));
        let named: Vec<PathBuf> = named.filter(|path| !shows_private(path)).collect();
        let kept = private::keep(&named, &replaced);
        let kept = kept.map_err(fail())?;
        for (path, mode) in
            private.iter().filter(|(path, _)| run.is_none_or(|run| run.path != *path))
        {
            // It may lie in one that is empty already.
            private::make_point(path, true).map_err(ViewError::option("--private", path))?;
            covers::cover_directory(path, *mode).map_err(ViewError::option("--private", path))?;
        }
        if let Some(run) = run {
            let is_empty = private.iter().any(|(path, _)| *path == run.path);
            own_run::mount(run, &replacements(&self.replaced), is_empty, scratch)
                .map_err(ViewError::system("the guest's /run"))?;
        }
        private::show(&kept).map_err(fail())?;
        Ok(())
    }

    /// Returns the directories that are replaced by empty ones, with the modes of these.
    fn own_directories(&self, view: &ViewConfig, notices: &mut Vec<String>) -> Vec<(PathBuf, u32)> {
        /// Mode of a directory for every user's files.
        const TEMPORARY: u32 = 0o1777;
        let mut own = view.private.clone();
        if view.devices.is_none() && !view.share_runtime {
            own.push((SHARED_MEMORY.into(), TEMPORARY));
        }
        for path in &self.sockets.crowded {
            notices.push(format!(
                "{} is empty for the command, because the host's has too many sockets; the working directory and \
                 paths of --ro and --rw in it are visible",
                path.display()
            ));
            own.push((path.clone(), TEMPORARY));
        }
        // The kernel resolves symbolic links, so paths that are compared must have none.
        let real = own.into_iter().filter_map(|(path, mode)| Some((real(&path)?, mode)));
        let mut real: Vec<_> = real.filter(|(path, _)| path.is_dir()).collect();
        real.sort();
        real.dedup_by(|one, before| one.0 == before.0);
        // A directory within another one is gone with that, unless it was asked for: the home directory is made again.
        let chosen: Vec<PathBuf> =
            view.private.iter().filter_map(|(path, _)| fs::canonicalize(path).ok()).collect();
        let outer: Vec<PathBuf> = real.iter().map(|(path, _)| path.clone()).collect();
        let is_within = |path: &Path| outer.iter().any(|of| path.starts_with(of) && path != of);
        real.retain(|(path, _)| chosen.contains(path) || !is_within(path));
        real
    }
}

/// Returns `true` if the guest gets a `/run` of its own.
fn has_own_run(view: &ViewConfig) -> bool {
    let is_named = view.writable.iter().any(|path| path == Path::new(own_run::RUN));
    view.root.is_none() && !is_named
}

fn replacements(replaced: &[(PathBuf, u32)]) -> Vec<Replacement<'_>> {
    replaced.iter().map(|(path, mode)| Replacement { path, mode: *mode }).collect()
}

/// Returns a path without symbolic links. `None` if it leads nowhere.
fn real(path: &Path) -> Option<PathBuf> {
    fs::canonicalize(path).ok()
}

/// Applies `--root`, `--ro` and `--rw`.
fn apply_changes(view: &ViewConfig) -> Result<(), ViewError> {
    if let Some(root) = &view.root {
        mounts::change_root(root, view.devices.is_none())
            .map_err(ViewError::option("--root", root))?;
    }
    let mut writable = vec![];
    for path in &view.writable {
        let fail = || ViewError::option("--rw", path);
        let place = fs::canonicalize(path).map_err(fail())?;
        let tree = covers::detach_copy(&place, true).map_err(fail())?;
        writable.push((tree, place, path));
    }
    for path in &view.read_only {
        make_read_only(path).map_err(ViewError::option("--ro", path))?;
    }
    for (tree, place, path) in writable {
        covers::attach(&tree, &place).map_err(ViewError::option("--rw", path))?;
    }
    Ok(())
}

/// Applies `--tmpfs` and `--hide`.
fn apply_hiding(view: &ViewConfig, scratch: &Path) -> Result<(), ViewError> {
    for path in &view.empty {
        covers::cover_directory(path, 0o1777).map_err(ViewError::option("--tmpfs", path))?;
    }
    for path in &view.hidden {
        let fail = ViewError::option("--hide", path);
        let hide = || {
            if path.metadata()?.is_dir() {
                covers::cover_directory(path, 0)
            } else {
                covers::cover_file(path, &mounts::hidden_file(scratch)?)
            }
        };
        hide().map_err(fail)?;
    }
    Ok(())
}

/// Makes a path, and everything mounted below it, read-only. A symbolic link stands for its target.
pub(super) fn make_read_only(path: &Path) -> io::Result<()> {
    // A mount cannot be attached at a symbolic link.
    let path = path.canonicalize()?;
    // The root directory is a mount already. A second one over it would leave this process below it, as if in a chroot,
    // where the kernel allows no further user namespace.
    if path != Path::new("/") {
        // Make it a mount of its own, with the mounts below it.
        let tree = covers::detach_copy(&path, true)?;
        covers::attach(&tree, &path)?;
    }
    namespaces::make_tree_read_only(&CString::new(path.as_os_str().as_bytes())?)
}

/// Detaches a mount whose files stay mounted at other paths.
pub(super) fn detach(path: &Path) -> io::Result<()> {
    Ok(rustix::mount::unmount(path, UnmountFlags::DETACH)?)
}
