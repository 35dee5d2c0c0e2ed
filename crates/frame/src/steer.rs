//! Which queue of a guest a packet takes.
//!
//! Packets of one flow take one queue, so that they stay in order. A guest that set up hashing over
//! its control ring gets what it asked for ([`Steering`]); netif.h, "Hash Mapping".

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::sync::Arc;

use ringfence_offload::Layers;
use ringfence_offload::flow_hash::{FlowFieldSet, FlowFields, ToeplitzKey};
use ringfence_wire::netif::ctrl::HashTypes;
use ringfence_wire::netif::extra::{HashAlgorithm, HashType, PacketHash};

use crate::batch::Batch;

/// How a guest wants its packets spread. Checked: every entry of the table names a queue there is.
#[derive(Clone, Debug)]
pub struct Steering {
    key: ToeplitzKey,
    fields: FlowFieldSet,
    /// From hash modulo length to queue; empty: the hash modulo the number of queues.
    table: Vec<u16>,
    queues: u16,
}

/// Spreads over queues by a hash of our own, which no guest knows.
#[derive(Clone, Debug)]
pub struct SecretSpread(Steering);

impl Steering {
    /// Spreads over `queues` queues, at least one, by `table`, whose entries are below that.
    pub fn new(key: &[u8], types: HashTypes, table: Vec<u16>, queues: u16) -> Steering {
        let fields = FlowFieldSet {
            ipv4: types.contains(HashType::Ipv4),
            ipv4_tcp: types.contains(HashType::Ipv4Tcp),
            ipv6: types.contains(HashType::Ipv6),
            ipv6_tcp: types.contains(HashType::Ipv6Tcp),
        };
        Steering { key: ToeplitzKey::new(key), fields, table, queues: queues.max(1) }
    }

    /// The hash of a packet with these first bytes and this length; `None` if nothing of it is to
    /// be hashed.
    pub fn hash(&self, header: &[u8], frame_len: usize) -> Option<PacketHash> {
        let layers = Layers::parse(header, u32::try_from(frame_len).ok()?).ok()?;
        let (fields, value) = self.key.hash_packet(header, &layers, self.fields)?;
        let kind = match fields {
            FlowFields::Ipv4 => HashType::Ipv4,
            FlowFields::Ipv4Tcp => HashType::Ipv4Tcp,
            FlowFields::Ipv6 => HashType::Ipv6,
            FlowFields::Ipv6Tcp => HashType::Ipv6Tcp,
        };
        Some(PacketHash { kind, algorithm: HashAlgorithm::Toeplitz, value })
    }

    /// The queue of packets with that hash.
    pub fn queue(&self, hash: u32) -> u16 {
        let of = |n: usize| hash as usize % n;
        match self.table.len() {
            0 => u16::try_from(of(usize::from(self.queues))).unwrap_or(0),
            entries => self.table[of(entries)].min(self.queues - 1),
        }
    }
}

/// Spreads frames over the queues of a vif: by what the guest set up, or else by a hash of our own.
#[derive(Debug)]
pub struct Chooser {
    by_guest: Option<Arc<Steering>>,
    own: SecretSpread,
    shares: Vec<Vec<u32>>,
    /// These are every so-manieth of the guest's queues.
    stride: usize,
}

impl SecretSpread {
    /// With a key of its own, at random.
    pub fn new() -> SecretSpread {
        // A guest that knew the key could make the flows of others meet in one queue.
        let word = || RandomState::new().build_hasher().finish().to_ne_bytes();
        let key: Vec<u8> = (0..5).flat_map(|_| word()).collect();
        SecretSpread(Steering::new(&key, HashTypes::ALL, Vec::new(), 1))
    }

    /// Which of `queues` queues a packet with these first bytes and this length takes. What has no
    /// flow takes the first.
    pub fn queue(&self, header: &[u8], frame_len: usize, queues: usize) -> usize {
        let Some(hash) = self.0.hash(header, frame_len) else { return 0 };
        mixed(hash.value) as usize % queues.max(1)
    }
}

impl Default for SecretSpread {
    fn default() -> SecretSpread {
        SecretSpread::new()
    }
}

