//! Cgroups of guests: each guest has one of its own, where the system permits it, with the guest's limits.
//!
//! ```text
//! cgroup of the launcher, or an ancestor that offers the controllers
//!   ringfence-PID     the limits
//!     guest           the same limits; init, the command and all that they start
//! ```
//!
//! Without limits there is one level, which holds the processes. The second level is the root of the guest's cgroup
//! namespace, so nothing in the guest reaches the limits above it, also not by a hierarchy that it mounts anew.
//!
//! The launcher makes the cgroup ([`GuestCgroup::create`]). The guest's supervisor starts init in it and removes it when init
//! has ended, also after the launcher was killed (`CgroupSet`). The launcher removes it if the supervisor was killed.
//!
//! Rules of version 2 (cgroup-v2 of the kernel's documentation): whoever moves a process needs write access to
//! `cgroup.procs` of the destination and of the common ancestor. A cgroup with processes enables no controllers for
//! its children, except the root. In a hierarchy of version 1 each controller may have a tree of its own; it is used for
//! limits only.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ringfence_sys::fork;
use ringfence_sys::prerequisite::{CGROUP, with_doctor};
use rustix::fs::{Access, AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

mod hierarchy;
mod limits;

pub use hierarchy::{Hierarchies, Hierarchy};
use limits::Setting;
pub use limits::{CpuLimit, CpuQuota, LimitError, Limits, MemoryLimit, PidsLimit, Usage, bytes_of};

/// Name of the second level.
const INNER: &str = "guest";
/// Cgroup into which a launcher moves itself to make room for limits.
const LAUNCHER: &str = "ringfence-launcher";
/// Number of names to try: launchers in several PID namespaces may have the same process number.
const NAMES_MAX: u32 = 100;
/// Attempts to remove a cgroup, and the interval between them. A process that was reaped leaves its cgroup a moment later.
const REMOVALS: u32 = 200;
const REMOVAL_INTERVAL: Duration = Duration::from_millis(1);

/// Errors of a guest's cgroup.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// The limits cannot be set here.
    #[error("{}", with_doctor(&format!("{options}: {why}. Start it in a cgroup of its own: {}", CGROUP.enable)))]
    NotDelegated { options: String, why: String },
    #[error(
        "{options}: no hierarchy of cgroups has the controller `{controller}`: the kernel lacks it, or it is not mounted below /sys/fs/cgroup"
    )]
    NoController { options: String, controller: &'static str },
    #[error("{}: {source}", path.display())]
    System { path: PathBuf, source: io::Error },
}

/// Place of a guest in one hierarchy, for its supervisor. The descriptor of the parent's directory comes with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupEntry {
    /// Name in the parent's directory.
    pub name: String,
    /// Set if the processes are one level below.
    pub has_inner: bool,
    /// Set in a hierarchy of version 2.
    pub is_unified: bool,
}

impl CgroupEntry {
    /// Returns the path of the processes' cgroup in the parent's directory.
    fn leaf(&self) -> PathBuf {
        let name = PathBuf::from(&self.name);
        if self.has_inner { name.join(INNER) } else { name }
    }
}

/// Cgroup of a guest in one hierarchy, as the launcher made it.
#[derive(Debug)]
struct Place {
    entry: CgroupEntry,
    parent: OwnedFd,
    /// Directory of the cgroup.
    path: PathBuf,
    /// Path in the hierarchy, for messages.
    shown: PathBuf,
}

/// Cgroup of a guest. Dropping it removes the cgroup if no process is left in it.
#[derive(Debug)]
pub struct GuestCgroup {
    places: Vec<Place>,
    limits: Limits,
}

impl GuestCgroup {
    /// Creates a cgroup with these limits. Without limits it returns `None` where the user may create none.
    ///
    /// # Errors
    ///
    /// Returns [`CgroupError`] if a limit cannot be set.
    pub fn create(
        hierarchies: &Hierarchies,
        limits: &Limits,
    ) -> Result<Option<GuestCgroup>, CgroupError> {
        let mut made = GuestCgroup { places: Vec::new(), limits: *limits };
        let settings = limits.settings();
        let unified = hierarchies.unified();
        if settings.is_empty() {
            let place = unified.and_then(|own| make_place(own, &own.path, &[]).ok());
            made.places.extend(place);
            return Ok(Some(made).filter(|made| !made.places.is_empty()));
        }
        let (of_unified, others): (Vec<_>, Vec<_>) = settings
            .into_iter()
            .partition(|setting| unified.is_some_and(|own| own.has_somewhere(setting.controller)));
        if let Some(own) = unified.filter(|_| !of_unified.is_empty()) {
            made.places.push(make_unified_place(own, &of_unified, limits)?);
        } else if let Some(own) = unified {
            made.places.extend(make_place(own, &own.path, &[]));
        }
        for setting in others {
            let Some(own) = hierarchies.of_controller(setting.controller) else {
                let (options, controller) = (limits.options(), setting.controller);
                return Err(CgroupError::NoController { options, controller });
            };
            let place = make_place(own, &own.path, std::slice::from_ref(&setting));
            let place = place.map_err(|error| not_delegated(limits, own, &error))?;
            made.places.push(place);
        }
        Ok(Some(made))
    }

