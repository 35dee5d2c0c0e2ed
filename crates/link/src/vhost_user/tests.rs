use std::io::{IoSlice, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};

use proptest::prelude::*;
use ringfence_frame::Port;
use ringfence_memory::{DeviceAccess, DeviceRange, LentSlice, Mapping, Protection};
use ringfence_offload::vnet::MODERN_LEN;
use ringfence_offload::{Checksum, Gso, GsoKind, OffloadMeta};
use ringfence_ring::split::{DriverQueue, QueueFeatures, QueuePages};
use ringfence_sys::poll::wait_readable;
use ringfence_uplink::link::{Committed, GuestLink, Slots};
use ringfence_wire::vhost_user::{PROTOCOL_FEATURES, number, request};
use ringfence_wire::virtio::{Descriptor, SplitLayout};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::*;

const SHAPE: FrameShape = FrameShape { frames: 64, long: 16 };
const MTU: u16 = 1500;
/// Entries of each vring.
const SIZE: u16 = 16;
/// Size of the guest's memory in bytes: 1 MiB for the vrings, then buffers of 4 KiB.
const MEMORY: usize = 4 << 20;
const BUFFERS: usize = 1 << 20;
const BUFFER: usize = 4096;
/// Bytes for the tables of a vring.
const AREA: usize = BUFFERS / 8;

/// Vrings of the first queue pair.
const TO_GUEST: usize = to_guest(0);
const FROM_GUEST: usize = from_guest(0);

/// All features of a Linux driver, and none but what it needs.
const ALL: u64 = FEATURES;
const BARE: u64 = feature::VERSION_1 | PROTOCOL_FEATURES;

/// Virtual machine: hypervisor and driver at once.
struct Machine {
    socket: UnixStream,
    file: OwnedFd,
    memory: LentSlice,
    queues: Vec<DriverQueue>,
    kicks: Vec<OwnedFd>,
    calls: Vec<OwnedFd>,
    features: u64,
}

fn link(clients: Clients) -> VhostUserLink {
    link_with(clients, VhostUserOptions::default())
}

fn link_with(clients: Clients, options: VhostUserOptions) -> VhostUserLink {
    VhostUserLink::new(clients, MTU, SHAPE, Arc::default(), options).unwrap()
}

/// Sends bytes with files.
fn send(socket: &UnixStream, bytes: &[u8], files: &[&OwnedFd]) {
    let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(files.is_empty() || control.push(SendAncillaryMessage::ScmRights(&files)));
    let sent =
        rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
    // The link may have closed its end.
    assert!(sent == Ok(bytes.len()) || sent == Err(Errno::PIPE), "{sent:?}");
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn state(index: u32, value: u32) -> Vec<u8> {
    [index.to_ne_bytes(), value.to_ne_bytes()].concat()
}

impl Machine {
    fn new(socket: UnixStream, features: u64) -> Machine {
        Machine::with_pairs(socket, features, 1)
    }

    fn with_pairs(socket: UnixStream, features: u64, pairs: usize) -> Machine {
        let file = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, MEMORY as u64).unwrap();
        let memory = Mapping::new(&file, 0, MEMORY, Protection::ReadWrite).unwrap().lent();
        let layout = SplitLayout::new(SIZE).unwrap();
        let of_queue = QueueFeatures {
            indirect: features & feature::INDIRECT != 0,
            event_idx: features & feature::EVENT_IDX != 0,
            in_order: false,
        };
        let queue = |number| {
            let pages = memory.slice(number * AREA, QueuePages::bytes(layout)).unwrap();
            let mut queue =
                DriverQueue::new(QueuePages::new(&pages, layout).unwrap(), layout, of_queue);
            queue.arm(1).unwrap();
            queue
        };
        let event = |_| eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let queues = (0..2 * pairs).map(queue).collect();
        let [kicks, calls] = [(), ()].map(|()| (0..2 * pairs).map(event).collect());
        Machine { socket, file, memory, queues, kicks, calls, features }
    }

    fn base(&self) -> u64 {
        self.range(0, 1, DeviceAccess::Read).address()
    }

    fn range(&self, offset: usize, len: usize, access: DeviceAccess) -> DeviceRange {
        self.memory.device_range(offset, len, access).unwrap()
    }

    fn send(&self, number: u32, payload: &[u8], files: &[&OwnedFd]) {
        send(&self.socket, &request(number, false, payload), files);
    }

    /// Sends the memory table: one region, whose addresses are those of this process.
    fn send_memory(&self) {
        let table = words(&[1, self.base(), MEMORY as u64, self.base(), 0]);
        self.send(number::SET_MEM_TABLE, &table, &[&self.file]);
    }

    /// Sends what QEMU sends for a vring.
    fn send_vring(&self, index: u32, next: u16) {
        let layout = SplitLayout::new(SIZE).unwrap();
        let place = index as usize;
        let start = self.base() + (place * AREA) as u64;
        let at = |offset: usize| start + offset as u64;
        self.send(number::SET_VRING_NUM, &state(index, SIZE.into()), &[]);
        self.send(number::SET_VRING_BASE, &state(index, next.into()), &[]);
        let tables = [at(0), at(layout.used_flags()), at(layout.avail_flags()), 0];
        let address = [state(index, 0), words(&tables)].concat();
        self.send(number::SET_VRING_ADDR, &address, &[]);
        self.send(number::SET_VRING_KICK, &words(&[index.into()]), &[&self.kicks[place]]);
        self.send(number::SET_VRING_CALL, &words(&[index.into()]), &[&self.calls[place]]);
        self.send(number::SET_VRING_ENABLE, &state(index, 1), &[]);
    }

    fn set_up(&self, link: &mut VhostUserLink) {
        self.send(number::SET_OWNER, &[], &[]);
        self.send(number::SET_FEATURES, &words(&[self.features]), &[]);
        self.send_memory();
        for index in 0..u32::try_from(self.queues.len()).unwrap() {
            self.send_vring(index, 0);
        }
        assert_eq!(receive(link), [[0; 0]; 0]);
        assert!(link.is_connected());
    }

    /// Gives the device buffers for frames: number `first` and the following ones. Returns `true` if it wants a kick.
    fn post(&mut self, buffers: std::ops::Range<usize>) -> bool {
        self.post_on(0, buffers)
    }

    fn post_on(&mut self, pair: usize, buffers: std::ops::Range<usize>) -> bool {
        for buffer in buffers {
            let range = self.range(BUFFERS + buffer * BUFFER, BUFFER, DeviceAccess::Write);
            self.queues[to_guest(pair)].push(&[range], u32::try_from(buffer).unwrap()).unwrap();
        }
        self.queues[to_guest(pair)].publish()
    }

    /// Sends a frame in two descriptors, as Linux does.
    fn transmit(&mut self, header: [u8; MODERN_LEN], frame: &[u8]) -> bool {
        self.transmit_on(0, header, frame)
    }

    fn transmit_on(&mut self, pair: usize, header: [u8; MODERN_LEN], frame: &[u8]) -> bool {
        let at = BUFFERS + 200 * BUFFER;
        self.memory.copy_from(at, &header).unwrap();
        self.memory.copy_from(at + 100, frame).unwrap();
        let ranges = [
            self.range(at, MODERN_LEN, DeviceAccess::Read),
            self.range(at + 100, frame.len(), DeviceAccess::Read),
        ];
        self.queues[from_guest(pair)].push(&ranges, 0).unwrap();
        self.queues[from_guest(pair)].publish()
    }

    /// Takes the next frame, with its virtio-net header.
    fn take(&mut self) -> Option<Vec<u8>> {
        self.take_from(0)
    }

    fn take_from(&mut self, pair: usize) -> Option<Vec<u8>> {
        let mut whole = Vec::new();
        let mut left = 1;
        while left > 0 {
            let used = self.queues[to_guest(pair)].pop().unwrap()?;
            let mut bytes = vec![0; used.len as usize];
            self.memory.copy_to(BUFFERS + used.token as usize * BUFFER, &mut bytes).unwrap();
            if whole.is_empty() {
                left = u16::from_le_bytes([bytes[10], bytes[11]]);
            }
            whole.extend(bytes);
            left -= 1;
        }
        Some(whole)
    }
}

