//! Several engines for one guest, each with a thread and a queue of the link of its own.
//!
//! # Theory of operation
//!
//! A conversation is one engine's, and which is a matter of its addresses alone, so
//! that any engine knows. The kernel of a TAP with several queues gives a flow to the queue on which it was
//! last answered: so frames come to their engine by themselves, but for the first ones, and those after
//! seconds of silence. What comes to another engine is handed over, as a copy; connections from outside are
//! handed over as they are. Whatever is of no conversation of TCP's or UDP's (echo requests, fragments
//! until they are put together) is the first engine's, and so is everything of a forwarded port of UDP.

use core::net::SocketAddr;
use std::os::fd::OwnedFd;

use ringfence_offload::OffloadMeta;
use ringfence_offload::packet::Transport;

use crate::packet::Packet;

/// Which of several engines one is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// Its number, from 0.
    pub index: usize,
    /// How many there are.
    pub of: usize,
    /// Ports of the guest that forwarded ports of UDP lead to.
    pub udp_forwards: Vec<u16>,
}

impl Default for Share {
    /// The only one.
    fn default() -> Share {
        Share { index: 0, of: 1, udp_forwards: Vec::new() }
    }
}

/// What is another engine's.
#[derive(Debug)]
pub enum Handed {
    /// A frame of the guest's, checked as far as checksums go.
    Frame {
        /// From the Ethernet header on.
        octets: Vec<u8>,
        /// What is left to be done to it.
        meta: OffloadMeta,
    },
    /// A connection from outside.
    Connection {
        /// The socket.
        file: OwnedFd,
        /// Who it is from, as the guest knows them.
        client: SocketAddr,
        /// Where it leads.
        guest: SocketAddr,
    },
}

impl Share {
    /// Whose a packet is, which is no fragment.
    pub(crate) fn of_packet(&self, packet: &Packet<'_>) -> usize {
        let is_udp = match packet.layers.transport() {
            Transport::Tcp(_) => false,
            Transport::Udp(_) => true,
            _ => return 0,
        };
        let Some(&[s0, s1, d0, d1]) = packet.transport().first_chunk() else { return 0 };
        let (from, to) = (u16::from_be_bytes([s0, s1]), u16::from_be_bytes([d0, d1]));
        if is_udp && self.udp_forwards.contains(&from) {
            return 0;
        }
        self.of_flow((packet.source, from).into(), (packet.destination, to).into())
    }

    /// Whose a conversation is.
    pub(crate) fn of_flow(&self, guest: SocketAddr, remote: SocketAddr) -> usize {
        /// FNV-1a. A guest may choose its addresses so that one engine has all to do: its own loss.
        fn mix(hash: u64, octets: &[u8]) -> u64 {
            octets
                .iter()
                .fold(hash, |hash, octet| (hash ^ u64::from(*octet)).wrapping_mul(0x0100_0000_01b3))
        }
        let mut hash = 0xcbf2_9ce4_8422_2325;
        for end in [guest, remote] {
            hash = match end {
                SocketAddr::V4(end) => mix(hash, &end.ip().octets()),
                SocketAddr::V6(end) => mix(hash, &end.ip().octets()),
            };
            hash = mix(hash, &end.port().to_be_bytes());
        }
        // The low bits of such a product know little of the octets that came first.
        let spread = (hash ^ (hash >> 32)) % u64::try_from(self.of.max(1)).unwrap_or(1);
        usize::try_from(spread).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversations_are_spread_over_all_engines() {
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
