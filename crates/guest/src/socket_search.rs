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

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxFlags};

use crate::bound_sockets::{self, BoundSocket};
use crate::directories::{Budget, Directory, Walker};

/// Maximum number of directories listed for names that lead nowhere.
const SEARCHES_MAX: usize = 256;
/// Number of sockets below a directory from which on it is replaced as a whole.
const CROWD: usize = 1024;
/// Maximum number of sockets that are hidden one by one.
const COVERS_MAX: usize = 4096;
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
        sockets: BTreeSet::new(),
        for_sockets: BTreeSet::new(),
        listed: BTreeMap::new(),
    };
    let lost = search.check(&bound_sockets::list(own_proc)?);
    search.look_around(&lost);
    search.list_usual_places();
    search.group()
}

struct Search<'a> {
    places: &'a Places<'a>,
    replaced: &'a [&'a Path],
    walker: &'a Walker<'a>,
    /// Listing of `/run`.
    run: Option<&'a Directory>,
    sockets: BTreeSet<PathBuf>,
    /// Directories with sockets and nothing else.
    for_sockets: BTreeSet<PathBuf>,
    /// Directories that were listed, with those within that are no mount points.
    listed: BTreeMap<PathBuf, Vec<PathBuf>>,
}

impl Search<'_> {
    /// Looks at the names. Returns the directories of those that do not lead to their file, the user's own first.
    fn check(&mut self, bound: &BTreeSet<BoundSocket>) -> Vec<PathBuf> {
        let mut lost = BTreeMap::new();
        for socket in bound {
            let path = Path::new(OsStr::from_bytes(&socket.name));
            let Some(parent) = path.parent().filter(|_| path.is_absolute()) else { continue };
            if self.is_replaced(path) {
                continue;
            }
            let file = socket_at(path);
            if let Some(found) = &file {
                self.sockets.insert(path.to_owned());
                let is_same = socket.file.is_none_or(|file| file.is(found.device, found.inode));
                if is_same && found.links == 1 {
                    continue;
                }
            }
            let foreign = lost.entry(parent).or_insert(true);
            *foreign &= socket.is_foreign;
        }
        let mut lost: Vec<_> = lost.into_iter().collect();
        lost.sort_by_key(|(_, is_foreign)| *is_foreign);
        lost.into_iter().take(SEARCHES_MAX).map(|(path, _)| path.to_owned()).collect()
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
            run.each(&mut |within| self.add(within));
        }
        for path in listed {
            self.list(path, 0, &mut PLACE.clone());
        }
    }

    /// Lists a directory, and those within down to `depth` levels. None is listed twice.
    fn list(&mut self, path: &Path, depth: usize, budget: &mut Budget) {
        // The listing of /run goes deeper than any other.
        let is_known = self.run.is_some_and(|run| path.starts_with(&run.path));
        if is_known || self.is_replaced(path) {
            return;
        }
        if !self.listed.contains_key(path) {
            let directory = self.walker.walk(path, 0, budget);
            self.add(&directory);
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

    fn add(&mut self, directory: &Directory) {
        if directory.is_for_sockets() {
            self.for_sockets.insert(directory.path.clone());
        }
        self.sockets.extend(directory.sockets.iter().map(|name| directory.path.join(name)));
    }

    fn is_replaced(&self, path: &Path) -> bool {
        self.replaced.iter().any(|replaced| path.starts_with(replaced))
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
        let mut crowded: BTreeSet<PathBuf> = BTreeSet::new();
        let mut numbers = Numbers::default();
        for parent in self.sockets.iter().filter_map(|socket| socket.parent()) {
            numbers.add(parent, 1);
        }
        // From the deepest directories upwards. The sockets of a crowd do not count further up.
        let mut left = 0;
        while let Some((directory, number)) = numbers.take_deepest() {
            if number > CROWD && self.may_be_replaced(&directory) {
                crowded.insert(directory);
            } else if let Some(parent) = directory.parent() {
                numbers.add(parent, number);
            } else {
                left = number;
            }
        }
        if left > COVERS_MAX {
            return Err(io::Error::other(format!(
                "{left} sockets in directories that hold other files, too (the limit is {COVERS_MAX})"
            )));
        }
        let is_hidden = |path: &Path| {
            path.ancestors().any(|above| replaced.contains(above) || crowded.contains(above))
        };
        let files = std::mem::take(&mut self.sockets);
        let files = files.into_iter().filter(|path| !is_hidden(path)).collect();
        let (directories, crowded) = (replaced.iter().cloned(), crowded.iter().cloned());
        Ok(HostSockets { files, directories: directories.collect(), crowded: crowded.collect() })
    }
}

/// Number of sockets below each directory, the deepest directories last.
#[derive(Default)]
struct Numbers(BTreeMap<(usize, PathBuf), usize>);

impl Numbers {
    fn add(&mut self, directory: &Path, number: usize) {
        let depth = directory.components().count();
        *self.0.entry((depth, directory.to_owned())).or_default() += number;
    }

    fn take_deepest(&mut self) -> Option<(PathBuf, usize)> {
        self.0.pop_last().map(|((_, directory), number)| (directory, number))
    }
}

/// File of a socket.
struct File {
    device: (u32, u32),
    inode: u64,
    links: u32,
}

/// Returns the socket at a path. `None` if there is none, or this user may not look at it.
fn socket_at(path: &Path) -> Option<File> {
    let wanted = StatxFlags::TYPE | StatxFlags::INO | StatxFlags::NLINK;
    let stat = rustix::fs::statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, wanted).ok()?;
    let is_socket = u32::from(stat.stx_mode) & libc::S_IFMT == libc::S_IFSOCK;
    is_socket.then_some(File {
        device: (stat.stx_dev_major, stat.stx_dev_minor),
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
            sockets: BTreeSet::new(),
            for_sockets: BTreeSet::new(),
            listed: BTreeMap::new(),
        }
    }

    fn add(search: &mut Search<'_>, directory: &str, number: usize) {
        let names = (0..number).map(|number| Path::new(directory).join(number.to_string()));
        search.sockets.extend(names);
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
        assert_eq!(found.crowded, ["/srv/crowd", "/tmp"].map(PathBuf::from));
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
