//! Source of datagrams for the paths that end in an uplink: an engine without a link, and a socket of the host.
//!
//! The process has a network namespace of its own, in which a range of addresses is local although no interface has
//! them. An egress policy leads to such addresses, as it does to other hosts. The socket is read between the
//! runs alone. Once its queue is full the kernel drops what comes, which costs the same with and without a policy.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::process::{Command, Stdio};
use std::sync::Arc;

use anyhow::{Context, ensure};
use ringfence_frame::PortCapabilities;
use ringfence_frame::batch::Batch;
use ringfence_offload::{Checksum, OffloadMeta};
use ringfence_policy::{Policy, file};
use ringfence_sys::clock::monotonic;
use ringfence_uplink::egress::{Egress, PolicyInForce};
use ringfence_uplink::emit::Ends;
use ringfence_uplink::host::real::RealHost;
use ringfence_uplink::link::{Committed, GuestLink, Slots};
use ringfence_uplink::{Access, Config, Uplink, UplinkCounters};

const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
/// Server, and the range that it is in.
const SERVER: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
const RANGE: &str = "198.18.0.0/15";
const PORT: u16 = 9000;
/// Port of the guest's socket.
const SOURCE: u16 = 40_000;
const PROTOCOL_UDP: u8 = 17;
const MTU: u16 = 1500;
/// Rules of the policy; the last one allows the server.
const RULES: u32 = 1000;
/// Bytes of the UDP header, and of all headers of a frame.
const UDP_LEN: usize = 8;
const HEADERS: usize = 14 + 20 + UDP_LEN;

/// Returns the server's address and port.
pub(super) fn server() -> SocketAddr {
    SocketAddr::new(SERVER.into(), PORT)
}

/// Returns a policy that allows the server by the last of many rules.
pub(super) fn egress() -> anyhow::Result<Arc<Egress>> {
    let mut text = "allow = [\n".to_owned();
    for number in 1..RULES {
        let [_, _, high, low] = number.to_be_bytes();
        let _ = writeln!(text, "    \"203.{high}.{low}.7:{PORT}/udp\",");
    }
    let _ = writeln!(text, "    \"{RANGE}:{PORT}/udp\",\n]");
    let policy = Policy::new(file::parse("cost.toml", &text)?)?;
    Ok(Egress::new(policy, None, false))
}

/// Returns the command that starts a program in namespaces of its own.
pub(super) fn isolated() -> Command {
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--net", "--"]);
    command
}

/// Returns the reason for which this machine has no path through an uplink; `None` if it has.
pub(super) fn missing() -> Option<String> {
    let done = isolated().args(["ip", "link", "set", "lo", "up"]).stdin(Stdio::null()).output();
    match done {
        Err(error) => Some(format!("unshare: {error}")),
        Ok(done) if done.status.success() => None,
        Ok(done) => {
            let text = String::from_utf8_lossy(&done.stderr);
            Some(text.lines().last().unwrap_or("a network namespace is refused").to_owned())
        }
    }
}

/// Uplink with the source of its packets.
pub(super) struct UplinkLine {
    uplink: Uplink,
    counters: Arc<UplinkCounters>,
    frame: Vec<u8>,
    batch: Batch,
    indices: Vec<u32>,
    server: UdpSocket,
    sent: u64,
}

impl UplinkLine {
    /// Creates the line in this process's network namespace, which is new.
    pub(super) fn new(size: u32, burst: usize, has_policy: bool) -> anyhow::Result<UplinkLine> {
        for words in
            [&["link", "set", "lo", "up"][..], &["route", "add", "local", RANGE, "dev", "lo"]]
        {
            let status = Command::new("ip").args(words).stdin(Stdio::null()).status()?;
            ensure!(status.success(), "ip {}: {status}", words.join(" "));
        }
        let server = UdpSocket::bind(server()).context("the server's socket")?;
        server.set_nonblocking(true)?;
        let counters = Arc::<UplinkCounters>::default();
        let policy = PolicyInForce::new(has_policy.then(egress).transpose()?);
        let access = Access { guest: vec![GUEST.into()], ..Access::default() };
        let config = Config { mtu: MTU, access, policy, ..Config::default() };
        let frame = frame(&config, size)?;
        let host = RealHost::new(Arc::clone(&counters)).context("sockets")?;
        let uplink = Uplink::new(config, Box::new(host), Arc::clone(&counters));
        let batch = Batch::with_capacity(burst, burst * frame.len().next_multiple_of(64));
        Ok(UplinkLine { uplink, counters, frame, batch, indices: Vec::new(), server, sent: 0 })
    }

