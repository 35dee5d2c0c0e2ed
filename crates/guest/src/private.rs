//! Directories of the guest's own: empty ones in memory in place of the host's, in which named paths stay visible.
//!
//! `--private` asks for them. A directory with too many sockets becomes one, too. The working directory and the paths
//! of `--ro` and `--rw` that lie in such a directory are mounted again at their places:
//!
//! ```text
//! keep: clones of the named paths  ──>  covers over the directories  ──>  show: mount points, the clones on them
//! ```

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use crate::covers;

/// Path that stays visible.
#[derive(Debug)]
pub(super) struct Kept {
    tree: OwnedFd,
    path: PathBuf,
    is_directory: bool,
}

/// Clones the mounts of those paths that lie in one of the directories.
pub(super) fn keep(paths: &[PathBuf], directories: &[PathBuf]) -> io::Result<Vec<Kept>> {
    let mut kept: Vec<Kept> = vec![];
    for path in paths {
        let is_in = |directory: &PathBuf| path.starts_with(directory) && path != directory;
        if directories.iter().any(is_in) && !kept.iter().any(|other| other.path == *path) {
            let tree = covers::detach_copy(path, true)?;
            kept.push(Kept { tree, path: path.clone(), is_directory: path.is_dir() });
        }
    }
    // A path comes before those within.
    kept.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(kept)
}

/// Mounts the clones again.
pub(super) fn show(kept: &[Kept]) -> io::Result<()> {
    for Kept { tree, path, is_directory } in kept {
        make_point(path, *is_directory)?;
        covers::attach(tree, path)?;
    }
    Ok(())
}

/// Makes a mount point, with the directories that lead to it, unless it exists.
pub(super) fn make_point(path: &Path, is_directory: bool) -> io::Result<()> {
    if path.exists() {
        return Ok(());
    }
    let directory = if is_directory { Some(path) } else { path.parent() };
    if let Some(directory) = directory {
        fs::DirBuilder::new().recursive(true).mode(0o755).create(directory)?;
    }
    if !is_directory {
        fs::File::options().create(true).append(true).open(path)?;
    }
    Ok(())
}
