//! What the daemon says of itself, and the socket at which it does.
//!
//! The socket has sequenced packets of JSON, like those between Ringfence's other processes. A client
//! asks once ([`ToServe`]) and reads until [`FromServe::End`]; a packet is bounded, so each device has
//! one of its own. An answer is made at once and sent by a thread of its own: whoever asks and does
//! not read holds nobody up.

// #syscall daemon accept4: who asks for the status
// #syscall daemon unlinkat: the socket is taken away
// #syscall daemon unlink@x86_64: the socket is taken away
// #syscall daemon setsockopt 1=SOL_SOCKET 2=20: SO_RCVTIMEO: a client that is slow
// #syscall daemon setsockopt 1=SOL_SOCKET 2=21: SO_SNDTIMEO: a client that is slow
// #syscall daemon setsockopt 1=SOL_SOCKET 2=66: SO_RCVTIMEO after 2038: a client that is slow
// #syscall daemon setsockopt 1=SOL_SOCKET 2=67: SO_SNDTIMEO after 2038: a client that is slow

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ringfence_sys::descriptors::refuse_descriptors;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};

use ringfence_sandbox::channel::{Channel, ChannelError};

/// How long a client may take to ask, and the kernel to take the answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Clients answered at a time; more wait in the socket's queue.
const CLIENTS_MAX: usize = 8;
/// Clients that wait.
const BACKLOG: i32 = 16;

/// Counters by name; what is zero may be left out.
pub type Counts = BTreeMap<String, u64>;

/// The daemon at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The daemon itself.
    pub daemon: DaemonStatus,
    /// Interfaces of guests, by domain and number.
    pub vifs: Vec<VifStatus>,
    /// Disks of guests, by domain and number.
    pub disks: Vec<VbdStatus>,
}

/// The daemon itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonStatus {
    /// Its version.
    pub version: String,
    /// `xen`, or `local`.
    pub platform: String,
    /// The domain it runs in.
    pub domain: u16,
    /// Its process.
    pub pid: u32,
    /// Seconds since it began.
    pub uptime_seconds: u64,
    /// Grant operations, system calls and the like of all data paths.
    pub path: Counts,
    /// What ports that are gone had counted.
    pub gone_ports: Counts,
    /// Rules broken by devices that are gone.
    pub gone_rules: Counts,
    /// Interfaces that were taken over from the daemon before this one.
    pub adopted: u64,
    /// What is to be said of all disks.
    #[serde(default)]
    pub disks: DiskTotals,
    /// Addresses that the switch knows, where there is a switch.
    pub switch_addresses: Option<u64>,
    /// The host's leg on the switch.
    pub host_interface: Option<HostStatus>,
}

/// The host's leg on the switch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostStatus {
    /// The interface.
    pub name: String,
    /// Its port's counters.
    pub counters: Counts,
}

/// One interface of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VifStatus {
    /// As operators know it: `vif5.0`.
    pub name: String,
    /// The guest's domain.
    pub domain: u16,
    /// The guest's name, where the store tells.
    pub domain_name: Option<String>,
    /// Which of its interfaces.
    pub handle: u32,
    /// Its Ethernet address.
    pub mac: Option<String>,
    /// Octets behind the Ethernet header.
    pub mtu: u16,
    /// What it is attached to.
    pub attachment: Attachment,
    /// This side's xenbus state, as its name.
    pub backend_state: String,
    /// The guest's.
    pub frontend_state: String,
    /// What the toolstack's script said.
    pub hotplug_status: Option<String>,
    /// Frames can flow.
    pub connected: bool,
    /// It was taken over from the daemon before this one.
    pub adopted: bool,
    /// How its pages are reached.
    pub mode: String,
    /// What the guest takes unfinished.
    pub frontend_takes: Option<String>,
    /// What this side takes unfinished.
    pub backend_takes: Option<String>,
    /// Why it is not connected, where this side is the reason.
    pub problem: Option<String>,
    /// Queues in use.
    pub queue_count: u32,
    /// Pages of the guest's that are kept mapped for it.
    pub staged_pages: u32,
    /// What was counted, over all queues.
    pub queues: Vec<QueueStatus>,
    /// Of the TAP interface's port, where there is one.
    pub tap: Option<Counts>,
    /// Rules that the guest broke.
    pub rules: Counts,
}

impl VifStatus {
    /// One of its counters, over all queues.
    pub fn sum(&self, counter: &str) -> u64 {
        self.queues.iter().filter_map(|queue| queue.counters.get(counter)).sum()
    }

