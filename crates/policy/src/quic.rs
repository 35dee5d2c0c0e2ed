//! QUIC of versions 1 and 2: server names in the Initial packets of a client.
//!
//! The keys of Initial packets follow from the connection id in the client's first packet (RFC 9001, 5.2;
//! RFC 9369, 3.3), so everyone on the path can read them. [`Client`] reads the datagrams of one association in
//! their order:
//!
//! ```text
//! datagram -> coalesced packets -> Initial: keys of its connection -> CRYPTO frames -> stream -> ClientHello
//! ```
//!
//! A server never receives a byte of a ClientHello that was not read here: an Initial packet that no key opens is
//! [`Seen::Unreadable`], bytes sent again must be the same, and a second ClientHello (after a retry of the server)
//! is reported like the first one. Limits: [`CONNECTIONS_MAX`] connections, [`STREAM_MAX`] bytes each.
//! rustls derives the keys and removes the protection.

use core::time::Duration;

use rustls::crypto::ring::cipher_suite::TLS13_AES_128_GCM_SHA256;
use rustls::quic::{DirectionalKeys, Version};
use rustls::{Side, SupportedCipherSuite};

use crate::tls::{self, Fields, HELLO_MAX, Hello, Read};
use ringfence_base::numbers::usize_from;

/// Maximum number of connections of one association that are known at a time.
pub const CONNECTIONS_MAX: usize = 16;
/// Time since its last Initial packet for which a connection is remembered. Servers end a handshake before.
pub const REMEMBERED_FOR: Duration = Duration::from_secs(60);
/// Maximum length of a connection's CRYPTO stream in bytes: two hellos.
pub const STREAM_MAX: usize = 2 * HELLO_MAX;
/// Bit of the first byte that marks a long header.
const LONG: u8 = 0x80;
/// Length of the sample for header protection in bytes. It lies four bytes behind the packet number's start.
const SAMPLE_LEN: usize = 16;
/// Maximum length of a connection id in bytes.
const ID_MAX: usize = 20;

/// Contents of a datagram, as far as a verdict needs them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    /// The datagram begins with no long header: a later packet of QUIC, or another protocol.
    Other,
    /// The datagram may be of a QUIC version whose Initial packets cannot be read.
    OtherVersion,
    /// All hellos of the datagram's connection have been reported.
    Known,
    /// The hello of the datagram's connection is not complete.
    Incomplete,
    /// The datagram completes this hello.
    Hello(Hello),
    /// The datagram has the form of QUIC, but no key opens it, or its connection was refused.
    Unreadable,
    /// The packets are malformed, or differ from earlier ones of the connection.
    Malformed,
}

/// Returns `true` if a datagram begins with a long header, which [`Client::read`] must see.
pub fn has_long_header(datagram: &[u8]) -> bool {
    datagram.first().is_some_and(|first| first & LONG != 0)
}

/// Client end of the QUIC connections of one association.
#[derive(Debug, Default)]
pub struct Client {
    /// Connections in the order of their first packets.
    connections: Vec<Connection>,
    /// Connection of the last hello.
    last: usize,
}

impl Client {
    /// Reads a datagram of the client.
    pub fn read(&mut self, datagram: &[u8], now: Duration) -> Seen {
        let Some(&[first, v0, v1, v2, v3]) = datagram.first_chunk() else { return Seen::Other };
        if first & LONG == 0 {
            return Seen::Other;
        }
        if version(u32::from_be_bytes([v0, v1, v2, v3])).is_none() {
            return Seen::OtherVersion;
        }
        let (mut rest, mut id, mut found) = (datagram, None, None);
        while has_long_header(rest) {
            let Some(packet) = LongPacket::read(rest) else { return Seen::Unreadable };
            // All packets of a datagram have the same id (RFC 9000, 12.2).
            if *id.get_or_insert(packet.id) != packet.id {
                return Seen::Unreadable;
            }
            rest = rest.get(packet.bytes.len()..).unwrap_or_default();
            if !packet.is_initial {
                continue;
            }
            let Some((index, frames)) = self.open(&packet, now) else { return Seen::Unreadable };
            let Some(connection) = self.connections.get_mut(index) else { return Seen::Unreadable };
            if connection.is_refused {
                return Seen::Unreadable;
            }
            connection.seen_at = now;
            (found, self.last) = (Some(index), index);
            if connection.stream.add_frames(&frames).is_none() {
                return Seen::Malformed;
            }
        }
        match found {
            Some(index) => self.next_hello(index),
            None if self.connections.is_empty() => Seen::Unreadable,
            None if self.is_waiting() => Seen::Incomplete,
            None => Seen::Known,
        }
    }

