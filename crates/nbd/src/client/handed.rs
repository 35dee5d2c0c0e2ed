//! A remote disk in two processes: one that may make connections, and one that may not.
//!
//! The first ([`NbdConnector`]) finds the server, agrees with it and hands over what was agreed
//! ([`NbdFacts`]) and the connection; later it makes another connection whenever it is asked to. The
//! second does the I/O. An encrypted connection cannot be handed over in the middle: there the first
//! one only shows that server and certificates are as they should be, and the second begins anew.

// #syscall driver ppoll: waiting for a connection
// #syscall driver getsockopt 1=SOL_SOCKET: whether there is one

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringfence_sys::poll::wait_any;
use rustix::event::{PollFd, PollFlags};
use serde::{Deserialize, Serialize};

use super::link::{Link, Place, Target};
use super::tls::{TlsClient, TlsIdentity};
use super::{Dialer, NbdAddress, NbdDisk, NbdOptions, agree, geometry};
use crate::protocol::agree::Settled;

/// What the process that does the I/O must know of a remote disk.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NbdFacts {
    /// The export.
    name: String,
    settled: Settled,
    options: NbdOptions,
    tls: Option<TlsIdentity>,
}

impl NbdFacts {
    /// Nothing may be written.
    pub fn is_read_only(&self) -> bool {
        self.options.read_only || self.settled.offer.is_read_only()
    }
}

/// Makes connections to a server, for another process.
#[derive(Clone)]
pub struct NbdConnector {
    place: Place,
    within: Duration,
}

impl NbdConnector {
    /// Connects to a server, and agrees with it on a disk: what to hand over, and the connection, if
    /// it can be handed over.
    ///
    /// # Errors
    ///
    /// As [`NbdDisk::open`].
    pub fn open(
        address: &NbdAddress,
        options: &NbdOptions,
    ) -> io::Result<(NbdConnector, NbdFacts, Option<OwnedFd>)> {
        // There is one who asks for connections, so there is one connection.
        let options = NbdOptions { connections: 1, ..options.clone() };
        let files = address.tls();
        let tls = files.map(|files| TlsIdentity::read(&files.directory, &files.hostname));
        let tls = tls.transpose()?;
        let target = Target {
            place: Place::resolve(address, None)?,
            name: address.name().to_owned(),
            tls: tls.as_ref().map(TlsClient::new).transpose()?,
        };
        let (link, settled) = agree(&target, options.connect)?;
        geometry(&settled, &options)?;
        let connector = NbdConnector { place: target.place, within: options.connect };
        let facts = NbdFacts { name: target.name, settled, options, tls };
        if facts.tls.is_some() {
            link.farewell();
            return Ok((connector, facts, None));
        }
        Ok((connector, facts, link.into_stream()))
    }

    /// Another connection. Blocks until there is one, or it has taken too long.
    ///
    /// # Errors
    ///
    /// When there is no server.
    pub fn connect(&self) -> io::Result<OwnedFd> {
        let (stream, connecting) = self.place.begin()?;
        if connecting {
            let mut writable = [PollFd::new(&stream, PollFlags::OUT)];
            if wait_any(&mut writable, Some(Instant::now() + self.within))? == 0 {
                return Err(io::ErrorKind::TimedOut.into());
            }
            rustix::net::sockopt::socket_error(&stream)??;
        }
        Ok(stream)
    }
}

impl NbdDisk {
    /// A disk that somebody else found; `first` is the connection on which it was agreed on, and
    /// others come by `dialer`.
    ///
    /// # Errors
    ///
    /// When what was handed over makes no disk.
    pub fn handed(
        facts: &NbdFacts,
        first: Option<OwnedFd>,
        dialer: &Arc<Dialer>,
    ) -> io::Result<NbdDisk> {
        let target = Target {
            place: Place::Handed(Arc::clone(dialer)),
            name: facts.name.clone(),
            tls: facts.tls.as_ref().map(TlsClient::new).transpose()?,
        };
        let link = first.map(|stream| Link::settled(stream, &facts.settled));
        NbdDisk::new(target, &facts.options, facts.settled, link)
    }
}
