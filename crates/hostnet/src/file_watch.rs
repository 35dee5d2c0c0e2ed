//! Watch over files of the host: reports that one of them may have changed or was replaced.
//!
//! Each file is watched by inotify, and so is the directory in which a new one may replace it, and that of the file to
//! which a symbolic link leads.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::Errno;

/// Watch over several files.
#[derive(Debug)]
pub struct FileWatch {
    files: &'static [&'static str],
    watch: OwnedFd,
}

impl FileWatch {
    /// Starts to watch files.
    ///
    /// # Errors
    ///
    /// Fails if the system permits no watch.
    pub fn new(files: &'static [&'static str]) -> Result<FileWatch, Errno> {
        let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let watch = FileWatch { files, watch };
        watch.renew();
        Ok(watch)
    }

    /// Watches the files that are there now. To be called before they are read.
    pub fn renew(&self) {
        let of_file = WatchFlags::CLOSE_WRITE | WatchFlags::DELETE_SELF | WatchFlags::MOVE_SELF;
        let of_directory = WatchFlags::CREATE | WatchFlags::MOVED_TO;
        for file in self.files {
            // A file or directory that is not there has no changes. A watch that exists is renewed.
            let _ = inotify::add_watch(&self.watch, *file, of_file);
            for directory in directories(Path::new(file)) {
                let _ = inotify::add_watch(&self.watch, directory, of_directory);
            }
        }
    }

    /// Returns the descriptor to poll.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.watch.as_fd()
    }

    /// Returns `true` if there were events since the last call.
    pub fn may_have_changed(&self) -> bool {
        let mut events = [0; 4096];
        let mut changed = false;
        while let Ok(1..) = rustix::io::read(&self.watch, &mut events) {
            changed = true;
        }
        changed
    }
}

/// Returns the directory of a path, and that of the file to which it leads.
fn directories(path: &Path) -> Vec<PathBuf> {
    let target = path.canonicalize().ok();
    let paths = [Some(path), target.as_deref()].into_iter().flatten();
    paths.filter_map(|path| path.parent().map(Path::to_owned)).collect()
}
