//! Socket of a virtual machine: the one that the client connects to, or one that is connected already.
//!
//! The socket is created with the user's rights, for the user alone. A file that is in the way is replaced only if it is
//! a socket at which nobody listens any more. [`SocketFile`] removes the file at the end, unless another process has
//! replaced it.

use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use ringfence_sys::namespaces::take_inherited;
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};

use super::greeting::Greeting;
use ringfence_uplink_process::link::{LinkOrder, Transport};

/// Number of sockets that are tried without --socket.
const PROBED: u32 = 64;

/// Place of the socket that --socket or --fd names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// File to create.
    Path(PathBuf),
    /// First free file of `/tmp/passt_1.socket` to `/tmp/passt_64.socket`.
    Probed,
    /// Descriptor of a connected socket, inherited from the parent process.
    Inherited(RawFd),
}

/// Endpoint of a virtual machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Endpoint {
    pub(crate) place: Place,
    /// Program in whose name the session speaks.
    pub(crate) program: &'static str,
    /// Set if the session ends with the first client.
    pub(crate) one_off: bool,
    pub(crate) transport: Transport,
}

/// Open endpoint, ready for the uplink.
#[derive(Debug)]
pub(crate) struct OpenEndpoint {
    pub(crate) socket: OwnedFd,
    pub(crate) link: LinkOrder,
    pub(crate) file: Option<SocketFile>,
    /// Datagram socket that waits for its client.
    pub(crate) greeting: Option<Greeting>,
}

impl Endpoint {
    /// Returns the descriptor that the parent process passes.
    pub(crate) fn inherited(&self) -> Option<RawFd> {
        match self.place {
            Place::Inherited(fd) => Some(fd),
            Place::Path(_) | Place::Probed => None,
        }
    }

    /// Returns the path of --socket.
    pub(crate) fn path(&self) -> Option<&Path> {
        match &self.place {
            Place::Path(path) => Some(path),
            Place::Probed | Place::Inherited(_) => None,
        }
    }

    /// Returns the name of the link.
    pub(crate) fn link_name(&self) -> &'static str {
        match self.transport {
            Transport::Stream => "stream",
            Transport::VhostUser { .. } => "vhost-user",
            Transport::Datagram => "datagram",
        }
    }

    /// Takes the inherited descriptor, or creates the socket.
    pub(crate) fn open(&self) -> anyhow::Result<OpenEndpoint> {
        let &Endpoint { one_off, transport, .. } = self;
        let (socket, file) = match &self.place {
            Place::Inherited(fd) => {
                let socket =
                    take_connected(*fd, transport).with_context(|| format!("--fd {fd}"))?;
                let link = LinkOrder::Connected(transport);
                return Ok(OpenEndpoint { socket, link, file: None, greeting: None });
            }
            Place::Path(path) => {
                listen(path, transport).with_context(|| format!("--socket {}", path.display()))?
            }
            Place::Probed => probe(Path::new("/tmp"), transport)?,
        };
        let link = LinkOrder::Clients { transport, one_off };
        let greets = transport == Transport::Datagram;
        let greeting = greets.then(|| socket.try_clone()).transpose()?;
        let greeting = greeting.map(|socket| Greeting { socket });
        Ok(OpenEndpoint { socket, link, file: Some(file), greeting })
    }
}

fn take_connected(fd: RawFd, transport: Transport) -> anyhow::Result<OwnedFd> {
    let socket = take_inherited(fd).context("it must be inherited, and no standard stream")?;
    let (wanted, name) = match transport {
        Transport::Datagram => (SocketType::DGRAM, "datagram"),
        Transport::Stream | Transport::VhostUser { .. } => (SocketType::STREAM, "stream"),
    };
    let is_wanted = sockopt::socket_type(&socket).is_ok_and(|kind| kind == wanted);
    if !is_wanted || rustix::net::getpeername(&socket).is_err() {
        bail!("it must be a connected {name} socket");
    }
    Ok(socket)
}

/// Creates the first of the sockets with default names that is free.
fn probe(directory: &Path, transport: Transport) -> anyhow::Result<(OwnedFd, SocketFile)> {
    let mut last = None;
    for number in 1..=PROBED {
        let path = directory.join(format!("passt_{number}.socket"));
        match listen(&path, transport) {
            Ok(made) => return Ok(made),
            Err(error) => last = Some(error),
        }
    }
    let why = last.map_or(String::new(), |error| format!(": {error}"));
    bail!(
        "{}/passt_1.socket to passt_{PROBED}.socket are all in use{why}; name another one with --socket",
        directory.display()
    )
}

/// Creates a listening stream socket for a virtual machine, in place of one at which nobody listens.
///
/// # Errors
///
/// Returns the system's error, and `AddrInUse` if another process listens there.
pub fn listen_at(path: &Path) -> io::Result<(OwnedFd, SocketFile)> {
    listen(path, Transport::Stream)
}

