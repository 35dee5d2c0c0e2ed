//! A guest's view of the host's files.
//!
//! The view is made in two steps, by init:
//!
//! ```text
//! outer user namespace    mount namespace: Ringfence's runtime directories and the host's sockets are
//!                         covered, the paths of the user's options are changed, /proc is the guest's
//!   nested user namespace   mount namespace: a copy, in which all of these mounts are locked; /sys is
//!                           the guest's. Init and the command live here
//! ```
//!
//! Order of the changes: `--root`, `--ro` with the exceptions of `--rw`, `--tmpfs`, `--hide`; then the
//! covers, so that no option uncovers anything. A cover that cannot be made ends the guest. What only makes
//! a guest tidier is left out with a remark.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ringfence_sys::namespaces;
use rustix::mount::{MountPropagationFlags, UnmountFlags};
use serde::{Deserialize, Serialize};

use super::covers::{self, Cover, CoverError};
use super::places::{self, Mounts};
use super::{GuestConfig, mounts};

/// The files of the host that a guest's command sees, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ViewConfig {
    /// The directory in which the command finds the sockets of its disks.
    pub runtime_dir: PathBuf,
    /// Every directory that a launcher of this user may take for its runtime directory.
    pub runtime_dirs: Vec<PathBuf>,
    /// The runtime directory of the user's session, where it is to be covered.
    pub session: Option<PathBuf>,
    /// Sockets of the guest's own disks, where the launcher has them.
    pub disks: Vec<PathBuf>,
    /// The host's sockets and the session's directory stay.
    pub share_runtime: bool,
    /// The command has the rights of the computer's root over files.
    pub is_host_root: bool,
    /// The directory that is to be the root directory.
    pub root: Option<PathBuf>,
    /// Paths below which nothing may be written.
    pub read_only: Vec<PathBuf>,
    /// Exceptions of these.
    pub writable: Vec<PathBuf>,
    /// Directories in whose place there is an empty one.
    pub empty: Vec<PathBuf>,
    /// Directories and files that are not to be seen.
    pub hidden: Vec<PathBuf>,
}

/// Why there is no view.
#[derive(Debug, thiserror::Error)]
pub(super) enum ViewError {
    #[error(
        "{0}. Without that the command would reach other guests; `--share-runtime` leaves out all but \
         Ringfence's own directory"
    )]
    Cover(#[from] CoverError),
    #[error("{option} {}: {source}", path.display())]
    Option { option: &'static str, path: PathBuf, source: io::Error },
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

/// Makes the mounts of the outer namespace, which the process has just entered.
pub(super) fn prepare(
    config: &GuestConfig,
    remarks: &mut Vec<String>,
) -> Result<mounts::Mounted, ViewError> {
    let view = &config.view;
    // What the host mounts later is seen; nothing of this goes the other way.
    let downstream = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", downstream)
        .map_err(|errno| ViewError::system("mount propagation")(errno.into()))?;
    let directory = std::env::current_dir();
    let own_proc = places::open_own_proc().map_err(ViewError::system("/proc/self"))?;
    let read_mounts =
        || Mounts::read(own_proc.as_fd()).map_err(ViewError::system("/proc/self/mountinfo"));
    let mounts = read_mounts()?;
    let covers = choose_covers(view, &mounts, own_proc.as_fd())?;
    let disks = view.disks.iter().map(|path| covers::detach_copy(path, false));
    let disks: Vec<OwnedFd> =
        disks.collect::<io::Result<_>>().map_err(ViewError::system("the disks' sockets"))?;
    change_as_asked(view)?;
    mounts::with_scratch(|scratch| {
        hide_as_asked(view, scratch)?;
        covers::lay(&covers, &read_mounts()?, &mounts::hidden_file(scratch)?)?;
        Ok::<_, ViewError>(())
    })?;
    show_own(view, &disks)?;
    let mounted = mounts::prepare(config, remarks).map_err(ViewError::system("mounts"))?;
    // By its path: what this process had until now is the directory below the covers.
    let entered = directory.and_then(std::env::set_current_dir);
    if let Err(error) = entered {
        std::env::set_current_dir("/").map_err(ViewError::system("/"))?;
        remarks.push(format!("the command starts in /: the working directory is hidden ({error})"));
    }
    Ok(mounted)
}

/// What is covered whatever the options say, and what is covered by default.
fn choose_covers(
    view: &ViewConfig,
    mounts: &Mounts,
    own_proc: BorrowedFd<'_>,
) -> Result<Vec<Cover>, ViewError> {
    /// For its user alone.
    const PRIVATE: u32 = 0o700;
    let mut covers: Vec<Cover> =
        view.runtime_dirs.iter().filter_map(|path| Cover::of(mounts, path, PRIVATE)).collect();
    if !view.share_runtime {
        covers.extend(view.session.iter().filter_map(|path| Cover::of(mounts, path, PRIVATE)));
        let sockets = covers::of_host_sockets(mounts, own_proc);
        covers.extend(sockets.map_err(ViewError::system("/proc/self/net/unix"))?);
    }
    Ok(covers)
}

/// `--root`, `--ro` and `--rw`.
fn change_as_asked(view: &ViewConfig) -> Result<(), ViewError> {
    if let Some(root) = &view.root {
        mounts::change_root(root).map_err(ViewError::option("--root", root))?;
    }
    let mut writable = vec![];
    for path in &view.writable {
        let tree = covers::detach_copy(path, true).map_err(ViewError::option("--rw", path))?;
        writable.push((tree, path));
    }
    for path in &view.read_only {
        make_read_only(path).map_err(ViewError::option("--ro", path))?;
    }
    for (tree, path) in writable {
        covers::attach(&tree, path).map_err(ViewError::option("--rw", path))?;
    }
    Ok(())
}

/// `--tmpfs` and `--hide`.
fn hide_as_asked(view: &ViewConfig, scratch: &Path) -> Result<(), ViewError> {
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

/// Makes a path, and all that is mounted below it, read-only.
pub(super) fn make_read_only(path: &Path) -> io::Result<()> {
    // A mount of its own, and everything that is mounted below it along with it.
    let tree = covers::detach_copy(path, true)?;
    covers::attach(&tree, path)?;
    namespaces::make_tree_read_only(&CString::new(path.as_os_str().as_bytes())?)
}

/// Has the guest's own runtime directory in the place of the covered one, with the sockets of its disks.
fn show_own(view: &ViewConfig, disks: &[OwnedFd]) -> Result<(), ViewError> {
    let show = || {
        // Another root directory has a /run, but nothing is to be left in it.
        let parent = view.runtime_dir.parent().filter(|_| view.root.is_some() && !disks.is_empty());
        if let Some(run) = parent {
            covers::cover_directory(run, 0o755)?;
        }
        if view.root.is_none() || !disks.is_empty() {
            // Where it cannot be made, a guest without disks has no use for it.
            let made = covers::make_private_directory(&view.runtime_dir);
            if !disks.is_empty() {
                made?;
            }
        }
        let names = view.disks.iter().filter_map(|path| path.file_name());
        let mut shown = disks.iter().zip(names);
        shown.try_for_each(|(tree, name)| covers::show_again(tree, &view.runtime_dir.join(name)))
    };
    show().map_err(ViewError::system("the sockets of the guest's disks"))
}

/// Undoes the mounts that only lent a place to files.
pub(super) fn detach(path: &Path) -> io::Result<()> {
    Ok(rustix::mount::unmount(path, UnmountFlags::DETACH)?)
}
