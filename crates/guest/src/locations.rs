//! File locations that do not depend on mounts: file system and path within it.
//!
//! One file may be reached by several paths, if its file system or a part of it is mounted twice
//! (bind mount). [`Mounts::paths_of`] returns every path by which the mounts of a namespace lead to
//! a [`FileLocation`]. The source is `mountinfo` (proc_pid_mountinfo(5)).

use std::fs;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, Statx, StatxFlags};

/// Mounts of one namespace, in the order in which they are stacked.
#[derive(Debug)]
pub(super) struct Mounts(Vec<Mount>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Mount {
    id: u64,
    /// `major:minor` of the file system.
    file_system: String,
    /// Directory of the file system that is mounted.
    root: PathBuf,
    point: PathBuf,
}

/// Location of a directory or file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FileLocation {
    file_system: String,
    path: PathBuf,
    identity: Identity,
}

/// Device number of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct DeviceNumber {
    pub(super) major: u32,
    pub(super) minor: u32,
}

impl DeviceNumber {
    /// Returns the device of a file.
    pub(super) fn of(stat: &Statx) -> DeviceNumber {
        DeviceNumber { major: stat.stx_dev_major, minor: stat.stx_dev_minor }
    }
}

/// Identity of an inode, with its type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: DeviceNumber,
    inode: u64,
    format: u16,
}

/// Opens the directory of `/proc` that describes this process, for [`Mounts::read`]: it stays readable
/// when something else is mounted at `/proc`.
pub(super) fn open_own_proc() -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open("/proc/self", flags, Mode::empty())?)
}

/// Reads a file below the directory of `/proc` that describes this process.
pub(super) fn read_own_proc(own: BorrowedFd<'_>, name: &str) -> io::Result<Vec<u8>> {
    let file = rustix::fs::openat(own, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut bytes = Vec::new();
    io::Read::read_to_end(&mut fs::File::from(file), &mut bytes)?;
    Ok(bytes)
}

impl Mounts {
    /// Reads the mounts of this process's namespace.
    pub(super) fn read(own_proc: BorrowedFd<'_>) -> io::Result<Mounts> {
        Mounts::parse(&read_own_proc(own_proc, "mountinfo")?)
    }

    /// Parses the contents of a `mountinfo`.
    pub(super) fn parse(bytes: &[u8]) -> io::Result<Mounts> {
        let mounts = bytes.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        let mounts: Option<Vec<Mount>> = mounts.map(parse).collect();
        let unreadable = || io::Error::new(io::ErrorKind::InvalidData, "/proc/self/mountinfo");
        Ok(Mounts(mounts.ok_or_else(unreadable)?))
    }

    /// Returns the location of a path. `None` if it does not exist or this user may not access it.
    pub(super) fn location(&self, path: &Path) -> Option<FileLocation> {
        self.location_of_real(&fs::canonicalize(path).ok()?)
    }

    /// Returns the location of a path without symbolic links.
    pub(super) fn location_of_real(&self, path: &Path) -> Option<FileLocation> {
        self.locate(rustix::fs::statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, WANTED).ok()?, path)
    }

    /// Returns the location of an open file. `path` is its path in these mounts.
    pub(super) fn location_of_open(
        &self,
        file: BorrowedFd<'_>,
        path: &Path,
    ) -> Option<FileLocation> {
        self.locate(rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, WANTED).ok()?, path)
    }

    fn locate(&self, stat: Statx, path: &Path) -> Option<FileLocation> {
        let mount = self.0.iter().find(|mount| mount.id == stat.stx_mnt_id)?;
        let below = path.strip_prefix(&mount.point).ok()?;
        Some(FileLocation {
            file_system: mount.file_system.clone(),
            path: join(&mount.root, below),
            identity: Identity::of(&stat),
        })
    }

    /// Returns the mount points.
    pub(super) fn points(&self) -> impl Iterator<Item = &Path> {
        self.0.iter().map(|mount| mount.point.as_path())
    }

    /// Returns every path that leads to the location or to a part of it (a mount from inside of
    /// it).
    pub(super) fn paths_of(&self, location: &FileLocation) -> Vec<PathBuf> {
        let mounts = self.0.iter().filter(|mount| mount.file_system == location.file_system);
        let paths = mounts.filter_map(|mount| {
            if let Ok(below) = location.path.strip_prefix(&mount.root) {
                // Another mount may cover this path.
                let path = join(&mount.point, below);
                return (identity(&path)? == location.identity).then_some(path);
            }
            let is_part = mount.root.starts_with(&location.path);
            is_part.then(|| mount.point.clone())
        });
        let mut paths: Vec<_> = paths.collect();
        paths.sort();
        paths.dedup();
        paths
    }
}

