#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a test: its panic is the report")]
//! Connections through an upstream proxy. The host is scripted, and the clock is simulated.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use ringfence_frame::Batch;
use ringfence_offload::{Checksum, Layers, OffloadMeta};
use ringfence_policy::{Action, Policy, PolicySource, RuleSource};
use ringfence_uplink::egress::{Note, PolicyInForce};
use ringfence_uplink::emit::Ends;
use ringfence_uplink::host::scripted::{PROXY, REFUSES, SILENT, ScriptedHost};
use ringfence_uplink::tcp::segment::{Header, Ports, Segment, SynOptions};
use ringfence_uplink::tcp::seq::Seq;
use ringfence_uplink::testing::Wire;
use ringfence_uplink::upstream::{ProxyKind, ProxySettings, UpstreamProxy};
use ringfence_uplink::{Config, Egress, Uplink, UplinkCounters};

const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const PROXY_IP: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
/// Address in the guest's network that stands for the host's loopback.
const HOST: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 9);
const RST: u8 = 4;
const SYN: u8 = 2;
const ACK: u8 = 16;
/// Any port with a server.
const ECHO: u16 = 80;

/// Guest behind a proxy, with one TCP connection at a time.
struct Guest {
    uplink: Uplink,
    counters: Arc<UplinkCounters>,
    notes: Receiver<Option<Note>>,
    wire: Wire,
    now: Duration,
    /// Port of the connection, its next sequence number and the one expected.
    port: u16,
    sent: u32,
    heard: u32,
    is_made: bool,
    is_reset: bool,
    received: Vec<u8>,
    answer: Vec<u8>,
    errors: usize,
}

impl Guest {
    /// Creates a guest whose proxy has this port. `rules` allow, or deny if they begin with a minus.
    fn new(proxy_port: u16, rules: &[&str]) -> Guest {
        let rules = rules.iter().map(|rule| {
            let denied = rule.strip_prefix('-');
            let action = if denied.is_some() { Action::Deny } else { Action::Allow };
            let text = denied.unwrap_or(rule).to_string();
            RuleSource { action, text, origin: String::new() }
        });
        let source = PolicySource { rules: rules.collect(), ..PolicySource::default() };
        let (queue, notes) = sync_channel(64);
        let egress = Egress::new(Policy::new(source).unwrap(), Some(queue), false);
        let settings = ProxySettings {
            kind: ProxyKind::Http,
            host: "proxy.example".to_owned(),
            port: proxy_port,
            addresses: vec![PROXY_IP.into(), Ipv4Addr::LOCALHOST.into()],
            credentials: None,
        };
        let mut config = Config {
            mtu: 1500,
            policy: PolicyInForce::new(Some(egress)),
            upstream: Some(UpstreamProxy::new(settings, [true, true])),
            ..Config::default()
        };
        config.access.name_servers = vec![SERVER.into()];
        config.access.host_loopback = vec![HOST.into()];
        let counters = Arc::<UplinkCounters>::default();
        let host = Box::new(ScriptedHost::new(100).unwrap());
        Guest {
            uplink: Uplink::new(config, host, Arc::clone(&counters)),
            counters,
            notes,
            wire: Wire::new(2),
            now: Duration::from_secs(1000),
            port: 10_000,
            sent: 0,
            heard: 0,
            is_made: false,
            is_reset: false,
            received: Vec::new(),
            answer: Vec::new(),
            errors: 0,
        }
    }

    fn input(&mut self, to: Ipv4Addr, protocol: u8, body: &[u8]) {
        let to_mac = self.uplink.config().mac;
        let ends = Ends { from_mac: [2, 0, 0, 0, 0, 2], to_mac, from: GUEST.into(), to: to.into() };
        let mut frame = vec![0; ends.header_len()];
        frame.extend_from_slice(body);
        ends.write(&mut frame, protocol, body.len(), 1).unwrap();
        let mut batch = Batch::with_capacity(1, 1 << 16);
        let offset = batch.reserve(frame.len()).unwrap();
        batch.scratch_mut(offset..offset + frame.len()).unwrap().copy_from_slice(&frame);
        let meta = OffloadMeta { checksum: Checksum::Verified, gso: None };
        let index = batch.push_contiguous(offset, frame.len(), meta).unwrap();
        self.uplink.input(&batch, &[index], self.now);
    }

