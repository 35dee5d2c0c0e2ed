//! TLS ClientHello: server name and encrypted hello, from a stream in any segments and records.
//!
//! Limits: [`HELLO_MAX`] bytes, and records as RFC 8446, 5.1, has them. A hello is alone in its records: its client waits
//! for the server's answer. Nothing is decrypted. [`second`] reads a second hello.

pub mod second;

use crate::name::HostName;
use ringfence_base::numbers::usize_from;

/// Maximum length of a ClientHello in bytes, with its four-byte header.
pub const HELLO_MAX: usize = 16 << 10;

/// Content type of handshake records.
pub const HANDSHAKE: u8 = 22;
/// First and last content type of records.
const CHANGE_CIPHER_SPEC: u8 = 20;
const ALERT: u8 = 21;
const HEARTBEAT: u8 = 24;
const CLIENT_HELLO: u8 = 1;
const SERVER_NAME: u16 = 0;
const EARLY_DATA: u16 = 42;
const ENCRYPTED_CLIENT_HELLO: u16 = 0xfe0d;
/// Maximum length of a record's fragment in bytes.
const FRAGMENT_MAX: usize = 1 << 14;

/// Contents of a ClientHello that a verdict needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hello {
    /// Server name, if the hello has the extension.
    pub name: Option<HostName>,
    /// Set if the hello has an extension for an encrypted hello, real or GREASE.
    pub has_ech: bool,
    /// Set if data may follow before the server's answer.
    pub offers_early_data: bool,
}

/// Results of reading the first bytes of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Read<T> {
    /// The bytes are the beginning of a message that is not complete.
    Incomplete,
    /// The bytes break a rule of the protocol, or a limit.
    Malformed,
    Complete(T),
}

/// Reads the ClientHello at the beginning of a TLS stream.
pub fn read_stream(bytes: &[u8]) -> Read<Hello> {
    let (mut message, mut declared) = (Vec::new(), 0);
    let mut rest = bytes;
    loop {
        let Some(&[kind, major, _, high, low]) = rest.first_chunk() else {
            let is_wrong = rest.first().is_some_and(|kind| *kind != HANDSHAKE)
                || rest.get(1).is_some_and(|major| *major != 3);
            return if is_wrong { Read::Malformed } else { Read::Incomplete };
        };
        let len = usize::from(u16::from_be_bytes([high, low]));
        if kind != HANDSHAKE || major != 3 || len == 0 || len > FRAGMENT_MAX {
            return Read::Malformed;
        }
        let body = &rest[5..];
        message.extend_from_slice(&body[..len.min(body.len())]);
        declared += len;
        match read_message(&message) {
            // Another message in the same record could be a second hello.
            Read::Complete(_) if declared > message_len(&message) => return Read::Malformed,
            Read::Incomplete if body.len() >= len => rest = &body[len..],
            other => return other,
        }
    }
}

/// Reads the beginning of a stream that is no handshake record. Returns `None` if no TLS server accepts it.
///
/// Clients send no other record before the hello. Servers of Go and Java skip alerts, of any version. A hello of SSLv2 shows
/// no name.
pub fn read_other_record(bytes: &[u8]) -> Option<Read<Hello>> {
    match bytes {
        [CHANGE_CIPHER_SPEC..=HEARTBEAT, 3, ..] | [ALERT, _, _, 0, 2, ..] => Some(Read::Malformed),
        [CHANGE_CIPHER_SPEC..=HEARTBEAT] | [ALERT, _] | [ALERT, _, _] | [ALERT, _, _, 0] => {
            Some(Read::Incomplete)
        }
        // The length of a hello of SSLv2 has two bytes, the first one with its highest bit set.
        [0x80..=0xff, _, CLIENT_HELLO, 0 | 2 | 3, ..] => Some(Read::Malformed),
        [0x80..=0xff] | [0x80..=0xff, _] | [0x80..=0xff, _, CLIENT_HELLO] => Some(Read::Incomplete),
        _ => None,
    }
}

