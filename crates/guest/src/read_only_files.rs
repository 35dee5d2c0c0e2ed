//! Files that the caller hands over open for reading, in a view that has read-only paths.
//!
//! A descriptor leads to the mount through which its file was opened: the caller's. A process reaches the file for writing
//! through that mount by the link `/proc/self/fd/N`, whatever the mounts of its own view say. Init therefore opens each
//! such file again, at its path in the view. A file whose path leads elsewhere in the view, or nowhere, stays as it was.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{Seek, SeekFrom};
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;

/// Opens the file of a descriptor again, at its path in this process's view. `None` if it is no file or directory that was
/// opened for reading alone, or is not at that path.
pub(crate) fn reopen(number: RawFd) -> Option<OwnedFd> {
    let link = PathBuf::from(format!("/proc/self/fd/{number}"));
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{number}")).ok()?;
    let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let flags = i32::from_str_radix(field("flags:")?, 8).ok()?;
    let position: u64 = field("pos:")?.parse().ok()?;
    let facts = fs::metadata(&link).ok()?;
    if flags & libc::O_ACCMODE != libc::O_RDONLY || !(facts.is_file() || facts.is_dir()) {
        return None;
    }
    let kept = flags & (libc::O_PATH | libc::O_DIRECTORY);
    let path = OsString::from(fs::read_link(&link).ok()?);
    let mut file =
        File::options().read(true).custom_flags(kept | libc::O_NOCTTY).open(path).ok()?;
    let found = file.metadata().ok()?;
    if (found.dev(), found.ino()) != (facts.dev(), facts.ino()) {
        return None;
    }
    if facts.is_file() && kept & libc::O_PATH == 0 {
        file.seek(SeekFrom::Start(position)).ok()?;
    }
    Some(file.into())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn file_open_for_reading_is_opened_again_at_its_position() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        fs::write(&path, "first second").unwrap();
        let mut file = File::open(&path).unwrap();
        file.read_exact(&mut [0; 6]).unwrap();
        let mut again = File::from(reopen(file.as_raw_fd()).unwrap());
        let mut rest = String::new();
        again.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "second");
        // The position is the copy's own.
        assert_eq!(file.stream_position().unwrap(), 6);
        assert!(reopen(File::open(directory.path()).unwrap().as_raw_fd()).is_some());
    }

    #[test]
    fn descriptor_for_writing_or_without_its_path_is_left_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let mut writable = File::options().create_new(true).append(true).open(&path).unwrap();
        writable.write_all(b"x").unwrap();
        assert!(reopen(writable.as_raw_fd()).is_none());
        let file = File::open(&path).unwrap();
        fs::rename(&path, directory.path().join("moved")).unwrap();
        fs::write(&path, "another").unwrap();
        assert!(reopen(file.as_raw_fd()).is_some(), "the link follows a file that was renamed");
        fs::remove_file(directory.path().join("moved")).unwrap();
        assert!(reopen(file.as_raw_fd()).is_none());
        let (reader, _writer) = std::io::pipe().unwrap();
        assert!(reopen(reader.as_raw_fd()).is_none());
    }
}