    fn segment(&mut self, to: SocketAddr, flags: u8, payload: &[u8]) {
        let IpAddr::V4(ip) = to.ip() else { panic!("{to}") };
        let options = if flags & SYN != 0 { &SynOptions::write(1460, Some(0))[..] } else { &[] };
        let mut body = vec![0; 20 + options.len()];
        let header = Header {
            ports: Ports { from: self.port, to: to.port() },
            seq: Seq(self.sent),
            acknowledged: Seq(self.heard),
            flags,
            window: 60_000,
            urgent: 0,
        };
        header.write(options, 0, &mut body).unwrap();
        body.extend_from_slice(payload);
        self.sent += u32::try_from(payload.len()).unwrap() + u32::from(flags & SYN != 0);
        self.input(ip, 6, &body);
    }

    fn datagram(&mut self, to: (Ipv4Addr, u16), payload: &[u8]) {
        let length = u16::try_from(8 + payload.len()).unwrap();
        let words = [4000, to.1, length, 0].map(u16::to_be_bytes).concat();
        self.input(to.0, 17, &[&words[..], payload].concat());
        self.settle();
    }

    /// Asks for the IPv4 address of a name. Returns the one in the answer.
    fn resolve(&mut self, name: &str) -> Option<Ipv4Addr> {
        let mut query = b"\0\x07\x01\0\0\x01\0\0\0\0\0\0".to_vec();
        for label in name.split('.') {
            query.push(u8::try_from(label.len()).unwrap());
            query.extend_from_slice(label.as_bytes());
        }
        query.extend_from_slice(b"\0\0\x01\0\x01");
        self.datagram((SERVER, 53), &query);
        let answer = std::mem::take(&mut self.answer);
        assert_eq!(answer[..2], *b"\0\x07");
        (answer[7] == 1).then(|| Ipv4Addr::from(*answer.last_chunk::<4>().unwrap()))
    }

    /// Opens a connection. Returns `true` if it is established.
    fn connect(&mut self, to: (Ipv4Addr, u16)) -> bool {
        self.port += 1;
        (self.sent, self.heard, self.is_made, self.is_reset) = (0, 0, false, false);
        self.received.clear();
        self.segment(to.into(), SYN, &[]);
        self.settle();
        assert!(!(self.is_made && self.is_reset));
        self.is_made
    }

    /// Runs rounds until no frame and no event is left. Received data is acknowledged.
    fn settle(&mut self) {
        loop {
            let events = self.uplink.poll_host(self.now).unwrap();
            self.uplink.run_timers(self.now);
            let more = self.uplink.output(&mut self.wire, self.now);
            let frames = std::mem::take(&mut self.wire.frames);
            if events == 0 && !more && frames.is_empty() {
                return;
            }
            frames.iter().for_each(|frame| self.receive(frame));
        }
    }

    fn receive(&mut self, frame: &[u8]) {
        let layers = Layers::parse(frame, u32::try_from(frame.len()).unwrap()).unwrap();
        match frame[23] {
            1 => self.errors += 1,
            17 => self.answer = frame[42..].to_vec(),
            _ => {}
        }
        if frame[23] != 6 {
            return;
        }
        let segment = Segment::parse(frame[34..].first_chunk().unwrap(), layers.payload_len());
        if segment.ports.to != self.port {
            return;
        }
        self.is_reset |= segment.has(RST);
        let from = Ipv4Addr::from(*frame[26..].first_chunk::<4>().unwrap());
        let from = (from, segment.ports.from).into();
        if segment.has(SYN) {
            self.heard = segment.seq.0.wrapping_add(1);
            self.is_made = true;
            self.segment(from, ACK, &[]);
        } else if segment.len > 0 && segment.seq.0 == self.heard {
            self.heard = self.heard.wrapping_add(segment.len);
            self.received.extend_from_slice(&frame[frame.len() - segment.len as usize..]);
            self.segment(from, ACK, &[]);
        }
    }

