//! Flow distribution over several engines of one guest, each with a thread and a queue of the link.
//!
//! | flow | its engine |
//! |---|---|
//! | TCP connection that the guest opens | the one that its SYN reached |
//! | TCP connection from outside | chosen by a hash of its addresses and ports |
//! | UDP associations of one port of the guest | chosen by a hash of that port: they share one host port |
//! | UDP associations of a forwarded port; multicast; no TCP or UDP, such as echo requests and fragments | the first |
//!
//! A TAP with several queues sends a flow's frames to the queue on which the flow was last answered, and otherwise to one
//! that a hash of its own selects, always the same. So frames of TCP reach the right engine by themselves.
//!
//! A frame that reaches another engine is handed over as a copy; a connection from outside is handed over as its
//! socket. A segment whose connection an engine does not have goes to the engine of the hash, and then to each of the
//! others at most once ([`Visited`]). The last one refuses it.
//!
//! When the forwarded UDP ports change, the first engine publishes them ([`UdpForwards`]), and the other engines read
//! them before their next batch of frames.

use core::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use ringfence_offload::OffloadMeta;
use ringfence_offload::packet::Transport;
use ringfence_sys::counters::Counter;
use ringfence_sys::numbers::{u64_from, usize_from};

use crate::packet::{Mac, Packet};

/// Value that the engines of a guest share. Only the first engine writes.
#[derive(Debug, Default)]
pub struct Published<T> {
    /// Number of changes. It grows while the lock is held, so a reader that sees the new number reads the new
    /// value.
    version: Counter,
    value: Mutex<T>,
}

impl<T: Clone> Published<T> {
    pub(crate) fn publish(&self, value: T) {
        let mut shared = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        *shared = value;
        self.version.add(1);
    }

    pub(crate) fn read(&self) -> (u64, T) {
        let shared = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        (self.version.get(), shared.clone())
    }

    /// Returns `true` if the version in force is not `version`.
    pub(crate) fn is_newer_than(&self, version: u64) -> bool {
        self.version.get() != version
    }
}

/// Targets of forwarded UDP ports.
pub type UdpForwards = Published<Vec<u16>>;

/// One engine's position among the engines of a guest.
#[derive(Clone, Debug)]
pub struct Share {
    /// Index of the engine, from 0.
    pub index: usize,
    /// Number of the guest's engines.
    pub of: usize,
    /// Ports of the guest that are targets of forwarded UDP ports, of all engines of the guest.
    pub udp_forwards: Arc<UdpForwards>,
    /// Copy of `udp_forwards`, and its version.
    known: (u64, Vec<u16>),
}

impl Default for Share {
    /// Returns the share of a single engine.
    fn default() -> Share {
        Share::new(0, 1, Arc::default())
    }
}

/// Engines that did not have the connection of a segment: a bit for each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Visited(u64);

impl Visited {
    fn with(self, engine: usize) -> Visited {
        Visited(self.0 | Visited::bit(engine))
    }

    fn has(self, engine: usize) -> bool {
        self.0 & Visited::bit(engine) != 0
    }

    /// Returns the bit of an engine. Engines beyond the 64th have none, and are never visited.
    fn bit(engine: usize) -> u64 {
        u32::try_from(engine).ok().and_then(|engine| 1_u64.checked_shl(engine)).unwrap_or(0)
    }
}

/// Frame or connection that belongs to another engine.
#[derive(Debug)]
pub enum Handoff {
    /// Frame of the guest whose checksum was verified.
    Frame {
        /// Bytes from the Ethernet header on.
        bytes: Vec<u8>,
        /// Offload work that is left to do.
        meta: OffloadMeta,
        /// Engines that do not have the frame's connection.
        visited: Visited,
    },
    /// Addresses of the guest, learned from a packet.
    Learned { mac: Mac, source: IpAddr },
    /// Notice that a value which the engines share has changed.
    Wake,
    /// Accepted connection from outside.
    Connection {
        /// Socket of the connection.
        file: OwnedFd,
        /// Address of the client as the guest sees it.
        client: SocketAddr,
        /// Address of the guest that the connection leads to.
        guest: SocketAddr,
    },
}

impl Share {
    /// Returns the position of engine `index` among `of` engines, which share `udp_forwards`.
    pub fn new(index: usize, of: usize, udp_forwards: Arc<UdpForwards>) -> Share {
        Share { index, of, udp_forwards, known: (0, Vec::new()) }
    }

    /// Publishes the targets of forwarded UDP ports to the other engines.
    pub(crate) fn set_udp_forwards(&mut self, ports: Vec<u16>) {
        self.udp_forwards.publish(ports);
        self.refresh();
    }