fn pair(features: u64) -> (VhostUserLink, Machine) {
    let (own, socket) = UnixStream::pair().unwrap();
    let mut link = link(Clients::Connected(own.into()));
    let machine = Machine::new(socket, features);
    machine.set_up(&mut link);
    (link, machine)
}

fn frame(len: usize, value: u8) -> Vec<u8> {
    let mut bytes = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x88, 0xb5];
    bytes.resize(len, value);
    bytes
}

/// Runs a round. Returns the frames of the guest.
fn try_receive(link: &mut VhostUserLink) -> Result<Vec<Vec<u8>>, Fault> {
    let mut batch = Batch::with_capacity(64, 400_000);
    link.transport.has_messages = true;
    link.receive(&mut batch, 64)?;
    let bytes = |frame: ringfence_frame::FrameView<'_>| {
        let mut bytes = vec![0; frame.len()];
        frame.copy_to(&mut bytes);
        bytes
    };
    let frames = batch.iter().map(bytes).collect();
    batch.clear();
    link.complete()?;
    Ok(frames)
}

fn receive(link: &mut VhostUserLink) -> Vec<Vec<u8>> {
    try_receive(link).unwrap()
}

/// Commits frames for the guest, and flushes. Returns the number of those that had room.
fn commit(link: &mut VhostUserLink, frame: &[u8], count: usize) -> usize {
    let mut slots = Slots::new();
    link.reserve(count, frame.len(), &mut slots);
    slots.iter_mut().for_each(|slot| slot[..frame.len()].copy_from_slice(frame));
    let committed = slots.len();
    drop(slots);
    link.commit(&vec![Committed { len: frame.len(), meta: OffloadMeta::PLAIN }; committed]);
    Port::flush(link).unwrap();
    committed
}

