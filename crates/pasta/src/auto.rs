//! Automatic ports: once a second, the session looks for listeners at one side, opens the same ports of the other side for
//! them, and closes the ports of listeners that are gone. With `-t auto` and `-u auto` the listeners are those of the
//! namespace; with `-T auto` and `-U auto`, those at the host's loopback.
//!
//! ```text
//! process in the namespace                 session
//!   opens /proc/net/{tcp,tcp6,udp,udp6} ──> reads them again each second
//!                                           ForwardedPorts::listen, ForwardedPorts::close ──> uplink
//!                                           reads the host's files
//!   listens at 127.0.0.1 and ::1    <────── NamespaceProcess::listen, ForwardedPorts::open ──> uplink
//! ```
//!
//! A file of `/proc/net` shows the namespace in which it was opened. So nothing of the session has to be in the
//! namespace. The command in the namespace decides about its listeners: the session reads a bounded number of bytes,
//! opens a bounded number of ports, and skips each port that is excluded, forwarded by an entry of its own, or taken. A
//! socket that one direction has opened is no listener for the other one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Seek};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::Context;
use ringfence_sandbox::channel::Channel;

use super::auto_forwards::{AutoForwards, TABLES};
use super::messages::Messages;
use super::namespace_process::NamespaceProcess;
use crate::forward_spec::Range;
use ringfence_uplink_process::forward::{Forward, ForwardProtocol};
use ringfence_uplink_process::forwarded_ports::ForwardedPorts;

/// Interval between two scans.
const INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of bytes that one scan reads of one file: about 28,000 sockets. Listeners of TCP come first.
const READ_MAX: u64 = 4 << 20;
/// State of a TCP socket that listens, and of a UDP socket that is bound and not connected.
const LISTENS: &str = "0A";
const BOUND: &str = "07";

/// Direction of automatic ports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Direction {
    /// From the host to listeners of the namespace.
    ToGuest,
    /// From the namespace's loopback to listeners at the host's.
    ToHost,
}

/// Scanner of one side's listeners, and the ports that are open for them at the other side.
#[derive(Debug)]
struct Scan {
    direction: Direction,
    wanted: Vec<AutoForwards>,
    tables: Vec<(ForwardProtocol, File)>,
    open: BTreeMap<(ForwardProtocol, SocketAddr), u32>,
    ephemeral: Range,
}

/// Automatic ports of both directions.
#[derive(Debug)]
pub(super) struct Auto {
    to_guest: Scan,
    to_host: Scan,
    next: Instant,
}

/// Parts of a session by which its scans open ports, and close them.
pub(super) struct Opener<'a> {
    pub(super) channel: &'a Channel,
    pub(super) ports: &'a mut ForwardedPorts,
    /// Process that listens in the namespace.
    pub(super) namespace_process: Option<&'a NamespaceProcess>,
    pub(super) messages: &'a mut Messages,
}

impl Auto {
    /// Creates scanners: of these files of the namespace, in the order of [`TABLES`], and of the host. Returns `None` if
    /// no port is wanted.
    ///
    /// # Errors
    ///
    /// Returns an error if the host's files cannot be opened.
    pub(super) fn new(
        to_guest: Vec<AutoForwards>,
        files: Vec<OwnedFd>,
        to_host: Vec<AutoForwards>,
    ) -> anyhow::Result<Option<Auto>> {
        if to_guest.is_empty() && to_host.is_empty() {
            return Ok(None);
        }
        let mut of_host = Vec::new();
        if !to_host.is_empty() {
            for name in TABLES {
                let path = format!("/proc/net/{name}");
                let file = File::open(&path).with_context(|| path)?;
                of_host.push(file.into());
            }
        }
        Ok(Some(Auto {
            to_guest: Scan::new(Direction::ToGuest, to_guest, files),
            to_host: Scan::new(Direction::ToHost, to_host, of_host),
            next: Instant::now(),
        }))
    }

    /// Returns the time of the next scan.
    pub(super) fn deadline(&self) -> Instant {
        self.next
    }

    /// Scans if it is time to.
    ///
    /// # Errors
    ///
    /// Returns a failure of the uplink, or of the process in the namespace, after which the session cannot go on.
    pub(super) fn run(&mut self, mut opener: Opener<'_>) -> anyhow::Result<()> {
        if Instant::now() < self.next {
            return Ok(());
        }
        self.next = Instant::now() + INTERVAL;
        // A socket that one scan has opened is no listener for the other one.
        let own = self.to_host.own_ports();
        self.to_guest.run(&own, &mut opener)?;
        let own = self.to_guest.own_ports();
        self.to_host.run(&own, &mut opener)
    }
}