/// Creates a listening socket that keeps message boundaries, for this user alone, in place of one at which nobody listens.
///
/// # Errors
///
/// Returns the system's error, and `AddrInUse` if another process listens there.
pub fn listen_for_messages(path: &Path) -> io::Result<(OwnedFd, SocketFile)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let made = || rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let address = SocketAddrUnix::new(path)?;
    if path.symlink_metadata().is_ok_and(|found| found.file_type().is_socket()) {
        match rustix::net::connect(made()?, &address) {
            Err(Errno::CONNREFUSED) => std::fs::remove_file(path)?,
            Ok(()) => return Err(io::ErrorKind::AddrInUse.into()),
            Err(errno) => return Err(errno.into()),
        }
    }
    let socket = made()?;
    for_user_alone(|| rustix::net::bind(&socket, &address))?;
    rustix::net::listen(&socket, 4)?;
    Ok((socket, SocketFile::at(path)?))
}

/// Creates a listening socket, or a datagram socket, in place of one at which nobody listens.
fn listen(path: &Path, transport: Transport) -> io::Result<(OwnedFd, SocketFile)> {
    // Another kind of file is left alone: binding fails.
    if path.symlink_metadata().is_ok_and(|found| found.file_type().is_socket()) {
        let found = match transport {
            Transport::Stream | Transport::VhostUser { .. } => UnixStream::connect(path).map(drop),
            Transport::Datagram => UnixDatagram::unbound()?.connect(path),
        };
        match found {
            Ok(()) => {
                let kind = io::ErrorKind::AddrInUse;
                return Err(io::Error::new(kind, "another process listens there"));
            }
            // A datagram socket with a client takes no other one.
            Err(error) if error.raw_os_error() == Some(Errno::PERM.raw_os_error()) => {
                return Err(io::Error::new(io::ErrorKind::AddrInUse, "it serves a machine"));
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path)?;
            }
            Err(error) => return Err(error),
        }
    }
    let socket: OwnedFd = match transport {
        Transport::Stream | Transport::VhostUser { .. } => bind(path)?.into(),
        Transport::Datagram => {
            let socket = for_user_alone(|| UnixDatagram::bind(path))?;
            socket.set_nonblocking(true)?;
            socket.into()
        }
    };
    Ok((socket, SocketFile::at(path)?))
}

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

/// Creates a non-blocking listening socket to which only the user, and root, can connect.
pub(super) fn bind(path: &Path) -> io::Result<UnixListener> {
    let listener = for_user_alone(|| UnixListener::bind(path))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Creates a file that only the user, and root, can open.
fn for_user_alone<T>(create: impl FnOnce() -> T) -> T {
    // Only this thread runs yet.
    let mask = rustix::process::umask(Mode::RWXG | Mode::RWXO);
    let created = create();
    rustix::process::umask(mask);
    created
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn socket_is_for_the_user_alone_and_removed_at_the_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let (_socket, file) = listen(&path, Transport::Stream).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o077, 0);
        drop(file);
        assert!(!path.exists());
    }

    #[test]
    fn file_of_another_process_is_not_removed_at_the_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let (_socket, file) = listen(&path, Transport::Stream).unwrap();
        std::fs::rename(&path, directory.path().join("moved")).unwrap();
        let _other = UnixListener::bind(&path).unwrap();
        drop(file);
        assert!(path.exists());
    }

    #[test]
    fn only_a_socket_without_listener_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        drop(UnixListener::bind(&path).unwrap());
        let (_socket, _file) = listen(&path, Transport::Stream).unwrap();
        assert!(listen(&path, Transport::Stream).is_err(), "the first one listens there");
        let file = directory.path().join("file");
        std::fs::write(&file, "kept").unwrap();
        assert!(listen(&file, Transport::Stream).is_err());
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert!(listen(&link, Transport::Stream).is_err());
        assert_eq!(std::fs::read(&file).unwrap(), b"kept");
    }

    #[test]
    fn first_free_default_socket_is_taken() {
        let directory = tempfile::tempdir().unwrap();
        let name = |file: &SocketFile| file.path().file_name().unwrap().to_owned();
        let (one, two) = (
            probe(directory.path(), Transport::Stream).unwrap(),
            probe(directory.path(), Transport::Stream).unwrap(),
        );
        assert_eq!(
            (name(&one.1), name(&two.1)),
            ("passt_1.socket".into(), "passt_2.socket".into())
        );
        drop(one);
        assert_eq!(name(&probe(directory.path(), Transport::Stream).unwrap().1), "passt_1.socket");
        let all: Vec<_> =
            (0..PROBED - 1).map(|_| probe(directory.path(), Transport::Stream).unwrap()).collect();
        let error = probe(directory.path(), Transport::Stream).unwrap_err().to_string();
        assert!(error.contains("--socket"), "{error}");
        drop(all);
    }

    #[test]
    fn only_a_datagram_socket_without_owner_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        drop(UnixDatagram::bind(&path).unwrap());
        let (socket, file) = listen(&path, Transport::Datagram).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o077, 0);
        for transport in [Transport::Datagram, Transport::Stream] {
            assert!(listen(&path, transport).is_err(), "{transport:?}");
        }
        UnixDatagram::from(socket.try_clone().unwrap()).connect(&path).unwrap();
        let error = listen(&path, Transport::Datagram).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse, "it is connected");
        drop(file);
        assert!(!path.exists());
    }
}
