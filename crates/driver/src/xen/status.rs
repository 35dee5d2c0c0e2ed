//! Status of the daemon, and the socket that reports it.
//!
//! The socket carries sequenced packets of JSON, as the channels between Ringfence's other processes do.
//! A client sends one [`ToServe`] and reads packets until [`FromServe::End`]. The size of a packet is
//! limited, so each device has a packet of its own. An order to change a disk has one packet as its answer.
//!
//! The control thread takes the snapshot. A thread for each client sends it, so that a client that does
//! not read delays nobody else. At most `CLIENTS_MAX` clients are served at a time.

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
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use ringfence_sys::descriptors::refuse_descriptors;
use ringfence_sys::mailbox::MailSender;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};

use ringfence_sandbox::channel::{Channel, ChannelError};

/// Time that a client has to send its request, and to take each packet of the answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that the control thread has to change a disk: until its storage has completed the requests in flight.
const ORDER_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum number of clients served at a time. More clients wait in the socket's queue.
const CLIENTS_MAX: usize = 8;
/// Maximum number of clients in the socket's queue.
const BACKLOG: i32 = 16;

/// Name of the kernel's counter of frames that found a TAP's queue full, beside the counters of the TAP's port.
pub const QUEUE_FULL: &str = "drop_queue_full";

/// Counters by name. Counters that are zero may be missing.
pub type Counts = BTreeMap<String, u64>;

/// State of the daemon and of its devices at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    pub daemon: DaemonStatus,
    /// Interfaces of guests, by domain and number.
    pub vifs: Vec<VifStatus>,
    pub disks: Vec<VbdStatus>,
}

/// State of the daemon itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonStatus {
    pub version: String,
    /// `xen` or `local`.
    pub platform: String,
    /// Domain that the daemon runs in.
    pub domain: u16,
    pub pid: u32,
    /// Seconds since the daemon started.
    pub uptime_seconds: u64,
    /// Grant operations, system calls and similar costs of all datapaths.
    pub path: Counts,
    /// Counters of ports that were closed.
    pub gone_ports: Counts,
    /// Rule violations of devices that are gone.
    pub gone_rules: Counts,
    /// Interfaces that were taken over from an earlier daemon.
    pub adopted: u64,
    /// Sums over all disks.
    #[serde(default)]
    pub disks: DiskTotals,
    /// Addresses in the forwarding database, if there is a switch.
    pub switch_addresses: Option<u64>,
    pub host_interface: Option<HostStatus>,
}

/// Host's interface on the switch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostStatus {
    pub name: String,
    pub counters: Counts,
}

/// State of one interface of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VifStatus {
    /// Name that operators know: `vif5.0`.
    pub name: String,
    pub domain: u16,
    /// Name of the guest, if the store shows it.
    pub domain_name: Option<String>,
    /// Number of the interface within the guest.
    pub handle: u32,
    pub mac: Option<String>,
    /// Longest packet behind the Ethernet header, in bytes.
    pub mtu: u16,
    pub attachment: Attachment,
    /// Name of the backend's xenbus state.
    pub backend_state: String,
    /// Name of the frontend's xenbus state.
    pub frontend_state: String,
    /// Value that the toolstack's script wrote.
    pub hotplug_status: Option<String>,
    /// Set if frames can flow.
    pub connected: bool,
    /// Set if the interface was taken over from an earlier daemon.
    pub adopted: bool,
    /// Access mode of the interface's pages.
    pub mode: String,
    /// Offloads that the guest accepts.
    pub frontend_takes: Option<String>,
    /// Offloads that this side accepts.
    pub backend_takes: Option<String>,
    /// Reason on this side for which the interface is not connected.
    pub problem: Option<String>,
    /// Number of queues in use.
    pub queue_count: u32,
    /// Number of the guest's pages that are staged.
    pub staged_pages: u32,
    /// Counters of the port, summed over all queues.
    pub queues: Vec<QueueStatus>,
    /// Numbers of the port that rise and fall, over all queues.
    #[serde(default)]
    pub levels: Counts,
    /// Counters of the TAP's port, if there is a TAP.
    pub tap: Option<Counts>,
    /// Rule violations of the guest.
    pub rules: Counts,
}