impl Scan {
    fn new(direction: Direction, wanted: Vec<AutoForwards>, files: Vec<OwnedFd>) -> Scan {
        let protocol = |name: &str| match name {
            "tcp" | "tcp6" => ForwardProtocol::Tcp,
            _ => ForwardProtocol::Udp,
        };
        let tables = TABLES.iter().zip(files);
        let tables = tables.map(|(name, file)| (protocol(name), File::from(file))).collect();
        let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range");
        let ephemeral = range
            .ok()
            .and_then(|text| ephemeral(&text))
            .unwrap_or(Range { first: 32768, last: 60999 });
        Scan { direction, wanted, tables, open: BTreeMap::new(), ephemeral }
    }

    /// Returns the ports that are open.
    fn own_ports(&self) -> BTreeSet<(ForwardProtocol, u16)> {
        self.open.keys().map(|(protocol, at)| (*protocol, at.port())).collect()
    }

    /// Opens ports of new listeners, except for `own` ones, and closes those of listeners that are gone.
    fn run(
        &mut self,
        own: &BTreeSet<(ForwardProtocol, u16)>,
        opener: &mut Opener<'_>,
    ) -> anyhow::Result<()> {
        if self.wanted.is_empty() {
            return Ok(());
        }
        let mut wanted = self.wanted_ports();
        wanted.retain(|(protocol, at)| !own.contains(&(*protocol, at.port())));
        let gone: Vec<_> = self.open.keys().filter(|key| !wanted.contains(*key)).copied().collect();
        for key in gone {
            if let Some(id) = self.open.remove(&key) {
                opener
                    .messages
                    .step(format_args!("closes {}/{}: its listener is gone", key.1, key.0));
                opener.ports.close(opener.channel, id)?;
            }
        }
        for (protocol, at) in wanted {
            if self.open.contains_key(&(protocol, at)) {
                continue;
            }
            // The port may be taken or need a right: the next scan tries again.
            if let Some(id) = self.open_port(protocol, at, opener)? {
                opener.messages.step(format_args!("forwards {at}/{protocol} to a new listener"));
                self.open.insert((protocol, at), id);
            }
        }
        Ok(())
    }

    /// Opens a port. Returns its number, or `None` if that is not possible now.
    fn open_port(
        &self,
        protocol: ForwardProtocol,
        at: SocketAddr,
        opener: &mut Opener<'_>,
    ) -> anyhow::Result<Option<u32>> {
        let opened = match self.direction {
            Direction::ToGuest => opener.ports.listen(opener.channel, protocol, at, at.port()),
            Direction::ToHost => {
                let Some(namespace_process) = opener.namespace_process else { return Ok(None) };
                let Ok(socket) = namespace_process.listen(protocol, at)? else { return Ok(None) };
                let (ipv6, guest_port) = (at.is_ipv6(), at.port());
                let forward = Forward { protocol, ipv6, guest_port, to_host: true };
                opener.ports.open(opener.channel, forward, socket)
            }
        };
        match opened {
            Ok(id) => Ok(Some(id)),
            Err(error) if error.is_of_port() => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the ports that the listeners of one side call for at the other side.
    fn wanted_ports(&mut self) -> BTreeSet<(ForwardProtocol, SocketAddr)> {
        let mut found = BTreeSet::new();
        for (protocol, file) in &mut self.tables {
            let mut text = Vec::new();
            let read = file.rewind().and_then(|()| (&*file).take(READ_MAX).read_to_end(&mut text));
            // A file that cannot be read has no listeners.
            if read.is_ok() {
                let text = String::from_utf8_lossy(&text);
                found.extend(listeners(&text, *protocol).map(|(ip, port)| (*protocol, ip, port)));
            }
        }
        let mut ports = BTreeSet::new();
        for wanted in &self.wanted {
            let chosen = found
                .iter()
                .filter(|(protocol, _, port)| wanted.wants(*protocol, *port, self.ephemeral));
            for (protocol, listens, port) in chosen {
                let leads = |ip: &&IpAddr| match self.direction {
                    Direction::ToGuest => true,
                    Direction::ToHost => is_reached_at(*listens, **ip),
                };
                let at = wanted.addresses.iter().filter(leads);
                ports.extend(at.map(|ip| (*protocol, SocketAddr::new(*ip, *port))));
            }
        }
        ports
    }
}

/// Returns `true` if a connection to `ip` reaches a listener at `listens`. An IPv6 listener at all addresses may take
/// IPv4 as well.
fn is_reached_at(listens: IpAddr, ip: IpAddr) -> bool {
    let listens = listens.to_canonical();
    listens == ip
        || listens.is_unspecified() && (listens.is_ipv6() || listens.is_ipv4() == ip.is_ipv4())
}

/// Returns the addresses and ports of the listeners in a file of `/proc/net` (proc_pid_net(5)).
fn listeners(text: &str, protocol: ForwardProtocol) -> impl Iterator<Item = (IpAddr, u16)> + '_ {
    let state = if protocol == ForwardProtocol::Tcp { LISTENS } else { BOUND };
    text.lines().skip(1).filter_map(move |line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let (local, _remote, found) = (fields.next()?, fields.next()?, fields.next()?);
        let (ip, port) = local.rsplit_once(':')?;
        let port = u16::from_str_radix(port, 16).ok()?;
        (found == state && port != 0).then_some((address(ip)?, port))
    })
}

