//! Search for the sockets that the host's programs have bound to paths.
//!
//! The kernel reports the name under which a socket was bound, and the identity of its file ([`bound_sockets`]). A name
//! whose file has that identity, and no second link, needs no search. All others do: the file was renamed or linked,
//! its directory was renamed, the name is relative, or it is that of another root directory. The kernel has no call
//! that leads from the identity to a path, so directories are listed:
//!
//! ```text
//! name ── statx(2): the same file, one link ────────────────────────────────> hidden
//!    └─ otherwise ──> its directory; the directories around it, two levels ──> every socket there is hidden
//! places in which sockets are usual ─────────────────────────────────────────> every socket there is hidden
//! directories that the launcher found in other processes ([`other_processes`]) ──> the same
//! ```
//!
//! All of it is bounded, whatever other users bind: a listing by [`Budget`], the number of listings by
//! [`SEARCHES_MAX`], and the number of covers by [`CROWD`], beyond which a directory is replaced as a whole.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxFlags};

use crate::bound_sockets::{self, BoundSocket};
use crate::directories::{Budget, Directory, Walker};
use crate::locations::DeviceNumber;

/// Maximum number of directories listed for names that lead nowhere.
const SEARCHES_MAX: usize = 256;
/// Number of sockets below a directory from which on it is replaced as a whole.
const CROWD: usize = 1024;
/// Maximum number of sockets that are hidden one by one.
const COVERS_MAX: usize = 2048;
/// Limits for one place.
const PLACE: Budget = Budget { directories: 64, entries: 8192 };
/// Limits for the directories around names that lead nowhere, all together.
const SURROUNDINGS: Budget = Budget { directories: 256, entries: 16_384 };

/// Directories that hold more than sockets, whatever their number.
const GENERAL: [&str; 16] = [
    "/", "/home", "/root", "/run", "/var", "/var/lib", "/var/run", "/usr", "/etc", "/opt", "/srv",
    "/mnt", "/media", "/proc", "/sys", "/dev",
];
/// Directories that every user can write to. They may be replaced although the working directory is in them.
pub(super) const TEMPORARY: [&str; 3] = ["/tmp", "/var/tmp", "/dev/shm"];

/// Places of one guest.
#[derive(Debug)]
pub(super) struct Places<'a> {
    pub home: Option<&'a Path>,
    pub working_directory: Option<&'a Path>,
    /// Directories that the launcher found in other processes.
    pub listed: &'a [PathBuf],
}

/// Sockets of the host's programs.
#[derive(Debug, Default)]
pub(super) struct HostSockets {
    /// Sockets to be hidden one by one.
    pub files: Vec<PathBuf>,
    /// Directories that hold sockets alone, to be replaced by empty ones.
    pub directories: Vec<PathBuf>,
    /// Directories that hold too many sockets, and other files, to be replaced by empty ones.
    pub crowded: Vec<PathBuf>,
}

/// Searches for the sockets. Those below `replaced` are left out. `run` is the listing of `/run`.
pub(super) fn find(
    places: &Places<'_>,
    walker: &Walker<'_>,
    own_proc: BorrowedFd<'_>,
    replaced: &[&Path],
    run: Option<&Directory>,
) -> io::Result<HostSockets> {
    let mut search = Search {
        places,
        replaced,
        walker,
        run,
        sockets: HashMap::new(),
        for_sockets: BTreeSet::new(),
        listed: BTreeMap::new(),
    };
    let lost = search.check(&bound_sockets::list(own_proc)?);
    search.look_around(&lost);
    search.list_usual_places();
    search.group()
}

/// State of a search. Paths that other users can make many of are kept and compared as bytes.
struct Search<'a> {
    places: &'a Places<'a>,
    replaced: &'a [&'a Path],
    walker: &'a Walker<'a>,
    /// Listing of `/run`.
    run: Option<&'a Directory>,
    /// Names of sockets, by the directory.
    sockets: HashMap<OsString, BTreeSet<OsString>>,
    /// Directories with sockets and nothing else.
    for_sockets: BTreeSet<PathBuf>,
    /// Directories that were listed, with those within that are no mount points.
    listed: BTreeMap<PathBuf, Vec<PathBuf>>,
}

