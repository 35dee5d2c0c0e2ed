//! Covers: mounts that hide a directory or file of the host from a guest's command.
//!
//! A cover is mounted in a mount namespace of an outer user namespace. The command runs in a nested
//! user namespace, in whose mount namespace the kernel has locked all inherited mounts. The command
//! can neither remove nor move a cover, nor bind a parent directory without it
//! (mount_namespaces(7)).

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, MoveMountFlags, OpenTreeFlags};

use super::locations::{FileLocation, Mounts};
use super::socket_search::HostSockets;

/// Directories in which programs of a host create their sockets, with the mode of the empty
/// directory that replaces them. A program that starts after the guest creates its socket there,
/// too.
const SOCKET_DIRECTORIES: [(&str, u32); 9] = [
    ("/run/user", 0o755),
    // That of root, and of a launcher in the guest that is root there.
    ("/run/ringfence", 0o700),
    ("/run/dbus", 0o755),
    ("/run/podman", 0o755),
    ("/run/docker", 0o755),
    ("/run/containerd", 0o755),
    ("/run/libvirt", 0o755),
    ("/tmp/.X11-unix", 0o1777),
    ("/tmp/.ICE-unix", 0o1777),
];

/// Location to be covered.
#[derive(Debug)]
pub(super) struct Cover {
    location: FileLocation,
    /// Mode of the empty directory that replaces a directory.
    mode: u32,
    /// Set if the location may disappear before it is covered.
    may_vanish: bool,
}

/// Error of a cover that could not be mounted.
#[derive(Debug, thiserror::Error)]
#[error("hiding {}: {source}", path.display())]
pub(super) struct CoverError {
    path: PathBuf,
    source: io::Error,
}

impl Cover {
    /// Creates a cover of the file or directory at a path. `None` if it does not exist.
    pub(super) fn of(mounts: &Mounts, path: &Path, mode: u32) -> Option<Cover> {
        Some(Cover { location: mounts.location(path)?, mode, may_vanish: false })
    }
}

/// Returns covers of the directories in which programs of a host create their sockets.
pub(super) fn of_socket_directories(mounts: &Mounts, directories: &[(PathBuf, u32)]) -> Vec<Cover> {
    directories.iter().filter_map(|(path, mode)| Cover::of(mounts, path, *mode)).collect()
}

/// Returns the directories in which programs of a host create their sockets, each with the mode of the empty directory
/// that replaces it. `user` is the user's id on the host.
pub(super) fn socket_directories(user: u32) -> Vec<(PathBuf, u32)> {
    // Sockets of tmux and screen: through them a client gets a shell on the host.
    let multiplexers = [format!("/tmp/tmux-{user}"), "/run/screen".to_owned()];
    let multiplexers = multiplexers.into_iter().map(|path| (PathBuf::from(path), 0o700));
    let known = SOCKET_DIRECTORIES.iter().map(|(path, mode)| (PathBuf::from(path), *mode));
    known.chain(multiplexers).collect()
}

/// Returns covers of sockets, and of directories that hold sockets.
pub(super) fn of_host_sockets(mounts: &Mounts, found: &HostSockets) -> Vec<Cover> {
    let mut covers: Vec<Cover> = vec![];
    let mut real: BTreeMap<&Path, Option<PathBuf>> = BTreeMap::new();
    for path in &found.files {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { continue };
        // Sockets of one directory need one look at the symbolic links that lead there.
        let real = real.entry(parent).or_insert_with(|| fs::canonicalize(parent).ok());
        let path = real.as_ref().map(|parent| parent.join(name));
        let location = path.and_then(|path| mounts.location_of_real(&path));
        covers.extend(location.map(|location| Cover { location, mode: 0, may_vanish: true }));
    }
    for path in &found.directories {
        let mode = fs::metadata(path).map_or(0o700, |metadata| metadata.permissions().mode());
        let (mode, location) = (mode & 0o1777, mounts.location(path));
        covers.extend(location.map(|location| Cover { location, mode, may_vanish: true }));
    }
    covers
}

/// Mounts the covers in this process's mount namespace. `file` is mounted over files.
pub(super) fn lay(covers: &[Cover], mounts: &Mounts, file: &Path) -> Result<(), CoverError> {
    let mut targets: Vec<(PathBuf, &Cover)> = vec![];
    for cover in covers {
        targets.extend(mounts.paths_of(&cover.location).into_iter().map(|path| (path, cover)));
    }
    // Directories come first. Their content needs no cover then.
    targets.sort_by(|a, b| a.0.cmp(&b.0));
    let mut last: Option<PathBuf> = None;
    for (path, cover) in targets {
        if last.as_ref().is_some_and(|covered| path.starts_with(covered)) {
            continue;
        }
        // A part of a hidden directory may be a file.
        let is_directory = cover.location.is_directory()
            && fs::metadata(&path).is_ok_and(|metadata| metadata.is_dir());
        let laid =
            if is_directory { cover_directory(&path, cover.mode) } else { cover_file(&path, file) };
        match laid {
            Ok(()) => last = Some(path).filter(|_| is_directory).or(last),
            Err(error) if cover.may_vanish && error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(CoverError { path, source }),
        }
    }
    Ok(())
}

/// Mounts an empty directory over a directory.
pub(super) fn cover_directory(path: &Path, mode: u32) -> io::Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    let options = std::ffi::CString::new(format!("mode={mode:o}"))?;
    Ok(rustix::mount::mount("ringfence", path, "tmpfs", flags, Some(options.as_c_str()))?)
}

/// Mounts `file` over a file.
pub(super) fn cover_file(path: &Path, file: &Path) -> io::Result<()> {
    Ok(rustix::mount::mount_bind(file, path)?)
}

/// Clones a mount of one file or directory, or of the tree below it, without attaching it.
pub(super) fn detach_copy(path: &Path, recursive: bool) -> io::Result<OwnedFd> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    flags.set(OpenTreeFlags::AT_RECURSIVE, recursive);
    Ok(rustix::mount::open_tree(rustix::fs::CWD, path, flags)?)
}

/// Attaches a mount from [`detach_copy`] at a path.
pub(super) fn attach(tree: &OwnedFd, path: &Path) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    Ok(rustix::mount::move_mount(tree, "", rustix::fs::CWD, path, flags)?)
}

/// Creates a directory in a cover, with its parents, that only its user can enter.
pub(super) fn make_private_directory(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}
