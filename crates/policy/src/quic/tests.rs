use proptest::prelude::*;

use super::testing::{Initial, V2, crypto, first_datagram, hello};
use super::*;
use crate::name::HostName;

const NOW: Duration = Duration::from_secs(1000);
const ID: [u8; 8] = [0x83, 0x94, 0xc8, 0xf0, 0x3e, 0x51, 0x57, 0x08];
const SERVERS_ID: [u8; 4] = *b"serv";

/// CRYPTO frame of the client's Initial packet in RFC 9001, A.2, and RFC 9369, A.2.
const FRAME: &str = "060040f1010000ed0303ebf8fa56f12939b9584a3896472ec40bb863cfd3e868\
    04fe3a47f06a2b69484c00000413011302010000c000000010000e00000b6578\
    616d706c652e636f6dff01000100000a00080006001d00170018001000070005\
    04616c706e000500050100000000003300260024001d00209370b2c9caa47fba\
    baf4559fedba753de171fa71f50f1ce15d43e994ec74d748002b000302030400\
    0d0010000e0403050306030203080408050806002d00020101001c0002400100\
    3900320408ffffffffffffffff05048000ffff07048000ffff08011001048000\
    75300901100f088394c8f03e51570806048000ffff";

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

fn shows(name: &str) -> Seen {
    Seen::Hello(Hello { name: Some(HostName::parse(name).unwrap()), ..Hello::default() })
}

/// Pads frames to the length that a sample needs.
fn padded(frames: &[u8]) -> Vec<u8> {
    [frames, &[0; 40]].concat()
}

fn packet(number: u64, frames: &[u8]) -> Vec<u8> {
    Initial::new(&ID, number).seal(&padded(frames))
}

/// Compares the beginning (header and sample) and the tag with the RFC. The tag covers all bytes between.
#[test]
fn initial_packets_of_rfc_9001_and_rfc_9369_show_their_name() {
    let mut frames = bytes(FRAME);
    frames.resize(1162, 0);
    for (version, start, tag) in [
        (
            1,
            "c000000001088394c8f03e5157080000449e7b9aec34d1b1c98dd7689fb8ec11d242b123dc9b",
            "e221af44860018ab0856972e194cd934",
        ),
        (
            V2,
            "d76b3343cf088394c8f03e5157080000449ea0c95e82ffe67b6abcdb4298b485dd04de806071",
            "a18b2faa745b6fe189cf772a9f84cbfc",
        ),
    ] {
        let sealed = Initial { version, ..Initial::new(&ID, 2) }.seal(&frames);
        assert_eq!(sealed.len(), 1200);
        assert_eq!(sealed[..38], bytes(start));
        assert_eq!(sealed[1184..], bytes(tag));
        assert_eq!(Client::default().read(&sealed, NOW), shows("example.com"));
    }
}

#[test]
fn hello_in_any_frames_packets_and_datagrams_shows_its_name() {
    let hello = hello("files.example.org");
    for len in [1, 7, 60, 200] {
        let mut client = Client::default();
        // The parts arrive in reverse order, each twice.
        let mut parts: Vec<_> = hello.chunks(len).enumerate().collect();
        parts.reverse();
        let last = parts.len() - 1;
        for (number, (at, part)) in parts.into_iter().enumerate() {
            let sealed = packet(u64::try_from(number).unwrap() * 2, &crypto(at * len, part));
            let seen = client.read(&sealed, NOW);
            let expected =
                if number == last { shows("files.example.org") } else { Seen::Incomplete };
            assert_eq!(seen, expected, "{len} {number}");
            let again = if number == last { Seen::Known } else { Seen::Incomplete };
            assert_eq!(client.read(&sealed, NOW), again);
            assert_eq!(client.is_waiting(), number != last);
        }
    }
    let (first, second) = hello.split_at(100);
    let coalesced = [packet(0, &crypto(100, second)), packet(1, &crypto(0, first))].concat();
    assert_eq!(Client::default().read(&coalesced, NOW), shows("files.example.org"));
    let both = packet(0, &[crypto(100, second), vec![1, 0], crypto(0, first)].concat());
    assert_eq!(Client::default().read(&both, NOW), shows("files.example.org"));
}

#[test]
fn later_connections_of_an_association_are_reported() {
    let mut client = Client::default();
    assert_eq!(client.read(&first_datagram(&ID, "a.org"), NOW), shows("a.org"));
    assert_eq!(client.read(&[0x40, 1, 2, 3, 4, 5], NOW), Seen::Other);
    assert_eq!(client.read(&first_datagram(b"another id", "b.org"), NOW), shows("b.org"));
    // The hello after a Retry has the keys of the server's id.
    assert_eq!(client.read(&first_datagram(&SERVERS_ID, "a.org"), NOW), shows("a.org"));
}

#[test]
fn second_hello_of_a_connection_is_reported() {
    for version in [1, V2] {
        let mut client = Client::default();
        let (first, second) = (hello("a.org"), hello("b.org"));
        assert_eq!(client.read(&packet(0, &crypto(0, &first)), NOW), shows("a.org"));
        let initial = Initial { version, keys_id: &ID, ..Initial::new(&SERVERS_ID, 1) };
        let acks = initial.seal(&padded(&[2, 0, 0, 0, 0]));
        assert_eq!(client.read(&acks, NOW), Seen::Known);
        let (one, two) = second.split_at(50);
        let part = Initial { number: 2, ..initial }.seal(&padded(&crypto(first.len(), one)));
        assert_eq!(client.read(&part, NOW), Seen::Incomplete);
        let rest = crypto(first.len() + 50, two);
        let rest = Initial { number: 3, ..initial }.seal(&padded(&rest));
        assert_eq!(client.read(&rest, NOW), shows("b.org"));
    }
    let both = [crypto(0, &hello("a.org")), crypto(hello("a.org").len(), &hello("b.org"))].concat();
    assert_eq!(Client::default().read(&packet(0, &both), NOW), Seen::Malformed);
}