impl Search<'_> {
    /// Looks at the names. Returns the directories of those that do not lead to their file, the user's own first.
    fn check(&mut self, bound: &[BoundSocket]) -> Vec<PathBuf> {
        let mut lost: HashMap<&[u8], bool> = HashMap::new();
        for socket in bound {
            let path = Path::new(OsStr::from_bytes(&socket.name));
            let Some((parent, name)) = split(&socket.name) else { continue };
            if self.is_replaced(&socket.name) {
                continue;
            }
            if let Some(found) = socket_at(path) {
                self.add(parent, OsStr::from_bytes(name));
                let is_same = socket.file.is_none_or(|file| file.is(found.device, found.inode));
                if is_same && found.links == 1 {
                    continue;
                }
            }
            let foreign = lost.entry(parent).or_insert(true);
            *foreign &= socket.is_foreign;
        }
        let mut lost: Vec<_> = lost.into_iter().collect();
        lost.sort_unstable_by_key(|(path, is_foreign)| (*is_foreign, *path));
        let paths = lost.into_iter().take(SEARCHES_MAX);
        paths.map(|(path, _)| PathBuf::from(OsStr::from_bytes(path))).collect()
    }

    fn add(&mut self, directory: &[u8], name: &OsStr) {
        let directory = OsStr::from_bytes(directory);
        match self.sockets.get_mut(directory) {
            Some(names) => names.insert(name.to_owned()),
            None => {
                let names = BTreeSet::from([name.to_owned()]);
                self.sockets.insert(directory.to_owned(), names).is_none()
            }
        };
    }

    /// Lists these directories, then those around them.
    fn look_around(&mut self, lost: &[PathBuf]) {
        for directory in lost {
            self.list(directory, 0, &mut PLACE.clone());
        }
        let mut budget = SURROUNDINGS;
        for directory in lost {
            // A directory may have been renamed, or a file moved to the next one.
            let around = directory.ancestors().skip(1).find(|path| path.is_dir());
            let around = around.filter(|path| *path != Path::new("/")).unwrap_or(directory);
            self.list(around, 2, &mut budget);
        }
    }

    /// Lists the places in which sockets are usual.
    fn list_usual_places(&mut self) {
        let Places { home, working_directory, listed } = *self.places;
        let ssh = home.map(|home| home.join(".ssh"));
        let places =
            [(Some(Path::new("/tmp")), 0), (home, 0), (working_directory, 0), (ssh.as_deref(), 1)];
        for (path, depth) in places {
            if let Some(path) = path {
                self.list(path, depth, &mut PLACE.clone());
            }
        }
        if let Some(run) = self.run {
            run.each(&mut |within| self.add_all(within));
        }
        for path in listed {
            self.list(path, 0, &mut PLACE.clone());
        }
    }

    /// Lists a directory, and those within down to `depth` levels. None is listed twice.
    fn list(&mut self, path: &Path, depth: usize, budget: &mut Budget) {
        // The listing of /run goes deeper than any other.
        let is_known = self.run.is_some_and(|run| path.starts_with(&run.path));
        if is_known || self.is_replaced(path.as_os_str().as_bytes()) {
            return;
        }
        if !self.listed.contains_key(path) {
            let directory = self.walker.walk(path, 0, budget);
            self.add_all(&directory);
            let within = directory.directories.into_iter().map(|within| within.path);
            let within = within.filter(|within| !self.walker.is_mounted(within)).collect();
            self.listed.insert(path.to_owned(), within);
        }
        if depth > 0 {
            for within in self.listed.get(path).cloned().unwrap_or_default() {
                self.list(&within, depth - 1, budget);
            }
        }
    }

    fn add_all(&mut self, directory: &Directory) {
        if directory.is_for_sockets() {
            self.for_sockets.insert(directory.path.clone());
        }
        for name in &directory.sockets {
            self.add(directory.path.as_os_str().as_bytes(), name);
        }
    }

    fn is_replaced(&self, path: &[u8]) -> bool {
        let is_below = |replaced: &&Path| {
            let rest = path.strip_prefix(replaced.as_os_str().as_bytes());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
        };
        self.replaced.iter().any(is_below)
    }

    /// Returns `true` if nothing else is lost with a directory than what is needed to reach sockets.
    fn may_be_replaced(&self, directory: &Path) -> bool {
        let Places { home, working_directory, .. } = *self.places;
        let holds = |path: Option<&Path>| path.is_some_and(|path| path.starts_with(directory));
        let is_temporary = TEMPORARY.map(Path::new).contains(&directory);
        let is_general = GENERAL.map(Path::new).contains(&directory) || holds(home);
        let holds_work = holds(working_directory) && !is_temporary;
        !is_general && !holds_work && working_directory != Some(directory)
    }

    /// Decides which directories are replaced as a whole.
    fn group(mut self) -> io::Result<HostSockets> {
        let mut replaced: BTreeSet<PathBuf> = std::mem::take(&mut self.for_sockets);
        replaced.retain(|directory| self.may_be_replaced(directory));
        let mut crowded = vec![];
        let mut numbers = Numbers::default();
        for (directory, names) in &self.sockets {
            numbers.add(directory.as_bytes(), names.len());
        }
        // From the deepest directories upwards. The sockets of a crowd do not count further up.
        let mut left = 0;
        while let Some(deepest) = numbers.0.pop() {
            for (directory, number) in deepest {
                let path = Path::new(OsStr::from_bytes(&directory));
                if number > CROWD && self.may_be_replaced(path) {
                    crowded.push(path.to_owned());
                } else if let Some((parent, _)) = split(&directory) {
                    numbers.add(parent, number);
                } else {
                    left = number;
                }
            }
        }
        if left > COVERS_MAX {
            return Err(io::Error::other(format!(
                "{left} sockets in directories that hold other files, too (the limit is {COVERS_MAX})"
            )));
        }
        let hidden: HashSet<&OsStr> =
            replaced.iter().chain(&crowded).map(|path| path.as_os_str()).collect();
        let mut files = vec![];
        for (directory, names) in &self.sockets {
            if !is_below(directory.as_bytes(), &hidden) {
                let directory = Path::new(directory);
                files.extend(names.iter().map(|name| directory.join(name)));
            }
        }
        files.sort_unstable();
        let directories = replaced.iter().cloned().collect();
        Ok(HostSockets { files, directories, crowded })
    }
}

