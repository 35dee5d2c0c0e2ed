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
//! Order of the changes: `--root`, `--ro` with the exceptions of `--rw`, `--strict`, `--tmpfs`, `--hide`; then
//! the covers, so that no option uncovers anything. A cover that cannot be made ends the guest.
//! Optional changes that fail are left out with a remark.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ringfence_sys::namespaces;
use rustix::mount::{MountPropagationFlags, UnmountFlags};

use crate::config::{GuestConfig, ViewConfig};
use crate::covers::{self, Cover, CoverError};
use crate::locations::{self, Mounts};
use crate::mounts;
use crate::strict::{Kept, StrictError};

/// Errors that prevent the view.
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
    #[error(transparent)]
    Strict(#[from] StrictError),
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

/// Makes the mounts of the outer mount namespace, which the process has just entered.
pub(super) fn prepare(
    config: &GuestConfig,
    remarks: &mut Vec<String>,
) -> Result<mounts::Mounted, ViewError> {
    let view = &config.view;
    // Mounts that the host makes later arrive here. Mounts made here do not reach the host.
    let downstream = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", downstream)
        .map_err(|errno| ViewError::system("mount propagation")(errno.into()))?;
    let directory = std::env::current_dir();
    let own_proc = locations::open_own_proc().map_err(ViewError::system("/proc/self"))?;
    let read_mounts =
        || Mounts::read(own_proc.as_fd()).map_err(ViewError::system("/proc/self/mountinfo"));
    let mounts = read_mounts()?;
    let covers = choose_covers(view, &mounts, own_proc.as_fd())?;
    let disks = view.disks.iter().map(|path| covers::detach_copy(path, false));
    let disks: Vec<OwnedFd> =
        disks.collect::<io::Result<_>>().map_err(ViewError::system("the disks' sockets"))?;
    apply_changes(view)?;
    mounts::with_scratch(|scratch| {
        apply_hiding(view, scratch)?;
        covers::lay(&covers, &read_mounts()?, &mounts::hidden_file(scratch)?)?;
        Ok::<_, ViewError>(())
    })?;
    mount_own_sockets(view, &disks)?;
    let mounted = mounts::prepare(config, remarks).map_err(ViewError::system("mounts"))?;
    // Enter the directory by path: the open one lies below the covers.
    let entered = directory.and_then(std::env::set_current_dir);
    if let Err(error) = entered {
        std::env::set_current_dir("/").map_err(ViewError::system("/"))?;
        remarks.push(format!("the command starts in /: the working directory is hidden ({error})"));
    }
    Ok(mounted)
}

/// Chooses the covers: those that no option removes, and those made by default.
fn choose_covers(
    view: &ViewConfig,
    mounts: &Mounts,
    own_proc: BorrowedFd<'_>,
) -> Result<Vec<Cover>, ViewError> {
    /// Mode that admits only the owner.
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

/// Applies `--root`, `--ro`, `--rw` and `--strict`.
fn apply_changes(view: &ViewConfig) -> Result<(), ViewError> {
    if let Some(root) = &view.root {
        mounts::change_root(root).map_err(ViewError::option("--root", root))?;
    }
    let kept = view.strict.as_ref().map(Kept::of).transpose()?;
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
    Ok(kept.map_or(Ok(()), Kept::apply)?)
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

/// Makes a path, and everything mounted below it, read-only.
pub(super) fn make_read_only(path: &Path) -> io::Result<()> {
    // The root directory is a mount already. A second one over it would leave this process below it, as if in a chroot,
    // where the kernel allows no further user namespace.
    if path.canonicalize()? != Path::new("/") {
        // Make it a mount of its own, with the mounts below it.
        let tree = covers::detach_copy(path, true)?;
        covers::attach(&tree, path)?;
    }
    namespaces::make_tree_read_only(&CString::new(path.as_os_str().as_bytes())?)
}

/// Creates the guest's own runtime directory in place of the covered one, with the sockets of its
/// disks.
fn mount_own_sockets(view: &ViewConfig, disks: &[OwnedFd]) -> Result<(), ViewError> {
    let show = || {
        // Another root directory has its own /run, in which nothing may be left behind.
        let parent = view.runtime_dir.parent().filter(|_| view.root.is_some() && !disks.is_empty());
        if let Some(run) = parent {
            covers::cover_directory(run, 0o755)?;
        }
        if view.root.is_none() || !disks.is_empty() {
            // A guest without disks does not need the directory.
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

/// Detaches a mount whose files stay mounted at other paths.
pub(super) fn detach(path: &Path) -> io::Result<()> {
    Ok(rustix::mount::unmount(path, UnmountFlags::DETACH)?)
}
