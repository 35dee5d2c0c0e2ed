//! TAP port with a real kernel, in namespaces of its own.

#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

mod support;

use std::net::UdpSocket;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringfence_frame::tap::TapPort;
use ringfence_frame::{Batch, DropReason, Fault, FrameView, Port};
use ringfence_offload::packet::{Layers, Transport};
use ringfence_offload::{Checksum, OffloadMeta};
use ringfence_platform::Counters;
use ringfence_sys::tap::{Tap, TapOffloads};

use support::{in_namespaces, ip};

const LIMIT: Duration = Duration::from_secs(60);
const PEER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];

struct Bench {
    port: TapPort,
    batch: Batch,
    system: Arc<Counters>,
}

impl Bench {
    fn new(offloads: TapOffloads) -> Bench {
        let mut tap = Tap::create("rf0").unwrap();
        tap.limit_offloads(offloads).unwrap();
        assert_eq!(tap.offloads, offloads);
        let system = Arc::new(Counters::default());
        let port = TapPort::new(tap.fd, tap.offloads, 1500, Arc::clone(&system));
        Bench { port, batch: Batch::default(), system }
    }

    fn up(offloads: TapOffloads) -> Bench {
        let bench = Bench::new(offloads);
        ip("address add 10.9.0.1/24 dev rf0");
        ip("link set rf0 up");
        ip("neighbour add 10.9.0.2 lladdr 02:00:00:00:00:09 dev rf0");
        bench
    }

    /// Receives until a UDP datagram from port 5001 arrives; returns its index in the batch.
    fn datagram(&mut self) -> u32 {
        let begin = Instant::now();
        while begin.elapsed() < LIMIT {
            self.batch.clear();
            self.port.receive(&mut self.batch, 64).unwrap();
            let ours = |frame: FrameView<'_>| {
                let len = u32::try_from(frame.len()).unwrap();
                match Layers::parse(frame.header(), len).map(|layers| layers.transport()) {
                    Ok(Transport::Udp(udp)) => {
                        let port = usize::from(udp.offset);
                        frame.header()[port..port + 2] == 5001u16.to_be_bytes()
                    }
                    _ => false,
                }
            };
            if let Some(index) = self.batch.iter().position(ours) {
                return u32::try_from(index).unwrap();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("no datagram in {LIMIT:?}");
    }

    /// Makes the frame a reply: swaps addresses and ports of Ethernet, IPv4 and UDP, which keeps both checksums
    /// valid.
    fn make_reply(&mut self, index: u32) {
        let header = self.batch.header_mut(index).unwrap();
        for (a, b, len) in [(0, 6, 6), (26, 30, 4), (34, 36, 2)] {
            for i in 0..len {
                header.swap(a + i, b + i);
            }
        }
        assert_eq!(header[6..12], PEER_MAC);
    }
}

fn socket() -> UdpSocket {
    let socket = UdpSocket::bind("10.9.0.1:5001").unwrap();
    socket.connect("10.9.0.2:7").unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    socket
}

#[test]
fn blank_and_complete_datagrams_are_echoed() {
    in_namespaces("blank_and_complete_datagrams_are_echoed", |_| {
        let mut bench = Bench::up(TapOffloads::CSUM);
        let socket = socket();
        for (finish, len) in [(false, 5), (true, 5), (false, 1472), (true, 1471)] {
            let sent: Vec<u8> = (0..len).map(|i| u8::try_from(i % 249).unwrap()).collect();
            socket.send(&sent).unwrap();
            let index = bench.datagram();
            let meta = bench.batch.get(index).unwrap().meta();
            assert_eq!(meta.checksum, Checksum::Partial { start: 34, offset: 6 });
            bench.make_reply(index);
            if finish {
                bench.batch.finish_checksum(index).unwrap();
                // The test verifies the checksum itself and does not trust the kernel's flag.
                bench.batch.set_meta(index, OffloadMeta::PLAIN);
            }
            let done = bench.port.transmit(&bench.batch, &[index]).unwrap();
            assert_eq!((done.sent, done.dropped), (1, 0));
            let mut got = [0; 2000];
            let n = socket.recv(&mut got).unwrap();
            assert_eq!(&got[..n], sent);
        }
        assert_eq!(bench.port.counters().tx_frames.get(), 4);
        assert!(bench.system.syscalls.get() >= 8);
    });
}

#[test]
fn datagram_with_wrong_checksum_is_not_received() {
    in_namespaces("datagram_with_wrong_checksum_is_not_received", |_| {
        let mut bench = Bench::up(TapOffloads::CSUM);
        let socket = socket();
        socket.send(b"hello").unwrap();
        let index = bench.datagram();
        bench.make_reply(index);
        // A blank checksum that is declared complete: the field holds the sum of the pseudo-header.
        bench.batch.set_meta(index, OffloadMeta::PLAIN);
        assert_eq!(bench.port.transmit(&bench.batch, &[index]).unwrap().sent, 1);
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        assert!(socket.recv(&mut [0; 16]).is_err());
    });
}

#[test]
fn kernel_computes_checksums_without_offloads() {
    in_namespaces("kernel_computes_checksums_without_offloads", |_| {
        let mut bench = Bench::up(TapOffloads(0));
        socket().send(b"hello").unwrap();
        let index = bench.datagram();
        assert!(bench.batch.get(index).unwrap().meta().is_finished());
    });
}

#[test]
fn interface_down_drops_frames_and_removal_ends_port() {
    in_namespaces("interface_down_drops_frames_and_removal_ends_port", |_| {
        let mut bench = Bench::new(TapOffloads::CSUM);
        let mut frame = [0u8; 60];
        frame[..6].fill(0xff);
        frame[6] = 2;
        let offset = bench.batch.reserve(60).unwrap();
        bench.batch.scratch_mut(offset..offset + 60).unwrap().copy_from_slice(&frame);
        bench.batch.push_contiguous(offset, 60, OffloadMeta::PLAIN).unwrap();
        let done = bench.port.transmit(&bench.batch, &[0]).unwrap();
        assert_eq!((done.sent, done.dropped), (0, 1));
        assert_eq!(bench.port.counters().drops(DropReason::LinkDown), 1);
        let received = bench.port.receive(&mut Batch::default(), 64).unwrap();
        assert_eq!(received.work, 0);
        ip("link delete rf0");
        assert!(matches!(bench.port.transmit(&bench.batch, &[0]), Err(Fault::Gone)));
        assert!(matches!(bench.port.receive(&mut Batch::default(), 64), Err(Fault::Gone)));
    });
}

#[test]
fn persistent_interface_is_opened_with_its_kind() {
    in_namespaces("persistent_interface_is_opened_with_its_kind", |_| {
        let files = |queues: usize| Tap::take_up_queues("rf0", queues).unwrap();
        let one = files(1);
        one[0].keep(true).unwrap();
        drop(one);
        let still_one = files(2);
        assert_eq!(still_one.len(), 1, "it was made with one queue");
        still_one[0].keep(false).unwrap();
        drop(still_one);
        let two = files(2);
        assert_eq!(two.len(), 2);
        two[0].keep(true).unwrap();
        drop(two);
        let of_two = files(1);
        assert_eq!(of_two.len(), 1, "no more are used than are asked for");
        drop(of_two);
        assert_eq!(files(2).len(), 2, "it has them still");
        Tap::create("rf0").map(drop).unwrap_err();
    });
}
