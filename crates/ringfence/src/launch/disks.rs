//! A guest's disks, as the launcher prepares them.
//!
//! It is the launcher that may open files: it opens and locks each, finds out about it, hands it to
//! the driver domain and keeps nothing of it, so that the lock ends with the driver domain's last
//! I/O. It also makes the socket at which the frontend serves the disk, in the runtime directory,
//! which is the user's alone.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, anyhow, bail, ensure};
use ringfence_block::blkback::Mode;
use ringfence_block::storage::file::OpenFile;

use super::report::printable;
use super::runtime_dir::RuntimeDir;
use crate::disk::{DISKS_MAX, DiskSpec, variable};
use crate::switchboard::{DiskFrontend, DiskRequest, FromDriver, ToDriver};
use crate::sys::channel::Channel;

/// The driver domain only adds a device.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the names of the sockets begin with.
const PREFIX: &str = "disk-";

/// A disk that was opened.
struct Prepared {
    request: DiskRequest,
    file: Option<OwnedFd>,
    socket: Option<OwnedFd>,
    path: PathBuf,
    persistent: bool,
}

/// The disks of one guest. Their sockets go when this does.
pub(super) struct Disks(Vec<Prepared>);

impl Disks {
    /// Opens and locks the files, and makes the sockets.
    pub(super) fn open(specs: &[DiskSpec], directory: &RuntimeDir) -> anyhow::Result<Disks> {
        ensure!(specs.len() <= DISKS_MAX, "a guest has at most {DISKS_MAX} disks");
        if !specs.is_empty() {
            sweep(directory);
        }
        let mut disks = Disks(vec![]);
        for (spec, handle) in specs.iter().zip(0u16..) {
            // The message has the reason in it already.
            let opened = OpenFile::open(&spec.path, &spec.options);
            let OpenFile { file, facts } = opened.map_err(|error| anyhow!("{error}"))?;
            let name = format!("{PREFIX}{}-{handle}", std::process::id());
            let path = directory.path().join(name);
            let socket = UnixListener::bind(&path)
                .with_context(|| format!("making the socket {}", path.display()))?;
            disks.0.push(Prepared {
                request: DiskRequest {
                    handle,
                    mode: spec.mode.name().to_owned(),
                    facts,
                    options: spec.options.clone(),
                },
                file: Some(file),
                socket: Some(socket.into()),
                path,
                persistent: spec.mode == Mode::Persistent,
            });
        }
        Ok(disks)
    }

    /// Hands the files to the driver domain.
    pub(super) fn attach(&mut self, lease: &Channel) -> anyhow::Result<()> {
        for disk in &mut self.0 {
            let Some(file) = disk.file.take() else { continue };
            lease.send(&ToDriver::Disk(Box::new(disk.request.clone())), &[file.as_fd()])?;
            match lease.receive_within(PATIENCE)?.0 {
                FromDriver::DiskAdded => {}
                FromDriver::Refused(why) => bail!("--disk: {}", printable(&why)),
                other => bail!("the driver domain answered {other:?}"),
            }
        }
        Ok(())
    }

    /// What the frontend is to do with each.
    pub(super) fn orders(&self) -> Vec<DiskFrontend> {
        self.0.iter().map(|disk| DiskFrontend { persistent: disk.persistent }).collect()
    }

    /// The sockets, for the frontend alone.
    pub(super) fn take_sockets(&mut self) -> Vec<OwnedFd> {
        self.0.iter_mut().filter_map(|disk| disk.socket.take()).collect()
    }

    /// By what variables the command finds them.
    pub(super) fn environment(&self) -> Vec<(String, String)> {
        let paths = self.0.iter().map(|disk| disk.path.display().to_string());
        paths.enumerate().map(|(number, path)| (variable(number), path)).collect()
    }
}

impl Drop for Disks {
    fn drop(&mut self) {
        for disk in &self.0 {
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
