//! Guests that are connected: the namespaces of a command, of a process, or of a file, or a virtual machine.
//!
//! [`Existing`] holds descriptors of namespaces that exist already, opened with the user's rights. [`Watch`]
//! reports that they are no longer wanted: the process has ended, or the file was deleted.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use rustix::fs::inotify::{CreateFlags, WatchFlags};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags};

use super::args::PastaArgs;
use super::machine::Endpoint;

/// Directory of named network namespaces (ip-netns(8)).
const NAMED: &str = "/run/netns";

/// Guest that is to be connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// New namespaces, in which a command runs. Empty: the user's shell.
    Command(Vec<OsString>),
    /// Namespaces that exist.
    Existing { netns: PathBuf, userns: Option<PathBuf> },
    /// Virtual machine.
    Machine(Endpoint),
}

impl Target {
    /// Returns the name of the program that connects such a guest.
    pub(crate) fn program(&self) -> &'static str {
        match self {
            Target::Command(_) | Target::Existing { .. } => crate::program::PASTA,
            Target::Machine(endpoint) => endpoint.program,
        }
    }

    /// Returns the end of a virtual machine's network card, if the target is one.
    pub(crate) fn endpoint(&self) -> Option<&Endpoint> {
        match self {
            Target::Machine(endpoint) => Some(endpoint),
            Target::Command(_) | Target::Existing { .. } => None,
        }
    }

    /// Returns the guest's name in the records of egress: that of its namespace's file, of its process, or of the socket.
    pub(crate) fn record_name(&self) -> String {
        let path = match self {
            Target::Existing { netns, .. } => match process_of(netns) {
                Some(pid) => return pid.to_string(),
                None => Some(netns.as_path()),
            },
            Target::Machine(endpoint) => endpoint.path(),
            Target::Command(_) => None,
        };
        let name = path.and_then(Path::file_name);
        name.map_or(self.program().into(), |name| name.to_string_lossy().into_owned())
    }

    /// Chooses the target that the arguments name.
    pub(crate) fn new(args: &PastaArgs) -> anyhow::Result<Target> {
        let pid = match &args.command[..] {
            [word] => word.to_str().and_then(|word| word.parse::<u32>().ok()),
            _ => None,
        };
        let target = match (&args.netns, pid) {
            (Some(_), Some(pid)) => bail!("--netns and PID {pid} name different targets: give one"),
            (Some(_), None) if !args.command.is_empty() => {
                bail!("--netns names existing namespaces, in which no command is run")
            }
            (Some(netns), None) => {
                let is_name = !netns.as_os_str().as_encoded_bytes().contains(&b'/');
                let netns = if is_name { Path::new(NAMED).join(netns) } else { netns.clone() };
                Target::Existing { netns, userns: args.userns.clone() }
            }
            (None, Some(pid)) => {
                let own = PathBuf::from(format!("/proc/{pid}/ns/user"));
                let userns = Some(args.userns.clone().unwrap_or(own));
                Target::Existing { netns: format!("/proc/{pid}/ns/net").into(), userns }
            }
            (None, None) if args.userns.is_some() => {
                bail!("--userns needs the network namespace as well: --netns PATH or PID")
            }
            (None, None) => Target::Command(args.command.clone()),
        };
        if args.no_pidns && !matches!(target, Target::Command(_)) {
            bail!("--no-pidns is about a command, and there is none");
        }
        Ok(target)
    }
}

/// Open descriptors of existing namespaces.
#[derive(Debug)]
pub(crate) struct Existing {
    pub(crate) netns: OwnedFd,
    /// User namespace to join first.
    pub(crate) userns: Option<OwnedFd>,
}

impl Existing {
    /// Opens the files of the namespaces.
    pub(crate) fn open(netns: &Path, userns: Option<&Path>) -> anyhow::Result<Existing> {
        let open = |path: &Path| {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            rustix::fs::open(path, flags, Mode::empty())
                .with_context(|| format!("cannot open the namespace {}", path.display()))
        };
        Ok(Existing { netns: open(netns)?, userns: userns.map(open).transpose()? })
    }