#[test]
fn frames_pass_in_both_directions_with_each_set_of_features() {
    let without = |features: u64| ALL & !features;
    for features in [ALL, BARE, without(feature::INDIRECT), without(feature::EVENT_IDX)] {
        let (mut link, mut machine) = pair(features);
        for round in 0..100_u8 {
            let sent = frame(60 + usize::from(round) * 14, round);
            machine.transmit([0; MODERN_LEN], &sent);
            assert_eq!(receive(&mut link), std::slice::from_ref(&sent));
            assert!(machine.queues[FROM_GUEST].pop().unwrap().is_some(), "its buffer returns");
            machine.post(0..1);
            assert_eq!(commit(&mut link, &sent, 1), 1);
            let arrived = machine.take().unwrap();
            assert_eq!(arrived[MODERN_LEN..], sent);
            assert_eq!(arrived[..MODERN_LEN], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
        }
        assert_eq!(
            (link.queue.counters.drops(DropReason::LinkDown), link.queue.frames.waiting()),
            (0, 0)
        );
    }
}

#[test]
fn super_packets_keep_their_offloads() {
    let (mut link, mut machine) = pair(ALL);
    assert!(GuestLink::capabilities(&link).gso.tcp_v4);
    let mut slots = Slots::new();
    link.reserve(1, 20_000, &mut slots);
    let sent = frame(20_000, 9);
    slots[0][..20_000].copy_from_slice(&sent);
    drop(slots);
    let gso = Gso { kind: GsoKind::TcpV4, ecn: false, size: 1448 };
    let checksum = Checksum::Partial { start: 34, offset: 16 };
    link.commit(&[Committed { len: 20_000, meta: OffloadMeta { checksum, gso: Some(gso) } }]);
    Port::flush(&mut link).unwrap();
    assert!(link.is_full(), "there are no buffers");
    machine.post(0..5);
    Port::flush(&mut link).unwrap();
    let arrived = machine.take().unwrap();
    // Blank checksum, TCP over IPv4, 5 buffers.
    assert_eq!((arrived[0], arrived[1], arrived[10]), (1, 1, 5));
    assert_eq!(arrived[MODERN_LEN..], sent);
}

#[test]
fn frame_without_buffers_waits_and_a_kick_wakes_the_link() {
    for features in [ALL, BARE] {
        let (mut link, mut machine) = pair(features);
        link.clear_events().unwrap();
        assert_eq!(commit(&mut link, &frame(60, 1), 3), 3);
        assert!(link.is_full());
        assert!(!link.arm().unwrap());
        assert!(!wait_readable(link.wait_fds()[0], Some(core::time::Duration::ZERO)).unwrap());
        assert!(machine.post(0..4), "the link waits for buffers");
        rustix::io::write(&machine.kicks[TO_GUEST], &1_u64.to_ne_bytes()).unwrap();
        assert!(wait_readable(link.wait_fds()[0], Some(core::time::Duration::ZERO)).unwrap());
        link.clear_events().unwrap();
        assert!(!wait_readable(link.wait_fds()[0], Some(core::time::Duration::ZERO)).unwrap());
        Port::flush(&mut link).unwrap();
        assert!(!link.is_full());
        assert_eq!(std::iter::from_fn(|| machine.take()).count(), 3);
        // The driver waits for frames, and is interrupted.
        assert!(wait_readable(&machine.calls[TO_GUEST], Some(core::time::Duration::ZERO)).unwrap());
        assert!(!link.arm().unwrap());
        assert!(machine.transmit([0; MODERN_LEN], &frame(60, 2)), "the link waits for frames");
        assert!(link.arm().unwrap());
    }
}

#[test]
fn frame_longer_than_all_buffers_is_dropped_and_later_ones_arrive() {
    for (features, len) in [(BARE, 5000), (ALL, 60_000)] {
        let (mut link, mut machine) = pair(features);
        machine.post(0..usize::from(SIZE));
        if features == ALL {
            // Buffers that were used for a short frame are missing for a long one.
            commit(&mut link, &frame(60, 1), 1);
            commit(&mut link, &frame(len, 2), 1);
            assert_eq!(machine.take().unwrap().len(), MODERN_LEN + 60);
            assert!(machine.take().unwrap().len() > len);
            continue;
        }
        commit(&mut link, &frame(len, 2), 1);
        commit(&mut link, &frame(60, 1), 1);
        assert_eq!(machine.take().unwrap().len(), MODERN_LEN + 60);
        assert_eq!(link.queue.counters.drops(DropReason::TooLong), 1);
    }
}

#[test]
fn runt_oversize_and_wrong_offloads_are_dropped_and_later_frames_arrive() {
    let (mut link, mut machine) = pair(ALL);
    let good = frame(60, 1);
    machine.transmit([0; MODERN_LEN], &good[..13]);
    machine.transmit([0; MODERN_LEN], &frame(65_554, 0));
    // A checksum beyond the frame.
    machine.transmit([1, 0, 0, 0, 0, 0, 255, 0, 255, 0, 0, 0], &good);
    assert_eq!(receive(&mut link), [[0; 0]; 0]);
    for reason in [DropReason::Runt, DropReason::Oversize, DropReason::BadOffload] {
        assert_eq!(link.queue.counters.drops(reason), 1, "{reason:?}");
    }
    machine.transmit([0; MODERN_LEN], &good);
    assert_eq!(receive(&mut link), [good]);
}

#[test]
fn stopped_vring_continues_where_it_was() {
    let (mut link, mut machine) = pair(ALL);
    machine.post(0..3);
    commit(&mut link, &frame(60, 1), 2);
    machine.send(number::GET_VRING_BASE, &state(0, 0), &[]);
    receive(&mut link);
    let mut answer = [0; 20];
    machine.socket.read_exact(&mut answer).unwrap();
    assert_eq!((answer[0], answer[12], answer[16]), (11, 0, 2));
    commit(&mut link, &frame(60, 2), 1);
    assert_eq!(link.queue.counters.drops(DropReason::LinkDown), 1);
    machine.send_vring(0, 2);
    receive(&mut link);
    commit(&mut link, &frame(60, 3), 1);
    let arrived: Vec<u8> =
        std::iter::from_fn(|| machine.take()).map(|frame| frame[MODERN_LEN + 59]).collect();
    assert_eq!(arrived, [1, 1, 3]);
}

#[test]
fn memory_that_is_passed_again_is_used_from_then_on() {
    let (mut link, mut machine) = pair(ALL);
    machine.transmit([0; MODERN_LEN], &frame(60, 1));
    machine.send_memory();
    assert_eq!(receive(&mut link), [frame(60, 1)]);
    // Memory without the vrings.
    let table = words(&[1, 0, MEMORY as u64, 0, 0]);
    machine.send(number::SET_MEM_TABLE, &table, &[&machine.file]);
    assert!(matches!(try_receive(&mut link), Err(Fault::Misbehaved(_))));
}

#[test]
fn requests_that_ask_are_answered() {
    let (own, socket) = UnixStream::pair().unwrap();
    let mut link = link(Clients::Connected(own.into()));
    let mut ask = |number, payload: &[u8]| {
        send(&socket, &request(number, true, payload), &[]);
        receive(&mut link);
        let mut answer = [0; 20];
        socket.set_nonblocking(true).unwrap();
        let read = (&socket).read_exact(&mut answer);
        read.is_ok().then(|| u64::from_ne_bytes(answer[12..].try_into().unwrap()))
    };
    assert_eq!(ask(number::GET_FEATURES, &[]), Some(card(1, MTU).offered()));
    assert_eq!(card(1, MTU).offered(), FEATURES | 1 << 33);
    assert_eq!(ask(number::SET_OWNER, &[]), None, "not negotiated");
    assert_eq!(ask(number::GET_PROTOCOL_FEATURES, &[]), Some(0x8038));
    assert_eq!(ask(number::SET_PROTOCOL_FEATURES, &words(&[0x8038])), Some(0));
    assert_eq!(ask(number::SET_OWNER, &[]), Some(0));
    assert_eq!(ask(number::GET_QUEUE_NUM, &[]), Some(1));
}

#[test]
fn mtu_beyond_that_of_the_card_is_refused() {
    for (mtu, is_served) in [(MTU, true), (MTU + 1, false)] {
        let (mut link, machine) = pair(ALL);
        machine.send(number::SET_PROTOCOL_FEATURES, &words(&[protocol_feature::MTU]), &[]);
        machine.send(number::NET_SET_MTU, &words(&[mtu.into()]), &[]);
        assert_eq!(try_receive(&mut link).is_ok(), is_served, "{mtu}");
    }
}

/// Link with so many queue pairs, and a machine that uses `used` of them.
fn pairs(pairs: u16, used: usize) -> (VhostUserLink, Machine) {
    let (own, socket) = UnixStream::pair().unwrap();
    let options = VhostUserOptions { pairs, ..VhostUserOptions::default() };
    let mut link = link_with(Clients::Connected(own.into()), options);
    let machine = Machine::with_pairs(socket, ALL | feature::MULTIQUEUE, used);
    machine.set_up(&mut link);
    (link, machine)
}

/// Frame of UDP over IPv4 between two ports.
fn datagram(from: u16, to: u16) -> Vec<u8> {
    let mut frame = vec![2; 12];
    frame.extend([8, 0, 0x45, 0, 0, 46, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 1]);
    frame.extend([from.to_be_bytes(), to.to_be_bytes(), [0, 26], [0, 0]].concat());
    frame.resize(60, 7);
    frame
}

#[test]
fn card_with_several_queue_pairs_offers_them() {
    let (mut link, machine) = pairs(4, 1);
    assert_eq!(card(4, MTU).offered(), FEATURES | feature::MULTIQUEUE | feature::ACCESS_PLATFORM);
    for (number, expected) in
        [(number::GET_PROTOCOL_FEATURES, 0x8039), (number::GET_QUEUE_NUM, 4_u64)]
    {
        machine.send(number, &[], &[]);
        receive(&mut link);
        let mut answer = [0; 20];
        (&machine.socket).read_exact(&mut answer).unwrap();
        assert_eq!(answer[12..], expected.to_ne_bytes());
    }
    // The ninth vring belongs to a fifth pair.
    machine.send(number::SET_VRING_NUM, &state(8, 16), &[]);
    assert!(try_receive(&mut link).is_err());
}

#[test]
fn frames_to_the_guest_take_the_pair_of_their_flow() {
    let (mut link, mut machine) = pairs(4, 4);
    for pair in 0..4 {
        machine.post_on(pair, pair * 4..pair * 4 + 2);
    }
    for (pair, port) in [(3, 4000), (1, 4001), (2, 4002)] {
        machine.transmit_on(pair, [0; MODERN_LEN], &datagram(port, 53));
        assert_eq!(receive(&mut link), [datagram(port, 53)]);
        assert!(machine.queues[from_guest(pair)].pop().unwrap().is_some(), "its buffer returns");
    }
    for (pair, port) in [(1, 4001), (2, 4002), (3, 4000)] {
        assert_eq!(commit(&mut link, &datagram(53, port), 1), 1);
        let arrived = machine.take_from(pair).unwrap();
        assert_eq!(arrived[MODERN_LEN..], datagram(53, port), "{pair}");
    }
    // A frame without a flow.
    commit(&mut link, &frame(60, 1), 1);
    assert!(machine.take_from(0).is_some());
}

#[test]
fn frames_from_all_pairs_arrive_in_one_round_and_none_is_left_out() {
    let (mut link, mut machine) = pairs(4, 4);
    let mut batch = Batch::with_capacity(64, 400_000);
    let mut found = [0; 4];
    // Messages count as work of a round, too.
    assert!(receive(&mut link).is_empty());
    for _ in 0..8 {
        // The buffers of all pairs have the same bytes.
        for pair in 0..4 {
            machine.transmit_on(pair, [0; MODERN_LEN], &frame(60, 1));
        }
        let received = link.receive(&mut batch, 2).unwrap();
        assert_eq!((received.frames, batch.len()), (2, 2));
        batch.clear();
        link.complete().unwrap();
        for (pair, count) in found.iter_mut().enumerate() {
            *count += usize::from(machine.queues[from_guest(pair)].pop().unwrap().is_some());
        }
    }
    assert!(found.iter().all(|count| *count > 0), "{found:?}");
    while !receive(&mut link).is_empty() {}
    assert!(!link.arm().unwrap());
    machine.transmit_on(3, [0; MODERN_LEN], &frame(60, 2));
    assert!(link.arm().unwrap(), "the last pair is looked at, too");
}

#[test]
fn flow_of_a_pair_that_stops_moves_to_one_that_runs() {
    let (mut link, mut machine) = pairs(2, 2);
    machine.post_on(0, 0..2);
    machine.transmit_on(1, [0; MODERN_LEN], &datagram(4000, 53));
    receive(&mut link);
    machine.send(number::SET_VRING_ENABLE, &state(2, 0), &[]);
    receive(&mut link);
    commit(&mut link, &datagram(53, 4000), 1);
    assert!(machine.take_from(0).is_some());
    machine.send(number::SET_VRING_ENABLE, &state(0, 0), &[]);
    receive(&mut link);
    commit(&mut link, &datagram(53, 4000), 1);
    assert_eq!(link.queue.counters.drops(DropReason::LinkDown), 1, "no pair runs");
}

#[test]
fn frame_that_waits_for_buffers_is_sent_by_the_round_that_finds_some() {
    let (mut link, mut machine) = pair(ALL);
    assert_eq!(commit(&mut link, &frame(60, 1), 2), 2);
    assert!(link.is_full());
    receive(&mut link);
    assert_eq!(link.queue.frames.waiting(), 2);
    machine.post(0..4);
    let mut batch = Batch::with_capacity(64, 400_000);
    assert_eq!(link.receive(&mut batch, 64).unwrap().work, 2, "a worker does not flush it again");
    assert_eq!(std::iter::from_fn(|| machine.take()).count(), 2);
}

#[test]
fn super_packet_of_udp_passes_whole_in_both_directions() {
    let (mut link, mut machine) = pair(ALL);
    assert!(GuestLink::capabilities(&link).gso.udp);
    let without = pair(ALL & !feature::GUEST_USO6).0;
    assert!(!GuestLink::capabilities(&without).gso.udp, "both families belong together");
    let mut sent = datagram(4000, 53);
    sent.resize(14 + 20 + 8 + 3000, 7);
    let total = u16::try_from(sent.len() - 14).unwrap();
    sent[16..18].copy_from_slice(&total.to_be_bytes());
    sent[38..40].copy_from_slice(&(total - 20).to_be_bytes());
    // Blank checksum of UDP, segments of 1000 bytes.
    let header = [1, 5, 42, 0, 0xe8, 3, 34, 0, 6, 0, 0, 0];
    machine.transmit(header, &sent);
    let mut batch = Batch::with_capacity(64, 400_000);
    link.receive(&mut batch, 64).unwrap();
    let meta = batch.get(0).unwrap().meta();
    assert_eq!(meta.gso, Some(Gso { kind: GsoKind::Udp, ecn: false, size: 1000 }));
    machine.post(0..2);
    let transmitted = link.transmit(&batch, &[0]).unwrap();
    assert_eq!(transmitted.sent, 1);
    Port::flush(&mut link).unwrap();
    let arrived = machine.take().unwrap();
    assert_eq!((arrived[1], &arrived[MODERN_LEN + 14..]), (5, &sent[14..]));
}

/// Messages that end a connection, each with its files.
fn hostile_messages(machine: &Machine) -> Vec<(Vec<u8>, Vec<OwnedFd>)> {
    let file = || machine.file.try_clone().unwrap();
    let with = |number, payload: &[u8], files| (request(number, false, payload), files);
    let table = |region: [u64; 4]| [words(&[1]), words(&region)].concat();
    let size = MEMORY as u64;
    let mut version = request(1, false, &[]);
    version[4] = 3;
    let address = |at: u64| [state(0, 0), words(&[at, at, at, 0])].concat();
    let (pipe, _) = rustix::pipe::pipe().unwrap();
    let socket = || OwnedFd::from(UnixStream::pair().unwrap().0);
    vec![
        (version, vec![]),
        (request(1, false, &[])[..11].to_vec(), vec![]),
        (request(2, false, &[0; 8])[..19].to_vec(), vec![]),
        with(6, &[0; 16], vec![]),
        with(number::SET_FEATURES, &words(&[feature::IN_ORDER]), vec![]),
        with(number::SET_PROTOCOL_FEATURES, &words(&[1]), vec![]),
        with(number::SET_MEM_TABLE, &table([0, size + 1, 0, 0]), vec![file()]),
        with(number::SET_MEM_TABLE, &table([0, size, 0, 1]), vec![file()]),
        with(number::SET_MEM_TABLE, &table([0, 0, 0, 0]), vec![file()]),
        with(number::SET_MEM_TABLE, &table([u64::MAX, 4096, 0, 0]), vec![file()]),
        with(number::SET_MEM_TABLE, &table([0, 4096, u64::MAX, 0]), vec![file()]),
        with(number::SET_MEM_TABLE, &table([0, 4096, 0, u64::MAX]), vec![file()]),
        with(number::SET_MEM_TABLE, &table([0, size, 0, 0]), vec![]),
        with(number::SET_MEM_TABLE, &table([0, size, 0, 0]), vec![file(), file()]),
        with(number::SET_VRING_NUM, &state(2, 16), vec![]),
        with(number::SET_VRING_NUM, &state(0, 32), vec![]),
        with(number::SET_VRING_NUM, &state(0, 3), vec![]),
        with(number::SET_VRING_ADDR, &address(0), vec![]),
        with(number::SET_VRING_ADDR, &address(machine.base() + size - 8), vec![]),
        with(number::SET_VRING_ADDR, &address(machine.base() + 1), vec![]),
        with(number::SET_VRING_KICK, &words(&[0]), vec![]),
        with(number::SET_VRING_KICK, &words(&[0x100]), vec![]),
        with(number::SET_VRING_KICK, &words(&[0]), vec![file()]),
        with(number::SET_VRING_CALL, &words(&[0]), vec![pipe]),
        with(number::SET_FEATURES, &words(&[ALL | feature::ACCESS_PLATFORM]), vec![]),
        with(number::NET_SET_MTU, &words(&[1500]), vec![]),
        with(number::SET_BACKEND_REQ_FD, &[], vec![]),
        with(number::SET_BACKEND_REQ_FD, &[], vec![file()]),
        with(number::SET_BACKEND_REQ_FD, &[], vec![socket(), socket()]),
    ]
}

#[test]
fn client_that_breaks_a_rule_is_disconnected_and_the_next_is_served() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let mut link = link(Clients::Listener { socket: listener.into(), one_off: false });
    let count = hostile_messages(&Machine::new(UnixStream::pair().unwrap().0, ALL)).len();
    for number in 0..count {
        let mut machine = Machine::new(UnixStream::connect(&path).unwrap(), ALL);
        machine.set_up(&mut link);
        let (bytes, files) = hostile_messages(&machine).swap_remove(number);
        send(&machine.socket, &bytes, &files.iter().collect::<Vec<_>>());
        assert_eq!(receive(&mut link), [[0; 0]; 0]);
        assert!(!link.is_connected(), "message {number}: {bytes:02x?}");
        assert_eq!(machine.socket.read(&mut [0; 64]).unwrap_or(0), 0);
        assert_eq!(GuestLink::capabilities(&link), PortCapabilities::plain(MTU));
        assert!(!link.arm().unwrap());
    }
    let mut machine = Machine::new(UnixStream::connect(&path).unwrap(), ALL);
    machine.set_up(&mut link);
    machine.transmit([0; MODERN_LEN], &frame(60, 7));
    assert_eq!(receive(&mut link), [frame(60, 7)]);
}

