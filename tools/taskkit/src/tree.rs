//! Trees of files that become a package or an archive.

use std::fs::{File, FileTimes};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Context as _;

use crate::exec::Cmd;

/// Tree of files in a folder of its own. Paths in it have no leading slash.
pub struct Tree {
    root: PathBuf,
}

impl Tree {
    /// Starts a tree in the folder `root`, which is emptied first.
    pub fn new(root: PathBuf) -> anyhow::Result<Tree> {
        if root.exists() {
            std::fs::remove_dir_all(&root)?;
        }
        std::fs::create_dir_all(&root)?;
        Ok(Tree { root })
    }

    /// Returns the folder of the tree.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the place of `path`. The directory it is in exists.
    pub fn place(&self, path: &str) -> anyhow::Result<PathBuf> {
        let place = self.root.join(path);
        std::fs::create_dir_all(place.parent().context("a path of a tree is in a directory")?)?;
        Ok(place)
    }

    /// Adds a file of the given mode.
    pub fn add(&self, path: &str, mode: u32, content: impl AsRef<[u8]>) -> anyhow::Result<()> {
        let place = self.place(path)?;
        std::fs::write(&place, content)?;
        Ok(std::fs::set_permissions(&place, PermissionsExt::from_mode(mode))?)
    }

    /// Adds a copy of a file.
    pub fn copy(&self, path: &str, mode: u32, from: &Path) -> anyhow::Result<()> {
        let content = std::fs::read(from).with_context(|| from.display().to_string())?;
        self.add(path, mode, content)
    }

    /// Adds a symbolic link.
    pub fn link(&self, path: &str, target: &str) -> anyhow::Result<()> {
        Ok(std::os::unix::fs::symlink(target, self.place(path)?)?)
    }

    /// Compresses a file in its place, which is the form for manual pages and boot images. The result depends on the
    /// content alone.
    pub fn compress(&self, place: &Path) -> anyhow::Result<()> {
        let zipped = Cmd::new("gzip").args(["-9".as_ref(), "-n".as_ref(), place.as_os_str()]);
        zipped.output(&self.root)?.map_err(|message| anyhow::anyhow!("gzip: {message}"))?;
        Ok(())
    }

    /// Returns the paths of all files and links, sorted.
    pub fn files(&self) -> anyhow::Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        let mut folders = vec![self.root.clone()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder)? {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    folders.push(entry.path());
                } else {
                    files.push(entry.path().strip_prefix(&self.root)?.to_owned());
                }
            }
        }
        files.sort();
        Ok(files)
    }

    /// Sets all directories to mode 0755. The caller's umask would make them private otherwise.
    pub fn open_directories(&self) -> anyhow::Result<()> {
        open_directories(&self.root)
    }

    /// Sets the time of modification of every file to `epoch`, in seconds since 1970. Links keep theirs.
    pub fn set_times(&self, epoch: u64) -> anyhow::Result<()> {
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(epoch);
        for path in self.files()? {
            let place = self.root.join(path);
            if !place.symlink_metadata()?.is_symlink() {
                File::open(&place)?.set_times(FileTimes::new().set_modified(time))?;
            }
        }
        Ok(())
    }

    /// Removes the folder with all files.
    pub fn remove(self) -> anyhow::Result<()> {
        Ok(std::fs::remove_dir_all(&self.root)?)
    }
}

fn open_directories(folder: &Path) -> anyhow::Result<()> {
    std::fs::set_permissions(folder, PermissionsExt::from_mode(0o755))?;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            open_directories(&entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_links_are_listed_in_order_with_one_time() {
        let folder = tempfile::tempdir().unwrap();
        let tree = Tree::new(folder.path().join("tree")).unwrap();
        tree.add("b/two", 0o755, "2").unwrap();
        tree.add("a", 0o644, "1").unwrap();
        tree.link("b/one", "../a").unwrap();
        tree.set_times(1_000_000_000).unwrap();
        let files = tree.files().unwrap();
        assert_eq!(files, ["a", "b/one", "b/two"].map(PathBuf::from));
        let of = tree.root().join("b/two").metadata().unwrap();
        let since = of.modified().unwrap().duration_since(SystemTime::UNIX_EPOCH).unwrap();
        assert_eq!((since.as_secs(), of.permissions().mode() & 0o777), (1_000_000_000, 0o755));
        tree.remove().unwrap();
    }
}
