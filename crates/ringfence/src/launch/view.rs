//! Launcher's part of a guest's view: directories and environment variables of the host.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use ringfence_sandbox::ids;
use ringfence_sys::nbd::NbdDevice;

use super::options::{Options, TerminalChoice};
use ringfence_guest::{DeviceConfig, HostPath, ViewConfig, other_processes};
use ringfence_hostnet::runtime_dir::{self, RuntimeDir};

/// Directories that a guest may have for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PrivatePlace {
    /// /tmp, /var/tmp and /dev/shm
    Tmp,
    /// /run
    Run,
    /// The home directory
    Home,
    /// /dev: null, zero, full, random, urandom, tty, net/tun, fuse, and terminals of its own
    Dev,
}

/// Options for a guest's view of the host's files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ViewOptions {
    /// Keeps the host's sockets and the session's directory visible.
    pub share_runtime: bool,
    /// New root directory.
    pub root: Option<PathBuf>,
    /// Paths made read-only, with everything below.
    pub read_only: Vec<PathBuf>,
    /// Exceptions from `read_only`.
    pub writable: Vec<PathBuf>,
    /// Directories of the guest's own, in which the working directory, `read_only` and `writable` stay visible.
    pub private: Vec<PrivatePlace>,
    /// Directories replaced by empty ones.
    pub empty: Vec<PathBuf>,
    /// Directories and files made invisible.
    pub hidden: Vec<PathBuf>,
    /// Devices besides those that every guest has. `/dev` stands for all.
    pub devices: Vec<PathBuf>,
}

impl ViewOptions {
    /// Adds the view of `--strict`: a read-only file tree and the guest's own directories, in which the working directory stays
    /// visible and writable. A working directory that is the home directory, or contains it, is neither.
    pub(crate) fn make_strict(&mut self) {
        let is_above_home = |directory: &PathBuf| {
            let mut homes = homes().into_iter().filter_map(|home| home.canonicalize().ok());
            homes.any(|home| home.starts_with(directory))
        };
        let directory = std::env::current_dir().ok();
        self.writable.extend(directory.filter(|directory| !is_above_home(directory)));
        self.read_only.push("/".into());
        self.isolate();
    }

    /// Gives the guest every directory that it can have for itself. Of the home directory the working directory stays.
    fn isolate(&mut self) {
        self.private = PrivatePlace::value_variants().to_vec();
    }

    /// Returns `true` if the guest has a `/dev` of its own.
    fn has_own_devices(&self, is_host_root: bool) -> bool {
        let is_all = |path: &PathBuf| path == Path::new("/dev");
        let is_above = |path: &PathBuf| {
            path.canonicalize().is_ok_and(|path| Path::new("/dev").starts_with(path))
        };
        let is_limited = is_host_root
            || self.root.is_some()
            || self.private.contains(&PrivatePlace::Dev)
            || self.read_only.iter().any(is_above);
        is_limited && !self.devices.iter().any(is_all)
    }
}

/// Facts about the host that only the launcher can find out.
pub(super) struct HostFacts {
    socket_directories: Vec<HostPath>,
}

impl HostFacts {
    pub(super) fn examine(options: &Options) -> HostFacts {
        let hides = !options.view.share_runtime;
        let socket_directories =
            if hides { other_processes::socket_directories() } else { Vec::new() };
        HostFacts { socket_directories }
    }
}

/// Variables that always name a socket of the host's session.
const SESSION_VARIABLES: [&str; 11] = [
    "DBUS_SESSION_BUS_ADDRESS",
    "DBUS_SYSTEM_BUS_ADDRESS",
    "SSH_AUTH_SOCK",
    "SSH_AGENT_PID",
    "GPG_AGENT_INFO",
    "WAYLAND_DISPLAY",
    "WAYLAND_SOCKET",
    "SESSION_MANAGER",
    "TMUX",
    "STY",
    "NOTIFY_SOCKET",
];
/// Variables that name a socket if their value begins with one of these prefixes.
const SOCKET_VARIABLES: [(&str, &[&str]); 5] = [
    ("DISPLAY", &[":", "unix"]),
    ("PULSE_SERVER", &["unix:", "/"]),
    ("PIPEWIRE_REMOTE", &["/"]),
    ("DOCKER_HOST", &["unix:"]),
    ("CONTAINER_HOST", &["unix:"]),
];