#[test]
fn full_blocking_eventfd_of_a_client_does_not_block_the_link_and_the_next_is_served() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut link = link(Clients::Listener { socket: listener.into(), one_off: false });
        let mut first = Machine::new(UnixStream::connect(&path).unwrap(), ALL);
        let full = || {
            let event = eventfd(0, EventfdFlags::empty()).unwrap();
            rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
            event
        };
        first.calls = vec![full(), full()];
        first.set_up(&mut link);
        let before = link.queue.system.syscalls.get();
        for _ in 0..200 {
            first.transmit([0; MODERN_LEN], &frame(60, 7));
            assert_eq!(receive(&mut link), [frame(60, 7)]);
            assert!(first.queues[FROM_GUEST].pop().unwrap().is_some());
            first.post(0..1);
            assert_eq!(commit(&mut link, &frame(60, 8), 1), 1);
            assert!(first.take().is_some());
        }
        // The driver wants an interrupt for each frame.
        assert!(link.queue.system.syscalls.get() - before >= 400);
        drop(first);
        receive(&mut link);
        let mut next = Machine::new(UnixStream::connect(&path).unwrap(), ALL);
        next.set_up(&mut link);
        next.transmit([0; MODERN_LEN], &frame(60, 9));
        done.send(receive(&mut link)).unwrap();
    });
    let frames = is_done.recv_timeout(core::time::Duration::from_secs(20));
    assert_eq!(frames.expect("the link is blocked, or an assertion failed"), [frame(60, 9)]);
}

