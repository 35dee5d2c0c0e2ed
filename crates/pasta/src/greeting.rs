//! Greeting of a virtual machine on a Unix datagram socket: connects the socket to the client that writes first.
//!
//! Such a socket accepts no connections. The client binds a socket of its own, and its first datagram, `VFKT` or a
//! frame, has that socket's address. The uplink cannot connect to it, because its sandbox has no files. The session can,
//! with the user's rights, and the connection holds for the uplink's descriptor of the same socket. The datagram stays
//! in the queue, for the uplink.
//!
//! Once connected, the kernel accepts datagrams from that client alone.

use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SocketAddrUnix, recvfrom};

/// Datagrams without a usable sender that are discarded in one call.
const DISCARDED_MAX: usize = 64;

/// Socket that waits for its client.
#[derive(Debug)]
pub(crate) struct Greeting {
    /// Second descriptor of the uplink's socket.
    pub(crate) socket: OwnedFd,
}

impl Greeting {
    /// Connects the socket to the sender of the first datagram. Discards datagrams whose sender has no address, or one
    /// that cannot be reached. Returns `true` if the socket is connected.
    ///
    /// # Errors
    ///
    /// Returns the error of reading the socket.
    pub(crate) fn answer(&self) -> io::Result<bool> {
        for _ in 0..DISCARDED_MAX {
            let mut byte = [0; 1];
            let peek = RecvFlags::PEEK | RecvFlags::DONTWAIT;
            let sender = match recvfrom(&self.socket, &mut byte, peek) {
                Ok((_, _, sender)) => sender,
                Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
                Err(errno) => return Err(errno.into()),
            };
            let address = sender.and_then(|sender| SocketAddrUnix::try_from(sender).ok());
            let named = address.filter(|address| !address.is_unnamed());
            if named.is_some_and(|address| rustix::net::connect(&self.socket, &address).is_ok()) {
                return Ok(true);
            }
            match recvfrom(&self.socket, &mut byte, RecvFlags::DONTWAIT) {
                Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use super::*;

    #[test]
    fn sender_with_an_address_becomes_the_peer_and_its_datagram_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let socket = UnixDatagram::bind(path("socket")).unwrap();
        socket.set_nonblocking(true).unwrap();
        let greeting = Greeting { socket: socket.try_clone().unwrap().into() };
        assert!(!greeting.answer().unwrap());
        // Nobody can answer the first one, and the second one's address is gone.
        UnixDatagram::unbound().unwrap().send_to(b"unnamed", path("socket")).unwrap();
        let gone = UnixDatagram::bind(path("gone")).unwrap();
        gone.send_to(b"gone", path("socket")).unwrap();
        drop(gone);
        assert!(!greeting.answer().unwrap());
        let client = UnixDatagram::bind(path("client")).unwrap();
        client.send_to(b"VFKT", path("socket")).unwrap();
        assert!(greeting.answer().unwrap());
        let mut got = [0; 10];
        assert_eq!(socket.recv(&mut got).unwrap(), 4);
        socket.send(b"frame").unwrap();
        assert_eq!(client.recv(&mut got).unwrap(), 5);
        let other = UnixDatagram::bind(path("other")).unwrap();
        assert!(other.send_to(b"VFKT", path("socket")).is_err(), "the first client alone");
    }
}