/// Returns the configuration of the view for init. `disks` is the number of the guest's disks.
pub(super) fn config(
    options: &Options,
    directory: &RuntimeDir,
    disks: usize,
    host: HostFacts,
) -> io::Result<ViewConfig> {
    let view = &options.view;
    let absolute =
        |paths: &[PathBuf]| paths.iter().map(std::path::absolute).collect::<io::Result<Vec<_>>>();
    let is_host_root = ids::is_host_root()?;
    let is_shared = options.terminal == TerminalChoice::Shared;
    let devices = || {
        let late = if is_host_root && disks > 0 { NbdDevice::paths() } else { vec![] };
        Ok::<_, io::Error>(DeviceConfig {
            given: absolute(&view.devices)?,
            terminal: if is_shared { terminal() } else { None },
            late,
        })
    };
    Ok(ViewConfig {
        runtime_dir: runtime_dir_of_guest(options, directory),
        runtime_dirs: runtime_dir::all_of_user(directory.path(), options.as_root),
        session: runtime_dir::session().filter(|path| may_be_covered(path)),
        disks,
        share_runtime: view.share_runtime,
        user: rustix::process::geteuid().as_raw(),
        home: homes().into_iter().next(),
        socket_directories: host.socket_directories,
        is_host_root,
        root: view.root.as_ref().map(std::path::absolute).transpose()?,
        read_only: absolute(&view.read_only)?,
        writable: absolute(&view.writable)?,
        private: private_directories(&view.private),
        empty: absolute(&view.empty)?,
        hidden: absolute(&view.hidden)?,
        devices: view.has_own_devices(is_host_root).then(devices).transpose()?,
    })
}

/// Returns the directories that stand for the places, with the modes of the empty ones that replace them. `/dev` is
/// made by other means.
fn private_directories(places: &[PrivatePlace]) -> Vec<(PathBuf, u32)> {
    let of = |place: &PrivatePlace| match place {
        PrivatePlace::Tmp => {
            ["/tmp", "/var/tmp", "/dev/shm"].map(|path| (PathBuf::from(path), 0o1777)).to_vec()
        }
        PrivatePlace::Run => vec![("/run".into(), 0o755)],
        PrivatePlace::Home => homes().into_iter().map(|path| (path, 0o700)).collect(),
        PrivatePlace::Dev => vec![],
    };
    places.iter().flat_map(of).collect()
}

/// Returns the user's home directories: that of the environment, and that of the user database.
fn homes() -> Vec<PathBuf> {
    let user = rustix::process::geteuid().as_raw().to_string();
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let listed = users.lines().find_map(|line| {
        let mut fields = line.split(':').skip(2);
        (fields.next() == Some(&user)).then(|| fields.nth(2).map(PathBuf::from))?
    });
    let own = std::env::var_os("HOME").map(PathBuf::from);
    let mut homes: Vec<_> = own.into_iter().chain(listed).collect();
    homes.retain(|home| home.is_absolute() && home != Path::new("/") && home.is_dir());
    homes.dedup();
    homes
}

/// Returns the terminal of the standard streams, if one of them is a terminal.
fn terminal() -> Option<PathBuf> {
    let streams = (rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr());
    let name = |stream: rustix::fd::BorrowedFd<'_>| {
        let name = rustix::termios::ttyname(stream.as_fd(), Vec::new()).ok()?;
        Some(PathBuf::from(std::ffi::OsString::from_vec(name.into_bytes())))
    };
    [streams.0, streams.1, streams.2].into_iter().find_map(name)
}

