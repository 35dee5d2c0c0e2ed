//! Unix sockets at which a process listens, and their files.
//!
//! A socket is created with the user's rights, for the user alone. A file that is in the way is replaced only if it is a
//! socket at which nobody listens any more. [`SocketFile`] removes the file at the end, unless another process has replaced
//! it.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Maximum number of stream connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// The same of connections that keep message boundaries: their servers have one client at a time.
const MESSAGES_BACKLOG: i32 = 4;

/// File of a socket, removed at the end.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl SocketFile {
    /// Takes over the file that this process has just created there.
    fn at(path: &Path) -> io::Result<SocketFile> {
        let found = path.symlink_metadata()?;
        Ok(SocketFile { path: std::path::absolute(path)?, identity: (found.dev(), found.ino()) })
    }

    /// Returns the path at which clients connect.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let found = self.path.symlink_metadata();
        if found.is_ok_and(|found| (found.dev(), found.ino()) == self.identity) {
            // The directory may belong to another user by now; the file then stays.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Creates a non-blocking socket of a type at `path`, to which only the user, and root, can connect. It listens, unless it
/// is for datagrams. Only one thread of the process may run, because the mask of new files is that of all.
///
/// # Errors
///
/// Returns the system's error, and `AddrInUse` if another process listens there.
pub fn listen_at(path: &Path, kind: SocketType) -> io::Result<(OwnedFd, SocketFile)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let made = || rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None);
    let address = SocketAddrUnix::new(path)?;
    // Another kind of file is left alone: binding fails.
    if path.symlink_metadata().is_ok_and(|found| found.file_type().is_socket()) {
        let in_use = |why| io::Error::new(io::ErrorKind::AddrInUse, why);
        match rustix::net::connect(made()?, &address) {
            Ok(()) | Err(Errno::AGAIN) => return Err(in_use("another process listens there")),
            // A datagram socket with a client takes no other one.
            Err(Errno::PERM) => return Err(in_use("it has a client")),
            Err(Errno::CONNREFUSED) => std::fs::remove_file(path)?,
            Err(errno) => return Err(errno.into()),
        }
    }
    let socket = made()?;
    for_user_alone(|| rustix::net::bind(&socket, &address))?;
    match kind {
        SocketType::DGRAM => {}
        SocketType::SEQPACKET => rustix::net::listen(&socket, MESSAGES_BACKLOG)?,
        _ => rustix::net::listen(&socket, BACKLOG)?,
    }
    Ok((socket, SocketFile::at(path)?))
}

/// Creates a non-blocking listening socket to which only the user, and root, can connect. The file stays at the end. Only one
/// thread of the process may run.
///
/// # Errors
///
/// Returns the system's error, and `AddrInUse` if there is a file.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    let listener = for_user_alone(|| UnixListener::bind(path))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Creates a file that only the user, and root, can open.
fn for_user_alone<T>(create: impl FnOnce() -> T) -> T {
    let mask = rustix::process::umask(Mode::RWXG | Mode::RWXO);
    let created = create();
    rustix::process::umask(mask);
    created
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixDatagram;

    use super::*;

    #[test]
    fn socket_is_for_the_user_alone_and_removed_at_the_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        for kind in [SocketType::STREAM, SocketType::SEQPACKET, SocketType::DGRAM] {
            let (_socket, file) = listen_at(&path, kind).unwrap();
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o077, 0);
            drop(file);
            assert!(!path.exists());
        }
    }

    #[test]
    fn file_of_another_process_is_not_removed_at_the_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let (_socket, file) = listen_at(&path, SocketType::STREAM).unwrap();
        std::fs::rename(&path, directory.path().join("moved")).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        drop(file);
        assert!(path.exists());
    }

    #[test]
    fn only_a_socket_without_listener_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        for kind in [SocketType::STREAM, SocketType::SEQPACKET] {
            drop(listen_without_file(&path, kind));
            let (_socket, _file) = listen_at(&path, kind).unwrap();
            let error = listen_at(&path, kind).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AddrInUse, "the first one listens there");
        }
        let file = directory.path().join("file");
        std::fs::write(&file, "kept").unwrap();
        assert!(listen_at(&file, SocketType::STREAM).is_err());
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert!(listen_at(&link, SocketType::STREAM).is_err());
        assert_eq!(std::fs::read(&file).unwrap(), b"kept");
    }

    /// Returns a listening socket whose file stays when it is closed.
    fn listen_without_file(path: &Path, kind: SocketType) -> OwnedFd {
        let (socket, file) = listen_at(path, kind).unwrap();
        std::mem::forget(file);
        socket
    }

    #[test]
    fn only_a_datagram_socket_without_owner_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        drop(UnixDatagram::bind(&path).unwrap());
        let (socket, file) = listen_at(&path, SocketType::DGRAM).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o077, 0);
        for kind in [SocketType::DGRAM, SocketType::STREAM] {
            assert!(listen_at(&path, kind).is_err(), "{kind:?}");
        }
        UnixDatagram::from(socket.try_clone().unwrap()).connect(&path).unwrap();
        let error = listen_at(&path, SocketType::DGRAM).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse, "it is connected");
        drop(file);
        assert!(!path.exists());
    }
}
