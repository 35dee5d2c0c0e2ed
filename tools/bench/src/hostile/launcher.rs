//! Launcher's role: registers guests with the driver domain, adds disks, and reads counters.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use ringfence_block::storage::file::{CacheMode, FileOptions, OpenFile};
use ringfence_net::features::OffloadKeys;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use super::orders::{DiskSpec, Entrance, GuestIdentity};
use ringfence_driver::switchboard::{
    AttachRequest, DiskRequest, DriverStats, FromDriver, Medium, ToDriver, VERSION,
};
use ringfence_sandbox::channel::{Channel, expect_fds};

/// Time limit for an answer of the driver domain.
const PATIENCE: Duration = Duration::from_secs(10);
/// Connections that may wait for `accept`.
const BACKLOG: i32 = 64;

fn socket() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Directory of the driver domain's socket, removed on drop.
pub(crate) struct Rendezvous {
    directory: PathBuf,
}

impl Rendezvous {
    /// Creates a listening socket in a directory that no other user can enter.
    pub(crate) fn new(number: usize) -> anyhow::Result<(Rendezvous, OwnedFd)> {
        let name = format!("ringfence-hostile-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(name);
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&directory)
            .with_context(|| format!("making {}", directory.display()))?;
        let rendezvous = Rendezvous { directory };
        let listener = socket()?;
        rustix::net::bind(&listener, &SocketAddrUnix::new(rendezvous.path())?)?;
        rustix::net::listen(&listener, BACKLOG)?;
        Ok((rendezvous, listener))
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.join("switch")
    }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        // The directory lies among temporary files; the system removes leftovers.
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Attachment of one guest to the driver domain; ends on drop.
pub(crate) struct Attachment {
    pub(crate) place: GuestIdentity,
    /// Connection of the guest to the hub.
    pub(crate) hub: OwnedFd,
    driver_channel: Channel,
    /// Socket for the guest's name service, unused here.
    _names: OwnedFd,
}

impl Attachment {
    /// Attaches one more guest.
    pub(crate) fn take(entrance: &Entrance) -> anyhow::Result<Attachment> {
        let stream = socket()?;
        rustix::net::connect(&stream, &SocketAddrUnix::new(&entrance.socket)?)
            .context("reaching the driver domain")?;
        let driver_channel = Channel::from_fd(stream);
        ringfence_driver::proof::introduce(&driver_channel)?;
        let request = AttachRequest {
            offloads: OffloadKeys::ALL.to_string(),
            coalesce: true,
            version: VERSION.to_owned(),
            interface: true,
            name: None,
            mac: None,
            addresses: Vec::new(),
            avoid: Vec::new(),
            mtu: entrance.mtu,
            mode: entrance.mode.clone(),
            queues: 1,
            // The packets of the benchmark have an EtherType of their own.
            forwarding: true,
            advertise: false,
            host_leg: false,
        };
        driver_channel.send(&ToDriver::Attach(Box::new(request)), &[])?;
        let (attached, fds) = match driver_channel.receive_within(PATIENCE)? {
            (FromDriver::Attached(attached), fds) => (attached, fds),
            (other, _) => bail!("the driver domain answered {other:?}"),
        };
        let [hub, names] = expect_fds(fds)?;
        let place = GuestIdentity { domain: attached.domain, mac: attached.mac, mtu: entrance.mtu };
        Ok(Attachment { place, hub, driver_channel, _names: names })
    }

    /// Gives the guest its first disk, a file of zeros in memory.
    pub(super) fn add_disk(&self, order: &DiskSpec) -> anyhow::Result<()> {
        use rustix::fs::MemfdFlags;
        let file = rustix::fs::memfd_create("ringfence-disk", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, order.bytes)?;
        let options = FileOptions { cache: CacheMode::WriteBack, ..FileOptions::default() };
        // A second open: the driver domain holds the lock through its own open file description.
        let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let OpenFile { file, facts, mark } = OpenFile::open(&path, &options)?;
        let medium = Medium::File { facts, options };
        let request = DiskRequest { handle: 0, mode: order.mode.clone(), medium };
        let files: Vec<_> = [file].into_iter().chain(mark).collect();
        let fds: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        self.driver_channel.send(&ToDriver::Disk(Box::new(request)), &fds)?;
        match self.driver_channel.receive_within(PATIENCE)?.0 {
            FromDriver::DiskAdded => Ok(()),
            other => bail!("the driver domain answered {other:?}"),
        }
    }

    /// Reads the driver domain's counters. Fails if a device of this guest was closed.
    pub(super) fn stats(&self) -> anyhow::Result<DriverStats> {
        self.driver_channel.send(&ToDriver::Stats, &[])?;
        match self.driver_channel.receive_within(PATIENCE)?.0 {
            FromDriver::Stats(stats) => Ok(*stats),
            FromDriver::DeviceClosed(why) => bail!("the victim's device was closed: {why}"),
            FromDriver::DiskClosed { why, .. } => bail!("the victim's disk was closed: {why}"),
            other => bail!("the driver domain answered {other:?}"),
        }
    }
}
