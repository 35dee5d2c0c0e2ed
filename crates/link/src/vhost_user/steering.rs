//! Steering of frames to the queue pairs of a guest.
//!
//! A device with several pairs sends a frame to the guest by the pair on which the guest sent the last frame of the same
//! flow (virtio 1.x, 5.1.6.5.6, automatic receive steering). Flows share the entries of a table by a hash, which is the
//! same for both directions. A guest can influence its own table alone.

use ringfence_offload::Layers;
use ringfence_offload::packet::{Network, Transport};
use ringfence_sys::numbers::{bounded, usize_from};

/// Number of entries, a power of two.
const ENTRIES: usize = 1 << BITS;
const BITS: u32 = 10;

/// Table of the pairs of flows.
#[derive(Debug)]
pub(super) struct Steering {
    /// Empty for a device with one pair.
    pairs: Vec<u8>,
}

impl Steering {
    /// Creates the table of a device with so many pairs.
    pub(super) fn new(pairs: usize) -> Steering {
        Steering { pairs: vec![0; if pairs > 1 { ENTRIES } else { 0 }] }
    }

    /// Forgets all flows: the next frame of each is sent by the first pair.
    pub(super) fn forget(&mut self) {
        self.pairs.fill(0);
    }

    /// Records the pair by which the guest sent a frame of `len` bytes that begins with `header`.
    pub(super) fn record(&mut self, header: &[u8], len: usize, pair: usize) {
        if self.pairs.is_empty() {
            return;
        }
        if let Some(entry) = entry(header, len) {
            self.pairs[entry] = bounded(pair, u8::MAX);
        }
    }

    /// Returns the pair for a frame to the guest.
    pub(super) fn pair(&self, frame: &[u8]) -> usize {
        if self.pairs.is_empty() {
            return 0;
        }
        entry(frame, frame.len()).map_or(0, |entry| self.pairs[entry].into())
    }
}

/// Returns the entry of a frame's flow. Frames without an IP header have none.
fn entry(header: &[u8], len: usize) -> Option<usize> {
    let layers = Layers::parse(header, bounded(len, u32::MAX)).ok()?;
    let at = usize::from(layers.network_offset());
    let word = |at: usize| header.get(at..)?.first_chunk().map(|bytes| u32::from_be_bytes(*bytes));
    let mut hash = match layers.network() {
        Network::Ipv4(_) => word(at + 12)? ^ word(at + 16)?,
        Network::Ipv6(_) => (2..10).try_fold(0, |hash, n| Some(hash ^ word(at + 4 * n)?))?,
        Network::Arp | Network::Other(_) => return None,
    };
    if let (Transport::Tcp(_) | Transport::Udp(_), false) =
        (layers.transport(), layers.is_fragment())
    {
        let ports = layers.transport_offset().and_then(|at| word(at.into()));
        let [a, b, c, d] = ports.unwrap_or_default().to_be_bytes();
        hash ^= u32::from(u16::from_be_bytes([a, b]) ^ u16::from_be_bytes([c, d])) << 8;
    }
    // Multiplication by the golden ratio spreads neighbouring addresses and ports.
    Some(usize_from(hash.wrapping_mul(0x9e37_79b1) >> (32 - BITS)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frame of UDP over IPv4 or IPv6 between these hosts and ports.
    fn frame(is_v4: bool, [from, to]: [u8; 2], ports: [u16; 2]) -> Vec<u8> {
        let mut frame = vec![2; 12];
        let payload = [ports[0].to_be_bytes(), ports[1].to_be_bytes(), [0, 8], [0, 0]].concat();
        if is_v4 {
            frame.extend([8, 0, 0x45, 0, 0, 28, 0, 0, 0x40, 0, 64, 17, 0, 0]);
            frame.extend([10, 0, 0, from, 10, 0, 0, to]);
        } else {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 8, 17, 64]);
            let address = |last| [[0xfd; 15].as_slice(), &[last]].concat();
            frame.extend([address(from), address(to)].concat());
        }
        frame.extend(payload);
        frame
    }

    #[test]
    fn frame_to_the_guest_takes_the_pair_of_its_flow() {
        for is_v4 in [true, false] {
            let mut steering = Steering::new(4);
            let sent = frame(is_v4, [1, 2], [4000, 53]);
            let answer = frame(is_v4, [2, 1], [53, 4000]);
            assert_eq!(steering.pair(&answer), 0);
            steering.record(&sent, sent.len(), 3);
            assert_eq!(steering.pair(&answer), 3);
            steering.record(&sent, sent.len(), 2);
            assert_eq!(steering.pair(&answer), 2, "the last frame counts");
            steering.forget();
            assert_eq!(steering.pair(&answer), 0);
        }
    }

    #[test]
    fn flows_spread_over_the_table() {
        let ports = |port| frame(true, [1, 2], [port, 53]);
        let found: std::collections::BTreeSet<_> =
            (4000..4100).filter_map(|port| entry(&ports(port), 42)).collect();
        assert!(found.len() > 50, "{} entries of 100 flows", found.len());
    }

    #[test]
    fn frame_without_a_flow_takes_the_first_pair() {
        let mut steering = Steering::new(2);
        let arp = [&[2; 12][..], &[8, 6], &[0; 28]].concat();
        steering.record(&arp, arp.len(), 1);
        assert_eq!((steering.pair(&arp), steering.pair(&[]), steering.pair(&[0; 5])), (0, 0, 0));
        let sent = frame(true, [1, 2], [1, 2]);
        let mut one = Steering::new(1);
        one.record(&sent, sent.len(), 0);
        assert_eq!(one.pair(&sent), 0);
    }
}
