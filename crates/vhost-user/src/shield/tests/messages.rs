//! A hypervisor, a shield and a backend, in a thread each.

use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ringfence_memory::DeviceAccess::{Read, Write};
use ringfence_platform::Counters;
use ringfence_ring::split::backend::BackendQueue;
use ringfence_sys::descriptors::{FileIdentity, identity};
use ringfence_sys::event_signal::EventSignal;
use ringfence_sys::poll::{wait_any, wait_readable};
use ringfence_wire::vhost_user::{
    LOG_ALL, PROTOCOL_FEATURES, Request, config_changed, number, protocol_feature as protocol,
    reply_word, request,
};
use ringfence_wire::virtio::{feature, flag};
use rustix::event::epoll;
use rustix::event::{PollFd, PollFlags};

use crate::PoolRule;
use crate::device::{Device, DeviceOffer, LOG_FILE_MAX, Parts, RequestAnswer};
use crate::messages::{self, Incoming};
use crate::proxy::table::{CONFIG_CHANGE, REQUESTS};
use crate::shield::{BackendFiles, Outcome, Shield, ShieldOptions};
use crate::testing::{FrontShape, Frontend, log_file, memfd, state, words};

const PATIENCE: Duration = Duration::from_secs(60);
const POOL: u64 = 16 << 20;
/// Feature of the kind of device.
const OWN: u64 = 1 << 5;
/// Features of a backend, of which some do not pass.
const OFFERED: u64 = OWN
    | feature::INDIRECT
    | feature::EVENT_IDX
    | feature::VERSION_1
    | feature::IN_ORDER
    | 1 << 34
    | 1 << 40
    | LOG_ALL
    | PROTOCOL_FEATURES;

mod migration;
mod slots;

/// Behaviour of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
enum Behaviour {
    /// Fills all room with its number, and uses each chain.
    #[default]
    Honest,
    /// Takes chains and never uses one.
    Silent,
    /// Uses each chain twice.
    Twice,
    /// Closes its connection at this request.
    LeavesAt(u32),
    /// Answers this request with another number.
    Confused(u32),
    /// Offers no feature of its own kind.
    Poor,
    /// Sends this request on its channel before it answers `GET_VRING_BASE`, and waits for an acknowledgement.
    Asks(u32),
    /// Sends changes of its configuration space without end.
    Floods,
    /// Uses chains a while after it took them, the last one first.
    Late,
    /// Uses no chain, and closes its connection a while after it took one.
    LeavesLate,
}

/// Observations of all backends.
#[derive(Debug, Default)]
struct Seen {
    requests: Vec<u32>,
    /// Files that came to a backend.
    files: Vec<FileIdentity>,
    taken: usize,
    /// Channel of a backend that was full.
    was_full: bool,
}

/// Shield in a thread of its own, and backends in others.
struct Served {
    thread: JoinHandle<Vec<String>>,
    stop: Arc<AtomicBool>,
    seen: Arc<Mutex<Seen>>,
}

fn offer(behaviour: Behaviour) -> DeviceOffer {
    let features = if behaviour == Behaviour::Poor { OFFERED & !OWN } else { OFFERED };
    let protocol =
        protocol::CONFIG | protocol::MULTIQUEUE | protocol::INFLIGHT | protocol::LOG_FILE | 1 << 11;
    DeviceOffer { features, protocol, vrings: 4, queues: 2, mtu: u16::MAX }
}

/// Sends a request on the channel of a backend, and waits until the shield has acknowledged it or gone.
fn ask_on(channel: &UnixStream, number: u32) {
    channel.set_read_timeout(Some(PATIENCE)).unwrap();
    (&*channel).write_all(&request(number, true, &[])).unwrap();
    let expected = reply_word(number, 0);
    let mut answer = vec![0; expected.len()];
    match (&*channel).read_exact(&mut answer) {
        Ok(()) => assert_eq!(answer[..], expected[..]),
        Err(error) => assert_eq!(error.kind(), ErrorKind::UnexpectedEof),
    }
}