    /// Returns the places in all hierarchies, with the descriptors of their parents.
    pub fn cgroups(&self) -> impl Iterator<Item = (CgroupEntry, BorrowedFd<'_>)> {
        self.places.iter().map(|place| (place.entry.clone(), place.parent.as_fd()))
    }

    /// Returns the path of the cgroup in its hierarchy: of version 2 if there is one, else of the first limit.
    pub fn path(&self) -> Option<&Path> {
        self.places.first().map(|place| place.shown.as_path())
    }

    /// Returns `true` if the guest's processes are in a cgroup of version 2 of their own.
    pub fn is_unified(&self) -> bool {
        self.places.iter().any(|place| place.entry.is_unified)
    }

    /// Returns the directory of the processes' cgroup in this hierarchy, if the guest has one there.
    pub fn leaf_in(&self, hierarchy: &Hierarchy) -> Option<PathBuf> {
        let place = self.places.iter().find(|place| place.path.starts_with(&hierarchy.point))?;
        let parent = place.path.parent()?;
        Some(parent.join(place.entry.leaf()))
    }

    /// Returns the limits of its processes.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Returns what the guest's processes use now.
    pub fn usage(&self) -> Usage {
        Usage::read(self.places.iter().map(|place| place.path.as_path()))
    }
}

impl Drop for GuestCgroup {
    fn drop(&mut self) {
        for place in &self.places {
            // The supervisor has removed it, unless it was killed.
            remove(&place.parent, &place.entry);
        }
    }
}

fn not_delegated(limits: &Limits, own: &Hierarchy, error: &io::Error) -> CgroupError {
    let path = own.path.display();
    let why = match error.kind() {
        io::ErrorKind::PermissionDenied => format!("the cgroup {path} belongs to somebody else"),
        io::ErrorKind::ReadOnlyFilesystem => {
            format!("the cgroups below {} are read-only", own.point.display())
        }
        _ => format!("the cgroup {path}: {error}"),
    };
    CgroupError::NotDelegated { options: limits.options(), why }
}

/// Creates a cgroup of version 2 with limits: in the launcher's own one, or in the nearest ancestor that offers the
/// controllers.
fn make_unified_place(
    own: &Hierarchy,
    settings: &[Setting],
    limits: &Limits,
) -> Result<Place, CgroupError> {
    let mut first = None;
    for path in own.path.ancestors() {
        let done = own
            .offer(path, settings)
            .map_err(|why| CgroupError::NotDelegated { options: limits.options(), why })
            .and_then(|()| {
                make_place(own, path, settings).map_err(|e| not_delegated(limits, own, &e))
            });
        match done {
            Ok(place) => return Ok(place),
            Err(error) => {
                first.get_or_insert(error);
            }
        }
    }
    let why = "there is no cgroup of version 2".to_owned();
    Err(first.unwrap_or(CgroupError::NotDelegated { options: limits.options(), why }))
}

/// Creates a cgroup below `path` of a hierarchy, with the limits of `settings`.
fn make_place(own: &Hierarchy, path: &Path, settings: &[Setting]) -> io::Result<Place> {
    let directory = own.directory(path);
    // Whoever may not move processes to a cgroup below does not need one.
    rustix::fs::access(directory.join("cgroup.procs"), Access::WRITE_OK)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let parent = rustix::fs::open(&directory, flags, Mode::empty())?;
    let name = make_directory(&parent)?;
    let entry = CgroupEntry { name, has_inner: !settings.is_empty(), is_unified: own.is_unified };
    let (shown, made) = (path.join(&entry.name), directory.join(&entry.name));
    let place = Place { entry, parent, path: made, shown };
    let limited = limit(own, &place, settings);
    limited.inspect_err(|_| remove(&place.parent, &place.entry))?;
    Ok(place)
}

