use std::sync::{Arc, Mutex};

use ringfence_frame::Batch;
use ringfence_offload::packet::protocol;
use ringfence_offload::{Checksum, Layers, OffloadMeta};

use super::*;
use crate::UplinkCounters;
use crate::host::datagrams::{Datagram, Failure};
use crate::host::scripted::ScriptedHost;
use crate::host::{Owner, Readiness};
use crate::replies::Replies;
use crate::share::Handoff;
use crate::{Egress, Uplink};

const NOW: Duration = Duration::from_secs(100);
const MDNS_V4: &str = "224.0.0.251:5353";
const QUERY: &[u8] = b"\0\0\0\0\0\x01query";
const RESPONSE: &[u8] = b"\0\0\x84\0\0\0response";

/// Link of the host: datagrams that were sent, and those that wait.
#[derive(Default)]
struct Wire {
    sent: Vec<(Vec<u8>, SocketAddr)>,
    waiting: VecDeque<(Vec<u8>, SocketAddr)>,
}

/// Socket of a group on that link.
#[derive(Clone, Default)]
struct OnWire(Arc<Mutex<Wire>>);

impl DatagramSocket for OnWire {
    fn send(&mut self, bytes: &[u8], _segment: Option<u16>, via: Option<Via>) -> Result<(), Errno> {
        let to = via.ok_or(Errno::DESTADDRREQ)?.to;
        self.0.lock().unwrap().sent.push((bytes.to_vec(), to));
        Ok(())
    }

    fn receive(&mut self, buffer: &mut ReceiveBuffer) -> Result<bool, Errno> {
        let (bytes, from) = self.0.lock().unwrap().waiting.pop_front().ok_or(Errno::AGAIN)?;
        buffer.prepare(1);
        buffer.bytes[..bytes.len()].copy_from_slice(&bytes);
        let (from, bytes) = (Some(from), 0..bytes.len());
        buffer.datagrams.push(Datagram {
            bytes,
            segment: None,
            from,
            to: None,
            class: 0,
            hops: None,
        });
        Ok(false)
    }

    fn error(&mut self, _bytes: &mut [u8]) -> Option<Failure> {
        None
    }

    fn set_marks(&mut self, _marks: crate::packet::Marks) {}
}

/// Guest 10.0.0.2 with mDNS, on a host with the address 192.0.2.2.
struct Guest {
    multicast: Multicast,
    config: Config,
    host: ScriptedHost,
    replies: Replies,
    counters: UplinkCounters,
    now: Duration,
    wire: OnWire,
}

/// Borrows the parts of a guest as a context.
macro_rules! context {
    ($guest:ident, $egress:ident) => {
        Context {
            config: &$guest.config,
            egress: &$egress,
            host: &mut $guest.host,
            replies: &mut $guest.replies,
            queries: &mut Vec::new(),
            held: &mut crate::held::HeldPackets::default(),
            counters: &$guest.counters,
            now: $guest.now,
        }
    };
}

