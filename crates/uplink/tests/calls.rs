#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a test: its panic is the report")]
//! System calls of the host's TCP sockets.

use std::io::Read;
use std::net::TcpListener;
use std::sync::Arc;

use ringfence_uplink::UplinkCounters;
use ringfence_uplink::host::real::RealHost;
use ringfence_uplink::host::{Host, Owner, OwnerKind, TcpHost};

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
