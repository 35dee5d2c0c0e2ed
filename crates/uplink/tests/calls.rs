#![forbid(unsafe_code)]
//! System calls of the host's TCP sockets, and of listening sockets behind a full link.

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use ringfence_frame::Batch;
use ringfence_offload::OffloadMeta;
use ringfence_uplink::forward::Destination;
use ringfence_uplink::host::real::RealHost;
use ringfence_uplink::host::{Host, Owner, OwnerKind, TcpHost};
use ringfence_uplink::testing::Wire;
use ringfence_uplink::{Config, Uplink, UplinkCounters};

#[test]
fn connection_that_sends_once_sets_no_delay_option() {
    let counters = Arc::<UplinkCounters>::default();
    let mut host = RealHost::new(Arc::clone(&counters)).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let owner = Owner { kind: OwnerKind::Tcp, index: 0, generation: 0 };
    let mut before = 0;
    let mut calls = || {
        let now = counters.syscalls.get();
        now - std::mem::replace(&mut before, now)
    };
    let socket = host.connect(owner, listener.local_addr().unwrap()).unwrap();
    assert_eq!(calls(), 5, "socket, two options, connect, epoll");
    let mut peer = listener.accept().unwrap().0;
    host.poll(&mut Vec::new(), None).unwrap();
    calls();
    // The option is set before the second piece, which the first one in flight would delay.
    for expected in [1, 2, 1] {
        assert_eq!(host.send_bytes(&socket, b"x"), Ok(1));
        assert_eq!(calls(), expected);
    }
    peer.read_exact(&mut [0; 3]).unwrap();
}

#[test]
fn connection_that_waits_behind_a_full_link_is_reported_twice_at_most() {
    const NOW: Duration = Duration::from_secs(1000);
    let counters = Arc::<UplinkCounters>::default();
    let mut config = Config { mtu: 1500, ..Config::default() };
    config.access.host_loopback.push([10, 0, 0, 1].into());
    config.guest.own = vec![[10, 0, 0, 1].into()];
    config.guest.mac = Some([2, 0, 0, 0, 0, 2]);
    let host = RealHost::new(Arc::clone(&counters)).unwrap();
    let mut uplink = Uplink::new(config, Box::new(host), Arc::clone(&counters));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    uplink.forward_tcp(listener.into(), Destination::Guest(([10, 0, 0, 2], 80).into())).unwrap();
    // The answer to an ARP request has no room.
    let mut request = vec![0xFF; 6];
    request.extend([2, 0, 0, 0, 0, 2, 8, 6, 0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 2, 10, 0, 0, 2]);
    request.extend([0, 0, 0, 0, 0, 0, 10, 0, 0, 1]);
    let mut batch = Batch::with_capacity(1, 1 << 12);
    let offset = batch.reserve(request.len()).unwrap();
    batch.scratch_mut(offset..offset + request.len()).unwrap().copy_from_slice(&request);
    let index = batch.push_contiguous(offset, request.len(), OffloadMeta::PLAIN).unwrap();
    uplink.input(&batch, &[index], NOW);
    let _client = TcpStream::connect(at).unwrap();
    let mut full = Wire::new(0);
    for events in [1, 1, 0, 0] {
        assert_eq!(uplink.poll_host(NOW), Ok(events));
        assert!(uplink.output(&mut full, NOW), "the answer waits");
    }
    let mut wire = Wire::new(4);
    uplink.output(&mut wire, NOW);
    assert_eq!(counters.tcp_accepted.get(), 1);
    let _second = TcpStream::connect(at).unwrap();
    uplink.poll_host(NOW).unwrap();
    uplink.output(&mut wire, NOW);
    assert_eq!(counters.tcp_accepted.get(), 2, "it is reported again");
}
