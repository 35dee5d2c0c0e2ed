//! Second ClientHello of a TLS client: its answer to a HelloRetryRequest (RFC 8446, 4.1.4).
//!
//! A second hello must name the same server, but not every server compares the names. [`Later`] reads the records behind
//! the first hello until no second one can follow:
//!
//! | record of the client | meaning |
//! |---|---|
//! | `change_cipher_spec`, `alert` | a second hello may follow; at most [`SKIPPED_MAX`] of them |
//! | `application_data`, the first hello offers early data | a second hello may follow, behind at most [`EARLY_DATA_MAX`] bytes |
//! | `handshake` with a ClientHello | the second hello |
//! | any other | no second hello: a server ends the connection, or has not asked for one |
//!
//! In TLS 1.2, encrypted `handshake` records follow a `change_cipher_spec`. They have no header that a second hello has,
//! but for one in 2^34.

use super::{
    ALERT, CHANGE_CIPHER_SPEC, FRAGMENT_MAX, HANDSHAKE, HELLO_MAX, Hello, Read, message_len,
    read_stream,
};

/// Maximum number of records before a second hello, early data aside. Clients send one.
pub const SKIPPED_MAX: usize = 32;
/// Maximum number of bytes of early data before a second hello. Servers accept 16 KiB, few of them 64.
pub const EARLY_DATA_MAX: usize = 128 << 10;

const APPLICATION_DATA: u8 = 23;
const CLIENT_HELLO: u8 = 1;
/// Length of a record's header in bytes.
const HEADER: usize = 5;
/// Minimum length of an encrypted fragment in bytes: its authentication tag.
const ENCRYPTED_MIN: usize = 16;

/// Result of reading more of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// So many bytes at the beginning belong to no second hello. More bytes are needed to tell about the others.
    More(usize),
    /// No second hello follows.
    Over,
    /// The bytes contain this second hello, and no further one follows.
    Hello(Hello),
    /// No client sends such records.
    Malformed,
}

/// Reader of a client's stream behind its first hello.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Later {
    /// The first hello offers early data.
    offers_early_data: bool,
    /// Number of bytes of the current record that are still to come.
    left: usize,
    /// Number of records before a second hello, early data aside.
    skipped: usize,
    /// Number of bytes of early data.
    early_data: usize,
}

impl Later {
    /// Prepares to read the records behind this first hello.
    pub fn new(first: &Hello) -> Later {
        let offers_early_data = first.offers_early_data;
        Later { offers_early_data, left: 0, skipped: 0, early_data: 0 }
    }

    /// Reads the stream from the end of the first hello, or of the bytes that were passed, on.
    pub fn read(&mut self, bytes: &[u8]) -> Next {
        let mut passed = 0;
        loop {
            let rest = bytes.get(passed..).unwrap_or_default();
            let known = self.left.min(rest.len());
            self.left -= known;
            passed += known;
            let rest = &rest[known..];
            let Some(&[kind, _, _, high, low]) = rest.first_chunk() else {
                return Next::More(passed);
            };
            let len = usize::from(u16::from_be_bytes([high, low]));
            match kind {
                CHANGE_CIPHER_SPEC | ALERT => {
                    self.skipped += 1;
                    if self.skipped > SKIPPED_MAX {
                        return Next::Malformed;
                    }
                }
                APPLICATION_DATA if self.offers_early_data => {
                    self.early_data += len;
                    if self.early_data > EARLY_DATA_MAX {
                        return Next::Over;
                    }
                }
                HANDSHAKE => match self.handshake(rest, len) {
                    Next::More(_) => return Next::More(passed),
                    other => return other,
                },
                _ => return Next::Over,
            }
            self.left = HEADER + len;
        }
    }