/// Returns `true` if the path is one of the directories, or below one.
fn is_below(path: &[u8], directories: &HashSet<&OsStr>) -> bool {
    let mut at = Some(path);
    while let Some(path) = at {
        if directories.contains(OsStr::from_bytes(path)) {
            return true;
        }
        at = split(path).map(|(parent, _)| parent);
    }
    false
}

/// Splits an absolute path into directory and name. `None` for `/` and for a relative path.
fn split(path: &[u8]) -> Option<(&[u8], &[u8])> {
    if !path.starts_with(b"/") || path == b"/" {
        return None;
    }
    let at = path.iter().rposition(|byte| *byte == b'/')?;
    Some((path.get(..at.max(1))?, path.get(at + 1..)?))
}

/// Number of sockets below each directory, by the number of components.
#[derive(Default)]
struct Numbers(Vec<HashMap<Vec<u8>, usize>>);

impl Numbers {
    fn add(&mut self, directory: &[u8], number: usize) {
        let slashes = directory.iter().filter(|byte| **byte == b'/').count();
        let depth = if directory == b"/" { 0 } else { slashes };
        if self.0.len() <= depth {
            self.0.resize_with(depth + 1, HashMap::new);
        }
        if let Some(numbers) = self.0.get_mut(depth) {
            *numbers.entry(directory.to_owned()).or_default() += number;
        }
    }
}

/// File of a socket.
struct File {
    device: DeviceNumber,
    inode: u64,
    links: u32,
}

/// Returns the socket at a path. `None` if there is none, or this user may not look at it.
fn socket_at(path: &Path) -> Option<File> {
    let wanted = StatxFlags::TYPE | StatxFlags::INO | StatxFlags::NLINK;
    let stat = rustix::fs::statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, wanted).ok()?;
    let is_socket = u32::from(stat.stx_mode) & libc::S_IFMT == libc::S_IFSOCK;
    is_socket.then_some(File {
        device: DeviceNumber::of(&stat),
        inode: stat.stx_ino,
        links: stat.stx_nlink,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn search<'a>(places: &'a Places<'a>, walker: &'a Walker<'a>) -> Search<'a> {
        Search {
            places,
            replaced: &[],
            walker,
            run: None,
            sockets: HashMap::new(),
            for_sockets: BTreeSet::new(),
            listed: BTreeMap::new(),
        }
    }

    fn add(search: &mut Search<'_>, directory: &str, number: usize) {
        let names = (0..number).map(|number| (directory, number.to_string()));
        for name in names {
            search.add(name.0.as_bytes(), OsStr::new(&name.1));
        }
    }

    #[test]
    fn crowd_is_replaced_at_the_deepest_directory_that_holds_it() {
        let (home, work) = (Path::new("/home/u"), Path::new("/tmp/own"));
        let places = Places { home: Some(home), working_directory: Some(work), listed: &[] };
        let walker = Walker::new([].into_iter());
        let mut some = search(&places, &walker);
        add(&mut some, "/srv/crowd", CROWD + 1);
        add(&mut some, "/srv/few", 3);
        add(&mut some, "/home/u", CROWD + 1);
        for number in 0..=CROWD {
            add(&mut some, &format!("/tmp/{number}"), 1);
        }
        let found = some.group().unwrap();
        let mut crowded = found.crowded;
        crowded.sort();
        assert_eq!(crowded, ["/srv/crowd", "/tmp"].map(PathBuf::from));
        assert_eq!(found.files.len(), CROWD + 1 + 3, "the home directory is not replaced");
    }

    #[test]
    fn working_directory_and_those_that_hold_it_are_not_replaced() {
        let work = Path::new("/data/project/own");
        let places = Places { home: None, working_directory: Some(work), listed: &[] };
        let walker = Walker::new([].into_iter());
        for (directory, crowded) in [
            ("/data/project/own", false),
            ("/data/project", false),
            ("/data/other", true),
            ("/data/project/own/deep", true),
            ("/usr", false),
        ] {
            let mut some = search(&places, &walker);
            add(&mut some, directory, CROWD + 1);
            let found = some.group().unwrap();
            assert_eq!(!found.crowded.is_empty(), crowded, "{directory}");
            assert_eq!(found.files.is_empty(), crowded, "{directory}");
        }
        let mut many = search(&places, &walker);
        add(&mut many, "/data/project/own", COVERS_MAX + 1);
        assert!(many.group().is_err());
    }
}
