//! Socket of a virtual machine: the one that the client connects to, or one that is connected already.
//!
//! [`ringfence_hostnet::socket_file`] creates the socket.

use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use ringfence_hostnet::socket_file::{SocketFile, listen_at};
use ringfence_sys::namespaces::take_inherited;
use rustix::net::{SocketType, sockopt};

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

/// Creates a listening socket, or a datagram socket, in place of one at which nobody listens.
fn listen(path: &Path, transport: Transport) -> io::Result<(OwnedFd, SocketFile)> {
    let kind = match transport {
        Transport::Stream | Transport::VhostUser { .. } => SocketType::STREAM,
        Transport::Datagram => SocketType::DGRAM,
    };
    listen_at(path, kind)
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
