//! First bytes of a connection: the name that a TLS or HTTP client shows before the server answers.

use crate::http::{self, Host};
use crate::name::HostName;
use crate::tls::{self, Hello, Read};

/// Maximum number of bytes that a verdict may need: a hello in records of some bytes each.
pub const FIRST_BYTES_MAX: usize = 32 << 10;

/// Contents of a connection's first bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shown {
    Tls(Hello),
    Http(Host),
    /// The bytes are of a protocol that shows no name. The rest of its first line must be read by
    /// [`http::FirstLine`].
    Unknown,
    /// The datagram may be of a QUIC version whose server name cannot be read.
    OtherQuic,
    /// The bytes are malformed TLS, QUIC or HTTP, or longer than the limit.
    Malformed,
}

impl Shown {
    /// Returns the name that the bytes show.
    pub fn name(&self) -> Option<&HostName> {
        match self {
            Shown::Tls(hello) => hello.name.as_ref(),
            Shown::Http(Host::Name(name)) => Some(name),
            _ => None,
        }
    }
}

/// Inspects the first bytes of a connection. Returns `None` if more are needed. `is_all`: no more will come.
pub fn inspect(bytes: &[u8], is_all: bool) -> Option<Shown> {
    let read = match bytes.first() {
        None => Read::Incomplete,
        Some(&tls::HANDSHAKE) => tls::read_stream(bytes).map(Shown::Tls),
        Some(_) => match tls::read_other_record(bytes) {
            Some(read) => read.map(Shown::Tls),
            None => match http::read_stream(bytes) {
                Some(read) => read.map(Shown::Http),
                None => return Some(Shown::Unknown),
            },
        },
    };
    match read {
        Read::Complete(shown) => Some(shown),
        Read::Malformed => Some(Shown::Malformed),
        // A word that nothing follows is no request.
        Read::Incomplete if is_all && http::is_word(bytes) => Some(Shown::Unknown),
        Read::Incomplete if is_all || bytes.len() >= FIRST_BYTES_MAX => Some(Shown::Malformed),
        Read::Incomplete => None,
    }
}

impl<T> Read<T> {
    fn map<U>(self, f: impl FnOnce(T) -> U) -> Read<U> {
        match self {
            Read::Incomplete => Read::Incomplete,
            Read::Malformed => Read::Malformed,
            Read::Complete(value) => Read::Complete(f(value)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Prefixes of a hello, and messages in its place, that some server accepts or skips.
    #[test]
    fn record_before_the_hello_is_malformed() {
        let hello = tls::tests::hello("b.org");
        let prefixes: [&[u8]; 14] = [
            &[21, 3, 1, 0, 2, 1, 0],
            &[21, 3, 3, 0, 2, 1, 90],
            &[21, 3, 3, 0, 2, 1, 41],
            &[21, 0, 0, 0, 2, 1, 90],
            &[21, 2, 0, 0, 2, 1, 90],
            &[21, 15, 255, 0, 2, 1, 90],
            &[21, 255, 0, 0, 2, 1, 90],
            &[21, 3, 3, 0, 0],
            &[20, 3, 3, 0, 1, 1],
            &[20, 3, 3, 0, 0],
            &[22, 3, 3, 0, 0],
            &[23, 3, 3, 0, 0],
            &[24, 3, 3, 0, 3, 1, 0, 0],
            // ClientHello of SSLv2 with the version of TLS 1.2.
            &[0x80, 0x2e, 1, 3, 3, 0, 3, 0, 0, 0, 16, 0, 0, 0x2f],
        ];
        for prefix in prefixes {
            let stream = [prefix, &hello].concat();
            assert_eq!(inspect(&stream, false), Some(Shown::Malformed), "{prefix:?}");
            for end in 1..prefix.len() {
                let early = inspect(&stream[..end], false);
                assert!(matches!(early, None | Some(Shown::Malformed)), "{prefix:?}: {early:?}");
            }
        }
        // A message of MongoDB begins with its length, least significant byte first.
        assert_eq!(inspect(&[21, 1, 0, 0, 7, 0, 0, 0], false), Some(Shown::Unknown));
    }

    #[test]
    fn record_that_rustls_skips_before_the_hello_does_not_pass() {
        let hello = tls::tests::hello("b.org");
        let bodies: [&[u8]; 6] = [&[], &[1], &[1, 0], &[1, 41], &[1, 90], &[2, 40]];
        for (kind, major, body) in (0..=255).flat_map(|kind| {
            [0, 2, 3, 4, 255]
                .into_iter()
                .flat_map(move |major| bodies.map(|body| (kind, major, body)))
        }) {
            let len = u8::try_from(body.len()).unwrap();
            let stream = [&[kind, major, 3, 0, len][..], body, &hello].concat();
            let mut acceptor = rustls::server::Acceptor::default();
            acceptor.read_tls(&mut &stream[..]).unwrap();
            if matches!(acceptor.accept(), Ok(Some(_))) {
                println!("rustls skips {kind} {major} {body:?}");
                assert_eq!(inspect(&stream, false), Some(Shown::Malformed));
            }
        }
    }

    #[test]
    fn incomplete_message_at_the_end_is_malformed() {
        let hello = tls::tests::hello("a.org");
        assert_eq!(inspect(&hello[..40], false), None);
        assert_eq!(inspect(&hello[..40], true), Some(Shown::Malformed));
        assert_eq!(inspect(b"GET / HT", true), Some(Shown::Malformed));
        assert_eq!(inspect(b"", false), None);
        assert_eq!(inspect(b"", true), Some(Shown::Unknown));
        assert_eq!(inspect(b"SSH-2.0-x\r\n", false), Some(Shown::Unknown));
        assert_eq!(inspect(b"ruok", false), None);
        assert_eq!(inspect(b"ruok", true), Some(Shown::Unknown));
        let tiny_records = tls::tests::in_records(&hello, 1);
        assert!(matches!(inspect(&tiny_records, false), Some(Shown::Tls(_))));
    }
}
