//! Hierarchies of cgroups that this process is in, and the controllers that they offer (cgroups(7)).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::Access;
use rustix::io::Errno;

use super::LAUNCHER;
use super::limits::Setting;

/// Directory in which every distribution mounts the hierarchies.
const MOUNTS: &str = "/sys/fs/cgroup";
/// Controllers of the limits that a guest may have.
const CONTROLLERS: [&str; 3] = ["memory", "cpu", "pids"];
/// Directory of the hierarchy of version 2 below [`MOUNTS`], beside hierarchies of version 1.
const UNIFIED: &str = "unified";

/// A hierarchy, and the cgroup of this process in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    /// Mount point.
    pub point: PathBuf,
    /// Path of the cgroup in the hierarchy, from `/`.
    pub path: PathBuf,
    /// Controllers of a hierarchy of version 1.
    controllers: Vec<String>,
    /// Set for version 2.
    pub is_unified: bool,
}

/// Hierarchies that this process is in.
#[derive(Clone, Debug, Default)]
pub struct Hierarchies(Vec<Hierarchy>);

impl Hierarchies {
    /// Reads the hierarchies of this process. None where the kernel has no cgroups.
    pub fn read() -> Hierarchies {
        fs::read_to_string("/proc/self/cgroup")
            .map_or_else(|_| Hierarchies::default(), |text| parse(&text))
    }

    /// Iterates over all hierarchies.
    pub fn iter(&self) -> impl Iterator<Item = &Hierarchy> {
        self.0.iter()
    }

    /// Returns the hierarchy of version 2.
    pub fn unified(&self) -> Option<&Hierarchy> {
        self.0.iter().find(|own| own.is_unified)
    }

    /// Returns the hierarchy of version 1 that has a controller.
    pub(super) fn of_controller(&self, controller: &str) -> Option<&Hierarchy> {
        let has = |own: &&Hierarchy| own.controllers.iter().any(|name| name == controller);
        self.0.iter().find(has).filter(|own| own.point.is_dir())
    }

    /// Returns the reason for which this process cannot make a cgroup with limits, or `None`. Changes nothing.
    pub fn obstacle(&self) -> Option<String> {
        let unified = self.unified();
        let (of_unified, others): (Vec<_>, Vec<_>) = CONTROLLERS
            .into_iter()
            .partition(|name| unified.is_some_and(|own| own.has_somewhere(name)));
        if let Some(own) = unified.filter(|_| !of_unified.is_empty()) {
            let at = |path| own.obstacle_at(path, &of_unified);
            let reasons: Vec<_> = own.path.ancestors().map(at).collect();
            if reasons.iter().all(Result::is_err) {
                return reasons.into_iter().find_map(Result::err);
            }
        }
        others.into_iter().find_map(|name| match self.of_controller(name) {
            Some(own) => own.obstacle_at(&own.path, &[]).err(),
            None => Some(format!("no hierarchy of cgroups has the controller `{name}`")),
        })
    }

    /// Returns `true` if a process with this user's rights can change a cgroup that it is in, by a hierarchy that it mounts
    /// with a cgroup namespace of its own. In version 1 this is assumed.
    pub fn can_be_changed(&self) -> bool {
        self.0.iter().any(|own| !own.is_unified || own.can_be_changed())
    }
}