    /// Returns all descriptors, the network namespace's first.
    pub(crate) fn fds(&self) -> Vec<BorrowedFd<'_>> {
        [Some(&self.netns), self.userns.as_ref()].into_iter().flatten().map(AsFd::as_fd).collect()
    }
}

/// Watch over the end of an existing namespace.
#[derive(Debug)]
pub(crate) enum Watch {
    /// Process that owns the namespace; readable at its end.
    Process(OwnedFd),
    /// File that names the namespace, and events of its directory.
    File { path: PathBuf, identity: (u64, u64), events: Option<OwnedFd> },
}

impl Watch {
    /// Watches the namespace at `netns`.
    pub(crate) fn new(netns: &Path) -> anyhow::Result<Watch> {
        if let Some(pid) = process_of(netns) {
            let fd = rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK)
                .with_context(|| format!("process {pid}"))?;
            return Ok(Watch::Process(fd));
        }
        let identity = identity(netns)?;
        // Without inotify, the file is looked at once a second.
        let events = watch_directory(netns).ok();
        Ok(Watch::File { path: netns.to_owned(), identity, events })
    }

    /// Returns the descriptor that becomes readable at a possible end. `None` if there is only [`Watch::is_over`].
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Watch::Process(fd) => Some(fd.as_fd()),
            Watch::File { events, .. } => events.as_ref().map(AsFd::as_fd),
        }
    }

    /// Returns `true` if the namespace is no longer wanted. Takes the pending events.
    pub(crate) fn is_over(&self) -> bool {
        match self {
            Watch::Process(fd) => {
                ringfence_sys::poll::wait_readable(fd, Some(std::time::Duration::ZERO))
                    .unwrap_or(true)
            }
            Watch::File { path, identity: before, events } => {
                let mut buffer = [0; 4096];
                while events.iter().any(|fd| rustix::io::read(fd, &mut buffer).is_ok_and(|n| n > 0))
                {
                }
                identity(path).ok() != Some(*before)
            }
        }
    }
}

/// Returns the process in a path of the form `/proc/PID/…`.
fn process_of(path: &Path) -> Option<Pid> {
    let rest = path.strip_prefix("/proc").ok()?;
    let pid = rest.components().next()?.as_os_str().to_str()?.parse().ok()?;
    Pid::from_raw(pid)
}

fn identity(path: &Path) -> anyhow::Result<(u64, u64)> {
    let stat = rustix::fs::stat(path).with_context(|| path.display().to_string())?;
    Ok((stat.st_dev, stat.st_ino))
}

fn watch_directory(path: &Path) -> io::Result<OwnedFd> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let fd = rustix::fs::inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    let kinds = WatchFlags::DELETE | WatchFlags::MOVED_FROM | WatchFlags::DELETE_SELF;
    rustix::fs::inotify::add_watch(&fd, directory.unwrap_or(Path::new(".")), kinds)?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_of_a_process_names_it() {
        let pid = |path: &str| process_of(Path::new(path)).map(Pid::as_raw_pid);
        assert_eq!(pid("/proc/17/ns/net"), Some(17));
        assert_eq!(pid("/proc/17/root/tmp/netns"), Some(17));
        assert_eq!(pid("/proc/self/ns/net"), None);
        assert_eq!(pid("/run/netns/17"), None);
    }

    #[test]
    fn deleted_or_replaced_file_ends_the_watch() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("netns");
        std::fs::write(&path, "").unwrap();
        let watch = Watch::new(&path).unwrap();
        assert!(!watch.is_over());
        std::fs::write(directory.path().join("other"), "").unwrap();
        assert!(!watch.is_over());
        std::fs::rename(directory.path().join("other"), &path).unwrap();
        assert!(watch.is_over());
        std::fs::remove_file(&path).unwrap();
        assert!(watch.is_over());
    }
}