impl FileLocation {
    /// Returns `true` for a directory.
    pub(super) fn is_directory(&self) -> bool {
        u32::from(self.identity.format) == libc::S_IFDIR
    }
}

impl Identity {
    fn of(stat: &Statx) -> Identity {
        Identity {
            device: DeviceNumber::of(stat),
            inode: stat.stx_ino,
            format: stat.stx_mode & 0o170_000,
        }
    }
}

/// Properties of a file for [`Identity`] and `Mounts`.
const WANTED: StatxFlags = StatxFlags::TYPE.union(StatxFlags::INO).union(StatxFlags::MNT_ID);

fn identity(path: &Path) -> Option<Identity> {
    let stat = rustix::fs::statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, WANTED).ok()?;
    Some(Identity::of(&stat))
}

/// Joins paths as [`Path::join`] does, without a trailing slash if nothing is joined.
fn join(directory: &Path, below: &Path) -> PathBuf {
    if below.as_os_str().is_empty() { directory.to_owned() } else { directory.join(below) }
}

/// Parses a line of `mountinfo`.
fn parse(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let id = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let (_parent, file_system) = (fields.next()?, fields.next()?);
    let file_system = String::from_utf8(file_system.to_owned()).ok()?;
    let (root, point) = (unescape(fields.next()?), unescape(fields.next()?));
    Some(Mount { id, file_system, root, point })
}

/// Undoes the kernel's escapes: a backslash and three octal digits for space, tab, newline and backslash.
pub(super) fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, more @ ..] = rest {
        let digits = more.get(..3).filter(|_| *first == b'\\');
        let code = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|code| u8::from_str_radix(code, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = more.get(3..).unwrap_or_default();
            }
            None => {
                bytes.push(*first);
                rest = more;
            }
        }
    }
    PathBuf::from(std::ffi::OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn mountinfo_line_with_escapes_is_parsed() {
        let line = br"36 35 98:0 /mnt\0401 /mnt/a\134b rw,noatime master:1 - ext3 /dev/root rw";
        let mount = parse(line).unwrap();
        assert_eq!((mount.id, mount.file_system.as_str()), (36, "98:0"));
        assert_eq!((mount.root, mount.point), ("/mnt 1".into(), r"/mnt/a\b".into()));
        assert_eq!(parse(b"36 35"), None);
    }

    #[test]
    fn place_of_a_directory_leads_back_to_it() {
        let directory = tempfile::tempdir().unwrap();
        let own = open_own_proc().unwrap();
        let mounts = Mounts::read(own.as_fd()).unwrap();
        let location = mounts.location(directory.path()).unwrap();
        assert!(location.is_directory());
        let path = fs::canonicalize(directory.path()).unwrap();
        assert!(mounts.paths_of(&location).contains(&path));
        assert_eq!(mounts.location(&directory.path().join("absent")), None);
    }

    #[test]
    fn place_is_reached_through_every_mount_that_holds_it() {
        let mounts =
            |text: &str| Mounts(text.lines().map(|l| parse(l.as_bytes()).unwrap()).collect());
        // A part of the directory is mounted elsewhere.
        let table = mounts("1 0 8:1 / / rw\n2 1 8:1 /run/user/7/ringfence /srv/x rw");
        let root = identity(Path::new("/")).unwrap();
        let location =
            FileLocation { file_system: "8:1".into(), path: "/run/user/7".into(), identity: root };
        assert_eq!(table.paths_of(&location), [PathBuf::from("/srv/x")]);
    }
}