    fn next_hello(&mut self, index: usize) -> Seen {
        let Some(connection) = self.connections.get_mut(index) else { return Seen::Unreadable };
        let stream = &mut connection.stream;
        if stream.is_read() {
            return Seen::Known;
        }
        match stream.next_hello() {
            Read::Incomplete => Seen::Incomplete,
            // The client sends its second hello only after the server's answer to the first one.
            Read::Complete(hello) if stream.is_read() => Seen::Hello(hello),
            Read::Complete(_) | Read::Malformed => Seen::Malformed,
        }
    }

    /// Removes the protection of an Initial packet. Returns the index of its connection and the frames.
    fn open(&mut self, packet: &LongPacket<'_>, now: Duration) -> Option<(usize, Vec<u8>)> {
        let known = self.connections.iter().position(|connection| connection.id == packet.id);
        if known.is_none()
            && let Some(keys) = client_keys(packet.version, packet.id)
            && let Some((number, frames)) = packet.open(&keys, None)
        {
            self.make_room(now)?;
            self.connections.push(Connection {
                version: packet.version,
                id: packet.id.to_vec(),
                keys,
                largest: number,
                stream: Stream::default(),
                seen_at: now,
                is_refused: false,
            });
            return Some((self.connections.len() - 1, frames));
        }
        // Later packets have an id of the server's choice, and the keys of the first id.
        for index in known.into_iter().chain(0..self.connections.len()) {
            let connection = self.connections.get_mut(index)?;
            let largest = Some(connection.largest);
            let opened = if connection.version == packet.version {
                packet.open(&connection.keys, largest)
            } else {
                // The server may choose the other version after the first packets (RFC 9369, 4).
                packet.open(&client_keys(packet.version, &connection.id)?, largest)
            };
            if let Some((number, frames)) = opened {
                connection.largest = connection.largest.max(number);
                return Some((index, frames));
            }
        }
        None
    }

    /// Makes room for a connection. Returns `None` if a server may still wait for packets of each.
    ///
    /// A server keeps the beginning of a stream. A connection forgotten too early could show another beginning here.
    fn make_room(&mut self, now: Duration) -> Option<()> {
        if self.connections.len() >= CONNECTIONS_MAX {
            let is_over = |one: &Connection| one.seen_at + REMEMBERED_FOR <= now;
            let oldest = self.connections.iter().position(is_over)?;
            self.connections.remove(oldest);
        }
        Some(())
    }

    /// Returns `true` if the hello of a connection is not complete.
    pub fn is_waiting(&self) -> bool {
        self.connections.iter().any(Connection::is_waiting)
    }

    /// Refuses later packets of the last datagram's connection, whose hello was denied or malformed.
    pub fn refuse_last(&mut self) {
        if let Some(connection) = self.connections.get_mut(self.last) {
            connection.refuse();
        }
    }

    /// Refuses later packets of the connections whose hello is not complete.
    pub fn refuse_waiting(&mut self) {
        self.connections.iter_mut().filter(|one| one.is_waiting()).for_each(Connection::refuse);
    }

    /// Returns the number of bytes that the streams occupy.
    pub fn memory(&self) -> usize {
        let each = |one: &Connection| one.stream.bytes.capacity() + one.stream.arrived.capacity();
        self.connections.iter().map(each).sum()
    }
}

struct Connection {
    version: u32,
    /// Connection id of the client's first packet, from which the keys follow.
    id: Vec<u8>,
    keys: DirectionalKeys,
    /// Largest packet number.
    largest: u64,
    stream: Stream,
    /// Time of the last Initial packet.
    seen_at: Duration,
    is_refused: bool,
}

