//! Domains that break the hub's protocol. Each attack costs at most the attacker's connection and
//! increments a counter of its own. The hub continues to serve a correct domain.

#![allow(clippy::unwrap_used, reason = "the panic of a test is its report")]

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use ringfence_platform::local::hub::{Hub, HubHandle, HubLimits};
use ringfence_platform::local::raw::process::{
    alone, descriptors, descriptors_settled, resident_pages,
};
use ringfence_platform::local::raw::{RawArena, RawDomain, RawError, kind, refusal};
use ringfence_platform::local::{ArenaShape, LocalPlatform};
use ringfence_platform::{Access, Channel, DomId, Granter, Platform};
use ringfence_sys::descriptors::testing::send_raw;
use ringfence_wire::xenstore::{NodeAccess, PermissionList};
use ringfence_xenstore::StoreAccess;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

const SHAPE: ArenaShape = ArenaShape { writable: 4, read_only: 4, references: 32 };

/// Hub, domain 0, and a correct domain.
struct Scene {
    hub: HubHandle,
    back: LocalPlatform,
    correct: LocalPlatform,
    rounds: u32,
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.hub.stop();
    }
}

impl Scene {
    fn new() -> Scene {
        Scene::listening(HubLimits::default(), None)
    }

    fn listening(limits: HubLimits, listener: Option<OwnedFd>) -> Scene {
        let (mut thread, hub) = Hub::new(limits).unwrap();
        if let Some(listener) = listener {
            thread.listen(listener).unwrap();
        }
        std::thread::spawn(move || thread.run().unwrap());
        let join = |wanted, privileged| {
            LocalPlatform::connect(hub.admit(wanted, privileged).unwrap().1).unwrap()
        };
        let (back, correct) = (join(Some(DomId(0)), true), join(None, false));
        let correct = correct.with_arena(SHAPE);
        let (home, mut store) = (correct.domid(), back.store().unwrap());
        let data = format!("/local/domain/{home}/data");
        store.mkdir(&data).unwrap();
        store.set_perms(&data, &PermissionList::owned_by(home, NodeAccess::None)).unwrap();
        Scene { hub, back, correct, rounds: 0 }
    }

    fn domain(&self) -> RawDomain {
        RawDomain::join(self.hub.admit(None, false).unwrap().1).unwrap()
    }

    /// Checks that the correct domain gets every service of the hub.
    fn check_correct_domain_is_served(&mut self) {
        self.rounds += 1;
        let begun = Instant::now();
        let channel = self.correct.alloc_unbound(DomId(0)).unwrap();
        let bound = self.back.bind_interdomain(self.correct.domid(), channel.port()).unwrap();
        assert_eq!((bound.clear(), bound.clear()), (Ok(true), Ok(false)), "pending once");
        channel.notify().unwrap();
        assert_eq!(bound.clear(), Ok(true));
        let mut granter = self.correct.granter(DomId(0)).unwrap();
        let lease = granter.lend(Access::ReadWrite).unwrap();
        self.back.grantee(self.correct.domid()).unwrap();
        granter.take_back(lease).unwrap();
        let mut store = self.correct.store().unwrap();
        store.write("data", self.rounds.to_string()).unwrap();
        assert_eq!(store.read_u32("data").unwrap(), self.rounds);
        assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    }

    fn faults(&self, name: &str) -> u64 {
        self.hub.faults().get(name).copied().unwrap_or(0)
    }
}

