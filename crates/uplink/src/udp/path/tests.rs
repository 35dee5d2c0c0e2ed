#![allow(clippy::unwrap_used, reason = "a test: its panic is the report")]

use core::net::SocketAddr;

use ringfence_frame::{Batch, PortCapabilities};
use ringfence_offload::packet::protocol;
use ringfence_offload::{Checksum, Layers, OffloadMeta};

use super::super::Udp;
use super::super::to_guest::{UDP_LEN, write_headers};
use super::*;
use crate::emit::{ETHERNET_LEN, Ends, UdpEnds};
use crate::flow::Origin;
use crate::host::scripted::{NARROW, ScriptedHost};
use crate::packet::Packet;
use crate::replies::Replies;
use crate::{Config, UplinkCounters};

/// UDP of a guest and the state it needs.
struct Guest {
    udp: Udp,
    config: Config,
    host: ScriptedHost,
    replies: Replies,
    counters: UplinkCounters,
    now: Duration,
}

impl Guest {
    fn new() -> Guest {
        Guest {
            udp: Udp::new(8),
            config: Config::default(),
            host: ScriptedHost::new(8).unwrap(),
            replies: Replies::default(),
            counters: UplinkCounters::default(),
            now: Duration::from_secs(1),
        }
    }

    /// Sends a datagram of `len` bytes with an IPv4 identification, and returns how its socket discovers the path.
    fn send(&mut self, to: SocketAddr, len: usize, id: u16) -> PathDiscovery {
        let ip = if to.is_ipv4() { "10.0.0.2" } else { "fd00::2" };
        let ends = Ends {
            from_mac: [2; 6],
            to_mac: self.config.mac,
            from: ip.parse().unwrap(),
            to: to.ip(),
        };
        let mut frame = vec![0; ends.header_len() + UDP_LEN + len];
        let udp_ends = UdpEnds { ends, from: 4000, to: to.port() };
        write_headers(&udp_ends, &mut frame, id, None, &PortCapabilities::plain(65_520)).unwrap();
        let mut batch = Batch::with_capacity(1, frame.len());
        let offset = batch.reserve(frame.len()).unwrap();
        batch.scratch_mut(offset..offset + frame.len()).unwrap().copy_from_slice(&frame);
        let meta = OffloadMeta { checksum: Checksum::Verified, gso: None };
        let index = batch.push_contiguous(offset, frame.len(), meta).unwrap();
        let layers = Layers::parse(&frame, u32::try_from(frame.len()).unwrap()).unwrap();
        let packet = Packet::read(batch.get(index).unwrap(), layers).unwrap();
        let mut context = Context {
            config: &self.config,
            egress: &None,
            host: &mut self.host,
            replies: &mut self.replies,
            queries: &mut Vec::new(),
            held: &mut crate::held::HeldPackets::default(),
            counters: &self.counters,
            now: self.now,
        };
        self.udp.input(&packet, &mut context);
        self.udp.finish_input(&mut context);
        let id = self.udp.flows.ids_of(Origin::Guest).last().unwrap();
        self.udp.flows.get(id).unwrap().marks.discovery
    }

    /// Returns the ICMP messages for the guest, without Ethernet header.
    fn messages(&mut self) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        while let Some((frame, _)) = self.replies.front() {
            all.push(frame[ETHERNET_LEN..].to_vec());
            self.replies.pop();
        }
        all
    }
}

fn narrow(ip: &str) -> SocketAddr {
    SocketAddr::new(ip.parse().unwrap(), NARROW)
}

#[test]
fn first_datagram_to_an_address_makes_the_mtu_known_without_an_error_for_its_socket() {
    let mut guest = Guest::new();
    guest.send(narrow("192.0.2.1"), 1, 7);
    let [v4] = &guest.messages()[..] else { panic!("one message") };
    // "Fragmentation needed", 1300 bytes, about an echo reply.
    assert_eq!((&v4[20..22], &v4[26..28]), (&[3, 4][..], &1300_u16.to_be_bytes()[..]));
    assert_eq!((v4[28 + 9], v4[28 + 20]), (protocol::ICMP, 0));
    assert_eq!(
        (&v4[28 + 12..28 + 16], &v4[28 + 16..28 + 20]),
        (&[10, 0, 0, 2][..], &[192, 0, 2, 1][..])
    );
    guest.send(narrow("2001:db8::1"), 1, 0);
    let [v6] = &guest.messages()[..] else { panic!("one message") };
    // "Packet too big".
    assert_eq!((&v6[40..42], &v6[44..48]), (&[2, 0][..], &1300_u32.to_be_bytes()[..]));
    assert_eq!((v6[48 + 6], v6[48 + 40]), (protocol::ICMPV6, 129));
    // Neither another datagram nor another association repeats it.
    guest.send(narrow("192.0.2.1"), 1, 7);
    guest.send(SocketAddr::new("192.0.2.1".parse().unwrap(), 12), 1, 7);
    assert_eq!(guest.messages().len(), 0);
    guest.now += KNOWN;
    guest.send(narrow("192.0.2.1"), 2000, 7);
    assert_eq!(guest.messages().len(), 1, "the guest's kernel has forgotten it");
}

#[test]
fn path_with_the_mtu_of_the_link_is_not_told() {
    let mut guest = Guest::new();
    guest.config.mtu = 1300;
    assert_eq!(guest.send(narrow("192.0.2.1"), 1290, 7), PathDiscovery::Guest);
    assert_eq!(guest.messages().len(), 0);
}

#[test]
fn df_of_a_long_datagram_is_copied_once_the_guest_knows_the_path() {
    for ip in ["192.0.2.1", "2001:db8::1"] {
        let mut guest = Guest::new();
        assert_eq!(guest.send(narrow(ip), 2000, 7), PathDiscovery::Host);
        guest.now += GRACE / 2;
        assert_eq!(guest.send(narrow(ip), 2000, 8), PathDiscovery::Host, "sent before");
        guest.now += GRACE;
        assert_eq!(guest.send(narrow(ip), 2000, 9), PathDiscovery::Guest);
        assert_eq!(guest.send(narrow(ip), 1, 10), PathDiscovery::Guest, "no needless change");
    }
}

#[test]
fn df_of_a_program_that_asks_for_it_is_copied_at_once() {
    let mut guest = Guest::new();
    assert_eq!(guest.send(narrow("192.0.2.1"), 2000, 0), PathDiscovery::Guest);
}