    /// Reads a `handshake` record, which begins a message.
    fn handshake(&self, record: &[u8], len: usize) -> Next {
        let body = &record[HEADER..];
        // The bytes behind the fragment belong to the next record.
        let body = &body[..len.min(body.len())];
        let may_be_encrypted = self.skipped > 0 && len >= ENCRYPTED_MIN;
        let is_hello = if may_be_encrypted {
            // Type, length, and version of the hello.
            let Some(&[kind, high, middle, low, major, _]) = body.first_chunk() else {
                return Next::More(0);
            };
            let hello = usize::try_from(u32::from_be_bytes([0, high, middle, low]));
            kind == CLIENT_HELLO && hello.is_ok_and(|len| len <= HELLO_MAX) && major == 3
        } else {
            match body.first() {
                // A server ignores no empty record of this type.
                None if len == 0 => return Next::Malformed,
                None => return Next::More(0),
                Some(kind) => *kind == CLIENT_HELLO,
            }
        };
        if !is_hello {
            return Next::Over;
        }
        match read_stream(record) {
            Read::Incomplete => Next::More(0),
            Read::Malformed => Next::Malformed,
            Read::Complete(hello) => Next::Hello(hello),
        }
    }
}

/// Returns the length of the records of the hello at the beginning of a stream.
pub fn first_len(bytes: &[u8]) -> usize {
    let (mut message, mut at) = (Vec::new(), 0);
    while let Some(&[_, _, _, high, low]) = bytes.get(at..).and_then(|rest| rest.first_chunk()) {
        let len = usize::from(u16::from_be_bytes([high, low])).min(FRAGMENT_MAX);
        let body = bytes.get(at + HEADER..).unwrap_or_default();
        message.extend_from_slice(&body[..len.min(body.len())]);
        at += HEADER + len;
        if message.len() >= 4 && message.len() >= message_len(&message) {
            break;
        }
    }
    at.min(bytes.len())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::{hello, in_records, with_extension};
    use super::*;

    /// Type of the extension that offers early data.
    const EARLY_DATA: u16 = 42;

    fn record(kind: u8, fragment: &[u8]) -> Vec<u8> {
        let len = u16::try_from(fragment.len()).unwrap().to_be_bytes();
        [&[kind, 3, 3][..], &len, fragment].concat()
    }

    fn ccs() -> Vec<u8> {
        record(CHANGE_CIPHER_SPEC, &[1])
    }

    fn parsed(stream: &[u8]) -> Hello {
        let Read::Complete(hello) = read_stream(stream) else { panic!("{stream:02x?}") };
        hello
    }

    /// Reads a stream whole.
    fn behind(first: &[u8], later: &[u8]) -> Next {
        Later::new(&parsed(first)).read(later)
    }

    /// Reads a stream in pieces of these lengths. Returns the verdict and the number of bytes passed before it.
    fn in_pieces(first: &[u8], later: &[u8], len: usize) -> (Next, usize) {
        let (mut reader, mut held, mut passed) = (Later::new(&parsed(first)), Vec::new(), 0);
        for piece in later.chunks(len) {
            held.extend_from_slice(piece);
            match reader.read(&held) {
                Next::More(count) => {
                    held.drain(..count);
                    passed += count;
                }
                verdict => return (verdict, passed),
            }
        }
        (Next::More(0), passed)
    }

    #[test]
    fn second_hello_is_read_in_any_segments_and_records() {
        let (first, second) = (hello("a.org"), hello("b.org"));
        for before in [vec![], ccs(), [ccs(), record(ALERT, &[1, 90])].concat()] {
            for len in [1, 5, 15, 16, 60, 16_384] {
                let later = [before.clone(), in_records(&second, len)].concat();
                let expected = Next::Hello(parsed(&second));
                assert_eq!(behind(&first, &later), expected, "{len}");
                for piece in [1, 3, 7, 1000] {
                    let (verdict, passed) = in_pieces(&first, &later, piece);
                    assert_eq!((verdict, passed <= before.len()), (expected.clone(), true));
                }
            }
        }
    }

    #[test]
    fn no_byte_of_an_incomplete_second_hello_is_passed() {
        let (first, later) = (hello("a.org"), [ccs(), hello("b.org")].concat());
        for end in 6..later.len() {
            assert_eq!(behind(&first, &later[..end]), Next::More(6), "{end}");
        }
    }

    #[test]
    fn early_data_before_second_hello_is_skipped_if_it_is_offered() {
        let data = record(APPLICATION_DATA, &[7; 1000]);
        let later = [&ccs()[..], &data, &data, &hello("b.org")].concat();
        assert_eq!(behind(&hello("a.org"), &later), Next::Over, "a server accepts none");
        let offers = with_extension(hello("a.org"), EARLY_DATA, &[]);
        assert_eq!(behind(&offers, &later), Next::Hello(parsed(&hello("b.org"))));
        assert_eq!(in_pieces(&offers, &later, 100).1, 6 + 2 * 1005);
        let much = data.repeat(EARLY_DATA_MAX / 1000 + 1);
        assert_eq!(behind(&offers, &much), Next::Over);
    }

    #[test]
    fn ordinary_records_end_the_reading_at_once() {
        let first = hello("a.org");
        let finished = record(APPLICATION_DATA, &[9; 53]);
        assert_eq!(behind(&first, &[ccs(), finished].concat()), Next::Over);
        // TLS 1.2: ClientKeyExchange, Certificate, and an encrypted Finished after a resumption.
        for kind in [16, 11] {
            assert_eq!(behind(&first, &record(HANDSHAKE, &[kind, 0, 0, 33])), Next::Over);
        }
        for nonce in 0..=255 {
            let fragment = [&[nonce; 8][..], &[0x5a; 32]].concat();
            let later = [ccs(), record(HANDSHAKE, &fragment)].concat();
            assert_eq!(behind(&first, &later), Next::Over, "{nonce}");
        }
    }

    #[test]
    fn records_that_no_client_sends_are_refused() {
        let first = hello("a.org");
        let many = ccs().repeat(SKIPPED_MAX + 1);
        assert_eq!(behind(&first, &many), Next::Malformed);
        let records = in_records(&hello("b.org"), 50);
        let interrupted = [&records[..55], &ccs(), &records[55..]].concat();
        assert_eq!(behind(&first, &interrupted), Next::Malformed);
        let mut version = hello("b.org");
        version[1] = 5;
        assert_eq!(behind(&first, &version), Next::Malformed, "the version may be ignored");
        let empty = record(HANDSHAKE, &[]);
        assert_eq!(behind(&first, &empty), Next::Malformed);
        assert_eq!(behind(&first, &[empty, hello("b.org")].concat()), Next::Malformed);
    }

    #[test]
    fn length_of_the_first_hello_ends_at_its_last_record() {
        let first = hello("a.org");
        for len in [1, 3, 100, 16_384] {
            let records = in_records(&first, len);
            let stream = [&records[..], &ccs(), b"more"].concat();
            assert_eq!(first_len(&stream), records.len());
        }
        assert_eq!(first_len(&first[..20]), 20);
    }

    proptest! {
        #[test]
        fn verdict_does_not_depend_on_segments(
            bytes in prop::collection::vec(any::<u8>(), 0..80),
            kinds in prop::collection::vec(19_u8..25, 0..5),
            piece in 1_usize..40,
        ) {
            let mut later = Vec::new();
            kinds.iter().for_each(|kind| later.extend(record(*kind, &bytes[..bytes.len().min(20)])));
            later.extend(bytes);
            let (first, whole) = (hello("a.org"), behind(&hello("a.org"), &later));
            let (verdict, passed) = in_pieces(&first, &later, piece);
            match whole {
                Next::More(count) => prop_assert_eq!((verdict, passed), (Next::More(0), count)),
                other => prop_assert_eq!(verdict, other),
            }
        }
    }
}