fn spare() -> OwnedFd {
    rustix::fs::memfd_create("spare", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
}

/// Returns `true` if the hub closed the connection without a reply.
fn is_disconnected(domain: &RawDomain) -> bool {
    matches!(domain.receive(), Err(RawError::Closed))
}

#[test]
fn hub_message_of_wrong_length_ends_connection() {
    let mut scene = Scene::new();
    for (len, n) in [1, 4, 31, 33, 64, 4096, 100_000].into_iter().zip(1..) {
        let domain = scene.domain();
        send_raw(&domain.socket, &vec![1; len], &[]).unwrap();
        assert!(is_disconnected(&domain), "{len} bytes");
        assert_eq!(scene.faults("hub_malformed_message"), n, "{len} bytes");
        scene.check_correct_domain_is_served();
    }
    let domain = scene.domain();
    send_raw(&domain.socket, &[], &[]).unwrap();
    assert!(is_disconnected(&domain), "an empty message ends the connection");
    scene.check_correct_domain_is_served();
}

#[test]
fn unknown_hub_request_is_refused() {
    let mut scene = Scene::new();
    let mut domain = scene.domain();
    for (kind, n) in [0, 8, 9, 0x8000_0001, u32::MAX].into_iter().zip(1..) {
        let refused = domain.call(kind, &[1; 6], &[]).unwrap_err().refused();
        assert_eq!(refused, Some(refusal::MALFORMED), "kind {kind:#x}");
        assert_eq!(scene.faults("hub_unknown_request"), n);
    }
    scene.check_correct_domain_is_served();
    domain.store().unwrap();
}

#[test]
fn request_with_wrong_descriptor_count_is_refused_and_leaks_none() {
    alone("request_with_wrong_descriptor_count_is_refused_and_leaks_none", || {
        let mut scene = Scene::new();
        let (mut domain, spare) = (scene.domain(), spare());
        scene.check_correct_domain_is_served();
        let before = descriptors();
        for n in 1..=4 {
            let fds = vec![spare.as_fd(); n];
            let refused = domain.call(kind::ALLOC, &[0], &fds).unwrap_err().refused();
            assert_eq!(refused, Some(refusal::DESCRIPTORS));
            assert_eq!(scene.faults("hub_surplus_descriptors"), n as u64);
        }
        for n in 0..4 {
            let fds = vec![spare.as_fd(); n];
            let refused = domain.call(kind::LEND, &[0, 4, 4, 32], &fds).unwrap_err().refused();
            assert_eq!(refused, Some(refusal::DESCRIPTORS));
            assert_eq!(scene.faults("hub_missing_descriptors"), n as u64 + 1);
        }
        scene.check_correct_domain_is_served();
        assert!(descriptors_settled(before) <= before, "the hub kept descriptors");
        // More descriptors than the hub's receive buffer holds: no reply, connection closed.
        for (n, count) in [7, 20, 60].into_iter().zip(5..) {
            let mut domain = scene.domain();
            domain.ask(kind::LEND, &[0, 4, 4, 32], &vec![spare.as_fd(); n]).unwrap();
            assert!(is_disconnected(&domain), "{n} descriptors");
            assert_eq!(scene.faults("hub_surplus_descriptors"), count);
        }
        scene.check_correct_domain_is_served();
        assert!(descriptors_settled(before) <= before, "the hub kept descriptors");
    });
}

#[test]
fn request_for_missing_or_foreign_object_is_refused() {
    let mut scene = Scene::new();
    let mut domain = scene.domain();
    let mut other = scene.domain();
    let correct = scene.correct.domid();
    let of = |error: RawError| error.refused();
    // Channels: unknown domain, unknown port, port for another domain, bound port, number out of range.
    assert_eq!(domain.bind(DomId(99), 1).map_err(of).err(), Some(Some(refusal::NOT_FOUND)));
    assert_eq!(
        domain.bind(correct, 4_000_000_000).map_err(of).err(),
        Some(Some(refusal::NOT_FOUND))
    );
    let theirs = other.alloc(correct).unwrap();
    let refused = domain.bind(other.domid, theirs.port).map_err(of).err();
    assert_eq!(refused, Some(Some(refusal::NOT_PERMITTED)));
    let ours = other.alloc(domain.domid).unwrap();
    domain.bind(other.domid, ours.port).unwrap();
    let refused = domain.bind(other.domid, ours.port).map_err(of).err();
    assert_eq!(refused, Some(Some(refusal::IN_USE)));
    let refused = domain.call(kind::BIND, &[0x1_0000, 1], &[]).map_err(of).err();
    assert_eq!(refused, Some(Some(refusal::MALFORMED)));
    let refused = domain.call(kind::CLOSE, &[77], &[]).map_err(of).err();
    assert_eq!(refused, Some(Some(refusal::NOT_FOUND)));
    // Arenas: none lent, lent to another domain, unknown grantee, lent twice.
    assert_eq!(domain.fetch(correct).map_err(of).err(), Some(Some(refusal::NOT_FOUND)));
    let arena = RawArena::new(SHAPE).unwrap();
    other.lend(correct, &arena).unwrap();
    assert_eq!(domain.fetch(other.domid).map_err(of).err(), Some(Some(refusal::NOT_FOUND)));
    assert_eq!(other.lend(DomId(500), &arena).map_err(of).err(), Some(Some(refusal::NOT_FOUND)));
    assert_eq!(other.lend(correct, &arena).map_err(of).err(), Some(Some(refusal::IN_USE)));
    for name in ["hub_not_found", "hub_not_permitted", "hub_in_use", "hub_malformed_message"] {
        assert!(scene.faults(name) > 0, "{name}: {:?}", scene.hub.faults());
    }
    scene.check_correct_domain_is_served();
}

#[test]
fn domain_over_its_quota_is_refused_and_others_are_served() {
    let mut scene = Scene::new();
    let mut domain = scene.domain();
    let mut kept = Vec::new();
    let quota = |error: &RawError| error.refused() == Some(refusal::QUOTA);
    while kept.len() < 1000 {
        match domain.alloc(DomId(0)) {
            Ok(channel) => kept.push(channel.socket),
            Err(error) => {
                assert!(quota(&error), "{error}");
                break;
            }
        }
    }
    assert_eq!(kept.len(), HubLimits::default().ports);
    let mut stores = Vec::new();
    while stores.len() < 1000 {
        match domain.store_socket() {
            Ok(socket) => stores.push(socket),
            Err(error) => {
                assert!(quota(&error), "{error}");
                break;
            }
        }
    }
    assert!(stores.len() <= HubLimits::default().stores, "{} stores", stores.len());
    // Arenas: each too large, and the sum too large.
    let arena = RawArena::new(SHAPE).unwrap();
    let fds = arena.handed_over.each_ref().map(AsFd::as_fd);
    for shape in [[u32::MAX, 1, 32], [1, 16385, 32], [16384, 0, u32::MAX], [0, 0, 32], [4, 4, 8]] {
        let refused = domain.call(kind::LEND, &[0, shape[0], shape[1], shape[2]], &fds);
        assert!(refused.is_err_and(|error| quota(&error)), "{shape:?}");
    }
    let large =
        RawArena::new(ArenaShape { writable: 15_000, read_only: 1, references: 32 }).unwrap();
    domain.lend(DomId(0), &large).unwrap();
    let refused = domain.lend(scene.correct.domid(), &large);
    assert!(refused.is_err_and(|error| quota(&error)), "two of 60 MiB");
    assert!(scene.faults("hub_quota") >= 8);
    scene.check_correct_domain_is_served();
    // Released resources are available again.
    drop(stores);
    let deadline = Instant::now() + Duration::from_secs(60);
    while domain.store_socket().is_err() {
        assert!(Instant::now() < deadline);
    }
    domain.call(kind::CLOSE, &[1], &[]).unwrap();
    domain.alloc(DomId(0)).unwrap();
}

#[test]
fn unread_replies_end_connection_and_use_bounded_memory() {
    alone("unread_replies_end_connection_and_use_bounded_memory", || {
        let mut scene = Scene::new();
        scene.check_correct_domain_is_served();
        let (mut before, mut held) = ((0, 0), (0, 0));
        for n in 1..=40u64 {
            let mut domain = scene.domain();
            domain.lend(DomId(0), &RawArena::new(SHAPE).unwrap()).unwrap();
            // Each reply to an ALLOC holds a descriptor; the domain reads none.
            let deadline = Instant::now() + Duration::from_secs(60);
            let mut asked = 0;
            while scene.faults("hub_reply_not_taken") < n {
                assert!(Instant::now() < deadline, "the connection stays open");
                let kind = if asked % 3 == 0 { kind::ALLOC } else { kind::FETCH };
                if domain.ask(kind, &[0], &[]).is_ok() {
                    asked += 1;
                }
            }
            // A connection closed with unread data reports one reset before the data that it had sent.
            let (mut replies, mut ends) = (0, 0);
            while ends < 2 {
                match domain.receive() {
                    Ok(_) => replies += 1,
                    Err(_) => ends += 1,
                }
            }
            assert!((2..100).contains(&replies), "{replies} replies were queued");
            drop(domain);
            if n % 10 == 0 {
                scene.check_correct_domain_is_served();
            }
            let most = if n > 5 { before.0 } else { usize::MAX };
            held = (descriptors_settled(most), resident_pages());
            if n == 5 {
                before = held;
            }
        }
        assert!(held.0 <= before.0 && held.1 <= before.1 + 256, "{before:?}, then {held:?}");
    });
}

#[test]
fn flood_of_requests_leaves_other_domains_served() {
    let mut scene = Scene::new();
    let mut domain = scene.domain();
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let seen = std::sync::Arc::clone(&stop);
    let flood = std::thread::spawn(move || {
        let mut sent = 0u64;
        while !seen.load(std::sync::atomic::Ordering::Relaxed) {
            // The domain reads the replies, so the connection stays.
            for _ in 0..8 {
                sent += u64::from(domain.ask(99, &[], &[]).is_ok());
            }
            for _ in 0..8 {
                let _ = domain.receive();
            }
        }
        sent
    });
    let begun = Instant::now();
    let mut rounds = 0u32;
    while begun.elapsed() < Duration::from_millis(300) || rounds < 20 {
        scene.check_correct_domain_is_served();
        rounds += 1;
        assert!(begun.elapsed() < Duration::from_secs(60));
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    assert!(flood.join().unwrap() > 100);
}

/// Checks that the quota also binds requests whose replies the domain does not read.
#[test]
fn allocations_with_unread_replies_stay_within_quota() {
    let mut scene = Scene::new();
    let domain = scene.domain();
    let mut words = [0u32; 8];
    words[0] = kind::ALLOC;
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let deadline = Instant::now() + Duration::from_secs(60);
    while scene.faults("hub_quota") < 10 {
        assert!(Instant::now() < deadline);
        let _ = send_raw(&domain.socket, &bytes, &[]);
    }
    scene.check_correct_domain_is_served();
}

/// Checks that the hub keeps no descriptor of a domain's own connection: that domain would never be
/// removed.
#[test]
fn lending_own_connection_as_arena_is_refused() {
    let mut scene = Scene::new();
    let mut domain = scene.domain();
    let id = domain.domid;
    let own = domain.socket.try_clone().unwrap();
    let refused = domain.call(kind::LEND, &[0, 4, 4, 32], &[own.as_fd(); 4]);
    assert!(refused.is_err(), "a socket is no arena");
    assert_eq!(scene.faults("hub_bad_arena"), 1);
    assert_eq!(scene.faults("arena_no_memfd"), 1);
    let channel = domain.alloc(DomId(0)).unwrap();
    drop((own, domain));
    let deadline = Instant::now() + Duration::from_secs(60);
    // The domain is removed when its ports are.
    while scene.back.bind_interdomain(id, ringfence_platform::EventPort(channel.port)).is_ok() {
        assert!(Instant::now() < deadline, "the hub keeps a domain that ended");
    }
    scene.check_correct_domain_is_served();
}

/// Creates a listening socket in the abstract namespace. Returns it and its address.
fn listener(name: &str) -> (OwnedFd, SocketAddrUnix) {
    let name = format!("ringfence-hostile-hub-{}-{name}", std::process::id());
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    let flags = SocketFlags::CLOEXEC;
    let kind = SocketType::SEQPACKET;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
    rustix::net::bind(&socket, &address).unwrap();
    rustix::net::listen(&socket, 64).unwrap();
    (socket, address)
}

fn call(address: &SocketAddrUnix) -> rustix::io::Result<RawDomain> {
    let socket = caller_socket()?;
    rustix::net::connect(&socket, address)?;
    Ok(RawDomain::silent(socket))
}

/// Creates the socket of a caller, not connected yet.
fn caller_socket() -> rustix::io::Result<OwnedFd> {
    let kind = SocketType::SEQPACKET;
    rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)
}

#[test]
fn request_before_hello_is_refused() {
    let (socket, address) = listener("hello");
    let mut scene = Scene::listening(HubLimits::default(), Some(socket));
    let mut caller = call(&address).unwrap();
    let arena = RawArena::new(SHAPE).unwrap();
    let fds = arena.handed_over.each_ref().map(AsFd::as_fd);
    for (kind, fds) in [(2, &[][..]), (3, &fds[..]), (4, &[]), (5, &[]), (6, &[]), (7, &[])] {
        let refused = caller.call(kind, &[0, 4, 4, 32], fds).unwrap_err().refused();
        assert_eq!(refused, Some(refusal::NOT_PERMITTED), "kind {kind}");
    }
    assert_eq!(scene.faults("hub_not_permitted"), 6);
    // Ids of other domains, and ids that no domain may have.
    for (wanted, why) in [
        (0, refusal::IN_USE),
        (0x7FF0, refusal::NOT_PERMITTED),
        (0xFFFF, refusal::NOT_PERMITTED),
        (0x1_0000, refusal::MALFORMED),
    ] {
        let refused = caller.call(kind::HELLO, &[wanted], &[]).unwrap_err().refused();
        assert_eq!(refused, Some(why), "{wanted:#x}");
    }
    let (args, _) = caller.call(kind::HELLO, &[u32::MAX], &[]).unwrap();
    // A second HELLO with another id has no effect.
    let (again, _) = caller.call(kind::HELLO, &[77], &[]).unwrap();
    assert_eq!(args[0], again[0]);
    caller.store().unwrap();
    scene.check_correct_domain_is_served();
}

#[test]
fn silent_connections_do_not_keep_new_domain_out() {
    alone("silent_connections_do_not_keep_new_domain_out", || {
        let (socket, address) = listener("strangers");
        let mut scene = Scene::listening(HubLimits::default(), Some(socket));
        scene.check_correct_domain_is_served();
        let before = descriptors();
        let silent: Vec<_> = (0..300).map(|_| call(&address).unwrap()).collect();
        let mut late = call(&address).unwrap();
        late.call(kind::HELLO, &[u32::MAX], &[]).unwrap();
        late.store().unwrap();
        assert!(scene.faults("hub_strangers") >= 260, "{:?}", scene.hub.faults());
        // This process holds both ends: 300 of the callers, and few of the hub.
        let held = descriptors_settled(before + 350) - before;
        assert!(held <= 350, "{held} descriptors");
        scene.check_correct_domain_is_served();
        drop(silent);
    });
}

#[test]
fn hub_without_free_descriptors_waits_and_recovers() {
    alone("hub_without_free_descriptors_waits_and_recovers", || {
        use rustix::process::{Resource, Rlimit, setrlimit};
        let (socket, address) = listener("exhausted");
        let mut scene = Scene::listening(HubLimits::default(), Some(socket));
        scene.check_correct_domain_is_served();
        // The callers have their sockets before the limit falls, so that only the hub needs descriptors: it
        // accepts about 20 callers, and has none left for the others.
        let callers: Vec<_> = (0..60).map(|_| caller_socket().unwrap()).collect();
        let limit = Rlimit { current: Some(descriptors() as u64 + 20), maximum: Some(4096) };
        setrlimit(Resource::Nofile, limit).unwrap();
        for caller in &callers {
            rustix::net::connect(caller, &address).unwrap();
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        while scene.faults("hub_no_room_for_connection") < 30 {
            assert!(Instant::now() < deadline, "{:?}", scene.hub.faults());
            std::thread::sleep(Duration::from_millis(1));
        }
        // The hub does not spin.
        let used = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        std::thread::sleep(Duration::from_millis(200));
        let then = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        let spent = (then.tv_sec - used.tv_sec) * 1_000_000_000 + (then.tv_nsec - used.tv_nsec);
        assert!(spent < 100_000_000, "the hub spins: {spent} ns of 200 ms");
        drop(callers);
        let limit = Rlimit { current: Some(4096), maximum: Some(4096) };
        setrlimit(Resource::Nofile, limit).unwrap();
        scene.check_correct_domain_is_served();
        let mut late = call(&address).unwrap();
        late.call(kind::HELLO, &[u32::MAX], &[]).unwrap();
    });
}

/// The kernel counts descriptors in flight for each user, in all processes. A domain without any in flight
/// is refused, and stays connected.
#[test]
fn alloc_during_descriptor_exhaustion_by_others_keeps_connection() {
    alone("alloc_during_descriptor_exhaustion_by_others_keeps_connection", || {
        use rustix::process::{Resource, Rlimit, setrlimit};
        // Capabilities of root lift the limit.
        if rustix::process::geteuid().is_root() {
            rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(65_534)).unwrap();
        }
        let mut scene = Scene::new();
        scene.check_correct_domain_is_served();
        let limit = Rlimit { current: Some(descriptors() as u64 + 100), maximum: Some(4096) };
        setrlimit(Resource::Nofile, limit).unwrap();
        let (a, _b) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        let spare = spare();
        let mut in_flight = 0;
        while send_raw(&a, &[1], &[spare.as_fd(); 40]).is_ok() {
            in_flight += 40;
        }
        assert!(in_flight > 0);
        let refused = scene.correct.alloc_unbound(DomId(0));
        assert!(refused.is_err(), "{in_flight} in flight");
        assert_eq!(scene.faults("hub_descriptors_under_way"), 1);
        drop((a, _b));
        // The connection is open.
        let deadline = Instant::now() + Duration::from_secs(60);
        while scene.correct.alloc_unbound(DomId(0)).is_err() {
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(1));
        }
        scene.check_correct_domain_is_served();
    });
}

