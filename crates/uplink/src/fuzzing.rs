//! Fuzz target `uplink_frames`: arbitrary frames of a guest. A property test runs it, too.

use core::net::{Ipv4Addr, Ipv6Addr};
use core::time::Duration;
use std::sync::Arc;

use ringfence_frame::Batch;
use ringfence_offload::packet::Layers;
use ringfence_offload::{Checksum, OffloadMeta};
use ringfence_policy::{Action, Policy, PolicySource, RuleSource};

use crate::egress::PolicyInForce;
use crate::emit::Ends;
use crate::host::scripted::{PROXY, ScriptedHost};
use crate::testing::Wire;
use crate::upstream::{ProxyKind, ProxySettings, UpstreamProxy};
use crate::{Config, Egress, Uplink, UplinkCounters};

/// Length of the longest generated frame, in bytes.
const FRAME_MAX: usize = 2048;
/// Maximum of frames in one case.
const FRAMES_MAX: usize = 64;
/// Maximum of TCP connections, and of sockets of the host.
const FLOWS: usize = 16;

/// Runs the engine's output and parses each frame. Returns `true` if more can be sent.
fn output(uplink: &mut Uplink, wire: &mut Wire, now: Duration) -> bool {
    let more = uplink.output(wire, now);
    for frame in wire.frames.drain(..) {
        let len = u32::try_from(frame.len()).unwrap_or(u32::MAX);
        assert!(Layers::parse(&frame, len).is_ok(), "an invalid frame: {frame:02x?}");
    }
    more
}

/// Runs one case: frames, each behind a byte that selects its headers and two bytes with its length. Selected
/// headers are valid, so that the fuzzer reaches the code behind them.
///
/// # Panics
///
/// Panics if the engine sends an invalid frame or exceeds a limit.
pub fn guest_frames(data: &[u8]) {
    let counters = Arc::<UplinkCounters>::default();
    let Ok(host) = ScriptedHost::new(FLOWS) else { return };
    let mut config = Config { mtu: 1500, ..Config::default() };
    config.tcp.flows_max = FLOWS;
    config.tcp.half_open_max = FLOWS / 2;
    let own = [(Ipv4Addr::new(10, 0, 0, 2).into(), 24), (Ipv6Addr::LOCALHOST.into(), 64)];
    config.guest.addresses = own.to_vec();
    config.guest.gateways = vec![Ipv4Addr::new(10, 0, 0, 1).into()];
    // Half of the cases run under an egress policy.
    if data.len() % 2 == 1 {
        let rules = ["*.org", "10.0.0.0/8:80"].map(|text| RuleSource {
            action: Action::Allow,
            text: text.to_owned(),
            origin: String::new(),
        });
        let source = PolicySource { rules: rules.to_vec(), ..PolicySource::default() };
        let policy = Policy::new(source);
        assert!(policy.is_ok(), "the rules parse");
        config.policy =
            PolicyInForce::new(policy.ok().map(|policy| Egress::new(policy, None, false)));
        config.access.name_servers.push(Ipv4Addr::new(10, 0, 0, 1).into());
    }
    // Half of these are behind a proxy.
    if data.len() % 4 == 3 {
        let settings = ProxySettings {
            kind: ProxyKind::Http,
            host: "proxy.example".to_owned(),
            port: PROXY,
            addresses: vec![Ipv4Addr::new(192, 0, 2, 1).into()],
            credentials: None,
        };
        config.upstream = Some(UpstreamProxy::new(settings, [true, true]));
    }
    let mut uplink = Uplink::new(config, Box::new(host), Arc::clone(&counters));
    let mut wire = Wire::new(2);
    let mut now = Duration::from_secs(1000);
    let mut rest = data;
    for _ in 0..FRAMES_MAX {
        let Some((&[what, low, high], after)) = rest.split_first_chunk() else { break };
        let len = usize::from(u16::from_le_bytes([low, high])) % FRAME_MAX;
        let (body, after) = after.split_at(len.min(after.len()));
        rest = after;
        now += Duration::from_millis(1 << (what >> 4));
        let Some(frame) = frame(what, body, uplink.config().mac) else { continue };
        run_round(&mut uplink, &mut wire, what, &frame, now);
        assert!(uplink.tcp_flows() <= FLOWS, "more connections than the limit");
    }
    // All state must expire by itself.
    for _ in 0..64 {
        now += Duration::from_secs(3600);
        uplink.run_timers(now);
        while output(&mut uplink, &mut wire, now) {}
        let _ = uplink.poll_host(now);
    }
    assert_eq!(uplink.udp_flows(), 0, "associations that never expire");
    assert!(counters.frames_in.get() <= FRAMES_MAX as u64);
}

/// Builds a frame with the headers that `what` selects.
fn frame(what: u8, body: &[u8], to_mac: [u8; 6]) -> Option<Vec<u8>> {
    let protocols = [6, 17, 1, 58];
    let protocol = protocols[usize::from(what >> 2) % protocols.len()];
    let from_mac = [2, 0, 0, 0, 0, 2];
    let ends = match what & 3 {
        0 => return Some(body.to_vec()),
        1 => {
            let kind = if what & 4 != 0 { [8, 6] } else { [0x86, 0xdd] };
            return Some([&to_mac[..], &from_mac, &kind, body].concat());
        }
        2 => Ends {
            from_mac,
            to_mac,
            from: Ipv4Addr::new(10, 0, 0, 2).into(),
            to: Ipv4Addr::new(10, 0, 0, 9).into(),
        },
        _ => Ends {
            from_mac,
            to_mac,
            from: Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2).into(),
            to: Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 9).into(),
        },
    };
    let mut frame = vec![0; ends.header_len()];
    frame.extend_from_slice(body);
    ends.write(&mut frame, protocol, body.len(), 1)?;
    Some(frame)
}

fn run_round(uplink: &mut Uplink, wire: &mut Wire, what: u8, frame: &[u8], now: Duration) {
    let mut batch = Batch::with_capacity(1, 1 << 16);
    let Some(offset) = batch.reserve(frame.len()) else { return };
    let Ok(room) = batch.scratch_mut(offset..offset + frame.len()) else { return };
    room.copy_from_slice(frame);
    // Checksum left to us by the guest's kernel, or computed by it.
    let checksum = if what & 8 != 0 { Checksum::Verified } else { Checksum::None };
    let meta = OffloadMeta { checksum, gso: None };
    if let Ok(index) = batch.push_contiguous(offset, frame.len(), meta) {
        uplink.input(&batch, &[index], now);
    }
    let _ = uplink.poll_host(now);
    uplink.run_timers(now);
    for _ in 0..1000 {
        if !output(uplink, wire, now) {
            return;
        }
        let _ = uplink.poll_host(now);
    }
    panic!("the engine never becomes idle");
}
