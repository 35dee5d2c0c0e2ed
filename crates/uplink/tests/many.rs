#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a test: its panic is the report")]
//! Many and hostile flows: their memory is bounded, and other flows keep working. The host is scripted, so
//! there can be more flows than a process has descriptors. The clock is simulated.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use ringfence_frame::Batch;
use ringfence_offload::{Checksum, Layers, OffloadMeta};
use ringfence_uplink::emit::Ends;
use ringfence_uplink::host::scripted::{REFUSES, SILENT, ScriptedHost};
use ringfence_uplink::tcp::segment::{Header, Ports, Segment, SynOptions};
use ringfence_uplink::tcp::seq::Seq;
use ringfence_uplink::testing::Wire;
use ringfence_uplink::{Config, Uplink, UplinkCounters};

const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
const FAR: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
const ECHO: u16 = 80;
const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;

/// State of a flow in the guest.
#[derive(Clone, Copy, Default)]
struct FlowState {
    sent: u32,
    heard: u32,
    made: bool,
    ended: bool,
    reset: bool,
}

/// Guest that identifies its flows by its own port, the remote port and the remote address.
struct Guest {
    uplink: Uplink,
    counters: Arc<UplinkCounters>,
    wire: Wire,
    now: Duration,
    flows: HashMap<Port, FlowState>,
    batch: Batch,
}

type Port = (u16, u16, Ipv4Addr);

impl Guest {
    fn new(sockets: usize, half_open: usize) -> Guest {
        let counters = Arc::<UplinkCounters>::default();
        let mut config = Config { mtu: 1500, ..Config::default() };
        config.tcp.half_open_max = half_open;
        let host = ScriptedHost::new(sockets).unwrap();
        Guest {
            uplink: Uplink::new(config, Box::new(host), Arc::clone(&counters)),
            counters,
            wire: Wire::new(2),
            now: Duration::from_secs(1000),
            flows: HashMap::new(),
            batch: Batch::with_capacity(1, 1 << 16),
        }
    }

    fn send(&mut self, port: Port, flags: u8, payload: &[u8]) {
        let flow = self.flows.entry(port).or_default();
        let (ours, theirs, far) = port;
        let ends = Ends {
            from_mac: [2, 0, 0, 0, 0, 2],
            to_mac: self.uplink.config().mac,
            from: GUEST.into(),
            to: far.into(),
        };
        let options = if flags & SYN != 0 { &SynOptions::write(1460, Some(0))[..] } else { &[] };
        let mut frame = vec![0; 34 + 20 + options.len() + payload.len()];
        let len = frame.len() - 34;
        ends.write(&mut frame, 6, len, 1).unwrap();
        let header = Header {
            ports: Ports { from: ours, to: theirs },
            seq: Seq(flow.sent),
            acknowledged: Seq(flow.heard),
            flags,
            window: 60_000,
            urgent: 0,
        };
        let at = 34 + header.write(options, 0, &mut frame[34..]).unwrap();
        frame[at..].copy_from_slice(payload);
        flow.sent += u32::try_from(payload.len()).unwrap();
        flow.sent += u32::from(flags & (SYN | FIN) != 0);
        self.batch.clear();
        let offset = self.batch.reserve(frame.len()).unwrap();
        self.batch.scratch_mut(offset..offset + frame.len()).unwrap().copy_from_slice(&frame);
        let meta = OffloadMeta { checksum: Checksum::Verified, gso: None };
        let index = self.batch.push_contiguous(offset, frame.len(), meta).unwrap();
        self.uplink.input(&self.batch, &[index], self.now);
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
            for frame in frames {
                self.receive(&frame);
            }
        }
    }

    fn receive(&mut self, frame: &[u8]) {
        let layers = Layers::parse(frame, u32::try_from(frame.len()).unwrap()).unwrap();
        let segment = Segment::parse(frame[34..].first_chunk().unwrap(), layers.payload_len());
        let far = Ipv4Addr::from(<[u8; 4]>::try_from(&frame[26..30]).unwrap());
        let port = (segment.ports.to, segment.ports.from, far);
        let Some(flow) = self.flows.get_mut(&port) else { return };
        if segment.has(RST) {
            flow.reset = true;
            return;
        }
        if segment.has(SYN) {
            flow.heard = segment.seq.0.wrapping_add(1);
            flow.made = true;
            return self.send(port, ACK, &[]);
        }
        if segment.seq.0 != flow.heard {
            return;
        }
        flow.heard = flow.heard.wrapping_add(segment.len);
        if segment.has(FIN) {
            flow.heard = flow.heard.wrapping_add(1);
            flow.ended = true;
        }
        if segment.len > 0 || segment.has(FIN) {
            self.send(port, ACK, &[]);
        }
    }

    fn flow(&self, port: Port) -> FlowState {
        self.flows.get(&port).copied().unwrap_or_default()
    }

    fn count(&self, is_so: fn(&FlowState) -> bool) -> usize {
        self.flows.values().filter(|flow| is_so(flow)).count()
    }

    /// Advances the clock in steps.
    fn wait(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            self.now = (self.now + time / 16).min(until);
            self.settle();
        }
    }

    /// Sends data on an established flow. Returns `true` if the echo arrives.
    fn echo(&mut self, port: Port) -> bool {
        let before = self.flow(port).heard;
        self.send(port, ACK, b"there and back");
        self.settle();
        self.flow(port).heard == before.wrapping_add(14)
    }
}

