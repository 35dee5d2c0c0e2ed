//! Socket by which clients add, list and remove ports while the session runs: `slirp4netns --api-socket`. That of
//! `pasta --conf-path` has another protocol ([`super::control`]).
//!
//! A client connects, sends one request, shuts its direction down, and receives one reply
//! ([`crate::hostfwd`]). The session's thread serves all clients, and no call blocks. At most
//! [`CLIENTS_MAX`] clients are connected at a time, each for ten seconds at most. Only the user that started the
//! session can connect.

use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Instant;

use crate::hostfwd::{Entry, HostForward, HostfwdRequest, REQUEST_MAX, Reply};
use ringfence_sandbox::channel::Channel;

use super::client::{ClientRead, SocketClient, listen};
use super::control::ControlServer;
use ringfence_uplink_process::forward::ForwardProtocol;
use ringfence_uplink_process::forwarded_ports::{ForwardedPortFailure, ForwardedPorts};

/// Maximum number of connected clients. The oldest one makes room for a new one.
const CLIENTS_MAX: usize = 16;
/// Maximum number of ports that clients have added.
const ENTRIES_MAX: usize = ringfence_uplink_process::forward::PORTS_MAX;

enum Progress {
    Waiting,
    Requested,
    Gone,
}

/// Reads the request of a client, as far as it has arrived.
fn read(client: &mut SocketClient) -> Progress {
    loop {
        match client.read() {
            ClientRead::Read if client.bytes.len() > REQUEST_MAX => return Progress::Requested,
            ClientRead::Read => {}
            ClientRead::End => return Progress::Requested,
            ClientRead::Waiting => return Progress::Waiting,
            ClientRead::Gone => return Progress::Gone,
        }
    }
}

/// Port that a client has added.
#[derive(Debug)]
struct Added {
    entry: Entry,
    /// Numbers of its sockets at the uplink.
    ports: Vec<u32>,
}

/// Socket by which clients change ports.
#[derive(Debug)]
pub(crate) enum PortServer {
    /// Of `slirp4netns`.
    Api(ApiServer),
    /// Of `pasta`.
    Control(ControlServer),
}

impl PortServer {
    /// Returns the descriptors to wait for.
    pub(crate) fn fds(&self) -> Vec<BorrowedFd<'_>> {
        match self {
            PortServer::Api(api) => api.fds().collect(),
            PortServer::Control(control) => control.fds().collect(),
        }
    }

    /// Returns the time at which [`PortServer::serve`] must be called next.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match self {
            PortServer::Api(api) => api.deadline(),
            PortServer::Control(control) => control.deadline(),
        }
    }

    /// Serves clients as far as they have sent.
    ///
    /// # Errors
    ///
    /// Returns a failure of the uplink, after which the session cannot go on.
    pub(crate) fn serve(
        &mut self,
        channel: &Channel,
        ports: &mut ForwardedPorts,
    ) -> Result<(), ForwardedPortFailure> {
        match self {
            PortServer::Api(api) => api.serve(channel, ports),
            PortServer::Control(control) => control.serve(channel, ports),
        }
    }
}

/// API socket and the ports of its clients.
#[derive(Debug)]
pub(crate) struct ApiServer {
    listener: UnixListener,
    clients: Vec<SocketClient>,
    added: Vec<Added>,
    last: u32,
    addresses: Vec<IpAddr>,
}

impl ApiServer {
    /// Creates the socket at `path`. A socket that an earlier process left there is replaced.
    pub(crate) fn bind(option: &str, path: &Path) -> anyhow::Result<ApiServer> {
        let listener = listen(option, path)?;
        let (clients, added, addresses) = Default::default();
        Ok(ApiServer { listener, clients, added, last: 0, addresses })
    }

    /// Sets the addresses of the namespace to which ports can lead.
    pub(crate) fn set_addresses(&mut self, addresses: Vec<IpAddr>) {
        self.addresses = addresses;
    }

