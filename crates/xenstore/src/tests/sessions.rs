//! Tests of clients and a server over sockets, with the pump in a thread.

use crate::{
    CloseReason, Closed, Leftovers, Limits, StoreAccess, StoreAttachError, StoreClient, StoreError,
    StorePump,
};
use ringfence_wire::grant::DomId;
use ringfence_wire::xenstore::{ErrorName, NodeAccess, PermissionList};
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(60);

type Task = Box<dyn FnOnce(&mut StorePump) + Send>;

/// Pump in its own thread, which also runs tasks of the test.
struct Hub {
    tasks: mpsc::Sender<Task>,
    thread: Option<JoinHandle<()>>,
}

impl Hub {
    fn start(limits: Limits) -> Hub {
        let (tasks, todo) = mpsc::channel::<Task>();
        let thread = std::thread::spawn(move || {
            let mut pump = StorePump::new(limits).unwrap();
            loop {
                pump.wait(Duration::from_millis(2)).unwrap();
                match todo.try_recv() {
                    Ok(task) => task(&mut pump),
                    Err(mpsc::TryRecvError::Empty) => {}
                    Err(mpsc::TryRecvError::Disconnected) => break,
                }
            }
        });
        Hub { tasks, thread: Some(thread) }
    }

    /// Runs `task` in the pump's thread and returns its result.
    fn with<T: Send + 'static>(
        &self,
        task: impl FnOnce(&mut StorePump) -> T + Send + 'static,
    ) -> T {
        let (give, take) = mpsc::channel();
        self.tasks.send(Box::new(move |pump| give.send(task(pump)).unwrap())).unwrap();
        take.recv().unwrap()
    }

    fn socket(&self, domain: u16) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let theirs = OwnedFd::from(theirs);
        self.with(move |pump| pump.attach(theirs, DomId(domain), domain == 0)).unwrap();
        ours
    }

    fn client(&self, domain: u16) -> StoreClient {
        let mut client = StoreClient::new(self.socket(domain).into()).unwrap();
        client.set_timeout(TIMEOUT);
        client
    }

    /// Waits until a connection ends and returns its record.
    fn closed(&self) -> Closed {
        let begin = Instant::now();
        while begin.elapsed() < TIMEOUT {
            if let Some(closed) = self.with(StorePump::take_closed) {
                return closed;
            }
        }
        panic!("no connection ended");
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.tasks = mpsc::channel().0;
        let ended = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            assert!(ended.is_some_and(|ended| ended.is_ok()), "the pump panicked");
        }
    }
}

fn own(client: &mut StoreClient, path: &str, owner: u16) {
    client.mkdir(path).unwrap();
    client.set_perms(path, &PermissionList::owned_by(DomId(owner), NodeAccess::None)).unwrap();
}

#[test]
fn handshake_of_two_domains_completes() {
    let hub = Hub::start(Limits::default());
    let mut backend = hub.client(0);
    own(&mut backend, "/local/domain/3/device", 3);
    let front = "/local/domain/3/device/state";
    backend.watch(front, "front").unwrap();
    assert_eq!(backend.wait_event(TIMEOUT).unwrap().unwrap().path, front);
    assert_eq!(backend.read_u32_opt(front).unwrap(), None);

    let mut frontend = hub.client(3);
    assert_eq!(frontend.domain_path(DomId(3)).unwrap(), "/local/domain/3");
    frontend
        .transaction(|t| {
            t.write("device/ring-ref", "8")?;
            t.write("device/state", "3")
        })
        .unwrap();
    let event = backend.wait_event(TIMEOUT).unwrap().unwrap();
    assert_eq!((event.path.as_str(), event.token.as_str()), (front, "front"));
    assert_eq!(backend.read_u32(front).unwrap(), 3);
    assert_eq!(backend.read_u16("/local/domain/3/device/ring-ref").unwrap(), 8);
    let mut names = backend.directory("/local/domain/3/device").unwrap();
    names.sort();
    assert_eq!(names, ["ring-ref", "state"]);

    frontend.rm("device/state").unwrap();
    assert_eq!(backend.wait_event(TIMEOUT).unwrap().unwrap().path, front);
    assert_eq!(backend.read_opt(front).unwrap(), None);
    backend.unwatch(front, "front").unwrap();
    frontend.write("device/state", "4").unwrap();
    assert_eq!(backend.next_event().unwrap(), None);
    let unknown = backend.unwatch(front, "front").unwrap_err();
    assert_eq!(unknown.refusal(), Some(ErrorName::NotFound));
}

