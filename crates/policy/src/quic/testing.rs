//! Initial packets of a client, for tests and fuzz targets.

#![allow(clippy::unwrap_used, reason = "in a test, a failure is a panic")]

use std::sync::Arc;

use rustls::crypto::ring::cipher_suite::TLS13_AES_128_GCM_SHA256;
use rustls::quic::ClientConnection;
use rustls::{ClientConfig, RootCertStore, Side, SupportedCipherSuite};

/// Number of version 2.
pub const V2: u32 = 0x6b33_43cf;

/// Fields of an Initial packet. `keys_id` is the id of the client's first packet.
#[derive(Clone, Copy, Debug)]
pub struct Initial<'a> {
    pub version: u32,
    pub id: &'a [u8],
    pub keys_id: &'a [u8],
    pub number: u64,
    /// Length of the packet number in bytes.
    pub number_len: usize,
}

impl<'a> Initial<'a> {
    /// Begins a packet of version 1 with the keys of its own id.
    pub fn new(id: &'a [u8], number: u64) -> Initial<'a> {
        Initial { version: 1, id, keys_id: id, number, number_len: 4 }
    }

    /// Writes the packet with these frames, protected.
    ///
    /// # Panics
    ///
    /// Panics if the frames are shorter than a sample or longer than a packet.
    pub fn seal(&self, frames: &[u8]) -> Vec<u8> {
        let SupportedCipherSuite::Tls13(suite) = TLS13_AES_128_GCM_SHA256 else { panic!() };
        let version = super::version(self.version).unwrap();
        let keys = suite.quic_suite().unwrap().keys(self.keys_id, Side::Client, version).local;
        let kind = if self.version == V2 { 0x10 } else { 0 };
        let mut packet = vec![0xc0 | kind | u8::try_from(self.number_len - 1).unwrap()];
        packet.extend(self.version.to_be_bytes());
        packet.push(u8::try_from(self.id.len()).unwrap());
        packet.extend(self.id);
        packet.extend([0, 0]);
        let len = u16::try_from(self.number_len + frames.len() + 16).unwrap();
        packet.extend((0x4000 | len).to_be_bytes());
        let number_at = packet.len();
        packet.extend(&self.number.to_be_bytes()[8 - self.number_len..]);
        let mut payload = frames.to_vec();
        let tag = keys.packet.encrypt_in_place(self.number, &packet, &mut payload).unwrap();
        packet.extend(payload);
        packet.extend(tag.as_ref());
        let (header, rest) = packet.split_at_mut(number_at + 4);
        let (first, header) = header.split_first_mut().unwrap();
        let number = &mut header[number_at - 1..];
        keys.header.encrypt_in_place(&rest[..super::SAMPLE_LEN], first, number).unwrap();
        packet
    }
}

/// Writes a CRYPTO frame.
///
/// # Panics
///
/// Panics if the data or its offset needs more than 14 bits.
pub fn crypto(offset: usize, data: &[u8]) -> Vec<u8> {
    let number = |number: usize| (0x4000 | u16::try_from(number).unwrap()).to_be_bytes();
    [&[6][..], &number(offset), &number(data.len()), data].concat()
}

/// Writes a ClientHello for QUIC, as rustls does for this name.
///
/// # Panics
///
/// Panics if the name has not the form of one.
pub fn hello(name: &str) -> Vec<u8> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    let name = name.to_owned().try_into().unwrap();
    let version = rustls::quic::Version::V1;
    let mut client = ClientConnection::new(Arc::new(config), version, name, vec![]).unwrap();
    let mut bytes = Vec::new();
    client.write_hs(&mut bytes);
    bytes
}

/// Writes a datagram with a whole hello.
///
/// # Panics
///
/// Panics if the name has not the form of one.
pub fn first_datagram(id: &[u8], name: &str) -> Vec<u8> {
    let mut frames = crypto(0, &hello(name));
    frames.resize(1162, 0);
    Initial::new(id, 0).seal(&frames)
}