/// Every bit of the result depends on every bit of the hash.
///
/// Toeplitz's hash is linear: with one key in twenty, flows that differ in six bits of a port have but
/// one or two values of the two lowest bits of their hashes, and would leave half of four queues
/// without work. What a guest asks for is to be followed to the letter; what we choose need not be.
/// (The finalizer of `MurmurHash3`, which is in the public domain.)
fn mixed(hash: u32) -> u32 {
    let hash = (hash ^ (hash >> 16)).wrapping_mul(0x85eb_ca6b);
    let hash = (hash ^ (hash >> 13)).wrapping_mul(0xc2b2_ae35);
    hash ^ (hash >> 16)
}

impl Chooser {
    /// Spreads over `queues` queues.
    pub fn new(queues: usize) -> Chooser {
        Chooser::strided(queues, 1)
    }

    /// Spreads over `queues` queues, which are every `stride`th of the guest's.
    pub fn strided(queues: usize, stride: usize) -> Chooser {
        let shares = vec![Vec::new(); queues];
        Chooser { by_guest: None, own: SecretSpread::new(), shares, stride: stride.max(1) }
    }

    /// Spreads as the guest set up, from now on.
    pub fn follow(&mut self, steering: Option<Arc<Steering>>) {
        self.by_guest = steering;
    }

    /// The frames of each queue, in their order. What has no flow takes the first.
    pub fn split(&mut self, batch: &Batch, frames: &[u32]) -> &[Vec<u32>] {
        self.shares.iter_mut().for_each(Vec::clear);
        for &index in frames {
            let (header, len) = batch.get(index).map_or((&[][..], 0), |f| (f.header(), f.len()));
            let place = match &self.by_guest {
                Some(steering) => {
                    let hash = steering.hash(header, len);
                    let queue = hash.map_or(0, |hash| steering.queue(hash.value));
                    usize::from(queue) / self.stride
                }
                None => self.own.queue(header, len, self.shares.len()),
            };
            if let Some(share) = self.shares.get_mut(place) {
                share.push(index);
            }
        }
        &self.shares
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_or_else_the_number_of_queues() {
        let types = HashTypes::ALL;
        let plain = Steering::new(&[], types, vec![], 3);
        assert_eq!([0, 1, 2, 3, u32::MAX].map(|h| plain.queue(h)), [0, 1, 2, 0, 0]);
        let table = Steering::new(&[], types, vec![2, 0], 3);
        assert_eq!([0, 1, 2, 3].map(|h| table.queue(h)), [2, 0, 2, 0]);
    }

    /// A TCP segment from that port.
    fn segment(port: u16) -> [u8; 60] {
        let mut frame = [0u8; 60];
        frame[12..14].copy_from_slice(&0x0800u16.to_be_bytes());
        frame[14] = 0x45;
        frame[16..18].copy_from_slice(&46u16.to_be_bytes());
        frame[23] = 6;
        frame[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        frame[34..36].copy_from_slice(&port.to_be_bytes());
        frame[46] = 0x50;
        frame
    }

    #[test]
    fn neighbouring_ports_are_spread_whatever_the_key() {
        for _ in 0..500 {
            let spread = SecretSpread::new();
            let mut flows = [0; 4];
            for port in 0..64 {
                flows[spread.queue(&segment(port), 60, 4)] += 1;
            }
            // 16 each on average; with keys alone one of twenty left a queue empty.
            assert!(flows.iter().all(|count| *count > 0), "{flows:?}");
        }
        assert_eq!(SecretSpread::new().queue(&[0; 60], 60, 4), 0, "no flow");
    }

    #[test]
    fn what_is_no_packet_has_no_hash() {
        let steering = Steering::new(&[1; 40], HashTypes::ALL, vec![], 1);
        assert_eq!(steering.hash(&[0; 60], 60), None);
        assert_eq!(steering.hash(&[], 0), None);
        let none = Steering::new(&[1; 40], HashTypes::default(), vec![], 1);
        let mut frame = [0u8; 60];
        frame[12..14].copy_from_slice(&0x0800u16.to_be_bytes());
        frame[14] = 0x45;
        frame[16..18].copy_from_slice(&28u16.to_be_bytes());
        frame[23] = 17;
        frame[38..40].copy_from_slice(&8u16.to_be_bytes());
        assert_eq!(none.hash(&frame, 60), None);
        assert!(steering.hash(&frame, 60).is_some_and(|hash| hash.kind == HashType::Ipv4));
    }
}
