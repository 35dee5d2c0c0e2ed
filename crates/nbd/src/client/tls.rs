//! TLS of NBD connections: the server agrees in the clear, and all later bytes are encrypted.
//!
//! A client with TLS settings never falls back to an unencrypted connection. The files are those of
//! libnbd and nbdkit, in one directory: `ca-cert.pem` with the trusted authorities, and for servers
//! that authenticate clients `client-cert.pem` and `client-key.pem`. The process that may open files reads
//! them once; the I/O process receives their content.

// #syscall driver,disk,daemon sendto,recvfrom,read: what TLS has made of requests

use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rustls::client::ResolvesClientCert;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, ClientConnection, RootCertStore, SignatureScheme};
use serde::{Deserialize, Serialize};

use crate::protocol::ProtocolError;

/// Default directory of the certificate files.
pub(super) const DIRECTORY_DEFAULT: &str = "/etc/pki/libnbd";

/// Maximum length in bytes of a file.
const FILE_MAX: u64 = 16 << 10;

/// Trusted authorities and own certificate of a client.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TlsIdentity {
    /// Name that the server's certificate must have.
    server: String,
    /// Certificates of the trusted authorities, in PEM.
    authorities: String,
    /// Certificate and key of the client in PEM, if any.
    own: Option<(String, String)>,
}

// The key must not reach a log.
impl fmt::Debug for TlsIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TlsIdentity { server, own, .. } = self;
        write!(f, "TlsIdentity({server}, with a key: {})", own.is_some())
    }
}

fn named(path: &Path) -> impl Fn(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

fn read(path: PathBuf) -> io::Result<String> {
    let mut text = String::new();
    let file = std::fs::File::open(&path).map_err(named(&path))?;
    file.take(FILE_MAX + 1).read_to_string(&mut text).map_err(named(&path))?;
    if text.len() as u64 > FILE_MAX {
        let long = format!("it has more than {FILE_MAX} bytes: name only what is needed");
        return Err(named(&path)(io::Error::other(long)));
    }
    Ok(text)
}

impl TlsIdentity {
    /// Reads the files in `directory`, for a server whose certificate names `server`.
    ///
    /// # Errors
    ///
    /// Returns an error if the authorities' certificates, or existing files of the client, cannot be read.
    pub fn read(directory: &Path, server: &str) -> io::Result<TlsIdentity> {
        let authorities = read(directory.join("ca-cert.pem")).map_err(|error| {
            let advice = "TLS needs the certificates of the server's authorities there \
                          (?tls-certificates=DIRECTORY); pre-shared keys are not supported";
            io::Error::new(error.kind(), format!("{error}. {advice}"))
        })?;
        let certificate = directory.join("client-cert.pem");
        let own = match certificate.exists() {
            true => Some((read(certificate)?, read(directory.join("client-key.pem"))?)),
            false => None,
        };
        let identity = TlsIdentity { server: server.to_owned(), authorities, own };
        // Unusable content is reported here, with the name of the directory.
        TlsClient::new(&identity).map_err(named(directory))?;
        Ok(identity)
    }
}

/// Answer of a client without a certificate to a server that asks for one. Notes that it was asked.
#[derive(Default, Debug)]
struct NoCertificate(OnceLock<()>);

impl ResolvesClientCert for NoCertificate {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        let _ = self.0.set(());
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

/// TLS settings shared by the connections of a client.
#[derive(Clone)]
pub(super) struct TlsClient {
    config: Arc<ClientConfig>,
    missing: Arc<NoCertificate>,
    server: ServerName<'static>,
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error)
}

fn certificates(pem: &str) -> io::Result<Vec<CertificateDer<'static>>> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    let found = found.map_err(invalid)?;
    if found.is_empty() { Err(invalid("there is no certificate in the file")) } else { Ok(found) }
}

impl TlsClient {
    pub(super) fn new(identity: &TlsIdentity) -> io::Result<TlsClient> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&identity.authorities)? {
            roots.add(certificate).map_err(invalid)?;
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(invalid)?
            .with_root_certificates(roots);
        let missing = Arc::<NoCertificate>::default();
        let config = match &identity.own {
            None => builder.with_client_cert_resolver(Arc::clone(&missing) as _),
            Some((chain, key)) => {
                let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(invalid)?;
                builder.with_client_auth_cert(certificates(chain)?, key).map_err(invalid)?
            }
        };
        let server = ServerName::try_from(identity.server.clone()).map_err(invalid)?;
        Ok(TlsClient { config: Arc::new(config), missing, server })
    }

    /// Starts a TLS session.
    pub(super) fn start(&self) -> io::Result<Tls> {
        let connection = ClientConnection::new(Arc::clone(&self.config), self.server.clone());
        let session = Box::new(connection.map_err(invalid)?);
        Ok(Tls { session, missing: Arc::clone(&self.missing) })
    }
}

/// Returns `true` for the alert of a server that accepts no offered cipher, such as one with pre-shared keys alone.
fn is_unable(error: Option<&rustls::Error>) -> bool {
    use rustls::AlertDescription::{HandshakeFailure, InsufficientSecurity, UnknownPSKIdentity};
    matches!(
        error,
        Some(rustls::Error::AlertReceived(
            HandshakeFailure | InsufficientSecurity | UnknownPSKIdentity
        ))
    )
}

/// TLS session of one connection.
pub(super) struct Tls {
    session: Box<ClientConnection>,
    missing: Arc<NoCertificate>,
}

/// Adapter of a socket for rustls.
struct Socket<'a>(&'a OwnedFd);

impl Read for Socket<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::read(self.0, buffer)?)
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // A closed connection yields an error, not SIGPIPE.
        Ok(rustix::net::send(self.0, bytes, rustix::net::SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Tls {
    /// Returns the reason for which a handshake ended: the error, or a client certificate that the server asked
    /// for. Servers then send an alert, or just close the connection.
    pub(super) fn explain(&self, error: io::Error) -> io::Error {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
        let is_alert = matches!(inner, Some(rustls::Error::AlertReceived(_)));
        let is_end = matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof);
        match self.missing.0.get() {
            Some(()) if is_alert || is_end => ProtocolError::WantsCertificate.into(),
            None if is_unable(inner) || (is_end && self.session.is_handshaking()) => {
                ProtocolError::EndedHandshake.into()
            }
            _ => error,
        }
    }

    /// Returns `true` if encrypted bytes wait to be sent.
    pub(super) fn wants_to_write(&self) -> bool {
        self.session.wants_write()
    }

    /// Reads decrypted bytes into `buffer`.
    pub(super) fn read(&mut self, socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.session.reader().read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                other => return other,
            }
            if self.session.read_tls(&mut Socket(socket))? == 0 {
                return Ok(0);
            }
            if let Err(error) = self.session.process_new_packets() {
                // The alert is sent to the server if the socket accepts it.
                let _ = self.flush(socket);
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            }
        }
    }

    /// Encrypts and sends as many bytes as fit; none while earlier bytes wait for the socket.
    pub(super) fn write(&mut self, socket: &OwnedFd, bytes: &[u8]) -> io::Result<usize> {
        self.flush(socket)?;
        let taken = self.session.writer().write(bytes)?;
        match self.flush(socket) {
            // Encrypted bytes stay queued until the socket accepts them.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            other => other?,
        }
        if taken == 0 { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(taken) }
    }

    /// Sends the encrypted bytes that are queued.
    pub(super) fn flush(&mut self, socket: &OwnedFd) -> io::Result<()> {
        while self.session.wants_write() {
            self.session.write_tls(&mut Socket(socket))?;
        }
        Ok(())
    }
}
