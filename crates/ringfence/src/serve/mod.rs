//! `ringfence serve`: the daemon of a driver domain on Xen.
//!
//! # How it works
//!
//! The toolstack creates a directory in xenstore for each interface and each disk that this domain is to
//! serve. One control thread watches the directories and runs the xenbus handshake with each guest. It
//! attaches connected interfaces to a dataplane, which has threads of its own. Each ring of a disk has a
//! thread too.
//!
//! A daemon takes over the devices that an earlier daemon left connected. Guests do not notice a restart.
//!
//! | module                | contents                                                         |
//! |-----------------------|------------------------------------------------------------------|
//! | [`config`]            | configuration file                                               |
//! | [`metrics`]           | counters for Prometheus                                          |
//! | [`status`], [`show`]  | status socket, and `ringfence status`                            |
//! | `daemon`              | control thread                                                   |
//! | `devices`             | discovery of devices                                             |
//! | `host`, `vif_keys`    | interfaces, and the toolstack's keys for them                    |
//! | `disks`               | disks and their storage                                          |
//! | `bridge`              | TAP interfaces of the host                                       |
//! | `staging`             | limits of staged pages                                           |
//! | `records`, `made`     | state that outlives the process                                  |

mod bridge;
pub mod config;
mod daemon;
mod devices;
mod disks;
mod host;
mod made;
pub mod metrics;
mod records;
pub mod show;
mod staging;
pub mod status;
mod vif;
mod vif_keys;

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use ringfence_platform::Platform;
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::xen::{Side, XenPlatform};
use ringfence_sandbox::STATUS_FAILED;
use ringfence_sandbox::isolation::{Confinement, Sockets, View};
use ringfence_sandbox::signals::Signals;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::Signal;
use rustix::thread::CapabilitySet;

use self::config::{Config, ConfigError, Listen, PATH_DEFAULT};
use self::daemon::{Daemon, ServeError};
use ringfence_hostnet::runtime_dir::RuntimeDir;

/// Directory of the status socket and of the files that outlive the daemon.
const RUNTIME_DIR: &str = "/run/ringfence";

const EXAMPLES: &str = "\
Examples:
  Check a configuration:
    ringfence serve --check

  A guest whose interface it serves (in the guest's xl configuration):
    vif = [ 'bridge=xenbr0,script=vif-ringfence' ]

  A guest whose disk it serves, a file, a device, or what an NBD server exports:
    disk = [ 'vdev=xvda,script=block-ringfence,target=/var/lib/xen/images/a.img' ]

  From a driver domain called `net` instead of dom0:
    vif = [ 'bridge=xenbr0,backend=net,script=vif-ringfence' ]

Signals:
    SIGTERM ends the daemon. Guests stay connected, and the next daemon takes them over.
    --on-exit=close closes their interfaces and disks instead. SIGHUP reads the configuration again.";

/// Serve network interfaces and disks to Xen guests, in dom0 or a driver domain
///
/// Finds the interfaces and disks that the toolstack makes for this domain and serves them to
/// unmodified guests, in place of the kernel's xen-netback and xen-blkback, which must not be loaded. It
/// can be stopped (or killed) and started again while guests run: their devices are taken over as they
/// are, and no request to a disk is lost.
///
/// Needs root, and the kernel's xen-gntdev, xen-evtchn and tun.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ServeArgs {
    /// Configuration file; the default one may be missing
    #[arg(long, value_name = "FILE", default_value = PATH_DEFAULT)]
    pub config: PathBuf,

    /// Check the configuration, print the result, and exit
    #[arg(long)]
    pub check: bool,

    /// Action on the guests' devices when the daemon ends
    #[arg(long, value_enum, value_name = "WHAT", default_value_t)]
    pub on_exit: OnExit,

    /// `xen`, or `local:SOCKET` for domains of a hub
    #[arg(long, default_value = "xen", value_parser = parse_platform, hide = true)]
    pub platform: PlatformChoice,

    /// Directory of files that outlive the daemon
    #[arg(long, value_name = "DIR", default_value = RUNTIME_DIR, hide = true)]
    pub runtime_dir: PathBuf,
}

/// Action on the guests' devices when the daemon ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, ValueEnum)]
pub enum OnExit {
    /// Leave them connected, for the next daemon to take over
    #[default]
    Keep,
    /// Close them; guests can use them again after they are unplugged and plugged in
    Close,
}

/// Hypervisor that the process uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlatformChoice {
    Xen,
    /// Hub that listens at this socket.
    Local(PathBuf),
}

/// Parses `xen` or `local:SOCKET`.
pub fn parse_platform(text: &str) -> Result<PlatformChoice, String> {
    match (text, text.strip_prefix("local:")) {
        ("xen", _) => Ok(PlatformChoice::Xen),
        (_, Some(socket)) if !socket.is_empty() => Ok(PlatformChoice::Local(socket.into())),
        _ => Err("a platform is `xen`, or `local:` and the path of a hub's socket".to_owned()),
    }
}

