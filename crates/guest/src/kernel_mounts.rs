//! Mounts of the host by which a program reaches kernel objects of others: hierarchies of cgroups, and message queues.
//!
//! Init handles them in three steps:
//!
//! 1. [`enter_cgroup_namespace`], in the outer user namespace. The command has no capability there, so by this namespace
//!    it mounts no hierarchy. It may make another one only if the guest has a cgroup of its own.
//! 2. [`confine`], in the outer mount namespace: hierarchies become read-only, and show the guest's own cgroup at their
//!    root. File systems of message queues are covered: an open file of one is a queue, in whatever namespace.
//! 3. [`mount_own_queues`], in the guest's own namespaces: the message queues of the guest take the place of the host's.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ringfence_sys::namespaces::{self, Fresh};
use rustix::io::Errno;
use rustix::mount::MountFlags;

use crate::config::CgroupConfig;
use crate::covers;
use crate::locations::unescape;

/// Mount point of the hierarchies, or of the directory with all of them.
const CGROUPS: &str = "/sys/fs/cgroup";
/// Place of POSIX message queues (mq_overview(7)).
const QUEUES: &str = "/dev/mqueue";
/// Limit of cgroup namespaces in the user namespace of this process, and in those below it (namespaces(7)).
const NAMESPACES_MAX: &str = "/proc/sys/user/max_cgroup_namespaces";

/// Enters a cgroup namespace, whose root is the guest's cgroup.
pub(super) fn enter_cgroup_namespace(config: &CgroupConfig, remarks: &mut Vec<String>) {
    if let Err(error) = namespaces::unshare(Fresh::Cgroup) {
        remarks.push(format!("the guest has no cgroup namespace of its own: {error}"));
    }
    if !config.namespaces
        && let Err(error) = fs::write(NAMESPACES_MAX, "0")
    {
        remarks.push(format!(
            "the command can change its cgroup by a hierarchy that it mounts anew: {NAMESPACES_MAX}: {error}"
        ));
    }
}

/// Makes hierarchies of cgroups read-only, and covers file systems of message queues. Returns the points at which
/// [`mount_own_queues`] mounts the guest's.
pub(super) fn confine(
    config: &CgroupConfig,
    remarks: &mut Vec<String>,
) -> io::Result<Vec<PathBuf>> {
    make_read_only(Path::new(CGROUPS))?;
    for (point, directory) in &config.shown {
        let shown =
            covers::detach_copy(directory, false).and_then(|own| covers::attach(&own, point));
        if let Err(error) = shown {
            remarks.push(format!("{} shows the host's cgroups: {error}", point.display()));
        }
    }
    // Without /proc there is no list, and the standard mount points are done.
    let mounts = fs::read("/proc/self/mountinfo").unwrap_or_default();
    let mut queues = Vec::new();
    for (point, kind) in mounts.split(|byte| *byte == b'\n').filter_map(parse) {
        match kind {
            Kind::Cgroups if !point.starts_with(CGROUPS) => make_read_only(&point)?,
            Kind::Cgroups => {}
            Kind::Queues => {
                covers::cover_directory(&point, 0o755)?;
                queues.push(point);
            }
        }
    }
    // A `/dev` of the guest's own has the directory alone.
    let own = Path::new(QUEUES);
    if own.is_dir() && !queues.iter().any(|point| point == own) {
        queues.push(own.to_owned());
    }
    Ok(queues)
}

/// Makes the mount at a path, with those below it, read-only. No effect where nothing is mounted.
fn make_read_only(point: &Path) -> io::Result<()> {
    match namespaces::make_tree_read_only(&CString::new(point.as_os_str().as_bytes())?) {
        Err(error) if is_no_mount(&error) => Ok(()),
        done => done,
    }
}

/// Returns `true` if the path does not exist, is no mount point, or leads through a directory of others.
fn is_no_mount(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    [Errno::NOENT, Errno::INVAL, Errno::NOTDIR, Errno::ACCESS].map(Some).contains(&errno)
}

/// Mounts the message queues of this process's IPC namespace.
pub(super) fn mount_own_queues(points: &[PathBuf], remarks: &mut Vec<String>) {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    for point in points {
        if let Err(errno) = rustix::mount::mount("mqueue", point, "mqueue", flags, None) {
            remarks.push(format!("{} is empty: it cannot be mounted ({errno})", point.display()));
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Cgroups,
    Queues,
}

/// Parses a line of `mountinfo` (proc_pid_mountinfo(5)), if it is that of such a file system.
fn parse(line: &[u8]) -> Option<(PathBuf, Kind)> {
    let mut fields = line.split(|byte| *byte == b' ');
    let point = unescape(fields.nth(4)?);
    // Optional fields end with a hyphen.
    let kind = match fields.skip_while(|field| *field != b"-").nth(1)? {
        b"cgroup" | b"cgroup2" => Kind::Cgroups,
        b"mqueue" => Kind::Queues,
        _ => return None,
    };
    Some((point, kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_of_kernel_objects_are_found_by_their_type() {
        for (line, found) in [
            (
                "41 31 0:38 / /x\\040y rw,relatime shared:9 - cgroup2 c rw",
                Some(("/x y", Kind::Cgroups)),
            ),
            (
                "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu",
                Some(("/sys/fs/cgroup/cpu", Kind::Cgroups)),
            ),
            (
                "33 24 0:19 / /dev/mqueue rw master:1 - mqueue mqueue rw",
                Some(("/dev/mqueue", Kind::Queues)),
            ),
            ("27 1 254:0 / / rw - ext4 cgroup2 rw", None),
            ("27 1", None),
        ] {
            let found = found.map(|(point, kind)| (PathBuf::from(point), kind));
            assert_eq!(parse(line.as_bytes()), found, "{line}");
        }
    }
}
