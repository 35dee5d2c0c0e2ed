#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a test: its panic is the report")]
//! Listening sockets of a process without a free descriptor. The limit is the process's own, so this file has one test.

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use ringfence_uplink::forward::Destination;
use ringfence_uplink::host::real::RealHost;
use ringfence_uplink::testing::Wire;
use ringfence_uplink::{Config, Uplink, UplinkCounters};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const CLIENTS: u64 = 9;

/// Runs a round. Returns the number of events.
fn round(uplink: &mut Uplink, wire: &mut Wire, now: Duration) -> usize {
    let events = uplink.poll_host(now).unwrap();
    uplink.run_timers(now);
    uplink.output(wire, now);
    events
}

#[test]
fn waiting_connections_are_accepted_once_descriptors_are_free_again() {
    let counters = Arc::<UplinkCounters>::default();
    let mut config = Config { mtu: 1500, ..Config::default() };
    config.access.host_loopback.push([10, 0, 0, 1].into());
    config.guest.mac = Some([2, 0, 0, 0, 0, 2]);
    let host = RealHost::new(Arc::clone(&counters)).unwrap();
    let mut uplink = Uplink::new(config, Box::new(host), Arc::clone(&counters));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let guest = ([10, 0, 0, 2], 80).into();
    uplink.forward_tcp(listener.into(), Destination::Guest(guest)).unwrap();
    let (mut wire, mut now) = (Wire::new(4), Duration::from_secs(1000));

    // One connection costs one call to accept it, one for the epoll, and one for the room of its socket.
    let mut clients = vec![TcpStream::connect(at).unwrap()];
    uplink.poll_host(now).unwrap();
    let before = counters.syscalls.get();
    uplink.output(&mut wire, now);
    assert_eq!((counters.tcp_accepted.get(), counters.syscalls.get() - before), (1, 3));
    assert_eq!(round(&mut uplink, &mut wire, now), 1, "the connection has room");
    assert_eq!(round(&mut uplink, &mut wire, now), 0, "nobody waits");

    clients.extend((0..CLIENTS).map(|_| TcpStream::connect(at).unwrap()));
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..limit }).unwrap();
    for failed in 1..=2 {
        let events = round(&mut uplink, &mut wire, now);
        assert_eq!((counters.accept_failed.get(), events), (failed, usize::from(failed == 1)));
        // The port is left alone meanwhile, and keeps nobody busy.
        assert_eq!(round(&mut uplink, &mut wire, now), 0);
        assert_eq!(counters.accept_failed.get(), failed);
        let again = uplink.deadline().unwrap();
        assert!(again > now && again <= now + Duration::from_secs(1), "{again:?}");
        now = again;
    }
    setrlimit(Resource::Nofile, limit).unwrap();
    let before = counters.syscalls.get();
    let mut rounds = 0;
    while counters.tcp_accepted.get() < 1 + CLIENTS {
        round(&mut uplink, &mut wire, now);
        rounds += 1;
        assert!(rounds < 50, "only {} accepted", counters.tcp_accepted.get());
    }
    // One after the first report, then two, four and the rest: one call each, beside the looks and what an open
    // connection costs.
    assert_eq!(rounds, 4);
    let others = rounds + 1 + 2 * CLIENTS;
    let accepts = counters.syscalls.get() - before - others;
    assert!((CLIENTS..=CLIENTS + 1).contains(&accepts), "{accepts}");
    assert_eq!(counters.accept_failed.get(), 2);
}
