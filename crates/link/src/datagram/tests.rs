use std::os::unix::net::UnixDatagram;

use ringfence_frame::Port;
use ringfence_sys::poll::wait_readable;
use ringfence_uplink::link::{Committed, GuestLink, Slots};

use super::*;

const SHAPE: FrameShape = FrameShape { frames: 16, long: 16 };
const MTU: u16 = 9000;
const NOW: Option<core::time::Duration> = Some(core::time::Duration::ZERO);

/// A link on a bound socket, and a client that is bound and connected to it.
struct Lab {
    link: DatagramLink,
    /// Second descriptor of the link's socket, as the connecting process has it.
    socket: UnixDatagram,
    client: UnixDatagram,
    directory: tempfile::TempDir,
}

impl Lab {
    fn new() -> Lab {
        let directory = tempfile::tempdir().unwrap();
        let socket = UnixDatagram::bind(directory.path().join("link")).unwrap();
        let own = socket.try_clone().unwrap().into();
        let link = DatagramLink::new(own, MTU, SHAPE, Arc::default()).unwrap();
        let mut lab = Lab { link, socket, client: UnixDatagram::unbound().unwrap(), directory };
        lab.client = lab.another("client");
        lab
    }

    fn another(&self, name: &str) -> UnixDatagram {
        let client = UnixDatagram::bind(self.directory.path().join(name)).unwrap();
        client.set_nonblocking(true).unwrap();
        client.connect(self.directory.path().join("link")).unwrap();
        client
    }

    /// Returns a link that is connected to its client.
    fn connected() -> Lab {
        let lab = Lab::new();
        lab.socket.connect(lab.directory.path().join("client")).unwrap();
        lab
    }

    /// Receives once. Returns the frames.
    fn receive(&mut self) -> Result<Vec<Vec<u8>>, Fault> {
        let mut batch = Batch::default();
        self.link.receive(&mut batch, 64)?;
        let bytes = |frame: ringfence_frame::FrameView<'_>| {
            let mut bytes = vec![0; frame.len()];
            frame.copy_to(&mut bytes);
            bytes
        };
        Ok(batch.iter().map(bytes).collect())
    }

    /// Sends a frame to the client. Returns `false` if the link has no room.
    fn send(&mut self, frame: &[u8]) -> bool {
        let mut slots = Slots::new();
        self.link.reserve(1, frame.len(), &mut slots);
        let Some(slot) = slots.first_mut() else { return false };
        slot[..frame.len()].copy_from_slice(frame);
        drop(slots);
        let meta = ringfence_offload::OffloadMeta::PLAIN;
        self.link.commit(&[Committed { len: frame.len(), meta }]);
        GuestLink::flush(&mut self.link);
        true
    }

    fn drops(&self, reason: DropReason) -> u64 {
        self.link.queue.counters.drops(reason)
    }
}

fn frame(len: usize, value: u8) -> Vec<u8> {
    let mut bytes = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x88, 0xb5];
    bytes.resize(len, value);
    bytes
}

#[test]
fn first_datagram_stays_until_the_socket_is_connected() {
    let mut lab = Lab::new();
    lab.client.send(&MAGIC).unwrap();
    lab.client.send(&frame(60, 1)).unwrap();
    assert_eq!(lab.receive().unwrap(), [[0; 0]; 0]);
    assert!(lab.send(&frame(60, 9)), "without a client, frames are lost and hold nobody up");
    assert_eq!(lab.drops(DropReason::LinkDown), 1);
    lab.socket.connect(lab.directory.path().join("client")).unwrap();
    assert_eq!(lab.receive().unwrap(), [frame(60, 1)]);
    assert_eq!(lab.drops(DropReason::Runt), 0, "the magic bytes are no frame");
    assert!(lab.send(&frame(9000, 2)));
    let mut got = [0; 10_000];
    assert_eq!(lab.client.recv(&mut got).unwrap(), 9000);
    assert_eq!(got[..9000], frame(9000, 2));
}

#[test]
fn runt_and_oversize_datagrams_are_dropped_and_later_ones_arrive() {
    let mut lab = Lab::connected();
    let longest = frame(usize::from(MTU) + 18, 2);
    for sent in [&[][..], b"VFK", b"VFKU", &frame(14, 0)[..13], &frame(usize::from(MTU) + 19, 0)] {
        lab.client.send(sent).unwrap();
    }
    lab.client.send(&longest).unwrap();
    assert_eq!(lab.receive().unwrap(), [longest]);
    assert_eq!(lab.drops(DropReason::Runt), 4);
    assert_eq!(lab.drops(DropReason::Oversize), 1);
}

#[test]
fn second_client_cannot_reach_a_connected_link() {
    let mut lab = Lab::connected();
    let second = UnixDatagram::bind(lab.directory.path().join("second")).unwrap();
    let refused = second.send_to(&frame(60, 2), lab.directory.path().join("link")).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied);
    lab.client.send(&frame(60, 1)).unwrap();
    assert_eq!(lab.receive().unwrap(), [frame(60, 1)]);
}

#[test]
fn client_that_does_not_read_fills_the_ring_and_gets_every_frame_later() {
    let mut lab = Lab::connected();
    let mut sent = 0_u8;
    while lab.send(&frame(9000, sent)) {
        sent += 1;
    }
    assert!(lab.link.is_full(), "the engine must not poll it");
    let mut got = [0; 10_000];
    for number in 0..sent {
        assert_eq!(lab.client.recv(&mut got).unwrap(), 9000, "{number} of {sent}");
        assert_eq!(got[..9000], frame(9000, number));
        if wait_readable(lab.link.transport.socket.epoll(), NOW).unwrap() {
            GuestLink::flush(&mut lab.link);
        }
    }
    assert!(!lab.link.is_full());
    assert_eq!(lab.link.queue.counters.tx_frames.get(), u64::from(sent));
}

#[test]
fn link_ends_with_the_first_frame_that_its_client_is_not_there_for() {
    let mut lab = Lab::connected();
    lab.client = UnixDatagram::unbound().unwrap();
    assert_eq!(lab.receive().unwrap(), [[0; 0]; 0]);
    lab.send(&frame(60, 1));
    assert!(lab.link.arm().unwrap());
    assert!(matches!(lab.receive(), Err(Fault::Gone)));
}

#[test]
fn connected_pair_needs_no_greeting() {
    let (own, client) = UnixDatagram::pair().unwrap();
    let mut link = DatagramLink::new(own.into(), MTU, SHAPE, Arc::default()).unwrap();
    client.send(&frame(60, 7)).unwrap();
    let mut batch = Batch::default();
    assert_eq!(link.receive(&mut batch, 64).unwrap().frames, 1);
}
