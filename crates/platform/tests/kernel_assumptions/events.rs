//! Sockets as event channels: the properties that eventfds lack.

use std::os::fd::OwnedFd;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};

use crate::peer::Peer;

fn sockets() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
}

/// Receives the data in the socket. Waits up to a minute for data or the end of file.
fn receive_within_a_minute(end: &OwnedFd) -> Result<usize, Errno> {
    let timeout = Timespec { tv_sec: 60, tv_nsec: 0 };
    let ready = poll(&mut [PollFd::new(end, PollFlags::IN)], Some(&timeout));
    assert_eq!(ready, Ok(1), "neither data nor an end of file within a minute");
    recv(end, &mut [0; 512][..], RecvFlags::DONTWAIT).map(|(_, received)| received)
}

/// Assumption: a send with `MSG_DONTWAIT` never blocks, even if the socket is full or the peer changed
/// its end. After one read the socket accepts data again.
#[test]
fn send_on_full_socket_with_dontwait_returns_eagain() {
    let (own, theirs) = sockets();
    let flags = fcntl_getfl(&theirs).unwrap();
    fcntl_setfl(&theirs, flags - OFlags::NONBLOCK).unwrap();
    let notify = || send(&own, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    let mut sent = 0;
    while notify().is_ok() {
        sent += 1;
        assert!(sent < 1_000_000, "the socket is never full");
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

/// Assumption: the two ends are two files; `O_NONBLOCK` of one does not affect the other.
#[test]
fn nonblocking_mode_of_one_socket_end_leaves_other_end_blocking() {
    let (own, theirs) = sockets();
    let flags = fcntl_getfl(&own).unwrap();
    fcntl_setfl(&own, flags | OFlags::NONBLOCK).unwrap();
    assert!(!fcntl_getfl(&theirs).unwrap().contains(OFlags::NONBLOCK));
}

/// Assumption: after the peer was killed, the kernel closes its end, and this end reports that.
///
/// Other tests of this program fork at the same time, without exec, and their children inherit `theirs`.
/// The end of file comes when the last of them has exited.
#[test]
fn socket_of_killed_peer_reports_end_of_file_and_epipe() {
    let (own, theirs) = sockets();
    let peer = Peer::fork(|line| {
        line.send(send(&theirs, &[1], SendFlags::NOSIGNAL).unwrap_or(0) as u64);
        line.receive();
    });
    assert_eq!(peer.receive(), 1);
    drop(theirs);
    drop(peer);
    assert_eq!(receive_within_a_minute(&own), Ok(1));
    assert_eq!(receive_within_a_minute(&own), Ok(0), "no end of file");
    assert_eq!(send(&own, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL), Err(Errno::PIPE));
}

/// Hazard: both sides of an eventfd share one file and its blocking mode. A peer clears `O_NONBLOCK` and
/// fills the counter; the next notification blocks for as long as the peer wants.
#[test]
fn write_to_eventfd_filled_by_peer_blocks_until_read() {
    let own = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
    let peer = Peer::fork(|line| {
        let flags = fcntl_getfl(&own).unwrap_or(OFlags::empty());
        let cleared = fcntl_setfl(&own, flags - OFlags::NONBLOCK).is_ok();
        let filled = rustix::io::write(&own, &(u64::MAX - 1).to_ne_bytes()) == Ok(8);
        line.send(u64::from(cleared && filled));
        line.receive();
    });
    assert_eq!(peer.receive(), 1);
    let (done, waiting) = channel();
    let ours = own.try_clone().unwrap();
    let notifier = std::thread::spawn(move || {
        let outcome = rustix::io::write(&ours, &1u64.to_ne_bytes());
        done.send(outcome).unwrap();
    });
    let held_up = waiting.recv_timeout(Duration::from_millis(300));
    assert_eq!(held_up, Err(RecvTimeoutError::Timeout), "the notification went through");
    // Only a read of the counter unblocks the notification.
    rustix::io::read(&own, &mut [0; 8]).unwrap();
    assert_eq!(waiting.recv_timeout(Duration::from_secs(20)), Ok(Ok(8)));
    notifier.join().unwrap();
}
