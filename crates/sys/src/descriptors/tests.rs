use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::disposal::{Disposal, PEER_PENDING_MAX, THREADS_MAX, peer_of, pending_of};
use super::testing::{Lingering, assert_descriptors_are_refused, send_raw};
use super::*;

/// Bound of every wait; a close that blocks would take an hour.
const SOON: Duration = Duration::from_secs(60);

fn pair(kind: SocketType) -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap()
}

/// Runs `work` on a thread and returns its result, which must come soon.
fn soon<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, result): (_, Receiver<T>) = channel();
    std::thread::spawn(move || sender.send(work()));
    result.recv_timeout(SOON).expect("it blocks")
}

fn eventually(mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + SOON;
    while !is_so() {
        assert!(Instant::now() < deadline, "it never came");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn descriptor_to_a_byte_socket_is_refused_by_the_kernel() {
    let (near, far) = pair(SocketType::STREAM);
    let near = ByteSocket::new(near).unwrap();
    assert_descriptors_are_refused(&far);
    send_raw(&far, b"x", &[]).unwrap();
    assert_eq!(near.receive(&mut [0; 8]), Ok(StreamReceived::Bytes(1)));
}

#[test]
fn bytes_of_a_stream_come_with_their_descriptors_alone() {
    let (near, far) = pair(SocketType::STREAM);
    let file = std::fs::File::open("/dev/null").unwrap();
    send_raw(&far, b"headbody", &[file.as_fd(), file.as_fd()]).unwrap();
    send_raw(&far, b"next", &[file.as_fd()]).unwrap();
    let mut buffer = [0; 4];
    let head = take_of_stream(&near, &mut buffer, 2).unwrap();
    assert_eq!((head.bytes, head.descriptors.len(), &buffer), (4, 2, b"head"));
    rustix::net::recv(&near, &mut buffer[..], rustix::net::RecvFlags::empty()).unwrap();
    assert_eq!(&buffer, b"body");
    let refused = take_of_stream(&near, &mut buffer, 0).unwrap_err();
    assert_eq!(refused, MessageError::Descriptors { limit: 0 });
    dispose_socket(near);
    let (near, far) = pair(SocketType::STREAM);
    // A process that another test starts has the other end, too, until it executes its program.
    rustix::net::shutdown(&far, rustix::net::Shutdown::Both).unwrap();
    assert_eq!(take_of_stream(&near, &mut buffer, 0).unwrap().bytes, 0);
}

#[test]
fn descriptor_queued_before_the_refusal_does_not_block_the_reader() {
    let (near, far) = pair(SocketType::STREAM);
    let lingering = Lingering::new();
    send_raw(&far, b"x", &[lingering.fd.as_fd()]).unwrap();
    let Lingering { fd, .. } = &lingering;
    let number = fd.as_raw_fd();
    let near = ByteSocket::new(near).unwrap();
    drop_fd(lingering, number, move || {
        assert_eq!(near.receive(&mut [0; 8]), Ok(StreamReceived::Descriptors));
        assert_eq!(
            near.receive(&mut [0; 8]),
            Ok(StreamReceived::Descriptors),
            "it stays in the queue"
        );
        drop(near);
    });
}

/// Closes the sender's copy, so that `work` has the last one, and runs that.
fn drop_fd(lingering: Lingering, number: i32, work: impl FnOnce() + Send + 'static) {
    let Lingering { _listener, _reader, fd } = lingering;
    assert_eq!(fd.as_raw_fd(), number);
    // The queue holds another reference: this close is not the last one.
    soon(move || drop(fd));
    soon(work);
    drop((_listener, _reader));
}

#[test]
fn bytes_before_a_descriptor_are_delivered_and_the_descriptor_is_not() {
    let (near, far) = pair(SocketType::STREAM);
    send_raw(&far, b"abc", &[]).unwrap();
    let lingering = Lingering::new();
    let number = lingering.fd.as_raw_fd();
    let reader = ByteSocket::new(near.try_clone().unwrap()).unwrap();
    let mut buffer = [0; 3];
    // The buffer is full: what follows is unknown.
    assert_eq!(reader.receive(&mut buffer), Ok(StreamReceived::Bytes(3)));
    assert_eq!(&buffer, b"abc");
    // As on a kernel that cannot refuse.
    allow_descriptors(&near);
    send_raw(&far, b"d", &[lingering.fd.as_fd()]).unwrap();
    drop_fd(lingering, number, move || {
        assert_eq!(reader.receive(&mut [0; 8]), Ok(StreamReceived::Descriptors));
        drop((reader, far));
        dispose(near);
    });
}

fn allow_descriptors(socket: &OwnedFd) {
    let on: libc::c_int = 1;
    let bytes = libc::socklen_t::try_from(size_of_val(&on)).unwrap();
    // SAFETY: the kernel reads one live int. Older kernels do not know the option.
    let _ = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, 83, (&raw const on).cast(), bytes)
    };
}

