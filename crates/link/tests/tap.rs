//! TAP link against a real kernel.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod support;

use std::net::UdpSocket;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringfence_frame::{Batch, DropReason, Fault, Port};
use ringfence_link::frame_ring::FrameShape;
use ringfence_link::tap::TapLink;
use ringfence_offload::packet::{Layers, Transport};
use ringfence_offload::{Checksum, OffloadMeta};
use ringfence_platform::Counters;
use ringfence_sys::tap::Tap;

use support::{in_namespaces, ip};

const LIMIT: Duration = Duration::from_secs(60);
/// Length of Ethernet, IPv4 and UDP header, in bytes.
const HEADERS: usize = 42;

/// Creates an interface with a link for each of its queues, and a neighbour behind it.
fn links(queues: usize) -> Vec<TapLink> {
    let links = Tap::create_queues("rf%d", queues).unwrap().into_iter().map(|tap| {
        assert_eq!(tap.name, "rf0", "every queue is of the one interface");
        let system = Arc::new(Counters::default());
        TapLink::new(tap.fd, tap.offloads, 1500, FrameShape::default(), system).unwrap()
    });
    let links = links.collect();
    ip("address add 10.9.0.1/24 dev rf0");
    ip("link set rf0 up");
    ip("neighbour add 10.9.0.2 lladdr 02:00:00:00:00:09 dev rf0");
    links
}

fn socket() -> UdpSocket {
    let socket = UdpSocket::bind("10.9.0.1:5001").unwrap();
    socket.connect("10.9.0.2:7").unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket
}

/// Returns the next UDP datagram that arrives on any link, and its metadata.
fn datagram(links: &mut [TapLink]) -> (Vec<u8>, OffloadMeta) {
    let begin = Instant::now();
    let mut batch = Batch::default();
    while begin.elapsed() < LIMIT {
        for link in &mut *links {
            batch.clear();
            link.receive(&mut batch, 64).unwrap();
            for frame in batch.iter() {
                let layers = Layers::parse(frame.header(), frame.len().try_into().unwrap());
                if matches!(layers.map(|layers| layers.transport()), Ok(Transport::Udp(_))) {
                    let mut bytes = vec![0; frame.len()];
                    frame.copy_to(&mut bytes);
                    if bytes[36..38] == 7u16.to_be_bytes() {
                        return (bytes, frame.meta());
                    }
                }
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("no datagram in {LIMIT:?}");
}

/// Swaps the addresses and ports of Ethernet, IPv4 and UDP, which makes a reply and changes no checksum.
fn make_reply(bytes: &mut [u8]) {
    for (a, b, len) in [(0, 6, 6), (26, 30, 4), (34, 36, 2)] {
        for i in 0..len {
            bytes.swap(a + i, b + i);
        }
    }
}

#[test]
fn frames_in_reserved_rooms_arrive_on_every_queue() {
    in_namespaces("frames_in_reserved_rooms_arrive_on_every_queue", || {
        let mut links = links(2);
        let socket = socket();
        socket.send(&[0; 1000]).unwrap();
        let (mut sample, meta) = datagram(&mut links);
        assert_eq!(meta.checksum, Checksum::Partial { start: 34, offset: 6 });
        make_reply(&mut sample);
        for (n, link) in (0u8..).zip(links.iter_mut()) {
            let values = [1u8, 2, 3].map(|value| value + 10 * n);
            let mut filling = values.into_iter();
            link.frames().reserve(3, sample.len(), |room| {
                room[..HEADERS].copy_from_slice(&sample[..HEADERS]);
                room[HEADERS..sample.len()].fill(filling.next().unwrap());
            });
            for _ in values {
                link.frames().commit(sample.len(), meta).unwrap();
            }
            link.flush().unwrap();
            assert_eq!(link.frames().free(1), FrameShape::default().frames as usize);
            assert_eq!(link.counters().tx_frames.get(), 3);
            for value in values {
                let mut got = [0; 2000];
                let n = socket.recv(&mut got).unwrap();
                // The kernel has verified the checksum that it had to complete.
                assert_eq!(got[..n], [value; 1000]);
            }
        }
    });
}

#[test]
fn frame_refused_by_kernel_is_dropped_and_counted() {
    in_namespaces("frame_refused_by_kernel_is_dropped_and_counted", || {
        let mut links = links(1);
        let link = &mut links[0];
        ip("link set rf0 down");
        send_one(link);
        link.flush().unwrap();
        assert_eq!(link.counters().drops(DropReason::LinkDown), 1);
        ip("link set rf0 up");
        send_one(link);
        link.flush().unwrap();
        assert_eq!(link.counters().tx_frames.get(), 1);
        ip("link delete rf0");
        send_one(link);
        assert!(matches!(link.flush(), Err(Fault::Gone)));
    });
}

fn send_one(link: &mut TapLink) {
    link.frames().reserve(1, 60, |room| room[..60].fill(0));
    link.frames().commit(60, OffloadMeta::PLAIN).unwrap();
}