/// Sends changes until the channel is full. Returns `true` if it is.
fn flood(channel: &UnixStream) -> bool {
    channel.set_nonblocking(true).unwrap();
    let is_full = |error: std::io::Error| error.kind() == ErrorKind::WouldBlock;
    (0..1000).any(|_| (&*channel).write(&config_changed()).is_err_and(is_full))
}

/// Serves one shield until it closes the connection.
fn backend(
    socket: &OwnedFd,
    number: u8,
    behaviour: Behaviour,
    seen: &Mutex<Seen>,
    stop: &AtomicBool,
) {
    let signal = EventSignal::new().unwrap();
    let mut device =
        Device::new(offer(behaviour), vec![number; 60], PoolRule::AtMost(POOL), signal).unwrap();
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let counters = Counters::default();
    let mut used = Vec::new();
    let mut channel = None;
    let mut late = Late::default();
    while !stop.load(Ordering::Relaxed) {
        if let (Behaviour::Floods, Some(channel)) = (behaviour, &channel) {
            let is_full = flood(channel);
            seen.lock().unwrap().was_full |= is_full;
        }
        let mut files = [PollFd::new(socket, PollFlags::IN), PollFd::new(&epoll, PollFlags::IN)];
        wait_any(&mut files, Some(Instant::now() + Duration::from_millis(1))).unwrap();
        loop {
            let message = match messages::receive(socket, &counters).unwrap() {
                Incoming::Message(message) => message,
                Incoming::Nothing => break,
                Incoming::Gone => return,
            };
            let request = message.header.request;
            let mut seen = seen.lock().unwrap();
            seen.requests.push(request);
            seen.files.extend(message.files.each().map(|file| identity(file).unwrap()));
            drop(seen);
            match behaviour {
                Behaviour::LeavesAt(number) if number == request => return,
                Behaviour::Confused(number) if number == request => {
                    let other = RequestAnswer::Word(7);
                    let header = ringfence_wire::vhost_user::Header {
                        request: request + 1,
                        ..message.header
                    };
                    messages::answer(socket, &header, &other, true, &counters).unwrap();
                    continue;
                }
                Behaviour::Asks(number) if request == number::GET_VRING_BASE => {
                    ask_on(channel.as_ref().expect("a channel"), number);
                }
                _ => {}
            }
            if let Request::GetVringBase(state) = &message.request {
                late.chains.retain(|(vring, ..)| *vring != state.index);
            }
            let answer = match message.request {
                // The device of the test offers all that it has.
                Request::GetFeatures => RequestAnswer::Word(offer(behaviour).features),
                Request::SetBackendSocket => {
                    let [socket] = message.files.exactly().unwrap();
                    channel = Some(UnixStream::from(socket));
                    RequestAnswer::Done
                }
                parsed => device.handle(parsed, message.files, epoll.as_fd()).unwrap(),
            };
            messages::answer(socket, &message.header, &answer, device.acknowledges(), &counters)
                .unwrap();
        }
        if behaviour == Behaviour::LeavesLate && late.is_due() {
            return;
        }
        let Parts { memory, vrings, signal, .. } = device.parts();
        for (index, vring) in (0_u32..).zip(vrings) {
            let Some(queue) = &mut vring.queue else { continue };
            let table = |address, len| {
                let (lent, offset) = memory.at(address, len).ok()?;
                lent.slice(offset, len).ok()
            };
            while let Some(head) = queue.take(table, &mut used).unwrap() {
                seen.lock().unwrap().taken += 1;
                if behaviour == Behaviour::Silent {
                    continue;
                }
                let mut len = 0;
                for link in used.iter().filter(|link| link.flags & flag::WRITE != 0) {
                    let (lent, at) = memory.at(link.address, link.len as usize).unwrap();
                    lent.copy_from(at, &vec![number; link.len as usize]).unwrap();
                    len += link.len;
                }
                if matches!(behaviour, Behaviour::Late | Behaviour::LeavesLate) {
                    late.chains.push((index, head, len));
                    late.taken = Some(Instant::now());
                    continue;
                }
                queue.finish(head, len);
                if behaviour == Behaviour::Twice {
                    queue.finish(head, len);
                }
            }
            if behaviour == Behaviour::Late {
                late.finish(index, queue);
            }
            let _ = queue.arm(0);
            vring.publish(signal);
        }
    }
}

