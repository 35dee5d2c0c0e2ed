//! Files below allowed folders, opened once.
//!
//! A path that was examined may lead to another file when it is used later. [`Folders::open`] therefore
//! resolves all links first and then walks from the allowed folder down to the file without following
//! any link. The descriptor that it returns is the file that was examined, whatever happens to the path
//! meanwhile: a link that appears on the way makes the walk fail.

// #syscall daemon openat: disks, and the folders on the way to them
// #syscall daemon readlinkat: where a disk is, when all links are followed
// #syscall daemon readlink@x86_64: where a disk is, when all links are followed

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Mode, OFlags};

/// Folders below which files may be opened.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Folders(Vec<PathBuf>);

/// Reason for which a path was not opened.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    #[error("{}: {source}", path.display())]
    System {
        path: PathBuf,
        /// Reason of the system.
        source: io::Error,
    },
    /// The file lies elsewhere.
    #[error("{} is not below an allowed folder", path.display())]
    Elsewhere {
        /// Place of the file when all links are followed.
        path: PathBuf,
    },
}

impl Folders {
    /// Allows these folders. Links in their own paths are followed.
    #[must_use]
    pub fn new(folders: Vec<PathBuf>) -> Folders {
        Folders(folders)
    }

    /// Opens `path` once, and returns the file and its path without links.
    ///
    /// # Errors
    ///
    /// [`FolderError`]: it is in no allowed folder, or cannot be opened, or changes meanwhile.
    pub fn open(&self, path: &Path, flags: OFlags) -> Result<(OwnedFd, PathBuf), FolderError> {
        let system = |source| FolderError::System { path: path.to_owned(), source };
        let real = std::fs::canonicalize(path).map_err(system)?;
        let below = |folder: &PathBuf| {
            let folder = std::fs::canonicalize(folder).ok()?;
            let rest = real.strip_prefix(&folder).ok()?.to_owned();
            Some((folder, rest))
        };
        let Some((folder, rest)) = self.0.iter().find_map(below) else {
            return Err(FolderError::Elsewhere { path: real });
        };
        let file = walk(&folder, &rest, flags).map_err(system)?;
        Ok((file, real))
    }
}

/// Opens `rest` below `folder` and follows no link on the way.
fn walk(folder: &Path, rest: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let last = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let step = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let Some(name) = rest.file_name() else {
        return Ok(rustix::fs::open(folder, last, Mode::empty())?);
    };
    let mut directory = rustix::fs::open(folder, step, Mode::empty())?;
    for part in rest.parent().into_iter().flat_map(Path::components) {
        let Component::Normal(part) = part else { return Err(io::ErrorKind::InvalidInput.into()) };
        directory = rustix::fs::openat(&directory, part, step, Mode::empty())?;
    }
    Ok(rustix::fs::openat(&directory, name, last, Mode::empty())?)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn walk_meeting_a_link_fails() {
        let dir = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(dir.path()).unwrap();
        fs::create_dir_all(root.join("in/real")).unwrap();
        fs::write(root.join("in/real/disk"), "x").unwrap();
        fs::write(root.join("secret"), "y").unwrap();
        symlink("real", root.join("in/link")).unwrap();
        symlink("../secret", root.join("in/out")).unwrap();
        let folder = root.join("in");
        assert!(walk(&folder, Path::new("real/disk"), OFlags::RDONLY).is_ok());
        assert!(walk(&folder, Path::new("link/disk"), OFlags::RDONLY).is_err());
        assert!(walk(&folder, Path::new("out"), OFlags::RDONLY).is_err());
        assert!(walk(&folder, Path::new("real/../../secret"), OFlags::RDONLY).is_err());
    }

    #[test]
    fn path_swapped_while_it_is_opened_never_opens_a_file_elsewhere() {
        let dir = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(dir.path()).unwrap();
        fs::create_dir(root.join("in")).unwrap();
        fs::write(root.join("in/disk"), "inside").unwrap();
        fs::write(root.join("secret"), "outside").unwrap();
        let path = root.join("in/image");
        fs::hard_link(root.join("in/disk"), &path).unwrap();
        let stop = AtomicBool::new(false);
        let folders = Folders::new(vec![root.join("in")]);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (link, file) = (root.join("in/.link"), root.join("in/.file"));
                while !stop.load(Ordering::Relaxed) {
                    symlink("../secret", &link).unwrap();
                    fs::rename(&link, &path).unwrap();
                    fs::hard_link(root.join("in/disk"), &file).unwrap();
                    fs::rename(&file, &path).unwrap();
                }
            });
            let mut opened = 0;
            for _ in 0..20_000 {
                if let Ok((file, _)) = folders.open(&path, OFlags::RDONLY) {
                    let mut content = [0; 7];
                    let read = rustix::io::pread(&file, &mut content, 0).unwrap();
                    if content[..read] != *b"inside" {
                        stop.store(true, Ordering::Relaxed);
                        panic!("{}", String::from_utf8_lossy(&content[..read]));
                    }
                    opened += 1;
                }
            }
            stop.store(true, Ordering::Relaxed);
            assert!(opened > 0, "the file itself is opened now and then");
        });
    }
}