impl Connection {
    fn is_waiting(&self) -> bool {
        !self.is_refused && !self.stream.is_read()
    }

    fn refuse(&mut self) {
        (self.is_refused, self.stream) = (true, Stream::default());
    }
}

impl core::fmt::Debug for Connection {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Connection").field("id", &self.id).finish_non_exhaustive()
    }
}

/// CRYPTO stream of the client's Initial packets.
#[derive(Debug, Default)]
struct Stream {
    bytes: Vec<u8>,
    /// Marks of the bytes that have arrived; empty when all have.
    arrived: Vec<bool>,
    /// Number of bytes before the first gap.
    prefix: usize,
    /// Length of the messages that were reported.
    reported: usize,
}

impl Stream {
    /// Returns `true` if there are messages, and all bytes belong to reported ones.
    fn is_read(&self) -> bool {
        self.reported > 0 && self.reported == self.bytes.len()
    }

    fn next_hello(&mut self) -> Read<Hello> {
        let message = self.bytes.get(self.reported..self.prefix).unwrap_or_default();
        let read = tls::read_message(message);
        if let (Read::Complete(_), Some(&[_, l0, l1, l2])) = (&read, message.first_chunk()) {
            let len = u32::from_be_bytes([0, l0, l1, l2]);
            self.reported += 4 + usize_from(len);
        }
        read
    }

    /// Adds the CRYPTO frames of a packet. Returns `None` if a frame is malformed or does not belong there.
    fn add_frames(&mut self, payload: &[u8]) -> Option<()> {
        let mut fields = Fields(payload);
        while !fields.0.is_empty() {
            match varint(&mut fields)? {
                // PADDING, PING.
                0 | 1 => {}
                kind @ (2 | 3) => skip_ack(&mut fields, kind == 3)?,
                6 => {
                    let offset = varint(&mut fields)?;
                    let len = usize::try_from(varint(&mut fields)?).ok()?;
                    self.add(usize::try_from(offset).ok()?, fields.take(len)?)?;
                }
                // CONNECTION_CLOSE of the transport.
                0x1c => {
                    varint(&mut fields)?;
                    varint(&mut fields)?;
                    let len = usize::try_from(varint(&mut fields)?).ok()?;
                    fields.take(len)?;
                }
                _ => return None,
            }
        }
        Some(())
    }

    /// Adds bytes. Returns `None` beyond the limit, and if bytes differ from those that came before.
    fn add(&mut self, start: usize, data: &[u8]) -> Option<()> {
        let end = start.checked_add(data.len()).filter(|end| *end <= STREAM_MAX)?;
        if end > self.bytes.len() {
            self.bytes.resize(end, 0);
            self.arrived.resize(end, false);
        }
        for (at, byte) in (start..end).zip(data) {
            let place = self.bytes.get_mut(at)?;
            if at < self.prefix || self.arrived.get(at) == Some(&true) {
                if place != byte {
                    return None;
                }
            } else {
                *place = *byte;
                *self.arrived.get_mut(at)? = true;
            }
        }
        while self.arrived.get(self.prefix) == Some(&true) {
            self.prefix += 1;
        }
        if self.prefix == self.bytes.len() {
            self.arrived = Vec::new();
        }
        Some(())
    }
}

/// Skips the fields of an ACK frame (RFC 9000, 19.3).
fn skip_ack(fields: &mut Fields<'_>, has_counts: bool) -> Option<()> {
    varint(fields)?;
    varint(fields)?;
    let ranges = varint(fields)?;
    varint(fields)?;
    for _ in 0..ranges {
        varint(fields)?;
        varint(fields)?;
    }
    if has_counts {
        varint(fields)?;
        varint(fields)?;
        varint(fields)?;
    }
    Some(())
}

/// Reads an integer of variable length (RFC 9000, 16).
fn varint(fields: &mut Fields<'_>) -> Option<u64> {
    let first = *fields.take(1)?.first()?;
    let more = fields.take((1 << (first >> 6)) - 1)?;
    Some(more.iter().fold(u64::from(first & 0x3f), |number, byte| number << 8 | u64::from(*byte)))
}