#[test]
fn descriptor_outside_of_the_memory_ends_the_connection() {
    let end = |machine: &Machine| machine.base() + MEMORY as u64;
    type Address = fn(u64) -> u64;
    let places: [(Address, u32); 5] = [
        (|end| end, 100),
        (|end| end - 99, 100),
        (|_| 0, 100),
        (|_| u64::MAX - 50, 100),
        (|end| end, 0),
    ];
    for (index, flags) in [(0, 2), (1, 0)] {
        for (place, len) in places {
            let (mut link, machine) = pair(ALL & !feature::INDIRECT);
            let layout = SplitLayout::new(SIZE).unwrap();
            let start = index * AREA;
            let address = place(end(&machine));
            let links = [
                Descriptor { address: machine.base(), len: 100, flags: flags | 1, next: 1 },
                Descriptor { address, len, flags, next: 0 },
            ];
            for (number, link) in links.iter().enumerate() {
                machine.memory.copy_from(start + number * 16, &link.to_bytes()).unwrap();
            }
            let one = 1_u16.to_le_bytes();
            machine.memory.copy_from(start + layout.avail_idx(), &one).unwrap();
            let fault = if index == 1 {
                try_receive(&mut link).err()
            } else {
                let mut slots = Slots::new();
                link.reserve(1, 188, &mut slots);
                drop(slots);
                link.commit(&[Committed { len: 188, meta: OffloadMeta::PLAIN }]);
                Port::flush(&mut link).err()
            };
            // A buffer is looked up as far as a frame fills it.
            let is_used = len > 0 || index == 1;
            let is_refused = matches!(fault, Some(Fault::Misbehaved(_)));
            assert_eq!(is_refused, is_used, "{index} {address:#x} {len}");
        }
    }
}

