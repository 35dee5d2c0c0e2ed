//! Connections to a host name: all of its addresses, looked up anew for each connection.
//!
//! Addresses are tried as RFC 8305 ("happy eyeballs") recommends. Those of IPv6 and IPv4 alternate. An attempt begins
//! when the one before failed or is 250 ms old, and does not end it. The first connection is used. A server that moved
//! to another address is found at the next connection; if the look-up fails, the addresses of the last one are used.
//!
//! A look-up and a connection block, so a disk queue has them done by a thread (`Dialer::to_host`).

// #syscall daemon ppoll: waiting for a connection
// #syscall daemon getsockopt 1=SOL_SOCKET: whether there is one

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ringfence_sys::poll::wait_any;
use rustix::event::{PollFd, PollFlags};
use rustix::net::{AddressFamily, sockopt};

use super::link::begin;

/// Time after which the next address is tried beside the one before (RFC 8305, section 5).
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// Maximum number of addresses of a name that are tried.
const ADDRESSES_MAX: usize = 16;

/// Look-up of the addresses of a host name and a port.
type Lookup = Arc<dyn Fn(&str, u16) -> io::Result<Vec<SocketAddr>> + Send + Sync>;

/// Host name and port of a server.
#[derive(Clone)]
pub(super) struct Host {
    name: String,
    port: u16,
    lookup: Lookup,
    /// Result of the last look-up that succeeded.
    known: Arc<Mutex<Vec<SocketAddr>>>,
}

impl Host {
    pub(super) fn new(name: &str, port: u16) -> Host {
        Host::with_lookup(name, port, |name, port| Ok((name, port).to_socket_addrs()?.collect()))
    }

    /// Creates a host whose addresses `lookup` returns.
    pub(super) fn with_lookup(
        name: &str,
        port: u16,
        lookup: impl Fn(&str, u16) -> io::Result<Vec<SocketAddr>> + Send + Sync + 'static,
    ) -> Host {
        let (name, lookup) = (name.to_owned(), Arc::new(lookup));
        Host { name, port, lookup, known: Arc::default() }
    }

    /// Returns the addresses in the order of the attempts.
    fn addresses(&self) -> io::Result<Vec<SocketAddr>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        match (self.lookup)(&self.name, self.port) {
            Ok(found) if !found.is_empty() => *known = in_order(&found),
            _ if !known.is_empty() => {}
            Ok(_) => {
                let why = format!("{} has no address", self.name);
                return Err(io::Error::new(io::ErrorKind::NotFound, why));
            }
            Err(error) => {
                return Err(io::Error::new(error.kind(), format!("{}: {error}", self.name)));
            }
        }
        Ok(known.clone())
    }

    /// Connects to the first address that answers. Blocks until then, or until all failed, at most until `until`
    /// beside the look-up.
    ///
    /// # Errors
    ///
    /// Returns the error of each address, or `TimedOut`.
    pub(super) fn connect(&self, until: Instant) -> io::Result<OwnedFd> {
        let stream = Attempts::new(self.addresses()?).run(until)?;
        sockopt::set_tcp_nodelay(&stream, true)?;
        sockopt::set_socket_keepalive(&stream, true)?;
        Ok(stream)
    }
}

/// Returns addresses with their families in turn, beginning with the first, without repetitions.
fn in_order(found: &[SocketAddr]) -> Vec<SocketAddr> {
    let first_is_v6 = found.first().is_some_and(SocketAddr::is_ipv6);
    let (mut first, mut second): (Vec<_>, Vec<_>) =
        found.iter().copied().partition(|address| address.is_ipv6() == first_is_v6);
    first.dedup();
    second.dedup();
    let mut ordered = vec![];
    for place in 0..first.len().max(second.len()) {
        ordered.extend([&first, &second].into_iter().filter_map(|family| family.get(place)));
    }
    ordered.truncate(ADDRESSES_MAX);
    ordered
}

/// Attempts to connect to the addresses of a host.
struct Attempts {
    /// Addresses that were not tried.
    left: std::vec::IntoIter<SocketAddr>,
    running: Vec<(SocketAddr, OwnedFd)>,
    failed: Vec<(SocketAddr, io::Error)>,
}

impl Attempts {
    fn new(addresses: Vec<SocketAddr>) -> Attempts {
        Attempts { left: addresses.into_iter(), running: vec![], failed: vec![] }
    }

