//! Queue selection: the queue of a vif that a packet takes.
//!
//! All packets of one flow take the same queue and stay in order. [`Steering`] holds the hash
//! configuration that a guest set over its control ring; netif.h, "Hash Mapping".

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::sync::Arc;

use ringfence_offload::Layers;
use ringfence_offload::flow_hash::{FlowFieldSet, FlowFields, ToeplitzKey};
use ringfence_sys::numbers::bounded;

use crate::batch::Batch;

/// Hash configuration of a guest. Every entry of its table is a valid queue number.
#[derive(Clone, Debug)]
pub struct Steering {
    key: ToeplitzKey,
    fields: FlowFieldSet,
    /// Mapping table, indexed by the hash modulo its length. If empty, the queue is the hash modulo the number of queues.
    table: Vec<u16>,
    queues: u16,
}

/// Hash of a packet's flow, and the fields that it covers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FlowHash {
    pub fields: FlowFields,
    pub value: u32,
}

/// Flow hash with a random key that guests do not know.
#[derive(Clone, Debug)]
pub struct SecretSpread(Steering);

impl Steering {
    /// Makes a configuration for `queues` queues, at least one. Every entry of `table` must be below `queues`.
    pub fn new(key: &[u8], fields: FlowFieldSet, table: Vec<u16>, queues: u16) -> Steering {
        Steering { key: ToeplitzKey::new(key), fields, table, queues: queues.max(1) }
    }

    /// Returns the hash of a packet with these first bytes and this length; `None` if the hashed fields do
    /// not cover the packet.
    pub fn hash(&self, header: &[u8], frame_len: usize) -> Option<FlowHash> {
        let layers = Layers::parse(header, u32::try_from(frame_len).ok()?).ok()?;
        let (fields, value) = self.key.hash_packet(header, &layers, self.fields)?;
        Some(FlowHash { fields, value })
    }

    /// Returns the queue for a hash.
    #[inline]
    pub fn queue(&self, hash: u32) -> u16 {
        let of = |n: usize| hash as usize % n;
        match self.table.len() {
            0 => bounded(of(usize::from(self.queues)), u16::MAX),
            entries => self.table[of(entries)].min(self.queues - 1),
        }
    }
}

/// Distribution of frames to the queues of a vif, by the guest's configuration or by a secret hash.
#[derive(Debug)]
pub struct Chooser {
    by_guest: Option<Arc<Steering>>,
    own: SecretSpread,
    shares: Vec<Vec<u32>>,
    /// Queue stride: the queues here are every `stride`th of the guest's.
    stride: usize,
}

impl SecretSpread {
    /// Makes a hash with a random key.
    pub fn new() -> SecretSpread {
        // A guest that knew the key could direct the flows of others to one queue.
        let word = || RandomState::new().build_hasher().finish().to_ne_bytes();
        let key: Vec<u8> = (0..5).flat_map(|_| word()).collect();
        SecretSpread(Steering::new(&key, FlowFieldSet::ALL, Vec::new(), 1))
    }

    /// Returns the queue, out of `queues`, for a packet with these first bytes and this length. A packet
    /// without a flow takes queue 0.
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

/// Mixes the hash, so that every bit of the result depends on every bit of the hash.
///
/// The Toeplitz hash is linear. With one key in twenty, flows that differ in six bits of a port have only
/// one or two values in the two lowest bits of their hashes. Half of four queues would stay idle. The
/// guest's own configuration is followed exactly; only the secret hash is mixed. (The finalizer of
/// `MurmurHash3`, which is in the public domain.)
fn mixed(hash: u32) -> u32 {
    let hash = (hash ^ (hash >> 16)).wrapping_mul(0x85eb_ca6b);
    let hash = (hash ^ (hash >> 13)).wrapping_mul(0xc2b2_ae35);
    hash ^ (hash >> 16)
}

impl Chooser {
    /// Makes a chooser for `queues` queues.
    pub fn new(queues: usize) -> Chooser {
        Chooser::strided(queues, 1)
    }

    /// Makes a chooser for `queues` queues, which are every `stride`th of the guest's.
    pub fn strided(queues: usize, stride: usize) -> Chooser {
        let shares = vec![Vec::new(); queues];
        Chooser { by_guest: None, own: SecretSpread::new(), shares, stride: stride.max(1) }
    }

    /// Replaces the guest's configuration.
    pub fn follow(&mut self, steering: Option<Arc<Steering>>) {
        self.by_guest = steering;
    }

    /// Returns the frames of each queue, in their order. Frames without a flow take the first queue.
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
    fn queue_is_from_table_or_hash_modulo_queues() {
        let fields = FlowFieldSet::ALL;
        let plain = Steering::new(&[], fields, vec![], 3);
        assert_eq!([0, 1, 2, 3, u32::MAX].map(|h| plain.queue(h)), [0, 1, 2, 0, 0]);
        let table = Steering::new(&[], fields, vec![2, 0], 3);
        assert_eq!([0, 1, 2, 3].map(|h| table.queue(h)), [2, 0, 2, 0]);
    }

    /// Returns a TCP segment from this source port.
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
    fn neighbouring_ports_use_every_queue_for_any_key() {
        for _ in 0..500 {
            let spread = SecretSpread::new();
            let mut flows = [0; 4];
            for port in 0..64 {
                flows[spread.queue(&segment(port), 60, 4)] += 1;
            }
            // The average is 16 flows per queue. Without the mixing, one key in twenty left a queue without flows.
            assert!(flows.iter().all(|count| *count > 0), "{flows:?}");
        }
        assert_eq!(SecretSpread::new().queue(&[0; 60], 60, 4), 0, "no flow");
    }

    #[test]
    fn hash_of_non_packet_is_none() {
        let steering = Steering::new(&[1; 40], FlowFieldSet::ALL, vec![], 1);
        assert_eq!(steering.hash(&[0; 60], 60), None);
        assert_eq!(steering.hash(&[], 0), None);
        let none = Steering::new(&[1; 40], FlowFieldSet::default(), vec![], 1);
        let mut frame = [0u8; 60];
        frame[12..14].copy_from_slice(&0x0800u16.to_be_bytes());
        frame[14] = 0x45;
        frame[16..18].copy_from_slice(&28u16.to_be_bytes());
        frame[23] = 17;
        frame[38..40].copy_from_slice(&8u16.to_be_bytes());
        assert_eq!(none.hash(&frame, 60), None);
        assert!(steering.hash(&frame, 60).is_some_and(|hash| hash.fields == FlowFields::Ipv4));
    }
}