#[test]
fn end_that_is_no_unix_socket_is_refused() {
    let file = rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    assert_eq!(ByteSocket::new(file).err(), Some(Errno::NOTSOCK));
    let lingering = Lingering::new();
    let number = lingering.fd.as_raw_fd();
    let copy = lingering.fd.try_clone().unwrap();
    drop_fd(lingering, number, move || {
        assert_eq!(ByteSocket::new(copy).err(), Some(Errno::OPNOTSUPP));
    });
}

#[test]
fn message_with_surplus_descriptors_is_refused_without_blocking() {
    for count in [1, 2, 3, 64] {
        let (near, far) = pair(SocketType::SEQPACKET);
        let lingering = Lingering::new();
        let number = lingering.fd.as_raw_fd();
        send_raw(&far, b"junk", &vec![lingering.fd.as_fd(); count]).unwrap();
        drop_fd(lingering, number, move || {
            let refused = receive_message(&near, &mut [0; 8], 0);
            assert_eq!(refused.unwrap_err(), MessageError::Descriptors { limit: 0 });
            dispose(near);
        });
    }
}

#[test]
fn message_within_the_limit_arrives_with_its_descriptors() {
    let (near, far) = pair(SocketType::SEQPACKET);
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    send_raw(&far, b"ab", &[writer.as_fd(), writer.as_fd()]).unwrap();
    drop(writer);
    let mut buffer = [0; 8];
    let got = receive_message(&near, &mut buffer, 2).unwrap();
    assert_eq!((got.bytes, got.descriptors.len()), (2, 2));
    assert_eq!(&buffer[..2], b"ab");
    let again = receive_message(&near, &mut buffer, 2).unwrap_err();
    assert_eq!(again, MessageError::System(Errno::AGAIN), "it was taken out of the queue");
    assert_eq!(got.descriptors.exactly::<1>().unwrap_err(), 2);
    // All were disposed of: the pipe has no writer.
    soon(move || assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(0)));
}

#[test]
fn message_longer_than_the_buffer_is_refused() {
    let (near, far) = pair(SocketType::SEQPACKET);
    send_raw(&far, &[0; 9], &[]).unwrap();
    let refused = receive_message(&near, &mut [0; 8], 2).unwrap_err();
    assert_eq!(refused, MessageError::Bytes { limit: 8 });
}

#[test]
fn disposed_socket_with_a_lingering_connection_in_its_queue_is_closed() {
    let (near, far) = pair(SocketType::STREAM);
    let lingering = Lingering::new();
    let Lingering { _listener, _reader, fd } = lingering;
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    send_raw(&far, b"x", &[fd.as_fd(), writer.as_fd()]).unwrap();
    drop((fd, writer));
    dispose_socket(near);
    // The pipe has no writer once the queue is closed.
    soon(move || assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(0)));
    drop((_listener, _reader));
}

#[test]
fn identity_tells_files_apart() {
    let file = |name| rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let (a, b) = (file("a"), file("b"));
    assert_eq!(identity(&a), identity(a.try_clone().unwrap()));
    assert_ne!(identity(&a).unwrap(), identity(&b).unwrap());
}

static ENDED: AtomicUsize = AtomicUsize::new(0);
type Gate = Arc<(Mutex<bool>, Condvar)>;

fn end(item: Option<Gate>) {
    if let Some(gate) = item {
        let mut open = gate.0.lock().unwrap();
        while !*open {
            open = gate.1.wait(open).unwrap();
        }
    }
    ENDED.fetch_add(1, Ordering::SeqCst);
}

#[test]
fn disposal_that_is_stuck_does_not_stop_the_others() {
    let gate = Gate::default();
    let disposal: Disposal<Option<Gate>> = Disposal::new(THREADS_MAX, end);
    for _ in 0..THREADS_MAX - 1 {
        disposal.add(Some(Arc::clone(&gate)));
    }
    for _ in 0..100 {
        disposal.add(None);
    }
    eventually(|| ENDED.load(Ordering::SeqCst) >= 100);
    assert!(!disposal.wait_until_done(Duration::from_millis(1)), "some are stuck");
    *gate.0.lock().unwrap() = true;
    gate.1.notify_all();
    assert!(disposal.wait_until_done(SOON));
    assert_eq!(ENDED.load(Ordering::SeqCst), 100 + THREADS_MAX - 1);
}