/// Reads a ClientHello from the beginning of a handshake message, such as QUIC carries without records.
pub fn read_message(message: &[u8]) -> Read<Hello> {
    if message.first().is_some_and(|kind| *kind != CLIENT_HELLO) {
        return Read::Malformed;
    }
    let Some(&[_, l0, l1, l2]) = message.first_chunk() else { return Read::Incomplete };
    let len = usize_from(u32::from_be_bytes([0, l0, l1, l2]));
    if len > HELLO_MAX - 4 {
        return Read::Malformed;
    }
    match message.get(4..4 + len) {
        None => Read::Incomplete,
        Some(body) => read_body(body).map_or(Read::Malformed, Read::Complete),
    }
}

/// Returns the length of the message at the beginning, with its header. `message` has a complete header.
fn message_len(message: &[u8]) -> usize {
    let len =
        message.first_chunk().map_or(0, |&[_, l0, l1, l2]| u32::from_be_bytes([0, l0, l1, l2]));
    4 + usize_from(len)
}

/// Cursor over fields of a message.
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl<'a> Fields<'a> {
    pub(crate) fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn number(&mut self) -> Option<u16> {
        self.take(2)?.try_into().ok().map(u16::from_be_bytes)
    }

    /// Takes a vector with a length of one byte.
    pub(crate) fn short(&mut self) -> Option<&'a [u8]> {
        let len = *self.take(1)?.first()?;
        self.take(len.into())
    }

    /// Takes a vector with a length of two bytes.
    fn long(&mut self) -> Option<&'a [u8]> {
        let len = self.number()?;
        self.take(len.into())
    }
}

/// Reads the body of a ClientHello (RFC 8446, 4.1.2). Returns `None` if it is malformed.
fn read_body(body: &[u8]) -> Option<Hello> {
    let mut fields = Fields(body);
    fields.take(2 + 32)?;
    let session = fields.short()?;
    let suites = fields.long()?;
    let methods = fields.short()?;
    if session.len() > 32 || suites.len() < 2 || suites.len() % 2 != 0 || methods.is_empty() {
        return None;
    }
    let mut hello = Hello::default();
    if fields.0.is_empty() {
        // TLS 1.2 and before: the extensions may be absent.
        return Some(hello);
    }
    let mut extensions = Fields(fields.long()?);
    if !fields.0.is_empty() {
        return None;
    }
    while !extensions.0.is_empty() {
        let (kind, data) = (extensions.number()?, extensions.long()?);
        match kind {
            SERVER_NAME if hello.name.is_some() => return None,
            SERVER_NAME => hello.name = Some(server_name(data)?),
            ENCRYPTED_CLIENT_HELLO => hello.has_ech = true,
            EARLY_DATA => hello.offers_early_data = true,
            _ => {}
        }
    }
    Some(hello)
}

