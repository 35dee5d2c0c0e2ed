//! `ringfence serve`: the driver-domain daemon on Xen.
//!
//! # Theory of operation
//!
//! The toolstack makes a directory in xenstore for each interface and each disk that this domain is to
//! serve. One thread watches them, goes through the xenbus handshake with each guest, and attaches
//! interfaces that are connected to a data plane, which has a thread of its own; each ring of a disk has
//! one too. What another process of this kind left
//! connected is taken over as it is: ending and starting the daemon is no event for the guests.
//!
//! * [`config`]: its configuration file.
//! * [`metrics`]: what it counts, for Prometheus.
//! * [`status`]: what it says of itself; [`show`]: `ringfence status`.
//! * `devices`: finds devices, and looks at those that changed.
//! * `host`: the interfaces, and what each is attached to.
//! * `disks`: the disks, and their storage.
//! * `bridge`: interfaces of the host.
//! * `staging`, `vif_keys`: limits of staged pages, and what the toolstack wrote about interfaces.
//! * `records`, `made`: what outlives the process.

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
mod vif_keys;

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use nix::sys::signal::Signal;
use ringfence_platform::Platform;
use ringfence_platform::local::LocalPlatform;
use ringfence_platform::xen::{Side, XenPlatform};
use ringfence_sandbox::STATUS_FAILED;
use ringfence_sandbox::isolation::{Confinement, Sockets, View};
use ringfence_sandbox::signals::Signals;
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::thread::CapabilitySet;

use self::config::{Config, ConfigError, Listen, PATH_DEFAULT};
use self::daemon::{Daemon, ServeError};
use crate::launch::runtime_dir::RuntimeDir;

/// Where the daemon keeps what outlives it, and its socket.
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
  SIGTERM ends it. Guests stay connected, and the next one goes on with them; --on-exit=close closes
  their interfaces and disks instead. SIGHUP has it read its configuration again.";

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
    /// The configuration; by default it may be missing
    #[arg(long, value_name = "FILE", default_value = PATH_DEFAULT)]
    pub config: PathBuf,

    /// Read the configuration, say whether it is right, and end
    #[arg(long)]
    pub check: bool,

    /// What becomes of the guests' devices when the daemon is told to end
    #[arg(long, value_enum, value_name = "WHAT", default_value_t)]
    pub on_exit: OnExit,

    /// `xen`, or `local:SOCKET` for domains of a hub
    #[arg(long, default_value = "xen", value_parser = parse_platform, hide = true)]
    pub platform: PlatformChoice,

    /// Where the daemon keeps what outlives it
    #[arg(long, value_name = "DIR", default_value = RUNTIME_DIR, hide = true)]
    pub runtime_dir: PathBuf,
}

/// What becomes of the guests' devices when the daemon is told to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, ValueEnum)]
pub enum OnExit {
    /// They stay connected, for the next daemon to go on with
    #[default]
    Keep,
    /// They are closed; guests use them again after they are unplugged and plugged in
    Close,
}

/// Which hypervisor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlatformChoice {
    /// Xen.
    Xen,
    /// The hub that listens at this socket.
    Local(PathBuf),
}

/// Reads `xen` or `local:SOCKET`.
pub fn parse_platform(text: &str) -> Result<PlatformChoice, String> {
    match (text, text.strip_prefix("local:")) {
        ("xen", _) => Ok(PlatformChoice::Xen),
        (_, Some(socket)) if !socket.is_empty() => Ok(PlatformChoice::Local(socket.into())),
        _ => Err("a platform is `xen`, or `local:` and the path of a hub's socket".to_owned()),
    }
}

/// Joins the hub at `socket`.
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

/// How the daemon was started.
struct Setup {
    config: PathBuf,
    on_exit: OnExit,
    platform: PlatformChoice,
    runtime_dir: PathBuf,
}

impl Setup {
    /// The configuration as it is now.
    fn load(&self) -> Result<Config, ConfigError> {
        Config::load(&self.config, self.config.as_os_str() == PATH_DEFAULT)
    }

    fn platform_name(&self) -> &'static str {
        match self.platform {
            PlatformChoice::Xen => "xen",
            PlatformChoice::Local(_) => "local",
        }
    }

    /// Where the status can be asked for: with another runtime directory, there.
    fn status_socket(&self, config: &Config) -> PathBuf {
        if self.runtime_dir.as_os_str() == RUNTIME_DIR {
            config.serve.status_socket.clone()
        } else {
            self.runtime_dir.join("serve.sock")
        }
    }

    /// Files of the host that the daemon needs while it serves guests.
    fn view(&self, config: &Config) -> View {
        let mut view = View::default()
            .read("/etc")
            // It may be a link to somewhere else.
            .read("/etc/resolv.conf")
            .read("/sys")
            .read("/proc/self")
            .read("/run/xenstored")
            .read("/var/run/xenstored")
            .devices("/dev/xen")
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

/// TCP sockets that the configuration asks for.
fn sockets(config: &Config) -> Sockets {
    let listen = match &config.metrics.listen {
        Some(Listen::Loopback(address)) => Some(address.port()),
        _ => None,
    };
    Sockets { connect: config.disks.serve && config.disks.nbd, listen }
}

/// Serves until told to end. Returns the exit status.
pub fn main(args: &ServeArgs) -> u8 {
    // The daemon leaves the directory that it was started in.
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let setup = Setup {
        config: absolute(&args.config),
        on_exit: args.on_exit,
        platform: args.platform.clone(),
        runtime_dir: absolute(&args.runtime_dir),
    };
    let done = match setup.load() {
        Ok(_) if args.check => {
            println!("{}: right", args.config.display());
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

fn serve(setup: Setup, config: Config) -> Result<(), ServeError> {
    crate::log::to_stderr_at(config.serve.log_level.level());
    let signals = Signals::new(&[Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP])?;
    // No directory stays open: its parents lead out of the view.
    drop(RuntimeDir::open_at(setup.runtime_dir.clone())?);
    let _lock = lock(setup.runtime_dir.join("serve.lock"))?;
    crate::driver::raise_descriptor_limit()?;
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

/// Serves, with no more of the system than that takes.
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

/// Locks the file, which names this process, until it is closed.
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
        // What it says is a hint for whoever reads the message.
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