static OF_OTHERS: AtomicUsize = AtomicUsize::new(0);

fn end_one(item: Option<Gate>) {
    match item {
        Some(gate) => drop(gate.1.wait_while(gate.0.lock().unwrap(), |open| !*open).unwrap()),
        None => drop(OF_OTHERS.fetch_add(1, Ordering::SeqCst)),
    }
}

#[test]
fn peer_whose_items_block_occupies_one_thread() {
    const PEERS: usize = 3;
    let gate = Gate::default();
    let disposal: Disposal<Option<Gate>> = Disposal::new(PEERS + 1, end_one);
    for peer in 0..PEERS as u64 {
        (0..10).for_each(|_| disposal.add_for(peer, Some(Arc::clone(&gate))));
    }
    (0..10).for_each(|_| disposal.add_for(99, None));
    (0..10).for_each(|_| disposal.add(None));
    eventually(|| OF_OTHERS.load(Ordering::SeqCst) == 20);
    *gate.0.lock().unwrap() = true;
    gate.1.notify_all();
    assert!(disposal.wait_until_done(SOON));
}

/// A Unix socket with a lingering connection in its queue: closing it blocks, whatever its own options are.
fn nested(lingering: &Lingering) -> OwnedFd {
    let (near, far) = pair(SocketType::STREAM);
    send_raw(&far, b"x", &[lingering.fd.as_fd()]).unwrap();
    near
}

/// Receives a socket whose close blocks over `near`, and drops it. The close ends with the result.
fn block_disposal(near: &OwnedFd, far: &OwnedFd) -> (TcpListener, TcpStream) {
    let lingering = Lingering::new();
    let outer = nested(&lingering);
    send_raw(far, b"x", &[outer.as_fd()]).unwrap();
    let Lingering { _listener, _reader, fd } = lingering;
    soon(move || drop((outer, fd)));
    drop(receive_message(near, &mut [0; 8], 1).unwrap());
    (_listener, _reader)
}

#[test]
fn peer_with_too_many_pending_descriptors_is_refused() {
    let (near, far) = pair(SocketType::SEQPACKET);
    let held = block_disposal(&near, &far);
    let mut taken = 0;
    let refused = loop {
        send_raw(&far, b"x", &[far.as_fd()]).unwrap();
        match receive_message(&near, &mut [0; 8], 1) {
            Ok(_) => taken += 1,
            Err(error) => break error,
        }
        assert!(taken <= PEER_PENDING_MAX, "every message is taken");
    };
    assert_eq!(refused, MessageError::Pending { limit: PEER_PENDING_MAX });
    // Another peer's descriptors are closed meanwhile.
    let (other_near, other_far) = pair(SocketType::SEQPACKET);
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    send_raw(&other_far, b"x", &[writer.as_fd()]).unwrap();
    drop(writer);
    drop(receive_message(&other_near, &mut [0; 8], 1).unwrap());
    soon(move || assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(0)));
    dispose_socket(near);
    drop(held);
}

#[test]
fn internet_sockets_are_closed_while_other_descriptors_of_their_peer_are_pending() {
    let (near, far) = pair(SocketType::SEQPACKET);
    let held = block_disposal(&near, &far);
    let before = pending_of(peer_of(&near).unwrap());
    for _ in 0..=PEER_PENDING_MAX {
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        send_raw(&far, b"x", &[socket.as_fd()]).unwrap();
        let received = receive_message(&near, &mut [0; 8], 1).unwrap();
        received.descriptors.close_internet_sockets();
    }
    assert_eq!(pending_of(peer_of(&near).unwrap()), before);
    // A file of another kind may block.
    send_raw(&far, b"x", &[far.as_fd()]).unwrap();
    receive_message(&near, &mut [0; 8], 1).unwrap().descriptors.close_internet_sockets();
    assert_eq!(pending_of(peer_of(&near).unwrap()), before + 1);
    dispose_socket(near);
    drop(held);
}

#[test]
fn socket_disposed_of_behind_a_blocked_close_is_shut_down_at_once() {
    let (near, far) = pair(SocketType::SEQPACKET);
    let held = block_disposal(&near, &far);
    dispose_socket(near);
    soon(move || {
        let ended = rustix::net::recv(&far, &mut [0; 1][..], rustix::net::RecvFlags::empty());
        assert_eq!(ended.map(|(_, bytes)| bytes), Ok(0));
    });
    drop(held);
}
