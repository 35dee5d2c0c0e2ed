use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use ringfence_sys::descriptors::{identity, take_of_stream};
use ringfence_sys::poll::{wait_any, wait_readable};
use ringfence_wire::vhost_user::{
    FILES_MAX, HEADER_LEN, Header, LOG_ALL, MemoryRegion, PROTOCOL_FEATURES, config_changed,
    memory_table, number, protocol_feature as protocol, reply, reply_word, request,
};
use ringfence_wire::virtio::feature;
use rustix::event::{EventfdFlags, PollFd, eventfd};

use super::end::HALF_MAX;
use super::notices::{INTERVAL, REQUESTS_MAX};
use super::table::{Decision, REQUESTS};
use super::*;
use crate::testing::{memfd, send_with, state, words};

const SECOND: Duration = Duration::from_secs(60);
const POOL: u64 = 16 << 20;
const RAM: u64 = 64 << 20;
/// First address of each region, in both address spaces: memory of the machine, the pool, and a pool of another device.
const RAM_AT: u64 = 0;
const POOL_AT: u64 = 1 << 32;
const OTHER_AT: u64 = 1 << 33;
/// Protocol features of a backend like qemu-storage-daemon.
const BACKEND: u64 = protocol::MULTIQUEUE
    | protocol::REPLY_ACK
    | protocol::BACKEND_REQ
    | protocol::CONFIG
    | protocol::INFLIGHT
    | protocol::CONFIGURE_MEM_SLOTS;
/// Protocol features that a proxy does not pass: logs, page faults, descriptors of the backend, notifiers, sockets.
const UNSAFE: u64 = 1 << 1 | 1 << 7 | 1 << 8 | 1 << 10 | 1 << 11 | 1 << 14 | 1 << 17 | 1 << 19;

/// Relay with both peers.
struct Bench {
    relay: Relay,
    front: UnixStream,
    back: UnixStream,
}

/// Files that a machine can hand over.
struct Machine {
    pool: OwnedFd,
    other: OwnedFd,
    ram: OwnedFd,
    event: OwnedFd,
}

impl Machine {
    fn new() -> Machine {
        Machine {
            pool: marked("disk", POOL),
            other: marked("card", POOL),
            ram: memfd(RAM).unwrap(),
            event: eventfd(0, EventfdFlags::CLOEXEC).unwrap(),
        }
    }

    /// Returns the files of a memory table with memory of the machine, and both pools.
    fn all(&self) -> [BorrowedFd<'_>; 3] {
        [self.ram.as_fd(), self.pool.as_fd(), self.other.as_fd()]
    }
}

fn marked(name: &str, bytes: u64) -> OwnedFd {
    let file = memfd(bytes).unwrap();
    rustix::io::pwrite(&file, format!("ringfence-pool 1 {name}").as_bytes(), 0).unwrap();
    file
}

fn region(start: u64, len: u64) -> MemoryRegion {
    MemoryRegion { guest: start, len, user: start, offset: 0 }
}

fn all_regions() -> [MemoryRegion; 3] {
    [region(RAM_AT, RAM), region(POOL_AT, POOL), region(OTHER_AT, POOL)]
}

fn named() -> PoolChoice {
    PoolChoice::named("disk").unwrap()
}

/// Message that a peer receives.
#[derive(Debug)]
struct Got {
    number: u32,
    needs_reply: bool,
    payload: Vec<u8>,
    files: Vec<OwnedFd>,
}

/// Receives the next message of a proxy.
fn get(mut socket: &UnixStream, is_answer: bool) -> io::Result<Got> {
    assert!(wait_readable(socket, Some(SECOND))?, "no message");
    let mut head = [0; HEADER_LEN];
    let received = take_of_stream(socket, &mut head, FILES_MAX).map_err(io::Error::other)?;
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let header = if is_answer { Header::parse_answer(&head) } else { Header::parse(&head) };
    let Header { request: number, needs_reply, len } = header.map_err(io::Error::other)?;
    let mut payload = vec![0; len];
    socket.read_exact(&mut payload)?;
    Ok(Got { number, needs_reply, payload, files: received.descriptors.into_vec() })
}

impl Bench {
    fn new(choice: PoolChoice) -> Bench {
        let pair = || UnixStream::pair().unwrap();
        let ((front, frontend), (back, backend), (own, spare)) = (pair(), pair(), pair());
        let channel = [own.into(), spare.into()];
        let peers = Peers { frontend: frontend.into(), backend: backend.into(), channel };
        Bench { relay: Relay::new(choice, peers).unwrap(), front, back }
    }

