//! Guest's own `/run`: a directory in memory with what the host's has, but without its sockets and named pipes.
//!
//! Programs keep their sockets below `/run`, and make them again when they are restarted. So the command never sees the
//! host's directory, only mounts of its entries:
//!
//! ```text
//! /run                 in memory
//!   utmp, media/       no sockets: mounts of the host's
//!   postgresql/        has sockets: in memory, too, with mounts of its other entries
//!   user/, dbus/, ...  empty
//! ```
//!
//! A directory with sockets and many other entries is mounted whole, and its sockets are covered one by one.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::mount::MountFlags;

use crate::bound_sockets::OVERFLOW_ID;
use crate::directories::{Budget, Directory, Walker};

/// Directory that this module replaces.
pub(super) const RUN: &str = "/run";
/// Maximum number of entries of a directory that are mounted one by one.
const ENTRIES_MAX: usize = 64;
/// Maximum number of entries of `/run` itself.
const RUN_MAX: usize = 512;
/// Levels of directories that are looked at.
const DEPTH: usize = 4;
/// Limits for one directory of `/run`, so that one which every user can write to does not use up those of others.
const BUDGET: Budget = Budget { directories: 128, entries: 8192 };

/// Empty directory of the guest's own in place of one of the host's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Replacement<'a> {
    pub path: &'a Path,
    pub mode: u32,
}

/// Lists the host's `/run`. `None` if it does not exist or has too many entries.
pub(super) fn list(walker: &Walker<'_>, replaced: &[Replacement<'_>]) -> Option<Directory> {
    let is_directory = fs::symlink_metadata(RUN).is_ok_and(|metadata| metadata.is_dir());
    let mut budget = Budget { directories: 1, entries: RUN_MAX };
    let mut run = is_directory
        .then(|| walker.walk(Path::new(RUN), 0, &mut budget))
        .filter(|run| !run.is_cut)?;
    for within in &mut run.directories {
        if !replaced.iter().any(|other| other.path == within.path)
            && !walker.is_mounted(&within.path)
        {
            *within = walker.walk(&within.path, DEPTH, &mut BUDGET.clone());
        }
    }
    Some(run)
}

/// Mounts the guest's own `/run`. `scratch` is a directory for its assembly. With `links_alone`, nothing is mounted in it:
/// the links of `/run` lead to programs on some systems (NixOS).
pub(super) fn mount(
    run: &Directory,
    replaced: &[Replacement<'_>],
    links_alone: bool,
    scratch: &Path,
) -> io::Result<()> {
    let target = scratch.join("run");
    fs::create_dir(&target)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    let options = CString::new(format!("mode={:o}", mode_of(Path::new(RUN))?))?;
    rustix::mount::mount("ringfence", &target, "tmpfs", flags, Some(options.as_c_str()))?;
    copy_links(run, &target);
    if !links_alone {
        fill(run, &target, replaced);
    }
    Ok(rustix::mount::mount_move(&target, RUN)?)
}

fn copy_links(directory: &Directory, target: &Path) {
    for name in &directory.links {
        // A link that has vanished is left out.
        let _ = fs::read_link(directory.path.join(name))
            .and_then(|link| std::os::unix::fs::symlink(link, target.join(name)));
    }
}

/// Mounts files and directories. Those that have vanished, or that the kernel does not mount, are left out.
fn fill(directory: &Directory, target: &Path, replaced: &[Replacement<'_>]) {
    for name in &directory.files {
        let target = target.join(name);
        let mounted = fs::File::create(&target)
            .and_then(|_| Ok(rustix::mount::mount_bind(directory.path.join(name), &target)?));
        if mounted.is_err() {
            let _ = fs::remove_file(&target);
        }
    }
    for within in &directory.directories {
        if let Some(name) = within.path.file_name() {
            let _ = fill_directory(within, &target.join(name), replaced);
        }
    }
}

fn fill_directory(
    directory: &Directory,
    target: &PathBuf,
    replaced: &[Replacement<'_>],
) -> io::Result<()> {
    let make = |mode: u32| {
        fs::DirBuilder::new().mode(mode & 0o777).create(target)?;
        fs::set_permissions(target, fs::Permissions::from_mode(mode & 0o1777))
    };
    let copy = || make(mode_of(&directory.path)?);
    if let Some(other) = replaced.iter().find(|other| other.path == directory.path) {
        return make(other.mode);
    }
    let entries = directory.links.len() + directory.files.len() + directory.directories.len();
    let contains_replaced = || replaced.iter().any(|other| other.path.starts_with(&directory.path));
    if directory.is_cut {
        // Stays empty: it may have sockets that were not found.
        copy()
    } else if entries <= ENTRIES_MAX && (directory.may_have_endpoints() || contains_replaced()) {
        copy()?;
        copy_links(directory, target);
        fill(directory, target, replaced);
        Ok(())
    } else {
        fs::create_dir(target)?;
        Ok(rustix::mount::mount_bind_recursive(&directory.path, target)?)
    }
}

/// Returns the mode for the guest's copy of a directory. The copy belongs to the user, who gets no more rights than the
/// directory gives to others if it belongs to somebody else.
fn mode_of(directory: &Path) -> io::Result<u32> {
    let metadata = fs::metadata(directory)?;
    let (mode, others) = (metadata.mode() & 0o1777, metadata.mode() & 0o7);
    Ok(if metadata.uid() == OVERFLOW_ID { mode & 0o1000 | (others * 0o111) } else { mode })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copy_of_a_directory_of_the_user_keeps_its_mode() {
        let directory = tempfile::tempdir().unwrap();
        for mode in [0o700, 0o1777, 0o755] {
            let permissions = fs::Permissions::from_mode(mode);
            fs::set_permissions(directory.path(), permissions).unwrap();
            assert_eq!(mode_of(directory.path()).unwrap(), mode);
        }
    }
}