/// Chains that a backend uses late: numbers of vrings, heads, and lengths in bytes.
#[derive(Default)]
struct Late {
    chains: Vec<(u32, u16, u32)>,
    taken: Option<Instant>,
}

impl Late {
    fn is_due(&self) -> bool {
        self.taken.is_some_and(|taken| taken.elapsed() > Duration::from_millis(50))
    }

    fn finish(&mut self, index: u32, queue: &mut BackendQueue) {
        if self.is_due() {
            let of_vring = self.chains.extract_if(.., |(vring, ..)| *vring == index);
            let due: Vec<_> = of_vring.collect();
            due.into_iter().rev().for_each(|(_, head, len)| queue.finish(head, len));
        }
    }
}

/// Serves a hypervisor. The first backend has the first behaviour, and so on; the last one's repeats.
fn serve(reconnect: bool, behaviours: &'static [Behaviour]) -> (Served, UnixStream) {
    let (own, socket) = UnixStream::pair().unwrap();
    own.set_nonblocking(true).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let seen = Arc::<Mutex<Seen>>::default();
    let (stopped, noted) = (Arc::clone(&stop), Arc::clone(&seen));
    // The backends outlive the shield, which otherwise reports the loss of one as a fault.
    let shield_ended = Arc::new(AtomicBool::new(false));
    let signal = EventSignal::new().unwrap();
    let mut shield = Shield::new(ShieldOptions { reconnect }, signal).unwrap();
    (0..2).for_each(|_| shield.add_log_file(log_file(LOG_FILE_MAX).unwrap()));
    shield.connect(own.into(), Instant::now()).unwrap();
    let thread = std::thread::spawn(move || {
        let (mut faults, mut backends) = (Vec::new(), Vec::new());
        while !stopped.load(Ordering::Relaxed) && shield.has_client() {
            let mut result = shield.round(Instant::now());
            if shield.wants_backend(Instant::now()) {
                let (near, far) = UnixStream::pair().unwrap();
                near.set_nonblocking(true).unwrap();
                far.set_nonblocking(true).unwrap();
                let number = backends.len();
                let behaviour = *behaviours.get(number).or(behaviours.last()).unwrap();
                let (seen, stop) = (Arc::clone(&noted), Arc::clone(&shield_ended));
                backends.push(std::thread::spawn(move || {
                    backend(
                        &far.into(),
                        u8::try_from(number + 1).unwrap(),
                        behaviour,
                        &seen,
                        &stop,
                    );
                }));
                let (own, theirs) = UnixStream::pair().unwrap();
                let channel = [own.into(), theirs.into()];
                let files =
                    BackendFiles { socket: near.into(), pool: memfd(POOL).unwrap(), channel };
                result = result.and(shield.attach(files).map(|()| Outcome::Worked));
            }
            match result {
                Ok(Outcome::Worked) => continue,
                Ok(Outcome::Idle) => {}
                Err(broken) => {
                    faults.push(broken.to_string());
                    shield.lose(broken.party, Instant::now());
                }
            }
            if !shield.arm() {
                let mut files = [PollFd::from_borrowed_fd(shield.wait_fd(), PollFlags::IN)];
                wait_any(&mut files, Some(Instant::now() + Duration::from_millis(2))).unwrap();
            }
            shield.clear_events(Instant::now());
        }
        drop(shield);
        shield_ended.store(true, Ordering::Relaxed);
        backends.into_iter().for_each(|backend| backend.join().unwrap());
        faults
    });
    (Served { thread, stop, seen }, socket)
}

