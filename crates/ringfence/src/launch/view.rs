//! Launcher's part of a guest's view: directories and environment variables of the host.

use std::io;
use std::path::{Path, PathBuf};

use ringfence_sandbox::ids;

use super::disks::GuestDisks;
use super::filter;
use super::options::Options;
use ringfence_guest::ViewConfig;
use ringfence_hostnet::runtime_dir::{self, RuntimeDir};

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
    /// Directories replaced by empty ones.
    pub empty: Vec<PathBuf>,
    /// Directories and files made invisible.
    pub hidden: Vec<PathBuf>,
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

/// Returns the configuration of the view for init.
pub(super) fn config(
    options: &Options,
    directory: &RuntimeDir,
    disks: &GuestDisks,
) -> io::Result<ViewConfig> {
    let view = &options.view;
    let absolute =
        |paths: &[PathBuf]| paths.iter().map(std::path::absolute).collect::<io::Result<Vec<_>>>();
    let is_strict = options.filter.strict;
    let strict = is_strict.then(|| filter::strict_view(view)).transpose()?;
    let mut read_only = absolute(&view.read_only)?;
    if is_strict {
        read_only.push("/".into());
    }
    Ok(ViewConfig {
        runtime_dir: runtime_dir_of_guest(options, directory),
        runtime_dirs: runtime_dir::all_of_user(directory.path(), options.as_root),
        session: runtime_dir::session().filter(|path| may_be_covered(path)),
        disks: disks.sockets(),
        share_runtime: view.share_runtime,
        is_host_root: ids::is_host_root()?,
        root: view.root.as_ref().map(std::path::absolute).transpose()?,
        read_only,
        writable: absolute(&view.writable)?,
        empty: absolute(&view.empty)?,
        hidden: absolute(&view.hidden)?,
        strict,
    })
}

/// Returns the directory in which the guest's command finds the sockets of its disks.
pub(super) fn runtime_dir_of_guest(options: &Options, directory: &RuntimeDir) -> PathBuf {
    let in_root = options.view.root.as_ref().map(|_| PathBuf::from("/run/ringfence"));
    in_root.unwrap_or_else(|| directory.path().to_owned())
}

/// Returns the variables to remove from the command's environment.
pub(super) fn removed_variables(options: &Options) -> Vec<String> {
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