    fn run(&mut self, until: Instant) -> io::Result<OwnedFd> {
        let mut next = Instant::now();
        loop {
            let now = Instant::now();
            if next <= now || self.running.is_empty() {
                match self.left.next() {
                    Some(address) => match begin_to(address) {
                        Ok((stream, false)) => return Ok(stream),
                        Ok((stream, true)) => {
                            self.running.push((address, stream));
                            next = now + ATTEMPT_DELAY;
                        }
                        Err(error) => {
                            self.failed.push((address, error));
                            continue;
                        }
                    },
                    None if self.running.is_empty() => return Err(self.failure()),
                    None => next = until,
                }
            }
            if until <= now {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let wait = next.min(until);
            let mut files: Vec<_> = self
                .running
                .iter()
                .map(|(_, stream)| PollFd::new(stream, PollFlags::OUT))
                .collect();
            if wait_any(&mut files, Some(wait))? == 0 {
                continue;
            }
            let ready: Vec<bool> = files.iter().map(|file| !file.revents().is_empty()).collect();
            if let Some(stream) = self.take_ready(&ready)? {
                return Ok(stream);
            }
            // An attempt failed: the next one need not wait.
            next = Instant::now();
        }
    }

    /// Takes the first connection that is established, and removes failed attempts.
    fn take_ready(&mut self, ready: &[bool]) -> io::Result<Option<OwnedFd>> {
        let mut ready = ready.iter();
        let running = std::mem::take(&mut self.running);
        for (address, stream) in running {
            if ready.next() != Some(&true) {
                self.running.push((address, stream));
                continue;
            }
            match sockopt::socket_error(&stream)? {
                Ok(()) => return Ok(Some(stream)),
                Err(errno) => self.failed.push((address, errno.into())),
            }
        }
        Ok(None)
    }

    /// Returns the error of the only address, or the errors of all.
    fn failure(&mut self) -> io::Error {
        let mut failed = std::mem::take(&mut self.failed);
        if let [(_, error)] = &failed[..]
            && let Some(errno) = error.raw_os_error()
        {
            return io::Error::from_raw_os_error(errno);
        }
        let kind = failed.last().map_or(io::ErrorKind::NotFound, |(_, error)| error.kind());
        let each = failed.drain(..).map(|(address, error)| format!("{address}: {error}"));
        io::Error::new(kind, each.collect::<Vec<_>>().join("; "))
    }
}

fn begin_to(address: SocketAddr) -> io::Result<(OwnedFd, bool)> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    begin(family, &address)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn listener() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    /// Returns an address at which nothing listens.
    fn refusing() -> SocketAddr {
        listener().1
    }

    /// Returns a listener that answers no further connection, because its queue is full, and connections that fill it.
    fn silent() -> (OwnedFd, SocketAddr, Vec<OwnedFd>) {
        let address: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let socket = rustix::net::socket_with(
            AddressFamily::INET,
            rustix::net::SocketType::STREAM,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        rustix::net::bind(&socket, &address).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let address = SocketAddr::try_from(rustix::net::getsockname(&socket).unwrap()).unwrap();
        let mut waiting = vec![];
        while waiting.len() < 8 {
            let (stream, _) = begin_to(address).unwrap();
            waiting.push(stream);
        }
        (socket, address, waiting)
    }

    fn host(addresses: &[SocketAddr]) -> Host {
        let addresses = addresses.to_vec();
        Host::with_lookup("a-name", 1, move |_, _| Ok(addresses.clone()))
    }

    /// Checks that the host is reached at the address of `listener`.
    fn connects(host: &Host, listener: &TcpListener) {
        let stream = host.connect(Instant::now() + Duration::from_secs(20)).unwrap();
        let peer = SocketAddr::try_from(rustix::net::getpeername(&stream).unwrap().unwrap());
        assert_eq!(peer.unwrap(), listener.local_addr().unwrap());
    }

    #[test]
    fn address_behind_refusing_and_silent_ones_is_found() {
        let (listener, good) = listener();
        let (_socket, silent, _waiting) = silent();
        let nowhere = "[::1]:1".parse().unwrap();
        connects(&host(&[nowhere, refusing(), silent, good]), &listener);
        connects(&host(&[silent, good]), &listener);
        connects(&host(&[good, silent]), &listener);
    }

    #[test]
    fn failure_names_every_address() {
        let (one, two) = (refusing(), refusing());
        let until = Instant::now() + Duration::from_secs(20);
        let error = host(&[one, two]).connect(until).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
        let text = error.to_string();
        assert!(text.contains(&one.to_string()) && text.contains(&two.to_string()), "{text}");
        let only = host(&[one]).connect(until).unwrap_err();
        assert_eq!(only.raw_os_error(), Some(libc::ECONNREFUSED));
        let none = host(&[]).connect(until).unwrap_err().to_string();
        assert!(none.contains("a-name has no address"), "{none}");
    }

    #[test]
    fn silent_address_alone_times_out() {
        let (_socket, silent, _waiting) = silent();
        let error =
            host(&[silent]).connect(Instant::now() + Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn name_is_looked_up_for_each_connection_and_last_addresses_serve_meanwhile() {
        let ((first, one), (second, two)) = (listener(), listener());
        let lookups = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&lookups);
        let host = Host::with_lookup("a-name", 1, move |name, port| {
            assert_eq!((name, port), ("a-name", 1));
            match count.fetch_add(1, Ordering::Relaxed) {
                0 => Ok(vec![one]),
                1 => Ok(vec![two]),
                _ => Err(io::Error::other("no name server answers")),
            }
        });
        connects(&host, &first);
        connects(&host, &second);
        connects(&host, &second);
        assert_eq!(lookups.load(Ordering::Relaxed), 3);
        let unknown = Host::with_lookup("b", 1, |_, _| Err(io::Error::other("unknown")));
        let error = unknown.connect(Instant::now()).unwrap_err().to_string();
        assert_eq!(error, "b: unknown");
    }

    #[test]
    fn families_take_turns_in_order_of_the_lookup() {
        let parse = |text: &str| -> Vec<SocketAddr> {
            text.split(' ').map(|address| address.parse().unwrap()).collect()
        };
        let found = parse("[::1]:1 [::2]:1 [::3]:1 1.0.0.1:1 1.0.0.2:1");
        let expected = parse("[::1]:1 1.0.0.1:1 [::2]:1 1.0.0.2:1 [::3]:1");
        assert_eq!(in_order(&found), expected);
        let many: Vec<SocketAddr> =
            (0..100u8).map(|n| SocketAddr::from(([10, 0, 0, n], 1))).collect();
        assert_eq!(in_order(&many), many[..ADDRESSES_MAX]);
    }
}