impl VifStatus {
    /// Returns the sum of one counter over all queues.
    pub fn sum(&self, counter: &str) -> u64 {
        self.queues.iter().filter_map(|queue| queue.counters.get(counter)).sum()
    }

    /// Returns the number of frames for the guest that the kernel dropped because the queue of the TAP was full.
    pub fn queue_drops(&self) -> u64 {
        self.tap.as_ref().and_then(|counts| counts.get(QUEUE_FULL)).copied().unwrap_or(0)
    }

    /// Returns `true` if the guest counts as stalled: it takes no frames.
    pub fn is_stalled(&self) -> bool {
        self.sum("stalls") > self.sum("stall_ends")
    }
}

/// Attachment of a guest's interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Attachment {
    #[default]
    Switch,
    Tap {
        interface: String,
        bridge: Option<String>,
    },
}

/// Counters of one queue of a vif or vbd, in the status report.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueStatus {
    /// `rx` counts what came from the guest, `tx` what went to the guest.
    pub counters: Counts,
}

/// Counters of the daemon's disks that no present disk has: of those taken over, gone or finishing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskTotals {
    /// Disks that were taken over from an earlier daemon.
    pub adopted: u64,
    /// Counters of rings that were closed.
    pub gone: Counts,
    /// Rule violations of disks that are gone.
    pub gone_rules: Counts,
    /// Disks that were removed and whose storage still has requests.
    pub finishing: u64,
}

/// State of one disk of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VbdStatus {
    /// Name that operators know: `vbd5.51712`.
    pub name: String,
    pub domain: u16,
    /// Name of the guest, if the store shows it.
    pub domain_name: Option<String>,
    /// Number of the disk within the guest, as its driver counts.
    pub handle: u32,
    /// Name of the disk in the guest's configuration: `xvda`.
    pub vdev: Option<String>,
    /// Path or address of the storage.
    pub storage: Option<String>,
    /// Format of a file or device: `raw` or `qcow2`.
    #[serde(default)]
    pub format: Option<String>,
    /// Size of the disk in bytes.
    pub bytes: Option<u64>,
    /// Size of a sector in bytes.
    pub sector_size: Option<u32>,
    /// Set if the guest cannot write.
    pub read_only: bool,
    /// Name of the backend's xenbus state.
    pub backend_state: String,
    /// Name of the frontend's xenbus state.
    pub frontend_state: String,
    /// Value that the toolstack's script wrote.
    pub hotplug_status: Option<String>,
    /// Set if requests can flow.
    pub connected: bool,
    /// Set if the disk was taken over from an earlier daemon.
    pub adopted: bool,
    /// Access mode that the configuration asks for.
    pub mode: String,
    /// Set if the guest grants the same pages again and they stay mapped.
    pub persistent: bool,
    pub ring_pages: Option<u32>,
    /// Layout of the guest's requests.
    pub protocol: Option<String>,
    /// Engines that execute the I/O, for storage that has several: `io_uring`, `threads`.
    #[serde(default)]
    pub engine: Option<String>,
    /// Reason on this side for which the disk is not connected.
    pub problem: Option<String>,
    /// Counters of each ring.
    pub queues: Vec<QueueStatus>,
    /// Numbers of the disk that rise and fall, over all rings.
    #[serde(default)]
    pub levels: Counts,
    /// Rule violations of the guest.
    pub rules: Counts,
}

/// Request at the daemon's status socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToServe {
    Status,
    /// Changes a disk in use. The only answer is [`FromServe::DiskChanged`].
    Disk(DiskOrder),
}

/// Order to change a disk in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskOrder {
    pub domain: u16,
    /// Number of the disk within the guest, as its driver counts.
    pub handle: u32,
    pub change: DiskChange,
}