fn at(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn config() -> Config {
    let mut config = Config { multicast: vec![Service::Mdns], ..Config::default() };
    config.access.guest = vec![IpAddr::from([10, 0, 0, 2])];
    config.guest.addresses = vec![(IpAddr::from([10, 0, 0, 2]), 24)];
    config.guest.gateways = vec![IpAddr::from([10, 0, 0, 1])];
    config
}

/// Returns a frame of the guest with a complete UDP header.
fn frame(from: &str, to: &str, payload: &[u8]) -> Vec<u8> {
    let (from, to) = (at(from), at(to));
    let ends = Ends { from_mac: [2; 6], to_mac: group_mac(to.ip()), from: from.ip(), to: to.ip() };
    let mut frame = vec![0; ends.header_len() + UDP_LEN];
    frame.extend_from_slice(payload);
    let udp_ends = UdpEnds { ends, from: from.port(), to: to.port() };
    write_headers(&udp_ends, &mut frame, 1, None, &PortCapabilities::plain(1500)).unwrap();
    frame
}

impl Guest {
    fn new() -> Guest {
        let wire = OnWire::default();
        let mut multicast = Multicast::default();
        for &address in Service::Mdns.groups() {
            let socket = Box::new(wire.clone());
            let group = Group { service: Service::Mdns, address, interface: "eth0".to_owned() };
            let made = Ok(Member { group, socket });
            multicast.members.insert(OwnerKind::MulticastGroup, |_| made).unwrap();
        }
        let mut host = ScriptedHost::new(8).unwrap();
        host.own = vec![IpAddr::from([192, 0, 2, 2])];
        let (replies, counters) = (Replies::default(), UplinkCounters::default());
        Guest { multicast, config: config(), host, replies, counters, now: NOW, wire }
    }

    /// Sends a datagram of the guest. Returns `true` if it was handled here.
    fn send(&mut self, from: &str, to: &str, payload: &[u8]) -> bool {
        let frame = frame(from, to, payload);
        let mut batch = Batch::with_capacity(1, frame.len());
        let offset = batch.reserve(frame.len()).unwrap();
        batch.scratch_mut(offset..offset + frame.len()).unwrap().copy_from_slice(&frame);
        let meta = OffloadMeta { checksum: Checksum::Verified, gso: None };
        let index = batch.push_contiguous(offset, frame.len(), meta).unwrap();
        let view = batch.get(index).unwrap();
        let layers = Layers::parse(&frame, u32::try_from(frame.len()).unwrap()).unwrap();
        let packet = Packet::read(view, layers).unwrap();
        let egress: Option<Arc<Egress>> = None;
        Multicast::concerns(&packet, &self.config)
            && self.multicast.input(&packet, &mut context!(self, egress))
    }

    /// Lets the IPv4 group receive a datagram. Returns the frames for the guest.
    fn receive(&mut self, from: &str, payload: &[u8]) -> Vec<Vec<u8>> {
        self.wire.0.lock().unwrap().waiting.push_back((payload.to_vec(), at(from)));
        let owner = Owner { kind: OwnerKind::MulticastGroup, index: 0, generation: 1 };
        self.multicast.ready(Ready { owner, what: Readiness::default() });
        let egress: Option<Arc<Egress>> = None;
        while self.multicast.run(&mut context!(self, egress)) > 0 {}
        let mut frames = Vec::new();
        while let Some((frame, _)) = self.replies.front() {
            frames.push(frame.to_vec());
            self.replies.pop();
        }
        frames
    }

    fn sent(&self) -> Vec<(Vec<u8>, SocketAddr)> {
        core::mem::take(&mut self.wire.0.lock().unwrap().sent)
    }
}

/// Returns source, destination and hop limit of an IPv4 frame, if its headers are valid.
fn ends_of(frame: &[u8]) -> (SocketAddr, SocketAddr, u8) {
    assert_eq!(ringfence_offload::checksum::internet_checksum(&frame[14..34]), 0);
    let port = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
    let ip = |at: usize| <[u8; 4]>::try_from(&frame[at..at + 4]).unwrap();
    ((ip(26), port(34)).into(), (ip(30), port(36)).into(), frame[22])
}

#[test]
fn datagram_reaches_only_groups_and_ports_of_the_named_services() {
    let mut guest = Guest::new();
    assert!(guest.send("10.0.0.2:5353", MDNS_V4, QUERY));
    assert_eq!(guest.sent(), [(QUERY.to_vec(), at(MDNS_V4))]);
    for (from, to) in [
        ("10.0.0.2:5353", "224.0.0.251:5354"),
        ("10.0.0.2:5353", "224.0.0.1:5353"),
        ("10.0.0.2:5353", "239.255.255.250:1900"),
        ("10.0.0.2:5353", "255.255.255.255:5353"),
        ("10.0.0.2:5353", "192.0.2.9:5353"),
    ] {
        assert!(!guest.send(from, to, QUERY), "{to}");
    }
    assert!(guest.sent().is_empty());
}

#[test]
fn datagram_with_forged_source_is_dropped() {
    let mut guest = Guest::new();
    for source in ["10.0.0.3:5353", "192.0.2.9:5353", "127.0.0.1:5353"] {
        assert!(guest.send(source, MDNS_V4, QUERY));
    }
    assert!(guest.send("[2001:db8::9]:5353", "[ff02::fb]:5353", QUERY));
    assert!(guest.sent().is_empty());
    assert_eq!(guest.counters.drop_forged_source.get(), 4);
    // Hosts send to groups of their link from link-local addresses.
    assert!(guest.send("[fe80::2]:5353", "[ff02::fb]:5353", QUERY));
    assert_eq!(guest.sent().len(), 1);
}

#[test]
fn engine_without_the_option_drops_multicast() {
    for (services, dropped) in [(vec![], 1), (vec![Service::Ssdp], 1), (vec![Service::Mdns], 0)] {
        let config = Config { multicast: services, ..config() };
        let host = Box::new(ScriptedHost::new(8).unwrap());
        let mut uplink = Uplink::new(config, host, Arc::default());
        let bytes = frame("10.0.0.2:5353", MDNS_V4, QUERY);
        let mut bytes = bytes;
        bytes[..6].copy_from_slice(&group_mac(at(MDNS_V4).ip()));
        let meta = OffloadMeta { checksum: Checksum::Verified, gso: None };
        uplink.accept_handoff(Handoff::Frame { bytes, meta, visited: Default::default() }, NOW);
        assert_eq!(uplink.counters().drop_multicast.get(), dropped);
    }
}

#[test]
fn datagram_of_group_has_its_real_source_and_the_group_as_destination() {
    let mut guest = Guest::new();
    let frames = guest.receive("192.0.2.9:5353", RESPONSE);
    assert_eq!(frames.len(), 1);
    assert_eq!(frames[0][..6], [0x01, 0, 0x5e, 0, 0, 251]);
    assert_eq!(ends_of(&frames[0]), (at("192.0.2.9:5353"), at(MDNS_V4), 255));
    assert!(frames[0].ends_with(RESPONSE));
    assert!(guest.receive("192.0.2.9:5353", &[0; PAYLOAD_MAX + 1]).is_empty());
    assert_eq!(
        (guest.counters.multicast_out.get(), guest.counters.multicast_dropped.get()),
        (1, 1)
    );
}

#[test]
fn own_datagram_does_not_come_back() {
    let mut guest = Guest::new();
    guest.send("10.0.0.2:5353", MDNS_V4, QUERY);
    // The same from another host, then the copy, then a program of the host.
    assert_eq!(guest.receive("192.0.2.9:5353", QUERY).len(), 1);
    assert_eq!(guest.receive("192.0.2.2:5353", QUERY).len(), 0);
    assert_eq!(guest.receive("192.0.2.2:5353", QUERY).len(), 1);
}

#[test]
fn host_is_answered_only_where_and_while_it_has_asked() {
    let mut guest = Guest::new();
    guest.receive("192.0.2.9:4000", QUERY);
    guest.receive("192.0.2.8:4000", RESPONSE);
    assert!(guest.send("10.0.0.2:5353", "192.0.2.9:4000", RESPONSE));
    assert_eq!(guest.sent(), [(RESPONSE.to_vec(), at("192.0.2.9:4000"))]);
    assert!(!guest.send("10.0.0.2:5353", "192.0.2.9:4001", RESPONSE));
    assert!(!guest.send("10.0.0.2:5353", "192.0.2.8:4000", RESPONSE));
    assert!(!guest.send("10.0.0.2:5354", "192.0.2.9:4000", RESPONSE));
    guest.now += ANSWERS;
    assert!(!guest.send("10.0.0.2:5353", "192.0.2.9:4000", RESPONSE));
    assert!(guest.sent().is_empty());
    for port in 1..1000 {
        guest.receive(&format!("192.0.2.9:{port}"), QUERY);
    }
    assert!(guest.multicast.askers.len() <= ASKERS_MAX);
}

#[test]
fn questions_have_a_bounded_number_of_sockets_for_a_bounded_time() {
    let mut guest = Guest::new();
    for port in 4000..4000 + 2 * u16::try_from(QUESTIONS_MAX).unwrap() {
        guest.now += Duration::from_millis(20);
        guest.send(&format!("10.0.0.2:{port}"), MDNS_V4, QUERY);
    }
    assert_eq!(guest.multicast.questions.indices().len(), QUESTIONS_MAX);
    guest.now = guest.multicast.deadline().unwrap() + ANSWERS;
    let egress: Option<Arc<Egress>> = None;
    guest.multicast.run_timers(&context!(guest, egress));
    assert_eq!(guest.multicast.deadline(), None);
}

#[test]
fn answer_is_accepted_while_its_question_is_open_and_from_the_services_port() {
    let mut guest = Guest::new();
    guest.send("10.0.0.2:4000", MDNS_V4, QUERY);
    let egress: Option<Arc<Egress>> = None;
    for (from, after, delivered) in [
        ("192.0.2.9:5353", Duration::ZERO, 1),
        ("192.0.2.9:5354", Duration::ZERO, 0),
        ("192.0.2.9:5353", ANSWERS, 0),
    ] {
        guest.now += after;
        let context = &mut context!(guest, egress);
        guest.multicast.deliver_answer(0, at(from), RESPONSE, context);
        assert_eq!(guest.replies.len(), delivered, "{from} after {after:?}");
        if let Some((frame, _)) = guest.replies.front() {
            assert_eq!(ends_of(frame), (at(from), at("10.0.0.2:4000"), HOPS_UNICAST));
            guest.replies.pop();
        }
    }
    assert_eq!(guest.counters.drop_stranger.get(), 2);
}

#[test]
fn datagrams_beyond_the_rate_are_dropped_in_each_direction_and_counted() {
    let mut guest = Guest::new();
    for _ in 0..1000 {
        guest.send("10.0.0.2:5353", MDNS_V4, RESPONSE);
    }
    let burst = usize::try_from(TO_LINK.burst).unwrap();
    assert_eq!(guest.sent().len(), burst);
    assert_eq!(guest.counters.multicast_dropped.get(), 1000 - u64::from(TO_LINK.burst));
    guest.now += Duration::from_secs(1);
    for _ in 0..1000 {
        guest.send("10.0.0.2:5353", MDNS_V4, RESPONSE);
    }
    assert_eq!(guest.sent().len(), usize::try_from(TO_LINK.per_second).unwrap());
    let burst = usize::try_from(TO_GUEST.burst).unwrap();
    let came: usize = (0..1000).map(|_| guest.receive("192.0.2.9:5353", RESPONSE).len()).sum();
    assert_eq!(came, burst);
}

#[test]
fn waiting_replies_leave_no_room_for_multicast() {
    let mut guest = Guest::new();
    for _ in 0..WAITING_MAX / 2 {
        guest.replies.push(|frame| {
            frame.push(0);
            Some(())
        });
    }
    assert_eq!(guest.receive("192.0.2.9:5353", RESPONSE).len(), WAITING_MAX / 2);
    assert_eq!(guest.counters.multicast_dropped.get(), 1);
}

#[test]
fn protocol_of_frames_to_the_guest_is_udp() {
    let mut guest = Guest::new();
    let frame = guest.receive("192.0.2.9:5353", RESPONSE).remove(0);
    assert_eq!(frame[23], protocol::UDP);
    let layers = Layers::parse(&frame, u32::try_from(frame.len()).unwrap()).unwrap();
    assert!(
        matches!(layers.transport(), Transport::Udp(udp) if usize::from(udp.length) == 8 + RESPONSE.len())
    );
}
