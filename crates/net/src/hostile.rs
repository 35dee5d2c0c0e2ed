//! Peers that break the rules, for tests: each of their words can be set by hand.
//!
//! * [`stage`]: a driver domain with any number of vifs, served in rounds by one thread, and a
//!   *neighbour*: a guest with manners, whose frames must go through whatever the others do.
//! * [`frontend`]: a guest that writes its rings, pages, grant table, keys and channels by hand.
//! * [`backend`]: a driver domain that does the same to an honest frontend.
//!
//! A test says in a few lines what is right about a peer and then breaks one field. What is made here
//! is well-formed until it is changed.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

pub mod backend;
pub mod frontend;
mod ring;
pub mod stage;

pub use ringfence_platform::local::raw::process;

pub use backend::HostileBackend;
pub use frontend::HostileFrontend;
pub use ring::RawRing;
pub use stage::{Neighbour, Stage};

/// Octets that look like a frame: an Ethernet header and a payload that depends on `seed`.
pub fn frame(seed: u32, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761).max(1);
    let noise = (0..len.max(14)).map(|_| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state.to_le_bytes()[1]
    });
    let mut bytes: Vec<u8> = noise.collect();
    bytes[..14].copy_from_slice(&[2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 1, 0x88, 0xB5]);
    bytes
}

/// An Ethernet, IPv4 and UDP frame of `payload` octets behind its headers of 42, whose checksum
/// field holds what is to stand there while the checksum is blank: any number.
pub fn udp_frame(payload: usize) -> Vec<u8> {
    let mut bytes = frame(77, 42 + payload);
    let udp_len = u16::try_from(8 + payload).unwrap().to_be_bytes();
    bytes[12..14].copy_from_slice(&[8, 0]);
    bytes[14..34].copy_from_slice(&ipv4_header(17, 8 + payload));
    bytes[34..42].copy_from_slice(&[0x30, 0x39, 0, 9, udp_len[0], udp_len[1], 0, 0]);
    bytes
}

/// An IPv4 header from 10.0.0.1 to 10.0.0.2 for `payload` octets of that protocol.
fn ipv4_header(protocol: u8, payload: usize) -> [u8; 20] {
    let len = u16::try_from(20 + payload).unwrap().to_be_bytes();
    let mut ip =
        [0x45, 0, len[0], len[1], 0, 1, 0, 0, 64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    let sum: u32 = ip.chunks(2).map(|pair| u32::from(pair[0]) * 256 + u32::from(pair[1])).sum();
    let sum = (sum & 0xFFFF) + (sum >> 16);
    let sum = !u16::try_from((sum & 0xFFFF) + (sum >> 16)).unwrap();
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    ip
}

/// An Ethernet, IP and TCP frame of `payload` octets behind its headers, of 54 octets over IPv4 and 74
/// over IPv6. Its checksum field holds the sum of the pseudo header, as that of a super-packet does.
pub fn tcp_frame(v6: bool, payload: usize) -> Vec<u8> {
    let ip = if v6 { 40 } else { 20 };
    let tcp = 14 + ip;
    let mut bytes = frame(78, tcp + 20 + payload);
    if v6 {
        let len = u16::try_from(20 + payload).unwrap().to_be_bytes();
        bytes[12..14].copy_from_slice(&[0x86, 0xDD]);
        bytes[14..22].copy_from_slice(&[0x60, 0, 0, 0, len[0], len[1], 6, 64]);
        bytes[22..54].fill(0);
        (bytes[22], bytes[37]) = (0xFD, 1);
        (bytes[38], bytes[53]) = (0xFD, 2);
    } else {
        bytes[12..14].copy_from_slice(&[8, 0]);
        bytes[14..34].copy_from_slice(&ipv4_header(6, 20 + payload));
    }
    bytes[tcp..tcp + 4].copy_from_slice(&[0x30, 0x39, 0, 80]);
    bytes[tcp + 12..tcp + 14].copy_from_slice(&[0x50, 0x18]);
    let total = u32::try_from(bytes.len()).unwrap();
    let headers = &mut bytes[..tcp + 20];
    let layers = ringfence_offload::Layers::parse(headers, total).unwrap();
    ringfence_offload::blank::reset_pseudo_header(headers, &layers).unwrap();
    bytes
}