/// Change of a disk in use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DiskChange {
    /// The image at this path, which was made for it, takes the place of the disk, which is its backing file.
    Snapshot {
        path: PathBuf,
        /// Backing files may lie in other folders.
        any_folder: bool,
    },
    /// The storage is enlarged to this size in bytes, or has been enlarged.
    Resize { bytes: Option<u64> },
}

/// Order, and the sender of its outcome: the size of the disk in bytes, or a text for the user.
pub(super) type OrderedChange = (DiskOrder, Sender<Result<u64, String>>);

/// Packet of the answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromServe {
    /// First packet.
    Daemon(Box<DaemonStatus>),
    Vif(Box<VifStatus>),
    Vbd(Box<VbdStatus>),
    /// Last packet.
    End,
    /// Size of a changed disk in bytes, or the reason for which it is as it was.
    DiskChanged(Result<u64, String>),
}

impl Snapshot {
    /// Splits the snapshot into packets.
    fn into_packets(self) -> Vec<FromServe> {
        let first = FromServe::Daemon(Box::new(self.daemon));
        let vifs = self.vifs.into_iter().map(|vif| FromServe::Vif(Box::new(vif)));
        let disks = self.disks.into_iter().map(|disk| FromServe::Vbd(Box::new(disk)));
        std::iter::once(first).chain(vifs).chain(disks).chain([FromServe::End]).collect()
    }
}

/// Daemon's end of the status socket.
#[derive(Debug)]
pub(super) struct StatusSocket {
    listener: OwnedFd,
    path: PathBuf,
    /// Token whose clones count the answers that are being sent.
    answers: Arc<()>,
    /// Recipient of orders.
    orders: MailSender<OrderedChange>,
}

impl StatusSocket {
    /// Listens at `path`, and passes orders to `orders`. Replaces the socket that an earlier daemon left there.
    pub(super) fn listen(
        path: &Path,
        orders: MailSender<OrderedChange>,
    ) -> io::Result<StatusSocket> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        // Accepted sockets inherit the option.
        refuse_descriptors(&listener)?;
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        rustix::net::bind(&listener, &SocketAddrUnix::new(path)?)?;
        // The status of guests is only for the administrator.
        rustix::fs::chmod(path, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)?;
        rustix::net::listen(&listener, BACKLOG)?;
        Ok(StatusSocket { listener, path: path.to_owned(), answers: Arc::default(), orders })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    /// Accepts clients and starts an answer for each. Calls `snapshot` at most once, and only for a client.
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
            let (snapshot, token) = (Arc::clone(&snapshot), Arc::clone(&self.answers));
            let orders = self.orders.clone();
            let answer = move || {
                // The send fails only for a client that has disconnected.
                let _ = answer_one(&channel, &snapshot, &orders);
                drop(token);
            };
            let thread = std::thread::Builder::new().name("status".to_owned()).spawn(answer);
            if let Err(error) = thread {
                tracing::warn!(%error, "a request for the status was not answered");
            }
        }
    }

    /// Returns the number of clients that are being served.
    fn answering(&self) -> usize {
        Arc::strong_count(&self.answers) - 1
    }

    /// Returns `true` if another client can be accepted. Otherwise the caller must not wait for the socket.
    pub(super) fn has_room(&self) -> bool {
        self.answering() < CLIENTS_MAX
    }
}

impl Drop for StatusSocket {
    fn drop(&mut self) {
        // The file may have been removed by another process.
        let _ = std::fs::remove_file(&self.path);
    }
}

fn answer_one(
    channel: &Channel,
    snapshot: &Snapshot,
    orders: &MailSender<OrderedChange>,
) -> Result<(), ChannelError> {
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    set_socket_timeout(channel, Timeout::Send, Some(CLIENT_TIMEOUT)).map_err(ChannelError::from)?;
    match channel.receive_within(CLIENT_TIMEOUT)?.0 {
        ToServe::Status => {
            let packets = snapshot.clone().into_packets();
            packets.iter().try_for_each(|packet| channel.send(packet, &[]))
        }
        ToServe::Disk(order) => {
            channel.send(&FromServe::DiskChanged(carry_out(order, orders)), &[])
        }
    }
}

