//! Flow distribution over several engines of one guest, each with a thread and a queue of the link.
//!
//! A hash of a flow's addresses and ports selects its engine, so every engine can compute the owner. A TAP
//! with several queues sends a flow's frames to the queue on which the flow was last answered. So frames
//! reach the right engine by themselves, except the first ones and those after seconds of silence.
//!
//! A frame that reaches another engine is handed over as a copy; a connection from outside is handed over
//! as its socket. The first engine owns everything without a TCP or UDP flow: echo requests, and fragments
//! until they are joined. It also owns all associations of forwarded UDP ports. When these ports change, it
//! publishes them ([`UdpForwards`]), and the other engines read them before their next batch of frames.

use core::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use ringfence_offload::OffloadMeta;
use ringfence_offload::packet::Transport;
use ringfence_sys::counters::Counter;
use ringfence_sys::numbers::{u64_from, usize_from};

use crate::packet::Packet;

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

/// Frame or connection that belongs to another engine.
#[derive(Debug)]
pub enum Handoff {
    /// Frame of the guest whose checksum was verified.
    Frame {
        /// Bytes from the Ethernet header on.
        bytes: Vec<u8>,
        /// Offload work that is left to do.
        meta: OffloadMeta,
    },
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

    /// Returns the index of the engine that owns an unfragmented packet's flow.
    pub(crate) fn of_packet(&self, packet: &Packet<'_>) -> usize {
        let is_udp = match packet.layers.transport() {
            Transport::Tcp(_) => false,
            Transport::Udp(_) => true,
            _ => return 0,
        };
        let Some(&[s0, s1, d0, d1]) = packet.transport().first_chunk() else { return 0 };
        let (from, to) = (u16::from_be_bytes([s0, s1]), u16::from_be_bytes([d0, d1]));
        if is_udp && self.known.1.contains(&from) {
            return 0;
        }
        self.of_flow((packet.source, from).into(), (packet.destination, to).into())
    }

    /// Returns the index of the engine that owns a flow.
    pub(crate) fn of_flow(&self, guest: SocketAddr, remote: SocketAddr) -> usize {
        /// Mixes bytes into an FNV-1a hash. A guest that chooses addresses for one engine slows only itself.
        fn mix(hash: u64, bytes: &[u8]) -> u64 {
            bytes
                .iter()
                .fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
        }
        let mut hash = 0xcbf2_9ce4_8422_2325;
        for end in [guest, remote] {
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
}