    /// Whether the guest counts as one that takes no frames.
    pub fn is_stalled(&self) -> bool {
        self.sum("stalls") > self.sum("stall_ends")
    }
}

/// What a guest's interface is attached to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Attachment {
    /// The daemon's switch.
    #[default]
    Switch,
    /// A TAP interface of the host.
    Tap {
        /// Its name.
        interface: String,
        /// The bridge it is on.
        bridge: Option<String>,
    },
}

/// One queue of an interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueStatus {
    /// Its port's counters: `rx` is what came from the guest, `tx` what went to it.
    pub counters: Counts,
}

/// What is to be said of all disks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskTotals {
    /// Disks that were taken over from the daemon before this one.
    pub adopted: u64,
    /// What rings that are gone had counted.
    pub gone: Counts,
    /// Rules broken by disks that are gone.
    pub gone_rules: Counts,
    /// Disks that are gone but for requests that their storage has not finished.
    pub finishing: u64,
}

/// One disk of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VbdStatus {
    /// `vbd5.51712`.
    pub name: String,
    /// The guest's domain.
    pub domain: u16,
    /// The guest's name, where the store tells.
    pub domain_name: Option<String>,
    /// Which of its disks, as its drivers count.
    pub handle: u32,
    /// Which, as the guest's configuration says: `xvda`.
    pub vdev: Option<String>,
    /// Where its bytes are.
    pub storage: Option<String>,
    /// How many there are.
    pub bytes: Option<u64>,
    /// Bytes of a sector.
    pub sector_size: Option<u32>,
    /// The guest cannot write.
    pub read_only: bool,
    /// This side's xenbus state, as its name.
    pub backend_state: String,
    /// The guest's.
    pub frontend_state: String,
    /// What the toolstack's script said.
    pub hotplug_status: Option<String>,
    /// Requests can flow.
    pub connected: bool,
    /// It was taken over from the daemon before this one.
    pub adopted: bool,
    /// How its pages are to be reached.
    pub mode: String,
    /// The guest uses the same pages again, and they stay mapped.
    pub persistent: bool,
    /// Pages of each ring.
    pub ring_pages: Option<u32>,
    /// The guest's layout of requests.
    pub protocol: Option<String>,
    /// Why it is not connected, where this side is the reason.
    pub problem: Option<String>,
    /// One for each queue.
    pub queues: Vec<QueueStatus>,
    /// Rules that the guest broke.
    pub rules: Counts,
}

/// What a client asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToServe {
    /// The state of everything.
    Status,
}

/// What it is told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromServe {
    /// The daemon; first.
    Daemon(Box<DaemonStatus>),
    /// One interface.
    Vif(Box<VifStatus>),
    /// One disk.
    Vbd(Box<VbdStatus>),
    /// That was all.
    End,
}

impl Snapshot {
    /// The packets that tell it.
    fn into_packets(self) -> Vec<FromServe> {
        let first = FromServe::Daemon(Box::new(self.daemon));
        let vifs = self.vifs.into_iter().map(|vif| FromServe::Vif(Box::new(vif)));
        let disks = self.disks.into_iter().map(|disk| FromServe::Vbd(Box::new(disk)));
        std::iter::once(first).chain(vifs).chain(disks).chain([FromServe::End]).collect()
    }
}

/// The daemon's end of the socket.
#[derive(Debug)]
pub(super) struct StatusSocket {
    listener: OwnedFd,
    path: PathBuf,
    /// Each answer that is being given holds one.
    seats: Arc<()>,
}