    /// Reads the targets of forwarded UDP ports again if they have changed.
    pub(crate) fn refresh(&mut self) {
        if self.of > 1 && self.udp_forwards.is_newer_than(self.known.0) {
            self.known = self.udp_forwards.read();
        }
    }

    /// Returns the index of the engine that owns an unfragmented packet without a TCP connection.
    pub(crate) fn of_packet(&self, packet: &Packet<'_>) -> usize {
        let Transport::Udp(_) = packet.layers.transport() else { return 0 };
        let Some(&from) = packet.transport().first_chunk() else { return 0 };
        let from = u16::from_be_bytes(from);
        if self.known.1.contains(&from) {
            return 0;
        }
        self.spread([(packet.source, from).into()])
    }

    /// Returns the index of the engine that owns a TCP connection from outside.
    pub(crate) fn of_flow(&self, guest: SocketAddr, remote: SocketAddr) -> usize {
        self.spread([guest, remote])
    }

    /// Returns the next engine that may have the connection of a segment, with all that do not have it, this one among
    /// them. Returns `None` if no engine has it.
    pub(crate) fn next_of_flow(
        &self,
        guest: SocketAddr,
        remote: SocketAddr,
        visited: Visited,
    ) -> Option<(usize, Visited)> {
        let visited = visited.with(self.index);
        let likely = self.of_flow(guest, remote);
        let mut others = core::iter::once(likely).chain(0..self.of.min(64));
        others.find(|engine| !visited.has(*engine)).map(|engine| (engine, visited))
    }

    /// Selects an engine by the ends of a flow.
    fn spread<const ENDS: usize>(&self, ends: [SocketAddr; ENDS]) -> usize {
        /// Mixes bytes into an FNV-1a hash. A guest that chooses addresses for one engine slows only itself.
        fn mix(hash: u64, bytes: &[u8]) -> u64 {
            bytes
                .iter()
                .fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
        }
        let mut hash = 0xcbf2_9ce4_8422_2325;
        for end in ends {
            hash = match end {
                SocketAddr::V4(end) => mix(hash, &end.ip().octets()),
                SocketAddr::V6(end) => mix(hash, &end.ip().octets()),
            };
            hash = mix(hash, &end.port().to_be_bytes());
        }
        // The low bits of the product depend little on the first bytes.
        let spread = (hash ^ (hash >> 32)) % u64_from(self.of.max(1));
        usize_from(spread)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forwarded_udp_port_is_known_to_every_engine_until_it_is_removed() {
        let forwards = Arc::<UdpForwards>::default();
        let mut engines = [0, 1].map(|index| Share::new(index, 2, Arc::clone(&forwards)));
        for ports in [vec![53, 80], vec![80], vec![]] {
            engines[0].set_udp_forwards(ports.clone());
            engines[1].refresh();
            assert_eq!((&engines[0].known.1, &engines[1].known.1), (&ports, &ports));
        }
    }

    #[test]
    fn flows_are_spread_evenly_over_engines() {
        let share = Share { of: 4, ..Share::default() };
        let mut counts = [0; 4];
        for port in 0..4000 {
            let guest = SocketAddr::from(([10, 0, 0, 2], 30_000 + port));
            counts[share.of_flow(guest, SocketAddr::from(([192, 0, 2, 1], 80)))] += 1;
        }
        assert!(counts.iter().all(|count| (700..1300).contains(count)), "{counts:?}");
        let guest = SocketAddr::from(([10, 0, 0, 2], 30_000));
        assert_eq!(Share::default().of_flow(guest, guest), 0);
    }

    #[test]
    fn segment_without_connection_visits_the_engine_of_its_hash_and_then_each_other_one_once() {
        let guest = SocketAddr::from(([10, 0, 0, 2], 30_000));
        for remote in (0..50).map(|port| SocketAddr::from(([192, 0, 2, 1], port))) {
            for first in 0..4 {
                let (mut at, mut visited, mut path) = (first, Visited::default(), vec![first]);
                loop {
                    let share = Share::new(at, 4, Arc::default());
                    let Some((next, all)) = share.next_of_flow(guest, remote, visited) else {
                        break;
                    };
                    (at, visited) = (next, all);
                    path.push(next);
                }
                let likely = Share::new(0, 4, Arc::default()).of_flow(guest, remote);
                assert_eq!(path[usize::from(first != likely)], likely, "{path:?}");
                path.sort_unstable();
                assert_eq!(path, [0, 1, 2, 3]);
            }
        }
    }
}
