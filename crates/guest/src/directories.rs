//! Bounded listings of the host's directories, by the kinds of their entries.
//!
//! A listing needs no call for each entry: the kernel reports the kind with the name. It does not enter other mounts.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, FileType};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// Limits of one walk. What lies beyond them is not listed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Budget {
    pub directories: usize,
    pub entries: usize,
}

/// Directory, with its entries by kind.
#[derive(Debug, Default)]
pub(super) struct Directory {
    pub path: PathBuf,
    /// Names of Unix sockets.
    pub sockets: Vec<OsString>,
    /// Number of named pipes.
    pub pipes: usize,
    /// Names of symbolic links.
    pub links: Vec<OsString>,
    /// Names of everything else but directories.
    pub files: Vec<OsString>,
    /// Directories within, as deep as the walk went. One that was not entered has no entries.
    pub directories: Vec<Directory>,
    /// Set if a limit ended the listing of this directory or of one within.
    pub is_cut: bool,
}

/// Walker over directories, which does not enter mount points.
#[derive(Debug)]
pub(super) struct Walker<'a> {
    points: BTreeSet<&'a Path>,
}

impl<'a> Walker<'a> {
    /// Creates a walker that stops at these mount points.
    pub(super) fn new(points: impl Iterator<Item = &'a Path>) -> Walker<'a> {
        Walker { points: points.collect() }
    }

    /// Returns `true` for a mount point.
    pub(super) fn is_mounted(&self, path: &Path) -> bool {
        self.points.contains(path)
    }

    /// Lists a directory, and those within down to `depth` levels. One that cannot be read has no entries.
    pub(super) fn walk(&self, path: &Path, depth: usize, budget: &mut Budget) -> Directory {
        let mut directory = Directory { path: path.to_owned(), ..Directory::default() };
        if budget.directories == 0 {
            directory.is_cut = true;
            return directory;
        }
        budget.directories -= 1;
        let Ok(entries) = fs::read_dir(path) else { return directory };
        for entry in entries.flatten() {
            if budget.entries == 0 {
                directory.is_cut = true;
                break;
            }
            budget.entries -= 1;
            if let Ok(kind) = entry.file_type() {
                directory.add(entry.file_name(), kind);
            }
        }
        for within in &mut directory.directories {
            if depth > 0 && !self.is_mounted(&within.path) {
                *within = self.walk(&within.path, depth - 1, budget);
                directory.is_cut |= within.is_cut;
            }
        }
        directory
    }
}

impl Directory {
    fn add(&mut self, name: OsString, kind: FileType) {
        if kind.is_dir() {
            let path = self.path.join(name);
            self.directories.push(Directory { path, ..Directory::default() });
        } else if kind.is_socket() {
            self.sockets.push(name);
        } else if kind.is_fifo() {
            self.pipes += 1;
        } else if kind.is_symlink() {
            self.links.push(name);
        } else {
            self.files.push(name);
        }
    }

    /// Calls `act` with this directory and all within.
    pub(super) fn each(&self, act: &mut impl FnMut(&Directory)) {
        act(self);
        self.directories.iter().for_each(|within| within.each(act));
    }

    /// Returns `true` if this directory or one within has a socket or a named pipe, or was not listed whole.
    pub(super) fn may_have_endpoints(&self) -> bool {
        let mut found = self.is_cut;
        self.each(&mut |directory| found |= directory.pipes > 0 || !directory.sockets.is_empty());
        found
    }

    /// Returns `true` if the directory has sockets and nothing else.
    pub(super) fn is_for_sockets(&self) -> bool {
        let others = self.pipes + self.links.len() + self.files.len() + self.directories.len();
        !self.is_cut && others == 0 && !self.sockets.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    const ALL: Budget = Budget { directories: 100, entries: 100 };

    #[test]
    fn entries_are_listed_by_kind_down_to_the_depth() {
        let outer = tempfile::tempdir().unwrap();
        let path = |name: &str| outer.path().join(name);
        for directory in ["deep", "deep/er", "mount"] {
            fs::create_dir(path(directory)).unwrap();
        }
        let _listeners =
            ["deep/s", "deep/er/s", "mount/s"].map(|name| UnixListener::bind(path(name)));
        fs::write(path("file"), "").unwrap();
        std::os::unix::fs::symlink("file", path("link")).unwrap();
        let point = path("mount");
        let walker = Walker::new([point.as_path()].into_iter());
        let list = |depth| {
            let directory = walker.walk(outer.path(), depth, &mut ALL.clone());
            let mut sockets = 0;
            directory.each(&mut |within| sockets += within.sockets.len());
            (directory.files.len(), directory.links.len(), directory.directories.len(), sockets)
        };
        assert_eq!(list(0), (1, 1, 2, 0));
        assert_eq!(list(1), (1, 1, 2, 1));
        assert_eq!(list(2), (1, 1, 2, 2));
        let deep = walker.walk(&path("deep/er"), 0, &mut ALL.clone());
        assert!(deep.is_for_sockets() && deep.may_have_endpoints());
    }

    #[test]
    fn walk_beyond_its_budget_is_cut() {
        let outer = tempfile::tempdir().unwrap();
        for number in 0..5 {
            fs::create_dir(outer.path().join(number.to_string())).unwrap();
        }
        let walker = Walker::new([].into_iter());
        for (directories, entries, cut) in [(6, 5, false), (5, 5, true), (6, 4, true)] {
            let mut budget = Budget { directories, entries };
            let directory = walker.walk(outer.path(), 1, &mut budget);
            assert_eq!(directory.is_cut, cut, "{directories} {entries}");
            assert_eq!(directory.may_have_endpoints(), cut);
        }
    }
}
