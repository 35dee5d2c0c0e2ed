use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};

use ringfence_frame::Port;
use ringfence_offload::OffloadMeta;
use ringfence_sys::poll::wait_readable;
use ringfence_uplink::link::{Committed, GuestLink, Slots};

use super::*;
use crate::clients::LOGGED_MAX;

const SHAPE: FrameShape = FrameShape { frames: 16, long: 16 };
const MTU: u16 = 9000;

fn link(clients: Clients) -> StreamLink {
    StreamLink::new(clients, MTU, SHAPE, Arc::default()).unwrap()
}

fn pair() -> (StreamLink, UnixStream) {
    let (own, client) = UnixStream::pair().unwrap();
    (link(Clients::Connected(own.into())), client)
}

fn listening(one_off: bool) -> (StreamLink, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let socket = UnixListener::bind(directory.path().join("socket")).unwrap();
    socket.set_nonblocking(true).unwrap();
    (link(Clients::Listener { socket: socket.into(), one_off }), directory)
}

fn connect(directory: &tempfile::TempDir) -> std::io::Result<UnixStream> {
    UnixStream::connect(directory.path().join("socket"))
}

fn frame(len: usize, value: u8) -> Vec<u8> {
    let mut bytes = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x88, 0xb5];
    bytes.resize(len, value);
    bytes
}

fn on_the_wire(frame: &[u8]) -> Vec<u8> {
    [&frame_stream::prefix(frame.len()).unwrap()[..], frame].concat()
}

/// Receives once. Returns the frames.
fn receive(link: &mut StreamLink) -> Result<Vec<Vec<u8>>, Fault> {
    let mut batch = Batch::default();
    link.receive(&mut batch, 64)?;
    let bytes = |frame: ringfence_frame::FrameView<'_>| {
        let mut bytes = vec![0; frame.len()];
        frame.copy_to(&mut bytes);
        bytes
    };
    Ok(batch.iter().map(bytes).collect())
}

/// Commits frames of one length for the guest. Returns the number of those that had room.
fn commit(link: &mut StreamLink, frame: &[u8], count: usize) -> usize {
    let mut slots = Slots::new();
    link.reserve(count, frame.len(), &mut slots);
    slots.iter_mut().for_each(|slot| slot[..frame.len()].copy_from_slice(frame));
    let committed = slots.len();
    drop(slots);
    link.commit(&vec![Committed { len: frame.len(), meta: OffloadMeta::PLAIN }; committed]);
    committed
}

#[test]
fn frame_in_pieces_is_received_whole() {
    let (mut link, mut client) = pair();
    let sent = frame(5000, 7);
    for piece in on_the_wire(&sent).chunks(999) {
        assert_eq!(receive(&mut link).unwrap(), [[0; 0]; 0]);
        client.write_all(piece).unwrap();
    }
    assert_eq!(receive(&mut link).unwrap(), [sent]);
}

#[test]
fn runt_and_oversize_frames_are_dropped_and_later_ones_arrive() {
    let (mut link, mut client) = pair();
    let good = frame(60, 1);
    let longest = frame(usize::from(MTU) + 18, 2);
    for sent in [&[][..], &frame(13, 0)[..13], &frame(usize::from(MTU) + 19, 0), &good, &longest] {
        client.write_all(&on_the_wire(sent)).unwrap();
    }
    assert_eq!(receive(&mut link).unwrap(), [good, longest]);
    assert_eq!(link.queue.counters.drops(DropReason::Runt), 2);
    assert_eq!(link.queue.counters.drops(DropReason::Oversize), 1);
}

#[test]
fn more_frames_than_the_budget_wait_and_keep_the_link_awake() {
    let (mut link, mut client) = pair();
    for _ in 0..100 {
        client.write_all(&on_the_wire(&frame(60, 1))).unwrap();
    }
    assert_eq!(receive(&mut link).unwrap().len(), 64);
    assert!(link.arm().unwrap(), "the socket is empty, but frames wait");
    assert_eq!(receive(&mut link).unwrap().len(), 36);
    assert!(!link.arm().unwrap());
}

#[test]
fn hostile_length_ends_a_link_without_other_clients() {
    let (mut link, mut client) = pair();
    client.write_all(&on_the_wire(&frame(60, 1))).unwrap();
    client.write_all(&[0xFF; 100]).unwrap();
    assert!(matches!(receive(&mut link), Err(Fault::Misbehaved(_))));
}