/// Reads the extension `server_name` (RFC 6066, 3): one name of type `host_name`.
fn server_name(data: &[u8]) -> Option<HostName> {
    let mut data = Fields(data);
    let mut list = Fields(data.long()?);
    let is_host_name = *list.take(1)?.first()? == 0;
    let name = list.long()?;
    if !is_host_name || !list.0.is_empty() || !data.0.is_empty() {
        return None;
    }
    HostName::parse(core::str::from_utf8(name).ok()?).ok()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;

    /// Writes the records of a ClientHello, as rustls does for this name.
    pub(crate) fn hello(name: &str) -> Vec<u8> {
        let config = rustls::ClientConfig::builder_with_provider(Arc::new(
            rustls::crypto::ring::default_provider(),
        ))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
        let name = name.to_owned().try_into().unwrap();
        let mut client = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
        let mut bytes = Vec::new();
        client.write_tls(&mut bytes).unwrap();
        bytes
    }

    /// Splits the handshake message of one record into records of at most `len` bytes.
    pub(crate) fn in_records(record: &[u8], len: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        for fragment in record[5..].chunks(len) {
            bytes.extend_from_slice(&record[..3]);
            bytes.extend_from_slice(&u16::try_from(fragment.len()).unwrap().to_be_bytes());
            bytes.extend_from_slice(fragment);
        }
        bytes
    }

    /// Appends an extension to the ClientHello of one record.
    pub(crate) fn with_extension(mut record: Vec<u8>, kind: u16, data: &[u8]) -> Vec<u8> {
        let session = usize::from(record[5 + 4 + 34]);
        let suites = 5 + 4 + 34 + 1 + session;
        let suites_len = usize::from(u16::from_be_bytes([record[suites], record[suites + 1]]));
        let extensions = suites + 2 + suites_len + 1 + 1;
        let len = u16::try_from(data.len()).unwrap();
        record.extend([kind.to_be_bytes(), len.to_be_bytes()].concat());
        record.extend(data);
        for (at, bytes) in [(3, 2), (6, 3), (extensions, 2)] {
            let mut number = 0;
            record[at..at + bytes].iter().for_each(|byte| number = number << 8 | u32::from(*byte));
            let number = (number + 4 + u32::from(len)).to_be_bytes();
            record[at..at + bytes].copy_from_slice(&number[4 - bytes..]);
        }
        record
    }

    fn complete(name: &str) -> Read<Hello> {
        let name = Some(HostName::parse(name).unwrap());
        Read::Complete(Hello { name, ..Hello::default() })
    }

    #[test]
    fn hello_in_any_segments_and_records_shows_its_name() {
        let whole = hello("files.example.org");
        for record_len in [1, 2, 7, 100, 16_384] {
            let stream = in_records(&whole, record_len);
            for end in 0..stream.len() {
                assert_eq!(read_stream(&stream[..end]), Read::Incomplete, "{record_len} {end}");
            }
            assert_eq!(read_stream(&stream), complete("files.example.org"));
            let more = [&stream[..], b"early data"].concat();
            assert_eq!(read_stream(&more), complete("files.example.org"));
        }
    }

    #[test]
    fn hello_without_name_or_with_ech_is_reported() {
        let Read::Complete(plain) = read_stream(&hello("192.0.2.1")) else { panic!() };
        assert_eq!(plain, Hello::default());
        let grease = with_extension(hello("a.org"), ENCRYPTED_CLIENT_HELLO, &[0; 8]);
        let Read::Complete(grease) = read_stream(&grease) else { panic!() };
        assert!(grease.has_ech && grease.name.is_some());
    }

    #[test]
    fn malformed_hello_is_refused() {
        let good = hello("a.org");
        let second_name = with_extension(good.clone(), SERVER_NAME, b"\0\x08\0\0\x05b.org");
        assert_eq!(read_stream(&second_name), Read::Malformed);
        let long = [&[22, 3, 1, 0x40, 0, 1, 1, 0, 0][..], &[0; 100]].concat();
        assert_eq!(read_stream(&long), Read::Malformed, "a hello of 64 KiB");
        let no_handshake = [&good[..20], &[23, 3, 3, 0, 1]].concat();
        assert_eq!(read_stream(&no_handshake[..5]), Read::Incomplete);
        for bytes in [&[22, 3, 1, 0, 0][..], &[22, 2], &[22, 3, 1, 0, 4, 2, 0, 0, 0], &[23]] {
            assert_eq!(read_stream(bytes), Read::Malformed, "{bytes:?}");
        }
        // Two messages in one record.
        let mut two = [&good[..], &good[5..]].concat();
        let len = u16::try_from(two.len() - 5).unwrap();
        two[3..5].copy_from_slice(&len.to_be_bytes());
        assert_eq!(read_stream(&two), Read::Malformed);
        assert_eq!(read_stream(&two[..good.len()]), Read::Malformed, "the rest is declared");
        let mut interrupted = in_records(&good, 10);
        interrupted[15] = 20;
        assert_eq!(read_stream(&interrupted), Read::Malformed, "another record inside the hello");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            crate::fuzzing::first_bytes(&bytes);
        }

        /// Compares with the parser of rustls.
        #[test]
        fn damaged_hello_shows_no_other_name_than_a_server_reads(at in 0..400_usize, value: u8) {
            let mut bytes = hello("a.example.org");
            let index = at % bytes.len();
            bytes[index] = value;
            let mut acceptor = rustls::server::Acceptor::default();
            acceptor.read_tls(&mut &bytes[..]).unwrap();
            if let Ok(Some(accepted)) = acceptor.accept()
                && let Some(name) = accepted.client_hello().server_name()
            {
                let expected = HostName::parse(name).unwrap();
                let Read::Complete(hello) = read_stream(&bytes) else { return Ok(()) };
                prop_assert_eq!(hello.name, Some(expected));
            }
        }
    }
}
