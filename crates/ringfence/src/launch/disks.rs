//! Disks of a guest in its launcher.
//!
//! Only the launcher may open files. It opens and locks each file, reads its properties, and passes
//! the descriptor to the driver domain without keeping it, so that the lock ends with the driver
//! domain's last I/O. It also creates the socket at which the frontend exports the disk, in the
//! runtime directory.
//!
//! The launcher also connects to a disk's NBD server, and connects again when the driver domain
//! requests it. The driver domain cannot choose the server.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow, bail, ensure};
use ringfence_block::storage::file::OpenFile;
use ringfence_nbd::client::NbdConnector;
use ringfence_sandbox::channel::Channel;
use ringfence_sys::descriptors::refuse_descriptors;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::devices::Device;
use super::report::Reporter;
use crate::disk::{DiskSpec, Source, device_variable, uri_of, uri_variable, variable};
use ringfence_driver::switchboard::{
    DISKS_MAX, DiskFrontend, DiskRequest, FromDriver, Medium, ToDriver,
};
use ringfence_hostnet::runtime_dir::RuntimeDir;
use ringfence_hostnet::text::printable;

/// Time limit for adding a disk.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Prefix of the sockets' file names.
const PREFIX: &str = "disk-";

/// Disk that has been opened.
struct Prepared {
    /// Request to the driver domain, until it is sent.
    request: Option<DiskRequest>,
    /// Open file, or connection to the server unless it is made later.
    file: Option<OwnedFd>,
    socket: Option<OwnedFd>,
    path: PathBuf,
    frontend: DiskFrontend,
}

/// Disks of one guest. Dropping it removes their sockets.
pub(super) struct GuestDisks {
    /// Nodes of the disks below /dev.
    devices: Vec<Device>,
    list: Vec<Prepared>,
    /// Connectors by handle, for disks on an NBD server.
    connectors: BTreeMap<u16, NbdConnector>,
}

impl GuestDisks {
    /// Opens and locks the files, and creates the sockets.
    pub(super) fn open(
        specs: &[DiskSpec],
        directory: &RuntimeDir,
        reporter: Reporter,
    ) -> anyhow::Result<GuestDisks> {
        ensure!(specs.len() <= DISKS_MAX, "a guest has at most {DISKS_MAX} disks");
        let mut disks = GuestDisks { devices: vec![], list: vec![], connectors: BTreeMap::new() };
        let mut found = vec![];
        for (spec, handle) in specs.iter().zip(0u16..) {
            found.push((spec.mode, handle, disks.open_source(handle, &spec.source, reporter)?));
        }
        if found.is_empty() {
            return Ok(disks);
        }
        // Another launcher's sweep would remove a socket that has no listener yet.
        let _lock = directory.lock()?;
        sweep(directory);
        for (mode, handle, (medium, file)) in found {
            let (path, socket) = listen(directory.path(), handle)?;
            refuse_descriptors(&socket)
                .with_context(|| format!("setting up the socket {}", path.display()))?;
            disks.list.push(Prepared {
                request: Some(DiskRequest { handle, mode: mode.name().to_owned(), medium }),
                file,
                socket: Some(socket.into()),
                path,
                frontend: DiskFrontend::of(mode),
            });
        }
        Ok(disks)
    }

