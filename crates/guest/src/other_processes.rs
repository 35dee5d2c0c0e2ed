//! Directories of the host in which processes of other network namespaces, or by relative names, have bound sockets.
//!
//! The launcher looks for them: init is in a user namespace of its own and may not examine the host's processes. It finds
//! what `/proc` shows to its user: its own processes, and all for root.
//!
//! ```text
//! /proc/PID/ns/net  another namespace ──> /proc/PID/net/unix: names ──> their directories, below /proc/PID/root
//! /proc/PID/cwd     if this namespace has relative names ─────────────> the directories of the names
//!                                                                          │ file system, path within
//!                                                                          └──> paths in the launcher's mounts
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};

use crate::HostPath;
use crate::bound_sockets::listed_names;
use crate::locations::{self, Mounts};

/// Maximum number of processes that are looked at.
const PROCESSES_MAX: usize = 4096;
/// Maximum number of network namespaces whose sockets are looked at.
const NAMESPACES_MAX: usize = 64;
/// Maximum number of directories that are looked at in one namespace.
const DIRECTORIES_MAX: usize = 256;
/// Maximum number of directories in relative names.
const RELATIVE_MAX: usize = 16;
/// Maximum length of all paths together. They are part of a message to init.
const BYTES_MAX: usize = 6 << 10;

/// Returns the directories, as paths of the calling process.
pub fn socket_directories() -> Vec<HostPath> {
    let Some(own) = Own::examine() else { return vec![] };
    let mut found: BTreeSet<PathBuf> = BTreeSet::new();
    let mut working: BTreeSet<PathBuf> = BTreeSet::new();
    let mut namespaces = BTreeMap::new();
    for pid in processes() {
        let process = PathBuf::from(format!("/proc/{pid}"));
        let Ok(network) = fs::read_link(process.join("ns/net")) else { continue };
        if !own.relative.is_empty()
            && let Ok(directory) = fs::read_link(process.join("cwd"))
        {
            working.insert(directory);
        }
        if network != own.network && namespaces.len() < NAMESPACES_MAX {
            namespaces.entry(network).or_insert(process);
        }
    }
    for directory in working.iter().take(DIRECTORIES_MAX) {
        found.extend(own.relative.iter().take(RELATIVE_MAX).map(|name| directory.join(name)));
    }
    for process in namespaces.values() {
        found.extend(directories_of(process, &own.mounts));
    }
    bounded(found)
}

/// Leaves out what is too long for a message.
fn bounded(found: BTreeSet<PathBuf>) -> Vec<HostPath> {
    let mut left = BYTES_MAX;
    let fits = |path: &PathBuf| {
        let length = path.as_os_str().len() + 8;
        let fits = length <= left;
        left -= if fits { length } else { 0 };
        fits
    };
    found.into_iter().filter(fits).map(HostPath).collect()
}

/// Properties of the calling process.
struct Own {
    network: PathBuf,
    mounts: Mounts,
    /// Directories of the relative names in the own network namespace.
    relative: BTreeSet<PathBuf>,
}

impl Own {
    fn examine() -> Option<Own> {
        let process = locations::open_own_proc().ok()?;
        let list = locations::read_own_proc(process.as_fd(), "net/unix").ok()?;
        let names = listed_names(&list).into_iter().map(|socket| socket.name);
        let relative = names.filter(|name| !name.starts_with(b"/"));
        let directory =
            |name: Vec<u8>| Some(Path::new(OsStr::from_bytes(&name)).parent()?.to_owned());
        Some(Own {
            network: fs::read_link("/proc/self/ns/net").ok()?,
            mounts: Mounts::read(process.as_fd()).ok()?,
            relative: relative.filter_map(directory).collect(),
        })
    }
}

/// Returns the ids of all processes, as far as `/proc` shows them.
fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    ids.take(PROCESSES_MAX)
}

/// Returns the directories of the sockets in the network namespace of a process, as paths in `own`.
fn directories_of(process: &Path, own: &Mounts) -> Vec<PathBuf> {
    let list = fs::read(process.join("net/unix")).unwrap_or_default();
    let read_mounts = || Mounts::parse(&fs::read(process.join("mountinfo"))?);
    let (Ok(root), Ok(mounts)) = (open_root(process), read_mounts()) else { return vec![] };
    let names = listed_names(&list).into_iter().map(|socket| socket.name);
    let directories: BTreeSet<PathBuf> = names
        .filter_map(|name| Some(Path::new(OsStr::from_bytes(&name)).parent()?.to_owned()))
        .filter(|directory| directory.is_absolute())
        .take(DIRECTORIES_MAX)
        .collect();
    let paths = directories.iter().filter_map(|directory| {
        let location = location_in(&root, directory, &mounts)?;
        Some(own.paths_of(&location))
    });
    paths.flatten().collect()
}

fn open_root(process: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::openat(CWD, process.join("root"), flags, Mode::empty())
}

/// Returns the location of a directory in another root directory.
fn location_in(
    root: &OwnedFd,
    directory: &Path,
    mounts: &Mounts,
) -> Option<locations::FileLocation> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let file = rustix::fs::openat2(root, directory, flags, Mode::empty(), resolve).ok()?;
    // The kernel's path, without symbolic links, from the root of the process's mounts.
    let number = std::os::fd::AsRawFd::as_raw_fd(&file);
    let path = fs::read_link(format!("/proc/self/fd/{number}")).ok()?;
    mounts.location_of_open(file.as_fd(), &path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_in_the_root_of_a_process_leads_to_its_path_here() {
        let directory = tempfile::tempdir().unwrap();
        let own = locations::open_own_proc().unwrap();
        let mounts = Mounts::read(own.as_fd()).unwrap();
        let root = open_root(Path::new("/proc/self")).unwrap();
        let location = location_in(&root, directory.path(), &mounts).unwrap();
        let path = fs::canonicalize(directory.path()).unwrap();
        assert!(mounts.paths_of(&location).contains(&path));
    }

    #[test]
    fn paths_beyond_the_size_of_a_message_are_left_out() {
        let path = |number: usize| PathBuf::from(format!("/{number:0>1000}"));
        let found: BTreeSet<PathBuf> = (0..20).map(path).collect();
        let kept = bounded(found);
        let bytes: usize = kept.iter().map(|path| path.0.as_os_str().len()).sum();
        assert!((4000..=BYTES_MAX).contains(&bytes), "{bytes}");
    }
}