impl StatusSocket {
    /// Listens at `path`, which belongs to this daemon: whatever is there is of one before it.
    pub(super) fn listen(path: &Path) -> io::Result<StatusSocket> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        // What is accepted later takes none, either.
        refuse_descriptors(&listener)?;
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        rustix::net::bind(&listener, &SocketAddrUnix::new(path)?)?;
        // What is told about guests is for the administrator.
        rustix::fs::chmod(path, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)?;
        rustix::net::listen(&listener, BACKLOG)?;
        Ok(StatusSocket { listener, path: path.to_owned(), seats: Arc::default() })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Answers those who wait. `snapshot` is called at most once, and only if somebody does.
    pub(super) fn answer(&self, snapshot: impl FnOnce() -> Snapshot) {
        let mut waiting = Vec::new();
        while self.answering() + waiting.len() < CLIENTS_MAX {
            match rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC) {
                Ok(socket) => waiting.push(Channel::from_fd(socket)),
                Err(Errno::INTR) => {}
                Err(_) => break,
            }
        }
        if waiting.is_empty() {
            return;
        }
        let snapshot = Arc::new(snapshot());
        for channel in waiting {
            let (snapshot, seat) = (Arc::clone(&snapshot), Arc::clone(&self.seats));
            let answer = move || {
                // A client that went away is told nothing.
                let _ = answer_one(&channel, &snapshot);
                drop(seat);
            };
            let thread = std::thread::Builder::new().name("status".to_owned()).spawn(answer);
            if let Err(error) = thread {
                tracing::warn!(%error, "a request for the status was not answered");
            }
        }
    }

    /// Clients that are being answered.
    fn answering(&self) -> usize {
        Arc::strong_count(&self.seats) - 1
    }

    /// Whether further clients are heard now; else the socket is not to be waited for.
    pub(super) fn has_room(&self) -> bool {
        self.answering() < CLIENTS_MAX
    }
}

impl Drop for StatusSocket {
    fn drop(&mut self) {
        // Somebody may have removed it before.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn answer_one(channel: &Channel, snapshot: &Snapshot) -> Result<(), ChannelError> {
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    set_socket_timeout(channel, Timeout::Send, Some(PATIENCE)).map_err(ChannelError::from)?;
    let (ToServe::Status, _) = channel.receive_within(PATIENCE)?;
    let packets = snapshot.clone().into_packets();
    packets.iter().try_for_each(|packet| channel.send(packet, &[]))
}

/// The state of the daemon that listens at `path`.
///
/// # Errors
///
/// When there is none, it is somebody else's, or it does not answer.
pub fn ask(path: &Path) -> Result<Snapshot, ChannelError> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
        .map_err(|errno| ChannelError::System(errno.into()))?;
    let channel = Channel::from_fd(socket);
    channel.send(&ToServe::Status, &[])?;
    let mut snapshot = Snapshot::default();
    loop {
        match channel.receive_within(PATIENCE)?.0 {
            FromServe::Daemon(daemon) => snapshot.daemon = *daemon,
            FromServe::Vif(vif) => snapshot.vifs.push(*vif),
            FromServe::Vbd(disk) => snapshot.disks.push(*disk),
            FromServe::End => return Ok(snapshot),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(vifs: u16) -> Snapshot {
        let vif = |domain| VifStatus {
            name: format!("vif{domain}.0"),
            domain,
            queues: vec![QueueStatus { counters: Counts::from([("rx_frames".to_owned(), 7)]) }],
            ..VifStatus::default()
        };
        let disk = |domain| VbdStatus {
            name: format!("vbd{domain}.51712"),
            domain,
            ..VbdStatus::default()
        };
        Snapshot {
            vifs: (1..=vifs).map(vif).collect(),
            disks: (1..=vifs).map(disk).collect(),
            ..Snapshot::default()
        }
    }

    fn path(dir: &tempfile::TempDir) -> PathBuf {
        dir.path().join("s.sock")
    }

    #[test]
    fn what_is_asked_is_told_whole() {
        let dir = tempfile::tempdir().unwrap();
        // One that was left over is in nobody's way.
        std::fs::write(path(&dir), "").unwrap();
        let socket = StatusSocket::listen(&path(&dir)).unwrap();
        let asked = path(&dir);
        let client = std::thread::spawn(move || ask(&asked).unwrap());
        while !client.is_finished() {
            socket.answer(|| snapshot(300));
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(client.join().unwrap(), snapshot(300));
        drop(socket);
        assert!(!path(&dir).exists());
    }

    #[test]
    fn clients_that_do_not_ask_are_bounded_and_keep_nobody_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let socket = StatusSocket::listen(&path(&dir)).unwrap();
        let silent: Vec<_> = (0..CLIENTS_MAX + 4)
            .map(|_| {
                let fd = rustix::net::socket_with(
                    AddressFamily::UNIX,
                    SocketType::SEQPACKET,
                    SocketFlags::CLOEXEC,
                    None,
                )
                .unwrap();
                rustix::net::connect(&fd, &SocketAddrUnix::new(path(&dir)).unwrap()).unwrap();
                fd
            })
            .collect();
        let began = std::time::Instant::now();
        socket.answer(|| snapshot(1));
        assert!(!socket.has_room());
        socket.answer(|| unreachable!("no room"));
        assert!(began.elapsed() < PATIENCE);
        drop(silent);
        while !socket.has_room() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
