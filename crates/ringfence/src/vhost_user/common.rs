//! Sockets and files of the sessions for virtual machines.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use ringfence_hostnet::socket_file::{SocketFile, listen_at};
use ringfence_vhost_user::device::LOG_FILE_MAX;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Maximum wait for a socket at which another process listens.
pub(super) const LISTEN_TIMEOUT: Duration = Duration::from_secs(2);

/// Creates the socket. The process of a session that was killed holds it for a moment.
pub(super) fn listen(path: &Path) -> io::Result<(OwnedFd, SocketFile)> {
    let until = Instant::now() + LISTEN_TIMEOUT;
    loop {
        match listen_at(path, SocketType::STREAM) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(20));
            }
            listening => return listening,
        }
    }
}

pub(super) fn say(text: impl std::fmt::Display) {
    eprintln!("ringfence: {text}");
}

/// Connects to a socket without waiting for a place in its queue.
pub(super) fn dial(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Creates a file for an in-flight log. A hypervisor that has it cannot shrink it.
pub(super) fn log_file() -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("ringfence-inflight", flags)?;
    rustix::fs::ftruncate(&file, LOG_FILE_MAX)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file)
}