    /// Creates a relay of which both peers have negotiated what the backend has.
    fn negotiated(choice: PoolChoice, backend: u64) -> Bench {
        let mut bench = Bench::new(choice);
        let features = bench.ask(number::GET_FEATURES, PROTOCOL_FEATURES | LOG_ALL | 3);
        assert_eq!(features & PROTOCOL_FEATURES, PROTOCOL_FEATURES);
        let offered = bench.ask(number::GET_PROTOCOL_FEATURES, backend);
        bench.tell(number::SET_PROTOCOL_FEATURES, &words(&[offered]), &[]);
        bench
    }

    /// Lets the relay work as long as there is work.
    fn round_at(&mut self, now: Instant) -> Result<Outcome, Broken> {
        let mut events = Vec::new();
        for _ in 0..4 {
            let mut waits = self.relay.waits();
            wait_any(&mut waits, Some(Instant::now())).unwrap();
            events.extend(waits.iter().map(PollFd::revents));
            match self.relay.serve(&events, now)? {
                Outcome::Connected => events.clear(),
                gone @ Outcome::Gone(_) => return Ok(gone),
            }
        }
        Ok(Outcome::Connected)
    }

    fn round(&mut self) -> Result<Outcome, Broken> {
        self.round_at(Instant::now())
    }

