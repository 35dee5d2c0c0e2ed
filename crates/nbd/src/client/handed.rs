//! Remote disk split over two processes: one opens connections, the other does the I/O.
//!
//! The connecting process ([`NbdConnector`]) finds the server and performs the handshake. It hands over
//! the result ([`NbdFacts`]) and the connection, and opens further connections on request ([`Dialer`]). A TLS
//! connection cannot be handed over after its handshake. There the connecting process only checks server
//! and certificates, and the I/O process starts with a new connection.

// #syscall none: the process that connects has no sandbox

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::link::{Endpoint, NbdLink, NbdTarget};
use super::tls::{TlsClient, TlsIdentity};
use super::{Dialer, NbdAddress, NbdDisk, NbdOptions, connect_and_negotiate, geometry};
use crate::protocol::agree::Negotiated;

/// Properties of a remote disk that the I/O process needs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct NbdFacts {
    name: String,
    settled: Negotiated,
    options: NbdOptions,
    tls: Option<TlsIdentity>,
}

impl NbdFacts {
    /// Returns `true` if the disk cannot be written.
    pub fn is_read_only(&self) -> bool {
        self.options.read_only || self.settled.offer.is_read_only()
    }
}

/// Connector to a server, on behalf of another process.
#[derive(Clone)]
pub struct NbdConnector {
    endpoint: Endpoint,
    time_limit: Duration,
}

impl NbdConnector {
    /// Connects to a server and negotiates an export. Returns the connector, the facts to hand over, and the
    /// connection unless it is encrypted.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`NbdDisk::open`].
    pub fn open(
        address: &NbdAddress,
        options: &NbdOptions,
    ) -> io::Result<(NbdConnector, NbdFacts, Option<OwnedFd>)> {
        // A dialer serves one queue, so there is one connection.
        let options = NbdOptions { connections: 1, ..options.clone() };
        let files = address.tls();
        let tls = files.map(|files| TlsIdentity::read(&files.directory, &files.hostname));
        let tls = tls.transpose()?;
        let target = NbdTarget {
            endpoint: Endpoint::of(address, None),
            name: address.name().to_owned(),
            tls: tls.as_ref().map(TlsClient::new).transpose()?,
        };
        let (link, settled) = connect_and_negotiate(&target, options.connect)?;
        geometry(&settled, &options)?;
        let connector = NbdConnector { endpoint: target.endpoint, time_limit: options.connect };
        let facts = NbdFacts { name: target.name, settled, options, tls };
        if facts.tls.is_some() {
            link.disconnect();
            return Ok((connector, facts, None));
        }
        Ok((connector, facts, link.into_stream()))
    }

    /// Opens another connection. Blocks until it is established or the time limit is reached.
    ///
    /// # Errors
    ///
    /// Returns the error of the socket, or `TimedOut`.
    pub fn connect(&self) -> io::Result<OwnedFd> {
        self.endpoint.connect(Instant::now() + self.time_limit)
    }
}

impl NbdDisk {
    /// Creates a disk from handed-over facts. `first` is the negotiated connection; later ones come from
    /// `dialer`.
    ///
    /// # Errors
    ///
    /// Returns an error if the facts describe no usable disk.
    pub fn handed(
        facts: &NbdFacts,
        first: Option<OwnedFd>,
        dialer: &Arc<Dialer>,
    ) -> io::Result<NbdDisk> {
        let target = NbdTarget {
            endpoint: Endpoint::Handed(Arc::clone(dialer)),
            name: facts.name.clone(),
            tls: facts.tls.as_ref().map(TlsClient::new).transpose()?,
        };
        let link = first.map(|stream| NbdLink::settled(stream, &facts.settled));
        NbdDisk::new(target, &facts.options, facts.settled, link)
    }
}
