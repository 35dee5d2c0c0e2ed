//! Automatic ports (`-t auto`, `-u auto`): once a second, the session looks for listeners in the namespace, opens
//! the same ports of the host for them, and closes the ports of listeners that are gone.
//!
//! ```text
//! process in the namespace                 session
//!   opens /proc/net/{tcp,tcp6,udp,udp6} ──> reads them again each second
//!                                           RunningPorts::listen, RunningPorts::close ──> uplink
//! ```
//!
//! A file of `/proc/net` shows the namespace in which it was opened. So nothing of the session has to be in the
//! namespace. The command in the namespace decides about its listeners: the session reads a bounded number of bytes,
//! opens a bounded number of ports, and skips each port that is excluded, forwarded by an entry of its own, or taken.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Seek};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use ringfence_sandbox::channel::Channel;
use ringfence_uplink::port_spec::Listen;

use super::messages::Messages;
use crate::uplink::forward::Protocol;
use crate::uplink::ports::{PortFailure, RunningPorts};

/// Interval between two scans.
const INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of bytes that one scan reads of one file: about 28,000 sockets. Listeners of TCP come first.
const READ_MAX: u64 = 4 << 20;
/// Sockets of the namespace's network: their names in `/proc/net`.
pub(super) const TABLES: [&str; 4] = ["tcp", "tcp6", "udp", "udp6"];

/// State of a TCP socket that listens, and of a UDP socket that is bound and not connected.
const LISTENS: &str = "0A";
const BOUND: &str = "07";

/// Option `auto` of one protocol.
#[derive(Clone, Debug)]
pub(super) struct AutoPorts {
    pub(super) protocol: Protocol,
    pub(super) listen: Listen,
    /// Addresses of the host at which ports are opened.
    pub(super) addresses: Vec<IpAddr>,
    /// Ports with an entry of their own.
    pub(super) taken: BTreeSet<u16>,
}

impl AutoPorts {
    /// Returns `true` if a listener at this port is to be forwarded. Ephemeral ports of UDP belong to clients.
    fn wants(&self, protocol: Protocol, port: u16, ephemeral: (u16, u16)) -> bool {
        let is_client = protocol == Protocol::Udp && (ephemeral.0..=ephemeral.1).contains(&port);
        protocol == self.protocol
            && !is_client
            && !self.taken.contains(&port)
            && !self.listen.is_excluded(port)
    }
}

/// Scanner of a namespace's listeners, and the ports that it has opened.
#[derive(Debug)]
pub(super) struct Auto {
    wanted: Vec<AutoPorts>,
    tables: Vec<(Protocol, File)>,
    open: BTreeMap<(Protocol, SocketAddr), u32>,
    ephemeral: (u16, u16),
    next: Instant,
}

impl Auto {
    /// Creates a scanner of these files, in the order of [`TABLES`].
    pub(super) fn new(wanted: Vec<AutoPorts>, files: Vec<OwnedFd>) -> Auto {
        let protocol = |name: &str| match name {
            "tcp" | "tcp6" => Protocol::Tcp,
            _ => Protocol::Udp,
        };
        let tables = TABLES.iter().zip(files);
        let tables = tables.map(|(name, file)| (protocol(name), File::from(file))).collect();
        let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range");
        let ephemeral = range.ok().and_then(|text| ephemeral(&text)).unwrap_or((32768, 60999));
        Auto { wanted, tables, open: BTreeMap::new(), ephemeral, next: Instant::now() }
    }

    /// Returns the time of the next scan.
    pub(super) fn deadline(&self) -> Instant {
        self.next
    }