#[test]
fn client_with_hostile_length_is_disconnected_and_the_next_is_served() {
    let (mut link, directory) = listening(false);
    for round in 0..20_u8 {
        let mut hostile = connect(&directory).unwrap();
        hostile.write_all(&[0xFF, 0, 0, 0, 1, 2, 3]).unwrap();
        assert_eq!(receive(&mut link).unwrap(), [[0; 0]; 0]);
        assert!(!link.is_connected());
        // The end reaches the client, and none of its bytes the next one's frames.
        assert_eq!(hostile.read(&mut [0; 1]).unwrap_or(0), 0);
        let mut client = connect(&directory).unwrap();
        client.write_all(&on_the_wire(&frame(60, round))).unwrap();
        assert_eq!(receive(&mut link).unwrap(), [frame(60, round)]);
        drop(client);
        receive(&mut link).unwrap();
    }
    assert_eq!(link.transport.clients.logged(), LOGGED_MAX);
    assert_eq!(link.queue.counters.drops(DropReason::BadRequest), 20);
}

#[test]
fn second_client_is_closed_while_the_first_is_connected() {
    let (mut link, directory) = listening(false);
    let mut first = connect(&directory).unwrap();
    receive(&mut link).unwrap();
    let mut second = connect(&directory).unwrap();
    second.set_read_timeout(Some(core::time::Duration::from_secs(2))).unwrap();
    assert!(
        wait_readable(link.transport.clients.epoll(), Some(core::time::Duration::ZERO)).unwrap()
    );
    link.clear_events().unwrap();
    assert!(
        !wait_readable(link.transport.clients.epoll(), Some(core::time::Duration::ZERO)).unwrap()
    );
    assert_eq!(second.read(&mut [0; 1]).unwrap(), 0);
    first.write_all(&on_the_wire(&frame(60, 3))).unwrap();
    assert_eq!(receive(&mut link).unwrap(), [frame(60, 3)]);
}

#[test]
fn next_client_begins_with_a_whole_frame() {
    let (mut link, directory) = listening(false);
    let mut first = connect(&directory).unwrap();
    // One frame is sent in part, and one received in part.
    first.write_all(&on_the_wire(&frame(60, 1))[..30]).unwrap();
    receive(&mut link).unwrap();
    // The kernel splits what is longer than half of the socket's buffer.
    while commit(&mut link, &frame(9000, 1), 16) > 0 {}
    assert!(link.is_full() && link.transport.sent > 0);
    drop(first);
    receive(&mut link).unwrap();
    assert!(!link.is_connected() && !link.is_full());
    // Without a client, frames are lost and the engine is not held up.
    for _ in 0..10 {
        assert_eq!(commit(&mut link, &frame(60, 2), 16), 16);
        GuestLink::flush(&mut link);
    }
    let mut next = connect(&directory).unwrap();
    next.write_all(&on_the_wire(&frame(60, 4))).unwrap();
    assert_eq!(receive(&mut link).unwrap(), [frame(60, 4)]);
    commit(&mut link, &frame(60, 5), 1);
    GuestLink::flush(&mut link);
    let mut got = [0; 64];
    next.read_exact(&mut got).unwrap();
    assert_eq!(got[..], on_the_wire(&frame(60, 5)));
}

#[test]
fn client_that_does_not_read_fills_the_ring_and_gets_every_frame_later() {
    let (mut link, mut client) = pair();
    let mut committed = 0_u8;
    while commit(&mut link, &frame(9000, committed), 1) > 0 {
        committed += 1;
        GuestLink::flush(&mut link);
    }
    assert!(link.is_full(), "the engine must not poll it");
    let len = 4 + 9000;
    for number in 0..committed {
        let mut got = vec![0; len];
        client.read_exact(&mut got).unwrap();
        assert!(got == on_the_wire(&frame(9000, number)), "frame {number} of {committed}");
        if link.is_full()
            && wait_readable(link.transport.clients.epoll(), Some(core::time::Duration::ZERO))
                .unwrap()
        {
            GuestLink::flush(&mut link);
        }
    }
    assert!(!link.is_full() && link.queue.frames.waiting() == 0);
    assert_eq!(link.queue.counters.tx_frames.get(), u64::from(committed));
}

#[test]
fn link_without_listener_ends_with_its_client() {
    let (mut link, client) = pair();
    drop(client);
    assert!(matches!(receive(&mut link), Err(Fault::Gone)));
}

#[test]
fn one_off_link_accepts_nobody_after_its_client() {
    let (mut link, directory) = listening(true);
    assert_eq!(receive(&mut link).unwrap(), [[0; 0]; 0]);
    let client = connect(&directory).unwrap();
    receive(&mut link).unwrap();
    assert!(link.is_connected());
    assert!(connect(&directory).is_err());
    drop(client);
    assert!(matches!(receive(&mut link), Err(Fault::Gone)));
}