#[test]
fn ten_thousand_concurrent_flows_all_echo() {
    let mut guest = Guest::new(20_000, 4096);
    let ports: Vec<Port> = (10_000..20_000).map(|port| (port, ECHO, FAR)).collect();
    for ports in ports.chunks(500) {
        ports.iter().for_each(|&port| guest.send(port, SYN, &[]));
        guest.settle();
    }
    assert_eq!(guest.count(|flow| flow.made && !flow.reset), 10_000);
    assert_eq!(guest.uplink.tcp_flows(), 10_000);
    for &port in &ports {
        guest.send(port, ACK, b"there and back");
    }
    guest.settle();
    let heard = |flow: &FlowState| u64::from(flow.sent) == 15;
    assert_eq!(guest.count(heard), 10_000);
    assert_eq!(guest.counters.tcp_bytes_out.get(), 140_000);
    assert_eq!(guest.counters.tcp_evicted.get(), 0);
}

#[test]
fn hundred_thousand_closed_flows_leave_no_state() {
    let mut guest = Guest::new(4000, 4096);
    for round in 0..50_u8 {
        let far = Ipv4Addr::new(198, 51, 100, round);
        let ports: Vec<Port> = (10_000..12_000).map(|port| (port, ECHO, far)).collect();
        ports.iter().for_each(|&port| guest.send(port, SYN, &[]));
        guest.settle();
        ports.iter().for_each(|&port| guest.send(port, ACK, b"x"));
        guest.settle();
        ports.iter().for_each(|&port| guest.send(port, FIN | ACK, &[]));
        guest.settle();
        let ended = ports.iter().filter(|port| guest.flow(**port).ended).count();
        assert_eq!(ended, 2000, "round {round}");
        guest.wait(Duration::from_secs(10));
        assert_eq!(guest.uplink.tcp_flows(), 0, "round {round}");
        guest.flows.clear();
    }
    assert_eq!(guest.counters.tcp_closed.get(), 100_000);
    assert_eq!(guest.counters.tcp_bytes_out.get(), 100_000);
}

