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
    let ip_len = u16::try_from(28 + payload).unwrap().to_be_bytes();
    let udp_len = u16::try_from(8 + payload).unwrap().to_be_bytes();
    bytes[12..14].copy_from_slice(&[8, 0]);
    let ip = [0x45, 0, ip_len[0], ip_len[1], 0, 1, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    bytes[14..34].copy_from_slice(&ip);
    let sum: u32 = ip.chunks(2).map(|pair| u32::from(pair[0]) * 256 + u32::from(pair[1])).sum();
    let sum = (sum & 0xFFFF) + (sum >> 16);
    let sum = !u16::try_from((sum & 0xFFFF) + (sum >> 16)).unwrap();
    bytes[24..26].copy_from_slice(&sum.to_be_bytes());
    bytes[34..42].copy_from_slice(&[0x30, 0x39, 0, 9, udp_len[0], udp_len[1], 0, 0]);
    bytes
}