#[test]
fn malformed_values_and_paths_are_refused() {
    let hub = Hub::start(Limits::default());
    let mut client = hub.client(0);
    client.write("/n", "12x").unwrap();
    assert!(matches!(client.read_u32("/n"), Err(StoreError::Number { .. })));
    client.write("/n", [0xFF]).unwrap();
    assert!(matches!(client.read_text("/n"), Err(StoreError::NotText { .. })));
    client.write("/n", "1").unwrap();
    assert!(client.read_flag("/n").unwrap());
    assert!(!client.read_flag("/missing").unwrap());
    assert_eq!(client.read_text_opt("/missing").unwrap(), None);
    assert!(matches!(client.read("/a/"), Err(StoreError::Path { .. })));
    assert!(matches!(client.read("@x"), Err(StoreError::Path { .. })));
    let big = client.write("/n", vec![b'x'; 5000]).unwrap_err();
    assert!(matches!(big, StoreError::StoreRequest(_)), "{big}");
    assert_eq!(client.read("/n").unwrap(), b"1", "the connection stays usable");
}

#[test]
fn listing_longer_than_one_reply_is_complete() {
    let hub = Hub::start(Limits::default());
    let mut client = hub.client(0);
    let names: Vec<String> = (0..900).map(|n| format!("child-{n:05}")).collect();
    client
        .transaction(|t| names.iter().try_for_each(|name| t.mkdir(&format!("/dir/{name}"))))
        .unwrap();
    assert_eq!(client.directory("/dir").unwrap(), names);
    assert_eq!(client.directory(&format!("/dir/{}", names[0])).unwrap(), [] as [&str; 0]);
    assert_eq!(client.directory_opt("/missing").unwrap(), None);
}

#[test]
fn concurrent_transactions_keep_every_update() {
    let hub = Hub::start(Limits::default());
    let mut toolstack = hub.client(0);
    own(&mut toolstack, "/local/domain/4/data", 4);
    toolstack.write("/local/domain/4/data/count", "0").unwrap();
    const EACH: u32 = 40;
    let threads: Vec<_> = [0, 4, 4]
        .map(|domain| {
            let mut client = hub.client(domain);
            std::thread::spawn(move || {
                for _ in 0..EACH {
                    client
                        .transaction(|t| {
                            let path = "/local/domain/4/data/count";
                            let count = t.read_u32(path)?;
                            t.write(path, (count + 1).to_string())
                        })
                        .unwrap();
                }
            })
        })
        .into_iter()
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(toolstack.read_u32("/local/domain/4/data/count").unwrap(), 3 * EACH);
}

#[test]
fn failed_transaction_is_aborted() {
    let hub = Hub::start(Limits { transactions: 1, ..Limits::default() });
    let mut toolstack = hub.client(0);
    own(&mut toolstack, "/local/domain/4/data", 4);
    let mut guest = hub.client(4);
    for _ in 0..3 {
        let error = guest
            .transaction(|t| {
                t.write("data/x", "1")?;
                t.read("data/missing")
            })
            .unwrap_err();
        assert_eq!(error.refusal(), Some(ErrorName::NotFound));
    }
    assert_eq!(guest.read_opt("data/x").unwrap(), None);
}

#[test]
fn guest_with_unread_events_is_dropped_and_delays_no_other_client() {
    let limits = Limits { output_soft: 8 << 10, output_hard: 32 << 10, ..Limits::default() };
    let hub = Hub::start(limits);
    let mut toolstack = hub.client(0);
    own(&mut toolstack, "/local/domain/4/data", 4);
    let mut paused = hub.socket(4);
    paused.set_nonblocking(true).unwrap();
    let mut watch = Vec::new();
    let request = ringfence_wire::xenstore::StoreRequest::Watch {
        path: ringfence_wire::xenstore::WatchPath::parse(b"data").unwrap(),
        token: &[b't'; 1000],
        depth: None,
    };
    request.emit(1, 0, &mut watch).unwrap();
    paused.write_all(&watch).unwrap();
    let begin = Instant::now();
    // The kernel's buffers take the first events, then the output queue fills.
    for n in 0.. {
        assert!(begin.elapsed() < TIMEOUT, "never dropped");
        toolstack.write(&format!("/local/domain/4/data/{n}"), "x").unwrap();
        if let Some(closed) = hub.with(StorePump::take_closed) {
            assert_eq!((closed.domain, closed.reason), (DomId(4), CloseReason::Dropped));
            break;
        }
    }
    assert_eq!(hub.with(|pump| pump.counters().output_overrun), 1);
    // The dropped connection frees its place in the limit.
    let mut again = hub.client(4);
    assert_eq!(again.read("data/0").unwrap(), b"x");
}