fn version(number: u32) -> Option<Version> {
    match number {
        1 => Some(Version::V1),
        0x6b33_43cf => Some(Version::V2),
        _ => None,
    }
}

/// Derives the keys of a client's Initial packets.
fn client_keys(number: u32, id: &[u8]) -> Option<DirectionalKeys> {
    let SupportedCipherSuite::Tls13(suite) = TLS13_AES_128_GCM_SHA256 else { return None };
    Some(suite.quic_suite()?.keys(id, Side::Server, version(number)?).remote)
}

/// Packet with a long header, protected.
struct LongPacket<'a> {
    version: u32,
    is_initial: bool,
    /// Destination connection id.
    id: &'a [u8],
    /// Offset of the packet number.
    number_at: usize,
    /// The packet, without those behind it.
    bytes: &'a [u8],
}

impl<'a> LongPacket<'a> {
    /// Reads a packet at the beginning of a datagram's rest. Returns `None` if a client sends no such packet.
    fn read(rest: &'a [u8]) -> Option<LongPacket<'a>> {
        let mut fields = Fields(rest);
        let first = *fields.take(1)?.first()?;
        let number = u32::from_be_bytes(fields.take(4)?.try_into().ok()?);
        let version = version(number)?;
        let (id, source) = (fields.short()?, fields.short()?);
        if id.len() > ID_MAX || source.len() > ID_MAX {
            return None;
        }
        // Version 2 counts the types from another one on (RFC 9369, 3.2).
        let shift = if matches!(version, Version::V2) { 3 } else { 0 };
        let kind = ((first >> 4) + shift) & 3;
        // Retry packets come from servers only.
        if kind == 3 {
            return None;
        }
        if kind == 0 {
            let token = usize::try_from(varint(&mut fields)?).ok()?;
            fields.take(token)?;
        }
        let len = usize::try_from(varint(&mut fields)?).ok()?;
        let number_at = rest.len() - fields.0.len();
        fields.take(len)?;
        let bytes = rest.get(..number_at + len)?;
        Some(LongPacket { version: number, is_initial: kind == 0, id, number_at, bytes })
    }

    /// Removes the protection. Returns the packet number and the frames, or `None` if the keys do not fit.
    ///
    /// A packet number may be abbreviated. With no largest number before it, it is not.
    fn open(&self, keys: &DirectionalKeys, largest: Option<u64>) -> Option<(u64, Vec<u8>)> {
        let mut first = *self.bytes.first()?;
        let mut number: [u8; 4] = *self.bytes.get(self.number_at..)?.first_chunk()?;
        let sample = self.bytes.get(self.number_at + 4..)?.get(..SAMPLE_LEN)?;
        keys.header.decrypt_in_place(sample, &mut first, &mut number).ok()?;
        let number = number.get(..usize::from(first & 3) + 1)?;
        let start = self.number_at + number.len();
        let mut header = self.bytes.get(..self.number_at)?.to_vec();
        *header.first_mut()? = first;
        header.extend_from_slice(number);
        let short = number.iter().fold(0, |number, byte| number << 8 | u64::from(*byte));
        let long = largest.map(|largest| whole_number(short, number.len(), largest));
        let mut payload = Vec::new();
        for number in [Some(short), long.filter(|long| *long != short)].into_iter().flatten() {
            payload.clear();
            payload.extend_from_slice(self.bytes.get(start..)?);
            if let Ok(frames) = keys.packet.decrypt_in_place(number, &header, &mut payload) {
                let len = frames.len();
                payload.truncate(len);
                return Some((number, payload));
            }
        }
        None
    }
}

/// Completes an abbreviated packet number: the one next to the expected number (RFC 9000, A.3).
fn whole_number(short: u64, len: usize, largest: u64) -> u64 {
    let (expected, span) = (largest + 1, 1_u64 << (8 * len));
    let near = (expected & !(span - 1)) | short;
    if near + span / 2 <= expected {
        near + span
    } else if near > expected + span / 2 && near >= span {
        near - span
    } else {
        near
    }
}

#[cfg(any(test, feature = "test-utils"))]
#[doc(hidden)]
pub mod testing;
#[cfg(test)]
mod tests;