    /// Takes the reasons of the denials so far, with the names of their destinations.
    fn denials(&self) -> Vec<(Option<String>, String)> {
        let denial = |note| match note {
            Note::Verdict { record, .. } if record.verdict == Action::Deny => {
                Some((record.name, record.reason))
            }
            _ => None,
        };
        self.notes.try_iter().flatten().filter_map(denial).collect()
    }

    fn denial(&self) -> (Option<String>, String) {
        let denials = self.denials();
        assert_eq!(denials.len(), 1, "{denials:?}");
        denials.into_iter().next().unwrap()
    }
}

#[test]
fn connection_to_a_name_is_asked_by_name_and_the_server_may_speak_first() {
    let mut guest = Guest::new(PROXY, &["a.org:25"]);
    let ip = guest.resolve("A.org").unwrap();
    assert_eq!(ip, Ipv4Addr::new(198, 18, 1, 0));
    assert!(guest.connect((ip, 25)));
    // The scripted server sends the request to the proxy back.
    let request = b"CONNECT a.org:25 HTTP/1.1\r\nHost: a.org:25\r\n\r\n";
    assert_eq!(guest.received.escape_ascii().to_string(), request.escape_ascii().to_string());
    guest.segment((ip, 25).into(), ACK, b"there and back");
    guest.settle();
    assert!(guest.received.ends_with(b"\r\n\r\nthere and back"));
    assert_eq!((guest.counters.tcp_proxied.get(), guest.counters.tcp_proxy_failed.get()), (1, 0));
    assert_eq!(guest.denials(), []);
}

#[test]
fn literal_address_is_asked_as_such_if_a_rule_allows_it() {
    let mut guest = Guest::new(PROXY, &["203.0.113.5:80"]);
    assert!(guest.connect((Ipv4Addr::new(203, 0, 113, 5), 80)));
    assert!(guest.received.starts_with(b"CONNECT 203.0.113.5:80 HTTP/1.1\r\n"));
    assert!(!guest.connect((Ipv4Addr::new(203, 0, 113, 6), 80)) && guest.is_reset);
    assert_eq!(guest.counters.tcp_opened.get(), 1, "the proxy is not asked");
}

#[test]
fn denied_name_and_unknown_substitute_never_reach_the_proxy() {
    let mut guest = Guest::new(PROXY, &["a.org:443"]);
    assert_eq!(guest.resolve("b.org"), None);
    let a = guest.resolve("a.org").unwrap();
    guest.denials();
    assert!(!guest.connect((a, 80)) && guest.is_reset);
    assert_eq!(guest.denial().0.as_deref(), Some("a.org"));
    // Rules for addresses open no substitute address.
    let mut guest = Guest::new(PROXY, &["0.0.0.0/0"]);
    for ip in [Ipv4Addr::new(198, 18, 1, 0), Ipv4Addr::new(198, 18, 0, 53)] {
        assert!(!guest.connect((ip, 443)) && guest.is_reset);
        assert!(guest.denial().1.contains("no name has this substitute address"));
    }
    assert_eq!(guest.counters.tcp_opened.get(), 0);
}

#[test]
fn failure_of_the_proxy_resets_the_connection_and_is_recorded() {
    for (port, reason) in [
        (REFUSES, "the upstream proxy 127.0.0.1:7 cannot be reached: Connection refused"),
        (ECHO, "the upstream proxy's answer is not HTTP/1"),
    ] {
        let mut guest = Guest::new(port, &["a.org:443"]);
        let ip = guest.resolve("a.org").unwrap();
        assert!(!guest.connect((ip, 443)) && guest.is_reset, "{reason}");
        let (name, text) = guest.denial();
        assert!(name.as_deref() == Some("a.org") && text.starts_with(reason), "{text}");
        assert_eq!((guest.counters.tcp_proxy_failed.get(), guest.uplink.tcp_flows()), (1, 0));
    }
}

