//! Files of a command under `run --strict`: empty directories in place of the user's, and what stays visible in them.
//!
//! The tree is read-only already when the empty directories are mounted. Paths that stay visible are cloned before that and
//! mounted again, each at its own place, whose parent directories are made where they are hidden.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ringfence_sys::namespaces;

use crate::config::StrictView;
use crate::covers;

/// Mode of an empty directory, in which every user of the guest may write.
const SHARED: u32 = 0o1777;

/// Error of a path of the view.
#[derive(Debug, thiserror::Error)]
#[error("--strict: {}: {source}", path.display())]
pub(super) struct StrictError {
    path: PathBuf,
    source: io::Error,
}

impl StrictError {
    fn of(path: &Path) -> impl FnOnce(io::Error) -> StrictError {
        let path = path.to_owned();
        move |source| StrictError { path, source }
    }
}

/// Clones of the paths that stay visible.
#[derive(Debug, Default)]
pub(super) struct Kept {
    /// Directories to be replaced, parents first.
    empty: Vec<PathBuf>,
    trees: Vec<Tree>,
}

/// Clone of a path.
#[derive(Debug)]
struct Tree {
    fd: OwnedFd,
    path: PathBuf,
    is_directory: bool,
    is_writable: bool,
}

impl Kept {
    /// Clones what stays visible. Paths that do not exist in this tree are passed over.
    pub(super) fn of(view: &StrictView) -> Result<Kept, StrictError> {
        let mut empty: Vec<PathBuf> =
            view.empty.iter().filter(|path| path.is_dir()).cloned().collect();
        empty.sort();
        empty.dedup();
        let mut trees = vec![];
        let mut shown = view.shown.clone();
        // Parents first. The writable one of two entries for a path comes last and is seen.
        shown.sort();
        for (path, is_writable) in shown {
            let Ok(metadata) = path.metadata() else { continue };
            let fd = covers::detach_copy(&path, true).map_err(StrictError::of(&path))?;
            trees.push(Tree { fd, path, is_directory: metadata.is_dir(), is_writable });
        }
        Ok(Kept { empty, trees })
    }

    /// Mounts the empty directories and, over them, what stays visible.
    pub(super) fn apply(self) -> Result<(), StrictError> {
        for path in &self.empty {
            let mounted =
                fs::create_dir_all(path).and_then(|()| covers::cover_directory(path, SHARED));
            mounted.map_err(StrictError::of(path))?;
        }
        for tree in &self.trees {
            tree.show().map_err(StrictError::of(&tree.path))?;
        }
        Ok(())
    }
}

impl Tree {
    fn show(&self) -> io::Result<()> {
        let Tree { fd, path, is_directory, is_writable } = self;
        if *is_directory {
            fs::create_dir_all(path)?;
        } else if !path.exists() {
            path.parent().map_or(Ok(()), fs::create_dir_all)?;
            fs::File::create_new(path)?;
        }
        covers::attach(fd, path)?;
        if *is_writable {
            return Ok(());
        }
        namespaces::make_tree_read_only(&CString::new(path.as_os_str().as_bytes())?)
    }
}
