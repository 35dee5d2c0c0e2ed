//! File view of a confined daemon: a mount namespace with only the files that the daemon needs.
//!
//! `ringfence serve` keeps user id 0, because the nodes of Xen's devices and the images of disks are
//! root's. A process with that id may connect to every Unix socket of the host, among them those of
//! service managers and container engines, which run commands for it. A seccomp filter sees no paths.
//! The view therefore leaves these sockets out: its root is an empty file system in memory, and only the
//! listed places of the host are mounted there.
//!
//! ```text
//!   /                tmpfs, read-only
//!   ├─ /etc, /sys    bind mounts, read-only, without what is mounted below them
//!   ├─ /proc/self    this process alone, read-only
//!   ├─ /dev/…        bind mounts, read-only (this still allows I/O on device nodes)
//!   └─ writable      bind mounts with all that is mounted below them, also later
//! ```
//!
//! Mounts of the host still arrive in writable and device places, because the new namespace is a slave
//! of the old one. Nothing propagates back.
//!
//! The view needs `CAP_SYS_ADMIN` and one thread. A directory descriptor that was opened before would
//! lead back to the host's files, so [`View::enter`] refuses to go on while there is one.

// #syscall none: what makes a sandbox comes before its list

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::path::{Component, Path, PathBuf};

use ringfence_sys::namespaces::{self, Fresh};
use rustix::fs::{FileType, Mode, OFlags, StatVfsMountFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::thread::CapabilitySet;

use super::{SandboxError, stage};

/// Directory under which the new root is assembled. Its content is opened before it is covered.
const ASSEMBLY: &str = "/sys";

/// Link to this process below /proc. The view contains the process under this name only.
const OWN_PROCESS: &str = "/proc/self";

/// Sockets of the host by which user id 0 becomes root again, or something close to it.
const PRIVILEGED: [&str; 10] = [
    "/run/systemd/private",
    "/run/systemd/notify",
    "/run/dbus/system_bus_socket",
    "/run/udev/control",
    "/run/docker.sock",
    "/run/podman/podman.sock",
    "/run/containerd/containerd.sock",
    "/run/crio/crio.sock",
    "/run/libvirt/libvirt-sock",
    "/run/snapd.socket",
];

/// Access that the view gives to a place.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Access {
    /// Files can be read. Mounts below the path are not visible.
    Read,
    /// Device nodes can be used. Files can be read.
    Devices,
    /// Files can be created and written.
    Write,
}

/// Path of the host that stays visible.
#[derive(Clone, PartialEq, Eq, Debug)]
struct ViewEntry {
    path: PathBuf,
    access: Access,
}

/// Set of the host's paths that stay visible to a daemon.
#[derive(Clone, Debug, Default)]
pub struct View {
    entries: Vec<ViewEntry>,
}

/// Path of the host that was opened in the old root.
struct ViewSource {
    file: OwnedFd,
    is_directory: bool,
    /// Path in the new root, without symbolic links.
    target: PathBuf,
    /// Paths by which the entry was listed.
    names: Vec<PathBuf>,
    access: Access,
}

impl View {
    /// Keeps a file or directory readable, without what is mounted below it.
    #[must_use]
    pub fn read(self, path: impl Into<PathBuf>) -> View {
        self.with(path, Access::Read)
    }

    /// Keeps a device node, or a directory of nodes, usable.
    #[must_use]
    pub fn devices(self, path: impl Into<PathBuf>) -> View {
        self.with(path, Access::Devices)
    }

    /// Keeps a directory writable, with all that is mounted below it.
    #[must_use]
    pub fn write(self, path: impl Into<PathBuf>) -> View {
        self.with(path, Access::Write)
    }

    fn with(mut self, path: impl Into<PathBuf>, access: Access) -> View {
        self.entries.push(ViewEntry { path: path.into(), access });
        self
    }

    /// Replaces the root directory by this view. Paths that do not exist are left out. Returns
    /// `false` and leaves all files visible if the process may not mount, or if the view contains
    /// `/`.
    ///
    /// # Errors
    ///
    /// [`SandboxError`]; the process must exit.
    pub(super) fn enter(&self) -> Result<bool, SandboxError> {
        let able = rustix::thread::capabilities(None)?.effective.contains(CapabilitySet::SYS_ADMIN);
        if !able || self.entries.iter().any(|entry| entry.path == Path::new("/")) {
            return Ok(false);
        }
        refuse_directories()?;
        match namespaces::unshare(Fresh::Mount) {
            // A service manager's own filter may forbid it.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Ok(false),
            other => stage("mount namespace", other)?,
        }
        // Mounts that the host makes later arrive here. Mounts made here do not reach the host.
        let slave = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
        stage("mount propagation", rustix::mount::mount_change("/", slave).map_err(Into::into))?;
        let sources = stage("files of the view", self.open())?;
        stage("root of the view", assemble(&sources))?;
        stage("change of root", change_root())?;
        stage("links of the view", link(&sources))?;
        stage("read-only root", restrict(Path::new("/"), Access::Read))?;
        drop(sources);
        refuse_directories()?;
        Ok(true)
    }