#[test]
fn socket_for_requests_stays_open_until_another_comes_or_the_client_goes() {
    let (mut link, machine) = pair(ALL);
    let sockets = [(), ()].map(|()| UnixStream::pair().unwrap());
    let mut ends = Vec::new();
    for (own, theirs) in sockets {
        machine.send(number::SET_BACKEND_REQ_FD, &[], &[&theirs.into()]);
        receive(&mut link);
        own.set_read_timeout(Some(core::time::Duration::from_secs(20))).unwrap();
        ends.push(own);
    }
    // The first one was replaced.
    assert_eq!(ends[0].read(&mut [0; 1]).unwrap(), 0);
    ends[1].set_nonblocking(true).unwrap();
    let is_open = ends[1].read(&mut [0; 1]).is_err();
    assert!(is_open);
    ends[1].set_nonblocking(false).unwrap();
    drop(machine);
    assert!(matches!(try_receive(&mut link), Err(Fault::Gone)));
    assert_eq!(ends[1].read(&mut [0; 1]).unwrap(), 0);
}

#[test]
fn features_with_access_platform_are_refused_by_name() {
    let (mut link, machine) = pair(ALL);
    machine.send(number::SET_FEATURES, &words(&[ALL | feature::ACCESS_PLATFORM]), &[]);
    let Err(Fault::Misbehaved(fault)) = try_receive(&mut link) else { panic!("it is accepted") };
    let text = fault.to_string();
    assert!(text.contains("the features have ACCESS_PLATFORM"), "{text}");
}

