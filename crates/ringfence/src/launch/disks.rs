//! A guest's disks, as the launcher prepares them.
//!
//! It is the launcher that may open files: it opens and locks each, finds out about it, hands it to
//! the driver domain and keeps nothing of it, so that the lock ends with the driver domain's last
//! I/O. It also makes the socket at which the frontend serves the disk, in the runtime directory,
//! which is the user's alone.
//!
//! To a disk's NBD server it is the launcher, too, that connects, and connects again whenever the
//! driver domain asks for it: which server that is, the driver domain has no say in.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, anyhow, bail, ensure};
use ringfence_block::storage::file::OpenFile;
use ringfence_block::storage::nbd::NbdConnector;
use ringfence_platform::descriptors::refuse_descriptors;

use super::devices::Device;
use super::report::{Reporter, printable};
use super::runtime_dir::RuntimeDir;
use crate::disk::{DISKS_MAX, DiskSpec, Source, device_variable, variable};
use crate::switchboard::{DiskFrontend, DiskRequest, FromDriver, Medium, ToDriver};
use crate::sys::channel::Channel;

/// The driver domain only adds a device.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the names of the sockets begin with.
const PREFIX: &str = "disk-";

/// A disk that was opened.
struct Prepared {
    /// Until the driver domain has it.
    request: Option<DiskRequest>,
    /// Its file, or the connection to its server, unless that is to be made when it is asked for.
    file: Option<OwnedFd>,
    socket: Option<OwnedFd>,
    path: PathBuf,
    frontend: DiskFrontend,
}

/// The disks of one guest. Their sockets go when this does.
pub(super) struct Disks {
    /// Their nodes below /dev.
    devices: Vec<Device>,
    list: Vec<Prepared>,
    /// By handle, of those that are on a server.
    connectors: BTreeMap<u16, NbdConnector>,
}

impl Disks {
    /// Opens and locks the files, and makes the sockets.
    pub(super) fn open(specs: &[DiskSpec], directory: &RuntimeDir) -> anyhow::Result<Disks> {
        ensure!(specs.len() <= DISKS_MAX, "a guest has at most {DISKS_MAX} disks");
        if !specs.is_empty() {
            sweep(directory);
        }
        let mut disks = Disks { devices: vec![], list: vec![], connectors: BTreeMap::new() };
        for (spec, handle) in specs.iter().zip(0u16..) {
            let (medium, file) = disks.find(handle, &spec.source)?;
            let name = format!("{PREFIX}{}-{handle}", std::process::id());
            let path = directory.path().join(name);
            let socket = UnixListener::bind(&path)
                .with_context(|| format!("making the socket {}", path.display()))?;
            refuse_descriptors(&socket)
                .with_context(|| format!("setting up the socket {}", path.display()))?;
            let mode = spec.mode.name().to_owned();
            disks.list.push(Prepared {
                request: Some(DiskRequest { handle, mode, medium }),
                file,
                socket: Some(socket.into()),
                path,
                frontend: DiskFrontend::of(spec.mode),
            });
        }
        Ok(disks)
    }

    /// Opens a file, or connects to a server.
    fn find(&mut self, handle: u16, source: &Source) -> anyhow::Result<(Medium, Option<OwnedFd>)> {
        match source {
            Source::File { path, options } => {
                // The message has the reason in it already.
                let opened = OpenFile::open(path, options);
                let OpenFile { file, facts } = opened.map_err(|error| anyhow!("{error}"))?;
                Ok((Medium::File { facts, options: options.clone() }, Some(file)))
            }
            Source::Nbd { address, options } => {
                let (connector, facts, stream) = NbdConnector::open(address, options)
                    .map_err(|error| anyhow!("--disk {address}: {error}"))?;
                self.connectors.insert(handle, connector);
                Ok((Medium::Nbd(facts), stream))
            }
        }
    }