    /// Opens all paths and sorts them, parents first.
    fn open(&self) -> io::Result<Vec<ViewSource>> {
        let mut sources: Vec<ViewSource> = Vec::new();
        for ViewEntry { path, access } in &self.entries {
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            let file = match rustix::fs::open(path, flags, Mode::empty()) {
                Ok(file) => file,
                Err(Errno::NOENT | Errno::NOTDIR) => continue,
                Err(errno) => return Err(about(path)(errno.into())),
            };
            let target = match path.to_str() {
                Some(OWN_PROCESS) => path.clone(),
                _ => fs::read_link(link_of(&file))?,
            };
            let kind = FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode);
            let (is_directory, names) = (kind == FileType::Directory, vec![path.clone()]);
            match sources.iter_mut().find(|other| other.target == target) {
                Some(other) => {
                    other.access = other.access.max(*access);
                    other.names.extend(names);
                }
                None => {
                    sources.push(ViewSource { file, is_directory, target, names, access: *access });
                }
            }
        }
        sources.sort_by(|a, b| a.target.cmp(&b.target));
        Ok(sources)
    }
}

/// Returns the sockets of the host through which this process could become root again.
pub(super) fn privileged_sockets() -> Vec<&'static str> {
    let reachable = |path: &&str| fs::metadata(path).is_ok_and(|file| file.file_type().is_socket());
    PRIVILEGED.into_iter().filter(reachable).collect()
}

/// Returns the path of an open file for system calls that take a path.
fn link_of(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Names the path that an error is about.
fn about(path: &Path) -> impl FnOnce(io::Error) -> io::Error {
    let path = path.to_owned();
    move |error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Fails if this process has a directory open, because its parents lead to the host's root.
fn refuse_directories() -> Result<(), SandboxError> {
    let list = || -> io::Result<Vec<i32>> {
        let mut numbers = Vec::new();
        for entry in fs::read_dir("/proc/self/fd")? {
            numbers.extend(entry?.file_name().to_str().and_then(|name| name.parse::<i32>().ok()));
        }
        // The listing's own descriptor is closed by now.
        let is_directory = |number: &i32| {
            fs::metadata(format!("/proc/self/fd/{number}")).is_ok_and(|f| f.is_dir())
        };
        numbers.retain(is_directory);
        Ok(numbers)
    };
    let surplus = stage("list of descriptors", list())?;
    if surplus.is_empty() { Ok(()) } else { Err(SandboxError::SurplusDescriptors(surplus)) }
}

/// Mounts all sources below the new root.
fn assemble(sources: &[ViewSource]) -> io::Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    rustix::mount::mount("ringfence", ASSEMBLY, "tmpfs", flags, Some(c"mode=0755,size=1m"))?;
    // A bind mount of a path that contains the mount point must not contain the new root too.
    rustix::mount::mount_change(ASSEMBLY, MountPropagationFlags::UNBINDABLE)?;
    for source in sources {
        let below = source.target.strip_prefix("/").map_err(io::Error::other)?;
        let target = Path::new(ASSEMBLY).join(below);
        let make = || -> io::Result<()> {
            make_target(below, source.is_directory)?;
            let from = link_of(&source.file);
            if source.access == Access::Read {
                rustix::mount::mount_bind(&from, &target)?;
            } else {
                rustix::mount::mount_bind_recursive(&from, &target)?;
            }
            restrict(&target, source.access)
        };
        make().map_err(about(&source.target))?;
    }
    Ok(())
}

/// Creates the mount point `below` the new root. Creates nothing in directories of the host.
fn make_target(below: &Path, is_directory: bool) -> io::Result<()> {
    let own = fs::metadata(ASSEMBLY)?.dev();
    let mut path = PathBuf::from(ASSEMBLY);
    let mut parts = below.components().peekable();
    while let Some(part) = parts.next() {
        let Component::Normal(name) = part else { return Err(io::ErrorKind::InvalidInput.into()) };
        let in_view = fs::symlink_metadata(&path)?.dev() == own;
        path.push(name);
        match fs::symlink_metadata(&path) {
            Ok(_) => continue,
            Err(error) if error.kind() == io::ErrorKind::NotFound && in_view => {}
            Err(error) => return Err(error),
        }
        if parts.peek().is_some() || is_directory {
            fs::create_dir(&path)?;
        } else {
            fs::File::create_new(&path)?;
        }
    }
    Ok(())
}

/// Sets the flags of a mount. Flags that are set already stay set.
fn restrict(target: &Path, access: Access) -> io::Result<()> {
    let mut flags = MountFlags::BIND | MountFlags::NOSUID | MountFlags::NOEXEC;
    let has = rustix::fs::statvfs(target)?.f_flag;
    flags.set(
        MountFlags::RDONLY,
        access != Access::Write || has.contains(StatVfsMountFlags::RDONLY),
    );
    flags.set(MountFlags::NODEV, access == Access::Read || has.contains(StatVfsMountFlags::NODEV));
    Ok(rustix::mount::mount_remount(target, flags, c"")?)
}

/// Makes the assembled tree the root and unmounts the old one.
fn change_root() -> io::Result<()> {
    rustix::process::chdir(ASSEMBLY)?;
    // With both paths the same, the kernel mounts the old root over the new one (pivot_root(2)).
    match rustix::process::pivot_root(".", ".") {
        Ok(()) => rustix::mount::unmount(".", UnmountFlags::DETACH)?,
        // The root is the initial RAM file system, which cannot be replaced: mount over it.
        Err(Errno::INVAL) => {
            rustix::mount::mount_move(".", "/")?;
            rustix::process::chroot(".")?;
        }
        Err(errno) => return Err(errno.into()),
    }
    Ok(rustix::process::chdir("/")?)
}

/// Creates symbolic links for entries that were listed by another path than their canonical one.
fn link(sources: &[ViewSource]) -> io::Result<()> {
    for source in sources {
        for name in source.names.iter().filter(|name| fs::metadata(name).is_err()) {
            let make = || -> io::Result<()> {
                fs::create_dir_all(name.parent().unwrap_or(Path::new("/")))?;
                symlink(&source.target, name)
            };
            make().map_err(about(name))?;
        }
    }
    Ok(())
}