#[test]
fn refused_features_are_named() {
    let fault = |features| ClientFault::Features { features }.to_string();
    let text = fault(feature::IN_ORDER | 1 << 60);
    assert!(text.ends_with("were not offered (IN_ORDER)"), "{text}");
    let text = ClientFault::Translated.to_string();
    assert!(text.contains("ACCESS_PLATFORM") && text.contains("vIOMMU"), "{text}");
}

/// Pool of a machine: a whole file whose addresses are not those of the hypervisor.
const POOL: u64 = 0xf800_0000;

/// Connects a client whose rule and file are these, and which sends one region. Returns the link, the client and the
/// reports.
fn hand_over(
    rule: PoolRule,
    file: &OwnedFd,
    regions: &[[u64; 4]],
) -> (VhostUserLink, UnixStream, std::sync::mpsc::Receiver<ClientReport>) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let (tell, reports) = std::sync::mpsc::channel();
    let report: Box<dyn Fn(ClientReport) + Send> = Box::new(move |state| tell.send(state).unwrap());
    let clients = Clients::Listener { socket: listener.into(), one_off: false };
    let mut link =
        link_with(clients, VhostUserOptions { pairs: 1, pool: rule, report: Some(report) });
    let socket = UnixStream::connect(&path).unwrap();
    let table: Vec<u64> = regions.iter().flatten().copied().collect();
    let table = [words(&[regions.len() as u64]), words(&table)].concat();
    let files = vec![file; regions.len()];
    send(&socket, &request(number::SET_MEM_TABLE, false, &table), &files);
    receive(&mut link);
    (link, socket, reports)
}

/// Creates a file of this size that begins with these bytes.
fn file_of(bytes: u64, head: &[u8]) -> OwnedFd {
    let file = rustix::fs::memfd_create("pool", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, bytes).unwrap();
    rustix::io::write(&file, head).unwrap();
    file
}

#[test]
fn memory_beyond_the_required_pool_is_refused_counted_and_reported() {
    const MIB: u64 = 1 << 20;
    let (at_most, marked) = (PoolRule::AtMost(4 * MIB), PoolRule::Marked);
    let whole = |size| vec![[POOL, size, 7 * MIB, 0]];
    let halves = vec![[POOL, 2 * MIB, 0, 0], [0, 2 * MIB, 2 * MIB, 2 * MIB]];
    let part = vec![[POOL, 2 * MIB, 0, 0]];
    let (none, mark): (&[u8], &[u8]) = (b"", &ringfence_wire::vhost_user::POOL_MARK);
    for (rule, size, head, regions, pool) in [
        (PoolRule::Any, 4 * MIB, none, whole(4 * MIB), Some(false)),
        (PoolRule::Any, 4 * MIB, mark, whole(4 * MIB), Some(true)),
        (at_most, 4 * MIB, none, whole(4 * MIB), Some(true)),
        (at_most, 5 * MIB, none, whole(5 * MIB), None),
        // Two regions of one file are one file.
        (at_most, 4 * MIB, none, halves.clone(), Some(true)),
        // The file gives access to more than its region.
        (at_most, 1 << 40, none, part.clone(), None),
        (marked, 4 * MIB, mark, whole(4 * MIB), Some(true)),
        (marked, 4 * MIB, none, whole(4 * MIB), None),
        (marked, 4 * MIB, &mark[..15], whole(4 * MIB), None),
        (marked, 4 * MIB, mark, halves, None),
        (marked, 4 * MIB, mark, part, None),
    ] {
        let (link, mut socket, reports) = hand_over(rule, &file_of(size, head), &regions);
        let state = reports.recv().unwrap();
        let expected = pool.map(|is_pool| HandedOver { bytes: size, is_pool });
        assert_eq!(state.memory, expected, "{rule:?} {size} {regions:?}");
        assert_eq!(link.is_connected(), pool.is_some(), "{rule:?} {size} {regions:?}");
        let refused = u64::from(pool.is_none());
        assert_eq!(state.refused, refused);
        assert_eq!(link.queue.counters.drops(DropReason::BadRequest), refused);
        if pool.is_none() {
            assert_eq!(socket.read(&mut [0; 1]).unwrap(), 0);
        }
    }
}