    /// Returns the descriptors to wait for.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let clients = self.clients.iter().map(|client| client.stream.as_fd());
        std::iter::once(self.listener.as_fd()).chain(clients)
    }

    /// Returns the time at which [`ApiServer::serve`] must be called next.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.clients.iter().map(|client| client.until).min()
    }

    /// Accepts clients, and answers those whose request is complete.
    ///
    /// # Errors
    ///
    /// Returns a failure of the uplink, after which the session cannot go on.
    pub(crate) fn serve(
        &mut self,
        channel: &Channel,
        ports: &mut ForwardedPorts,
    ) -> Result<(), ForwardedPortFailure> {
        self.accept();
        for mut client in std::mem::take(&mut self.clients) {
            match read(&mut client) {
                Progress::Waiting => self.clients.push(client),
                Progress::Gone => {}
                Progress::Requested => {
                    let reply = self.answer(&client.bytes, channel, ports)?;
                    // A client that has gone, or does not read, loses its reply.
                    let _ = client.stream.write_all(&reply.to_json());
                }
            }
        }
        Ok(())
    }

    fn accept(&mut self) {
        while let Ok((stream, _)) = self.listener.accept() {
            let Ok(client) = SocketClient::new(stream) else { continue };
            if self.clients.len() >= CLIENTS_MAX {
                self.clients.remove(0);
            }
            self.clients.push(client);
        }
    }

    fn answer(
        &mut self,
        request: &[u8],
        channel: &Channel,
        ports: &mut ForwardedPorts,
    ) -> Result<Reply, ForwardedPortFailure> {
        let done = match HostfwdRequest::parse(request) {
            Ok(HostfwdRequest::Add(forward)) => self.add(&forward, channel, ports),
            Ok(HostfwdRequest::List) => {
                let entries = self.added.iter().map(|added| added.entry.clone()).collect();
                Ok(Reply::Entries(entries))
            }
            Ok(HostfwdRequest::Remove(id)) => {
                match self.added.iter().position(|added| added.entry.id == id) {
                    Some(at) => {
                        let removed = self.added.remove(at);
                        close_all(&removed.ports, channel, ports)?;
                        Ok(Reply::Removed)
                    }
                    None => return Ok(Reply::Error(format!("bad request: there is no id {id}"))),
                }
            }
            Err(error) => return Ok(Reply::Error(error.to_string())),
        };
        match done {
            Err(error) if error.is_of_port() => {
                Ok(Reply::Error(format!("bad request: add_hostfwd: {error}")))
            }
            done => done,
        }
    }

    /// Adds a port. It has one socket for each family that the request and the namespace have.
    fn add(
        &mut self,
        wanted: &HostForward,
        channel: &Channel,
        ports: &mut ForwardedPorts,
    ) -> Result<Reply, ForwardedPortFailure> {
        if self.added.len() >= ENTRIES_MAX {
            return Err(ForwardedPortFailure::TooMany);
        }
        if let Some(ip) = wanted.guest.filter(|ip| !self.addresses.contains(ip)) {
            let why = format!("bad request: guest_addr {ip} is not an address of the namespace");
            return Ok(Reply::Error(why));
        }
        let own = |is_v4: bool| self.addresses.iter().copied().find(|ip| ip.is_ipv4() == is_v4);
        let (v4, v6) = (wanted.host_v4.zip(own(true)), wanted.host_v6.zip(own(false)));
        let hosts = [v4.map(|(ip, _)| IpAddr::from(ip)), v6.map(|(ip, _)| IpAddr::from(ip))];
        let protocol = if wanted.is_udp { ForwardProtocol::Udp } else { ForwardProtocol::Tcp };
        let mut opened = Vec::new();
        for host in hosts.into_iter().flatten() {
            let at = SocketAddr::new(host, wanted.host_port);
            match ports.listen(channel, protocol, at, wanted.guest_port) {
                Ok(port) => opened.push(port),
                Err(error) => {
                    close_all(&opened, channel, ports)?;
                    return Err(error);
                }
            }
        }
        if opened.is_empty() {
            let why = "bad request: the namespace has no address of the family of host_addr";
            return Ok(Reply::Error(why.to_owned()));
        }
        self.last += 1;
        let entry = Entry {
            id: self.last,
            proto: if wanted.is_udp { "udp" } else { "tcp" },
            host_addr: v4.map(|(host, _)| host),
            host_addr6: v6.map(|(host, _)| host),
            host_port: wanted.host_port,
            guest_addr: v4.map(|(_, guest)| guest),
            guest_addr6: v6.map(|(_, guest)| guest),
            guest_port: wanted.guest_port,
        };
        self.added.push(Added { entry, ports: opened });
        Ok(Reply::Added(self.last))
    }
}

fn close_all(
    opened: &[u32],
    channel: &Channel,
    ports: &mut ForwardedPorts,
) -> Result<(), ForwardedPortFailure> {
    opened.iter().try_for_each(|port| ports.close(channel, *port))
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn server() -> (tempfile::TempDir, ApiServer) {
        let directory = tempfile::tempdir().unwrap();
        let server = ApiServer::bind("--api-socket", &directory.path().join("api")).unwrap();
        (directory, server)
    }

    /// Lets the server answer a request. There is no uplink.
    fn ask(server: &mut ApiServer, place: &Path, request: &[u8]) -> String {
        let mut client = UnixStream::connect(place.join("api")).unwrap();
        client.write_all(request).unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        let (channel, _uplink) = Channel::pair().unwrap();
        server.serve(&channel, &mut ForwardedPorts::default()).unwrap();
        let mut reply = String::new();
        client.read_to_string(&mut reply).unwrap();
        reply
    }

    #[test]
    fn request_without_effect_on_the_uplink_is_answered() {
        let (place, mut server) = server();
        let list = b"{\"execute\": \"list_hostfwd\"}";
        assert_eq!(ask(&mut server, place.path(), list), "{\"return\": {\"entries\": []}}");
        let remove = b"{\"execute\": \"remove_hostfwd\", \"arguments\": {\"id\": 7}}";
        assert!(ask(&mut server, place.path(), remove).starts_with("{\"error\": {\"desc\": "));
        let long = vec![b' '; REQUEST_MAX + 1];
        assert!(ask(&mut server, place.path(), &long).contains("more than 4095 bytes"));
    }

    #[test]
    fn clients_beyond_the_limit_displace_the_oldest() {
        let (place, mut server) = server();
        let connect = || UnixStream::connect(place.path().join("api")).unwrap();
        let mut oldest = connect();
        let others: Vec<_> = (0..CLIENTS_MAX).map(|_| connect()).collect();
        server.accept();
        assert_eq!((server.clients.len(), others.len()), (CLIENTS_MAX, CLIENTS_MAX));
        assert_eq!(oldest.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn socket_is_accessible_to_its_user_only_and_replaces_an_earlier_one() {
        use std::os::unix::fs::PermissionsExt;
        let (place, _server) = server();
        let path = place.path().join("api");
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{mode:o}");
        ApiServer::bind("--api-socket", &path).unwrap();
        std::fs::write(place.path().join("file"), "kept").unwrap();
        assert!(ApiServer::bind("--api-socket", &place.path().join("file")).is_err());
    }
}