#[test]
fn silent_proxy_ends_the_connection_at_its_time_limit() {
    let mut guest = Guest::new(SILENT, &["a.org:443"]);
    let ip = guest.resolve("a.org").unwrap();
    assert!(!guest.connect((ip, 443)) && !guest.is_reset);
    guest.now += guest.uplink.config().tcp.proxy_within - Duration::from_millis(1);
    guest.settle();
    assert!(!guest.is_reset);
    guest.now += Duration::from_millis(1);
    assert!(guest.uplink.deadline().unwrap() <= guest.now);
    guest.settle();
    assert!(guest.is_reset);
    assert_eq!(guest.denial().1, "the upstream proxy has not answered in time");
}

#[test]
fn proxy_itself_is_out_of_reach_by_every_way() {
    let mut guest = Guest::new(PROXY, &["192.0.2.1:13", "10.0.0.9", "proxy.example"]);
    let by_name = guest.resolve("proxy.example").unwrap();
    guest.denials();
    // The address itself, the host's loopback, at which the proxy listens too, and the name.
    for ip in [PROXY_IP, HOST, by_name] {
        assert!(!guest.connect((ip, PROXY)) && guest.is_reset, "{ip}");
        assert!(guest.denial().1.contains("only the uplink itself"), "{ip}");
    }
    assert_eq!(guest.counters.tcp_opened.get(), 0);
    // Other ports of these hosts are as reachable as without a proxy.
    assert!(guest.connect((HOST, ECHO)) && guest.connect((by_name, 443)));
    assert_eq!(guest.counters.tcp_proxied.get(), 1);
}

#[test]
fn datagrams_and_pings_to_other_hosts_are_refused_and_counted() {
    let mut guest = Guest::new(PROXY, &["a.org:443/udp", "203.0.113.5", "icmp", "10.0.0.9"]);
    let a = guest.resolve("a.org").unwrap();
    guest.denials();
    for ip in [a, Ipv4Addr::new(203, 0, 113, 5)] {
        guest.datagram((ip, 443), b"x");
        guest.input(ip, 1, b"\x08\0\0\0\0\x01\0\x01");
        guest.settle();
        let reasons: Vec<_> = guest.denials().into_iter().map(|(_, reason)| reason).collect();
        assert_eq!(reasons, ["the upstream proxy carries TCP alone"; 2]);
    }
    assert_eq!((guest.counters.drop_not_proxied.get(), guest.errors), (4, 4));
    // The host's own services need no proxy.
    guest.datagram((HOST, ECHO), b"there and back");
    assert_eq!(guest.answer, b"there and back");
    assert_eq!(guest.counters.drop_not_proxied.get(), 4);
}

#[test]
fn new_policy_ends_connections_by_name_that_it_denies() {
    let mut guest = Guest::new(PROXY, &["a.org", "b.org"]);
    let ip = guest.resolve("a.org").unwrap();
    assert!(guest.connect((ip, 443)));
    let replace = |guest: &mut Guest, text: &str| {
        let (action, text, origin) = (Action::Allow, text.to_owned(), String::new());
        let rules = vec![RuleSource { action, text, origin }];
        let policy = Policy::new(PolicySource { rules, ..PolicySource::default() }).unwrap();
        guest.uplink.set_policy(policy, None, guest.now);
        guest.settle();
    };
    replace(&mut guest, "a.org:443");
    assert!(!guest.is_reset);
    // A rule for the substitute address says nothing about the name.
    replace(&mut guest, "198.18.0.0/15");
    assert!(guest.is_reset);
}