    /// Sends a request of the frontend, and lets the relay work.
    fn send(
        &mut self,
        number: u32,
        needs_reply: bool,
        payload: &[u8],
        files: &[BorrowedFd<'_>],
    ) -> Result<Outcome, Broken> {
        send_with(&self.front, &request(number, needs_reply, payload), files).unwrap();
        self.round()
    }

    /// Sends a request that passes. Returns it as the backend receives it.
    fn tell(&mut self, number: u32, payload: &[u8], files: &[BorrowedFd<'_>]) -> Got {
        assert_eq!(self.send(number, false, payload, files).unwrap(), Outcome::Connected);
        get(&self.back, false).unwrap()
    }

    /// Answers as the backend.
    fn answer(&mut self, bytes: &[u8]) -> Result<Outcome, Broken> {
        (&self.back).write_all(bytes).unwrap();
        self.round()
    }

    /// Asks for a number. The backend answers `answer`; returns what the frontend receives.
    fn ask(&mut self, number: u32, answer: u64) -> u64 {
        assert_eq!(self.tell(number, &[], &[]).number, number);
        self.answer(&reply_word(number, answer)).unwrap();
        self.number(number)
    }

    /// Receives an answer that is a number.
    fn number(&self, number: u32) -> u64 {
        let got = get(&self.front, true).unwrap();
        assert_eq!((got.number, got.payload.len()), (number, 8));
        u64::from_ne_bytes(got.payload.try_into().unwrap())
    }

    /// Sends a request that must be refused. Returns the fault as text.
    fn refused(&mut self, number: u32, payload: &[u8], files: &[BorrowedFd<'_>]) -> String {
        let broken = self.send(number, false, payload, files).unwrap_err();
        let nothing = wait_readable(&self.back, Some(Duration::ZERO)).unwrap();
        assert!(!nothing, "request {number} reached the backend");
        broken.to_string()
    }

    fn is_silent(socket: &UnixStream) -> bool {
        !wait_readable(socket, Some(Duration::ZERO)).unwrap()
    }
}

fn same(one: impl AsFd, other: impl AsFd) -> bool {
    identity(one).unwrap() == identity(other).unwrap()
}

/// Returns a file, and a reader that sees the end when every copy of it is closed.
fn closing() -> (OwnedFd, OwnedFd) {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    (writer, reader)
}

fn is_closed(reader: OwnedFd) -> bool {
    wait_readable(&reader, Some(SECOND)).unwrap()
        && rustix::io::read(&reader, &mut [0; 1]).unwrap() == 0
}

#[test]
fn features_that_qemu_needs_are_offered_and_unsafe_ones_are_not() {
    let mut bench = Bench::new(named());
    let features = bench.ask(number::GET_FEATURES, PROTOCOL_FEATURES | LOG_ALL | 3);
    assert_eq!(features, PROTOCOL_FEATURES | feature::ACCESS_PLATFORM | 3);
    let offered = bench.ask(number::GET_PROTOCOL_FEATURES, protocol::CONFIG | UNSAFE);
    assert_eq!(offered, protocol::CONFIG | protocol::REPLY_ACK | protocol::BACKEND_REQ);
    // The backend gets what it has.
    let told = bench.tell(number::SET_PROTOCOL_FEATURES, &words(&[offered]), &[]);
    assert_eq!(told.payload, words(&[protocol::CONFIG]));
    let told = bench.tell(number::SET_FEATURES, &words(&[PROTOCOL_FEATURES | 1]), &[]);
    assert_eq!(told.payload, words(&[PROTOCOL_FEATURES | 1]));
}

#[test]
fn features_that_were_not_offered_are_refused_by_name() {
    for (number, features, text) in [
        (number::SET_FEATURES, feature::ACCESS_PLATFORM, "ACCESS_PLATFORM"),
        (number::SET_FEATURES, LOG_ALL, "0x4000000 were not offered"),
        (number::SET_PROTOCOL_FEATURES, 1 << 8, "0x100 were not offered"),
    ] {
        let mut bench = Bench::negotiated(named(), BACKEND);
        let refused = bench.refused(number, &words(&[features]), &[]);
        assert!(refused.contains(text) && refused.contains("hypervisor"), "{refused}");
    }
}

#[test]
fn backend_without_protocol_features_is_refused() {
    let mut bench = Bench::new(named());
    bench.tell(number::GET_FEATURES, &[], &[]);
    let refused = bench.answer(&reply_word(number::GET_FEATURES, 3)).unwrap_err().to_string();
    assert!(refused.contains("bit 30"), "{refused}");
}

#[test]
fn memory_table_reaches_the_backend_with_the_pool_alone() {
    let machine = Machine::new();
    let mut bench = Bench::negotiated(named(), BACKEND);
    let told = bench.tell(number::SET_MEM_TABLE, &memory_table(&all_regions()), &machine.all());
    assert_eq!(told.payload, memory_table(&[region(POOL_AT, POOL)]));
    assert_eq!(told.files.len(), 1);
    assert!(same(&told.files[0], &machine.pool));
    let (lent, withheld) = bench.relay.memory();
    assert_eq!(lent.map(|lent| (lent.bytes, lent.is_pool)), Some((POOL, true)));
    assert_eq!(withheld.bytes, RAM + POOL);
}

#[test]
fn descriptor_of_other_memory_is_closed() {
    let machine = Machine::new();
    let mut bench = Bench::negotiated(named(), BACKEND);
    let (file, reader) = closing();
    let table = memory_table(&[region(POOL_AT, POOL), region(RAM_AT, RAM)]);
    let told = bench.tell(number::SET_MEM_TABLE, &table, &[machine.pool.as_fd(), file.as_fd()]);
    assert_eq!(told.files.len(), 1);
    drop(file);
    assert!(is_closed(reader));
}

#[test]
fn descriptors_of_messages_that_carry_none_are_closed() {
    let machine = Machine::new();
    let mut bench = Bench::negotiated(named(), BACKEND);
    let (file, reader) = closing();
    let files = [machine.ram.as_fd(), file.as_fd()];
    assert_eq!(bench.tell(number::SET_OWNER, &[], &files).files.len(), 0);
    assert_eq!(bench.tell(number::SET_VRING_NUM, &state(0, 64), &files).files.len(), 0);
    // A vring that is to be polled has no eventfd.
    assert_eq!(bench.tell(number::SET_VRING_KICK, &words(&[1 << 8]), &files).files.len(), 0);
    drop(file);
    assert!(is_closed(reader));
}

#[test]
fn pool_is_chosen_by_its_name_its_mark_or_its_size() {
    let machine = Machine::new();
    let (unnamed, unmarked) = (marked("", POOL), memfd(POOL).unwrap());
    let ram = (region(RAM_AT, RAM), machine.ram.as_fd());
    let pool = |file| (region(POOL_AT, POOL), file);
    for (choice, file, is_pool) in [
        (named(), &machine.pool, true),
        (named(), &machine.other, false),
        (named(), &unnamed, false),
        (PoolChoice::Marked, &machine.other, true),
        (PoolChoice::Marked, &unnamed, true),
        (PoolChoice::Marked, &unmarked, false),
        (PoolChoice::Size(POOL), &unmarked, true),
        (PoolChoice::Size(POOL - 1), &unmarked, false),
        (PoolChoice::Size(POOL + 1), &unmarked, false),
    ] {
        let mut bench = Bench::negotiated(choice.clone(), BACKEND);
        let (regions, files): (Vec<_>, Vec<_>) = [ram, pool(file.as_fd())].into_iter().unzip();
        let table = memory_table(&regions);
        if is_pool {
            let told = bench.tell(number::SET_MEM_TABLE, &table, &files);
            assert!(same(&told.files[0], file), "{choice}");
        } else {
            let refused = bench.refused(number::SET_MEM_TABLE, &table, &files);
            for word in [&choice.to_string(), "80 MiB", "ivshmem-plain"] {
                assert!(refused.contains(word), "{choice}: {refused}");
            }
        }
    }
}

#[test]
fn part_of_a_file_and_a_file_that_is_no_memory_are_no_pools() {
    let machine = Machine::new();
    let part = MemoryRegion { len: POOL / 2, ..region(POOL_AT, POOL) };
    let behind = MemoryRegion { offset: 4096, ..region(POOL_AT, POOL - 4096) };
    for part in [part, behind] {
        let mut bench = Bench::negotiated(named(), BACKEND);
        let table = memory_table(&[part]);
        bench.refused(number::SET_MEM_TABLE, &table, &[machine.pool.as_fd()]);
    }
    // A read of a file that a server serves could block.
    let (reader, _writer) = UnixStream::pair().unwrap();
    let mut bench = Bench::negotiated(PoolChoice::Size(0), BACKEND);
    bench.refused(number::SET_MEM_TABLE, &memory_table(&[region(0, 0)]), &[reader.as_fd()]);
}

#[test]
fn two_files_that_could_be_the_pool_are_refused() {
    let machine = Machine::new();
    let twin = marked("disk", POOL);
    for (choice, second) in [
        (PoolChoice::Marked, &machine.other),
        (PoolChoice::Size(POOL), &machine.other),
        (named(), &twin),
    ] {
        let regions = [region(POOL_AT, POOL), region(OTHER_AT, POOL)];
        let files = [machine.pool.as_fd(), second.as_fd()];
        let mut bench = Bench::negotiated(choice.clone(), BACKEND);
        let refused = bench.refused(number::SET_MEM_TABLE, &memory_table(&regions), &files);
        assert!(refused.contains("--pool NAME"), "{refused}");
        // Also one after the other.
        let mut bench = Bench::negotiated(choice, BACKEND);
        bench.tell(37, &memory_table(&regions[..1]), &files[..1]);
        let refused = bench.refused(37, &memory_table(&regions[1..]), &files[1..]);
        assert!(refused.contains("--pool NAME"), "{refused}");
    }
}

#[test]
fn table_needs_one_descriptor_for_each_region() {
    let machine = Machine::new();
    for files in [&machine.all()[..2], &[], &[machine.all(), machine.all()].concat()] {
        let mut bench = Bench::negotiated(named(), BACKEND);
        let table = memory_table(&all_regions());
        let refused = bench.refused(number::SET_MEM_TABLE, &table, files);
        assert!(refused.contains("in place of 3"), "{refused}");
    }
}

#[test]
fn added_region_passes_for_the_pool_alone_and_others_are_acknowledged() {
    let machine = Machine::new();
    let mut bench = Bench::negotiated(named(), BACKEND);
    let [ram, pool, _] = all_regions().map(|region| memory_table(&[region]));
    for (number, files) in [(37, vec![machine.ram.as_fd()]), (38, vec![])] {
        bench.send(number, true, &ram, &files).unwrap();
        assert_eq!(bench.number(number), 0);
        assert!(Bench::is_silent(&bench.back));
    }
    for (number, files, passed) in [(37, vec![machine.pool.as_fd()], 1), (38, vec![], 0)] {
        let told = bench.tell(number, &pool, &files);
        assert_eq!((told.number, &told.payload, told.files.len()), (number, &pool, passed));
    }
    let refused = bench.refused(38, &pool, &[]);
    assert!(refused.contains("REM_MEM_REG"), "{refused}");
}

#[test]
fn acknowledgement_of_the_backend_passes_and_a_missing_one_is_made_behind_a_question() {
    let machine = Machine::new();
    let table = memory_table(&all_regions());
    let mut bench = Bench::negotiated(named(), BACKEND);
    bench.send(number::SET_MEM_TABLE, true, &table, &machine.all()).unwrap();
    assert!(get(&bench.back, false).unwrap().needs_reply);
    bench.answer(&reply_word(number::SET_MEM_TABLE, 7)).unwrap();
    assert_eq!(bench.number(number::SET_MEM_TABLE), 7, "the backend has refused it");

    let mut bench = Bench::negotiated(named(), BACKEND & !protocol::REPLY_ACK);
    bench.send(number::SET_MEM_TABLE, true, &table, &machine.all()).unwrap();
    assert!(!get(&bench.back, false).unwrap().needs_reply);
    assert_eq!(get(&bench.back, false).unwrap().number, number::GET_FEATURES);
    assert!(Bench::is_silent(&bench.front), "the backend is not there yet");
    bench.answer(&reply_word(number::GET_FEATURES, 3)).unwrap();
    assert_eq!(bench.number(number::SET_MEM_TABLE), 0);
    assert!(Bench::is_silent(&bench.front));
}

#[test]
fn each_message_that_is_not_passed_is_refused_by_its_name() {
    let machine = Machine::new();
    let mut count = 0;
    for row in REQUESTS {
        let Decision::Refuse(why) = row.decision else { continue };
        for payload in [&[][..], &[0; 16]] {
            let mut bench = Bench::negotiated(named(), u64::MAX);
            let refused = bench.refused(row.number, payload, &[machine.ram.as_fd()]);
            assert!(refused.contains(row.name) && refused.contains(why), "{refused}");
        }
        count += 1;
    }
    assert_eq!(count, 14);
    for number in [0, 45, 99, u32::MAX] {
        let refused = Bench::negotiated(named(), u64::MAX).refused(number, &[], &[]);
        assert!(refused.contains(&format!("request {number} is refused")), "{refused}");
    }
}

#[test]
fn message_of_another_length_or_of_a_feature_that_was_not_negotiated_is_refused() {
    let mut bench = Bench::negotiated(named(), BACKEND);
    let refused = bench.refused(number::SET_VRING_NUM, &[0; 9], &[]);
    assert!(refused.contains("SET_VRING_NUM of 9 bytes"), "{refused}");
    let mut bench = Bench::negotiated(named(), protocol::REPLY_ACK);
    let refused = bench.refused(number::GET_CONFIG, &[0; 12], &[]);
    assert!(refused.contains("GET_CONFIG belongs"), "{refused}");
}

#[test]
fn messages_that_wait_pass_each_with_its_own_descriptors() {
    let machine = Machine::new();
    let mut bench = Bench::negotiated(named(), BACKEND);
    for (number, payload) in [(number::SET_OWNER, vec![]), (number::SET_VRING_NUM, state(0, 64))] {
        send_with(&bench.front, &request(number, false, &payload), &[]).unwrap();
    }
    let kick = request(number::SET_VRING_KICK, false, &words(&[0]));
    send_with(&bench.front, &kick, &[machine.event.as_fd()]).unwrap();
    let poll = request(number::SET_VRING_CALL, false, &words(&[1 << 8]));
    send_with(&bench.front, &poll, &[]).unwrap();
    bench.round().unwrap();
    for files in [0, 0, 1, 0] {
        let mut head = [0; HEADER_LEN];
        let found = take_of_stream(&bench.back, &mut head, FILES_MAX).unwrap();
        assert_eq!(found.descriptors.len(), files);
        let len = Header::parse(&head).unwrap().len;
        (&bench.back).read_exact(&mut vec![0; len]).unwrap();
    }
}

#[test]
fn eventfds_pass_and_memory_in_their_place_is_refused() {
    let machine = Machine::new();
    for number in [number::SET_VRING_KICK, number::SET_VRING_CALL, number::SET_VRING_ERR] {
        let mut bench = Bench::negotiated(named(), BACKEND);
        let told = bench.tell(number, &words(&[0]), &[machine.event.as_fd()]);
        assert_eq!(told.files.len(), 1);
        for files in [&[machine.ram.as_fd()][..], &[], &machine.all()] {
            Bench::negotiated(named(), BACKEND).refused(number, &words(&[0]), files);
        }
    }
}

#[test]
fn log_of_the_backend_passes_both_ways_and_memory_in_its_place_is_refused() {
    let machine = Machine::new();
    let log = memfd(4096).unwrap();
    let description = [words(&[4096, 0]), vec![0; 8]].concat();
    let mut bench = Bench::negotiated(named(), BACKEND);
    bench.tell(number::GET_INFLIGHT_FD, &description, &[]);
    let answer = reply(number::GET_INFLIGHT_FD, &description);
    send_with(&bench.back, &answer, &[log.as_fd()]).unwrap();
    bench.round().unwrap();
    let got = get(&bench.front, true).unwrap();
    assert!(got.payload == description && same(&got.files[0], &log));
    let told = bench.tell(number::SET_INFLIGHT_FD, &description, &[log.as_fd()]);
    assert!(same(&told.files[0], &log));

    let mut bench = Bench::negotiated(named(), BACKEND);
    let refused = bench.refused(number::SET_INFLIGHT_FD, &description, &[machine.ram.as_fd()]);
    assert!(refused.contains("memory of the guest"), "{refused}");
    // A small file that is memory of the machine.
    let mut bench = Bench::negotiated(named(), BACKEND);
    bench.send(37, true, &memory_table(&[region(RAM_AT, 4096)]), &[log.as_fd()]).unwrap();
    assert_eq!(bench.number(37), 0);
    bench.refused(number::SET_INFLIGHT_FD, &description, &[log.as_fd()]);
    // A backend that answers with a file of another kind.
    let mut bench = Bench::negotiated(named(), BACKEND);
    bench.tell(number::GET_INFLIGHT_FD, &description, &[]);
    send_with(&bench.back, &answer, &[bench.back.as_fd()]).unwrap();
    let broken = bench.round().unwrap_err();
    assert_eq!(broken.party, Party::Backend);
}

#[test]
fn vring_outside_of_the_pool_or_with_a_log_is_refused() {
    let machine = Machine::new();
    let address = |flags: u32, tables: [u64; 3]| {
        let [descriptors, used, available] = tables;
        [state(1, flags), words(&[descriptors, used, available, 0])].concat()
    };
    let inside = [POOL_AT, POOL_AT + 4096, POOL_AT + POOL - 1];
    let set_up = || {
        let mut bench = Bench::negotiated(named(), BACKEND);
        bench.tell(number::SET_MEM_TABLE, &memory_table(&all_regions()), &machine.all());
        bench
    };
    let told = set_up().tell(number::SET_VRING_ADDR, &address(0, inside), &[]);
    assert_eq!(told.payload, address(0, inside));
    for (at, outside) in [(0, POOL_AT - 1), (1, POOL_AT + POOL), (2, RAM_AT), (0, OTHER_AT)] {
        let mut tables = inside;
        tables[at] = outside;
        let refused = set_up().refused(number::SET_VRING_ADDR, &address(0, tables), &[]);
        assert!(refused.contains("load the module ringfence-lent-pool"), "{refused}");
    }
    let refused = set_up().refused(number::SET_VRING_ADDR, &address(1, inside), &[]);
    assert!(refused.contains("log"), "{refused}");
}

#[test]
fn socket_for_requests_stays_with_the_proxy_if_the_backend_knows_none() {
    let (mine, given) = UnixStream::pair().unwrap();
    let mut bench = Bench::negotiated(named(), BACKEND & !protocol::BACKEND_REQ);
    bench.send(number::SET_BACKEND_REQ_FD, true, &[], &[given.as_fd()]).unwrap();
    assert_eq!(bench.number(number::SET_BACKEND_REQ_FD), 0);
    assert!(Bench::is_silent(&bench.back));
    drop(given);
    assert!(Bench::is_silent(&mine), "it stays open");
    let refused = bench.refused(number::SET_BACKEND_REQ_FD, &[], &[mine.as_fd()]);
    assert!(refused.contains("a second time"), "{refused}");
    bench.relay.close();
    assert_eq!((&mine).read(&mut [0]).unwrap(), 0);
    let machine = Machine::new();
    let mut bench = Bench::negotiated(named(), BACKEND);
    bench.refused(number::SET_BACKEND_REQ_FD, &[], &[machine.ram.as_fd()]);
}

/// Creates a relay with a channel. Returns the ends of the frontend and of the backend.
fn with_channel() -> (Bench, UnixStream, UnixStream) {
    let (mine, given) = UnixStream::pair().unwrap();
    let mut bench = Bench::negotiated(named(), BACKEND);
    let told = bench.tell(number::SET_BACKEND_REQ_FD, &[], &[given.as_fd()]);
    let [theirs] = <[OwnedFd; 1]>::try_from(told.files).unwrap();
    assert!(!same(&theirs, &given), "the backend got the socket of the frontend");
    (bench, mine, theirs.into())
}

#[test]
fn change_of_the_configuration_is_acknowledged_and_told_to_the_frontend() {
    let (mut bench, front, back) = with_channel();
    (&back).write_all(&request(2, true, &[])).unwrap();
    bench.round().unwrap();
    assert_eq!(get(&back, true).unwrap().payload, words(&[0]));
    let got = get(&front, false).unwrap();
    assert_eq!((got.number, got.needs_reply, got.payload.len()), (2, false, 0));
    // The end of a channel is not that of the connection.
    drop(front);
    assert_eq!(bench.round().unwrap(), Outcome::Connected);
    assert_eq!((&back).read(&mut [0]).unwrap(), 0);
}

#[test]
fn backend_that_floods_its_channel_causes_one_notice_in_an_interval() {
    let (mut bench, front, back) = with_channel();
    (0..2 * REQUESTS_MAX).for_each(|_| (&back).write_all(&config_changed()).unwrap());
    drop(back);
    let begun = Instant::now();
    for interval in 0..2 {
        for now in [begun + interval * INTERVAL, begun + interval * INTERVAL + INTERVAL / 2] {
            assert_eq!(bench.round_at(now).unwrap(), Outcome::Connected);
            assert_eq!(get_if_there(&front), (now == begun + interval * INTERVAL).then_some(2));
        }
    }
    // All requests were read, so the end of the channel is seen. A thread closes the proxy's copy of the backend's end.
    while Bench::is_silent(&front) {
        bench.round_at(begun + 2 * INTERVAL).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!((&front).read(&mut [0]).unwrap(), 0);
}

/// Returns the number of a message that is there.
fn get_if_there(socket: &UnixStream) -> Option<u32> {
    (!Bench::is_silent(socket)).then(|| get(socket, false).unwrap().number)
}

#[test]
fn other_requests_and_answers_on_the_channel_are_refused() {
    let machine = Machine::new();
    for (number, name) in [
        (1, "IOTLB_MSG"),
        (3, "VRING_HOST_NOTIFIER_MSG"),
        (4, "VRING_CALL"),
        (8, "SHARED_OBJECT_LOOKUP"),
        (9, "SHMEM_MAP"),
        (10, "SHMEM_UNMAP"),
        (99, "request 99 of the backend"),
    ] {
        for payload in [&[][..], &[0; 32]] {
            let (mut bench, front, back) = with_channel();
            let bytes = request(number, true, payload);
            send_with(&back, &bytes, &[machine.ram.as_fd()]).unwrap();
            let broken = bench.round().unwrap_err();
            assert_eq!(broken.party, Party::Backend);
            assert!(broken.to_string().contains(name), "{broken}");
            assert!(Bench::is_silent(&front));
        }
    }
    let (mut bench, front, _back) = with_channel();
    (&front).write_all(&reply_word(2, 0)).unwrap();
    let broken = bench.round().unwrap_err();
    assert!(matches!(broken.fault, ProxyFault::Unsolicited), "{broken}");
}

#[test]
fn answer_to_another_question_or_to_none_ends_the_connection() {
    for answer in [
        reply_word(number::GET_QUEUE_NUM, 1),
        reply(number::GET_FEATURES, &[0; 9]),
        reply(number::GET_FEATURES, &[]),
    ] {
        let mut bench = Bench::new(named());
        bench.tell(number::GET_FEATURES, &[], &[]);
        let broken = bench.answer(&answer).unwrap_err();
        assert!(matches!(broken.fault, ProxyFault::Answer { .. }), "{broken}");
        assert_eq!(broken.party, Party::Backend);
    }
    let mut bench = Bench::new(named());
    bench.tell(number::SET_OWNER, &[], &[]);
    let broken = bench.answer(&reply_word(number::SET_OWNER, 0)).unwrap_err();
    assert!(matches!(broken.fault, ProxyFault::Unsolicited), "{broken}");
    let broken = Bench::new(named()).answer(&request(1, false, &[])).unwrap_err();
    assert!(matches!(broken.fault, ProxyFault::Message(_)), "{broken}");
}

#[test]
fn message_in_pieces_passes_and_half_of_one_ends_the_connection_in_time() {
    let mut bench = Bench::negotiated(named(), BACKEND);
    let bytes = request(number::SET_VRING_NUM, false, &state(0, 64));
    for piece in bytes.chunks(5) {
        assert!(Bench::is_silent(&bench.back));
        (&bench.front).write_all(piece).unwrap();
        bench.round().unwrap();
    }
    assert_eq!(get(&bench.back, false).unwrap().payload, state(0, 64));
    assert_eq!(bench.relay.deadline(), None);
    (&bench.front).write_all(&bytes[..15]).unwrap();
    bench.round().unwrap();
    assert!(bench.relay.deadline().is_some_and(|deadline| deadline > Instant::now()));
    let broken = bench.round_at(Instant::now() + HALF_MAX).unwrap_err();
    assert!(broken.to_string().contains("15 bytes of a message of 20"), "{broken}");
}

#[test]
fn message_too_long_or_with_late_or_too_many_descriptors_is_refused() {
    let machine = Machine::new();
    let mut bench = Bench::new(named());
    let mut bytes = request(number::SET_OWNER, false, &[]);
    bytes[8..12].copy_from_slice(&u32::MAX.to_ne_bytes());
    send_with(&bench.front, &bytes, &[]).unwrap();
    assert!(matches!(bench.round().unwrap_err().fault, ProxyFault::Message(_)));

    let mut bench = Bench::new(named());
    let bytes = request(number::SET_VRING_NUM, false, &state(0, 64));
    send_with(&bench.front, &bytes[..12], &[]).unwrap();
    send_with(&bench.front, &bytes[12..], &[machine.ram.as_fd()]).unwrap();
    assert!(matches!(bench.round().unwrap_err().fault, ProxyFault::Receive(_)));

    let mut bench = Bench::new(named());
    let many = vec![machine.ram.as_fd(); FILES_MAX + 1];
    send_with(&bench.front, &request(number::SET_OWNER, false, &[]), &many).unwrap();
    assert!(matches!(bench.round().unwrap_err().fault, ProxyFault::Receive(_)));
}

#[test]
fn flood_waits_in_the_socket_of_the_sender_while_the_other_peer_does_not_read() {
    let mut bench = Bench::negotiated(named(), BACKEND);
    bench.front.set_nonblocking(true).unwrap();
    let bytes = request(number::SET_VRING_NUM, false, &state(0, 64));
    let mut sent = 0;
    loop {
        match (&bench.front).write(&bytes) {
            Ok(written) => {
                assert_eq!(written, bytes.len());
                sent += 1;
            }
            Err(_) if !bench.front_has_room() => break,
            Err(_) => {}
        }
        assert!(sent < 1_000_000, "the proxy takes everything");
        bench.round().unwrap();
    }
    // All of it arrives once the backend reads.
    for _ in 0..sent {
        if Bench::is_silent(&bench.back) {
            bench.round().unwrap();
        }
        assert_eq!(get(&bench.back, false).unwrap().payload, state(0, 64));
    }
    bench.round().unwrap();
    assert!(Bench::is_silent(&bench.back));
}

impl Bench {
    /// Returns `true` if the frontend can send more after the relay has worked.
    fn front_has_room(&mut self) -> bool {
        self.round().unwrap();
        let mut waits = [PollFd::new(&self.front, rustix::event::PollFlags::OUT)];
        wait_any(&mut waits, Some(Instant::now())).unwrap() > 0
    }
}

#[test]
fn end_of_a_peer_is_noticed_also_while_an_answer_is_awaited() {
    let mut bench = Bench::new(named());
    bench.tell(number::GET_FEATURES, &[], &[]);
    let Bench { mut relay, front, back } = bench;
    drop(front);
    let events: Vec<_> = {
        let mut waits = relay.waits();
        assert!(wait_any(&mut waits, Some(Instant::now() + SECOND)).unwrap() > 0);
        waits.iter().map(PollFd::revents).collect()
    };
    assert_eq!(relay.serve(&events, Instant::now()).unwrap(), Outcome::Gone(Party::Frontend));
    relay.close();
    assert_eq!((&back).read(&mut [0]).unwrap(), 0);

    let Bench { mut relay, front: _front, back } = Bench::new(named());
    drop(back);
    assert_eq!(relay.serve(&[], Instant::now()).unwrap(), Outcome::Gone(Party::Backend));
}

proptest! {
    #[test]
    fn arbitrary_messages_bring_no_memory_but_the_pool_to_the_backend(
        data in proptest::collection::vec(any::<u8>(), 0..800),
    ) {
        fuzzing::pool_proxy(&data);
    }
}