/// The kernel counts descriptors in flight for all processes of a user, so one domain must not have many.
#[test]
fn domain_that_leaves_a_descriptor_unread_and_asks_for_more_is_disconnected() {
    let mut scene = Scene::new();
    for (kind, args) in [(kind::STORE, &[][..]), (kind::ALLOC, &[0][..])] {
        let mut domain = scene.domain();
        let before = scene.faults("hub_reply_not_taken");
        for _ in 0..8 {
            // The send fails after the hub has closed the connection.
            let _ = domain.ask(kind, args, &[]);
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        while scene.faults("hub_reply_not_taken") == before {
            assert!(Instant::now() < deadline, "the domain is still connected");
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut taken = 0;
        while let Ok((_, fds)) = domain.receive() {
            taken += fds.len();
        }
        assert!(taken <= 1, "{taken} descriptors were in flight");
        scene.check_correct_domain_is_served();
    }
}

/// Creates a TCP connection whose close blocks for an hour. Returns the writer and the reader, which does
/// not read.
fn lingering() -> (OwnedFd, std::net::TcpStream) {
    use std::io::Write;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut writer = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (reader, _) = listener.accept().unwrap();
    writer.set_nonblocking(true).unwrap();
    while writer.write(&[0; 65536]).is_ok() {}
    let hour = Some(Duration::from_secs(3600));
    rustix::net::sockopt::set_socket_linger(&writer, hour).unwrap();
    (writer.into(), reader)
}

/// Sends descriptors whose last references are in the hub's queues.
#[test]
fn lingering_descriptors_sent_to_the_hub_do_not_block_it() {
    let directory = tempfile::tempdir().unwrap();
    let address = SocketAddrUnix::new(directory.path().join("hub")).unwrap();
    let socket = || {
        let kind = SocketType::SEQPACKET;
        rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap()
    };
    let listener = socket();
    rustix::net::bind(&listener, &address).unwrap();
    rustix::net::listen(&listener, 16).unwrap();
    let mut kept = Vec::new();
    for (kind, args, count) in [
        (kind::HELLO, &[u32::MAX][..], 1),
        (kind::LEND, &[0, 4, 4, 32][..], 4),
        (kind::LEND, &[0, 4, 4, 32][..], 5),
        (kind::STORE, &[][..], 60),
    ] {
        let caller = socket();
        rustix::net::connect(&caller, &address).unwrap();
        let mut domain = RawDomain::silent(caller);
        let (writer, reader) = lingering();
        let (second, second_reader) = lingering();
        domain.ask(kind, args, &vec![writer.as_fd(); count]).unwrap();
        // These follow a message that ends the connection: the hub closes them with its queue.
        send_raw(&domain.socket, &[1], &[second.as_fd()]).unwrap();
        send_raw(&domain.socket, &[1], &[second.as_fd()]).unwrap();
        drop((writer, second));
        kept.push((domain, reader, second_reader));
    }
    // On a thread, because a hub that is blocked answers nobody.
    let (sender, done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut scene = Scene::listening(HubLimits::default(), Some(listener));
        scene.check_correct_domain_is_served();
        for (domain, ..) in &kept {
            while !matches!(domain.receive(), Err(RawError::Closed)) {}
        }
        scene.check_correct_domain_is_served();
        sender.send(())
    });
    done.recv_timeout(Duration::from_secs(60)).expect("the hub serves its domains");
}

#[test]
fn descriptor_over_a_socket_of_the_hub_is_refused_before_the_other_end_is_used() {
    let name = rustix::system::uname();
    let mut numbers = name.release().to_str().unwrap().split(['.', '-']);
    let mut next = || numbers.next().and_then(|n| n.parse::<u32>().ok()).unwrap_or(0);
    if (next(), next()) < (6, 16) {
        eprintln!("SKIPPED: this kernel has no SO_PASSRIGHTS (Linux 6.16)");
        return;
    }
    let scene = Scene::new();
    let mut domain = scene.domain();
    let channel = domain.alloc(DomId(0)).unwrap();
    let store = domain.store_socket().unwrap();
    for socket in [&channel.socket, &store] {
        let refused = send_raw(socket, &[1], &[spare().as_fd()]).unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::PermissionDenied);
    }
}