#[test]
fn requests_sent_without_reading_are_all_answered_later() {
    let hub = Hub::start(Limits { output_soft: 2 << 10, ..Limits::default() });
    let mut toolstack = hub.client(0);
    own(&mut toolstack, "/local/domain/4/data", 4);
    toolstack.write("/local/domain/4/data/x", vec![b'x'; 1500]).unwrap();
    let socket = hub.socket(4);
    let mut writer = socket.try_clone().unwrap();
    const REQUESTS: u32 = 3000;
    let sender = std::thread::spawn(move || {
        let path = ringfence_wire::xenstore::Path::parse(b"data/x").unwrap();
        for n in 0..REQUESTS {
            let mut message = Vec::new();
            let request = ringfence_wire::xenstore::StoreRequest::Read { path };
            request.emit(n, 0, &mut message).unwrap();
            writer.write_all(&message).unwrap();
        }
    });
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(toolstack.read("/local/domain/4/data/x").unwrap().len(), 1500);
    let mut reader = ringfence_wire::xenstore::MessageReader::new();
    let mut expected = 0;
    while expected < REQUESTS {
        let read = std::io::Read::read(&mut &socket, reader.spare()).unwrap();
        assert_ne!(read, 0, "dropped");
        reader.commit(read);
        while let Some((header, payload)) = reader.next().unwrap() {
            assert_eq!((header.req_id, payload.len()), (expected, 1500));
            expected += 1;
        }
    }
    sender.join().unwrap();
}

#[test]
fn stalled_connection_causes_no_wakeups() {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut pump = StorePump::new(Limits { output_soft: 0, ..Limits::default() }).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    pump.attach(theirs.into(), DomId(4), false).unwrap();
    let mut message = Vec::new();
    let request = ringfence_wire::xenstore::StoreRequest::GetDomainPath { domain: DomId(1) };
    request.emit(1, 0, &mut message).unwrap();
    let busy = |pump: &StorePump| {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(pump, PollFlags::IN)], Some(&now)).unwrap() > 0
    };
    // Sends only whole requests, until the buffers of both sides are full.
    for _ in 0..1_000_000 {
        let blocked = (&ours).write(&message).is_err();
        let mut rounds = 0;
        while busy(&pump) {
            pump.dispatch().unwrap();
            rounds += 1;
            assert!(rounds < 10_000, "the descriptor is readable without work");
        }
        if blocked {
            assert!((&ours).write(&message).is_err(), "requests wait unread");
            return;
        }
    }
    panic!("the pump reads requests without end");
}

#[test]
fn malformed_message_ends_its_connection_only() {
    let hub = Hub::start(Limits::default());
    let mut other = hub.client(0);
    let mut socket = hub.socket(4);
    let mut message = [0; 16];
    message[0] = 2;
    message[12..].copy_from_slice(&4097u32.to_le_bytes());
    socket.write_all(&message).unwrap();
    let closed = hub.closed();
    assert!(matches!(closed.reason, CloseReason::Framing(_)), "{closed:?}");
    other.write("/a", "fine").unwrap();
}

#[test]
fn close_by_stalled_client_ends_connection() {
    let hub = Hub::start(Limits::default());
    drop(hub.socket(4));
    assert_eq!(hub.closed().reason, CloseReason::Peer);

    let hub = Hub::start(Limits { output_soft: 0, ..Limits::default() });
    let mut socket = hub.socket(4);
    // The client reads nothing back, so the server accepts one request only.
    let mut message = Vec::new();
    let request = ringfence_wire::xenstore::StoreRequest::GetDomainPath { domain: DomId(1) };
    request.emit(1, 0, &mut message).unwrap();
    for _ in 0..20_000 {
        socket.set_nonblocking(true).unwrap();
        if socket.write_all(&message).is_err() {
            break;
        }
    }
    drop(socket);
    assert_eq!(hub.closed().reason, CloseReason::Peer);
}

#[test]
fn release_of_domain_ends_its_connection() {
    let hub = Hub::start(Limits::default());
    let mut toolstack = hub.client(0);
    toolstack.watch("@releaseDomain", "gone").unwrap();
    toolstack.watch("@introduceDomain", "new").unwrap();
    for _ in 0..2 {
        toolstack.wait_event(TIMEOUT).unwrap().unwrap();
    }
    let mut guest = hub.client(4);
    assert!(!guest.is_introduced(DomId(4)).unwrap());
    hub.with(|pump| pump.introduce(DomId(4)));
    assert_eq!(toolstack.wait_event(TIMEOUT).unwrap().unwrap().token, "new");
    assert!(guest.is_introduced(DomId(4)).unwrap());
    hub.with(|pump| pump.release(DomId(4), Leftovers::Remove));
    assert_eq!(toolstack.wait_event(TIMEOUT).unwrap().unwrap().token, "gone");
    assert_eq!(hub.closed().reason, CloseReason::Dropped);
    assert_eq!(guest.read("data").unwrap_err(), StoreError::Closed);
    assert_eq!(guest.read("data").unwrap_err(), StoreError::Broken);
}

#[test]
fn connection_above_limit_of_domain_is_refused() {
    let hub = Hub::start(Limits { connections: 1, ..Limits::default() });
    let _first = hub.socket(4);
    let (_ours, theirs) = UnixStream::pair().unwrap();
    let refused = hub.with(move |pump| pump.attach(theirs.into(), DomId(4), false));
    assert!(matches!(refused, Err(StoreAttachError::TooMany(_))));
}