    /// Sends one burst of datagrams.
    pub(super) fn burst(&mut self, count: usize) -> anyhow::Result<()> {
        self.batch.clear();
        self.indices.clear();
        let (len, meta) =
            (self.frame.len(), OffloadMeta { checksum: Checksum::Verified, gso: None });
        for _ in 0..count {
            let at = self.batch.reserve(len).context("a full batch")?;
            let frame = self.batch.scratch_mut(at..at + len)?;
            frame.copy_from_slice(&self.frame);
            frame[len - 8..].copy_from_slice(&self.sent.to_be_bytes());
            self.sent += 1;
            self.indices.push(self.batch.push_contiguous(at, len, meta)?);
        }
        let now = monotonic();
        self.uplink.input(&self.batch, &self.indices, now);
        self.uplink.poll_host(now)?;
        self.uplink.run_timers(now);
        self.uplink.output(&mut NoLink, now);
        Ok(())
    }

    /// Checks that the uplink sent every packet, and that the first ones arrived whole and in order.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        let sent = self.counters.udp_datagrams_in.get();
        ensure!(sent == self.sent, "the uplink sent {sent} of {} datagrams", self.sent);
        let mut bytes = [0; 2048];
        let mut last: Option<u64> = None;
        while let Ok(len) = self.server.recv(&mut bytes) {
            let numbers = self.frame.len() - HEADERS;
            ensure!(len == numbers, "a datagram has {len} bytes in place of {numbers}");
            let number = bytes[..len].last_chunk().map_or(0, |bytes| u64::from_be_bytes(*bytes));
            ensure!(last.is_none_or(|last| last < number), "{number} came after {last:?}");
            last = Some(number);
        }
        last.context("no datagram arrived").map(drop)
    }
}

/// Returns a datagram of the guest as a frame of `size` bytes.
fn frame(config: &Config, size: u32) -> anyhow::Result<Vec<u8>> {
    let (from, to): (IpAddr, IpAddr) = (GUEST.into(), SERVER.into());
    let ends = Ends { from_mac: [2, 0, 0, 0, 0, 2], to_mac: config.mac, from, to };
    let mut frame = vec![0x5a; size as usize];
    let udp = frame.len().checked_sub(ends.header_len()).context("a shorter frame")?;
    let at = ends.write(&mut frame, PROTOCOL_UDP, udp, 1).context("a shorter frame")?;
    let header = [SOURCE, PORT, u16::try_from(udp)?, 0].map(u16::to_be_bytes).concat();
    frame[at..at + UDP_LEN].copy_from_slice(&header);
    Ok(frame)
}

/// Link of a guest that receives nothing: the server does not answer.
struct NoLink;

impl GuestLink for NoLink {
    fn capabilities(&self) -> PortCapabilities {
        PortCapabilities::plain(MTU)
    }

    fn reserve<'a>(&'a mut self, _: usize, _: usize, _: &mut Slots<'a>) {}

    fn commit(&mut self, _: &[Committed]) {}
}

#[cfg(test)]
mod tests {
    use ringfence_policy::rule::Protocol;

    use super::*;

    #[test]
    fn policy_allows_the_server_and_no_other_address() {
        let (egress, counters) = (egress().unwrap(), UplinkCounters::default());
        let ask = |to| egress.connect(to, Protocol::Udp, monotonic(), &counters).is_some();
        assert!(ask(server()));
        assert!(!ask(SocketAddr::new(SERVER.into(), PORT + 1)));
        assert!(!ask(SocketAddr::new(Ipv4Addr::new(192, 0, 2, 1).into(), PORT)));
    }

    #[test]
    fn frame_is_a_whole_datagram() {
        let frame = frame(&Config::default(), 100).unwrap();
        let layers = ringfence_offload::Layers::parse(&frame, 100).unwrap();
        assert_eq!((frame.len(), layers.payload_len()), (100, 58));
    }
}