#[test]
fn memory_of_a_client_that_has_gone_is_no_longer_reported() {
    let file = file_of(4096, b"");
    let (mut link, socket, reports) = hand_over(PoolRule::Any, &file, &[[0, 4096, 0, 0]]);
    assert!(reports.recv().unwrap().memory.is_some());
    drop(socket);
    receive(&mut link);
    assert_eq!(reports.recv().unwrap(), ClientReport::default());
}

#[test]
fn indirect_table_and_ring_addresses_outside_of_the_pool_end_the_connection() {
    // An indirect table beside the pool.
    let layout = SplitLayout::new(SIZE).unwrap();
    let start = AREA;
    let places: [fn(u64) -> u64; 3] =
        [|base| base + MEMORY as u64 - 16, |base| base - 16, |_| 4096];
    for place in places {
        let (mut link, machine) = pair(ALL);
        let address = place(machine.base());
        let table = Descriptor { address, len: 32, flags: 4, next: 0 };
        machine.memory.copy_from(start, &table.to_bytes()).unwrap();
        machine.memory.copy_from(start + layout.avail_idx(), &1_u16.to_le_bytes()).unwrap();
        assert!(matches!(try_receive(&mut link), Err(Fault::Misbehaved(_))), "{address:#x}");
        assert_eq!(link.queue.counters.drops(DropReason::BadRequest), 1);
    }
    // A ring at an address of the guest, and not of the hypervisor.
    let file = file_of(MEMORY as u64, b"");
    let (mut link, socket, _reports) =
        hand_over(PoolRule::Any, &file, &[[POOL, MEMORY as u64, 1 << 40, 0]]);
    let event = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let tables = [POOL, POOL + 4096, POOL + 8192, 0];
    send(&socket, &request(number::SET_VRING_NUM, false, &state(0, SIZE.into())), &[]);
    let address = [state(0, 0), words(&tables)].concat();
    send(&socket, &request(number::SET_VRING_ADDR, false, &address), &[]);
    send(&socket, &request(number::SET_VRING_KICK, false, &words(&[0])), &[&event]);
    receive(&mut link);
    assert!(!link.is_connected());
}

#[test]
fn second_client_is_closed_and_the_first_stays() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let mut link = link(Clients::Listener { socket: listener.into(), one_off: false });
    let mut first = Machine::new(UnixStream::connect(&path).unwrap(), ALL);
    first.set_up(&mut link);
    let mut second = UnixStream::connect(&path).unwrap();
    receive(&mut link);
    assert_eq!(second.read(&mut [0; 1]).unwrap(), 0);
    first.transmit([0; MODERN_LEN], &frame(60, 7));
    assert_eq!(receive(&mut link), [frame(60, 7)]);
    drop(first);
    receive(&mut link);
    assert!(!link.is_connected());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_messages_cause_no_panic(
        messages in proptest::collection::vec(
            (0_u32..28, any::<bool>(), proptest::collection::vec(any::<u8>(), 0..80), 0_usize..3),
            0..30,
        ),
    ) {
        let (mut link, machine) = pair(ALL);
        machine.socket.set_nonblocking(true).unwrap();
        for (number, needs_reply, payload, files) in messages {
            let all = [&machine.file, &machine.kicks[0], &machine.calls[1]];
            send(&machine.socket, &request(number, needs_reply, &payload), &all[..files]);
            if try_receive(&mut link).is_err() {
                break;
            }
            let _ = Port::flush(&mut link);
            let _ = (&machine.socket).read(&mut [0; 4096]);
        }
    }

    #[test]
    fn arbitrary_vrings_cause_no_panic(
        bytes in proptest::collection::vec(any::<u8>(), 600),
        index in 0_u16..20,
        features in prop::sample::select(vec![ALL, BARE]),
    ) {
        let (mut link, machine) = pair(features);
        let layout = SplitLayout::new(SIZE).unwrap();
        for start in [0, AREA] {
            machine.memory.copy_from(start, &bytes).unwrap();
            // Some addresses lie in the memory.
            for descriptor in (0..usize::from(SIZE)).step_by(2) {
                let at = start + descriptor * 16;
                machine.memory.copy_from(at, &machine.base().to_le_bytes()).unwrap();
                machine.memory.copy_from(at + 10, &[0, 0]).unwrap();
            }
            machine.memory.copy_from(start + layout.avail_idx(), &index.to_le_bytes()).unwrap();
        }
        let mut slots = Slots::new();
        link.reserve(4, 300, &mut slots);
        let len = slots.len();
        drop(slots);
        link.commit(&vec![Committed { len: 300, meta: OffloadMeta::PLAIN }; len]);
        if try_receive(&mut link).is_ok() {
            let _ = Port::flush(&mut link);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn arbitrary_messages_and_virtqueues_stay_in_the_memory_of_the_machine(
        data in proptest::collection::vec(any::<u8>(), 0..1200),
    ) {
        fuzzing::vhost_user(&data);
    }
}
