//! Why event channels are sockets.

use std::os::fd::OwnedFd;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};

use crate::peer::Peer;

fn sockets() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
}

/// Assumption: sending with `MSG_DONTWAIT` never waits, however full the socket is and whatever the
/// peer did to its end, and after one read there is room again.
#[test]
fn a_full_socket_refuses_at_once() {
    let (own, theirs) = sockets();
    let flags = fcntl_getfl(&theirs).unwrap();
    fcntl_setfl(&theirs, flags - OFlags::NONBLOCK).unwrap();
    let notify = || send(&own, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    let mut sent = 0;
    while notify().is_ok() {
        sent += 1;
        assert!(sent < 1_000_000, "it is never full");
    }
    let begun = Instant::now();
    for _ in 0..1000 {
        assert_eq!(notify(), Err(Errno::AGAIN));
    }
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    let mut events = [0; 512];
    recv(&theirs, &mut events[..], RecvFlags::DONTWAIT).unwrap();
    assert_eq!(notify(), Ok(1));
    eprintln!("{sent} notifications fill a socket");
}

/// Assumption: the two ends are two files: `O_NONBLOCK` of one says nothing of the other.
#[test]
fn the_ends_of_a_socket_pair_have_modes_of_their_own() {
    let (own, theirs) = sockets();
    let flags = fcntl_getfl(&own).unwrap();
    fcntl_setfl(&own, flags | OFlags::NONBLOCK).unwrap();
    assert!(!fcntl_getfl(&theirs).unwrap().contains(OFlags::NONBLOCK));
}

/// Assumption: when the peer's end is closed, by the kernel if it was killed, this end is told.
#[test]
fn the_end_of_a_killed_peer_is_closed() {
    let (own, theirs) = sockets();
    let peer = Peer::fork(|line| {
        line.tell(send(&theirs, &[1], SendFlags::NOSIGNAL).unwrap_or(0) as u64);
        line.hear();
    });
    assert_eq!(peer.hear(), 1);
    drop(theirs);
    drop(peer);
    let mut events = [0; 512];
    assert_eq!(recv(&own, &mut events[..], RecvFlags::DONTWAIT).map(|(_, n)| n), Ok(1));
    assert_eq!(recv(&own, &mut events[..], RecvFlags::DONTWAIT).map(|(_, n)| n), Ok(0));
    assert_eq!(send(&own, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL), Err(Errno::PIPE));
}

/// Hazard: the blocking mode of an eventfd belongs to the file that both sides share. A peer clears
/// it, fills the counter, and holds up the next notification, for as long as it likes.
#[test]
fn an_eventfd_lets_a_peer_hold_up_a_notification() {
    let own = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
    let peer = Peer::fork(|line| {
        let flags = fcntl_getfl(&own).unwrap_or(OFlags::empty());
        let cleared = fcntl_setfl(&own, flags - OFlags::NONBLOCK).is_ok();
        let filled = rustix::io::write(&own, &(u64::MAX - 1).to_ne_bytes()) == Ok(8);
        line.tell(u64::from(cleared && filled));
        line.hear();
    });
    assert_eq!(peer.hear(), 1);
    let (done, waiting) = channel();
    let ours = own.try_clone().unwrap();
    let notifier = std::thread::spawn(move || {
        let outcome = rustix::io::write(&ours, &1u64.to_ne_bytes());
        done.send(outcome).unwrap();
    });
    let held_up = waiting.recv_timeout(Duration::from_millis(300));
    assert_eq!(held_up, Err(RecvTimeoutError::Timeout), "the notification went through");
    // Only reading the counter lets it go on.
    rustix::io::read(&own, &mut [0; 8]).unwrap();
    assert_eq!(waiting.recv_timeout(Duration::from_secs(20)), Ok(Ok(8)));
    notifier.join().unwrap();
}