impl Hierarchy {
    /// Returns the directory of the cgroup at a path of the hierarchy.
    pub fn directory(&self, path: &Path) -> PathBuf {
        self.point.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Returns `true` unless the cgroup of this process belongs to somebody else.
    fn can_be_changed(&self) -> bool {
        let procs = self.directory(&self.path).join("cgroup.procs");
        match rustix::fs::access(&procs, rustix::fs::Access::WRITE_OK) {
            Err(Errno::ACCESS | Errno::PERM) => false,
            // Another mount may be writable.
            Err(Errno::ROFS) => rustix::fs::stat(&procs)
                .is_ok_and(|stat| stat.st_uid == rustix::process::geteuid().as_raw()),
            _ => true,
        }
    }

    /// Returns `true` if the hierarchy of version 2 has a controller, in whatever cgroup.
    pub(super) fn has_somewhere(&self, controller: &str) -> bool {
        words(&self.point.join("cgroup.controllers")).iter().any(|name| name == controller)
    }

    /// Returns `true` if the cgroup at `path` has to enable some of the controllers for its children, and may. Returns the
    /// reason if it may not, or lacks one.
    fn must_enable(&self, path: &Path, controllers: &[&str]) -> Result<bool, String> {
        let (directory, shown) = (self.directory(path), path.display());
        let available = words(&directory.join("cgroup.controllers"));
        let is_missing = |name: &&&str| !available.iter().any(|known| known == *name);
        if let Some(missing) = controllers.iter().find(is_missing) {
            return Err(format!("the cgroup {shown} has no controller `{missing}`"));
        }
        let enabled = words(&directory.join("cgroup.subtree_control"));
        if controllers.iter().all(|name| enabled.iter().any(|known| known == name)) {
            return Ok(false);
        }
        if path != self.path && path != Path::new("/") {
            return Err(format!("the cgroup {shown} gives its children no such controller"));
        }
        Ok(true)
    }

    /// Returns the reason for which this process cannot make a cgroup with limits at `path`. Changes nothing.
    fn obstacle_at(&self, path: &Path, controllers: &[&str]) -> Result<(), String> {
        let (directory, shown) = (self.directory(path), path.display());
        let may_write = |file: &str| {
            rustix::fs::access(directory.join(file), Access::WRITE_OK).map_err(
                |errno| match errno {
                    Errno::ROFS => {
                        format!("the cgroups below {} are read-only", self.point.display())
                    }
                    Errno::ACCESS | Errno::PERM => {
                        format!("the cgroup {shown} belongs to somebody else")
                    }
                    other => format!("the cgroup {shown}: {}", io::Error::from(other)),
                },
            )
        };
        if self.is_unified && self.must_enable(path, controllers)? {
            may_write("cgroup.subtree_control")?;
            // The root may have processes and enable controllers.
            if path != Path::new("/") && !is_alone(&directory) {
                return Err(crowded(path));
            }
        }
        may_write("cgroup.procs")?;
        may_write(".")
    }

    /// Makes the controllers of `settings` available below the cgroup at `path`. Returns the reason if they are not.
    pub(super) fn offer(&self, path: &Path, settings: &[Setting]) -> Result<(), String> {
        let (directory, shown) = (self.directory(path), path.display());
        let controllers: Vec<&str> = settings.iter().map(|setting| setting.controller).collect();
        if !self.must_enable(path, &controllers)? {
            return Ok(());
        }
        let is_own = path == self.path;
        let mut done = enable(&directory, settings);
        if is_busy(&done) && is_own && is_alone(&directory) {
            done = leave(&directory).and_then(|()| enable(&directory, settings));
        }
        done.map_err(|error| match error.kind() {
            io::ErrorKind::ResourceBusy => crowded(path),
            io::ErrorKind::PermissionDenied => {
                format!("the cgroup {shown} belongs to somebody else")
            }
            _ => format!("the cgroup {shown}: {error}"),
        })
    }
}

/// Returns the reason for which a cgroup with other processes has no limits below it.
fn crowded(path: &Path) -> String {
    format!(
        "other processes than this one are in the cgroup {}, so the kernel sets no limits below it",
        path.display()
    )
}

fn is_busy(done: &io::Result<()>) -> bool {
    done.as_ref().is_err_and(|error| Errno::from_io_error(error) == Some(Errno::BUSY))
}

/// Enables the controllers of `settings` for the children of a cgroup.
pub(super) fn enable(directory: &Path, settings: &[Setting]) -> io::Result<()> {
    let names: Vec<String> =
        settings.iter().map(|setting| format!("+{}", setting.controller)).collect();
    fs::write(directory.join("cgroup.subtree_control"), names.join(" "))
}

/// Returns `true` if this process is the only one in a cgroup.
fn is_alone(directory: &Path) -> bool {
    words(&directory.join("cgroup.procs")) == [std::process::id().to_string()]
}

/// Moves this process one level below, so that the cgroup may enable controllers.
fn leave(directory: &Path) -> io::Result<()> {
    let below = directory.join(LAUNCHER);
    match fs::create_dir(&below) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    fs::write(below.join("cgroup.procs"), "0")
}

/// Returns the words of a file. None if it cannot be read.
fn words(file: &Path) -> Vec<String> {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.split_ascii_whitespace().map(str::to_owned).collect()
}

/// Parses `/proc/self/cgroup`: a line `NUMBER:CONTROLLERS:PATH` for each hierarchy.
fn parse(text: &str) -> Hierarchies {
    let lines: Vec<_> = text
        .lines()
        .filter_map(|line| {
            let (number, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            Some((number == "0" && controllers.is_empty(), controllers, path))
        })
        .collect();
    let has_others = lines.iter().any(|(is_unified, ..)| !is_unified);
    // A path that leaves the root of the cgroup namespace has no directory in it.
    let inside = lines.iter().filter(|(.., path)| !path.starts_with("/.."));
    let own = |(is_unified, controllers, path): &(bool, &str, &str)| {
        let mounts = Path::new(MOUNTS);
        let point = match (is_unified, has_others) {
            (true, false) => mounts.to_owned(),
            (true, true) => mounts.join(UNIFIED),
            (false, _) => mounts.join(controllers.strip_prefix("name=").unwrap_or(controllers)),
        };
        let controllers = controllers.split(',').map(str::to_owned).collect();
        Hierarchy { point, path: PathBuf::from(path), controllers, is_unified: *is_unified }
    };
    Hierarchies(inside.map(own).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unified_hierarchy_alone_is_mounted_at_the_top() {
        let found = parse("0::/user.slice/a b.scope\n");
        let own = found.unified().unwrap();
        assert_eq!(own.directory(&own.path), Path::new("/sys/fs/cgroup/user.slice/a b.scope"));
        assert_eq!(own.directory(Path::new("/")), Path::new("/sys/fs/cgroup/"));
        assert!(parse("0::/../other\n").unified().is_none(), "outside of the namespace");
    }

    #[test]
    fn cgroup_with_other_processes_is_an_obstacle_to_limits() {
        let folder = tempfile::tempdir().unwrap();
        let (point, own) = (folder.path().to_owned(), folder.path().join("own"));
        fs::create_dir(&own).unwrap();
        for directory in [&point, &own] {
            fs::write(directory.join("cgroup.controllers"), "cpu memory pids").unwrap();
            fs::write(directory.join("cgroup.subtree_control"), "").unwrap();
        }
        let path = PathBuf::from("/own");
        let hierarchy = Hierarchy { point, path, controllers: vec![], is_unified: true };
        let hierarchies = Hierarchies(vec![hierarchy]);
        let obstacle = |procs: &str| {
            fs::write(own.join("cgroup.procs"), procs).unwrap();
            hierarchies.obstacle()
        };
        let alone = std::process::id().to_string();
        assert_eq!(obstacle(&alone), None);
        let crowded = obstacle(&format!("{alone}\n1\n")).unwrap();
        assert!(crowded.starts_with("other processes") && crowded.contains("/own"), "{crowded}");
        fs::write(own.join("cgroup.subtree_control"), "cpu memory pids").unwrap();
        assert_eq!(obstacle("1\n"), None, "the controllers are enabled");
        fs::write(own.join("cgroup.controllers"), "cpu memory").unwrap();
        assert!(obstacle("1\n").unwrap().contains("`pids`"));
        assert!(Hierarchies::default().obstacle().unwrap().contains("`memory`"));
    }

    #[test]
    fn hierarchies_of_both_versions_have_mount_points_of_their_own() {
        let found = parse("9:name=systemd:/x\n5:cpu,cpuacct:/\n4:memory:/m\n0::/u\n");
        let directories: Vec<_> = found.iter().map(|own| own.directory(&own.path)).collect();
        let expected = ["systemd/x", "cpu,cpuacct/", "memory/m", "unified/u"];
        assert_eq!(directories, expected.map(|path| Path::new(MOUNTS).join(path)));
        assert!(found.can_be_changed());
        assert_eq!(parse("").iter().count(), 0);
    }
}
