//! Disks of a guest in its launcher.
//!
//! Only the launcher may open files. It opens and locks each file, reads its properties, and passes
//! the descriptor to the driver domain. It keeps a copy of a disk's own files for later changes (`disk_changes`).
//! The socket at which the frontend exports the disk comes from the guest's init
//! ([`GuestDisks::take_from_guest`]), which makes it where this guest alone has a path to it.
//!
//! The launcher also connects to a disk's NBD server, and connects again when the driver domain
//! requests it. The driver domain cannot choose the server.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{bail, ensure};
use ringfence_nbd::client::NbdConnector;
use ringfence_sandbox::channel::Channel;
use ringfence_sys::numbers::bounded;
use ringfence_sys::prerequisite::NBD;
use rustix::net::SocketAddrUnix;

use super::devices::Device;
use super::options::SwitchChoice;
use super::report::Reporter;
use super::served_file::Storage;
use crate::disk::{DiskSpec, device_variable, dial, uri_of, uri_variable, variable};
use ringfence_block::blkback::BlkbackOptions;
use ringfence_driver::switchboard::{
    DISKS_MAX, DiskFrontend, DiskRequest, FromDriver, Medium, ToDriver,
};
use ringfence_guest::disk_socket_name;
use ringfence_hostnet::text::printable;

/// Maximum length in bytes of the path of a socket (`unix(7)`).
const SOCKET_PATH_MAX: usize = 107;

/// Minimum number of rings of a shared switch whose first guest has a disk.
const SHARED_RINGS: u16 = 16;

/// Time limit for adding a disk.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Disk that has been opened.
struct Prepared {
    /// Request to the driver domain, until it is sent.
    request: Option<DiskRequest>,
    /// Open files, or the connection to the server unless it is made later.
    files: Vec<OwnedFd>,
    /// Listening socket for the frontend, once init has made it.
    socket: Option<OwnedFd>,
    frontend: DiskFrontend,
    /// Storage as it is served now.
    storage: Storage,
}

/// Disks of one guest.
pub(super) struct GuestDisks {
    /// Directory of the sockets in the guest's view, once init has made it.
    directory: Option<OwnedFd>,
    /// Nodes of the disks below /dev.
    devices: Vec<Device>,
    list: Vec<Prepared>,
    /// Connectors by handle, for disks on an NBD server.
    connectors: BTreeMap<u16, NbdConnector>,
}

impl GuestDisks {
    /// Opens and locks the files. The sockets of the disks will be in the directory `sockets` of the guest's view.
    pub(super) fn open(
        specs: &[DiskSpec],
        sockets: &Path,
        reporter: Reporter,
    ) -> anyhow::Result<GuestDisks> {
        ensure!(specs.len() <= DISKS_MAX, "a guest has at most {DISKS_MAX} disks");
        if let Some(last) = specs.len().checked_sub(1) {
            check_socket_path(&sockets.join(disk_socket_name(last)))?;
        }
        let mut disks = GuestDisks {
            directory: None,
            devices: vec![],
            list: vec![],
            connectors: BTreeMap::new(),
        };
        for (spec, handle) in specs.iter().zip(0u16..) {
            let opened = spec.source.open(&|text| reporter.problem(text))?;
            disks.connectors.extend(opened.connector.map(|connector| (handle, connector)));
            let (medium, files) = (opened.medium, opened.files);
            let storage = Storage::of(&spec.source, &medium, &files)?;
            disks.list.push(Prepared {
                request: Some(DiskRequest { handle, mode: spec.mode.name().to_owned(), medium }),
                files,
                socket: None,
                frontend: DiskFrontend::of(spec.mode),
                storage,
            });
        }
        Ok(disks)
    }

    /// Returns the number of rings that a new driver domain makes for disks in files. Other guests of a shared switch may
    /// bring disks later.
    pub(super) fn rings(&self, switch: &SwitchChoice) -> u16 {
        let is_file = |disk: &&Prepared| {
            disk.request
                .as_ref()
                .is_some_and(|request| matches!(request.medium, Medium::File { .. }))
        };
        let files = self.list.iter().filter(is_file).count();
        let own = bounded(files as u64 * u64::from(BlkbackOptions::default().queues), u16::MAX);
        match switch {
            SwitchChoice::Shared(_) if own > 0 => own.max(SHARED_RINGS),
            _ => own,
        }
    }