/// Passes an order to the control thread, and returns its outcome.
fn carry_out(order: DiskOrder, orders: &MailSender<OrderedChange>) -> Result<u64, String> {
    let (answer, answered) = channel();
    orders.send((order, answer)).map_err(|_| "the daemon ends".to_owned())?;
    answered.recv_timeout(ORDER_TIMEOUT).map_err(|error| match error {
        RecvTimeoutError::Timeout => format!(
            "the storage has not completed the disk's requests within {} seconds; the change follows when it has",
            ORDER_TIMEOUT.as_secs()
        ),
        RecvTimeoutError::Disconnected => "the disk was removed".to_owned(),
    })?
}

/// Connects to the daemon that listens at `path`.
fn connect(path: &Path) -> Result<Channel, ChannelError> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
        .map_err(|errno| ChannelError::System(errno.into()))?;
    Ok(Channel::from_fd(socket))
}

/// Orders the daemon that listens at `path` to change a disk. Returns its size in bytes, or the reason for which the disk
/// was not changed.
///
/// # Errors
///
/// Returns an error if there is no daemon, if it belongs to another user, or if it does not answer. The disk may have been
/// changed then.
pub fn change_disk(path: &Path, order: DiskOrder) -> Result<Result<u64, String>, ChannelError> {
    let channel = connect(path)?;
    channel.send(&ToServe::Disk(order), &[])?;
    match channel.receive_within(ORDER_TIMEOUT + CLIENT_TIMEOUT)?.0 {
        FromServe::DiskChanged(outcome) => Ok(outcome),
        _ => Err(ChannelError::Closed),
    }
}

/// Asks the daemon that listens at `path` for its state.
///
/// # Errors
///
/// Returns an error if there is no daemon, if it belongs to another user, or if it does not answer.
pub fn ask(path: &Path) -> Result<Snapshot, ChannelError> {
    let channel = connect(path)?;
    channel.send(&ToServe::Status, &[])?;
    let mut snapshot = Snapshot::default();
    loop {
        match channel.receive_within(CLIENT_TIMEOUT)?.0 {
            FromServe::Daemon(daemon) => snapshot.daemon = *daemon,
            FromServe::Vif(vif) => snapshot.vifs.push(*vif),
            FromServe::Vbd(disk) => snapshot.disks.push(*disk),
            FromServe::End => return Ok(snapshot),
            FromServe::DiskChanged(_) => return Err(ChannelError::Closed),
        }
    }
}

#[cfg(test)]
mod tests {
    use ringfence_sys::descriptors::testing::assert_descriptors_are_refused;
    use ringfence_sys::mailbox::mailbox;

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

    fn listen(dir: &tempfile::TempDir) -> StatusSocket {
        StatusSocket::listen(&path(dir), mailbox().unwrap().0).unwrap()
    }

    fn connected(dir: &tempfile::TempDir) -> OwnedFd {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let fd = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::connect(&fd, &SocketAddrUnix::new(path(dir)).unwrap()).unwrap();
        fd
    }

    #[test]
    fn descriptor_to_the_status_socket_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let _socket = listen(&dir);
        assert_descriptors_are_refused(connected(&dir));
    }

    #[test]
    fn client_receives_every_device_of_snapshot() {
        let dir = tempfile::tempdir().unwrap();
        // A file of an earlier daemon is replaced.
        std::fs::write(path(&dir), "").unwrap();
        let socket = listen(&dir);
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
    fn silent_clients_are_limited_and_delay_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let socket = listen(&dir);
        let silent: Vec<_> = (0..CLIENTS_MAX + 4).map(|_| connected(&dir)).collect();
        let began = std::time::Instant::now();
        socket.answer(|| snapshot(1));
        assert!(!socket.has_room());
        socket.answer(|| unreachable!("no room"));
        assert!(began.elapsed() < CLIENT_TIMEOUT);
        drop(silent);
        while !socket.has_room() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