impl Served {
    /// Ends the shield. Returns its faults.
    fn stop(self) -> Vec<String> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }

    /// Waits until the shield has closed the hypervisor's connection. Returns its faults.
    fn ended(self) -> Vec<String> {
        let begun = Instant::now();
        while !self.thread.is_finished() {
            assert!(begun.elapsed() < PATIENCE, "the hypervisor is served");
            std::thread::sleep(Duration::from_millis(1));
        }
        self.thread.join().unwrap()
    }

    fn wait_for_taken(&self, count: usize) {
        let begun = Instant::now();
        while self.seen.lock().unwrap().taken < count {
            assert!(begun.elapsed() < PATIENCE, "no chain reached the backend");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn shape() -> FrontShape {
    FrontShape {
        vrings: 2,
        size: 8,
        buffers: 1 << 20,
        features: feature::INDIRECT | feature::EVENT_IDX | feature::VERSION_1 | OWN,
        protocol: protocol::REPLY_ACK
            | protocol::MULTIQUEUE
            | protocol::CONFIG
            | protocol::INFLIGHT
            | protocol::LOG_FILE
            | protocol::BACKEND_REQ,
        has_mark: false,
    }
}

fn front(socket: UnixStream) -> Frontend {
    front_of(shape(), socket)
}

fn front_of(shape: FrontShape, socket: UnixStream) -> Frontend {
    let mut front = Frontend::new(shape).unwrap();
    front.attach(socket).unwrap();
    front
}

fn push(front: &mut Frontend, vring: usize, token: u32) {
    let at = front.buffers_at() + token as usize * 8192;
    let ranges = [front.range(at, 16, Read), front.range(at + 16, 4096, Write)];
    front.vrings[vring].driver.push(&ranges, token).unwrap();
    front.kick(vring);
}

/// Waits for the next used chain. Returns its token and the first byte of its room.
fn pop(front: &mut Frontend, vring: usize) -> (u32, u8) {
    let begun = Instant::now();
    loop {
        let vring = &mut front.vrings[vring];
        let _ = rustix::io::read(&vring.call, &mut [0; 8]);
        if let Some(used) = vring.driver.pop().unwrap() {
            let at = front.buffers_at() + used.token as usize * 8192 + 16;
            let mut byte = [0];
            front.memory.copy_to(at, &mut byte).unwrap();
            return (used.token, byte[0]);
        }
        if !vring.driver.arm(1).unwrap() {
            let left = PATIENCE.checked_sub(begun.elapsed()).expect("no answer in time");
            wait_readable(&vring.call, Some(left)).unwrap();
        }
    }
}

#[test]
fn driver_is_served_by_a_backend_that_gets_no_descriptor_of_the_machine() {
    let (served, socket) = serve(false, &[Behaviour::Honest]);
    let mut front = front(socket);
    front.set_up().unwrap();
    for token in 0..100 {
        push(&mut front, token as usize % 2, token % 8);
        assert_eq!(pop(&mut front, token as usize % 2), (token % 8, 1));
    }
    let wanted = [[0, 60, 0].map(u32::to_ne_bytes).concat(), vec![9; 60]].concat();
    let (config, _) = front.ask(number::GET_CONFIG, &wanted).unwrap();
    assert_eq!(config[..], [&wanted[..12], &[1; 60]].concat());
    assert_eq!(front.ask(number::GET_QUEUE_NUM, &[]).unwrap().0, words(&[2]));
    let memory = [&front.file, &front.log.as_ref().unwrap().1, &front.vrings[0].kick]
        .map(|file| identity(file).unwrap());
    let seen = Arc::clone(&served.seen);
    assert_eq!(served.stop(), [""; 0]);
    let seen = seen.lock().unwrap();
    // All eventfds have one identity, and the others are the pool.
    assert!(seen.files.iter().all(|file| !memory[..2].contains(file)), "a file of the machine");
    let others = seen.files.iter().filter(|file| **file != memory[2]).count();
    assert_eq!(others, 2, "one pool and one socket");
    for number in [number::GET_INFLIGHT_FD, number::SET_INFLIGHT_FD] {
        assert!(!seen.requests.contains(&number), "{number}");
    }
    assert_eq!(seen.requests.iter().filter(|found| **found == number::SET_MEM_TABLE).count(), 1);
}

#[test]
fn features_of_vrings_are_the_shields_own() {
    let (served, socket) = serve(false, &[Behaviour::Honest]);
    let front = front(socket);
    let word = |number| {
        let (answer, _) = front.ask(number, &[]).unwrap();
        u64::from_ne_bytes(answer[..].try_into().unwrap())
    };
    let expected = OWN
        | feature::INDIRECT
        | feature::EVENT_IDX
        | feature::VERSION_1
        | feature::ACCESS_PLATFORM
        | LOG_ALL
        | PROTOCOL_FEATURES;
    assert_eq!(word(number::GET_FEATURES), expected);
    let protocol = shape().protocol | protocol::CONFIGURE_MEM_SLOTS;
    assert_eq!(word(number::GET_PROTOCOL_FEATURES), protocol);
    drop(front);
    served.ended();
}

#[test]
fn each_message_that_is_not_offered_is_refused_by_its_name() {
    let offered = [
        1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 21, 24, 25, 31, 32, 36, 37, 38,
    ];
    for row in REQUESTS.iter().filter(|row| !offered.contains(&row.number)) {
        let (served, socket) = serve(false, &[Behaviour::Honest]);
        let front = front(socket);
        front.negotiate().unwrap();
        // Of both that pass, the backend has no feature.
        front.ask(row.number, &[0; 8]).unwrap_err();
        let faults = served.ended();
        assert!(faults[0].starts_with("the hypervisor: "), "{faults:?}");
        assert!(faults[0].contains(row.name), "{}: {faults:?}", row.name);
    }
    let (served, socket) = serve(false, &[Behaviour::Honest]);
    front(socket).ask(99, &[]).unwrap_err();
    assert!(served.ended()[0].contains("request 99 is refused"));
}

#[test]
fn end_of_the_backend_ends_the_hypervisors_connection_without_reconnect() {
    let (served, socket) = serve(false, &[Behaviour::LeavesAt(number::GET_CONFIG)]);
    let mut front = front(socket);
    front.set_up().unwrap();
    front.ask(number::GET_CONFIG, &[0; 12]).unwrap_err();
    assert!(served.ended()[0].contains("the backend: vhost-user: the connection ended"));
}

#[test]
fn next_backend_serves_chains_in_flight_and_the_message_at_which_one_has_left() {
    let behaviours = &[Behaviour::LeavesAt(number::GET_VRING_BASE), Behaviour::Honest];
    let (served, socket) = serve(true, behaviours);
    let mut front = front(socket);
    front.set_up().unwrap();
    push(&mut front, 0, 0);
    assert_eq!(pop(&mut front, 0), (0, 1));
    let (answer, _) = front.ask(number::GET_VRING_BASE, &state(0, 0)).unwrap();
    assert_eq!(answer, state(0, 1), "by the second one");
    front.send_vring(0).unwrap();
    for vring in 0..2 {
        push(&mut front, vring, 1);
        assert_eq!(pop(&mut front, vring), (1, 2));
    }
    assert_eq!(served.stop().len(), 1);
}

#[test]
fn next_backend_serves_what_a_silent_one_left() {
    let behaviours = &[Behaviour::Silent, Behaviour::Honest];
    let (served, socket) = serve(true, behaviours);
    let mut front = front(socket);
    front.set_up().unwrap();
    (0..5).for_each(|token| push(&mut front, 0, token));
    served.wait_for_taken(5);
    // The first one is still connected, so it is made to leave.
    let (answer, _) = front.ask(number::GET_VRING_BASE, &state(1, 0)).unwrap();
    assert_eq!(answer, state(1, 0));
    drop(front);
    assert_eq!(served.ended().len(), 1);
}

#[test]
fn backend_that_uses_a_chain_twice_is_replaced_and_the_driver_sees_it_once() {
    let (served, socket) = serve(true, &[Behaviour::Twice, Behaviour::Honest]);
    let mut front = front(socket);
    front.set_up().unwrap();
    (0..3).for_each(|token| push(&mut front, 0, token));
    let mut tokens: Vec<_> = (0..3).map(|_| pop(&mut front, 0).0).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, [0, 1, 2]);
    assert_eq!(front.vrings[0].driver.pop(), Ok(None));
    let faults = served.stop();
    assert!(faults[0].contains("the backend: vhost-user: vring 0: the device"), "{faults:?}");
}

#[test]
fn answer_to_another_request_is_a_fault_of_the_backend() {
    // The false answer is as long as the right one.
    let (served, socket) = serve(false, &[Behaviour::Confused(number::GET_VRING_BASE)]);
    let mut front = front(socket);
    front.set_up().unwrap();
    front.ask(number::GET_VRING_BASE, &state(0, 0)).unwrap_err();
    let faults = served.ended();
    assert!(faults[0].contains("the backend: vhost-user: an answer to request 12"), "{faults:?}");
}

#[test]
fn backend_with_fewer_features_does_not_continue() {
    let (served, socket) = serve(
        true,
        &[Behaviour::LeavesAt(number::GET_VRING_BASE), Behaviour::Poor, Behaviour::Honest],
    );
    let mut front = front(socket);
    front.set_up().unwrap();
    front.ask(number::GET_VRING_BASE, &state(0, 0)).unwrap();
    let faults = served.stop();
    assert!(faults[1].contains("0x20 are missing"), "{faults:?}");
}

/// Frontend that has passed a socket for requests of the device. Returns the hypervisor's end of that.
fn front_with_requests(socket: UnixStream) -> (Frontend, UnixStream) {
    let mut front = front(socket);
    front.set_up().unwrap();
    let (near, far) = UnixStream::pair().unwrap();
    front.order(number::SET_BACKEND_REQ_FD, &[], &[far.as_fd()]).unwrap();
    near.set_read_timeout(Some(PATIENCE)).unwrap();
    (front, near)
}

fn wait_for_notice(mut requests: &UnixStream) {
    let mut told = [0; 12];
    requests.read_exact(&mut told).unwrap();
    assert_eq!(told[..], config_changed());
}

#[test]
fn change_of_the_configuration_is_acknowledged_while_an_answer_is_awaited_and_told() {
    let (served, socket) = serve(false, &[Behaviour::Asks(CONFIG_CHANGE)]);
    let (front, requests) = front_with_requests(socket);
    for vring in 0..2 {
        front.ask(number::GET_VRING_BASE, &state(vring, 0)).unwrap();
        wait_for_notice(&requests);
    }
    // The hypervisor may have closed its end.
    drop(requests);
    front.send_vring(0).unwrap();
    front.ask(number::GET_VRING_BASE, &state(0, 0)).unwrap();
    assert_eq!(served.stop(), [""; 0]);
}

#[test]
fn change_of_the_configuration_is_dropped_for_a_hypervisor_without_a_socket_for_it() {
    let (served, socket) = serve(false, &[Behaviour::Asks(CONFIG_CHANGE)]);
    let mut front = front(socket);
    front.set_up().unwrap();
    front.ask(number::GET_VRING_BASE, &state(0, 0)).unwrap();
    push(&mut front, 1, 0);
    assert_eq!(pop(&mut front, 1), (0, 1));
    assert_eq!(served.stop(), [""; 0]);
}

#[test]
fn next_backend_is_told_as_a_change_of_the_configuration() {
    let behaviours = &[Behaviour::LeavesAt(number::GET_VRING_BASE), Behaviour::Honest];
    let (served, socket) = serve(true, behaviours);
    let (front, requests) = front_with_requests(socket);
    front.ask(number::GET_VRING_BASE, &state(0, 0)).unwrap();
    wait_for_notice(&requests);
    assert_eq!(served.stop().len(), 1);
}

#[test]
fn driver_is_served_while_a_backend_floods_its_channel() {
    let (served, socket) = serve(false, &[Behaviour::Floods]);
    let (mut front, requests) = front_with_requests(socket);
    wait_for_notice(&requests);
    let begun = Instant::now();
    let mut token = 0;
    while token < 50 || !served.seen.lock().unwrap().was_full {
        push(&mut front, 0, token % 8);
        assert_eq!(pop(&mut front, 0), (token % 8, 1));
        token += 1;
        assert!(begun.elapsed() < PATIENCE, "the shield reads all of a flood");
    }
    wait_for_notice(&requests);
    assert_eq!(served.stop(), [""; 0]);
}

#[test]
fn other_request_of_a_backend_is_refused_by_its_name() {
    let cases: [(&'static [Behaviour], _); 3] = [
        (&[Behaviour::Asks(1)], "IOTLB_MSG"),
        (&[Behaviour::Asks(9)], "SHMEM_MAP"),
        (&[Behaviour::Asks(99)], "request 99"),
    ];
    for (behaviours, name) in cases {
        let (served, socket) = serve(false, behaviours);
        let (front, _requests) = front_with_requests(socket);
        front.ask(number::GET_VRING_BASE, &state(0, 0)).unwrap_err();
        let faults = served.ended();
        assert!(faults[0].starts_with("the backend: "), "{faults:?}");
        assert!(faults[0].contains(name), "{faults:?}");
    }
}

#[test]
fn next_shield_serves_what_is_in_the_log() {
    let (served, socket) = serve(false, &[Behaviour::Silent]);
    let mut front = front(socket);
    front.set_up().unwrap();
    (0..5).for_each(|token| push(&mut front, 0, token));
    served.wait_for_taken(5);
    served.stop();
    front.disconnect();
    let (served, socket) = serve(false, &[Behaviour::Honest]);
    front.attach(socket).unwrap();
    front.set_up().unwrap();
    for token in 0..5 {
        assert_eq!(pop(&mut front, 0), (token, 1));
    }
    assert_eq!(served.stop(), [""; 0]);
}

#[test]
fn full_and_blocking_eventfd_of_the_driver_does_not_stop_the_shield() {
    let (served, socket) = serve(false, &[Behaviour::Honest]);
    let mut front = front(socket);
    front.set_up().unwrap();
    let call = front.vrings[0].call.try_clone().unwrap();
    // A shield interrupts a driver that may have missed something. The counter has room then for the test.
    let _ = rustix::io::read(&call, &mut [0; 8]);
    rustix::fs::fcntl_setfl(&call, rustix::fs::OFlags::empty()).unwrap();
    rustix::io::write(&call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    // Nobody reads the counter.
    for token in 0..20 {
        push(&mut front, 0, token % 8);
        let begun = Instant::now();
        while front.vrings[0].driver.pop().unwrap().is_none() {
            assert!(begun.elapsed() < PATIENCE, "the shield is blocked");
            std::thread::sleep(Duration::from_micros(100));
        }
    }
    push(&mut front, 1, 0);
    assert_eq!(pop(&mut front, 1), (0, 1));
    assert_eq!(served.stop(), [""; 0]);
}
