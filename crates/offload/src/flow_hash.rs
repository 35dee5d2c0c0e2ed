//! Toeplitz hash of a packet's flow, over addresses and ports.
//!
//! The hash selects a packet's queue. So the packets of a flow stay in order and one processor handles
//! them. netif's control ring lets the receiver choose key and fields (`io/netif.h`, "Hash types" and
//! "Toeplitz hash").
//!
//! # Theory of operation
//!
//! The hash walks the input from its most significant bit. For each set bit it adds, modulo 2, the 32
//! bits of the key that begin at the bit's position. This is linear. So [`ToeplitzKey::new`]
//! precomputes the contribution of each nibble at each position, and hashing needs one table lookup
//! per nibble.

use crate::packet::{Layers, Network, Transport};

/// Bytes of the longest input: two IPv6 addresses and two ports.
pub const INPUT_MAX: usize = 36;

/// Bytes of the longest effective key: 32 bits at each bit of the longest input.
pub const KEY_MAX: usize = INPUT_MAX + 4;

/// Header fields over which a Toeplitz hash is computed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FlowFields {
    /// IPv4 addresses: 8 bytes.
    Ipv4,
    /// IPv4 addresses and TCP ports: 12 bytes.
    Ipv4Tcp,
    /// IPv6 addresses: 32 bytes.
    Ipv6,
    /// IPv6 addresses and TCP ports: 36 bytes.
    Ipv6Tcp,
}

/// Set of fields that may be hashed. If both forms of a protocol are set, TCP packets are hashed with
/// ports and other packets without.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct FlowFieldSet {
    /// Permits hashing of [`FlowFields::Ipv4`].
    pub ipv4: bool,
    /// Permits hashing of [`FlowFields::Ipv4Tcp`].
    pub ipv4_tcp: bool,
    /// Permits hashing of [`FlowFields::Ipv6`].
    pub ipv6: bool,
    /// Permits hashing of [`FlowFields::Ipv6Tcp`].
    pub ipv6_tcp: bool,
}

impl FlowFieldSet {
    pub const ALL: FlowFieldSet =
        FlowFieldSet { ipv4: true, ipv4_tcp: true, ipv6: true, ipv6_tcp: true };
}

/// Toeplitz key with precomputed tables.
#[derive(Clone, PartialEq, Eq)]
pub struct ToeplitzKey {
    /// Contribution of a nibble, by position in the input and by value.
    nibbles: Box<[[u32; 16]; 2 * INPUT_MAX]>,
}

impl core::fmt::Debug for ToeplitzKey {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        // The key stays out of logs: with it, a peer can direct many flows to one queue.
        f.write_str("ToeplitzKey(..)")
    }
}

impl ToeplitzKey {
    /// Precomputes the tables of a key. Missing bytes count as zero; bytes beyond [`KEY_MAX`] have no
    /// effect.
    #[must_use]
    pub fn new(key: &[u8]) -> ToeplitzKey {
        let mut padded = [0; KEY_MAX + 4];
        let used = key.len().min(KEY_MAX);
        padded[..used].copy_from_slice(&key[..used]);
        let mut nibbles = Box::new([[0; 16]; 2 * INPUT_MAX]);
        for (position, values) in nibbles.iter_mut().enumerate() {
            // The 35 bits of the key that a nibble at this position can select.
            let word = padded[position / 2..].first_chunk().copied().unwrap_or_default();
            let bits = u64::from_be_bytes(word) << (4 * (position % 2));
            for (value, sum) in values.iter_mut().enumerate() {
                for bit in 0..4u32 {
                    if value & (0b1000 >> bit) != 0 {
                        *sum ^= high_half(bits << bit);
                    }
                }
            }
        }
        ToeplitzKey { nibbles }
    }

    /// Hashes the first [`INPUT_MAX`] bytes of `input`.
    #[must_use]
    pub fn hash(&self, input: &[u8]) -> u32 {
        let pairs = self.nibbles.chunks_exact(2).zip(input);
        pairs.fold(0, |sum, (tables, byte)| {
            let (high, low) = (usize::from(byte >> 4), usize::from(byte & 15));
            sum ^ tables[0][high] ^ tables[1][low]
        })
    }

    /// Hashes a packet over the fields that `fields` permits; returns `None` if there are none. `headers`
    /// are the bytes that `layers` was parsed from. Fragments are hashed without ports, so that all
    /// fragments of a packet have the same hash.
    #[must_use]
    pub fn hash_packet(
        &self,
        headers: &[u8],
        layers: &Layers,
        fields: FlowFieldSet,
    ) -> Option<(FlowFields, u32)> {
        let at = usize::from(layers.network_offset());
        let ports = match layers.transport() {
            Transport::Tcp(_) if !layers.is_fragment() => layers.transport_offset(),
            _ => None,
        };
        let (addresses, with_ports, plain) = match layers.network() {
            Network::Ipv4(_) => (
                headers.get(at + 12..at + 20)?,
                fields.ipv4_tcp.then_some(FlowFields::Ipv4Tcp),
                fields.ipv4.then_some(FlowFields::Ipv4),
            ),
            Network::Ipv6(_) => (
                headers.get(at + 8..at + 40)?,
                fields.ipv6_tcp.then_some(FlowFields::Ipv6Tcp),
                fields.ipv6.then_some(FlowFields::Ipv6),
            ),
            Network::Arp | Network::Other(_) => return None,
        };
        let mut input = [0; INPUT_MAX];
        let (front, rest) = input.split_at_mut(addresses.len());
        front.copy_from_slice(addresses);
        if let (Some(kind), Some(at)) = (with_ports, ports) {
            let at = usize::from(at);
            rest[..4].copy_from_slice(headers.get(at..at + 4)?);
            return Some((kind, self.hash(&input[..addresses.len() + 4])));
        }
        plain.map(|kind| (kind, self.hash(&input[..addresses.len()])))
    }
}