    /// Scans if it is time to.
    ///
    /// # Errors
    ///
    /// Returns a failure of the uplink, after which the session cannot go on.
    pub(super) fn run(
        &mut self,
        channel: &Channel,
        ports: &mut RunningPorts,
        messages: &mut Messages,
    ) -> Result<(), PortFailure> {
        if Instant::now() < self.next {
            return Ok(());
        }
        self.next = Instant::now() + INTERVAL;
        let wanted = self.wanted_ports();
        let gone: Vec<_> = self.open.keys().filter(|key| !wanted.contains(*key)).copied().collect();
        for key in gone {
            if let Some(id) = self.open.remove(&key) {
                messages.step(format_args!("closes {}/{}: its listener is gone", key.1, key.0));
                ports.close(channel, id)?;
            }
        }
        for (protocol, at) in wanted {
            if self.open.contains_key(&(protocol, at)) {
                continue;
            }
            match ports.listen(channel, protocol, at, at.port()) {
                Ok(id) => {
                    messages.step(format_args!("forwards {at}/{protocol} to a new listener"));
                    self.open.insert((protocol, at), id);
                }
                // The port is taken or needs a right: the next scan tries again.
                Err(error) if error.is_of_port() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Returns the ports of the host that the listeners of the namespace call for.
    fn wanted_ports(&mut self) -> BTreeSet<(Protocol, SocketAddr)> {
        let mut found = BTreeSet::new();
        for (protocol, file) in &mut self.tables {
            let mut text = Vec::new();
            let read = file.rewind().and_then(|()| (&*file).take(READ_MAX).read_to_end(&mut text));
            // A file that cannot be read has no listeners.
            if read.is_ok() {
                let text = String::from_utf8_lossy(&text);
                found.extend(listeners(&text, *protocol).map(|port| (*protocol, port)));
            }
        }
        let mut ports = BTreeSet::new();
        for wanted in &self.wanted {
            let chosen = found
                .iter()
                .filter(|(protocol, port)| wanted.wants(*protocol, *port, self.ephemeral));
            for (protocol, port) in chosen {
                let at = wanted.addresses.iter().map(|ip| SocketAddr::new(*ip, *port));
                ports.extend(at.map(|at| (*protocol, at)));
            }
        }
        ports
    }
}

/// Returns the ports of the listeners in a file of `/proc/net` (proc_pid_net(5)).
fn listeners(text: &str, protocol: Protocol) -> impl Iterator<Item = u16> + '_ {
    let state = if protocol == Protocol::Tcp { LISTENS } else { BOUND };
    text.lines().skip(1).filter_map(move |line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let (local, _remote, found) = (fields.next()?, fields.next()?, fields.next()?);
        let (_, port) = local.rsplit_once(':')?;
        let port = u16::from_str_radix(port, 16).ok()?;
        (found == state && port != 0).then_some(port)
    })
}

/// Parses the sysctl `ip_local_port_range`.
fn ephemeral(text: &str) -> Option<(u16, u16)> {
    let mut ports = text.split_ascii_whitespace().map(|port| port.parse().ok());
    Some((ports.next()??, ports.next()??))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TCP: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0
   1: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 2 1 0 100 0 0 10 0
   2: 0100007F:0050 0100007F:9C40 01 00000000:00000000 00:00000000 00000000     0        0 3 1 0 100 0 0 10 0
";

    fn auto(listen: &str) -> AutoPorts {
        let listen = match listen.parse().unwrap() {
            ringfence_uplink::port_spec::PortSpec::Listen(listen) => listen,
            ringfence_uplink::port_spec::PortSpec::None => panic!("no port"),
        };
        let (addresses, taken) = (vec!["0.0.0.0".parse().unwrap()], BTreeSet::from([81]));
        AutoPorts { protocol: Protocol::Tcp, listen, addresses, taken }
    }

    #[test]
    fn listener_is_found_and_connection_is_not() {
        assert_eq!(listeners(TCP, Protocol::Tcp).collect::<Vec<_>>(), [8080, 22]);
        let udp = TCP.replace(" 0A ", " 07 ");
        assert_eq!(listeners(&udp, Protocol::Udp).collect::<Vec<_>>(), [8080, 22]);
        assert_eq!(listeners(&udp, Protocol::Tcp).count(), 0);
    }

    #[test]
    fn excluded_taken_and_ephemeral_ports_are_not_wanted() {
        let range = (32768, 60999);
        let tcp = auto("auto,~80");
        let wants = |port| tcp.wants(Protocol::Tcp, port, range);
        assert!(wants(79) && !wants(80) && !wants(81) && wants(40000));
        assert!(!tcp.wants(Protocol::Udp, 79, range));
        let udp = AutoPorts { protocol: Protocol::Udp, ..auto("auto") };
        assert!(udp.wants(Protocol::Udp, 53, range) && !udp.wants(Protocol::Udp, 40000, range));
        assert_eq!(ephemeral("32768\t60999\n"), Some(range));
        assert_eq!(ephemeral(""), None);
    }

    #[test]
    fn ports_follow_the_listeners_of_the_scanned_files() {
        let file = |text: &str| {
            let mut file = tempfile::tempfile().unwrap();
            std::io::Write::write_all(&mut file, text.as_bytes()).unwrap();
            file
        };
        let table = file(TCP);
        let files = vec![table.try_clone().unwrap().into(), file("").into()];
        let mut auto = Auto::new(vec![auto("auto,~22")], files);
        let port = |text: &str| (Protocol::Tcp, text.parse().unwrap());
        assert_eq!(auto.wanted_ports(), BTreeSet::from([port("0.0.0.0:8080")]));
        table.set_len(0).unwrap();
        assert_eq!(auto.wanted_ports(), BTreeSet::new());
    }

    proptest! {
        #[test]
        fn arbitrary_text_yields_valid_ports(text in "([0-9A-F: \n]|0A|:1F90 ){0,64}") {
            for protocol in [Protocol::Tcp, Protocol::Udp] {
                prop_assert!(listeners(&text, protocol).all(|port| port != 0));
            }
        }
    }
}
