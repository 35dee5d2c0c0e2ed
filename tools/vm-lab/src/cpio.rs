//! Writer of cpio archives, which Linux unpacks as its first root file system (format "newc",
//! Documentation/driver-api/early-userspace/buffer-format.rst).
//!
//! One file may contain several archives. Later ones add to the earlier ones and replace their files. So the
//! large constant part is written once, and each boot appends its own archive.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;

/// Writer of one archive. Root owns all entries; parent directories are added as needed.
pub(crate) struct Archive<W> {
    out: W,
    written: usize,
    inode: u32,
    directories: BTreeSet<String>,
}

impl<W: Write> Archive<W> {
    /// Starts an empty archive on `out`.
    pub(crate) fn new(out: W) -> Archive<W> {
        Archive { out, written: 0, inode: 0, directories: BTreeSet::new() }
    }

    /// Adds a directory and its parents. Paths are relative to the root: `usr/bin`.
    pub(crate) fn directory(&mut self, path: &str) -> io::Result<()> {
        for (end, _) in path.match_indices('/').chain([(path.len(), "")]) {
            let parent = &path[..end];
            if !parent.is_empty() && self.directories.insert(parent.to_owned()) {
                self.entry(parent, DIRECTORY | 0o755, b"")?;
            }
        }
        Ok(())
    }

    /// Adds a file that everyone may read, and execute if `executable`.
    pub(crate) fn file(&mut self, path: &str, executable: bool, bytes: &[u8]) -> io::Result<()> {
        self.parent(path)?;
        self.entry(path, REGULAR | if executable { 0o755 } else { 0o644 }, bytes)
    }

    /// Adds a symbolic link at `path`.
    pub(crate) fn symlink(&mut self, path: &str, target: &str) -> io::Result<()> {
        self.parent(path)?;
        self.entry(path, SYMLINK | 0o777, target.as_bytes())
    }

    /// Adds a copy of the file at `from`, with its execute permission. Follows symbolic links.
    pub(crate) fn copy(&mut self, path: &str, from: &Path) -> io::Result<()> {
        let named =
            |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", from.display()));
        let executable = from.metadata().map_err(named)?.permissions().mode() & 0o100 != 0;
        self.file(path, executable, &std::fs::read(from).map_err(named)?)
    }

    /// Adds all files below `from` in the order of their names. Symbolic links stay links.
    pub(crate) fn tree(&mut self, path: &str, from: &Path) -> io::Result<()> {
        self.directory(path)?;
        let mut entries = std::fs::read_dir(from)?.collect::<io::Result<Vec<_>>>()?;
        entries.sort_by_key(std::fs::DirEntry::file_name);
        for entry in entries {
            let inside = format!("{path}/{}", entry.file_name().to_string_lossy());
            let kind = entry.file_type()?;
            if kind.is_dir() {
                self.tree(&inside, &entry.path())?;
            } else if kind.is_symlink() {
                self.symlink(&inside, &std::fs::read_link(entry.path())?.to_string_lossy())?;
            } else {
                self.copy(&inside, &entry.path())?;
            }
        }
        Ok(())
    }

    /// Writes the end mark and padding to a multiple of 512 bytes, so that another archive may follow.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.entry("TRAILER!!!", 0, b"")?;
        self.pad(512)?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn parent(&mut self, path: &str) -> io::Result<()> {
        path.rfind('/').map_or(Ok(()), |end| self.directory(&path[..end]))
    }

    /// Writes one entry: a header of 110 characters, the name with a zero byte, and the contents. Name and contents are
    /// padded to four bytes.
    fn entry(&mut self, name: &str, mode: u32, bytes: &[u8]) -> io::Result<()> {
        let too_long = |_| io::Error::other(format!("{name} is too long for a cpio archive"));
        self.inode += 1;
        let links = if mode & DIRECTORY == DIRECTORY { 2 } else { 1 };
        let size = u32::try_from(bytes.len()).map_err(too_long)?;
        let name_size = u32::try_from(name.len() + 1).map_err(too_long)?;
        // inode, mode, uid, gid, links, mtime, size, device (2), device of a node (2), name, check
        let fields = [self.inode, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name_size, 0];
        let mut header = String::from("070701");
        fields.iter().for_each(|field| header += &format!("{field:08x}"));
        self.write(header.as_bytes())?;
        self.write(name.as_bytes())?;
        self.write(&[0])?;
        self.pad(4)?;
        self.write(bytes)?;
        self.pad(4)
    }

    fn pad(&mut self, to: usize) -> io::Result<()> {
        let missing = self.written.next_multiple_of(to) - self.written;
        self.write(&[0; 512][..missing])
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len();
        self.out.write_all(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parses the names, modes and contents of an archive.
    fn read(mut bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut entries = vec![];
        loop {
            let field = |i: usize| {
                let digits = std::str::from_utf8(&bytes[6 + 8 * i..14 + 8 * i]).unwrap();
                usize::from_str_radix(digits, 16).unwrap()
            };
            assert_eq!(&bytes[..6], b"070701");
            let (mode, size, name_size) = (field(1), field(6), field(11));
            let name = String::from_utf8(bytes[110..110 + name_size - 1].to_vec()).unwrap();
            let start = (110 + name_size).next_multiple_of(4);
            let content = bytes[start..start + size].to_vec();
            bytes = &bytes[(start + size).next_multiple_of(4)..];
            if name == "TRAILER!!!" {
                assert!(bytes.iter().all(|byte| *byte == 0));
                return entries;
            }
            entries.push((name, u32::try_from(mode).unwrap(), content));
        }
    }

    #[test]
    fn parent_is_added_once_and_before_its_entries() {
        let mut archive = Archive::new(Vec::new());
        archive.file("usr/bin/tool", true, b"12345").unwrap();
        archive.file("usr/bin/other", false, b"").unwrap();
        archive.symlink("bin", "usr/bin").unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(bytes.len() % 512, 0);
        let entry = |name: &str, mode, content: &[u8]| (name.to_owned(), mode, content.to_vec());
        assert_eq!(
            read(&bytes),
            [
                entry("usr", 0o040_755, b""),
                entry("usr/bin", 0o040_755, b""),
                entry("usr/bin/tool", 0o100_755, b"12345"),
                entry("usr/bin/other", 0o100_644, b""),
                entry("bin", 0o120_777, b"usr/bin"),
            ]
        );
    }

    #[test]
    fn tree_keeps_structure_links_and_execute_permission() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("sub")).unwrap();
        let script = directory.path().join("sub/run.sh");
        std::fs::write(&script, "echo").unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::symlink("run.sh", directory.path().join("sub/start")).unwrap();
        let mut archive = Archive::new(Vec::new());
        archive.tree("vm", directory.path()).unwrap();
        let entries = read(&archive.finish().unwrap());
        let names: Vec<_> = entries.iter().map(|(name, mode, _)| (name.as_str(), *mode)).collect();
        let wanted = [
            ("vm", 0o040_755),
            ("vm/sub", 0o040_755),
            ("vm/sub/run.sh", 0o100_755),
            ("vm/sub/start", 0o120_777),
        ];
        assert_eq!(names, wanted);
    }
}