#[test]
fn bytes_that_differ_from_earlier_ones_are_refused() {
    let (allowed, other) = (hello("a.org"), hello("b.org"));
    let mut client = Client::default();
    assert_eq!(client.read(&packet(0, &crypto(0, &allowed)), NOW), shows("a.org"));
    assert_eq!(client.read(&packet(1, &crypto(0, &other)), NOW), Seen::Malformed);
    client.refuse_last();
    assert_eq!(client.read(&packet(2, &crypto(0, &allowed)), NOW), Seen::Unreadable);
    let overlap = [crypto(0, &allowed[..80]), crypto(40, &other[40..])].concat();
    assert_eq!(Client::default().read(&packet(0, &overlap), NOW), Seen::Malformed);
    let beyond = [&[6, 0x80, 0, 0x80, 0, 1][..], &[1]].concat();
    assert_eq!(Client::default().read(&packet(0, &beyond), NOW), Seen::Malformed);
    assert_eq!(Client::default().read(&packet(0, &[8]), NOW), Seen::Malformed);
}

#[test]
fn abbreviated_packet_number_is_completed() {
    let (first, second) = (crypto(0, &hello("a.org")), padded(&[1]));
    for (number, next) in [(200, 266), (300, 250), (65_530, 65_600)] {
        let mut client = Client::default();
        assert_eq!(client.read(&packet(number, &first), NOW), shows("a.org"));
        let short = Initial { number_len: 1, ..Initial::new(&ID, next) }.seal(&second);
        assert_eq!(client.read(&short, NOW), Seen::Known, "{number} {next}");
    }
    // A server without the first packet would take the number as it is.
    let unknown = Initial { number_len: 1, ..Initial::new(&ID, 266) }.seal(&padded(&first));
    assert_eq!(Client::default().read(&unknown, NOW), Seen::Unreadable);
}

#[test]
fn datagram_that_no_key_opens_is_unreadable() {
    let whole = first_datagram(&ID, "a.org");
    for at in [0, 7, 18, 30, 1199] {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x0f;
        let seen = Client::default().read(&damaged, NOW);
        assert!(matches!(seen, Seen::Unreadable | Seen::Known), "{at} {seen:?}");
    }
    assert_eq!(Client::default().read(&whole[..1199], NOW), Seen::Unreadable);
    let two_ids = [packet(0, &crypto(0, &hello("a.org"))), first_datagram(b"12345678", "b.org")];
    assert_eq!(Client::default().read(&two_ids.concat(), NOW), Seen::Unreadable);
    let draft = [&[0xc3, 0xff, 0, 0, 29][..], &whole[5..]].concat();
    assert_eq!(Client::default().read(&draft, NOW), Seen::OtherVersion);
    assert_eq!(Client::default().read(&[0xc3, 0, 0, 0], NOW), Seen::Other);
    // A Handshake packet without a connection.
    assert_eq!(Client::default().read(&[&[0xe0][..], &whole[1..]].concat(), NOW), Seen::Unreadable);
}

#[test]
fn connections_stay_bounded_and_are_remembered_for_a_handshake() {
    let mut client = Client::default();
    for id in 0..CONNECTIONS_MAX {
        let id = [8, u8::try_from(id).unwrap()];
        assert_eq!(client.read(&first_datagram(&id, "a.org"), NOW), shows("a.org"));
    }
    let another = first_datagram(&ID, "b.org");
    assert_eq!(client.read(&another, NOW), Seen::Unreadable);
    assert_eq!(client.read(&another, NOW + REMEMBERED_FOR), shows("b.org"));
    assert_eq!(client.connections.len(), CONNECTIONS_MAX);
    assert!(client.memory() < CONNECTIONS_MAX * 4096);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_datagrams_are_read_without_panic(data in prop::collection::vec(any::<u8>(), 0..600)) {
        crate::fuzzing::quic_datagrams(&data);
    }

    #[test]
    fn any_frames_in_any_order_show_only_the_name_of_the_stream(
        cuts in prop::collection::vec(1_usize..250, 0..6),
        order in prop::collection::vec(any::<prop::sample::Index>(), 1..20),
    ) {
        let hello = hello("a.org");
        let mut ends: Vec<usize> = cuts.into_iter().filter(|cut| *cut < hello.len()).collect();
        ends.extend([0, hello.len()]);
        ends.sort_unstable();
        ends.dedup();
        let parts: Vec<_> = ends.windows(2).map(|pair| (pair[0], pair[1])).collect();
        let mut client = Client::default();
        let mut left = parts.clone();
        for (number, index) in order.into_iter().enumerate() {
            let (start, end) = parts[index.index(parts.len())];
            left.retain(|part| *part != (start, end));
            let number = u64::try_from(number).unwrap();
            match client.read(&packet(number, &crypto(start, &hello[start..end])), NOW) {
                Seen::Incomplete => prop_assert!(!left.is_empty()),
                Seen::Known => prop_assert!(left.is_empty()),
                seen => {
                    prop_assert!(left.is_empty());
                    prop_assert_eq!(seen, shows("a.org"));
                }
            }
        }
    }
}