#[test]
fn syn_flood_is_bounded_and_other_flow_echoes() {
    let mut guest = Guest::new(600, 512);
    let regular = (5000, ECHO, FAR);
    guest.send(regular, SYN, &[]);
    guest.settle();
    assert!(guest.echo(regular));
    for wave in 0..100_u32 {
        for port in 0..1000_u16 {
            let far = Ipv4Addr::from_bits(FAR.to_bits() + 256 + wave);
            guest.send((10_000 + port, SILENT, far), SYN, &[]);
        }
        guest.settle();
        assert!(guest.uplink.tcp_flows() <= 513, "{} connections", guest.uplink.tcp_flows());
        assert!(guest.echo(regular), "the regular flow is stuck in wave {wave}");
        guest.flows.retain(|port, _| *port == regular);
    }
    assert!(guest.counters.tcp_evicted.get() > 90_000);
    // The remaining ones expire. The regular flow is probed, answers, and stays open.
    guest.wait(Duration::from_secs(600));
    assert_eq!(guest.uplink.tcp_flows(), 1);
    assert!(guest.echo(regular));
}

#[test]
fn exhausted_descriptors_evict_longest_idle_flow() {
    let mut guest = Guest::new(100, 4096);
    for port in 10_000..10_300 {
        guest.send((port, ECHO, FAR), SYN, &[]);
        guest.settle();
        assert!(guest.flow((port, ECHO, FAR)).made, "{port}");
    }
    assert!(guest.uplink.tcp_flows() <= 100);
    assert_eq!(guest.count(|flow| flow.reset), 200, "evicted flows are reset");
    assert!(guest.echo((10_299, ECHO, FAR)));
}

#[test]
fn vanished_guest_is_detected_after_keep_alive_time() {
    let mut guest = Guest::new(100, 64);
    let port = (10_000, ECHO, FAR);
    guest.send(port, SYN, &[]);
    guest.settle();
    assert!(guest.echo(port));
    // The guest is silent for an hour, which is no reason to close.
    guest.flows.clear();
    guest.wait(Duration::from_secs(3600));
    assert_eq!(guest.uplink.tcp_flows(), 1);
    // The guest does not answer the keep-alive probes that follow.
    guest.wait(Duration::from_secs(3600));
    for _ in 0..20 {
        guest.wait(Duration::from_secs(120));
    }
    assert_eq!(guest.uplink.tcp_flows(), 0);
}

#[test]
fn half_open_connection_expires() {
    let mut guest = Guest::new(100, 64);
    guest.send((10_000, SILENT, FAR), SYN, &[]);
    guest.send((10_001, REFUSES, FAR), SYN, &[]);
    guest.settle();
    assert!(guest.flow((10_001, REFUSES, FAR)).reset, "a refused connection is reset at once");
    assert_eq!(guest.uplink.tcp_flows(), 1);
    guest.wait(Duration::from_secs(3600));
    assert_eq!(guest.uplink.tcp_flows(), 0);
    assert!(!guest.flow((10_000, SILENT, FAR)).made);
}

#[test]
fn reset_in_any_state_removes_connection() {
    // Before the answer, established, with data in flight, after our FIN, after both FINs.
    for steps in 0..5 {
        let mut guest = Guest::new(4, 64);
        let port = (10_000, if steps == 0 { SILENT } else { ECHO }, FAR);
        guest.send(port, SYN, &[]);
        guest.settle();
        if steps > 1 {
            guest.send(port, ACK, b"in flight");
        }
        if steps > 2 {
            guest.send(port, FIN | ACK, &[]);
        }
        if steps > 3 {
            guest.settle();
        }
        guest.send(port, RST | ACK, &[]);
        guest.settle();
        guest.wait(Duration::from_secs(10));
        assert_eq!(guest.uplink.tcp_flows(), 0, "after {steps} steps");
        // The same ports can be used again at once.
        let again = (10_000, ECHO, FAR);
        guest.flows.clear();
        guest.flows.insert(again, FlowState { sent: 9_000_000, ..FlowState::default() });
        guest.send(again, SYN, &[]);
        guest.settle();
        assert!(guest.echo(again), "after {steps} steps");
    }
}