    /// Returns the storage of a disk.
    pub(super) fn storage_mut(&mut self, number: u16) -> Option<&mut Storage> {
        self.list.get_mut(usize::from(number)).map(|disk| &mut disk.storage)
    }

    /// Returns the paths and addresses of the disks, as they are served now.
    pub(super) fn texts(&self) -> Vec<String> {
        let text = |disk: &Prepared| match &disk.storage {
            Storage::File(served) => served.text.clone(),
            Storage::Server(address) => address.clone(),
        };
        self.list.iter().map(text).collect()
    }

    /// Returns the number of disks.
    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    /// Takes the directory of the sockets, and the socket of each disk, from the descriptors that the guest's init sent
    /// first. Returns the rest. `None` if there are too few.
    pub(super) fn take_from_guest(&mut self, fds: Vec<OwnedFd>) -> Option<Vec<OwnedFd>> {
        let mut fds = fds.into_iter();
        if !self.list.is_empty() {
            self.directory = Some(fds.next()?);
        }
        for disk in &mut self.list {
            disk.socket = Some(fds.next()?);
        }
        Some(fds.collect())
    }

    /// Returns the path of a disk's socket for this process.
    fn socket_path(&self, number: usize) -> Option<PathBuf> {
        let directory = self.directory.as_ref()?.as_raw_fd();
        Some(Path::new("/proc/self/fd").join(directory.to_string()).join(disk_socket_name(number)))
    }

    /// Sends the disks to the driver domain.
    pub(super) fn attach(&mut self, driver_channel: &Channel) -> anyhow::Result<()> {
        for disk in &mut self.list {
            let Some(request) = disk.request.take() else { continue };
            let files = std::mem::take(&mut disk.files);
            let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
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
        if let Some(connector) = self.connectors.get(&handle) {
            dial(connector, driver_channel, move |problem| ToDriver::Dialled { handle, problem });
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
        for number in 0..self.len() {
            let Some(socket) = self.socket_path(number) else { continue };
            match Device::of(&socket) {
                Ok(Some(device)) => {
                    let path = device.path().display().to_string();
                    reporter.step(format_args!("disk {number} is {path}, too"));
                    environment.push((device_variable(number), path));
                    self.devices.push(device);
                }
                Ok(None) => reporter.step(format_args!(
                    "disk {number} has no node below /dev: {}; {}",
                    NBD.permit, NBD.enable
                )),
                Err(error) => {
                    reporter.problem(format_args!("disk {number} has no node below /dev: {error}"))
                }
            }
        }
        environment
    }

    /// Returns the paths of the nodes below /dev.
    pub(super) fn device_paths(&self) -> Vec<PathBuf> {
        self.devices.iter().map(|device| device.path().to_owned()).collect()
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
        let both = |number: usize| {
            let path = directory.join(disk_socket_name(number)).display().to_string();
            [(uri_variable(number), uri_of(&path)), (variable(number), path)]
        };
        (0..self.len()).flat_map(both).collect()
    }
}

/// Refuses a path that no program could connect to.
fn check_socket_path(path: &Path) -> anyhow::Result<()> {
    let is_address = SocketAddrUnix::new(path).is_ok();
    ensure!(
        is_address,
        "--disk: {} has {} bytes, and the path of a socket has at most {SOCKET_PATH_MAX}: set XDG_RUNTIME_DIR \
         to a directory with a shorter path",
        path.display(),
        path.as_os_str().len()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::report::Loudness;
    use super::*;

    #[test]
    fn disk_without_its_socket_from_the_guest_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image");
        std::fs::write(&image, [0; 4096]).unwrap();
        let spec = image.display().to_string().parse().unwrap();
        let mut disks =
            GuestDisks::open(&[spec], directory.path(), Reporter::new(Loudness::Quiet)).unwrap();
        let open = |number| -> Vec<OwnedFd> {
            (0..number).map(|_| std::fs::File::open(&image).unwrap().into()).collect()
        };
        assert!(disks.take_from_guest(open(1)).is_none());
        assert_eq!(disks.take_from_guest(open(5)).map(|rest| rest.len()), Some(3));
        assert_eq!(disks.take_sockets().len(), 1);
    }
}