    /// Hands the files to the driver domain.
    pub(super) fn attach(&mut self, lease: &Channel) -> anyhow::Result<()> {
        for disk in &mut self.list {
            let Some(request) = disk.request.take() else { continue };
            let file = disk.file.take();
            let fds: Vec<_> = file.iter().map(AsFd::as_fd).collect();
            lease.send(&ToDriver::Disk(Box::new(request)), &fds)?;
            match lease.receive_within(PATIENCE)?.0 {
                FromDriver::DiskAdded => {}
                FromDriver::Refused(why) => bail!("--disk: {}", printable(&why)),
                other => bail!("the driver domain answered {other:?}"),
            }
        }
        Ok(())
    }

    /// Connects to the server of a disk once more. That may take long: a thread of its own does it.
    pub(super) fn dial(&self, handle: u16, lease: &Channel) {
        let Some(connector) = self.connectors.get(&handle).cloned() else { return };
        let Ok(answers) = lease.try_clone() else { return };
        let connect = move || {
            let (stream, problem) = match connector.connect() {
                Ok(stream) => (Some(stream), None),
                Err(error) => (None, Some(error.to_string())),
            };
            let fds: Vec<_> = stream.iter().map(AsFd::as_fd).collect();
            // If the driver domain is gone, nobody wants it.
            let _ = answers.send(&ToDriver::Dialled { handle, problem }, &fds);
        };
        let thread = std::thread::Builder::new().name("dial".to_owned());
        if let Err(error) = thread.spawn(connect) {
            let problem = Some(error.to_string());
            let _ = lease.send(&ToDriver::Dialled { handle, problem }, &[]);
        }
    }

    /// What the frontend is to do with each.
    pub(super) fn orders(&self) -> Vec<DiskFrontend> {
        self.list.iter().map(|disk| disk.frontend).collect()
    }

    /// The sockets, for the frontend alone.
    pub(super) fn take_sockets(&mut self) -> Vec<OwnedFd> {
        self.list.iter_mut().filter_map(|disk| disk.socket.take()).collect()
    }

    /// Makes nodes below /dev of those that are served, where that can be; by what variables the command
    /// finds these.
    pub(super) fn make_devices(&mut self, reporter: Reporter) -> Vec<(String, String)> {
        let mut environment = vec![];
        for (disk, number) in self.list.iter().zip(0..) {
            match Device::of(&disk.path) {
                Ok(Some(device)) => {
                    let path = device.path().display().to_string();
                    reporter.step(format_args!("disk {number} is {path}, too"));
                    environment.push((device_variable(number), path));
                    self.devices.push(device);
                }
                Ok(None) => reporter.step(format_args!(
                    "disk {number} has no node below /dev: only root may make one, where the kernel has \
                     the driver nbd (modprobe nbd)"
                )),
                Err(error) => reporter
                    .problem(format_args!("disk {number} has no node below /dev: {error}")),
            }
        }
        environment
    }

    /// Ends the nodes below /dev, when what was written to them is on the disks. To be called while the disks
    /// are served; where they are not any more, this fails at once.
    pub(super) fn end_devices(&mut self, reporter: Reporter) {
        for device in self.devices.drain(..) {
            let path = device.path().to_owned();
            if let Err(error) = device.end() {
                reporter.problem(format_args!(
                    "{}: not everything that was written could be stored: {error}",
                    path.display()
                ));
            }
        }
    }

    /// By what variables the command finds them.
    pub(super) fn environment(&self) -> Vec<(String, String)> {
        let paths = self.list.iter().map(|disk| disk.path.display().to_string());
        paths.enumerate().map(|(number, path)| (variable(number), path)).collect()
    }
}

impl Drop for Disks {
    fn drop(&mut self) {
        for disk in &self.list {
            let _ = std::fs::remove_file(&disk.path);
        }
    }
}

/// Removes the sockets of launchers that were killed: nobody listens there.
fn sweep(directory: &RuntimeDir) {
    let Ok(entries) = std::fs::read_dir(directory.path()) else { return };
    for entry in entries.flatten() {
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        let refused = UnixStream::connect(entry.path())
            .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
        if refused {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}