/// Returns the most significant half.
fn high_half(bits: u64) -> u32 {
    let [a, b, c, d, ..] = bits.to_be_bytes();
    u32::from_be_bytes([a, b, c, d])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Key of the verification suite that network card vendors publish.
    const KEY: [u8; 40] = [
        0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f,
        0xb0, 0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30,
        0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
    ];

    /// Reference implementation from the header's wording: one input bit after the other.
    fn bit_by_bit(key: &[u8], input: &[u8]) -> u32 {
        let key_bit = |n: usize| key.get(n / 8).is_some_and(|o| o & (0x80 >> (n % 8)) != 0);
        let mut hash = 0;
        for n in 0..input.len() * 8 {
            if input[n / 8] & (0x80 >> (n % 8)) != 0 {
                for bit in 0..32 {
                    hash ^= u32::from(key_bit(n + bit)) << (31 - bit);
                }
            }
        }
        hash
    }

    /// Source, destination, ports, and the hashes without and with ports, from the published suite.
    #[test]
    fn toeplitz_hash_matches_published_vectors() {
        let key = ToeplitzKey::new(&KEY);
        let v4 = [
            (
                [66u8, 9, 149, 187],
                2794u16,
                [161u8, 142, 100, 80],
                1766u16,
                0x323e_8fc2,
                0x51cc_c178,
            ),
            ([199, 92, 111, 2], 14230, [65, 69, 140, 83], 4739, 0xd718_262a, 0xc626_b0ea),
            ([24, 19, 198, 95], 12898, [12, 22, 207, 184], 38024, 0xd2d0_a5de, 0x5c2b_394a),
        ];
        for (src, sport, dst, dport, plain, tcp) in v4 {
            let addresses = [src, dst].concat();
            let ports = [sport.to_be_bytes(), dport.to_be_bytes()].concat();
            assert_eq!(key.hash(&addresses), plain);
            assert_eq!(key.hash(&[addresses, ports].concat()), tcp);
        }
        let src: std::net::Ipv6Addr = "3ffe:2501:200:1fff::7".parse().unwrap();
        let dst: std::net::Ipv6Addr = "3ffe:2501:200:3::1".parse().unwrap();
        let addresses = [src.octets(), dst.octets()].concat();
        let ports = [2794u16.to_be_bytes(), 1766u16.to_be_bytes()].concat();
        assert_eq!(key.hash(&addresses), 0x2cc1_8cd5);
        assert_eq!(key.hash(&[addresses, ports].concat()), 0x4020_7d3d);
    }

    #[test]
    fn hash_packet_selects_fields_by_set_and_fragmentation() {
        // Four bytes of payload give the first fragment below the required multiple of eight.
        let mut frame = [0u8; 58];
        frame[12..14].copy_from_slice(&0x0800u16.to_be_bytes());
        frame[14] = 0x45;
        frame[16..18].copy_from_slice(&44u16.to_be_bytes());
        frame[23] = 6;
        frame[26..34].copy_from_slice(&[66, 9, 149, 187, 161, 142, 100, 80]);
        frame[34..38].copy_from_slice(&[0x0a, 0xea, 0x06, 0xe6]);
        frame[46] = 0x50;
        let layers = Layers::parse(&frame, 58).unwrap();
        let key = ToeplitzKey::new(&KEY);
        let all = FlowFieldSet::ALL;
        let with_ports = Some((FlowFields::Ipv4Tcp, 0x51cc_c178));
        let plain = Some((FlowFields::Ipv4, 0x323e_8fc2));
        assert_eq!(key.hash_packet(&frame, &layers, all), with_ports);
        let no_tcp = FlowFieldSet { ipv4_tcp: false, ..all };
        assert_eq!(key.hash_packet(&frame, &layers, no_tcp), plain);
        let v6_only = FlowFieldSet { ipv4: false, ipv4_tcp: false, ..all };
        assert_eq!(key.hash_packet(&frame, &layers, v6_only), None);
        // Only the first fragment has ports, so no fragment is hashed with them.
        frame[20] = 0x20;
        let fragment = Layers::parse(&frame, 58).unwrap();
        assert_eq!(key.hash_packet(&frame, &fragment, all), plain);
    }

    #[test]
    fn hash_with_empty_key_is_zero() {
        assert_eq!(ToeplitzKey::new(&[]).hash(&[0xFF; 36]), 0);
    }

    proptest! {
        #[test]
        fn table_hash_of_any_input_matches_bitwise_hash(
            key in prop::collection::vec(any::<u8>(), 0..48),
            input in prop::collection::vec(any::<u8>(), 0..=INPUT_MAX),
        ) {
            let used = &key[..key.len().min(KEY_MAX)];
            prop_assert_eq!(ToeplitzKey::new(&key).hash(&input), bit_by_bit(used, &input));
        }
    }
}
