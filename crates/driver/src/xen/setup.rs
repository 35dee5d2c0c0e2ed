//! Settings of the command line, and what the daemon needs of its host.

use std::path::{Path, PathBuf};

use ringfence_platform::PlatformChoice;
use ringfence_sandbox::isolation::{Sockets, View};

use super::args::OnExit;
use super::config::{Config, ConfigError, Listen, PATH_DEFAULT};

/// Directory of the status socket and of the files that outlive the daemon.
pub(super) const RUNTIME_DIR: &str = "/run/ringfence";

/// Command line of the daemon.
pub(super) struct Setup {
    pub(super) config: PathBuf,
    pub(super) on_exit: OnExit,
    pub(super) platform: PlatformChoice,
    pub(super) runtime_dir: PathBuf,
}

impl Setup {
    /// Reads the configuration file.
    pub(super) fn load(&self) -> Result<Config, ConfigError> {
        Config::load(&self.config, self.config.as_os_str() == PATH_DEFAULT)
    }

    /// Returns the name of the platform in the status.
    pub(super) fn platform_name(&self) -> &'static str {
        match self.platform {
            PlatformChoice::Xen => "xen",
            PlatformChoice::Local(_) => "local",
        }
    }

    /// Returns the path of the status socket. A runtime directory other than the default contains it.
    pub(super) fn status_socket(&self, config: &Config) -> PathBuf {
        if self.runtime_dir.as_os_str() == RUNTIME_DIR {
            config.serve.status_socket.clone()
        } else {
            self.runtime_dir.join("serve.sock")
        }
    }

    /// Returns the files of the host that the daemon needs while it serves guests.
    pub(super) fn view(&self, config: &Config) -> View {
        let mut view = View::default()
            .read("/etc")
            // This file may be a link to another directory.
            .read("/etc/resolv.conf")
            .read("/sys")
            .read("/proc/self")
            .read("/run/xenstored")
            .read("/var/run/xenstored")
            .devices("/dev/xen")
            .devices("/dev/ringfence-window")
            .devices("/dev/net/tun")
            .write(&self.runtime_dir);
        let directory = |path: &Path| path.parent().unwrap_or(path).to_owned();
        view = match directory(&self.config) {
            root if root == Path::new("/") => view.read(&self.config),
            directory => view.read(directory),
        };
        view = view.write(directory(&self.status_socket(config)));
        if let Some(Listen::Unix(path)) = &config.metrics.listen {
            view = view.write(directory(path));
        }
        for path in &config.disks.paths {
            let below_dev = path.starts_with("/dev");
            view = if below_dev { view.devices(path) } else { view.write(path) };
        }
        view
    }
}

/// Returns the TCP sockets that the configuration needs.
pub(super) fn sockets(config: &Config) -> Sockets {
    let listen = match &config.metrics.listen {
        Some(Listen::Loopback(address)) => Some(address.port()),
        _ => None,
    };
    Sockets { connect: config.disks.serve && config.disks.nbd, listen }
}