    /// Opens a file, or connects to a server.
    fn open_source(
        &mut self,
        handle: u16,
        source: &Source,
        reporter: Reporter,
    ) -> anyhow::Result<(Medium, Option<OwnedFd>)> {
        match source {
            Source::File { path, options } => {
                // The error's message has the reason already.
                let report = |text: &str| reporter.problem(text);
                let opened = OpenFile::open_reporting(path, options, &report);
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

    /// Returns the paths of the sockets.
    pub(super) fn sockets(&self) -> Vec<PathBuf> {
        self.list.iter().map(|disk| disk.path.clone()).collect()
    }

    /// Sends the disks to the driver domain.
    pub(super) fn attach(&mut self, driver_channel: &Channel) -> anyhow::Result<()> {
        for disk in &mut self.list {
            let Some(request) = disk.request.take() else { continue };
            let file = disk.file.take();
            let fds: Vec<_> = file.iter().map(AsFd::as_fd).collect();
            driver_channel.send(&ToDriver::Disk(Box::new(request)), &fds)?;
            match driver_channel.receive_within(ANSWER_TIMEOUT)?.0 {
                FromDriver::DiskAdded => {}
                FromDriver::Refused(why) => bail!("--disk: {}", printable(&why)),
                other => bail!("the driver domain answered {other:?}"),
            }
        }
        Ok(())
    }

    /// Connects to the server of a disk again, on another thread because that may take long.
    pub(super) fn dial(&self, handle: u16, driver_channel: &Channel) {
        let Some(connector) = self.connectors.get(&handle).cloned() else { return };
        let Ok(answers) = driver_channel.try_clone() else { return };
        let connect = move || {
            let (stream, problem) = match connector.connect() {
                Ok(stream) => (Some(stream), None),
                Err(error) => (None, Some(error.to_string())),
            };
            let fds: Vec<_> = stream.iter().map(AsFd::as_fd).collect();
            // Fails if the driver domain is gone, which then needs no connection.
            let _ = answers.send(&ToDriver::Dialled { handle, problem }, &fds);
        };
        let thread = std::thread::Builder::new().name("dial".to_owned());
        if let Err(error) = thread.spawn(connect) {
            let problem = Some(error.to_string());
            let _ = driver_channel.send(&ToDriver::Dialled { handle, problem }, &[]);
        }
    }

    /// Returns the frontend's configuration of each disk.
    pub(super) fn frontend_configs(&self) -> Vec<DiskFrontend> {
        self.list.iter().map(|disk| disk.frontend).collect()
    }

    /// Takes the sockets, for the frontend alone.
    pub(super) fn take_sockets(&mut self) -> Vec<OwnedFd> {
        self.list.iter_mut().filter_map(|disk| disk.socket.take()).collect()
    }

    /// Creates nodes below /dev for the exported disks, if possible. Returns the environment
    /// variables that name them.
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

    /// Flushes and ends the nodes below /dev. Call it while the disks are exported; it fails at
    /// once otherwise.
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

    /// Returns the environment variables that name the sockets in the command's view, and their NBD addresses.
    pub(super) fn environment(&self, directory: &Path) -> Vec<(String, String)> {
        let names = self.list.iter().filter_map(|disk| disk.path.file_name());
        let paths = names.map(|name| directory.join(name).display().to_string());
        let both = |(number, path): (usize, String)| {
            [(uri_variable(number), uri_of(&path)), (variable(number), path)]
        };
        paths.enumerate().flat_map(both).collect()
    }
}

impl Drop for GuestDisks {
    fn drop(&mut self) {
        for disk in &self.list {
            let _ = std::fs::remove_file(&disk.path);
        }
    }
}

/// Creates a socket under a free name. Launchers of several PID namespaces may have the same
/// process id.
fn listen(directory: &Path, handle: u16) -> anyhow::Result<(PathBuf, UnixListener)> {
    /// Maximum number of launchers with the same process id.
    const NAMES_MAX: u32 = 1000;
    let own = format!("{PREFIX}{}", std::process::id());
    for number in 0..NAMES_MAX {
        let namesake = if number == 0 { String::new() } else { format!(".{number}") };
        let path = directory.join(format!("{own}{namesake}-{handle}"));
        match UnixListener::bind(&path) {
            Ok(socket) => return Ok((path, socket)),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) => {
                return Err(error).with_context(|| format!("making the socket {}", path.display()));
            }
        }
    }
    bail!("{}: too many sockets {own}", directory.display())
}

/// Removes the sockets of launchers that were killed, which have no listener.
fn sweep(directory: &RuntimeDir) {
    let Ok(entries) = std::fs::read_dir(directory.path()) else { return };
    for entry in entries.flatten() {
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        let refused = is_refused(&entry.path());
        if refused {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Returns `true` if no process listens at the socket. Does not block on a listener with a full
/// queue.
fn is_refused(path: &Path) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let connected = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .and_then(|socket| rustix::net::connect(&socket, &SocketAddrUnix::new(path)?));
    connected == Err(Errno::CONNREFUSED)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use ringfence_sys::descriptors::testing::assert_descriptors_are_refused;

    use super::super::report::Loudness;
    use super::*;

    #[test]
    fn descriptor_to_the_socket_of_a_disk_is_refused() {
        let outer = tempfile::tempdir().unwrap();
        let directory = RuntimeDir::open_at(outer.path().join("r")).unwrap();
        let image = outer.path().join("image");
        std::fs::write(&image, [0; 4096]).unwrap();
        let spec = image.display().to_string().parse().unwrap();
        let disks = GuestDisks::open(&[spec], &directory, Reporter::new(Loudness::Quiet)).unwrap();
        assert_descriptors_are_refused(UnixStream::connect(&disks.list[0].path).unwrap());
    }

    #[test]
    fn socket_name_in_use_gets_a_number() {
        let directory = tempfile::tempdir().unwrap();
        let (first, _listener) = listen(directory.path(), 3).unwrap();
        let (second, _other) = listen(directory.path(), 3).unwrap();
        assert_ne!(first, second);
        assert!(second.to_string_lossy().ends_with(".1-3"), "{}", second.display());
    }

    #[test]
    fn sweep_removes_sockets_without_a_listener_alone() {
        let outer = tempfile::tempdir().unwrap();
        let directory = RuntimeDir::open_at(outer.path().join("r")).unwrap();
        let (kept, _listener) = listen(directory.path(), 0).unwrap();
        let (stale, listener) = listen(directory.path(), 1).unwrap();
        drop(listener);
        sweep(&directory);
        assert!(kept.exists() && !stale.exists());
    }
}