/// Parses an address of `/proc/net`: words of 32 bits, whose bytes are those of the address.
fn address(text: &str) -> Option<IpAddr> {
    let word = |at: usize| {
        let word = u32::from_str_radix(text.get(at * 8..at * 8 + 8)?, 16).ok()?;
        Some(word.to_ne_bytes())
    };
    match text.len() {
        8 => Some(IpAddr::from(word(0)?)),
        32 => {
            let words = [word(0)?, word(1)?, word(2)?, word(3)?];
            Some(IpAddr::from(<[u8; 16]>::try_from(words.concat()).ok()?))
        }
        _ => None,
    }
}

/// Parses the sysctl `ip_local_port_range`.
fn ephemeral(text: &str) -> Option<Range> {
    let mut ports = text.split_ascii_whitespace().map(|port| port.parse().ok());
    Some(Range { first: ports.next()??, last: ports.next()?? })
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

    fn auto(listen: &str) -> AutoForwards {
        let listen = match listen.parse().unwrap() {
            crate::forward_spec::PastaForwardSpec::Listen(listen) => listen,
            crate::forward_spec::PastaForwardSpec::None => panic!("no port"),
        };
        let (addresses, taken) = (vec!["0.0.0.0".parse().unwrap()], BTreeSet::from([81]));
        AutoForwards { protocol: ForwardProtocol::Tcp, listen, addresses, taken }
    }

    #[test]
    fn listener_is_found_and_connection_is_not() {
        let found = [("127.0.0.1", 8080), ("0.0.0.0", 22)];
        let found = found.map(|(ip, port)| (ip.parse().unwrap(), port));
        assert_eq!(listeners(TCP, ForwardProtocol::Tcp).collect::<Vec<_>>(), found);
        let udp = TCP.replace(" 0A ", " 07 ");
        assert_eq!(listeners(&udp, ForwardProtocol::Udp).collect::<Vec<_>>(), found);
        assert_eq!(listeners(&udp, ForwardProtocol::Tcp).count(), 0);
    }

    #[test]
    fn excluded_taken_and_ephemeral_ports_are_not_wanted() {
        let range = Range { first: 32768, last: 60999 };
        let tcp = auto("auto,~80");
        let wants = |port| tcp.wants(ForwardProtocol::Tcp, port, range);
        assert!(wants(79) && !wants(80) && !wants(81) && wants(40000));
        assert!(!tcp.wants(ForwardProtocol::Udp, 79, range));
        let udp = AutoForwards { protocol: ForwardProtocol::Udp, ..auto("auto") };
        assert!(
            udp.wants(ForwardProtocol::Udp, 53, range)
                && !udp.wants(ForwardProtocol::Udp, 40000, range)
        );
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
        let mut auto = Scan::new(Direction::ToGuest, vec![auto("auto,~22")], files);
        let port = |text: &str| (ForwardProtocol::Tcp, text.parse().unwrap());
        assert_eq!(auto.wanted_ports(), BTreeSet::from([port("0.0.0.0:8080")]));
        table.set_len(0).unwrap();
        assert_eq!(auto.wanted_ports(), BTreeSet::new());
    }

    #[test]
    fn listener_of_the_host_is_wanted_where_the_loopback_reaches_it() {
        let line = |local: &str| format!("  0: {local} 00000000:0000 0A 0:0 0:0 0 0 0 1");
        let all = [
            "0100007F:0001",
            "3500007F:0035",
            "00000000:0002",
            "020000C0:0003",
            "00000000000000000000000000000000:0004",
            "00000000000000000000000001000000:0005",
            "0000000000000000FFFF00000100007F:0006",
        ];
        let text = format!("head\n{}\n", all.map(line).join("\n"));
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, text.as_bytes()).unwrap();
        let addresses = ["127.0.0.1", "::1"].map(|ip| ip.parse().unwrap()).to_vec();
        let wanted = AutoForwards { addresses, ..auto("auto") };
        let mut scan = Scan::new(Direction::ToHost, vec![wanted], vec![file.into()]);
        let found: Vec<_> = scan.wanted_ports().into_iter().map(|(_, at)| at.to_string()).collect();
        let expected =
            ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:4", "127.0.0.1:6", "[::1]:4", "[::1]:5"];
        assert_eq!(found, expected);
    }

    proptest! {
        #[test]
        fn arbitrary_text_yields_valid_ports(text in "([0-9A-F: \n]|0A|:1F90 ){0,64}") {
            for protocol in [ForwardProtocol::Tcp, ForwardProtocol::Udp] {
                prop_assert!(listeners(&text, protocol).all(|(_, port)| port != 0));
            }
        }
    }
}