/// Returns the directory in which the guest's command finds the sockets of its disks.
pub(super) fn runtime_dir_of_guest(options: &Options, directory: &RuntimeDir) -> PathBuf {
    let in_root = options.view.root.as_ref().map(|_| PathBuf::from("/run/ringfence"));
    in_root.unwrap_or_else(|| directory.path().to_owned())
}

/// Variables that name the user's terminal.
const TERMINAL_VARIABLES: [&str; 2] = ["GPG_TTY", "SSH_TTY"];

/// Returns the variables to remove from the command's environment. `has_own_terminal` is set if the command does not have the
/// user's.
pub(super) fn removed_variables(options: &Options, has_own_terminal: bool) -> Vec<String> {
    let of_terminals = TERMINAL_VARIABLES.iter().filter(|_| has_own_terminal);
    let of_terminals = of_terminals.map(|name| (*name).to_owned());
    of_terminals.chain(variables_of_sockets(options)).collect()
}

/// Returns the variables that name sockets which the command does not see.
fn variables_of_sockets(options: &Options) -> Vec<String> {
    if options.view.share_runtime && options.view.root.is_none() {
        return vec![];
    }
    let session = options.view.root.as_ref().map(|_| &"XDG_RUNTIME_DIR");
    let of_sockets = SOCKET_VARIABLES.iter().filter(|(name, beginnings)| {
        std::env::var(name).is_ok_and(|text| beginnings.iter().any(|b| text.starts_with(b)))
    });
    let of_sockets = of_sockets.map(|(name, _)| name);
    SESSION_VARIABLES
        .iter()
        .chain(of_sockets)
        .chain(session)
        .map(|name| (*name).to_owned())
        .collect()
}

/// Returns `false` for a directory that contains more than a session's sockets. The user may have
/// set the variable to any directory.
fn may_be_covered(session: &Path) -> bool {
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let is_general = ["/", "/tmp", "/var/tmp", "/run"].map(Path::new).contains(&session);
    !is_general && !home.is_some_and(|home| home.starts_with(session))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_the_guests_own_where_files_are_limited_or_root_runs_it() {
        let own = |view: &ViewOptions| [false, true].map(|is_root| view.has_own_devices(is_root));
        let none = ViewOptions::default();
        assert_eq!(own(&none), [false, true]);
        for path in ["/", "/dev"] {
            let mut view = ViewOptions { read_only: vec![path.into()], ..none.clone() };
            assert_eq!(own(&view), [true, true], "{path}");
            view.devices = vec!["/dev".into()];
            assert_eq!(own(&view), [false, false], "{path}");
        }
        let elsewhere = ViewOptions { read_only: vec!["/usr".into()], ..none.clone() };
        assert_eq!(own(&elsewhere), [false, true]);
        let mut isolated = none;
        isolated.isolate();
        assert_eq!(own(&isolated), [true, true]);
    }

    #[test]
    fn private_places_stand_for_directories_that_exist() {
        let directories = private_directories(&[PrivatePlace::Tmp, PrivatePlace::Run]);
        let paths: Vec<_> = directories.iter().map(|(path, _)| path.to_str().unwrap()).collect();
        assert_eq!(paths, ["/tmp", "/var/tmp", "/dev/shm", "/run"]);
        assert!(private_directories(&[PrivatePlace::Home]).iter().all(|(path, _)| path.is_dir()));
    }

    #[test]
    fn general_directory_is_not_covered_as_a_session() {
        assert!(may_be_covered(Path::new("/run/user/7")));
        for path in ["/", "/tmp", "/run"] {
            assert!(!may_be_covered(Path::new(path)), "{path}");
        }
        if let Some(home) = std::env::var_os("HOME") {
            assert!(!may_be_covered(Path::new(&home)));
        }
    }
}