fn make_directory(parent: &OwnedFd) -> io::Result<String> {
    let pid = std::process::id();
    let own = format!("ringfence-{pid}");
    let numbered = (2..=NAMES_MAX).map(|number| format!("ringfence-{pid}-{number}"));
    for name in [own].into_iter().chain(numbered) {
        match rustix::fs::mkdirat(parent, &name, Mode::from_raw_mode(0o755)) {
            Ok(()) => return Ok(name),
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Err(Errno::EXIST.into())
}

/// Sets the limits at both levels of a cgroup.
fn limit(own: &Hierarchy, place: &Place, settings: &[Setting]) -> io::Result<()> {
    if settings.is_empty() {
        return Ok(());
    }
    let write = |directory: &Path| {
        settings.iter().try_for_each(|setting| setting.write(directory, own.is_unified))
    };
    write(&place.path)?;
    if own.is_unified {
        hierarchy::enable(&place.path, settings)?;
    }
    let inner = place.path.join(INNER);
    fs::create_dir(&inner)?;
    // The guest reads its limits there.
    write(&inner)
}

/// Removes a cgroup, with those that the guest made below it. Gives up after a while if processes are left.
fn remove(parent: impl AsFd, entry: &CgroupEntry) {
    for _ in 0..REMOVALS {
        match remove_tree(parent.as_fd(), &entry.name) {
            Err(Errno::BUSY) => std::thread::sleep(REMOVAL_INTERVAL),
            // Nothing is left, or nothing helps.
            _ => return,
        }
    }
}

fn remove_tree(parent: BorrowedFd<'_>, name: &str) -> Result<(), Errno> {
    let removed = rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR);
    if removed != Err(Errno::BUSY) {
        return removed;
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let own = rustix::fs::openat(parent, name, flags, Mode::empty())?;
    for entry in Dir::read_from(&own)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().to_str() else { continue };
        if entry.file_type() == FileType::Directory && ![".", ".."].contains(&name) {
            remove_tree(own.as_fd(), name)?;
        }
    }
    rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR)
}

/// Places of a guest, as its supervisor has them. Dropping them removes the cgroups.
#[derive(Debug, Default)]
pub(crate) struct CgroupSet(pub(crate) Vec<(CgroupEntry, OwnedFd)>);

impl CgroupSet {
    /// Returns `true` if the guest has no cgroup of its own.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Starts a process in the guest's cgroups: in that of version 2 at once, in others by a move. `exec` executes the
    /// program in the new process, and returns an exit status if that fails.
    pub(crate) fn start(&self, exec: impl FnOnce() -> u8) -> io::Result<Pid> {
        let unified = self.0.iter().find(|(entry, _)| entry.is_unified);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let leaf = unified
            .map(|(entry, parent)| rustix::fs::openat(parent, entry.leaf(), flags, Mode::empty()))
            .transpose()?;
        match leaf {
            Some(leaf) => fork::fork_into(leaf.as_fd(), exec),
            None => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Returns the number of the guest's processes that the kernel has killed for lack of memory, if a cgroup counts them.
    pub(crate) fn killed_for_memory(&self) -> Option<u64> {
        self.0.iter().find_map(|(entry, parent)| {
            limits::killed_for_memory(|file| {
                let path = Path::new(&entry.name).join(file);
                let flags = OFlags::RDONLY | OFlags::CLOEXEC;
                let opened = rustix::fs::openat(parent, path, flags, Mode::empty()).ok()?;
                io::read_to_string(fs::File::from(opened)).ok()
            })
        })
    }

    /// Moves a process into the guest's cgroups, except those of version 2 if it was started there.
    pub(crate) fn enter(&self, pid: Pid, is_in_unified: bool) -> io::Result<()> {
        for (entry, parent) in
            self.0.iter().filter(|(entry, _)| !(entry.is_unified && is_in_unified))
        {
            let file = entry.leaf().join("cgroup.procs");
            let flags = OFlags::WRONLY | OFlags::CLOEXEC;
            let procs = rustix::fs::openat(parent, file, flags, Mode::empty())?;
            rustix::io::write(&procs, pid.as_raw_nonzero().to_string().as_bytes())?;
        }
        Ok(())
    }
}

impl Drop for CgroupSet {
    fn drop(&mut self) {
        // All processes of the guest have ended.
        self.0.iter().for_each(|(entry, parent)| remove(parent, entry));
    }
}