/// Connects to the hub at `socket`.
pub fn join_hub(
    socket: &std::path::Path,
) -> Result<LocalPlatform, ringfence_platform::PlatformError> {
    let connect = || -> io::Result<OwnedFd> {
        let fd = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        rustix::net::connect(&fd, &SocketAddrUnix::new(socket)?)?;
        Ok(fd)
    };
    let system =
        |source| ringfence_platform::PlatformError::System { what: "reaching the hub", source };
    LocalPlatform::connect(connect().map_err(system)?)
}

/// Command line of the daemon.
struct Setup {
    config: PathBuf,
    on_exit: OnExit,
    platform: PlatformChoice,
    runtime_dir: PathBuf,
}

impl Setup {
    /// Reads the configuration file.
    fn load(&self) -> Result<Config, ConfigError> {
        Config::load(&self.config, self.config.as_os_str() == PATH_DEFAULT)
    }

    fn platform_name(&self) -> &'static str {
        match self.platform {
            PlatformChoice::Xen => "xen",
            PlatformChoice::Local(_) => "local",
        }
    }

    /// Returns the path of the status socket. A runtime directory other than the default contains it.
    fn status_socket(&self, config: &Config) -> PathBuf {
        if self.runtime_dir.as_os_str() == RUNTIME_DIR {
            config.serve.status_socket.clone()
        } else {
            self.runtime_dir.join("serve.sock")
        }
    }

    /// Returns the files of the host that the daemon needs while it serves guests.
    fn view(&self, config: &Config) -> View {
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
fn sockets(config: &Config) -> Sockets {
    let listen = match &config.metrics.listen {
        Some(Listen::Loopback(address)) => Some(address.port()),
        _ => None,
    };
    Sockets { connect: config.disks.serve && config.disks.nbd, listen }
}

/// Serves until a signal ends the daemon. Returns the exit status.
pub fn main(args: &ServeArgs) -> u8 {
    // The sandbox changes the working directory.
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let setup = Setup {
        config: absolute(&args.config),
        on_exit: args.on_exit,
        platform: args.platform.clone(),
        runtime_dir: absolute(&args.runtime_dir),
    };
    let done = match setup.load() {
        Ok(_) if args.check => {
            println!("{}", verdict(&args.config, args.config.exists()));
            Ok(())
        }
        Ok(config) => serve(setup, config),
        Err(error) => Err(error.into()),
    };
    match done {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("ringfence: serve: {error}");
            STATUS_FAILED
        }
    }
}

/// Returns the result of `--check` for a configuration without errors. Only the default file may be missing.
fn verdict(path: &Path, exists: bool) -> String {
    match exists {
        true => format!("{}: right", path.display()),
        false => format!("{}: there is no such file, so the defaults apply", path.display()),
    }
}

fn serve(setup: Setup, config: Config) -> Result<(), ServeError> {
    ringfence_hostnet::log::to_stderr_at(config.serve.log_level.level());
    let signals = Signals::new(&[Signal::INT, Signal::TERM, Signal::HUP])?;
    // No directory may stay open: its parent directories lead out of the view.
    drop(RuntimeDir::open_at(setup.runtime_dir.clone())?);
    let _lock = lock(setup.runtime_dir.join("serve.lock"))?;
    ringfence_sandbox::limits::raise_descriptor_limit()?;
    match setup.platform.clone() {
        PlatformChoice::Xen => {
            let platform = XenPlatform::open(Side::Backend)?;
            run(setup, config, platform, signals)
        }
        PlatformChoice::Local(socket) => {
            let platform = join_hub(&socket)?;
            run(setup, config, platform, signals)
        }
    }
}

/// Enters the sandbox and serves.
fn run<P: Platform>(
    setup: Setup,
    config: Config,
    platform: P,
    signals: Signals,
) -> Result<(), ServeError> {
    let (files, sockets) = (setup.view(&config), sockets(&config));
    let confinement = Confinement::enter(CapabilitySet::NET_ADMIN, &files, sockets)?;
    let daemon = Daemon::new(setup, config, platform, signals)?;
    confinement.lock()?;
    daemon.run()
}

/// Locks the file and writes the process id into it. The lock holds until the file is closed.
fn lock(path: PathBuf) -> Result<File, ServeError> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fail = |what| {
        let path = path.clone();
        move |source: io::Error| ServeError::File { path, what, source }
    };
    let open = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR);
    let mut file = File::from(open.map_err(io::Error::from).map_err(fail("cannot be opened"))?);
    if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        let mut text = String::new();
        // The process id is only a hint in the message.
        let _ = (&file).take(16).read_to_string(&mut text);
        return Err(ServeError::AnotherRuns { pid: text.trim_end().parse().ok() });
    }
    let write = |file: &mut File| {
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{}", std::process::id())
    };
    write(&mut file).map_err(fail("cannot be written"))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_without_a_file_says_that_the_defaults_apply() {
        let path = Path::new(PATH_DEFAULT);
        assert_eq!(verdict(path, true), format!("{PATH_DEFAULT}: right"));
        assert!(verdict(path, false).contains("no such file, so the defaults apply"));
    }
}
